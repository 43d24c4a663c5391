"""TRL's GRPOTrainer on the quickstart's task, in a process of its own; prints one JSON object as its last line.

python benchmarks/trl_runner.py --model FOLDER --steps 5
python benchmarks/trl_runner.py --model FOLDER --steps 40 --eval-heldout configs/data/heldout_sums.jsonl --eval-every 10

One step = `--prompts` prompts x `--group-size` samples, one optimizer step (AdamW, constant learning rate, gradient
norm 1), TRL's default loss (token mean over the batch, no KL). Gradient checkpointing, TRL's default, is off, since it
costs TRL time; `--gradient-checkpointing` trades that for memory. Everything else not given here is TRL's default.

Output: step_s (median without the first step), steps_s, rollouts_per_s, response_tokens_mean, reward_mean, peak_bytes
(VmHWM after training and before the last evaluation); with --eval-heldout also `evaluations`: [{step, train_s,
accuracy}], train_s without the evaluations' own time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets
import torch
import transformers
import trl

import measure


class StepClock(transformers.TrainerCallback):
    """Times each step (sampling, scoring and update) and evaluates between steps, off the clock."""

    def __init__(self, evaluate: Any, every: int) -> None:
        self.evaluate, self.every = evaluate, every
        self.steps_s: list[float] = []
        self.evaluations: list[dict[str, float]] = []
        self._started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps_s.append(time.perf_counter() - self._started)
        if self.every and state.global_step % self.every == 0 and state.global_step < args.max_steps:
            self.note(state.global_step)

    def note(self, step: int) -> None:
        if self.evaluate is not None:
            self.evaluations.append({"step": step, "train_s": sum(self.steps_s), "accuracy": self.evaluate()})


def reward(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """1 if the first integer on the first line is the answer, else 0."""
    return [float(measure.first_integer(text) == truth) for text, truth in zip(completions, answer, strict=True)]


@torch.no_grad()
def greedy_accuracy(model: Any, tokenizer: Any, problems: list[dict[str, str]], max_new_tokens: int) -> float:
    """Part of the held-out problems that greedy decoding answers."""
    was_training = model.training
    model.eval()
    right = 0
    for start in range(0, len(problems), 50):
        rows = problems[start : start + 50]
        inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True, padding_side="left")
        tokens = model.generate(
            **inputs, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
        texts = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(measure.first_integer(text) == row["answer"] for text, row in zip(texts, rows, strict=True))
    model.train(was_training)
    return right / len(problems)


def build_trainer(options: argparse.Namespace, heldout: list[dict[str, str]], output_dir: str) -> Any:
    rows = measure.training_problems(4000, heldout)
    config = trl.GRPOConfig(
        output_dir=output_dir,
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=options.prompts * options.group_size,
        num_generations=options.group_size,
        max_completion_length=options.max_new_tokens,
        max_steps=options.steps,
        temperature=1.0,
        beta=0.0,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        gradient_checkpointing=options.gradient_checkpointing,
        seed=options.seed,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
    )
    return trl.GRPOTrainer(
        model=str(options.model), reward_funcs=reward, args=config, train_dataset=datasets.Dataset.from_list(rows)
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder with safetensors and tokenizer")
    parser.add_argument("--prompts", type=int, default=4, help="prompts a step")
    parser.add_argument("--group-size", type=int, default=8, help="samples a prompt")
    parser.add_argument("--max-new-tokens", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=5e-6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gradient-checkpointing", action="store_true", help="less memory, more time")
    parser.add_argument("--eval-heldout", type=Path, help="JSONL file: greedy accuracy before and after")
    parser.add_argument("--eval-every", type=int, default=0, help="evaluate also every so many steps")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    exclude = measure.HELDOUT if options.eval_heldout is None else options.eval_heldout
    heldout = measure.heldout_problems(exclude)
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = build_trainer(options, heldout, output_dir)

        def evaluate() -> float:
            return greedy_accuracy(trainer.model, trainer.processing_class, heldout, options.max_new_tokens)

        clock = StepClock(evaluate if options.eval_heldout else None, options.eval_every)
        trainer.add_callback(clock)
        clock.note(0)
        trainer.train()
        peak_bytes = measure.peak_resident_bytes()
        clock.note(options.steps)
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    step_s = statistics.median(clock.steps_s[1:] or clock.steps_s)
    result = {
        "side": "trl",
        "step_s": step_s,
        "steps_s": clock.steps_s,
        "rollouts_per_s": options.prompts * options.group_size / step_s,
        "response_tokens_mean": statistics.mean(entry["completions/mean_length"] for entry in history),
        "reward_mean": statistics.mean(entry["reward"] for entry in history),
        "peak_bytes": peak_bytes,
        "evaluations": clock.evaluations,
        "seed": options.seed,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
