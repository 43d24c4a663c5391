"""What a run shows of the libraries under it, set up once when a command starts, on every rank: not for embedders.

Left out are warnings that say nothing to a user, each named by its text, its class and the module it comes from;
everything else is shown. Of our own notes, those about long work at first use are shown.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

from grpo_mc.data.text import printable

_MEGATRON = r"megatron\.core(\..*)?"
_OURS = r"grpo_mc\.megatron\..*"
_TORCH = r"torch\..*"

QUIET: tuple[tuple[str, type[Warning], str], ...] = (
    # Packages that Megatron-Core can do without.
    (".*Transformer Engine.*", UserWarning, ""),
    (".*Apex.*", UserWarning, ""),
    # Defaults of its own configuration, and its optimizer's look at shards of parameters.
    (".*full scope is deprecated.*", UserWarning, ""),
    (r"The \.grad attribute of a Tensor that is not a leaf.*", UserWarning, ""),
    # It calls torch's collectives by their older names; torch's wrapper around them is where the warning comes from.
    *[
        (
            r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated.*",
            FutureWarning,
            module,
        )
        for module in (_TORCH, _MEGATRON, _OURS)
    ],
)
"""(start of the text, class, module) as regular expressions; "" = any module."""

QUIET_WITHOUT_GPU = (r".*set the environment variable CUDA_DEVICE_MAX_CONNECTIONS to 1.*", UserWarning, _MEGATRON)
"""About the order of kernels on a GPU."""

SHOWN_NOTES = ("grpo_mc.megatron.checkpoint_cache",)
"""Loggers whose INFO lines are shown: the import of a model at its first use takes seconds."""

GPU_DRIVER = Path("/dev/nvidiactl")
"""There where an NVIDIA driver is loaded; asking torch would mean importing it first."""


class StderrHandler(logging.Handler):
    """Writes to what sys.stderr is at that moment, which a live display exchanges while it is on."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(printable(f"grpo-mc: {record.getMessage()}"), file=sys.stderr, flush=True)
        except OSError:
            self.handleError(record)


def set_up_notices() -> None:
    """Filters the warnings and shows our notes; may be called again."""
    for message, category, module in (*QUIET, *(() if GPU_DRIVER.exists() else (QUIET_WITHOUT_GPU,))):
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
    for name in SHOWN_NOTES:
        logger = logging.getLogger(name)
        if not any(isinstance(handler, StderrHandler) for handler in logger.handlers):
            logger.addHandler(StderrHandler(logging.INFO))
        logger.setLevel(logging.INFO)
