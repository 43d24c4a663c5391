"""Every folder of tests is looked into: pytest leaves some names out by default, "dist" among them."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def test_no_folder_with_tests_is_left_out(pytestconfig: pytest.Config) -> None:
    patterns = pytestconfig.getini("norecursedirs")
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    left_out = [str(folder) for folder in folders for part in folder.parts for p in patterns if fnmatch(part, p)]
    assert len(folders) > 10 and Path("dist") in folders
    assert not left_out, f"pytest does not look into {left_out}; see norecursedirs in pytest.ini"
