"""What a run of `gpu.run` leaves behind: the text at its end, a JSON file, and the table in the documentation."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any

RESULTS = ("passed", "failed", "stuck", "crashed", "skipped", "not run")
BAD = ("failed", "stuck", "crashed", "not run")
BEGIN, END = "<!-- results of make test-gpu: begin -->", "<!-- results of make test-gpu: end -->"
SLOWEST = 30
TEXT_LINES = 25  # of a traceback


@dataclass(frozen=True)
class Result:
    """The result of a test, one of RESULTS, with a line that says why, and a traceback or the like."""

    id: str
    result: str
    seconds: float = 0.0
    worker: int | None = None
    message: str = ""
    text: str = ""

    @property
    def function(self) -> str:
        return self.id.partition("[")[0]

    @property
    def folder(self) -> str:
        return PurePath(self.id.partition("::")[0]).parent.as_posix()


@dataclass
class Record:
    """Everything about a run."""

    date: str
    machine: dict[str, Any] = field(default_factory=dict)
    workers: int = 0
    wall_seconds: float = 0.0
    ended_by: str = ""  # what ended the run before all tests had run
    results: list[Result] = field(default_factory=list)

    def count(self) -> Counter[str]:
        return Counter(each.result for each in self.results)

    @property
    def exit_code(self) -> int:
        """0 if all tests passed or were skipped, 5 as pytest's if there are none."""
        if self.ended_by or any(each.result in BAD for each in self.results):
            return 1
        return 0 if self.results else 5


def counts(count: Counter[str]) -> str:
    """Return `1 failed, 2 passed`, as pytest writes it; passed and failed are always named."""
    named = ("failed", "passed", *(name for name in RESULTS[2:] if count[name]))
    return ", ".join(f"{count[name]} {name}" for name in named)


def as_text(record: Record) -> str:
    """Return the summary at the end of a run."""
    lines: list[str] = []
    for name in ("failed", "crashed", "stuck"):
        for each in (each for each in record.results if each.result == name):
            lines += ["", f"=== {name}: {each.id} ({each.seconds:.1f} s)", each.message]
            lines += each.text.rstrip().splitlines()[-TEXT_LINES:]
    for name in ("failed", "crashed", "stuck", "not run"):
        chosen = [each for each in record.results if each.result == name]
        if chosen:
            lines += ["", f"{name} ({len(chosen)}):", *(f"  {each.id}  {each.message}".rstrip() for each in chosen)]
    timed = [each for each in record.results if each.seconds]
    if timed:
        lines += ["", f"slowest of {len(timed)} tests:"]
        lines += [f"  {each.seconds:7.1f} s  {each.id}" for each in slowest(record, SLOWEST)]
    lines += ["", f"The run ended early: {record.ended_by}."] if record.ended_by else [""]
    busy = sum(each.seconds for each in timed)
    lines.append(
        f"{record.wall_seconds:.0f} s, {record.workers} workers, {busy:.0f} s of tests; {about(record.machine)}"
    )
    lines.append(f"{counts(record.count())} in {record.wall_seconds:.1f}s")
    return "\n".join(lines)


def slowest(record: Record, count: int) -> list[Result]:
    """Return the slowest tests."""
    return sorted((each for each in record.results if each.seconds), key=lambda each: -each.seconds)[:count]


def about(machine: dict[str, Any]) -> str:
    """Return the GPU and the versions on one line."""
    gpu = f"{machine.get('gpu') or 'no GPU'}, driver {machine.get('driver') or 'unknown'}"
    names = {"python": "Python", "torch": "PyTorch", "cuda": "CUDA", "triton": "Triton"}
    versions = ", ".join(f"{name} {machine[key]}" for key, name in names.items() if machine.get(key))
    return f"{gpu}, {machine.get('cores', '?')} CPU cores, {versions}"


def write_json(record: Record, path: Path) -> None:
    """Write everything about the run; texts are cut to their ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = asdict(record) | {"counts": dict(record.count())}
    for each in content["results"]:
        each["text"] = each["text"][-4000:]
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def known_seconds(path: Path) -> dict[str, float]:
    """Return the seconds of the tests of an earlier run, by name; nothing where there is none."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))["results"]
        return {each["id"]: float(each["seconds"]) for each in results}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def as_table(record: Record) -> str:
    """Return the results in Markdown: what ran where, and a row for each folder."""
    columns = [name for name in RESULTS if record.count()[name] or name in ("passed", "failed", "stuck", "skipped")]
    folders = sorted({each.folder for each in record.results})

    def row(title: str, chosen: list[Result]) -> str:
        count = Counter(each.result for each in chosen)
        cells = [title, *(str(count[name]) for name in columns), f"{sum(each.seconds for each in chosen):.0f}"]
        return f"| {' | '.join(cells)} |"

    lines = [
        f"{record.date[:10]}, {about(record.machine)}: {len(record.results)} tests in {record.wall_seconds:.0f} s on "
        f"{record.workers} workers.",
        "",
        f"| folder | {' | '.join(columns)} | seconds of tests |",
        f"|---|{'---:|' * (len(columns) + 1)}",
        *(row(f"`{folder}`", [each for each in record.results if each.folder == folder]) for folder in folders),
        row("all", record.results),
    ]
    bad = [each for each in record.results if each.result in BAD]
    if bad:
        lines += ["", "| did not pass | result |", "|---|---|", *(f"| `{_name(x)}` | {x.result} |" for x in bad)]
    lines += ["", "| slowest | seconds |", "|---|---:|"]
    lines += [f"| `{_name(each)}` | {each.seconds:.1f} |" for each in slowest(record, 10)]
    return "\n".join(lines)


def _name(result: Result) -> str:
    return result.id.replace("|", r"\|").replace("`", "'")


def write_table(record: Record, page: Path) -> None:
    """Replace what is between the two markers in the page."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} must have the lines {BEGIN!r} and {END!r}")
    page.write_text(f"{before}{BEGIN}\n\n{as_table(record)}\n\n{END}{after}", encoding="utf-8")
