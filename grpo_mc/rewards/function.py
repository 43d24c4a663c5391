"""A function of yours, by import path, in TRL's or verl's signature.

Options: path ("package.module:name" or "file.py:name"), signature, options (further keyword arguments).

trl   fn(prompts, completions, **columns) -> list of float or None
      Called with one response at a time: every argument is a list of length 1. Columns are the record's other columns,
      with ground_truth, data_source and completion_ids. A conversational record gives `prompts` and `completions` as
      message lists, as TRL does. None abstains. A function without **kwargs gets only the columns that it names.
verl  fn(data_source, solution_str, ground_truth, extra_info) -> float, or dict with "score"
      extra_info is the record's extra_info column, or all its other columns when it has none.

Each call runs in a worker process under rewards.timeout_s. A call that raises gives "crashed"; NaN, infinity, a
string, a bool or the wrong number of values gives "bad output"; neither counts as a score.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from grpo_mc.rewards.sample import PromptView, Sample, Scorer


def build(options: Any) -> Scorer:
    """The scorer for a FunctionReward.

    Raises:
        ValueError: the module, file or function does not exist, or an import inside it fails.
    """
    function = load_function(options.path)
    call = _call_trl if options.signature == "trl" else _call_verl
    extra = dict(options.options)
    accepted = _accepted_names(function)

    def score(sample: Sample) -> tuple[object, str]:
        return call(function, sample, extra, accepted)

    return score


def load_function(path: str) -> Callable[..., Any]:
    """The function that "package.module:name" or "file.py:name" names.

    Raises:
        ValueError: it cannot be found; the message says what is missing.
    """
    where, _, name = path.rpartition(":")
    operation = f"reward function {path!r}"
    module = _load_file(where, operation) if where.endswith(".py") else _load_module(where, operation)
    function = getattr(module, name, None)
    if function is None:
        raise ValueError(f"{operation}: {where} has no {name!r}; correct the name after the colon")
    if not callable(function):
        raise ValueError(f"{operation}: {name!r} is a {type(function).__name__}, not a function; name a function")
    return function  # type: ignore[no-any-return]


def _load_module(name: str, operation: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"{operation}: cannot import {name!r}: {error}; install it, correct the path, "
            "or start the program in the folder that holds it"
        ) from error


def _load_file(path: str, operation: str) -> ModuleType:
    if not os.path.isfile(path):
        raise ValueError(f"{operation}: there is no file {os.path.abspath(path)!r}; correct the path")
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(f"grpo_mc_reward_{name}", path)
    assert spec is not None and spec.loader is not None  # a path that ends in .py always has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles of the file look themselves up there
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # so that it can import its neighbours, as a script can
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise ValueError(f"{operation}: an import in the file fails: {error}; install it or correct it") from error
    return module


def _accepted_names(function: Callable[..., Any]) -> frozenset[str] | None:
    """The keyword names that the function takes; None when it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)


def _call_trl(
    function: Callable[..., Any], sample: Sample, extra: dict[str, Any], accepted: frozenset[str] | None
) -> tuple[object, str]:
    prompt = sample.prompt
    columns = {k: v for k, v in prompt.fields.items() if k not in ("prompt", "completion", "prompts", "completions")}
    columns.setdefault("ground_truth", prompt.ground_truth)
    columns.setdefault("data_source", prompt.data_source)
    columns["completion_ids"] = list(sample.response_ids or ())
    arguments: dict[str, Any] = {name: [value] for name, value in columns.items()}
    if prompt.messages is None:
        arguments.update(prompts=[prompt.text], completions=[sample.text])
    else:
        reply = [{"role": "assistant", "content": sample.text}]
        arguments.update(prompts=[list(prompt.messages)], completions=[reply])
    arguments.update(extra)
    if accepted is not None:
        arguments = {name: value for name, value in arguments.items() if name in accepted}
    values = _finish(function(**arguments))
    if isinstance(values, str) or not hasattr(values, "__len__"):
        raise BadOutput(f"returned {_short(values)}, but a list with one value for each response is needed")
    if len(values) != 1:
        raise BadOutput(f"returned {len(values)} values for 1 response")
    return list(values)[0], ""


def _call_verl(
    function: Callable[..., Any], sample: Sample, extra: dict[str, Any], accepted: frozenset[str] | None
) -> tuple[object, str]:
    prompt = sample.prompt
    arguments = {
        "data_source": prompt.data_source,
        "solution_str": sample.text,
        "ground_truth": _original_ground_truth(prompt),
        "extra_info": prompt.fields["extra_info"] if "extra_info" in prompt.fields else dict(prompt.fields),
        **extra,
    }
    if accepted is not None:
        arguments = {name: value for name, value in arguments.items() if name in accepted}
    value = _finish(function(**arguments))
    if isinstance(value, dict):
        if "score" not in value:
            raise BadOutput(f'returned a dict with {sorted(map(str, value))}, but "score" is needed')
        return value["score"], ""
    return value, ""


def _original_ground_truth(prompt: PromptView) -> Any:
    """verl's ground truth may be a list or dict; the prompt's own is text."""
    model = prompt.fields.get("reward_model")
    if isinstance(model, dict) and "ground_truth" in model:
        return model["ground_truth"]
    return prompt.ground_truth


def _finish(value: Any) -> Any:
    """The result of a call: awaited where the function is async, as plain Python where it is an array or tensor."""
    if inspect.iscoroutine(value):
        value = asyncio.run(value)
    return value.tolist() if hasattr(value, "tolist") else value


class BadOutput(Exception):
    """The function answered, but with something that is no list of scores."""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
