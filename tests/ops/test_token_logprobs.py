"""token_logprobs, its stats and its backward: hand-worked numbers, the reference on tricky shapes, registrations."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mc import ops
from grpo_mc.ops import reference
from helpers import cuda_emulator
from helpers.compare import assert_close, relative_error


def close_to(actual: torch.Tensor, expected: torch.Tensor, bound: float) -> bool:
    return actual.numel() == 0 or float((actual.double() - expected.double()).abs().max()) <= bound


VOCABS = (1, 8, 123, 5000, 49152)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-6}
GRAD_TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-6, torch.bfloat16: 4e-3}


def make(tokens: int, vocab: int, dtype: torch.dtype, seed: int = 0, spread: float = 4.0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(tokens, vocab, generator=generator) * spread).to(dtype)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    return logits, targets


def backward_of(function, logits: torch.Tensor, targets: torch.Tensor, **options) -> tuple[torch.Tensor, ...]:
    """Outputs and the gradient of a fixed random combination of both outputs."""
    leaf = logits.detach().clone().requires_grad_()
    logprobs, entropy = function(leaf, targets, with_entropy=True, **options)
    generator = torch.Generator().manual_seed(1)
    g = torch.randn(len(targets), generator=generator, dtype=torch.float64)
    h = torch.randn(len(targets), generator=generator, dtype=torch.float64)
    ((logprobs.double() * g).sum() + (entropy.double() * h).sum()).backward()
    return logprobs.detach(), entropy.detach(), leaf.grad


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("tokens", (0, 1, 7))
@pytest.mark.parametrize("vocab", VOCABS)
def test_matches_the_float64_reference(vocab: int, tokens: int, dtype: torch.dtype) -> None:
    logits, targets = make(tokens, vocab, dtype)
    for temperature in (1.0, 0.7):
        got = backward_of(ops.token_logprobs, logits, targets, temperature=temperature)
        want = backward_of(reference.token_logprobs, logits.double(), targets, temperature=temperature)
        case = (vocab, tokens, dtype, temperature)
        assert got[0].dtype == got[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert got[2].dtype == dtype
        for ours, theirs in zip(got[:2], want[:2], strict=True):  # both may be near 0 for a peaked row
            assert close_to(ours, theirs, TOLERANCE[dtype] * 2), case
        # p and 1 - p are float32: a gradient far below 1 keeps an absolute error of that size.
        assert relative_error(got[2], want[2]) <= GRAD_TOLERANCE[dtype] or close_to(got[2], want[2], 2e-7), case


@pytest.mark.parametrize("temperature, expected", [(1.0, -0.126928), (0.5, -0.018150), (2.0, -0.313262)])
def test_temperature_divides_the_logits(temperature: float, expected: float) -> None:
    """H05."""
    logprobs = ops.token_logprobs(torch.tensor([[2.0, 0.0]] * 2), torch.tensor([0, 1]), temperature=temperature)
    assert logprobs.tolist() == pytest.approx([expected, expected - 2 / temperature], abs=1e-6)


def test_logprobs_of_bf16_logits_are_float32() -> None:
    """H09: bf16 would store -11.9375 and -30.25."""
    flat = ops.token_logprobs(torch.zeros(1, 151936, dtype=torch.bfloat16), torch.tensor([5]))
    assert flat.dtype == torch.float32
    assert float(flat) == pytest.approx(-math.log(151936), abs=1e-6)
    logits, targets = make(4, 30000, torch.bfloat16)
    logits[:, 0], targets[:] = -19.0, 0
    want = reference.token_logprobs(logits.double(), targets)
    assert float(want.min()) < -30
    assert float((ops.token_logprobs(logits, targets) - want).abs().max()) <= 1e-5


@pytest.mark.parametrize("padding", (0.0, 50.0, float("nan"), float("inf")))
def test_padding_columns_never_count(padding: float) -> None:
    """H19: V = 5 padded to 8; -ln 5 whatever the padding holds, and gradient 0 there."""
    logits = torch.zeros(2, 8)
    logits[:, 5:] = padding
    logits.requires_grad_()
    logprobs, entropy = ops.token_logprobs(logits, torch.tensor([0, 4]), vocab_size=5, with_entropy=True)
    assert logprobs.tolist() == pytest.approx([-1.609438] * 2, abs=1e-6)
    assert entropy.tolist() == pytest.approx([1.609438] * 2, abs=1e-6)
    (logprobs.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([0.8, -0.2, -0.2, -0.2, -0.2, 0, 0, 0], abs=1e-6)


def test_peaked_rows_do_not_leak_the_tail() -> None:
    """V = 152064, one logit +3 and the rest -15 at temperature 1.5: a log-prob is never positive."""
    logits = torch.full((1, 152064), -15.0)
    logits[0, 7] = 3.0
    got = backward_of(ops.token_logprobs, logits, torch.tensor([7]), temperature=1.5)
    want = backward_of(reference.token_logprobs, logits.double(), torch.tensor([7]), temperature=1.5)
    assert float(got[0]) < 0
    for ours, theirs in zip(got, want, strict=True):
        assert_close(ours, theirs, 5e-6)  # float32 z = -12 is off by 5e-7, and so are all 152063 equal terms


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
def test_minus_infinity_is_a_token_that_cannot_be_drawn(dtype: torch.dtype) -> None:
    logits, targets = make(6, 5000, dtype)
    logits[:, ::3] = float("-inf")
    logits[0, :4900] = float("-inf")  # a whole block without a finite logit
    targets = targets // 3 * 3 + 1
    targets[0] = 4999 // 3 * 3 - 2
    targets[1] = 0  # impossible: log-prob -inf
    logprobs, entropy = ops.token_logprobs(logits, targets, with_entropy=True)
    want, want_entropy = reference.token_logprobs(logits.double(), targets, with_entropy=True)
    assert float(logprobs[1]) == float("-inf")
    assert_close(logprobs[2:], want[2:], 1e-6)
    assert_close(entropy, want_entropy, 1e-6)
    logits.requires_grad_()
    logprobs, entropy = ops.token_logprobs(logits, targets, with_entropy=True)
    (logprobs[2:].sum() + entropy.sum()).backward()
    assert logits.grad is not None and bool(torch.isfinite(logits.grad).all())
    assert float(logits.grad[:, ::3][2:].abs().max()) == 0


def test_large_logits_keep_their_digits() -> None:
    """Logits around 1e4, where float32 steps by 1e-3: differences are taken before anything is rounded."""
    logits, targets = make(5, 3000, torch.float32)
    for offset in (1e4, -1e4, 3e6):
        moved = logits + offset
        got = backward_of(ops.token_logprobs, moved, targets, temperature=0.7)
        want = backward_of(reference.token_logprobs, moved.double(), targets, temperature=0.7)
        for ours, theirs in zip(got, want, strict=True):
            assert_close(ours, theirs, 2e-6, offset)


def test_extreme_temperature_stays_finite() -> None:
    logits, targets = make(4, 500, torch.float32)
    for temperature in (1e-3, 0.1, 100.0):
        got = backward_of(ops.token_logprobs, logits, targets, temperature=temperature)
        want = backward_of(reference.token_logprobs, logits.double(), targets, temperature=temperature)
        assert all(bool(torch.isfinite(x).all()) for x in got)
        assert_close(got[0], want[0], 1e-6, temperature)
        assert_close(got[2], want[2], 1e-5, temperature)


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
@pytest.mark.parametrize("place", (0, 2047, 2048, 4999))
def test_nan_stays_visible_in_its_row_only(bad: float, place: int) -> None:
    logits, targets = make(3, 5000, torch.float32)
    logits[1, place] = bad
    logprobs, entropy = ops.token_logprobs(logits, targets, with_entropy=True)
    assert torch.isnan(logprobs).tolist() == torch.isnan(entropy).tolist() == [False, True, False]
    logits[1] = float("-inf")
    logits[1, place] = float("nan")
    assert torch.isnan(ops.token_logprobs(logits, targets)).tolist() == [False, True, False]
    logits[1, place] = float("-inf")
    assert torch.isnan(ops.token_logprobs(logits, targets)).tolist() == [False, True, False]


def test_tokens_without_a_gradient_get_exact_zeros() -> None:
    logits, targets = make(2, 100, torch.float32)
    logits[0] = float("nan")
    logits.requires_grad_()
    logprobs = ops.token_logprobs(logits, targets)
    logprobs[1].backward()
    assert logits.grad is not None and float(logits.grad[0].abs().max()) == 0
    assert float(logits.grad[1].abs().max()) > 0


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_inplace_backward_overwrites_the_logits(dtype: torch.dtype) -> None:
    logits, targets = make(5, 700, dtype)
    want = backward_of(ops.token_logprobs, logits, targets, vocab_size=700)[2]
    padded_rows = torch.cat([logits, logits], 1)[:, :700]
    for base in (logits.clone(), padded_rows):
        leaf = base.detach().requires_grad_()
        logprobs, entropy = ops.token_logprobs(leaf, targets, with_entropy=True, inplace_backward=True)
        generator = torch.Generator().manual_seed(1)
        g = torch.randn(5, generator=generator, dtype=torch.float64)
        h = torch.randn(5, generator=generator, dtype=torch.float64)
        loss = (logprobs.double() * g).sum() + (entropy.double() * h).sum()
        (grad,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        assert grad.data_ptr() == base.data_ptr()
        assert torch.equal(grad, want)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, leaf)
    with pytest.raises(ValueError, match="columns are adjacent"):
        ops.token_logprobs(logits.t().contiguous().t(), targets, inplace_backward=True)


def test_strided_logits_and_expanded_gradients() -> None:
    logits, targets = make(6, 300, torch.float32)
    wide = torch.randn(6, 1000)
    wide[:, 100:400] = logits
    transposed = logits.t().contiguous().t()
    want = ops.token_logprobs(logits, targets)
    for view in (wide[:, 100:400], transposed):
        leaf = view.detach().requires_grad_()
        logprobs = ops.token_logprobs(leaf, targets)
        assert torch.equal(logprobs, want)
        logprobs.sum().backward()  # an expanded, zero-stride gradient
        assert leaf.grad is not None and leaf.grad.shape == (6, 300)


def test_offsets_beyond_32_bits() -> None:
    """H13: rows of an expanded tensor start 2^31 elements apart in index, at one address."""
    row, _ = make(1, 70000, torch.float32)
    logits = row.expand(40000, 70000)  # 2.8e9 elements
    targets = torch.arange(40000)
    logprobs, entropy = ops.token_logprobs(logits[-3:], targets[-3:], with_entropy=True)
    want = torch.log_softmax(row[0].double(), 0)[targets[-3:]]
    assert_close(logprobs, want, 1e-6)
    assert_close(entropy, entropy[:1].expand(3), 0)


@pytest.mark.parametrize("splits", ([0, 123], [0, 64, 123], [0, 40, 80, 120, 160]))
@pytest.mark.parametrize("offset", (0.0, 1e4))
def test_shards_merge_to_the_whole(splits: list[int], offset: float) -> None:
    """The shards' stats merged as the reference says equal one call; the last split has a shard of padding only."""
    logits, targets = make(7, 123, torch.float32)
    logits = torch.cat([logits + offset, torch.full((7, 40), 99.0 + offset)], 1)  # 40 columns of padding
    parts = []
    for start, stop in zip(splits, [*splits[1:], 163], strict=True):
        shard = logits[:, start:stop]
        got = ops.token_logprob_stats(shard, targets, vocab_start=start, vocab_size=123, temperature=0.7)
        want = reference.token_logprob_stats(
            shard.double(), targets, vocab_start=start, vocab_size=123, temperature=0.7
        )
        for ours, theirs in zip(got, want, strict=True):
            assert torch.equal(torch.isinf(ours), torch.isinf(theirs))
            assert_close(ours.nan_to_num(neginf=0), theirs.nan_to_num(neginf=0), 2e-6, (splits, start))
        parts.append([x.double() for x in want])
    maximum = torch.stack([p[0] for p in parts]).max(0).values
    weights = [torch.where(p[0] == -math.inf, 0.0, (p[0] - maximum).exp()) for p in parts]
    total = sum(w * p[1] for w, p in zip(weights, parts, strict=True))
    lse = maximum + total.log()
    logprobs, entropy = ops.token_logprobs(logits, targets, temperature=0.7, vocab_size=123, with_entropy=True)
    assert_close(sum(p[3] for p in parts) - lse, logprobs.double(), 1e-6)
    grad, grad_entropy = torch.randn(7), torch.randn(7)
    options = {"temperature": 0.7, "vocab_size": 123, "inplace": False}
    whole = ops.token_logprobs_backward(logits, targets, lse, entropy, grad, grad_entropy, vocab_start=0, **options)
    cut = [
        ops.token_logprobs_backward(logits[:, a:b], targets, lse, entropy, grad, grad_entropy, vocab_start=a, **options)
        for a, b in zip(splits, [*splits[1:], 163], strict=True)
    ]
    assert torch.equal(torch.cat(cut, 1), whole)
    want = reference.token_logprobs_backward(
        logits.double(), targets, lse, entropy.double(), grad, grad_entropy, vocab_start=0, **options
    )
    assert_close(whole, want, 1e-6)


