"""The work and communication of all ranks, round by round, as arrays over ranks: what is costed and simulated.

In every round a rank starts some exchanges, computes, and then waits for some exchanges that it takes part in (of this
round or of earlier ones) before it continues with the next round. That is how the executors are written:

    ring            round s   starts: the next keys     computes on these keys   waits: the next keys
    all-gather      round g   starts: group g's keys    computes on group g-1    waits: group g's keys

Rounds are generated lazily: thousands of ranks have thousands of rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

KernelKind = Literal[
    "attention", "attention backward", "matmul", "copy", "relayout", "decode", "sparse", "sparse backward", "indexer",
    "recurrent", "recurrent backward",
]  # fmt: skip
"""What a kernel does. A relayout is a copy that changes the order of dimensions, as messages need it. Sizes are
operations, except for `copy`, `relayout` and `decode`: bytes read and written."""

KERNEL_KINDS: tuple[KernelKind, ...] = get_args(KernelKind)
SIZED_IN_BYTES: frozenset[KernelKind] = frozenset({"copy", "relayout", "decode"})

MAX_LISTED_MESSAGES = 1 << 18
"""An exchange of more messages than this keeps only their totals per rank."""


@dataclass(frozen=True)
class Messages:
    """The messages of one exchange: the i-th goes from rank `source[i]` to rank `target[i]`. None is empty."""

    source: Ints
    target: Ints
    nbytes: Ints  # or rows, until they are `scaled`

    @staticmethod
    def of(messages: Iterable[tuple[int, int, int]]) -> Messages:
        """From (source, target, bytes); empty messages are left out, as they are not sent."""
        return Messages.sized(*np.array(list(messages), dtype=np.int64).reshape(-1, 3).T)

    @staticmethod
    def sized(source: Ints, target: Ints, nbytes: Ints) -> Messages:
        """From arrays; empty messages are left out."""
        sent = nbytes > 0
        return Messages(source[sent], target[sent], nbytes[sent])

    def __len__(self) -> int:
        return len(self.source)

    def scaled(self, row_bytes: Ints) -> Messages:
        """The messages of these rows; a row is `row_bytes[r]` bytes on the rank r that sends it."""
        return Messages.sized(self.source, self.target, self.nbytes * row_bytes[self.source])

    def returned(self) -> Messages:
        """The messages that carry the same bytes back, from the ranks that received them."""
        return Messages(self.target, self.source, self.nbytes)

    def sent(self, world: int) -> Ints:
        """Bytes or rows that every rank sends."""
        return np.bincount(self.source, self.nbytes, world).astype(np.int64)


@dataclass(frozen=True)
class MessageTotals:
    """An exchange of so many messages that only their totals are kept: entry r is rank r's.

    Ranks of one `group` all wait for one another, as in a collective.
    """

    group: Ints
    intra_node_out: Ints  # bytes to ranks of the same node, or rows until they are `scaled`
    intra_node_in: Ints
    inter_node_out: Ints  # bytes to other nodes
    inter_node_in: Ints
    sends: Ints  # messages

    def scaled(self, row_bytes: Ints) -> MessageTotals:
        """The totals of these rows in bytes. All ranks of a group must have the same row size."""
        intra = self.intra_node_out * row_bytes, self.intra_node_in * row_bytes
        inter = self.inter_node_out * row_bytes, self.inter_node_in * row_bytes
        return MessageTotals(self.group, *intra, *inter, self.sends)

    def returned(self) -> MessageTotals:
        """The totals of the same bytes on the way back."""
        intra, inter = (self.intra_node_in, self.intra_node_out), (self.inter_node_in, self.inter_node_out)
        return MessageTotals(self.group, *intra, *inter, self.sends)

    def sent(self, world: int) -> Ints:
        """Bytes or rows that every rank sends."""
        return self.intra_node_out + self.inter_node_out


Exchange = Messages | MessageTotals


def all_to_all(parts: Sequence[tuple[Ints, Ints]], ranks: int, ranks_per_node: int) -> Exchange:
    """The exchange among every `ranks` consecutive ranks. Each part: the rows of one rank, the bytes of a row of the
    other's; entry r is rank r's."""
    world = len(parts[0][0])
    if world * (ranks - 1) > MAX_LISTED_MESSAGES:
        return _totals(parts, ranks, ranks_per_node)
    group = np.arange(world, dtype=np.int64) // ranks
    source = np.repeat(np.arange(world, dtype=np.int64), ranks)
    target = np.repeat(group * ranks, ranks) + np.tile(np.arange(ranks), world)
    kept = source != target
    source, target = source[kept], target[kept]
    nbytes = sum((rows[source] * row[target] for rows, row in parts), np.zeros(len(source), np.int64))
    return Messages.sized(source, target, nbytes)


def _totals(parts: Sequence[tuple[Ints, Ints]], ranks: int, ranks_per_node: int) -> MessageTotals:
    world = len(parts[0][0])
    group, node = np.arange(world) // ranks, np.arange(world) // ranks_per_node

    def others(values: Ints, by: Ints) -> Ints:
        return np.bincount(by, values)[by].astype(np.int64) - values

    # Ranks of a node are consecutive, so a node is part of a group or the other way around.
    near = node if ranks_per_node < ranks else group
    zeros = np.zeros(world, np.int64)
    intra_out = sum((rows * others(row, near) for rows, row in parts), zeros)
    intra_in = sum((row * others(rows, near) for rows, row in parts), zeros)
    inter_out = sum((rows * others(row, group) for rows, row in parts), zeros) - intra_out
    inter_in = sum((row * others(rows, group) for rows, row in parts), zeros) - intra_in
    return MessageTotals(group, intra_out, intra_in, inter_out, inter_in, np.full(world, ranks - 1, np.int64))


@dataclass(frozen=True)
class Kernels:
    """What every rank computes with one kind of kernel: entry r is rank r's."""

    kind: KernelKind
    size: Floats  # of all calls together, in the unit of the kind
    calls: Floats
    causal: tuple[Floats, Floats] | None = None  # size and calls of the causal squares among them, where known
    bytes_read: Floats | None = None  # read at the same time, such as weights: the longer of both counts
    streams: int = 1  # that calls alternate between on a GPU: one fills the device while another's last wave drains
    overlapped: bool = False  # whether it runs on another stream than the rest of its round, and hides behind it

    def scaled(self, share: float) -> Kernels:
        """The same number of calls, each `share` times as large."""
        causal = None if self.causal is None else (self.causal[0] * share, self.causal[1])
        return replace(self, size=self.size * share, causal=causal)


