"""Where the answer stands in a response, and what a number is."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mc.rewards.extract import EXTRACT_MODES, extract_answer, has_balanced_braces, strip_full_stop
from grpo_mc.rewards.number_text import find_numbers, parse_number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\text{a}\{b\}}", r"\text{a}\{b\}"),
        (r"\boxed{\{}", r"\{"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\fbox{42}", "42"),
        (r"\boxed{1} then \fbox{2}", "2"),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed{1} or \boxed{2", None),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed {4}", "4"),
        (r"\boxed 5.", "5"),
        (r"\boxed{}", None),
        (r"\boxedness{6}", None),
        ("no box", None),
    ],
)
def test_box_is_not_cut_at_the_first_closing_brace(text: str, answer: str | None) -> None:
    """H26: the value is the whole balanced group of the last box; an unclosed box is no answer."""
    assert extract_answer(text, "boxed") == answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$9{,}500", 9500),
        (r"about 9\,500 of them", 9500),
        (r"1,\!234", 1234),
        ("The total is 72 clips, altogether.", 72),
        ("1,234.50", Fraction(2469, 2)),
        ("answer is 3 5", 5),
        ("x = 8,000.", 8000),
        ("3,5", 5),
        ("1,234,56", 56),
        ("0,123", 123),
        ("12345,678", 678),
        ("10 - 3", 3),
        ("10-3", 3),
        ("x = -3", -3),
        ("it is \u22125", -5),
        ("a loss of -$5.", -5),
        ("-.5", Fraction(-1, 2)),
        ("1e3", 1000),
        ("is 2/3.", Fraction(2, 3)),
        (r"is $-\frac{3}{4}$", Fraction(-3, 4)),
        (r"is \dfrac12", Fraction(1, 2)),
        ("12/25/2020", 2020),
    ],
)
def test_last_number_survives_punctuation(text: str, value: Fraction | int) -> None:
    """H27: a comma between three-digit groups groups; elsewhere it is punctuation, as is a trailing full stop."""
    number = extract_answer(text, "last_number")
    assert number is not None
    assert parse_number(number) == value


@pytest.mark.parametrize("text", ["no numbers, at all.", ", .", "", "-", "\u00b2"])
def test_a_bare_comma_is_no_number(text: str) -> None:
    """H27: a bare comma matched as a number."""
    assert extract_answer(text, "last_number") is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 7\n16 - 3 = 13", "7"),
        ("-4", "-4"),
        ("7.\n", "7"),
        ("7", "7"),
        ("1,234 apples", "1,234"),
        ("3.5", None),
        ("3/4", None),
        ("\n7", "7"),
        (" \n\t\n 7 apples\n8", "7"),
        ("seven\n7", None),
        ("\nseven\n7", None),
        (" \n", None),
    ],
)
def test_first_integer_is_the_first_number_of_the_first_line_with_text(text: str, answer: str | None) -> None:
    """3.5 is not 3; blank lines before the answer do not matter, and a line after it does not count."""
    assert extract_answer(text, "first_integer") == answer


def test_answer_tag_is_the_last_closed_one() -> None:
    assert extract_answer("<answer> 1 </answer> <answer>\n2\n</answer>", "answer_tag") == "2"
    assert extract_answer("<answer>1</answer> <answer>2", "answer_tag") is None
    assert extract_answer("<answer> </answer>", "answer_tag") is None
    assert extract_answer("1", "answer_tag") is None


def test_full_and_first_line_are_stripped() -> None:
    assert extract_answer("  a\nb ", "full") == "a\nb"
    assert extract_answer("  a \nb ", "first_line") == "a"
    assert extract_answer("  ", "full") is None


def test_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'box'.*boxed"):
        extract_answer("", "box")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\frac12", Fraction(1, 2)),
        (r"\frac{-3}{4}", Fraction(-3, 4)),
        (r"-\frac{-3}{4}", Fraction(3, 4)),
        ("$1,234.50", Fraction(2469, 2)),
        ("$72$", 72),
        ("50\\%", 50),
        (r"72\text{ cm}", 72),
        ("+3", 3),
        ("- 3", -3),
        ("(1,2)", None),
        ("1,2", None),
        ("1/0", None),
        ("3 5", None),
        ("", None),
        ("nan", None),
        ("inf", None),
        ("1_000", None),
    ],
)
def test_parse_number_reads_all_of_the_text_or_nothing(text: str, value: Fraction | int | None) -> None:
    """H27: "(1,2)" stays a pair."""
    assert parse_number(text) == value


@pytest.mark.parametrize("text", ["1e999999999", "9" * 5000, "1e-999999999"])
def test_a_number_too_long_to_hold_is_refused_at_once(text: str) -> None:
    assert parse_number(text) is None


def test_strip_full_stop_keeps_an_ellipsis() -> None:
    assert strip_full_stop(" 3. ") == "3"
    assert strip_full_stop("3...") == "3..."


_MATH_TEXT = st.text(alphabet="0123456789,.$%-+/{}()[]\\ \nabfrcoxednsw<>\u2212", max_size=60)


@given(text=st.one_of(st.text(max_size=60), _MATH_TEXT), mode=st.sampled_from(EXTRACT_MODES))
@settings(max_examples=400, deadline=None)
def test_extraction_takes_any_text(text: str, mode: str) -> None:
    """Whatever the model writes, extraction gives a non-empty stripped text or None, and numbers parse or are None."""
    answer = extract_answer(text, mode)
    if answer is not None:
        assert answer and answer == answer.strip()
        parse_number(answer)


@given(text=_MATH_TEXT)
@settings(max_examples=300, deadline=None)
def test_every_number_found_is_a_number(text: str) -> None:
    """What find_numbers cuts out is what parse_number reads, except a fraction over zero."""
    for number in find_numbers(text):
        is_over_zero = any(part.strip("{} 0") == "" for part in number.replace("frac", "/").split("/")[1:])
        assert parse_number(number) is not None or is_over_zero or number.rstrip("{} ").endswith("0"), number


@given(value=st.integers(-(10**15), 10**15))
def test_grouped_integers_keep_their_value(value: int) -> None:
    assert parse_number(f"{value:,}") == value
    assert extract_answer(f"It is {value:,}, I think.", "last_number") == f"{value:,}"


@given(inner=_MATH_TEXT.filter(lambda t: has_balanced_braces(t) and "\\boxed" not in t and t.strip()))
@settings(max_examples=200, deadline=None)
def test_a_box_returns_what_was_put_into_it(inner: str) -> None:
    assert extract_answer(f"so \\boxed{{{inner}}} q.e.d.", "boxed") == inner.strip()
