"""Compressed gradients inside Megatron-Core's DDP, on two real ranks: training follows, bad steps leave no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.compare import relative_error
from helpers.processes import run_distributed
from helpers.tiny_models import build_tiny_model

pytestmark = pytest.mark.dist

STEPS, LR = 8, 1e-3
"""On one batch, which is learnt by heart: the loss falls."""
MODELS = {"llama": {"num_hidden_layers": 2}, "mixtral": {"num_hidden_layers": 2}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family, changes in MODELS.items():
        build_tiny_model(folder / family, family, **changes)
    return folder


def _policy(folder: Path, compression: str, dtype: str = "fp32") -> Any:
    from grpo_mc.megatron.mesh import build_mesh
    from helpers.tiny_policy import build_policy

    mesh = build_mesh(timeout_s=60)
    return mesh, build_policy(mesh, folder, dtype, compression=compression)


def _error(policy: Any) -> list[torch.Tensor]:
    return [shard.data.clone() for shard in policy.compression.shards()]


def _same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) > 0 and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def trained(folder: Path) -> dict[Any, Any]:
    """Losses and norms of the steps, by model and format; first gradients; bucket groups that were given back."""
    from helpers.tiny_policy import train_step

    found: dict[Any, Any] = {}
    for family in MODELS:
        for compression in ("none", "int8", "int4"):
            mesh, policy = _policy(folder / family, compression)
            found[family, compression] = [train_step(policy, mesh, 0, LR) for _ in range(STEPS)]
            if policy.compression is not None:
                groups = policy.ddp.bucket_groups + policy.ddp.expert_parallel_bucket_groups
                found["groups", family] = ["start_grad_sync" in vars(group) for group in groups]
                policy.compression.uninstall()
                policy.compression.uninstall()  # does nothing
                found["given back", family] = not any("start_grad_sync" in vars(group) for group in groups)
                before = _error(policy)
                train_step(policy, mesh, 0)
                found["idle", family] = _same(before, _error(policy))
            policy.close()
    return found


def test_training_follows_the_uncompressed_one(models: Path) -> None:
    results = run_distributed(trained, 2, models, timeout_s=120)
    assert results[0] == results[1]
    for family in MODELS:
        exact, exact_norms = zip(*results[0][family, "none"], strict=True)
        fall = exact[0] - exact[-1]
        assert fall > 0.2
        for compression, norm_gap in (("int8", 1e-3), ("int4", 1e-2)):
            losses, norms = zip(*results[0][family, compression], strict=True)
            gaps = [abs(loss - want) / fall for loss, want in zip(losses, exact, strict=True)]
            assert gaps[0] == 0.0 and max(gaps) <= 0.05, (family, compression, gaps)  # a router changes its mind
            assert 0 < abs(norms[0] - exact_norms[0]) <= norm_gap * exact_norms[0], (family, compression)
        assert all(results[0]["groups", family]) and results[0]["given back", family] and results[0]["idle", family]


def bad_steps(folder: Path) -> dict[str, Any]:
    """A NaN in one rank's gradient, in each rank's part of the buffer in turn; then a good step."""
    from helpers.tiny_policy import train_step

    mesh, policy = _policy(folder / "llama", "int4")
    train_step(policy, mesh, 0)
    before, found = _error(policy), []
    weights = [p.detach().clone() for p in policy.model.parameters()]
    buffer = policy.ddp.buffers[0].grad_data
    start = policy.ddp.bucket_groups[0].start_grad_sync
    for at in (3, 3 * len(buffer) // 4, None):

        def poison_and_start(*args: Any, at: int | None = at, **options: Any) -> None:
            if at is not None and mesh.rank == 1:
                buffer[at] = float("nan")
            start(*args, **options)

        policy.ddp.bucket_groups[0].start_grad_sync = poison_and_start
        try:
            train_step(policy, mesh, 1)
            changed = True
        except AssertionError:  # train_step's, for a step without an update
            changed = False
        same = _same(weights, [p.detach() for p in policy.model.parameters()])
        found.append((changed, same, _same(before, _error(policy))))
    return {"found": found, "finite": all(p.isfinite().all() for p in policy.model.parameters())}


def test_a_step_with_a_nan_on_one_rank_changes_nothing_on_any(models: Path) -> None:
    for result in run_distributed(bad_steps, 2, models, timeout_s=60):
        assert result == {"found": [(False, True, True), (False, True, True), (True, False, False)], "finite": True}


def summed_over_steps(folder: Path, steps: int, thrown_away: dict[int, float]) -> dict[str, Any]:
    """This rank's part of DDP's gradients, summed over the steps that count, exact and in 4 bits.

    The weights stay (lr is 0), so that both ways see the same gradients; four batches take turns. In some steps rank 1
    writes a number that is not finite over an entry of its gradient, in rank 0's part and in its own in turn.
    """
    from helpers.tiny_policy import train_step

    found: dict[str, Any] = {"undone": []}
    for compression in ("none", "int4"):
        mesh, policy = _policy(folder / "llama", compression)
        policy.clip_grad = 0.0  # which would scale the buffer
        (buffer,) = policy.ddp.buffers
        (group,) = policy.ddp.bucket_groups
        start, bad = group.start_grad_sync, []

        def poison_and_start(
            *args: Any, start: Any = start, buffer: Any = buffer, bad: list[Any] = bad, **options: Any
        ) -> None:
            for at, number in bad if mesh.rank == 1 else []:
                buffer.grad_data[at] = number
            start(*args, **options)

        group.start_grad_sync = poison_and_start
        total = torch.zeros(len(buffer.grad_data) // 2, dtype=torch.float64)
        for step in range(steps):
            if step in thrown_away:
                bad[:] = [((step % 2) * len(total) + 3, thrown_away[step])]
                before = _error(policy) if compression != "none" else []
                with pytest.raises(AssertionError):  # train_step's, for a step without an update
                    train_step(policy, mesh, step % 4, 0.0)
                if compression != "none":
                    found["undone"].append(_same(before, _error(policy)))
                bad.clear()
            train_step(policy, mesh, step % 4, 0.0)
            total += buffer.grad_data.view(2, -1)[mesh.rank]
        found[compression] = total
        policy.close()
    return found


def test_the_sum_of_64_steps_through_ddp_is_exact_though_some_were_thrown_away(models: Path) -> None:
    """Relative squared error at most 1e-4; a step with a NaN or an infinity leaves what was left over as it was."""
    thrown_away = {5: float("nan"), 20: float("inf"), 41: float("-inf"), 62: float("nan")}
    results = run_distributed(summed_over_steps, 2, models, 64, thrown_away, timeout_s=200)
    assert all(result["undone"] == [True] * 4 for result in results)
    got, exact = (torch.cat([result[name] for result in results]) for name in ("int4", "none"))
    assert 0 < relative_error(got, exact) ** 2 <= 1e-4


def resumed(folder: Path, scratch: Path) -> dict[str, Any]:
    """Save, step; load into a new policy, the same step: equal? And into other formats."""
    from grpo_mc.megatron.checkpoint import load_checkpoint, save_checkpoint
    from helpers.tiny_policy import train_step

    found: dict[str, Any] = {}
    mesh, policy = _policy(folder / "llama", "int4")
    for step in range(2):
        train_step(policy, mesh, step)
    save_checkpoint(policy, mesh, scratch / "step_2", {})
    saved = _error(policy)
    after = train_step(policy, mesh, 2)
    for compression in ("int4", "int8", "none"):
        _, other = _policy(folder / "llama", compression)
        load_checkpoint(other, mesh, scratch / "step_2")
        if other.compression is not None:
            found[f"{compression} errors"] = _same(saved, _error(other)), any(part.any() for part in _error(other))
        found[compression] = train_step(other, mesh, 2) == after
        weights = zip(policy.model.parameters(), other.model.parameters(), strict=True)
        found[f"{compression} weights"] = all(torch.equal(a, b) for a, b in weights)
        other.close()
    state = {name: part for name, part in policy.compression.state_dict().items()}
    _, other = _policy(folder / "llama", "int4")
    other.compression.load_state_dict(state)
    found["state"] = _same(_error(policy), _error(other))
    try:
        other.compression.load_state_dict({})
    except ValueError as error:
        found["message"] = str(error)
    return found


def test_a_resumed_run_goes_on_to_the_last_bit(models: Path, tmp_path: Path) -> None:
    for found in run_distributed(resumed, 2, models, tmp_path, timeout_s=60):
        assert found["int4 errors"] == (True, True) and found["int4 weights"]
        assert found["int8 errors"] == (False, False) and not found["int8 weights"]  # starts from nothing
        assert found["int4"] and found["state"] and "the state has buckets []" in found["message"]


def overlapped(folder: Path) -> list[float]:
    """The gradients of one backward pass by Megatron-Core's overlapped reduction and by ours, as a relative error."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from grpo_mc.megatron.grad_compression import compressed, install

    mesh, policy = _policy(folder / "llama", "none", "bf16")
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=20_000, grad_reduce_in_fp32=True
    )
    parameters = torch.nn.Sequential(torch.nn.Linear(200, 100), torch.nn.Linear(100, 300)).to(torch.bfloat16)
    ddp = DistributedDataParallel(policy.model.config, settings, parameters)
    errors, exact = [], []
    for how in ("exact", "int8"):
        compression = install(ddp, compressed(how)) if how != "exact" else None
        for step in range(3):
            ddp.zero_grad_buffer()
            x = torch.randn(16, 200, generator=torch.Generator().manual_seed(10 * step + mesh.rank))
            ddp(x.to(torch.bfloat16)).float().square().sum().backward()
            ddp.finish_grad_sync()
            parts = [
                bucket.grad_data.view(2, -1)[mesh.rank] for group in ddp.bucket_groups for bucket in group.buckets
            ]
            whole = torch.cat(parts).clone()
            if compression is None:
                exact.append(whole)
            else:
                errors.append(relative_error(whole, exact[step]))
    errors.append(float(len(ddp.bucket_groups)))
    return errors


