"""A tokenizer.json folder from the vocabulary inside a GGUF file.

GGUF stores byte-level BPE as tokens, token types and merges, and names the way text is split before BPE in
`tokenizer.ggml.pre`. That split is half of the tokenizer: SmolLM's splits every digit off, and without it 'x  5'
becomes other tokens than those the model was trained on. A name that is not in the table below is refused, not guessed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTE_LEVEL_NO_SPLIT = {**_BYTE_LEVEL, "use_regex": False}
_CONTROL, _USER_DEFINED = 3, 4


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _split(digits: str) -> dict[str, Any]:
    """The split of the cl100k family; the families differ in how many digits stay together."""
    regex = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


_DIGITS = _sequence({"type": "Digits", "individual_digits": True}, _BYTE_LEVEL)
_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": _BYTE_LEVEL,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "qwen2": _sequence(_split(r"\p{N}"), _BYTE_LEVEL_NO_SPLIT),
    "llama-bpe": _sequence(_split(r"\p{N}{1,3}"), _BYTE_LEVEL_NO_SPLIT),
}


def write_tokenizer(gguf_path: Path, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja into `folder`.

    Raises:
        ValueError: not a GGUF file, or a tokenizer of a kind that is not known here.
    """
    fields = read_fields(gguf_path)
    kind, split = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in _PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer of {gguf_path}: its kind is {kind!r} with text splitting {split!r}; readable are kind 'gpt2' "
            f"with {', '.join(_PRE_TOKENIZERS)}; set model.tokenizer to a folder with the model's tokenizer.json"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    specials = {role: _token(tokens, fields.get(f"tokenizer.ggml.{key}_token_id")) for role, key in _ROLES.items()}
    ends = [end for key in ("eos", "eot") if (end := fields.get(f"tokenizer.ggml.{key}_token_id")) is not None]
    add_bos = bool(fields.get("tokenizer.ggml.add_bos_token", False))
    _write_json(folder / "tokenizer.json", _tokenizer_json(fields, tokens, specials["bos_token"] if add_bos else None))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": add_bos, **specials}
    _write_json(folder / "tokenizer_config.json", {key: value for key, value in config.items() if value is not None})
    _write_json(folder / "generation_config.json", {"eos_token_id": list(dict.fromkeys(ends))})
    if "tokenizer.chat_template" in fields:
        (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")


_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def read_fields(gguf_path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file by key: numbers, strings and lists of them.

    Raises:
        ValueError: not a GGUF file.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf_path)
    except (ValueError, IndexError, OSError) as error:
        raise ValueError(f"{gguf_path}: not a readable GGUF file ({error}); is it complete?") from error
    return {key: field.contents() for key, field in reader.fields.items() if key.startswith(("tokenizer.", "general."))}


def _token(tokens: list[str], token_id: int | None) -> str | None:
    return None if token_id is None else tokens[token_id]


def _tokenizer_json(fields: dict[str, Any], tokens: list[str], bos: str | None) -> dict[str, Any]:
    types = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    added = [
        {
            "id": index,
            "content": tokens[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, kind in enumerate(types)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    split = fields["tokenizer.ggml.pre"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if split == "qwen2" else None,
        "pre_tokenizer": _PRE_TOKENIZERS[split],
        "post_processor": None if bos is None else _prepend(bos, tokens.index(bos)),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": split == "llama-bpe",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": fields["tokenizer.ggml.merges"],
        },
    }


def _prepend(token: str, token_id: int) -> dict[str, Any]:
    """The post-processor that puts one token before the text."""
    special, first = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, first],
        "pair": [special, first, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
