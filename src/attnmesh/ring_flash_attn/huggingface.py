"""ring_flash_attn's adapter for Transformers: models called with shards of packed documents attend over all ranks.

    substitute_hf_flash_attn(group, heads_k_stride=1)
    update_ring_flash_attn_params(cu_seqlens, group)        # for every batch
    model(input_ids=shard, position_ids=its positions)      # rows of one batch, sharded by `Contiguous()`

Models with `attn_implementation` "flash_attention_2", "flash_attention_3", "flash_attention_4" and "attnmesh" are
served. The package flash_attn is not needed if the substitution comes before the model is made.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attnmesh.comm import Comm, VirtualComm
from attnmesh.core.layouts import Contiguous
from attnmesh.core.masks import Documents, Mask, Packing
from attnmesh.integrations.sharded_pass import ShardedPass, checked_on_all_ranks
from attnmesh.integrations.transformers_attention import (
    LayerMask,
    layer_mask,
    register_attention,
    set_default_pass,
    transformers_attention,
)
from attnmesh.ring_flash_attn.functions import Group, bounds, comm_of, context, lengths_of, raised_on_all_ranks
from attnmesh.utils.optional import require
from attnmesh.utils.validation import check_bool, check_count

_FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")


class _RingPass(ShardedPass):
    """The pass over one row of packed documents that is sharded by `Contiguous()`."""

    heads_k_stride = 1

    def __init__(self, comm: Comm, whole: tuple[int, ...]) -> None:
        length = whole[-1]
        cp = context(comm, Contiguous(), "allgather")
        self.in_row = cp.positions(length)[None]
        cuts = torch.tensor(whole, dtype=torch.int64, device="cpu")
        positions = self.in_row - cuts[torch.bucketize(self.in_row, cuts, right=True) - 1]
        documents = Documents(lengths_of(whole)) if len(whole) > 2 else None
        super().__init__(
            cp, length, Packing(documents, (0,), length), positions, torch.ones_like(positions, dtype=torch.bool)
        )

    def attend(
        self, layer: object, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, sinks: Tensor | None,
        softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Out of this rank's queries over the keys of all ranks."""
        with raised_on_all_ranks(self.cp.comm, "attention with ring_flash_attn"):
            stride = self.heads_k_stride
            if q.shape[0] != 1:
                raise ValueError(f"input_ids must be one row of packed documents [1, tokens], got {q.shape[0]} rows")
            if k.shape[1] % stride:
                raise ValueError(f"heads_k_stride must divide the {k.shape[1]} kv heads, got {stride}")
        return super().attend(layer, q, k, v, mask=mask, scale=scale, sinks=sinks, softcap=softcap)

    def check_given(self, name: str, given: Tensor) -> None:
        """Raise ValueError on every rank if the model was given other positions, or padding."""
        if given is self._accepted.get(name) or torch.compiler.is_compiling():
            return
        with checked_on_all_ranks(self.cp.comm, f"a model's {name}", force=True):
            mine = given.cpu()
            if name == "attention_mask" and not mine.all():
                raise ValueError(
                    "attention_mask must not hide tokens: give padding a document of its own in cu_seqlens"
                )
            if name == "position_ids" and not self._are_positions(mine):
                raise ValueError(
                    f"position_ids must be the {self.in_row.shape[1]} positions of this rank of the {self.length} of "
                    f"cu_seqlens, counted in documents, {self.position_ids[0, :3].tolist()} ..., or in the row, "
                    f"{self.in_row[0, :3].tolist()} ..., got {list(given.shape)} {mine.flatten()[:3].tolist()} ..."
                )
        self._accepted[name] = given

    def _are_positions(self, given: Tensor) -> bool:
        """Whether they are this rank's positions. Padding at the end of the row may have position 0."""
        for expected in (self.position_ids, self.in_row):
            if given.shape == expected.shape:
                others = (given != expected)[0].nonzero()
                if not others.numel() or not given[0, int(others[0]) :].any():
                    return True
        return False


class _State:
    """What was substituted and given last."""

    comm: Comm | None = None
    heads_k_stride = 1
    ring: _RingPass | None = None

    def checked_pass(self) -> _RingPass:
        """The pass of the latest documents."""
        if self.ring is None:
            raise ValueError("update_ring_flash_attn_params(cu_seqlens, group) must be called before the model")
        if self.ring.cp.comm is not self.comm:
            raise ValueError(
                "process_group of update_ring_flash_attn_params must be the group of substitute_hf_flash_attn, got "
                f"{self.ring.cp.comm} and {self.comm}"
            )
        self.ring.heads_k_stride = self.heads_k_stride
        return self.ring


