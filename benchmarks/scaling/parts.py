"""The studies, one after the other."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator
from pathlib import Path

from attnmesh.cli.output import Rows
from attnmesh.planner.catalog import cluster
from benchmarks.scaling.cases import FULL, HARDWARE, QUICK
from benchmarks.scaling.decode import decode_rows
from benchmarks.scaling.prefill import prefill_rows
from benchmarks.scaling.slow import slow_rows


class Part(enum.StrEnum):
    """What is studied."""

    DECODE = "decode"
    SLOW = "slow"
    PREFILL = "prefill"


_ROWS = {Part.DECODE: decode_rows, Part.SLOW: slow_rows, Part.PREFILL: prefill_rows}


def study(parts: Collection[Part], *, quick: bool, hardware_file: Path | None = None) -> Iterator[tuple[Part, Rows]]:
    """The rows of every part, a few at a time: the largest take a minute each, and what is done can be kept."""
    scope, machines = QUICK if quick else FULL, cluster(HARDWARE, extra=hardware_file)
    for part in Part:
        if part in parts:
            for rows in _ROWS[part](scope, machines):
                yield part, rows
