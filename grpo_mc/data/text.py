"""Text that came from outside, before it is encoded or shown.

A Python string may hold what no file or terminal should get: halves of surrogate pairs, which UTF-8 cannot hold (JSON
lets them in as escapes), and control characters, which a terminal obeys.
"""

from __future__ import annotations

import re

# C0 but tab and line feed, DEL and C1, line and paragraph separators, changes of direction, surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def find_surrogate(text: str) -> int | None:
    """The position of the first character that UTF-8 cannot hold, None when there is none."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return error.start
    return None


def printable(text: str) -> str:
    r"""`text` with control characters (but tab and line feed) and surrogates as escapes: "\x1b", "\ud800"."""
    return _UNSAFE.sub(lambda found: found.group().encode("unicode_escape").decode("ascii"), text)
