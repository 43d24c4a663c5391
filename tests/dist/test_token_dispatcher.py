"""The token dispatcher inside a real model: the loss and gradients of Megatron-Core's all-to-all, over expert layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mc.config import AlgorithmConfig
from grpo_mc.data.micro_batches import GroupPart
from helpers.compare import assert_all_close
from helpers.engines import single_mesh
from helpers.processes import run_distributed
from helpers.tiny_models import build_tiny_model

pytestmark = pytest.mark.dist

LAYOUTS: dict[str, dict[str, int]] = {
    "ep2": {"ep": 2}, "tp2 ep2": {"tp": 2, "ep": 2}, "tp2 ep2 etp2": {"tp": 2, "ep": 2, "etp": 2},
}  # fmt: skip
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoid with a bias": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    "padded": {"moe_router_padding_for_quantization": True},
}
"""Fields of the config that differ from policy_config's."""
CASES = [(layout, router) for layout in LAYOUTS for router in ROUTERS if layout == "ep2" or router == "softmax"]
SPLIT_EXPERTS = "tp2 ep2 etp2"
"""Megatron-Core's dispatcher then gathers unequal shares over etp, which gloo cannot; it is compared with ep2."""
TOKEN_MEAN = AlgorithmConfig(aggregation="token_mean")
RAGGED: list[tuple[int, list[int]]] = [(5, [4, 1, 9]), (1, [3, 2]), (8, [0, 2, 7]), (3, [6])]


def one_backward(folder: Path, mesh: Any, dispatcher: str, router: str, recompute: str = "none") -> dict[str, Any]:
    """Loss and gradients (rank 0) of the ragged groups, one group a data-parallel rank and the rest on the first."""
    from grpo_mc.algorithms.denominators import Denominators
    from grpo_mc.config import OptimizerConfig
    from grpo_mc.megatron.hf_checkpoint import open_checkpoint
    from grpo_mc.megatron.model import build_model, policy_config
    from grpo_mc.megatron.train_step import Policy
    from grpo_mc.megatron.weights import load_weights
    from helpers.training import gradients_of, make_batches, make_groups

    checkpoint = open_checkpoint(folder)
    config = policy_config(checkpoint.architecture, mesh, recompute=recompute, moe_dispatcher=dispatcher)
    for field, value in ROUTERS[router].items():
        setattr(config, field, value)
    model = build_model(checkpoint.architecture, mesh, config)
    load_weights(model, checkpoint, mesh)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(torch.linspace(-0.4, 0.4, len(buffer)))
    policy = Policy(model, mesh, algorithm=TOKEN_MEAN, optimizer=OptimizerConfig(), temperature=1.0)
    plan: list[Any] = [(GroupPart(0, (0, 1, 2)),), (GroupPart(1, (0, 1)),), (GroupPart(2, (0, 1, 2)),), (GroupPart(3, (0,)),)]
    per_rank = len(plan) // mesh.dp
    mine = plan[mesh.dp_rank * per_rank : (mesh.dp_rank + 1) * per_rank]
    batches = make_batches(make_groups(RAGGED, 264), mine, TOKEN_MEAN, mesh, pad_multiple=mesh.tp)
    sums = policy.backward(batches, Denominators(34, 8, 4))
    return {"loss": sums["loss"], "gradients": gradients_of(policy, mesh)}


def rank_main(folder: Path) -> dict[Any, dict[str, Any]]:
    """Results by (layout, router, dispatcher)."""
    from megatron.core import parallel_state

    from grpo_mc.megatron.mesh import build_mesh

    found: dict[Any, dict[str, Any]] = {}
    for layout, degrees in LAYOUTS.items():
        mesh = build_mesh(**degrees, timeout_s=60)
        for router in (r for (name, r) in CASES if name == layout):
            found[layout, router, "dedupe"] = one_backward(folder, mesh, "dedupe", router)
            if layout != SPLIT_EXPERTS and router != "padded":
                found[layout, router, "megatron"] = one_backward(folder, mesh, "megatron", router)
        if layout == "ep2":
            found["recomputed"] = one_backward(folder, mesh, "dedupe", "softmax", recompute="full")
            found["fp8"] = one_backward(folder, mesh, "dedupe_fp8", "softmax")
        parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, dict[str, Any]]]:
    folder = build_tiny_model(tmp_path_factory.mktemp("mixtral"), "mixtral", num_hidden_layers=2)
    return run_distributed(rank_main, 4, folder, timeout_s=180)


