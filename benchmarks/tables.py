"""Write docs/benchmarks.md, a table of README.md and the figures from the recorded results, docs/results/*.json.

    python -m benchmarks.tables            # writes the page and the table
    python -m benchmarks.tables --check    # fails if they are not what it would write
    python -m benchmarks.tables --plot docs  # draws the figures into this folder

To record a new measurement, change a file in docs/results/ and run the first and the last command. A file is one
section of the page, an object with

    title     the heading
    command   what measures it, from the repository root
    machine, versions, date
    text      what was measured, and how
    columns   names
    rows      lists with a cell for each column: a number, shown with the digits that the file has, or a text
    pair      optional, a column such as "direction": rows with equal cells before it become one row of "a / b"
    figure    optional, a file in docs/ that is shown below the table

SECTIONS has the order of the files. README.md has a table of a result below `<!-- results: NAME -->`.
"""

from __future__ import annotations

import re
from json import loads
from pathlib import Path
from typing import Annotated, Any

import typer

from attnmesh.utils.optional import require
from benchmarks.prefill import plot_efficiency

DOCS = Path(__file__).parents[1] / "docs"
SECTIONS = (
    "schedules", "ring-eager", "query-distributed", "dense", "masks", "host", "training", "decode",
    "decode-storage", "mla", "sharded-decode", "sparse", "sparse-decode", "model", "model-cpu", "ring-cpu",
    "recurrent", "accuracy", "predicted",
)  # fmt: skip
INTRODUCTION = """\
# Benchmarks

What was measured, on which machine, and the command that measures it, from the repository root. \
`python -m benchmarks.tables` writes this page from the files in `docs/results/`. \
S is the length of the whole sequence, k is 1024, world the number of ranks; a / b is forward / forward with backward \
unless the text says otherwise. Efficiency = T(one device, torch's cuDNN attention, whole sequence) / (world x slowest \
rank). Nothing was measured on more than one GPU. What bounds the kernels, and what was tried, is in the \
[notes](notes/dense-forward.md).
"""
NUMBER = re.compile(r"-?\d[\d,.]*(e-?\d+)?[k%*]?( / (-|-?\d[\d,.]*(e-?\d+)?[k%*]?))*")

Result = dict[str, Any]
app = typer.Typer(add_completion=False)


def read_result(name: str, docs: Path | None = None) -> Result:
    """Return a recorded result; its numbers are the texts that the file has, so that no digit is lost."""
    result: Result = loads(((docs or DOCS) / "results" / f"{name}.json").read_text(), parse_float=str, parse_int=str)
    wrong = [row for row in result["rows"] if len(row) != len(result["columns"])]
    if wrong:
        raise ValueError(f"{name}.json has {len(result['columns'])} columns, and rows of another length: {wrong}")
    return result


def read_rows(name: str, docs: Path | None = None) -> list[dict[str, Any]]:
    """Return the rows of a result by column: numbers as float, "16k" as 16 x 1024, empty cells as None."""
    result = read_result(name, docs)
    return [dict(zip(result["columns"], map(_value, row), strict=True)) for row in result["rows"]]


def page(docs: Path | None = None) -> str:
    """Return docs/benchmarks.md."""
    return "\n".join([INTRODUCTION, *(_section(read_result(name, docs)) for name in SECTIONS)])


def with_tables(text: str, docs: Path | None = None) -> str:
    """Return a Markdown text with the tables below `<!-- results: NAME -->` written anew."""
    return re.sub(
        r"(<!-- results: ([\w-]+) -->\n)(?:\|.*\n)*",
        lambda found: found[1] + _table(read_result(found[2], docs)),
        text,
    )


def _section(result: Result) -> str:
    where = f"`{result['command']}`. {result['machine']}; {result['versions']}; {result['date']}."
    figure = f"\n![{result['title']}]({result['figure']})\n" if "figure" in result else ""
    return f"## {result['title']}\n\n{where} {result['text']}\n\n{_table(result)}{figure}"


def _table(result: Result) -> str:
    columns, rows = _paired(result) if "pair" in result else (result["columns"], result["rows"])
    right = [all(NUMBER.fullmatch(row[at]) for row in rows if row[at]) for at in range(len(columns))]
    lines = [f"| {' | '.join(line)} |\n" for line in (columns, *rows)]
    return "".join([lines[0], f"|{'|'.join('--:' if is_right else '---' for is_right in right)}|\n", *lines[1:]])


def _paired(result: Result) -> tuple[list[str], list[list[str]]]:
    """Join rows with equal cells before the column `pair`: its values go, cells after it become "a / b"."""
    at = result["columns"].index(result["pair"])
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for row in result["rows"]:
        groups.setdefault(tuple(row[:at]), []).append(row[at + 1 :])
    rows = [[*keys, *map(_joined, zip(*found, strict=True))] for keys, found in groups.items()]
    return [*result["columns"][:at], *result["columns"][at + 1 :]], rows


def _joined(cells: tuple[str, ...]) -> str:
    return " / ".join(cell or "-" for cell in cells) if any(cells) else ""


def _value(text: str) -> float | str | None:
    if match := re.fullmatch(r"(-?\d[\d.]*(?:e-?\d+)?)(k?)", text):
        return float(match[1]) * (1024 if match[2] else 1)
    return text or None


def draw_figures(folder: Path) -> list[Path]:
    """Draw prefill.svg and sparse.svg; equal results make equal files."""
    pyplot = require("matplotlib.pyplot", extra="plot")
    schedules = read_result("schedules")["columns"][5:]
    lines = [
        {**row, "ranks": row["world"], "length": row["S"], "schedule": schedule, "efficiency": row[schedule]}
        for row in read_rows("schedules")
        for schedule in schedules
    ]
    with pyplot.rc_context({"svg.hashsalt": "attnmesh"}):
        plot_efficiency(lines, folder / "prefill.svg")
        _plot_sparse(pyplot, folder / "sparse.svg")
    return [folder / "prefill.svg", folder / "sparse.svg"]


def _plot_sparse(pyplot: Any, path: Path) -> None:
    """Milliseconds of every sparse operation against the number of keys."""
    figure, panel = pyplot.subplots(figsize=(6.4, 4.2))
    for row in read_rows("sparse"):
        keys = [name for name in row if name.endswith("k, ms")]
        panel.plot(
            [_value(name.partition(",")[0]) for name in keys],
            [row[name] for name in keys],
            marker="o",
            label=row["operation"].replace("`", ""),
        )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlabel("keys")
    panel.set_ylabel("ms, 4096 queries")
    panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


@app.command()
def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if the page is out of date.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the figures into this folder.")] = None,
) -> None:
    """Write docs/benchmarks.md, and the table of README.md, from docs/results/*.json."""
    readme = DOCS.parent / "README.md"
    wanted = {DOCS / "benchmarks.md": page(), readme: with_tables(readme.read_text())}
    if check and any(path.read_text() != text for path, text in wanted.items()):
        raise SystemExit("the documents are not what docs/results/ says: run python -m benchmarks.tables")
    if not check:
        for path, text in wanted.items():
            path.write_text(text)
    if plot is not None:
        draw_figures(plot)


if __name__ == "__main__":
    app()
