"""What a recurrent layer costs over ranks: its program, the load of every rank, its peak memory.

Messages come from `plan.recurrent`, which the executor follows. `ContextParallel.explain_recurrent`, the ranking of
prefill plans and `attnmesh simulate` read the program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from attnmesh.core import ranges
from attnmesh.core.layouts import Layout, Zigzag
from attnmesh.ops.recurrent.chunked import CHUNK
from attnmesh.ops.recurrent.layer import Form, Recurrence, RecurrentLayer
from attnmesh.ops.recurrent.layers import (
    RWKV7,
    GatedDeltaRule,
    KimiDeltaAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    ShortConvolution,
)
from attnmesh.plan.recurrent import HaloPlan, ScanPlan, SegmentSizes, halo_plan, runs, scan_plan
from attnmesh.planner.auto import brief
from attnmesh.planner.cost import Cost, cost
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.program import (
    Exchange,
    Floats,
    Ints,
    Kernels,
    Load,
    Messages,
    Program,
    Round,
    all_to_all,
    program_loads,
)
from attnmesh.planner.sizes import copy
from attnmesh.utils.text import counted, readable_bytes, readable_seconds
from attnmesh.utils.validation import check_bool, check_count, check_type

KINDS: dict[str, type[RecurrentLayer]] = {
    "gated_delta_rule": GatedDeltaRule, "kimi_delta_attention": KimiDeltaAttention, "mamba2": Mamba2, "mamba1": Mamba1,
    "lightning_attention": LightningAttention, "rwkv7": RWKV7, "short_convolution": ShortConvolution,
}  # fmt: skip
"""The kinds of recurrent layers, by the names that commands take."""

BACKWARD = 3
"""Operations of a backward, in forwards: two products for each one of the forward, which is computed again."""


@dataclass(frozen=True)
class RecurrentShape:
    """The sizes of a recurrent layer, all but its positions.

    Attributes:
        kind: the class of the layer.
        batch: sequences.
        heads: heads of the values; channels of Mamba-1 and of a convolution.
        groups: heads of the keys.
        key_dim: rows of a state; W - 1 of a convolution over W positions.
        value_dim: columns of a state.
        itemsize: bytes per element of the inputs.
        sum_itemsize: bytes per element of a state.

    Examples:
        >>> from attnmesh.planner.recurrent import RecurrentShape
        >>> shape = RecurrentShape(am.recurrent.Mamba2, 1, heads=128, groups=8, key_dim=128, value_dim=64)
        >>> shape.state_bytes  # of one sequence
        4194304
    """

    kind: type[RecurrentLayer]
    batch: int
    heads: int
    groups: int
    key_dim: int
    value_dim: int
    itemsize: int = 2
    sum_itemsize: int = 4

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "groups", "key_dim", "value_dim", "itemsize", "sum_itemsize"):
            check_count(name, getattr(self, name))

    @staticmethod
    def of(layer: RecurrentLayer) -> RecurrentShape:
        """The shape of a layer with inputs."""
        sizes, itemsize = layer._check(), getattr(layer, layer._OUTPUT).element_size()
        dims = sizes.batch, sizes.heads, sizes.groups, sizes.key_dim, sizes.value_dim
        return RecurrentShape(type(layer), *dims, itemsize, layer.compute_dtype.itemsize)

    @property
    def state_bytes(self) -> int:
        """The bytes of the states of all sequences."""
        return self.batch * self.heads * self.key_dim * self.value_dim * self.sum_itemsize

    @property
    def form(self) -> Form:
        """The form of the transition of a recurrence."""
        assert issubclass(self.kind, Recurrence)
        return self.kind._FORM

    @property
    def segment(self) -> SegmentSizes:
        """The bytes of a segment per head."""
        form = {"scalar": 1, "diagonal": self.key_dim, "dense": self.key_dim**2}[self.form]
        one = self.batch * self.sum_itemsize
        return SegmentSizes(one * form, one * self.key_dim * self.value_dim)

    @property
    def input_row(self) -> int:
        """The bytes of all inputs of a position."""
        return sum(map(self._elements, self.kind._DIMS)) * self.itemsize

    @property
    def output_row(self) -> int:
        """The bytes of the output of a position."""
        return self._elements(self.kind._OUTPUT) * self.itemsize

    def _elements(self, name: str) -> int:
        """The elements of an input of one position; 0 for weights."""
        words = self.kind._DIMS[name].split()
        return math.prod(getattr(self, word) for word in words if word != "seq") if "seq" in words else 0

    @property
    def operations(self) -> float:
        """Operations of a position, in chunks: products within the chunk, of each head with the state, and back."""
        k, v, kind = self.key_dim, self.value_dim, self.kind
        if kind is Mamba1:
            return 8.0 * self.batch * self.heads * k
        within, state = 2.0 * CHUNK, 2.0 * k * v
        solved = CHUNK * (k + v)
        if kind is RWKV7:  # two keys are written and two read
            per_head, per_group = 4 * within * k + 2 * within * v + solved + 4 * state, 0.0
        elif kind is KimiDeltaAttention:
            per_head, per_group = 2 * within * k + within * v + solved + 3 * state, 0.0
        elif kind is GatedDeltaRule:
            per_head, per_group = within * v + solved + 3 * state, 2 * within * k
        else:
            per_head, per_group = within * v + 2 * state, within * k
        return self.batch * (self.heads * per_head + self.groups * per_group)

    @property
    def segment_operations(self) -> float:
        """Operations of a position for the segment of its range, besides the operations of its outputs."""
        k, v = self.key_dim, self.value_dim
        per_head = 2.0 * k * k + 2.0 * k * k * (k + v) / CHUNK if self.form == "dense" else 2.0 * k * v / CHUNK
        return self.batch * self.heads * per_head


@dataclass(frozen=True)
class RecurrentWorkload:
    """A recurrent layer over ranks.

    Attributes:
        shape: the kind and the sizes of the layer.
        length: positions of the whole sequence.
        world: ranks.
        ranks_per_node: on a mesh of one dimension, the world size.
        layout: which rank holds which positions.
        final: whether all ranks get the final state.

    Examples:
        >>> from attnmesh.planner.recurrent import RecurrentShape, RecurrentWorkload, recurrent_loads
        >>> shape = RecurrentShape(am.recurrent.GatedDeltaRule, 1, heads=32, groups=16, key_dim=128, value_dim=128)
        >>> workload = RecurrentWorkload(shape, 2**18, world=8, ranks_per_node=8)
        >>> max(load.sent for load in recurrent_loads(workload, backward=False)) / 2**20  # MiB
        10.0
    """

    shape: RecurrentShape
    length: int
    world: int
    ranks_per_node: int
    layout: Layout = Zigzag()  # noqa: RUF009  (immutable)
    final: bool = False

    def __post_init__(self) -> None:
        check_type("shape", self.shape, RecurrentShape)
        check_count("length", self.length)
        for name in ("world", "ranks_per_node"):
            check_count(name, getattr(self, name), least=1)
        check_bool(final=self.final)

    @property
    def rows(self) -> Ints:
        """The positions that every rank holds."""
        return np.array(list(map(ranges.size, runs(self.layout, self.length, self.world))), dtype=np.int64)

    @property
    def scan(self) -> ScanPlan:
        """The plan of the scan of a recurrence."""
        shape = self.shape
        sizes = shape.heads, shape.segment, shape.value_dim
        return scan_plan(self.layout, self.length, self.world, *sizes, self.final)

    @property
    def halos(self) -> HaloPlan:
        """The plan of a convolution."""
        return halo_plan(self.layout, self.length, self.world, self.shape.key_dim, self.final)

    @property
    def communicates(self) -> bool:
        """Whether ranks send anything."""
        return self.world > 1 and self.length > 0


class RankBytes(NamedTuple):
    """Bytes per head in the exchanges of a scan, entry r is rank r's; and the heads that it scans."""

    given: Ints
    returned: Ints
    heads: Ints

    @staticmethod
    def of(plan: ScanPlan, *, backward: bool) -> RankBytes:
        """The bytes of a forward or a backward."""
        ranks = range(plan.world)
        given, returned = (
            [each(rank, backward=backward) for rank in ranks] for each in (plan.given, plan.returned)
        )  # fmt: skip
        return RankBytes(*(np.array(x, dtype=np.int64) for x in (given, returned, list(map(len, plan.heads)))))

    def exchanges(self, plan: ScanPlan, ranks_per_node: int) -> list[Exchange]:
        """The exchanges, in order."""
        there = all_to_all([(self.given, self.heads)], plan.world, ranks_per_node)
        if plan.gathered:
            return [there]
        return [there, all_to_all([(self.returned, self.heads)], plan.world, ranks_per_node).returned()]


