"""The memory estimate against hand-worked sizes, a real parameter count, and how it moves with the layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_mc.megatron.fused_adam import STATE_BITS
from grpo_mc.megatron.hf_config import ModelArchitecture
from grpo_mc.megatron.memory_estimate import RUNTIME_BYTES, Layout, estimate_memory, parameter_count
from grpo_mc.megatron.offload import CHUNK
from grpo_mc.ops import adam_state


def architecture(**changes: Any) -> ModelArchitecture:
    sizes: dict[str, Any] = {
        "family": "llama", "num_layers": 4, "hidden_size": 8, "ffn_hidden_size": 16, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 2, "vocab_size": 10, "rope_theta": 1e4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "max_positions": 64,
    }  # fmt: skip
    return ModelArchitecture(**{**sizes, **changes})


# A layer: q 8*8, k and v 8*4 each, o 8*8 = 192; three MLP matrices of 8*16 = 384; two norms of 8 = 592.
LAYER = 592


def test_parameters_by_hand() -> None:
    assert parameter_count(architecture()) == 80 + 4 * LAYER + 8
    assert parameter_count(architecture(tie_word_embeddings=False)) == 160 + 4 * LAYER + 8
    # Four experts instead of one MLP, and a router of 8*4.
    assert parameter_count(architecture(num_experts=4, experts_per_token=2)) == 80 + 4 * (LAYER + 3 * 384 + 32) + 8


def test_parameters_of_smollm2_135m() -> None:
    smollm2 = architecture(
        num_layers=30, hidden_size=576, ffn_hidden_size=1536, num_heads=9, num_kv_heads=3, head_dim=64, vocab_size=49152
    )
    assert parameter_count(smollm2) == 134_515_008


def test_static_memory_by_hand() -> None:
    estimate = estimate_memory(architecture(), Layout(has_reference=True))
    held = 80 + 4 * LAYER
    assert estimate.parameters == estimate.gradients == estimate.reference == 4 * held
    assert estimate.optimizer == 8 * held
    assert estimate.static == 20 * held + RUNTIME_BYTES


def test_bf16_halves_parameters_and_adds_master_weights() -> None:
    held = 80 + 4 * LAYER
    estimate = estimate_memory(architecture(), Layout(dtype="bf16"))
    assert (estimate.parameters, estimate.gradients, estimate.optimizer) == (2 * held, 4 * held, 12 * held)


def test_compressed_gradients_keep_what_is_left_over() -> None:
    """Of the other rank's half: 2 bytes of what is left over, and a message of 4 bits each way."""
    held = 80 + 4 * LAYER
    sizes = {
        (dp, kind): estimate_memory(architecture(), Layout(dp=dp, grad_compression=kind)).gradients
        for dp in (1, 2)
        for kind in ("none", "int4", "int8")
    }
    assert sizes[2, "none"] == sizes[1, "none"] == sizes[1, "int4"] == sizes[1, "int8"] == 4 * held
    assert sizes[2, "int4"] == 4 * held + 3 * held // 2 and sizes[2, "int8"] == 4 * held + 4 * held // 2


@pytest.mark.parametrize("states, moments", [("fp32", 8.0), ("int8", 2 + 12 / 128), ("int4", 1 + 12 / 128)])
def test_moments_in_few_bits(states: str, moments: float) -> None:
    """Two codes a parameter, and 12 bytes of scales for 128 of them; as adam_state allocates."""
    held = 80 + 4 * LAYER
    estimate = estimate_memory(architecture(), Layout(dtype="bf16", optimizer_states=states))
    assert estimate.optimizer == int((moments + 4) * held)
    state = adam_state(torch.empty(128 * 50), bits=STATE_BITS[states])
    assert sum(part.nbytes for part in state if part is not None) == moments * 128 * 50


def test_an_offloaded_optimizer_takes_two_chunks() -> None:
    large = architecture(vocab_size=1 << 21)  # 8 entries a word: more than two chunks
    small, whole = (
        estimate_memory(large, Layout(dtype="bf16", optimizer_offload=offload)) for offload in (True, False)
    )
    assert small.optimizer == 12 * 2 * CHUNK < whole.optimizer
    assert estimate_memory(architecture(), Layout(optimizer_offload=True)).optimizer == 8 * (80 + 4 * LAYER)


def test_data_parallel_ranks_share_the_optimizer_only() -> None:
    one, two = (estimate_memory(architecture(), Layout(dp=dp)) for dp in (1, 2))
    assert two.parameters == one.parameters and two.gradients == one.gradients
    assert two.optimizer == one.optimizer // 2


