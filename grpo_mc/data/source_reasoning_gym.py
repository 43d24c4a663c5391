"""Problems from reasoning-gym's generators.

Fields of a record: the entry's metadata, `question`, `answer`, and `entry`, the whole entry as the generator made it.
The generator's own verifier needs that entry unchanged: some verifiers score a right answer as wrong when the tuples in
it have become lists, so it may be pickled but must not go through JSON.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

import reasoning_gym
from reasoning_gym.factory import DATASETS

from grpo_mc.config.data import ReasoningGymSource
from grpo_mc.data.sources import Record


def read_reasoning_gym(source: ReasoningGymSource) -> Iterator[Record]:
    """The problems of a generator; problem i comes from seed + i in most of them.

    Raises:
        ValueError: no such generator, or options that it refuses.
    """
    if source.task not in DATASETS:
        near = difflib.get_close_matches(source.task, DATASETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"reasoning_gym: there is no task {source.task!r} among its {len(DATASETS)}{hint}")
    try:
        dataset = reasoning_gym.create_dataset(source.task, size=source.size, seed=source.seed, **source.options)
    except (AssertionError, TypeError, ValueError) as error:
        # the generators check their options with assert, and their names by the call itself
        raise ValueError(f"reasoning_gym: {source.task} refuses the options {source.options}: {error}") from error
    for row in range(len(dataset)):
        entry = dataset[row]
        fields = {**entry["metadata"], "question": entry["question"], "answer": entry["answer"], "entry": entry}
        yield Record(fields, row, f"reasoning_gym {source.task} (seed {source.seed}) problem {row}")
