"""`ServingLoop`: the steps of a `Generator` on all ranks, with requests that only rank 0 knows of.

Before every step, rank 0 passes new requests and cancellations to the other ranks. All ranks then make the same calls,
as `Generator` requires. `RequestQueue` is where the threads of the HTTP server put requests on rank 0.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.generation.generator import Generator
from attnmesh.generation.requests import FinishReason, PromptLogprob, Request, Token
from attnmesh.generation.sampling import LogitBias, Sampling

# `Submission`: a request that rank 0 passes to all ranks. `Commands`: changes that all ranks make before a step.


@dataclass(frozen=True)
class Submission:
    """The arguments of `Generator.submit`, as plain data."""

    ticket: int
    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    stop: list[int] | None = None
    stop_strings: list[str] = field(default_factory=list)
    min_new_tokens: int = 0
    logprobs: int | None = None
    sample: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)
    grammar: str | None = None
    priority: int = 0
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None

    def submit(self, generator: Generator) -> Request:
        """Submit it. All ranks call this alike."""
        processors = [LogitBias.of(self.logit_bias)] if self.logit_bias else []
        return generator.submit(
            self.prompt, max_new_tokens=self.max_new_tokens, sampling=self.sampling, stop=self.stop,
            stop_strings=self.stop_strings, min_new_tokens=self.min_new_tokens, logprobs=self.logprobs,
            logits_processors=processors, sample=self.sample, grammar=self.grammar, priority=self.priority,
            skip_special_tokens=self.skip_special_tokens, prompt_logprobs=self.prompt_logprobs,
        )  # fmt: skip


@dataclass
class Commands:
    """Requests to submit, tickets of requests to move and cancel, in this order; `stop` ends the loop of all ranks."""

    submissions: list[Submission] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)  # from prefill ranks to decode ranks
    cancelled: list[int] = field(default_factory=list)
    stop: bool = False

    def __bool__(self) -> bool:
        return bool(self.submissions or self.moved or self.cancelled or self.stop)

    def encode(self) -> bytes:
        """As JSON; empty without commands. Samples of a prompt differ in two fields only: the others are there once."""
        if not self:
            return b""
        groups: list[tuple[Submission, list[tuple[int, int]]]] = []
        for each in self.submissions:
            if not groups or replace(each, ticket=groups[-1][0].ticket, sample=groups[-1][0].sample) != groups[-1][0]:
                groups.append((each, []))
            groups[-1][1].append((each.ticket, each.sample))
        submissions = [{**asdict(first), "samples": samples} for first, samples in groups]
        return json.dumps({**vars(self), "submissions": submissions}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Commands:
        """The commands that `encode` returned."""
        if not data:
            return cls()
        fields: dict[str, Any] = json.loads(data)
        submissions = []
        for each in fields.pop("submissions"):
            samples = each.pop("samples")
            first = Submission(**{**each, "sampling": Sampling(**each["sampling"])})
            submissions += [replace(first, ticket=ticket, sample=sample) for ticket, sample in samples]
        return cls(submissions, **fields)


def broadcast(comm: Comm, commands: Commands | None, device: torch.device) -> Commands:
    """The commands of rank 0, on all ranks; the others pass None. Two messages, or one if there are none."""
    if comm.world == 1:
        assert commands is not None
        return commands
    data = b"" if commands is None else commands.encode()
    size = int(_from_first(comm, torch.tensor([len(data)], dtype=torch.int64, device=device)))
    if not size:
        return Commands()
    own = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)  # other ranks do not send theirs
    return Commands.decode(bytes(_from_first(comm, own.to(device), size).cpu().numpy()))


def _from_first(comm: Comm, x: Tensor, size: int = 1) -> Tensor:
    shapes = [(size if rank == 0 else 0,) for rank in range(comm.world)]
    return comm.all_gather(x if comm.rank == 0 else x.new_empty(0), shapes)[0]


POLL = 0.2  # seconds between looks at whether to stop
_MAX_IDLE = 10.0  # seconds between messages to other ranks, which would give up waiting otherwise


@dataclass(frozen=True)
class Event:
    """News of the answer number `choice` of a call: it was accepted (nothing else is set), or went on, or ended."""

    choice: int
    token: Token | None = None
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    cached: int = 0  # tokens of its prompt that were in the KV cache
    prompt_logprobs: Sequence[PromptLogprob] = ()


Listener = Callable[[Event], None]
"""Called with the events of a call, from the thread that computes: it must return soon."""


class QueueFull(Exception):  # noqa: N818 - says what is wrong, as CacheFull does
    """The queue is full."""


class Closed(Exception):  # noqa: N818
    """The server is shutting down, or has failed."""


class RequestQueue:
    """Requests on their way to the loop, at most `most` that are not finished. Any thread may call its methods."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._changed = threading.Condition()
        self._commands = Commands()
        self._listeners: dict[int, tuple[Listener, int]] = {}  # of requests that are not finished
        self._tickets = 0
        self.is_open = True

    def __len__(self) -> int:
        return len(self._listeners)

    def check_room(self, count: int) -> None:
        """Raise QueueFull or Closed if the queue does not take this many requests now."""
        if not self.is_open:
            raise Closed("the server is shutting down")
        if len(self) + count > self.most:
            raise QueueFull(
                f"{len(self)} requests are in progress or waiting, and {count} more are too many: the queue takes "
                f"{self.most}"
            )

    def submit(self, submissions: Sequence[Submission], listener: Listener) -> list[int]:
        """The tickets of these requests, which are the choices 0, 1, .. of a call."""
        with self._changed:
            self.check_room(len(submissions))
            tickets = list(range(self._tickets, self._tickets + len(submissions)))
            self._tickets += len(submissions)
            for choice, (ticket, submission) in enumerate(zip(tickets, submissions, strict=True)):
                self._listeners[ticket] = listener, choice
                self._commands.submissions.append(replace(submission, ticket=ticket))
            self._changed.notify_all()
        return tickets

    def cancel(self, tickets: Sequence[int]) -> None:
        """End these requests if they are not finished; no more events follow."""
        with self._changed:
            self._commands.cancelled += [ticket for ticket in tickets if self._listeners.pop(ticket, None) is not None]
            self._changed.notify_all()

    # What follows is called by the loop.

    def take(self, timeout: float) -> Commands:
        """The next commands, as soon as there are some, or after some seconds."""
        with self._changed:
            if not self._commands and timeout > 0:
                self._changed.wait(timeout)
            commands, self._commands = self._commands, Commands()
        return commands

    def move(self, tickets: Sequence[int]) -> None:
        """Continue these requests on the decode ranks, which have room for them."""
        with self._changed:
            self._commands.moved += tickets
            self._changed.notify_all()

    def report_tokens(
        self,
        ticket: int,
        new: Sequence[Token],
        finish_reason: FinishReason | None,
        error: Exception | None,
        cached: int,
        prompt_logprobs: Sequence[PromptLogprob] = (),
    ) -> None:
        """Tell the listener of a request about new tokens, its end, or both."""
        for token in new[:-1]:
            self.report(ticket, token)
        self.report(ticket, new[-1] if new else None, finish_reason, error, cached, prompt_logprobs)

    def report(
        self,
        ticket: int,
        token: Token | None = None,
        finish_reason: FinishReason | None = None,
        error: Exception | None = None,
        cached: int = 0,
        prompt_logprobs: Sequence[PromptLogprob] = (),
    ) -> None:
        """Tell the listener of a request, if it was not cancelled."""
        is_last = finish_reason is not None or error is not None
        with self._changed:
            found = self._listeners.pop(ticket, None) if is_last else self._listeners.get(ticket)
        if found is not None:
            listener, choice = found
            listener(Event(choice, token, finish_reason, error, cached, prompt_logprobs))

    def close(self) -> None:
        """Take no more requests."""
        self.is_open = False

    def fail_all(self, error: Exception) -> None:
        """Take no more requests, and end all with an error."""
        self.close()
        for ticket in list(self._listeners):
            self.report(ticket, error=error)


