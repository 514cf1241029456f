"""What is wrong with a model, in words for the person who asked for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from attnmesh.extras import require


class ModelProblem(ValueError):  # noqa: N818 - what is wrong is the model, not the program
    """A model that cannot be loaded, and why."""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Whatever another library raises inside becomes a ModelProblem that begins with `what`.

    Files of models are foreign, and what reads them raises anything: KeyError, struct.error, errors of its own.
    """
    try:
        yield
    except ModelProblem:
        raise
    except Exception as error:
        raise ModelProblem(f"{what}: {str(error).strip() or type(error).__name__}") from error


def needed(module: str) -> ModuleType:
    """A module of the extra `hf`; a ModelProblem says how to install it."""
    try:
        return require(module, extra="hf")
    except ModuleNotFoundError as missing:
        raise ModelProblem(str(missing)) from missing
