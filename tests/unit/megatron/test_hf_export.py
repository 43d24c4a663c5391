"""Writing model folders: transformers loads them with the same logits; whatever fails leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from grpo_mc.megatron import hf_export
from grpo_mc.megatron.hf_checkpoint import Checkpoint, open_checkpoint
from grpo_mc.megatron.hf_export import write_hf_folder


def tensors_of(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    for name in checkpoint.names():
        yield name, checkpoint.tensor(name)


@pytest.fixture
def checkpoint(tiny_model: Any) -> Checkpoint:
    return open_checkpoint(tiny_model("llama"))


def logits(folder: Path) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(40)[None]).logits


def test_transformers_loads_an_export_with_identical_logits(family_model: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = family_model
    source = open_checkpoint(folder)
    tokenizer_files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    out = write_hf_folder(
        tmp_path / "export",
        source.architecture,
        reversed(list(tensors_of(source))),  # in any order
        dtype=torch.float32,
        tokenizer_files=tokenizer_files,
        max_shard_bytes=200_000,
    )
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert torch.equal(logits(out), logits(folder))
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_import_of_an_export_is_bit_exact(family_model: tuple[str, Path], tmp_path: Path) -> None:
    source = open_checkpoint(family_model[1])
    write_hf_folder(tmp_path / "export", source.architecture, tensors_of(source), dtype=torch.float32)
    again = open_checkpoint(tmp_path / "export")
    assert again.architecture == source.architecture
    assert again.names() == source.names()
    assert all(torch.equal(again.tensor(name), source.tensor(name)) for name in source.names())


def test_files_are_what_the_safetensors_library_reads(checkpoint: Checkpoint, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    out = write_hf_folder(tmp_path / "export", checkpoint.architecture, tensors_of(checkpoint), dtype=torch.bfloat16)
    loaded = load_file(out / "model.safetensors")
    assert sorted(loaded) == sorted(checkpoint.names())
    assert all(torch.equal(loaded[name], checkpoint.tensor(name).bfloat16()) for name in loaded)
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": 258, "pad_token_id": 258}


def test_shards_hold_to_their_size_and_the_index_lists_them(checkpoint: Checkpoint, tmp_path: Path) -> None:
    out = write_hf_folder(
        tmp_path / "export",
        checkpoint.architecture,
        tensors_of(checkpoint),
        dtype=torch.float32,
        max_shard_bytes=100_000,
    )
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(checkpoint.names())
    files = sorted(out.glob("*.safetensors"))
    assert {file.name for file in files} == set(index["weight_map"].values())
    assert all(file.stat().st_size < 100_000 + 8_000 for file in files)


@pytest.mark.parametrize("fault", ["missing", "twice", "unknown", "shape"])
def test_wrong_set_of_tensors_is_refused_and_leaves_nothing(checkpoint: Checkpoint, tmp_path: Path, fault: str) -> None:
    tensors = list(tensors_of(checkpoint))
    if fault == "missing":
        tensors.pop()
    elif fault == "twice":
        tensors.append(tensors[0])
    elif fault == "unknown":
        tensors.append(("lm_head.weight", tensors[0][1]))
    else:
        tensors[0] = (tensors[0][0], tensors[0][1][:-1])
    words = {
        "missing": "model.norm.weight",
        "twice": "given twice",
        "unknown": "lm_head.weight",
        "shape": r"\[263, 64\]",
    }
    with pytest.raises(ValueError, match=words[fault]):
        write_hf_folder(tmp_path / "export", checkpoint.architecture, tensors, dtype=torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_one_clear_error_and_leaves_nothing(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    with pytest.raises(OSError, match="MB free.*choose another folder"):
        write_hf_folder(tmp_path / "export", checkpoint.architecture, tensors_of(checkpoint), dtype=torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_disk_that_fills_up_on_the_way_leaves_nothing(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        written.append(len(data))
        if len(written) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="disk of .*export is full") as caught:
        write_hf_folder(tmp_path / "export", checkpoint.architecture, tensors_of(checkpoint), dtype=torch.float32)
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_interrupt_leaves_nothing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def interrupted() -> Iterator[tuple[str, Tensor]]:
        yield next(tensors_of(checkpoint))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_hf_folder(tmp_path / "export", checkpoint.architecture, interrupted(), dtype=torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_existing_folder_is_kept_unless_overwriting_is_asked_for(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        write_hf_folder(folder, checkpoint.architecture, tensors_of(checkpoint), dtype=torch.float32)
    assert (folder / "notes.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="missing"):  # a failed replacement leaves the old folder
        write_hf_folder(folder, checkpoint.architecture, [], dtype=torch.float32, overwrite=True)
    assert (folder / "notes.txt").exists()
    write_hf_folder(folder, checkpoint.architecture, tensors_of(checkpoint), dtype=torch.float32, overwrite=True)
    assert not (folder / "notes.txt").exists() and open_checkpoint(folder).names()
    assert list(tmp_path.iterdir()) == [folder]


def test_one_tensor_larger_than_a_shard_has_a_file_to_itself(checkpoint: Checkpoint) -> None:
    plan = hf_export.plan_shards(checkpoint.architecture, torch.float32, max_shard_bytes=10_000)
    assert list(plan[f"model-00001-of-{len(plan):05d}.safetensors"]) == ["model.embed_tokens.weight"]


def test_bad_arguments_are_refused_before_anything_is_written(checkpoint: Checkpoint, tmp_path: Path) -> None:
    arch = checkpoint.architecture
    with pytest.raises(ValueError, match="torch.int8"):
        write_hf_folder(tmp_path / "export", arch, [], dtype=torch.int8)
    with pytest.raises(ValueError, match="tokenizer.json is missing"):
        write_hf_folder(
            tmp_path / "export", arch, [], dtype=torch.float32, tokenizer_files=[tmp_path / "tokenizer.json"]
        )
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        write_hf_folder(tmp_path / "file", arch, [], dtype=torch.float32)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
