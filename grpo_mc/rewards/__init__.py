"""Reward functions, typed verdicts, and the pool of processes that runs the functions.

    with RewardPool(config.rewards) as pool:
        pool.score(groups)          # fills rollout.verdicts, rollout.rewards and rollout.reward

A reward type is one module here; `REWARD_TYPES` lists them and `explain` tells what one does. `score_one` judges a
rollout in the calling process; grpo_mc.rewards.files judges a file of responses. Nothing here imports torch, so that
worker processes start fast.
"""

from grpo_mc.rewards.judge import score_one
from grpo_mc.rewards.pool import RewardPool
from grpo_mc.rewards.registry import REWARD_TYPES, NamedScorer, build_functions, explain
from grpo_mc.rewards.sample import PromptView, Sample

__all__ = [
    "REWARD_TYPES",
    "NamedScorer",
    "PromptView",
    "RewardPool",
    "Sample",
    "build_functions",
    "explain",
    "score_one",
]
