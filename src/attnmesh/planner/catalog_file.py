"""Reads, checks and writes the TOML files of the hardware catalog.

Numbers are in common units. All are powers of ten of seconds, bytes and operations, so a number is converted by moving
its decimal point, without rounding: what `as_toml` writes is read back as the same number.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path

from attnmesh.planner.counts import MAX_RANKS
from attnmesh.planner.hardware import Curve, Device, Link, Wiring
from attnmesh.planner.program import KERNEL_KINDS, SIZED_IN_BYTES, KernelKind
from attnmesh.utils.files import read_text
from attnmesh.utils.text import one_line
from attnmesh.utils.validation import shown

_MAX_BYTES = 2**20  # of a file
_LONGEST_NAME = 100  # that is compared with the known ones
_LARGEST = Decimal("1e30")  # of a number and of its inverse: quotients and sums of such numbers are finite


def unknown(what: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for an unknown name, with similar names and all known ones."""
    names = sorted(known)
    similar = get_close_matches(name[:_LONGEST_NAME].lower(), names, n=3, cutoff=0.5)
    meant = f" Did you mean {' or '.join(similar)}?" if similar else ""
    return ValueError(f"unknown {what} {shown(name)}.{meant} Known: {', '.join(names)}")


Value = str | bool | int | float | Curve
Table = Mapping[str, Value]

FIELD_OF: dict[KernelKind, str] = {kind: kind.replace(" ", "_") for kind in KERNEL_KINDS}
CAUSAL_FIELD_OF: dict[KernelKind, str] = {
    "attention": "causal_attention",
    "attention backward": "causal_attention_backward",
}

# Powers of ten between the units of files and seconds, bytes, operations.
GIGA, MILLI, MICRO = 9, -3, -6


def rate_places(kind: KernelKind) -> int:
    """The power of ten of a kernel's rate: GB/s or TFLOP/s."""
    return 9 if kind in SIZED_IN_BYTES else 12


def size_places(kind: KernelKind) -> int:
    """The power of ten of the size of a sample: MB or GFLOP. Divided by milliseconds they are the units of rates."""
    return 6 if kind in SIZED_IN_BYTES else 9


@dataclass(frozen=True)
class Tables:
    """The content of a file: the fields of each device and link, and efficiencies by kind of kernel.

    Fields have their names in the file, values are in seconds, bytes and operations. Keys are lower-case names of
    devices and links; the field `name` has them as written.
    """

    device: Mapping[str, Table] = field(default_factory=dict)
    link: Mapping[str, Table] = field(default_factory=dict)
    efficiency: Table = field(default_factory=dict)


def read_tables(path: Path) -> Tables:
    """The tables of a file; ValueError names the file, the field, its value and what is allowed."""
    text = read_text(path, str(path), most=_MAX_BYTES)
    try:
        whole = tomllib.loads(text, parse_float=Decimal)
    except RecursionError:
        raise ValueError(f"{path} is not TOML that can be read: it is nested too deeply") from None
    except (ValueError, ArithmeticError) as error:  # also numbers beyond any use: of thousands of digits, 1e9999999999
        raise ValueError(f"{path} is not TOML: {one_line(str(error))}") from None
    for name in whole:
        if name not in ("device", "link", "efficiency"):
            raise unknown(f"table in {path}:", name, ("device", "link", "efficiency"))
    return Tables(
        device=_named(whole.get("device", {}), "device", _DEVICE, path),
        link=_named(whole.get("link", {}), "link", _LINK, path),
        efficiency=_fields(whole.get("efficiency", {}), "efficiency", _EFFICIENCY, path),
    )


@dataclass(frozen=True)
class _Field:
    """How a field is read; `read` returns None for a value that is not allowed."""

    allowed: str
    read: Callable[[object], Value | None]


def _named(tables: object, what: str, known: Mapping[str, _Field], path: Path) -> dict[str, Table]:
    if not isinstance(tables, dict):
        raise ValueError(f"{path}: {what} must be tables, [{what}.NAME], got {shown(tables)}")
    return {
        name.lower(): {"name": name, **_fields(fields, f"{what}.{name}", known, path)}
        for name, fields in tables.items()
    }


def _fields(fields: object, where: str, known: Mapping[str, _Field], path: Path) -> dict[str, Value]:
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: {where} must be a table, got {shown(fields)}")
    read: dict[str, Value] = {}
    for name, given in fields.items():
        if name not in known:
            raise unknown(f"field of {where} in {path}:", name, known)
        value = known[name].read(given)
        if value is None:
            raise ValueError(f"{path}: {where}.{name} must be {known[name].allowed}, got {_shown(given)}")
        read[name] = value
    return read


def _shown(given: object) -> str:
    if isinstance(given, list):
        return f"[{', '.join(map(_shown, given))}]"
    return str(given) if isinstance(given, Decimal) else shown(given)


def _text(given: object) -> str | None:
    return given if isinstance(given, str) and given else None


def _flag(given: object) -> bool | None:
    return given if isinstance(given, bool) else None


def _whole(given: object) -> int | None:
    return given if isinstance(given, int) and not isinstance(given, bool) and 0 < given <= MAX_RANKS else None


