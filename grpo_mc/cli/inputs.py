"""What several commands read from their arguments: a config file with overrides, reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_mc.config import RewardsConfig


def split_config_and_overrides(arguments: Sequence[str], *, needs_config: bool) -> tuple[Path | None, list[str]]:
    """Splits "CONFIG section.key=value ..." in any order.

    An argument is an override when it holds "=" and no file of that name exists.

    Raises:
        ValueError: no config file where one is needed, or two.
    """
    files = [a for a in arguments if "=" not in a or _is_there(Path(a))]
    overrides = [a for a in arguments if a not in files]
    if len(files) > 1:
        raise ValueError(
            f"got {len(files)} config files ({', '.join(files)}); give one, and changes as section.key=value"
        )
    if not files and needs_config:
        raise ValueError("no config file given; give one, e.g. configs/quickstart.yaml")
    return (Path(files[0]) if files else None), overrides


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # longer than a file name can be, for one
        return False


def refuse_missing(command: str, path: Path, needed: str) -> None:
    """Refuses a path where there is nothing; the message names the newest of its neighbours that begin alike.

    Args:
        command: What the message begins with.
        needed: What to give instead, "the run.dir of a run", say.

    Raises:
        FileNotFoundError: Nothing is there.
    """
    if _is_there(path):
        return
    alike = sorted(path.parent.glob(f"{path.name}*"), key=lambda place: place.stat().st_mtime) if path.name else []
    hint = f"; there is {alike[-1]}" if alike else ""
    raise FileNotFoundError(f"{command}: there is no {path}{hint}; give {needed}")


def parse_rewards(specifications: Sequence[str]) -> RewardsConfig:
    """Reward functions, each a type ("math") or a YAML mapping ("{type: numeric, tolerance: 0.01}"), as a section.

    Raises:
        ConfigError: an unknown type or option, or a value of the wrong type.
    """
    from grpo_mc.config import load_config_text

    functions = [text if text.lstrip().startswith("{") else f"{{type: {text}}}" for text in specifications]
    # The smallest configuration around them, so that they are read and checked exactly as in a file.
    text = "model: {path: none}\nrun: {dir: none, steps: 0}\n"
    return load_config_text(text, [f"rewards.functions=[{', '.join(functions)}]"], name="--reward").rewards
