"""The tokenizer: text and chats to token ids, and back.

It reads tokenizer.json with the `tokenizers` library and never through a class that the folder names: those classes
rebuild the text splitting and lose steps of it (SmolLM's digit splitting), and some run code from the folder.

The beginning-of-sequence token (BOS) has one rule, for raw text and chats alike: if the tokenizer asks for one or the
text starts with one, the ids start with exactly one. What this module encodes is what the engine samples from and what
the trainer trains on; nothing encodes a prompt twice.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from grpo_mc.data.cache import cache_root, cached_folder, file_key, package_gguf
from grpo_mc.data.gguf_vocabulary import write_tokenizer
from grpo_mc.data.records import TokenIds
from grpo_mc.data.strict_json import parse_json
from grpo_mc.data.text import find_surrogate

_SAVED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_VERSION = "v1"
"""Part of the cache key; rises when write_tokenizer writes something else."""


class Tokenizer:
    """A tokenizer.json folder, ready to use. Make one with `load_tokenizer`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
        self._backend = _read_backend(folder, self._config)
        self._specials = {
            role: text for role in _SPECIAL_ROLES if (text := _special_text(self._config.get(role))) is not None
        }
        added = self._backend.encode("", add_special_tokens=True).ids
        self.bos_id: int | None = self._special_id("bos_token")
        """The BOS token, None if the tokenizer has none."""
        if self.bos_id is None and len(added) == 1 and added[0] != self._special_id("eos_token"):
            self.bos_id = added[0]  # not named in the config, but put before every text
        asked = self._config.get("add_bos_token")
        self.adds_bos: bool = self.bos_id is not None and (asked if isinstance(asked, bool) else self.bos_id in added)
        """Whether the tokenizer asks for BOS before every text."""
        self.eos_ids: tuple[int, ...] = self._end_ids()
        """The tokens that end a response; may be empty."""
        pad = self._special_id("pad_token")
        self.pad_id: int = pad if pad is not None else (*self.eos_ids, 0)[0]
        """A legal id to fill up with. Often equal to an end token: never tell padding by it."""
        self.vocab_size: int = 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        """The largest id plus 1."""
        self.chat_template: str | None = _read_chat_template(folder, self._config)
        """The Jinja template of chats, None if the folder has none."""

    def encode(self, text: str) -> TokenIds:
        """[P] int64: the ids of a raw prompt or a rendered chat, with BOS by the rule of this module.

        No end-of-sequence token is added, and nothing is cut or padded. Special tokens written out in the text count as
        themselves.

        Raises:
            ValueError: a text that UTF-8 cannot hold.
        """
        at = find_surrogate(text)
        if at is not None:
            raise ValueError(
                f"tokenizer: character {at} of the text is {text[at]!r}, half of a surrogate pair, which UTF-8 cannot "
                f"hold: {text[max(0, at - 20) : at + 20]!r}; remove it or write the whole character"
            )
        ids = self._backend.encode(text, add_special_tokens=False).ids
        leading = 0
        while leading < len(ids) and ids[leading] == self.bos_id:
            leading += 1
        # a template may write BOS and the tokenizer ask for it too: one is kept
        prefix = [self.bos_id] if self.bos_id is not None and (leading or self.adds_bos) else []
        return np.array(prefix + ids[leading:], np.int64)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a chat by the folder's template, up to where the assistant's turn begins.

        A chat that ends with an assistant message is left open there, for the model to continue it.

        Raises:
            ValueError: no template, no message, or a chat that the template refuses.
        """
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        if self.chat_template is None:
            raise ValueError(
                f"chat prompt: the tokenizer in {self.folder} has no chat template; add chat_template.jinja there, or "
                "give the source a template and chat: false"
            )
        if not messages:
            raise ValueError("chat prompt: the list of messages is empty; give at least one message")
        is_open = messages[-1]["role"] == "assistant"
        try:
            rendered, _ = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                chat_template=self.chat_template,
                add_generation_prompt=not is_open,
                continue_final_message=is_open,
                **self._specials,
            )
        except (TemplateError, ValueError, TypeError) as error:
            roles = [message["role"] for message in messages]
            raise ValueError(
                f"chat prompt: the chat template of {self.folder} refuses messages with roles {roles}: {error}"
            ) from error
        return str(rendered[0])

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> TokenIds:
        """[P] int64: `encode(render_chat(messages))`."""
        return self.encode(self.render_chat(messages))

    def decode(self, token_ids: Sequence[int] | TokenIds, *, skip_special_tokens: bool = False) -> str:
        """The text of ids, unchanged by any clean-up of spaces. Bytes that are no whole character become U+FFFD."""
        ids = [int(token_id) for token_id in token_ids]
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def save(self, folder: Path) -> None:
        """Writes the tokenizer's files into an existing folder, as they were read."""
        for name in _SAVED:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, folder / name)

    def _special_id(self, role: str) -> int | None:
        text = self._specials.get(role)
        return None if text is None else self._backend.token_to_id(text)

    def _end_ids(self) -> tuple[int, ...]:
        """From the tokenizer, then from the generation and model configs; several are legal (Llama 3 has three)."""
        found: list[Any] = [self._special_id("eos_token")]
        for name in ("generation_config.json", "config.json"):
            ends = _read_json(self.folder / name).get("eos_token_id")
            found += ends if isinstance(ends, list) else [ends]
        return tuple(dict.fromkeys(end for end in found if isinstance(end, int)))


