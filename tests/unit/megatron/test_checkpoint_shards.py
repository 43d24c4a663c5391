"""Cutting a flat range into boxes, and what a checkpoint's metadata may hold."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mc.megatron.checkpoint_shards import Box, boxes_of_range
from grpo_mc.megatron.checkpoint_storage import ShardReader


def test_a_range_of_a_matrix_is_a_row_s_rest_whole_rows_and_a_row_s_start() -> None:
    assert list(boxes_of_range((4, 4), 2, 13)) == [Box((0, 2), (1, 2)), Box((1, 0), (2, 4)), Box((3, 0), (1, 1))]
    assert list(boxes_of_range((4, 4), 4, 12)) == [Box((1, 0), (2, 4))]
    assert list(boxes_of_range((4, 4), 5, 7)) == [Box((1, 1), (1, 2))]
    assert list(boxes_of_range((4, 4), 6, 10)) == [Box((1, 2), (1, 2)), Box((2, 0), (1, 2))]
    assert list(boxes_of_range((7,), 3, 7)) == [Box((3,), (4,))]
    assert list(boxes_of_range((), 0, 1)) == [Box((), ())]
    assert list(boxes_of_range((4, 4), 5, 5)) == []


@st.composite
def _ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    stop = draw(st.integers(0, math.prod(shape)))
    return shape, draw(st.integers(0, stop)), stop


@given(_ranges())
def test_boxes_follow_each_other_through_the_range(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    index = np.arange(math.prod(shape)).reshape(shape)
    boxes = list(boxes_of_range(shape, start, stop))
    covered = [
        index[tuple(slice(o, o + s) for o, s in zip(box.offset, box.size, strict=True))].ravel() for box in boxes
    ]
    assert np.concatenate([*covered, np.zeros(0, int)]).tolist() == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1


class _Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("trapped"),)  # type: ignore[return-value]


@pytest.mark.parametrize("dotted", [False, True])
def test_metadata_that_would_call_something_is_refused(tmp_path: Path, dotted: bool) -> None:
    content = pickle.dumps(_Trap())
    if dotted:  # an attribute of a module that is allowed
        content = b"\x80\x04\x8c\x28torch.distributed.checkpoint.filesystem\x8c\x09os.getpid\x93)R."
        content = content.replace(b"\x8c\x28", b"\x8c" + bytes([len("torch.distributed.checkpoint.filesystem")]))
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(pickle.UnpicklingError, match="does not belong"):
        ShardReader(tmp_path).read_metadata()
