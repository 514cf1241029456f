"""Optional dependencies: imported when used, with an error that names the extra to install."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType


def require(module: str, *, extra: str) -> ModuleType:
    """Import `module`, or say which extra of attnmesh brings what it needs."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"{missing.name} is not installed; this needs the extra {extra!r}: pip install 'attnmesh[{extra}]'",
            name=missing.name,
        ) from missing


def installed(module: str) -> bool:
    """Whether an optional module is there, without importing it."""
    return importlib.util.find_spec(module) is not None
