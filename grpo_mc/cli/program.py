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
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

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
    arguments = list(sys.argv[1:] if argv is None else argv)
    status = 1
    try:
        status = _dispatch(arguments)
    except Interrupted as stop:
        if os.environ.get("RANK", "0") == "0":
            print(f"grpo-mc: {stop}", file=sys.stderr)
        status = stop.exit_status
    except KeyboardInterrupt:
        print("grpo-mc: interrupted", file=sys.stderr)
        status = 130
    except BrokenPipeError:
        # The reader of our output is gone (`| head`); what is left in the buffer has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except Exception as error:
        if not is_users_mistake(error):
            raise
        if os.environ.get("GRPO_MC_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        print(f"grpo-mc: error: {describe(error)}", file=sys.stderr)
        status = 2
    finally:
        sys.stderr.flush()
        if argv is None and status != 0:
            _bound_exit(status)
    return status


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
    cannot be written or read, and operators that are not built (an ImportError of ours that holds the command to run).
    """
    if isinstance(error, OSError):
        kinds = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
        return error.errno in _USER_ERRNOS or isinstance(error, kinds)
    by_name = ("OperatorsMissing", "CheckpointError")  # importing them here would import torch
    return isinstance(error, ValueError) or type(error).__name__ in by_name


def describe(error: BaseException) -> str:
    """The error as text; where it was raised outside this package, how to see where."""
    if isinstance(error, OSError) and error.errno is not None:
        place = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{place}"
    text = str(error).strip() or type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    is_ours = bool(frames) and os.path.abspath(frames[-1].filename).startswith(package + os.sep)
    return text if is_ours else f"{text} (GRPO_MC_DEBUG=1 shows where)"


def _bound_exit(status: int) -> None:
    """Ends the process in EXIT_BOUND_S if its normal end is held up (a process group's or a pool's exit handler)."""

    def end() -> None:
        time.sleep(EXIT_BOUND_S)
        os._exit(status)

    threading.Thread(target=end, daemon=True, name="bounded-exit").start()
