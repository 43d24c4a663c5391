"""Checks that span sections, on a resolved configuration: each message names both fields and both values."""

from __future__ import annotations

from grpo_mc.config.base import ConfigError
from grpo_mc.config.data import ReasoningGymSource
from grpo_mc.config.presets import PRESETS
from grpo_mc.config.schema import Config


def check_across_sections(config: Config) -> None:
    """Refuses sections that contradict one another.

    Raises:
        ConfigError: with every contradiction, one a line.
    """
    problems = _group_problems(config) + _batch_problems(config) + _length_problems(config) + _source_problems(config)
    problems += _objective_problems(config)
    if problems:
        raise ConfigError("\n".join(problems))


def check_trainable(config: Config) -> None:
    """Refuses a configuration that lacks what training needs: prompts (or rollouts to replay) and rewards.

    Raises:
        ConfigError: with everything that is missing, one a line.
    """
    problems = []
    if config.pipeline.mode != "train_only":
        if config.data.train is None:
            problems.append(f"data.train is null but pipeline.mode is '{config.pipeline.mode}'; name a source")
        if not config.rewards.functions:
            problems.append(
                f"rewards.functions is empty but pipeline.mode is '{config.pipeline.mode}'; name a reward function"
            )
    if problems:
        raise ConfigError("\n".join(problems))


def config_warnings(config: Config) -> list[str]:
    """Legal settings of a resolved configuration that are probably not meant, one line each."""
    algorithm, warnings = config.algorithm, []
    preset = PRESETS.get(algorithm.preset or "")
    usual = preset.algorithm["kl_gradient"] if preset else "direct"
    if algorithm.beta == 0 and algorithm.kl_gradient != usual:
        warnings.append(
            f"algorithm.kl_gradient is '{algorithm.kl_gradient}' but algorithm.beta is 0: there is no KL term"
        )
    if algorithm.beta > 0 and algorithm.kl_placement == "in_reward" and algorithm.kl_gradient != "direct":
        warnings.append(
            f"algorithm.kl_gradient is '{algorithm.kl_gradient}' but algorithm.kl_placement is 'in_reward': "
            "the KL is not differentiated there"
        )
    if algorithm.beta > 0 and algorithm.kl_placement == "in_reward" and algorithm.kl != "k1":
        warnings.append(
            f"algorithm.kl is '{algorithm.kl}' but algorithm.kl_placement is 'in_reward', which always takes k1"
        )
    if algorithm.beta > 0 and (algorithm.kl, algorithm.kl_placement, algorithm.kl_gradient) == (
        "k1",
        "in_loss",
        "direct",
    ):
        warnings.append(
            "algorithm.kl is 'k1' and algorithm.kl_gradient is 'direct': as a loss its expected gradient is zero, it "
            "does not hold the policy near the reference; set kl: k3 or kl_gradient: k2"
        )
    if algorithm.max_refills > 0 and not algorithm.filter_zero_variance:
        warnings.append(
            f"algorithm.max_refills is {algorithm.max_refills} but algorithm.filter_zero_variance is false: "
            "no group is dropped, so none is replaced"
        )
    if config.rollout.top_k > 0 or config.rollout.top_p < 1:
        warnings.append(
            f"rollout.top_k is {config.rollout.top_k} and rollout.top_p is {config.rollout.top_p}: responses are "
            "sampled from a cut distribution but trained on with log-probs of the whole one"
        )
    if config.evaluation.every > 0 and config.evaluation.source is None:
        warnings.append(
            f"evaluation.every is {config.evaluation.every} but evaluation.source is null: none takes place"
        )
    return warnings


def _group_problems(config: Config) -> list[str]:
    group_size, algorithm = config.rollout.group_size, config.algorithm
    if group_size > 1 or config.pipeline.mode == "rollout_only":
        return []
    problems = []
    if algorithm.scale in ("std", "leave_one_out_std"):
        problems.append(
            f"rollout.group_size is 1 but algorithm.scale is '{algorithm.scale}': one reward has no std; "
            "raise group_size to 2 or more"
        )
    if algorithm.baseline == "leave_one_out":
        problems.append(
            "rollout.group_size is 1 but algorithm.baseline is 'leave_one_out': there are no others; "
            "raise group_size to 2 or more"
        )
    if algorithm.quantile is not None:
        problems.append(
            f"rollout.group_size is 1 but algorithm.quantile is {algorithm.quantile}: one reward has no quantiles; "
            "raise group_size to 2 or more"
        )
    if not problems:
        problems.append(
            f"rollout.group_size is 1 but algorithm.baseline is '{algorithm.baseline}': every advantage would be 0; "
            "raise group_size to 2 or more"
        )
    return problems


