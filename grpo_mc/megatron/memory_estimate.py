"""How much memory a run needs on one rank, before it is started: a sum of what is allocated, from sizes alone.

    parameters   the fullest pipeline stage's share, in the compute dtype
    gradients    float32, one for each parameter (Megatron's DDP buffer); with compression also what is left over, kept
                 twice, and the messages both ways, for the parts of the other data-parallel ranks
    optimizer    two moments (float32, or 8 or 4 bits and 12 bytes for 128 entries), plus float32 master weights under
                 bf16; split over dp (distributed optimizer). Offloaded, two chunks of them
    reference    a second copy of the parameters when the KL asks for one
    activations  what a backward pass keeps for one micro-batch, times the micro-batches in flight (1F1B: up to pp);
                 with model.fp8 the inputs of linear layers as codes, a byte an entry and a scale for 128
    logits       [scored tokens, V / tp] float32, and its gradient; streamed, one chunk of the vocabulary
    KV cache     keys and values of the responses decoded at once and of one prompt for each group

Training and sampling take turns, so the peak is static + max(activations + logits, KV cache + one row of logits for
each decoded response) + the runtime. It is an estimate, not a bound: allocator slack, attention's scratch space and
the temporary copies of checkpointing are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from grpo_mc.config import Config
from grpo_mc.megatron.offload import CHUNK
from grpo_mc.ops.linear_logprobs import CHUNK_COLUMNS

RUNTIME_BYTES = 450_000_000
"""Resident size of a process that has imported torch (CPU build), Megatron-Core and transformers, and built nothing."""

BYTES = {"fp32": 4, "bf16": 2}

CODE_BYTES = 1 + 4 / 128
"""Of an entry that is kept in FP8, with its part of a float32 scale; see fp8_linear."""

MOMENT_BYTES = {"fp32": 8.0, "int8": 2 + 12 / 128, "int4": 1 + 12 / 128}
"""Of both moments of a parameter, by optimizer.states."""


class Architecture(Protocol):
    """The sizes read here; ModelArchitecture has them."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def ffn_hidden_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def experts_per_token(self) -> int: ...


@dataclass(frozen=True)
class Layout:
    """What of a run decides its memory. Sizes are those of the whole run."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    dp: int = 1
    dtype: str = "fp32"
    """"fp32" or "bf16"."""
    fp8: bool = False
    """Linear layers and experts multiply in FP8 and keep their inputs so."""
    grad_compression: str = "none"
    """"none", "int8" or "int4"."""
    optimizer_states: str = "fp32"
    """"fp32", "int8" or "int4"."""
    optimizer_offload: bool = False
    sequence_parallel: bool = False
    recompute: bool = False
    """Keep only each layer's input and compute the rest again in the backward pass."""
    has_reference: bool = False
    streamed_logprobs: bool = False
    """Log-probs from a chunk of the vocabulary at a time."""
    max_tokens_per_micro_batch: int = 1024
    num_prompts: int = 0
    """Groups a step."""
    group_size: int = 1
    max_prompt_tokens: int = 0
    max_new_tokens: int = 0
    max_batch_rows: int = 256
    """Most responses decoded at once on one data-parallel rank."""


