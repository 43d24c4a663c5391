"""Checks of the layout against the number of processes and the model's shape, before any process group exists.

The world is cut twice: tp x pp x cp x dp for everything but experts, etp x ep x pp x (the rest) for experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_mc.config.base import ConfigError, derive
from grpo_mc.config.training import ParallelConfig


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides which layouts are possible."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    """Rows of the embedding as the model has them; the engine pads them to a multiple of tp."""
    num_experts: int = 0
    """Experts in a layer; 0 = a dense model."""
    hidden_size: int = 0
    """0 = not checked."""
    ffn_hidden_size: int = 0
    """Inner size of the dense feed-forward layer, 0 = not checked."""
    moe_ffn_hidden_size: int = 0
    """Inner size of an expert, 0 = not checked."""


def data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
    """dp = world size / (tp * pp * cp).

    Raises:
        ConfigError: it does not divide, or parallel.dp is given and differs.
    """
    tp, pp, cp = parallel.tp, parallel.pp, parallel.cp
    product = tp * pp * cp
    if world_size % product:
        raise ConfigError(
            f"parallel: world size {world_size} is not a multiple of tp * pp * cp = {tp} * {pp} * {cp} = {product}; "
            f"start {-(-world_size // product) * product} processes or lower tp or pp"
        )
    dp = world_size // product
    if parallel.dp is not None and "dp" in parallel.model_fields_set and parallel.dp != dp:
        raise ConfigError(
            f"parallel.dp is {parallel.dp} but world size {world_size} / (tp {tp} * pp {pp} * cp {cp}) = {dp}; "
            f"leave dp out or start {parallel.dp * product} processes"
        )
    return dp


def expert_tensor_size(parallel: ParallelConfig) -> int:
    """etp as given, else tp for experts that are not spread and 1 for those that are."""
    if parallel.etp is not None and "etp" in parallel.model_fields_set:
        return parallel.etp
    return parallel.tp if parallel.ep == 1 else 1


def resolve_sequence_parallel(parallel: ParallelConfig, shape: ModelShape) -> bool:
    """sequence_parallel as given, else on when the model has experts and tp > 1."""
    if parallel.sequence_parallel is not None and "sequence_parallel" in parallel.model_fields_set:
        return parallel.sequence_parallel
    return shape.num_experts > 0 and parallel.tp > 1


def check_parallel(parallel: ParallelConfig, shape: ModelShape, world_size: int) -> ParallelConfig:
    """The layout with dp, etp and sequence_parallel filled in, checked against the model.

    Args:
        parallel: section `parallel`.
        shape: the model's shape.
        world_size: number of processes.

    Returns:
        The section with no null left.

    Raises:
        ConfigError: the model cannot be laid out so; every reason is listed with both values.
    """
    dp = data_parallel_size(parallel, world_size)
    etp = expert_tensor_size(parallel)
    sequence_parallel = resolve_sequence_parallel(parallel, shape)
    problems = _dense_problems(parallel, shape) + _expert_problems(parallel, shape, dp, etp, sequence_parallel)
    if parallel.grad_compression != "none" and parallel.tp > 1 and not sequence_parallel:
        problems.append(
            f"parallel.grad_compression is '{parallel.grad_compression}' and parallel.tp is {parallel.tp} without "
            "sequence_parallel: copies of norms drift apart; set sequence_parallel: true, or grad_compression: none"
        )
    if sequence_parallel and parallel.tp == 1 and parallel.sequence_parallel:
        problems.append("parallel.sequence_parallel is true but parallel.tp is 1; remove it or raise tp")
    if problems:
        raise ConfigError("parallel: this layout does not fit the model:\n  " + "\n  ".join(problems))
    return derive(parallel, dp=dp, etp=etp, sequence_parallel=sequence_parallel)


def _indivisible(axis: str, size: int, name: str, count: int) -> list[str]:
    """A problem where `count` of the model is not a multiple of the axis' size; a count of 0 is not checked."""
    if count % size == 0:
        return []
    fits = ", ".join(str(n) for n in range(1, size) if count % n == 0)
    return [f"parallel.{axis} is {size} but the model's {name} is {count}, not a multiple; {axis} may be {fits}"]


def _dense_problems(parallel: ParallelConfig, shape: ModelShape) -> list[str]:
    problems = _indivisible("tp", parallel.tp, "num_heads", shape.num_heads)
    problems += _indivisible("tp", parallel.tp, "num_kv_heads", shape.num_kv_heads)
    problems += _indivisible("tp", parallel.tp, "hidden_size", shape.hidden_size)
    problems += _indivisible("tp", parallel.tp, "ffn_hidden_size", shape.ffn_hidden_size)
    problems += _indivisible("pp", parallel.pp, "num_layers", shape.num_layers)
    if shape.vocab_size < parallel.tp:
        problems.append(f"parallel.tp is {parallel.tp} but the model's vocab_size is only {shape.vocab_size}")
    return problems


def _expert_problems(
    parallel: ParallelConfig, shape: ModelShape, dp: int, etp: int, sequence_parallel: bool
) -> list[str]:
    tp, ep = parallel.tp, parallel.ep
    if shape.num_experts == 0:
        asked = {"ep": ep, "etp": parallel.etp if "etp" in parallel.model_fields_set else 1}
        given: dict[str, int | str] = {key: size for key, size in asked.items() if size is not None and size > 1}
        if parallel.moe_dispatcher != "dedupe":  # a resolved config names the default
            given["moe_dispatcher"] = f"'{parallel.moe_dispatcher}'"
        return [
            f"parallel.{key} is {value} but the model has no experts (num_experts is 0); leave {key} out"
            for key, value in given.items()
        ]
    problems = _indivisible("ep", ep, "num_experts", shape.num_experts)
    ranks = tp * parallel.cp * dp
    if ranks % etp or (ranks // etp) % ep:
        problems.append(
            f"parallel.etp * parallel.ep is {etp} * {ep} = {etp * ep} but tp * cp * dp is {tp} * {parallel.cp} * {dp} "
            f"= {ranks}, not a multiple; lower ep or etp, or start more processes"
        )
    problems += _indivisible("etp", etp, "moe_ffn_hidden_size", shape.moe_ffn_hidden_size)
    if tp > 1 and not sequence_parallel:
        problems.append(
            f"parallel.sequence_parallel is false but parallel.tp is {tp} and the model has {shape.num_experts} "
            "experts; experts under tp need sequence_parallel: true"
        )
    return problems
