"""The Python examples of the README, of the guide to planning and of that to sparse attention run as they stand."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
GUIDE = Path(__file__).parents[1] / "docs" / "guide.md"
PLANNING = Path(__file__).parents[1] / "docs" / "planning.md"


def blocks_of(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


BLOCKS = blocks_of(README.read_text())


def test_the_readme_has_examples():
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_an_example_runs_and_its_own_assertions_hold(block):
    exec(compile(block, str(README), "exec"), {"__name__": "__main__"})


def test_the_guide_to_planning_runs(capsys):
    (block,) = blocks_of(PLANNING.read_text())
    exec(compile(block, str(PLANNING), "exec"), {"__name__": "__main__"})
    assert "event by event" in capsys.readouterr().out


def test_the_guide_to_sparse_attention_runs_from_top_to_bottom():
    section = re.search(r"^## Sparse attention .*?(?=^## )", GUIDE.read_text(), flags=re.DOTALL | re.MULTILINE)
    blocks = blocks_of(section[0])
    assert len(blocks) == 3
    exec(compile("\n".join(blocks), str(GUIDE), "exec"), {"__name__": "__main__"})