@pytest.mark.parametrize(("layout", "router"), CASES)
def test_loss_and_gradients_are_those_of_megatrons_dispatcher(layout: str, router: str, ranks: Any) -> None:
    found = ranks[0][layout, router, "dedupe"]
    same = "ep2" if layout == SPLIT_EXPERTS else layout
    expected = ranks[0][same, "softmax" if router == "padded" else router, "megatron"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert_all_close(found["gradients"], expected["gradients"], 1e-5 if same != layout else 2e-6, f"{layout}, {router}")


def test_the_router_matters(ranks: Any) -> None:
    """Or the comparison above would compare one router with itself."""
    losses = [ranks[0]["ep2", router, "dedupe"]["loss"] for router in ("softmax", "sigmoid with a bias")]
    assert abs(losses[0] - losses[1]) > 1e-4 * abs(losses[0])


def test_recomputed_layers_have_the_same_gradients(ranks: Any) -> None:
    expected = ranks[0]["ep2", "softmax", "dedupe"]
    assert ranks[0]["recomputed"]["loss"] == expected["loss"]
    assert_all_close(ranks[0]["recomputed"]["gradients"], expected["gradients"], 1e-6, "recomputed")


def test_fp8_rows_change_the_gradients_by_their_rounding_and_no_more(ranks: Any) -> None:
    found, expected = ranks[0]["fp8"], ranks[0]["ep2", "softmax", "dedupe"]
    assert_all_close(found["gradients"], expected["gradients"], 0.1, "fp8")
    name = "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    assert not torch.equal(found["gradients"][name], expected["gradients"][name])


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What needs no second rank: the router of case H18 through the dispatcher, padding, and what is refused."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection, topk_routing_with_score_function

    from grpo_mc.megatron.model import policy_config
    from grpo_mc.megatron.parity_layout import TINY_MIXTRAL
    from grpo_mc.megatron.token_dispatcher import DedupeTokenDispatcher

    def dispatcher_with(**fields: bool) -> Any:
        config = policy_config(TINY_MIXTRAL, mesh)
        for field, value in fields.items():
            setattr(config, field, value)
        return DedupeTokenDispatcher(4, [0, 1, 2, 3], config, get_default_pg_collection())

    logits, bias = torch.tensor([[2.0, 1, 0, -1]]), torch.tensor([0.0, 0, 0, 3])
    found: dict[str, Any] = {}
    with single_mesh() as mesh:
        probs, routing_map = topk_routing_with_score_function(logits, 2, score_function="sigmoid", expert_bias=bias)
        dispatcher = dispatcher_with()
        x, weights = dispatcher.dispatch_preprocess(torch.ones(1, 1, 8), routing_map, probs)
        rows, counts, row_probs = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(x, weights))
        parts = dispatcher.combine_preprocess(rows * row_probs[:, None])
        found |= {"weights": weights[0].tolist(), "counts": counts.tolist(), "row_probs": row_probs.tolist()}
        found["out"] = dispatcher.combine_postprocess(dispatcher.token_combine(parts))
        none = dispatcher.dispatch_preprocess(torch.ones(1, 1, 8), torch.zeros(1, 4).bool(), torch.ones(1, 4))
        rows, counts, _ = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*none))
        out = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(rows)))
        found["none"] = (counts.tolist(), float(out.abs().sum()))
        padding = dispatcher_with(moe_router_padding_for_quantization=True)
        sent = padding.token_dispatch(*padding.dispatch_preprocess(torch.ones(1, 1, 8), routing_map, probs))
        found["padded"] = padding.dispatch_postprocess(*sent)[1].tolist()
        for option in ("moe_shared_expert_overlap", "moe_pad_expert_input_to_capacity", "moe_permute_fusion"):
            with pytest.raises(ValueError) as caught:
                dispatcher_with(**{option: True})
            found[option] = str(caught.value)
    return found


def test_the_routers_bias_is_in_no_weight(alone: dict[str, Any]) -> None:
    """H18: logits 2, 1, 0, -1 with a bias of 3 on the last; the weights are those of the unbiased sigmoid."""
    assert alone["counts"] == [1, 0, 0, 1]
    assert alone["weights"] == pytest.approx([0.766085, 0.233915], abs=1e-6)
    assert alone["row_probs"] == alone["weights"]
    torch.testing.assert_close(alone["out"], torch.ones(1, 1, 8))


def test_a_token_that_no_expert_wants(alone: dict[str, Any]) -> None:
    assert alone["none"] == ([0, 0, 0, 0], 0.0)


def test_experts_rows_are_padded_for_quantization(alone: dict[str, Any]) -> None:
    assert alone["padded"] == [16, 0, 0, 16]


@pytest.mark.parametrize(
    "option", ["moe_shared_expert_overlap", "moe_pad_expert_input_to_capacity", "moe_permute_fusion"]
)
def test_options_of_megatrons_dispatchers_are_refused(option: str, alone: dict[str, Any]) -> None:
    assert f"{option} is set, but" in alone[option] and "unset it or use Megatron-Core's dispatcher" in alone[option]
