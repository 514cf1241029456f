"""Loops that may take long tell a command how far they are; without one that listens they are plain loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
Report = Callable[[int, int], None]

_listening: list[Report | None] = [None]  # the last one counts


@contextmanager
def reporting(report: Report) -> Iterator[None]:
    """Call `report(done, total)` for every step of loops over `reported` items that begin in the `with` statement."""
    _listening.append(report)
    try:
        yield
    finally:
        _listening.pop()


@contextmanager
def reported_steps() -> Iterator[Report]:
    """A function that reports how many of how many steps are done. Loops in the `with` statement do not report."""
    report = _listening[-1]
    _listening.append(None)
    try:
        yield report or (lambda done, total: None)
    finally:
        _listening.pop()


def reported(items: Iterable[T], total: int) -> Iterator[T]:
    """The items, at most `total`. The outermost loop reports, not the loops within its steps."""
    report = _listening[-1]
    if report is None:
        yield from items
        return
    for done, item in enumerate(items):
        report(done, total)
        _listening.append(None)
        try:
            yield item
        finally:
            _listening.pop()
