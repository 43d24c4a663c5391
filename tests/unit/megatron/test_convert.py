"""Models in and out: imports, exports of sharded models and of training checkpoints keep every bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_mc.config import Config, to_yaml
from grpo_mc.data.tokenizer import load_tokenizer
from grpo_mc.megatron.convert import export_model, import_model, load_model_weights, save_hf
from grpo_mc.megatron.hf_checkpoint import open_checkpoint


def weights(folder: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.tensor(name) for name in checkpoint.names()}


def different(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that are not the same bit for bit."""
    assert mine.keys() == theirs.keys()
    return [
        name for name in mine if mine[name].dtype != theirs[name].dtype or not torch.equal(mine[name], theirs[name])
    ]


def sharded(folder: Path, *, init_weights: bool = True, **degrees: int) -> tuple[Any, Any]:
    """(mesh, this rank's model) of a folder's weights."""
    from grpo_mc.megatron.mesh import build_mesh
    from grpo_mc.megatron.model import build_model, policy_config
    from grpo_mc.megatron.weights import load_weights

    mesh = build_mesh(**degrees)
    source = open_checkpoint(folder)
    model = build_model(source.architecture, mesh, policy_config(source.architecture, mesh))
    if init_weights:
        load_weights(model, source, mesh)
    return mesh, model


@pytest.fixture
def one_process() -> Iterator[None]:
    """Ends the process group of a test that starts one in this process."""
    import torch.distributed as dist

    from grpo_mc.megatron.mesh import destroy_mesh

    was_there = dist.is_initialized()
    yield
    if not was_there:
        destroy_mesh()


def write_run(run_dir: Path, model: Path) -> None:
    """A run directory with the config.yaml of a run on `model`."""
    run_dir.mkdir(parents=True)
    config = {
        "model": {"path": str(model)},
        "rollout": {"group_size": 2, "max_new_tokens": 2},
        "run": {"dir": str(run_dir), "steps": 1},
    }
    (run_dir / "config.yaml").write_text(to_yaml(Config.model_validate(config)))


def save_steps(run_dir: Path, model: Any, mesh: Any, *steps: int) -> None:
    """Checkpoints of the model in which every parameter is `step` larger than at first."""
    from grpo_mc.config import AlgorithmConfig, OptimizerConfig
    from grpo_mc.megatron.checkpoint import save_checkpoint
    from grpo_mc.megatron.train_step import Policy

    policy = Policy(model, mesh, algorithm=AlgorithmConfig(), optimizer=OptimizerConfig(lr=1e-3), temperature=1.0)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    for step in steps:
        for parameter, value in zip(model.parameters(), start, strict=True):
            parameter.data.copy_(value + step)
        save_checkpoint(policy, mesh, run_dir / "checkpoints" / f"step_{step}", {"step": step})


def moved(folder: Path, step: int) -> dict[str, Tensor]:
    return {name: tensor + step for name, tensor in weights(folder).items()}


def test_import_of_a_folder_keeps_every_bit_and_the_tokenizer(family_model: tuple[str, Path], tmp_path: Path) -> None:
    folder = import_model(family_model[1], tmp_path / "made" / "model")
    assert different(weights(folder), weights(family_model[1])) == []
    assert open_checkpoint(folder).architecture == open_checkpoint(family_model[1]).architecture
    mine, theirs = load_tokenizer(folder), load_tokenizer(family_model[1])
    chat = [{"role": "user", "content": "caf\u00e9 <|im_end|> 12"}]
    assert mine.encode_chat(chat).tolist() == theirs.encode_chat(chat).tolist()
    assert (mine.eos_ids, mine.pad_id, mine.bos_id) == (theirs.eos_ids, theirs.pad_id, theirs.bos_id)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == theirs.eos_ids[0]


