"""What a Transformers `config.json` says about a model's attention. Read as plain JSON: Transformers is not needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a model that its attention depends on."""

    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    layers: int = 1


def read_config(path: Path) -> ModelConfig:
    """The sizes in a config file; ValueError names what is missing."""
    try:
        fields = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must hold one JSON object, got {type(fields).__name__}")
    if isinstance(fields.get("text_config"), dict):  # of a model that also sees or hears
        fields = fields["text_config"]
    if fields.get("kv_lora_rank") is not None:
        raise ValueError(f"{path} has kv_lora_rank: latent attention caches no heads that could be divided")
    q_heads = _size(fields, "num_attention_heads", path)
    hidden = _size(fields, "hidden_size", path)
    return ModelConfig(
        q_heads=q_heads,
        kv_heads=q_heads if fields.get("num_key_value_heads") is None else _size(fields, "num_key_value_heads", path),
        head_dim=_head_dim(fields, q_heads, hidden, path),
        hidden=hidden,
        layers=_size(fields, "num_hidden_layers", path),
    )


def _head_dim(fields: Mapping[str, object], q_heads: int, hidden: int, path: Path) -> int:
    if fields.get("head_dim") is not None:
        return _size(fields, "head_dim", path)
    if hidden % q_heads:
        raise ValueError(f"{path} has no head_dim, and hidden_size={hidden} is no multiple of {q_heads} heads")
    return hidden // q_heads


def _size(fields: Mapping[str, object], name: str, path: Path) -> int:
    n = fields.get(name)
    if n is None:
        raise ValueError(f"{path} has no {name}")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"{name} in {path} must be a positive integer, got {n!r}")
    return n
