"""A ranking as a table, and as JSON."""

from __future__ import annotations

from rich.console import Console

from attnmesh.cli import output as report
from attnmesh.planner.ranking import Option, Ranking
from attnmesh.planner.units import readable_bytes, readable_seconds

SHOWN = 12

_MEDIUM, _WIDE = 100, 130  # columns of a terminal from which on there is more to see
_ON_WIDE = ("weights", "KV cache", "bottleneck")
_ON_MEDIUM = ("sends",)


def table(console: Console, title: str, ranking: Ranking, *, every: bool) -> None:
    """Print the options, the best first, with what each takes and why it wins or loses."""
    shown = ranking.options if every else ranking.options[:SHOWN]
    rows = [
        {
            "way": option.name,
            "time": readable_seconds(option.seconds),
            "memory": readable_bytes(option.memory.total),
            "weights": readable_bytes(option.memory.weights),
            "KV cache": readable_bytes(option.memory.cache),
            "sends": readable_bytes(option.sent),
            "bottleneck": option.bottleneck,
            "why": ranking.why(option),
        }
        for option in shown
    ]
    left_out = (*_ON_WIDE * (console.width < _WIDE), *_ON_MEDIUM * (console.width < _MEDIUM))
    report.show(console, title, [{name: cell for name, cell in row.items() if name not in left_out} for row in rows])
    if left_out:
        console.print(f"a wider terminal also shows {', '.join(left_out)}", style="dim")
    hidden = len(ranking.options) - len(shown)
    if hidden:
        console.print(f"and {hidden} more (--all shows them)")
    for name, why in ranking.refused.items():
        console.print(f"{name}: {why}", style="dim")


def as_json(ranking: Ranking) -> dict[str, object]:
    """The same for machines."""

    def one(option: Option) -> dict[str, object]:
        memory = option.memory
        return {
            "way": option.name, "seconds": option.seconds, "parts": option.parts, "bytes_sent": option.sent,
            "memory": {"total": memory.total, "weights": memory.weights, "cache": memory.cache,
                       "working": memory.working},
            "fits": option.fits(ranking.device_memory), "bottleneck": option.bottleneck, "why": ranking.why(option),
        }  # fmt: skip

    best = ranking.best
    return {
        "best": None if best is None else best.name,
        "options": [one(option) for option in ranking.options],
        "refused": ranking.refused,
        "device_memory": ranking.device_memory,
        "advice": ranking.advice,
    }
