"""Decode: random calls, poisoned wherever nothing may be read, and their results in float64.

Every cache is first filled with valid numbers, from which the float64 results are computed. Then everything that a
kernel must not read is poisoned: positions past the end of a sequence (including the tail of its last block), blocks
that a window has left behind, keys outside the ranges of all tokens, free blocks, the memory around a view, the queries
of a skipped sequence, an additive mask past the end. Unused block table entries hold -1 or numbers outside the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnmesh.core.state import State
from attnmesh.ops.decode import reference
from attnmesh.ops.decode.api import decode_attention, paged_decode_attention
from attnmesh.ops.decode.call import build_call
from attnmesh.ops.storage import Quantized, Stored, dequantize, quantize
from attnmesh.testing.errors import Comparison

UNUSED_ENTRIES = (-1, 2**31 - 1, -1, -(2**31))  # what unused block table entries hold

_DEFAULTS: dict[str, Any] = dict.fromkeys(
    ("cur_pos", "mask", "tree", "scale", "window", "sinks", "max_splits", "split_size")
) | {"share_cache": False}


@dataclass(frozen=True)
class DecodeProblem:
    """One decode call: its poisoned arguments, and the valid caches [B or 1, Hkv, capacity, D] in float64."""

    q: Tensor
    k: Stored
    v: Stored
    table: Tensor | None
    options: dict[str, Any]
    valid: tuple[Tensor, Tensor]

    def run(self, backend: str, **more: Any) -> State:
        """Return out and lse of the public function."""
        return State(*self.attend(backend, return_lse=True, **more))

    def attend(self, backend: str, **more: Any) -> Any:
        """Call the public function with the options of this problem and `more`."""
        options: dict[str, Any] = {**self.options, **more, "backend": backend}
        if self.table is None:
            return decode_attention(self.q, self.k, self.v, **options)
        return paged_decode_attention(self.q, self.k, self.v, self.table, **options)

    def call(self) -> Any:
        """Return the validated call, as backends receive it."""
        return build_call(self.q, self.k, self.v, self.table, **_DEFAULTS | self.options)

    def exact(self) -> State:
        """Return the result in float64."""
        return reference_decode(self.q.double(), *self.valid, **self.options | {"out_dtype": None})

    def plain(self) -> State:
        """Return the result of the plain computation in the dtype of q."""
        return reference_decode(self.q, *self.valid, **self.options, plain=True)

    def compare(self, actual: State) -> list[Comparison]:
        """Return comparisons of out and lse."""
        return compare(actual, self.exact(), self.plain())

    def with_options(self, **options: Any) -> DecodeProblem:
        """Return the same problem with other options."""
        return replace(self, options=self.options | options)

    def sequence(self, i: int) -> DecodeProblem:
        """Return the problem of sequence i alone. The cache is not shared and `cur_pos` is a tensor."""
        one = slice(i, i + 1)
        alone = replace(self, q=self.q[one], options=self.options | {"cur_pos": self.options["cur_pos"][one]})
        if self.table is not None:
            return replace(alone, table=self.table[one])
        return replace(alone, k=change_stored(lambda x: x[one], self.k), v=change_stored(lambda x: x[one], self.v))


def reference_decode(q: Tensor, k: Tensor, v: Tensor, *, plain: bool = False, **options: Any) -> State:
    """Return decode over valid caches [B or 1, Hkv, L, D], in float64 or by the plain computation in the dtype of q.

    NaN in `q` and in an additive mask, which belong to nothing that is read, count as 0.
    """
    options = _DEFAULTS | {name: value for name, value in options.items() if name != "return_lse"}
    if options["cur_pos"] is None:
        options["cur_pos"] = [k.shape[2] - 1] * q.shape[0]
    mask = options["mask"]
    if mask is not None and mask.is_floating_point():
        options["mask"] = torch.where(mask.isnan(), 0.0, mask).double()
    q = torch.where(q.isnan(), 0.0, q)
    return reference.run(build_call(q, k.to(q.dtype), v.to(q.dtype), None, **options), plain=plain)


def compare(actual: State, exact: State, plain: State) -> list[Comparison]:
    """Return comparisons of out and lse."""
    return [Comparison("out", actual.out, exact.out, plain.out), Comparison("lse", actual.lse, exact.lse, plain.lse)]


def random_decode(
    positions: Sequence[int],
    *,
    tokens: int = 1,
    group: int = 2,
    kv_heads: int = 2,
    dims: tuple[int, int] = (32, 32),
    v_in_k: bool = False,
    block_size: int | None = None,
    capacity: int | None = None,
    storage: str = "plain",
    dtype: torch.dtype = torch.float32,
    share: str | None = None,
    memory: str = "own",
    q_memory: str = "transposed",
    key_range: str = "causal",
    window: int | None = None,
    sinks: bool = False,
    at: str | None = "list",
    device: torch.device | str = "cpu",
    seed: int = 0,
    **options: Any,
) -> DecodeProblem:
    """Return a random decode call for sequences whose last positions are `positions` (-1: skipped).

    Args:
        block_size: makes the cache paged; `capacity` counts tokens either way.
        dims: the head dimensions of keys and values.
        v_in_k: values are the first columns of the keys' memory.
        share: "cache" sets share_cache; "blocks" lets block tables name the same blocks at their beginning.
        memory: how caches lie in memory: "own", "token major" (not for pools), "layer" or "layer inside" a larger one.
        key_range: what tokens see: "causal", "tree", "trees" (one per sequence), "intervals", or a mask: "bool bht",
            "bias bht", "added h" (a bias with some very large entries), ... The letters name the dimensions that are
            not broadcast; " short" is a mask that ends before the cache does.
        at: the type of `cur_pos`: "list", "int32", "int64", or None to leave it out.
        options: more arguments of the call.
    """
    generator = torch.Generator().manual_seed(seed)
    batch = len(positions)
    step = block_size or 1
    capacity = max([-(-(last + 1) // step) * step for last in positions] + [step]) if capacity is None else capacity
    capacity = -(-capacity // step) * step
    owners = 1 if share == "cache" else batch

    k = _normal(generator, owners, kv_heads, capacity, dims[0])
    v = k[..., : dims[1]] if v_in_k else _normal(generator, owners, kv_heads, capacity, dims[1])
    live = _live(positions, tokens, capacity, window, step)  # [B, capacity]
    if key_range == "intervals":
        first, end = random_key_ranges(positions, tokens, seed)
        keys = torch.arange(capacity, device="cpu")
        live &= (keys >= first[:, :1]) & (keys < end[:, -1:])
        options["key_range"] = (first.to(device), end.long().to(device))
    if share == "cache":
        live = live.any(0, keepdim=True)
    common = 0
    if share == "blocks" and batch > 1:
        assert block_size, "only pools have blocks to share"
        common = max(1, max(positions) // step // 2 + 1) * step  # of sequences of different lengths: one's tail too
        k[1:, :, :common], v[1:, :, :common] = k[:1, :, :common].clone(), v[:1, :, :common].clone()
        live[:, :common] = live[:, :common].any(0)
    k_stored = _stored(k, storage, dtype)
    v_stored = _columns(k_stored, dims[1]) if v_in_k else _stored(v, storage, dtype)
    valid_k, valid_v = (dequantize(x, torch.float64).to(device) for x in (k_stored, v_stored))
    valid_v = valid_v[..., : dims[1]]

    # In memory: only what is live, poison everywhere else.
    table = pages = None
    if block_size:
        table, blocks = _block_table(live, block_size, common, generator)
        pages = (table, blocks, block_size)
    k_stored = _placed(k_stored, live, pages, memory, device)
    v_stored = _columns(k_stored, dims[1]) if v_in_k else _placed(v_stored, live, pages, memory, device)

    q = _normal(generator, batch, group * kv_heads, tokens, dims[0]).to(dtype)
    for sequence, last in enumerate(positions):
        if last < 0:
            q[sequence] = torch.nan
    q = _view(q.to(device), q_memory)

    if key_range != "intervals":
        options |= _mask_options(key_range, positions, q.shape, capacity, dtype, generator, device)
    if window is not None:
        options["window"] = window
    if sinks:
        weights = 2 * _normal(generator, group * kv_heads)
        options["sinks"] = weights.to(dtype if seed % 2 else torch.float32).to(device)
    if share == "cache":
        options["share_cache"] = True
    if at is not None:
        whole = torch.tensor(list(positions), dtype=torch.int64 if at == "int64" else torch.int32, device=device)
        options["cur_pos"] = list(positions) if at == "list" else whole
    table = None if table is None else table.to(device)
    return DecodeProblem(q, k_stored, v_stored, table, options, (valid_k, valid_v))


def random_key_ranges(positions: Sequence[int], tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the first key and the end of what each token sees, [B, T] each.

    Some ranges are empty and some reach past either end; there are no gaps between the ranges of a sequence.
    """
    generator = torch.Generator().manual_seed(seed)
    first, end = torch.zeros(2, len(positions), tokens, dtype=torch.int32, device="cpu")
    for b, last in enumerate(positions):
        starts, ends = (
            torch.randint(-1, last + 3, (2, tokens), generator=generator, device="cpu").sort(1).values.tolist()
        )
        for t in range(tokens):
            end[b, t] = ends[t]
            first[b, t] = starts[t] if t == 0 else min(starts[t], max(ends[t - 1], starts[0]))
    return first, end


