"""Handles that a cache returns (`Sequence`, `NewTokens`) and the validation of its arguments.

Validation raises ValueError with the argument's name and value, before anything changes.
"""

from __future__ import annotations

from array import array
from collections import abc
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from attnmesh.kv_cache.pools import DTYPES
from attnmesh.utils.validation import check_count, check_positive, check_tensor, shown

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class Sequence:
    """A sequence in a `BlockCache` or a `ShardedCache`. All fields change through the cache only.

    `row` is its row in the batch, `length` its number of tokens over all ranks, and `cached` the number of prompt
    tokens that were reused when it was allocated.
    """

    row: int
    length: int
    cached: int
    owner: object | None  # stands for the cache; None once freed
    blocks: list[int]  # may reach past the length: blocks reserved for the prompt
    ids: array[int]  # known token ids: longer than `length` while a prompt is incomplete, shorter after unknown tokens
    root: bytes  # the parent hash of the first block
    hashes: list[bytes]  # prefix hashes of the full blocks that were registered or reused
    pending: dict[NewTokens, int]  # tokens not yet written in every layer, and their first position, in order
    window_blocks: list[int]  # of layers with a window: -1 where it does not reach
    kvdp_rank: int = 0  # that stores it
    window_begin: int = 0  # the first of `window_blocks` that may not be -1
    state: int = -1  # the kept state that it continued from when it was allocated
    shared: int = 0  # tokens of the prompt that were in the cache then, with or without a kept state after them
    answer_state: bytes = b""  # the prefix hash of the state that was kept last in its answer

    @property
    def written(self) -> int:
        """The number of leading tokens that are written in every layer."""
        return next(iter(self.pending.values()), self.length)

    @property
    def freed(self) -> bool:
        """Whether it was freed."""
        return self.owner is None

    def __repr__(self) -> str:
        state = ", freed" if self.freed else ""
        return f"Sequence(row={self.row}, length={self.length}, cached={self.cached}{state})"


@dataclass(eq=False, repr=False)
class NewTokens:
    """Slots for T new tokens of n sequences: `slots` int64 [n, T] on the device, block * block_size + offset.

    A slot is -1, and skipped by `write`, where another rank stores the token, or where the token was truncated or freed
    before it was written. `window_slots` are the slots of layers that keep a window: below 0 also before it.
    """

    slots: Tensor
    sequences: tuple[Sequence, ...]
    unwritten_layers: set[int]
    owner: object  # stands for the cache
    window_slots: Tensor

    def drop(self, sequence: Sequence, begin: int) -> None:
        """Do not write a sequence's new tokens from index `begin` on: their slots may be in use elsewhere by now."""
        if not self.slots.is_meta:
            for slots in (self.slots, self.window_slots):
                slots[self.sequences.index(sequence), begin:] = -1

    def __repr__(self) -> str:
        return f"NewTokens({list(self.slots.shape)} slots, unwritten layers {sorted(self.unwritten_layers)})"


def token_ids(name: str, ids: object) -> array[int]:
    """Token ids as an array of 64-bit integers."""
    if not isinstance(ids, list | abc.Iterable) or isinstance(ids, str | bytes | set | dict):
        raise ValueError(f"{name} must be a list of integers, got {shown(ids)}")
    try:
        items = list(ids)
        if bool not in set(map(type, items)):
            return array("q", items)
    except (TypeError, OverflowError, RuntimeError):  # not integers, or a tensor without data
        pass
    raise ValueError(f"{name} must be 64-bit integers, got {shown(ids)}")


def prompt_ids(prompt: object) -> tuple[int, array[int]]:
    """The length of a prompt and its token ids, which are empty if only the length is given."""
    if not isinstance(prompt, int):
        ids = token_ids("prompt", prompt)
        return len(ids), ids
    return check_count("prompt, as a number of tokens,", prompt), array("q")