def test_gradcheck() -> None:
    logits, targets = make(3, 11, torch.float64)
    leaf = logits.requires_grad_()

    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ops.token_logprobs(x, targets, temperature=0.7, vocab_size=9, with_entropy=True)

    targets = targets % 9
    assert torch.autograd.gradcheck(both, (leaf,))
    assert torch.autograd.gradcheck(lambda x: ops.token_logprobs(x, targets), (leaf,))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
@pytest.mark.parametrize("with_entropy", (False, True))
def test_opcheck(dtype: torch.dtype, with_entropy: bool) -> None:
    logits, targets = make(3, 33, dtype)
    leaf = logits.requires_grad_()
    torch.library.opcheck(torch.ops.grpo_mc.token_logprobs, (leaf, targets, 0.7, 33, with_entropy, False))
    plain = logits.detach()
    torch.library.opcheck(torch.ops.grpo_mc.token_logprob_stats, (plain, targets, 4, 60, 0.7))
    lse = torch.zeros(3, dtype=torch.float64)
    entropy = torch.zeros(3) if with_entropy else None
    arguments = (plain, targets, lse, entropy, torch.ones(3), entropy, 0.7, 0, 33)
    torch.library.opcheck(torch.ops.grpo_mc.token_logprobs_backward, arguments)
    torch.library.opcheck(torch.ops.grpo_mc.token_logprobs_backward_, arguments)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_one_and_two_threads_agree_bit_for_bit(dtype: torch.dtype) -> None:
    logits, targets = make(9, 20000, dtype)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(backward_of(ops.token_logprobs, logits, targets, temperature=0.9))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits, targets = make(9, 5000, torch.float32)
    whole = ops.token_logprobs(logits, targets)
    alone = torch.cat([ops.token_logprobs(logits[i : i + 1], targets[i : i + 1]) for i in range(9)])
    assert torch.equal(whole, alone)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"temperature": 0.0}, "temperature is 0; it must be positive"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"vocab_size": 11}, "vocab_size is 11 but logits has 10 columns"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"targets": torch.tensor([0])}, "targets has shape"),
        ({"targets": torch.tensor([0.0, 1.0])}, "targets has dtype Float"),
        ({"logits": torch.zeros(2, 10, dtype=torch.float16)}, "logits has dtype Half"),
        ({"logits": torch.zeros(10)}, r"it must be \[T, V\]"),
    ],
)
def test_user_mistakes_are_value_errors(change: dict, message: str) -> None:
    arguments = {"logits": torch.zeros(2, 10), "targets": torch.tensor([0, 1]), **change}
    with pytest.raises(ValueError, match=message):
        ops.token_logprobs(**arguments)


