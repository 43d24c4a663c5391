"""Calls every operator once on the GPU at small, uneven sizes: what compute-sanitizer watches (tools/gpu_check.sh)."""

from __future__ import annotations

import torch

from grpo_mc import ops

ROWS, WIDTH = 37, 300


def policy_losses(logprobs: torch.Tensor, advantages: torch.Tensor) -> None:
    """Every kind, with means per sequence and per group, in float32 and float64."""
    mask = torch.ones(ROWS, dtype=torch.bool, device="cuda")
    sequences = {
        "cu_seqlens": torch.tensor([0, 5, 5, 30, ROWS], device="cuda"),
        "sequence_groups": torch.tensor([3, 3, 7, 7], device="cuda"),
    }
    for kind in ("clip", "gspo", "gspo_token", "cispo", "reinforce"):
        for aggregation in ("token_mean", "sequence_mean_token_mean", "group_mean"):
            for values in (logprobs, logprobs.double()):
                leaf = values.clone().requires_grad_()
                ops.policy_loss(
                    leaf, values, advantages, mask, kind=kind, clip_low=0.2, clip_high=0.2, kl="k3", beta=0.1,
                    ref_logprobs=values, aggregation=aggregation, denominator=float(ROWS), **sequences,
                ).loss.backward()  # fmt: skip


def decoding(x: torch.Tensor) -> None:
    """Products of one to many rows; attention with every number of query heads a kernel is made for, both dtypes."""
    for rows in (1, 2, 3, 5, 9, ROWS):
        ops.row_linear(x[:rows], x)
    ops.row_linear(x[:, 1:], x[:, :-1])  # rows that begin in the middle of sixteen bytes
    cache, tables = torch.randn(80, 16, 2, 32, device="cuda"), torch.arange(80, device="cuda").view(2, 40).int()
    lengths = torch.tensor([5, 600], device="cuda").int()
    for group in (1, 2, 4, 11):
        query = torch.randn(2, 2 * group, 32, device="cuda")
        for values in (cache, cache.bfloat16()):
            ops.paged_attention(query.to(values.dtype), values, values, tables, lengths, scale=0.2)


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, device="cuda")
    ops.rms_norm(x, torch.rand(WIDTH, device="cuda"), 1e-5)
    targets = torch.randint(WIDTH, (ROWS,), device="cuda")
    logits = x.clone().requires_grad_()
    logprobs, entropy = ops.token_logprobs(logits, targets, with_entropy=True)
    (logprobs.sum() + entropy.sum()).backward()
    hidden, weight = torch.randn(ROWS, 64, device="cuda"), torch.randn(WIDTH, 64, device="cuda")
    logprobs, entropy = ops.linear_logprobs(
        hidden.requires_grad_(), weight.requires_grad_(), targets, with_entropy=True
    )
    (logprobs + entropy).sum().backward()
    ops.linear_logprob_stats(hidden, weight, targets, vocab_start=0, vocab_size=WIDTH - 7, temperature=0.5)
    groups = torch.arange(ROWS, device="cuda") // 4
    advantages = ops.group_advantages(x[:, 0], groups, baseline="mean", scale="std", ddof=0, eps=1e-4)
    for scale in ("std", "leave_one_out_std", "batch_std", "none"):
        ops.group_advantages(x[:, 0].double(), groups, scale=scale, valid=groups > 2)
    policy_losses(logprobs.detach(), advantages)
    decoding(x)
    for tile in ((1, 128), (128, 1), (128, 128)):
        ops.dequantize_fp8(*ops.quantize_fp8(x, tile=tile), tile=tile)
    experts = torch.tensor([1, 1, 20, ROWS - 1], device="cuda")
    codes, scale = ops.quantize_fp8(x, tile=(128, 1), offsets=experts)
    ops.dequantize_fp8(codes, scale, tile=(128, 1), offsets=experts)
    codes, scale = ops.quantize_fp8(x)
    ops.fp8_gemm(codes, scale, codes, scale, out_dtype=torch.bfloat16)
    b, b_scale = ops.quantize_fp8(torch.randn(130, WIDTH, device="cuda"), tile=(128, 128))
    offsets = torch.tensor([0, 0, 20, ROWS], device="cuda")
    ops.fp8_grouped_gemm(
        codes,
        scale,
        torch.stack([b.view(torch.uint8)] * 3).view(b.dtype),
        torch.stack([b_scale] * 3),
        offsets,
        out_dtype=torch.float32,
    )
    for rows in (ROWS, 3 * ROWS):  # few and many: two kernels each
        tokens = torch.randn(rows, WIDTH, device="cuda")
        bounds = torch.tensor([0, 0, 20, rows], device="cuda")
        for tile in ((1, 128), (128, 128)):
            weight, weight_scale = ops.quantize_fp8(torch.randn(130, WIDTH, device="cuda"), tile=tile)
            ops.fp8_gemm(*ops.quantize_fp8(tokens), weight, weight_scale)
            turned = [each.t().contiguous().t() for each in (weight, weight_scale)]
            ops.fp8_gemm(*ops.quantize_fp8(tokens), *turned)
        quantized = ops.quantize_fp8(tokens, tile=(128, 1), offsets=bounds)
        ops.fp8_grouped_wgrad(*quantized, *quantized, bounds)
    expert_ids, probs = ops.moe_route(x[:, :8].contiguous(), top_k=2)
    rows, _, row_map, _ = ops.moe_permute(x.requires_grad_(), expert_ids, probs, num_experts=8)
    ops.moe_unpermute(rows, row_map, probs).sum().backward()
    many = torch.randint(-1, 40, (5000, 2), device="cuda")  # in chunks over several blocks
    ops.moe_permute(torch.ones(5000, 8, device="cuda").bfloat16(), many, many.float(), num_experts=40, align=16)
    error = ops.int4_error(x)
    for rounding in ("nearest", "stochastic"):
        codes, scale = ops.quantize_int4(x, rounding=rounding, hadamard=True, error=error)
        ops.dequantize_int4(codes, scale, shape=x.shape, hadamard=True)
        codes, scale = ops.quantize_int8(x, rounding=rounding, hadamard=True, error=error)
        ops.dequantize_int8(codes, scale, shape=x.shape, hadamard=True)
    codes, scale = ops.quantize_int4(x, block=512)  # a block of codes for each CUDA block
    ops.dequantize_int4(codes, scale, shape=x.shape)
    for bits in (32, 8, 4):
        for grads in (x.detach(), x.detach().bfloat16()):
            params = x.detach().clone()
            ops.adam_step(params, grads, ops.adam_state(params, bits=bits), lr=0.1, step=1, out_bf16=params.bfloat16())
    torch.cuda.synchronize()
    print("every kernel ran once")


if __name__ == "__main__":
    main()
