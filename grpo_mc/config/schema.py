"""The whole configuration: one frozen object with a section for each part."""

from __future__ import annotations

from pydantic import Field

from grpo_mc.config.algorithm import AlgorithmConfig
from grpo_mc.config.base import Section
from grpo_mc.config.data import DataConfig
from grpo_mc.config.model import ModelConfig
from grpo_mc.config.rewards import RewardsConfig
from grpo_mc.config.rollout import InferenceConfig, RolloutConfig
from grpo_mc.config.run import CheckpointConfig, EvaluationConfig, MonitorConfig, RunConfig
from grpo_mc.config.training import OptimizerConfig, ParallelConfig, PipelineConfig


class Config(Section):
    """A run's configuration."""

    model: ModelConfig
    """Which weights, which tokenizer, which precision."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Where prompts come from."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """How responses are sampled."""
    rewards: RewardsConfig = Field(default_factory=RewardsConfig)
    """How responses are judged."""
    inference: InferenceConfig = Field(default_factory=InferenceConfig)
    """How reference log-probs are computed."""
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    """The objective."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The optimizer and its schedule."""
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    """The layout over processes."""
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    """How the parts of the run work together."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """What is saved."""
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """How the model is measured."""
    monitor: MonitorConfig = Field(default_factory=MonitorConfig)
    """What is shown and written."""
    run: RunConfig
    """The run itself."""