def _objective_problems(config: Config) -> list[str]:
    algorithm = config.algorithm
    if algorithm.dual_clip is None or algorithm.loss in ("clip", "gspo", "gspo_token"):
        return []
    return [
        f"algorithm.dual_clip is {algorithm.dual_clip:g} but algorithm.loss is '{algorithm.loss}', which has no such "
        "bound; set dual_clip: null, or loss: clip, gspo or gspo_token"
    ]


def _batch_problems(config: Config) -> list[str]:
    prompts, minibatches, dp = config.data.prompts_per_step, config.algorithm.minibatches, config.parallel.dp
    problems = []
    if prompts % minibatches:
        problems.append(
            f"data.prompts_per_step is {prompts} but algorithm.minibatches is {minibatches}; "
            "prompts_per_step must be a multiple of minibatches"
        )
    if dp is not None and prompts % dp:
        problems.append(
            f"data.prompts_per_step is {prompts} but parallel.dp is {dp}; prompts_per_step must be a multiple of dp "
            f"(the global batch does not change with the layout): {-(-prompts // dp) * dp} would do"
        )
    elif dp is not None and prompts % minibatches == 0 and (prompts // minibatches) % dp:
        problems.append(
            f"data.prompts_per_step / algorithm.minibatches is {prompts} / {minibatches} = {prompts // minibatches} "
            f"but parallel.dp is {dp}; every minibatch must be a multiple of dp"
        )
    if config.optimizer.warmup_steps > config.run.steps > 0:
        problems.append(
            f"optimizer.warmup_steps is {config.optimizer.warmup_steps} but run.steps is {config.run.steps}; "
            "the warm-up must end within the run"
        )
    return problems


def _length_problems(config: Config) -> list[str]:
    problems = []
    rollout, algorithm, evaluation = config.rollout, config.algorithm, config.evaluation
    if algorithm.overlong_buffer is not None and algorithm.overlong_buffer > rollout.max_new_tokens:
        problems.append(
            f"algorithm.overlong_buffer is {algorithm.overlong_buffer} but rollout.max_new_tokens is "
            f"{rollout.max_new_tokens}; the buffer lies inside the response"
        )
    if max(evaluation.pass_k) > evaluation.num_samples:
        problems.append(
            f"evaluation.pass_k has {max(evaluation.pass_k)} but evaluation.num_samples is {evaluation.num_samples}; "
            "pass@k needs at least k samples"
        )
    if evaluation.num_samples > 1 and evaluation.temperature == 0:
        problems.append(
            f"evaluation.num_samples is {evaluation.num_samples} but evaluation.temperature is 0: all samples would "
            "be the same; raise the temperature or set num_samples: 1"
        )
    if rollout.top_k == 1 and config.pipeline.mode == "train":
        problems.append(
            f"rollout.top_k is 1 but rollout.group_size is {rollout.group_size}: all rollouts of a group would be the "
            "same; raise top_k or set 0 (off)"
        )
    return problems


def _source_problems(config: Config) -> list[str]:
    problems = []
    for name, source in (("data.train", config.data.train), ("evaluation.source", config.evaluation.source)):
        if source is not None and source.chat is False and source.system_prompt is not None:
            problems.append(f"{name}.system_prompt is set but {name}.chat is false; a system message needs chat: true")
    train, held_out = config.data.train, config.evaluation.source
    if (
        isinstance(train, ReasoningGymSource)
        and isinstance(held_out, ReasoningGymSource)
        and (train.task, train.options) == (held_out.task, held_out.options)
        and max(train.seed, held_out.seed) < min(train.seed + train.size, held_out.seed + held_out.size)
    ):
        problems.append(
            f"data.train.seed is {train.seed} (size {train.size}) and evaluation.source.seed is {held_out.seed} "
            f"(size {held_out.size}): problem i is generated from seed + i, so they share problems; "
            "move the seeds further apart"
        )
    return problems
