"""The memory that may be used is the machine's, or a control group's limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_mc.data import host_memory
from grpo_mc.data.host_memory import group_limit, total_memory


def test_the_memory_of_this_machine_is_known_and_a_groups_limit_is_heeded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = total_memory()
    assert whole is not None and whole > 1 << 28
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path)
    for limit, expected in (("max", None), (str((1 << 63) - 4096), None), ("1000000\n", 1_000_000)):
        (tmp_path / "memory.max").write_text(limit)
        assert group_limit() == expected
        assert expected is None or total_memory() == expected
