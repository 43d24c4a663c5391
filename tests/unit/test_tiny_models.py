"""The tiny model folders are what the tests take them for."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from helpers.tiny_models import EOS_ID, VOCAB_SIZE


def test_folder_loads_in_transformers(family_model: tuple[str, Path]) -> None:
    family, folder = family_model
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == family
    with torch.no_grad():
        logits = model(torch.arange(12)[None]).logits
    assert logits.shape == (1, 12, VOCAB_SIZE)
    assert float(logits.std()) > 0.1  # far from uniform, so a wrong weight shows
    norms = [p for n, p in model.named_parameters() if p.dim() == 1]
    assert norms and all(float(p.detach().std()) > 0.01 for p in norms)


def test_tokenizer_has_one_token_a_byte(family_model: tuple[str, Path]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(family_model[1])
    assert tokenizer.encode("2 + 5 =") == list(b"2 + 5 =")
    assert tokenizer.decode(list("\u00e9".encode())) == "\u00e9"
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == EOS_ID
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert tokenizer.encode(chat)[:3] == [257, ord("u"), ord("s")]
