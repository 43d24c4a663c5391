"""Where the commands meet the other parts: every call into the lower layers is here, imported when it is made.

The commands themselves parse, call and print. Keeping the calls together keeps `grpo-mc --help` quick (nothing heavy
is imported before a command needs it) and shows in one place what the commands rely on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_mc.cli.notices import set_up_notices

if TYPE_CHECKING:
    from grpo_mc.config import Config
    from grpo_mc.data.dataset import PromptDataset
    from grpo_mc.data.records import Group
    from grpo_mc.monitor import RunMonitor


EXPORT_DIR = "model"
"""Folder of a run directory that holds the trained model as safetensors."""


def world_size() -> int:
    """Processes of this launch: WORLD_SIZE under torchrun, else 1."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """True on the one process that prints."""
    return os.environ.get("RANK", "0") == "0"


def load_config(path: Path, overrides: Sequence[str]) -> Config:
    """The resolved configuration, checked for this launch's number of processes.

    parallel.dp stays as it was written, so that config.yaml of a run also holds for a resume on more processes.
    """
    from grpo_mc.config import load_config as load
    from grpo_mc.config import resolve

    config = load(path, list(overrides))
    if "WORLD_SIZE" in os.environ:
        resolve(config, world_size())
    return config


def with_layout(config: Config) -> Config:
    """The configuration with parallel.dp filled in: for this launch, or without torchrun for the fewest processes."""
    from grpo_mc.config import resolve

    p = config.parallel
    return resolve(config, world_size() if "WORLD_SIZE" in os.environ else p.tp * p.pp * p.cp * (p.dp or 1))


def mark_resumed(config: Config) -> Config:
    """The configuration with `run.resume` set."""
    return config.model_copy(update={"run": config.run.model_copy(update={"resume": True})})


def train(config: Config, *, resume_dir: Path | None, sink: RunMonitor) -> Any:
    """Runs the training loop; returns its TrainResult."""
    set_up_notices()
    from grpo_mc.pipeline.run import train as run

    return run(config, resume_dir=resume_dir, sink=sink)


def evaluate(config: Config, *, on_progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Evaluates the configuration's model; the figures by name (`accuracy`, `accuracy_error`, `n`, ...)."""
    set_up_notices()
    from grpo_mc.pipeline.run import evaluate as run

    return dict(run(config, on_progress=on_progress).record())


def trained_model(run_dir: Path) -> Path:
    """The model that a finished run wrote.

    Raises:
        FileNotFoundError: it wrote none.
    """
    from grpo_mc.monitor.run_files import CONFIG_FILE

    folder = run_dir / EXPORT_DIR
    if not (run_dir / CONFIG_FILE).is_file():
        raise FileNotFoundError(f"{run_dir} holds no {CONFIG_FILE}; give a configuration file or the run.dir of a run")
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{run_dir} holds no {EXPORT_DIR}/ (the run has not finished, or checkpoint.export_hf is false); "
            f"write it with `grpo-mc convert export {run_dir} {folder}`"
        )
    return folder


def read_model_architecture(config: Config) -> Any:
    """The ModelArchitecture behind model.path; weights are not read (a .gguf file is converted once)."""
    set_up_notices()
    from grpo_mc.megatron.hf_checkpoint import locate_folder
    from grpo_mc.megatron.hf_config import read_architecture

    return read_architecture(locate_folder(config.model.path, config.model.cache_dir))


def prompts(config: Config) -> tuple[PromptDataset | None, PromptDataset | None]:
    """The training prompts and the held-out prompts, read and checked as a run does; None for what it does not use."""
    from grpo_mc.data.dataset import held_out_prompts, training_prompts
    from grpo_mc.data.tokenizer import load_tokenizer

    mode = config.pipeline.mode
    needs_training = config.data.train is not None and mode != "train_only"
    needs_held_out = config.evaluation.source is not None and mode == "train"
    if not needs_training and not needs_held_out:
        return None, None
    positions = read_model_architecture(config).max_positions
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path, config.model.cache_dir)
    return (
        training_prompts(config, tokenizer, positions) if needs_training else None,
        held_out_prompts(config, tokenizer, positions) if needs_held_out else None,
    )


def generate(model: str, prompts: Sequence[str], **options: Any) -> Iterable[Any]:
    """Responses in prompt order, `num_samples` for each prompt."""
    set_up_notices()
    from grpo_mc.pipeline.run import generate as run

    return run(model, prompts, **options)


def import_model(source: str, destination: Path, *, dtype: str) -> Path:
    """Writes `source` (safetensors folder, GGUF file or package:NAME) as a safetensors folder."""
    set_up_notices()
    from grpo_mc.megatron.convert import import_model as run

    return run(source, destination, dtype=dtype)


def export_model(checkpoint: Path, destination: Path, *, dtype: str) -> Path:
    """Writes a training checkpoint as a safetensors folder."""
    set_up_notices()
    from grpo_mc.megatron.convert import export_model as run

    return run(checkpoint, destination, dtype=dtype)


def check_parity(**options: Any) -> int:
    """Runs the layout-parity check, which prints its own table; returns the exit status."""
    set_up_notices()
    from grpo_mc.megatron.parity import run

    return int(run(**options))


def list_benchmarks() -> list[str]:
    """Names that `bench` takes."""
    from grpo_mc.ops.bench import names

    return list(names())


def run_benchmark(operator: str, *, as_json: bool, compare: Path | None, device: str) -> int:
    """Runs one operator's benchmark, which prints its own lines; returns the exit status."""
    from grpo_mc.ops.bench import run

    return int(run(operator, as_json=as_json, compare=compare, device=device) or 0)


def score(config_rewards: Any, groups: list[Group]) -> None:
    """Fills verdicts and rewards of every rollout in `groups`."""
    from grpo_mc.rewards import RewardPool

    with RewardPool(config_rewards) as pool:
        pool.score(groups)


def reward_types() -> dict[str, str]:
    """Reward types -> one line each."""
    from grpo_mc.rewards import REWARD_TYPES

    return dict(REWARD_TYPES)


def explain_reward(reward_type: str) -> str:
    """What a reward type does."""
    from grpo_mc.rewards import explain

    return explain(reward_type)


def operators_info() -> dict[str, Any]:
    """What the compiled operators say of themselves: version, instruction set, devices."""
    from grpo_mc import ops

    return dict(ops.info())
