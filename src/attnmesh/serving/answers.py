"""The answers of a call while they are computed: their tokens, whole or as a stream, and the client that goes away."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request

from attnmesh.generation.requests import Token
from attnmesh.serving.fields import ApiError
from attnmesh.serving.loop import Closed, Event, RequestQueue, Submission
from attnmesh.serving.metrics import AnswerTimes, Metrics
from attnmesh.serving.responses import Choice, Formatter, Json

_COMMENT_SECONDS = 15.0  # without a token, after which a stream has a comment, so that no proxy gives it up

T = TypeVar("T")


class ClientGone(Exception):  # noqa: N818
    """The client has closed its connection."""


class Answers:
    """The choices of one call, while they are computed. `gone` ends when its client has gone: they are cancelled."""

    def __init__(
        self, queue: RequestQueue, metrics: Metrics, submissions: list[Submission], gone: asyncio.Task[None]
    ) -> None:
        self.choices = [Choice(i) for i in range(len(submissions))]
        self.new_tokens = 0
        self._queue, self._times = queue, [AnswerTimes(metrics) for _ in submissions]
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None  # for the next event; a task and a queue would take longer
        self._loop, self._gone = asyncio.get_running_loop(), gone

        def listen(event: Event) -> None:
            with suppress(RuntimeError):  # the HTTP server has ended
                self._loop.call_soon_threadsafe(self._put, event)

        self._tickets = queue.submit(submissions, listen)
        gone.add_done_callback(self._end)

    def _put(self, event: Event) -> None:
        self._events.append(event)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _end(self, gone: asyncio.Task[None]) -> None:
        if not gone.cancelled():
            self.cancel()
        self._wake()

    def cancel(self) -> None:
        """End the requests that are not finished."""
        self._queue.cancel(self._tickets)
        for choice, times in zip(self.choices, self._times, strict=True):
            if choice.finish_reason is None:
                choice.finish_reason = "cancelled"
                times.end("cancelled")

    def close(self) -> None:
        """End what is not finished, and wait for the client no longer."""
        self.cancel()
        self._gone.cancel()

    async def accepted(self) -> None:
        """Return when all choices are accepted; raise the error of a choice that is not."""
        for _ in self.choices:
            event = await self._next()
            assert event is not None

    async def tokens(self, wait: float | None = None) -> AsyncIterator[tuple[Choice | None, Token | None]]:
        """Every new token with its choice, which has it already; None for both after `wait` seconds without one.

        An answer may also end without a new token.
        """
        left = len(self.choices)
        while left:
            event = await self._next(wait)
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

    async def _next(self, wait: float | None = None) -> Event | None:
        """The next event; None after `wait` seconds. Raises its error, and ClientGone when the client has gone."""
        if not self._events and not self._gone.done():
            self._waiter = self._loop.create_future()
            timer = None if wait is None else self._loop.call_later(wait, self._wake)
            try:
                await self._waiter
            finally:  # also if this is cancelled, as the stream of a client that goes away is
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        if self._gone.done():
            raise ClientGone
        if not self._events:
            return None
        event = self._events.popleft()
        if event.error is not None:
            self.choices[event.choice].finish_reason = "error"
            self._times[event.choice].end("error")
            raise _api_error(event.error)
        return event


async def stream(answers: Answers, formatter: Formatter, used: Callable[[], Json]) -> AsyncIterator[str]:
    """Server-sent events."""
    try:
        for first in formatter.begin(answers.choices):
            yield first
        async for choice, token in answers.tokens(_COMMENT_SECONDS):
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
        answers.close()


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
