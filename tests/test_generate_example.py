"""The generation example: its own assertions hold, in a plain and in a quantized cache."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "generate_from_a_block_cache.py"


@pytest.mark.parametrize("options", [(), ("--storage", "int8", "--samples", "2")], ids=["plain", "int8"])
def test_generation_from_a_cache_is_generation_without(options):
    ran = subprocess.run(
        [sys.executable, str(EXAMPLE), *options], capture_output=True, text=True, timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("96 were there already") == 2  # the second and the third prompt: six blocks of 16
    assert "as without a cache" in ran.stdout
