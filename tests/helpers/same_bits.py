"""Operators whose results have the same bits on every device: casts, codes, random rounding, moving rows, Adam."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from grpo_mc import ops


def tricky(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Numbers of many sizes, a stretch of zeros, a NaN, infinities, numbers below the normal ones."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=draw) * 10.0 ** torch.randint(-6, 7, (rows, 1), generator=draw)
    x[0] = 0
    x[1, 3 % columns], x[2, columns // 2], x[3, -1] = torch.nan, torch.inf, -torch.inf
    x[4] *= 1e-40
    x[5] = x[5].sign() * torch.finfo(torch.bfloat16).max
    return x.to(dtype)


def quantised(device: str) -> dict[str, list[Tensor]]:
    """FP8, 8- and 4-bit codes, scales, error states and what they decode to, on the CPU."""
    found: dict[str, list[Tensor]] = {}
    for dtype, columns in itertools.product((torch.float32, torch.bfloat16), (300, 512)):
        x = tricky(133, columns, dtype).to(device)
        for tile, power_of_two in itertools.product(((1, 128), (128, 1), (128, 128)), (False, True)):
            codes, scale = ops.quantize_fp8(x, tile=tile, power_of_two=power_of_two)
            back = ops.dequantize_fp8(codes, scale, tile=tile, dtype=dtype)
            found[f"fp8 {dtype} {columns} {tile} {power_of_two}"] = [codes.view(torch.uint8), scale, back]
        offsets = torch.tensor([1, 1, 60, 60, 100, 131], device=device)
        codes, scale = ops.quantize_fp8(x, tile=(128, 1), offsets=offsets)
        back = ops.dequantize_fp8(codes, scale, tile=(128, 1), offsets=offsets)
        found[f"fp8 of experts {dtype} {columns}"] = [codes.view(torch.uint8), scale, back]
        for block, hadamard, rounding in itertools.product(
            (32, 96, 128, 544), (False, True), ("nearest", "stochastic")
        ):
            for quantize, dequantize in (
                (ops.quantize_int4, ops.dequantize_int4),
                (ops.quantize_int8, ops.dequantize_int8),
            ):
                error = ops.int4_error(x, block=block)
                kept: list[Tensor] = []
                for offset in (0, 10**11 + 1):
                    codes, scale = quantize(
                        x, block=block, hadamard=hadamard, rounding=rounding, error=error, seed=7, offset=offset
                    )
                    kept += [codes, scale, error.codes.clone(), error.scale.clone()]
                total = torch.ones_like(x)
                dequantize(codes, scale, shape=x.shape, hadamard=hadamard, add_to=total)
                found[f"{quantize.__name__} {dtype} {columns} {block} {hadamard} {rounding}"] = [*kept, total]
    return {name: [tensor.cpu() for tensor in tensors] for name, tensors in found.items()}


def moved(device: str) -> dict[str, list[Tensor]]:
    """Tokens to their experts' rows, back, and the gradients of the rows, on the CPU."""
    found: dict[str, list[Tensor]] = {}
    for dtype, columns in itertools.product((torch.float32, torch.bfloat16), (37, 1040)):
        draw = torch.Generator().manual_seed(columns)
        x = torch.randn(80, columns, generator=draw).to(device, dtype).requires_grad_()
        expert_ids = torch.randint(-1, 6, (80, 5), generator=draw).to(device)
        probs = torch.rand(80, 5, generator=draw).to(device)
        rows, row_probs, row_map, offsets = ops.moe_permute(x, expert_ids, probs, num_experts=6, capacity=60, align=16)
        total = ops.moe_unpermute(rows, row_map, probs)
        total.backward(torch.randn(80, columns, generator=draw).to(device, dtype))
        assert x.grad is not None
        found[f"moe {dtype} {columns}"] = [rows.detach(), row_probs, row_map, offsets, total.detach(), x.grad]
    return {name: [tensor.cpu() for tensor in tensors] for name, tensors in found.items()}


def optimised(device: str) -> dict[str, list[Tensor]]:
    """Parameters, their copies and states of three Adam steps, on the CPU."""
    found: dict[str, list[Tensor]] = {}
    for bits, dtype, columns in itertools.product((32, 8, 4), (torch.float32, torch.bfloat16), (300, 512)):
        draw = torch.Generator().manual_seed(bits)
        params = torch.randn(133, columns, generator=draw).to(device)
        state, copy = ops.adam_state(params, bits=bits), torch.empty_like(params, dtype=torch.bfloat16)
        grads = tricky(133, columns, dtype).to(device)
        for step in (1, 2, 3):
            ops.adam_step(
                params, grads, state, lr=0.01, step=step, weight_decay=0.1, grad_scale=3.0, clip_coef=0.7,
                out_bf16=copy, seed=5, offset=2**33,
            )  # fmt: skip
            grads = grads.flip(0) * 0.5
        kept = [x for x in state if x is not None]
        found[f"adam_step {bits} {dtype} {columns}"] = [params, copy, *kept]
    return {name: [tensor.cpu() for tensor in tensors] for name, tensors in found.items()}


def assert_same_bits(got: dict[str, list[Tensor]], want: dict[str, list[Tensor]]) -> None:
    """Names the first call with another bit; a NaN is a NaN, whatever its payload."""
    assert got.keys() == want.keys()
    for name, tensors in got.items():
        for index, (one, two) in enumerate(zip(tensors, want[name], strict=True)):
            assert one.dtype == two.dtype and one.shape == two.shape, f"{name}: result {index}"
            bits = {2: torch.int16, 4: torch.int32}.get(one.element_size())
            if one.is_floating_point():
                assert bits is not None and torch.equal(one.isnan(), two.isnan()), f"{name}: result {index}, NaNs"
                one, two = (x.masked_fill(x.isnan(), 0).view(bits) for x in (one, two))
            assert torch.equal(one, two), f"{name}: result {index}, {int((one != two).sum())} entries differ"
