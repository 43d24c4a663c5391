"""adam_step: a step by hand, the reference to the last bit, torch's AdamW, special values, what is refused."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_mc import ops
from grpo_mc.ops import reference
from grpo_mc.ops.adam import STATE_BITS, AdamState, adam_state
from helpers.compare import assert_close

NAN, INF = float("nan"), float("inf")
NUMBERS: dict[str, Any] = {"lr": 1e-3, "step": 1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parts(state: AdamState) -> list[Tensor]:
    return [tensor for tensor in state if tensor is not None]


def copy(state: AdamState) -> AdamState:
    return AdamState(*(tensor.clone() for tensor in parts(state)))


def equal(one: Tensor, two: Tensor) -> bool:
    """Bit for bit, but any NaN is as good as another."""
    return torch.equal(one.nan_to_num(7e7), two.nan_to_num(7e7)) and torch.equal(one.isnan(), two.isnan())


def both(params: Tensor, grads: Tensor, state: AdamState, **numbers: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Everything a step writes, by the operator and by the reference, from copies of the same."""
    written = []
    for step in (ops.adam_step, reference.adam_step):
        mine, moments, out = params.clone(), copy(state), torch.zeros(params.shape, dtype=torch.bfloat16)
        step(mine, grads, moments, out_bf16=out, **{**NUMBERS, **numbers})
        written.append([mine, *parts(moments), out])
    return written[0], written[1]


def test_by_hand() -> None:
    """g = 2 * 3 / 4 = 1.5; the first step moves by lr against g's sign, after decay by 1 - lr * 0.5."""
    params, state, out = torch.tensor([8.0]), adam_state(torch.zeros(1)), torch.zeros(1, dtype=torch.bfloat16)
    grads = torch.tensor([2.0])
    numbers: dict[str, Any] = {"lr": 0.5, "betas": (0.5, 0.75), "eps": 0.0, "weight_decay": 0.5}
    ops.adam_step(params, grads, state, step=1, grad_scale=4.0, clip_coef=3.0, out_bf16=out, **numbers)
    assert params.item() == 8.0 * 0.75 - 0.5 and out.item() == 5.5
    assert state.exp_avg.item() == 0.75 and state.exp_avg_sq.item() == 0.25 * 2.25
    ops.adam_step(params, torch.zeros(1), state, step=2, **numbers)
    # m = 0.375, over 1 - 0.5^2: 0.5; v = 0.421875, over 1 - 0.75^2: 0.964286
    assert params.item() == pytest.approx(5.5 * 0.75 - 0.5 * 0.5 / (0.421875 / 0.4375) ** 0.5, rel=1e-6)
    assert grads.item() == 2.0


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("n", (0, 1, 7, 8, 22, 55, 64, 128, 1000, 100_003))
def test_the_same_bits_as_the_reference(n: int, dtype: torch.dtype) -> None:
    params, state = normal(n, seed=n), adam_state(torch.zeros(n))
    for step in (1, 2, 1 << 25):
        grads = normal(n, seed=n + step).to(dtype) * 10.0 ** (step % 3)
        ours, theirs = both(params, grads, state, step=step, grad_scale=3.0, clip_coef=0.7)
        assert all(map(torch.equal, ours, theirs))
        params, state = ours[0], AdamState(*ours[1:3])


@pytest.mark.parametrize("weight_decay", (0.0, 0.1))
def test_agrees_with_torch(weight_decay: float) -> None:
    """50 steps of a learning rate that changes, against AdamW of torch."""
    ours = normal(1003)
    theirs = torch.nn.Parameter(ours.clone())
    adamw = torch.optim.AdamW([theirs], weight_decay=weight_decay, fused=True)
    state = adam_state(ours)
    for step in range(1, 51):
        grads = normal(1003, seed=step)
        theirs.grad = grads * 0.25
        adamw.param_groups[0]["lr"] = 0.01 / step
        adamw.step()
        ops.adam_step(ours, grads, state, lr=0.01 / step, step=step, weight_decay=weight_decay, grad_scale=4.0)
    assert_close(ours, theirs.detach(), 1e-6)
    assert_close(state.exp_avg_sq, adamw.state[theirs]["exp_avg_sq"], 1e-6)