def new_ids(tokens: object, sequences: int) -> tuple[int, list[array[int]] | None]:
    """The number of new tokens per sequence, and their ids unless only the number is given."""
    if isinstance(tokens, int):
        check_positive(tokens=tokens)
        return tokens, None
    if not isinstance(tokens, abc.Sequence) or len(tokens) != sequences:
        raise ValueError(
            f"tokens must be a number, or a list of token ids for each of {sequences} sequences, got {shown(tokens)}"
        )
    each = [token_ids(f"tokens[{i}]", ids) for i, ids in enumerate(tokens)]
    lengths = [len(ids) for ids in each]
    if len(set(lengths)) > 1 or not lengths[0]:
        raise ValueError(
            f"tokens must have the same number of ids for every sequence, at least 1, got {lengths}: append sequences "
            "with other numbers of tokens by calls of their own"
        )
    return lengths[0], each


def check_distinct(sequences: object, check_one: abc.Callable[[T, int], None]) -> tuple[T, ...]:
    """At least one sequence, all different, each of which passes `check_one`."""
    if not isinstance(sequences, abc.Sequence) or not sequences:
        raise ValueError(f"sequences must be a list of at least one sequence, got {shown(sequences)}")
    for at, sequence in enumerate(sequences):
        check_one(sequence, at)
    if len(set(sequences)) < len(sequences):
        raise ValueError(f"sequences must be different ones, got {shown(sequences)}")
    return tuple(sequences)


def check_live(sequence: object, has: abc.Callable[[Sequence], bool], at: int | None) -> None:
    """Raise ValueError unless `sequence`, or `sequences[at]`, is a sequence that a cache `has`."""
    if not isinstance(sequence, Sequence):
        name = "sequence" if at is None else f"sequences[{at}]"
        raise ValueError(f"{name} must be what allocate or fork returned, got {shown(sequence)}")
    if not has(sequence):
        of = "was freed" if sequence.freed else "belongs to another cache, or was ended by clear()"
        raise ValueError(f"{sequence} {of}")


def check_length(name: object, length: int, max_length: int) -> None:
    """Raise ValueError for a length that does not fit into a row of the block table."""
    if length > max_length:
        raise ValueError(f"{name} would have {length} tokens, max_length is {max_length}")


def check_prompt_ids(sequence: Sequence, given: array[int]) -> None:
    """Raise ValueError if new ids differ from ids of the prompt that are still to be appended."""
    if len(sequence.ids) <= sequence.length:
        return
    prompt = sequence.ids[sequence.length : sequence.length + len(given)]
    for at, (expected, got) in enumerate(zip(prompt, given, strict=False), sequence.length):
        if expected != got:
            raise ValueError(f"token {at} of {sequence} is {got}, but the prompt it was allocated with has {expected}")


def check_given(name: str, x: object, stored: bool) -> None:
    """Raise ValueError unless a tensor of new tokens is given exactly if it is stored."""
    if (x is not None) != stored:
        wanted = "a tensor" if stored else "None, for this cache does not store it"
        raise ValueError(f"{name} must be {wanted}, got {shown(x)}")


def check_new_kv(slots: Tensor, kv_heads: int, **given: tuple[Tensor | None, int]) -> None:
    """Raise ValueError unless each of the given tensors is [n, kv_heads, T, D] for slots [n, T], or None."""
    n, tokens = slots.shape
    for name, (x, dim) in given.items():
        if x is None:
            continue
        check_tensor(name, x)
        if x.shape != (n, kv_heads, tokens, dim):
            raise ValueError(f"{name} must be [{n}, {kv_heads}, {tokens}, {dim}], got {list(x.shape)}")
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} must be one of {', '.join(map(str, DTYPES))}, got {x.dtype}")
        if x.device != slots.device:
            raise ValueError(f"{name} must be on the cache's device, {slots.device}, got {x.device}")
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(f"{name} requires a gradient, and the cache has no backward: use torch.no_grad()")
