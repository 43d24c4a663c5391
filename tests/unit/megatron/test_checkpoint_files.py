"""The file-system protocol of checkpoints, on folders that no model has written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_mc.megatron import checkpoint_files
from grpo_mc.megatron.checkpoint_files import (
    MANIFEST,
    MARKER,
    CheckpointError,
    fault_of,
    prune_folder,
    publish,
    scan,
    temporary_path,
    write_manifest,
)

SHARDS = ["weights_0.distcp", "optimizer_0.distcp", "optimizer_1.distcp"]


def _write(root: Path, step: int, published: bool = True) -> Path:
    """A checkpoint of small files; with published=False a save that stopped just before its end."""
    directory = root / f"step_{step}"
    temporary = temporary_path(directory)
    temporary.mkdir(parents=True)
    for number, name in enumerate((*SHARDS, ".metadata", "state.json")):
        (temporary / name).write_bytes(bytes([number]) * (100 + step))
    write_manifest(temporary, SHARDS)
    if published:
        publish(temporary, directory)
    return directory


def _tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def _reasons(root: Path) -> dict[str, str]:
    return {path.name: reason for path, reason in scan(root).ignored}


def test_half_written_checkpoints_are_ignored_named_and_left_alone(tmp_path: Path) -> None:
    """H23: step_10 complete; step_20 without optimizer state; step_30 with a truncated file; stray step_40.tmp."""
    step_10 = _write(tmp_path, 10)
    step_20 = _write(tmp_path, 20)
    for name in SHARDS[1:]:
        (step_20 / name).unlink()
    truncated = _write(tmp_path, 30) / "weights_0.distcp"
    truncated.write_bytes(truncated.read_bytes()[:-1])
    _write(tmp_path, 40, published=False)
    before = _tree(tmp_path)

    found = scan(tmp_path)

    assert (found.path, found.step) == (step_10, 10)
    reasons = _reasons(tmp_path)
    assert set(reasons) == {"step_20", "step_30", "step_40.tmp"}
    assert "optimizer_0.distcp is missing" in reasons["step_20"]
    assert "weights_0.distcp has 129 bytes where 130 were written" in reasons["step_30"]
    assert "did not end" in reasons["step_40.tmp"]
    assert _tree(tmp_path) == before


@pytest.mark.parametrize("name", [*SHARDS, ".metadata", "state.json", MANIFEST, MARKER])
def test_any_damaged_file_makes_a_checkpoint_incomplete(tmp_path: Path, name: str) -> None:
    directory = _write(tmp_path, 1)
    assert fault_of(directory) is None
    path = directory / name
    content = path.read_bytes()
    for damaged in (content[:-1], b"", content[:-1] + bytes([content[-1] ^ 1])):
        path.write_bytes(damaged)
        assert name in str(fault_of(directory))
    path.unlink()
    assert f"{name} is missing" in str(fault_of(directory))
    path.write_bytes(content)
    assert fault_of(directory) is None


def test_a_manifest_without_optimizer_state_is_incomplete(tmp_path: Path) -> None:
    """H23: a checkpoint whose save never came to the optimizer, though what it lists is all there."""
    directory = tmp_path / "step_3"
    temporary = temporary_path(directory)
    temporary.mkdir()
    (temporary / "weights_0.distcp").write_bytes(b"w")
    write_manifest(temporary, ["weights_0.distcp"])
    publish(temporary, directory)
    assert fault_of(directory) == "it holds no optimizer"


def test_a_kill_between_rename_and_marker_leaves_no_checkpoint(tmp_path: Path) -> None:
    _write(tmp_path, 1)
    (_write(tmp_path, 2) / MARKER).unlink()
    assert scan(tmp_path).step == 1
    assert "COMPLETE is missing" in _reasons(tmp_path)["step_2"]


def test_the_marker_is_written_after_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    def note(path: Path, content: bytes) -> None:
        written.append((path.name, path.parent.name))
        path.write_bytes(content)

    monkeypatch.setattr(checkpoint_files, "write_synced", note)
    _write(tmp_path, 7)
    assert written == [(MANIFEST, "step_7.tmp"), (MARKER, "step_7")]


def test_steps_are_compared_as_numbers(tmp_path: Path) -> None:
    for step in (9, 10, 100, 20):
        _write(tmp_path, step)
    (tmp_path / "step_best").mkdir()
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    found = scan(tmp_path)
    assert found.step == 100
    assert found.ignored == ()


def test_no_folder_and_an_empty_one_have_no_checkpoint(tmp_path: Path) -> None:
    assert scan(tmp_path / "missing").path is None
    assert scan(tmp_path).path is None


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    directory = _write(tmp_path, 5)
    (directory / "state.json").unlink()  # whole or not
    temporary = temporary_path(directory)
    temporary.mkdir()
    for name in SHARDS:
        (temporary / name).write_bytes(b"new")
    write_manifest(temporary, SHARDS)
    publish(temporary, directory)
    assert fault_of(directory) is None
    assert (directory / SHARDS[0]).read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["step_5"]


def test_a_shard_that_rank_zero_cannot_see_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "weights_0.distcp").write_bytes(b"w")
    with pytest.raises(CheckpointError, match="weights_3.distcp.*all hosts share"):
        write_manifest(tmp_path, ["weights_0.distcp", "weights_3.distcp"])


def test_large_files_are_listed_by_size_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "CHECKSUM_LIMIT_BYTES", 100)
    (tmp_path / "weights_0.distcp").write_bytes(b"x" * 101)
    (tmp_path / "state.json").write_bytes(b"x" * 100)
    write_manifest(tmp_path, ["weights_0.distcp"])
    files = json.loads((tmp_path / MANIFEST).read_text())["files"]
    assert files["weights_0.distcp"] == {"bytes": 101}
    assert set(files["state.json"]) == {"bytes", "crc32"}


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 9, 10):
        _write(tmp_path, step)
    removed = prune_folder(tmp_path, keep_last=2, keep={2, 77})
    assert [path.name for path in removed] == ["step_1", "step_3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_2", "step_9"]


def test_prune_neither_counts_nor_removes_incomplete_checkpoints(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        _write(tmp_path, step)
    (_write(tmp_path, 4) / MARKER).unlink()
    _write(tmp_path, 5, published=False)
    prune_folder(tmp_path, keep_last=2, keep=set())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2", "step_3", "step_4", "step_5.tmp"]


def test_prune_takes_the_marker_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        _write(tmp_path, step)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_files.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prune_folder(tmp_path, keep_last=1, keep=set())
    assert "COMPLETE is missing" in _reasons(tmp_path)["step_1"]


@pytest.mark.parametrize("keep_last", [0, -1])
def test_prune_refuses_to_keep_nothing(tmp_path: Path, keep_last: int) -> None:
    _write(tmp_path, 1)
    with pytest.raises(ValueError, match=f"keep_last is {keep_last}, needed at least 1"):
        prune_folder(tmp_path, keep_last, set())
    assert scan(tmp_path).step == 1
