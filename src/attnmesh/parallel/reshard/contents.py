"""`CacheContents`: the sequences of a `ShardedCache` without its keys and values, and where each sharding stores them.

It is what a rank needs to know of a cache that is on other ranks or in files, and it is written as JSON.

Sequences with common blocks (prefixes, forks) are a tree: a sequence has its first `common` positions in common
with its `base`, a sequence in an earlier row. Every key and value is thus stored, moved and written once.

`CacheTokens` reads and writes the stored tokens of a rank's cache by sequence and position, bit by bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.core import ranges
from attnmesh.core.layouts import Layout
from attnmesh.core.ranges import InterleavedShard, Ranges
from attnmesh.kv_cache.block_manager import BlockLayout, root_hash
from attnmesh.kv_cache.pools import CacheSpec
from attnmesh.kv_cache.sequence import token_ids
from attnmesh.kv_cache.sharded import ShardedCache
from attnmesh.ops.storage import PLAIN, check_storage
from attnmesh.plan.decode import DecodeSharding, Place
from attnmesh.plan.reshard import Part, Piece
from attnmesh.utils.validation import (
    check_bool,
    check_count,
    check_index,
    check_list,
    check_number,
    check_positive,
    check_tensor,
    check_type,
    shown,
)

_HASH_BYTES = 32  # of a root


@dataclass(frozen=True)
class SequenceContents:
    """A sequence: its tokens, and the earlier row `base` (-1: none) whose first `common` positions it shares.

    `reserved` is the number of tokens that it has blocks for; `ids` are the token ids that are known.
    """

    row: int
    length: int
    cached: int
    reserved: int
    ids: tuple[int, ...]
    root: str
    base: int
    common: int


@dataclass(frozen=True)
class CacheContents:
    """The sizes of a cache, as `ShardedCache` takes them, and its sequences in the order of their rows."""

    batch: int
    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    max_length: int
    storage: str
    k_scale: float | tuple[float, ...] | None
    v_scale: float | tuple[float, ...] | None
    sequences: tuple[SequenceContents, ...]
    latent: bool = False

    def __post_init__(self) -> None:
        check_positive(**{name: getattr(self, name) for name in _SIZES})
        check_bool(latent=self.latent)
        for dim in self.widths:
            check_storage(self.storage, dim)
        for name in ("k_scale", "v_scale"):
            _check_scale(name, getattr(self, name), self.kv_heads)
        lengths: dict[int, int] = {}
        for at, sequence in enumerate(self.sequences):
            try:
                self._check(sequence, lengths)
            except ValueError as error:
                raise ValueError(f"sequences[{at}]: {error}") from None
            lengths[sequence.row] = sequence.length

    def _check(self, sequence: SequenceContents, lengths: dict[int, int]) -> None:
        """Raise ValueError unless a sequence is valid after the sequences of `lengths`, by row."""
        check_index("row", sequence.row, self.batch)
        if lengths and sequence.row <= max(lengths):
            raise ValueError(f"row must be above {max(lengths)}, got {sequence.row}")
        check_count("reserved", sequence.reserved, most=self.max_length)
        check_count("length", sequence.length, most=sequence.reserved)
        check_count("cached", sequence.cached, most=self.max_length)
        if len(token_ids("ids", sequence.ids)) > sequence.reserved:
            raise ValueError(f"ids must be at most reserved={sequence.reserved}, got {len(sequence.ids)}")
        root = sequence.root
        if not isinstance(root, str) or len(root) != 2 * _HASH_BYTES or set(root) - set("0123456789abcdef"):
            raise ValueError(f"root must be {2 * _HASH_BYTES} hexadecimal digits, got {shown(root)}")
        if sequence.base not in (-1, *lengths) or isinstance(sequence.base, bool):
            raise ValueError(f"base must be an earlier row or -1, got {shown(sequence.base)}")
        most = 0 if sequence.base == -1 else min(sequence.length, lengths[sequence.base])
        check_count("common", sequence.common, most=most)

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of what is stored per token and head: keys and values, or latents."""
        return (self.head_dim,) if self.latent else (self.head_dim, self.value_dim)

    @property
    def spec(self) -> CacheSpec:
        """What is stored per token."""
        return CacheSpec(
            layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim, value_dim=self.value_dim,
            storage=self.storage, k_scale=_scale_of(self.k_scale), v_scale=_scale_of(self.v_scale), latent=self.latent,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The contents as numbers, strings, lists and dictionaries."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> CacheContents:
        """The contents from what `to_json` returned; raises ValueError for anything else."""
        if isinstance(value, dict):
            value = {"latent": False, **value}  # which earlier files do not have
        given = _record("the cache", value, cls)
        sequences = tuple(_sequence(one) for one in check_list("sequences", given["sequences"], "sequences"))
        scales = {name: _tuple(given[name]) for name in ("k_scale", "v_scale")}
        return cls(**{**given, **scales, "sequences": sequences})

    # Where sequences are stored.

    def common(self, a: int, b: int) -> int:
        """The number of leading positions that the sequences in two rows share."""
        shared = self.max_length
        while a != b:
            later = self._by_row[max(a, b)]
            a, b, shared = min(a, b), later.base, min(shared, later.common)
            if b == -1:
                return 0
        return min(shared, self._by_row[a].length)

    @cached_property
    def _by_row(self) -> dict[int, SequenceContents]:
        return {sequence.row: sequence for sequence in self.sequences}

    def placements(self, sharding: DecodeSharding, block_size: int) -> list[Placement]:
        """Where each sequence goes: it keeps its row, and shares blocks with an earlier one of the same KVDP rank."""
        layout = layout_of(sharding, block_size)
        rows = [sharding.sequences(sharding.rank(Place(0, 0, peer)), self.batch) for peer in range(sharding.kvdp)]
        placed: list[Placement] = []
        for sequence in self.sequences:
            kvdp_rank = next(peer for peer, own in enumerate(rows) if sequence.row in own)
            placed.append(self.place(sequence, sequence.row, kvdp_rank, placed, layout))
        return placed

    def place(
        self, sequence: SequenceContents, row: int, kvdp_rank: int, placed: Sequence[Placement], layout: BlockLayout
    ) -> Placement:
        """A sequence in a row of a KVDP rank, which shares blocks with those that are `placed` there."""
        sharers = [
            (self._shared_blocks(earlier.sequence, sequence, layout), -earlier.sequence.row)
            for earlier in placed
            if earlier.kvdp_rank == kvdp_rank and sequence.base != -1
        ]
        shared, base = max(sharers, default=(0, 1))
        return Placement(
            sequence, row, kvdp_rank, -base if shared else -1, shared, layout.num_blocks(sequence.reserved)
        )

    def _shared_blocks(self, a: SequenceContents, b: SequenceContents, layout: BlockLayout) -> int:
        """The blocks that two sequences can have in common: full ones, or all where both are the same throughout."""
        common = self.common(a.row, b.row)
        if common == a.length == b.length == a.reserved == b.reserved:
            return layout.num_blocks(common)
        return layout.num_full_blocks(common)

    def parts(self, sharding: DecodeSharding) -> list[Part]:
        """What each rank of a sharding holds: every position of every content once per replica of its heads."""
        return [
            Part(
                sharding.kv_heads(rank, self.kv_heads),
                tuple(
                    Piece(one.row, one.row, positions)
                    for one in self.sequences
                    if one.row in sharding.sequences(rank, self.batch)
                    and (positions := sharding.position_shard(rank).ranges(one.length, one.common))
                ),
            )
            for rank in range(sharding.ranks)
        ]

    def pieces(self, placed: Placement, shard: InterleavedShard, begin: int) -> list[Piece]:
        """The positions from `begin` on of a sequence on a rank, by the row whose content they are."""
        pieces, at, end = [], placed.sequence, placed.sequence.length
        while begin < end:
            if positions := shard.ranges(end, max(begin, at.common)):
                pieces.append(Piece(placed.row, at.row, positions))
            end = min(end, at.common)
            at = self._by_row[at.base] if at.base != -1 else at
        return pieces


class Placement(NamedTuple):
    """Where a sequence is stored, and the number of blocks it shares with another, which is in row `base` here."""

    sequence: SequenceContents
    row: int
    kvdp_rank: int
    base: int
    shared: int
    blocks: int  # with the shared ones

    @property
    def new_blocks(self) -> int:
        """The blocks that are allocated for it."""
        return self.blocks - self.shared


_SIZES = ("batch", "layers", "kv_heads", "head_dim", "value_dim", "max_length")


def layout_of(sharding: DecodeSharding, block_size: int) -> BlockLayout:
    """The blocks that positions lie in under a sharding, on the first of its ranks."""
    return BlockLayout(InterleavedShard(sharding.cp, 0, sharding.interleave), block_size)


def check_movable(name: str, cache: ShardedCache) -> None:
    """Raise ValueError for layers with blocks or shapes of their own: contents do not have these."""
    for size in ("kv_heads", "head_dim", "value_dim"):
        if not isinstance(found := getattr(cache.spec, size), int):
            raise ValueError(f"{name} must have the same {size} in every layer, got {shown(found)}")
    if cache.local.window is not None:
        raise ValueError(
            f"{name} must have the same blocks in every layer, got one with a window of {cache.local.window} in "
            f"{cache.local.num_windowed} of {cache.layers} layers"
        )


def contents_of(cache: ShardedCache, rows: Collection[int] | None = None) -> CacheContents:
    """The contents of a cache, or of some rows, the same on all its ranks. Raises ValueError for unwritten tokens."""
    check_movable("cache", cache)
    layout = cache.local.layout
    first_row: dict[tuple[int, int], int] = {}  # of those that refer to a block, by KVDP rank and block
    sequences: list[SequenceContents] = []
    live = {row: one for row, one in cache.sequences.items() if rows is None or row in rows}
    for row, one in live.items():
        if one.pending:
            raise ValueError(
                f"cache must be written in every layer, but {one} is not from token {one.written} on: write these "
                f"tokens, or truncate it"
            )
        blocks = one.blocks[: layout.num_blocks(one.length)]
        base, common = -1, 0
        for block in blocks:
            if (one.kvdp_rank, block) not in first_row:
                break
            base = first_row[one.kvdp_rank, block]
        if base != -1:
            common = _common(one.blocks, live[base].blocks, layout, min(one.length, live[base].length))
        for block in blocks:
            first_row.setdefault((one.kvdp_rank, block), row)
        reserved = max(one.length, len(one.ids))
        if len(one.blocks) > len(blocks):  # for a prompt: at most what fits into them
            fits = layout.shard.position(len(one.blocks) * layout.block_size, 0)
            reserved = min(cache.max_length, max(fits, len(one.ids)))
        sequences.append(
            SequenceContents(
                row, one.length, one.cached, reserved, tuple(one.ids[:reserved]), one.root.hex(),
                base if common else -1, common,
            )
        )  # fmt: skip
    return replace(sizes_of(cache), sequences=tuple(sequences))


def sizes_of(cache: ShardedCache) -> CacheContents:
    """The sizes of a cache, without sequences."""
    spec, (kv_heads, head_dim, value_dim) = cache.spec, cache.spec.shapes[0]  # of all layers, as check_movable has seen
    return CacheContents(
        batch=cache.batch, layers=spec.layers, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim,
        max_length=cache.max_length, storage=spec.storage,
        k_scale=_scale_numbers(spec.k_scale), v_scale=_scale_numbers(spec.v_scale), sequences=(), latent=spec.latent,
    )  # fmt: skip


def _common(a: list[int], b: list[int], layout: BlockLayout, length: int) -> int:
    """The leading positions, at most `length`, that lie in the same blocks of two sequences on every rank."""
    equal = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return min(length, layout.shard.position(equal * layout.block_size, 0))


def _scale_numbers(scale: float | Tensor | None) -> float | tuple[float, ...] | None:
    if not isinstance(scale, Tensor):
        return None if scale is None else float(scale)
    numbers = scale.detach().float().cpu()
    return tuple(numbers.tolist()) if numbers.ndim else float(numbers)


def _scale_of(numbers: float | tuple[float, ...] | None) -> float | Tensor | None:
    """An fp8 scale, as a cache takes it, from the numbers of `CacheContents`."""
    return torch.tensor(numbers, dtype=torch.float32, device="cpu") if isinstance(numbers, tuple) else numbers


def _check_scale(name: str, scale: object, kv_heads: int) -> None:
    if isinstance(scale, tuple):
        if len(scale) != kv_heads:
            raise ValueError(f"{name} must have one number for each of {kv_heads} kv heads, got {shown(scale)}")
        for number in scale:
            check_number(name, number, above=0)
    elif scale is not None:
        check_number(name, scale, above=0)


def _sequence(value: object) -> SequenceContents:
    given = _record("a sequence", value, SequenceContents)
    return SequenceContents(**{**given, "ids": tuple(check_list("ids", given["ids"], "token ids"))})


def _record(name: str, value: object, kind: type) -> dict[str, Any]:
    """A dictionary with exactly the fields of a dataclass."""
    names = [field.name for field in fields(kind)]
    if not isinstance(value, dict) or set(value) != set(names):
        raise ValueError(f"{name} must have the fields {', '.join(names)}, got {shown(value)}")
    return value


def _tuple(value: object) -> Any:
    return tuple(value) if isinstance(value, list) else value


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
Slots = tuple[Tensor, Tensor]
"""The blocks of tokens, and their offsets in these blocks."""


class Reader(Protocol):
    """What tokens are read from: a cache, or a prefill."""

    @property
    def device(self) -> torch.device:
        """The device of the tokens."""

    def read(self, pieces: Sequence[Piece], heads: range) -> list[Tensor]:
        """The tokens of pieces, in their order: [layers, tokens, heads, ...] of each stored tensor, contiguous."""


class CacheTokens:
    """The tokens of one rank's `ShardedCache`: what is stored per token, as integers, so that no bit can change."""

    def __init__(self, cache: ShardedCache) -> None:
        self.heads = cache.sharding.kv_heads(cache.rank, cache.spec.shapes[0][0])
        self.tensors = [as_integers(x) for x in cache.local.stored_tensors]
        """[layers, num_blocks, block_size, own kv heads, ...]: keys and values, each followed by its scales."""
        self._shard, self._block_size = cache.local.layout.shard, cache.local.layout.block_size
        self._sequences = cache.sequences

    @property
    def device(self) -> torch.device:
        """The device of the cache."""
        return self.tensors[0].device

    def read(self, pieces: Sequence[Piece], heads: range) -> list[Tensor]:
        """The tokens of pieces, from the rows of their content."""
        return self.read_slots(
            self.slots((piece.content, ranges.as_tensor(piece.positions)) for piece in pieces), heads
        )

    def write(self, pieces: Sequence[Piece], heads: range, tokens: Sequence[Tensor]) -> None:
        """Store tokens as `read` returned them, in the blocks of the pieces' own rows."""
        slots = self.slots((piece.row, ranges.as_tensor(piece.positions)) for piece in pieces)
        self.write_slots(slots, heads, tokens)

    def slots(self, positions: Iterable[tuple[int, Tensor]]) -> Slots:
        """The slots of positions of rows; all of them are stored on this rank."""
        blocks, offsets = [], []
        for row, of_row in positions:
            index = self._shard.index(of_row)
            of_sequence = torch.tensor(self._sequences[row].blocks, dtype=torch.int64, device="cpu")
            blocks.append(of_sequence[index // self._block_size])
            offsets.append(index % self._block_size)
        return torch.cat(blocks).to(self.device), torch.cat(offsets).to(self.device)

    def read_slots(self, slots: Slots, heads: range) -> list[Tensor]:
        """The tokens in slots, [layers, tokens, heads, ...] of each stored tensor, contiguous."""
        return [self._of(x, heads)[:, slots[0], slots[1]].contiguous() for x in self.tensors]

    def write_slots(self, slots: Slots, heads: range, tokens: Sequence[Tensor]) -> None:
        """Store tokens [layers, tokens, heads, ...] in slots."""
        for x, new in zip(self.tensors, tokens, strict=True):
            self._of(x, heads)[:, slots[0], slots[1]] = new

    def buffers(self, comm: Comm, pieces: Sequence[Piece], heads: range) -> list[Tensor]:
        """Buffers to receive tokens in, shaped as `read` returns them."""
        tokens = sum(ranges.size(piece.positions) for piece in pieces)
        return [
            comm.buffer((x.shape[0], tokens, len(heads), *x.shape[4:]), dtype=x.dtype, device=x.device)
            for x in self.tensors
        ]

    def _of(self, x: Tensor, heads: range) -> Tensor:
        first = heads.start - self.heads.start
        return x[:, :, :, first : first + len(heads)]


def as_integers(x: Tensor) -> Tensor:
    """A view of a tensor as integers of the same width."""
    return x.view(_INTEGERS[x.element_size()])


# `PrefillKV`: the keys and values that a prefill by context parallelism leaves on its ranks.


@dataclass(frozen=True, eq=False)
class PrefillKV:
    """Keys and values of all layers of a batch, of which rank `rank` of `world` has its positions by a layout.

    `keys[layer]` is [batch, kv heads, own positions, D] as passed to `ContextParallel.attention`, in bf16, fp16 or
    fp32, and `values[layer]` the same with their own width. All sequences have `length` tokens; with their `ids`, later
    prompts reuse them. `reshard` stores them in a cache, where sequence i is in row i.

    Examples:
        >>> k, v = torch.randn(2, 1, 2, 10, 16)
        >>> def rank(comm):
        ...     mine = [am.Zigzag().shard(x, 2, comm.world, comm.rank) for x in (k, v)]
        ...     prefill = am.decode.PrefillKV([mine[0]], [mine[1]], am.Zigzag(), 10, comm.rank, comm.world)
        ...     return am.decode.reshard(prefill, am.DecodeSharding(tp=2), comm, block_size=4).keys(0).shape
        >>> am.run_virtual(2, rank)[0]  # all positions of one kv head
        torch.Size([3, 4, 1, 16])
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    layout: Layout
    length: int
    rank: int
    world: int
    ids: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        check_type("layout", self.layout, Layout)
        check_positive(length=self.length, world=self.world)
        check_index("rank", self.rank, self.world)
        own = self.layout.local_length(self.length, self.world, self.rank)
        first: Tensor | None = None
        for name in ("keys", "values"):
            layers = check_list(name, getattr(self, name), "tensors, one for each layer")
            if not layers or len(layers) != len(self.keys):
                raise ValueError(
                    f"{name} must have a tensor for each layer, as many as keys, got {shown(getattr(self, name))}"
                )
            for layer, x in enumerate(layers):
                check_tensor(f"{name}[{layer}]", x, "[batch, kv heads, positions, D]")
                first = x if first is None else first
                _check_layer(f"{name}[{layer}]", x, layers[0], first, own)
        if self.ids is not None:
            given = check_list("ids", self.ids, "token ids for each sequence")
            lengths = [len(token_ids(f"ids[{i}]", one)) for i, one in enumerate(given)]
            if lengths != [self.length] * self.batch:
                raise ValueError(
                    f"ids must have {self.length} token ids for each of {self.batch} sequences, got {shown(lengths)}"
                )

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return len(self.keys[0])

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.keys[0].device

    def positions(self) -> list[Ranges]:
        """The positions of every rank."""
        return [self.layout.ranges(self.length, self.world, rank) for rank in range(self.world)]

    def contents(self) -> CacheContents:
        """The sequences, as in a cache."""
        ids: list[tuple[int, ...]] = [()] * self.batch
        if self.ids is not None:
            ids = [tuple(token_ids("ids", one)) for one in self.ids]
        storage = {dtype: name for name, dtype in PLAIN.items()}[self.keys[0].dtype]
        root = root_hash("").hex()
        _, kv_heads, _, head_dim = self.keys[0].shape
        return CacheContents(
            self.batch, len(self.keys), kv_heads, head_dim, self.values[0].shape[-1], self.length, storage, None, None,
            tuple(SequenceContents(row, self.length, 0, self.length, own, root, -1, 0) for row, own in enumerate(ids)),
        )  # fmt: skip

    def read(self, pieces: Sequence[Piece], heads: range) -> list[Tensor]:
        """The tokens of pieces, as they are stored."""
        own = ranges.as_tensor(self.layout.ranges(self.length, self.world, self.rank))
        at = [torch.searchsorted(own, ranges.as_tensor(piece.positions)) for piece in pieces]
        rows = torch.cat([torch.full_like(index, piece.content) for index, piece in zip(at, pieces, strict=True)])
        rows, index = rows.to(self.device), torch.cat(at).to(self.device)
        stored = []
        for layers in (self.keys, self.values):
            of_heads = [as_integers(x)[:, heads.start : heads.stop].transpose(1, 2) for x in layers]
            tokens = of_heads[0].new_empty((len(layers), len(index), len(heads), layers[0].shape[-1]))
            for layer, x in enumerate(of_heads):  # not stacked: the tokens of one layer are copied at a time
                tokens[layer] = x[rows, index]
            stored.append(tokens)
        return stored


def _check_layer(name: str, x: Tensor, like: Tensor, keys: Tensor, own: int) -> None:
    """Raise ValueError unless a layer has the shape of the first one, and the dtype and the device of the keys."""
    if x.ndim != 4 or x.shape[2] != own or x.shape != like.shape or x.shape[:3] != keys.shape[:3] or not x.shape[-1]:
        raise ValueError(
            f"{name} must be [batch, kv heads, {own} positions of this rank, D], as in other layers, got {shown(x)}"
        )
    if x.dtype not in PLAIN.values() or x.dtype != keys.dtype or x.device != keys.device:
        raise ValueError(f"{name} must be bf16, fp16 or fp32, of one dtype and device in all layers, got {shown(x)}")
