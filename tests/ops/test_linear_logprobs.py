"""linear_logprobs: the reference over chunks, padding, temperatures and shards; gradients; memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_mc import ops
from grpo_mc.ops import reference
from helpers import cuda_emulator
from helpers.compare import assert_close


def problem(
    tokens: int, hidden: int, vocabulary: int, *, seed: int = 0, dtype: torch.dtype = torch.float32,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=draw).to(dtype)
    weight = (torch.randn(vocabulary, hidden, generator=draw) / hidden**0.5).to(dtype)
    return x, weight, torch.randint(vocab_size or vocabulary, (tokens,), generator=draw)


def gradients(function: Any, x: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> list[Tensor]:
    """Values, and the gradients of a loss of both outputs."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    logprobs, entropy = function(x, weight, targets, with_entropy=True, **options)
    factor = torch.linspace(-1, 2, len(targets), dtype=logprobs.dtype)
    (logprobs * factor + 0.3 * entropy * factor.flip(0)).sum().backward()
    assert x.grad is not None and weight.grad is not None
    return [logprobs.detach(), entropy.detach(), x.grad, weight.grad]


def test_by_hand() -> None:
    """Logits ln 1, ln 2, ln 5: probabilities 1/8, 2/8, 5/8."""
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(5)]])
    logprobs, entropy = ops.linear_logprobs(torch.ones(1, 1), weight, torch.tensor([1]), with_entropy=True)
    assert float(logprobs) == pytest.approx(math.log(2 / 8), abs=1e-6)
    assert float(entropy) == pytest.approx(-sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8)), abs=1e-6)


@pytest.mark.parametrize(
    "tokens, hidden, vocabulary", [(0, 4, 10), (1, 1, 1), (3, 47, 123), (7, 16, 2048), (5, 8, 2049), (12, 32, 5000)]
)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.1}, {"temperature": 1.7, "vocab_size": -5}])
def test_matches_the_reference(tokens: int, hidden: int, vocabulary: int, options: dict[str, Any]) -> None:
    if "vocab_size" in options:
        options = {**options, "vocab_size": max(1, vocabulary + options["vocab_size"])}
    size = options.get("vocab_size")
    for dtype, bound in ((torch.float32, 3e-5), (torch.float64, 1e-12)):
        x, weight, targets = problem(tokens, hidden, vocabulary, dtype=dtype, vocab_size=size)
        got = gradients(ops.linear_logprobs, x, weight, targets, **options)
        want = gradients(reference.linear_logprobs, x.double(), weight.double(), targets, **options)
        for name, ours, theirs in zip(("logprobs", "entropy", "hidden", "weight"), got, want, strict=True):
            assert ours.dtype == dtype
            if theirs.norm() > 1e-9:
                assert_close(ours, theirs, bound, (name, dtype))
        if size is not None:
            assert not got[3][size:].any()
        alone = ops.linear_logprobs(x, weight, targets, **options)
        assert torch.equal(alone, got[0])


def test_bfloat16_logits_are_float() -> None:
    x, weight, targets = problem(20, 64, 3000, dtype=torch.bfloat16)
    got = gradients(ops.linear_logprobs, x, weight, targets)
    want = gradients(reference.linear_logprobs, x.double(), weight.double(), targets)
    assert [t.dtype for t in got] == [torch.float32] * 2 + [torch.bfloat16] * 2
    for ours, theirs, bound in zip(got, want, (1e-6, 1e-6, 3e-3, 3e-3), strict=True):
        assert_close(ours, theirs, bound)


def test_shards_merge() -> None:
    """Three shards, the last of them padding alone, against the whole."""
    x, weight, targets = problem(9, 16, 4100, vocab_size=4000)
    bounds, parts = (0, 1500, 4000, 4100), []
    for first, last in zip(bounds[:-1], bounds[1:], strict=True):
        options = dict(vocab_start=first, vocab_size=4000, temperature=0.7)
        got = ops.linear_logprob_stats(x, weight[first:last], targets, **options)  # type: ignore[arg-type]
        want = reference.linear_logprob_stats(x.double(), weight[first:last].double(), targets, **options)  # type: ignore[arg-type]
        for ours, theirs in zip(got, want, strict=True):
            assert torch.allclose(ours.nan_to_num(neginf=-1), theirs.nan_to_num(neginf=-1), rtol=1e-5, atol=1e-5)
        parts.append(got)
    top = torch.stack([part[0] for part in parts]).amax(0)
    total = sum(part[1] * (part[0] - top).exp() for part in parts)
    logprobs = sum(part[3] for part in parts) - top - total.log()
    assert_close(logprobs, ops.linear_logprobs(x, weight, targets, temperature=0.7, vocab_size=4000), 1e-6)