def test_import_in_bf16_rounds_each_weight_once(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = import_model(tiny_model("qwen2"), tmp_path / "model", dtype="bf16")
    rounded = {name: tensor.bfloat16() for name, tensor in weights(tiny_model("qwen2")).items()}
    assert different(weights(folder), rounded) == []


def test_an_exported_folder_imports_to_the_same_bits(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    first = import_model(tiny_model("mixtral"), tmp_path / "first", dtype="bf16")
    second = import_model(first, tmp_path / "second", dtype="bf16")
    for path in first.iterdir():
        assert (second / path.name).read_bytes() == path.read_bytes(), path.name


def test_bad_sources_and_destinations_are_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source, taken, bare = tiny_model("llama"), tmp_path / "taken", tmp_path / "bare"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="taken exists and is not empty"):
        import_model(source, taken)
    shutil.copytree(source, bare)
    (bare / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer .*bare.*tokenizer.json does not exist"):
        import_model(bare, tmp_path / "out")
    with pytest.raises(ValueError, match="dtype is 'fp16'; use one of fp32, bf16"):
        import_model(source, tmp_path / "out", dtype="fp16")
    with pytest.raises(ValueError, match="'nowhere' does not exist"):
        import_model("nowhere", tmp_path / "out")
    with pytest.raises(ValueError, match="largest token id is 258, but the model has 256"):
        import_model(tiny_model("llama", vocab_size=256, eos_token_id=2, pad_token_id=2), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "taken"]


def test_saving_the_model_in_memory(tiny_model: Callable[..., Path], tmp_path: Path, one_process: None) -> None:
    source = tiny_model("qwen3")
    mesh, model = sharded(source)
    tokenizer = load_tokenizer(source)
    folder = save_hf(model, mesh, tmp_path / "model", tokenizer, "fp32")
    assert different(weights(folder), weights(source)) == []
    assert load_tokenizer(folder).encode("1 + 1").tolist() == tokenizer.encode("1 + 1").tolist()
    with pytest.raises(ValueError, match="exists and is not empty"):
        save_hf(model, mesh, folder, tokenizer, "fp32")
    save_hf(model, mesh, folder, tokenizer, "bf16", overwrite=True)
    assert {tensor.dtype for tensor in weights(folder).values()} == {torch.bfloat16}


def test_export_of_a_run_takes_its_newest_complete_checkpoint(
    tiny_model: Callable[..., Path], tmp_path: Path, one_process: None
) -> None:
    source, run_dir = tiny_model("llama"), tmp_path / "run"
    write_run(run_dir, source)
    mesh, model = sharded(source)
    save_steps(run_dir, model, mesh, 2, 10, 30)
    (run_dir / "checkpoints" / "step_30" / "COMPLETE").unlink()  # a save that was killed (H23)
    assert different(weights(export_model(run_dir, tmp_path / "newest")), moved(source, 10)) == []
    step_2 = run_dir / "checkpoints" / "step_2"
    assert different(weights(export_model(step_2, tmp_path / "step_2")), moved(source, 2)) == []
    assert open_checkpoint(tmp_path / "newest").architecture == open_checkpoint(source).architecture
    assert load_tokenizer(tmp_path / "newest").encode("a1").tolist() == load_tokenizer(source).encode("a1").tolist()
    load_model_weights(model, step_2)
    assert different(weights(save_hf(model, mesh, tmp_path / "live", load_tokenizer(source))), moved(source, 2)) == []
    with pytest.raises(ValueError, match="step_30 is no complete checkpoint: COMPLETE is missing"):
        export_model(run_dir / "checkpoints" / "step_30", tmp_path / "out")


def test_export_needs_the_config_of_the_first_model_and_not_its_weights(
    tiny_model: Callable[..., Path], tmp_path: Path, one_process: None
) -> None:
    source, run_dir = tmp_path / "source", tmp_path / "run"
    shutil.copytree(tiny_model("mixtral"), source)
    write_run(run_dir, source)
    mesh, model = sharded(source)
    save_steps(run_dir, model, mesh, 1)
    expected = moved(source, 1)
    for path in source.glob("*.safetensors"):
        path.unlink()
    assert different(weights(export_model(run_dir, tmp_path / "model")), expected) == []
    shutil.copyfile(tiny_model("llama") / "config.json", source / "config.json")
    with pytest.raises(ValueError, match="step_1 was saved with family = 'mixtral' but the model .* has 'llama'"):
        export_model(run_dir, tmp_path / "out")
    (run_dir / "config.yaml").unlink()
    with pytest.raises(ValueError, match="config.yaml is missing, which names the model and tokenizer"):
        export_model(run_dir, tmp_path / "out")


def test_paths_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere does not exist; give a run directory"):
        export_model(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(ValueError, match="has no checkpoints folder"):
        export_model(tmp_path, tmp_path / "out")
    (tmp_path / "checkpoints" / "step_4.tmp").mkdir(parents=True)
    with pytest.raises(ValueError, match="no complete checkpoint; step_4.tmp is not complete: a save that did not end"):
        export_model(tmp_path, tmp_path / "out")


def save_from_two_ranks(source: Path, folder: Path, layouts: list[dict[str, int]]) -> list[str]:
    """In each layout a good export, two that rank 0 cannot write, and a checkpoint; the errors that this rank saw."""
    from megatron.core import parallel_state

    tokenizer = load_tokenizer(source)
    errors = []
    for number, degrees in enumerate(layouts):
        mesh, model = sharded(source, **degrees)
        model_dir = save_hf(model, mesh, folder / f"model_{number}", tokenizer, "fp32")
        for target in (model_dir, model_dir / "config.json" / "below"):  # taken; a file is no parent
            try:
                save_hf(model, mesh, target, tokenizer, "fp32")
            except (ValueError, OSError) as error:
                errors.append(f"{type(error).__name__}: {error}")
        save_steps(folder / f"run_{number}", model, mesh, 1)
        parallel_state.destroy_model_parallel()
    return errors


@pytest.mark.dist
def test_ranks_write_one_folder_or_all_raise(
    tiny_model: Callable[..., Path], tmp_path: Path, run_distributed: Callable[..., Any], one_process: None
) -> None:
    """tp=2 pads the vocabulary of 265 to 266; neither the folder nor the export of the checkpoint may show it."""
    source = tiny_model("llama", vocab_size=265)
    layouts = [{"tp": 2}, {"pp": 2}]
    for number in range(len(layouts)):
        write_run(tmp_path / f"run_{number}", source)
    errors = run_distributed(save_from_two_ranks, 2, source, tmp_path, layouts, init=False)
    assert errors[0] == errors[1] and len(errors[0]) == 2 * len(layouts), errors
    assert errors[0][0].startswith("ValueError: export model: ")
    for number in range(len(layouts)):
        assert different(weights(tmp_path / f"model_{number}"), weights(source)) == []
        exported = export_model(tmp_path / f"run_{number}", tmp_path / f"exported_{number}")
        assert different(weights(exported), moved(source, 1)) == []
