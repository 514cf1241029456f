"""What a report says, as plain data: made from the plans that the library follows, before anything is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from attnmesh.core import ranges
from attnmesh.core.layouts import Layout
from attnmesh.core.masks import And, Documents, Mask, SlidingWindow
from attnmesh.plan.program import Load, imbalance
from attnmesh.plan.schedule import Step
from attnmesh.plan.schedules import SCHEDULES, loads, refusal, steps
from attnmesh.plan.shards import shards
from attnmesh.plan.workload import Shape, Workload
from attnmesh.planner.auto import Choice, choose_schedule
from attnmesh.planner.catalog import default_cluster
from attnmesh.planner.hardware import Cluster
from attnmesh.report.simulated import simulated
from attnmesh.report.tiles import Band, bands, pair_counts
from attnmesh.trace.timeline import Span
from attnmesh.verify.attention import Outcome

Rows = Sequence[Mapping[str, object]]
"""A table: a dictionary a row, all with the same keys."""

MOST_RANKS = 64  # more cannot be told apart
_STRIPES_SHOWN = 8  # positions a rank: a layout that deals positions out in turn goes on as it begins


@dataclass(frozen=True)
class ScheduleView:
    """A schedule as the page shows it."""

    name: str
    steps: list[Step]  # of the forward
    forward: list[Load]  # by rank
    backward: list[Load]
    simulated: list[Span]  # of the forward

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean."""
        return imbalance(self.forward)


@dataclass(frozen=True)
class Report:
    """Everything on the page."""

    workload: Workload
    length: int
    facts: Mapping[str, object]  # of the run, in words
    bands: list[Band]
    pairs: list[list[int]]  # visible in every tile: bands of queries down, of keys across
    schedules: list[ScheduleView]
    choice: Choice
    machine: str  # what the estimates are for
    timelines: Mapping[str, Sequence[Span]] = field(default_factory=dict)  # such as "simulated" and "measured"
    outcomes: Sequence[Outcome] = ()  # of checks against float64
    figures: Mapping[str, Rows] = field(default_factory=dict)

    @property
    def strip(self) -> int:
        """How many positions the strips show: all, unless ranks take them in turn."""
        dealt = any(run.step > 1 for held in self.workload.shards.queries for run in held)
        return min(self.length, _STRIPES_SHOWN * self.workload.shards.world) if dealt else self.length


def make_report(
    mask: Mask,
    layout: Layout,
    length: int,
    world: int,
    shape: Shape,
    *,
    node: int | None = None,
    device: str = "cuda",
    facts: Mapping[str, object] | None = None,
    timelines: Mapping[str, Sequence[Span]] | None = None,
    outcomes: Sequence[Outcome] = (),
    figures: Mapping[str, Rows] | None = None,
) -> Report:
    """A report on attention over `length` positions spread over `world` ranks, `node` of them to a node.

    `device` is the kind of machine that schedules are ranked for. `facts` are shown first, beside what is asked here.
    """
    _check(length, world, shape)
    mask.check(length)
    workload = Workload(shards(mask, layout, length, world), shape, _ranks_a_node(world, node))
    able = [name for name in SCHEDULES if refusal(name, workload.shards, workload.ranks_per_node) is None]
    cluster = default_cluster(device)
    choice = choose_schedule(workload, cluster)
    cut = bands(workload.shards.queries)
    return Report(
        workload=workload,
        length=length,
        facts={
            "ranks": _ranks(world, workload.ranks_per_node), "length": f"{length:,} tokens", "layout": in_words(layout),
            "mask": in_words(mask),
            "schedule": f"{choice.schedule} (the fastest by estimate)",
            "heads": f"{shape.q_heads} query, {shape.kv_heads} key/value, of {shape.head_dim}",
            "batch": shape.batch, **(facts or {}),
        },
        bands=cut,
        pairs=pair_counts(workload.shards, cut, cut),
        schedules=[_view(name, workload, cluster) for name in able],
        choice=choice,
        machine=cluster.device.name,
        timelines=timelines or {},
        outcomes=outcomes,
        figures=figures or {},
    )  # fmt: skip


def default_node(world: int) -> int:
    """How many ranks a node has unless it is said: the middle divisor, so that both levels have something to do."""
    divisors = [n for n in range(2, world) if world % n == 0]
    return divisors[len(divisors) // 2] if divisors else world


def in_words(what: Layout | Mask) -> str:
    """A layout or a mask as people say it."""
    match what:
        case And(parts=parts):
            return " and ".join(map(in_words, parts))
        case SlidingWindow(left=left, right=right):
            return f"window of {left:,} before" + (f" and {right:,} after" if right else "")
        case Documents(lengths=lengths):
            return f"{len(lengths):,} documents"
    return repr(what).removesuffix("()").lower()


def runs_of(held: ranges.Ranges) -> list[list[int]]:
    """Spans as lists: first, stop, step."""
    return [[run.start, run.stop, run.step] for run in held]


def _view(name: str, workload: Workload, cluster: Cluster) -> ScheduleView:
    forward, backward = (loads(name, workload, backward=way) for way in (False, True))
    return ScheduleView(name, steps(name, workload), forward, backward, simulated(name, workload, cluster))


def _ranks_a_node(world: int, node: int | None) -> int:
    if node is None:
        return default_node(world)
    if node < 1 or world % node:
        raise ValueError(f"node must divide the {world} ranks, got {node}")
    return node


def _ranks(world: int, node: int) -> str:
    return f"{world}" if node == world else f"{world}, as {world // node} nodes of {node}"


def _check(length: int, world: int, shape: Shape) -> None:
    if not 1 <= world <= MOST_RANKS:
        raise ValueError(f"world must be 1 to {MOST_RANKS} ranks for a report, got {world}")
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    for name in ("batch", "q_heads", "kv_heads", "head_dim"):
        if getattr(shape, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(shape, name)}")
    if shape.q_heads % shape.kv_heads:
        raise ValueError(f"kv_heads must divide the {shape.q_heads} query heads, got {shape.kv_heads}")