@pytest.mark.parametrize("bad", (NAN, INF, -INF))
def test_a_bad_gradient_spoils_its_own_entry(bad: float) -> None:
    params, state = normal(300), adam_state(torch.zeros(300))
    grads = normal(300, seed=1)
    grads[130] = bad
    ours, theirs = both(params, grads, state)
    assert all(map(equal, ours, theirs))
    for written in ours:
        assert (~written.isfinite()).nonzero().flatten().tolist() == [130]


def test_extreme_numbers() -> None:
    """Nothing moves without a gradient; squares that overflow or vanish do what float32 does."""
    params, state = normal(64), adam_state(torch.zeros(64))
    ours, _ = both(params, torch.zeros(64), state, weight_decay=0.0)
    assert torch.equal(ours[0], params) and not ours[1].any() and not ours[2].any()
    grads = torch.tensor([1e30, -1e30, 1e-30, 3e38, 1e-45, -0.0, 1.0, -1.0] * 8)
    for lr in (0.0, 1e-3, 1e3):
        assert all(map(equal, *both(params, grads, state, lr=lr, eps=0.0)))


def test_unaligned_strided_and_shaped() -> None:
    memory, moments = normal(4, 1001), [torch.zeros(4, 1001) for _ in range(2)]
    odd = [tensor[1, 1:] for tensor in (memory, *moments)]
    before, grads = memory.clone(), normal(1000, 7).t()[3]
    want, state = before[1, 1:].clone(), adam_state(torch.zeros(1000))
    reference.adam_step(want, grads, state, **NUMBERS)
    ops.adam_step(odd[0], grads, AdamState(*odd[1:]), **NUMBERS)
    assert torch.equal(memory[1, 1:], want) and torch.equal(odd[1], state.exp_avg)
    memory[1, 1:] = before[1, 1:]
    assert torch.equal(memory, before)  # nothing else was touched
    matrix, out = normal(30, 50), torch.zeros(1500, dtype=torch.bfloat16)
    ops.adam_step(matrix, normal(30, 50, seed=3), adam_state(matrix), out_bf16=out, **NUMBERS)
    assert torch.equal(out, matrix.flatten().bfloat16())


@pytest.mark.parametrize("bits", STATE_BITS)
def test_threads_and_instruction_sets_do_not_change_a_bit(bits: int, tmp_path: Path) -> None:
    code = (
        "import sys, torch\nfrom grpo_mc import ops\nfrom grpo_mc.ops.adam import adam_state\n"
        "torch.set_num_threads(int(sys.argv[1]))\ndraw = torch.Generator().manual_seed(0)\n"
        "params = torch.randn(70_003, generator=draw)\n"
        f"state, out = adam_state(params, bits={bits}), params.bfloat16()\n"
        "for step in range(1, 6):\n"
        "    grads = torch.randn(70_003, generator=draw) * 10.0**-step\n"
        "    ops.adam_step(params, grads, state, lr=1e-3, step=step, weight_decay=0.1, out_bf16=out, seed=7)\n"
        "torch.save((params, state, out), sys.argv[2])\n"
    )
    results = []
    for threads, isa in ((1, "auto"), (2, "auto"), (1, "generic"), (2, "generic")):
        file = tmp_path / f"{threads}-{isa}.pt"
        environment = os.environ | {"GRPO_MC_CPU_ISA": isa}
        command = [sys.executable, "-c", code, str(threads), str(file)]
        subprocess.run(command, env=environment, check=True, timeout=120)
        params, state, out = torch.load(file, weights_only=False)
        results.append([params, *parts(state), out])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def call(**changes: Any) -> None:
    tensors = {"params": torch.ones(3), "grads": torch.ones(3), "state": adam_state(torch.ones(3))}
    given = {**NUMBERS, **tensors, **changes}
    ops.adam_step(given.pop("params"), given.pop("grads"), given.pop("state"), **given)


