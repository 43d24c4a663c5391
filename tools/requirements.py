"""Prints what pyproject.toml requires, one requirement a line, so that pip can install it without the package itself.

python tools/requirements.py            the dependencies
python tools/requirements.py dev bench  the named extras
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main(extras: list[str]) -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    if not extras:
        print(*project["dependencies"], sep="\n")
    for extra in extras:
        known = project["optional-dependencies"]
        if extra not in known:
            raise SystemExit(f"requirements.py: no extra named {extra!r} in pyproject.toml; it has {sorted(known)}")
        print(*known[extra], sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
