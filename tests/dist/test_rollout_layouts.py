"""The native engine under tensor, pipeline and expert parallelism gives the tokens of one process.

With batch_invariant a response is also the same bit for bit: over batch sizes on any layout, and over layouts that
split no matrix (pipeline, data and expert parallelism).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.engines import load_policy, make_requests, single_mesh, tokens_of, trainer_logprobs

pytestmark = pytest.mark.dist

LENGTHS = [1, 4, 9, 16]
SAMPLES = 3
MODES = {
    "greedy": {"temperature": 0.0, "max_new_tokens": 8},
    "sampled": {"temperature": 1.5, "max_new_tokens": 8, "top_p": 0.95},
}
ALL = [[0, 1, 2, 3]]
# family, degrees, groups of each data-parallel rank
LAYOUTS: dict[int, list[tuple[str, dict[str, int], list[list[int]]]]] = {
    2: [
        ("llama", {"tp": 2}, ALL),
        ("llama", {"pp": 2}, ALL),
        ("mixtral", {"tp": 2}, ALL),
        ("mixtral", {"ep": 2}, [[0, 1], [2, 3]]),
        ("mixtral", {"ep": 2}, [[0, 1, 2, 3], []]),  # one rank never has work of its own
        ("mixtral", {"ep": 2}, [[3], [0, 1, 2]]),
    ],
    4: [
        ("qwen3", {"tp": 2, "pp": 2}, ALL),
        ("mixtral", {"pp": 2, "ep": 2}, [[0, 1, 3], [2]]),
        ("mixtral", {"tp": 2, "ep": 2}, [[1], [0, 2, 3]]),
    ],
}
CASES = [(ranks, case) for ranks, layouts in LAYOUTS.items() for case in range(len(layouts))]


def _generate(folder: Path, mesh: Any, requests: list[Any]) -> dict[str, Any]:
    """Tokens of each mode, distance of the sampled log-probs from the trainer's, bits of batch-invariant sampling."""
    from grpo_mc.data.tokenizer import load_tokenizer
    from grpo_mc.rollout.native import NativeEngine
    from grpo_mc.rollout.sampling import SamplingParams

    model, tokenizer = load_policy(folder, mesh), load_tokenizer(folder)
    engine = NativeEngine(model, mesh, tokenizer, seed=3, kv_block_size=4, max_batch_rows=7)
    found: dict[str, Any] = {}
    for name, mode in MODES.items():
        responses = engine.generate(requests, SamplingParams(**mode))  # type: ignore[arg-type]
        found[name] = tokens_of(responses)
    scored = trainer_logprobs(model, mesh, requests, responses, 1.5)
    gaps = [np.abs(np.array(r.logprobs) - scored[r.group_id, r.sample_index]).max() for r in responses]
    found["gap"] = float(max(gaps, default=0.0))
    for rows in (7, 2):
        engine = NativeEngine(model, mesh, tokenizer, seed=3, max_batch_rows=rows, batch_invariant=True)
        responses = engine.generate(requests, SamplingParams(max_new_tokens=4))
        found[f"bits{rows}"] = {(r.group_id, r.sample_index): (r.token_ids, r.logprobs) for r in responses}
    return found


def _on_layouts(folders: dict[str, Path], ranks: int) -> list[dict[str, Any]]:
    """One rank: every layout of so many ranks in turn."""
    from megatron.core import parallel_state

    from grpo_mc.megatron.mesh import build_mesh

    results = []
    for family, degrees, groups_of_rank in LAYOUTS[ranks]:
        mesh = build_mesh(**degrees, timeout_s=60)
        mine = groups_of_rank[mesh.dp_rank % len(groups_of_rank)]
        requests = [request for request in make_requests(LENGTHS, SAMPLES) if request.group_id in mine]
        results.append(_generate(folders[family], mesh, requests))
        parallel_state.destroy_model_parallel()
    return results


@pytest.fixture(scope="module")
def folders(tiny_model: Callable[..., Path]) -> dict[str, Path]:
    return {family: tiny_model(family) for family in ("llama", "qwen3", "mixtral")}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Family -> what one process generates."""
    with single_mesh() as mesh:
        requests = make_requests(LENGTHS, SAMPLES)
        return {family: _generate(folder, mesh, requests) for family, folder in folders.items()}


@pytest.fixture(scope="module")
def found(folders: dict[str, Path], run_distributed: Callable[..., list[Any]]) -> Callable[[int], list[Any]]:
    """Number of ranks -> rank -> layout -> what the rank generated; launched once for each number."""
    done: dict[int, list[Any]] = {}

    def run(ranks: int) -> list[Any]:
        if ranks not in done:
            done[ranks] = run_distributed(_on_layouts, ranks, folders, ranks, timeout_s=240)
        return done[ranks]

    return run


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_tokens_are_those_of_one_process(
    ranks: int, case: int, found: Callable[[int], list[Any]], expected: dict[str, dict[str, Any]]
) -> None:
    family, degrees, _ = LAYOUTS[ranks][case]
    results = [of_rank[case] for of_rank in found(ranks)]
    for mode in MODES:
        merged: dict[Any, list[int]] = {}
        for result in results:
            for key, ids in result[mode].items():
                assert merged.setdefault(key, ids) == ids, f"{degrees} {mode} {key}: two ranks disagree"
        assert merged == expected[family][mode], f"{family} {degrees} {mode}"
    assert max(result["gap"] for result in results) < 1e-5


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_batch_invariant_bits(
    ranks: int, case: int, found: Callable[[int], list[Any]], expected: dict[str, dict[str, Any]]
) -> None:
    family, degrees, _ = LAYOUTS[ranks][case]
    for result in (of_rank[case] for of_rank in found(ranks)):
        assert result["bits7"] == result["bits2"], f"{family} {degrees}: the batch size changes bits"
        if "tp" not in degrees:
            alone = {key: expected[family]["bits7"][key] for key in result["bits7"]}
            assert result["bits7"] == alone, f"{family} {degrees}: the layout changes bits"
