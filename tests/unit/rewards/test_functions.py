"""The reward types, one by one, in this process."""

from __future__ import annotations

from typing import get_args

import pytest

from grpo_mc.config.rewards import Extract, RewardFunction
from grpo_mc.rewards import REWARD_TYPES, explain
from grpo_mc.rewards.extract import EXTRACT_MODES
from helpers.rewards import make_scorer, score_text


def test_exact_compares_characters() -> None:
    scorer = make_scorer(type="exact")
    assert score_text(scorer, " 12\n", "12") == 1.0
    assert score_text(scorer, "12.", "12") == 0.0
    assert score_text(scorer, "Yes", "yes") == 0.0
    assert score_text(make_scorer(type="exact", ignore_case=True), "Yes", "yes") == 1.0
    assert score_text(make_scorer(type="exact", strip=False), " 12", "12") == 0.0
    assert score_text(make_scorer(type="exact", strip=False), "", "") == 1.0
    assert score_text(scorer, "12", None) is None
    assert score_text(scorer, "72", "48 + 24 = 72\n#### 72") == 1.0


def test_numeric_tolerance_counts_its_edge() -> None:
    """|2.3 - 2| is exactly the tolerance 0.3, although 0.3 has no exact float."""
    scorer = make_scorer(type="numeric", tolerance=0.3)
    assert score_text(scorer, "2.3", "2") == 1.0
    assert score_text(scorer, "2.31", "2") == 0.0
    relative = make_scorer(type="numeric", relative_tolerance=0.01)
    assert score_text(relative, "-202", "-200") == 1.0
    assert score_text(relative, "-203", "-200") == 0.0


def test_numeric_reads_numbers_however_written() -> None:
    """H26, H27 for the numeric type."""
    scorer = make_scorer(type="numeric")
    assert score_text(scorer, "The total is 72 clips, altogether.", "72") == 1.0
    assert score_text(scorer, "so $9{,}500", "9500") == 1.0
    assert score_text(scorer, "so 1/2.", "0.5") == 1.0
    assert score_text(scorer, "2/3", "2") == 0.0
    assert score_text(scorer, "none", "2") == 0.0
    assert score_text(scorer, "2", "two") is None
    assert score_text(make_scorer(type="numeric", extract="boxed"), r"\boxed{x}", "2") == 0.0


_EQUAL = [
    (r"\boxed{\frac12}", r"\frac{1}{2}"),
    (r"\boxed{1/2}", r"\frac{1}{2}"),
    (r"\boxed{0.5}", r"\frac{1}{2}"),
    (r"\boxed{\frac{-3}{4}}", r"-\frac{3}{4}"),
    (r"\fbox{42}", "42"),
    (r"\boxed{8,000}", "8000"),
    (r"\boxed{9{,}500}", "9500"),
    (r"\boxed{1,234.50}", "1234.5"),
    (r"\boxed{72.}", "72"),
    (r"\boxed{(1, 2)}", "(1,2)"),
    (r"\boxed{\left(1,2\right)}", "(1,2)"),
    (r"\boxed{x(x+2)}", "x^2+2x"),
    (r"\boxed{2\sqrt2}", r"\sqrt{8}"),
    (r"\boxed{x = 3}", "3"),
    (r"\boxed{8000+x}", "8,000 + x"),
    (r"\boxed{\text{East}}", "east"),
    (r"\boxed{3}", r"so we get \boxed{3}"),
]
_DIFFERENT = [
    (r"\boxed{2}", r"\frac{2}{3}"),
    (r"\boxed{\frac{2}{3}}", "2"),
    (r"\boxed{000}", "8000"),
    (r"\boxed{12}", "(1,2)"),
    (r"\boxed{(2,1)}", "(1,2)"),
    (r"\boxed{3 5}", "35"),
    (r"\boxed{3", "3"),
    ("3", "3"),
    (r"\boxed{seat}", r"\text{east}"),
    (r"\boxed{on}", "No"),
    (r"\boxed{0.333}", r"\frac{1}{3}"),
    (r"\boxed{\frac{}{}}", "3"),
]