class _RankState(threading.local, _State):
    """The state of a virtual rank, which is a thread."""


_of_process, _of_virtual_rank = _State(), _RankState()
_passes: WeakKeyDictionary[LayerMask, _RingPass] = WeakKeyDictionary()
_original: dict[str, Any] = {}


def _state(comm: Comm | None = None) -> _State:
    """The state of this rank. Its other threads, such as a backward's, see it too if the rank is a process."""
    virtual = isinstance(comm, VirtualComm) or (comm is None and _of_virtual_rank.comm is not None)
    return _of_virtual_rank if virtual else _of_process


def substitute_hf_flash_attn(process_group: Group, heads_k_stride: int) -> None:
    """Let models of Transformers with FlashAttention, or with attnmesh, attend over the ranks of a group.

    `update_ring_flash_attn_params` must precede every batch. `heads_k_stride` must divide the kv heads; the executor
    decides how many heads are gathered at a time.

    Examples:
        >>> ring_flash_attn.substitute_hf_flash_attn(None, heads_k_stride=1)  # None: the default process group
        >>> ring_flash_attn.use_ring_attn(False)  # Transformers' own attention again
    """
    comm = comm_of(process_group)
    with raised_on_all_ranks(comm, "substitute_hf_flash_attn"):
        check_count("heads_k_stride", heads_k_stride, least=1)
    state = _state(comm)
    state.comm, state.heads_k_stride = comm, heads_k_stride
    use_ring_attn(True)


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: Group) -> None:
    """Set the documents of the next batch: their cumulative lengths in the whole row, the same on every rank.

    A rank holds the tokens that `Contiguous()` gives it: `tensor_split(ranks)` of the row.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> am.register_attention()
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        ...                      num_attention_heads=4, num_key_value_heads=2, attn_implementation="attnmesh")
        >>> model = LlamaForCausalLM(config)
        >>> ring_flash_attn.substitute_hf_flash_attn(None, heads_k_stride=1)
        >>> cu_seqlens = torch.tensor([0, 8, 12], dtype=torch.int32)  # a row of two documents
        >>> ring_flash_attn.update_ring_flash_attn_params(cu_seqlens, None)
        >>> model(torch.randint(64, (1, 12))).logits.shape
        torch.Size([1, 12, 64])
        >>> ring_flash_attn.use_ring_attn(False)
    """
    comm = comm_of(process_group)
    with raised_on_all_ranks(comm, "update_ring_flash_attn_params"):
        whole = bounds("cu_seqlens", cu_seqlens)
        if whole[-1] < comm.world:
            raise ValueError(f"cu_seqlens must end with at least one token per rank, {comm.world}, got {whole[-1]}")
    _state(comm).ring = _RingPass(comm, whole)


def use_ring_attn(flag: bool) -> None:
    """With False, undo the substitution; with True, repeat it.

    Examples:
        >>> ring_flash_attn.substitute_hf_flash_attn(None, heads_k_stride=1)
        >>> ring_flash_attn.use_ring_attn(False)
        >>> ring_flash_attn.use_ring_attn(True)
        >>> ring_flash_attn.use_ring_attn(False)
    """
    check_bool(flag=flag)
    modeling = require("transformers.modeling_utils", extra="hf")
    masking = require("transformers.masking_utils", extra="hf")
    functions, masks, model = modeling.AttentionInterface, masking.AttentionMaskInterface, modeling.PreTrainedModel
    if not _original:
        _original["check"] = model._check_and_adjust_attn_implementation
        for name in _FLASH:
            _original[name] = modeling.ALL_ATTENTION_FUNCTIONS[name], masking.ALL_MASK_ATTENTION_FUNCTIONS[name]
    register_attention()
    for name in _FLASH:
        function, mask = (transformers_attention, layer_mask) if flag else _original[name]
        functions.register(name, function)
        masks.register(name, mask)
    model._check_and_adjust_attn_implementation = _checked_implementation if flag else _original["check"]
    set_default_pass(_default_pass if flag else None)


def _checked_implementation(model: Any, attn_implementation: str | None, *args: Any, **options: Any) -> str:
    """Transformers' check of `attn_implementation`, which needs no package flash_attn here."""
    if attn_implementation in _FLASH and model._supports_flash_attn:
        return attn_implementation
    checked: str = _original["check"](model, attn_implementation, *args, **options)
    return checked


def _default_pass(mask: LayerMask) -> _RingPass:
    """The pass of the forward that made this mask, also if that is recomputed after the documents were updated."""
    if mask not in _passes:
        state = _state()
        with raised_on_all_ranks(comm_of(state.comm), "attention with ring_flash_attn"):
            _passes[mask] = state.checked_pass()
    return _passes[mask]
