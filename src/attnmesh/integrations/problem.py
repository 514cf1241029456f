"""What is wrong with a model, in words for the person who asked for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from attnmesh.core.optional import require


class ModelError(ValueError):
    """A model that cannot be loaded, and why."""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Whatever another library raises inside becomes a ModelError that begins with `what`.

    Files of models are foreign, and what reads them raises anything: KeyError, struct.error, errors of its own.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{what}: {str(error).strip() or type(error).__name__}") from error


def needed(module: str) -> ModuleType:
    """A module of the extra `hf`; a ModelError says how to install it."""
    try:
        return require(module, extra="hf")
    except ModuleNotFoundError as missing:
        raise ModelError(str(missing)) from missing
