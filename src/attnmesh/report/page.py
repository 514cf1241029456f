"""The page itself: a template filled with tables, data, style and script, in one file that needs nothing else."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template

from attnmesh.report.data import Report, Rows
from attnmesh.report.picture import picture


def write_report(path: Path, report: Report) -> None:
    """Write the report to a file that any browser opens, with or without a network."""
    path.write_text(page(report), encoding="utf-8")


def page(report: Report) -> str:
    """The report as HTML."""
    template = Template(_part("template.html"))
    return template.substitute(
        style=_part("style.css"),
        script=_part("page.js"),
        data=as_script(picture(report)),
        title=_escaped(f"{report.workload.shards.world} ranks, {report.length:,} tokens"),
        facts=_facts(report.facts),
        exactness=_exactness(report),
        figures=_figures(report.figures),
        reasons=_reasons(report),
        machine=_escaped(report.machine),
    )


def as_script(data: object) -> str:
    """JSON that can stand inside a script element: nothing in it can end that element or open a comment."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, marked: int | None = None) -> str:
    """An HTML table; numbers to the right. The `marked`-th row stands out."""
    rows = list(rows)
    head = "".join(_head(column, [row[at] for row in rows]) for at, column in enumerate(columns))
    opened = ['<tr class="marked">' if at == marked else "<tr>" for at in range(len(rows))]
    body = "".join(f"{tr}{''.join(map(_cell, row))}</tr>" for tr, row in zip(opened, rows, strict=True))
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _head(name: str, cells: list[object]) -> str:
    kind = ' class="number"' if cells and all(map(_is_number, cells)) else ""
    return f'<th scope="col"{kind}>{_escaped(name)}</th>'


def _facts(facts: Mapping[str, object]) -> str:
    return "".join(f"<div><dt>{_escaped(name)}</dt><dd>{_escaped(value)}</dd></div>" for name, value in facts.items())


def _exactness(report: Report) -> str:
    if not report.outcomes:
        return '<p class="none">Nothing was checked for this report.</p>'
    rows = [
        [o.mode.name, o.mode.shape, o.worst, f"{o.error:.1e}", f"{o.bound:.1e}", "exact" if o.passed else "WRONG"]
        for o in report.outcomes
    ]
    return table(["mode", "shape", "worst result", "error", "bound", "verdict"], rows)


def _figures(figures: Mapping[str, Rows]) -> str:
    if not figures:
        return '<p class="none">No figures were given.</p>'
    return "".join(f"<h3>{_escaped(name)}</h3>{_rows(rows)}" for name, rows in figures.items())


def _rows(rows: Rows) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return table(columns, [[row.get(column, "") for column in columns] for row in rows])


def _reasons(report: Report) -> str:
    choice = report.choice
    ranked = sorted(choice.seconds.items(), key=lambda named: named[1])
    best = ranked[0][1]
    imbalance = {view.name: view.imbalance for view in report.schedules}
    rows: list[list[object]] = [
        [name, f"{1e3 * seconds:.3f} ms", f"{seconds / best:.2f} x", f"{imbalance[name]:.3f}", _why(seconds, best)]
        for name, seconds in ranked
    ]
    rows += [[name, "", "", "", f"refused: {why}"] for name, why in choice.refusals.items()]
    return table(["schedule", "estimate", "of the fastest", "imbalance", "verdict"], rows, marked=0)


def _why(seconds: float, best: float) -> str:
    if seconds == best:
        return "chosen: its slowest rank is done first"
    return f"{100 * (seconds / best - 1):.0f}% slower by estimate"


def _cell(value: object) -> str:
    if isinstance(value, (int, float)) and _is_number(value):
        return f'<td class="number">{_number(value)}</td>'
    said = _escaped(value)
    kind = {"exact": ' class="good"', "WRONG": ' class="bad"'}.get(said, "")
    return f"<td{kind}>{said}</td>"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.2e}" if value and not 1e-2 <= abs(value) < 1e6 else f"{value:,.3f}"


def _escaped(value: object) -> str:
    return html.escape(str(value))


def _part(name: str) -> str:
    return resources.files("attnmesh.report").joinpath(name).read_text(encoding="utf-8")
