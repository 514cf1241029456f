"""The communicator interface: point-to-point messages, collectives and agreement between ranks.

A transport implements `_exchange` and `_compare`; everything else is built on these two.

Ranks compare the operation and its arguments before they exchange data. Every rank has a log of its calls with a
rolling digest: ranks that made the same calls in the same order have the same digest.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple, TypeVar, final

import torch
from torch import Tensor

from attnmesh.comm.health.group_store import CommError
from attnmesh.trace.timeline import Recorder
from attnmesh.utils.text import alternatives, counted, format_ranks, ranks_by_value, see, with_link
from attnmesh.utils.validation import check_device, check_timeout, check_type

T = TypeVar("T")
Shape = Sequence[int]
Message = tuple[Tensor, int]
"""A contiguous buffer and the rank at its other end."""
SharedValues = dict[str, object]
"""Arguments, by name, that must be equal on all ranks."""


_MAX_REMEMBERED = 4096  # agreements
COMPARED_CALLS = 32  # latest calls that are compared with every agreement
_ONE_ROUND = 1 << 16  # bytes per rank below which an all-reduce is latency-bound: one round beats two

# The log of the calls of a rank.

_KEPT, _LATEST, _EVERY = 4096, 16, 64  # calls
_BITS = (1 << 64) - 1
_MULTIPLIER = 0x5851F42D4C957F2D  # odd, of Knuth's MMIX generator


class LoggedCall(NamedTuple):
    """A call: its number, from 1, and the digest of all calls up to it."""

    number: int
    digest: int
    text: str


class CallLog:
    """The calls of one rank. Adding one costs about a microsecond; texts are formatted when they are read."""

    def __init__(self) -> None:
        self.count = 0
        self.digest = 0
        self._calls: deque[tuple[int, int, str, object]] = deque(maxlen=_KEPT)
        self._made: Counter[Hashable] = Counter()

    def add(self, operation: str, digest: int, detail: object = None) -> None:
        """Log a call whose arguments have this digest (`text_digest`, or `hash` of integers)."""
        self.count += 1
        self.digest = (self.digest * _MULTIPLIER + digest) & _BITS
        self._calls.append((self.count, self.digest, operation, detail))

    def number(self, *kind: Hashable) -> int:
        """The number of a new object of this kind, from 1: equal on ranks that make the same objects in the same order.

        Calls of objects with equal arguments differ by it. Numbers are not used again after an object is deleted:
        ranks collect garbage at different times.
        """
        self._made[kind] += 1
        return self._made[kind]

    def made(self, *kind: Hashable) -> int:
        """How many objects of this kind were numbered."""
        return self._made[kind]

    def latest(self, calls: int) -> list[LoggedCall]:
        """The latest calls, oldest first. May be called on another thread."""
        kept = list(self._calls)[-calls:]
        return [LoggedCall(number, digest, call_text(operation, detail)) for number, digest, operation, detail in kept]

    def digests(self) -> dict[int, int]:
        """The digests of all kept calls, by number. May be called on another thread."""
        return {number: digest for number, digest, _, _ in list(self._calls)}

    def sampled_digests(self) -> dict[int, int]:
        """The digests of the latest calls, and of some before: what another rank needs to compare with its own."""
        return {n: digest for n, digest in self.digests().items() if n > self.count - _LATEST or n % _EVERY == 0}

    @property
    def last_call(self) -> tuple[str, object] | None:
        """The operation and the detail of the latest call."""
        return self._calls[-1][2:] if self._calls else None


@lru_cache(maxsize=4096)
def text_digest(text: str) -> int:
    """A 64-bit digest of a text, equal in all processes; `hash` of a string is not."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def call_text(operation: str, detail: object) -> str:
    """`operation(name=value, ...)`. A detail of two parts is the arguments and the last call of the state.

    A detail that is a number is the number of a call.
    """
    if detail is None:
        return operation
    if isinstance(detail, int):
        return f"{operation}(call {detail})"
    if isinstance(detail, tuple):
        detail, last_call = detail
        return call_text(operation, detail) + (f" after {call_text(*last_call)}" if last_call else "")
    if isinstance(detail, Mapping):
        detail = ", ".join(f"{name}={_as_tuples(value)}" for name, value in detail.items())
    return f"{operation}({detail})"


