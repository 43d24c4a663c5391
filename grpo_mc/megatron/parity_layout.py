"""The layouts of `grpo-mc check parity`: their names, and which of them a model can be laid out on."""

from __future__ import annotations

import re
from dataclasses import dataclass

from grpo_mc.config.layout import ModelShape, check_parallel
from grpo_mc.config.training import ParallelConfig
from grpo_mc.megatron.hf_config import ModelArchitecture

TINY_MIXTRAL = ModelArchitecture(
    family="mixtral", num_layers=4, hidden_size=64, ffn_hidden_size=96, num_heads=4, num_kv_heads=2, head_dim=16,
    vocab_size=131, rope_theta=1e4, rms_norm_eps=1e-5, tie_word_embeddings=False, max_positions=512,
    num_experts=4, experts_per_token=2,
)  # fmt: skip
"""Its odd vocabulary has to be padded under tp."""

REFERENCE = "separate"
"""One process; every response with a prompt of its own, in a micro-batch of its own."""
DEFAULT_LAYOUTS = (
    "mb1", "mb2", "mb4", "dp2", "tp2", "pp2", "ep2", "tp2xpp2", "dp2xep2", "tp2xep2", "pp2xep2",
)  # fmt: skip
_DEFAULT_MICRO_BATCHES = 4
_AXES = ("mb", "tp", "pp", "ep", "etp", "dp")


@dataclass(frozen=True)
class ParityLayout:
    """A layout to check."""

    name: str
    processes: int
    micro_batches: int | None
    """How many the whole batch makes on one data-parallel rank; None for the reference."""
    parallel: ParallelConfig


def parse_layout(name: str) -> ParityLayout:
    """The layout of a name: degrees joined by x, e.g. "tp2xpp2"; mbN = the batch is cut into N micro-batches.

    The number of processes is the product of the degrees tp, pp, dp and ep. Experts are spread over ranks that are
    tensor- or data-parallel ranks for everything else, so ep2 has two data-parallel ranks.

    Raises:
        ValueError: not such a name.
    """
    if name == REFERENCE:
        return ParityLayout(name, 1, None, ParallelConfig(dp=1))
    degrees: dict[str, int] = {}
    for part in name.split("x"):
        match = re.fullmatch(r"([a-z]+)([1-9]\d*)", part)
        if match is None or match[1] not in _AXES or match[1] in degrees:
            raise ValueError(
                f"check parity: layout '{name}' is not understood at '{part}'; join degrees of {', '.join(_AXES)}"
                " by x, each once, as in tp2xpp2"
            )
        degrees[match[1]] = int(match[2])
    micro_batches = degrees.pop("mb", _DEFAULT_MICRO_BATCHES)
    dp = degrees.pop("dp", 1) * degrees.get("ep", 1)
    processes = degrees.get("tp", 1) * degrees.get("pp", 1) * dp
    return ParityLayout(name, processes, micro_batches, ParallelConfig.model_validate({"dp": dp, **degrees}))


def fit(layout: ParityLayout, shape: ModelShape) -> ParityLayout:
    """The layout with every degree filled in.

    Raises:
        ConfigError: the model cannot be laid out so.
    """
    parallel = check_parallel(layout.parallel, shape, layout.processes)
    return ParityLayout(layout.name, layout.processes, layout.micro_batches, parallel)