def test_the_overlapped_reduction_is_served_too(models: Path) -> None:
    for *errors, groups in run_distributed(overlapped, 2, models, timeout_s=60):
        assert groups > 1 and all(0 < error <= 1e-2 for error in errors), errors


def refused(folder: Path) -> list[str]:
    from types import SimpleNamespace

    from grpo_mc.megatron.grad_compression import compressed, install

    _, policy = _policy(folder / "llama", "none")
    messages = []
    for settings, model in (
        ({"use_distributed_optimizer": False}, {}),
        ({"num_distributed_optimizer_instances": 2}, {}),
        ({"reduce_scatter_with_fp32_accumulation": True}, {}),
        ({}, {"tensor_model_parallel_size": 2}),
    ):
        ddp = SimpleNamespace(
            ddp_config=SimpleNamespace(**{**vars(policy.ddp.ddp_config), **settings}),
            config=SimpleNamespace(**{**vars(policy.ddp.config), **model}),
        )
        try:
            install(ddp, compressed("int4"))  # type: ignore[arg-type]
        except ValueError as error:
            messages.append(str(error))
    install(policy.ddp, compressed("int4"))  # one rank: nothing to do
    return messages + [str("start_grad_sync" in vars(policy.ddp.bucket_groups[0]))]


def test_what_it_cannot_serve_is_named(models: Path) -> None:
    from grpo_mc.megatron.grad_compression import compressed

    (found,) = run_distributed(refused, 1, models, timeout_s=60)
    words = "use_distributed_optimizer is False", "instances is above 1", "fp32_accumulation is True", "norms drift"
    assert len(found) == 5 and all(word in message for word, message in zip(words, found, strict=False))
    assert found[4] == "False"
    with pytest.raises(ValueError, match="'int3' is unknown; it must be one of int4, int8"):
        compressed("int3")