def _as_tuples(value: object) -> object:
    """A torch.Size or a list as a tuple, as agreements compare them."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def out_of_step(by_rank: Mapping[int, Sequence[LoggedCall]], global_ranks: Sequence[int] | None = None) -> str | None:
    """How the calls of ranks differ; None if all that can be compared are equal.

    The first call that differs is described. A rank that is behind is not out of step. `global_ranks` as in
    `format_ranks`.
    """
    calls = {rank: {call.number: call for call in log} for rank, log in by_rank.items()}
    for number in sorted({number for log in calls.values() for number in log}):
        known = {rank: log[number] for rank, log in calls.items() if number in log}
        if len({call.digest for call in known.values()}) > 1:
            texts = {rank: call.text for rank, call in known.items()}
            if len(set(texts.values())) == 1:
                texts = {rank: f"{call.text} [digest {call.digest:016x}]" for rank, call in known.items()}
            earlier = "" if number - 1 in set().union(*calls.values()) or number == 1 else " or before"
            return f"ranks are out of step at call {number}{earlier}: {alternatives(texts, global_ranks)}"
    return None


def more_calls(by_rank: Mapping[int, Sequence[LoggedCall]], global_ranks: Sequence[int] | None = None) -> str:
    """How many calls ranks have made, if all calls that can be compared are equal."""
    texts = {
        rank: f"{counted(calls[-1].number, 'call')}, the last one {calls[-1].text}," if calls else "no call"
        for rank, calls in by_rank.items()
    }
    return f"ranks are out of step: {alternatives(texts, global_ranks)}"


_SHORT = 100  # characters
_DISAGREE = "debugging.md#ranks-disagree"


@dataclass(frozen=True)
class Signature:
    """An operation that one rank is about to start, its arguments as strings, and the error it found in them."""

    operation: str
    values: dict[str, str]
    error: str | None = None
    calls: tuple[LoggedCall, ...] = ()
    """The latest calls of the rank before this one."""

    @classmethod
    def from_json(cls, text: str | bytes) -> Signature:
        """Parse the output of `to_json`."""
        fields = json.loads(text)
        return cls(**{**fields, "calls": tuple(LoggedCall(*call) for call in fields["calls"])})

    def to_json(self) -> str:
        """The signature as a string, for a key-value store."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in self.values.items())
        return f"{self.operation}({values})"

    @property
    def short(self) -> str:
        """The operation with the arguments that fit into a line."""
        text = str(self)
        return text if len(text) <= _SHORT else f"{text[:_SHORT].rpartition(', ')[0]}, ...)"


def disagreement(signatures: Mapping[int, Signature], global_ranks: Sequence[int] | None = None) -> str | None:
    """The error message for signatures (by rank) that do not agree; None if they do.

    `global_ranks` as in `format_ranks`. An error that a rank reports about its own arguments comes first, because it
    explains other differences.
    """
    ranks = sorted(signatures)
    errors = ranks_by_value({rank: error for rank in ranks if (error := signatures[rank].error) is not None})
    if errors:
        operation = signatures[next(rank for rank in ranks if signatures[rank].error is not None)].operation
        named = (f"{error} (on {format_ranks(by, global_ranks)})" for error, by in errors.items())
        return with_link(f"{operation}: {'; '.join(named)}")

    operations = {rank: signatures[rank].operation for rank in ranks}
    if len(set(operations.values())) > 1:
        calls = {rank: str(signatures[rank]) for rank in ranks}
        return f"ranks called different operations: {alternatives(calls, global_ranks)}{see(_DISAGREE)}"

    names = dict.fromkeys(name for rank in ranks for name in signatures[rank].values)
    differing = []
    for name in names:
        values = {rank: signatures[rank].values.get(name, "(not given)") for rank in ranks}
        if len(set(values.values())) > 1:
            differing.append(f"{name} is {alternatives(values, global_ranks)}")
    if differing:
        return f"{operations[ranks[0]]}: ranks disagree: {'; '.join(differing)}{see(_DISAGREE)}"
    return None