@pytest.mark.parametrize("target", (10, -100))
def test_a_target_out_of_range_is_an_error_or_on_a_gpu_nan(target: int) -> None:
    logits, targets = torch.zeros(3, 12), torch.tensor([0, target, 9])

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = ops.token_logprobs(logits, targets, vocab_size=10)
        stats = ops.token_logprob_stats(logits, targets, vocab_start=0, vocab_size=10, temperature=1.0)
        return logprobs, stats[3]

    if not cuda_emulator.IS_USED:
        with pytest.raises(ValueError, match=rf"targets\[1\] is {target}; it must lie in \[0, 10\)"):
            call()
        return
    for result in call():
        assert torch.isnan(result).tolist() == [False, True, False]


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 6),
    vocab=st.integers(1, 700),
    padding=st.integers(0, 9),
    temperature=st.floats(0.05, 20),
    spread=st.sampled_from([0.0, 1.0, 30.0]),
    offset=st.sampled_from([0.0, -300.0, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    layout=st.sampled_from(["plain", "offset", "transposed"]),
    seed=st.integers(0, 1000),
)
def test_fuzz_against_the_reference(tokens, vocab, padding, temperature, spread, offset, dtype, layout, seed) -> None:
    logits, targets = make(tokens, vocab + padding, dtype, seed, spread)
    logits, targets = (logits + offset).to(dtype), targets % vocab
    if layout == "offset":
        logits = torch.cat([logits.new_zeros(tokens, 3), logits], 1)[:, 3:]
    elif layout == "transposed":
        logits = logits.t().contiguous().t()
    options = {"temperature": temperature, "vocab_size": vocab}
    got = backward_of(ops.token_logprobs, logits, targets, **options)
    want = backward_of(reference.token_logprobs, logits.double(), targets, **options)
    # Absolute where a value may be near 0; the size of z bounds what float32 can hold.
    wide = logits.double()
    size = 1.0 + (float((wide.amax(1) - wide.amin(1)).max()) / temperature if tokens else 0.0)
    for ours, theirs in zip(got[:2], want[:2], strict=True):
        assert close_to(ours, theirs, 2e-6 * size)
    scale = float(want[2].abs().max()) if tokens else 0
    bound = (4e-3 if dtype == torch.bfloat16 else 2e-6 * min(size, 50)) * scale + 1e-6 / temperature
    assert close_to(got[2], want[2], bound)
