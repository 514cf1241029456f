"""The Python blocks of README.md and docs/ run as they stand.

A block of the README stands alone. The blocks of a page run from top to bottom in one namespace. A text block after a
Python block is what it prints. A block that cannot run has an HTML comment above it, `<!-- not run: reason -->`.
"""

import re
import runpy
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = {
    "index": 1,
    "tutorials/train": 4,
    "tutorials/serve": 4,
    "tutorials/plan": 4,
    "state": 3,
    "recurrent": 7,
    "schedules": 1,
    "shardings": 2,
    "training": 2,
    "reproducibility": 2,
    "context-parallelism": 5,
    "masks": 7,
    "layouts": 3,
    "decode": 4,
    "sharded-generation": 4,
    "sparse-attention": 5,
    "debugging": 1,
    "planning": 1,
    "cluster": 1,
    "language-models": 4,
    "reference/attention": 1,
    "reference/masks": 1,
    "reference/layouts": 1,
    "reference/context-parallelism": 1,
    "reference/recurrent": 1,
    "reference/ranks": 1,
    "reference/decode": 1,
    "reference/kv-cache": 1,
    "reference/sharded-generation": 1,
    "reference/sparse-attention": 1,
    "reference/language-models": 1,
    "reference/integrations": 1,
    "reference/planner": 1,
    "migrating": 7,
}  # page: number of blocks that run

_BLOCK = re.compile(
    r"(<!-- not run: [^\n]+ -->\n)?^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", flags=re.DOTALL | re.MULTILINE
)


class Block(NamedTuple):
    code: str
    printed: str  # "" if the page does not say


def blocks_of(path: Path) -> list[Block]:
    return [Block(code, printed) for not_run, code, printed in _BLOCK.findall(path.read_text()) if not not_run]


def run(code: str, path: Path, namespace: dict[str, object]) -> None:
    if "from transformers" in code:
        pytest.importorskip("transformers")
    exec(compile(code, str(path), "exec"), namespace)


BLOCKS = blocks_of(README)


def test_the_readme_has_three_examples():
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_example_runs(block):
    run(block.code, README, {"__name__": "__main__"})


@pytest.mark.parametrize("name", PAGES)
def test_page_runs_from_top_to_bottom(name, capsys):
    page = DOCS / f"{name}.md"
    blocks = blocks_of(page)
    assert len(blocks) == PAGES[name]
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks:
        run(block.code, page, namespace)
        shown = capsys.readouterr().out
        if block.printed:
            assert shown.strip("\n") == block.printed.strip("\n")
    if name == "masks":
        assert namespace["magi"] == runpy.run_path(str(ROOT / "examples" / "draw_masks.py"))["MASKS"]


def test_every_page_with_python_is_tested():
    with_python = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md") if blocks_of(path)}
    assert with_python == set(PAGES)


@pytest.mark.parametrize(
    "path", [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))], ids=lambda path: str(path.relative_to(ROOT))
)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, target