class ServingLoop:
    """Computes requests until `should_stop`. `queue` is None on all ranks but the first.

    `should_stop` is called on rank 0 a few times per second. Then no more requests are taken, and those in progress
    have `grace` seconds to end.
    """

    def __init__(
        self, generator: Generator, queue: RequestQueue | None, *, should_stop: Callable[[], bool], grace: float
    ) -> None:
        self._generator, self._queue, self._should_stop, self._grace = generator, queue, should_stop, grace
        self._requests: dict[int, Request] = {}  # by ticket
        self._deadline: float | None = None
        self._max_idle = min(_MAX_IDLE, generator.comm.timeout / 4)

    def run(self) -> None:
        """Run until the end; all ranks call it."""
        generator, queue = self._generator, self._queue
        try:
            while True:
                own = self._next_commands() if generator.comm.rank == 0 else None
                commands = broadcast(generator.comm, own, generator.engine.device)
                for submission in commands.submissions:
                    self._submit(submission)
                if commands.moved:
                    self._move(commands.moved)
                for ticket in commands.cancelled:
                    self._cancel(ticket)
                if commands.stop:
                    break
                self._report(generator.step())
        except BaseException as error:
            if queue is not None:
                queue.fail_all(RuntimeError(f"the server has failed: {type(error).__name__}"))
            raise
        if queue is not None:
            queue.fail_all(Closed("the server is shutting down"))

    @property
    def _is_busy(self) -> bool:
        """Whether the next step computes something."""
        return self._generator.num_unfinished > 0

    def _move(self, tickets: Sequence[int]) -> None:
        """Continue requests on other ranks."""
        raise NotImplementedError  # there are no other ranks

    def _next_commands(self) -> Commands:
        """The commands that the first rank passes on: at once while it is busy, otherwise as soon as there are some."""
        queue = self._queue
        assert queue is not None
        until = time.monotonic() + self._max_idle
        while True:
            if self._deadline is None and self._should_stop():
                queue.close()
                self._deadline = time.monotonic() + self._grace
            is_busy = self._is_busy
            commands = queue.take(0.0 if is_busy else POLL)
            commands.stop = self._deadline is not None and (not len(queue) or time.monotonic() >= self._deadline)
            if is_busy or commands or time.monotonic() >= until:
                return commands

    def _submit(self, submission: Submission) -> None:
        try:
            request = submission.submit(self._generator)
        except ValueError as error:  # raised on all ranks, since all pass the same
            if self._queue is not None:
                self._queue.report(submission.ticket, error=error)
            return
        self._requests[submission.ticket] = request
        if self._queue is not None:
            self._queue.report(submission.ticket)

    def _cancel(self, ticket: int) -> None:
        request = self._requests.pop(ticket, None)  # it may have ended in the meantime
        if request is not None:
            self._generator.cancel(request)

    def _report(self, tokens: Sequence[Token]) -> None:
        """Tell the listeners, and forget requests that are finished."""
        for ticket, request in list(self._requests.items()):
            new = [token for token in tokens if token.row == request.number]
            if request.finished:
                del self._requests[ticket]
            if new or request.finished:
                self._tell(ticket, request, new)

    def _tell(self, ticket: int, request: Request, new: Sequence[Token]) -> None:
        """Report new tokens of a request, and its end."""
        if self._queue is not None:
            first = request.prompt_logprobs if len(new) == len(request.tokens) else ()
            self._queue.report_tokens(ticket, new, request.finish_reason, request.error, request.cached, first)
