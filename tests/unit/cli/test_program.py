"""The program: help without heavy imports, exit statuses, one line for a user's mistake, bounded ends."""

from __future__ import annotations

import errno
import importlib
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from grpo_mc.cli import program
from grpo_mc.cli.program import COMMANDS, describe, is_users_mistake, main

REPOSITORY = Path(__file__).resolve().parents[3]


def install_command(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    """Makes `grpo-mc trial` call `run`."""
    module = types.ModuleType("trial", "A trial.")
    module.EXAMPLES = ""  # type: ignore[attr-defined]
    module.add_arguments = lambda parser: None  # type: ignore[attr-defined]
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "grpo_mc_trial", module)
    monkeypatch.setitem(COMMANDS, "trial", ("grpo_mc_trial", "a trial"))


def run_program(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "grpo_mc", *arguments],
        capture_output=True, text=True, timeout=60, cwd=REPOSITORY, env={**os.environ, **environ},
    )  # fmt: skip


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom grpo_mc.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'transformers', 'megatron', 'rich', 'yaml'} & set(sys.modules)\n"
        "sys.exit(' '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_explains_itself_with_examples(name: str, capsys: Any) -> None:
    before = set(sys.modules)
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0
    assert f"usage: grpo-mc {name}" in out
    assert "examples:" in out and f"grpo-mc {name}" in out.split("examples:")[1]
    assert "torch" not in set(sys.modules) - before


def test_every_command_module_is_thin() -> None:
    for module, _ in COMMANDS.values():
        lines = len(Path(importlib.import_module(module).__file__ or "").read_text().splitlines())
        assert lines <= 110, f"{module} has {lines} lines; move work into another module"


def test_python_m_is_the_same_program() -> None:
    done = run_program("--version")
    assert (done.returncode, done.stdout) == (0, f"grpo-mc {importlib.import_module('grpo_mc').__version__}\n")


def test_no_command_prints_the_help_and_fails() -> None:
    done = run_program()
    assert done.returncode == 2
    assert done.stdout == "" and "commands:" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["trian"], "no command 'trian'; did you mean 'train'?"),
        (["xyz"], "no command 'xyz'; commands are train, eval,"),
        (["--vers"], None),
        (["--nonsense"], "unrecognized arguments: --nonsense; see `grpo-mc --help`"),
        (["report"], "the following arguments are required: RUN_DIR; see `grpo-mc report --help`"),
        (["report", "none_such"], "report: there is no none_such; give the run.dir"),
        (["train"], "no config file given"),
        (["train", "a.yaml", "b.yaml"], "got 2 config files (a.yaml, b.yaml)"),
        (["train", "none_such.yaml"], "none_such.yaml: cannot be read"),
        (["train", "--resume", "none_such"], "train --resume: there is no none_such"),
        (["train", "x.yaml", "--resume", "runs/a"], "got the config file x.yaml too"),
        (["rewards", "explain"], "needs a TYPE"),
        (["rewards", "score", "none.jsonl"], "either --config CONFIG or at least one --reward"),
        (["rewards", "score", "none.jsonl", "--reward", "exact"], "none.jsonl: there is no such file"),
        (["rewards", "explain", "exactt"], "no reward type 'exactt'; types are exact, numeric"),
        (["convert", "import", "x.gguf", "."], "convert: . exists"),
        (["generate", "model"], "no prompt; give --prompt TEXT"),
        (["generate", "model", "--prompt", "a", "--system", "b"], "add --chat"),
        (["generate", "model", "--prompt", "a", "--top-p", "0"], "--top-p is 0.0; it must be above 0"),
        (["generate", "model", "--prompt", "a", "--num-samples", "0"], "--num-samples is 0; it must be at least 1"),
    ],
)
def test_a_users_mistake_is_one_line_and_status_2(arguments: list[str], line: str | None, capsys: Any) -> None:
    try:
        status = main(arguments)
    except SystemExit as end:
        status = int(end.code or 0)
    captured = capsys.readouterr()
    if line is None:  # argparse completes the option
        assert status == 0
        return
    assert status == 2
    assert captured.err.startswith("grpo-mc: error: ")
    assert line in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_the_traceback_of_a_mistake_is_there_when_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("GRPO_MC_DEBUG", "1")
    assert main(["report", "none_such"]) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert err.splitlines()[-1].startswith("grpo-mc: error: report: there is no none_such")


