"""The log of rollouts: every bit comes back, files appear whole or not at all, and anybody's tools can query it."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from grpo_mc.data.records import FinishReason, Group, Prompt, Rollout, Segment, Verdict, VerdictStatus
from grpo_mc.pipeline.rollout_log import RolloutLog, read_rollouts
from grpo_mc.pipeline.rollout_table import SCHEMA


def make_group(group_id: int = 7, rewards: tuple[float | None, ...] = (1.0, 0.1), **prompt_fields: Any) -> Group:
    prompt = Prompt(f"sums:{group_id}", np.array([5, 2**40, 0]), f"{group_id} + 1 =", **prompt_fields)
    rollouts = [
        Rollout(
            group_id, i, prompt, [Segment("model", np.array([i, 9, 9]), np.array([-0.1, -1e-7, 0.0], np.float32))],
            f" answer {i}", FinishReason.FINISHED, (3,), None, {"exact": 0.1 * i}, [], reward,
        )
        for i, reward in enumerate(rewards)
    ]  # fmt: skip
    return Group(group_id, prompt, rollouts)


def round_trip(tmp_path: Path, *groups: Group) -> list[Group]:
    ((step, read),) = read_rollouts(RolloutLog(tmp_path).write(3, list(groups)))
    assert step == 3
    return read


def bits(array: np.ndarray[Any, Any] | None) -> tuple[Any, ...] | None:
    """What must be equal for two arrays to be the same bit for bit (NaN and -0.0 too)."""
    return None if array is None else (array.dtype, array.tobytes())


def test_every_field_comes_back(tmp_path: Path) -> None:
    prompt = Prompt(
        "sums:4", np.array([1, 2**62]), 'a "quoted" prompt\n\u00e9\u4e2d\0end',
        ({"role": "system", "content": "s"}, {"role": "user", "content": "u"}), "42", "chain_sum",
        {"difficulty": [1, 2], "note": None},
    )  # fmt: skip
    verdicts = [
        Verdict("exact", VerdictStatus.SCORED, 0.1, "half", 0.25),
        Verdict("judge", VerdictStatus.TIMED_OUT, None, "10 s", 10.0),
    ]
    rollout = Rollout(
        4, 2, prompt,
        [
            Segment("model", np.array([1, 2]), np.array([-0.5, -2.25], np.float32)),
            Segment("tool", np.array([3])),
            Segment("model", np.zeros(0, np.int64), np.zeros(0, np.float32)),
        ],
        "call()42", FinishReason.TRUNCATED, (3, 4), np.array([-0.5, -1.0, -3.0], np.float32), {"exact": 0.1}, verdicts,
        0.1,
    )  # fmt: skip
    ((read,),) = [group.rollouts for group in round_trip(tmp_path, Group(4, prompt, [rollout]))]
    assert read.prompt.text == prompt.text and read.prompt.messages == prompt.messages
    assert (read.prompt.prompt_id, read.prompt.ground_truth, read.prompt.data_source) == ("sums:4", "42", "chain_sum")
    assert read.prompt.fields == prompt.fields and bits(read.prompt.token_ids) == bits(prompt.token_ids)
    assert [segment.source for segment in read.segments] == ["model", "tool", "model"]
    for mine, theirs in zip(read.segments, rollout.segments, strict=True):
        assert bits(mine.token_ids) == bits(theirs.token_ids) and bits(mine.logprobs) == bits(theirs.logprobs)
    assert (read.group_id, read.sample_index, read.text) == (4, 2, "call()42")
    assert read.finish_reason is FinishReason.TRUNCATED and read.policy_versions == (3, 4)
    assert bits(read.ref_logprobs) == bits(rollout.ref_logprobs)
    assert read.rewards == {"exact": 0.1} and read.verdicts == verdicts and read.reward == 0.1
    assert read.verdicts[1].status is VerdictStatus.TIMED_OUT
    assert read.response_mask.tolist() == [True, True, False]


def test_odd_numbers_keep_their_bits(tmp_path: Path) -> None:
    zeros, third = (0.0, -0.0), 0.1 + 0.2
    group = make_group(rewards=(math.nan, None, *zeros, math.inf, 5e-324, third))
    odd = np.array([np.nan, -np.inf, *zeros, 1e-45, np.nextafter(np.float32(-1), np.float32(0))], np.float32)
    group.rollouts[0].segments = [Segment("model", np.arange(6), odd)]
    group.rollouts[0].rewards = {"a": math.nan, "b": -math.inf, "c": third, "d": -0.0, "e": 2.0**-1074}
    (read,) = round_trip(tmp_path, group)
    rewards = [rollout.reward for rollout in read.rollouts]
    assert rewards[1] is None
    assert bits(np.array(rewards[:1] + rewards[2:], float)) == bits(
        np.array([math.nan, *zeros, math.inf, 5e-324, third])
    )
    assert bits(read.rollouts[0].segments[0].logprobs) == bits(odd)
    scores = read.rollouts[0].rewards
    assert math.isnan(scores["a"]) and scores["b"] == -math.inf and scores["c"] == third
    assert math.copysign(1, scores["d"]) == -1 and scores["e"] == 2.0**-1074


def test_empty_responses_and_absent_values(tmp_path: Path) -> None:
    group = make_group(rewards=(None, None))
    group.rollouts[0].segments, group.rollouts[0].text = [], ""
    group.rollouts[0].finish_reason, group.rollouts[0].policy_versions = FinishReason.FAILED, ()
    group.rollouts[0].rewards = {}
    group.rollouts[1].ref_logprobs = np.zeros(3, np.float32)
    (read,) = round_trip(tmp_path, group)
    first, second = read.rollouts
    assert first.segments == [] and first.response_length == 0 and first.rewards == {} and first.verdicts == []
    assert first.finish_reason is FinishReason.FAILED and first.policy_versions == ()
    assert first.ref_logprobs is None and bits(second.ref_logprobs) == bits(np.zeros(3, np.float32))
    assert read.prompt.messages is None and read.prompt.ground_truth is None and read.prompt.fields == {}


def test_the_rollouts_of_a_group_share_one_prompt_and_groups_with_equal_prompts_stay_apart(tmp_path: Path) -> None:
    first, second = make_group(7), make_group(8)
    second.prompt = first.prompt
    read = round_trip(tmp_path, first, second)
    assert [group.group_id for group in read] == [7, 8]
    assert [[rollout.sample_index for rollout in group.rollouts] for group in read] == [[0, 1], [0, 1]]
    assert all(rollout.prompt is group.prompt for group in read for rollout in group.rollouts)
    assert read[0].prompt.text == read[1].prompt.text == "7 + 1 ="


def test_columns_that_json_does_not_know_do_not_stop_the_run(tmp_path: Path) -> None:
    """A source may carry anything in its columns, and text that UTF-8 cannot hold."""
    fields = {"when": Path("a/b"), "raw": b"\xff", "nan": math.nan, "set": {1}, 5: np.float32(0.5), "a": np.arange(2)}
    group = make_group(fields=fields, ground_truth="lone \ud800 surrogate")
    (read,) = round_trip(tmp_path, group)
    assert read.prompt.fields["when"] == "a/b" and read.prompt.fields["nan"] == "NaN"
    assert read.prompt.fields["5"] == 0.5 and read.prompt.fields["a"] == [0, 1]
    assert read.prompt.ground_truth == "lone ? surrogate"


def test_steps_are_sorted_by_number_from_a_file_a_folder_or_a_run(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path)
    written = [log.write(step, [make_group(step)]) for step in (100_000_000, 12, 2)]
    assert written[1] == tmp_path / "rollouts" / "step_00000012.parquet"
    for path in (tmp_path, str(tmp_path / "rollouts")):
        assert [step for step, _ in read_rollouts(path)] == [2, 12, 100_000_000]
    assert [(step, groups[0].group_id) for step, groups in read_rollouts(written[1])] == [(12, 12)]


def test_a_step_without_groups_is_a_step(tmp_path: Path) -> None:
    path = RolloutLog(tmp_path).write(3, [])
    assert read_rollouts(path) == [(3, [])]
    assert pq.read_schema(path).remove_metadata() == SCHEMA


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path)
    log.write(1, [make_group(1)])
    log.write(1, [make_group(2)])
    assert [groups[0].group_id for _, groups in read_rollouts(tmp_path)] == [2]


def test_truncate_after_removes_later_steps_and_torn_files_only(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path)
    for step in (1, 2, 3, 10):
        log.write(step, [make_group(step)])
    torn, own = log.folder / ".step_00000011.parquet.partial", log.folder / "sums.parquet.txt"
    torn.write_bytes(b"PAR1")
    own.write_text("a user's")
    assert log.truncate_after(2) == 2
    assert [step for step, _ in read_rollouts(tmp_path)] == [1, 2]
    assert own.exists() and not torn.exists()
    assert RolloutLog(tmp_path / "new").truncate_after(0) == 0


def test_a_full_disk_is_one_error_and_leaves_no_half_file(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path)
    log.write(1, [make_group(1)])
    big = make_group(2)
    big.rollouts[0].segments[0].token_ids = np.random.default_rng(0).integers(0, 2**62, 100_000)
    big.rollouts[0].segments[0].logprobs = np.zeros(100_000, np.float32)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # the kernel refuses the write, as on a full disk
    try:
        with pytest.raises(OSError, match=r"write rollouts: .*step_00000002.parquet cannot be written \(.*free some"):
            log.write(2, [big])
        with pytest.raises(OSError):
            log.write(1, [big])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in log.folder.iterdir()] == ["step_00000001.parquet"]
    assert [groups[0].group_id for _, groups in read_rollouts(tmp_path)] == [1]


@pytest.mark.parametrize("keep", [0, 3, 200, -20])
def test_a_torn_file_is_refused_by_name(tmp_path: Path, keep: int) -> None:
    path = RolloutLog(tmp_path).write(1, [make_group()])
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="read rollouts: .*step_00000001.parquet is damaged"):
        read_rollouts(tmp_path)


def test_missing_paths_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere does not exist; give a run directory"):
        read_rollouts(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no .parquet file"):
        read_rollouts(tmp_path)
    pq.write_table(pa.table({"prompt": ["a"], "reward": [1.0]}), tmp_path / "data.parquet")
    with pytest.raises(ValueError, match="data.parquet lacks the columns step, group_id"):
        read_rollouts(tmp_path)


def rewritten(path: Path, column: str, value: Any) -> Path:
    """The file with another value in each row of a column."""
    table = pq.read_table(path)
    place = table.schema.get_field_index(column)
    values = pa.array([value] * table.num_rows)
    pq.write_table(table.set_column(place, column, values), path)
    return path


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("finish_reason", "stopped", "'stopped' is not a valid FinishReason"),
        ("rewards", "[1]", "a row that is no rollout"),
        ("fields", "{", "a row that is no rollout"),
        ("prompt_ids", None, "rows without prompt_ids"),
        ("prompt_ids", [1, None], "a null among token ids"),
        ("segments", "text", "damaged or no log"),
    ],
)
def test_values_of_another_kind_are_refused(tmp_path: Path, column: str, value: Any, message: str) -> None:
    path = rewritten(RolloutLog(tmp_path).write(1, [make_group()]), column, value)
    with pytest.raises(ValueError, match=f"step_00000001.parquet.*{message}"):
        read_rollouts(path)


def test_a_repeated_rollout_is_refused(tmp_path: Path) -> None:
    path = RolloutLog(tmp_path).write(1, [make_group(7)])
    path.with_name("all.parquet").write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="step 1, group 7, sample 0 a second time"):
        read_rollouts(tmp_path)


def test_a_selection_made_with_other_tools_can_be_replayed(tmp_path: Path) -> None:
    """Several steps in one file, filtered, without this package's metadata, strings and lists of other widths."""
    log = RolloutLog(tmp_path)
    for step in (1, 2):
        log.write(step, [make_group(10 * step + i, rewards=(0.0, 1.0)) for i in range(2)])
    table = pq.read_table(log.folder).replace_schema_metadata({})
    table = table.filter(pc.field("reward") > 0.5)
    wide = [
        pa.large_string() if f.type == pa.string() else pa.large_list(pa.int64()) if f.name == "prompt_ids" else f.type
        for f in table.schema
    ]
    table = table.cast(pa.schema(list(zip(table.schema.names, wide, strict=True))))
    pq.write_table(table, tmp_path / "picked.parquet", row_group_size=1)
    read = read_rollouts(tmp_path / "picked.parquet")
    assert [(step, [group.group_id for group in groups]) for step, groups in read] == [(1, [10, 11]), (2, [20, 21])]
    assert {r.sample_index for _, groups in read for group in groups for r in group.rollouts} == {1}
    assert bits(read[1][1][0].rollouts[0].response_ids) == bits(np.array([1, 9, 9]))
    assert bits(read[1][1][0].prompt.token_ids) == bits(np.array([5, 2**40, 0]))


def test_columns_can_be_queried_and_carry_statistics(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path)
    for step in (1, 2):
        log.write(step, [make_group(step, rewards=(0.25 * step, None, 0.75 * step))])
    table = pq.read_table(log.folder, columns=["step", "reward", "response_length", "rewards"])
    means = table.group_by("step").aggregate([("reward", "mean"), ("response_length", "sum")]).sort_by("step")
    assert means.to_pylist() == [
        {"step": 1, "reward_mean": 0.5, "response_length_sum": 9},
        {"step": 2, "reward_mean": 1.0, "response_length_sum": 9},
    ]
    assert json.loads(table["rewards"][1].as_py()) == {"exact": 0.1}
    metadata = pq.read_metadata(log.folder / "step_00000002.parquet")
    columns = [metadata.row_group(0).column(i) for i in range(metadata.num_columns)]
    column = next(column for column in columns if column.path_in_schema == "reward")
    assert column.compression == "ZSTD"
    assert (column.statistics.min, column.statistics.max, column.statistics.null_count) == (0.5, 1.5, 1)


def test_the_log_needs_neither_torch_nor_megatron() -> None:
    code = "import sys, grpo_mc.pipeline.rollout_log; print(sorted({'torch', 'megatron'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
