r"""Numbers inside text: where they begin and end, and what they are worth.

One grammar serves extraction and comparison, so that both see the same number:

    sign        - + or U+2212 directly before the number or its currency sign, unless a letter, digit or closing
                bracket stands directly before it: "10-3" ends in 3, "10 - 3" too, "x = -3" in -3
    grouping    a comma between three-digit groups groups: 1,234,567 (also LaTeX "{,}", ",\!" and "\,");
                any other comma is punctuation: "72 clips, altogether" is 72, "3,5" is 3 and 5
    decimals    1.5, .5, 1e-3; a full stop that no digit follows is punctuation
    fractions   1/2, \frac{1}{2}, \frac12, \dfrac, \tfrac are one number

`100,200,300` without spaces reads as one hundred million and so on: text alone cannot tell it from a list.
"""

from __future__ import annotations

import re
from fractions import Fraction

_UNSIGNED = r"(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)|\d+)(?:\.\d+)?|\.\d+"
_DECIMAL = rf"(?:{_UNSIGNED})(?:[eE][+-]?\d+)?"
_LATEX_PART = r"(?:\{\s*[+-]?\d+\s*\}|\d)"
_LATEX_FRACTION = rf"\\[dt]?frac\s*{_LATEX_PART}\s*{_LATEX_PART}"
_SLASH_FRACTION = r"(?<![\d/.,])\d+/\d+(?!\d|/|\.\d)"
_SIGN = r"(?<![\w)\]}])[+-]"
_CURRENCY = r"(?:\\?\$|\u20ac|\u00a3)"
_NUMBER = re.compile(rf"({_SIGN})?{_CURRENCY}?({_LATEX_FRACTION}|{_SLASH_FRACTION}|{_DECIMAL})")

_GROUP_SPELLINGS = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\,)(?=\d{3}(?!\d))")
_MAX_DIGITS = 1000
_MAX_EXPONENT = 400


def normalize_numbers(text: str) -> str:
    """`text` with one spelling for minus signs and thousands separators."""
    return _GROUP_SPELLINGS.sub(",", text.replace("\u2212", "-"))


def find_numbers(text: str) -> list[str]:
    """Every number in `text`, in order, as normalize_numbers writes it, without a currency sign."""
    return [(m.group(1) or "") + m.group(2) for m in _NUMBER.finditer(normalize_numbers(text))]


_FRAC_PARTS = re.compile(rf"([+-]?)\\[dt]?frac\s*({_LATEX_PART})\s*({_LATEX_PART})$")
_PLAIN = re.compile(rf"([+-]?)({_DECIMAL})(?:/(\d+))?$")


def parse_number(text: str) -> Fraction | None:
    """The exact value of `text` when all of it is one number, else None.

    Surrounding space, a trailing full stop, dollar signs around, a currency sign, a percent sign and a trailing
    \\text{...} unit do not count. More than 1000 digits or an exponent beyond 400 is not read as a number: its exact
    value would not fit memory.
    """
    return _value(_bare(normalize_numbers(text)))


def _bare(text: str) -> str:
    """`text` without the decoration around a number."""
    text = text.strip()
    text = re.sub(r"\s*\\(?:text|mathrm|textbf|mbox)\s*\{[^{}]*\}\s*$", "", text)
    text = text.strip().strip("$").strip().removesuffix(".").strip().strip("$")
    text = text.removesuffix("%").removesuffix("\\").strip()
    text = re.sub(r"^([+-]?)\s*(?:\\?\$|\u20ac|\u00a3)\s*", r"\1", text)
    return re.sub(r"^([+-])\s+", r"\1", text)


def _value(text: str) -> Fraction | None:
    if len(text) > _MAX_DIGITS:
        return None
    if match := _FRAC_PARTS.match(text):
        sign, top, bottom = match.groups()
        numerator, denominator = Fraction(top.strip("{} \t\n")), int(bottom.strip("{} \t\n"))
    elif match := _PLAIN.match(text):
        sign, decimal, under = match.groups()
        exponent = re.search(r"[eE]([+-]?\d+)$", decimal)
        if exponent and (len(exponent.group(1)) > 5 or abs(int(exponent.group(1))) > _MAX_EXPONENT):
            return None
        numerator, denominator = Fraction(decimal.replace(",", "")), int(under) if under else 1
    else:
        return None
    if denominator == 0:
        return None
    value = numerator / denominator
    return -value if sign == "-" else value
