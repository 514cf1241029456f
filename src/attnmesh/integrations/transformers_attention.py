"""`attn_implementation="attnmesh"`: Transformers models whose attention runs over ranks.

Transformers passes keyword arguments of a model's call down to its attention. One of them, `mesh`, selects how the
attention of this call is computed: over a sequence that is sharded (`ShardedPass`, from `shard_inputs`) or over a
sharded KV cache (the passes of `generation`). Without it the attention is that of one device. No mask tensor is ever
made: positions determine which keys are visible.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnmesh.core.masks import Causal, Mask, SlidingWindow
from attnmesh.core.merge import discount_sinks
from attnmesh.core.optional import require
from attnmesh.core.validation import check_type, shown
from attnmesh.ops.dense.api import attention
from attnmesh.parallel.context import ContextParallel

NAME = "attnmesh"
MODELS = ("llama", "qwen2", "qwen3", "mistral", "gpt_oss")
"""The `model_type`s that are supported."""

# Keyword arguments that models pass down to their attention and that do not change it.
_IGNORED_ARGUMENTS = {
    "position_ids", "cache_position", "use_cache", "is_causal", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict", "logits_to_keep", "num_items_in_batch", "shift_labels",
}  # fmt: skip

_IGNORED_LABEL = -100  # skipped by Transformers' losses


class AttentionPass(Protocol):
    """How the attention of one forward pass is computed."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Out [B, Hq, n, D] of this rank's queries, from this rank's q, k and v."""


@dataclass(frozen=True)
class ShardedPass:
    """Attention over a sequence of `length` positions that is sharded by context parallelism."""

    cp: ContextParallel
    length: int

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, sinks: Tensor | None,
        softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Out of this rank's queries over the keys of all ranks."""
        attend = partial(self.cp.attention, q, k, v, mask=mask, scale=scale, softcap=softcap, length=self.length)
        if sinks is None:
            return attend()
        out, lse = attend(return_lse=True)
        return discount_sinks(out, lse, sinks[:, None])