def run_layout(config: Config) -> Layout:
    """What of a resolved configuration, its layout filled in, decides its memory."""
    p = config.parallel
    return Layout(
        tp=p.tp, pp=p.pp, ep=p.ep, etp=p.etp or 1, cp=p.cp, dp=p.dp or 1,
        dtype=config.model.dtype,
        grad_compression=p.grad_compression,
        fp8=config.model.fp8 != "none",
        optimizer_states=config.optimizer.states, optimizer_offload=config.optimizer.offload,
        sequence_parallel=bool(p.sequence_parallel),
        recompute=config.model.recompute == "full",
        streamed_logprobs=config.model.logprobs == "streamed",
        has_reference=config.algorithm.beta > 0,
        max_tokens_per_micro_batch=p.max_tokens_per_micro_batch,
        num_prompts=config.data.prompts_per_step,
        group_size=config.rollout.group_size,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_new_tokens=config.rollout.max_new_tokens,
        max_batch_rows=config.rollout.max_batch_rows,
    )  # fmt: skip


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the fullest rank."""

    parameters: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    logits: int
    kv_cache: int
    decode_logits: int
    runtime: int = RUNTIME_BYTES

    @property
    def static(self) -> int:
        """What stays for the whole run."""
        return self.parameters + self.gradients + self.optimizer + self.reference + self.runtime

    @property
    def peak(self) -> int:
        """Static, plus the larger of training's and sampling's needs."""
        return self.static + max(self.activations + self.logits, self.kv_cache + self.decode_logits)

    def lines(self) -> list[str]:
        """One line for each part, then the peak, in GB."""
        names = ("parameters", "gradients", "optimizer", "reference", "activations", "logits", "kv_cache",
                 "decode_logits", "runtime", "peak")  # fmt: skip
        return [f"{name.replace('_', ' '):<14} {getattr(self, name) / 1e9:9.3f} GB" for name in names]


def parameter_count(arch: Architecture) -> int:
    """Parameters of the whole model, norms included, biases left out (they are below a thousandth)."""
    embedding = arch.vocab_size * arch.hidden_size
    layers = arch.num_layers * (_attention(arch) + _mlp(arch) + 2 * arch.hidden_size)
    return embedding * (1 if arch.tie_word_embeddings else 2) + layers + arch.hidden_size


def estimate_memory(arch: Architecture, layout: Layout) -> MemoryEstimate:
    """The estimate for the fullest rank.

    Raises:
        ValueError: a dtype other than fp32 or bf16.
    """
    if layout.dtype not in BYTES:
        raise ValueError(f"memory estimate: dtype is {layout.dtype!r}; it must be one of {', '.join(BYTES)}")
    item = BYTES[layout.dtype]
    dense, expert = _rank_parameters(arch, layout)
    master = 0 if layout.dtype == "fp32" else 4
    # Expert parameters have fewer replicas: the ranks of tp * cp * dp are shared out over etp * ep.
    expert_dp = max(1, layout.tp * layout.cp * layout.dp // (layout.etp * layout.ep))
    moments = MOMENT_BYTES[layout.optimizer_states]
    owned = dense // (layout.dp * layout.cp) + expert // expert_dp
    optimizer = int((moments + master) * (min(owned, 2 * CHUNK) if layout.optimizer_offload else owned))
    tokens = layout.max_tokens_per_micro_batch
    vocab = -(-arch.vocab_size // layout.tp)
    rows = _decoded_rows(layout)
    return MemoryEstimate(
        parameters=item * (dense + expert),
        gradients=_gradient_bytes(layout, dense, layout.dp * layout.cp) + _gradient_bytes(layout, expert, expert_dp),
        optimizer=optimizer,
        reference=item * (dense + expert) if layout.has_reference else 0,
        activations=_activation_bytes(arch, layout, tokens, item) * min(layout.pp, max(1, _micro_batches(layout))),
        logits=4 * (min(vocab, CHUNK_COLUMNS) if layout.streamed_logprobs else 2 * vocab) * _scored_tokens(layout),
        kv_cache=_kv_cache_bytes(arch, layout, rows, item),
        decode_logits=4 * vocab * rows,
    )


def _gradient_bytes(layout: Layout, parameters: int, ranks: int) -> int:
    """The buffer, and what compression between so many ranks adds to it."""
    if layout.grad_compression == "none":
        return 4 * parameters
    bits = int(layout.grad_compression.removeprefix("int"))
    return 4 * parameters + (16 + 2 * bits) * parameters * (ranks - 1) // ranks // 8


def _attention(arch: Architecture) -> int:
    heads = arch.num_heads + 2 * arch.num_kv_heads
    return arch.hidden_size * arch.head_dim * (heads + arch.num_heads)


def _mlp(arch: Architecture) -> int:
    one = 3 * arch.hidden_size * arch.ffn_hidden_size
    return one * arch.num_experts + arch.hidden_size * arch.num_experts if arch.num_experts else one


def _rank_parameters(arch: Architecture, layout: Layout) -> tuple[int, int]:
    """(dense, expert) parameters on the fullest rank: a first stage with the embedding, or one stage with all."""
    layers = -(-arch.num_layers // layout.pp)
    embedding = -(-arch.vocab_size // layout.tp) * arch.hidden_size
    # With pp > 1 the first and the last stage hold one matrix each, tied or not.
    copies = 1 if arch.tie_word_embeddings or layout.pp > 1 else 2
    dense = copies * embedding + layers * (_attention(arch) // layout.tp + 2 * arch.hidden_size)
    if not arch.num_experts:
        return dense + layers * _mlp(arch) // layout.tp, 0
    experts = layers * 3 * arch.hidden_size * arch.ffn_hidden_size * arch.num_experts // (layout.ep * layout.etp)
    return dense + layers * arch.hidden_size * arch.num_experts, experts


def _activation_bytes(arch: Architecture, layout: Layout, tokens: int, item: int) -> int:
    """What one micro-batch keeps on one rank for its backward pass, without the output layer."""
    layers = -(-arch.num_layers // layout.pp)
    tokens = -(-tokens // layout.cp)
    hidden = arch.hidden_size / layout.tp if layout.sequence_parallel else arch.hidden_size
    kept, inputs = _layer_entries(arch, layout, hidden)
    layer = item * kept + (CODE_BYTES if layout.fp8 else item) * inputs
    if layout.recompute:
        return int(tokens * (layers * item * hidden + layer))
    return int(tokens * layers * layer)


def _layer_entries(arch: Architecture, layout: Layout, hidden: float) -> tuple[float, float]:
    """Numbers that a layer keeps per token, and those it keeps only as inputs of linear layers.

    Together they are both norms' inputs and outputs; q, k, v before and after the rotation; attention's output; gate,
    up and their product. With experts, dispatched copies of the token, in and out, and the MLP of each expert it goes
    to; the second norm's output is then the router's input too, which is not in FP8.
    """
    qkv = arch.head_dim * 2 * (arch.num_heads + 2 * arch.num_kv_heads) / layout.tp
    attended = arch.head_dim * arch.num_heads / layout.tp
    if arch.num_experts:
        k, ffn = arch.experts_per_token, arch.ffn_hidden_size / layout.etp
        return 3 * hidden + qkv + k * (arch.hidden_size + 2 * ffn), hidden + attended + k * (arch.hidden_size + ffn)
    ffn = arch.ffn_hidden_size / layout.tp
    return 2 * hidden + qkv + 2 * ffn, 2 * hidden + attended + ffn


def _decoded_rows(layout: Layout) -> int:
    """Responses decoded at once on one data-parallel rank."""
    return min(layout.max_batch_rows, -(-layout.num_prompts // layout.dp) * layout.group_size)


def _kv_cache_bytes(arch: Architecture, layout: Layout, rows: int, item: int) -> int:
    """Keys and values: the prompt once for each group, the response once for each row."""
    prompts = -(-rows // layout.group_size)
    cached = rows * layout.max_new_tokens + prompts * layout.max_prompt_tokens
    layers = -(-arch.num_layers // layout.pp)
    kv_heads = max(1, arch.num_kv_heads // layout.tp)
    return 2 * item * layers * kv_heads * arch.head_dim * cached


def _group_tokens(layout: Layout) -> int:
    """Most tokens of one group in training: its prompt once and its responses."""
    return layout.max_prompt_tokens + layout.group_size * layout.max_new_tokens


def _scored_tokens(layout: Layout) -> int:
    """Most response tokens in one micro-batch; only they get logits."""
    rollouts = -(-layout.num_prompts // layout.dp) * layout.group_size
    return min(layout.max_tokens_per_micro_batch, rollouts * layout.max_new_tokens)


def _micro_batches(layout: Layout) -> int:
    """About how many micro-batches a step has on one data-parallel rank."""
    tokens = -(-layout.num_prompts // layout.dp) * _group_tokens(layout)
    return -(-tokens // layout.max_tokens_per_micro_batch)