def test_huge_logits_and_one_wide_gap() -> None:
    x = torch.tensor([[1e4], [-1e4], [0.0]])
    weight = torch.linspace(-1, 1, 5001)[:, None]
    got = ops.linear_logprobs(x, weight, torch.tensor([5000, 5000, 17]), with_entropy=True)
    want = reference.linear_logprobs(x.double(), weight.double(), torch.tensor([5000, 5000, 17]), with_entropy=True)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.allclose(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    assert float(got[1][2]) == pytest.approx(math.log(5001), rel=1e-6)


def test_padding_may_hold_anything() -> None:
    x, weight, targets = problem(6, 8, 2100, vocab_size=2050)
    weight[2050:] = torch.nan
    got = gradients(ops.linear_logprobs, x, weight, targets, vocab_size=2050)
    want = gradients(reference.linear_logprobs, x, weight[:2050], targets)
    for ours, theirs in zip(got[:3], want[:3], strict=True):
        assert_close(ours, theirs, 1e-5)
    assert not got[3][2050:].any()


def test_gradcheck() -> None:
    x, weight, targets = problem(4, 3, 7, dtype=torch.float64)
    x.requires_grad_(), weight.requires_grad_()
    for with_entropy in (False, True):

        def call(x: Tensor, weight: Tensor, flag: bool = with_entropy) -> Any:
            return ops.linear_logprobs(x, weight, targets, temperature=0.8, vocab_size=6, with_entropy=flag)

        targets.clamp_(max=5)
        assert torch.autograd.gradcheck(call, (x, weight))


def test_a_frozen_side_gets_no_gradient() -> None:
    x, weight, targets = problem(6, 8, 3000)
    want = gradients(reference.linear_logprobs, x, weight, targets)
    for which in (0, 1):
        sides = [x.clone(), weight.clone()]
        sides[which].requires_grad_()
        logprobs, entropy = ops.linear_logprobs(*sides, targets, with_entropy=True)
        factor = torch.linspace(-1, 2, 6)
        (logprobs * factor + 0.3 * entropy * factor.flip(0)).sum().backward()
        assert sides[1 - which].grad is None
        assert_close(sides[which].grad, want[2 + which], 1e-5)  # type: ignore[arg-type]


def test_the_logits_never_exist() -> None:
    """No tensor of a forward and backward pass holds more than a chunk of logits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple) else (out,):
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.untyped_storage().nbytes())
            return out

    x, weight, targets = problem(64, 2, 40_960)
    with Sizes():
        gradients(ops.linear_logprobs, x, weight, targets)
    assert largest <= 64 * 40_960 * 4 / 20


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(hidden=torch.ones(3)), r"hidden is \[3\] and weight \[5, 4\]"),
        (dict(hidden=torch.ones(3, 2)), r"hidden is \[3, 2\]"),
        (dict(weight=torch.ones(5, 4).double()), "hidden is torch.float32 and weight torch.float64"),
        (dict(hidden=torch.ones(3, 4).half(), weight=torch.ones(5, 4).half()), "both float32, bfloat16 or float64"),
        (dict(vocab_size=6), "vocab_size is 6; it must be 1 to 5"),
        (dict(temperature=0.0), "temperature"),
        (dict(targets=torch.tensor([0, 1])), "targets"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], words: str) -> None:
    arguments = dict(hidden=torch.ones(3, 4), weight=torch.ones(5, 4), targets=torch.tensor([0, 1, 2])) | change
    with pytest.raises(ValueError, match=words):
        ops.linear_logprobs(**arguments)  # type: ignore[arg-type]


def test_a_target_out_of_range_is_an_error_or_on_a_gpu_nan() -> None:
    x, weight, targets = torch.ones(3, 4), torch.ones(5, 4), torch.tensor([0, 5, 2])
    if not cuda_emulator.IS_USED:
        with pytest.raises(ValueError, match=r"targets\[1\] is 5; it must lie in \[0, 5\)"):
            ops.linear_logprobs(x, weight, targets)
        return
    assert torch.isnan(ops.linear_logprobs(x, weight, targets)).tolist() == [False, True, False]  # type: ignore[arg-type]


def test_opcheck() -> None:
    x, weight, targets = problem(5, 4, 9)
    x.requires_grad_(), weight.requires_grad_()
    for with_entropy in (False, True):
        torch.library.opcheck(torch.ops.grpo_mc.linear_logprobs.default, (x, weight, targets, 0.9, 8, with_entropy))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 30), st.integers(1, 4500), st.floats(0.2, 3.0), st.integers(0, 2**31))
def test_random_shapes(tokens: int, hidden: int, vocabulary: int, temperature: float, seed: int) -> None:
    x, weight, targets = problem(tokens, hidden, vocabulary, seed=seed)
    got = ops.linear_logprobs(x, weight, targets, temperature=temperature)
    want = reference.linear_logprobs(x.double(), weight.double(), targets, temperature=temperature)
    assert torch.allclose(got.double(), want, rtol=1e-5, atol=2e-5)  # type: ignore[union-attr]