def recurrent_program(workload: RecurrentWorkload, *, backward: bool) -> Program:
    """The program of all ranks, forward or backward.

    Examples:
        >>> from attnmesh.planner.recurrent import RecurrentShape, RecurrentWorkload, recurrent_program
        >>> shape = RecurrentShape(am.recurrent.Mamba2, 1, heads=128, groups=8, key_dim=128, value_dim=64)
        >>> program = recurrent_program(RecurrentWorkload(shape, 2**18, 8, 8), backward=False)
        >>> [each.name for each in program.rounds()]
        ['segments', 'exchange of segments', 'scan', 'exchange of states', 'outputs']
    """
    check_type("workload", workload, RecurrentWorkload)
    check_bool(backward=backward)
    make = _convolution if workload.shape.kind is ShortConvolution else _recurrence
    return Program(workload.shape.kind.__name__, workload.world, lambda: make(workload, backward=backward))


def recurrent_loads(workload: RecurrentWorkload, *, backward: bool) -> list[Load]:
    """What every rank computes and sends."""
    return program_loads(recurrent_program(workload, backward=backward), workload.ranks_per_node)


def recurrent_cost(workload: RecurrentWorkload, cluster: Cluster, *, backward: bool) -> Cost:
    """The cost of one direction."""
    nodes = cluster.with_ranks_per_node(workload.ranks_per_node)
    return cost(recurrent_program(workload, backward=backward), nodes)


