"""Recurrent layers of Transformers' models over ranks: convolutions, delta rules and state spaces.

A layer is recognised by the functions that its `forward` calls. Transformers' models have one function for each kind of
recurrence, under one name and with the arguments of the kernel that replaces it (causal-conv1d, flash-linear-attention,
mamba-ssm). In a batch that is sharded over ranks these functions compute over the ranks; all else is the model's own.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnmesh.ops.recurrent.layer import RecurrentLayer
from attnmesh.ops.recurrent.layers import (
    GatedDeltaRule,
    KimiDeltaAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    ShortConvolution,
)


@runtime_checkable
class RecurrentPass(Protocol):
    """How the recurrent layers of one forward pass are computed."""

    def scan(self, module: nn.Module, layer: RecurrentLayer) -> Tensor:
        """The outputs of this rank's tokens, from the inputs of this rank."""


_Scan = Callable[[RecurrentLayer], Tensor]


def _refuse_states(**given: object) -> None:
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(f"{name} must not be given in a batch that is sharded over ranks (use_cache=False)")


def _convolution(
    scan: _Scan, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """`causal_conv1d_fn`."""
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"the activation of a convolution over ranks must be silu or None, got {activation!r}")
    x = hidden_states.to(weight.dtype)
    return scan(ShortConvolution(x, weight, bias, None if activation is None else "silu")).to(hidden_states.dtype)


def _delta_rule(
    kind: type[GatedDeltaRule] | type[KimiDeltaAttention], scan: _Scan, query: Tensor, key: Tensor,
    value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, **_: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`chunk_gated_delta_rule` and `chunk_kda`."""
    _refuse_states(initial_state=initial_state)
    inputs = (x.transpose(1, 2) for x in (query, key, value, g, beta))
    q, k, v, g, beta = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in inputs)
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    out = scan(kind(q, k, v, g, beta)).transpose(1, 2).contiguous().to(query.dtype)
    return out, _no_state(out, output_final_state)


def _step_sizes(dt: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float]) -> Tensor:
    """The step sizes of a state space; the bias has the dimensions of `dt` from its second on, or fewer."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    if softplus:
        dt = F.softplus(dt)
    return dt if limit == (0.0, float("inf")) else dt.clamp(*limit)


def _mamba2(
    scan: _Scan, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int = 256,
    D: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")), z: Tensor | None = None,
    return_final_states: bool = False, **_: Any,
) -> Tensor | tuple[Tensor, Tensor | None]:  # fmt: skip
    """`mamba_chunk_scan_combined`."""
    _refuse_states(initial_states=initial_states)
    dt = _step_sizes(dt, dt_bias, dt_softplus, dt_limit)
    x, dt, B, C = (x.transpose(1, 2) for x in (hidden_states, dt, B, C))
    out = scan(Mamba2(x, dt, A, B, C, D)).transpose(1, 2).contiguous()
    return _result(out, z, return_final_states)


def _mamba1(
    scan: _Scan, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    return_last_state: bool = False, **_: Any,
) -> Tensor | tuple[Tensor, Tensor | None]:  # fmt: skip
    """`selective_scan_fn`."""
    bias = None if delta_bias is None else delta_bias[:, None]
    dt = _step_sizes(dt, bias, delta_softplus, (0.0, float("inf")))
    B, C = (x.transpose(1, 2)[:, None] for x in (B, C))
    out = scan(Mamba1(hidden_states, dt, A, B, C, D))
    return _result(out, z, return_last_state)


def _result(out: Tensor, z: Tensor | None, returns_state: bool) -> Tensor | tuple[Tensor, Tensor | None]:
    out = out if z is None else out * F.silu(z)
    return (out, _no_state(out, True)) if returns_state else out


def _no_state(out: Tensor, is_asked: bool) -> Tensor | None:
    """What a layer gives to its cache, which keeps the states itself."""
    return out.new_empty(0) if is_asked else None


def _fused(*_: Any, **__: Any) -> None:
    """A layer in one kernel: None lets the model compute it in steps."""


_SCANS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": functools.partial(_delta_rule, GatedDeltaRule),
    "chunk_kimi_delta_attention": functools.partial(_delta_rule, KimiDeltaAttention),
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba1,
}
_FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
_MAKES_MASK = "create_recurrent_attention_mask"
_MASKED = {_MAKES_MASK: 2, "apply_mask_to_padding_states": 1}  # where attention_mask stands
# The parts of MiniMax's lightning attention, which has no function of its own.
_LIGHTNING = {"act_fn", "qkv_proj", "slope_rate", "norm", "output_gate", "out_proj"}
_OVER_RANKS = "over_ranks"  # the attribute of a function that has been replaced


def is_recurrent(layer: type) -> bool:
    """Whether the layers of this class mix tokens in functions that are served."""
    return _is_recurrent(layer)


@functools.cache
def _is_recurrent(layer: Any) -> bool:
    code = getattr(inspect.unwrap(getattr(layer, "forward", None)), "__code__", None)  # type: ignore[arg-type]
    names = () if code is None else code.co_names
    return any(name in _SCANS for name in names) or _LIGHTNING.issubset(names)


