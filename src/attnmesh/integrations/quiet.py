"""Transformers without its progress bars and warnings, for the time of a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attnmesh.integrations.problem import needed


@contextmanager
def quiet() -> Iterator[None]:
    """Only errors are logged and no bar is drawn inside; afterwards both are as they were."""
    logging = needed("transformers.utils.logging")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    # Not disable_progress_bar: that reaches into huggingface_hub, whose setting could not be told apart afterwards.
    hook = logging.set_tqdm_hook(_no_bar)
    try:
        yield
    finally:
        logging.set_tqdm_hook(hook)
        logging.set_verbosity(verbosity)


def _no_bar(factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return factory(*args, **{**kwargs, "disable": True})
