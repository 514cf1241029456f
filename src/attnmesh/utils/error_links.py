"""Errors that users meet often end with a link to the page and heading that explain them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

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