def load_tokenizer(path: str | Path, cache_dir: str | None = None) -> Tokenizer:
    """Loads a tokenizer.

    Args:
        path: a folder with tokenizer.json (and tokenizer_config.json, chat_template.jinja); a .gguf file; or
            "package:NAME" for the .gguf file that an installed package carries.
        cache_dir: where the tokenizer of a .gguf file is kept once converted (`grpo_mc.data.cache.cache_root`).

    Raises:
        ValueError: nothing there, a broken file, or a tokenizer of a kind that is not known.
    """
    name = str(path)
    source = package_gguf(name.removeprefix("package:")) if name.startswith("package:") else Path(path)
    if source.is_file() and source.suffix == ".gguf":
        target = cache_root(cache_dir) / "tokenizers" / f"{file_key(source)}-{_VERSION}"
        source = cached_folder(target, lambda folder: write_tokenizer(source, folder))
    if not (source / "tokenizer.json").is_file():
        raise ValueError(
            f"tokenizer {name}: {source / 'tokenizer.json'} does not exist; give a folder with tokenizer.json, "
            'a .gguf file or "package:NAME"'
        )
    return Tokenizer(source)


def check_fits(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuses a tokenizer with ids that the model has no embedding for.

    Args:
        tokenizer: the tokenizer.
        vocab_size: the model's vocabulary, without padding columns.

    Raises:
        ValueError: an id at or past `vocab_size`.
    """
    largest = max(tokenizer.vocab_size - 1, tokenizer.pad_id, *tokenizer.eos_ids)
    if largest >= vocab_size:
        raise ValueError(
            f"tokenizer {tokenizer.folder}: its largest token id is {largest}, but the model has {vocab_size} "
            f"(ids 0 to {vocab_size - 1}); set model.tokenizer to the tokenizer that this model was trained with"
        )


_SPECIAL_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


def _special_text(value: Any) -> str | None:
    """A special token is written as a string or as an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is no file."""
    if not path.is_file():
        return {}
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); restore the file") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a {type(value).__name__}, an object is needed; restore the file")
    return value


def _read_backend(folder: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for a file it cannot read
        raise ValueError(f"tokenizer {path}: not a readable tokenizer.json ({error}); restore the file") from error
    # some folders ship with these switched on; a prompt is refused when too long, never cut
    backend.no_truncation()
    backend.no_padding()
    for token_id, entry in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        content = entry["content"]
        if backend.token_to_id(content) is None:
            names = ("single_word", "lstrip", "rstrip", "normalized", "special")
            options = {name: entry[name] for name in names if name in entry}
            backend.add_tokens([tokenizers.AddedToken(content, **options)])
        if backend.token_to_id(content) != int(token_id):
            raise ValueError(
                f"tokenizer {folder}: tokenizer_config.json gives {content!r} the id {token_id}, tokenizer.json "
                f"{backend.token_to_id(content)}; the two files do not belong together"
            )
    return backend


def _read_chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None
