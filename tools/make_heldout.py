"""Writes configs/data/heldout_sums.jsonl: 400 sums and differences that no training run may draw.

    python tools/make_heldout.py [OUTPUT]

The problems are chain_sum's, with two terms: 100 of one digit and 300 of two, half sums and half differences, no two
the same. There are only 200 problems of one digit, so half of them stay for training. Problem i comes from seed + i, so
the seed lies far from any that a training run uses; `data.exclude` keeps training off those that meet all the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import reasoning_gym

SEED = 1_000_000_000
SHOTS = "2 + 5 = 7\n16 - 3 = 13\n"
"""Two solved problems before the asked one."""
SHOWN = {line.split(" = ")[0] for line in SHOTS.splitlines()}
"""Not asked, because the answer stands in the prompt."""
COUNTS = {(1, "+"): 50, (1, "-"): 50, (2, "+"): 150, (2, "-"): 150}
OUTPUT = Path(__file__).resolve().parent.parent / "configs" / "data" / "heldout_sums.jsonl"


def draw(num_digits: int, operator: str, count: int, seed: int) -> list[dict[str, str]]:
    """The first `count` distinct problems of one kind that the generator makes from `seed` on."""
    options = {"min_terms": 2, "max_terms": 2, "min_digits": num_digits, "max_digits": num_digits}
    dataset = reasoning_gym.create_dataset("chain_sum", size=100 * count, seed=seed, allow_negation=False, **options)
    found: dict[str, str] = {}
    for entry in dataset:
        expression = entry["metadata"]["expression"]
        if f" {operator} " in expression and expression not in SHOWN:
            found[expression] = entry["answer"]
        if len(found) == count:
            break
    assert len(found) == count, f"{len(found)} of {count} problems with {num_digits} digits and {operator}"
    return [
        {"prompt": f"{SHOTS}{e} =", "answer": answer, "expression": e, "data_source": "chain_sum"}
        for e, answer in found.items()
    ]


def make_problems() -> list[dict[str, str]]:
    """All problems, mixed so that the first so many of them have the mix of the whole."""
    kinds = [
        draw(num_digits, operator, count, SEED + 1_000_000 * index)
        for index, ((num_digits, operator), count) in enumerate(COUNTS.items())
    ]
    # problem j of n of a kind stands at (j + 1/2) / n of the file
    placed = [
        ((at + 0.5) / len(kind), index, problem) for index, kind in enumerate(kinds) for at, problem in enumerate(kind)
    ]
    return [problem for _, _, problem in sorted(placed, key=lambda item: item[:2])]


def main() -> None:
    """Writes the file."""
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    output.write_text("".join(json.dumps(problem) + "\n" for problem in make_problems()), encoding="utf-8")
    print(f"{output}: {sum(COUNTS.values())} problems")


if __name__ == "__main__":
    main()
