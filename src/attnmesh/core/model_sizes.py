"""Limits on the sizes that a model's configuration declares: they decide how much memory and work a model takes.

A configuration comes from elsewhere. Its numbers are checked before anything is built from them, by the names that
Transformers (`num_hidden_layers`) and GGUF files (`llama.block_count`) give them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attnmesh.utils.validation import shown

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
