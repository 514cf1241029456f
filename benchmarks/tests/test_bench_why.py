"""The figures of docs/why.md."""

import json
import re
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.why import figures
from benchmarks.why.__main__ import app
from benchmarks.why.policies import (
    FLOAT32,
    HALF_BLOCKS,
    HALF_SUM,
    NAMES,
    POLICIES,
    exact_attention,
    measure_policies,
    random_inputs,
    ring,
)
from benchmarks.why.sources import DOCS, EVERY_BLOCK, count_bytes, read_sources
from helpers.cases import sweep

PAGE = DOCS / "why.md"


@pytest.fixture(scope="module")
def sources():
    return read_sources()


# The emulated policies.


def by_policy(rows, world):
    return {row["policy"]: row for row in rows if row["ranks"] == world}


def test_only_what_is_rounded_on_the_way_grows():
    rows = measure_policies((1, 8), length=192, heads=1)
    one, eight = by_policy(rows, 1), by_policy(rows, 8)
    for name in NAMES:
        assert len({one[policy][name] for policy in POLICIES}) == 1  # one block: nothing is merged
        assert eight[FLOAT32][name] < 1.02 * one[FLOAT32][name]
        assert eight[FLOAT32][name] < eight[HALF_BLOCKS][name] < eight[HALF_SUM][name]


def test_blocks_of_an_odd_length_are_the_whole():
    inputs = random_inputs(75, heads=1, head_dim=16)
    for found, exact in zip(ring(inputs, 3, FLOAT32), exact_attention(inputs), strict=True):
        assert torch.allclose(found.double(), exact, atol=0.03)


def test_emulated_and_measured_errors_agree(sources):
    """The H200's kernels round as the emulation does: float32 states as Triton, bf16 blocks as cuDNN."""
    for backend, policy, names in (("triton", FLOAT32, NAMES), ("aten", HALF_BLOCKS, ("out", "dq"))):
        measured = {row["world"]: row for row in sources.accuracy if row["backend"] == backend}
        for world in (2, 8, 32):
            emulated = by_policy(sources.errors, world)[policy]
            assert all(abs(emulated[name] / measured[world][name] - 1) < 0.1 for name in names), (backend, world)


@pytest.mark.sweep
def test_committed_errors_are_computed_again(sources):
    for row in measure_policies((1, 2, 8)):
        saved = by_policy(sources.errors, row["ranks"])[row["policy"]]
        assert all(abs(row[name] / saved[name] - 1) < 0.01 for name in NAMES)


# What else the figures are drawn from.


def test_committed_bytes_are_those_of_the_plans(sources):
    again = count_bytes((2, 8, 16))
    assert [row for row in sources.bytes if row["ranks"] in (2, 8, 16)] == again
    assert {row["schedule"] for row in again} == {EVERY_BLOCK, "ring", "allgather", "ulysses", "ulysses+ring"}


def test_ring_and_allgather_share_a_curve(sources):
    sent = {(row["mask"], row["ranks"], row["schedule"]): row["bytes"] for row in sources.bytes}
    assert all(sent[(*key, "allgather")] == n for (*key, schedule), n in sent.items() if schedule == "ring")


def test_what_does_not_fit_is_not_drawn():
    rows = [{"ranks": n, "efficiency": e, "fits": f} for n, e, f in ((8, 0.9, False), (8, 0.7, True), (16, 0.8, False))]
    assert figures.best_that_fit(rows) == [rows[1]]


# The figures.


def drawn_again(sources, folder, names):
    chosen = {name: figures.FIGURES[name] for name in names}
    return [figures._drawn(name, draw, sources, folder) for name, draw in chosen.items()]


def apart(svg):
    """Text and numbers: processors differ in the last digits of coordinates."""
    return re.split(r"-?\d+\.\d+", svg), [float(number) for number in re.findall(r"-?\d+\.\d+", svg)]


