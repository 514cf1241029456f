"""The answers of a call while they are computed: their tokens, whole or as a stream, and the client that goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request

from attnmesh.generation.requests import Token
from attnmesh.serving.commands import Submission
from attnmesh.serving.fields import ApiError
from attnmesh.serving.loop import Closed, Event, RequestQueue
from attnmesh.serving.metrics import AnswerTimes, Metrics
from attnmesh.serving.responses import Choice, Formatter, Json

_COMMENT_SECONDS = 15.0  # without a token, after which a stream has a comment, so that no proxy gives it up

T = TypeVar("T")


class ClientGone(Exception):  # noqa: N818
    """The client has closed its connection."""


class Answers:
    """The choices of one call, while they are computed."""

    def __init__(self, queue: RequestQueue, metrics: Metrics, submissions: list[Submission]) -> None:
        self.choices = [Choice(i) for i in range(len(submissions))]
        self.new_tokens = 0
        self._queue, self._times = queue, [AnswerTimes(metrics) for _ in submissions]
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listen(event: Event) -> None:
            with suppress(RuntimeError):  # the HTTP server has ended
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        self._tickets = queue.submit(submissions, listen)

    def cancel(self) -> None:
        """End the requests that are not finished."""
        self._queue.cancel(self._tickets)
        for choice, times in zip(self.choices, self._times, strict=True):
            if choice.finish_reason is None:
                choice.finish_reason = "cancelled"
                times.end("cancelled")

    async def accepted(self, gone: asyncio.Task[None]) -> None:
        """Return when all choices are accepted; raise the error of a choice that is not."""
        for _ in self.choices:
            event = await self._next(gone)
            assert event is not None

    async def tokens(
        self, gone: asyncio.Task[None], wait: float | None = None
    ) -> AsyncIterator[tuple[Choice | None, Token | None]]:
        """Every new token with its choice, which has it already; None for both after `wait` seconds without one.

        An answer may also end without a new token.
        """
        left = len(self.choices)
        while left:
            event = await self._next(gone, wait)
            if event is None:
                yield None, None
                continue
            choice, times = self.choices[event.choice], self._times[event.choice]
            choice.cached_tokens = event.cached
            choice.prompt_logprobs = choice.prompt_logprobs or event.prompt_logprobs
            if event.token is not None:
                choice.add(event.token, event.finish_reason)
                self.new_tokens += 1
                times.token()
            if event.finish_reason is not None:
                choice.finish_reason = event.finish_reason
                left -= 1
                times.end(event.finish_reason)
            yield choice, event.token

    async def _next(self, gone: asyncio.Task[None], wait: float | None = None) -> Event | None:
        """The next event; None after `wait` seconds. Raises its error, and ClientGone when the client has gone."""
        if self._events.empty() or gone.done():
            get = asyncio.ensure_future(self._events.get())
            try:
                done, _ = await asyncio.wait({get, gone}, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            finally:  # also if this is cancelled, as the stream of a client that goes away is
                get.cancel()  # unless it is done; no event is lost
            if get not in done:
                if done:
                    raise ClientGone
                return None
            event = get.result()
        else:
            event = self._events.get_nowait()
        if event.error is not None:
            self.choices[event.choice].finish_reason = "error"
            self._times[event.choice].end("error")
            raise _api_error(event.error)
        return event


async def stream(
    answers: Answers, formatter: Formatter, used: Callable[[], Json], gone: asyncio.Task[None]
) -> AsyncIterator[str]:
    """Server-sent events."""
    try:
        for first in formatter.begin(answers.choices):
            yield first
        async for choice, token in answers.tokens(gone, _COMMENT_SECONDS):
            if choice is None:
                yield ": computing\n\n"
            else:
                for part in formatter.token(choice, token):
                    yield part
        for last in formatter.end(answers.choices, used()):
            yield last
    except ApiError as error:  # the status has been sent
        yield formatter.error(error.body)
    except ClientGone:
        return
    finally:
        answers.cancel()
        gone.cancel()


async def disconnected(request: Request) -> None:
    """Return when the client has gone. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless(gone: asyncio.Task[None], work: Coroutine[Any, Any, T]) -> T:
    """The result of some work; raises ClientGone when the client has gone before."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda task: None if task.cancelled() else task.exception())  # nobody may await it
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()


def _api_error(error: Exception) -> ApiError:
    """The answer to an error that was raised where requests are computed."""
    if isinstance(error, Closed):
        return ApiError(503, str(error))
    is_callers = type(error) is ValueError  # of `submit`; invalid logits raise a subclass
    return ApiError(400 if is_callers else 500, str(error))
