"""What the layers of a model do: the calls of the attention function in a forward pass, and what is cached for each.

And the calls of recurrent layers, with the shapes of their states.

No model is known by its name. `attention_calls` runs the model over two tokens and records, for every call, the module
that attends, its mask, and the shapes of its keys and values. A call caches the keys and values that it is given,
however the model made them: one module may attend several times in a pass, layers may differ in heads and widths, and a
call whose keys and values are the tensors of an earlier call (Gemma 3n) reads what is cached for that one. Latents
are cached where `kv_b_proj` of the module expands them to the keys and values of the call, which is computed and
compared; otherwise the keys and values are.

With sharded weights a pass needs all ranks. What is cached then follows from the configuration (`calls_of_config`), and
recurrent layers, which every rank has, are called by themselves (`recurrent_calls`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnmesh.core.masks import Causal, Chunked, Mask, SlidingWindow
from attnmesh.generation.models import LatentWidths, cached_widths, latent_widths, layer_configs, layer_windows
from attnmesh.generation.recurrent_states import RecurrentCall
from attnmesh.integrations.recurrent_layers import is_recurrent, serve_over_ranks
from attnmesh.integrations.transformers_models import MODELS_PAGE, text_config
from attnmesh.models.sharded import heads_of
from attnmesh.ops.recurrent.api import scan
from attnmesh.ops.recurrent.layer import RecurrentLayer
from attnmesh.ops.storage import bytes_per_token
from attnmesh.utils.text import explained_in

_TOKENS = 2  # of the pass that is recorded
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}  # of latents that are expanded; else 0.05


@dataclass(frozen=True)
class CachedLayer:
    """What the cache has for each token: keys and values of some heads, of a window only if there is one."""

    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    latent: bool = False

    def bytes_per_token(self, storage: str, kv_heads: int | None = None) -> int:
        """Bytes of one token with scales; by default of all kv heads."""
        widths = (self.head_dim,) if self.latent else (self.head_dim, self.value_dim)
        heads = self.kv_heads if kv_heads is None else kv_heads
        return round(heads * sum(bytes_per_token(storage, width) for width in widths))


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function in every pass."""

    name: str  # of the module
    number: int
    layer: int  # of the cache
    mask: Mask
    is_first: bool  # of the calls with this layer of the cache: it writes

    @property
    def window(self) -> int | None:
        """The most tokens that a token attends to, itself included; None if that is not limited."""
        return mask_window(self.mask)


