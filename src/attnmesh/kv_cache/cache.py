"""`BlockCache`: keys and values of many sequences in one pool of blocks, prefixes shared and found again."""

from __future__ import annotations

from array import array
from collections import abc
from functools import lru_cache

import torch
from torch import Tensor

from attnmesh.core.ranges import InterleavedShard
from attnmesh.kv_cache import sequence as check
from attnmesh.kv_cache.block_manager import Ledger, Paging
from attnmesh.kv_cache.block_pool import Blocks, CacheStats, root_digest
from attnmesh.kv_cache.pools import Tables, fp8_scale, make_pools, write_tokens
from attnmesh.kv_cache.sequence import NewTokens, Sequence
from attnmesh.ops.storage import Stored, check_storage

_MOST_BLOCK_SIZE = 256  # what paged decode reads
_WHOLE = InterleavedShard()


class BlockCache:
    """A paged KV cache for `paged_decode_attention`: `keys(layer)`, `values(layer)`, `block_table` and `cur_pos`.

    The tables are int32 [max_sequences, blocks of max_length] and [max_sequences], -1 where there is nothing. They stay
    where they are for the life of the cache, so CUDA graphs over them see every later change. No operation reads the
    device, and one that raises has changed nothing.

    A sequence lives from `allocate` (or `fork`) to `free`. Its tokens get slots by `append`, and `write` fills them
    layer by layer. A full block whose ids are known is found again by later prompts once all its layers are written.

    `storage` is bf16, fp16, fp32, fp8, int8 or bfp8. `k_scale` and `v_scale`, a number, [] or [kv_heads], are fp8's:
    values up to 448 times the scale are kept, larger ones become the largest. They are 1 by default.

    With a `share` the positions of every sequence are dealt to several ranks, and this cache holds one rank's. Prompts,
    ids, `max_length` and a sequence's `length` remain those of the whole sequence; `cur_pos` and the slots are this
    rank's: the last of `share.length(length)` tokens, in the order of their positions. Ranks that perform the same
    operations have the same blocks, hits and CacheFull without a word between them. A found prefix ends where all
    ranks have filled the same blocks and none has begun the next: with a run that divides block_size after any block,
    otherwise after blocks that make whole runs.

    On the meta device a cache is books only, to follow another rank's: no operation touches a tensor.
    """

    def __init__(
        self,
        *,
        layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        storage: str = "bf16",
        device: torch.device | str | None = None,
        max_sequences: int,
        max_length: int,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        share: InterleavedShard = _WHOLE,
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        check.check_sizes(
            layers=layers, num_blocks=num_blocks, block_size=block_size, kv_heads=kv_heads, head_dim=head_dim,
            value_dim=value_dim, max_sequences=max_sequences, max_length=max_length,
        )  # fmt: skip
        if block_size > _MOST_BLOCK_SIZE:
            raise ValueError(f"block_size must be 1 to {_MOST_BLOCK_SIZE}, got {block_size}")
        if not isinstance(share, InterleavedShard):
            raise ValueError(f"share must be a Share, got {type(share).__name__}")
        check_storage(storage, head_dim)
        check_storage(storage, value_dim)
        self._layers, self._max_length = layers, max_length
        self._heads, self._dim, self._value_dim = kv_heads, head_dim, value_dim
        self._paging = Paging(share, block_size)
        self._tables = Tables(max_sequences, self._paging.blocks(max_length), device)
        self.block_table, self.cur_pos = self._tables.block_table, self._tables.cur_pos
        device = self.cur_pos.device
        shape = (layers, num_blocks, block_size, kv_heads)
        k_scale = fp8_scale("k_scale", k_scale, storage, kv_heads, device)
        v_scale = fp8_scale("v_scale", v_scale, storage, kv_heads, device)
        self._keys = make_pools((*shape, head_dim), storage, k_scale, device)
        self._values = make_pools((*shape, value_dim), storage, v_scale, device)
        self._blocks = Blocks(num_blocks)
        self._ledger = Ledger(self, self._blocks, self._tables, self._paging, max_sequences)
        self._lookups = self._hits = 0

    def keys(self, layer: int) -> Stored:
        """The pool of a layer's keys, [num_blocks, block_size, kv_heads, head_dim]."""
        check.check_layer(layer, self._layers)
        return self._keys.layers[layer]

    def values(self, layer: int) -> Stored:
        """The pool of a layer's values, [num_blocks, block_size, kv_heads, value_dim]."""
        check.check_layer(layer, self._layers)
        return self._values.layers[layer]

    @property
    def free_rows(self) -> int:
        """How many more sequences there can be."""
        return self._ledger.free_rows

    def stats(self) -> CacheStats:
        """The cache in numbers."""
        blocks = self._blocks
        return CacheStats(
            total=blocks.total, free=blocks.free, used=blocks.total - blocks.free - blocks.cached,
            cached=blocks.cached, lookups=self._lookups, hits=self._hits, evictions=blocks.evictions,
        )  # fmt: skip

    def allocate(self, prompt: abc.Sequence[int] | int, *, cache_key: str = "") -> Sequence:
        """A sequence for a prompt, with room for all of it: appending that cannot fail (unless it is forked meanwhile).

        It begins with the full blocks that are cached already, `length == cached` tokens of the prompt. The last token
        is never among them: it has to be computed, to say what comes next. The rest, `prompt[cached:]`, is to be
        appended, in one or more chunks. A prompt given as a count reserves room, and neither finds nor is found.
        Prompts find only what was written under the same `cache_key`.
        """
        count, ids, root = self._check_prompt(prompt, cache_key)
        sequence = self._ledger.begin(count, ids, root)
        self._tables.upload()
        self._lookups += len(ids)
        self._hits += sequence.cached
        return sequence

    def find(self, prompt: abc.Sequence[int] | int, *, cache_key: str = "") -> int:
        """How many tokens of a prompt `allocate` would find. Nothing is held, nor counted as a lookup."""
        _, ids, root = self._check_prompt(prompt, cache_key)
        return self._ledger.find(root, ids)

    def append(self, sequences: abc.Sequence[Sequence], tokens: int | abc.Sequence[abc.Sequence[int]]) -> NewTokens:
        """Slots for T more tokens on each of n sequences: on all of them or, with CacheFull, on none.

        `tokens` are lists of ids, or their number T. Where a prompt is outstanding, T stands for its next ids, and
        given ids must be those. After tokens whose ids were not given, a sequence's blocks are not found again.
        The tables count the new tokens at once: write a layer before it is read. Blocks with new tokens that others
        hold, too, are copied first, in all layers.
        """
        return self.append_along(sequences, tokens, ())[0]

    def append_along(
        self,
        sequences: abc.Sequence[Sequence],
        tokens: int | abc.Sequence[abc.Sequence[int]],
        numbers: abc.Sequence[int],
    ) -> tuple[NewTokens, Tensor]:
        """`append`, and `numbers` that come along in the same upload, int64 on the device."""
        sequences, count, given = self._check_append(sequences, tokens)
        begins = tuple(sequence.length for sequence in sequences)
        sources, targets = self._ledger.grow(sequences, count, given)
        if self._tables.is_meta:
            slots, along = _no_slots(len(sequences), count), self._tables.upload()
        else:
            places = [slot for sequence in sequences for slot in self._new_slots(sequence, count)]
            sent = self._tables.upload([*places, *sources, *targets, *numbers])
            placed, source, target, along = sent.split([len(places), len(sources), len(targets), len(numbers)])
            slots = placed.view(len(sequences), count)
            if sources:
                self._keys.copy_blocks(source, target)
                self._values.copy_blocks(source, target)
        new = NewTokens(slots, sequences, set(range(self._layers)), self)
        for sequence, begin in zip(sequences, begins, strict=True):
            sequence.pending[new] = begin
        return new, along

    def send(self, numbers: abc.Sequence[int]) -> Tensor:
        """Numbers to the device, as `append_along` sends them, when nothing is appended."""
        return self._tables.upload(numbers)

    def check_append(self, sequences: abc.Sequence[Sequence], tokens: int | abc.Sequence[abc.Sequence[int]]) -> None:
        """Raise what `append` would raise. Nothing changes."""
        sequences, count, _ = self._check_append(sequences, tokens)
        self._ledger.check_growth(sequences, count)

    def write(self, layer: int, new: NewTokens, k: Tensor, v: Tensor) -> None:
        """Fill one layer of new tokens: k [n, kv_heads, T, head_dim] and v [n, kv_heads, T, value_dim], any strides.

        Each layer once. With the last one, full blocks become findable. On the meta device k and v are not looked at.
        """
        self._check_missing(new, layer)
        if not self._tables.is_meta:
            check.check_new(new.slots, k, v, self._heads, self._dim, self._value_dim)
            write_tokens(self.keys(layer), self.values(layer), new.slots, k, v)
        self.wrote(new, layer)

    def wrote(self, new: NewTokens, layer: int | None = None) -> None:
        """The books of `write`, where somebody else has filled the slots: in one layer, or in all that are missing."""
        self._check_missing(new, layer)
        for each in sorted(new.missing) if layer is None else [layer]:
            new.missing.discard(each)
        if not new.missing:
            for sequence in new.sequences:
                if sequence.pending.pop(new, None) is not None:
                    self._ledger.register(sequence)

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same tokens in the same blocks; whoever appends first copies what it appends to.

        What remains of a prompt that is outstanding stays with the first.
        """
        self._own(sequence)
        if sequence.pending:
            raise ValueError(f"{sequence} has tokens from {sequence.written} on that are not written in every layer")
        twin = self._ledger.fork(sequence)
        self._tables.upload()
        return twin

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Keep the first `length` tokens, as after rejected drafts. Room that a prompt had reserved goes back, too."""
        self._own(sequence)
        if not isinstance(length, int) or not 0 <= length <= sequence.length:
            raise ValueError(f"length must be 0 to {sequence.length}, the length of {sequence}, got {length!r}")
        self._ledger.truncate(sequence, length)
        self._tables.upload()

    def free(self, sequence: Sequence) -> None:
        """End a sequence. Its blocks go back; those that can be found again stay as long as there is room."""
        self._own(sequence)
        self._ledger.end(sequence)
        self._tables.upload()

    def _new_slots(self, sequence: Sequence, count: int) -> list[int]:
        return self._paging.slots(sequence.blocks, sequence.length - count, sequence.length)

    def _check_prompt(self, prompt: abc.Sequence[int] | int, cache_key: str) -> tuple[int, array[int], bytes]:
        """The length of a prompt, its ids, and where their chain begins."""
        count, ids = check.prompt_ids(prompt)
        check.check_length("prompt", count, self._max_length)
        if not isinstance(cache_key, str):
            raise ValueError(f"cache_key must be a string, got {cache_key!r}")
        return count, ids, root_digest(cache_key)

    def _check_append(
        self, sequences: abc.Sequence[Sequence], tokens: int | abc.Sequence[abc.Sequence[int]]
    ) -> tuple[tuple[Sequence, ...], int, list[array[int]] | None]:
        """The sequences, how many tokens each gets, and which, if that was said."""
        sequences = check.each_once(sequences, self._own)
        count, given = check.new_ids(tokens, len(sequences))
        longest = max(sequences, key=lambda sequence: sequence.length)
        check.check_length(longest, longest.length + count, self._max_length)
        if given is not None:
            for sequence, ids in zip(sequences, given, strict=True):
                check.check_prompt_kept(sequence, ids)
        return sequences, count, given

    def _check_missing(self, new: NewTokens, layer: int | None) -> None:
        """Refuse what is not new tokens of this cache, and a layer of them that is written."""
        if layer is not None:
            check.check_layer(layer, self._layers)
        if not isinstance(new, NewTokens) or new.owner is not self:
            raise ValueError(f"new must be what append of this cache returned, got {new!r}")
        if layer is not None and layer not in new.missing:
            raise ValueError(f"layer {layer} of these tokens is written already; missing are {sorted(new.missing)}")

    def _own(self, sequence: Sequence) -> None:
        if not isinstance(sequence, Sequence):
            raise ValueError(f"sequence must be what allocate or fork returned, got {type(sequence).__name__}")
        if sequence.owner is not self:
            raise ValueError(f"{sequence} {'was freed' if sequence.owner is None else 'belongs to another cache'}")


@lru_cache
def _no_slots(sequences: int, tokens: int) -> Tensor:
    """The slots of a cache on the meta device: only their shape means something, so they are made once for each."""
    return torch.empty(sequences, tokens, dtype=torch.int64, device="meta")
