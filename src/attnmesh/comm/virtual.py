"""Virtual ranks: a world of ranks inside one process, on one device."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from attnmesh.comm.base import (
    COMPARED_CALLS,
    CallLog,
    Comm,
    Message,
    Pending,
    RecordedPending,
    Signature,
    disagreement,
    out_of_step,
)
from attnmesh.comm.health.group_store import CommError
from attnmesh.trace.timeline import MessageRecord, Recorder, Track
from attnmesh.utils.text import format_ranks
from attnmesh.utils.validation import check_count, shown

_LOG = logging.getLogger(__name__)

T = TypeVar("T")
_MAX_THREADS = 4096


def run_virtual(world: int, fn: Callable[[Comm], T], *, timeout: float = 300) -> list[T]:
    """Run `fn(comm)` on `world` virtual ranks and return their results in rank order.

    The same program runs on real ranks, forward and backward. Ranks are threads that take turns, so runs are
    reproducible. They share the caller's device, CUDA stream, autocast and gradient mode, and torch's global random
    number generator: a rank that needs its own random numbers uses a Generator.

    The first error on any rank ends the run and is raised here with the rank as a note. A deadlock is detected
    immediately and raised as a CommError that lists what each rank waits for. After `timeout` seconds, ranks that still
    run are abandoned with a CommError.

    Examples:
        >>> am.run_virtual(3, lambda comm: comm.all_reduce(torch.tensor(comm.rank + 1)).item())
        [6, 6, 6]
    """
    check_count("world", world, least=1, most=_MAX_THREADS)
    if not callable(fn):
        raise ValueError(f"fn must be a function of a comm, got {shown(fn)}")
    shared = _VirtualWorld(world)
    comms = [VirtualComm(shared, rank, timeout) for rank in range(world)]
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}  # in the order in which they were raised
    thread_state = _ThreadState()

    def run_rank(comm: VirtualComm) -> None:
        comm.enter()
        error: BaseException | None = None
        try:
            with thread_state.restored():
                results[comm.rank] = fn(comm)
        except BaseException as raised:
            error = errors[comm.rank] = raised
            error.add_note(f"raised on virtual rank {comm.rank} of {world}")
        finally:
            comm.leave(error)

    for comm in comms:
        threading.Thread(target=run_rank, args=(comm,), name=f"virtual rank {comm.rank}", daemon=True).start()
    shared.scheduler.start()
    try:
        in_time = shared.scheduler.all_finished.wait(timeout)
    except BaseException:  # the caller was interrupted
        shared.scheduler.abort("run_virtual was interrupted")
        raise
    if not in_time:
        unfinished = shared.scheduler.unfinished()
        shared.scheduler.abort(f"run_virtual gave up after {timeout} s")
        _LOG.warning("virtual ranks did not finish within %s s", timeout)
        raise CommError(f"virtual ranks did not finish within {timeout} s: {unfinished}")
    if errors:
        raise _error_to_raise(errors, world)
    return [results[rank] for rank in range(world)]


def _error_to_raise(errors: Mapping[int, BaseException], world: int) -> BaseException:
    """The first error, which caused the others; rank 0's if all ranks raised the same type of error."""
    same_type = len({type(error) for error in errors.values()}) == 1
    return errors[0] if same_type and len(errors) == world else next(iter(errors.values()))


