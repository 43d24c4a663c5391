"""The program: finds the command, imports only its module, turns the user's mistakes into one clear line.

Exit status: 0 done; 1 a check failed (doctor, check parity); 2 the user has to change something (one line on stderr,
`GRPO_MC_DEBUG=1` adds the traceback); 130 interrupted by Ctrl-C, 143 by SIGTERM. Any other exception is ours and keeps
its traceback (status 1). Every failure under torchrun ends this process within EXIT_BOUND_S even if a library's exit
handler waits for another rank, so that the launcher sees it and ends the other ranks.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn, TextIO

from grpo_mc.data.text import printable
from grpo_mc.pipeline.stop import Interrupted

EXIT_BOUND_S = 30.0
"""Longest time from a failure to the end of the process."""

COMMANDS = {
    "train": ("grpo_mc.cli.train", "train a model with GRPO; --dry-run explains the run, --resume continues one"),
    "eval": ("grpo_mc.cli.evaluate", "measure a model on held-out prompts, with error bars"),
    "generate": ("grpo_mc.cli.generate", "sample text from a model"),
    "convert": ("grpo_mc.cli.convert", "import weights (safetensors, GGUF) or export a checkpoint to safetensors"),
    "check": ("grpo_mc.cli.check", "parity: same loss and gradients on every parallel layout"),
    "bench": ("grpo_mc.cli.bench", "time an operator against its reference and the library baselines"),
    "doctor": ("grpo_mc.cli.doctor", "look at machine, versions, operators, ports and process groups"),
    "report": ("grpo_mc.cli.report", "write a run's report as one HTML file"),
    "config": ("grpo_mc.cli.config", "explain the keys of a configuration; list the named objectives"),
    "rewards": ("grpo_mc.cli.rewards", "list, explain or try reward functions without a run"),
}
"""Command -> (module, one line of help). Listed here so that --help imports no command."""

EXAMPLES = """\
examples:
  grpo-mc doctor                                     is this machine ready?
  grpo-mc train configs/quickstart.yaml --dry-run    what would this run do?
  grpo-mc train configs/quickstart.yaml run.steps=20 optimizer.lr=2e-6
  torchrun --nproc-per-node 2 -m grpo_mc train configs/quickstart.yaml parallel.tp=2
  grpo-mc train --resume runs/quickstart             go on where it stopped
  grpo-mc report runs/quickstart                     curves and samples as one HTML file

`grpo-mc COMMAND --help` shows a command's options and examples. GRPO_MC_DEBUG=1 shows tracebacks.
"""

_GLOO_LOST = re.compile(r"gloo.*(Timed out waiting|Connection closed by peer|Connection reset|Broken pipe)", re.S)
_USER_ERRNOS = frozenset(
    {
        errno.ENOENT,
        errno.EACCES,
        errno.EPERM,
        errno.EISDIR,
        errno.ENOTDIR,
        errno.EEXIST,
        errno.ENOTEMPTY,
        errno.EROFS,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.ENAMETOOLONG,
        errno.ELOOP,
    }  # fmt: skip
)


class OneLineParser(argparse.ArgumentParser):
    """Reports a usage mistake as one line that names the help to read."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"grpo-mc: error: {message}; see `{self.prog} --help`\n")


