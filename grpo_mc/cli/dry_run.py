"""What `train --dry-run` prints: the resolved configuration, the objective, the mesh, a memory estimate, the prompts
and one scored reward. No process group, no weights and no training; the model's config.json and the data are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_mc.config import Config
    from grpo_mc.data.dataset import PromptDataset
    from grpo_mc.data.records import Group, Prompt


def explain(config: Config) -> None:
    """Prints the explanation of a resolved configuration.

    Raises:
        ValueError: the model, the layout, the data or a reward function does not work as configured.
    """
    from grpo_mc.cli import calls
    from grpo_mc.config import config_warnings, objective_formula, to_yaml

    _part("configuration", to_yaml(config))
    _part("objective", objective_formula(config))
    _part("mesh", mesh_text(config))
    _part("memory on the fullest rank (estimate)", memory_text(config))
    training, held_out = calls.prompts(config)
    _part("prompts", prompts_text(training, held_out))
    _part("one scored reward", reward_text(config, training))
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
    from grpo_mc.megatron.memory_estimate import estimate_memory, parameter_count, run_layout

    arch = calls.read_model_architecture(config)
    p = config.parallel
    p = check_parallel(p, model_shape(arch), p.tp * p.pp * p.cp * (p.dp or 1))
    layout = run_layout(config.model_copy(update={"parallel": p}))
    lines = estimate_memory(arch, layout).lines()
    return "\n".join([f"model {config.model.path}: {parameter_count(arch) / 1e6:,.1f} M parameters", *lines])


def prompts_text(training: PromptDataset | None, held_out: PromptDataset | None) -> str:
    """How many prompts there are, and how many were left out."""
    lines = [
        f"{name}: {len(dataset)} of {dataset.num_read} records; left out are {dataset.num_too_long} for their length"
        f" and {dataset.num_excluded} as excluded problems"
        for name, dataset in (("training", training), ("held-out", held_out))
        if dataset is not None
    ]
    return "\n".join(lines) or "none: the run reads no prompts"


def reward_text(config: Config, training: PromptDataset | None) -> str:
    """The first training problem, with its reference answer taken as the response and scored."""
    from grpo_mc.cli import calls
    from grpo_mc.cli.reward_text import verdict_lines

    if training is None or not config.rewards.functions:
        return "none: data.train or rewards.functions is not set, or not used by pipeline.mode"
    prompt = training[0]
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
