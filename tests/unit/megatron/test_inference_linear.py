"""The direct linear layers of sampling give what the training layers give, and go away again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.engines import load_policy, single_mesh


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    with single_mesh() as built:
        yield built


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])  # tied head; biases; experts
def test_logits_are_the_same_bits(family: str, mesh: Any, tiny_model: Callable[..., Path]) -> None:
    from grpo_mc.megatron.inference_linear import inference_linears
    from grpo_mc.megatron.layout import SharedPrefixLayout, make_block

    model = load_policy(tiny_model(family), mesh).eval()
    blocks = (make_block(0, 9, [], [], mesh.device),)

    def logits() -> torch.Tensor:
        layout = SharedPrefixLayout(positions=torch.arange(9), blocks=blocks)
        with torch.inference_mode():
            return model(torch.arange(9)[None], None, None, packed_seq_params=layout)

    before = {name: set(vars(module)) for name, module in model.named_modules()}
    expected = logits()
    with inference_linears(model):  # row_linear sums in an order of its own
        assert (logits() - expected).abs().max() <= 1e-5 * expected.abs().max()
    with inference_linears(model, few_rows=0):
        assert {name for name, module in model.named_modules() if "forward" in vars(module)}
        assert torch.equal(logits(), expected)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    with pytest.raises(RuntimeError, match="stop"), inference_linears(model):
        raise RuntimeError("stop")
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
