"""The verbs that ranks speak. A transport supplies one, `exchange`; the others are made of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from attnmesh.comm.agreement import Claim, complaint, remembered_as
from attnmesh.comm.traffic import Traffic
from attnmesh.trace.recorder import Recorder

Shape = Sequence[int]
Message = tuple[Tensor, int]
"""A contiguous buffer and the rank at its other end."""


_MOST_REMEMBERED = 4096
_ONE_ROUND = 1 << 16  # bytes that arrive at a rank: below it a message costs what its sending costs


class CommError(RuntimeError):
    """A peer died, raised, or did not arrive in time. The comm cannot be used any more."""


class Pending(ABC):
    """Messages under way."""

    @abstractmethod
    def wait(self) -> None:
        """Return when receive buffers are filled and send buffers may be reused. Twice does no harm."""


class Finished(Pending):
    """Nothing under way."""

    def wait(self) -> None:
        """Return at once."""


class Comm(ABC):
    """One rank's end of a world of ranks that call the same verbs in the same order.

    Tensors are moved as they are: no gradient flows through a comm, so its verbs belong inside the forward
    and the backward of an autograd Function. Results never alias another rank's memory; a rank's own part
    comes back as it is. Messages without elements are not sent.
    """

    rank: int
    world: int
    timeout: float
    """Seconds after which a rank gives up on another."""
    traffic: Traffic
    shares_stream = False
    """Whether other ranks queue work on this rank's CUDA stream."""

    def __init__(self, rank: int, world: int, timeout: float) -> None:
        if timeout <= 0:
            raise ValueError(f"timeout must be positive seconds, got {timeout}")
        self.rank, self.world, self.timeout = rank, world, timeout
        self.traffic = Traffic()
        self._recorder: Recorder | None = None
        self._agreed: set[object] = set()
        self._operation = "nothing agreed yet"

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, world={self.world})"

    @property
    def recorder(self) -> Recorder | None:
        """Who notes what this rank does, while somebody watches; see `recording`."""
        return self._recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._recorder = recorder

    def buffer(self, shape: Shape, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory to receive into, contents undefined. A transport with a better kind than plain memory overrides it."""
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    # The verbs.

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """Post one batch of point-to-point messages; `wait()` on the result finishes them.

        Several messages between the same two ranks match in order. Buffers must be contiguous and may not
        be touched before `wait()` returns.
        """
        self._check_messages(sends, "sends")
        self._check_messages(recvs, "recvs")
        sends = [message for message in sends if message[0].numel()]
        recvs = [message for message in recvs if message[0].numel()]
        if not sends and not recvs:
            return Finished()
        self.traffic.add("exchange", len(sends), sum(tensor.nbytes for tensor, _ in sends))
        return self._exchange("exchange", sends, recvs)

    def all_gather(self, x: Tensor, shapes: Sequence[Shape], into: Tensor | None = None) -> list[Tensor]:
        """Everybody's `x`, in rank order. `shapes[i]` is the shape of rank i's; they may differ.

        They come to lie one after the other in `into`, if given: a contiguous buffer for all of them, the own one too.
        """
        self._check_count(shapes, "shapes")
        self._check_shape(x, shapes[self.rank], "x")
        _check_room(x, shapes, into)
        self._count("all_gather", x.nbytes * (self.world - 1))
        return self._all_gather("all_gather", x, shapes, into)

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Shape], into: Tensor | None = None) -> list[Tensor]:
        """`parts[i]` goes to rank i; what comes from rank i has shape `shapes[i]`. `into` as for `all_gather`."""
        self._check_count(parts, "parts")
        self._check_count(shapes, "shapes")
        self._check_shape(parts[self.rank], shapes[self.rank], f"parts[{self.rank}]")
        kinds = {(part.dtype, part.device) for part in parts}
        if len(kinds) > 1:
            raise ValueError(f"parts must share one dtype and device, got {sorted(map(str, kinds))}")
        _check_room(parts[self.rank], shapes, into)
        self._count("all_to_all", sum(part.nbytes for i, part in enumerate(parts) if i != self.rank))
        return self._all_to_all("all_to_all", parts, shapes, into)

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum of everybody's `parts[rank]`, which is this rank's share; parts may differ in shape."""
        self._check_count(parts, "parts")
        self._count("reduce_scatter", sum(part.nbytes for i, part in enumerate(parts) if i != self.rank))
        return self._reduce_scatter("reduce_scatter", parts)

    def all_reduce(self, x: Tensor, *, reuse: bool = False) -> Tensor:
        """The sum of everybody's `x`: the same bits on every rank. A new tensor, unless `x` may be reused for it."""
        self._count("all_reduce", round(2 * (self.world - 1) / self.world * x.nbytes))
        return self._all_reduce("all_reduce", x, reuse)

    def barrier(self) -> None:
        """Return when every rank is here."""
        self._count("barrier", 0)
        self._barrier("barrier")

    @final
    def agree(
        self, operation: str, facts: Mapping[str, object], error: str | None = None, *, anew: bool = False
    ) -> None:
        """Make sure that all ranks are about to do the same, or raise ValueError on every one of them.

        `facts` must be equal everywhere (call a device `device`, without its index); `error` is what
        this rank finds wrong with its own arguments. What was agreed once is remembered and costs no
        message afterwards, unless all ask `anew`. When one rank remembers and goes on while another comes
        with something new, the two wait for each other in different places: that ends in a CommError
        within the timeout.
        """
        self._operation = operation
        key = remembered_as(operation, facts)
        if error is None and not anew and key in self._agreed:
            return
        claim = Claim.of(operation, facts, error)
        claims = self._compare(claim)
        problem = complaint(claims)
        if problem is not None:
            raise ValueError(problem)
        if len(self._agreed) >= _MOST_REMEMBERED:  # on all ranks at the same call: they agree on the same things
            self._agreed.clear()
        self._agreed.add(key)

    def fail(self, message: str) -> None:
        """Let the others know that this rank gives up, so that their errors can say why."""

    # What a transport supplies.

    @abstractmethod
    def _exchange(self, verb: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """Post checked, non-empty messages to and from other ranks."""

    @abstractmethod
    def _compare(self, claim: Claim) -> Mapping[int, Claim]:
        """Publish this rank's claim and return every rank's.

        As soon as any rank's claim holds an error (the own one above all), it returns with the claims that
        are there: a rank that has found a mistake does not wait for anybody before it says so.
        """

    # The collectives, made of `_exchange`. A transport that has something better overrides them.

    def _all_gather(self, verb: str, x: Tensor, shapes: Sequence[Shape], into: Tensor | None = None) -> list[Tensor]:
        return self._all_to_all(verb, [x] * self.world, shapes, into)

    def _all_to_all(
        self, verb: str, parts: Sequence[Tensor], shapes: Sequence[Shape], into: Tensor | None = None
    ) -> list[Tensor]:
        own = parts[self.rank].detach()
        if into is None:
            arrived = [own if i == self.rank else own.new_empty(shape) for i, shape in enumerate(shapes)]
        else:
            arrived = parts_of(into, shapes)
            arrived[self.rank].copy_(own)
        # Every rank starts with its right neighbour, so that no rank is everybody's first target.
        others = [(self.rank + step) % self.world for step in range(1, self.world)]
        sends = [(parts[i].detach().contiguous(), i) for i in others if parts[i].numel()]
        recvs = [(arrived[i], i) for i in reversed(others) if arrived[i].numel()]
        if sends or recvs:
            self._exchange(verb, sends, recvs).wait()
        return arrived

    def _all_reduce(self, verb: str, x: Tensor, reuse: bool = False) -> Tensor:
        """Each rank sums one slice, in rank order, and hands the sum around: bits depend on no timing.

        What is small takes one round instead of two: everybody gets everything, and sums it in the same order.
        """
        if x.nbytes * self.world <= _ONE_ROUND:
            return _sum(self._all_gather(verb, x.detach().contiguous(), [x.shape] * self.world))
        slices = x.detach().contiguous().view(-1).tensor_split(self.world)
        sums = self._all_gather(verb, self._reduce_scatter(verb, slices), [part.shape for part in slices])
        return torch.cat(sums).view(x.shape)

    def _reduce_scatter(self, verb: str, parts: Sequence[Tensor]) -> Tensor:
        own = parts[self.rank]
        addends = self._all_to_all(verb, parts, [own.shape] * self.world)
        return _sum(addends)

    def _barrier(self, verb: str) -> None:
        token = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._all_gather(verb, token, [(1,)] * self.world)

    # Checks.

    def _check_messages(self, messages: Sequence[Message], name: str) -> None:
        for i, (tensor, peer) in enumerate(messages):
            if not 0 <= peer < self.world:
                raise ValueError(f"{name}[{i}]: peer {peer} is not a rank of this comm (0..{self.world - 1})")
            if peer == self.rank:
                raise ValueError(f"{name}[{i}]: rank {peer} cannot exchange messages with itself")
            if not tensor.is_contiguous():
                shape, stride = tuple(tensor.shape), tensor.stride()
                raise ValueError(f"{name}[{i}]: buffer must be contiguous, got {shape} with strides {stride}")

    def _check_count(self, given: Sequence[object], name: str) -> None:
        if len(given) != self.world:
            raise ValueError(f"{name}: need one for each of {self.world} ranks, got {len(given)}")

    def _check_shape(self, x: Tensor, shape: Shape, name: str) -> None:
        if tuple(x.shape) != tuple(shape):
            raise ValueError(f"{name} has shape {tuple(x.shape)} but shapes[{self.rank}] says {tuple(shape)}")

    def _count(self, verb: str, nbytes: int) -> None:
        """A collective is one message, and none in a world of one."""
        if self.world > 1:
            self.traffic.add(verb, 1, nbytes)


def _sum(addends: Sequence[Tensor]) -> Tensor:
    """A new tensor. 16-bit sums round once, at the end: the error must not grow with the number of ranks."""
    dtype = addends[0].dtype
    total = addends[0].to(torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype, copy=True)
    for addend in addends[1:]:
        total += addend
    return total.to(dtype)


def parts_of(buffer: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """A contiguous buffer's parts of these shapes, one after the other."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(tuple(shape)) for part, shape in zip(buffer.view(-1).split(sizes), shapes, strict=True)]


def _check_room(like: Tensor, shapes: Sequence[Shape], into: Tensor | None) -> None:
    size = sum(torch.Size(shape).numel() for shape in shapes)
    if into is not None and (into.numel() != size or into.dtype != like.dtype or not into.is_contiguous()):
        raise ValueError(
            f"into must be contiguous, {size} elements of {like.dtype}, got {into.numel()} of {into.dtype} with "
            f"strides {into.stride()}"
        )
