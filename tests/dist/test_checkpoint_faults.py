"""What goes wrong around a save or a load: a kill, a full disk, folders that are not whole, the wrong model.

Two launches: one process is killed in a save; two processes resume from what it left, and meet every other fault.
"""

from __future__ import annotations

import builtins
import errno
import logging
import os
import resource
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import ProcessFailure, run_distributed
from helpers.tiny_models import build_tiny_model

pytestmark = pytest.mark.dist

Found = list[dict[str, Any]]
"""What each rank found, by case."""


def _names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def _message(call: Callable[[], Any], kind: type[BaseException]) -> str:
    """What the call raises, all on one line."""
    try:
        call()
    except kind as error:
        assert type(error) is kind, repr(error)
        return str(error).replace("\n", " ")
    return "nothing was raised"


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    old = vars(owner).get(name)
    setattr(owner, name, value)
    yield
    if old is None:
        delattr(owner, name)
    else:
        setattr(owner, name, old)


def _flip_bits(path: Path) -> None:
    """Damages the middle of a file; its size stays."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(byte ^ 0xFF for byte in content[middle : middle + 64])
    path.write_bytes(content)


def _start(model: Path) -> tuple[Any, Any]:
    from grpo_mc.megatron.mesh import build_mesh
    from helpers.tiny_policy import build_policy, train_step

    mesh = build_mesh(timeout_s=60)
    policy = build_policy(mesh, model)
    train_step(policy, mesh, 0)
    return policy, mesh


def _killed_in_a_save(root: Path, model: Path) -> None:
    from grpo_mc.megatron import checkpoint_storage
    from grpo_mc.megatron.checkpoint import save_checkpoint

    policy, mesh = _start(model)
    save_checkpoint(policy, mesh, root / "step_1", {"step": 1})
    written = []

    def save_some(tensor: Any, stream: Any) -> None:
        written.append(stream.write(b"half a tensor"))
        if len(written) > 5:
            stream.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint_storage._save_tensor = save_some
    save_checkpoint(policy, mesh, root / "step_2", {"step": 2})


def _resume_and_fail(root: Path, model: Path, other_model: Path) -> dict[str, Any]:
    """Every fault that leaves both ranks alive: the messages, and what then lies in the folder."""
    import torch.distributed as dist

    from grpo_mc.megatron import checkpoint_files, checkpoint_storage
    from grpo_mc.megatron.checkpoint import CheckpointError, find_latest, load_checkpoint, save_checkpoint
    from helpers.tiny_policy import adam_states, build_policy

    policy, mesh = _start(model)
    found: dict[str, Any] = {}

    def save(step: int, extra: Any = None) -> None:
        save_checkpoint(policy, mesh, root / f"step_{step}", extra or {"step": step})

    def full(path: Path, mode: str) -> Any:
        is_full = mesh.rank == 1 and "optimizer" in path.name
        return builtins.open("/dev/full", "wb") if is_full else builtins.open(path, mode)

    def no_manifest(folder: Path, shard_files: list[str]) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # Rank 1 looks at a folder that does not exist: rank 0's answer counts.
    latest = find_latest(root if mesh.rank == 0 else root / "missing")
    found["latest"] = latest.step, [path.name for path, _ in latest.ignored]
    found["extra"] = load_checkpoint(policy, mesh, root / "step_1")
    states = adam_states(policy)
    watch = _Watch()
    with _replaced(checkpoint_storage, "_save_tensor", watch):
        save(2)
    found["tensors"] = watch.seen, watch.at_once
    found["saved again"] = find_latest(root), _names(root)

    with _replaced(checkpoint_storage, "open", full):
        found["full for rank 1"] = _message(lambda: save(3), CheckpointError), _names(root)
    with _replaced(checkpoint_files, "write_manifest", no_manifest):
        found["full for rank 0"] = _message(lambda: save(3), CheckpointError), _names(root)
    with _replaced(checkpoint_storage, "_save_tensor", _press_ctrl_c if mesh.rank == 1 else watch):
        found["Ctrl-C"] = _message(lambda: save(3), KeyboardInterrupt), _names(root)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    found["limited"] = _message(lambda: save(3), CheckpointError), _names(root)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    found["no JSON"] = _message(lambda: save(3, {"sampler": {1, 2}}), ValueError), _names(root)

    other = build_policy(mesh, other_model)
    found["other model"] = _message(lambda: load_checkpoint(other, mesh, root / "step_1"), ValueError)
    found["no such step"] = _message(lambda: load_checkpoint(policy, mesh, root / "step_9"), ValueError)
    with _replaced(checkpoint_files, "CHECKSUM_LIMIT_BYTES", 0):  # as if these files were large
        save(4)
    dist.barrier()
    if mesh.rank == 1:
        _flip_bits(root / "step_4" / "weights_0.distcp")
    dist.barrier()
    found["flipped bits"] = _message(lambda: load_checkpoint(policy, mesh, root / "step_4"), CheckpointError)
    load_checkpoint(policy, mesh, root / "step_1")
    found["step_1 is as it was"] = all(bool((a == b).all()) for a, b in zip(states, adam_states(policy), strict=True))
    return found


def _press_ctrl_c(tensor: Any, stream: Any) -> None:
    raise KeyboardInterrupt("pressed")


class _Watch:
    """Saves tensors and counts how many of those that it was handed are alive at once."""

    def __init__(self) -> None:
        from grpo_mc.megatron import checkpoint_storage

        self._save = checkpoint_storage._save_tensor
        self._references: list[weakref.ref[Any]] = []
        self.at_once = 0

    @property
    def seen(self) -> int:
        return len(self._references)

    def __call__(self, tensor: Any, stream: Any) -> None:
        self._references.append(weakref.ref(tensor))
        self.at_once = max(self.at_once, sum(reference() is not None for reference in self._references))
        self._save(tensor, stream)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What _resume_and_fail gave on each rank, in the folder that _killed_in_a_save left."""
    folder = tmp_path_factory.mktemp("faults")
    model = build_tiny_model(folder / "model", num_hidden_layers=2)
    other_model = build_tiny_model(folder / "other", num_hidden_layers=3)
    root = folder / "checkpoints"
    with pytest.raises(ProcessFailure, match="status -9"):
        run_distributed(_killed_in_a_save, 1, root, model, init=False, timeout_s=300)
    assert _names(root) == ["step_1", "step_2.tmp"]
    assert (root / "step_2.tmp" / "weights_0.distcp").stat().st_size > 0
    return run_distributed(_resume_and_fail, 2, root, model, other_model, init=False, timeout_s=300)


