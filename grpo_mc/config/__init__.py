"""Configuration: frozen sections, strict YAML, command line overrides, presets, checks. Imports no torch."""

from grpo_mc.config.algorithm import AlgorithmConfig
from grpo_mc.config.base import ConfigError, Section
from grpo_mc.config.checks import check_trainable, config_warnings
from grpo_mc.config.data import DataConfig, HfSource, JsonlSource, ParquetSource, ReasoningGymSource, Source
from grpo_mc.config.formula import objective_formula
from grpo_mc.config.layout import ModelShape, check_parallel
from grpo_mc.config.load import load_config, load_config_text, to_yaml
from grpo_mc.config.model import ModelConfig
from grpo_mc.config.presets import PRESETS, Preset
from grpo_mc.config.resolve import resolve
from grpo_mc.config.rewards import (
    ExactReward,
    FormatReward,
    FunctionReward,
    MathReward,
    MultipleChoiceReward,
    NumericReward,
    ReasoningGymReward,
    RegexReward,
    RewardFunction,
    RewardsConfig,
)
from grpo_mc.config.rollout import InferenceConfig, RolloutConfig
from grpo_mc.config.run import CheckpointConfig, EvaluationConfig, MonitorConfig, RunConfig
from grpo_mc.config.schema import Config
from grpo_mc.config.training import OptimizerConfig, ParallelConfig, PipelineConfig

__all__ = [
    "PRESETS",
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "EvaluationConfig",
    "ExactReward",
    "FormatReward",
    "FunctionReward",
    "HfSource",
    "InferenceConfig",
    "JsonlSource",
    "MathReward",
    "ModelConfig",
    "ModelShape",
    "MonitorConfig",
    "MultipleChoiceReward",
    "NumericReward",
    "OptimizerConfig",
    "ParallelConfig",
    "ParquetSource",
    "PipelineConfig",
    "Preset",
    "ReasoningGymReward",
    "ReasoningGymSource",
    "RegexReward",
    "RewardFunction",
    "RewardsConfig",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "Source",
    "check_parallel",
    "check_trainable",
    "config_warnings",
    "load_config",
    "load_config_text",
    "objective_formula",
    "resolve",
    "to_yaml",
]
