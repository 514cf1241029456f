"""A batch for a Transformers model, spread over ranks in one call."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmesh.integrations.spread_pass import SpreadPass
from attnmesh.parallel.context import ContextParallel

_IGNORED = -100  # what Transformers' losses skip


def shard_inputs(ranks: ContextParallel, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
    """This rank's part of a batch [B, S], as keyword arguments of a model: `model(**shard_inputs(...))`.

    Tokens, their positions and, if given, what each is to predict. `labels` are as Transformers takes them (usually
    the tokens themselves, -100 where nothing is to be learned); they are moved on by one before they are spread. The
    loss is this rank's share of the mean over all ranks' labels: the sum of all ranks' losses is the loss, and the sum
    of their gradients the gradient. Of the logits, which are this rank's, `ranks.unshard(logits, 1, S)` makes all.
    """
    _check_ids("input_ids", input_ids)
    length = input_ids.shape[1]
    if length < ranks.world:
        raise ValueError(f"input_ids must have a token for each of {ranks.world} ranks, got {list(input_ids.shape)}")
    positions = ranks.positions(length).to(input_ids.device)
    mine = ranks.shard(input_ids, 1)
    part: dict[str, Any] = {
        "input_ids": mine,
        "position_ids": positions[None].expand(input_ids.shape[0], -1),
        # Every token counts. Without this, Transformers would take positions that jump for packed sequences.
        "attention_mask": torch.ones_like(mine, dtype=torch.bool),
        "use_cache": False,
        "mesh": SpreadPass(ranks, length),
    }
    if labels is not None:
        _check_ids("labels", labels)
        if labels.shape != input_ids.shape:
            raise ValueError(f"labels must be like input_ids, {list(input_ids.shape)}, got {list(labels.shape)}")
        following = F.pad(labels, (0, 1), value=_IGNORED)[:, 1:]
        expected = ranks.shard(following, 1).contiguous()
        part |= {"labels": expected, "shift_labels": expected, "num_items_in_batch": (following != _IGNORED).sum()}
    return part


def _check_ids(name: str, ids: Tensor) -> None:
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"{name} must be integers [batch, tokens], got {got}")