def test_tensor_and_pipeline_parallel_split_by_hand() -> None:
    tp = estimate_memory(architecture(), Layout(tp=2))
    assert tp.parameters == 4 * (40 + 4 * (192 // 2 + 384 // 2 + 16))
    pp = estimate_memory(architecture(), Layout(pp=2))
    assert pp.parameters == 4 * (80 + 2 * LAYER)


def test_expert_parallel_split_by_hand() -> None:
    moe = architecture(num_experts=4, experts_per_token=2)
    estimate = estimate_memory(moe, Layout(ep=2, dp=2))
    dense, experts = 80 + 4 * (192 + 16 + 32), 4 * 4 * 384 // 2
    assert estimate.parameters == 4 * (dense + experts)
    # The experts are spread over both data-parallel ranks, so nobody shares their optimizer state.
    assert estimate.optimizer == 8 * (dense // 2 + experts)


def test_activations_and_logits_by_hand() -> None:
    layout = Layout(max_tokens_per_micro_batch=100, num_prompts=2, group_size=4, max_prompt_tokens=5, max_new_tokens=3)
    estimate = estimate_memory(architecture(), layout)
    # Per token and layer: 4*8 hidden, q k v twice 2*(8+4+4), attention output 8, MLP 3*16.
    assert estimate.activations == 4 * 100 * 4 * (32 + 32 + 8 + 48)
    assert estimate.logits == 2 * 4 * 10 * (2 * 4 * 3)
    streamed = replace(layout, streamed_logprobs=True)
    assert estimate_memory(architecture(), streamed).logits == 4 * 10 * (2 * 4 * 3)
    assert estimate_memory(architecture(vocab_size=10_000), streamed).logits == 4 * 2048 * (2 * 4 * 3)
    # 8 responses of 3 tokens and 2 prompts of 5, keys and values of 2 heads of 2 in 4 layers.
    assert estimate.kv_cache == 2 * 4 * 4 * 4 * (8 * 3 + 2 * 5)
    assert estimate.decode_logits == 4 * 10 * 8


def test_recompute_keeps_a_layers_input_only() -> None:
    layout = Layout(max_tokens_per_micro_batch=100)
    full = estimate_memory(architecture(), replace(layout, recompute=True)).activations
    assert full == 4 * 100 * (4 * 8 + 120)


def test_fp8_keeps_the_inputs_of_linear_layers_as_codes() -> None:
    layout = Layout(max_tokens_per_micro_batch=128, fp8=True)
    # Both norms' outputs 2*8, attention's 8 and the MLP's product 16: 40 bytes and a float32 scale for 128 of each.
    assert estimate_memory(architecture(), layout).activations == 128 * 4 * 4 * (120 - 40) + 4 * 40 * (128 + 4)
    recompute = replace(layout, recompute=True)
    assert estimate_memory(architecture(), recompute).activations == 128 * 4 * (4 * 8 + 120 - 40) + 40 * (128 + 4)
    # With experts the second norm's output stays; of the two experts' inputs (8) and products (16) the codes are kept.
    moe, plain = architecture(num_experts=4, experts_per_token=2), replace(layout, fp8=False)
    saved = estimate_memory(moe, plain).activations - estimate_memory(moe, layout).activations
    assert saved == 4 * (128 * 4 - 128 - 4) * (8 + 8 + 2 * (8 + 16))
    assert estimate_memory(architecture(), layout).static == estimate_memory(architecture(), plain).static


def test_fewer_rows_at_once_need_less_cache() -> None:
    layout = Layout(num_prompts=8, group_size=8, max_new_tokens=100)
    all_rows = estimate_memory(architecture(), layout)
    some = estimate_memory(architecture(), replace(layout, max_batch_rows=16))
    assert some.kv_cache * 4 == all_rows.kv_cache


def test_the_peak_is_the_larger_phase_not_the_sum() -> None:
    estimate = estimate_memory(architecture(), Layout(num_prompts=4, group_size=8, max_new_tokens=1000))
    phases = (estimate.activations + estimate.logits, estimate.kv_cache + estimate.decode_logits)
    assert estimate.peak == estimate.static + max(phases)
    assert estimate.lines()[-1].startswith("peak ")


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype is 'fp8'; it must be one of fp32, bf16"):
        estimate_memory(architecture(), Layout(dtype="fp8"))
