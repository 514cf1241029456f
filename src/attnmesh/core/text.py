"""Text for people: what comes from elsewhere is made safe to show."""

from __future__ import annotations

import re

# Control characters move the cursor, ring the bell and start escape sequences. Overrides and isolates of the writing
# direction change the order in which a line is read. Lone surrogates, which stand for undecodable bytes, cannot be
# written to a file.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: str, *, keep: str = "\n\t") -> str:
    """The text with control characters shown as escapes (`\\x1b`), except those in `keep`."""
    return _UNSAFE.sub(lambda match: match[0] if match[0] in keep else _escaped(match[0]), text)


def one_line(text: str, *, most: int = 2000) -> str:
    """The text on one line of at most `most` characters, without control characters."""
    line = printable(" ".join(part.strip() for part in text.splitlines() if part.strip()), keep="")
    return line if len(line) <= most else f"{line[: most - 4]} ..."


def counted(number: int, noun: str) -> str:
    """`1 rank`, `1,024 ranks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _escaped(character: str) -> str:
    code = ord(character)
    return _NAMED.get(character) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")
