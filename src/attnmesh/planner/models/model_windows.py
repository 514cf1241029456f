"""Which layers of a model see only the last keys: families say it in different ways."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_KINDS = {"full_attention": False, "sliding_attention": True}  # whether a kind of layer has a window
_PATTERN = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2}  # every n-th layer sees all, where none is named


def windows(fields: Mapping[str, object], layers: int, path: Path) -> tuple[int | None, ...]:
    """The window of every layer of a config; empty if none has one. A window counts the query's own position."""
    if fields.get("attention_chunk_size") is not None:
        raise ValueError(f"{path} has attention_chunk_size: attention in chunks is not planned for")
    slides = _sliding(fields, layers, path)
    if not any(slides):
        return ()
    window = fields.get("sliding_window")
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(f"sliding_window in {path} must be a positive integer, got {window!r}")
    return tuple(window if slide else None for slide in slides)


def _sliding(fields: Mapping[str, object], layers: int, path: Path) -> list[bool]:
    kinds = fields.get("layer_types")
    if kinds is not None:
        return _by_kind(kinds, layers, path)
    if fields.get("sliding_window") is None or fields.get("use_sliding_window") is False:
        return []
    if fields.get("use_sliding_window"):  # Qwen: the first layers see all
        first = fields.get("max_window_layers", 0)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ValueError(f"max_window_layers in {path} must be an integer of at least 0, got {first!r}")
        return [layer >= first for layer in range(layers)]
    pattern = fields.get("sliding_window_pattern") or _PATTERN.get(str(fields.get("model_type")))
    if pattern is None:  # Mistral: all layers alike
        return [True] * layers
    if not isinstance(pattern, int) or pattern < 1:
        raise ValueError(f"sliding_window_pattern in {path} must be a positive integer, got {pattern!r}")
    return [(layer + 1) % pattern != 0 for layer in range(layers)]


def _by_kind(kinds: object, layers: int, path: Path) -> list[bool]:
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"layer_types in {path} must list one kind for each of {layers} layers, got {kinds!r}")
    strange = sorted({str(kind) for kind in kinds} - set(_KINDS))
    if strange:
        raise ValueError(f"layer_types in {path} must be {' or '.join(_KINDS)}, got {', '.join(strange)}")
    return [_KINDS[str(kind)] for kind in kinds]
