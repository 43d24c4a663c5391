"""The order in which prompts are drawn: shuffled anew each epoch, and resumable at any draw.

The order of an epoch is a function of (seed, epoch) alone: the stable sort of raw Philox outputs, keyed by both. So the
whole state is a position, and a resumed run draws what the uninterrupted one would have drawn. Raw generator outputs,
unlike numpy's shuffles, are the same in every numpy version.

Every draw has a group id. Ids rise by one per draw over the whole run and never repeat, also where draws are refills
for groups that were filtered out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from grpo_mc.data.packing import IntArray

_STREAM = 0x5A3B1E
"""High word of the Philox counter: keeps these numbers apart from those of token sampling under the same seed."""


@dataclass(frozen=True)
class Draw:
    """One prompt draw."""

    group_id: int
    """Number of the draw in the run, from 0."""
    index: int
    """Position of the prompt in the dataset."""
    epoch: int
    """How often the whole dataset had been drawn before."""


class PromptSampler:
    """Draws dataset positions without end."""

    def __init__(self, size: int, *, seed: int, shuffle: bool = True) -> None:
        """Starts at the first draw.

        Args:
            size: prompts in the dataset, at least 1.
            seed: the run's seed; with the epoch it fixes the order.
            shuffle: False draws in the dataset's order in every epoch.

        Raises:
            ValueError: no prompt to draw.
        """
        if size < 1:
            raise ValueError(f"prompt sampler: the dataset has {size} prompts; at least 1 is needed")
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self._drawn = 0
        self._order_epoch = -1
        self._order: IntArray = np.zeros(0, np.int64)

    def draw(self, count: int) -> list[Draw]:
        """The next `count` draws; they may run over the end of an epoch."""
        draws = []
        for group_id in range(self._drawn, self._drawn + count):
            epoch, place = divmod(group_id, self._size)
            if epoch != self._order_epoch:
                self._order, self._order_epoch = self._epoch_order(epoch), epoch
            draws.append(Draw(group_id, int(self._order[place]), epoch))
        self._drawn += count
        return draws

    @property
    def num_drawn(self) -> int:
        """Draws so far, which is the next group id."""
        return self._drawn

    def state_dict(self) -> dict[str, int]:
        """What `load_state_dict` needs; plain integers."""
        return {"drawn": self._drawn, "size": self._size, "seed": self._seed, "shuffle": int(self._shuffle)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where `state` was taken.

        Raises:
            ValueError: the state is of another dataset size, seed or order, so the draws would not go on but differ.
        """
        own = self.state_dict()
        if set(state) != set(own):
            raise ValueError(f"prompt sampler: the state has the entries {sorted(state)}, needed are {sorted(own)}")
        different = [f"{key} {state[key]} (now {own[key]})" for key in own if key != "drawn" and state[key] != own[key]]
        if different:
            raise ValueError(
                f"prompt sampler: the saved state was taken with {', '.join(different)}; resume with the dataset, "
                "data.shuffle and run.seed of the saved run, or start a new run from its model"
            )
        self._drawn = state["drawn"]

    def _epoch_order(self, epoch: int) -> IntArray:
        """[size] int64, the permutation of an epoch."""
        if not self._shuffle:
            return np.arange(self._size)
        key = np.array([self._seed % 2**64, epoch], np.uint64)
        counter = np.array([0, 0, 0, _STREAM], np.uint64)
        return np.argsort(np.random.Philox(counter=counter, key=key).random_raw(self._size), kind="stable")
