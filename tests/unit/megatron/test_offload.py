"""Adam over chunks of states in host memory: the same bits as in one piece, at every edge of a chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_mc.config.training import OptimizerConfig
from grpo_mc.megatron.fused_adam import FusedAdam
from grpo_mc.megatron.offload import ChunkedAdam, chunks
from grpo_mc.ops import AdamState, adam_state, adam_step

CPU = torch.device("cpu")
CHUNK = 256


def normal(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def parts(state: AdamState) -> list[Tensor]:
    return [tensor for tensor in state if tensor is not None]


@pytest.mark.parametrize("with_params", (True, False))
@pytest.mark.parametrize("bits", (32, 8, 4))
@pytest.mark.parametrize("n", (0, 1, 127, 128, 255, 256, 257, 511, 512, 513, 700, 1300))
def test_chunks_change_nothing(n: int, bits: int, with_params: bool) -> None:
    chunked, whole, pieces = ChunkedAdam(CPU, CHUNK), normal(n), normal(n)
    states = [adam_state(whole, bits=bits) for _ in range(2)]
    copies = [torch.zeros(n, dtype=torch.bfloat16) for _ in range(2)]
    for step in range(1, 4):
        numbers: dict[str, Any] = {"lr": 0.1 / step, "step": step, "weight_decay": 0.1, "seed": 3, "offset": 1280}
        adam_step(whole, normal(n, step), states[0], out_bf16=copies[0], **numbers)
        chunked.step(pieces, normal(n, step), states[1], copies[1], with_params=with_params, **numbers)
    assert torch.equal(whole, pieces) and torch.equal(*copies)
    assert all(map(torch.equal, parts(states[0]), parts(states[1])))


def test_buffers_are_two_chunks_at_most() -> None:
    """Whatever is stepped through them: 2 x 256 entries of parameters and moments."""
    chunked = ChunkedAdam(CPU, CHUNK)
    for n in (100, 5000, 300):
        chunked.step(normal(n), normal(n), adam_state(normal(n)), None, with_params=True, lr=0.1, step=1)
    held = [buffer for slot in chunked._slots for buffer in slot.values()]
    assert len(held) == 6 and sum(buffer.numel() for buffer in held) == 6 * CHUNK


def test_ranges() -> None:
    assert list(chunks(0, 128)) == []
    assert list(chunks(300, 128)) == [slice(0, 128), slice(128, 256), slice(256, 300)]
    for bad in (0, -128, 100):
        with pytest.raises(ValueError, match=f"offload: chunk is {bad}; it must be a multiple of 128"):
            ChunkedAdam(CPU, bad)


@pytest.mark.parametrize("bits", (32, 4))
def test_the_optimizer_with_main_weights_in_host_memory(bits: int) -> None:
    """Two groups of parameters, one with a bfloat16 copy whose main weights are sent away."""
    ends = []
    for chunked in (None, ChunkedAdam(CPU, CHUNK)):
        main, plain, copy = normal(1000), normal(333, 1), torch.zeros(1000, dtype=torch.bfloat16)
        numbers: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8}
        groups = [
            {"params": [main], "weight_decay": 0.1, **numbers},
            {"params": [plain], "weight_decay": 0.0, **numbers},
        ]
        adam = FusedAdam(groups, bits=bits, seed=5, copies={main: copy}, chunked=chunked)
        if chunked is not None:
            adam.send_to_host(main)
            assert main.shape == (1000,) and main.untyped_storage().nbytes() == 4
        for step in range(4):
            main.grad, plain.grad = normal(1000, 10 + step), normal(333, 20 + step)
            adam.clip_coef = 0.5
            adam.step()
        kept = adam.state[main].pop("param", main)
        ends.append([kept, plain, copy, *adam.state[main].values(), *adam.state[plain].values()])
        assert adam.param_groups[0]["step"] == 4 and torch.equal(copy, kept.bfloat16())
    assert len(ends[0]) == len(ends[1]) and all(map(torch.equal, *ends))


def test_offload_needs_the_fused_step() -> None:
    with pytest.raises(ValueError, match="offload is true but kind is 'adamw'; set kind: fused_adamw"):
        OptimizerConfig(offload=True)
