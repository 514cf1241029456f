"""Chromium for tests of pages, and the contrast of their texts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest


def chromium() -> Iterator[Any]:
    """A browser, for a fixture; skips the test where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no Chromium is installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


# The contrast of every text with what lies behind it, as the web's accessibility guidelines compute it.
CONTRASTS = r"""() => {
  const numbers = (colour) => colour.match(/[\d.]+/g).map(Number);
  const linear = (x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  const light = (colour) => {
    const [r, g, b] = numbers(colour).map((x) => linear(x / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if ((numbers(colour)[3] ?? 1) > 0.5) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const kinds = "h1,h2,h3,p,dt,dd,td,th,label,legend,button,select,output,figcaption,.name,.count,b,.switch span";
  const shown = [...document.querySelectorAll(kinds)].filter((node) => node.textContent.trim() && node.offsetParent);
  return shown.map((node) => {
    const pair = [light(getComputedStyle(node).color), light(behind(node))];
    const contrast = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    return [contrast, `${node.tagName} ${node.textContent.trim().slice(0, 30)}`];
  });
}"""
