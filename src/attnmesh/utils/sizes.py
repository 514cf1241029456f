"""Limits on the sizes of models and plans, which decide how much memory and work they take, and divisors of counts.

The configuration of a model comes from elsewhere. Its numbers are checked before anything is built from them, by the
names that Transformers (`num_hidden_layers`) and GGUF files (`llama.block_count`) give them. A count of a plan
that exceeds its limit is refused before any work. Within the limits, sums of bytes and operations stay below the
largest int64.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isqrt, prod
from typing import Any

from attnmesh.utils.validation import check_count, check_positive, shown

MAX_LAYERS = 4096
MAX_EXPERTS = 2**20  # of all layers together

_LARGEST = 2**63 - 1  # of integers without a limit of their own, such as a seed
_EXPERTS = re.compile(r".*experts|expert_count")
_MOST = (
    (re.compile(r".*(layers?|layers_per_.*|blocks|cycles|num_inputs)|block_count|attention_types"), MAX_LAYERS),
    (re.compile(r".*heads?|head_count(_kv)?"), 2**16),
    (_EXPERTS, 2**16),
    (re.compile(r".*labels"), 2**16),
    (re.compile(r".*(size|dim|rank|embd|inner|d_model|d_ff)|(embedding|feed_forward|key|value)_length"), 2**24),
    (re.compile(r".*(positions?|position_embeddings|window)|context_length"), 2**31),
)
_LAYERS = re.compile(r"num_hidden_layers|n_layers?|num_layers|block_count")
_POSITIVE = re.compile(
    rf"{_LAYERS.pattern}|num_attention_heads|num_key_value_heads|n_heads?|num_heads|head_count|head_dim"
    r"|vocab_size|hidden_size|intermediate_size|n_embd|d_model|embedding_length"
    r"|max_position_embeddings|n_positions|context_length"
)


def check_model_sizes(fields: Mapping[str, object], source: object) -> None:
    """Raise ValueError for a size that is not a positive integer or exceeds its limit; `source` is named in it.

    Fields of nested configurations are checked too. A list has one size for each layer.
    """
    for name, value in fields.items():
        if isinstance(value, Mapping):
            check_model_sizes(value, source)
        elif isinstance(value, list):
            _check_list(name, value, source)
        elif value is not None:
            _check_size(name, value, source, least=1)
    layers, experts = _largest(fields, _LAYERS), _largest(fields, _EXPERTS)
    if layers * experts > MAX_EXPERTS:  # each may be a module of its own
        total = f"at most {MAX_EXPERTS:,} experts in all layers together"
        raise ValueError(f"{source} must have {total}, got {layers:,} x {experts:,}")


def _check_list(name: str, values: list[object], source: object) -> None:
    if _is(_POSITIVE, name) and len(values) > MAX_LAYERS:
        raise ValueError(f"{name} in {source} must have at most {MAX_LAYERS:,} entries, got {len(values):,}")
    for value in values:
        if isinstance(value, Mapping):
            check_model_sizes(value, source)
        elif isinstance(value, list):
            _check_list(name, value, source)
        else:
            _check_size(name, value, source, least=0)  # a layer without attention has no heads


def _check_size(name: str, value: Any, source: object, *, least: int) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if _is(_POSITIVE, name) and not (whole and least <= value):
        raise ValueError(f"{name} in {source} must be a positive integer, got {shown(value)}")
    most = next((limit for pattern, limit in _MOST if _is(pattern, name)), _LARGEST)
    if whole and value > most:
        raise ValueError(f"{name} in {source} must be at most {most:,}, got {value:,}")


def _is(pattern: re.Pattern[str], name: str) -> bool:
    return pattern.fullmatch(name.rpartition(".")[2]) is not None


def _largest(fields: Mapping[str, Any], pattern: re.Pattern[str]) -> int:
    sizes = (value for name, value in fields.items() if _is(pattern, name) and isinstance(value, int))
    return max(sizes, default=0)


MAX_RANKS = 1 << 14
MAX_LENGTH = 1 << 27
MAX_BATCH = 1 << 16
MAX_HEADS = 1 << 16
MAX_HEAD_DIM = 1 << 16
MAX_HIDDEN = 1 << 24
MAX_TOKENS = 1 << 12
"""New tokens per sequence in a decode step."""

_MAX_ELEMENTS = 1 << 56
_PER_ELEMENT = ("context", "length", "batch", "tokens", "q_heads", "head_dim")
_MOST_OF_PLANS = {
    "ranks": MAX_RANKS, "devices": MAX_RANKS, "world": MAX_RANKS, "ranks_per_node": MAX_RANKS, "rails": MAX_RANKS,
    "context": MAX_LENGTH, "length": MAX_LENGTH, "batch": MAX_BATCH, "tokens": MAX_TOKENS,
    "q_heads": MAX_HEADS, "kv_heads": MAX_HEADS, "head_dim": MAX_HEAD_DIM, "hidden": MAX_HIDDEN, "layers": MAX_LAYERS,
}  # fmt: skip


def check_sizes(**counts: object) -> None:
    """Raise ValueError for a count that is not a positive integer or exceeds its limit, and for too many elements."""
    check_positive(**counts)
    checked = {name: check_count(name, n, most=_MOST_OF_PLANS[name]) for name, n in counts.items()}
    elements = {name: n for name, n in checked.items() if name in _PER_ELEMENT}
    if prod(elements.values()) > _MAX_ELEMENTS:
        raise ValueError(f"{' x '.join(elements)} must be at most 2**56, got {' x '.join(map(str, elements.values()))}")


def divisors(n: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
