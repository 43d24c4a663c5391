"""The error bar of an accuracy.

The standard error sqrt(p (1 - p) / n) is 0 where all answers are right or none is, which says that 0 of 16 is known
exactly. Wilson's interval (E. B. Wilson, Journal of the American Statistical Association 22, 1927, p. 209) inverts the
test instead, and its half width is never 0:

    z / (n + z^2) * sqrt(n p (1 - p) + z^2 / 4)

With z = 1 it is a bar of one standard deviation, and close to the standard error wherever that is any good. It is shown
around p itself, not around the interval's centre (p + z^2 / 2n) / (1 + z^2 / n).
"""

from __future__ import annotations

import math


def wilson_half_width(proportion: float, n: float, z: float = 1.0) -> float:
    """Half the width of Wilson's interval.

    Args:
        proportion: Successes by trials, in [0, 1]; NaN gives NaN.
        n: Independent trials, at least 0; 0 gives 0.5, the half of all there can be.
        z: Standard deviations of the normal distribution: 1 covers 68 %, 1.96 covers 95 %.
    """
    return z / (n + z * z) * math.sqrt(n * proportion * (1.0 - proportion) + z * z / 4.0)


def accuracy_error(accuracy: float, stderr: float, *, num_prompts: int, num_samples: int) -> float:
    """Half width of the accuracy's Wilson interval, z = 1.

    Several samples of a prompt are not independent, so then n is the number of independent answers that would have had
    this standard error, p (1 - p) / stderr^2 (the effective sample size of survey statistics; Korn and Graubard, Survey
    Methodology 24, 1998, p. 193): between 1 and all samples, and the number of prompts where the standard error is 0.

    Args:
        accuracy: Mean over the prompts of the part of their samples that is right.
        stderr: Standard error of that mean.
    """
    n = float(num_prompts)
    if num_samples > 1 and stderr > 0:
        n = min(max(accuracy * (1.0 - accuracy) / stderr**2, 1.0), float(num_prompts * num_samples))
    return wilson_half_width(accuracy, n)
