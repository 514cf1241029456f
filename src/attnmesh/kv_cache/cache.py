"""`BlockCache`: keys and values of many sequences in one pool of blocks, with prefix caching and copy-on-write."""

from __future__ import annotations

from array import array
from collections import abc
from functools import lru_cache

import torch
from torch import Tensor

from attnmesh.core.ranges import InterleavedShard
from attnmesh.kv_cache.block_manager import BlockLayout, BlockManager, BlockPool, CacheStats, LayerKind, root_hash
from attnmesh.kv_cache.pools import (
    CacheSpec,
    DeviceTables,
    LayerPools,
    Pools,
    fp8_scale,
    make_index_pools,
    make_pools,
    write_rows,
    write_tokens,
)
from attnmesh.kv_cache.sequence import (
    NewTokens,
    Sequence,
    check_distinct,
    check_given,
    check_length,
    check_live,
    check_new_kv,
    check_prompt_ids,
    new_ids,
    prompt_ids,
)
from attnmesh.ops.storage import Stored, storage_of
from attnmesh.utils.validation import (
    check_bool,
    check_count,
    check_device,
    check_index,
    check_positive,
    check_tensor,
    check_type,
    shown,
)

_MAX_BLOCK_SIZE = 256  # the largest that paged decode reads
_UNSHARDED = InterleavedShard()