# Communicators.


@dataclass
class Traffic:
    """Messages and payload bytes sent by one rank, in total and per operation.

    Counts what an operation sends by definition, not what a transport does: padding, staging copies and the algorithm
    of a collective do not show. `all_gather` sends its part to every other rank, `all_reduce` twice all but its share.
    """

    messages: int = 0
    bytes: int = 0
    by_op: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, op: str, messages: int, nbytes: int) -> None:
        """Count `messages` messages of `nbytes` bytes in total."""
        self.messages += messages
        self.bytes += nbytes
        sent = self.by_op.get(op, (0, 0))
        self.by_op[op] = (sent[0] + messages, sent[1] + nbytes)

    def reset(self) -> None:
        """Set all counts to zero."""
        self.messages = self.bytes = 0
        self.by_op.clear()


class Pending(ABC):
    """Messages in flight."""

    @abstractmethod
    def wait(self) -> None:
        """Return when receive buffers are filled and send buffers may be reused. Safe to call again."""


class Finished(Pending):
    """No messages in flight."""

    def wait(self) -> None:
        """Return immediately."""


FINISHED = Finished()


class Comm(ABC):
    """One rank's endpoint in a world of ranks that make the same calls in the same order.

    No gradient flows through a comm: use it inside the forward and the backward of an autograd Function. Results never
    alias another rank's memory; a rank's own part is returned as is. Messages without elements are not sent.

    Examples:
        >>> def rank(comm):
        ...     parts = comm.all_gather(torch.full((comm.rank + 1,), comm.rank), shapes=[(1,), (2,), (3,)])
        ...     return comm.world, torch.cat(parts).tolist()
        >>> am.run_virtual(3, rank)[0]
        (3, [0, 1, 1, 2, 2, 2])
    """

    rank: int
    world: int
    timeout: float
    """Seconds that a rank waits for another."""
    traffic: Traffic
    shares_stream = False
    """Whether other ranks queue work on this rank's CUDA stream."""
    _shares_log = False  # whether other subgroups use the same log
    global_ranks: Sequence[int] | None = None
    """The ranks by their numbers in the default process group, which errors name; None if they are the same."""
    is_own_group = False
    """Whether this is a process group of its own, which needs all its ranks in the first operation (NCCL)."""

    def __init__(self, rank: int, world: int, timeout: float) -> None:
        self.rank, self.world, self.timeout = rank, world, check_timeout(timeout)
        self.traffic = Traffic()
        self._recorder: Recorder | None = None
        self._agreed: dict[object, int] = {}  # values that ranks agreed on, and their digests
        self._operation = "nothing agreed yet"
        self.log = CallLog()
        """The calls of this rank, which every message is checked against."""
        self._logs = {tuple(range(world)): self.log}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, world={self.world})"

    @property
    def recorder(self) -> Recorder | None:
        """The recorder of this rank inside `recording`, else None."""
        return self._recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._recorder = recorder

    @property
    def shares_memory(self) -> bool:
        """Whether small messages to all other ranks go through the memory of this host; known from an agreement on."""
        return False

    def buffer(self, shape: Shape, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized receive buffer, contiguous, at the begin of its storage.

        A transport that needs special memory overrides this.
        """
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    # Operations.

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """Post one batch of point-to-point messages; `wait()` on the result completes them.

        Several messages between the same two ranks match in order. Buffers must be contiguous and may not be touched
        before `wait()` returns.
        """
        self._check_one_thread("exchange")
        self._check_messages(sends, "sends")
        self._check_messages(recvs, "recvs")
        sends = [message for message in sends if message[0].numel()]
        recvs = [message for message in recvs if message[0].numel()]
        if not sends and not recvs:
            return FINISHED
        self.traffic.add("exchange", len(sends), sum(tensor.nbytes for tensor, _ in sends))
        return self._exchange("exchange", sends, recvs)

    def all_gather(self, x: Tensor, shapes: Sequence[Shape], into: Tensor | None = None) -> list[Tensor]:
        """The `x` of all ranks, in rank order. `shapes[i]` is the shape on rank i; shapes may differ.

        `into` is a contiguous buffer for all parts, the own one included, which are laid out in rank order.
        """
        self._check_count(shapes, "shapes")
        self._check_shape(x, shapes[self.rank], "x")
        _check_into(x, shapes, into)
        self._log_collective("all_gather", shapes, x)
        self._count("all_gather", x.nbytes * (self.world - 1))
        return self._all_gather("all_gather", x, shapes, into)

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Shape], into: Tensor | None = None) -> list[Tensor]:
        """Send `parts[i]` to rank i and return what rank i sent, of shape `shapes[i]`. `into` as for `all_gather`."""
        self._check_count(parts, "parts")
        self._check_count(shapes, "shapes")
        self._check_shape(parts[self.rank], shapes[self.rank], f"parts[{self.rank}]")
        kinds = {(part.dtype, part.device) for part in parts}
        if len(kinds) > 1:
            raise ValueError(f"parts must share one dtype and device, got {sorted(map(str, kinds))}")
        _check_into(parts[self.rank], shapes, into)
        self._log_collective("all_to_all", (), parts[0])
        self._count("all_to_all", sum(part.nbytes for i, part in enumerate(parts) if i != self.rank))
        return self._all_to_all("all_to_all", parts, shapes, into)

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum over all ranks of their `parts[rank]`; parts may differ in shape."""
        self._check_count(parts, "parts")
        self._log_collective("reduce_scatter", [part.shape for part in parts], parts[0])
        self._count("reduce_scatter", sum(part.nbytes for i, part in enumerate(parts) if i != self.rank))
        return self._reduce_scatter("reduce_scatter", parts)

    def all_reduce(self, x: Tensor, *, reuse: bool = False) -> Tensor:
        """The sum of `x` over all ranks, with the same bits on every rank. `reuse` allows it to overwrite `x`."""
        self._log_collective("all_reduce", [x.shape], x)
        self._count("all_reduce", round(2 * (self.world - 1) / self.world * x.nbytes))
        return self._all_reduce("all_reduce", x, reuse)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._log_collective("barrier", (), None)
        self._count("barrier", 0)
        self._barrier("barrier")

    @final
    def agree(
        self,
        operation: str,
        values: Mapping[str, object],
        error: str | None = None,
        *,
        state: CallLog | None = None,
        force: bool = False,
    ) -> None:
        """Check that all ranks are about to start the same operation; raise ValueError on all of them if not.

        `values` must be equal on all ranks (a device goes in as `device`, without its index); `error` is the error that
        this rank found in its own arguments. `state` is the log of an object that the operation works on, such as a
        cache, which must have gone through the same calls on all ranks.

        An agreement is remembered and costs no message the next time, unless all ranks set `force`. Every call is
        logged (`log`), and messages pass only between ranks with equal logs. Ranks that are out of step, because one
        remembers what is new to another or because their states differ, raise CommError.
        """
        digest = self._agreed_digest(operation, values, error, force)
        if self.world == 1:
            return
        if state is None:
            self.log.add(operation, digest, values)
        else:
            self.log.add(operation, digest ^ state.digest, (values, state.last_call))

    @final
    def _agreed_digest(self, operation: str, values: Mapping[str, object], error: str | None, force: bool) -> int:
        """The digest of values that all ranks have compared, now or before."""
        self._check_one_thread(operation)
        self._operation = operation
        key: object = operation, tuple(values.items())
        try:
            digest = self._agreed.get(key)
        except TypeError:  # a list or a dict
            key = operation, tuple((name, _hashable(value)) for name, value in values.items())
            digest = self._agreed.get(key)
        if digest is None or force or error is not None:
            digest = self._compared(operation, values, error)
            if len(self._agreed) >= _MAX_REMEMBERED:
                self._agreed = {}  # on all ranks in the same call, since they agree on the same values
            self._agreed[key] = digest
        return digest

    def _compared(self, operation: str, values: Mapping[str, object], error: str | None) -> int:
        """The digest of values, once all ranks have compared them."""
        texts = {name: str(_hashable(value)) for name, value in values.items()}
        signatures = self._compare(Signature(operation, texts, error, tuple(self.log.latest(COMPARED_CALLS))))
        problem = disagreement(signatures, self.global_ranks)
        if problem is not None:
            raise ValueError(problem)
        calls = {rank: signature.calls for rank, signature in sorted(signatures.items())}
        if len({latest[-1].digest if latest else 0 for latest in calls.values()}) > 1:
            raise CommError(out_of_step(calls, self.global_ranks) or more_calls(calls, self.global_ranks))
        return text_digest(call_text(operation, dict(sorted(texts.items()))))

    @final
    def note(self, operation: str, detail: str | int | None = None) -> None:
        """Log an operation that follows from an earlier call, such as its backward. Nothing is compared now.

        A detail that is a number is the number of a call (`calls`).
        """
        self._check_one_thread(operation)
        self._operation = operation
        if self.world == 1:
            return
        if isinstance(detail, int):
            self.log.add(operation, hash((text_digest(operation), detail)), detail)
        else:
            self.log.add(operation, text_digest(call_text(operation, detail)), detail)

    @property
    def calls(self) -> int:
        """The number of calls that were logged."""
        return self.log.count

    def log_of(self, members: tuple[int, ...]) -> CallLog:
        """The log of a subgroup whose calls differ from the calls of other subgroups."""
        return self._logs.setdefault(members, CallLog())

    @contextmanager
    def replaying(self, operation: str) -> Iterator[None]:
        """Around the replay of a CUDA graph that has messages of this comm in it.

        The calls in a graph are logged only when they are captured. This logs the replay, so that ranks that replay
        differently are noticed; over NCCL, so is a rank that does not arrive.
        """
        check_type("operation", operation, str, "a string")
        self.note(operation)
        yield

    def fail(self, message: str) -> None:
        """Report to the other ranks that this rank has failed, so that their errors can give the reason."""

    # Implemented by a transport.

    @abstractmethod
    def _exchange(self, op: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """Post checked, non-empty messages to and from other ranks."""

    def _exchange_with(self, log: CallLog, op: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """`_exchange` for a subgroup with a log of its own. A transport that checks messages overrides it."""
        return self._exchange(op, sends, recvs)

    def _exchange_now(self, op: str, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        """`_exchange`, and wait for the messages. A transport with a faster way for small ones overrides it."""
        self._exchange(op, sends, recvs).wait()

    @abstractmethod
    def _compare(self, signature: Signature) -> Mapping[int, Signature]:
        """Publish this rank's signature and return the signatures of all ranks.

        As soon as any signature has an error (this rank's own included), return the known ones: a rank that found
        an error does not wait for others before it raises.
        """

    # Collectives built on `_exchange`. A transport with native collectives overrides them.

    def _all_gather(self, op: str, x: Tensor, shapes: Sequence[Shape], into: Tensor | None = None) -> list[Tensor]:
        return self._all_to_all(op, [detached(x).contiguous()] * self.world, shapes, into)

    def _all_to_all(
        self, op: str, parts: Sequence[Tensor], shapes: Sequence[Shape], into: Tensor | None = None
    ) -> list[Tensor]:
        own = detached(parts[self.rank])
        if into is None:
            received = [own if i == self.rank else _empty(own, shape) for i, shape in enumerate(shapes)]
        else:
            received = split_buffer(into, shapes)
            received[self.rank].copy_(own)
        # Every rank starts with its right neighbor, so that no rank is the first target of all others.
        others = [(self.rank + step) % self.world for step in range(1, self.world)]
        sends = [(detached(parts[i]).contiguous(), i) for i in others if parts[i].numel()]
        recvs = [(received[i], i) for i in reversed(others) if received[i].numel()]
        if sends or recvs:
            self._exchange_now(op, sends, recvs)
        return received

    def _all_reduce(self, op: str, x: Tensor, reuse: bool = False) -> Tensor:
        """Reduce-scatter and all-gather, with sums in rank order: the result does not depend on timing.

        Small tensors take one round instead of two: every rank gathers all parts and sums them in the same order.
        """
        if x.nbytes * self.world <= _ONE_ROUND:
            return _sum(self._all_gather(op, detached(x).contiguous(), [x.shape] * self.world))
        slices = x.detach().contiguous().view(-1).tensor_split(self.world)
        sums = self._all_gather(op, self._reduce_scatter(op, slices), [part.shape for part in slices])
        return torch.cat(sums).view(x.shape)

    def _reduce_scatter(self, op: str, parts: Sequence[Tensor]) -> Tensor:
        own = parts[self.rank]
        return _sum(self._all_to_all(op, parts, [own.shape] * self.world))

    def _barrier(self, op: str) -> None:
        token = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._all_gather(op, token, [(1,)] * self.world)

    # Checks.

    def _check_one_thread(self, operation: str) -> None:
        """Raise if another thread is in an operation of this comm. A transport that is used by processes overrides it.

        Nothing has been logged or sent before, so that the other thread can go on.
        """

    def _check_messages(self, messages: Sequence[Message], name: str) -> None:
        for i, (tensor, peer) in enumerate(messages):
            if not 0 <= peer < self.world:
                raise ValueError(f"{name}[{i}]: peer must be in 0..{self.world - 1}, got {peer}")
            if peer == self.rank:
                raise ValueError(f"{name}[{i}]: peer must be another rank, got {peer}, which is this rank")
            if not tensor.is_contiguous():
                shape, stride = tuple(tensor.shape), tensor.stride()
                raise ValueError(f"{name}[{i}]: buffer must be contiguous, got shape {shape} with strides {stride}")

    def _check_count(self, given: Sequence[object], name: str) -> None:
        if len(given) != self.world:
            raise ValueError(f"{name} must have one entry for each of {counted(self.world, 'rank')}, got {len(given)}")

    def _check_shape(self, x: Tensor, shape: Shape, name: str) -> None:
        if tuple(x.shape) != tuple(shape):
            raise ValueError(f"{name} must have shape shapes[{self.rank}] = {tuple(shape)}, got {tuple(x.shape)}")

    def _log_collective(self, op: str, shapes: Sequence[Shape], x: Tensor | None) -> None:
        """Log a collective, unless other subgroups, whose collectives may differ, share the log."""
        self._check_one_thread(op)
        if self.world > 1 and not self._shares_log:
            sizes = tuple(map(tuple, shapes))
            itemsize = 0 if x is None else x.element_size()
            self.log.add(op, hash((text_digest(op), itemsize, sizes)), {"shapes": sizes} if sizes else None)

    def _count(self, op: str, nbytes: int) -> None:
        """Count a collective as one message; in a world of one, as none."""
        if self.world > 1:
            self.traffic.add(op, 1, nbytes)


def post(comm: Comm, sends: Sequence[Message], recvs: Sequence[Message], nbytes: int) -> Pending:
    """`Comm.exchange` of messages that a plan made: valid, none of them empty. `nbytes` are sent."""
    if not sends and not recvs:
        return FINISHED
    comm._check_one_thread("exchange")
    comm.traffic.add("exchange", len(sends), nbytes)
    return comm._exchange("exchange", sends, recvs)


class Agreement:
    """A call whose arguments were checked, with the values that all ranks must agree on, to be made again and again.

    `begin` is `Comm.agree`, but looks up only once whether ranks have agreed on the values before.
    """

    __slots__ = ("_agreed", "_comm", "_digest", "_operation", "_values")

    def __init__(self, comm: Comm, operation: str, values: SharedValues) -> None:
        self._comm, self._operation, self._values = comm, operation, values
        self._agreed: object = None  # what the comm remembered, with this call
        self._digest = 0

    def begin(self) -> None:
        """Raise ValueError on all ranks if they do not agree; log the call."""
        comm = self._comm
        if self._agreed is not comm._agreed:
            self._digest = comm._agreed_digest(self._operation, self._values, None, force=False)
            self._agreed = comm._agreed
        else:
            comm._check_one_thread(self._operation)
            comm._operation = self._operation
        if comm.world > 1:
            comm.log.add(self._operation, self._digest, self._values)


class SoloComm(Comm):
    """A comm with a single rank."""

    def __init__(self, timeout: float = 300) -> None:
        super().__init__(rank=0, world=1, timeout=timeout)

    def _exchange(self, op: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        return Finished()  # there are no peers: the base class rejects messages to the rank itself

    def _compare(self, signature: Signature) -> Mapping[int, Signature]:
        return {0: signature}


def _hashable(value: object) -> Hashable:
    """A hashable form of a value, equal for a list, a tuple and a torch.Size of the same numbers."""
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((str(key), _hashable(item)) for key, item in sorted(value.items()))
    return value if isinstance(value, Hashable) else str(value)


def detached(x: Tensor) -> Tensor:
    """`x.detach()`, or `x` itself if there is nothing to detach, which is faster."""
    return x.detach() if x.requires_grad else x


def _empty(like: Tensor, shape: Shape) -> Tensor:
    """`like.new_empty(shape)`, in half the time if the shape is the same."""
    return torch.empty_like(like) if shape == like.shape and like.is_contiguous() else like.new_empty(shape)


def _sum(addends: Sequence[Tensor]) -> Tensor:
    """A new tensor. 16-bit sums are rounded once, at the end: the error must not grow with the number of ranks."""
    first, *others = addends
    if first.dtype in (torch.float16, torch.bfloat16):
        first = first.float()
    elif not others:
        return first.clone()
    total = first + others[0] if others else first
    for addend in others[1:]:
        total += addend
    return total if total.dtype == addends[0].dtype else total.to(addends[0].dtype)


def split_buffer(buffer: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Consecutive parts of a contiguous buffer, as views of these shapes."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(tuple(shape)) for part, shape in zip(buffer.view(-1).split(sizes), shapes, strict=True)]


def _check_into(like: Tensor, shapes: Sequence[Shape], into: Tensor | None) -> None:
    size = sum(torch.Size(shape).numel() for shape in shapes)
    if into is not None and (into.numel() != size or into.dtype != like.dtype or not into.is_contiguous()):
        raise ValueError(
            f"into must be contiguous with {size} elements of {like.dtype}, got {into.numel()} of {into.dtype} with "
            f"strides {into.stride()}"
        )


# Recording.


@contextmanager
def recording(comm: Comm, device: torch.device | str = "cpu") -> Iterator[Recorder]:
    """Record this rank inside the `with` statement. All ranks must enter it together.

    Subgroups of `comm` (`SubComm`) are recorded with it; other process groups are not.
    """
    check_type("comm", comm, Comm)
    check_device("device", device)
    if comm.recorder is not None:
        raise RuntimeError(f"rank {comm.rank} is being recorded already")
    comm.barrier()
    recorder = comm.recorder = Recorder(comm.rank, device)
    try:
        yield recorder
    finally:
        comm.recorder = None


class RecordedPending(Pending):
    """Messages in flight whose wait is recorded, on the host or on the stream of `device`."""

    def __init__(self, pending: Pending, op: str, recorder: Recorder, device: torch.device | None) -> None:
        self._pending, self._op, self._recorder, self._device = pending, op, recorder, device
        self._waited = False

    def wait(self) -> None:
        """Wait for the messages. Only the first wait is recorded; further ones take no time."""
        if self._waited:
            self._pending.wait()
            return
        self._waited = True
        with self._recorder.span("wait", self._op, self._device):
            self._pending.wait()
