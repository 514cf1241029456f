"""Two CUDA lanes without a GPU: rings are run on the CPU over streams that only keep vector clocks.

Every access to a key buffer, and every use of memory that a sum has freed, is checked against what happened before it.
Two accesses that no event orders are a race, whether or not a GPU would ever have lost it.
"""

from contextlib import contextmanager

import pytest
import torch

from attnmesh import Causal, ContextParallel, Contiguous, Documents, Full, SlidingWindow, Striped, Zigzag
from attnmesh.comm.base import Comm, Finished
from attnmesh.ops import merge
from attnmesh.ops import merge as accumulate
from attnmesh.ops.dense.aten import Aten
from attnmesh.parallel import ring
from attnmesh.plan.ring import Joined
from helpers.cases import first, sweep

HEAD_DIM, ROWS = 16, 8
MASKS = [Causal(), Full(), SlidingWindow(11), Causal() & Documents([3 * ROWS, 5 * ROWS]), Documents([2] * 4 * ROWS)]


class Stream:
    """What a stream knows to have happened, on itself and, through events, on others."""

    device_index = cuda_stream = 0

    def __init__(self, name: str) -> None:
        self.name, self.clock = name, {}

    def tick(self) -> tuple[str, int]:
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.name, self.clock[self.name]

    def knows(self, moment: tuple[str, int]) -> bool:
        return self.clock.get(moment[0], 0) >= moment[1]

    def record_event(self) -> dict[str, int]:
        return dict(self.clock)

    def wait_event(self, event: dict[str, int]) -> None:
        for name, time in event.items():
            self.clock[name] = max(self.clock.get(name, 0), time)


class Device:
    """Stands in for torch.cuda in `ops.merge`, and remembers who touched what."""

    def __init__(self) -> None:
        self.main = Stream("main")
        self.streams = (Stream("stream A"), Stream("stream B"))
        self.stack = [self.main]
        self.races: set[str] = set()
        self._accesses: dict[int, list[tuple[bool, tuple[str, int], str]]] = {}
        self._makers: dict[int, tuple[torch.Tensor, Stream]] = {}
        self._freed: list[tuple[Stream, tuple[str, int]]] = []

    def current_stream(self) -> Stream:
        return self.stack[-1]

    @contextmanager
    def stream(self, stream: Stream):
        self.stack.append(stream)
        yield
        self.stack.pop()

    def touch(self, tensor: torch.Tensor, what: str, *, writes: bool) -> None:
        stream = self.current_stream()
        now = stream.tick()
        before = self._accesses.setdefault(tensor.untyped_storage().data_ptr(), [])
        for wrote, moment, earlier in before:
            if (writes or wrote) and not stream.knows(moment):
                self.races.add(f"{what} on {stream.name} does not wait for: {earlier} on {moment[0]}")
        before.append((writes, now, what))

    def made(self, tensor: torch.Tensor) -> None:
        self._makers[id(tensor)] = (tensor, self.current_stream())

    def summed(self, tensors: list[torch.Tensor]) -> None:
        """Sums free what they have read: its maker's stream may use the memory again from now on."""
        now = self.current_stream().tick()
        self._freed += [(self._makers[id(x)][1], now) for x in tensors if id(x) in self._makers]

    def allocates(self) -> None:
        stream = self.current_stream()
        stream.tick()
        for maker, reader in self._freed:
            if maker is stream and not stream.knows(reader):
                self.races.add(f"{stream.name} may use memory again that a sum on {reader[0]} still reads")


class Recorder(Comm):
    """One rank alone, whose exchanges touch the buffers they send and overwrite those they receive into."""

    def __init__(self, rank: int, world: int, device: Device) -> None:
        super().__init__(rank, world, timeout=10)
        self.device = device

    def _exchange(self, verb, sends, recvs):
        for tensor, _ in sends:
            self.device.touch(tensor, "a send", writes=False)
        for tensor, _ in recvs:
            tensor.normal_()
            self.device.touch(tensor, "a receive", writes=True)
        return Finished()

    def _compare(self, signature):
        return {self.rank: signature}


