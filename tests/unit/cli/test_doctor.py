"""doctor: every check alone, on a machine that is good and on one that is not; the bounded probe."""

from __future__ import annotations

import importlib.metadata
import json
import re
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from grpo_mc.cli import calls, doctor_checks, probe
from grpo_mc.cli.doctor_checks import REQUIRED, TESTED, Check, version_key
from grpo_mc.cli.program import main

REPOSITORY = Path(__file__).resolve().parents[3]


def test_ranges_are_those_of_the_package_metadata() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=]", line)[0]: line for line in project["dependencies"]}
    for name, (lowest, below, _) in TESTED.items():
        assert declared[name] == f"{name}>={lowest},<{below}"
    assert set(declared) == set(TESTED) | set(REQUIRED)
    assert project["requires-python"] == ">=3.11,<3.14"


@pytest.mark.parametrize(
    ("found", "status"),
    [("2.13.0", "ok"), ("2.13.0+cpu", "ok"), ("2.11.1", "ok"), ("2.10.9", "fail"), ("2.15.0", "fail"),
     ("2.15.0rc1", "fail"), ("2.9", "fail"), ("dev", "fail")],
)  # fmt: skip
def test_versions(monkeypatch: pytest.MonkeyPatch, found: str, status: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    check = doctor_checks.check_version("torch")
    assert check.status == status
    assert bool(check.advice) == (status == "fail")


def test_version_numbers() -> None:
    assert version_key("2.13.0rc1") == (2, 13, 0)
    assert version_key("x") == ()
    assert version_key("2.9") < version_key("2.11")


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert doctor_checks.check_version("torch") == Check(
        "torch", "fail", "not installed; needs >=2.11,<2.15", "pip install 'torch>=2.11,<2.15'"
    )
    assert "gguf" in doctor_checks.check_packages().advice


def test_operators_that_do_not_load_are_a_failure_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> dict[str, Any]:
        raise ImportError("grpo_mc.ops: not built\nmore")

    monkeypatch.setattr(calls, "operators_info", broken)
    check = doctor_checks.check_operators()
    assert (check.status, check.detail) == ("fail", "grpo_mc.ops: not built")
    assert "build" in check.advice


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({}, "(2 threads of 4 cores), not built for CUDA"),
        ({"threads": 1, "cpus": 1}, "(1 thread of 1 core), not built for CUDA"),
        ({"cuda_library": True}, "built for CUDA, but no CUDA device is usable"),
        ({"cuda_library": True, "devices": ["cpu", "cuda"]}, "built for CUDA"),
    ],
)
def test_operators_are_described_in_words(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], end: str) -> None:
    info = {"version": "0.1", "built_torch": "2.13.0", "torch": "2.13.0", "devices": ["cpu"], "cuda_library": False,
            "cpu_isa": "avx2", "threads": 2, "cpus": 4, **changes}  # fmt: skip
    monkeypatch.setattr(calls, "operators_info", lambda: info)
    check = doctor_checks.check_operators()
    assert check.detail.startswith("version 0.1, built with torch 2.13.0, avx2 code on the CPU")
    assert check.detail.endswith(end)


def test_what_the_operators_say_here_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "built with torch" in doctor_checks.operators_text(calls.operators_info())


def test_no_package_is_named_that_nothing_uses() -> None:
    """vllm and flash-attn were offered as extras and looked for by doctor; Megatron-Core takes Transformer Engine."""
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) == {"gpu", "tensorboard", "wandb", "bench", "dev"}


def test_too_many_threads_for_the_cores_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    assert doctor_checks.check_processor().status == "warn"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert doctor_checks.check_processor().status == "ok"


def test_writing_is_tried_and_leaves_nothing(tmp_path: Path) -> None:
    assert doctor_checks.check_writable("working directory", tmp_path).status == "ok"
    assert list(tmp_path.iterdir()) == []
    check = doctor_checks.check_writable("cache", tmp_path / "none")
    assert check.status == "fail" and "GRPO_MC_CACHE" in check.advice


def test_the_cache_is_looked_for_at_its_nearest_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_MC_CACHE", str(tmp_path / "a" / "b"))
    assert doctor_checks.cache_directory() == tmp_path


def test_a_small_disk_and_little_memory_are_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "MIN_DISK_BYTES", 1 << 62)
    monkeypatch.setattr(doctor_checks, "group_limit", lambda: 1_000_000)
    assert doctor_checks.check_disk(tmp_path).status == "warn"
    check = doctor_checks.check_memory()
    assert check.status == "warn" and "limited to 0.0 GB" in check.detail


def test_ports() -> None:
    assert doctor_checks.check_port().status == "ok"


@pytest.mark.dist
def test_the_process_group_probe_works_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")  # what a surrounding launch set does not disturb it
    problem, seconds = probe.probe_process_group(60.0)
    assert problem == ""
    assert seconds < 60


def test_the_probe_is_bounded_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_CHILD", "import time; time.sleep(600)")
    started = time.monotonic()
    problem, _ = probe.probe_process_group(1.0)
    assert "within the bound" in problem
    assert time.monotonic() - started < 10


def test_the_probe_tells_what_the_child_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_CHILD", "raise RuntimeError('no interface eth7')")
    assert probe.probe_process_group(30.0)[0] == "RuntimeError: no interface eth7"


def test_the_command_fails_only_on_failures(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    checks = [Check("a", "ok", "fine"), Check("b", "warn", "slow", "do this")]
    monkeypatch.setattr(doctor_checks, "all_checks", lambda timeout_s: iter(checks))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "WARN b                     slow\n" in out and "-> do this" in out
    assert out.endswith("0 failed, 1 warning\n")
    checks.append(Check("c", "fail", "broken", "mend it"))
    assert main(["doctor", "--json"]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["status"] for row in rows] == ["ok", "warn", "fail"]
