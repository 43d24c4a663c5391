"""README.md and CONTRIBUTING.md say what is true: their commands exist and run, their files and variables are there.

Every line of an indented or fenced block is a command that a check below knows, the Python example, the tree, or text
of TEXT_BLOCKS; a block that is none of these fails, so that a new one gets a check. Failures name file and line.
"""

from __future__ import annotations

import ast
import inspect
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from grpo_mc.cli.program import COMMANDS, build_parser
from grpo_mc.ops import bench
from helpers.processes import REPOSITORY, run_command, torchrun

DOCUMENTS = ("README.md", "CONTRIBUTING.md")
TEXT_BLOCKS = ("processes 1 =", "prompts ->", "config  ->")
"""How the blocks begin that are no commands: a run's output (compared below), the data flow, the layers (compared)."""
COMMAND = re.compile(r"(?:\w+=\S+ )*(make|grpo-mc|torchrun|sbatch|pre-commit|tools/launch/\w+\.sh|\.venv/bin/python) ")
FOLDERS = "grpo_mc|csrc|configs|benchmarks|tools|tests"
PATH = re.compile(rf"(?<![\w./-])((?:{FOLDERS})/[\w./-]*\w|(?:{FOLDERS})/|[\w.-]+\.(?:md|toml|txt|yaml)\b)")
VARIABLE = r"""(GRPO_MC_\w+)["']"""
READS = re.compile(
    rf"""(?:environ\.get\(|environ\[|getenv\(|getenv\(\s*|\bflag\()["']{VARIABLE}|["']{VARIABLE} in os"""
)
WORLD = 4
"""Processes of README's torchrun line."""


@dataclass(frozen=True)
class Line:
    """A line of a document."""

    document: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.number}: {self.text.strip()!r}"


def lines_of(document: str) -> list[Line]:
    text = (REPOSITORY / document).read_text()
    return [Line(document, number, line) for number, line in enumerate(text.splitlines(), start=1)]


ALL_LINES = [line for document in DOCUMENTS for line in lines_of(document)]


def blocks() -> Iterator[tuple[str, list[Line]]]:
    """(kind, lines) of each block: kind is what follows the fence, or "indented" (four spaces after an empty line)."""
    for document in DOCUMENTS:
        kind, block, was_empty = "", [], True
        for line in lines_of(document):
            is_fence = line.text.startswith("```")
            is_indented = line.text.startswith("    ") and kind in ("", "indented")
            if kind == "indented" and not is_indented and line.text:
                yield kind, [one for one in block if one.text]
                kind, block = "", []
            if is_fence and kind:
                yield kind, block
                kind, block = "", []
            elif is_fence:
                kind = line.text[3:] or "plain"
            elif kind or (is_indented and was_empty):
                kind = kind or "indented"
                block.append(line)
            was_empty = not line.text


def commands() -> list[tuple[Line, list[str]]]:
    """(line, words) of every command in a block or between backticks; environment assignments and comments are cut."""
    found = [line for kind, block in blocks() if kind == "indented" for line in block]
    for line in ALL_LINES:
        found += [Line(line.document, line.number, text) for text in re.findall(r"`([^`]+)`", line.text)]
    texts = [(line, line.text.strip()) for line in found]
    return [(line, shlex.split(text, comments=True)) for line, text in texts if COMMAND.match(text)]


def without_assignments(words: list[str]) -> list[str]:
    first = next(i for i, word in enumerate(words) if not re.fullmatch(r"[A-Z_]+=.*", word))
    return words[first:]


def grpo_mc_problem(words: list[str]) -> str | None:
    """What is wrong with the arguments of grpo-mc: an unknown command or flag, a refused configuration."""
    name, *arguments = words
    if name not in COMMANDS:
        return f"no command {name!r}"
    parser = build_parser(f"grpo-mc {name}", import_module(COMMANDS[name][0]))
    try:
        parser.parse_args(arguments)
    except SystemExit:
        return "the argument parser refuses it"
    return None


def test_every_block_is_checked_by_something() -> None:
    problems = []
    for kind, block in blocks():
        text = block[0].text.strip()
        if kind == "indented" and not text.startswith(TEXT_BLOCKS):
            shown = [line for line in block if not line.text.strip().startswith("#")]
            problems += [f"{line} is a command without a check" for line in shown if not COMMAND.match(line.text[4:])]
        elif kind not in ("indented", "python") and block[0].text != "grpo_mc/":
            problems.append(f"{block[0]} begins a {kind} block without a check")
    assert not problems, "\n".join(problems)


def test_make_targets_and_variables_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    there = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    there |= {f"{name}=" for name in re.findall(r"^([A-Z_]+) \?=", makefile, re.MULTILINE)}
    named = [(line, words[1:]) for line, words in commands() if words[0] == "make"]
    wanted = [(line, re.sub(r"=.*", "=", word)) for line, words in named for word in words]
    problems = [f"{line}: the Makefile has no {word}" for line, word in wanted if word not in there]
    assert wanted
    assert not problems, "\n".join(problems)


