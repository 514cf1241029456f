"""The API reference: the docstring of every public name has an example, and the examples run.

The examples of a page continue the code at its top. They need no device but the CPU.
"""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from helpers.models import write_folder
from test_readme import DOCS, blocks_of, run

PAGES = {
    path.stem: re.findall(r"^::: (\S+)$", path.read_text(), flags=re.MULTILINE)
    for path in sorted((DOCS / "reference").glob("*.md"))
}
CONSTANTS = {"attnmesh.training.accelerate.TESTED", "attnmesh.training.verl.TESTED"}
TRANSFORMERS = {"integrations", "language-models", "sharded-generation"}
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

_parser = doctest.DocTestParser()


def example(name: str) -> doctest.DocTest:
    """The example in the docstring of a name."""
    module, _, attribute = name.rpartition(".")
    text = inspect.getdoc(getattr(importlib.import_module(module), attribute)) or ""
    _, _, examples = text.partition("\nExamples:\n")
    return _parser.get_doctest(examples, {}, name, None, None)


def test_every_name_has_an_example():
    names = {name for page in PAGES.values() for name in page}
    assert names > CONSTANTS
    assert [name for name in sorted(names - CONSTANTS) if not example(name).examples] == []


def test_an_example_that_is_wrong_fails():
    test = _parser.get_doctest(">>> 1 + 1\n3\n", {}, "planted", None, None)
    assert doctest.DocTestRunner(verbose=False).run(test, out=lambda text: None).failed == 1


@pytest.fixture
def namespace(tmp_path: Path, request: pytest.FixtureRequest):
    """The names of a page: what the code at its top defines, and the folder of a model."""
    page = request.param
    names: dict[str, object] = {"__name__": "__main__", "torch": torch, "am": am}
    if page in TRANSFORMERS:
        pytest.importorskip("transformers")
    if page == "language-models":
        names["folder"] = write_folder(tmp_path)
    path = DOCS / "reference" / f"{page}.md"
    for block in blocks_of(path):
        run(block.code, path, names)
    yield page, names
    if dist.is_initialized():  # an example failed before its last line
        dist.destroy_process_group()


@pytest.mark.parametrize("namespace", [page for page, names in PAGES.items() if names], indirect=True)
def test_examples_run(namespace):
    page, names = namespace
    shown: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=OPTIONS)
    for name in PAGES[page]:
        test = example(name)
        test.globs = dict(names)
        torch.manual_seed(0)
        runner.run(test, out=shown.append)
    assert not shown, "".join(shown)
