"""The HTML page of a report: one file with its tables, data, style and script."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from string import Template

from attnmesh.core import ranges
from attnmesh.core.mask import Coverage, Mask, coverage, sequence_intervals
from attnmesh.core.ranges import Ranges
from attnmesh.generation.requests import GenerationStats
from attnmesh.plan.shards import Shards
from attnmesh.planner.program import Load
from attnmesh.report.data import (
    MOST_ROWS,
    GeneratedAnswer,
    GenerationReport,
    RankGroups,
    Rows,
    ScheduleReport,
    ScheduleView,
)
from attnmesh.trace.timeline import Span
from attnmesh.utils.files import write_text
from attnmesh.utils.text import printable
from attnmesh.utils.validation import check_path, check_type

# The data that the page's script draws from: token ranges, mask tiles, steps, messages, loads and timelines.


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


_MIB = 2**20
_TIE = 0.005  # relative; closer estimates count as equal


@dataclass(frozen=True)
class Bar:
    """A table cell that is drawn as a bar, `share` (0 to 1) of the column's width."""

    share: float


def write_report(path: Path | str, report: ScheduleReport | GenerationReport) -> None:
    """Write the report as an HTML file that needs no network.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp()) / "report.html"
        >>> write_report(path, schedule_report(am.Causal(), am.Zigzag(), 4096, 4, shape))
        >>> path.read_text()[:15]
        '<!doctype html>'
    """
    path = check_path("path", path)
    check_type("report", report, (ScheduleReport, GenerationReport))
    write_text(path, page(report))


def page(report: ScheduleReport | GenerationReport) -> str:
    """Return the report as HTML."""
    if isinstance(report, GenerationReport):
        main, data = _generation_sections(report), None
    else:
        main, data = _schedule_sections(report), drawing_data(report)
    return Template(_part("template.html")).substitute(
        title=_escaped(report.title),
        style=_part("style.css"),
        main=main,
        data=as_script(data),
        script=_part("page.js"),
    )