def _recurrence(workload: RecurrentWorkload, *, backward: bool) -> Iterator[Round]:
    shape, rows = workload.shape, workload.rows.astype(np.float64)
    outputs = _kernels(rows * shape.operations, backward)
    if not workload.communicates:
        yield Round("outputs", work=(outputs,))
        return
    plan = workload.scan
    sizes = RankBytes.of(plan, backward=backward)
    segments = _kernels(_segment_rows(plan) * shape.segment_operations, backward)
    scan = _scan(plan, sizes.heads, shape)
    names = ("gradients of incoming states", "gradients of states") if backward else ("segments", "states")
    exchanges = sizes.exchanges(plan, workload.ranks_per_node)
    yield Round("outputs", work=(outputs,)) if backward else Round("segments", work=(segments,))
    for name, exchange in zip(names, exchanges, strict=False):
        yield Round(f"exchange of {name}", {name: exchange}, (), (name,))
        if name == names[0]:
            yield Round("scan", work=(scan,))
    yield Round("segments", work=(segments,)) if backward else Round("outputs", work=(outputs,))


def _kernels(operations: Floats, backward: bool) -> Kernels:
    calls = np.where(operations > 0, 1.0, 0.0)
    return (
        Kernels("recurrent backward", BACKWARD * operations, calls)
        if backward
        else Kernels("recurrent", operations, calls)
    )


def _segment_rows(plan: ScanPlan) -> Floats:
    """The positions of every rank whose segments are sent, entry r is rank r's."""
    rows = np.zeros(plan.world)
    for number in plan.scanned:
        if number:
            rows[plan.segments[number].rank] += len(plan.segments[number].positions)
    return rows


def _scan(plan: ScanPlan, heads: Ints, shape: RecurrentShape) -> Kernels:
    """The scan of a rank's heads over all ranges: small products, one after another, or additions of states."""
    count = float(len(plan.scanned))
    if shape.form == "dense":
        product = 2.0 * shape.batch * shape.key_dim**2 * shape.value_dim / plan.parts
        size: Floats = count * product * heads.astype(np.float64)
        return Kernels("matmul", size, np.where(heads > 0, count, 0.0))
    return copy(count * plan.sizes.state * heads, calls=int(count))


def _convolution(workload: RecurrentWorkload, *, backward: bool) -> Iterator[Round]:
    shape, rows = workload.shape, workload.rows
    compute = Round("outputs", work=(copy(rows * (shape.output_row + shape.input_row * backward)),))
    if not workload.communicates:
        yield compute
        return
    halos = workload.halos
    row = shape.batch * shape.heads * (shape.sum_itemsize if backward else shape.itemsize)
    messages = Messages.of((source, target, n * row) for (source, target), n in halos.sent.items() if source != target)
    if backward:
        name, messages = "gradients of halos", messages.returned()
    else:
        name = "halos"
    exchange = Round(f"exchange of {name}", {name: messages}, (), (name,))
    yield from (compute, exchange) if backward else (exchange, compute)


