"""`attn_implementation="attnmesh"`: Transformers models whose attention runs over ranks.

Transformers passes keyword arguments of a model's call down to its attention. One of them, `attention_pass`, selects
how the attention of this call is computed: over a batch that is sharded (`ShardedPass`, from `shard_inputs`) or over a
sharded KV cache (the passes of `generation`). Without it the model attends on one device.

No mask tensor is ever made. Transformers describes a mask by a function that it composes (causal, with a window, in
chunks, within packed sequences), and calls a hook of the attention implementation to make a tensor of it. Our hook
recognizes the function instead (`LayerMask`); a function that it does not know raises ValueError.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnmesh.core.mask_encoding import traced_mask
from attnmesh.core.masks import (
    Causal,
    Chunked,
    Full,
    Mask,
    Packing,
    PerSequence,
    Slices,
    SlidingWindow,
    number_starts,
    packing_of,
)
from attnmesh.integrations.sharded_pass import ReadError, ShardedMask, ShardedPass
from attnmesh.integrations.transformers_models import (
    MODELS_PAGE,
    NAME,
    changing_rotary,
    check_config,
    check_head,
    counts_positions_from_mask,
    scale_by_index,
)
from attnmesh.ops.dense.api import attention
from attnmesh.utils.optional import require
from attnmesh.utils.text import see
from attnmesh.utils.validation import shown

# Changes to other packages that are undone exactly, also to modules that are imported later.


_MISSING = object()


class Patches:
    """Attributes that were replaced, and what they were."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []
        self._finder = _Finder()

    def replace(self, owner: type, name: str, method: Callable[..., Any]) -> None:
        """Replace a method of a class by `method(original, self, ...)`."""
        original = getattr(owner, name)
        self._replaced.append((owner, name, owner.__dict__.get(name, _MISSING)))

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return method(original, *args, **kwargs)

        setattr(owner, name, replaced)

    def when_imported(self, module: str, apply: Callable[[ModuleType], None]) -> None:
        """Call `apply(module)` now if the module is imported, else after its import."""
        if module in sys.modules:
            apply(sys.modules[module])
            return
        self._finder.pending[module] = apply
        if self._finder not in sys.meta_path:
            sys.meta_path.insert(0, self._finder)

    def undo(self) -> None:
        """Restore all attributes; modules that are imported later stay as they are."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._finder.pending.clear()
        while self._replaced:
            owner, name, own = self._replaced.pop()
            if own is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


class _Finder(MetaPathFinder):
    """Finds the pending modules as Python would, and calls their function after they are executed."""

    def __init__(self) -> None:
        self.pending: dict[str, Callable[[ModuleType], None]] = {}
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a pending module; None for others, which other finders find."""
        if fullname not in self.pending or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_apply(module: ModuleType) -> None:
                execute(module)
                apply = self.pending.pop(fullname, None)
                if apply is not None:
                    apply(module)

            spec.loader.exec_module = execute_and_apply  # type: ignore[method-assign]
        return spec


# Keyword arguments that models pass down to their attention and that do not change it.
_IGNORED_ARGUMENTS = {
    "position_ids", "cache_position", "use_cache", "is_causal", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict", "logits_to_keep", "num_items_in_batch", "shift_labels", "deterministic",
}  # fmt: skip

# The documents of a packed row, as FlashAttention takes them. On one device they are compared with the positions.
_PACKED_ARGUMENTS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}

# Options of configurations for attention dropout.
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")

# Models that look attn_implementation up in a table of their own.
_OWN_TABLES = ("bark", "falcon", "git", "gpt_neo", "gptj")

_MASKING = "transformers.masking_utils"
_MASK_FUNCTIONS = (
    "causal_mask_function", "sliding_window_overlay", "chunked_overlay", "packed_sequence_mask_function",
    "bidirectional_mask_function", "sliding_window_bidirectional_overlay",
)  # fmt: skip
_NOT_CAUSAL = -2  # in place of the number of a packed sequence

_patches = Patches()


