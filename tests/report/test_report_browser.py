"""The page in Chromium: drawings, controls, phone width, and no network requests."""

import re

import pytest

from attnmesh.core.layouts import Zigzag
from attnmesh.core.masks import Causal
from attnmesh.generation.requests import GenerationStats
from attnmesh.plan.shards import Shape
from attnmesh.report import GeneratedAnswer, generation_report, schedule_report, write_report
from attnmesh.trace.timeline import Span
from attnmesh.verify.mode import Mode, Outcome
from helpers.browser import CONTRASTS, chromium

sync_api = pytest.importorskip("playwright.sync_api")
browser = pytest.fixture(scope="module")(chromium)

WORLD = 4
EVIL = "<img src=x onerror=\"document.title='taken'\">"


def ring_spans() -> list[Span]:
    """Every rank computes for 3 ms per step, with transfers of 2 ms; rank 0 waits once."""
    spans = [
        Span(rank, track, EVIL, 3e-3 * step + begin, 3e-3 * step + end, {"step": step})
        for rank in range(WORLD)
        for step in range(WORLD)
        for track, begin, end in (("compute", 0.0, 3e-3), ("send", 0.0, 2e-3), ("receive", 1e-4, 2e-3))
    ]
    return [*spans, Span(0, "wait", "keys", 12e-3, 13e-3)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    outcome = Outcome(Mode("ring", "1x1", lambda seed, device: []), "dq", 1e-7, 1e-6)
    report = schedule_report(
        Causal(), Zigzag(), 512, WORLD, Shape(1, 8, 2, 64, 2, 4), ranks_per_node=2, facts={"written": EVIL},
        timelines={"simulated": ring_spans()}, outcomes=[outcome], figures={EVIL: [{"rank": 0, "a long name": 1.5}]},
    )  # fmt: skip
    where = tmp_path_factory.mktemp("report") / "report.html"
    write_report(where, report)
    return where


@pytest.fixture(scope="module")
def on_a_desk(browser):
    return browser.new_page(viewport={"width": 1200, "height": 800}, color_scheme="light")


@pytest.fixture
def open_page(browser, on_a_desk, path):
    """Open the page; afterwards assert that it logged, threw and requested nothing."""
    opened, wrong = [], []

    def logged(message):
        wrong.append(f"logged {message.text}")

    def threw(error):
        wrong.append(f"threw {error}")

    def requested(request):
        if request.url != path.as_uri() and not request.url.startswith("data:"):
            wrong.append(f"requested {request.url}")

    listeners = {"console": logged, "pageerror": threw, "request": requested}

    def opening(**options):
        page = browser.new_page(**options) if options else on_a_desk
        for event, listener in listeners.items():
            page.on(event, listener)
        page.set_viewport_size(options.get("viewport", {"width": 1200, "height": 800}))
        page.set_default_timeout(10_000)
        page.goto(path.as_uri())
        opened.append(page)
        return page

    yield opening
    for page in opened:
        assert page.title() == "attnmesh report: 4 ranks, 512 tokens"  # no text became markup
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
        if page is not on_a_desk:
            page.close()
    assert wrong == []


def tiles(page) -> str:
    return page.evaluate("document.getElementById('tiles').toDataURL()")


def colors(page) -> int:
    """The number of colors of the tiles."""
    return page.evaluate(
        """() => {
          const canvas = document.getElementById("tiles");
          const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          return new Set(new Uint32Array(pixels.buffer)).size;
        }"""
    )


def drawn(page) -> dict[str, str]:
    """The content of every drawing."""
    inside = {name: page.locator(f"#{name}").inner_html() for name in ("strips", "now-table", "wheel", "loads")}
    return {**inside, "timelines": page.locator("#timelines").inner_html(), "tiles": tiles(page)}


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


def test_every_drawing_has_its_elements(open_page):
    page = open_page()
    assert page.locator("#strips .strip").count() == WORLD + 1
    assert (
        page.locator("#strips .whole i").count() == 2 * WORLD - 1
    )  # two runs per rank; those of the last rank are joined
    assert page.locator("#wheel circle").count() == WORLD
    assert page.locator("#loads tbody tr").count() == 2 * WORLD
    assert page.locator(".timeline:nth-child(2) rect").count() == 1 + 3 * WORLD * WORLD + 1  # one is the hatching's
    summaries = page.locator(".timeline p:not(.detail)").all_inner_texts()
    assert ["estimated for h200, nvlink4" in summary for summary in summaries] == [True, False]
    assert page.locator("#timelines text", has_text="rank 3").count() == 2  # simulated, and as given
    assert page.locator("img").count() == 0
    assert colors(page) > WORLD


def test_a_selected_rank_stands_out_in_every_drawing(open_page):
    page = open_page()
    page.select_option("#schedule", "ring")
    before = drawn(page)
    page.select_option("#group", "2")
    assert changed(before, drawn(page)) == set(before)
    assert page.locator("#strips .strip.dim").count() == WORLD - 1
    page.select_option("#group", "-1")
    assert changed(before, drawn(page)) == set()


def test_a_selected_step_shows_its_computation_and_messages(open_page):
    page = open_page()
    page.select_option("#schedule", "ring")
    before = drawn(page)
    page.locator("#step").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#step-name").inner_text() == "Step 2 of 4: keys of rank r + 1"
    assert changed(before, drawn(page)) == set(before) - {"loads"}
    assert page.locator("#now-title").inner_text() == "Forward, step 2 of 4"
    assert page.locator("#strips .used i").count() > 0
    assert page.locator(".timeline:nth-child(2) rect[opacity='0.15']").count() == 3 * WORLD * (WORLD - 1)
    second = tiles(page)
    page.keyboard.press("End")
    assert "No communication" in page.locator("#now-text").inner_text()
    assert tiles(page) != second
    page.keyboard.press("Home")
    assert changed(before, drawn(page)) == set()


@pytest.mark.sweep
def test_play_goes_through_all_steps(open_page):
    page = open_page(color_scheme="light")  # a page of its own: its clock stands still
    page.clock.install()
    page.reload()
    page.click("#play")
    assert page.locator("#step").input_value() == "1"
    assert page.locator("#play").get_attribute("aria-label") == "Stop"
    page.clock.run_for(60_000)
    assert page.locator("#step").input_value() == page.locator("#step").get_attribute("max")
    assert page.locator("#play").get_attribute("aria-label") == "Play the steps"


@pytest.mark.sweep
def test_every_schedule_has_drawings_of_its_own(open_page):
    page = open_page()
    names = page.locator("#schedule option").evaluate_all("all => all.map(option => option.value)")
    assert names == ["ring", "allgather", "ulysses", "ulysses+ring", "ulysses+allgather", "ring+ring"]
    seen = set()
    for name in names:
        page.select_option("#schedule", name)
        assert page.locator("#heads-field").is_visible() == ("ulysses" in name), name
        page.check("input[name=color][value=step]", force=True)
        by_step = tiles(page)
        page.check("input[name=color][value=rank]", force=True)
        seen.add((tiles(page), by_step, page.locator("#loads").inner_html(), page.locator("#now-text").inner_text()))
    assert len(seen) == len(names)


@pytest.mark.sweep
def test_under_ulysses_a_rank_shows_its_own_heads(open_page):
    page = open_page()
    page.select_option("#schedule", "ulysses")
    assert page.locator("#heads option").all_inner_texts() == [
        "heads 0 to 1",
        "heads 2 to 3",
        "heads 4 to 5",
        "heads 6 to 7",
    ]
    before = tiles(page)
    page.select_option("#group", "3")
    assert page.locator("#heads").input_value() == "3"
    page.select_option("#group", "-1")
    page.select_option("#heads", "0")
    assert tiles(page) == before


@pytest.mark.sweep
def test_color_and_order_switches(open_page):
    page = open_page()
    page.select_option("#schedule", "ring")
    first = tiles(page)
    page.locator("input[name=color][value=rank]").focus()
    page.keyboard.press("ArrowRight")
    second = tiles(page)
    page.locator("input[name=order][value=sequence]").focus()
    page.keyboard.press("ArrowRight")
    assert len({first, second, tiles(page)}) == 3
    assert "step 1" in page.locator("#legend").inner_text()


@pytest.mark.sweep
def test_the_tile_under_the_pointer_is_described(open_page):
    page = open_page()
    page.select_option("#schedule", "ring")
    box = page.locator("#tiles").bounding_box()
    page.locator("#tiles").hover(position={"x": 16, "y": box["height"] - 4})
    text = page.locator("#tile-text").inner_text()
    assert re.match(r"Queries 504 to 511 \(rank 0\), keys 0 to 7 \(rank 0\): all 64 pairs visible\.", text)
    assert text.endswith("Computed by rank 0 in step 1: keys of rank r.")
    page.locator("#tiles").hover(position={"x": box["width"] - 4, "y": 16})
    assert "masked, not computed" in page.locator("#tile-text").inner_text()
    page.locator("#tiles").focus()
    page.keyboard.press("ArrowLeft")
    assert "keys 496 to 503" in page.locator("#tile-text").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read_in_both_color_schemes(open_page, scheme):
    page = open_page(color_scheme=scheme)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(16, 19, 23)") == (scheme == "dark")
    found = page.evaluate(CONTRASTS)
    assert len(found) > 80
    assert [each for each in found if each[0] < 4.5] == []
    before = tiles(page)
    page.click("#theme")  # and the other way round
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != paper
    assert [each for each in page.evaluate(CONTRASTS) if each[0] < 4.5] == []
    assert tiles(page) != before


@pytest.mark.parametrize("width", [375, 320])
def test_a_phone_needs_no_sideways_scrolling(open_page, width):
    page = open_page(viewport={"width": width, "height": 700}, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#controls").bounding_box()["height"] < 200  # it stays on the screen, and must leave room
    page.locator("#tiles").scroll_into_view_if_needed()
    box = page.locator("#tiles").bounding_box()
    page.touchscreen.tap(box["x"] + box["width"] / 4, box["y"] + box["height"] * 3 / 4)
    assert "Computed by rank" in page.locator("#tile-text").inner_text()


@pytest.mark.sweep
def test_drawings_follow_the_width_of_the_window(open_page):
    page = open_page()
    page.set_viewport_size({"width": 500, "height": 800})
    page.wait_for_function("document.getElementById('tiles').width === document.getElementById('tiles').clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth") <= 500
    assert page.locator("#timelines svg").first.bounding_box()["width"] <= 500
    times = (
        page.locator("#timelines svg").first.locator("text", has_text=re.compile("^0$| [mµ]?s$")).all_text_contents()
    )
    assert times[0] == "0"
    assert len(times) > 1  # a scale has a second mark at any width


def test_the_keyboard_reaches_every_control(open_page):
    page = open_page()
    page.select_option("#schedule", "ulysses")
    page.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.name"))
    assert [name for name in reached if name][:9] == [
        "theme", "schedule", "group", "play", "step", "color", "order", "heads", "tiles",
    ]  # fmt: skip


CARDS = """() => [...document.querySelectorAll("#selection tbody tr")].map((row) => {
  const cells = [...row.cells].filter((cell) => getComputedStyle(cell).display !== "none");
  return cells.map((cell) => [getComputedStyle(cell, "::before").content, cell.getBoundingClientRect().top]);
})"""


def overflowing(page) -> list[str]:
    """Elements that scroll sideways."""
    return page.evaluate(
        """() => [...document.querySelectorAll("*")].filter((each) => each.scrollWidth > each.clientWidth + 1
          && ["auto", "scroll"].includes(getComputedStyle(each).overflowX))
          .map((each) => each.outerHTML.slice(0, 80))"""
    )


@pytest.mark.sweep
def test_wide_tables_stack_on_a_phone(open_page):
    page = open_page(viewport={"width": 320, "height": 700})
    assert overflowing(page) == []
    for row in page.evaluate(CARDS):
        assert [label for label, _ in row][:2] == ['"schedule"', '"estimated time"']
        assert len({top for _, top in row}) == len(row)  # one below the other
    page.set_viewport_size({"width": 1200, "height": 800})
    assert all(len({top for _, top in row}) == 1 and row[0][0] == "none" for row in page.evaluate(CARDS))


def other_page(browser, tmp_path, report, **options):
    write_report(tmp_path / "report.html", report)
    page = browser.new_page(**options)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto((tmp_path / "report.html").as_uri())
    assert wrong == []
    return page


@pytest.mark.sweep
def test_many_ranks_are_drawn_by_node(browser, tmp_path):
    report = schedule_report(Causal(), Zigzag(), 160, 20, Shape(1, 8, 2, 64, 2, 4), ranks_per_node=5)
    page = other_page(browser, tmp_path, report, viewport={"width": 375, "height": 700})
    assert overflowing(page) == []
    assert page.locator("#strips .name").all_inner_texts() == ["all", "node 0", "node 1", "node 2", "node 3"]
    assert page.locator("#wheel circle").count() == 4
    assert page.locator("#loads tbody tr").count() == 8
    assert page.locator("#now-table tbody tr").count() == 4
    assert page.locator("#timelines text", has_text="node").count() == 4
    assert page.locator("#group option").all_inner_texts()[1] == "node 0 (ranks 0 to 4)"
    page.select_option("#group", "2")
    assert page.locator("#strips .strip.dim").count() == 3
    page.close()


@pytest.mark.sweep
def test_a_single_rank_has_no_communication(browser, tmp_path):
    page = other_page(browser, tmp_path, schedule_report(Causal(), Zigzag(), 64, 1, Shape(1, 8, 2, 64, 2, 4)))
    assert page.locator("h1").inner_text() == "1 rank, 64 tokens"
    assert page.locator("#now-title").inner_text() == "Forward, 1 step"
    assert page.locator("#loads h3").all_inner_texts() == ["FLOPs"]
    assert page.locator("#wheel svg").count() == 0
    page.close()


@pytest.mark.sweep
def test_a_generation_report_needs_no_drawings(browser, tmp_path):
    answers = [GeneratedAnswer("Who?", "word " * 200, 50, 200, 200, 1e-6)]
    stats = [
        GenerationStats(rank, cached_tokens=60 + rank, generated_tokens=200, decode_seconds=1.0) for rank in range(4)
    ]
    page = other_page(browser, tmp_path, generation_report(answers, stats), viewport={"width": 320, "height": 700})
    assert overflowing(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    assert page.locator("section h2").all_inner_texts()[1:] == [
        "Questions and answers", "Per-rank figures", "Comparison with a single process",
    ]  # fmt: skip
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != paper
    page.close()


def test_a_link_names_the_schedule_and_an_embedding_page_the_colors(browser, path, tmp_path):
    outer = tmp_path / "outer.html"
    outer.write_text(f'<iframe src="{path.as_uri()}#allgather"></iframe>')
    page = browser.new_page(color_scheme="light")
    page.goto(outer.as_uri())
    report = page.frame_locator("iframe")
    sync_api.expect(report.locator("#schedule")).to_have_value("allgather")
    page.evaluate("frames[0].postMessage({theme: '<b>'}, '*')")
    page.evaluate("frames[0].postMessage({theme: 'dark'}, '*')")
    sync_api.expect(report.locator("html")).to_have_attribute("data-theme", "dark")
    sync_api.expect(report.locator("#theme")).to_have_text("Light")
    page.close()