def table(document: str, header: str) -> Iterator[tuple[Line, list[str]]]:
    """(line, texts between backticks in the first column) of the table whose header line is given."""
    lines = lines_of(document)
    first = next((i for i, line in enumerate(lines) if line.text == header), None)
    assert first is not None, f"{document} has no table {header!r}"
    for line in lines[first + 2 :]:
        if not line.text.startswith("|"):
            return
        yield line, re.findall(r"`([^`]+)`", line.text.split("|")[1])


def test_the_table_of_commands_is_what_the_parser_takes() -> None:
    problems, listed = [], set()
    for line, texts in table("README.md", "| command | does |"):
        for text in texts:
            words = re.sub(r"[\[\]]|\.\.\.", "", text).split()
            listed.add(words[0])
            if problem := grpo_mc_problem(words):
                problems.append(f"{line}: `{text}`: {problem}")
    problems += [f"README.md: the table of commands lacks `{name}`" for name in COMMANDS if name not in listed]
    assert not problems, "\n".join(problems)


def test_commands_outside_the_table_are_what_the_parser_takes() -> None:
    """Also behind torchrun and tools/launch; a configuration they name is read with their changes and resolved."""
    from grpo_mc.config import load_config, resolve

    seen = 0
    for line, all_words in commands():
        words = without_assignments(all_words)
        start = {"grpo-mc": 1, "tools/launch/torchrun.sh": 1}.get(words[0])
        if "grpo_mc" in words:
            start = words.index("grpo_mc") + 1
        if start is None:
            continue
        seen += 1
        arguments = words[start:]
        problem = grpo_mc_problem(arguments)
        assert problem is None, f"{line}: {problem}"
        if arguments[0] == "train" and arguments[1].endswith(".yaml"):
            processes = WORLD if words[0] == "torchrun" else 2 if "two_hosts" in words[0] else 1
            try:
                resolve(load_config(REPOSITORY / arguments[1], arguments[2:]), processes)
            except ValueError as error:
                pytest.fail(f"{line}: {error}")
    assert seen >= 3


def test_paths_exist() -> None:
    """`foo` stands for an operator; not every operator has CUDA code."""
    problems = []
    tree = {line for kind, block in blocks() if kind == "plain" for line in block}
    for line in [line for line in ALL_LINES if line not in tree]:
        for path in PATH.findall(line.text):
            is_there = (REPOSITORY / path.replace("foo", "policy_loss")).exists() or path.startswith("csrc/cuda/foo")
            if not is_there:
                problems.append(f"{line} names {path}, which is not there")
        for target in re.findall(r"\]\(([^)#:]+)\)", line.text):
            if not (REPOSITORY / target).exists():
                problems.append(f"{line} links to {target}, which is not there")
    assert not problems, "\n".join(problems)


def test_the_tree_names_files_that_exist() -> None:
    """tools/readme_tree.py --write mends it."""
    problems = []
    (tree,) = (block for kind, block in blocks() if kind == "plain")
    folders: list[str] = []
    for line in tree:
        depth, name = (len(line.text) - len(line.text.lstrip())) // 4, line.text.split()[0]
        folders = folders[:depth]
        if not REPOSITORY.joinpath(*folders, name).exists():
            problems.append(f"{line}: there is no {'/'.join([*folders, name])}; run tools/readme_tree.py --write")
        if name.endswith("/"):
            folders.append(name.rstrip("/"))
    assert len(tree) > 100
    assert not problems, "\n".join(problems)


def test_the_table_of_operators_is_what_was_measured() -> None:
    """tools/operators_table.py --write mends it."""
    command = [sys.executable, "tools/operators_table.py"]
    table = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    readme = (REPOSITORY / "README.md").read_text()
    assert readme.split("<!-- operators: begin -->")[1].split("<!-- operators: end -->")[0].strip() == table.strip()
    shown = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
    assert shown == set(bench.names()), "run make bench-ops ARGS=--json for what is missing"


def test_the_python_examples_run() -> None:
    import torch.distributed as dist

    names: dict[str, Any] = {}
    try:
        for block in (block for kind, block in blocks() if kind == "python"):
            source = "\n".join(line.text for line in block)
            padding = "\n" * (block[0].number - 1)  # tracebacks have README's lines
            exec(compile(padding + source, str(REPOSITORY / "README.md"), "exec"), names)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert math.isfinite(float(names["result"].loss.detach()))
    assert float(names["logits"].grad.abs().sum()) > 0
    names["logprobs"].sum().backward()
    assert names["logprobs"].shape == names["entropy"].shape == (12,)
    assert float(names["hidden"].grad.abs().sum()) > 0