class BlockCache:
    """A paged KV cache for `paged_decode_attention`: `keys(layer)`, `values(layer)`, `block_table` and `cur_pos`.

    `block_table` is int32 [max_sequences, blocks of max_length] and `cur_pos` int32 [max_sequences], -1 where empty.
    Both keep their addresses for the life of the cache, so CUDA graphs over them see every later change. No operation
    reads the device, and an operation that raises has changed nothing.

    A sequence lives from `allocate` (or `fork`) to `free`. `append` assigns slots to its tokens, and `write` fills them
    layer by layer. Once all layers of a full block with known token ids are written, later prompts with the same prefix
    reuse it.

    `spec` is what is stored per token. `device` is torch's default device if it is None.

    With a `shard`, the positions of every sequence are sharded over ranks, and this cache stores the positions of one
    rank. Prompts, ids, `max_length` and a sequence's `length` refer to the whole sequence; `cur_pos` and the slots are
    of the `shard.length(length)` tokens stored here, in position order. Ranks that perform the same operations have the
    same blocks, prefix hits and CacheFull without communication. A reused prefix ends where all ranks have filled the
    same blocks and none has started the next: after any block if the interleave divides block_size, otherwise after
    blocks that make whole multiples of the interleave.

    Layers with a window have `window_blocks` separate blocks, in which a sequence stores only what the widest of the
    windows reaches, and 512 tokens before it. `block_tables[1]` and `slots_of` are theirs.

    With `num_states`, at most this many states of recurrent layers are kept (`keep_state`), and a reused prefix ends
    with a kept state. The caller has the memory of the states.

    In a `ShardedCache` the sequences have `rows` of its batch, and belong to `kvdp_rank`. On the meta device a cache
    has no memory. It tracks the blocks of another rank's cache.

    Examples:
        >>> spec = am.CacheSpec(layers=1, kv_heads=2, head_dim=16, storage="fp32")
        >>> cache = am.BlockCache(spec, num_blocks=8, block_size=4, max_sequences=2, max_length=16, device="cpu")
        >>> first = cache.allocate([1, 2, 3, 4, 5])
        >>> cache.write(0, cache.append([first], 5), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16))
        >>> second = cache.allocate([1, 2, 3, 4, 9])  # reuses the full block of the first
        >>> second.cached, cache.cur_pos.tolist()
        (4, [4, 3])
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        num_blocks: int,
        block_size: int,
        max_sequences: int,
        max_length: int,
        device: torch.device | str | None = None,
        window_blocks: int = 0,
        num_states: int = 0,
        shard: InterleavedShard = _UNSHARDED,
        rows: range | None = None,
        kvdp_rank: int = 0,
    ) -> None:
        check_type("spec", spec, CacheSpec)
        check_positive(num_blocks=num_blocks, block_size=block_size, max_sequences=max_sequences, max_length=max_length)
        if block_size > _MAX_BLOCK_SIZE:
            raise ValueError(f"block_size must be 1 to {_MAX_BLOCK_SIZE}, got {block_size}")
        check_type("shard", shard, InterleavedShard)
        if device is not None:
            check_device("device", device)
        self.window = spec.window
        """The window of layers with separate blocks; None if there are none."""
        check_count("window_blocks", window_blocks, least=0 if self.window is None else 1)
        check_type("rows", rows, (range, type(None)), "a range of rows or None")
        check_count("kvdp_rank", kvdp_rank)
        self._num_states = check_count("num_states", num_states)
        layers, storage = spec.layers, spec.storage
        self._layers, self._max_length = layers, max_length
        self._shapes = shapes = spec.shapes
        self.value_dim = spec.value_dim
        self.layout = BlockLayout(shard, block_size)
        """The blocks that positions lie in."""
        self._num_blocks = (num_blocks,) if self.window is None else (num_blocks, window_blocks)
        kinds = [0 if window is None else 1 for window in spec.windows or [None] * layers]
        self.num_windowed = sum(kinds)
        """The number of layers that keep a window only."""
        self._tables = DeviceTables(len(self._num_blocks), max_sequences, self.layout.num_blocks(max_length), device)
        self.block_tables, self.cur_pos = self._tables.block_tables, self._tables.cur_pos
        self.block_table = self.block_tables[0]
        device = self.cur_pos.device
        one = spec.kv_heads if isinstance(spec.kv_heads, int) else None
        k_scale = fp8_scale("k_scale", spec.k_scale, storage, one, device)
        v_scale = fp8_scale("v_scale", spec.v_scale, storage, one, device)
        groups: dict[tuple[int, tuple[int, int, int]], list[int]] = {}
        for layer in range(layers):
            groups.setdefault((kinds[layer], shapes[layer]), []).append(layer)
        self._pools: list[list[Pools]] = [[] for _ in self._num_blocks]  # of each kind of layers
        by_number: dict[int, LayerPools] = {}
        for (kind, (kv_head, dim, value)), members in groups.items():
            front = (len(members), self._num_blocks[kind], block_size, kv_head)
            stored = [make_pools((*front, dim), storage, k_scale, device)]
            stored += [] if spec.latent else [make_pools((*front, value), storage, v_scale, device)]
            self._pools[kind] += stored
            for i, layer in enumerate(members):
                by_number[layer] = _layer_pools(kind, value, *(each.layers[i] for each in stored))
        self._latent = spec.latent
        self.pools = tuple(by_number[layer] for layer in range(layers))
        """Where each layer's keys and values are."""
        self._index_dim = index_dim = spec.index_dim
        sizes = layers, num_blocks, block_size
        self._index = None if index_dim is None else make_index_pools(sizes, index_dim, storage, device)
        self._rows, self._kvdp_rank = range(max_sequences) if rows is None else rows, kvdp_rank
        self.max_sequences = max_sequences
        self._lookups = self._hits = 0
        self._forget()

    def _forget(self) -> None:
        limits = ("num_blocks", "window_blocks")
        pools = [BlockPool(blocks, limit) for blocks, limit in zip(self._num_blocks, limits, strict=False)]
        kinds = [LayerKind(i, pool, self.window if i else None) for i, pool in enumerate(pools)]
        self._pool = pools[0]
        states = BlockPool(self._num_states, "num_states") if self._num_states else None
        self._manager = BlockManager(kinds, self._tables, self.layout, self._rows, self._kvdp_rank, states)

    def keys(self, layer: int) -> Stored:
        """The pool of a layer's keys, [num_blocks, block_size, kv_heads, head_dim]."""
        check_index("layer", layer, self._layers)
        return self.pools[layer].keys

    def values(self, layer: int) -> Stored:
        """The pool of a layer's values, [num_blocks, block_size, kv_heads, value_dim]; of latents, a view of the keys.

        Raises ValueError for fp8_ds_mla: what reads its keys knows that they contain the values.
        """
        check_index("layer", layer, self._layers)
        _, keys, values = self.pools[layer]
        if values is keys:
            raise ValueError(
                f"a cache of storage {storage_of(keys)!r} has no pool of values: they are in keys({layer})"
            )
        return values

    def index_keys(self, layer: int) -> Stored:
        """The pool of a layer's index keys, [num_blocks, block_size, 1, index_dim]."""
        check_index("layer", layer, self._layers)
        if self._index is None:
            raise ValueError("a cache has index keys only if it was made with index_dim, got None")
        return self._index.layers[layer]

    @property
    def sequences(self) -> dict[int, Sequence]:
        """All sequences that were not freed, by row."""
        return dict(sorted(self._manager.sequences.items()))

    def has(self, sequence: Sequence) -> bool:
        """Whether a sequence belongs to this cache, and was not freed."""
        return sequence.owner is self._manager.owner

    @property
    def free_rows(self) -> int:
        """The number of sequences that can still be allocated."""
        return len(self._manager.free_rows)

    @property
    def stored_tensors(self) -> tuple[Tensor, ...]:
        """All that is stored per token, [layers, num_blocks, block_size, kv_heads, ...]: keys, values, their scales.

        fp8 scales are not stored per token, and not among them. Index keys in fp8_token are [layers, num_blocks, ...].
        """
        kinds = range(len(self._num_blocks))
        return tuple(x for kind in kinds for pools in self._pools_of(kind) for x in pools.tensors)

    def _pools_of(self, kind: int) -> list[Pools]:
        index = [] if self._index is None or kind else [self._index]
        return [*self._pools[kind], *index]

    def stats(self) -> CacheStats:
        """The number of free, used and cached blocks, prefix hits and evictions."""
        pool, free, cached = self._pool, len(self._pool.free_blocks), len(self._pool.cached_blocks)
        return CacheStats(
            total=pool.total, free=free, used=pool.total - free - cached, cached=cached, lookups=self._lookups,
            hits=self._hits, evictions=pool.evictions,
        )  # fmt: skip

    def allocate(self, prompt: abc.Sequence[int] | int, *, cache_key: str = "") -> Sequence:
        """A sequence with blocks for the whole prompt: appending the prompt cannot fail (unless it is forked before).

        It starts with the cached blocks of the longest known prefix, `length == cached` tokens. The last prompt token
        is never among them, because its logits have to be computed. Append the rest, `prompt[cached:]`, in one or more
        chunks. A prompt given as a length reserves blocks and takes no part in prefix caching. Prompts reuse only
        blocks with the same `cache_key`.
        """
        count, ids, root = self._check_prompt(prompt, cache_key)
        sequence = self._manager.allocate(count, ids, root)
        self._tables.upload()
        self._lookups += len(ids)
        self._hits += sequence.cached
        return sequence

    def check_allocate(self, prompt: abc.Sequence[int] | int, spare: int = 0) -> None:
        """Raise CacheFull unless there is room for a prompt, and for `spare` blocks besides."""
        self._manager.check_allocate(*self._check_prompt(prompt, ""), spare)

    def find_prefix(self, prompt: abc.Sequence[int] | int, *, cache_key: str = "") -> int:
        """The number of tokens of a prompt that `allocate` would reuse. Does not count as a lookup."""
        _, ids, root = self._check_prompt(prompt, cache_key)
        return self._manager.find_prefix(root, ids)

    def reusable(self, tokens: int, of: Sequence | None = None) -> int:
        """The most tokens that a prompt can reuse of another prompt, or a sequence, with so many tokens in common."""
        return self._manager.reusable(tokens, of)

    def chunk_end(self, sequence: Sequence) -> int:
        """Where the next pass over a prompt must end: at its end, or before, where a state is to be kept."""
        return self._manager.chunk_end(sequence)

    def keep_state(self, sequence: Sequence, *, in_answer: bool) -> int | None:
        """Which of the kept states the caller replaces by the present state of a sequence; None for none of them."""
        return self._manager.keep_state(sequence, in_answer)

    def append(self, sequences: abc.Sequence[Sequence], tokens: int | abc.Sequence[abc.Sequence[int]]) -> NewTokens:
        """Slots for T more tokens of each of n sequences. Raises CacheFull, for all of them, if blocks are missing.

        `tokens` are lists of ids, or their number T. While a prompt is incomplete, a number stands for its next ids,
        and given ids must be those. After tokens with unknown ids, a sequence's further blocks are not reused. The
        tables include the new tokens at once: write a layer before reading it. Blocks that other sequences reference
        are copied first, in all layers.
        """
        return self.extend(*self._check_append(sequences, tokens))[0]

    def extend(
        self, sequences: tuple[Sequence, ...], count: int, given: abc.Sequence[abc.Sequence[int]] | None = None,
        numbers: abc.Sequence[int] = (),
    ) -> tuple[NewTokens, Tensor]:  # fmt: skip
        """As `append` of valid arguments, and `numbers` as int64 on the device, copied in the same transfer."""
        copies = self._manager.append(sequences, count, given)
        if self._tables.is_meta:
            slots = [_meta_slots(len(sequences), count)]
            extra = self._tables.upload()
        else:
            kinds = len(copies)
            parts = [self._manager.new_slots(sequences, count, kind) for kind in range(kinds)]
            parts += [*(blocks for both in copies for blocks in both), [*numbers]]
            sent = self._tables.upload([number for part in parts for number in part]).split([*map(len, parts)])
            slots = [each.view(len(sequences), count) for each in sent[:kinds]]
            extra = sent[-1]
            for kind, (sources, _) in enumerate(copies):
                if sources:
                    for pools in self._pools_of(kind):
                        pools.copy_blocks(*sent[kinds + 2 * kind : kinds + 2 * kind + 2])
        new = NewTokens(slots[0], sequences, set(range(self._layers)), self._manager.owner, slots[-1])
        for sequence in sequences:
            sequence.pending[new] = sequence.length - count
        return new, extra

    def slots_of(self, new: NewTokens, layer: int) -> Tensor:
        """The slots [n, T] of new tokens in a layer."""
        return new.window_slots if self.pools[layer].kind else new.slots

    def upload(self, numbers: abc.Sequence[int]) -> Tensor:
        """`numbers` as int64 on the device, where `extend` has nothing to append."""
        return self._tables.upload(numbers)

    def check_append(self, sequences: abc.Sequence[Sequence], tokens: int | abc.Sequence[abc.Sequence[int]]) -> None:
        """Raise the error that `append` would raise, without changing anything."""
        sequences, count, _ = self._check_append(sequences, tokens)
        self._manager.check_append(sequences, count)

    def check_extend(self, sequences: abc.Sequence[Sequence], count: int) -> None:
        """Raise CacheFull if `extend` would."""
        self._manager.check_room(sequences, count)

    def write(
        self, layer: int, new: NewTokens, k: Tensor, v: Tensor | None = None, index_k: Tensor | None = None
    ) -> None:
        """Write one layer of new tokens: k [n, kv_heads, T, head_dim] and v [n, kv_heads, T, value_dim], any strides.

        Of latents there is no v; `index_k` [n, 1, T, index_dim] is given where the cache has index keys. Each layer is
        written once. After the last layer, full blocks are available to other prompts. On the meta device the tensors
        are ignored.
        """
        check_index("layer", layer, self._layers)
        self._check_unwritten(new, layer)
        if not self._tables.is_meta:
            check_given("index_k", index_k, self._index is not None)
            check_new_kv(new.slots, 1, index_k=(index_k, self._index_dim or 0))
            self.write_slots(layer, self.slots_of(new, layer), k, v)
            if index_k is not None:
                write_rows(self.index_keys(layer), new.slots, index_k)
        self.mark_written(new, layer)

    def write_slots(self, layer: int, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Write k and v, as of `write`, to `slots` [n, T] of a layer; slots below 0 are skipped."""
        check_tensor("k", k)
        check_given("v", v, not self._latent)
        heads, dim, value_dim = self._shapes[layer]
        check_new_kv(slots, heads, k=(k, dim), v=(v, value_dim))
        if v is None:
            write_rows(self.pools[layer].keys, slots, k)
        else:
            write_tokens(self.pools[layer].keys, self.pools[layer].values, slots, k, v)

    def mark_written(self, new: NewTokens, layer: int | None = None) -> None:
        """Record that the slots of one layer, or of all unwritten layers, were filled by other means than `write`."""
        self._check_unwritten(new, layer)
        new.unwritten_layers -= new.unwritten_layers if layer is None else {layer}
        if not new.unwritten_layers:
            for sequence in new.sequences:
                if sequence.pending.pop(new, None) is not None:
                    self._manager.cache_full_blocks(sequence)

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same tokens in the same blocks, copied when either appends to them.

        The rest of an incomplete prompt stays with the first sequence.
        """
        self._check_sequence(sequence)
        if sequence.pending:
            raise ValueError(f"{sequence} has tokens from {sequence.written} on that are not written in every layer")
        forked = self._manager.fork(sequence)
        self._tables.upload()
        return forked

    def restore(
        self, row: int, length: int, reserved: int, ids: array[int], root: bytes, shared: list[int]
    ) -> Sequence:
        """A sequence whose keys and values the caller copies to its blocks, as `BlockManager.restore`."""
        sequence = self._manager.restore(row, length, reserved, ids, root, shared)
        self._tables.upload()
        return sequence

    def mark_restored(self, sequence: Sequence) -> None:
        """Record that the keys and values of a restored sequence were copied: prompts can reuse its full blocks."""
        self._check_sequence(sequence)
        self._manager.cache_full_blocks(sequence)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Keep the first `length` tokens, as after rejected drafts. Blocks reserved for a prompt are freed, too.

        Layers with a window do not have all earlier tokens: it is 0, or at most 512 tokens less there.
        """
        self._check_sequence(sequence)
        check_index("length", length, sequence.length + 1, sequence)
        self._manager.check_truncate(sequence, length)
        self._manager.truncate(sequence, length)
        self._tables.upload()

    def free(self, sequence: Sequence, *, forget: bool = False) -> None:
        """End a sequence and free its blocks. Blocks with a prefix hash stay cached until they are evicted.

        With `forget` they do not: no prompt reuses a block of this sequence, which may be invalid.
        """
        self._check_sequence(sequence)
        check_bool(forget=forget)
        self._manager.free(sequence, forget=forget)
        self._tables.upload()

    def forget_cached(self) -> None:
        """Free the blocks that are cached for later prompts only."""
        self._manager.forget_cached()

    def clear(self) -> None:
        """End all sequences and forget all cached blocks; the memory stays.

        This also restores a cache in which an operation was interrupted, by a KeyboardInterrupt.
        """
        self._tables.clear()
        self._forget()

    def _check_prompt(self, prompt: abc.Sequence[int] | int, cache_key: str) -> tuple[int, array[int], bytes]:
        """The length of a prompt, its ids, and the parent hash of its first block."""
        count, ids = prompt_ids(prompt)
        check_length("prompt", count, self._max_length)
        check_type("cache_key", cache_key, str, "a string")
        return count, ids, root_hash(cache_key)

    def _check_append(
        self, sequences: abc.Sequence[Sequence], tokens: int | abc.Sequence[abc.Sequence[int]]
    ) -> tuple[tuple[Sequence, ...], int, list[array[int]] | None]:
        """The sequences, the number of new tokens per sequence, and their ids if given."""
        sequences = check_distinct(sequences, self._check_sequence)
        count, given = new_ids(tokens, len(sequences))
        longest = max(sequences, key=lambda sequence: sequence.length)
        check_length(longest, longest.length + count, self._max_length)
        if given is not None:
            for sequence, ids in zip(sequences, given, strict=True):
                check_prompt_ids(sequence, ids)
        return sequences, count, given

    def _check_unwritten(self, new: NewTokens, layer: int | None) -> None:
        """Raise ValueError unless `new` are tokens of this cache whose `layer` is not written yet."""
        if layer is not None:
            check_index("layer", layer, self._layers)
        if not isinstance(new, NewTokens) or new.owner is not self._manager.owner:
            raise ValueError(f"new must be what append of this cache returned, got {shown(new)}")
        if layer is not None and layer not in new.unwritten_layers:
            raise ValueError(
                f"layer {layer} of these tokens is already written, unwritten are {sorted(new.unwritten_layers)}"
            )

    def _check_sequence(self, sequence: Sequence, at: int | None = None) -> None:
        check_live(sequence, self.has, at)


def _layer_pools(kind: int, value_dim: int, keys: Stored, values: Stored | None = None) -> LayerPools:
    """The pools of one layer. Without values they are the first features of the keys."""
    if values is None:
        values = keys[..., :value_dim] if isinstance(keys, Tensor) else keys
    return LayerPools(kind, keys, values)


@lru_cache
def _meta_slots(sequences: int, tokens: int) -> Tensor:
    """Slots on the meta device, which have a shape only: made once per shape."""
    return torch.empty(sequences, tokens, dtype=torch.int64, device="meta")