def as_script(data: object) -> str:
    """Return JSON for a script element: nothing in it can end that element or open a comment."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, marked: int | None = None) -> str:
    """Return an HTML table with numbers aligned right and row `marked` in bold. Rows become cards on a phone."""
    rows = list(rows)
    head = "".join(_head(column, [row[at] for row in rows]) for at, column in enumerate(columns))
    opened = ['<tr class="marked">' if at == marked else "<tr>" for at in range(len(rows))]
    body = "".join(f"{tr}{''.join(map(_cell, columns, row))}</tr>" for tr, row in zip(opened, rows, strict=True))
    return (
        f'<div class="scroll" tabindex="0"><table class="stack"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _schedule_sections(report: ScheduleReport) -> str:
    return "".join(
        [
            _section("run", "The workload", _facts(report.facts)),
            _part("schedules.html"),
            _section(
                "selection", "Why this schedule", _ranking(report),
                f"Estimated time of one layer, forward + backward, on {report.hardware}. The estimates rank schedules; "
                "they are not measured times. Exposed communication is the share of the time in which the busiest rank "
                "does not compute.",
            ),
            _section(
                "exactness", "Exactness", _exactness(report),
                "A small random case over all ranks, forward + backward, compared with float64. An error may be at "
                "most twice the error of the plain computation in the same precision.",
            ),
            _section("figures", "Figures", _figures(report.figures)),
        ]
    )  # fmt: skip


def _generation_sections(report: GenerationReport) -> str:
    most, whole = max(each.kv_bytes for each in report.stats), report.stats[0].kv_bytes_unsharded
    first = report.stats[0]
    reused = (
        f" {first.reused_tokens:,} prompt tokens were reused from an earlier prompt." if first.reused_tokens else ""
    )
    return "".join(
        [
            _section("run", "The run", _facts(report.facts)),
            _section("answers", "Questions and answers", "".join(map(_answer, report.answers))),
            _section(
                "ranks", f"Per-{report.groups.noun} figures", _rank_table(report),
                f"KV cache: at most {most / _MIB:.1f} MiB per rank; one device would need {whole / _MIB:.1f} MiB."
                f"{reused}{_group_note(report.groups)} Times are measured.",
            ),
            _section(
                "comparison", "Comparison with a single process", _comparison(report.answers),
                "The same prompts through the unsharded model in one process. The logit difference is relative to the "
                "largest logit.",
            ),
        ]
    )  # fmt: skip


def _section(name: str, title: str, body: str, intro: str = "") -> str:
    """Return a section of the page; nothing if it has no body."""
    if not body:
        return ""
    paragraph = f"<p>{_escaped(intro)}</p>" if intro else ""
    heading = f'<h2 id="{name}-title">{_escaped(title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{heading}{paragraph}{body}</section>\n'


def _facts(facts: Mapping[str, object]) -> str:
    each = (f"<div><dt>{_escaped(name)}</dt><dd>{_escaped(value)}</dd></div>" for name, value in facts.items())
    return f'<dl class="facts">{"".join(each)}</dl>'


def _ranking(report: ScheduleReport) -> str:
    choice = report.choice
    ranked = sorted(choice.costs.items(), key=lambda named: named[1].seconds)
    best = ranked[0][1].seconds
    imbalance = {view.name: view.imbalance for view in report.schedules}
    rows: list[list[object]] = [
        [
            name, f"{1e3 * cost.seconds:.3f}\u00a0ms", f"{cost.seconds / best:.2f}x", f"{cost.exposed:.0%}",
            f"{imbalance[name]:.3f}", _verdict(name == choice.schedule, cost.seconds / best - 1),
        ]
        for name, cost in ranked
    ]  # fmt: skip
    rows += [[name, "", "", "", "", f"not available: {why}"] for name, why in choice.unsupported.items()]
    columns = ["schedule", "estimated time", "relative", "exposed communication", "load imbalance", "verdict"]
    return table(columns, rows, marked=[name for name, _ in ranked].index(choice.schedule))


def _verdict(selected: bool, slower: float) -> str:
    if selected:
        return "selected: lowest estimated time"
    return "tie with the selected schedule" if slower < _TIE else f"{100 * slower:.0f}% slower"


def _exactness(report: ScheduleReport) -> str:
    rows = [
        [o.mode.name, o.mode.shape, o.worst, f"{o.error:.1e}", f"{o.bound:.1e}", "exact" if o.passed else "WRONG"]
        for o in report.outcomes
    ]
    return table(["mode", "shape", "worst result", "error", "bound", "verdict"], rows) if rows else ""


def _figures(figures: Mapping[str, Rows]) -> str:
    return "".join(f"<h3>{_escaped(name)}</h3>{_rows(rows)}" for name, rows in figures.items())


def _rows(rows: Rows) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return table(columns, [[row.get(column, "") for column in columns] for row in rows])


def _answer(each: GeneratedAnswer) -> str:
    counts = f"{each.prompt_tokens:,} prompt tokens, {each.new_tokens:,} new tokens"
    return (
        f'<article class="answer"><h3>{_escaped(each.question)}</h3><blockquote>{_escaped(each.answer)}</blockquote>'
        f'<p class="note">{counts}</p></article>'
    )


def _comparison(answers: Sequence[GeneratedAnswer]) -> str:
    rows = [
        [
            number, each.question, each.new_tokens, each.matching_tokens, f"{each.logit_difference:.1e}",
            "same" if each.matching_tokens == each.new_tokens else "DIFFERENT",
        ]
        for number, each in enumerate(answers, 1)
        if each.matching_tokens is not None
    ]  # fmt: skip
    columns = ["answer", "question", "tokens", "equal tokens", "largest logit difference", "verdict"]
    return table(columns, rows) if rows else ""


def _rank_table(report: GenerationReport) -> str:
    columns = [report.groups.noun, "", "tokens held", "KV cache MiB", "sent MiB", "prefill s", "decode s", "tokens/s"]
    if report.speculative:
        columns += ["steps", "drafted", "accepted"]
    grouped = [[report.stats[rank] for rank in ranks] for ranks in report.groups.ranks]
    most = max(1, *(sum(each.cached_tokens for each in members) for members in grouped))
    rows = [_rank_row(number, members, most, report) for number, members in enumerate(grouped)]
    return table(columns, rows)


def _rank_row(number: int, members: Sequence[GenerationStats], most: int, report: GenerationReport) -> list[object]:
    """Sums of what the ranks of a row hold and send, and the times of the slowest."""
    first = members[0]
    held = sum(each.cached_tokens for each in members)
    decode = max(each.decode_seconds for each in members)
    decoded = first.generated_tokens - len(report.answers)  # the first token of an answer comes from the prefill
    row: list[object] = [
        number, Bar(held / most), held, sum(each.kv_bytes for each in members) / _MIB,
        sum(each.bytes_sent for each in members) / _MIB, max(each.prefill_seconds for each in members), decode,
        decoded / decode if decode else 0.0,
    ]  # fmt: skip
    return [*row, first.decode_steps, first.draft_tokens, first.accepted_tokens] if report.speculative else row


def _group_note(groups: RankGroups) -> str:
    if groups.size == 1:
        return ""
    return f" Every row sums {groups.size} ranks; its times are of the slowest rank."


def _head(name: str, cells: list[object]) -> str:
    kind = ' class="number"' if cells and all(map(_is_number, cells)) else ""
    return f'<th scope="col"{kind}>{_escaped(name)}</th>'


def _cell(column: str, value: object) -> str:
    label = f' data-label="{_escaped(column)}"' if column else ""
    if isinstance(value, Bar):
        return f'<td class="track"{label}><div class="bar" style="width:{100 * value.share:.1f}%"></div></td>'
    if isinstance(value, (int, float)) and _is_number(value):
        return f'<td class="number"{label}>{_number(value)}</td>'
    text = _escaped(value)
    kind = {"exact": "good", "same": "good", "WRONG": "bad", "DIFFERENT": "bad", "": "empty"}.get(text)
    return f"<td{label}>{text}</td>" if kind is None else f'<td class="{kind}"{label}>{text}</td>'


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.2e}" if value and not 1e-2 <= abs(value) < 1e6 else f"{value:,.3f}"


def _escaped(value: object) -> str:
    return html.escape(printable(str(value)))


def _part(name: str) -> str:
    return resources.files("attnmesh.report").joinpath(name).read_text(encoding="utf-8")
