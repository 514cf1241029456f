"""Figures from a JSON file, as tables: whatever lists of rows and groups of values are in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from attnmesh.report.data import Rows


def read_figures(path: Path) -> dict[str, Rows]:
    """The tables of a file that `--json` of a command wrote; ValueError if there are none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ValueError(f"{path} is no JSON") from None
    found = dict(_tables(path.stem, value))
    if not found:
        raise ValueError(f"{path} has no figures: it must hold objects, or lists of objects")
    return found


def _tables(name: str, value: object) -> Iterator[tuple[str, Rows]]:
    if isinstance(value, list):
        rows = [row for row in value if isinstance(row, dict)]
        if rows:
            yield name, [{key: _plain(cell) for key, cell in row.items()} for row in rows]
    elif isinstance(value, dict):
        alone = {key: each for key, each in value.items() if not isinstance(each, (dict, list)) or _is_flat(each)}
        if alone:
            yield name, [{"": key, "value": _plain(each)} for key, each in alone.items()]
        for key, each in value.items():
            if key not in alone:
                yield from _tables(f"{name}: {key}", each)


def _is_flat(value: object) -> bool:
    return isinstance(value, list) and not any(isinstance(each, (dict, list)) for each in value)


def _plain(cell: object) -> object:
    return cell if isinstance(cell, (str, int, float)) else json.dumps(cell) if cell is not None else ""
