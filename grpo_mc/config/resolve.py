"""From what the user wrote to what the run does: presets, derived defaults and the checks across sections.

`resolve` is idempotent. It knows nothing of the model's shape; `grpo_mc.config.layout` checks that once it is known.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from grpo_mc.config.algorithm import AlgorithmConfig
from grpo_mc.config.base import ConfigError, derive, shorten
from grpo_mc.config.checks import check_across_sections
from grpo_mc.config.layout import data_parallel_size, expert_tensor_size
from grpo_mc.config.presets import PRESETS, Preset
from grpo_mc.config.schema import Config


def find_preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        ConfigError: no preset has that name; the message names the nearest one.
    """
    if name in PRESETS:
        return PRESETS[name]
    key = name.lower().replace("-", "_").replace(".", "")
    near = [key] if key in PRESETS else difflib.get_close_matches(key, PRESETS, n=1, cutoff=0.4)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise ConfigError(f"algorithm.preset is '{shorten(name)}', which is no preset; {hint}Presets: {', '.join(PRESETS)}")


def apply_preset(config: Config) -> Config:
    """Fills what the configuration does not set from its preset; without a preset, the configuration itself."""
    if config.algorithm.preset is None:
        return config
    preset = find_preset(config.algorithm.preset)
    is_set = config.algorithm.model_fields_set
    values = {key: value for key, value in preset.algorithm.items() if key not in is_set}
    update: dict[str, Any] = {}
    if preset.group_size is not None and "group_size" not in config.rollout.model_fields_set:
        update["rollout"] = config.rollout.model_copy(update={"group_size": preset.group_size})
    if preset.overlong_fraction is not None and "overlong_buffer" not in is_set:
        # Below five tokens there is no room for a buffer.
        values["overlong_buffer"] = int(config.rollout.max_new_tokens * preset.overlong_fraction) or None
    explicit = {key: getattr(config.algorithm, key) for key in is_set}
    update["algorithm"] = AlgorithmConfig.model_validate(explicit | values)
    return config.model_copy(update=update)


def resolve(config: Config, world_size: int | None = None) -> Config:
    """The configuration with presets applied and derived defaults filled in, checked across sections.

    Args:
        config: as loaded or built.
        world_size: number of processes; None = not known yet, then parallel.dp stays as it is.

    Raises:
        ConfigError: sections contradict one another; every contradiction is listed with both fields and both values.
    """
    config = apply_preset(config)
    rollout, algorithm, parallel = config.rollout, config.algorithm, config.parallel
    update: dict[str, Any] = {}
    if algorithm.norm_length is None:
        update["algorithm"] = derive(algorithm, norm_length=rollout.max_new_tokens)
    if config.evaluation.max_new_tokens is None:
        update["evaluation"] = derive(config.evaluation, max_new_tokens=rollout.max_new_tokens)
    rewards = config.rewards
    functions = [derive(function, name=function.name or function.type) for function in rewards.functions]
    max_pending = rewards.max_pending or 64 * rewards.workers
    update["rewards"] = derive(rewards, functions=functions, max_pending=max_pending)
    run_dir = Path(config.run.dir).expanduser().absolute()
    update["run"] = config.run.model_copy(update={"dir": str(run_dir), "name": config.run.name or run_dir.name})
    update["parallel"] = derive(parallel, etp=expert_tensor_size(parallel))
    if world_size is not None:
        update["parallel"] = derive(update["parallel"], dp=data_parallel_size(parallel, world_size))
    config = config.model_copy(update=update)
    check_across_sections(config)
    return config
