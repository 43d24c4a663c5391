"""Handing samples to worker processes and collecting their verdicts, under a time limit for every call.

Each (rollout, function) call has a time limit that is kept by killing the worker process, because nothing else stops
a computation inside the interpreter. The verdict is then "timed out"; the worker's other samples go back into the
queue and a new worker takes its place. A worker that dies gives "crashed" for the call that was running. Each death
settles at least one call, so a run always ends: after at most calls * (timeout + start of a worker) / workers.

A worker gets samples only when it waits for them, so neither side can block the other by a full connection.
"""

from __future__ import annotations

import selectors
import time
from collections import deque
from typing import Any

from grpo_mc.data.records import Verdict, VerdictStatus
from grpo_mc.rewards.channel import ChannelClosed
from grpo_mc.rewards.judge import one_line
from grpo_mc.rewards.process import WorkerProcess
from grpo_mc.rewards.sample import Sample

START_TIMEOUT_S = 120.0
"""Most seconds for a worker to start, and to build each of its functions (to import what it needs)."""
_BATCH = 16
"""Most samples in one message: enough to hide the round trip, few enough to share work evenly."""
_CLOSE_GRACE_S = 1.0


class Dispatcher:
    """The workers, and the loop that moves samples and verdicts. Not thread-safe.

    Args:
        options: pickled list of plain reward options, what a worker builds its functions from.
        names: the functions' names, in order.
        num_workers: processes.
        timeout_s: seconds that one call may take.
        max_pending: most samples handed to the workers and not yet judged.
    """

    def __init__(self, options: bytes, names: list[str], num_workers: int, timeout_s: float, max_pending: int) -> None:
        self._options = options
        self._names = names
        self._timeout_s = timeout_s
        self._max_pending = max_pending
        self._queue: deque[tuple[int, int, Sample]] = deque()
        self._verdicts: dict[int, list[Verdict]] = {}
        self._unfinished = 0
        self._workers: list[WorkerProcess] = []
        try:
            for _ in range(num_workers):
                self._workers.append(WorkerProcess(options))
            while any(not w.is_ready for w in self._workers):
                self._step()
        except BaseException:
            self.close()
            raise

    def run(self, tasks: dict[int, Sample]) -> dict[int, list[Verdict]]:
        """The verdicts of every task by its ticket, one for each function in order. Tickets are never used twice.

        Raises:
            ValueError: a replacement for a lost worker cannot build the functions.
            RuntimeError: a replacement cannot start for another reason.
        """
        self._queue = deque((ticket, 0, sample) for ticket, sample in tasks.items())
        self._verdicts = {ticket: [] for ticket in tasks}
        self._unfinished = len(tasks)
        try:
            while self._unfinished:
                self._replace_closed()
                self._hand_out()
                self._step()
        except BaseException:
            # Samples of this run are still with some workers: without those workers the next run starts clean.
            for worker in self._workers:
                if worker.tasks or not worker.is_ready:
                    worker.tasks.clear()
                    worker.close()
            raise
        return self._verdicts

    def worker_pids(self) -> list[int]:
        """The process ids of the workers that have not been ended."""
        return [w.pid for w in self._workers if not w.is_closed and w.pid is not None]

    def close(self) -> None:
        """End the workers and all that they started."""
        for worker in self._workers:
            worker.channel.close()  # all at once, so that they leave together
        for worker in self._workers:
            worker.close(_CLOSE_GRACE_S if worker.is_ready and not worker.tasks else 0.0)
        self._workers.clear()

    def _step(self) -> None:
        for worker in self._wait():
            self._read(worker)
        self._end_overdue()

    def _replace_closed(self) -> None:
        for i, worker in enumerate(self._workers):
            if worker.is_closed:
                self._workers[i] = WorkerProcess(self._options)

    def _hand_out(self) -> None:
        for worker in self._workers:
            room = self._max_pending - sum(len(w.tasks) for w in self._workers)
            if worker.is_idle and self._queue and room > 0:
                count = min(room, self._batch_size(), len(self._queue))
                try:
                    worker.give([self._queue.popleft() for _ in range(count)])
                except ChannelClosed:
                    self._return_tasks(worker)  # it died while idle: no call was running, nobody is to blame

    def _batch_size(self) -> int:
        """How many samples to hand to one worker: an even share at first, fewer towards the end."""
        return max(1, min(_BATCH, -(-len(self._queue) // (2 * len(self._workers)))))

    def _wait(self) -> list[WorkerProcess]:
        """The workers that have something to say, waiting for it until the first time limit ends."""
        now = time.monotonic()
        with selectors.DefaultSelector() as selector:
            limits = [0.0] if any(w.is_closed for w in self._workers) else []
            for worker in self._workers:
                if not worker.is_closed:
                    selector.register(worker.channel, selectors.EVENT_READ, worker)
                    if not worker.is_idle:
                        limits.append(max(0.0, worker.since + self._limit(worker) - now))
            return [key.data for key, _ in selector.select(min(limits, default=0.0))]

    def _limit(self, worker: WorkerProcess) -> float:
        return self._timeout_s if worker.is_ready else START_TIMEOUT_S

    def _read(self, worker: WorkerProcess) -> None:
        try:
            for answer in worker.answers():
                self._take(worker, answer)
        except ChannelClosed:
            self._bury(worker)

    def _take(self, worker: WorkerProcess, answer: list[Any]) -> None:
        if answer[0] == "started":
            worker.pid = answer[1]
        elif answer[0] == "building":
            worker.building = answer[1]
        elif answer[0] == "ready":
            worker.is_ready = True
        elif answer[0] == "failed":
            _, is_user_error, text = answer
            if is_user_error:
                raise ValueError(text)
            raise RuntimeError(f"a reward worker could not start:\n{text}")
        else:
            ticket, index, status, score, reason, seconds = answer
            verdict = Verdict(self._names[index], VerdictStatus(status), score, reason, seconds)
            self._settle(worker, verdict, ticket)

    def _settle(self, worker: WorkerProcess, verdict: Verdict, ticket: int) -> None:
        """Record the verdict of the call that the worker was at, and move its place on by one call."""
        current, index, sample = worker.tasks.popleft()
        assert current == ticket and index == len(self._verdicts[ticket])
        self._verdicts[ticket].append(verdict)
        if index + 1 < len(self._names):
            worker.tasks.appendleft((ticket, index + 1, sample))
        else:
            self._unfinished -= 1

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.is_closed or worker.is_idle or now - worker.since < self._limit(worker):
                continue
            if not worker.is_ready:
                self._read(worker)  # it may have gone on since
                if not worker.is_ready and now >= worker.since:
                    raise _start_failure(worker, f"was not ready after {START_TIMEOUT_S:g} s")
                continue
            self._read(worker)  # an answer may have arrived since
            if worker.is_closed or worker.is_idle or now < worker.since:
                continue
            self._blame(worker, VerdictStatus.TIMED_OUT, f"no answer within {self._timeout_s:g} s")

    def _bury(self, worker: WorkerProcess) -> None:
        """A worker has died: its running call crashed, or it could not start."""
        how = worker.exit_text()
        if not worker.is_ready:
            raise _start_failure(worker, how)
        if worker.tasks:
            self._blame(worker, VerdictStatus.CRASHED, f"the worker process {how}")
        else:
            worker.close()

    def _blame(self, worker: WorkerProcess, status: VerdictStatus, reason: str) -> None:
        """Settle the running call with `status`, queue the worker's other calls again, and end the worker."""
        ticket, index, _ = worker.tasks[0]
        seconds = time.monotonic() - worker.since
        name = self._names[index]
        self._settle(worker, Verdict(name, status, None, one_line(reason), seconds), ticket)
        self._return_tasks(worker)

    def _return_tasks(self, worker: WorkerProcess) -> None:
        self._queue.extendleft(reversed(worker.tasks))
        worker.tasks.clear()
        worker.close()


def _start_failure(worker: WorkerProcess, how: str) -> Exception:
    """What to raise for a worker that ended or overran before it was ready: the function it was at is to blame."""
    if worker.building is None:
        return RuntimeError(f"a reward worker {how} before it began; standard error has its last words")
    return ValueError(
        f"{worker.building}: the process that loads it {how}; make sure that importing it ends, and ends well "
        "(what it wrote to standard error is above)"
    )
