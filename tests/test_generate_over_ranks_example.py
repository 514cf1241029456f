"""The example of generation over ranks: all ranks together say what one says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[1] / "examples" / "generate_over_ranks.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")


def said(*command: str) -> str:
    ran = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("one rank says the same") == 1
    return ran.stdout


@pytest.mark.slow
def test_four_virtual_ranks():
    output = said(str(EXAMPLE), "--tokens", "16")
    assert "TP2-KVDP2 over 4 ranks" in output
    assert output.count(" 48 of them there already") == 2  # the second prompt on either KVDP rank: twelve blocks of 4


@pytest.mark.slow
def test_one_sequence_on_uneven_ranks():
    output = said(str(EXAMPLE), "--ranks", "6", "--prompts", "1", "--tokens", "8")
    assert "TP2-CP3 over 6 ranks" in output


@pytest.mark.slow
def test_processes_say_what_virtual_ranks_say():
    assert said(*TORCHRUN, str(EXAMPLE)) == said(str(EXAMPLE))
