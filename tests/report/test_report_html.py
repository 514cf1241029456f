"""The page as text: one file that needs nothing else, and nothing in the data can become markup."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from attnmesh.core.layouts import Striped, Zigzag
from attnmesh.core.masks import Causal
from attnmesh.plan.workload import Shape
from attnmesh.report import make_report, write_report
from attnmesh.report.page import page
from attnmesh.report.picture import picture
from attnmesh.trace.timeline import Span
from attnmesh.verify.attention import Outcome
from attnmesh.verify.mode import ComparedMode

SHAPE = Shape(1, 8, 2, 16, 2, 4)
EVIL = "</script><img src=x onerror=alert(1)>&\"'<!--"
MODE = ComparedMode("ring <zigzag>", "1x1", lambda seed, device: [])


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
    return make_report(Causal(), Zigzag(), 64, 4, SHAPE, facts={"written": "today"})


def test_the_page_refers_to_nothing_outside_itself(report):
    text = page(report)
    assert set(re.findall(r"https?://[^\s\"')]+", text)) == {"http://www.w3.org/2000/svg"}  # a namespace, not fetched
    for tag, attributes in Read(text).tags:
        assert not {"src", "srcset", "data", "action"} & set(attributes), tag
        assert attributes.get("href", "data:").startswith("data:")
    assert "@import" not in text
    assert "url(http" not in text
    assert not re.search(r"\b(fetch|XMLHttpRequest|importScripts|WebSocket)\b", text)


def test_the_data_inside_is_the_picture(report):
    read = Read(page(report))
    assert json.loads(read.texts["script"][0]) == json.loads(json.dumps(picture(report)))


def test_text_from_outside_stays_text(report):
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


def test_tables_say_what_was_found(report):
    outcomes = [Outcome(MODE, "dq", 3e-7, 1e-6), Outcome(MODE, "out", float("nan"), 1e-6)]
    figures = {"generate": [{"rank": 0, "seconds": 0.5, "bytes": 1234567}, {"rank": 1, "note": "late"}]}
    cells = Read(page(replace(report, outcomes=outcomes, figures=figures))).texts["td"]
    assert cells[:12] == [
        "ring <zigzag>", "1x1", "dq", "3.0e-07", "1.0e-06", "exact",
        "ring <zigzag>", "1x1", "out", "nan", "1.0e-06", "WRONG",
    ]  # fmt: skip
    assert cells[12:20] == ["0", "0.500", "1,234,567", "", "1", "", "", "late"]


def test_reasons_are_ranked_and_refusals_say_why():
    report = make_report(Causal(), Striped(), 60, 6, SHAPE)
    cells = Read(page(report)).texts["td"]
    rows = [cells[i : i + 5] for i in range(0, len(cells), 5)]
    served = sorted(report.choice.seconds, key=lambda name: report.choice.seconds[name])
    assert [row[0] for row in rows] == [*served, *report.choice.refusals]
    assert rows[0][4] == "chosen: its slowest rank is done first"
    assert rows[1][4].endswith("% slower by estimate")
    assert report.choice.refusals
    assert all(why in row[4] for row, why in zip(rows[len(served) :], report.choice.refusals.values(), strict=True))


def test_a_page_without_anything_extra_says_so(report, tmp_path):
    write_report(tmp_path / "report.html", report)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text == page(report)
    assert "No figures were given." in text
    assert "Nothing was checked for this report." in text


def test_every_control_has_a_label(report):
    text = page(report)
    ids = re.findall(r'<(?:select|input|button|canvas)\b[^>]*\bid="([^"]+)"', text)
    assert {"schedule", "rank", "step", "play", "heads", "theme", "tiles"} <= set(ids)
    for name in ids:
        inside = rf'<label[^>]*>[^<]*<(?:select|input)\b[^>]*\bid="{name}"'
        opened = next(tag for tag in re.findall(r"<[a-z]+\b[^>]*>", text) if f' id="{name}"' in tag)
        assert re.search(inside, text) or f'for="{name}"' in text or "aria-label" in opened or "<button" in opened, name
