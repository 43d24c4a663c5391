"""How this process's threads share the processor."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SPIN_COUNT = 10_000
"""About 0.1 ms, longer than the gaps between two operators of a step."""


def limit_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Lets idle threads sleep soon, so that runs on a busy machine do not starve each other; before torch is imported.

    GNU OpenMP's threads wait for work by spinning, for some 10 ms unless told otherwise. With another process on the
    same cores they spin through the time slices in which that process, or their own other thread, has work to do: two
    runs at once took five times as long as one. OMP_WAIT_POLICY and GOMP_SPINCOUNT win where the user has set them.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
