"""The HTML page of a report: one file with its tables, data, style and script."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template

from attnmesh.generation.stats import GenerationStats
from attnmesh.report.data import GeneratedAnswer, GenerationReport, RankGroups, Rows, ScheduleReport
from attnmesh.report.drawing import drawing_data
from attnmesh.utils.files import write_text
from attnmesh.utils.text import printable
from attnmesh.utils.validation import check_path, check_type

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
    return f" Every row sums {groups.size} ranks; its times are those of the slowest."


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
