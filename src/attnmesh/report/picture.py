"""What the page's script draws from, in the terms of JSON."""

from __future__ import annotations

from collections.abc import Sequence

from attnmesh.core import ranges
from attnmesh.plan.program import Load
from attnmesh.report.data import Report, ScheduleView, runs_of
from attnmesh.trace.timeline import Span

_MOST_SPANS = 8000  # of a timeline; more would make the page slow, and are too thin to see

Json = dict[str, object]


def picture(report: Report) -> Json:
    """All that is drawn."""
    shards, shape = report.workload.shards, report.workload.shape
    return {
        "world": shards.world,
        "node": report.workload.ranks_per_node,
        "length": report.length,
        "heads": shape.q_heads,
        "operations_a_pair": 4 * shape.batch * shape.head_dim,  # two products, two operations an element; a head
        "shards": [{"count": ranges.size(held), "runs": runs_of(held)} for held in shards.queries],
        "strip": report.strip,
        "bands": [[band.rank, band.positions.start, band.positions[-1], len(band.positions)] for band in report.bands],
        "in_turn": any(band.positions.step > 1 for band in report.bands),
        "pairs": report.pairs,
        "schedules": [_schedule(view) for view in report.schedules],
        "chosen": report.choice.schedule,
        "timelines": [_timeline(name, list(told)) for name, told in report.timelines.items()],
    }


def _schedule(view: ScheduleView) -> Json:
    return {
        "name": view.name,
        "steps": [step.name for step in view.steps],
        "visits": [
            [tile.rank, at, *_ends(tile.heads), *_ends(tile.queries), *_ends(tile.keys), tile.pairs]
            for at, step in enumerate(view.steps)
            for tile in step.tiles
        ],
        "messages": [[at, *message] for at, step in enumerate(view.steps) for message in step.messages],
        "forward": _loads(view.forward),
        "backward": _loads(view.backward),
        "imbalance": view.imbalance,
        "timeline": _timeline(f"{view.name}, simulated", view.simulated),
    }


def _loads(ranks: Sequence[Load]) -> Json:
    return {
        "flops": [load.flops for load in ranks],
        "near": [load.intra_node for load in ranks],
        "far": [load.inter_node for load in ranks],
    }


def _ends(of: range) -> tuple[int, int]:
    return of.start, of.stop


def _timeline(name: str, told: list[Span]) -> Json:
    kept = sorted(told, key=lambda span: span.begin)[:_MOST_SPANS]
    start = kept[0].begin if kept else 0.0
    return {
        "name": name,
        "left_out": len(told) - len(kept),
        "spans": [
            [span.rank, span.track, span.name, span.begin - start, span.end - start, _step(span), _said(span)]
            for span in kept
        ],
    }


def _step(span: Span) -> int | None:
    """The step that a span belongs to, where it says so."""
    step = span.args.get("step", span.args.get("round"))
    return step if isinstance(step, int) else None


def _said(span: Span) -> str:
    told = {key: value for key, value in span.args.items() if key not in ("step", "round")}
    return ", ".join(f"{key} {_figure(value)}" for key, value in told.items())


def _figure(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