@dataclass(frozen=True)
class Round:
    """One round of all ranks."""

    name: str
    starts: Mapping[str, Exchange] = field(default_factory=dict)  # by name, unique in a program
    work: tuple[Kernels, ...] = ()  # in order
    waits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """What `world` ranks do. `rounds()` generates the rounds anew each time."""

    name: str
    world: int
    make: Callable[[], Iterator[Round]]

    def rounds(self) -> Iterator[Round]:
        """The rounds, in order."""
        return self.make()


def concurrent_rounds(programs: Sequence[Iterator[Round]]) -> Iterator[Round]:
    """The rounds of programs that have no rank in common, merged. A rank with nothing to do passes a round at once."""
    for rounds in zip_longest(*programs):
        present = [part for part in rounds if part is not None]
        yield Round(
            present[0].name,
            {name: messages for part in present for name, messages in part.starts.items()},
            tuple(kernels for part in present for kernels in part.work),
            tuple(name for part in present for name in part.waits),
        )


@dataclass(frozen=True)
class Load:
    """What one rank computes and sends in one direction, forward or backward."""

    flops: int = 0
    intra_node: int = 0  # bytes sent within the node
    inter_node: int = 0  # bytes sent to other nodes

    @property
    def sent(self) -> int:
        """All bytes sent."""
        return self.intra_node + self.inter_node


def imbalance(loads: Sequence[Load]) -> float:
    """Work of the busiest rank over the mean."""
    work = [load.flops for load in loads]
    return max(work) * len(work) / sum(work) if sum(work) else 1.0


def program_loads(program: Program, ranks_per_node: int) -> list[Load]:
    """The load of every rank over a whole program."""
    counter = LoadCounter(program.world, ranks_per_node)
    for round_ in program.rounds():
        counter.add(round_)
    return counter.loads()


class LoadCounter:
    """Adds up the operations and bytes of rounds as they pass."""

    def __init__(self, world: int, ranks_per_node: int) -> None:
        self.ranks_per_node, self.rounds = ranks_per_node, 0
        self.flops = np.zeros(world)
        self.intra_node, self.inter_node = np.zeros(world, dtype=np.int64), np.zeros(world, dtype=np.int64)

    def add(self, round_: Round) -> None:
        """Count one round."""
        self.rounds += 1
        for kernels in round_.work:
            if kernels.kind not in SIZED_IN_BYTES:
                self.flops += kernels.size
        for messages in round_.starts.values():
            if isinstance(messages, MessageTotals):
                self.intra_node += messages.intra_node_out
                self.inter_node += messages.inter_node_out
                continue
            within = messages.source // self.ranks_per_node == messages.target // self.ranks_per_node
            np.add.at(self.intra_node, messages.source[within], messages.nbytes[within])
            np.add.at(self.inter_node, messages.source[~within], messages.nbytes[~within])

    def counting(self, program: Program) -> Program:
        """The same program, counted while it runs: rounds of thousands of ranks are not generated twice."""

        def counted() -> Iterator[Round]:
            for round_ in program.rounds():
                self.add(round_)
                yield round_

        return Program(program.name, program.world, counted)

    def loads(self) -> list[Load]:
        """The load of every rank so far."""
        columns = zip(self.flops, self.intra_node, self.inter_node, strict=True)
        return [Load(round(flops), int(intra), int(inter)) for flops, intra, inter in columns]

    def maximum(self) -> Load:
        """The maximum over ranks, of each quantity by itself."""
        return Load(*(int(column.max(initial=0)) for column in (self.flops, self.intra_node, self.inter_node)))