@pytest.fixture
def device(monkeypatch) -> Device:
    device = Device()

    class FakeTorch:
        cuda = device

        def __getattr__(self, name):
            return getattr(torch, name)

    monkeypatch.setattr(merge, "torch", FakeTorch())
    monkeypatch.setattr(merge, "_streams", lambda *_: device.streams)

    def on_two_streams(stages, device):
        return sum(len(patch.blocks) for patch, backend in stages if backend is not None)

    monkeypatch.setattr(ring, "_parts_on_two_streams", on_two_streams)
    for name, method in (("forward", Aten.forward), ("backward", Aten.backward)):

        def compute(self, call, *rest, original=method, name=name):
            device.touch(call.k, f"{name} reads keys", writes=False)
            device.allocates()
            original(self, call, *rest)

        monkeypatch.setattr(Aten, name, compute)
    for kind in (accumulate.StateAccumulator, accumulate.GradAccumulator):

        def add(self, part, row=0, sequence=0, original=kind.add):
            device.made(part[0] if isinstance(part, tuple) else part)
            original(self, part, row, sequence)

        monkeypatch.setattr(kind, "add", add)
    for name, function in (("_merge_parts", accumulate._merge_parts), ("_sum_parts", accumulate._sum_parts)):

        def sum_up(total, parts, *rest, original=function):
            device.summed([part.value[0] if isinstance(part.value, tuple) else part.value for part in parts])
            return original(total, parts, *rest)

        monkeypatch.setattr(accumulate, name, sum_up)
    return device


def run_two_layers(device: Device, layout, mask, world: int, rank: int, wanted: str) -> None:
    cp = ContextParallel(Recorder(rank, world, device), layout=layout, schedule="ring")
    length = ROWS * world
    for _ in range(2):
        q, k, v = (cp.shard(torch.randn(1, 1, length, HEAD_DIM), 2) for _ in range(3))
        inputs = [x.clone().requires_grad_(name in wanted) for x, name in zip((q, k, v), "qkv", strict=True)]
        out = cp.attention(*inputs, mask=mask, length=length)
        if wanted:
            out.sum().backward()


@pytest.mark.parametrize(
    ("layout", "wanted"),
    first(
        1,
        [
            *[(Contiguous(), "kv"), (Zigzag(), "qkv"), (Zigzag(), ""), (Striped(), "q")],
            *(
                sweep(layout, wanted)
                for layout, wanted in [(Contiguous(), ""), (Contiguous(), "qkv"), (Striped(), "kv"), (Striped(), "qkv")]
            ),
        ],
    ),
    ids=str,
)
def test_no_buffer_is_overwritten_and_no_memory_reused_while_it_is_read(device, layout, wanted):
    for world in (2, 5, 8):
        for mask in MASKS if world == 8 else MASKS[:3]:
            for rank in {0, world // 2, world - 1}:
                run_two_layers(device, layout, mask, world, rank, wanted)
    assert not device.races


def test_neither_are_those_of_joined_blocks(device, monkeypatch):
    monkeypatch.setattr(ring, "joined_blocks", lambda *_: Joined(forward=4, backward=3))
    for rank in (0, 4, 7):
        run_two_layers(device, Zigzag(), Causal(), 8, rank, "qkv")
    assert not device.races


@pytest.mark.parametrize(("method", "found"), [("wait_for_last_block", "receive"), ("record_arrival", "keys")])
def test_the_replay_notices_a_wait_that_is_missing(device, monkeypatch, method, found):
    monkeypatch.setattr(merge.StreamPair, method, lambda self: None)
    run_two_layers(device, Zigzag(), Causal(), 6, 5, "qkv")
    assert any(found in race for race in device.races)


def test_the_replay_notices_memory_that_is_reused_too_early(device, monkeypatch):
    @contextmanager
    def exclusive(self):
        yield

    monkeypatch.setattr(merge.StreamPair, "exclusive", exclusive)
    run_two_layers(device, Zigzag(), Causal(), 8, 7, "")
    assert any("memory" in race for race in device.races)


def test_blocks_do_take_turns_on_two_streams(device):
    run_two_layers(device, Zigzag(), Causal(), 4, 3, "")
    assert all(stream.clock[stream.name] > 1 for stream in device.streams)
