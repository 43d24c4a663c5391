"""Named objectives: the published algorithms, and the conventions of other projects.

A preset gives values of section `algorithm` and, where its source names one, the group size. It fills only what the
configuration does not set. Every preset sets every field that its source decides, so that a later change of a default
does not change a preset. Where a source leaves a number open (the eps beside a std, say) the number here is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

AlgorithmValues = dict[str, Any]


@dataclass(frozen=True)
class Preset:
    """A named objective."""

    name: str
    summary: str
    """One line: what is special about it and where it comes from."""
    algorithm: AlgorithmValues
    """Values of section `algorithm`."""
    group_size: int | None = None
    """Value of rollout.group_size; None = the source names none."""
    overlong_fraction: float | None = None
    """overlong_buffer as a part of rollout.max_new_tokens (rounded down); None = no overlong penalty."""


_CLIPPED: AlgorithmValues = {
    "baseline": "mean",
    "scale": "std",
    "ddof": 0,
    "eps": 1e-4,
    "quantile": None,
    "loss": "clip",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": None,
    "aggregation": "sequence_mean_token_mean",
    "beta": 0.0,
    "kl": "k3",
    "kl_placement": "in_loss",
    "kl_gradient": "direct",
    "entropy_coef": 0.0,
    "filter_zero_variance": False,
    "max_refills": 0,
    "overlong_buffer": None,
    "mask_truncated": False,
    "correction": "none",
    "epochs": 1,
}

_ALL = (
    Preset("grpo", "GRPO, arXiv 2402.03300 (KL coefficient 0.04 from there) and 2501.12948 (16 rollouts a group).",
           {**_CLIPPED, "beta": 0.04}, group_size=16),
    Preset("dr_grpo", "Dr. GRPO, arXiv 2503.20783: no std, no length bias, no KL.",
           {**_CLIPPED, "scale": "none", "aggregation": "sequence_mean_token_sum_norm"}),
    Preset("dapo", "DAPO, arXiv 2503.14476: clip-higher, token mean, dynamic sampling (10 refills at most), soft "
           "overlong penalty over the last fifth of the response, no KL.",
           {**_CLIPPED, "clip_high": 0.28, "aggregation": "token_mean", "filter_zero_variance": True,
            "max_refills": 10, "overlong_penalty": 1.0}, group_size=16, overlong_fraction=0.2),
    Preset("gspo", "GSPO, arXiv 2507.18071: sequence ratio, clip 3e-4 / 4e-4, no KL.",
           {**_CLIPPED, "loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}),
    Preset("cispo", "CISPO, arXiv 2506.13585: clipped ratio as a constant weight, no lower bound, upper bound 5 (from "
           "arXiv 2510.13786), token mean, no KL.",
           {**_CLIPPED, "loss": "cispo", "clip_low": 1.0, "clip_high": 4.0, "aggregation": "token_mean"}),
    Preset("rloo", "RLOO, arXiv 2402.14740: leave-one-out baseline, no std, plain policy gradient.",
           {**_CLIPPED, "baseline": "leave_one_out", "scale": "none", "loss": "reinforce",
            "aggregation": "sequence_mean_token_sum", "kl": "k1", "kl_placement": "in_reward"}),
    Preset("reinforce_plus_plus", "REINFORCE++ with the group mean as baseline, arXiv 2501.03262: std over the batch, "
           "KL (k1, 0.01) in the reward, token mean.",
           {**_CLIPPED, "scale": "batch_std", "eps": 1e-8, "aggregation": "token_mean", "beta": 0.01, "kl": "k1",
            "kl_placement": "in_reward"}),
    Preset("trl", "Conventions of huggingface/trl 1.16 without vLLM (its sequence mask is for vLLM only): sample "
           "std + 1e-4, token mean, no KL; with a beta, k3 times the ratio.",
           {**_CLIPPED, "ddof": 1, "aggregation": "token_mean", "kl_gradient": "importance"}, group_size=8),
    Preset("verl", "Conventions of verl-project/verl for grpo: sample std + 1e-6, dual clip 3, token mean.",
           {**_CLIPPED, "ddof": 1, "eps": 1e-6, "dual_clip": 3.0, "aggregation": "token_mean"}),
    Preset("slime", "Conventions of THUDM/slime: sample std + 1e-6, mean of each response's token mean.",
           {**_CLIPPED, "ddof": 1, "eps": 1e-6}),
    Preset("nemo_rl", "Conventions of NVIDIA-NeMo/RL: leave-one-out mean and std, token mean, KL (k3, 0.01).",
           {**_CLIPPED, "baseline": "leave_one_out", "scale": "leave_one_out_std", "ddof": 1, "eps": 1e-6,
            "aggregation": "token_mean", "beta": 0.01}, group_size=16),
    Preset("megatron_rl", "Conventions of megatron/rl: population std + 1e-4, clip 0.01, KL (k3, 0.001), 2 passes.",
           {**_CLIPPED, "clip_low": 0.01, "clip_high": 0.01, "aggregation": "token_mean", "beta": 0.001, "epochs": 2},
           group_size=2),
)  # fmt: skip

PRESETS: dict[str, Preset] = {preset.name: preset for preset in _ALL}
"""Every preset by name."""
