"""Imports point downwards only, and each layer keeps to what it may know (the table is in `LAYER`)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "grpo_mc"
LAYER = {
    "config": 0,
    "ops": 1,
    "algorithms": 2,
    "data": 2,
    "megatron": 3,
    "rewards": 3,
    "rollout": 4,
    "pipeline": 5,
    "monitor": 6,
    "cli": 6,
}
SIDEWAYS = {("algorithms", "data"), ("cli", "monitor")}
"""(importer, imported) pairs inside one layer; every other sideways import fails."""
ANYWHERE = {"", "__init__"}
"""The package itself (its version) may be imported from everywhere and imports nothing."""


def imports_of(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import, also those inside functions and `if TYPE_CHECKING`.

    `from a import b` yields both a and a.b, since b may be a module. Relative imports are resolved against `module`.
    """
    base = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            anchor = base[: len(base) - (node.level - 1)] if node.level else []
            target = ".".join([*anchor, *([node.module] if node.module else [])])
            yield node.lineno, target
            for alias in node.names:
                yield node.lineno, f"{target}.{alias.name}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value)


def part_of(module: str) -> str | None:
    """The package under grpo_mc that a module belongs to; "" for grpo_mc itself, None for other projects."""
    names = module.split(".")
    if names[0] != "grpo_mc":
        return None
    if len(names) == 1:
        return ""
    return "cli" if names[1] == "__main__" else names[1]


def upward_imports(source: str, module: str, is_package: bool) -> list[str]:
    """The imports of one module that do not point downwards, as messages."""
    here = part_of(module)
    problems = []
    for line, target in imports_of(source, module, is_package):
        there = part_of(target)
        if here is None or there is None or there == here or there not in LAYER:
            continue  # same part, another project, or a name of grpo_mc itself such as its version
        if here in ANYWHERE:
            problems.append(f"{module}:{line} imports {target}; grpo_mc/__init__.py imports no part")
        elif LAYER[there] >= LAYER[here] and (here, there) not in SIDEWAYS:
            problems.append(f"{module}:{line} (layer {LAYER[here]}) imports {target} (layer {LAYER[there]})")
    return sorted(set(problems))


def modules() -> Iterator[tuple[Path, str, bool]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        names = list(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        is_package = names[-1] == "__init__"
        yield path, ".".join(names[:-1] if is_package else names), is_package


def test_every_part_has_a_layer() -> None:
    parts = {part_of(name) for _, name, _ in modules()} - ANYWHERE
    assert parts <= set(LAYER), f"no layer for {sorted(p for p in parts if p not in LAYER)}: add it to LAYER"


def test_imports_point_downwards() -> None:
    problems = [text for path, name, pkg in modules() for text in upward_imports(path.read_text(), name, pkg)]
    assert not problems, "\n".join(problems)


def test_only_the_megatron_part_touches_megatron_core() -> None:
    problems = []
    for path, name, is_package in modules():
        if part_of(name) != "megatron":
            for line, target in imports_of(path.read_text(), name, is_package):
                if target.split(".")[0] == "megatron":
                    problems.append(f"{name}:{line} imports {target}")
    assert not problems, "\n".join(problems)


def test_operators_know_no_process_groups_or_models() -> None:
    banned = ("torch.distributed", "transformers", "safetensors", "gguf")
    problems = []
    for path, name, is_package in modules():
        if part_of(name) == "ops":
            for line, target in imports_of(path.read_text(), name, is_package):
                if any(target == b or target.startswith(b + ".") for b in banned):
                    problems.append(f"{name}:{line} imports {target}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("source", "module", "is_package", "found"),
    [
        ("from grpo_mc.pipeline import loop", "grpo_mc.ops.policy_loss", False, True),
        ("def f():\n    import grpo_mc.cli.main", "grpo_mc.rollout.engine", False, True),
        ("from ..rollout import engine", "grpo_mc.data.packing", False, True),
        ("from .. import rollout", "grpo_mc.data.packing", False, True),
        ("from .. import rollout", "grpo_mc.data", True, True),
        ("from . import rollout", "grpo_mc", True, True),
        ("from grpo_mc import megatron", "grpo_mc.rewards.pool", False, True),
        ("if TYPE_CHECKING:\n    from grpo_mc.monitor import writer", "grpo_mc.pipeline.loop", False, True),
        ("importlib.import_module('grpo_mc.cli')", "grpo_mc.config.schema", False, True),
        ("from grpo_mc.data.records import Rollout", "grpo_mc.algorithms.filters", False, False),
        ("from grpo_mc.algorithms import advantages", "grpo_mc.data.records", False, True),
        ("from .records import Rollout", "grpo_mc.data.packing", False, False),
        ("from grpo_mc import __version__", "grpo_mc.config.schema", False, False),
        ("import torch", "grpo_mc.ops", True, False),
    ],
)
def test_the_walk_sees_each_spelling(source: str, module: str, is_package: bool, found: bool) -> None:
    assert bool(upward_imports(source, module, is_package)) is found


def test_config_loads_without_torch() -> None:
    code = (
        "import sys, grpo_mc.config; sys.exit(' '.join({'torch', 'megatron', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_is_quiet() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import grpo_mc, sys; sys.exit('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=PACKAGE.parent,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
