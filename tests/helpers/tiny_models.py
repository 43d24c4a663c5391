"""Tiny random model folders in the Hugging Face layout, of every family that the bridge knows.

Each folder holds config.json, model.safetensors (float32) and a byte-level tokenizer with a ChatML template. Norm
weights and biases are random too: a mapping fault that swaps two of them would not show with ones and zeros. As in
SmolLM2, the padding token is the end-of-sequence token, and the model's vocabulary is larger than the tokenizer's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3", "mixtral")
VOCAB_SIZE = 264
"""Rows of the embedding: 256 bytes, 3 special tokens, 5 unused."""
EOS_ID = 258
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": EOS_ID,
}


def tiny_config(family: str, **changes: Any) -> Any:
    """The transformers config of a tiny model; `changes` replace its fields."""
    import transformers

    fields = dict(_SIZES)
    if family == "llama":
        return transformers.LlamaConfig(**fields | {"tie_word_embeddings": True} | changes)
    if family == "qwen2":  # biases on q, k, v
        return transformers.Qwen2Config(**fields | {"tie_word_embeddings": False} | changes)
    if family == "qwen3":  # norms on q and k, head_dim apart from hidden_size / num_attention_heads
        return transformers.Qwen3Config(**fields | {"tie_word_embeddings": True, "head_dim": 32} | changes)
    if family == "mixtral":
        moe = {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
        return transformers.MixtralConfig(**fields | moe | changes)
    raise ValueError(f"tiny_config: family is {family!r}, needed one of {FAMILIES}")


def build_tiny_model(folder: Path, family: str = "llama", *, seed: int = 0, **changes: Any) -> Path:
    """Writes a tiny model folder.

    Args:
        folder: where to write; made if missing.
        family: one of FAMILIES.
        seed: of the weights.
        changes: fields of the transformers config to replace, e.g. num_hidden_layers=2.

    Returns: `folder`.
    """
    import torch
    import transformers

    config = tiny_config(family, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0.0, 0.1)
                elif parameter.dim() == 1:
                    parameter.normal_(1.0, 0.1)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


def write_byte_tokenizer(folder: Path) -> None:
    """A tokenizer with one token a byte: ids 0-255 in byte order, then the three ChatML specials."""
    import tokenizers
    import transformers

    alphabet = _byte_symbols()
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={s: i for i, s in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])  # first, so that they get 256, 257, 258
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def _byte_symbols() -> list[str]:
    """GPT-2's printable stand-in for each byte, in byte order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
