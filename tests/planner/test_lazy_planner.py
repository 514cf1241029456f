"""The planner is optional at run time: only `auto`, `explain` and recommendations import it."""

import subprocess
import sys

CODE = """
import sys
import torch
import attnmesh as am

def loaded():
    return [name for name in sys.modules if name.startswith("attnmesh.planner")]

assert not loaded(), loaded()

def rank(comm):
    cp = am.ContextParallel(comm, schedule="ring")
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    return cp.attention(q, k, v)

am.run_virtual(2, rank)
assert not loaded(), loaded()
assert am.recommend_sharding(batch=4, q_heads=8, kv_heads=2, ranks=4).choice.sharding.ranks == 4
assert loaded()
"""


def test_an_explicit_schedule_does_not_import_the_planner():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