def build_parser(prog: str, module: ModuleType) -> OneLineParser:
    """The parser of one command: its docstring is the help, its `add_arguments` the options."""
    parser = OneLineParser(
        prog=prog,
        description=(module.__doc__ or "").strip(),
        epilog=module.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    return parser


def top_level_parser() -> OneLineParser:
    """The parser of `grpo-mc` itself; commands parse their own options."""
    from grpo_mc import __version__

    lines = "\n".join(f"  {name:<10}{summary}" for name, (_, summary) in COMMANDS.items())
    parser = OneLineParser(
        prog="grpo-mc",
        usage="grpo-mc COMMAND ...",
        description=f"GRPO post-training of language models on Megatron-Core.\n\ncommands:\n{lines}",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"grpo-mc {__version__}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status.

    Args:
        argv: the arguments; None = this process's own, and then a failure also bounds the time to its end.
    """
    open_missing_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    status = 1
    try:
        status = _dispatch(arguments)
    except Interrupted as stop:
        if os.environ.get("RANK", "0") == "0":
            _say(f"grpo-mc: {stop}")
        status = stop.exit_status
    except KeyboardInterrupt:
        _say("grpo-mc: interrupted")
        status = 130
    except BrokenPipeError:
        # The reader of our output is gone (`| head`); what is left in the buffer has nowhere to go.
        _silence(sys.stdout)
        status = 141
    except Exception as error:
        if not is_users_mistake(error):
            _tell_launcher(traceback.format_exc())
            raise
        if os.environ.get("GRPO_MC_DEBUG", "0") not in ("", "0"):
            _say(traceback.format_exc().rstrip())
        _tell_launcher(describe(error))
        rank = os.environ.get("RANK", "0")
        _say(f"grpo-mc: error{'' if rank == '0' else f' on rank {rank}'}: {describe(error)}")
        status = 2
    finally:
        _say("", end="")
        if argv is None and status != 0:
            _bound_exit(status)
    return status


def open_missing_streams() -> None:
    """Standard streams that were closed (`2>&-`) become the null device. Python has None for them, which nothing can
    print to, and the next file opened would get their number: output of others would be written into it."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))


def _say(text: str, end: str = "\n") -> None:
    """Writes to standard error what a person should read; that nobody can read it changes nothing."""
    try:
        print(printable(text), file=sys.stderr, end=end, flush=True)
    except OSError:
        _silence(sys.stderr)


def _tell_launcher(text: str) -> None:
    """Leaves the failure where torchrun looks for it: its summary then names the first one, not the ranks it ended."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    text = printable(text.rstrip())
    failure = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": failure}, file)
    except OSError:
        pass  # standard error has it too


def _silence(stream: TextIO) -> None:
    from grpo_mc.monitor.lossy_stream import redirect_to_nowhere  # the package is not needed for --help

    redirect_to_nowhere(stream)


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        top_level_parser().print_help(sys.stderr)
        return 2
    name = arguments[0]
    if name.startswith("-"):
        top_level_parser().parse_args(arguments)
        return 2
    if name not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else f"; commands are {', '.join(COMMANDS)}"
        raise ValueError(f"no command '{name}'{hint}")
    module = importlib.import_module(COMMANDS[name][0])
    parsed = build_parser(f"grpo-mc {name}", module).parse_args(arguments[1:])
    return int(module.run(parsed))


def is_users_mistake(error: BaseException) -> bool:
    """True for what the user can change: every ValueError, the file system's refusals among OSErrors, checkpoints that
    cannot be written or read, operators that are not built (an ImportError of ours that holds the command to run), and
    memory that does not suffice.
    """
    if isinstance(error, OSError):
        kinds = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
        return error.errno in _USER_ERRNOS or isinstance(error, kinds)
    by_name = ("OperatorsMissing", "CheckpointError")  # importing them here would import torch
    if isinstance(error, ValueError) or type(error).__name__ in by_name:
        return True
    return is_out_of_memory(error) or is_lost_rank(error)


def is_lost_rank(error: BaseException) -> bool:
    """True for what a rank gets that waits for one that ended or hangs: an exception of ours, or gloo's RuntimeError,
    which only its text tells apart."""
    from_gloo = isinstance(error, RuntimeError) and _GLOO_LOST.search(str(error)) is not None
    return type(error).__name__ == "LostRank" or from_gloo


def is_out_of_memory(error: BaseException) -> bool:
    """True for Python's MemoryError and for what torch's allocators raise: a class of its own for a GPU, and for a CPU
    a RuntimeError that only its text tells apart."""
    is_gpu = type(error).__name__ == "OutOfMemoryError"
    is_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return isinstance(error, MemoryError) or is_gpu or is_cpu


def describe(error: BaseException) -> str:
    """The error as text; where it was raised outside this package, how to see where."""
    if isinstance(error, OSError) and error.errno is not None:
        place = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{place}"
    if is_out_of_memory(error):
        return _describe_out_of_memory(error)
    if is_lost_rank(error):
        return f"another rank has ended or did not answer within parallel.timeout_s; see its own message ({error})"
    text = str(error).strip() or type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    is_ours = bool(frames) and os.path.abspath(frames[-1].filename).startswith(package + os.sep)
    return text if is_ours else f"{text} (GRPO_MC_DEBUG=1 shows where)"


def _describe_out_of_memory(error: BaseException) -> str:
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ [KMGT]?i?B|\d+ bytes)", str(error))
    return (
        f"out of memory{f': {asked[1]} more were asked for' if asked else ''}; lower "
        "parallel.max_tokens_per_micro_batch (training), rollout.max_batch_rows (sampling) or "
        "inference.max_tokens_per_batch (reference), set model.recompute=full and model.logprobs=streamed, choose a "
        "smaller model, or split it with parallel.tp or parallel.pp; `grpo-mc train CONFIG "
        "--dry-run` estimates what a run needs"
    )


def _bound_exit(status: int) -> None:
    """Ends the process in EXIT_BOUND_S if its normal end is held up (a process group's or a pool's exit handler)."""

    def end() -> None:
        time.sleep(EXIT_BOUND_S)
        os._exit(status)

    threading.Thread(target=end, daemon=True, name="bounded-exit").start()