@dataclass(frozen=True)
class AttentionCalls:
    """The calls of a pass in their order, and what is cached for them."""

    calls: tuple[AttentionCall, ...]
    layers: tuple[CachedLayer, ...]
    latent: LatentWidths | None
    recurrent: tuple[RecurrentCall, ...] = ()

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer of the cache."""
        return tuple(layer.window for layer in self.layers)

    @cached_property
    def shared(self) -> frozenset[int]:
        """The layers of the cache that several calls read."""
        return frozenset(call.layer for call in self.calls if not call.is_first)


class NewTokensCache:
    """What Transformers takes for a cache: it returns the new keys and values as they are, without earlier ones."""

    is_compileable: ClassVar[bool] = False  # required by Transformers
    is_initialized: ClassVar[bool] = True
    has_states: bool = False  # of recurrent layers

    def get_mask_sizes(self, query_length: int, layer: int = 0) -> tuple[int, int]:
        """Required by Transformers, for a mask that is never made."""
        return query_length, 0

    def get_query_offset(self, layer: int = 0) -> int:
        """Required by Transformers, for a mask that is never made."""
        return 0

    def get_seq_length(self, layer: int = 0) -> int:
        """Required by Transformers; positions are passed with every call."""
        return 0

    # Recurrent layers: the functions that they call keep the states.

    def get_conv_state(self, *_: object, **__: object) -> None:
        """None: the layer computes with the new tokens."""

    def get_recurrent_state(self, *_: object, **__: object) -> None:
        """None: the layer computes with the new tokens."""

    def has_previous_state(self, *_: object) -> bool:
        """As if there were no earlier tokens."""
        return False

    def update_conv_state(self, new: Tensor, *_: object, **__: object) -> Tensor:
        """The inputs of a convolution, without earlier ones."""
        return new

    def update_recurrent_state(self, *_: object, **__: object) -> None:
        """Keeps nothing."""


def mask_window(mask: Mask) -> int | None:
    """The most tokens that a token attends to under the mask of a layer, itself included."""
    if isinstance(mask, SlidingWindow):
        return mask.left + 1
    return mask.size if isinstance(mask, Chunked) else None


def run_model(model: Any, cache: NewTokensCache, ids: Tensor, positions: Tensor, keep: int = 0) -> Tensor:
    """The logits of the last `keep` tokens, or of all if 0."""
    logits: Tensor = model(
        input_ids=ids, position_ids=positions, past_key_values=cache, attention_pass=cache,
        use_cache=not cache.has_states,  # with it, MiniMax asks for a cache of its own
        logits_to_keep=keep,
    ).logits  # fmt: skip
    return logits


@explained_in(MODELS_PAGE)
@torch.no_grad()
def attention_calls(model: Any) -> AttentionCalls:
    """The calls of a model with whole weights. Raises ValueError for what a sharded KV cache does not serve."""
    name, device = type(model).__name__, model.get_input_embeddings().weight.device
    positions = torch.arange(_TOKENS, device=device)[None]
    recorded = _Recorder(model, positions)
    serve_over_ranks(model)
    try:
        run_model(model, recorded, positions, positions, 1)
    except AttributeError as error:
        if error.obj is not recorded:
            raise
        raise ValueError(f"{name}: the model must not read {error.name!r} of its KV cache, which is paged") from None
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        raise ValueError(f"{name} must pass keyword arguments to its attention: {error}") from None
    recorded.check_attended()
    if not recorded.calls and not recorded.recurrent:
        raise ValueError(f"{name}: no layer attends by the attention function of attn_implementation")
    latent = _checked_latents(model, recorded.calls)
    calls: list[AttentionCall] = []
    layers: list[CachedLayer] = []
    writers: list[_Recorded] = []
    for number, each in enumerate(recorded.calls):
        same = [i for i, other in enumerate(writers) if each.has_kv_of(other)]
        layer = same[0] if same else len(layers)
        calls.append(AttentionCall(each.name, number, layer, each.mask, not same))
        if same:
            layers[layer] = _widened(layers[layer], calls[-1].window)
            continue
        writers.append(each)
        if latent is None:
            widths = each.k.shape[1], each.k.shape[3], each.v.shape[3]
        else:
            widths = 1, latent.cached, latent.latent
        layers.append(CachedLayer(*widths, calls[-1].window, latent is not None))
    if not layers:  # the cache has blocks and lengths for every sequence, also where nothing attends
        layers.append(CachedLayer(1, 1, 1))
    return AttentionCalls(tuple(calls), tuple(layers), latent, tuple(recorded.recurrent))


def calls_of_config(config: Any) -> AttentionCalls:
    """The calls of a model whose layers attend once each, to keys and values as its configuration has them."""
    windows = layer_windows(config)
    layers = tuple(
        CachedLayer(heads_of(each).kv, **cached_widths(each), window=window)
        for each, window in zip(layer_configs(config), windows, strict=True)
    )
    masks: list[Mask] = [Causal() if window is None else SlidingWindow(window - 1) for window in windows]
    calls = (AttentionCall(f"layer {i}", i, i, mask, is_first=True) for i, mask in enumerate(masks))
    return AttentionCalls(tuple(calls), layers, latent_widths(config))


@torch.no_grad()
def recurrent_calls(model: Any) -> tuple[RecurrentCall, ...]:
    """The recurrent calls of a model with sharded weights, in the order of its layers."""
    weight = model.get_input_embeddings().weight
    recorded = _Recorder(model, torch.arange(_TOKENS, device=weight.device)[None])
    layers = [module for module in model.modules() if is_recurrent(type(module))]
    if layers:
        serve_over_ranks(model)
    for layer in layers:
        _LayerCall()(layer, weight.new_zeros(1, _TOKENS, weight.shape[1]), attention_pass=recorded)
    return tuple(recorded.recurrent)


class _LayerCall(nn.Module):
    """Calls a layer as a model does: what a pass is, is read from the arguments of the outer call."""

    def forward(self, layer: nn.Module, hidden_states: Tensor, **kwargs: Any) -> Any:
        """The outputs of the layer."""
        return layer(hidden_states)


def _widened(layer: CachedLayer, window: int | None) -> CachedLayer:
    """A layer of the cache that another call with this window reads, too."""
    both = None if layer.window is None or window is None else max(layer.window, window)
    return CachedLayer(layer.kv_heads, layer.head_dim, layer.value_dim, both, layer.latent)


# The recorded pass.


@dataclass(frozen=True)
class _Recorded:
    name: str
    module: object
    mask: Mask
    k: Tensor
    v: Tensor
    cached: tuple[Tensor, Tensor] | None  # what the model gave to its cache before

    def has_kv_of(self, other: _Recorded) -> bool:
        """Whether both attend to the same tensors."""
        return is_same(self.k, other.k) and is_same(self.v, other.v)


def is_same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are the same memory, seen the same way."""
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()


