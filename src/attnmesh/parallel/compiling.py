"""Functions that `torch.compile` does not trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(reason: str) -> Callable[[F], F]:
    """Decorates a function that always runs eagerly. A graph breaks there; with fullgraph=True torch gives `reason`."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                torch._dynamo.graph_break(msg=reason)
                # Not as a decorator: it imports torch._dynamo, which takes as long as the rest of torch.
                return torch.compiler.disable(function, reason=reason)(*args, **kwargs)
            return function(*args, **kwargs)

        return cast(F, wrapped)

    return decorate
