"""The HTML of a report: one file, its sections and tables, and nothing in the data can become markup."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from attnmesh.core.layouts import Striped, Zigzag
from attnmesh.core.masks import Causal
from attnmesh.generation.requests import GenerationStats
from attnmesh.plan.shards import Shape
from attnmesh.report import GeneratedAnswer, generation_report, schedule_report, write_report
from attnmesh.report.page import drawing_data, page
from attnmesh.trace.timeline import Span
from attnmesh.verify.mode import Mode, Outcome

SHAPE = Shape(1, 8, 2, 16, 2, 4)
EVIL = "</script><img src=x onerror=alert(1)>&\"'<!--"
MODE = Mode("ring <zigzag>", "1x1", lambda seed, device: [])


class Read(HTMLParser):
    """Tags with their attributes, and the text of every script and table cell."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if self._open:
            self.texts[self._open[-1]][-1] += data


@pytest.fixture(scope="module")
def report():
    return schedule_report(Causal(), Zigzag(), 64, 4, SHAPE, facts={"written": "today"})


def test_the_page_needs_no_network(report):
    text = page(report)
    assert set(re.findall(r"https?://[^\s\"')]+", text)) == {"http://www.w3.org/2000/svg"}  # a namespace, not fetched
    for tag, attributes in Read(text).tags:
        assert not {"src", "srcset", "data", "action"} & set(attributes), tag
        assert attributes.get("href", "data:").startswith("data:")
    assert "@import" not in text
    assert "url(http" not in text
    assert not re.search(r"\b(fetch|XMLHttpRequest|importScripts|WebSocket)\b", text)


def test_the_data_inside_is_the_drawing_data(report):
    read = Read(page(report))
    assert json.loads(read.texts["script"][0]) == json.loads(json.dumps(drawing_data(report)))


def test_text_in_the_data_never_becomes_markup(report):
    figures = {EVIL: [{EVIL: EVIL, "n": 3}]}
    spans = [Span(0, "compute", EVIL, 0.0, 1.0, {EVIL: EVIL})]
    text = page(replace(report, facts={EVIL: EVIL}, figures=figures, timelines={EVIL: spans}))
    read = Read(text)
    assert not [attributes for tag, attributes in read.tags if tag == "img"]
    assert not any(name.startswith("on") for _, attributes in read.tags for name in attributes)
    assert len(read.texts["script"]) == 2
    told = json.loads(read.texts["script"][0])["timelines"][0]
    assert (told["name"], told["spans"][0][2]) == (EVIL, EVIL)
    assert EVIL in read.texts["dt"]
    assert EVIL in read.texts["td"]


def table_of(text: str, section: str) -> list[list[str]]:
    """The rows of the first table of a section."""
    inside = text[text.index(f'<section id="{section}"') :]
    inside = inside[: inside.index("</section>")]
    return [Read(row).texts["td"] for row in re.findall(r"<tr[^>]*><td.*?</tr>", inside)]


def test_tables_show_outcomes_and_figures(report):
    outcomes = [Outcome(MODE, "dq", 3e-7, 1e-6), Outcome(MODE, "out", float("nan"), 1e-6)]
    figures = {"generate": [{"rank": 0, "seconds": 0.5, "bytes": 1234567}, {"rank": 1, "note": "late"}]}
    text = page(replace(report, outcomes=outcomes, figures=figures))
    assert table_of(text, "exactness") == [
        ["ring <zigzag>", "1x1", "dq", "3.0e-07", "1.0e-06", "exact"],
        ["ring <zigzag>", "1x1", "out", "nan", "1.0e-06", "WRONG"],
    ]
    assert table_of(text, "figures") == [["0", "0.500", "1,234,567", ""], ["1", "", "", "late"]]


def test_schedules_are_ranked_and_unsupported_ones_have_a_reason():
    report = schedule_report(Causal(), Striped(), 60, 6, SHAPE)
    rows = table_of(page(report), "selection")
    served = sorted(report.choice.seconds, key=lambda name: report.choice.seconds[name])
    assert [row[0] for row in rows] == [*served, *report.choice.unsupported]
    assert rows[0][5] == "selected: lowest estimated time"
    assert rows[1][5].endswith("% slower")
    assert report.choice.unsupported
    assert all(why in row[5] for row, why in zip(rows[len(served) :], report.choice.unsupported.values(), strict=True))