def test_a_kill_in_the_middle_of_a_save_leaves_a_folder_to_resume_from(faults: Found) -> None:
    """H23, with a real SIGKILL, and resumed on two processes; the step that was being saved is then saved again."""
    for found in faults:
        assert found["extra"] == {"step": 1}
        latest, names = found["saved again"]
        assert (latest.step, latest.ignored) == (2, ())
        assert names == ["step_1", "step_2"]


def test_all_ranks_agree_on_the_latest_checkpoint(faults: Found) -> None:
    """H23."""
    assert [found["latest"] for found in faults] == [(1, ["step_2.tmp"])] * 2


def test_a_save_copies_one_tensor_at_a_time(faults: Found) -> None:
    """Weights lie in the gradient buckets' flat buffers, so each is copied to be written; never all of them at once."""
    for found in faults:
        num_tensors, at_once = found["tensors"]
        assert num_tensors > 10
        assert at_once == 1


@pytest.mark.parametrize(
    ("case", "rank", "reason"),
    [
        ("full for rank 1", 1, "No space left on device"),
        ("full for rank 0", 0, "No space left on device"),
        ("limited", 0, "File too large"),
    ],
)
def test_a_full_disk_is_one_clear_error_and_leaves_nothing(faults: Found, case: str, rank: int, reason: str) -> None:
    """Every rank says which rank could not write, and why; the temporary folder is gone."""
    for found in faults:
        message, names = found[case]
        assert message.startswith("save checkpoint ") and f"step_3: rank {rank}: " in message
        assert reason in message and "GB are free" in message and "checkpoint.keep_last" in message
        assert "Traceback" not in message
        assert names == ["step_1", "step_2"]


def test_ctrl_c_in_a_save_leaves_nothing(faults: Found) -> None:
    for found in faults:
        assert found["Ctrl-C"] == ("pressed", ["step_1", "step_2"])


def test_host_state_that_is_no_json_is_refused_before_anything_is_written(faults: Found) -> None:
    for found in faults:
        message, names = found["no JSON"]
        assert "set is not JSON serializable" in message
        assert names == ["step_1", "step_2"]


def test_a_checkpoint_of_another_model_is_refused(faults: Found) -> None:
    for found in faults:
        assert "step_1 was saved with num_layers = 2 but the model has 3" in found["other model"]


def test_loading_an_incomplete_checkpoint_is_refused(faults: Found) -> None:
    for found in faults:
        assert "step_9 is no complete checkpoint: COMPLETE is missing" in found["no such step"]


def test_flipped_bits_are_found_when_they_are_loaded(faults: Found) -> None:
    """The manifest has no checksum of large files; every tensor carries its own."""
    for found in faults:
        assert ": the content of weights_0.distcp is not what was written" in found["flipped bits"]
        assert "remove this folder to go on from an earlier checkpoint" in found["flipped bits"]


def test_failed_saves_leave_earlier_checkpoints_untouched(faults: Found) -> None:
    assert all(found["step_1 is as it was"] for found in faults)


def test_incomplete_checkpoints_are_warned_of_without_processes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from grpo_mc.megatron.checkpoint import find_latest, prune

    (tmp_path / "step_3").mkdir()
    (tmp_path / "step_4.tmp").mkdir()
    with caplog.at_level(logging.WARNING):
        found = find_latest(tmp_path)
    prune(tmp_path, 1, set())
    assert found.path is None and len(found.ignored) == 2
    assert "step_3 is ignored: COMPLETE is missing" in caplog.text
    assert "step_4.tmp is ignored" in caplog.text
    assert _names(tmp_path) == ["step_3", "step_4.tmp"]
