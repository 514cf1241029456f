"""What every call of a Transformers model is checked for while batches are sharded over ranks.

A model is told of a sharded batch by its arguments only. One that reads neither masks nor other keyword arguments would
compute with this rank's tokens and give no sign of it, so the call itself is watched: before it what the layers of the
model are, and after it that each of them has attended over the ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from attnmesh.integrations.transformers_models import (
    MODELS_PAGE,
    attention_layers,
    check_attention_code,
    check_config,
    check_modules,
    text_config,
)
from attnmesh.utils.error_links import see

_CallCheck = Callable[[nn.Module, Sequence[Any]], None]

_checks: ContextVar[tuple[_CallCheck, ...]] = ContextVar("checks of calls without a sharded batch", default=())
_inspected: WeakSet[nn.Module] = WeakSet()


class WatchedPass:
    """What is known of the call of a model with a sharded batch, which the model is given as `mesh`."""

    def __init__(self) -> None:
        self.is_watched = False
        """Whether a model is being called that was checked for this batch."""
        self.attended_by: set[int] | None = set()
        """The ids of the modules that have attended in the latest call; None if some are in a compiled graph."""

    def count_attention(self, module: nn.Module) -> None:
        """Note that the attention of this module is computed over the ranks."""
        if torch.compiler.is_compiling():
            self.attended_by = None
        elif self.attended_by is not None:
            self.attended_by.add(id(module))


def watch_models() -> None:
    """Let all models of Transformers check the sharded batches that they are given. May be called more than once."""
    models = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if models is not None and models.__call__ is not _call:
        models.__call__ = _call


@contextmanager
def checked_calls(check: _CallCheck) -> Iterator[None]:
    """In this context, `check(model, arguments)` is called before a model that is not given a sharded batch."""
    watch_models()
    token = _checks.set((*_checks.get(), check))
    try:
        yield
    finally:
        _checks.reset(token)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """PreTrainedModel.__call__ with the checks of a sharded batch."""
    if torch.compiler.is_compiling():
        if isinstance(kwargs.get("mesh"), WatchedPass):
            check_config(text_config(self))
        return self._call_impl(*args, **kwargs)
    given = (*args, *kwargs.values())
    mesh = _pass_of(given)
    if mesh is None:
        for check in _checks.get():
            check(self, given)
    elif not mesh.is_watched:
        return _watched_call(self, mesh, args, kwargs)
    return nn.Module.__call__(self, *args, **kwargs)


def _pass_of(given: Sequence[Any]) -> WatchedPass | None:
    """The pass of a sharded batch, which a model may be given with its mask only."""
    passes = (x if isinstance(x, WatchedPass) else getattr(x, "mesh", None) for x in given)
    return next((x for x in passes if isinstance(x, WatchedPass)), None)


def _watched_call(model: Any, mesh: WatchedPass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    check_attention_code(model)
    if model not in _inspected:
        check_modules(model)
        _inspected.add(model)
    mesh.is_watched, mesh.attended_by = True, set()
    try:
        result = nn.Module.__call__(model, *args, **kwargs)
    finally:
        mesh.is_watched = False
    _check_attended(model, mesh)
    return result


def _check_attended(model: nn.Module, mesh: WatchedPass) -> None:
    """Raise ValueError if a layer of the model has not attended over the ranks in the call that has ended."""
    config = text_config(model)
    attended = mesh.attended_by
    if attended is None or len(attended) >= max(1, getattr(config, "num_hidden_layers", 1)):
        return
    for path, layer in attention_layers(model):
        if not any(id(part) in attended for part in layer.modules()):
            got = f"{path} ({type(layer).__name__}), which did not"
            break
    else:
        if attended:
            return  # a model with fewer layers than its configuration has
        got = "a model that did not call it at all"
    raise ValueError(
        f"{type(model).__name__}: every layer that mixes tokens must call attnmesh's attention in a batch that is "
        f"sharded over ranks, got {got}, in a model of type {getattr(config, 'model_type', None)!r}: it would see one "
        f"rank's tokens only{see(MODELS_PAGE)}"
    )