@pytest.mark.parametrize(("response", "truth", "score"), [(*c, 1.0) for c in _EQUAL] + [(*c, 0.0) for c in _DIFFERENT])
def test_math_equal_numbers_are_equal_however_written(response: str, truth: str, score: float) -> None:
    """H26, H27, with the anagram trap of symbolic comparison (letters multiply, so "seat" would equal "east")."""
    assert score_text(make_scorer(type="math"), response, truth) == score


def test_math_takes_one_answer_only() -> None:
    """An answer that closes the box and opens another must not get two tries."""
    scorer = make_scorer(type="math", extract="full")
    assert score_text(scorer, r"5} or \boxed{x^2", "x^2") == 0.0
    assert score_text(scorer, "5 or 6", "5") == 0.0


def test_math_abstains_without_a_readable_ground_truth() -> None:
    scorer = make_scorer(type="math")
    assert score_text(scorer, r"\boxed{3}", None) is None
    assert score_text(scorer, r"\boxed{3}", "") is None


@pytest.mark.parametrize(
    ("response", "chosen"),
    [
        ("B", "B"),
        ("(b)", "B"),
        ("**B**", "B"),
        ("B.", "B"),
        (r"\boxed{\text{B}}", "B"),
        ("The answer is (B).", "B"),
        ("Answer: A? No, the answer is B", "B"),
        ("B) 42", "B"),
        ("(B) 42, since (A) is 41", "B"),
        ("I take (B) here", "B"),
        ("A dog barks", None),
        ("the answer is a dog", None),
        ("(A) or (B)?", "A"),
        ("either (A) or (B)", None),
        ("", None),
    ],
)
def test_multiple_choice_reads_the_letter_and_no_article(response: str, chosen: str | None) -> None:
    scorer = make_scorer(type="multiple_choice", choices="ABCD")
    for letter in "ABCD":
        assert score_text(scorer, response, letter) == float(letter == chosen)


def test_multiple_choice_abstains_on_a_ground_truth_that_is_no_letter() -> None:
    scorer = make_scorer(type="multiple_choice", choices="ABCD")
    assert score_text(scorer, "B", "(b)") == 1.0
    assert score_text(scorer, "B", "2") is None


def test_regex_modes() -> None:
    assert score_text(make_scorer(type="regex", pattern=r"a.b"), "xa\nby") == 1.0
    assert score_text(make_scorer(type="regex", pattern=r"a.b", full_match=True), "xa\nby") == 0.0
    assert score_text(make_scorer(type="regex", pattern=r"\d+", extract="boxed"), "7") == 0.0


def test_regex_with_an_answer_group_compares_the_last_match() -> None:
    scorer = make_scorer(type="regex", pattern=r"#### *(?P<answer>-?\d+)")
    assert score_text(scorer, "#### 3\n#### 4", "4") == 1.0
    assert score_text(scorer, "#### 3\n#### 4", "3") == 0.0
    assert score_text(scorer, "4", "4") == 0.0
    assert score_text(scorer, "#### 4", None) is None


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>a\nb</think>\n<answer>c</answer>\n", 1.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>b</answer> end", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.0),
        ("<think> </think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("</think>a<think><answer>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format_wants_each_block_once_in_order(response: str, score: float) -> None:
    assert score_text(make_scorer(type="format"), response) == score


def test_format_counts_a_tag_that_the_prompt_opened() -> None:
    """Chat templates of reasoning models end the prompt with <think>."""
    scorer = make_scorer(type="format")
    assert score_text(scorer, "a</think><answer>b</answer>", text="hi <think>\n") == 1.0
    assert score_text(scorer, "a</think><answer>b</answer>", text="hi") == 0.0


@pytest.mark.parametrize("reward_type", REWARD_TYPES)
def test_every_type_explains_its_options(reward_type: str) -> None:
    text = explain(reward_type)
    assert text.startswith(reward_type)
    assert "ption" in text


def test_explain_refuses_an_unknown_type() -> None:
    with pytest.raises(ValueError, match="'maths'.*math"):
        explain("maths")


def test_configuration_and_registry_know_the_same_types() -> None:
    """Workers do not import the configuration, so both sides list the types and the extract modes."""
    models = get_args(get_args(RewardFunction)[0])
    assert [get_args(m.model_fields["type"].annotation)[0] for m in models] == list(REWARD_TYPES)
    assert get_args(Extract) == EXTRACT_MODES
