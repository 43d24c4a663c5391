"""What a run leaves behind and what a person sees of it: metric files, live progress, the HTML report.

    RunMonitor      one sink for the pipeline: files, TensorBoard, W&B and the live display (sink.py)
    MetricsWriter   metrics.jsonl, evaluations.jsonl and samples.jsonl of a run directory (metrics.py)
    ProgressDisplay live line on a terminal, one line per step elsewhere (progress.py)
    write_report    run directory -> one self-contained report.html (report.py)

Nothing here holds maths of the objective, and nothing here imports torch at import time.
"""

from grpo_mc.monitor.metrics import MetricsWriter
from grpo_mc.monitor.progress import ProgressDisplay
from grpo_mc.monitor.report import write_report
from grpo_mc.monitor.sink import RunMonitor

__all__ = ["MetricsWriter", "ProgressDisplay", "RunMonitor", "write_report"]
