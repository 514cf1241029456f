"""Hooks of MkDocs: pages from files outside of docs/, the reports of schedules.md, functions that a factory makes."""

import ast
import re
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from attnmesh import ring_flash_attn
from attnmesh.cli.report import compare_schedules
from attnmesh.core.layouts import Contiguous, Layout, Zigzag
from attnmesh.core.masks import Causal
from attnmesh.plan.shards import Shape
from attnmesh.report import schedule_report
from attnmesh.report.page import page
from attnmesh.ring_flash_attn import functions

ROOT = Path(__file__).parents[1]
COPIED = {"security.md": "SECURITY.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
REPORTS: dict[str, Layout] = {"contiguous": Contiguous(), "zigzag": Zigzag()}  # of schedules.md


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and reports that are not files in docs/."""
    for uri, source in COPIED.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "examples.md", content=examples_page()))
    for name, layout in REPORTS.items():
        files.append(File.generated(config, f"reports/{name}.html", content=report_page(layout)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with links to files outside of docs/ replaced by links to the pages made from them."""
    del config, files
    for uri, source in COPIED.items():
        markdown = markdown.replace(f"](../{source}", f"]({uri}").replace(f"]({source}", f"]({uri}")
    if page.file.src_uri in COPIED:
        markdown = re.sub(r"\]\(docs/", "](", markdown)
    return re.sub(r"\]\(\.\./examples/(\w+)\.py\)", r"](examples.md#\1py)", markdown)


def examples_page() -> str:
    """Return a page with the programs in examples/, each after the first line of its docstring."""
    parts = ["# Examples", "The programs in `examples/` of the repository. The test suite runs them."]
    for path in sorted((ROOT / "examples").glob("*.py")):
        code = path.read_text()
        summary = (ast.get_docstring(ast.parse(code)) or "").partition("\n")[0]
        parts += [f"## {path.name}", summary, f"````python\n{code}````"]
    return "\n\n".join(parts) + "\n"


def report_page(layout: Layout) -> str:
    """Return the report on causal attention over the 4 ranks of a node with a layout, checked against float64."""
    mask, world = Causal(), 4
    shape = Shape(batch=1, q_heads=32, kv_heads=8, head_dim=128, itemsize=2, sum_itemsize=4)
    outcomes = compare_schedules(world, layout, mask, ranks_per_node=world)
    return page(schedule_report(mask, layout, 131072, world, shape, ranks_per_node=world, outcomes=outcomes))


class RuntimeFunctions(griffe.Extension):
    """Reads the functions of ring_flash_attn from the imported module: a factory makes them."""

    def on_module_members(self, *, mod: griffe.Module, **_: object) -> None:
        """Add the functions that the source of the module does not show."""
        if mod.path == functions.__name__:
            inspected = griffe.inspect(mod.name, filepath=Path(functions.__file__), parent=mod.parent)
            for name in set(ring_flash_attn.__all__) & set(inspected.members) - set(mod.members):
                mod.set_member(name, inspected.members[name])
