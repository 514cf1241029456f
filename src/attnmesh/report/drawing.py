"""The data that the page's script draws from: token ranges, mask tiles, steps, messages, loads and timelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from attnmesh.core import ranges
from attnmesh.core.mask import Coverage, Mask, coverage, sequence_intervals
from attnmesh.core.ranges import Ranges
from attnmesh.plan.shards import Shards
from attnmesh.planner.program import Load
from attnmesh.report.data import MOST_ROWS, RankGroups, ScheduleReport, ScheduleView
from attnmesh.trace.timeline import Span
from attnmesh.utils.text import printable

_MOST_SPANS = 8000  # of a timeline; more would make the page slow, and are too thin to see
_STRIPES_SHOWN = 8  # tokens per rank shown of a layout that deals tokens out in turn: the rest repeats
_BANDS = 64  # approximate rows of mask tiles: more are too small on a phone

Json = dict[str, object]


def drawing_data(report: ScheduleReport) -> Json:
    """Return everything that is drawn, as JSON values."""
    shards, shape = report.workload.shards, report.workload.shape
    cut = bands(shards.queries)
    return {
        "world": shards.world,
        "ranks_per_node": report.workload.ranks_per_node,
        "group_size": report.groups.size,
        "group_noun": report.groups.noun,
        "length": report.length,
        "heads": shape.q_heads,
        "masks": shards.mask.sequences or 1,  # whose pairs are counted together
        # per head: two matmuls, two operations per element
        "flops_per_pair": 2 * (1 if shards.mask.sequences else shape.batch) * (shape.head_dim + shape.out_dim),
        "shards": [
            {"count": ranges.size(held), "runs": [[run.start, run.stop, run.step] for run in held]}
            for held in shards.queries
        ],
        "strip": _tokens_shown(shards, report.length),
        "bands": [[band.rank, band.positions.start, band.positions[-1], len(band.positions)] for band in cut],
        "in_turn": any(band.positions.step > 1 for band in cut),
        "pairs": pair_counts(shards, cut, cut),
        "schedules": [_schedule(view, report) for view in report.schedules],
        "selected": report.choice.schedule,
        "timelines": [_timeline(name, spans, report.groups) for name, spans in report.timelines.items()],
    }


@dataclass(frozen=True)
class Band:
    """Neighbouring positions of one rank's shard: a row or a column of mask tiles.

    A band never reaches beyond a shard. All pairs of a tile therefore have their queries on one rank and their keys on
    one rank, and every schedule computes them in one step: the same tiles serve every schedule.
    """

    rank: int
    positions: range


def bands(shards: tuple[Ranges, ...]) -> list[Band]:
    """Cut all shards into bands of about equal size, rank by rank."""
    each = sum(map(ranges.size, shards)) / _BANDS  # positions per band, where the runs allow it
    return [
        Band(rank, part)
        for rank, shard in enumerate(shards)
        for run in shard
        for part in _cut(run, max(1, min(len(run), round(len(run) / each))))
    ]


def pair_counts(shards: Shards, queries: list[Band], keys: list[Band]) -> list[list[int]]:
    """Return the visible pairs of every tile: one row per band of queries, one column per band of keys.

    Those of a mask per sequence are counted in all sequences together.
    """
    return [[visible_pairs(shards.mask, q.positions, k.positions) for k in keys] for q in queries]


def visible_pairs(mask: Mask, q: range, k: range) -> int:
    """Return the number of visible pairs of the queries `q` and the keys `k`, in all `mask.sequences` or in one."""
    count = 0
    for sequences, intervals in sequence_intervals(mask, max(q.stop, k.stop)):
        for part in intervals:
            found = coverage(part, q, k)
            if found is not Coverage.EMPTY:
                pairs = len(q) * len(k) if found is Coverage.FULL else part.pairs(q, k)
                count += pairs * (1 if sequences is None else len(sequences))
    return count


def _cut(run: range, parts: int) -> list[range]:
    edges = [len(run) * at // parts for at in range(parts + 1)]
    return [run[a:b] for a, b in pairwise(edges)]


def _tokens_shown(shards: Shards, length: int) -> int:
    """All tokens, unless ranks take them in turn."""
    in_turn = any(run.step > 1 for held in shards.queries for run in held)
    return min(length, _STRIPES_SHOWN * shards.world) if in_turn else length


def _schedule(view: ScheduleView, report: ScheduleReport) -> Json:
    return {
        "name": view.name,
        "steps": [step.name for step in view.steps],
        "blocks": [
            [tile.rank, at, *_ends(tile.heads), *_ends(tile.queries), *_ends(tile.keys), tile.pairs]
            for at, step in enumerate(view.steps)
            for tile in step.tiles
        ],
        "messages": [[at, *message] for at, step in enumerate(view.steps) for message in step.messages],
        "forward": _loads(view.forward),
        "backward": _loads(view.backward),
        "imbalance": view.imbalance,
        "timeline": _timeline(f"{view.name}, forward, simulated", view.timeline, report.groups, report.hardware),
    }


def _loads(ranks: Sequence[Load]) -> Json:
    return {
        "flops": [load.flops for load in ranks],
        "intra_node": [load.intra_node for load in ranks],
        "inter_node": [load.inter_node for load in ranks],
    }


def _ends(of: range) -> tuple[int, int]:
    return of.start, of.stop


def _timeline(name: str, spans: Sequence[Span], groups: RankGroups, hardware: str | None = None) -> Json:
    """The spans of one timeline. One with more ranks than there may be rows has the first rank of every group."""
    grouped = groups.size > 1 and len({span.rank for span in spans}) > MOST_ROWS
    drawn = [span for span in spans if span.rank % groups.size == 0] if grouped else spans
    kept = sorted(drawn, key=lambda span: span.begin)[:_MOST_SPANS]
    start = kept[0].begin if kept else 0.0
    return {
        "name": printable(name),
        "hardware": hardware,  # that a simulated one is for
        "left_out": len(drawn) - len(kept),
        "spans": [
            [
                span.rank,
                span.track,
                printable(span.name),
                span.begin - start,
                span.end - start,
                _step(span),
                _args(span),
            ]
            for span in kept
        ],
    }


def _step(span: Span) -> int | None:
    step = span.args.get("step", span.args.get("round"))
    return step if isinstance(step, int) else None


def _args(span: Span) -> str:
    shown = {key: value for key, value in span.args.items() if key not in ("step", "round")}
    return printable(", ".join(f"{key} {_figure(value)}" for key, value in shown.items()))


def _figure(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
