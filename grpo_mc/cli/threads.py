"""How this process's threads share the processor."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SPIN_COUNT = 10_000
"""Turns of the waiting loop; GNU OpenMP's own default is 30 times as many. On 2 cores a run alone is as fast as with
the default and two runs at once take half as long; 1,000 turns cost a run alone a third."""


def limit_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Lets idle threads sleep soon, so that runs on a busy machine do not starve each other; before torch is imported.

    GNU OpenMP's threads wait for work by spinning. With another process on the same cores they spin through the time
    slices in which that process, or their own other thread, has work to do: two runs at once took some five times as
    long a step as one. OMP_WAIT_POLICY and GOMP_SPINCOUNT win where the user has set them.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