def poison_cache(pool: Stored) -> None:
    """Fill the memory of a cache with values that spoil every result that reads them."""
    for x in (pool,) if isinstance(pool, Tensor) else (pool.values, pool.scales, pool.rope):
        if x is not None and (isinstance(pool, Tensor) or x is pool.values or pool.storage != "fp8"):
            x = x.view(torch.int8) if x.dtype == torch.float8_e4m3fn else x  # bytes can be filled on every device
            x.fill_(_poison(x.dtype))


def change_stored(change: Callable[[Tensor], Tensor], stored: Stored) -> Stored:
    """Apply a change to values and scales; the scales of fp8, which belong to no token, only follow the device."""
    if isinstance(stored, Tensor):
        return change(stored)
    values = change(stored.values)
    scales = stored.scales.to(values.device) if stored.storage == "fp8" else change(stored.scales)
    return Quantized(values, scales, None if stored.rope is None else change(stored.rope))


def _poison(dtype: torch.dtype) -> float:
    """NaN; in bytes 127: NaN in fp8, the largest int8, and as the exponents of bfp8 2 ** 127."""
    return 127 if dtype.itemsize == 1 else torch.nan


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")


def _live(positions: Sequence[int], tokens: int, capacity: int, window: int | None, step: int) -> Tensor:
    """Return what each sequence may read, [B, capacity]. What a window has left behind is poisoned in whole blocks."""
    keys = torch.arange(capacity, device="cpu")
    last = torch.tensor(list(positions), dtype=torch.int64, device="cpu")[:, None]
    live = keys <= last
    if window is not None:
        first = (last - tokens + 1 - window + 1).clamp(min=0)
        live &= keys >= first // step * step
    return live