class VirtualComm(Comm):
    """The comm of one virtual rank. It can only be used on the thread that runs the rank."""

    shares_stream = True

    def __init__(self, shared: _VirtualWorld, rank: int, timeout: float) -> None:
        super().__init__(rank, shared.world, timeout)
        self._shared = shared
        shared.logs[rank] = self.log
        self._thread: int | None = None
        self._round = 0  # number of agreements so far; the same on every rank

    def enter(self) -> None:
        """Wait for the first turn on the thread of this rank."""
        self._thread = threading.get_ident()
        self._shared.scheduler.enter(self.rank)

    def leave(self, error: BaseException | None) -> None:
        """End this rank's run."""
        self._thread = None
        self._shared.scheduler.finish(self.rank, error)

    def _exchange(self, op: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        return self._exchange_with(self.log, op, sends, recvs)

    def _exchange_with(self, log: CallLog, op: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        self._check_usable()
        messages = [_PostedMessage(op, log, self.rank, peer, tensor.detach(), send=True) for tensor, peer in sends]
        messages += [_PostedMessage(op, log, peer, self.rank, tensor.detach(), send=False) for tensor, peer in recvs]
        pending: Pending = _PendingMessages(self, messages)
        if self.recorder is not None:
            for message in messages:
                message.record_with(self.recorder)
            pending = RecordedPending(pending, op, self.recorder, messages[0].tensor.device)
        for message in messages:
            self._shared.post(message)
        return pending

    def _compare(self, signature: Signature) -> Mapping[int, Signature]:
        self._check_usable()
        self._round += 1
        signatures = self._shared.signatures[self._round]
        signatures[self.rank] = signature
        if len(signatures) == self.world:
            self._shared.signatures.pop(self._round - 1, None)  # all ranks have entered this round

        def decided() -> bool:
            return len(signatures) == self.world or any(known.error is not None for known in signatures.values())

        self._shared.scheduler.wait_until(self.rank, decided, lambda: f"{self._missing()} to agree on {signature}")
        return dict(signatures)

    def _check_usable(self) -> None:
        """Raise on another thread; wait for ranks that have not read the disagreement of the latest round."""
        self._check_thread()
        signatures = self._shared.signatures[self._round] if self._round else {}
        if self._round and len(signatures) < self.world:
            self._shared.scheduler.wait_until(
                self.rank,
                lambda: len(signatures) == self.world,
                lambda: f"{self._missing()} to learn that {disagreement(signatures)}",
            )

    def _missing(self) -> str:
        return format_ranks([rank for rank in range(self.world) if rank not in self._shared.signatures[self._round]])

    def wait_for(self, messages: Sequence[_PostedMessage]) -> None:
        """Let other ranks run until all messages are delivered."""
        self._check_thread()

        def description() -> str:
            return " and ".join(str(message) for message in messages if not message.delivered)

        self._shared.scheduler.wait_until(
            self.rank, lambda: all(message.delivered for message in messages), description
        )
        for message in messages:
            if message.mismatch is not None:
                kind, text = message.mismatch
                raise kind(text)

    def _check_thread(self) -> None:
        if self._thread != threading.get_ident():
            raise RuntimeError(
                f"virtual rank {self.rank} was used outside its own thread or after its run: a virtual comm can only "
                "be used in the fn that run_virtual calls, and in backward passes on the same thread"
            )


@dataclass(frozen=True)
class _PendingMessages(Pending):
    comm: VirtualComm
    messages: Sequence[_PostedMessage]

    def wait(self) -> None:
        self.comm.wait_for(self.messages)


class _VirtualWorld:
    """State shared by the ranks of one run. Only the rank whose turn it is accesses it."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.logs: dict[int, CallLog] = {}
        self.scheduler = _Scheduler(world, self.out_of_step)
        self.signatures: defaultdict[int, dict[int, Signature]] = defaultdict(dict)  # by round and rank
        self._posted: defaultdict[tuple[int, int], deque[_PostedMessage]] = defaultdict(deque)

    def out_of_step(self) -> str | None:
        """How the calls of ranks differ; None if they do not."""
        return out_of_step({rank: log.latest(COMPARED_CALLS) for rank, log in self.logs.items()})

    def post(self, message: _PostedMessage) -> None:
        """Post one end of a message. When the second end is posted, the data is copied from buffer to buffer."""
        queue = self._posted[message.source, message.target]
        if queue and queue[0].send != message.send:
            other = queue.popleft()
            _deliver(*((message, other) if message.send else (other, message)))
        else:
            queue.append(message)


@dataclass(eq=False)
class _PostedMessage:
    """One end of a message between two ranks."""

    op: str
    log: CallLog
    source: int
    target: int
    tensor: Tensor
    send: bool
    delivered: bool = False
    mismatch: tuple[type[Exception], str] | None = None  # why the two ends do not match
    record: MessageRecord | None = None  # if the rank is being recorded

    def __post_init__(self) -> None:
        self.digest, self.number = self.log.digest, self.log.count  # as of now: the rank may go on

    @property
    def rank(self) -> int:
        """The rank of this end."""
        return self.source if self.send else self.target

    def record_with(self, recorder: Recorder) -> None:
        """Let the recorder of this end's rank record the message."""
        track: Track
        track, peer = ("send", self.target) if self.send else ("receive", self.source)
        self.record = recorder.message(track, self.op, peer, self.tensor.nbytes)

    def __str__(self) -> str:
        awaited = f"rank {self.target} to receive" if self.send else f"rank {self.source} to send"
        return f"{awaited} {self.content()} ({self.op})"

    def content(self) -> str:
        """Dtype and shape."""
        return f"{str(self.tensor.dtype).removeprefix('torch.')}{list(self.tensor.shape)}"


def _deliver(sent: _PostedMessage, received: _PostedMessage) -> None:
    sent.delivered = received.delivered = True
    in_step = sent.digest == received.digest
    if not in_step or sent.tensor.dtype != received.tensor.dtype or sent.tensor.numel() != received.tensor.numel():
        text = (
            f"rank {sent.source} sends {sent.content()} ({sent.op}) "
            f"but rank {sent.target} receives {received.content()} ({received.op})"
        )
        if not in_step:
            calls = {end.rank: end.log.latest(COMPARED_CALLS) for end in (sent, received)}
            different = out_of_step(calls) or f"ranks are out of step at calls {sent.number} and {received.number}"
            text = f"{different}; {text}"
        sent.mismatch = received.mismatch = (ValueError if in_step else CommError), text
        return
    records = [message.record for message in (sent, received) if message.record is not None]
    begin = records[0].recorder.now(received.tensor.device) if records else 0.0
    with torch.no_grad():
        received.tensor.copy_(sent.tensor.view(received.tensor.shape))
    for record in records:
        record.done(begin, record.recorder.now(received.tensor.device))


@dataclass
class _Waiting:
    ready: Callable[[], bool]
    description: Callable[[], str]


class _Scheduler:
    """Runs `world` threads one at a time.

    Because a single thread runs, state shared between ranks needs no locks, cores are not oversubscribed, and the order
    of events is the same in every run: a rank runs until it must wait, then the next one in rank order that can run.
    The running rank also knows the state of all others, so a deadlock is detected without a timeout.
    """

    def __init__(self, world: int, out_of_step: Callable[[], str | None]) -> None:
        self.world, self._out_of_step = world, out_of_step
        self.broken: str | None = None
        """Why no rank can continue, once that is so."""
        self._aborted: str | None = None
        self.all_finished = threading.Event()
        self._turn = [threading.Semaphore(0) for _ in range(world)]
        self._waiting: dict[int, _Waiting] = {}
        self._finished: dict[int, str] = {}

    def start(self) -> None:
        """Let rank 0 run."""
        self._turn[0].release()

    def enter(self, rank: int) -> None:
        """Wait for this rank's first turn."""
        self._turn[rank].acquire()

    def wait_until(self, rank: int, ready: Callable[[], bool], description: Callable[[], str]) -> None:
        """Let others run until `ready()`. Raise CommError as soon as that is known to be impossible."""
        if not ready() and self._aborted is None:
            self._waiting[rank] = _Waiting(ready, description)
            self._run_next(rank)
            self._turn[rank].acquire()
            del self._waiting[rank]
        if self._aborted is not None:
            raise CommError(self._aborted)
        if not ready():
            raise CommError(f"rank {rank} was waiting for {description()}; {self.broken}")

    def finish(self, rank: int, error: BaseException | None) -> None:
        """End a rank; an error ends the wait of every other rank."""
        self._finished[rank] = "returned" if error is None else f"raised {type(error).__name__}"
        if error is not None and self.broken is None:
            self.broken = f"rank {rank} raised {type(error).__name__}: {error}"
        if len(self._finished) == self.world:
            self.all_finished.set()
        else:
            self._run_next(rank)

    def abort(self, reason: str) -> None:
        """Make ranks that wait, now or later, raise CommError, also for what could still arrive."""
        self.broken = self._aborted = reason

    def unfinished(self) -> str:
        """The states of the ranks that have not finished."""
        ranks = [rank for rank in range(self.world) if rank not in self._finished]
        return "; ".join(f"rank {rank} is {self._state(rank)}" for rank in ranks)

    def _run_next(self, rank: int) -> None:
        """Give the turn to the next rank that can run. If there is none, it is a deadlock: all can run, to raise."""
        order = [(rank + step) % self.world for step in range(1, self.world + 1)]
        chosen = next((other for other in order if self._can_run(other)), None)
        if chosen is None:
            states = "; ".join(f"rank {r} is {self._state(r)}" for r in range(self.world))
            different = self._out_of_step()
            self.broken = f"{different}; {states}" if different else f"deadlock: no rank can continue: {states}"
            chosen = next(other for other in order if self._can_run(other))
        self._turn[chosen].release()

    def _can_run(self, rank: int) -> bool:
        if rank in self._finished:
            return False
        waiting = self._waiting.get(rank)
        return waiting is None or self.broken is not None or waiting.ready()

    def _state(self, rank: int) -> str:
        if rank in self._finished:
            return f"finished ({self._finished[rank]})"
        waiting = self._waiting.get(rank)
        return "running" if waiting is None else f"waiting for {waiting.description()}"


class _ThreadState:
    """The caller's thread-local torch state, to be restored on the threads of the ranks."""

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = {
            device: torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
        }
        self.default_device = torch.get_default_device()
        self.stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def restored(self) -> ExitStack:
        """A context manager that sets the same state on the current thread."""
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(self.inference))
        stack.enter_context(torch.set_grad_enabled(self.grad))
        # Backward must stay on the rank's thread: CUDA's would run on a thread that is not the rank whose turn it is.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        for device, dtype in self.autocast.items():
            stack.enter_context(torch.autocast(device, dtype))
        if self.default_device.type != "cpu":
            stack.enter_context(self.default_device)
        if self.stream is not None:
            stack.enter_context(torch.cuda.device(self.stream.device))
            stack.enter_context(torch.cuda.stream(self.stream))
        return stack
