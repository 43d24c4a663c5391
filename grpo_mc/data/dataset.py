"""The prompts of a source, tokenized and ready to draw from.

Prompts that are too long, and problems that stand in an excluded file (the held-out ones), are left out, counted and
logged. A problem is known again by its normalised text as well as by its whole prompt, so that another template around
the same problem does not bring it back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from grpo_mc.config import Config
from grpo_mc.config.data import ReasoningGymSource, Source
from grpo_mc.data.records import Prompt
from grpo_mc.data.schemas import (
    normalize,
    other_fields,
    problem_keys,
    read_data_source,
    read_ground_truth,
    read_problem,
)
from grpo_mc.data.source_jsonl import read_jsonl
from grpo_mc.data.sources import Record, read_records, source_name
from grpo_mc.data.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


class PromptDataset:
    """A list of prompts."""

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        *,
        exclude: Sequence[str] = (),
        max_prompt_tokens: int | None = None,
        limit_note: str = "",
    ) -> None:
        """Reads and tokenizes the whole source.

        Args:
            source: where the records come from, and the template for them.
            tokenizer: gives the token ids.
            exclude: JSON Lines files with problems that must not be drawn.
            max_prompt_tokens: longer prompts are left out; None = any length.
            limit_note: where that limit comes from, for the messages.

        Raises:
            ValueError: a source or record that cannot be used, or no prompt left.
        """
        excluded = _excluded_keys(exclude)
        records = read_records(source)
        self.num_read: int = len(records)
        """Records of the source."""
        self.num_excluded: int = 0
        """Left out because the problem stands in an excluded file."""
        self.num_too_long: int = 0
        """Left out because of their length."""
        self._prompts: list[Prompt] = []
        name = source.task if isinstance(source, ReasoningGymSource) else Path(source.path).stem
        for record in records:
            prompt = make_prompt(record, source, tokenizer, name)
            if excluded and not excluded.isdisjoint(problem_keys(record) | {normalize(prompt.text)}):
                self.num_excluded += 1
            elif max_prompt_tokens is not None and len(prompt.token_ids) > max_prompt_tokens:
                self.num_too_long += 1
            else:
                self._prompts.append(prompt)
        counts = (
            f"{self.num_read} records read, {self.num_excluded} left out as excluded problems, {self.num_too_long} as "
            f"longer than {max_prompt_tokens} tokens{limit_note}, {len(self._prompts)} kept"
        )
        if not self._prompts:
            raise ValueError(f"{source_name(source)}: no prompt is left: {counts}; give other data or a higher limit")
        _log.info("%s: %s", source_name(source), counts)
        self._warn_of_own_system_messages(source)

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]

    def _warn_of_own_system_messages(self, source: Source) -> None:
        own = sum(p.messages is not None and p.messages[0]["content"] != source.system_prompt for p in self._prompts)
        if source.system_prompt is not None and own:
            _log.warning(
                "%s: %d of %d prompts bring their own system message, which stays; system_prompt is not used for them",
                source_name(source),
                own,
                len(self._prompts),
            )


def room_for_prompt(positions: int, max_new_tokens: int, setting: str) -> int:
    """The most tokens of a prompt that leaves `max_new_tokens` of the model's positions for the response.

    Args:
        setting: which setting max_new_tokens is, for the message.

    Raises:
        ValueError: there is no room for a prompt.
    """
    if max_new_tokens >= positions:
        raise ValueError(
            f"{setting} is {max_new_tokens} but the model has {positions} positions for a prompt and its response"
            f" together; lower {setting} to {positions - 1} or less, by as much as the prompts need"
        )
    return positions - max_new_tokens


def training_prompts(config: Config, tokenizer: Tokenizer, positions: int) -> PromptDataset:
    """The prompts of data.train. Those that are longer than data.max_prompt_tokens, or that leave too few of the
    model's positions for rollout.max_new_tokens, are left out and counted.

    Args:
        positions: the model's.

    Raises:
        ValueError: as PromptDataset; or rollout.max_new_tokens leaves no room for any prompt.
    """
    data = config.data
    assert data.train is not None, "check_trainable has seen to it"
    room = room_for_prompt(positions, config.rollout.max_new_tokens, "rollout.max_new_tokens")
    note = ""
    if room < data.max_prompt_tokens:
        note = f" (the model's {positions} positions less rollout.max_new_tokens {config.rollout.max_new_tokens})"
    limit = min(data.max_prompt_tokens, room)
    return PromptDataset(data.train, tokenizer, exclude=data.exclude, max_prompt_tokens=limit, limit_note=note)


def held_out_prompts(config: Config, tokenizer: Tokenizer, positions: int) -> PromptDataset:
    """The prompts of evaluation.source, all of them: an accuracy over fewer would be another figure.

    Args:
        positions: the model's.

    Raises:
        ValueError: as PromptDataset; or prompts leave too few of the model's positions for a response.
    """
    source, own = config.evaluation.source, config.evaluation.max_new_tokens
    assert source is not None, "the caller has seen to it"
    setting = "rollout.max_new_tokens" if own is None else "evaluation.max_new_tokens"
    max_new_tokens = own or config.rollout.max_new_tokens
    room = room_for_prompt(positions, max_new_tokens, setting)
    dataset = PromptDataset(source, tokenizer)
    num_too_long = sum(len(dataset[at].token_ids) > room for at in range(len(dataset)))
    if num_too_long:
        raise ValueError(
            f"evaluation.source: {num_too_long} of {len(dataset)} held-out prompts are longer than the"
            f" {room} tokens that {setting} {max_new_tokens} leaves of the model's {positions} positions; lower"
            " evaluation.max_new_tokens or take these prompts out of the source"
        )
    return dataset


def make_prompt(record: Record, source: Source, tokenizer: Tokenizer, name: str) -> Prompt:
    """One record as a Prompt; `name` is the first half of its id.

    Raises:
        ValueError: a field that is missing or of the wrong type, or a prompt without tokens; names place and field.
    """
    problem = read_problem(record, source)
    text = tokenizer.render_chat(problem.messages) if problem.messages is not None else problem.text
    assert text is not None
    token_ids = tokenizer.encode(text)
    if not len(token_ids):
        raise ValueError(f"{record.where}: the prompt {text!r} has no tokens; nothing can be sampled after it")
    return Prompt(
        prompt_id=f"{name}:{record.row}",
        token_ids=token_ids,
        text=text,
        messages=problem.messages,
        ground_truth=read_ground_truth(record),
        data_source=read_data_source(record, name),
        fields=other_fields(record),
    )


def _excluded_keys(paths: Sequence[str]) -> set[str]:
    """The keys of all problems in the files.

    Raises:
        ValueError: an empty file, or a row by which no problem can be known again: passing over it would train on it.
    """
    keys: set[str] = set()
    for path in paths:
        of_file: set[str] = set()
        for record in read_jsonl(path):
            found = problem_keys(record)
            if not found:
                raise record.error("prompt", "nothing to exclude by; prompt, question, problem or expression is needed")
            of_file |= found
        if not of_file:
            raise ValueError(f"{path}: there is no problem to exclude in it; correct data.exclude")
        keys |= of_file
    return keys
