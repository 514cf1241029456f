"""`attnmesh report` writes a file, or exits with 2 and one line."""

import json
import re
from contextlib import nullcontext

import pytest

from attnmesh.cli.options import parse_mask
from attnmesh.core.masks import BlockCausal, Causal, Chunked, Documents, Full, Global, Prefix, SlidingWindow
from attnmesh.plan.shards import SCHEDULES
from attnmesh.report.data import read_figures
from attnmesh.trace.timeline import Span, write_trace
from helpers.cli import run as run_command

SPAN = Span(3, "send", "keys", 2.0, 2.5, {"bytes": 9})


def run(*arguments: object):
    return run_command("report", *arguments)


def test_a_report_of_files_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("attnmesh.cli.output._LINE_EVERY", 0.0)
    trace, figures, out = tmp_path / "measured.json", tmp_path / "generate.json", tmp_path / "report.html"
    write_trace(trace, [SPAN], title="a run")
    figures.write_text(json.dumps({"rows": [{"rank": 0, "tokens": 1024}]}))
    ran = run(
        "--out", out, "--ranks", 4, "--length", "0.25k", "--trace", trace, "--figures", figures, "--mask", "window:20",
        "--layer", "mamba2",
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    assert f"1 of {len(SCHEDULES)}: comparing every schedule with float64, about" in ran.stderr
    text = out.read_text(encoding="utf-8")
    assert "causal and window of 19 before" in text
    assert "generate: rows" in text
    assert "mamba2 over ranks" in text
    assert '"name":"mamba2, simulated forward"' in text
    assert '"name":"measured"' in text
    checked = re.findall(
        r'<td data-label="mode">(\S+) [^<]*</td>.*?data-label="error">([^<]*)<.*?class="(good|bad)"', text
    )
    assert [name for name, _, _ in checked] == list(SCHEDULES)
    assert all(float(error) > 0 and verdict == "good" for _, error, verdict in checked)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out", "{folder}/none/report.html"], "--out must be in an existing folder"),
        (["--out", "{folder}"], "--out must be a file, got the folder"),
        (["--ranks", 0], "Invalid value"),
        (["--ranks", 65], "65 is not in the range 1<=x<=64"),
        (["--length", "long"], "got 'long'"),
        (["--mask", "window:0"], "mask window:N must have a number N of at least 1"),
        (["--mask", "diagonal"], "got 'diagonal'"),
        (["--layout", "heap"], "Invalid value"),
        (["--kv-heads", 5], "kv_heads must divide the 32 query heads, got 5"),
        (["--layer", "attention"], "--layer must be one of"),
        (["--ranks-per-node", 3], "must divide the 8 ranks, got 3"),
        (["--figures", "{folder}/none.json"], "cannot be read"),
        (["--figures", "{folder}/text"], "text is not JSON: "),
        (["--figures", "{folder}/number"], "number has no table"),
        (["--trace", "{folder}/none.json"], "cannot be read"),
        (["--trace", "{folder}/number"], "is not a trace"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, arguments, said):
    (tmp_path / "text").write_text("no JSON")
    (tmp_path / "number").write_text("3")
    given = [str(each).format(folder=tmp_path) for each in arguments]
    ran = run(*(() if "--out" in given else ("--out", tmp_path / "report.html")), "--no-check", *given)
    assert ran.exit_code == 2
    assert said in " ".join(ran.output.replace("│", " ").split())
    assert "Traceback" not in ran.output
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("causal", Causal()),
        ("full", Full()),
        ("window:5", Causal() & SlidingWindow(4)),
        ("window:4k+global:4", (Causal() & SlidingWindow(4095)) | (Causal() & Global(4))),
        ("prefix:7", Prefix(7)),
        ("chunked:8", Chunked(8)),
        ("block-causal:8", BlockCausal(8)),
        ("documents:8", Documents([8, 8, 4])),
        ("documents:10", Documents([10, 10])),
        ("documents:30", Documents([20])),
    ],
)
def test_names_of_masks(text, mask):
    assert parse_mask(text, 20) == mask


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("window", "mask window:N must have a number N of at least 1"),
        ("window:5+", "such as window:4k+global:4; got ''"),
        ("window:5+diagonal", "got 'diagonal'"),
        (
            "prefix:0",
            "must have a number N of at least 1 and at most 2147483647, such as 4096 or 4k, got 'prefix:0'",
        ),
        ("prefix:1.3", "got 'prefix:1.3'"),
        ("chunked:-1", "got 'chunked:-1'"),
        ("causal:4", "block-causal:N, documents:N"),
        ("documents:1", "mask documents:1 must give at most 65,536 documents, got 1,048,576"),
    ],
)
def test_other_masks_are_refused(text, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_mask(text, 2**20)


def test_figures_are_all_tables_that_a_file_holds(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(
        json.dumps({"benchmark": "ring", "machine": {"cores": 2}, "sections": {"a": [{"x": 1}, {"x": [1]}], "b": []}})
    )
    assert read_figures(path) == {
        "run": [{"": "benchmark", "value": "ring"}],
        "run: machine": [{"": "cores", "value": 2}],
        "run: sections: a": [{"x": 1}, {"x": "[1]"}],
        "run: sections": [{"": "b", "value": "[]"}],
    }


@pytest.mark.parametrize("depth", [10, 100_000])
@pytest.mark.parametrize("pair", ["[]", ['{"a":', "}"]], ids=["list", "object"])
def test_nested_figures_are_read_or_refused(tmp_path, depth, pair):
    path = tmp_path / "run.json"
    path.write_text(pair[0] * depth + "1" + pair[1] * depth)
    refused = pytest.raises(ValueError, match=r"run\.json (has no table|.*nested too deeply)")
    with nullcontext() if depth == 10 and pair != "[]" else refused:
        assert list(read_figures(path).values()) == [[{"": "a", "value": 1}]]
