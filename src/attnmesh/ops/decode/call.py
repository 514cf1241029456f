"""`DecodeCall`: a validated decode call as a value, which every backend takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.launch import signature
from attnmesh.ops.storage import SPARSE_STORAGES, STORAGES, Quantized, Stored, storage_of, values_of, width_of
from attnmesh.utils.validation import check_bool, check_number, check_tensor, shown

MAX_DECODE_TOKENS = 8  # queries per sequence: more is prefill, which `attention` computes
_INTEGERS = (torch.int32, torch.int64)
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class Splits:
    """How the keys of a sequence are split among programs: at most `max_count` parts, or parts of a fixed `size`."""

    max_count: int | None = None
    size: int | None = None


@dataclass(frozen=True)
class DecodeCall:
    """T queries per sequence, at positions `cur_pos - T + 1 .. cur_pos`, over the keys 0 .. cur_pos of its cache.

    `k` and `v` are caches [B or 1, Hkv, L, D], or pools [blocks, block_size, Hkv, D] with a block `table` [B or 1,
    slots]. One latent pool of `fp8_ds_mla` is both: its values are the features before the rope part.

    - By default a query attends to the keys up to its own position.
    - `tree` [B or 1, T, T]: to the keys before the T new tokens, and to the new tokens that its row selects.
    - `mask` [B or 1, Hq or 1, T or 1, width]: to the keys up to cur_pos that are True, or with the given bias added to
      their scores; to none from `width` on.
    - `window`: of these, to none before the last `window` keys up to its own position, itself included.
    - `key_range`, two tensors [B, T]: to the keys `first <= k < end` up to cur_pos, whatever its own position.

    `softcap` bounds scores before a bias is added. `sinks` [Hq] are scores of keys without a value. `cur_pos < 0` skips
    a sequence. `rounded`: `out` has `dtype`, the dtype of the given queries, rather than the accumulation dtype. (q is
    wider than these if the cache is.) `memo` is shared by the calls of the layers of one step, which differ in q, k, v
    and sinks only: what a backend derives from the rest, it derives once.
    """

    q: Tensor
    k: Stored
    v: Stored
    table: Tensor | None
    cur_pos: Tensor
    mask: Tensor | None
    tree: Tensor | None
    scale: float
    window: int | None
    key_range: tuple[Tensor, Tensor] | None
    sinks: Tensor | None
    splits: Splits
    rounded: bool
    dtype: torch.dtype
    softcap: float | None = None
    memo: dict[Any, Any] | None = None

    @property
    def paged(self) -> bool:
        """Whether k and v are pools of blocks."""
        return self.table is not None

    @property
    def shared(self) -> bool:
        """Whether all sequences read one cache."""
        owner = values_of(self.k) if self.table is None else self.table
        return owner.shape[0] == 1 and self.q.shape[0] > 1

    @property
    def head_axis(self) -> int:
        """The dimension of k and v that indexes kv heads."""
        return 2 if self.paged else 1

    @property
    def kv_heads(self) -> int:
        """The number of kv heads."""
        return values_of(self.k).shape[self.head_axis]

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.q.shape[1] // self.kv_heads

    @property
    def value_dim(self) -> int:
        """The head dimension of v and of out."""
        return values_of(self.v).shape[-1]

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of out."""
        return self.dtype if self.rounded else accumulation_dtype(self.q.dtype)

    @property
    def block_size(self) -> int:
        """Tokens per block; 1 in a contiguous cache."""
        return values_of(self.k).shape[1] if self.paged else 1

    @property
    def capacity(self) -> int:
        """Maximum number of keys per sequence: the length of the cache, or the capacity of a row of the table."""
        return values_of(self.k).shape[2] if self.table is None else self.table.shape[1] * self.block_size

    def empty_state(self) -> State:
        """Uninitialized tensors for out and lse."""
        shape = (*self.q.shape[:3], self.value_dim)
        return State(
            self.q.new_empty(shape, dtype=self.out_dtype),
            self.q.new_empty(shape[:3], dtype=accumulation_dtype(self.q.dtype)),
        )


class Backend(Protocol):
    """One implementation. It serves a call, or returns the reason why it cannot."""

    name: str

    def why_not(self, call: DecodeCall) -> str | None:
        """The reason why this backend cannot serve the call; None if it can."""

    def run(self, call: DecodeCall, into: State | None = None) -> State:
        """Out [B, Hq, T, Dv] and lse [B, Hq, T], written to `into` if given."""

    def prepared(self) -> Callable[[DecodeCall, State | None], State]:
        """`run` for calls of one signature."""


