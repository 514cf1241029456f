"""Optional dependencies: imported on first use, with an error that names the extra to install."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

from attnmesh.utils.text import see


class MissingExtraError(ModuleNotFoundError):
    """An optional dependency is not installed. The message names the extra of attnmesh to install."""


def require(module: str, *, extra: str) -> ModuleType:
    """Imports `module`; raises MissingExtraError, a ModuleNotFoundError that names the extra of attnmesh to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            f"{missing.name} is not installed; this needs the extra {extra!r}: pip install 'attnmesh[{extra}]'"
            f"{see('features.md#extras')}",
            name=missing.name,
        ) from missing


@functools.cache  # takes a tenth of a millisecond, for a module that has not been imported
def installed(module: str) -> bool:
    """Whether a module is installed, without importing it."""
    return importlib.util.find_spec(module) is not None
