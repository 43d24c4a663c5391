"""Opening folders of weights: every damaged or unsuitable one is one ValueError that names the file and the remedy."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_mc.megatron.hf_checkpoint import open_checkpoint
from grpo_mc.megatron.safetensors_file import read_header, read_tensor


@pytest.fixture
def folder(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A model folder of the test's own, to be damaged."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def message(folder: Path | str) -> str:
    with pytest.raises(ValueError) as caught:
        open_checkpoint(folder)
    return str(caught.value)


def test_tensors_are_those_the_safetensors_library_reads(family_model: tuple[str, Path]) -> None:
    checkpoint = open_checkpoint(family_model[1])
    theirs = load_file(family_model[1] / "model.safetensors")
    assert sorted(checkpoint.names()) == sorted(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(checkpoint.tensor(name), tensor)
        assert (checkpoint.shape(name), checkpoint.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(checkpoint.tensor(name, rows=(3, 7)), theirs[name][3:7])
    assert checkpoint.tensor(name, rows=(5, 5)).shape == (0, theirs[name].shape[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_dtype_is_read_as_stored(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5).to(dtype), "scalar": torch.tensor(2.5, dtype=dtype), "none": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "x.safetensors")
    entries = read_header(tmp_path / "x.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(read_tensor(entries[name]), tensor)


def test_tensors_of_several_files_are_found_by_the_index(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = list(tensors)
    save_file({name: tensors[name] for name in names[:9]}, folder / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] for name in names[9:]}, folder / "model-00002-of-00002.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 if i < 9 else 2}-of-00002.safetensors" for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    checkpoint = open_checkpoint(folder)
    assert all(torch.equal(checkpoint.tensor(name), tensors[name]) for name in names)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors is missing" in message(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    assert "points outside its folder" in message(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "weight_map" in message(folder)


def test_reading_keeps_no_more_than_the_tensor_in_memory(tmp_path: Path) -> None:
    save_file({f"t{i}": torch.ones(4_000_000) for i in range(8)}, tmp_path / "x.safetensors")  # 8 x 16 MB

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    for entry in read_header(tmp_path / "x.safetensors").values():
        assert read_tensor(entry)[-1] == 1
        assert resident_bytes() - before < 40_000_000


@pytest.mark.parametrize("keep", [0, 5, 100, 5_000, -1])
def test_truncated_file_is_noticed_before_any_tensor_is_read(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    text = message(folder)
    assert str(path) in text and "download or copy the file again" in text


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        b'{"a": ' + b"[" * 100_000,
        # Two tensors over the same bytes; half over each other; the end right but a gap before it.
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
        b' "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]},'
        b' "b": {"dtype": "BF16", "shape": [1], "data_offsets": [1, 3]},'
        b' "c": {"dtype": "F16", "shape": [1], "data_offsets": [2, 4]}}',
        b'{"a": {"dtype": "F16", "shape": [1], "data_offsets": [2, 4]}}',
    ],
)
def test_damaged_header_is_one_clear_error(folder: Path, header: bytes) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\0\0")
    text = message(folder)
    assert str(path) in text and "download or copy the file again" in text


def test_tensors_in_any_order_and_empty_ones_fill_a_file(tmp_path: Path) -> None:
    header = (
        b'{"b": {"dtype": "F16", "shape": [1], "data_offsets": [2, 4]},'
        b' "none": {"dtype": "F32", "shape": [0, 3], "data_offsets": [2, 2]},'
        b' "a": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}'
    )
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\x3c\0\x40")
    entries = read_header(path)
    assert [float(read_tensor(entries[name])) for name in ("a", "b")] == [1.0, 2.0]
    assert read_tensor(entries["none"]).shape == (0, 3)


def test_file_that_shrinks_after_opening_is_noticed(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="model.safetensors ends early"):
        for name in checkpoint.names():
            checkpoint.tensor(name)


def test_quantised_dtype_is_refused_by_name(folder: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}, folder / "model.safetensors")
    text = message(folder)
    assert "I8" in text and "model.norm.weight" in text and "unquantised" in text


def test_pickle_files_are_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    text = message(folder)
    assert "pytorch_model.bin is a pickle file" in text and "safetensors" in text
    assert "pickle" in message(folder / "pytorch_model.bin")


def test_folder_without_weights_and_path_that_is_none(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "has no .safetensors file" in message(folder)
    assert "does not exist" in message(folder / "nowhere")
    assert "is a file" in message(folder / "config.json")


def test_weights_of_another_model_are_refused(folder: Path, tiny_model: Callable[..., Path]) -> None:
    shutil.copy(tiny_model("llama", intermediate_size=64) / "model.safetensors", folder)
    text = message(folder)
    assert "mlp.gate_proj.weight" in text and "[64, 64]" in text and "[96, 64]" in text
    shutil.copy(tiny_model("llama", num_hidden_layers=2) / "model.safetensors", folder)
    assert "lacks 18 of the 38 tensors" in message(folder)


def test_a_bias_the_architecture_has_no_place_for_is_not_dropped_silently(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}, folder / "model.safetensors")
    assert "model.layers.0.self_attn.o_proj.bias" in message(folder)


def test_derived_buffers_and_a_stored_copy_of_a_tied_head_are_ignored(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
    }
    save_file(tensors | extra, folder / "model.safetensors")
    assert sorted(open_checkpoint(folder).names()) == sorted(tensors)


def test_tensor_in_two_files_is_refused(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "model-copy.safetensors")
    text = message(folder)
    assert "model-copy.safetensors" in text and "model.safetensors" in text


def test_unknown_name_asked_for(folder: Path) -> None:
    with pytest.raises(ValueError, match="no tensor 'lm_head.weight'"):
        open_checkpoint(folder).tensor("lm_head.weight")
