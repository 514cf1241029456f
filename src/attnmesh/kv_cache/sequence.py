"""What the cache hands out: a handle for a sequence, and the places of its new tokens."""

from __future__ import annotations

from array import array
from collections import abc
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from attnmesh.kv_cache.pools import DTYPES


@dataclass(eq=False, repr=False)
class Sequence:
    """A sequence in a cache. `row` is its row in the cache's tables, `length` its tokens, `cached` how many of them
    were there when it began. The rest is the cache's own; all of it changes through the cache only.
    """

    row: int
    length: int
    cached: int
    owner: object | None  # its cache; None once freed
    blocks: list[int]  # may reach past the length: what a prompt has reserved
    ids: array[int]  # known tokens: past the length while a prompt is outstanding, short of it after an anonymous token
    root: bytes
    digests: list[bytes]  # of the full blocks that were registered or found
    pending: dict[NewTokens, int]  # tokens not yet written in every layer, and where they begin, in their order

    @property
    def written(self) -> int:
        """How many tokens, from the first on, are in the cache with all their layers."""
        return next(iter(self.pending.values()), self.length)

    def __repr__(self) -> str:
        state = "" if self.owner is not None else ", freed"
        return f"Sequence(row={self.row}, length={self.length}, cached={self.cached}{state})"


@dataclass(eq=False, repr=False)
class ShardedSequence:
    """A sequence in a cache that is spread over ranks. `row` is its row in the batch; the rest is as of `Sequence`."""

    row: int
    bank: int  # which KVDP rank's sequences it is among
    held: Sequence  # as its bank knows it
    owner: object  # its cache

    @property
    def length(self) -> int:
        """Its tokens, whoever holds them."""
        return self.held.length

    @property
    def cached(self) -> int:
        """How many of them were there when it began."""
        return self.held.cached

    @property
    def freed(self) -> bool:
        """Whether it has ended."""
        return self.held.owner is None

    def __repr__(self) -> str:
        state = ", freed" if self.freed else ""
        return f"ShardedSequence(row={self.row}, length={self.length}, cached={self.cached}{state})"


@dataclass(eq=False, repr=False)
class NewTokens:
    """Slots for T new tokens of n sequences: `slots` int64 [n, T] on the device, block * block_size + offset.

    The slot of a token that another rank of the share holds is -1, which `write` skips. So is that of a token truncated
    or freed before it was written.
    """

    slots: Tensor
    sequences: tuple[Sequence, ...]
    missing: set[int]  # layers not yet written
    owner: object  # their cache

    def skip(self, sequence: Sequence, begin: int) -> None:
        """Give up a sequence's tokens from the `begin`th on: by now their slots may be someone else's."""
        if not self.slots.is_meta:
            self.slots[self.sequences.index(sequence), begin:] = -1

    def __repr__(self) -> str:
        return f"NewTokens({list(self.slots.shape)} slots, missing layers {sorted(self.missing)})"


T = TypeVar("T")


def check_sizes(**sizes: int) -> None:
    """Refuse a size below 1."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a positive integer, got {size!r}")


def check_layer(layer: int, layers: int) -> None:
    """Refuse a layer that is not there."""
    if not isinstance(layer, int) or not 0 <= layer < layers:
        raise ValueError(f"layer must be 0 to {layers - 1}, got {layer!r}")


def token_ids(name: str, ids: object) -> array[int]:
    """Token ids as 64-bit integers."""
    if not isinstance(ids, abc.Iterable) or isinstance(ids, (str, bytes)):
        raise ValueError(f"{name} must be integers, got {type(ids).__name__}")
    try:
        return array("q", list(ids))
    except (TypeError, OverflowError) as wrong:
        raise ValueError(f"{name} must be 64-bit integers: {wrong}") from wrong


def prompt_ids(prompt: object) -> tuple[int, array[int]]:
    """The length of a prompt and its ids; of a mere count no ids are known."""
    if not isinstance(prompt, int):
        ids = token_ids("prompt", prompt)
        return len(ids), ids
    if prompt < 0:
        raise ValueError(f"prompt must be token ids or their number, got {prompt}")
    return prompt, array("q")


def new_ids(tokens: object, sequences: int) -> tuple[int, list[array[int]] | None]:
    """How many tokens each sequence gets, and which, if `tokens` says more than the number."""
    if isinstance(tokens, int):
        check_sizes(tokens=tokens)
        return tokens, None
    if not isinstance(tokens, abc.Sequence) or len(tokens) != sequences:
        said = f"{len(tokens)} lists" if isinstance(tokens, abc.Sequence) else type(tokens).__name__
        raise ValueError(
            f"tokens must be a number, or a list of token ids for each of {sequences} sequences, got {said}"
        )
    each = [token_ids(f"tokens[{i}]", ids) for i, ids in enumerate(tokens)]
    lengths = [len(ids) for ids in each]
    if len(set(lengths)) > 1 or not lengths[0]:
        raise ValueError(f"every sequence must get equally many tokens, at least 1, got {lengths}")
    return lengths[0], each


def each_once(sequences: object, check_one: abc.Callable[[T], None]) -> tuple[T, ...]:
    """Different sequences, at least one, each of which passes a check."""
    if not isinstance(sequences, abc.Sequence) or not sequences:
        raise ValueError(f"sequences must be a list of at least one sequence, got {sequences!r}")
    for sequence in sequences:
        check_one(sequence)
    if len(set(sequences)) < len(sequences):
        raise ValueError(f"sequences must be different ones, got {list(sequences)}")
    return tuple(sequences)


def check_length(what: object, length: int, max_length: int) -> None:
    """Refuse what would not fit into a row of the table."""
    if length > max_length:
        raise ValueError(f"{what} would have {length} tokens, max_length is {max_length}")


def check_prompt_kept(sequence: Sequence, given: array[int]) -> None:
    """Refuse ids that are not those of the prompt, as far as that is outstanding."""
    if len(sequence.ids) <= sequence.length:
        return
    promised = sequence.ids[sequence.length : sequence.length + len(given)]
    for at, (wanted, got) in enumerate(zip(promised, given, strict=False), sequence.length):
        if wanted != got:
            raise ValueError(f"token {at} of {sequence} is {got}, but the prompt it was allocated with has {wanted}")


def check_new(slots: Tensor, k: Tensor, v: Tensor, kv_heads: int, head_dim: int, value_dim: int) -> None:
    """Refuse keys and values that are not [n, kv_heads, T, D] for slots [n, T]."""
    n, tokens = slots.shape
    for name, x, dim in (("k", k, head_dim), ("v", v, value_dim)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.shape != (n, kv_heads, tokens, dim):
            raise ValueError(f"{name} must be [{n}, {kv_heads}, {tokens}, {dim}], got {list(x.shape)}")
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} must be one of {', '.join(map(str, DTYPES))}, got {x.dtype}")
        if x.device != slots.device:
            raise ValueError(f"{name} must be on the cache's device, {slots.device}, got {x.device}")
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(f"the cache has no backward, and {name} requires a gradient: use torch.no_grad()")
