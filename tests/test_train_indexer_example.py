"""The indexer's example: recall rises, and two ranks learn what one learns, step by step."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnmesh import run_virtual

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_indexer.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TOLERANCE = 1e-4  # seen: 5e-6. A rank whose rows stand at the wrong positions is off by 1e-2 and more


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("train_indexer", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_ranks_learn_what_one_learns(example):
    one, two = (run_virtual(world, lambda comm: example.train(comm, 10, 6, every=4)) for world in (1, 2))
    assert two[0] == two[1]  # the ranks say the same
    assert [point.step for point in one[0]] == [0, 4, 8, 12, 16]
    assert [point.stage for point in two[0]] == ["warm-up"] * 3 + ["sparse"] * 2
    assert [point.loss for point in two[0]] == pytest.approx([point.loss for point in one[0]], rel=TOLERANCE)
    assert [point.recall for point in two[0]] == pytest.approx([point.recall for point in one[0]], abs=1e-3)
    recall = [point.recall for point in one[0]]
    assert recall[0] < example.CHANCE + 0.1
    assert recall[-1] > 0.55


def test_a_picture_is_drawn(example, tmp_path):
    pytest.importorskip("matplotlib")
    points = [example.Point(0, "warm-up", 4.0, 0.2), example.Point(1, "sparse", 0.5, 0.9)]
    example.draw(points, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def said(folder: Path, *command: str) -> list[tuple[float, float]]:
    """Loss and recall of every line."""
    picture = folder / "picture.png"
    ran = subprocess.run(
        [sys.executable, *command, "--plot", str(picture)], capture_output=True, text=True, timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count(f"drawn in {picture}") == 1
    assert picture.stat().st_size > 10_000
    return [(float(loss), float(recall)) for loss, recall in re.findall(r"loss (\S+)  recall (\S+)", ran.stdout)]


@pytest.mark.slow
def test_recall_rises_from_chance_to_above_nine_tenths_and_processes_say_the_same(example, tmp_path):
    pytest.importorskip("matplotlib")
    one, two = (said(tmp_path, *command, str(EXAMPLE)) for command in ((), TORCHRUN))
    assert len(one) == 9
    assert one[0][1] < example.CHANCE + 0.1
    assert one[-1][1] > 0.9
    for (loss, recall), (other_loss, other_recall) in zip(one, two, strict=True):
        assert other_loss == pytest.approx(loss, rel=TOLERANCE)
        assert other_recall == pytest.approx(recall, abs=2e-3)
