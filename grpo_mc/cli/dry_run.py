"""What `train --dry-run` prints: the resolved configuration, the objective, the mesh, a memory estimate and one scored
reward. No process group, no weights and no training; the model's config.json and the first problem are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_mc.config import Config
    from grpo_mc.data.records import Group, Prompt


def explain(config: Config) -> None:
    """Prints the explanation of a resolved configuration.

    Raises:
        ValueError: the model, the layout, the data or a reward function does not work as configured.
    """
    from grpo_mc.config import config_warnings, objective_formula, to_yaml

    _part("configuration", to_yaml(config))
    _part("objective", objective_formula(config))
    _part("mesh", mesh_text(config))
    _part("memory on the fullest rank (estimate)", memory_text(config))
    _part("one scored reward", reward_text(config))
    warnings = config_warnings(config)
    if warnings:
        _part("warnings", "\n".join(warnings))


def _part(title: str, text: str) -> None:
    print(f"== {title}\n{text.rstrip()}\n")


def mesh_text(config: Config) -> str:
    """The layout as text: each degree, the processes and how a batch is shared out."""
    p = config.parallel
    dp = p.dp or 1
    world = p.tp * p.pp * p.cp * dp
    rollouts = config.data.prompts_per_step * config.rollout.group_size
    lines = [
        f"processes {world} = tp {p.tp} x pp {p.pp} x cp {p.cp} x dp {dp}; experts: ep {p.ep}, etp {p.etp or 1}",
        f"a batch is {config.data.prompts_per_step} groups x {config.rollout.group_size} = {rollouts} rollouts, "
        f"about {-(-config.data.prompts_per_step // dp)} groups on each of {dp} data-parallel ranks; "
        f"micro-batches of at most {p.max_tokens_per_micro_batch} tokens",
        f"optimizer steps {config.run.steps} x {config.algorithm.epochs * config.algorithm.minibatches}",
    ]
    return "\n".join(lines)


def memory_text(config: Config) -> str:
    """The memory estimate as text, with the model's size."""
    from grpo_mc.cli import calls
    from grpo_mc.config import check_parallel
    from grpo_mc.megatron.hf_config import model_shape
    from grpo_mc.megatron.memory_estimate import Layout, estimate_memory, parameter_count

    arch = calls.read_model_architecture(config)
    p = config.parallel
    p = check_parallel(p, model_shape(arch), p.tp * p.pp * p.cp * (p.dp or 1))
    layout = Layout(
        tp=p.tp, pp=p.pp, ep=p.ep, etp=p.etp or 1, cp=p.cp, dp=p.dp or 1,
        dtype=config.model.dtype,
        sequence_parallel=bool(p.sequence_parallel),
        recompute=config.model.recompute == "full",
        has_reference=config.algorithm.beta > 0,
        max_tokens_per_micro_batch=p.max_tokens_per_micro_batch,
        num_prompts=config.data.prompts_per_step,
        group_size=config.rollout.group_size,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_new_tokens=config.rollout.max_new_tokens,
        max_batch_rows=config.rollout.max_batch_rows,
    )  # fmt: skip
    lines = estimate_memory(arch, layout).lines()
    return "\n".join([f"model {config.model.path}: {parameter_count(arch) / 1e6:,.1f} M parameters", *lines])


def reward_text(config: Config) -> str:
    """The first training problem, with its reference answer taken as the response and scored."""
    from grpo_mc.cli import calls
    from grpo_mc.cli.reward_text import verdict_lines

    if config.data.train is None or not config.rewards.functions:
        return "none: data.train or rewards.functions is not set"
    prompt = calls.first_prompt(config)
    if prompt.ground_truth is None:
        return f"prompt {prompt.text!r}: no reference answer in the data, so there is no response to try"
    group = reference_group(prompt)
    calls.score(config.rewards, [group])
    rollout = group.rollouts[0]
    return "\n".join([f"prompt   {prompt.text!r}", f"response {rollout.text!r} (the reference answer)",
                      *verdict_lines(rollout)])  # fmt: skip


def reference_group(prompt: Prompt) -> Group:
    """A group of one rollout whose response is the reference answer."""
    from grpo_mc.data.records import FinishReason, Group, Rollout

    rollout = Rollout(
        group_id=0, sample_index=0, prompt=prompt, segments=[], text=prompt.ground_truth or "",
        finish_reason=FinishReason.FINISHED, policy_versions=(),
    )  # fmt: skip
    return Group(group_id=0, prompt=prompt, rollouts=[rollout])
