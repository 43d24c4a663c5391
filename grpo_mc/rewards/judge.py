"""From a reward function's raw answer to typed verdicts, and from verdicts to the reward of a rollout.

Only a finite number is a score. None abstains. NaN, infinity, a number beyond float32, a string, a bool and the wrong
number of values are bad output; an exception is a crash. Neither is turned into 0: a zero would move the baseline of
the other rollouts of the group and train against an answer that nobody judged.
"""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Mapping, Sequence

from grpo_mc.data.records import Rollout, Verdict, VerdictStatus
from grpo_mc.data.text import printable
from grpo_mc.rewards.function import BadOutput
from grpo_mc.rewards.registry import NamedScorer
from grpo_mc.rewards.sample import Sample

MAX_SCORE = 3.4e38
"""Advantages are computed from float32 rewards; a larger score would be infinite there."""

_MAX_REASON_CHARS = 500


def score_one(functions: Sequence[NamedScorer], rollout: Rollout | Sample) -> list[Verdict]:
    """Judge one rollout in this process, without a time limit. One verdict for each function, in order."""
    sample = rollout if isinstance(rollout, Sample) else Sample.from_rollout(rollout)
    return [run_scorer(function, sample) for function in functions]


def run_scorer(function: NamedScorer, sample: Sample) -> Verdict:
    """The verdict of one function on one sample; never raises for what the function does."""
    start = time.perf_counter()
    try:
        value, reason = function.score(sample)
        status, score, reason = classify(value, reason)
    except BadOutput as error:
        status, score, reason = VerdictStatus.BAD_OUTPUT, None, str(error)
    except (Exception, SystemExit) as error:  # the boundary to code of others, which may raise anything
        status, score, reason = VerdictStatus.CRASHED, None, _describe(error)
    return Verdict(function.name, status, score, one_line(reason), time.perf_counter() - start)


def classify(value: object, reason: str = "") -> tuple[VerdictStatus, float | None, str]:
    """The status and score of a raw value, with the reason for it."""
    if value is None:
        return VerdictStatus.ABSTAINED, None, reason or "returned None"
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number:
        return VerdictStatus.BAD_OUTPUT, None, f"returned {value!r} ({type(value).__name__}), but a number is needed"
    try:
        score = float(value)  # type: ignore[arg-type]
    except OverflowError:
        return VerdictStatus.BAD_OUTPUT, None, "returned an integer too large for a float"
    if not math.isfinite(score):
        return VerdictStatus.BAD_OUTPUT, None, f"returned {score}, but a finite number is needed"
    if abs(score) > MAX_SCORE:
        return VerdictStatus.BAD_OUTPUT, None, f"returned {score:g}, which float32 cannot hold"
    return VerdictStatus.SCORED, score, reason


def record_verdicts(rollout: Rollout, verdicts: Sequence[Verdict], weights: Mapping[str, float]) -> None:
    """Store the verdicts on the rollout, with its rewards by name and the weighted sum of the scored ones.

    No scored verdict, or a sum that float32 cannot hold, leaves `rollout.reward` None: unscored.
    """
    rollout.verdicts = list(verdicts)
    rollout.rewards = {v.name: v.score for v in verdicts if v.status is VerdictStatus.SCORED and v.score is not None}
    total = math.fsum(weights[name] * score for name, score in rollout.rewards.items())
    rollout.reward = total if rollout.rewards and abs(total) <= MAX_SCORE else None


def one_line(text: str) -> str:
    """`text` on one line, cut to 500 characters, with nothing that UTF-8 cannot hold or that a terminal would obey."""
    text = printable(" ".join(text.split()).encode("utf-8", "replace").decode())
    return text if len(text) <= _MAX_REASON_CHARS else text[: _MAX_REASON_CHARS - 3] + "..."


def _describe(error: BaseException) -> str:
    """The error and the place that raised it, as one line."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = "" if place is None else f" ({place.tb_frame.f_code.co_filename}:{place.tb_lineno})"
    return f"{type(error).__name__}: {error}{where}"