ONES = torch.ones(6)
CODES = adam_state(torch.ones(3), bits=8)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"params": torch.ones(3).double()}, r"params is Double \[3\]; it must be Float with 3 entries"),
        ({"grads": torch.ones(3).half()}, "grads has dtype Half"),
        ({"grads": torch.ones(4)}, r"grads have shape \[4\]; they must have that of params, \[3\]"),
        ({"state": adam_state(torch.ones(4))}, r"exp_avg is Float \[4\]; it must be Float with 3 entries"),
        (
            {"state": adam_state(torch.ones(300), bits=4)},
            r"exp_avg is Byte \[3, 64\]; it must be Float like",
        ),
        ({"state": CODES._replace(exp_avg_scale=None)}, "a state of codes has scales"),
        ({"state": AdamState(*adam_state(torch.ones(3))[:2], *CODES[2:])}, "a state of codes has scales"),
        ({"state": CODES._replace(exp_avg_sq=torch.zeros(3))}, "exp_avg_sq is Float"),
        ({"state": CODES._replace(exp_avg_sq_scale=torch.zeros(1))}, "exp_avg_sq_scale is Float"),
        ({"offset": 64}, "offset is 64; it must be a multiple of 128"),
        ({"params": torch.ones(3, 2).t(), "grads": torch.ones(2, 3), "state": adam_state(ONES)}, "must be contiguous"),
        ({"params": ONES[:3], "grads": ONES[2:5]}, "params shares memory with an input"),
        ({"state": AdamState(ONES[:3], ONES[1:4])}, "exp_avg shares memory"),
        ({"out_bf16": torch.ones(3)}, "out_bf16 is Float"),
        ({"out_bf16": torch.ones(2, dtype=torch.bfloat16)}, "out_bf16 is BFloat16"),
        ({"params": torch.ones(3, requires_grad=True)}, "params is written in place and needs a gradient"),
        ({"grads": torch.ones(3, device="meta")}, "grads is on meta but params on cpu"),
        ({"lr": -1.0}, "lr is -1; it must be at least 0"),
        ({"lr": NAN}, "lr is nan; it must be a finite number"),
        ({"eps": -1e-8}, "eps is -1e-08"),
        ({"weight_decay": INF}, "weight_decay is inf"),
        ({"betas": (1.0, 0.9)}, "betas are 1 and 0.9; both must be at least 0 and below 1"),
        ({"betas": (0.9, NAN)}, "betas are 0.9 and nan"),
        ({"step": 0}, "step is 0; it must be at least 1"),
        ({"grad_scale": 0.0}, "grad_scale is 0; it must be finite and above 0"),
        ({"clip_coef": NAN}, "clip_coef is nan"),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"adam_step: {words}|adam_step: .*{words}"):
        call(**changes)


def test_opcheck() -> None:
    numbers = (1e-3, 0.9, 0.999, 1e-8, 0.1, 3, 2.0, 0.5, 7, 256)
    for bits, grads in itertools.product(STATE_BITS, (normal(300), normal(300).bfloat16())):
        for out in (None, torch.zeros(300, dtype=torch.bfloat16)):
            arguments = (normal(300), grads, *adam_state(torch.ones(300), bits=bits), out, *numbers)
            torch.library.opcheck(torch.ops.grpo_mc.adam_step_.default, arguments)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2000), st.floats(-30, 18), st.floats(0, 1), st.floats(0, 0.9999), st.floats(0, 0.99999),
    st.integers(1, 2**40), st.booleans(),
)  # fmt: skip
def test_random_numbers(
    n: int, exponent: float, lr: float, beta1: float, beta2: float, step: int, is_bf16: bool
) -> None:
    grads = normal(n, seed=n) * 10**exponent
    grads = grads.bfloat16() if is_bf16 else grads
    state = AdamState(normal(n, seed=1), normal(n, seed=2).square())
    ours, theirs = both(normal(n, seed=3), grads, state, lr=lr, betas=(beta1, beta2), step=step)
    assert all(map(equal, ours, theirs))
