"""`attn_implementation="attnmesh"`: Transformers models whose attention runs over ranks.

Transformers passes keyword arguments of a model's call down to its attention. One of them, `mesh`, selects how the
attention of this call is computed: over a batch that is sharded (`ShardedPass`, from `shard_inputs`) or over a sharded
KV cache (the passes of `generation`). Without it the attention is that of one device. No mask tensor is ever made: the
mask hook describes the mask of a layer (`LayerMask`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from attnmesh.core.masks import Mask
from attnmesh.integrations.layer_masks import LayerMask, layer_mask
from attnmesh.integrations.patches import Patches
from attnmesh.integrations.sharded_batch import ShardedMask, ShardedPass
from attnmesh.integrations.transformers_models import MODELS_PAGE, NAME, changing_rotary, scale_by_index
from attnmesh.ops.dense.api import attention
from attnmesh.utils.error_links import see
from attnmesh.utils.optional import require
from attnmesh.utils.validation import shown

# Keyword arguments that models pass down to their attention and that do not change it.
_IGNORED_ARGUMENTS = {
    "position_ids", "cache_position", "use_cache", "is_causal", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict", "logits_to_keep", "num_items_in_batch", "shift_labels",
}  # fmt: skip

# The documents of a packed row, as FlashAttention takes them. On one device they are compared with the positions.
_PACKED_ARGUMENTS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}

# Options of configurations for attention dropout.
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


# Models that look attn_implementation up in a table of their own.
_OWN_TABLES = ("bark", "falcon", "git", "gpt_neo", "gptj")

_patches = Patches()


class AttentionPass(Protocol):
    """How the attention of one forward pass is computed."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Out [B, Hq, n, D] of this rank's queries, from this rank's q, k and v."""


_default_pass: Callable[[LayerMask], AttentionPass] | None = None


def set_default_pass(find: Callable[[LayerMask], AttentionPass] | None) -> None:
    """Let `find(mask)` return the pass of models that are called without `mesh`; None: they attend on one device."""
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
    mesh: AttentionPass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that Transformers calls: out [B, n, Hq, D], and no attention weights."""
    served = _IGNORED_ARGUMENTS
    if mesh is None and not torch.compiler.is_compiling():
        served = served | _PACKED_ARGUMENTS
    mask = _checked_mask(module, attention_mask, dropout, sliding_window, kwargs, served)
    if mesh is None and _default_pass is not None:
        mesh = _default_pass(mask)
    query, key, value = _autocast(query, key, value)
    if mesh is None and isinstance(mask.padding, ShardedMask):
        raise ValueError(
            f"{type(module).__name__} must give the attention function the keyword argument mesh of the model's call, "
            f"since this batch is sharded over ranks, got {sorted(kwargs)}{see(MODELS_PAGE)}"
        )
    if mesh is None:
        queries, keys = (torch.arange(at.start, at.stop, device="cpu") for at in (mask.queries, mask.keys))
        out = attention(
            query, key, value, mask=mask.on_one_device(kwargs.get("position_ids"), kwargs.get("cu_seq_lens_q")),
            scale=scaling, softcap=softcap, sinks=s_aux, q_positions=queries, k_positions=keys,
        )  # fmt: skip
    elif isinstance(mesh, ShardedPass):
        if not mesh.balances_experts:
            _check_experts(module, kwargs)
        padding = mask.padding.mesh.attention_mask if isinstance(mask.padding, ShardedMask) else mask.padding
        for name, given in (("attention_mask", padding), ("position_ids", kwargs.get("position_ids"))):
            if given is not None:
                mesh.check_given(name, given)
        rotary = changing_rotary(getattr(module, "config", None))
        if rotary is not None:
            mesh.check_rotary(*rotary)
        query = scale_by_index(module, query, mesh.index_in_row)
        mesh.count_attention(module)
        out = mesh.attend(0, query, key, value, mask=mask.kind, scale=scaling, sinks=s_aux, softcap=softcap)
    else:
        if softcap is not None:
            raise ValueError(f"softcap must be None over a sharded KV cache, got {softcap} ({type(module).__name__})")
        layer: Any = module.layer_idx
        out = mesh.attend(layer, query, key, value, mask=mask.kind, scale=scaling, sinks=s_aux)
    return out.transpose(1, 2).contiguous(), None  # as Transformers' own: some models take a view of it


def _check_experts(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise ValueError if the model adds a load-balancing loss of its experts, which has means over all tokens."""
    given = kwargs.get("output_router_logits")
    if given or (given is None and getattr(getattr(module, "config", None), "output_router_logits", False)):
        raise ValueError(
            f"{type(module).__name__}: output_router_logits must be False over ranks, got True: the load-balancing "
            "loss would be that of one rank's tokens"
        )


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of autocast, as torch's own attention takes them: rotary embeddings leave float32."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


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
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ValueError(f"{name}: is_causal must not be False")
    window = getattr(mask.kind, "left", None)
    if sliding_window is not None and window != sliding_window - 1:
        raise ValueError(f"{name}: the mask must have the layer's sliding window {sliding_window}, got {mask.kind}")
    if not kwargs.keys() <= served:
        unknown = sorted(k for k, v in kwargs.items() if v is not None and v is not False and k not in served)
        if unknown:
            raise ValueError(f"{name}: unsupported attention arguments {', '.join(unknown)}")
    return mask
