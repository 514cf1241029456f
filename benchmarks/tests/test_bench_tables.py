"""docs/benchmarks.md is what docs/results/ says."""

import json
import re

import pytest
from typer.testing import CliRunner

from benchmarks import tables

RESULT = {
    "title": "T", "command": "c", "machine": "m", "versions": "v", "date": "d", "text": "What.",
    "columns": ["S", "direction", "ms", "note"],
}  # fmt: skip


@pytest.fixture
def docs(tmp_path, monkeypatch):
    """A folder with one result, whose rows the test gives as JSON."""
    folder = tmp_path / "docs"
    (folder / "results").mkdir(parents=True)
    (tmp_path / "README.md").write_text("Before.\n\n<!-- results: one -->\n| old |\n\nAfter.\n")
    monkeypatch.setattr(tables, "DOCS", folder)
    monkeypatch.setattr(tables, "SECTIONS", ("one",))

    def write(rows: str, **more: str):
        head = json.dumps({**RESULT, **more})[:-1]
        (folder / "results" / "one.json").write_text(f'{head}, "rows": {rows}}}')
        return folder

    return write


def last_rows(page: str) -> list[str]:
    return page.strip().splitlines()[-2:]


def test_the_page_is_what_the_results_say():
    ran = CliRunner().invoke(tables.app, ["--check"])
    assert ran.exit_code == 0, ran.output
    assert len(tables.page().splitlines()) <= 250


def test_every_result_is_on_the_page_with_where_it_is_from():
    assert {path.stem for path in (tables.DOCS / "results").glob("*.json")} == set(tables.SECTIONS)
    for name in tables.SECTIONS:
        result = tables.read_result(name)
        assert all(result[key] for key in ("title", "command", "machine", "versions", "text")), name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"]), name


def test_numbers_keep_their_digits(docs):
    where = docs('[["16k", "forward", 0.900, "x"], ["2k", "forward", 1e-3, ""]]')
    assert last_rows(tables.page(where)) == ["| 16k | forward | 0.900 | x |", "| 2k | forward | 1e-3 |  |"]
    assert [(row["S"], row["ms"], row["note"]) for row in tables.read_rows("one", where)] == [
        (16384.0, 0.9, "x"), (2048.0, 0.001, None),
    ]  # fmt: skip


def test_directions_share_a_row(docs):
    where = docs(
        '[["1k", "forward", 1.0, ""], ["2k", "forward", 3, "a"], ["1k", "both", 2.50, ""], ["2k", "both", 4, ""]]',
        pair="direction",
    )
    assert last_rows(tables.page(where)) == ["| 1k | 1.0 / 2.50 |  |", "| 2k | 3 / 4 | a / - |"]


def test_a_page_that_is_out_of_date_is_reported_and_written(docs):
    where = docs('[["1k", "forward", 1.0, ""]]')
    page = where / "benchmarks.md"
    page.write_text("old")
    assert "python -m benchmarks.tables" in str(CliRunner().invoke(tables.app, ["--check"]).exception)
    assert page.read_text() == "old"
    assert CliRunner().invoke(tables.app, []).exit_code == 0
    assert CliRunner().invoke(tables.app, ["--check"]).exit_code == 0
    table = "| S | direction | ms | note |\n|--:|---|--:|--:|\n| 1k | forward | 1.0 |  |\n"
    assert (where.parent / "README.md").read_text() == f"Before.\n\n<!-- results: one -->\n{table}\nAfter.\n"


def test_a_row_without_a_cell_is_refused(docs):
    where = docs('[["1k", "forward", 1.0]]')
    with pytest.raises(ValueError, match=r"one\.json has 4 columns"):
        tables.page(where)


def test_committed_figures_are_those_of_the_results(tmp_path):
    pytest.importorskip("matplotlib")
    for path in tables.draw_figures(tmp_path):
        drawn, saved = (
            [float(number) for number in re.findall(r"-?\d+\.\d+", file.read_text())]
            for file in (path, tables.DOCS / path.name)
        )
        assert drawn == pytest.approx(saved, abs=0.01), path.name
