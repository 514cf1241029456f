"""The command: `python -m tests.gpu.search FAMILY --seconds 120 --seed 7`."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

if __name__ == "__main__":  # as pytest does: modules of tests/helpers are `helpers.NAME`
    sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from tests.gpu.search.cases import FAMILIES, from_line
from tests.gpu.search.runner import Search


def main(arguments: Sequence[str] | None = None) -> int:
    """Search some families; 1 if a case failed or was stuck."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.search", description="Random calls of the library, compared with float64."
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"{', '.join(FAMILIES)}; all by default")
    parser.add_argument("--seconds", type=float, help="stop after this long, per family (60 without --cases)")
    parser.add_argument("--cases", type=int, help="stop after so many cases, per family")
    parser.add_argument("--seed", type=int, default=0, help="another seed is another series of cases (default 0)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case (default 0)")
    parser.add_argument("--number", type=int, help="repeat this case alone")
    parser.add_argument("--case", metavar="LINE", help='run the case of a line: "q=7 k=9 ..."; it may be changed')
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1, help="processes at a time; 0: in this one (default 1)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which a case is stuck (default 60)")
    parser.add_argument("--verbose", action="store_true", help="print every case")
    args = parser.parse_args(arguments)
    good = True
    for family in args.families or FAMILIES:
        one = args.number is not None or args.case is not None
        search = Search(
            family, args.seed, args.device, args.workers, args.limit, args.verbose or one,
            from_line(args.case) if args.case is not None else None,
        )  # fmt: skip
        good &= search.run(iter([args.number or 0]) if one else _numbers(args.first, args.cases, args.seconds))
    return 0 if good else 1


def _numbers(first: int, cases: int | None, seconds: float | None) -> Iterator[int]:
    """Yield numbers until there are so many, or until the time is over."""
    end = time.monotonic() + (60.0 if seconds is None and cases is None else seconds or float("inf"))
    for number in itertools.count(first) if cases is None else range(first, first + cases):
        if time.monotonic() >= end:
            return
        yield number


if __name__ == "__main__":
    sys.exit(main())
