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
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from grpo_mc.rewards.sample import PromptView, Sample, Scorer


def build(options: Any) -> Scorer:
    """The scorer for a FunctionReward.

    Raises:
        ValueError: the module, file or function does not exist, or importing it raises anything.
    """
    function = load_function(options.path)
    call = _call_trl if options.signature == "trl" else _call_verl
    extra = dict(options.options)
    with _code_of_others(f"reward function {options.path!r}", "reading its signature"):
        accepted = _accepted_names(function)

    def score(sample: Sample) -> tuple[object, str]:
        return call(function, sample, extra, accepted)

    return score


def load_function(path: str) -> Callable[..., Any]:
    """The function that "package.module:name" or "file.py:name" names.

    Raises:
        ValueError: it cannot be found, or importing it raises anything; the message says what and where.
    """
    where, _, name = path.rpartition(":")
    operation = f"reward function {path!r}"
    if where.endswith(".py"):
        module = _load_file(where, operation)
    else:
        module = _load_module(where, operation)
    with _code_of_others(operation, "looking up the function"):  # a module may have a __getattr__
        function = getattr(module, name, None)
    if function is None:
        raise ValueError(f"{operation}: {where} has no {name!r}; correct the name after the colon")
    if not callable(function):
        raise ValueError(f"{operation}: {name!r} is a {type(function).__name__}, not a function; name a function")
    return function  # type: ignore[no-any-return]


def _load_module(name: str, operation: str) -> ModuleType:
    if not all(name.split(".")):
        raise ValueError(
            f"{operation}: {name!r} is no module's full name; give package.module:name without leading or double dots, "
            "or file.py:name"
        )
    with _code_of_others(operation, f"importing {name!r}"):
        return importlib.import_module(name)


def _load_file(path: str, operation: str) -> ModuleType:
    if not os.path.isfile(path):
        raise ValueError(f"{operation}: there is no file {os.path.abspath(path)!r}; correct the path")
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(f"grpo_mc_reward_{name}", path)
    assert spec is not None and spec.loader is not None  # a path that ends in .py always has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles of the file look themselves up there
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # so that it can import its neighbours, as a script can
    with _code_of_others(operation, "importing the file"):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _code_of_others(operation: str, doing: str) -> Iterator[None]:
    """Whatever the code inside raises becomes a ValueError that names the operation, the error and its place."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except ImportError as error:
        raise ValueError(
            f"{operation}: {doing} failed: {_describe(error)}; install what is missing, correct the path or the file, "
            "or start the program in the folder that holds it"
        ) from error
    except BaseException as error:  # SystemExit among them: the boundary to code of others, which may raise anything
        raise ValueError(f"{operation}: {doing} failed: {_describe(error)}; correct the file") from error


def _describe(error: BaseException) -> str:
    """The error and the last place in its traceback that is a file, as one line."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    files = [f for f in frames if not f.filename.startswith("<") and f.filename != __file__]
    place = f" ({files[-1].filename}:{files[-1].lineno})" if files else ""
    try:
        text = str(error)
    except Exception:  # an exception class of theirs with a broken __str__
        text = ""
    return " ".join(f"{type(error).__name__}: {text}".split()) + place


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
