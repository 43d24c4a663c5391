"""Groups of rollouts as an Arrow table, one row per rollout, and back.

Token ids, log-probs and rewards keep every bit. JSON columns (messages, fields, rewards) are strict JSON: NaN and the
infinities are the strings "NaN", "Infinity" and "-Infinity". A group without rollouts leaves no row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from grpo_mc.data.records import FinishReason, Group, Prompt, Rollout, Segment, Verdict, VerdictStatus

_INT_LIST, _FLOAT_LIST = pa.list_(pa.int64()), pa.list_(pa.float32())
_SEGMENT = pa.struct([("source", pa.string()), ("token_ids", _INT_LIST), ("logprobs", _FLOAT_LIST)])
_VERDICT = pa.struct(
    [("name", pa.string()), ("status", pa.string()), ("score", pa.float64()), ("reason", pa.string()),
     ("seconds", pa.float64())]
)  # fmt: skip
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("group_id", pa.int64()),
        ("sample_index", pa.int64()),
        ("prompt_id", pa.string()),
        ("prompt_text", pa.string()),
        ("prompt_ids", _INT_LIST),
        ("messages", pa.string()),  # JSON; null: the source had none
        ("ground_truth", pa.string()),
        ("data_source", pa.string()),
        ("fields", pa.string()),  # JSON; what JSON does not know is there as its str()
        ("segments", pa.list_(_SEGMENT)),
        ("response", pa.string()),
        ("response_length", pa.int64()),  # tokens, all segments; for queries, not read back
        ("finish_reason", pa.string()),
        ("policy_versions", _INT_LIST),
        ("ref_logprobs", _FLOAT_LIST),
        ("rewards", pa.string()),  # JSON: score by reward name
        ("verdicts", pa.list_(_VERDICT)),
        ("reward", pa.float64()),  # null: unscored
    ]
)
NULLABLE = ("messages", "ground_truth", "ref_logprobs", "reward")
"""Columns that may be null; in the others a null is a fault."""


def to_table(step: int, groups: Sequence[Group]) -> pa.Table:
    """The rollouts of a step as a table of SCHEMA, group after group."""
    rows = [(group, rollout) for group in groups for rollout in group.rollouts]
    for group, rollout in rows:
        assert rollout.group_id == group.group_id, (rollout.group_id, group.group_id)
    prompts = [group.prompt for group, _ in rows]
    rollouts = [rollout for _, rollout in rows]
    columns = {
        "step": [step] * len(rows),
        "group_id": [rollout.group_id for rollout in rollouts],
        "sample_index": [rollout.sample_index for rollout in rollouts],
        "prompt_id": [_text(prompt.prompt_id) for prompt in prompts],
        "prompt_text": [_text(prompt.text) for prompt in prompts],
        "prompt_ids": _lists([prompt.token_ids for prompt in prompts], np.int64),
        "messages": [None if prompt.messages is None else _json(prompt.messages) for prompt in prompts],
        "ground_truth": [None if prompt.ground_truth is None else _text(prompt.ground_truth) for prompt in prompts],
        "data_source": [_text(prompt.data_source) for prompt in prompts],
        "fields": [_json(prompt.fields) for prompt in prompts],
        "segments": _segments(rollouts),
        "response": [_text(rollout.text) for rollout in rollouts],
        "response_length": [rollout.response_length for rollout in rollouts],
        "finish_reason": [str(rollout.finish_reason) for rollout in rollouts],
        "policy_versions": _lists([np.array(rollout.policy_versions, np.int64) for rollout in rollouts], np.int64),
        "ref_logprobs": _lists([rollout.ref_logprobs for rollout in rollouts], np.float32),
        "rewards": [_json({name: float(score) for name, score in rollout.rewards.items()}) for rollout in rollouts],
        "verdicts": [[_verdict_row(verdict) for verdict in rollout.verdicts] for rollout in rollouts],
        "reward": [None if rollout.reward is None else float(rollout.reward) for rollout in rollouts],
    }
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column, field.type)
        for field, column in zip(SCHEMA, columns.values(), strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _lists(rows: Sequence[npt.NDArray[Any] | None], dtype: Any) -> pa.ListArray:
    """A list column from one array (or None) per row, without a Python object per number."""
    arrays = [np.zeros(0, dtype) if row is None else np.asarray(row, dtype) for row in rows]
    values = pa.array(np.concatenate(arrays) if arrays else np.zeros(0, dtype))
    return pa.ListArray.from_arrays(
        _offsets(map(len, arrays)), values, mask=pa.array([row is None for row in rows], pa.bool_())
    )


def _segments(rollouts: Sequence[Rollout]) -> pa.ListArray:
    segments = [segment for rollout in rollouts for segment in rollout.segments]
    structs = pa.StructArray.from_arrays(
        [
            pa.array([segment.source for segment in segments], pa.string()),
            _lists([segment.token_ids for segment in segments], np.int64),
            _lists([segment.logprobs for segment in segments], np.float32),
        ],
        fields=list(_SEGMENT),
    )
    return pa.ListArray.from_arrays(_offsets(len(rollout.segments) for rollout in rollouts), structs)


def _offsets(lengths: Iterable[int]) -> pa.Array:
    return pa.array(np.cumsum([0, *lengths]), pa.int32())


def _verdict_row(verdict: Verdict) -> dict[str, Any]:
    return {
        "name": _text(verdict.name), "status": str(verdict.status), "score": verdict.score,
        "reason": _text(verdict.reason), "seconds": verdict.seconds,
    }  # fmt: skip


def rollouts_of(table: pa.Table) -> Iterator[tuple[int, Rollout]]:
    """(step, rollout) per row of a table of SCHEMA; each with a Prompt of its own.

    Raises:
        ValueError, TypeError, AttributeError: a value that no rollout has, e.g. an unknown finish reason.
    """
    plain = {
        name: table.column(name).to_pylist()
        for name in SCHEMA.names
        if name not in ("prompt_ids", "segments", "policy_versions", "ref_logprobs", "response_length")
    }
    prompt_ids, ref_logprobs = _arrays(table.column("prompt_ids")), _arrays(table.column("ref_logprobs"))
    versions, segments = _arrays(table.column("policy_versions")), _read_segments(table.column("segments"))
    for i in range(table.num_rows):
        row = {name: values[i] for name, values in plain.items()}
        messages = None if row["messages"] is None else tuple(json.loads(row["messages"]))
        ids, policy_versions = prompt_ids[i], versions[i]
        assert ids is not None and policy_versions is not None  # NULLABLE
        prompt = Prompt(
            row["prompt_id"], ids, row["prompt_text"], messages, row["ground_truth"], row["data_source"],
            json.loads(row["fields"]),
        )  # fmt: skip
        verdicts = [
            Verdict(v["name"], VerdictStatus(v["status"]), v["score"], v["reason"], v["seconds"])
            for v in row["verdicts"]
        ]
        rewards = {name: float(score) for name, score in json.loads(row["rewards"]).items()}
        yield row["step"], Rollout(
            row["group_id"], row["sample_index"], prompt, segments[i], row["response"],
            FinishReason(row["finish_reason"]), tuple(policy_versions.tolist()), ref_logprobs[i], rewards, verdicts,
            row["reward"],
        )  # fmt: skip


def _arrays(column: pa.ChunkedArray | pa.ListArray) -> list[npt.NDArray[Any] | None]:
    """One array with memory of its own per row of a list column; None where it is null."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    rows: list[npt.NDArray[Any] | None] = []
    for chunk in chunks:
        if chunk.values.null_count:
            raise ValueError("a null among token ids or log-probs")
        offsets, values = chunk.offsets.to_numpy(), chunk.values.to_numpy()
        parts = zip(offsets, offsets[1:], chunk.is_valid().to_pylist(), strict=False)
        rows += [values[begin:end].copy() if valid else None for begin, end, valid in parts]
    return rows


def _read_segments(column: pa.ChunkedArray) -> list[list[Segment]]:
    rows: list[list[Segment]] = []
    for chunk in column.chunks:
        sources, token_ids, logprobs = chunk.values.flatten()
        if sources.null_count or token_ids.null_count:
            raise ValueError("a segment without source or token ids")
        parts = zip(sources.to_pylist(), _arrays(token_ids), _arrays(logprobs), strict=True)
        segments = [Segment(source, ids, lps) for source, ids, lps in parts if ids is not None]
        offsets = chunk.offsets.to_pylist()
        rows += [segments[begin:end] for begin, end in zip(offsets, offsets[1:], strict=False)]
    return rows


def _json(value: Any) -> str:
    return _text(json.dumps(_strict(value), ensure_ascii=False, allow_nan=False, default=str))


def _strict(value: Any) -> Any:
    """`value` with text keys and without the numbers that JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _text(value: str) -> str:
    """UTF-8 cannot hold a lone surrogate; it becomes a question mark."""
    return value.encode("utf-8", "replace").decode("utf-8")
