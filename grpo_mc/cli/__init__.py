"""The commands of `grpo-mc` (also `python -m grpo_mc`): one module a command, imported only when it is asked for."""

from grpo_mc.cli.threads import limit_spinning

limit_spinning()

from grpo_mc.cli.program import main  # noqa: E402 - torch reads the setting when it is imported

__all__ = ["main"]
