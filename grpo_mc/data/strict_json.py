"""JSON from outside: whatever is wrong with it is one ValueError.

Python's own reader raises RecursionError for a text with a thousand open brackets, and what it accepts just below that
fails later, where the value is copied, printed or sent to another process.
"""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 100
"""Most lists and objects inside one another."""


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: not JSON, not UTF-8, a number of too many digits, or nested deeper than MAX_DEPTH.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    opening = text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else text.count("[") + text.count("{")
    if opening > MAX_DEPTH:
        _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list) and item]:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep()
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]


def _too_deep() -> ValueError:
    return ValueError(f"lists and objects are nested deeper than {MAX_DEPTH} levels")