@functools.cache
def has_recurrent_layers(module: ModuleType) -> bool:
    """Whether a module with the code of a model has classes of such layers."""
    return any(
        inspect.isclass(each) and issubclass(each, nn.Module) and each.__module__ == module.__name__
        and is_recurrent(each) for each in vars(module).values()
    )  # fmt: skip


def serve_over_ranks(model: nn.Module) -> None:
    """Let the functions that the recurrent layers of a model call compute over ranks where the batch is sharded."""
    classes = {type(layer) for layer in model.modules()}
    for layer in classes:
        if is_recurrent(layer) and _LIGHTNING.issubset(inspect.unwrap(layer.forward).__code__.co_names):
            _serve_lightning(layer)
    for code in {sys.modules[layer.__module__] for layer in classes}:
        if not has_recurrent_layers(code):
            continue
        for name, serve in [*_SCANS.items(), *((name, _fused) for name in _FUSED)]:
            original = getattr(code, name, None)
            if original is not None and not hasattr(original, _OVER_RANKS):
                setattr(code, name, _over_ranks(original, serve))
        for name, position in _MASKED.items():
            original = getattr(code, name, None)
            if original is not None and not hasattr(original, _OVER_RANKS):
                setattr(code, name, _with_local_mask(original, position))


_over_ranks_before: WeakSet[nn.Module] = WeakSet()


def _over_ranks(original: Callable[..., Any], serve: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if isinstance(kwargs.get("attention_pass"), RecurrentPass):
                raise ValueError("recurrent layers over ranks must run in eager mode, got a call within torch.compile")
            return original(*args, **kwargs)
        module, found, is_called = _caller(sys._getframe(1))
        if found is None:
            if not is_called and module in _over_ranks_before:
                raise ValueError(
                    f"{type(module).__name__} is computed again outside of its model's call, without the arguments of "
                    f"the sharded batch: activation checkpointing must have use_reentrant=False"
                )
            return original(*args, **kwargs)
        _over_ranks_before.add(module)
        return serve(functools.partial(found.scan, module), *args, **kwargs)

    setattr(function, _OVER_RANKS, True)
    return function


def _serve_lightning(layer: Any) -> None:
    """Let the `forward` of lightning attention compute over ranks where the batch is sharded."""
    original = layer.forward
    if hasattr(original, _OVER_RANKS):
        return

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = kwargs.get("attention_pass")
        if not isinstance(found, RecurrentPass):
            return original(self, hidden_states, *args, **kwargs)
        qkv, mask = self.act_fn(self.qkv_proj(hidden_states)), kwargs.get("attention_mask")
        qkv = qkv if mask is None else qkv * mask[:, :, None]
        q, k, v = qkv.unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2).chunk(3, -1)
        out = found.scan(self, LightningAttention(q, k, v, -self.slope_rate.flatten(), scale=1.0))
        out = self.norm(out.transpose(1, 2).flatten(2))
        return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * out), None

    setattr(forward, _OVER_RANKS, True)
    layer.forward = forward


def _with_local_mask(original: Callable[..., Any], position: int) -> Callable[..., Any]:
    """A function that takes `attention_mask`, in a sharded batch this rank's tokens, 0 for padding, or None.

    A mask that is made for layers carries the pass to them: some models hand nothing else on.
    """

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask", args[position] if len(args) > position else None)
        local = getattr(mask, "for_recurrent_layers", None)
        if local is None:
            return original(*args, **kwargs)
        if original.__name__ == _MAKES_MASK:
            tensor = local()
            tensor.attention_pass = mask.attention_pass  # type: ignore[union-attr]
            return tensor
        return original(*args[:position], **kwargs | {"attention_mask": local()})

    setattr(function, _OVER_RANKS, True)
    return function


def _caller(frame: FrameType | None) -> tuple[nn.Module, RecurrentPass | None, bool]:
    """The layer that calls a function, the pass of a sharded batch, and whether a model is being called.

    An outer `forward` has the pass as an argument. (Not all layers hand the arguments of the model's call on to their
    functions. A layer that is computed again for the backward pass has the arguments of the layer only.)
    """
    layer: nn.Module | None = None
    is_called = False
    while frame is not None:
        if frame.f_code.co_name == "forward" and isinstance(module := frame.f_locals.get("self"), nn.Module):
            layer = module if layer is None else layer
            is_called = is_called or hasattr(module, "get_input_embeddings")
            found = _pass_in(frame)
            if found is not None:
                return layer, found, is_called
        frame = frame.f_back
    assert layer is not None, "recurrent functions are called by layers"
    return layer, None, is_called


def _pass_in(frame: FrameType) -> RecurrentPass | None:
    """The pass of a sharded batch among the arguments of a call, of which it may be a part of the mask."""
    given = frame.f_locals
    mask = given.get("attention_mask")
    for found in ((given.get("kwargs") or {}).get("attention_pass"), getattr(mask, "attention_pass", None)):
        if isinstance(found, RecurrentPass):
            return found
    return None
