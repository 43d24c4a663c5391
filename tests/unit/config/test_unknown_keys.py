"""H25: no unknown key is ever dropped; the message has the key, the section, the place and the nearest valid key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest

from grpo_mc.config import Config
from grpo_mc.config.base import Section
from grpo_mc.config.keys import section_classes

Refusal = Callable[..., str]


def test_misspelt_learning_rate(refusal: Refusal, minimal: str) -> None:
    assert refusal(minimal + "optimizer:\n  learning_rat: 1.0e-6\n") == (
        "a.yaml, line 11: unknown key 'learning_rat' in section 'optimizer'; did you mean 'lr'?"
    )


def test_trainer_key_at_the_top_level(refusal: Refusal, minimal: str) -> None:
    assert refusal(minimal + "lr: 1e-6\n") == (
        "a.yaml, line 10: unknown key 'lr' at the top level; it belongs in another section: 'optimizer.lr'"
    )
    assert refusal(minimal + "group_size: 4\n").endswith("it belongs in another section: 'rollout.group_size'")


def test_key_in_two_other_sections_names_both(refusal: Refusal, minimal: str) -> None:
    assert refusal(minimal + "max_new_tokens: 4\n").endswith(
        "it belongs in another section: 'rollout.max_new_tokens' or 'evaluation.max_new_tokens'"
    )


def test_hyphen_for_underscore(refusal: Refusal, minimal: str) -> None:
    """Only the typo is reported, not also the key that is missing because of it."""
    assert refusal(minimal.replace("steps", "num-steps")) == (
        "a.yaml, line 6: unknown key 'num-steps' in section 'run'; did you mean 'steps'?"
    )
    assert refusal(minimal + "rollout: {group-size: 4}\n").endswith("did you mean 'group_size'?")


def test_key_of_another_section(refusal: Refusal, minimal: str) -> None:
    assert refusal(minimal + "rollout: {beta: 0.1}\n").endswith("it belongs in another section: 'algorithm.beta'")


def test_nothing_near_lists_the_valid_keys(refusal: Refusal, minimal: str) -> None:
    message = refusal(minimal + "inference: {zzzzzz: 1}\n")
    assert message == "a.yaml, line 10: unknown key 'zzzzzz' in section 'inference'; valid keys: max_tokens_per_batch"


def test_misspelt_section(refusal: Refusal, minimal: str) -> None:
    assert refusal(minimal + "optimiser: {lr: 1}\n").endswith("at the top level; did you mean 'optimizer'?")


def test_keys_inside_sources_and_rewards(refusal: Refusal, minimal: str) -> None:
    assert refusal(minimal.replace("size: 10", "siz: 10")) == (
        "a.yaml, line 3: unknown key 'siz' in section 'data.train'; did you mean 'size'?"
    )
    assert refusal(minimal + "      wieght: 2\n") == (
        "a.yaml, line 10: unknown key 'wieght' in section 'rewards.functions.0'; did you mean 'weight'?"
    )
    # A key of another kind of source is unknown to this one.
    assert "unknown key 'path' in section 'data.train'" in refusal(minimal.replace("size: 10", "path: x"))


def test_every_unknown_key_is_reported_at_once(refusal: Refusal, minimal: str) -> None:
    message = refusal(minimal + "optimizer: {lrr: 1}\nrollout: {topk: 1, temperature: hot}\n")
    assert [line.split(":")[0] for line in message.split("\n")] == ["a.yaml, line 10"] + ["a.yaml, line 11"] * 2
    assert "temperature is 'hot'" in message


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("optimizer.learning_rat=1e-6", "unknown key 'learning_rat' in section 'optimizer'; did you mean 'lr'?"),
        ("run.num-steps=4", "unknown key 'num-steps' in section 'run'; did you mean 'steps'?"),
        ("optimiser.lr=1", "unknown key 'optimiser' at the top level; did you mean 'optimizer'?"),
        ("lr=1", "'lr' is no section, it belongs in another section: 'optimizer.lr'"),
        ("rewards.functions.0.wieght=2", "in section 'rewards.functions.0'; did you mean 'weight'?"),
        ("optimizer.lr", "needs section.key=value"),
        ("optimizer..lr=1", "needs section.key=value"),
        ("=1", "needs section.key=value"),
        ("optimizer.lr.x=1", "optimizer.lr is 1e-06 and has no key 'x'"),
        ("rewards.functions.1.weight=2", "rewards.functions is a list of 1; name an item by its position from 0"),
        ("rewards.functions.first.weight=2", "rewards.functions is a list of 1; name an item by its position from 0"),
    ],
)
def test_typos_on_the_command_line(refusal: Refusal, minimal: str, override: str, part: str) -> None:
    message = refusal(minimal + "optimizer: {lr: 1e-6}\n", [override])
    assert message.startswith(f"command line, {override}: ") and part in message


def all_sections(section: type[Section] = Config) -> Iterator[type[Section]]:
    yield section
    for field in section.model_fields.values():
        for inner in section_classes(field.annotation):
            yield from all_sections(inner)


def literal_values(annotation: Any) -> set[Any]:
    return set(get_args(annotation))


@pytest.mark.parametrize("section", list(dict.fromkeys(all_sections())), ids=str)
def test_every_section_is_strict_and_every_field_described(section: type[Section]) -> None:
    config = section.model_config
    assert config.get("frozen") and config.get("extra") == "forbid" and config.get("strict")
    for name, field in section.model_fields.items():
        assert field.description, f"{section.__name__}.{name} needs a docstring under it"
        # The tags that pydantic puts into an error's location must not look like keys.
        for tag in ("kind", "type"):
            if tag in section.model_fields:
                assert name not in literal_values(section.model_fields[tag].annotation)