class AttentionPass(Protocol):
    """How the attention of one forward pass is computed."""

    def index_in_row(self) -> Tensor:
        """The index in its row of each of this rank's tokens, [n] or [B, n]."""

    def attend(
        self, layer: object, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, sinks: Tensor | None,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        """Out [B, Hq, n, D] of this rank's queries, from this rank's q, k and v; `layer` is the module that asks."""


_default_pass: Callable[[LayerMask], AttentionPass] | None = None


def set_default_pass(find: Callable[[LayerMask], AttentionPass] | None) -> None:
    """Let `find(mask)` be the `attention_pass` of models that are called without; None: they attend on one device."""
    global _default_pass
    _default_pass = find


def register_attention() -> None:
    """Register `attn_implementation="attnmesh"` with Transformers. May be called more than once.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> am.register_attention()
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        ...                      num_attention_heads=4, num_key_value_heads=2, attn_implementation="attnmesh")
        >>> LlamaForCausalLM(config)(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 64])
    """
    functions = require("transformers.modeling_utils", extra="hf").AttentionInterface
    masks = require("transformers.masking_utils", extra="hf").AttentionMaskInterface
    functions.register(NAME, transformers_attention)
    masks.register(NAME, layer_mask)
    for kind in _OWN_TABLES:
        _patches.when_imported(f"transformers.models.{kind}.modeling_{kind}", _refuse_in_tables)


def _refuse_in_tables(module: ModuleType) -> None:
    """Let the tables of attention classes in the code of a model refuse this attention in words, not by KeyError."""
    for name, table in vars(module).items():
        if name.endswith("_ATTENTION_CLASSES"):
            table.setdefault(NAME, partial(_refuse, tuple(table)))


def _refuse(names: tuple[str, ...], config: Any, *_: object, **__: object) -> NoReturn:
    raise ValueError(
        f"{type(config).__name__}: the model has attention code of its own, and attn_implementation must be "
        f"{' or '.join(names)}, got {NAME!r}{see(MODELS_PAGE)}"
    )


def transformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerMask | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    attention_pass: AttentionPass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that Transformers calls: out [B, n, Hq, D], and no attention weights."""
    if attention_pass is None and _is_image_encoder(module, attention_mask, kwargs.get("is_causal")):
        for name, given in (("sliding_window", sliding_window), ("softcap", softcap), ("s_aux", s_aux)):
            if given is not None:
                raise ValueError(f"{type(module).__name__}: {name} must be None without a mask, got {shown(given)}")
        encode = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS["sdpa"]
        how = {**kwargs, "scaling": scaling, "dropout": dropout, "is_causal": False}
        found: tuple[Tensor, None] = encode(module, query, key, value, attention_mask, **how)
        return found
    served = _IGNORED_ARGUMENTS
    if attention_pass is None and not torch.compiler.is_compiling():
        served = served | _PACKED_ARGUMENTS
    _check_decoder(module, attention_mask, attention_pass)
    mask = _checked_mask(module, attention_mask, dropout, sliding_window, kwargs, served)
    if attention_pass is None and _default_pass is not None:
        attention_pass = _default_pass(mask)
        _check_decoder(module, mask, attention_pass)
    query, key, value = autocast(query, key, value)
    if attention_pass is None and isinstance(mask.padding, ShardedMask):
        raise ValueError(
            f"{type(module).__name__} must give the attention function the keyword argument attention_pass of the "
            f"model's call, since this batch is sharded over ranks, got {sorted(kwargs)}{see(MODELS_PAGE)}"
        )
    if attention_pass is None:
        queries, keys = (torch.arange(at.start, at.stop, device="cpu") for at in (mask.queries, mask.keys))
        out = attention(
            query, key, value, mask=mask.on_one_device(kwargs.get("position_ids"), kwargs.get("cu_seq_lens_q")),
            scale=scaling, softcap=softcap, sinks=s_aux, q_positions=queries, k_positions=keys,
        )  # fmt: skip
    else:
        if isinstance(attention_pass, ShardedPass):
            _check_sharded(module, attention_pass, mask, kwargs)
        query = scale_by_index(module, query, attention_pass.index_in_row)
        out = attention_pass.attend(
            module, query, key, value, mask=mask.kind, scale=scaling, sinks=s_aux, softcap=softcap
        )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None  # as Transformers' own: some models take a view of it


def _is_image_encoder(module: nn.Module, mask: object, is_causal: bool | None) -> bool:
    """Whether the module attends to whole images, without a mask or with one of patches that the model makes itself."""
    if is_causal is not False and getattr(module, "is_causal", True) is not False:
        return False
    return mask is None or (isinstance(mask, Tensor) and mask.dim() == 4)


def _check_decoder(module: nn.Module, mask: LayerMask | None, attention_pass: AttentionPass | None) -> None:
    """Raise ValueError for the mask of an encoder in a pass that is not one of `shard_inputs`."""
    is_sharded = attention_pass is None or isinstance(attention_pass, ShardedPass)
    if not is_sharded and isinstance(mask, LayerMask) and not mask.is_causal:
        raise ValueError(
            f"{type(module).__name__}: masks must be causal for a model that generates, got {mask.kind}: an encoder "
            f"is served with batches of shard_inputs{see(MODELS_PAGE)}"
        )


def _check_sharded(module: nn.Module, attention_pass: ShardedPass, mask: LayerMask, kwargs: dict[str, Any]) -> None:
    """Raise ValueError if the model was given something else than the sharded batch."""
    if not attention_pass.balances_experts:
        _check_experts(module, kwargs)
    if mask.is_causal != attention_pass.causal:
        raise ValueError(
            f"{type(module).__name__}: shard_inputs must be given causal={mask.is_causal} for a model with the mask "
            f"{mask.kind}, got {attention_pass.causal}{see(MODELS_PAGE)}"
        )
    padding = mask.padding.attention_pass.attention_mask if isinstance(mask.padding, ShardedMask) else mask.padding
    for name, given in (("attention_mask", padding), ("position_ids", kwargs.get("position_ids"))):
        if given is not None:
            attention_pass.check_given(name, given)
    rotary = changing_rotary(getattr(module, "config", None))
    if rotary is not None:
        attention_pass.check_rotary(*rotary)
    attention_pass.count_attention(module)


def _check_experts(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise ValueError if the model adds a load-balancing loss of its experts, which has means over all tokens."""
    given = kwargs.get("output_router_logits")
    if given or (given is None and getattr(getattr(module, "config", None), "output_router_logits", False)):
        raise ValueError(
            f"{type(module).__name__}: output_router_logits must be False over ranks, got True: the load-balancing "
            "loss would be computed from one rank's tokens"
        )


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype that autocast casts to, as torch's own attention takes them.

    Rotary embeddings leave float32, and function modes run before autocast does.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def _checked_mask(
    module: nn.Module, mask: LayerMask | None, dropout: float, sliding_window: int | None, kwargs: dict[str, Any],
    served: set[str],
) -> LayerMask:  # fmt: skip
    """The mask of this layer; raises ValueError for what is not served, such as arguments that are not in `served`."""
    name = type(module).__name__
    if not isinstance(mask, LayerMask):
        if mask is None:
            raise ValueError(f"{name}: the model must make its masks by Transformers' create_causal_mask, got no mask")
        got = f"a tensor of shape {list(mask.shape)}" if isinstance(mask, Tensor) else shown(mask)
        raise ValueError(f"{name}: attention_mask must be None or [batch, tokens], got {got}")
    if dropout:
        options = [each for each in _DROPOUTS if getattr(getattr(module, "config", None), each, None) == dropout]
        how = f": load the model with {options[0]}=0.0" if options else ""
        raise ValueError(f"{name}: attention dropout must be 0, got {dropout}{how}")
    if (
        mask.is_causal
        and not mask.has_blocks
        and (kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False)
    ):
        raise ValueError(f"{name}: is_causal must not be False")
    if sliding_window is not None and mask.window != sliding_window - 1:
        raise ValueError(f"{name}: the mask must have the layer's sliding window {sliding_window}, got {mask.kind}")
    if not kwargs.keys() <= served:
        unknown = sorted(k for k, v in kwargs.items() if v is not None and v is not False and k not in served)
        if unknown:
            raise ValueError(f"{name}: unsupported attention arguments {', '.join(unknown)}")
    return mask


# Masks.


class Span(NamedTuple):
    """Positions `start <= p < stop`: not a range, whose ends torch.compile would make constants."""

    start: int
    stop: int


class LayerMask:
    """What Transformers passes to the attention of a layer as its mask: `kind` of the layer, and the batch's tensors.

    `padding` [B, keys] hides tokens of padding, and `packing` [B, keys] numbers the sequences that are packed in a row;
    either may be None. Queries and keys have the positions `queries` and `keys`. Tensors are read only if attention
    runs on one device (`on_one_device`), once for all layers.
    """

    ndim = 4

    def __init__(
        self, kind: Mask, padding: Tensor | ShardedMask | None, packing: Tensor | None, queries: Span, keys: Span
    ) -> None:
        self.kind, self.padding, self.packing, self.queries, self.keys = kind, padding, packing, queries, keys
        self.window: int | None = getattr(kind, "left", None)  # how many earlier tokens a token attends to
        self.has_blocks = False
        self._on_one_device: Mask | None = None
        self.is_causal = not isinstance(kind, Full) and getattr(kind, "right", 0) == 0

    @property
    def shape(self) -> tuple[int | None, ...]:
        """As of a mask [batch, heads, queries, keys] that is made already, for a model that passes it on."""
        return None, None, self.queries.stop - self.queries.start, self.keys.stop

    def __getitem__(self, key: object) -> Any:
        return self.__getattr__("[]")

    def __getattr__(self, name: str) -> Any:
        raise ReadError(
            f"models must pass the masks that Transformers makes on to their attention as they are, got a model that "
            f"reads {name} of its mask: masks that a model changes are not supported"
        )

    def over_ranks(self, padding: ShardedMask) -> LayerMask:
        """The mask of a rank's tokens, from a mask of the whole batch."""
        here = Span(0, padding.shape[1])
        return LayerMask(self.kind, padding, None, here, here).with_blocks(self.window, self.has_blocks)

    def with_blocks(self, window: int | None, has_blocks: bool = True) -> LayerMask:
        """Itself, as a mask in which tokens of a block attend to one another, and others to `window` earlier tokens."""
        self.window, self.has_blocks = window, has_blocks
        return self

    def on_one_device(self, position_ids: Tensor | None, cu_seq_lens: Tensor | None = None) -> Mask:
        """The mask of the layer within the documents and without the padding of the batch.

        `cu_seq_lens` are the bounds of the documents, as FlashAttention takes them. Documents are found by their
        positions, which must begin anew at the same tokens.
        """
        if self._on_one_device is None:
            if torch.compiler.is_compiling():
                self._on_one_device = traced_mask(self.kind, self._traced_documents(position_ids))
            else:
                self._on_one_device = self._documents(position_ids, cu_seq_lens).apply(self.kind)
        return self._on_one_device

    def _traced_documents(self, position_ids: Tensor | None) -> Tensor | None:
        """The numbers of the documents, as an operator of the graph that is being traced."""
        packing = self.packing
        if packing is None and self.padding is None and position_ids is not None and self.queries == self.keys:
            packing = F.pad(position_ids[:, 1:] != position_ids[:, :-1] + 1, (1, 0)).cumsum(-1)
        if packing is None and self.padding is None:
            return None
        padding: Any = self.padding
        numbers: Tensor = _number_documents(packing, padding, self.keys.stop)
        return numbers

    def _documents(self, position_ids: Tensor | None, cu_seq_lens: Tensor | None) -> Packing:
        real, starts = self.padding, None
        if real is not None:
            real = _real(real, self.keys.stop)
            check_gaps(None, None, real)
        if self.packing is not None:
            starts = number_starts(self.packing.cpu())
        elif real is None and position_ids is not None and self.queries == self.keys and self.is_causal:
            # Not every model passes them on; positions do not divide rows of encoders.
            starts = document_starts(position_ids.cpu())
        given = real if real is not None else starts
        if cu_seq_lens is not None:
            begins = None if starts is None or len(starts) != 1 else starts[0].nonzero().flatten()
            if begins is None or not torch.equal(begins, cu_seq_lens.cpu().long()[:-1]):
                raise ValueError(
                    f"cu_seq_lens_q must be the documents of position_ids, one row that begins anew with each, got "
                    f"{shown(cu_seq_lens.tolist())}"
                )
        if given is None:
            return Packing(None, (), self.keys.stop)
        return packing_of(starts, None if real is None or bool(real.all()) else real, (given.shape[0], self.keys.stop))


@torch.library.custom_op("attnmesh::number_documents", mutates_args=())
def _number_documents(packing: Tensor | None, padding: Tensor | None, length: int) -> Tensor:
    """`Packing.numbers` of a batch whose tensors are known when the graph runs."""
    numbers = None if packing is None else packing.cpu().int()
    if numbers is not None and bool((numbers == _NOT_CAUSAL).any()):
        raise ValueError("masks must be causal, got a mask of tokens that attend to later tokens")
    if padding is None:
        assert numbers is not None
        return numbers.clone()
    real = _real(padding, length)
    check_gaps(None, None, real)
    numbers = torch.zeros_like(real, dtype=torch.int32) if numbers is None else numbers
    return numbers.masked_fill(~real, -1)


@_number_documents.register_fake
def _(packing: Tensor | None, padding: Tensor | None, length: int) -> Tensor:
    given = packing if packing is not None else padding
    assert given is not None
    return torch.empty(given.shape[0], length, dtype=torch.int32, device="cpu")


def _real(padding: Tensor | ShardedMask, length: int) -> Tensor:
    """The tokens that are not padding, on the host. Transformers treats tokens beyond the mask as padding."""
    real = padding.cpu().bool()
    return F.pad(real, (0, length - real.shape[1]))[:, :length] if real.shape[1] < length else real[:, :length]


def layer_mask(
    *_: object,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | ShardedMask | LayerMask | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device,
    config: Any,
    **__: object,
) -> LayerMask | Tensor | None:
    """The hook that Transformers calls to make a mask, once per kind of layer in a forward pass."""
    check_config(config)
    if isinstance(attention_mask, LayerMask):  # which the model around a language model has made
        return attention_mask
    if isinstance(attention_mask, ShardedMask) and not torch.compiler.is_compiling():
        if attention_mask.attention_pass.causal and not attention_mask.attention_pass.gathers_scores:
            check_head()
        config_class: type = type(config)
        if attention_mask.attention_pass.counts_padding and counts_positions_from_mask(config_class):
            raise ValueError(
                f"position_ids must be given to shard_inputs for rows with padding before their tokens: the code of "
                f"{config_class.__name__} may derive them from attention_mask, got None"
            )
    blocks = None
    if torch.compiler.is_compiling():
        packed = not allow_is_causal_skip and attention_mask is None and q_length == kv_length
        kind = _traced_kind(local_size, not use_vmap and (allow_is_causal_skip or packed), config)
        packing = _traced_packing(mask_function, batch_size, q_length, device) if packed else None
    else:
        found = _functions(mask_function)
        blocks = found.pop("blockwise_overlay", None)
        kind, packing = _kind(found)
        if isinstance(kind, Full) and q_length != kv_length and not isinstance(attention_mask, ShardedMask):
            # Queries that pool what an image encoder has computed: a small mask, for torch's attention.
            make = sys.modules[_MASKING].ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
            pooled: Tensor | None = make(
                batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
                mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=False, device=device,
                config=config,
            )  # fmt: skip
            return pooled
    if isinstance(q_offset, Tensor) or kv_offset + kv_length != q_offset + q_length:
        raise ValueError(
            f"the KV cache must end with the last token, as a DynamicCache does, got {kv_length} keys from {kv_offset} "
            f"for {q_length} queries from {q_offset}: static caches are not supported"
        )
    queries, keys = Span(q_offset, q_offset + q_length), Span(kv_offset, kv_offset + kv_length)
    if blocks is None:
        return LayerMask(kind, attention_mask, packing, queries, keys)
    united = _with_blocks(kind, blocks, attention_mask, keys.stop)
    return LayerMask(united, attention_mask, packing, queries, keys).with_blocks(getattr(kind, "left", None))


def _functions(function: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """The functions that a mask function is made of, by name, and the values that each was made with."""
    found: dict[str, dict[str, Any]] = {}
    for name, cells in _conjunction(function):
        if name in found:
            raise ValueError(f"masks must not have two functions {name}")
        found[name] = cells
    return found


def _kind(found: dict[str, dict[str, Any]]) -> tuple[Mask, Tensor | None]:
    """The mask of one layer, and the numbers of packed sequences."""
    if "bidirectional_mask_function" in found:
        window = found.pop("sliding_window_bidirectional_overlay", None)
        if len(found) > 1:
            raise ValueError(f"masks of encoders must be full or have a sliding window, got {', '.join(found)}")
        both = None if window is None else int(window["sliding_window"])
        return (Full() if both is None else SlidingWindow(both, both)), None
    if "causal_mask_function" not in found:
        raise ValueError(f"masks must be causal or bidirectional, got {', '.join(found)}")
    packing = found.get("packed_sequence_mask_function", {}).get("packed_sequence_mask")
    window, chunk = found.get("sliding_window_overlay"), found.get("chunked_overlay")
    if window is not None and chunk is not None:
        raise ValueError("masks must have a sliding window or chunks, got both")
    if window is not None:
        return _window(int(window["sliding_window"])), packing
    return (Causal() if chunk is None else Chunked(int(chunk["chunk_size"]))), packing


def _with_blocks(kind: Mask, cells: dict[str, Any], padding: object, length: int) -> Mask:
    """The mask of a layer in which the tokens of a block, such as an image, attend to one another in both directions.

    `cells` have the number of the block of every token [B, S], -1 for text, and `within_window`: whether a window of
    the layer holds between tokens of a block, too.
    """
    if isinstance(padding, ShardedMask):
        raise ValueError(
            "blocks of tokens that attend to one another must be found in the whole batch over ranks, got a model that "
            f"finds them in one rank's tokens{see(MODELS_PAGE)}"
        )
    if not isinstance(kind, Causal | SlidingWindow):
        raise ValueError(f"masks with blocks must be causal, or have a sliding window, got {kind}")
    numbers = cells["block_sequence_ids"].cpu()[:, :length]
    if isinstance(padding, Tensor):
        real = padding[:, : numbers.shape[1]].cpu().bool()
        numbers = numbers.masked_fill(~F.pad(real, (0, numbers.shape[1] - real.shape[1])), -1)
    rows: list[Mask] = []
    for row in numbers.numpy():
        spans = Slices([(span, span, "full") for span in _spans(row)])
        if not spans.slices:
            rows.append(kind)
        elif cells["within_window"] and isinstance(kind, SlidingWindow):
            rows.append((Causal() | spans) & SlidingWindow(kind.left, length))
        else:
            rows.append(kind | spans)
    return rows[0] if all(mask == rows[0] for mask in rows) else PerSequence(rows)


def _spans(numbers: np.ndarray) -> list[tuple[int, int]]:
    """Where the blocks of a row begin and end, of more than one token."""
    edges = np.flatnonzero(np.diff(numbers, prepend=-1, append=-1)).tolist()
    spans = [(a, b) for a, b in pairwise(edges) if numbers[a] >= 0]
    if len({int(numbers[a]) for a, _ in spans}) < len(spans):
        raise ValueError(
            "tokens that attend to one another must be next to each other, got a mask with a block in several parts"
        )
    return [(a, b) for a, b in spans if b - a > 1]


def _window(size: int) -> Mask:
    """A window of 0 tokens belongs to layers that the model does not have: Qwen2-MoE makes a mask for them anyway."""
    return SlidingWindow(size - 1) if size else Slices([])


def _conjunction(function: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The functions that a mask function is the conjunction of: the name of each, and the values it was made with."""
    name, cells = function.__qualname__.split(".")[0], _cells(function)
    if function.__module__ == _MASKING and name == "and_masks":
        for part in cells["mask_functions"]:
            yield from _conjunction(part)
    elif function.__module__ == _MASKING and name == "or_masks" and _is_blocks(cells["mask_functions"][-1]):
        *others, blocks = cells["mask_functions"]
        inside = [each for part in others for each in _conjunction(part)]
        yield from inside
        window = any(name == "sliding_window_overlay" for name, _ in inside)
        yield (
            "blockwise_overlay",
            {"block_sequence_ids": _cells(blocks)["block_sequence_ids"], "within_window": not window},
        )
    elif function.__module__ == _MASKING and name in _MASK_FUNCTIONS:
        yield name, cells
    else:
        raise ValueError(
            f"masks must be causal or bidirectional, with a sliding window, in chunks, of packed sequences or of "
            f"blocks, got the mask function "
            f"{function.__module__}.{function.__qualname__}"
        )


def _cells(function: Callable[..., Any]) -> dict[str, Any]:
    """The values that an inner function was made with, by their names."""
    names = function.__code__.co_freevars
    return dict(zip(names, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))


def _is_blocks(function: Callable[..., Any]) -> bool:
    return function.__module__ == _MASKING and function.__qualname__.split(".")[0] == "blockwise_overlay"


def _traced_packing(function: Callable[..., Any], rows: int, tokens: int, device: torch.device) -> Tensor:
    """The numbers of packed sequences [B, tokens] in a graph that is being traced, where functions can only be called.

    A sequence begins with a token that does not attend to the previous token.
    """
    row, token = torch.arange(rows, device=device)[:, None], torch.arange(1, tokens, device=device)
    follows, ahead = (
        function(row, row, *pair).expand(rows, -1) for pair in ((token, token - 1), (token - 1, token))
    )  # fmt: skip
    numbers = F.pad((~follows).cumsum(-1), (1, 0))
    return numbers.masked_fill(F.pad(ahead, (1, 0)), _NOT_CAUSAL)


def _traced_kind(local_size: int | None, served: bool, config: Any) -> Mask:
    """The mask of one layer in a graph that is being traced, where functions cannot be inspected."""
    if not served:
        raise ValueError(
            "masks in a compiled graph must be causal, with a sliding window, in chunks or of packed sequences, got "
            "another mask function"
        )
    if local_size is None:
        return Causal()
    window, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    if local_size == chunk and local_size != window:
        return Chunked(local_size)
    if local_size == window and local_size != chunk:
        return _window(local_size)
    raise ValueError(
        f"a compiled graph must tell a sliding window from chunks, got a mask of {local_size} tokens with "
        f"sliding_window={window} and attention_chunk_size={chunk}"
    )


def document_starts(position_ids: Tensor) -> Tensor:
    """The tokens [B, S] whose position does not follow the previous position: as Transformers finds packed rows."""
    if position_ids.device.type == "cpu":
        positions = position_ids.numpy()
        first = np.ones_like(positions[:, :1], dtype=bool)
        return torch.from_numpy(np.concatenate([first, positions[:, 1:] != positions[:, :-1] + 1], 1))
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return starts


def check_gaps(position_ids: Tensor | None, starts: Tensor | None, real: Tensor) -> None:
    """Raise ValueError for padding inside a document; between two documents it is allowed."""
    for row in range(real.shape[0]):
        tokens = real[row].numpy()
        begins = np.flatnonzero(np.diff(tokens, prepend=False) & tokens)
        for begin in begins.tolist()[1:]:
            before = int(np.flatnonzero(tokens[:begin])[-1])
            if starts is None or position_ids is None or position_ids[row, begin] > position_ids[row, before]:
                raise ValueError(
                    f"attention_mask must hide tokens before, after or between documents, got row {row} with hidden "
                    f"tokens {before + 1} to {begin - 1} inside a document (position_ids that restart begin a new one)"
                )
