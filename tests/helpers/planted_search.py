"""A family of the random search with planted faults: number 1 never ends, 2 is wrong, 3 is refused, 4 kills itself."""

from __future__ import annotations

import os
import time
from random import Random

import attnmesh as am

DRAWN = {"0": "fine", "1": "sleep", "2": "wrong", "3": "refused", "4": "crash"}


def draw(random: Random, build: Random, device: str) -> dict[str, object]:
    """Return a case by its number, which the search keeps to itself: the first draws of seed 0 tell them apart."""
    first = random.random()
    known = {Random(f"{__name__}-0-{number}").random(): kind for number, kind in DRAWN.items()}
    return {"kind": known.get(first, "fine"), "size": 7}


def check(case: dict[str, object], device: str) -> None:
    """Do what the case says."""
    if case["kind"] == "sleep":
        time.sleep(1000)
    if case["kind"] == "wrong":
        raise AssertionError("out: error 3.1e-02 > 1.2e-02")
    if case["kind"] == "refused":
        am.SlidingWindow(-1)
    if case["kind"] == "crash":
        os.abort()