@pytest.mark.parametrize("names", [["why-scaling"], sweep(list(figures.FIGURES))], ids=["one", "all"])
def test_committed_figures_are_those_of_the_data(sources, tmp_path, names):
    for path in drawn_again(sources, tmp_path, names):
        (words, numbers), (saved_words, saved_numbers) = (apart(x.read_text()) for x in (path, DOCS / path.name))
        assert words == saved_words, path.name
        assert numbers == pytest.approx(saved_numbers, abs=0.01), path.name


@pytest.mark.parametrize("name", figures.FIGURES)
def test_committed_figures_follow_the_page_to_dark(name):
    """Every color is one of ours, so that none is invisible on the other paper."""
    text = (DOCS / f"{name}.svg").read_text()
    ours = {figures.BLUE, figures.ORANGE, figures.GREEN, figures.RED, figures.PURPLE, figures.GREY}
    body = text.split("</style>", 1)[1]
    assert set(re.findall(r"#[0-9a-f]{6}", body)) <= ours | set(figures.DARK)
    assert "prefers-color-scheme: dark" in text
    assert ElementTree.fromstring(text).tag.endswith("svg")
    for light in (figures.PAPER, figures.INK):
        assert f"fill: {light}" in body  # in the form that the rules match


def luminance(color):
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("color", ["BLUE", "ORANGE", "GREEN", "RED", "PURPLE", "GREY"])
def test_colors_are_seen_on_both_papers(color):
    papers = figures.PAPER, figures.DARK[figures.PAPER]
    assert all(contrast(getattr(figures, color), paper) >= 3 for paper in papers)
    assert all(contrast(a, b) >= 10 for a, b in zip((figures.INK, figures.DARK[figures.INK]), papers, strict=True))


# The page and the command.


def test_the_page_shows_every_figure():
    assert set(re.findall(r"\((why-[\w-]+)\.svg\)", PAGE.read_text())) == set(figures.FIGURES)


def test_the_numbers_of_the_page(sources):
    text = " ".join(PAGE.read_text().split())
    one, many = by_policy(sources.errors, 1), by_policy(sources.errors, 64)
    out, dk = ({policy: many[policy][name] / one[policy][name] for policy in POLICIES} for name in ("out", "dk"))
    assert f"have {out[HALF_SUM]:.1f} times the error of one in out and {dk[HALF_SUM]:.1f} times in" in text
    assert f"{out[HALF_BLOCKS]:.1f} and {dk[HALF_BLOCKS]:.1f} times if only blocks are" in text
    assert max(out[FLOAT32], dk[FLOAT32]) < 1.01
    measured = {(row["backend"], row["world"]): row for row in sources.accuracy}
    last = measured["triton", 32]["out"] / measured["triton", 1]["out"]
    assert f"Triton's kernels have {last:.2f} times the error of one rank in out at 32 ranks" in text
    aten = max(measured["aten", 8][name] / measured["aten", 1][name] for name in NAMES)
    assert f"the second policy, too: {aten:.2f} times at 8 ranks" in text
    longer = [row for row in sources.prefill if row["S"] >= 65536 and row["world"] == 8]
    assert min(row[schedule] for row in longer for schedule in ("ring", "allgather", "ulysses")) >= 0.9
    slower = [row["ours / cuDNN"] - 1 for row in sources.decode if row["ours / cuDNN"] > 1]
    assert len(slower) == 7
    assert f"by {min(slower):.1%} to {max(slower):.0%}" in text


def test_the_command(tmp_path, monkeypatch):
    run = CliRunner().invoke
    assert "--plot" in run(app, []).output
    assert run(app, []).exit_code == 2
    monkeypatch.setattr("benchmarks.why.__main__.compute", lambda: {"errors": [], "bytes": []})
    monkeypatch.setattr("benchmarks.why.__main__.draw_figures", lambda sources, folder: [folder / "x.svg"])
    saved = tmp_path / "why.json"
    shown = run(app, ["--json", str(saved), "--plot", str(tmp_path)])
    assert shown.exit_code == 0
    assert "x.svg" in shown.output
    assert set(json.loads(saved.read_text())["sections"]) == {"errors", "bytes"}