def _number(given: object, places: int) -> float | None:
    """A number of at least 0, times ten to the power `places`."""
    if isinstance(given, bool) or not isinstance(given, int | Decimal):
        return None
    if not given:
        return 0.0
    if Decimal(given).is_nan() or not 1 / _LARGEST <= given <= _LARGEST:
        return None
    return float(Decimal(given).scaleb(places))


def _above_0(places: int) -> _Field:
    return _Field(f"a number above 0, at most {_LARGEST:g}", lambda given: _number(given, places) or None)


def _at_least_0(places: int) -> _Field:
    return _Field(f"a number of at least 0, at most {_LARGEST:g}", lambda given: _number(given, places))


def _share(given: object) -> float | None:
    share = _number(given, 0)
    return share if share is not None and 0 < share <= 1 else None


def _curve(kind: KernelKind) -> _Field:
    units = ("GB/s", "[MB, ms]") if kind in SIZED_IN_BYTES else ("TFLOP/s", "[GFLOP, ms]")

    def samples(given: object) -> list[tuple[float | None, float | None]]:
        if not isinstance(given, list):
            return [(_number(given, rate_places(kind)), 1.0)]  # a rate is the size of one second
        pairs = [pair if isinstance(pair, list) and len(pair) == 2 else (None, None) for pair in given]
        return [(_number(size, size_places(kind)), _number(time, MILLI)) for size, time in pairs]

    def read(given: object) -> Curve | None:
        try:
            return Curve(tuple((size or 0, seconds or 0) for size, seconds in samples(given)))
        except ValueError:  # empty, not above 0, or not ascending
            return None

    return _Field(f"a rate in {units[0]}, or samples {units[1]} above 0, ascending in size", read)


_COUNT = f"a whole number above 0, at most {MAX_RANKS}"
_DEVICE: dict[str, _Field] = {
    "source": _Field("text", _text),
    "memory_gb": _above_0(GIGA),
    "launch_us": _above_0(MICRO),
    "round_us": _at_least_0(MICRO),
    "peak_tflops": _above_0(12),
    "peak_gbs": _above_0(GIGA),
    "intra_node": _Field("the name of a link", _text),
    "inter_node": _Field("the name of a link", _text),
    "ranks_per_node": _Field(_COUNT, _whole),
    "rails": _Field(_COUNT, _whole),
    "cores": _Field(_COUNT, _whole),
    **{FIELD_OF[kind]: _curve(kind) for kind in KERNEL_KINDS},
    **{name: _curve(kind) for kind, name in CAUSAL_FIELD_OF.items()},
}
_LINK: dict[str, _Field] = {
    "source": _Field("text", _text),
    "bandwidth_gbs": _above_0(GIGA),
    "latency_us": _at_least_0(MICRO),
    "message_us": _at_least_0(MICRO),
    "shared": _Field("true or false", _flag),
}
_EFFICIENCY: dict[str, _Field] = {
    FIELD_OF[kind]: _Field("a number above 0, at most 1", _share) for kind in KERNEL_KINDS
}


def as_toml(device: Device, links: Iterable[Link] = (), wiring: Wiring | None = None) -> str:
    """A device, links and the wiring of the device as the text of a catalog file.

    Read back, it gives equal objects. (If the catalog already has a device of that name, it keeps the curves that
    `device` does not have.)
    """
    lines = [
        f"[device.{_quoted(device.name)}]",
        f"source = {_quoted(device.source)}",
        f"memory_gb = {_scaled(device.memory, -GIGA)}",
        f"launch_us = {_scaled(device.launch, -MICRO)}",
    ]
    if device.cores is not None:
        lines.append(f"cores = {device.cores}")
    if device.round:
        lines.append(f"round_us = {_scaled(device.round, -MICRO)}")
    for name, value in vars(wiring or Wiring()).items():
        if value is not None:
            lines.append(f"{name} = {_quoted(value) if isinstance(value, str) else value}")
    lines += [_curve_line(FIELD_OF[kind], kind, curve) for kind, curve in device.curves]
    lines += [_curve_line(CAUSAL_FIELD_OF[kind], kind, curve) for kind, curve in device.causal]
    for link in links:
        lines += [
            "",
            f"[link.{_quoted(link.name)}]",
            f"source = {_quoted(link.source)}",
            f"bandwidth_gbs = {_scaled(link.bandwidth, -GIGA)}",
            f"latency_us = {_scaled(link.latency, -MICRO)}",
            f"message_us = {_scaled(link.message, -MICRO)}",
            f"shared = {str(link.shared).lower()}",
        ]
    return "\n".join(lines) + "\n"


def _curve_line(field: str, kind: KernelKind, curve: Curve) -> str:
    samples = (f"[{_scaled(size, -size_places(kind))}, {_scaled(time, -MILLI)}]" for size, time in curve.samples)
    return f"{field} = [{', '.join(samples)}]  # [{'MB' if kind in SIZED_IN_BYTES else 'GFLOP'}, ms]"


def _scaled(value: float, places: int) -> str:
    text = format(Decimal(repr(float(value))).scaleb(places), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace(
        "\x7f", "\\u007f"
    )  # JSON strings are TOML strings except for this character
