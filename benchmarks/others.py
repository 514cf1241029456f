"""How busy everybody else kept the machine while something was measured."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path


class Others:
    """From when it is made until asked. Counts processes that were started and have ended since as ours."""

    def __init__(self) -> None:
        self._wall, self._busy, self._ours = time.perf_counter(), _busy(), _ours()

    def share(self) -> float | None:
        """The share of all cores that others had; None where the system does not say."""
        before, now = self._busy, _busy()
        if before is None or now is None:
            return None
        wall = (time.perf_counter() - self._wall) * (os.cpu_count() or 1)
        return max(now - before - (_ours() - self._ours), 0.0) / wall


def _busy() -> float | None:
    """Seconds that all cores together have been busy."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        user, nice, system, _, _, irq, soft, steal = map(int, fields)
        return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _ours() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
