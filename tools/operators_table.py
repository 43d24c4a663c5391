"""Writes README's table of operators from the measured rows of benchmarks/operators.jsonl.

python tools/operators_table.py           prints the table
python tools/operators_table.py --write   puts it into README.md, between its two markers
"""

from __future__ import annotations

import json
from typing import Any

from readme_tree import ROOT, print_or_write

ROWS = ROOT / "benchmarks" / "operators.jsonl"
BEGIN, END = "<!-- operators: begin -->", "<!-- operators: end -->"
SCALING = "ours on 1 thread"
SHAPES = 4
"""Of an operator with more than so many, the first, the middle and the last are shown."""


def read_rows() -> list[dict[str, Any]]:
    """The rows that `grpo-mc bench all --json` printed."""
    return [json.loads(line) for line in ROWS.read_text().splitlines() if line.startswith("{")]


def subject(row: dict[str, Any]) -> tuple[str, str]:
    """Operator, and shape with dtype: rows that agree in both stand on one line."""
    shape = ", ".join(f"{name} {size}" for name, size in row["shape"].items())
    return row["op"], f"{shape}, {row['dtype']}"


def cells(rows: list[dict[str, Any]]) -> list[str]:
    """The cells of one line, from its rows: one against each baseline."""
    against = [row for row in rows if not row["baseline_name"].startswith(SCALING)] or rows
    scaling = [f"{row['ratio']:.2f}" for row in rows if row["baseline_name"].startswith(SCALING)]
    first = against[0]
    rate = f"{first['gflops']:.0f} GFLOP/s" if "gflops" in first else f"{first['gbps']:.1f} GB/s"
    ratios = [f"{row['baseline_name']} {row['ratio']:.2f}" for row in against]
    worst = max(row["rel_error"] for row in against)
    error = f"{worst:.0e}" if worst else "0"
    milliseconds = f"{first['seconds'] * 1e3:.3g}"
    return [f"`{first['op']}`", subject(first)[1], milliseconds, rate, error, "; ".join(ratios), *scaling[:1]]


def shown(operator: str, lines: list[list[str]]) -> list[list[str]]:
    """The lines of one operator that the table has."""
    own = [line for line in lines if line[0] == f"`{operator}`"]
    return own if len(own) <= SHAPES else [own[0], own[len(own) // 2], own[-1]]


def table() -> str:
    """The table in Markdown, and the machine it was measured on."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in read_rows():
        groups.setdefault(subject(row), []).append(row)
    machines = sorted({row["machine"] for rows in groups.values() for row in rows})
    head = ["operator", "shape", "ms", "rate", "error", "times as fast as", "2 threads to 1"]
    every = [cells(rows) for rows in groups.values()]
    operators = dict.fromkeys(name for name, _ in groups)
    lines = [head, ["---"] * len(head), *(line for name in operators for line in shown(name, every))]
    text = "\n".join("| " + " | ".join([*line, *[""] * (len(head) - len(line))]) + " |" for line in lines)
    return f"Measured on: {'; '.join(machines)}.\n\n{text}"


def main() -> None:
    print_or_write(table(), BEGIN, END)


if __name__ == "__main__":
    main()
