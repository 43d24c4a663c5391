"""What a run leaves on disk for later: checkpoints to go on from, and the trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_mc.config import CheckpointConfig
from grpo_mc.megatron.checkpoint import LatestCheckpoint, find_latest, load_checkpoint, prune, save_checkpoint
from grpo_mc.megatron.convert import save_hf
from grpo_mc.pipeline.setup import Runtime
from grpo_mc.pipeline.training_module import TrainingModule

CHECKPOINTS_DIR = "checkpoints"
MODEL_DIR = "model"


class Keeper:
    """Saves and restores the training module's policy, with whatever host state the loop adds. All ranks together."""

    def __init__(self, runtime: Runtime, training: TrainingModule) -> None:
        self.runtime, self.training = runtime, training
        self.config: CheckpointConfig = runtime.config.checkpoint
        self.run_dir = Path(runtime.config.run.dir)
        self.root = self.run_dir / CHECKPOINTS_DIR
        self.last_saved: int | None = None
        """Step of the newest checkpoint that this run knows to be whole."""

    def latest(self) -> LatestCheckpoint:
        """The newest complete checkpoint, and those that are not complete."""
        return find_latest(self.root)

    def save(self, step: int, state: dict[str, Any], best_step: int | None) -> None:
        """A checkpoint of this step, if there is none yet; then older ones are pruned as the configuration says.

        Args:
            state: JSON values, handed back by `load`.
            best_step: The one that did best in evaluation, to be kept as this one is.
        """
        if self.last_saved == step:
            return
        extra = {**state, "policy_version": self.training.policy_version}
        save_checkpoint(self.training.policy, self.runtime.mesh, self.root / f"step_{step}", extra)
        self.last_saved = step
        # The step just saved is not always among the newest: the folder may hold higher ones of another run.
        keep = {step, best_step} if self.config.keep_best and best_step is not None else {step}
        prune(self.root, self.config.keep_last, keep)

    def load(self, path: Path, step: int) -> dict[str, Any]:
        """Restores the policy from the checkpoint of a step; returns the state it was saved with."""
        extra = load_checkpoint(self.training.policy, self.runtime.mesh, path)
        self.training.policy_version = int(extra["policy_version"])
        self.last_saved = step
        return extra

    def export(self) -> Path | None:
        """The model as a Hugging Face folder in the run directory, in place of an earlier one, if it is wanted."""
        if not self.config.export_hf:
            return None
        folder, dtype = self.run_dir / MODEL_DIR, self.runtime.config.model.dtype
        return save_hf(self.runtime.model, self.runtime.mesh, folder, self.runtime.tokenizer, dtype, overwrite=True)
