"""What a person sees while ranks work: bars on a terminal, text as it comes. Only one rank has a screen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from attnmesh.cli import output as report


class Screen:
    """Rank 0's is seen; everybody else's says nothing. Off a terminal there are no bars."""

    def __init__(self, *, seen: bool) -> None:
        self._console: Console = report.console(quiet=not seen)
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Something that takes a while."""
        if self._console.is_terminal and not self._console.quiet:
            with self._console.status(what):
                yield
        else:
            yield

    def ask(self, question: str) -> None:
        """A question, before it is answered."""
        self._console.print(f"\n[bold]> {escape(question)}[/bold]", highlight=False)

    def read(self, done: int, total: int) -> None:
        """So many tokens of a prompt are read; the bar goes when all are."""
        if not self._console.is_terminal or self._console.quiet:
            return
        if self._bar is None:
            columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,} of {task.total:,}")
            self._bar = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
            self._task = self._bar.add_task("reading", total=total)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=done)
        if done == total:
            self._bar.stop()
            self._bar = None

    def say(self, text: str) -> None:
        """A piece of an answer, as it comes and as it is."""
        self._console.out(text, end="", highlight=False)

    def note(self, text: str = "") -> None:
        """A line beside the answers."""
        self._console.print(f"[dim]{escape(text)}[/dim]", highlight=False, soft_wrap=True)