def test_an_unexpected_exception_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: Any) -> int:
        raise RuntimeError("our fault")

    install_command(monkeypatch, run)
    with pytest.raises(RuntimeError, match="our fault"):
        main(["trial"])


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("arguments", ["rewards list", "report none_such", "--version"])
def test_closed_standard_streams_change_no_exit_status(closed: str, arguments: str) -> None:
    """sys.stderr and sys.stdout are None then, which nothing can print to."""
    command = f"{sys.executable} -m grpo_mc {arguments} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.returncode == (2 if "none_such" in arguments else 0), done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_that_nobody_can_read_keeps_its_status() -> None:
    command = f"({sys.executable} -m grpo_mc report none_such 2>&3; echo $? >&4) 3>&1 4>&2 | true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.stderr == "2\n"


def test_control_characters_of_an_error_do_not_reach_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def run(_: Any) -> int:
        raise ValueError("a\x1b[31m b\0 \x9b \ud800")

    install_command(monkeypatch, run)
    assert main(["trial"]) == 2
    assert r"a\x1b[31m b\x00 \x9b \ud800" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000 bytes. Error code 12"),
         "4000 bytes"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0"),
         "2.00 GiB"),
        (MemoryError(), None),
    ],
)  # fmt: skip
def test_out_of_memory_is_one_line_that_says_what_to_change(
    error: BaseException, asked: str | None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def run(_: Any) -> int:
        raise error

    install_command(monkeypatch, run)
    assert main(["trial"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("grpo-mc: error: out of memory") and err.count("\n") == 1
    assert "parallel.max_tokens_per_micro_batch" in err and (asked is None or asked in err)


def test_torchs_own_allocator_error_is_known() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 58, dtype=torch.uint8)
    assert is_users_mistake(caught.value)
    assert "288230376151711744 bytes more were asked for" in describe(caught.value)


def test_an_interrupt_is_status_130_without_traceback(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def run(_: Any) -> int:
        raise KeyboardInterrupt

    install_command(monkeypatch, run)
    assert main(["trial"]) == 130
    assert capsys.readouterr().err == "grpo-mc: interrupted\n"


def test_a_value_error_from_a_library_says_how_to_find_its_place(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    install_command(monkeypatch, lambda _: int("x"))
    assert main(["trial"]) == 2
    assert capsys.readouterr().err.endswith("(GRPO_MC_DEBUG=1 shows where)\n")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("x"), True),
        (OSError(errno.ENOSPC, "No space left on device", "/runs/a"), True),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), True),
        (FileNotFoundError("ours, without a number"), True),
        (OSError(errno.EIO, "Input/output error"), False),
        (ConnectionResetError(errno.ECONNRESET, "reset"), False),
        (ImportError("no module"), False),
        (type("OperatorsMissing", (ImportError,), {})("not built"), True),
        (RuntimeError("x"), False),
        (KeyError("x"), False),
    ],
)
def test_whose_fault_an_error_is(error: BaseException, expected: bool) -> None:
    assert is_users_mistake(error) is expected


def test_a_full_disk_names_reason_and_file() -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "/runs/a/metrics.jsonl")
    assert describe(error) == "No space left on device: /runs/a/metrics.jsonl"
    assert describe(FileNotFoundError("give the run.dir")).startswith("give the run.dir")


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    code = "import sys\nfrom grpo_mc.cli import main\nsys.exit(main(['rewards', 'explain', 'exact']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 141
    assert "Traceback" not in errors


def test_a_failed_process_ends_although_an_exit_handler_waits() -> None:
    """A rank that fails must end, or the launcher never ends the others."""
    code = (
        "import atexit, sys, time, types\nfrom grpo_mc.cli import program\n"
        "program.EXIT_BOUND_S = 1.0\n"
        "atexit.register(time.sleep, 60)\n"
        "sys.argv = ['grpo-mc', 'report', 'none_such']\n"
        "sys.exit(program.main())"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, cwd=REPOSITORY)
    assert done.returncode == 2
    assert time.monotonic() - started < 40
    assert done.stderr.startswith("grpo-mc: error: report: there is no none_such")


def test_the_bound_leaves_time_for_a_normal_end() -> None:
    assert 5 <= program.EXIT_BOUND_S <= 60


def test_a_lost_rank_is_one_line() -> None:
    from grpo_mc.megatron.host_barrier import LostRank

    gloo = RuntimeError(
        "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 20000ms for recv"
    )
    for error in (gloo, LostRank("rank 1 of the group has ended")):
        assert is_users_mistake(error)
        assert "another rank has ended or did not answer within parallel.timeout_s" in describe(error)
        assert str(error) in describe(error)
    assert not is_users_mistake(RuntimeError("Timed out waiting for a bus"))