class _Recorder(NewTokensCache):
    """The cache and the attention of the recorded pass. Its attention is 0: only what the calls are given matters."""

    def __init__(self, model: Any, positions: Tensor) -> None:
        self._model, self._positions = type(model).__name__, positions
        self.has_states = any(is_recurrent(type(module)) for module in model.modules())
        self._names = {id(module): path for path, module in model.named_modules()}
        self._cached: tuple[int, Tensor, Tensor] | None = None
        self.calls: list[_Recorded] = []
        self.recurrent: list[RecurrentCall] = []

    def index_in_row(self) -> Tensor:
        """The positions of the tokens."""
        return self._positions

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Note what a layer caches."""
        self.check_attended()
        self._cached = layer, key, value
        return key, value

    def check_attended(self) -> None:
        """Raise ValueError if a layer has cached keys and values, and has not attended since."""
        if self._cached is not None:
            raise ValueError(
                f"{self._model}: layer {self._cached[0]} caches keys and values, but does not attend by the attention "
                "function of attn_implementation"
            )

    def attend(
        self, layer: object, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, sinks: Tensor | None,
        softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Note a call."""
        name = self._names.get(id(layer), f"layer {layer}")
        if not isinstance(mask, Causal | SlidingWindow | Chunked):
            raise ValueError(
                f"{self._model}: the mask of {name} must be causal, a sliding window or chunks, got {mask!r}"
            )
        cached = None if self._cached is None else self._cached[1:]
        self._cached = None
        self.calls.append(_Recorded(name, layer, mask, k, v, cached))
        return q.new_zeros(*q.shape[:3], v.shape[3])

    def scan(self, module: nn.Module, layer: RecurrentLayer) -> Tensor:
        """Note a call of a recurrent layer."""
        name = self._names.get(id(module), type(module).__name__)
        self.recurrent.append(RecurrentCall(name, layer.state_shape[1:], layer.compute_dtype))
        return scan(layer)


def _checked_latents(model: nn.Module, calls: list[_Recorded]) -> LatentWidths | None:
    """The widths of the latents that the model caches, if `kv_b_proj` expands them to the keys and values."""
    widths = latent_widths(text_config(model))
    if widths is None:
        return None
    for number, call in enumerate(calls):
        expand, latents = getattr(call.module, "kv_b_proj", None), call.cached
        if type(expand) is not nn.Linear or expand.bias is not None or latents is None:
            return None
        latent, rope = latents
        if getattr(call.module, "layer_idx", None) != number or latent.shape[1] != 1 or rope.shape[1] != 1:
            return None
        if (latent.shape[3], rope.shape[3]) != (widths.latent, widths.rope):
            return None
        if expand.out_features != call.k.shape[1] * (widths.nope + widths.value):
            return None
        expanded = F.linear(latent[:, 0], expand.weight).unflatten(-1, (call.k.shape[1], -1)).transpose(1, 2)
        key, value = expanded.split([widths.nope, widths.value], -1)
        keys = torch.cat([key, rope.expand(-1, call.k.shape[1], -1, -1)], -1)
        if not (_is_near(keys, call.k) and _is_near(value, call.v)):
            return None
    return widths


def _is_near(x: Tensor, y: Tensor) -> bool:
    near: Callable[..., bool] = torch.allclose
    largest = float(y.abs().max())
    return x.shape == y.shape and near(x, y, rtol=0, atol=largest * _TOLERANCE.get(x.dtype, 0.05))