def signature_of(
    q: Tensor, k: Stored, v: Stored, table: Tensor | None, cur_pos: Sequence[int] | Tensor | None, mask: Tensor | None,
    tree: Tensor | None, key_range: tuple[Tensor, Tensor] | None, sinks: Tensor | None, slopes: Tensor | None,
    into: State | None, options: tuple[object, ...],
) -> tuple[Any, ...] | None:  # fmt: skip
    """Everything that the checks of a call, its backend and its launches depend on, besides the values of positions.

    None if it cannot be known: then the call is checked, and computed or refused, as if it were the first.
    """
    if torch.compiler.is_compiling():
        return None
    try:
        tensors = [q, table, mask, tree, sinks, slopes]
        offsets: list[Any] = []
        if isinstance(k, Tensor) and isinstance(v, Tensor):
            tensors += (k, v)
        elif isinstance(k, Quantized) and isinstance(v, Quantized):
            parts = k.values, k.scales, k.rope, v.values, v.scales, v.rope
            tensors += parts
            offsets = [None if x is None else x.storage_offset() & 3 for x in parts]  # values are read as words
        else:
            return None
        if isinstance(cur_pos, Tensor):
            tensors.append(cur_pos)
        if key_range is not None:
            tensors += key_range
        if into is not None:
            tensors += into
        if torch.is_grad_enabled():
            for x in tensors:
                if x is not None and x.requires_grad:
                    return None
        kinds = (type(k), type(v), type(cur_pos), type(key_range), type(into), len(tensors))
        return (*signature(*tensors), *offsets, kinds, *map(type, tensors), options, *map(type, options))
    except (AttributeError, RuntimeError, TypeError, ValueError):  # not tensors, or not dense ones
        return None


