"""The page at `/` in Chromium: a chat, ranks and requests, the key, phone width and both color schemes."""

import pytest

from attnmesh.plan.decode import DecodeSharding
from helpers.browser import CONTRASTS, chromium

for name in ("transformers", "openai", "fastapi", "uvicorn", "prometheus_client", "llguidance"):
    pytest.importorskip(name)

from helpers.serving import NAME, virtual_server, write_byte_model, write_model  # noqa: E402

sync_api = pytest.importorskip("playwright.sync_api")
browser = pytest.fixture(scope="module")(chromium)
EVIL = "<img src=x onerror=\"document.title='taken'\">"


@pytest.fixture(scope="module")
def server(browser, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    how = {"sharding": DecodeSharding(cp=2), "cache_tokens": 1024}
    with virtual_server(write_byte_model(folder / "model"), folder, **how) as server:
        yield server


@pytest.fixture
def open_page(browser):
    """Open the page of a server; afterwards assert that it logged and threw nothing, and asked no other host."""
    opened, wrong = [], []

    def opening(server, expected=(), **options):
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 844}, "color_scheme": "light", **options})
        page.set_default_timeout(20_000)
        logged, asked = [], []
        page.on("console", lambda message: logged.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda each: asked.append(each.url))
        page.goto(server.url)
        opened.append((page, server.url, logged, asked, expected))
        return page

    yield opening
    for page, url, logged, asked, expected in opened:
        assert page.title() == f"{NAME} · attnmesh"  # no text became markup
        assert [each for each in asked if not each.startswith((url, "data:"))] == []
        assert [each for each in logged if not any(part in each for part in expected)] == []
        page.close()
    assert wrong == []


def ask(page, text, most=20):
    for name, value in (("most", most), ("temperature", 0)):
        page.evaluate("([name, value]) => { document.getElementById(name).value = value }", [name, value])
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def wait_for_answers(page, count):
    sync_api.expect(page.locator(".figures")).to_have_count(count, timeout=20_000)


def test_a_conversation(open_page, server):
    page = open_page(server)
    page.wait_for_selector("#state.on")
    messages = []
    for text in (EVIL, "And\nmore?"):
        ask(page, text)
        messages.append({"role": "user", "content": text})
        how = {"model": NAME, "messages": messages, "max_tokens": 20, "temperature": 0}
        wanted = server.client().chat.completions.create(**how).choices[0].message.content
        messages.append({"role": "assistant", "content": wanted})
        wait_for_answers(page, len(messages) // 2)
    page.wait_for_selector("#send:visible")
    found = page.evaluate("[...document.querySelectorAll('.message > .text')].map((each) => each.textContent)")
    assert found == [each["content"] for each in messages]
    assert "20 tokens" in page.locator(".figures").last.inner_text()
    page.click("#new")
    assert page.locator(".message").count() == 0


def test_ranks_requests_and_the_end_of_an_answer(open_page, server):
    page = open_page(server, expected=("400",))
    page.wait_for_selector(".rank")
    assert page.locator(".rank h3").all_inner_texts() == ["Rank 0\nCP 0", "Rank 1\nCP 1"]
    assert page.locator(".positions b").all_inner_texts()[:4] == ["0", "1", "0", "1"]
    for _ in range(5):  # an answer may end by itself
        ask(page, "Hello", most=900)
        page.wait_for_selector(".request, .figures")
        if page.locator(".request").count():
            break
    assert "rank 0: " in page.locator(".request").first.inner_text()
    page.click("#stop")
    page.wait_for_selector("#send:visible")
    sync_api.expect(page.locator(".request")).to_have_count(0)  # it is cancelled
    assert "stopped" in page.locator(".figures").last.inner_text()
    ask(page, "a" * 2000)
    page.wait_for_selector(".error")
    assert "exceed 1024 tokens" in page.locator(".error").inner_text()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("dark", 390), ("light", 320)])
def test_all_can_be_read_on_every_screen(open_page, server, scheme, width):
    page = open_page(server, color_scheme=scheme, viewport={"width": width, "height": 700})
    page.wait_for_selector("#state.on")
    ask(page, "Hello")
    wait_for_answers(page, 1)
    found = page.evaluate(CONTRASTS)
    if width < 1000:
        assert not page.locator("#ranks").is_visible()
        page.click("#switch")
        assert page.locator("#ranks").is_visible()
        found += page.evaluate(CONTRASTS)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert len(found) > 15
    assert [each for each in found if each[0] < 4.5] == []
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(16, 19, 23)") == (scheme == "dark")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != paper
    assert [each for each in page.evaluate(CONTRASTS) if each[0] < 4.5] == []


def test_a_key_is_asked_for(open_page, server, browser, tmp_path):
    with virtual_server(write_model(tmp_path), tmp_path, api_keys=("a-key-of-the-test",)) as own:
        page = open_page(own, expected=("401",))
        for key in ("a-wrong-one", "a-key-of-the-test"):
            page.fill("#key", key)
            page.press("#key", "Enter")
        page.wait_for_selector("#state.on")
        page.reload()  # it is kept in this tab
        page.wait_for_selector("#state.on")
        ask(page, "a b c", most=4)
        wait_for_answers(page, 1)
