"""Recurrent layers of Transformers models over ranks: recognized by the functions that mix their tokens.

A hybrid model of Transformers mixes the tokens of a recurrent layer in a few functions of the module with its code: a
causal convolution, the chunked gated delta rule, the scan of Mamba-2. In a call with a sharded batch these functions
compute over the ranks; in other calls they are Transformers' own. A layer that calls another function of this kind, or
a convolution of torch, is not served.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnmesh.ops.recurrent.convolution import ShortConvolution
from attnmesh.ops.recurrent.delta_rules import GatedDeltaRule, KimiDeltaAttention
from attnmesh.ops.recurrent.layer import RecurrentLayer
from attnmesh.ops.recurrent.state_space import Mamba2


@runtime_checkable
class RecurrentPass(Protocol):
    """How the recurrent layers of one forward pass are computed over ranks."""

    def recurrent(self, layer: RecurrentLayer) -> Tensor:
        """The outputs of this rank's tokens, from this rank's inputs."""


_sharded_call: ContextVar[bool] = ContextVar("whether a model is called with a sharded batch", default=False)

_ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}


def _causal_convolution(
    attention_pass: RecurrentPass, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **_: object,
) -> Tensor:  # fmt: skip
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation of a convolution must be silu or None over ranks, got {activation!r}")
    layer = ShortConvolution(hidden_states, weight, bias, _ACTIVATIONS[activation])  # type: ignore[arg-type]
    return attention_pass.recurrent(layer)


def _delta_rule(
    attention_pass: RecurrentPass, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    chunk_size: int = 64, initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    _check_no_cache(initial_state, output_final_state)
    q, k, v, g, beta = (x.transpose(1, 2).float() for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    kind = GatedDeltaRule if g.ndim == beta.ndim else KimiDeltaAttention
    out = attention_pass.recurrent(kind(q, k, v, g, beta))
    return out.transpose(1, 2).contiguous().to(query.dtype), None


def _mamba2(
    attention_pass: RecurrentPass, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int,
    D: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False,
    z: Tensor | None = None, **_: object,
) -> Tensor:  # fmt: skip
    _check_no_cache(initial_states, return_final_states)
    if z is not None:
        raise ValueError("z must be None over ranks, got a tensor")
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    x, dt, B, C = (one.transpose(1, 2).float() for one in (hidden_states, dt, B, C))
    out = attention_pass.recurrent(Mamba2(x, dt, A, B, C, D))
    return out.transpose(1, 2).contiguous()


def _fused_mamba2(attention_pass: RecurrentPass, *_: object, **__: object) -> None:
    """Nothing: the layer then computes its steps one after another."""


def _check_no_cache(state: Tensor | None, final: bool) -> None:
    if state is not None or final:
        raise ValueError("use_cache must be False for recurrent layers in a batch that is sharded over ranks, got True")


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _causal_convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba2_split_conv1d_scan_combined": _fused_mamba2,
}
"""The functions of a model's code that compute over ranks."""

_CONVOLUTION = "causal_conv1d_fn"
_MASK = "create_recurrent_attention_mask"
# Functions for one token and a cache, which a sharded batch has not, and functions that compute every token by itself.
_OTHERS = {
    "causal_conv1d_update", "torch_recurrent_gated_delta_rule", "mamba2_selective_state_update",
    "recurrent_kimi_delta_attention", "apply_mask_to_padding_states", "apply_rotary_pos_emb",
}  # fmt: skip
_CALLS_CONVOLUTION = re.compile(r"self\.\w*conv\w*\(")


@functools.cache
def why_not(module: ModuleType) -> str:
    """Why recurrent layers of the models in a module are not served, or nothing."""
    mixers = recurrent_classes(module)
    if not mixers:
        return f"no layer of {module.__name__} mixes tokens in functions that are known"
    kernels = {name for name, x in vars(module).items() if inspect.isfunction(x) and _is_kernel(x, module)}
    for name in sorted(kernels - FUNCTIONS.keys() - _OTHERS):
        return f"{module.__name__} has a function {name}, which is not known"
    for mixer in mixers:
        forward = inspect.unwrap(mixer.forward)
        called = {name for name in forward.__code__.co_names if inspect.isfunction(vars(module).get(name))}
        for name in sorted(called - FUNCTIONS.keys() - _OTHERS):
            return f"{mixer.__name__} mixes tokens in {name}, which is not known"
        if _CALLS_CONVOLUTION.search(inspect.getsource(forward)):
            return f"{mixer.__name__} calls a convolution itself"
        for name in sorted(called & FUNCTIONS.keys()):
            known = [
                p for p in inspect.signature(FUNCTIONS[name]).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD
            ]
            own = inspect.signature(vars(module)[name]).parameters
            unknown = own.keys() - {p.name for p in known} - {"kwargs"}
            if unknown and FUNCTIONS[name] is not _fused_mamba2:
                return f"{name} of {module.__name__} takes {', '.join(sorted(unknown))}, which is not known"
    return ""


def _is_kernel(function: Any, module: ModuleType) -> bool:
    """Whether a kernel may replace a function of the module, as in all that mix tokens."""
    return function.__module__ == module.__name__ and hasattr(function, "__wrapped__")


@functools.cache
def recurrent_classes(module: ModuleType) -> tuple[type[nn.Module], ...]:
    """The layers in the code of a model that call a causal convolution by its function."""
    found = []
    for kind in vars(module).values():
        if inspect.isclass(kind) and issubclass(kind, nn.Module) and kind.__module__ == module.__name__:
            code = getattr(inspect.unwrap(kind.forward), "__code__", None)
            if code is not None and _CONVOLUTION in code.co_names:
                found.append(kind)
    return tuple(found)


def serve(module: ModuleType) -> bool:
    """Let the functions of a model's code compute over ranks in calls with a sharded batch, if it has recurrent layers.

    Returns whether it has. May be called again.
    """
    if not recurrent_classes(module):
        return False
    for name, function in FUNCTIONS.items():
        original = vars(module).get(name)
        if original is not None and not hasattr(original, "over_ranks"):
            setattr(module, name, _served(original, function))
    masks = vars(module).get(_MASK)
    if masks is not None and not hasattr(masks, "over_ranks"):
        setattr(module, _MASK, _served_mask(masks))
    return True


@contextmanager
def sharded_call() -> Iterator[None]:
    """Around the call of a model with a sharded batch: functions that are not given its pass raise ValueError."""
    token = _sharded_call.set(True)
    try:
        yield
    finally:
        _sharded_call.reset(token)


def _served(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def served(*args: Any, **kwargs: Any) -> Any:
        attention_pass = kwargs.pop("attention_pass", None)
        if isinstance(attention_pass, RecurrentPass):
            return function(attention_pass, *args, **kwargs)
        if _sharded_call.get():
            raise ValueError(
                f"{original.__name__} must be given the keyword argument attention_pass of the model's call, since "
                f"this batch is sharded over ranks, got {sorted(kwargs)}"
            )
        return original(*args, **kwargs)

    served.over_ranks = function  # type: ignore[attr-defined]
    return served


def _served_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def served(*args: Any, **kwargs: Any) -> Any:
        attention_pass = getattr(kwargs.get("attention_mask"), "attention_pass", None)
        if not isinstance(attention_pass, RecurrentPass):
            return original(*args, **kwargs)
        real: Tensor = attention_pass.attention_mask  # type: ignore[attr-defined]
        return None if bool(real.all()) else real

    served.over_ranks = original  # type: ignore[attr-defined]
    return served
