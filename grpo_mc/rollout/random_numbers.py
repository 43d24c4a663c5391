"""Counter-based random numbers for sampling: one uniform per token, a pure function of who asks.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed by the run's seed, with
the counter (prompt draw, sample index, position). A token's random number is then the same whatever the batch, the
worker, the order of the work or a retry.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

Words = npt.NDArray[np.uint64]


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Philox-4x32-10 of counters given as four arrays of 32-bit words (held in uint64) under one key of two words."""
    c0, c1, c2, c3 = counter
    k0, k1 = np.uint64(key[0]), np.uint64(key[1])
    for _ in range(10):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c2 = (product1 >> _SHIFT) ^ c1 ^ k0, (product0 >> _SHIFT) ^ c3 ^ k1
        c1, c3 = product1 & _LOW, product0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(
    seed: int, group_ids: npt.NDArray[np.int64], samples: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """One uniform number in (0, 1) per row: the middle of one of 2^52 equal intervals, so never 0 or 1.

    Args:
        seed: The run's seed; its low 64 bits count.
        group_ids: [B] prompt draws.
        samples: [B] sample indices, below 2^32.
        positions: [B] positions of the token in its response, below 2^32.
    """
    groups = group_ids.astype(np.uint64)
    counter = (groups & _LOW, groups >> _SHIFT, samples.astype(np.uint64), positions.astype(np.uint64))
    high, low, _, _ = philox(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    bits = (high << np.uint64(20)) | (low >> np.uint64(12))
    return (bits.astype(np.float64) + 0.5) * 2.0**-52  # with a 53rd bit the largest would round to 1
