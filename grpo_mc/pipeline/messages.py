"""What the modules hand to each other, and the queues that hold it on the way."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from grpo_mc.data.records import Group, Prompt

Message = TypeVar("Message")


@dataclass(frozen=True)
class PromptDraw:
    """A prompt to sample a group from."""

    group_id: int
    """The draw's number in the run."""
    prompt: Prompt


@dataclass
class GroupBatch:
    """Groups of one step on their way from sampling to training."""

    step: int
    """The training step they are meant for, from 1."""
    groups: list[Group]
    metrics: dict[str, float] = field(default_factory=dict)
    """Of all groups that were sampled for it, also those that were sorted out, by metric name."""


class QueueFull(RuntimeError):
    """A producer put more into a queue than it was told to hold: a fault of the scheduler."""


class BoundedQueue(Generic[Message]):
    """A first-in-first-out queue of bounded size. With placement `colocated` both ends live in one process."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name, self.capacity = name, capacity
        self._items: deque[Message] = deque()

    def put(self, message: Message) -> None:
        """Adds a message.

        Raises:
            QueueFull: the queue holds `capacity` messages.
        """
        if len(self._items) >= self.capacity:
            raise QueueFull(f"{self.name} queue: full with {self.capacity} messages")
        self._items.append(message)

    def take(self) -> list[Message]:
        """All messages, oldest first; the queue is empty afterwards."""
        items = list(self._items)
        self._items.clear()
        return items

    def __len__(self) -> int:
        return len(self._items)