def recurrent_memory(workload: RecurrentWorkload, *, backward: bool) -> Ints:
    """The memory that a layer allocates besides its inputs, in bytes by rank.

    Forward: the outputs and what ranks exchange. Backward: the gradients of the inputs, what ranks exchange and what
    the forward saved of it. What kernels, or chunks in PyTorch, use for themselves is not counted.
    """
    shape, rows = workload.shape, workload.rows
    results: Ints = rows * (shape.input_row if backward else shape.output_row)
    if not workload.communicates or shape.kind is ShortConvolution:
        return results
    plan = workload.scan
    sizes, size, count = RankBytes.of(plan, backward=backward), plan.sizes, len(plan.scanned)
    heads = shape.heads * plan.parts
    given, returned = heads * sizes.given, heads * sizes.returned
    received, sent_back = sizes.heads * sizes.given.sum(), sizes.heads * sizes.returned.sum()
    arrays = sizes.heads * (max(0, count - 1) * size.transition + count * size.state)
    states = sizes.heads * count * size.state
    if not backward:
        into = heads * size.state * np.array([len(plan.into(rank)) + plan.final for rank in range(plan.world)])
        first = 2 * given + received + arrays
        last = given + arrays + states + into + (0 if plan.gathered else sent_back + returned)
        return np.asarray(results + np.maximum(first, last), dtype=np.int64)
    saved = RankBytes.of(plan, backward=False)
    kept = heads * saved.given + given + sizes.heads * max(0, count - 1) * size.transition
    out = heads * size.state * np.array([len(plan.out(rank)) for rank in range(plan.world)])
    exchanged = given + received + 2 * states + (0 if plan.gathered else sent_back + returned)
    return np.asarray(results + kept + np.maximum(exchanged, heads * saved.given) + out, dtype=np.int64)


@dataclass(frozen=True)
class RecurrentExplanation:
    """The plan of a recurrent layer over ranks. `str()` prints it as a table.

    Attributes:
        workload: the layer and its ranks.
        kernel: what computes it.
        forward, backward: the load of every rank.
        memory: peak bytes by rank, forward and backward, see `recurrent_memory`.
        seconds: estimates for the cluster, forward and backward.
        cluster: what times are estimated for.
    """

    workload: RecurrentWorkload
    kernel: str
    forward: list[Load]
    backward: list[Load]
    memory: tuple[Ints, Ints]
    seconds: tuple[float, float]
    cluster: Cluster

    @property
    def rounds(self) -> int:
        """The exchanges in each direction."""
        if not self.workload.communicates:
            return 0
        return 1 if self.workload.shape.kind is ShortConvolution else self.workload.scan.rounds

    def rows(self) -> list[dict[str, str]]:
        """What every rank holds, computes, sends and allocates, as rows of a table."""
        work, rows = self.workload, []
        held = runs(work.layout, work.length, work.world)
        for rank, (there, back) in enumerate(zip(self.forward, self.backward, strict=True)):
            figures = {
                "GFLOP forward": there.flops / 1e9, "GFLOP backward": back.flops / 1e9,
                "MB sent forward": there.sent / 1e6, "MB sent backward": back.sent / 1e6,
                "MB peak forward": self.memory[0][rank] / 1e6, "MB peak backward": self.memory[1][rank] / 1e6,
            }  # fmt: skip
            numbers = {name: f"{x:.4g}" for name, x in figures.items()}
            rows.append({"rank": str(rank), "positions": brief(held[rank]), **numbers})
        return rows

    def __str__(self) -> str:
        rows = [list(row.values()) for row in self.rows()]
        repeated = {"GFLOP backward", "MB sent backward", "MB peak backward"}
        rows.insert(0, ["backward" if name in repeated else name for name in self.rows()[0]])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        times = " forward, ".join(readable_seconds(seconds) for seconds in self.seconds)
        world, kind = self.workload.world, self.workload.shape.kind.__name__
        return "\n".join([
            f"{kind} over {counted(world, 'rank')}, {self.kernel}", *table, *self._exchange(),
            f"estimated for {self.cluster.device.name}: {times} backward",
        ])  # fmt: skip

    def _exchange(self) -> list[str]:
        work = self.workload
        if not work.communicates:
            return []
        if work.shape.kind is ShortConvolution:
            return [f"one exchange in each direction: the last {work.shape.key_dim} inputs before each range"]
        state = f"a state is {readable_bytes(work.shape.state_bytes)}"
        if work.scan.gathered:
            return [f"one all-gather in each direction: every rank scans all heads; {state}"]
        divided = "heads" if work.scan.parts == 1 else f"heads, each in {work.scan.parts} parts,"
        return [f"two all-to-alls in each direction: ranks divide the {divided} for the scan; {state}"]


def explain_recurrent(workload: RecurrentWorkload, kernel: str, cluster: Cluster) -> RecurrentExplanation:
    """The explanation of a layer."""
    forward, backward = (recurrent_loads(workload, backward=way) for way in (False, True))
    memory = recurrent_memory(workload, backward=False), recurrent_memory(workload, backward=True)
    seconds = [recurrent_cost(workload, cluster, backward=way).seconds for way in (False, True)]
    return RecurrentExplanation(workload, kernel, forward, backward, memory, (seconds[0], seconds[1]), cluster)
