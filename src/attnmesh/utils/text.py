"""Text for people: what comes from elsewhere is made safe to show, ranks are named, bytes and seconds have units."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

# Control characters move the cursor, ring the bell and start escape sequences. Overrides and isolates of the writing
# direction change the order in which a line is read. Lone surrogates, which stand for undecodable bytes, cannot be
# written to a file.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: str, *, keep: str = "\n\t") -> str:
    """The text with control characters shown as escapes (`\\x1b`), except the characters in `keep`."""
    return _UNSAFE.sub(lambda match: match[0] if match[0] in keep else _escaped(match[0]), text)


def one_line(text: str, *, most: int = 2000) -> str:
    """The text on one line of at most `most` characters, without control characters."""
    line = printable(" ".join(part.strip() for part in text.splitlines() if part.strip()), keep="")
    return line if len(line) <= most else f"{line[: most - 4]} ..."


def counted(number: int, noun: str) -> str:
    """`1 rank`, `1,024 ranks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def alternatives(by_rank: Mapping[int, str], global_ranks: Sequence[int] | None = None) -> str:
    """`X on ranks 0, 2 but Y on rank 1`."""
    values = ranks_by_value(by_rank)
    return " but ".join(f"{value} on {format_ranks(ranks, global_ranks)}" for value, ranks in values.items())


def ranks_by_value(by_rank: Mapping[int, str]) -> dict[str, list[int]]:
    """The ranks that have each value, in order of the first rank that has it."""
    groups: dict[str, list[int]] = {}
    for rank, value in by_rank.items():
        groups.setdefault(value, []).append(rank)
    return groups


def format_ranks(ranks: Sequence[int], global_ranks: Sequence[int] | None = None) -> str:
    """`rank 3`, or `ranks 0, 2`; `global rank 7` if the ranks of a group have other numbers in the default group."""
    is_global = global_ranks is None or list(global_ranks) == list(range(len(global_ranks)))
    numbers = ranks if is_global or global_ranks is None else [global_ranks[rank] for rank in ranks]
    return f"{'' if is_global else 'global '}{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, numbers))}"


def _escaped(character: str) -> str:
    code = ord(character)
    return _NAMED.get(character) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")


def readable_bytes(nbytes: float) -> str:
    """Bytes as text: `9.664 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"


def readable_seconds(seconds: float) -> str:
    """Seconds as text: `12.5 ms`."""
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * size:  # what rounds to 1000 of a unit is shown as 1 of the next
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


# Errors that users meet often end with a link to the page and heading that explain them.

P = ParamSpec("P")
T = TypeVar("T")

DOCS = "docs/"
"""Where the pages are: a folder of the repository, as in the README. Documentation with an address has it here."""

_LINK = re.compile(rf"\. See {re.escape(DOCS)}[\w-]+\.md(?:#[\w-]+)?")


def see(page: str) -> str:
    """The end of a message: `. See docs/PAGE.md#HEADING`. `page` is `PAGE.md#HEADING`."""
    return f". See {DOCS}{page}"


def with_link(message: str, page: str | None = None) -> str:
    """The message with one link at its end: the first that it has already, as one that it quotes, else to `page`."""
    links = _LINK.findall(message)
    if not links and page is None:
        return message
    return _LINK.sub("", message).removesuffix(".") + (links[0] if links else see(page or ""))


def without_link(message: str) -> str:
    """The message without links."""
    return _LINK.sub("", message)


def explained_in(page: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let the ValueErrors of a check end with a link to `page`."""

    def decorate(check: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(check)
        def explained(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return check(*args, **kwargs)
            except ValueError as error:
                error.args = (with_link(str(error), page),)
                raise

        return explained

    return decorate
