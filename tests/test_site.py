"""The documentation site: every page has a place in it, every public name a reference, and it needs no network."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import pytest

from attnmesh.utils.optional import installed

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GENERATED = {"security.md", "contributing.md", "changelog.md", "examples.md"}  # by docs/hooks.py
PUBLIC_MODULES = (
    "attnmesh", "attnmesh.training.accelerate", "attnmesh.training.data_parallel",
    "attnmesh.ring_flash_attn", "attnmesh.report", "attnmesh.sparse", "attnmesh.decode", "attnmesh.models",
    "attnmesh.recurrent", "attnmesh.training.verl",
)  # fmt: skip
# The code in tables that is shown on more than one line.
BROKEN_CODE = (
    "[...document.querySelectorAll('td code')].filter(x => x.getClientRects().length > 1).map(x => x.textContent)"
)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

needs_mkdocs = pytest.mark.skipif(
    not all(map(installed, ("mkdocs", "material", "mkdocstrings"))), reason="the extra 'docs' is not installed"
)


def referenced() -> list[str]:
    """The names that the pages of the reference document, in order."""
    pages = sorted((DOCS / "reference").glob("*.md"))
    return [name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), flags=re.MULTILINE)]


def public() -> set[str]:
    return {f"{module}.{name}" for module in PUBLIC_MODULES for name in importlib.import_module(module).__all__}


def pages_in(nav: object) -> list[str]:
    match nav:
        case str():
            return [nav]
        case dict():
            return [page for inner in nav.values() for page in pages_in(inner)]
        case list():
            return [page for inner in nav for page in pages_in(inner)]
    raise AssertionError(nav)


def test_every_public_name_is_in_the_reference_once():
    assert public() - set(referenced()) == set()
    assert [name for name, count in Counter(referenced()).items() if count > 1] == []


def test_every_name_of_the_reference_exists():
    for name in referenced():
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_modules_that_features_names_are_public():
    named = set(re.findall(r"attnmesh\.(?:\w+\.)*\w+", (DOCS / "features.md").read_text()))
    assert {name for name in named if name not in PUBLIC_MODULES and name not in public()} == set()


@needs_mkdocs
def test_every_page_has_one_place_in_the_navigation():
    from mkdocs.utils.yaml import yaml_load

    with (ROOT / "mkdocs.yml").open() as file:
        nav = pages_in(yaml_load(file)["nav"])
    on_disk = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(nav) == sorted(on_disk | GENERATED)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    where = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(where)],
        cwd=ROOT, capture_output=True, text=True, timeout=500, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return where


@pytest.mark.sweep
@needs_mkdocs
def test_the_site_builds_without_a_warning_and_documents_every_name(site):
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    names = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}
    assert set(referenced()) - names == set()


@pytest.mark.sweep
@needs_mkdocs
def test_the_site_loads_nothing_from_elsewhere(site):
    for path in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"?([^\"\s>]+)", path.read_text())
        assert [url for url in loaded if url.startswith(("http:", "https:", "//"))] == [], path.name


@pytest.mark.sweep
@needs_mkdocs
def test_reports_that_the_site_embeds_are_in_it(site):
    embedded = re.findall(r"<iframe[^>]*src=\"([^\"#]+)#([^\"]+)\"", (site / "schedules.html").read_text())
    assert [schedule for _, schedule in embedded] == ["ring", "ring", "ulysses"]
    assert len({name for name, _ in embedded}) == 2
    for name, schedule in embedded:
        assert f'"name":"{schedule}"' in (site / name).read_text()


@pytest.mark.sweep
@needs_mkdocs
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_site_works_in_a_browser_without_a_server(site):
    sync_api = pytest.importorskip("playwright.sync_api")
    wrong: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="light")
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: request.url.startswith("http") and wrong.append(request.url))
        for path in sorted(site.rglob("*.html")):
            if path.parent.name != "reports" and path.name != "404.html":
                page.goto(path.as_uri())
                assert page.evaluate("document.documentElement.scrollWidth") <= 390, path.name
                assert page.evaluate(BROKEN_CODE) == [], path.name

        page.goto((site / "schedules.html").as_uri())
        for at, schedule in enumerate(("ring", "ring", "ulysses")):
            page.locator("iframe.report").nth(at).scroll_into_view_if_needed()
            report = page.frame_locator("iframe.report").nth(at)
            sync_api.expect(report.locator("#schedule")).to_have_value(schedule)
        paper = "getComputedStyle(document.body).backgroundColor"
        ulysses = next(frame for frame in page.frames if frame.url.endswith("#ulysses"))
        before = ulysses.evaluate(paper)
        page.evaluate("document.body.setAttribute('data-md-color-scheme', 'slate')")
        ulysses.wait_for_function(f"{paper} !== '{before}'")

        page.set_viewport_size({"width": 1280, "height": 900})
        page.goto((site / "index.html").as_uri())
        page.locator(".md-search__input").first.click()
        page.keyboard.type("gather_log_probs")
        page.locator(".md-search-result__item").first.wait_for(timeout=20_000)
        browser.close()
    assert wrong == []