def _stored(x: Tensor, storage: str, dtype: torch.dtype) -> Stored:
    if storage == "plain":
        return x.to(dtype)
    if storage == "fp8 heads":  # scales far apart: another head's scales give a wrong result
        scale = x.abs().amax().float() / 448 * 1.5 ** torch.arange(x.shape[1], device="cpu")
        return quantize(x, "fp8", scale=scale.float())
    return quantize(x, storage)


def _columns(stored: Stored, count: int) -> Stored:
    """Return the first columns, in the same memory."""
    if isinstance(stored, Tensor):
        return stored[..., :count]
    if stored.rope is not None:
        return stored  # the values of a latent cache are those before the rope part
    scales = stored.scales[..., : count // 16] if stored.storage == "bfp8" else stored.scales
    return Quantized(stored.values[..., :count], scales)


def _block_table(live: Tensor, block_size: int, common: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """Return a table of shuffled blocks for what is live, and the number of blocks, three of which are free."""
    used = live.unflatten(1, (-1, block_size)).any(-1)
    owned, shared = used.clone(), common // block_size
    owned[1:, :shared] = False
    blocks = int(owned.sum()) + 3
    order = torch.randperm(blocks, generator=generator, device="cpu").int()
    unused = torch.tensor(UNUSED_ENTRIES, dtype=torch.int32, device="cpu")
    table = unused[torch.arange(used.numel(), device="cpu") % len(unused)].view(used.shape)
    table[owned] = order[: int(owned.sum())]
    if shared:
        table[:, :shared] = torch.where(used[:, :shared], table[:1, :shared], table[:, :shared])
    return table, blocks


def _placed(
    stored: Stored, live: Tensor, pages: tuple[Tensor, int, int] | None, memory: str, device: torch.device | str
) -> Stored:
    """Return what is live in the memory of a cache or, with `pages`, of a pool."""

    def one(x: Tensor) -> Tensor:  # [owners, Hkv, capacity, ...]
        bits = x.view(torch.int8) if x.itemsize == 1 else x
        poison = torch.tensor(_poison(bits.dtype), dtype=bits.dtype, device="cpu")
        shown = live.reshape(live.shape[0], 1, live.shape[1], *[1] * (x.ndim - 3))
        bits = torch.where(shown, bits, poison)
        if pages is not None:
            table, blocks, block_size = pages
            pool = torch.full(
                (blocks, block_size, x.shape[1], *x.shape[3:]), poison.item(), dtype=bits.dtype, device="cpu"
            )
            for owner, slot in live.unflatten(1, (-1, block_size)).any(-1).nonzero().tolist():
                rows = bits[owner, :, slot * block_size : (slot + 1) * block_size]
                pool[table[owner, slot]] = rows.transpose(0, 1)
            bits = pool
        return _view_in_memory(bits.to(device), memory, poison.to(device)).view(x.dtype)

    return change_stored(one, stored)


def _view_in_memory(x: Tensor, memory: str, poison: Tensor) -> Tensor:
    """Return the same numbers with other strides; the memory around a view is poison."""
    if memory == "own":
        return x.contiguous()
    if memory == "token major":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    around = poison.expand_as(x)
    if memory == "layer":
        return torch.stack([around, x, around])[1]
    assert memory == "layer inside"
    return torch.stack([around, x, around], 1)[:, 1]


def _view(q: Tensor, memory: str) -> Tensor:
    if memory == "own":
        return q.contiguous()
    if memory == "transposed":
        return q.transpose(1, 2).contiguous().transpose(1, 2)
    assert memory == "fused"  # [B, T, heads and more, D], as one projection of q, k and v gives it
    wide = torch.full((q.shape[0], q.shape[2], q.shape[1] + 4, q.shape[3]), torch.nan, dtype=q.dtype, device=q.device)
    wide[:, :, : q.shape[1]] = q.transpose(1, 2)
    return wide[:, :, : q.shape[1]].transpose(1, 2)


def _mask_options(
    key_range: str,
    positions: Sequence[int],
    shape: Sequence[int],
    capacity: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    device: torch.device | str,
) -> dict[str, Tensor]:
    """Return the option `tree` or `mask`."""
    batch, heads, tokens, _ = shape
    if key_range == "causal":
        return {}

    def chance(odds: float, *size: int) -> Tensor:
        return torch.rand(*size, generator=generator, dtype=torch.float32, device="cpu") < odds

    if key_range in ("tree", "trees"):
        return {"tree": chance(0.7, *([batch] if key_range == "trees" else []), tokens, tokens).to(device)}
    kind, *rest = key_range.split()
    short = "short" in rest
    letters = "".join(part for part in rest if part != "short")
    width = max(1, (max([*positions, 0]) + 1) * 2 // 3) if short else capacity
    size = [n if letter in letters else 1 for n, letter in zip((batch, heads, tokens), "bht", strict=True)]
    mask = chance(0.7, *size, width)
    if letters:
        mask.view(-1, width)[-1:] = False  # a row that sees nothing
    if kind == "bool":
        return {"mask": mask.to(device)}
    added = torch.where(
        mask, 2 * torch.randn(mask.shape, generator=generator, dtype=torch.float32, device="cpu"), -torch.inf
    )
    if kind == "added":  # large enough to round away the scores
        added[chance(0.1, *added.shape)] = torch.finfo(torch.float16).min
    for sequence in range(size[0]):  # past the end
        last = positions[sequence] if size[0] > 1 or batch == 1 else max([*positions, -1])
        added[sequence, ..., last + 1 :] = torch.nan
    return {"mask": added.to(dtype if "t" in letters else torch.float32).to(device)}