def test_close_estimates_are_called_a_tie(report):
    cost = report.choice.costs["ring"]
    choice = replace(
        report.choice, schedule="ring", costs={"ring": cost, "allgather": replace(cost, seconds=cost.seconds * 1.001)}
    )
    rows = table_of(page(replace(report, choice=choice)), "selection")
    assert [row[5] for row in rows[:2]] == ["selected: lowest estimated time", "tie with the selected schedule"]


def test_empty_sections_are_left_out(report, tmp_path):
    write_report(tmp_path / "report.html", report)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text == page(report)
    sections = [attributes.get("aria-labelledby") for tag, attributes in Read(text).tags if tag == "section"]
    assert sections == ["run-title", "tokens-title", "mask-title", "loads-title", "timeline-title", "selection-title"]


def test_the_hardware_of_estimates_and_the_passes_are_named(report):
    text = page(report)
    selection = text[text.index('<section id="selection"') :]
    assert f"forward + backward, on {report.hardware}" in selection[: selection.index("<table")]
    assert report.hardware in Read(text).texts["dd"]
    assert "ring, forward, simulated" in text


def stats(world: int) -> list[GenerationStats]:
    return [
        GenerationStats(
            rank, cached_tokens=100 + rank, kv_bytes=2**20, kv_bytes_unsharded=9 * 2**20, bytes_sent=2**21,
            generated_tokens=11, decode_steps=9, draft_tokens=4, accepted_tokens=3, prefill_seconds=0.5 + rank,
            decode_seconds=2.0,
        )
        for rank in range(world)
    ]  # fmt: skip


class TestGenerationReport:
    def test_questions_and_answers_of_the_run_are_shown(self):
        answers = [GeneratedAnswer("Who?", EVIL, 50, 6), GeneratedAnswer("When?", "Then.", 52, 5)]
        text = page(generation_report(answers, stats(3), facts={"model": "tiny"}))
        read = Read(text)
        assert read.texts["h3"] == ["Who?", "When?"]
        assert read.texts["blockquote"] == [EVIL, "Then."]
        assert "50 prompt tokens, 6 new tokens" in text
        sections = [attributes["id"] for tag, attributes in read.tags if tag == "section"]
        assert sections == ["run", "answers", "ranks"]  # nothing simulated, and no comparison without one
        assert json.loads(read.texts["script"][0]) is None
        assert {"3", "2 prompts, 102 tokens", "tiny"} <= set(read.texts["dd"])

    def test_every_rank_has_its_figures(self):
        report = generation_report([GeneratedAnswer("Who?", "Me.", 50, 11)], stats(3))
        rows = table_of(page(report), "ranks")
        assert rows[1] == ["1", "", "101", "1.000", "2.000", "1.500", "2.000", "5.000"]
        rows = table_of(page(replace(report, speculative=True)), "ranks")
        assert rows[2][-3:] == ["9", "4", "3"]

    def test_many_ranks_are_summed_by_node(self):
        text = page(generation_report([GeneratedAnswer("Who?", "Me.", 50, 11)], stats(32), ranks_per_node=8))
        rows = table_of(text, "ranks")
        assert rows[1] == ["1", "", str(sum(range(108, 116))), "8.000", "16.000", "15.500", "2.000", "5.000"]
        assert len(rows) == 4
        assert "Per-node figures" in text

    def test_the_comparison_with_one_process_is_shown(self):
        answers = [GeneratedAnswer("Who?", "Me.", 50, 6, 6, 1e-6), GeneratedAnswer("When?", "Then.", 52, 5, 2, 0.5)]
        rows = table_of(page(generation_report(answers, stats(2))), "comparison")
        assert rows == [["1", "Who?", "6", "6", "1.0e-06", "same"], ["2", "When?", "5", "2", "5.0e-01", "DIFFERENT"]]


def test_cells_carry_the_name_of_their_column_for_phones(report):
    cells = [attributes for tag, attributes in Read(page(report)).tags if tag == "td"]
    assert {cell["data-label"] for cell in cells} >= {"schedule", "estimated time", "exposed communication", "verdict"}


def test_every_control_has_a_label(report):
    text = page(report)
    ids = re.findall(r'<(?:select|input|button|canvas)\b[^>]*\bid="([^"]+)"', text)
    assert {"schedule", "group", "step", "play", "heads", "theme", "tiles"} <= set(ids)
    for name in ids:
        inside = rf'<label[^>]*>(?:<span[^>]*>[^<]*</span>|[^<])*<(?:select|input)\b[^>]*\bid="{name}"'
        opened = next(tag for tag in re.findall(r"<[a-z]+\b[^>]*>", text) if f' id="{name}"' in tag)
        assert re.search(inside, text) or f'for="{name}"' in text or "aria-label" in opened or "<button" in opened, name
