"""The hardware catalog: devices, links and clusters by name, from `hardware.toml` and optionally a file of the user.

Numbers are in common units. All are powers of ten of seconds, bytes and operations, so a number is converted by moving
its decimal point, without rounding: what `as_toml` writes is read back as the same number.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from attnmesh.planner.hardware import Cluster, Curve, Device, Link, Wiring
from attnmesh.planner.program import KERNEL_KINDS, SIZED_IN_BYTES, KernelKind
from attnmesh.utils.files import read_text
from attnmesh.utils.sizes import MAX_RANKS
from attnmesh.utils.text import one_line
from attnmesh.utils.validation import check_device, check_path, check_type, shown

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


def _curve_field(kind: KernelKind) -> _Field:
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
    **{FIELD_OF[kind]: _curve_field(kind) for kind in KERNEL_KINDS},
    **{name: _curve_field(kind) for kind, name in CAUSAL_FIELD_OF.items()},
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


_BUILT_IN = Path(__file__).with_name("hardware.toml")
T = TypeVar("T")


@dataclass(frozen=True)
class Catalog:
    """Devices, links and wirings by lower-case name."""

    devices: Mapping[str, Device]
    links: Mapping[str, Link]
    wirings: Mapping[str, Wiring]

    def device(self, name: str) -> Device:
        """A device by name, ignoring case. ValueError lists similar names and all names."""
        return _found("device", name, self.devices)

    def link(self, name: str) -> Link:
        """A link by name."""
        return _found("link", name, self.links)

    def cluster(
        self,
        device: str,
        *,
        ranks_per_node: int | None = None,
        intra_node: str | None = None,
        inter_node: str | None = None,
        rails: int | None = None,
    ) -> Cluster:
        """A cluster of one kind of device, with its usual links and node size unless given."""
        found, usual = self.device(device), _found("device", device, self.wirings)
        for name, link in (("intra_node", intra_node), ("inter_node", inter_node)):
            if link is not None:
                _found(f"{name} link", link, self.links)
        intra_node, inter_node = intra_node or usual.intra_node, inter_node or usual.inter_node
        ranks, ports = usual.ranks_per_node or ranks_per_node, usual.rails or rails
        if intra_node is None or inter_node is None or ranks is None or ports is None:
            parts = {"intra_node": intra_node, "inter_node": inter_node, "ranks_per_node": ranks, "rails": ports}
            missing = " and ".join(name for name, part in parts.items() if part is None)
            raise ValueError(f"the catalog has no links or node size for {found.name}: give {missing}")
        made = Cluster(found, self.link(intra_node), self.link(inter_node), ranks, ports)
        if ranks_per_node is not None:
            made = made.with_ranks_per_node(ranks_per_node)
        return made if rails is None else replace(made, rails=rails)


def catalog(extra: Path | str | None = None) -> Catalog:
    """The built-in catalog, updated with a file if given."""
    return _built_in() if extra is None else load(check_path("extra", extra))


def load(path: Path | str) -> Catalog:
    """The built-in catalog updated with a file: its fields replace fields of the same name."""
    path = check_path("path", path)
    ours, given = _built_in_tables(), read_tables(path)
    merged = Tables(
        device=_merged(ours.device, given.device, path),
        link=_merged(ours.link, given.link, path),
        efficiency={**ours.efficiency, **given.efficiency},
    )
    for name, table in given.device.items():
        for peak in ("peak_tflops", "peak_gbs"):
            if peak in table and all(
                FIELD_OF[kind] in merged.device[name] for kind in KERNEL_KINDS if _peak_of(kind) == peak
            ):
                raise ValueError(
                    f"{path}: device.{name}.{peak} has no effect: all its kernels have rates or samples of their own"
                )
    return _catalog(merged, path)


def cluster(
    device: str, *, ranks_per_node: int | None = None, intra_node: str | None = None, inter_node: str | None = None,
    rails: int | None = None, extra: Path | str | None = None,
) -> Cluster:  # fmt: skip
    """A cluster by the names of its parts in the hardware catalog.

    Args:
        device: such as "h200" or "cpu". A name that the catalog does not have raises ValueError with those it has.
        ranks_per_node: devices of a node; by default the number in the device's usual node.
        intra_node, inter_node: names of links, by default the usual links of the device.
        rails: network interfaces of a node, by default the number in the device's usual node.
        extra: a TOML file that updates the catalog, such as one that `attnmesh calibrate` wrote.

    Examples:
        >>> cluster("h200", ranks_per_node=4).ranks_per_node
        4
        >>> cluster("abacus")
        Traceback (most recent call last):
            ...
        ValueError: unknown device 'abacus'. Known: a100, b200, cpu, h100, h200, mi300x, trainium2
    """
    return catalog(extra).cluster(
        device, ranks_per_node=ranks_per_node, intra_node=intra_node, inter_node=inter_node, rails=rails
    )


def default_cluster(device: torch.device | str) -> Cluster:
    """The cluster to plan for on a torch device type: a CPU host, or H200 nodes for anything else."""
    return _default_cluster(check_device("device", device).type)


@cache
def _default_cluster(device: str) -> Cluster:
    return cluster("cpu" if device == "cpu" else "h200")


@cache
def _built_in() -> Catalog:
    return _catalog(_built_in_tables(), _BUILT_IN)


@cache
def _built_in_tables() -> Tables:
    return read_tables(_BUILT_IN)


def _found(what: str, name: str, among: Mapping[str, T]) -> T:
    check_type(what, name, str, "a name of the catalog")
    key = name.strip().lower()
    if key not in among:
        raise unknown(what, name, among)
    return among[key]


def _merged(ours: Mapping[str, Table], given: Mapping[str, Table], path: Path) -> dict[str, Table]:
    merged = dict(ours)
    for name, table in given.items():
        before = ours.get(name, {})
        merged[name] = {**before, **table}
        changed = [field for field in table if field != "name"]
        if before and changed and "source" not in table:  # record which fields come from which source
            merged[name] = {**merged[name], "source": f"{before['source']}; {', '.join(changed)}: {path}"}
    return merged


def _catalog(tables: Tables, path: Path) -> Catalog:
    links = {name: _link(table, path) for name, table in tables.link.items()}
    for table in tables.device.values():
        for end in ("intra_node", "inter_node"):
            if end in table and str(table[end]).lower() not in links:
                raise unknown(f"link in {path}: device.{table['name']}.{end} names", str(table[end]), links)
    return Catalog(
        devices={name: _device(table, tables.efficiency, path) for name, table in tables.device.items()},
        links=links,
        wirings={
            name: Wiring(**{end: table.get(end) for end in ("intra_node", "inter_node", "ranks_per_node", "rails")})  # type: ignore[arg-type]
            for name, table in tables.device.items()
        },
    )


def _device(table: Mapping[str, Any], efficiency: Table, path: Path) -> Device:
    _require(table, ("source", "memory_gb", "launch_us"), f"device.{table['name']}", path)
    curves = tuple((kind, curve) for kind in KERNEL_KINDS if (curve := _curve(kind, table, efficiency)) is not None)
    if not curves:
        kinds = ", ".join(FIELD_OF.values())
        raise ValueError(f"{path}: device.{table['name']} has no rates: give peak_tflops, peak_gbs or any of {kinds}")
    return Device(
        table["name"], table["source"], table["memory_gb"], table["launch_us"], curves, cores=table.get("cores"),
        causal=tuple((kind, table[name]) for kind, name in CAUSAL_FIELD_OF.items() if name in table),
        round=table.get("round_us", 0.0),
    )  # fmt: skip


def _curve(kind: KernelKind, table: Mapping[str, Any], efficiency: Mapping[str, Any]) -> Curve | None:
    given: Curve | None = table.get(FIELD_OF[kind])
    if given is not None or _peak_of(kind) not in table:
        return given
    return Curve(((table[_peak_of(kind)] * efficiency[FIELD_OF[kind]], 1.0),))


def _peak_of(kind: KernelKind) -> str:
    return "peak_gbs" if kind in SIZED_IN_BYTES else "peak_tflops"


def _link(table: Mapping[str, Any], path: Path) -> Link:
    _require(table, ("source", "latency_us", "bandwidth_gbs"), f"link.{table['name']}", path)
    usual = Link("", "", 0, 1)
    return Link(
        table["name"], table["source"], table["latency_us"], table["bandwidth_gbs"],
        message=table.get("message_us", usual.message), shared=table.get("shared", usual.shared),
    )  # fmt: skip


def _require(table: Table, fields: tuple[str, ...], where: str, path: Path) -> None:
    missing = [field for field in fields if field not in table]
    if missing:
        raise ValueError(f"{path}: {where} is new and lacks {' and '.join(missing)}")
