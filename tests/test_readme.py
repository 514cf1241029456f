"""Every Python example of the README runs as it stands there, and so does the guide's section on sparse attention."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
GUIDE = Path(__file__).parents[1] / "docs" / "guide.md"


def blocks_of(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


BLOCKS = blocks_of(README.read_text())


def test_the_readme_has_examples():
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_an_example_runs_and_its_own_assertions_hold(block):
    exec(compile(block, str(README), "exec"), {"__name__": "__main__"})


def test_the_guide_to_sparse_attention_runs_from_top_to_bottom():
    section = re.search(r"^## Sparse attention .*?(?=^## )", GUIDE.read_text(), flags=re.DOTALL | re.MULTILINE)
    blocks = blocks_of(section[0])
    assert len(blocks) == 3
    exec(compile("\n".join(blocks), str(GUIDE), "exec"), {"__name__": "__main__"})
