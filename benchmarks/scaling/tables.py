"""The studies as Markdown tables, as `docs/scaling.md` has them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attnmesh.utils.text import readable_bytes, readable_seconds
from benchmarks.scaling.study import Part

Line = Mapping[str, Any]
Lines = Sequence[Line]


def all_tables(sections: Mapping[str, Lines]) -> str:
    """All tables that there are rows for, each under its title."""
    return "\n\n".join(f"{title}\n\n{table}" for title, table in _titled(sections))


def replace_tables(text: str, sections: Mapping[str, Lines]) -> str:
    """A document with its tables made anew: those that follow a comment with their title, `<!-- title -->`."""
    for title, table in _titled(sections):
        marked = re.compile(rf"(<!-- {re.escape(title)} -->\n)(?:\|.*\n)*")
        text = marked.sub(lambda found, table=table: f"{found[1]}{table}\n", text)  # type: ignore[misc]
    return text


def _titled(sections: Mapping[str, Lines]) -> list[tuple[str, str]]:
    return [titled for part, write in _TABLES.items() if sections.get(part) for titled in write(sections[part])]


def short(length: int) -> str:
    """128k, 1M: as contexts are named."""
    return f"{length >> 20}M" if length >= 1 << 20 else f"{length >> 10}k"


def _prefill(lines: Lines) -> Iterable[tuple[str, str]]:
    forward = [line for line in lines if line["direction"] == "forward"]
    schedules = list(dict.fromkeys(line["schedule"] for line in lines))
    for direction in dict.fromkeys(line["direction"] for line in lines):
        these = [line for line in lines if line["direction"] == direction]
        yield f"Efficiency, {direction}", _across(these, schedules, _efficiency)
    for length in sorted({line["length"] for line in forward}):
        rows = [_whole(line) for line in forward if line["length"] == length]
        yield f"{short(length)} tokens, forward", _table(_COLUMNS, rows)
    both = [line for line in lines if line["direction"] != "forward"]
    if both:
        yield f"{short(both[0]['length'])} tokens, forward+backward", _table(_COLUMNS, [_whole(line) for line in both])
    largest = max(line["ranks"] for line in forward)
    longest = max(line["length"] for line in forward if line["ranks"] == largest)
    rows = [
        (line["schedule"], f"{line['simulated_in']:.1f}")
        for line in forward
        if (line["ranks"], line["length"]) == (largest, longest)
    ]
    title = f"What simulating {largest:,} ranks and {short(longest)} tokens took on this machine"
    yield title, _table(("schedule", "seconds:"), rows)


_COLUMNS = (
    "GPUs:", "schedule", "time:", "efficiency:", "exposed communication:", "sent within the node:",
    "sent between nodes:", "exchanges:", "memory per rank:", "bottleneck",
)  # fmt: skip


def _whole(line: Line) -> tuple[str, ...]:
    return (
        str(line["ranks"]), line["schedule"], _time(line["seconds"]), f"{line['efficiency']:.3f}",
        _percent(line["exposed_communication"]), readable_bytes(line["intra_node_bytes"]),
        readable_bytes(line["inter_node_bytes"]), str(line["exchanges"]),
        readable_bytes(line["bytes_per_rank"]) + ("" if line["fits"] else " (does not fit)"), line["bottleneck"],
    )  # fmt: skip


def _efficiency(line: Line) -> str:
    return f"{line['efficiency']:.3f}" + ("" if line["fits"] else "*")


def _across(lines: Lines, schedules: Sequence[str], cell: Callable[[Line], str]) -> str:
    """A row for each length and number of ranks, a column for each schedule, the best that fits in bold."""
    rows = []
    for length, ranks in dict.fromkeys((line["length"], line["ranks"]) for line in _by_length(lines)):
        these = {line["schedule"]: line for line in lines if (line["length"], line["ranks"]) == (length, ranks)}
        best = min(these.values(), key=lambda line: (not line["fits"], line["seconds"]))
        cells = [
            f"**{cell(line)}**" if line is best and line["fits"] else cell(line) if line else ""
            for line in map(these.get, schedules)
        ]
        rows.append((short(length), str(ranks), *cells))
    return _table(("tokens:", "GPUs:", *(f"{schedule}:" for schedule in schedules)), rows)


def _by_length(lines: Lines) -> Lines:
    return sorted(lines, key=lambda line: (line["length"], line["ranks"]))


def _decode(lines: Lines) -> Iterable[tuple[str, str]]:
    columns = (
        "batch:",
        "GPUs:",
        "best sharding",
        "step:",
        "tokens/s:",
        "compute share:",
        "weights:",
        "KV cache:",
        "other shardings",
    )
    for model in dict.fromkeys(line["model"] for line in lines):
        rows = []
        for batch, devices in dict.fromkeys((x["batch"], x["devices"]) for x in lines if x["model"] == model):
            first, *others = [x for x in lines if (x["model"], x["batch"], x["devices"]) == (model, batch, devices)]
            memory = readable_bytes(first["weights"]), readable_bytes(first["cache"])
            if not first["fits"]:
                rows.append((str(batch), str(devices), "nothing fits", "", "", "", *memory, ""))
                continue
            said = ", ".join(f"{x['sharding']} {_loses(x, first)}" for x in others)
            speed = readable_seconds(first["seconds"]), f"{first['tokens_per_second']:,.0f}"
            rows.append(
                (str(batch), str(devices), first["sharding"], *speed, _percent(first["compute_share"]), *memory, said)
            )
        yield f"{model} at {short(lines[0]['length'])}", _table(columns, rows)


def _loses(line: Line, best: Line) -> str:
    return f"x{line['seconds'] / best['seconds']:.2f}" if line["fits"] else "does not fit"


def _slow(lines: Lines) -> Iterable[tuple[str, str]]:
    rows = [
        (
            str(x["ranks"]), x["schedule"], readable_seconds(x["seconds"]), f"{x['slow_rank']:.3f}",
            f"{x['slow_link']:.3f}",
        )
        for x in lines
    ]  # fmt: skip
    columns = ("GPUs:", "schedule", "time:", "one rank 1.5x slower:", "one rank's links at 1/4 bandwidth:")
    yield f"{short(lines[0]['length'])} tokens, forward, times as long", _table(columns, rows)


def _time(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 1000 else readable_seconds(seconds)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns whose name ends in a colon are numbers: they stand to the right."""
    head = "| " + " | ".join(column.rstrip(":") for column in columns) + " |"
    sides = "|" + "|".join("--:" if column.endswith(":") else "---" for column in columns) + "|"
    return "\n".join((head, sides, *("| " + " | ".join(row) + " |" for row in rows)))


_TABLES: dict[Part, Callable[[Lines], Iterable[tuple[str, str]]]] = {
    Part.PREFILL: _prefill,
    Part.DECODE: _decode,
    Part.SLOW: _slow,
}
