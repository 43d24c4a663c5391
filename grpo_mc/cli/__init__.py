"""The commands of `grpo-mc` (also `python -m grpo_mc`): one module a command, imported only when it is asked for."""

from grpo_mc.cli.program import main

__all__ = ["main"]
