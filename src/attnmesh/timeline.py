"""What happened when, on which rank: of a simulated run or a real one, and as a file that trace viewers open."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

Track = Literal["compute", "send", "receive", "wait"]


@dataclass(frozen=True)
class Span:
    """Something that took a rank from `begin` to `end`, in seconds since the run began."""

    rank: int
    track: Track
    name: str
    begin: float
    end: float
    facts: dict[str, object] = field(default_factory=dict)  # such as bytes, peer, operations


def read_trace(path: Path) -> list[Span]:
    """The spans of a trace file; ValueError if it is none."""
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        names = {
            (event["name"], event["pid"], event.get("tid")): event["args"]["name"]
            for event in events
            if event["ph"] == "M" and event["name"] in ("process_name", "thread_name")
        }
        ranks = {pid: int(said.split()[-1]) for (kind, pid, _), said in names.items() if kind == "process_name"}
        tracks = {(pid, tid): said for (kind, pid, tid), said in names.items() if kind == "thread_name"}
        return [_read(event, ranks, tracks) for event in events if event["ph"] == "X"]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise ValueError(f"{path} is no trace of ranks, as attnmesh writes them") from None


def _read(event: dict[str, Any], ranks: dict[int, int], tracks: dict[tuple[int, int], str]) -> Span:
    track = tracks[event["pid"], event["tid"]]
    if track not in get_args(Track):
        raise ValueError(f"no track is called {track!r}")
    begin, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
    return Span(ranks[event["pid"]], cast(Track, track), event["name"], begin, end, event.get("args", {}))
