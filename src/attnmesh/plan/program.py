"""What ranks do, round by round, as arrays over ranks: the form in which a plan is costed and simulated.

In every round a rank starts some exchanges, computes, and then waits for some exchanges that it takes part in (of this
round or of earlier ones) before it goes on to the next round. That is how executors are written:

    ring            round s   starts: the next keys     computes on these keys   waits: the next keys
    all-gather      round g   starts: group g's keys    computes on group g-1    waits: group g's keys

Rounds are made as they are asked for: thousands of ranks have thousands of rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from attnmesh.planner.hardware import Device, Floats, Kind

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Messages:
    """The messages of one exchange: the i-th goes from rank `source[i]` to rank `target[i]`. None is empty."""

    source: Ints
    target: Ints
    nbytes: Ints

    @staticmethod
    def of(messages: Iterable[tuple[int, int, int]]) -> Messages:
        """From (source, target, bytes); empty ones are left out, as they are not sent."""
        kept = [message for message in messages if message[2]]
        columns = np.array(kept, dtype=np.int64).reshape(-1, 3).T
        return Messages(*columns)

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class Bundle:
    """An exchange of so many messages that only their sums are kept: entry r is rank r's.

    Ranks of one `group` all wait for one another, as in a collective: nobody has everything before the last one came.
    """

    group: Ints
    near_out: Ints  # bytes to ranks of the same node
    near_in: Ints
    far_out: Ints  # bytes to other nodes
    far_in: Ints
    sends: Ints  # messages


@dataclass(frozen=True)
class Kernels:
    """What every rank computes with one kind of kernel: entry r is rank r's."""

    kind: Kind
    size: Floats  # of all calls together, in the unit of the kind
    calls: Floats
    squares: tuple[Floats, Floats] | None = None  # size and calls of the causal squares among them, where known
    reads: Floats | None = None  # bytes that have to be read meanwhile, such as weights: the longer of both counts
    lanes: int = 1  # streams that calls take in turn on a GPU: one fills the device while another's last wave drains
    beside: bool = False  # whether it runs on another stream than the rest of its round, and hides behind it

    def seconds(self, device: Device) -> Floats:
        """What every rank takes for it on a device of its own."""
        lanes = self.lanes if device.cores is None else 1
        if self.squares is None:
            computed = device.seconds(self.kind, self.size, self.calls, lanes=lanes)
        else:
            size, calls = self.squares
            rest = device.seconds(self.kind, self.size - size, self.calls - calls, lanes=lanes)
            computed = rest + device.seconds(self.kind, size, calls, squares=True, lanes=lanes)
        if self.reads is None:
            return computed
        return np.maximum(computed, device.seconds("decode", self.reads, self.calls))

    def times(self, share: float) -> Kernels:
        """As many calls of another size."""
        squares = None if self.squares is None else (self.squares[0] * share, self.squares[1])
        return replace(self, size=self.size * share, squares=squares)


@dataclass(frozen=True)
class Round:
    """One round of all ranks."""

    name: str
    starts: Mapping[str, Messages | Bundle] = field(default_factory=dict)  # by name, unique in a program
    work: tuple[Kernels, ...] = ()  # one after the other
    waits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """What `world` ranks do. `rounds()` makes the rounds anew each time."""

    name: str
    world: int
    make: Callable[[], Iterator[Round]]

    def rounds(self) -> Iterator[Round]:
        """The rounds, in order."""
        return self.make()
