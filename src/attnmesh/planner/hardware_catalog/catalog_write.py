"""Devices and links as a file that the catalogue reads: what a calibration leaves behind."""

from __future__ import annotations

import json
from collections.abc import Iterable
from decimal import Decimal

from attnmesh.planner.hardware import OF_BYTES, Curve, Device, Kind, Link, Wiring
from attnmesh.planner.hardware_catalog.catalog_file import FIELD_OF, GIGA, MICRO, MILLI, SQUARES_OF, size_places


def as_toml(device: Device, links: Iterable[Link] = (), wiring: Wiring | None = None) -> str:
    """A file that says a device, links, and how the device is wired.

    Read back, it gives equal objects. (If the catalogue has a device of that name already, it keeps what is not said
    here: kinds of kernels that `device` has no curve for.)
    """
    lines = [
        f"[device.{_quoted(device.name)}]",
        f"source = {_quoted(device.source)}",
        f"memory_gb = {_moved(device.memory, -GIGA)}",
        f"launch_us = {_moved(device.launch, -MICRO)}",
    ]
    if device.cores is not None:
        lines.append(f"cores = {device.cores}")
    if device.round:
        lines.append(f"round_us = {_moved(device.round, -MICRO)}")
    for name, value in vars(wiring or Wiring()).items():
        if value is not None:
            lines.append(f"{name} = {_quoted(value) if isinstance(value, str) else value}")
    lines += [_curve(FIELD_OF[kind], kind, curve) for kind, curve in device.curves]
    lines += [_curve(SQUARES_OF[kind], kind, curve) for kind, curve in device.squares]
    for link in links:
        lines += [
            "",
            f"[link.{_quoted(link.name)}]",
            f"source = {_quoted(link.source)}",
            f"bandwidth_gbs = {_moved(link.bandwidth, -GIGA)}",
            f"latency_us = {_moved(link.latency, -MICRO)}",
            f"message_us = {_moved(link.message, -MICRO)}",
            f"shared = {str(link.shared).lower()}",
        ]
    return "\n".join(lines) + "\n"


def _curve(field: str, kind: Kind, curve: Curve) -> str:
    samples = (f"[{_moved(size, -size_places(kind))}, {_moved(time, -MILLI)}]" for size, time in curve.samples)
    return f"{field} = [{', '.join(samples)}]  # [{'MB' if kind in OF_BYTES else 'GFLOP'}, ms]"


def _moved(value: float, places: int) -> str:
    text = format(Decimal(repr(float(value))).scaleb(places), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's strings are TOML's but for this one
