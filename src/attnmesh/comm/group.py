"""Ranks that are processes: a comm over a torch.distributed process group."""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from attnmesh.comm.agreement import Claim, complaint
from attnmesh.comm.base import Comm, CommError, Message, Pending, Shape, parts_of
from attnmesh.comm.board import Board
from attnmesh.comm.parcel import Parcel, stage
from attnmesh.comm.recording import NotedPending
from attnmesh.comm.watch import Waitable, watch_on_stream, watched
from attnmesh.trace.recorder import Recorder

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class GroupComm(Comm):
    """A comm over a process group with gloo, NCCL, or both.

    Over gloo, every verb is made of point-to-point messages: sums are taken in rank order, errors name the
    peer, and one deadline bounds each wait. CUDA tensors that gloo must carry are staged through pinned
    host memory. Over NCCL, waiting orders streams and does not block the host; NCCL's own watchdog keeps
    the time.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float = 300) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), timeout)
        # Weak, or a destroyed group would keep its sockets open for as long as somebody holds the comm.
        self._group_ref = weakref.ref(group)
        self._carriers = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
        self._board = Board(_store_of(group), self.rank, self.world)
        self._broken: str | None = None
        self._unsettled: str | None = None  # a complaint that not all have heard yet
        self._nccl_is_warm = False

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group beneath."""
        group = self._group_ref()
        if group is None:
            raise CommError("the process group of this comm has been destroyed")
        return group

    def fail(self, message: str) -> None:
        """Let the others know that this rank gives up; their errors quote it."""
        self._board.report_failure(message)

    # Agreement.

    def _compare(self, claim: Claim) -> Mapping[int, Claim]:
        self._check_in()
        if self.world == 1:
            return {0: claim}
        try:
            claims = self._board.compare(claim, self.timeout)
        except CommError as error:
            raise self._give_up(str(error)) from error
        if len(claims) < self.world:
            self._unsettled = complaint(claims)
        elif complaint(claims) is None and self._will_use_nccl(claim):
            self._warm_up_nccl()
        return claims

    def _will_use_nccl(self, claim: Claim) -> bool:
        """A group that has gloo beside NCCL may never move a CUDA tensor, or have no GPU for every rank."""
        on_cuda = "cpu" not in self._carriers or claim.facts.get("device", "").startswith("cuda")
        return on_cuda and self._carriers.get("cuda") == "nccl"

    def _warm_up_nccl(self) -> None:
        """NCCL wants all ranks in a group's first operation; a ring's first hop may well leave some out."""
        if not self._nccl_is_warm:
            dist.all_reduce(torch.zeros(1, device="cuda"), group=self.group)
            self._nccl_is_warm = True

    def _check_in(self) -> None:
        """Refuse to go on after a failure, or out of step with ranks that missed this rank's complaint."""
        if self._broken is not None:
            raise CommError(f"this comm has failed before: {self._broken}")
        _ = self.group  # raises when it has been destroyed
        if self._unsettled is not None:
            heard, self._unsettled = self._unsettled, None
            if not self._board.all_came(self.timeout):
                raise self._give_up(f"rank {self.rank}: not all ranks came to hear that {heard}")

    # Messages.

    def _exchange(self, verb: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        self._check_in()
        carrier = self._carrier_of_all([tensor for tensor, _ in (*sends, *recvs)])
        parcels = [Parcel(tensor.detach(), peer, send=True) for tensor, peer in sends]
        parcels += [Parcel(tensor.detach(), peer, send=False) for tensor, peer in recvs]
        if carrier != "nccl":
            stage(parcels)
        if self.recorder is not None:
            return self._recorded_exchange(verb, parcels, self.recorder, blocking=carrier != "nccl")
        return _Batch(self, verb, parcels, self._posted(verb, parcels), blocking=carrier != "nccl")

    def _recorded_exchange(self, verb: str, parcels: list[Parcel], recorder: Recorder, *, blocking: bool) -> Pending:
        """The same, and notes when every message was done and how long this rank waited."""
        device = None if blocking else parcels[0].tensor.device
        posted = recorder.now(device)
        works: Sequence[Waitable] = self._posted(verb, parcels)
        if blocking:
            works = watched(works, parcels, verb, recorder, self.timeout, posted)
        else:
            watch_on_stream(works, parcels, verb, recorder, posted)
        return NotedPending(_Batch(self, verb, parcels, works, blocking=blocking), verb, recorder, device)

    def _posted(self, verb: str, parcels: Sequence[Parcel]) -> list[dist.Work]:
        try:
            return self._post(parcels)
        except RuntimeError as error:
            raise self.lost(verb, parcels, error) from error

    def _post(self, parcels: Sequence[Parcel]) -> list[dist.Work]:
        # Bytes are bytes: every dtype travels, whatever the backend knows about it.
        ops = [
            dist.P2POp(
                dist.isend if parcel.send else dist.irecv,
                parcel.wire.view(-1).view(torch.uint8),
                group=self.group,
                group_peer=parcel.peer,
            )
            for parcel in parcels
        ]
        return dist.batch_isend_irecv(ops)

    def _carrier_of_all(self, tensors: Sequence[Tensor]) -> str:
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            raise ValueError(f"one exchange needs one device, got {', '.join(sorted(map(str, devices)))}")
        return self._carrier(tensors[0].device)

    def _carrier(self, device: torch.device) -> str:
        """The backend that moves tensors of this device."""
        carrier = self._carriers.get(device.type)
        if carrier is None:
            able = ", ".join(f"{kind} ({backend})" for kind, backend in self._carriers.items())
            raise ValueError(f"this process group cannot carry {device.type} tensors, only {able}")
        return carrier

    def lost(self, verb: str, parcels: Sequence[Parcel], error: Exception) -> CommError:
        """Give up because of messages that did not get through."""
        under_way = " and ".join(map(str, parcels))
        return self._give_up(
            f"rank {self.rank} failed in {verb} ({self._operation}) while {under_way}: "
            f"{_essence(error)}{self._board.explain()}"
        )

    def _give_up(self, message: str) -> CommError:
        self._broken = message
        self.fail(message)
        return CommError(message)

    # What NCCL does better than a batch of messages.

    def _all_gather(self, verb: str, x: Tensor, shapes: Sequence[Shape], into: Tensor | None = None) -> list[Tensor]:
        if self._carrier(x.device) != "nccl":
            return super()._all_gather(verb, x, shapes, into)
        return self._padded_all_gather(x, shapes, into)

    def _padded_all_gather(self, x: Tensor, shapes: Sequence[Shape], into: Tensor | None = None) -> list[Tensor]:
        """One native all-gather; parts of different sizes are padded to the largest."""
        self._check_in()
        sizes = [torch.Size(shape).numel() for shape in shapes]
        largest = max(sizes)
        if largest == 0:
            return [x.new_empty(shape) for shape in shapes]
        mine = x.detach().contiguous().view(-1)
        if mine.numel() < largest:
            mine = torch.cat([mine, mine.new_zeros(largest - mine.numel())])
        level = into is not None and len(set(sizes)) == 1
        gathered = into.view(-1) if into is not None and level else mine.new_empty(self.world * largest)
        # The name that torch gives it since 2.13, and the one that it had before.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        all_gather(gathered.view(torch.uint8), mine.view(torch.uint8), group=self.group)
        parts = [
            part[:size].view(shape)
            for part, size, shape in zip(gathered.view(self.world, largest), sizes, shapes, strict=True)
        ]
        if into is None or level:
            return parts
        places = parts_of(into, shapes)
        for place, part in zip(places, parts, strict=True):
            place.copy_(part)
        return places

    def _all_reduce(self, verb: str, x: Tensor, reuse: bool = False) -> Tensor:
        if self._carrier(x.device) != "nccl":
            return super()._all_reduce(verb, x)
        self._check_in()
        if x.dtype in (torch.float16, torch.bfloat16):  # NCCL would round at every rank; here sums round once
            total = x.detach().float().contiguous()
        else:
            total = (
                x.detach() if reuse and x.is_contiguous() else x.detach().clone(memory_format=torch.contiguous_format)
            )
        dist.all_reduce(total, group=self.group)
        return total.to(x.dtype)

    def _reduce_scatter(self, verb: str, parts: Sequence[Tensor]) -> Tensor:
        own = parts[self.rank]
        if self._carrier(own.device) != "nccl" or len({part.shape for part in parts}) > 1:
            return super()._reduce_scatter(verb, parts)
        self._check_in()
        total = torch.empty_like(own, memory_format=torch.contiguous_format)
        dist.reduce_scatter(total, [part.detach().contiguous() for part in parts], group=self.group)
        return total

    def _barrier(self, verb: str) -> None:
        if "cpu" in self._carriers:
            super()._barrier(verb)
        else:
            self._check_in()
            dist.barrier(self.group)


class _Batch(Pending):
    def __init__(
        self, comm: GroupComm, verb: str, parcels: list[Parcel], works: Sequence[Waitable], *, blocking: bool
    ) -> None:
        self._comm, self._verb, self._parcels, self._works = comm, verb, parcels, works
        self._blocking = blocking

    def wait(self) -> None:
        if self._blocking:
            self._wait_on_host()
        else:
            for work in self._works:
                work.wait()
        self._parcels, self._works = [], []  # waiting again is free, and buffers can go

    def _wait_on_host(self) -> None:
        deadline = time.monotonic() + self._comm.timeout
        for i, (parcel, work) in enumerate(zip(self._parcels, self._works, strict=True)):
            left = max(deadline - time.monotonic(), 0.001)
            try:
                work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                raise self._comm.lost(self._verb, self._parcels[i:], error) from error
            parcel.unstage()


def _store_of(group: dist.ProcessGroup) -> Store:
    try:
        return group.get_group_store()
    except (AttributeError, RuntimeError):  # a group that was made without telling its store
        return dist.distributed_c10d._get_process_group_store(group)


def _essence(error: Exception) -> str:
    """What the backend says, without the line of its source and the advice that it adds."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+\.cc:\d+\] ", "", text).partition(". This is typically")[0]