def shard_inputs(cp: ContextParallel, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
    """This rank's shard of a batch [B, S], as keyword arguments of a model: `model(**shard_inputs(cp, ids, ids))`.

    Args:
        cp: the ranks and the layout.
        input_ids: tokens [B, S], the same on every rank.
        labels: as Transformers takes them, usually the tokens themselves, -100 where there is no loss. They are shifted
            by one position before they are sharded.

    The model's loss is this rank's share of the mean over the labels of all ranks: the sum over all ranks of their
    losses is the loss, and that of their gradients is the gradient. `cp.unshard(logits, 1, S)` returns the logits of
    the whole sequence.
    """
    check_type("cp", cp, ContextParallel)
    _check_ids("input_ids", input_ids)
    length = input_ids.shape[1]
    if length < cp.world:
        raise ValueError(f"input_ids must have at least one token per rank ({cp.world}), got {list(input_ids.shape)}")
    positions = cp.positions(length).to(input_ids.device)
    local_ids = cp.shard(input_ids, 1)
    inputs: dict[str, Any] = {
        "input_ids": local_ids,
        "position_ids": positions[None].expand(input_ids.shape[0], -1),
        # Without a mask Transformers would treat positions that are not consecutive as packed sequences.
        "attention_mask": torch.ones_like(local_ids, dtype=torch.bool),
        "use_cache": False,
        "mesh": ShardedPass(cp, length),
    }
    if labels is not None:
        _check_ids("labels", labels)
        if labels.shape != input_ids.shape or labels.device != input_ids.device:
            raise ValueError(
                f"labels must have the shape of input_ids, {list(input_ids.shape)}, and be on {input_ids.device}, got "
                f"{list(labels.shape)} on {labels.device}"
            )
        shifted = F.pad(labels, (0, 1), value=_IGNORED_LABEL)[:, 1:]
        local = cp.shard(shifted, 1).contiguous()
        inputs |= {"labels": local, "shift_labels": local, "num_items_in_batch": (shifted != _IGNORED_LABEL).sum()}
    return inputs


def _check_ids(name: str, ids: Tensor) -> None:
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else f"{type(ids).__name__} {shown(ids)}"
        raise ValueError(f"{name} must be an int32 or int64 tensor [batch, tokens], got {got}")


def register_attention() -> None:
    """Register `attn_implementation="attnmesh"` with Transformers. May be called more than once."""
    functions = require("transformers.modeling_utils", extra="hf").AttentionInterface
    masks = require("transformers.masking_utils", extra="hf").AttentionMaskInterface
    functions.register(NAME, transformers_attention)
    masks.register(NAME, _no_mask)


def check_config(config: Any, name: str) -> None:
    """Raise ValueError unless the configuration of the model called `name` is of a supported type."""
    kind = getattr(config, "model_type", None)
    if kind not in MODELS:
        raise ValueError(f"model_type must be one of {', '.join(MODELS)}, got {kind!r} ({name})")


def check_model(model: Any) -> None:
    """Raise ValueError unless the model is of a supported type and uses this attention."""
    if not hasattr(model, "config") or not hasattr(model, "get_input_embeddings"):
        raise ValueError(f"model must be a language model of Transformers, got {shown(model)}")
    check_config(model.config, type(model).__name__)
    implementation = model.config._attn_implementation
    if implementation != NAME:
        raise ValueError(
            f"attn_implementation of the model must be {NAME!r} (load it with attn_implementation={NAME!r} or call "
            f"model.set_attn_implementation({NAME!r})), got {implementation!r}"
        )


def transformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    mesh: AttentionPass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that Transformers calls: out [B, n, Hq, D], and no attention weights."""
    _check_call(module, attention_mask, dropout, kwargs)
    mask = Causal() if sliding_window is None else SlidingWindow(sliding_window - 1)
    if mesh is None:
        out = _attend_on_one_device(query, key, value, mask=mask, scale=scaling, softcap=softcap, sinks=s_aux)
    else:
        if softcap is not None and not isinstance(mesh, ShardedPass):
            raise ValueError(f"softcap must be None over a sharded KV cache, got {softcap} ({type(module).__name__})")
        layer: Any = module.layer_idx
        more: dict[str, Any] = {} if softcap is None else {"softcap": softcap}
        out = mesh.attend(layer, query, key, value, mask=mask, scale=scaling, sinks=s_aux, **more)
    return out.transpose(1, 2), None


def _attend_on_one_device(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """The queries are the last positions of the keys."""
    positions = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device="cpu")
    out, lse = attention(q, k, v, mask=mask, scale=scale, softcap=softcap, q_positions=positions, return_lse=True)
    return out if sinks is None else discount_sinks(out, lse, sinks[:, None])


def _no_mask(
    *_: object,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **__: object,
) -> None:
    """Called by Transformers instead of making a mask; raises ValueError where positions alone are not enough."""
    if attention_mask is not None and not attention_mask.all():
        raise ValueError(
            "attention_mask must not hide tokens: padding is not supported (attnmesh.generate takes prompts of "
            "different lengths)"
        )
    if kv_offset + kv_length != q_offset + q_length:
        raise ValueError(
            f"the KV cache must end with the last token, as a DynamicCache does, got {kv_length} keys from {kv_offset} "
            f"for {q_length} queries from {q_offset}: static caches are not supported"
        )
    if not allow_is_causal_skip:
        raise ValueError(
            "position_ids must increase by one and no mask function may be given: attnmesh supports causal masks only, "
            "no packed sequences"
        )


def _check_call(module: nn.Module, mask: Tensor | None, dropout: float, kwargs: dict[str, Any]) -> None:
    name = type(module).__name__
    if mask is not None:
        raise ValueError(f"{name}: attention_mask must be None, got a tensor of shape {list(mask.shape)}")
    if dropout:
        raise ValueError(f"{name}: attention dropout must be 0, got {dropout}")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ValueError(f"{name}: is_causal must not be False")
    unknown = sorted(k for k, v in kwargs.items() if v is not None and v is not False and k not in _IGNORED_ARGUMENTS)
    if unknown:
        raise ValueError(f"{name}: unsupported attention arguments {', '.join(unknown)}")
