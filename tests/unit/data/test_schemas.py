"""What fields mean: TRL's and verl's records, templates, and the keys by which a problem is known again."""

from __future__ import annotations

import pytest

from grpo_mc.config.data import JsonlSource
from grpo_mc.data.schemas import (
    fill_template,
    normalize,
    other_fields,
    problem_keys,
    read_data_source,
    read_ground_truth,
    read_problem,
)
from grpo_mc.data.sources import Record

CHAT = [{"role": "system", "content": "be short"}, {"role": "user", "content": "1+1?"}]


def record(**fields) -> Record:
    return Record(fields, 4, "p.jsonl line 5")


def source(**options) -> JsonlSource:
    return JsonlSource(kind="jsonl", path="p.jsonl", **options)


def test_trl_string_and_chat():
    assert read_problem(record(prompt="hi"), source(chat=False)).text == "hi"
    assert read_problem(record(prompt="hi"), source()).messages == ({"role": "user", "content": "hi"},)
    problem = read_problem(record(prompt=CHAT, answer="2"), source())
    assert problem.messages == tuple(CHAT) and problem.text is None
    assert read_ground_truth(record(prompt=CHAT, solution="2", level=3)) == "2"
    assert other_fields(record(prompt=CHAT, solution="2", level=3)) == {"solution": "2", "level": 3}


def test_verl_record():
    verl = record(
        data_source="gsm8k",
        prompt=CHAT,
        reward_model={"style": "rule", "ground_truth": "2"},
        extra_info={"answer": "long"},
        answer="not this one",
    )
    assert read_problem(verl, source()).messages == tuple(CHAT)
    assert read_ground_truth(verl) == "2" and read_data_source(verl, "p") == "gsm8k"
    assert other_fields(verl)["extra_info"] == {"answer": "long"}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"answer": 3}, "3"),
        ({"answer": 0}, "0"),
        ({"answer": 0.5}, "0.5"),
        ({"answer": ["a", "b"]}, '["a", "b"]'),
        ({"answer": True}, "true"),
        ({"answer": None, "solution": "x"}, "x"),
        ({"reward_model": {"ground_truth": ["7"]}}, '["7"]'),
        ({"reward_model": {"style": "model"}, "answer": "y"}, "y"),
        ({"reward_model": None}, None),
        ({}, None),
    ],
)
def test_ground_truth_is_text(fields, text):
    assert read_ground_truth(record(**fields)) == text


def test_data_source():
    assert read_data_source(record(), "p") == "p"
    assert read_data_source(record(source_dataset="chain_sum"), "p") == "chain_sum"
    with pytest.raises(ValueError, match=r"p.jsonl line 5: field 'data_source' is 3; the name of a domain"):
        read_data_source(record(data_source=3), "p")


def test_template_makes_a_raw_prompt():
    problem = read_problem(record(expression="3 + 4", n=2), source(template="{n}: {expression} = {{}}"))
    assert problem.text == "2: 3 + 4 = {}" and problem.messages is None
    chat = read_problem(record(expression="3 + 4"), source(template="{expression}?", chat=True, system_prompt="s"))
    assert chat.messages == ({"role": "system", "content": "s"}, {"role": "user", "content": "3 + 4?"})
    assert fill_template("{n:03d}", record(n=7)) == "007"


def test_system_prompt_leaves_the_records_own():
    assert read_problem(record(prompt=CHAT), source(system_prompt="s")).messages == tuple(CHAT)
    own = read_problem(record(prompt=CHAT[1:]), source(system_prompt="s")).messages
    assert own == ({"role": "system", "content": "s"}, CHAT[1])


def test_content_of_text_parts_is_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    problem = read_problem(record(prompt=[{"role": "user", "content": parts}]), source())
    assert problem.messages == ({"role": "user", "content": "ab"},)


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"text": "a"}, {}, r"line 5: field 'prompt' is missing; .*prompt, question, problem, .*it has: text"),
        ({"prompt": " "}, {}, r"line 5: field 'prompt' is ' '; a prompt with at least one character"),
        ({"prompt": 3}, {}, r"field 'prompt' is 3; a text or a list of messages"),
        ({"prompt": []}, {}, r"field 'prompt' is \[\]; a text or a list"),
        ({"prompt": [{"role": "user"}]}, {}, r"message 0 needs a role and a content"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, {}, r"no images"),
        ({"prompt": ["hi"]}, {}, r"message 0 needs a role"),
        ({"prompt": CHAT}, {"chat": False}, r"needs the chat template; set chat: true"),
        ({"prompt": "a"}, {"chat": False, "system_prompt": "s"}, r"system_prompt needs the chat template"),
        ({"a": 1}, {"template": "{b}"}, r"line 5: field 'b' is missing; the template needs a text .*fields: a"),
        ({"a": [1]}, {"template": "{a}"}, r"field 'a' is \[1\]; the template needs a text or a number"),
        ({"a": 1}, {"template": "{a.__class__}"}, r"no plain field name"),
        ({"a": 1}, {"template": "{}"}, r"no plain field name"),
        ({"a": 1}, {"template": "{a"}, r"expected '}'"),
        ({"a": "x"}, {"template": "{a:d}"}, r"template '\{a:d\}' over p.jsonl line 5"),
        (
            {"prompt": "a\ud800b"},
            {},
            r"line 5: field 'prompt' is 'a.ud800b'; character 1 is '.ud800', half of a surrogate",
        ),
        (
            {"prompt": [{"role": "user", "content": "a\udfff"}]},
            {},
            r"field 'prompt' .*character 1 of a text of message 0",
        ),
        ({"prompt": [{"role": "a\udfff", "content": "a"}]}, {}, r"field 'prompt' .*of message 0"),
        ({"a": "\ud800"}, {"template": "x {a}"}, r"line 5: field 'a' .*surrogate"),
        ({"a": "b"}, {"template": "\ud800 {a}"}, r"template '.ud800 \{a\}': UTF-8"),
        ({"prompt": "a"}, {"system_prompt": "\ud800"}, r"system_prompt is '.ud800'; UTF-8"),
        ({"prompt": "x" * 200, "reward_model": 1}, {"chat": False, "template": "{reward_models}"}, r"is missing"),
    ],
)
def test_bad_records_are_named(fields, options, message):
    with pytest.raises(ValueError, match=message):
        read_problem(record(**fields), source(**options))


def test_long_values_are_cut_in_messages():
    with pytest.raises(ValueError) as caught:
        read_ground_truth(record(reward_model="y" * 500))
    assert "field 'reward_model' is 'yyy" in str(caught.value) and len(str(caught.value)) < 250


def test_problem_is_known_again_however_it_is_written():
    assert normalize("3 + 4  =\n") == normalize("3+4=") == "3+4="
    assert normalize("What is\t X?") == "what is x?" and normalize("12 3") != normalize("123")
    assert normalize("\uff13 + 4") == "3+4"
    assert problem_keys(record(prompt="2 + 5 = 7\n3 + 4 =", expression="3 + 4")) == {"2+5=7 3+4=", "3+4"}
    assert problem_keys(record(prompt=[*CHAT, {"role": "assistant", "content": "2"}])) == {"1+1?"}
    assert problem_keys(record(question="Q?", answer="A")) == {"q?"}