def build_call(
    q: Tensor,
    k: Stored,
    v: Stored,
    table: Tensor | None,
    *,
    cur_pos: Sequence[int] | Tensor | None,
    mask: Tensor | None,
    tree: Tensor | None,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None,
    share_cache: bool = False,
    max_splits: int | None = None,
    split_size: int | None = None,
    key_range: tuple[Tensor, Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    softcap: float | None = None,
) -> DecodeCall:
    """Validates the arguments of a decode call; raises ValueError. Does not read tensors on a device."""
    caches = ("k_cache", "v_cache") if table is None else ("k_pool", "v_pool")
    _check_tensors(q, k, v, table, caches)
    dtype, q = q.dtype, _as_wide(q, k, v)
    check_storages(q, k, v, caches, axis=1 if table is None else 2, latent=table is not None)
    if share_cache is not False and share_cache is not True:
        check_bool(share_cache=share_cache)  # raises
    _check_batch(
        q, values_of(k) if table is None else table, share_cache, "k_cache" if table is None else "block_table"
    )
    for name, number in (("window", window), ("max_splits", max_splits), ("split_size", split_size)):
        if number is not None and (not isinstance(number, int) or number is True or not 1 <= number <= _INT64_MAX):
            raise ValueError(f"{name} must be a positive integer or None, got {shown(number)}")
    if max_splits is not None and split_size is not None:
        raise ValueError(
            f"max_splits and split_size are mutually exclusive, got max_splits={max_splits} and split_size={split_size}"
        )
    if scale is not None and not (type(scale) is float and math.isfinite(scale)):
        scale = check_number("scale", scale)
    if mask is not None and tree is not None:
        raise ValueError("mask and tree are mutually exclusive, got both")
    if key_range is not None:
        others = {"mask": mask, "tree": tree, "window": window, "share_cache": share_cache or None}
        for name, other in others.items():
            if other is not None:
                raise ValueError(f"key_range and {name} are mutually exclusive, got both")
    if out_dtype is not None and not (
        isinstance(out_dtype, torch.dtype) and out_dtype in (dtype, accumulation_dtype(dtype))
    ):
        raise ValueError(f"out_dtype must be None or {_out_dtypes(dtype)}, got {shown(out_dtype)}")
    if softcap is not None:
        softcap = check_number("softcap", softcap, above=0)
    capacity = values_of(k).shape[2] if table is None else table.shape[1] * values_of(k).shape[1]
    return DecodeCall(
        q,
        k,
        v,
        table,
        checked_positions(cur_pos, q, capacity),
        _checked_mask(mask, q, capacity),
        _checked_tree(tree, q),
        1.0 / math.sqrt(q.shape[-1]) if scale is None else scale,
        window,
        checked_key_range(key_range, q),
        checked_per_head("sinks", sinks, q),
        Splits(max_splits, split_size),
        out_dtype in (None, dtype),
        dtype,
        softcap,
    )


def check_into(into: State, call: DecodeCall, out_dtype: torch.dtype | None) -> DecodeCall:
    """Validates `into`; returns the call with the output dtype that `into` has."""
    q = call.q
    if not isinstance(into, tuple) or len(into) != 2 or not all(isinstance(x, Tensor) for x in into):
        raise ValueError(f"into must be a State (out, lse) of two tensors, got {type(into).__name__} {shown(into)}")
    out, lse = into
    allowed = (call.dtype, accumulation_dtype(call.dtype)) if out_dtype is None else (out_dtype,)
    if out.dtype not in allowed:
        wanted = _out_dtypes(call.dtype) if out_dtype is None else f"{out_dtype} (out_dtype)"
        raise ValueError(f"into.out must be {wanted}, got {out.dtype}")
    if lse.dtype != accumulation_dtype(q.dtype):
        raise ValueError(f"into.lse must be {accumulation_dtype(q.dtype)}, got {lse.dtype}")
    shape = (*q.shape[:3], call.value_dim)
    for name, x, wanted_shape in (("out", out, shape), ("lse", lse, shape[:3])):
        if x.shape != wanted_shape:
            raise ValueError(f"into.{name} must have shape {wanted_shape}, got {tuple(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"into.{name} must be on the device of q, {q.device}, got {x.device}")
        _refuse_gradient(f"into.{name}", x)
    if out.stride(-1) != 1 and out.shape[-1] > 1:
        raise ValueError(f"the last dimension of into.out must be contiguous, got strides {out.stride()}")
    return replace(call, rounded=out.dtype == call.dtype)


def _check_tensors(q: Tensor, k: Stored, v: Stored, table: Tensor | None, caches: tuple[str, str]) -> None:
    kind = "[batch, kv heads, length, head_dim]" if table is None else "[num_blocks, block_size, kv heads, head_dim]"
    for name, x in (("q", q), (caches[0], k), (caches[1], v)):
        if not isinstance(x, Tensor) and (name == "q" or not isinstance(x, Quantized)):
            raise ValueError(f"{name} must be a tensor{'' if name == 'q' else ' or Quantized'}, got {_described(x)}")
        whole = values_of(x)
        if whole.layout is not torch.strided:
            check_tensor(name, whole)  # raises
        if whole.ndim != 4:
            shape = "[batch, heads, tokens, head_dim]" if name == "q" else kind
            raise ValueError(f"{name} must be {shape}, got shape {tuple(whole.shape)}")
        if whole.device != q.device:
            raise ValueError(
                f"q, {caches[0]} and {caches[1]} must be on the same device, got {name} on {whole.device} and q on "
                f"{q.device}"
            )
        _refuse_gradient(name, whole)
        if isinstance(x, Quantized):
            _refuse_gradient(f"the scales of {name}", x.scales)
            if x.rope is not None:
                _refuse_gradient(f"the rope part of {name}", x.rope)
    if not q.dtype.is_floating_point:
        raise ValueError(f"q must be floating point, got {q.dtype}")
    if not 1 <= q.shape[2] <= MAX_DECODE_TOKENS:
        raise ValueError(
            f"q must have 1 to {MAX_DECODE_TOKENS} tokens per sequence, got {q.shape[2]} "
            f" (for prompts: paged_prefill_attention, attention)"
        )
    if not q.shape[3]:
        raise ValueError(f"head_dim must be at least 1, got 0 in q {list(q.shape)}")
    if table is not None:
        if not isinstance(table, Tensor) or table.ndim != 2 or table.dtype != torch.int32:
            raise ValueError(f"block_table must be int32 [batch, slots], got {_described(table)}")
        if table.device != q.device:
            raise ValueError(f"block_table must be on the device of q, {q.device}, got {table.device}")
        if not 1 <= values_of(k).shape[1] <= 256:
            raise ValueError(f"block_size must be 1 to 256, got {values_of(k).shape[1]} in {caches[0]}")


def check_storages(
    q: Tensor, k: Stored, v: Stored, caches: tuple[str, str], axis: int, *, latent: bool = False
) -> None:
    """Raise ValueError unless caches named `caches` fit q and each other; `axis` is their dimension of kv heads.

    `latent`: they may be one `fp8_ds_mla` cache, whose values are the features before the rope part.
    """
    storages = storage_of(k, caches[0]), storage_of(v, caches[1])
    allowed = (*STORAGES, "fp8_ds_mla") if latent else STORAGES
    for name, storage in zip(caches, storages, strict=True):
        if storage in SPARSE_STORAGES and storage not in allowed:
            raise ValueError(
                f"{name} must be stored as one of {', '.join(allowed)} for dense attention, got {storage} (which "
                f"paged_sparse_decode_attention and paged_indexer_topk read)"
            )
    k_values, v_values = values_of(k), values_of(v)
    if k_values.shape[:3] != v_values.shape[:3]:
        raise ValueError(
            f"{' and '.join(caches)} must have the same shape up to head_dim, got {tuple(k_values.shape)} and "
            f"{tuple(v_values.shape)}"
        )
    if width_of(k) != q.shape[3]:
        raise ValueError(f"q and {caches[0]} must have the same head_dim, got {q.shape[3]} and {width_of(k)}")
    if not v_values.shape[3]:
        raise ValueError(f"the head_dim of {caches[1]} must be at least 1, got 0")
    heads, kv_heads = q.shape[1], k_values.shape[axis]
    if not heads or not kv_heads or heads % kv_heads:
        raise ValueError(f"q_heads must be a multiple of kv_heads, got q_heads={heads} and kv_heads={kv_heads}")
    if storages[0] != storages[1]:
        raise ValueError(f"{' and '.join(caches)} must have the same storage type, got {storages[0]} and {storages[1]}")
    if storages[0] == "fp8_ds_mla" and not _same_memory(k, v):
        raise ValueError(
            f"{caches[1]} must be {caches[0]} itself if it is stored as fp8_ds_mla (the values are the features before "
            f"the rope part), got another cache"
        )
    for name, x in zip(caches, (k, v), strict=True):
        if isinstance(x, Tensor):
            if x.dtype != q.dtype:
                raise ValueError(
                    f"q and {name} must have the same dtype, or {name} be float32 or Quantized, got {q.dtype} and "
                    f"{x.dtype}"
                )
        elif x.storage == "fp8" and x.scales.ndim and x.scales.shape[0] != kv_heads:
            raise ValueError(f"{name} must have one fp8 scale per kv head, {kv_heads}, got {x.scales.shape[0]}")


def _same_memory(k: Stored, v: Stored) -> bool:
    return k is v or (
        isinstance(k, Quantized)
        and isinstance(v, Quantized)
        and all(
            a is not None and b is not None and a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
            for a, b in ((k.values, v.values), (k.scales, v.scales), (k.rope, v.rope))
        )
    )


def _check_batch(q: Tensor, owner: Tensor, share_cache: bool, name: str) -> None:
    batch = 1 if share_cache else q.shape[0]
    if owner.shape[0] != batch:
        raise ValueError(
            f"{name} must have a batch of {batch} (q has {q.shape[0]}, share_cache={share_cache}), got {owner.shape[0]}"
        )


def checked_positions(cur_pos: Sequence[int] | Tensor | None, q: Tensor, capacity: int) -> Tensor:
    """The positions as a tensor; raises ValueError for invalid positions that the host can read."""
    batch = q.shape[0]
    if cur_pos is None:
        return torch.full((batch,), capacity - 1, dtype=torch.int32, device=q.device)
    if not isinstance(cur_pos, Tensor):
        if not isinstance(cur_pos, Sequence) or not all(type(at) is int for at in cur_pos):
            raise ValueError(f"cur_pos must be integers, got {shown(cur_pos)}")
        cur_pos = list(cur_pos)
        _check_count(len(cur_pos), batch)
        _check_range(cur_pos, capacity)
        if q.is_cuda and torch.cuda.is_current_stream_capturing():  # a replay would copy from freed memory
            raise ValueError("cur_pos must be a tensor on the device while a CUDA graph is captured, got a list")
        return torch.tensor(cur_pos, dtype=torch.int32, device="cpu").to(q.device, non_blocking=True)
    if cur_pos.ndim != 1 or cur_pos.dtype not in _INTEGERS:
        raise ValueError(f"cur_pos must be int32 or int64 [batch], got {cur_pos.dtype} {tuple(cur_pos.shape)}")
    if cur_pos.device != q.device:
        raise ValueError(f"cur_pos must be a list or on the device of q, {q.device}, got {cur_pos.device}")
    _check_count(cur_pos.shape[0], batch)
    if cur_pos.device.type == "cpu":  # free to read here; on a device the kernel checks
        _check_range(cur_pos.tolist(), capacity)
    return cur_pos


def _check_count(count: int, batch: int) -> None:
    if count != batch:
        raise ValueError(f"cur_pos must have one position per sequence, {batch}, got {count}")


def _check_range(positions: list[int], capacity: int) -> None:
    for sequence, at in enumerate(positions):
        if not -1 <= at < capacity:
            raise ValueError(
                f"cur_pos[{sequence}] is {shown(at)}, but must be 0 to {capacity - 1}, or -1 to skip the sequence"
            )


def _checked_mask(mask: Tensor | None, q: Tensor, capacity: int) -> Tensor | None:
    if mask is None:
        return None
    batch, heads, tokens, _ = q.shape
    if (
        not isinstance(mask, Tensor)
        or not (mask.dtype == torch.bool or mask.dtype.is_floating_point)
        or mask.ndim != 4
        or any(n not in (1, m) for n, m in zip(mask.shape, (batch, heads, tokens), strict=False))
    ):
        raise ValueError(
            f"mask must be a boolean or floating point tensor [{batch} or 1, {heads} or 1, {tokens} or 1, up to "
            f"{capacity}], got {_described(mask)}"
        )
    if mask.shape[3] > capacity:
        raise ValueError(f"mask must cover at most {capacity} keys, the capacity of the cache, got {mask.shape[3]}")
    if mask.device != q.device:
        raise ValueError(f"mask must be on the device of q, {q.device}, got {mask.device}")
    check_tensor("mask", mask)
    _refuse_gradient("mask", mask)
    return mask


def _checked_tree(tree: Tensor | None, q: Tensor) -> Tensor | None:
    if tree is None:
        return None
    batch, tokens = q.shape[0], q.shape[2]
    if not isinstance(tree, Tensor) or tree.dtype != torch.bool:
        raise ValueError(
            f"tree must be a boolean tensor [{tokens}, {tokens}] or [{batch}, ...], got {_described(tree)}"
        )
    if tree.ndim == 2:
        tree = tree[None]
    if tree.ndim != 3 or tree.shape[0] not in (1, batch) or tree.shape[1:] != (tokens, tokens):
        raise ValueError(
            f"tree must be [{tokens}, {tokens}] or [{batch}, {tokens}, {tokens}], got shape {tuple(tree.shape)}"
        )
    if tree.device != q.device:
        raise ValueError(f"tree must be on the device of q, {q.device}, got {tree.device}")
    check_tensor("tree", tree)
    return tree


def checked_key_range(key_range: tuple[Tensor, Tensor] | None, q: Tensor) -> tuple[Tensor, Tensor] | None:
    """The key range as it is given; raises ValueError for an invalid range."""
    if key_range is None:
        return None
    if not isinstance(key_range, tuple) or len(key_range) != 2:
        raise ValueError(
            f"key_range must be a tuple of two tensors, (first, end), got {type(key_range).__name__} {shown(key_range)}"
        )
    shape = (q.shape[0], q.shape[2])
    for name, x in zip(("first", "end"), key_range, strict=True):
        if not isinstance(x, Tensor) or x.dtype not in _INTEGERS or x.shape != shape:
            raise ValueError(f"key_range {name} must be int32 or int64 [{shape[0]}, {shape[1]}], got {_described(x)}")
        if x.device != q.device:
            raise ValueError(f"key_range {name} must be on the device of q, {q.device}, got {x.device}")
        if x.device.type == "cpu":  # free to read
            for sequence, token in (x[:, 1:] < x[:, :-1]).nonzero():
                raise ValueError(
                    f"key_range {name} must not decrease from token to token, got {x[sequence].tolist()} "
                    f"for sequence {int(sequence)} (at token {int(token) + 1})"
                )
    return key_range


def checked_per_head(name: str, x: Tensor | None, q: Tensor) -> Tensor | None:
    """An argument [Hq], such as sinks; raises ValueError."""
    if x is None:
        return None
    if not isinstance(x, Tensor) or x.shape != (q.shape[1],) or not x.dtype.is_floating_point:
        raise ValueError(f"{name} must be floating point [{q.shape[1]}], one per query head, got {_described(x)}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
    check_tensor(name, x)
    _refuse_gradient(name, x)
    return x


def _as_wide(q: Tensor, k: Stored, v: Stored) -> Tensor:
    """Queries in half precision over a cache in float32 as float32: neither keys nor values are rounded."""
    wide = all(isinstance(x, Tensor) and x.dtype == torch.float32 for x in (k, v))
    return q.float() if wide and q.dtype in (torch.float16, torch.bfloat16) else q


def _out_dtypes(dtype: torch.dtype) -> str:
    return " or ".join(map(str, dict.fromkeys((dtype, accumulation_dtype(dtype)))))


def _refuse_gradient(name: str, x: Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"{name} must not require a gradient (decode has no backward): use attention() or no_grad()")


def _described(x: object) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else f"{type(x).__name__} {shown(x)}"
