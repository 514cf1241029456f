"""What ranks run while a node fails: attention, again and again, until an error is raised."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from attnmesh import launch
from attnmesh.comm import Comm, CommError
from attnmesh.core.masks import Causal
from attnmesh.parallel.context import ContextParallel

TIMEOUT = 10.0
PROMISED, WITHOUT_STORE = TIMEOUT + 5, TIMEOUT + 10
"""Seconds within which every survivor raises, by docs/reliability.md; and those that have lost the store too."""

_LENGTH = 256
_AFTER = 3.0  # seconds that a rank stays after its error, so that torchrun does not end the others before theirs


def attend_until_error(comm: Comm, *, folder: Path) -> None:
    """Attend until a CommError is raised, and write when that was, and what it says."""
    cp = ContextParallel(comm, schedule="ring")
    x = torch.randn(1, 4, cp.layout.local_length(_LENGTH, cp.world, cp.rank), 32, dtype=torch.float32, device="cpu")
    calls = 0
    try:
        while True:
            cp.attention(x, x, x, mask=Causal(), length=_LENGTH)
            calls += 1
            if calls == 10:
                (folder / f"attending-{comm.rank}").touch()
    except CommError as error:
        written = folder / f"unfinished-{comm.rank}"
        written.write_text(json.dumps({"time": time.time(), "message": str(error)}))
        written.rename(folder / f"raised-{comm.rank}")
        time.sleep(_AFTER)


def main() -> None:
    """Run under torchrun: `python -m benchmarks.rehearsal.failing FOLDER`."""
    launch.run(attend_until_error, timeout=TIMEOUT, folder=Path(sys.argv[1]))


if __name__ == "__main__":
    main()