def variables_read() -> dict[str, str]:
    """GRPO_MC_* variable -> a file that reads it."""
    found = {}
    files = [REPOSITORY / "setup.py"]
    for folder in ("grpo_mc", "csrc", "tools", "benchmarks"):
        files += sorted(path for path in (REPOSITORY / folder).rglob("*") if path.suffix in (".py", ".cpp", ".h"))
    for path in files:
        for groups in READS.findall(path.read_text()):
            found["".join(groups)] = str(path.relative_to(REPOSITORY))
    return found


def test_environment_variables_are_those_that_are_read() -> None:
    listed = {text: line for line, texts in table("README.md", "| variable | meaning |") for text in texts}
    read = variables_read()
    cpp_extension = inspect.getsource(import_module("torch.utils.cpp_extension"))  # reads MAX_JOBS
    problems = [
        f"README.md: the table of variables lacks {name}, read in {read[name]}" for name in read.keys() - listed
    ]
    for name, line in listed.items():
        if "/" not in name and name.isupper() and name not in read and f"'{name}'" not in cpp_extension:
            problems.append(f"{line}: nothing reads {name}")
    assert not problems, "\n".join(problems)


def test_the_layers_are_those_of_the_layer_test() -> None:
    source = ast.parse((REPOSITORY / "tests/unit/test_layers.py").read_text())
    (layer,) = (
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYER"
    )
    (line,) = (block[0] for _, block in blocks() if block[0].text.strip().startswith("config  ->"))
    shown = [set(names.split(", ")) for names in re.split(r"\s*->\s*", line.text.strip())]
    assert shown == [{n for n, i in layer.items() if i == number} for number in range(len(shown))], str(line)


def test_the_other_programs_of_the_documents_are_there() -> None:
    problems = []
    for line, all_words in commands():
        words = without_assignments(all_words)
        if words[0] == "pre-commit" and not (REPOSITORY / ".pre-commit-config.yaml").is_file():
            problems.append(f"{line}: there is no .pre-commit-config.yaml")
        scripts = [word for word in words[:2] if word.startswith("tools/launch/")]
        problems += [f"{line}: {name} cannot be run" for name in scripts if not os.access(REPOSITORY / name, os.X_OK)]
        if words[0] == "torchrun":
            assert words[1:3] == ["--nproc-per-node", str(WORLD)], str(line)
    assert not problems, "\n".join(problems)


def test_benchmark_scripts_have_the_flags_of_the_documents() -> None:
    problems = []
    for line in ALL_LINES:
        for name, flags in re.findall(r"`(\w+\.py)((?: [^`]+)?)`", line.text):
            script = REPOSITORY / "benchmarks" / name
            source = script.read_text() if script.is_file() else ""
            problems += [f"{line}: {name} has no {f}" for f in re.findall(r"--[\w-]+", flags) if f'"{f}"' not in source]
    assert not problems, "\n".join(problems)


def test_the_line_for_two_hosts_starts_torchrun_as_said(tmp_path: Path) -> None:
    """The line with host0, with an interpreter that prints its arguments."""
    (line,) = (line for line in ALL_LINES if "tools/launch/torchrun.sh" in line.text and "NNODES" in line.text)
    recorder = tmp_path / "recorder"
    recorder.write_text('#!/usr/bin/env bash\necho "$@"\n')
    recorder.chmod(0o755)
    script = f"unset MASTER_PORT; {line.text}"  # a test before this one may have made a process group
    done = run_command(["bash", "-c", script], timeout_s=30, env={"PYTHON": str(recorder)}, cwd=REPOSITORY)
    wanted = (
        "--nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr host0 --master-port 29500 -m grpo_mc train CONFIG"
    )
    assert done.output.strip().endswith(wanted), f"{line}\n{done.output}"


@pytest.mark.dist
def test_the_torchrun_line_runs_and_prints_what_the_document_shows(tmp_path: Path) -> None:
    ((line, words),) = ((line, words) for line, words in commands() if words[0] == "torchrun")
    arguments = [*words[3:], f"run.dir={tmp_path / 'run'}"]
    done = torchrun(arguments, WORLD, timeout_s=400, cwd=REPOSITORY)
    assert (tmp_path / "run/report.html").is_file(), f"{line}\n{done.output[-2000:]}"
    (shown,) = (block for _, block in blocks() if block[0].text.strip().startswith("processes 1 ="))
    for one in shown:
        text = re.sub(r"runs/[^\s,]+", "FOLDER", re.sub(r"left \S+$", "left ", one.text.strip()))
        pattern = re.sub(r"\d[\d.,]*(e-?\d+)?", r"[-+.,e\\d]+", re.escape(text).replace(r"\.", ".")).replace(
            "FOLDER", r"\S+"
        )
        if text != "...":
            assert re.search(pattern, done.output), f"{one}: the run prints no such line\n{done.output[-2000:]}"
