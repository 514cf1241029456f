"""`CacheSpec`: what a KV cache stores per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnmesh.kv_cache.pools import fp8_scale
from attnmesh.ops.storage import LATENT_GROUP, PLAIN, STORAGES, check_storage
from attnmesh.utils.validation import check_bool, check_choice, check_count, check_positive, shown


@dataclass(frozen=True, eq=False, kw_only=True)
class CacheSpec:
    """What a KV cache stores per token: the layers of a model, the widths of their kv heads, and the storage type.

    `storage` is bf16, fp16, fp32, fp8, int8 or bfp8. `k_scale` and `v_scale` (a number, [] or [kv_heads], default 1)
    are for fp8: values are saturated at 448 times the scale. `value_dim` is `head_dim` by default. `kv_heads`,
    `head_dim` and `value_dim` are of every layer, or lists with a number for each layer.

    With `latent` (multi-head latent attention) one vector per token is stored: there is one kv head, and the values are
    the first `value_dim` features of the keys. `storage` is then bf16, fp16, fp32 or fp8_ds_mla, the 656 bytes per
    token of DeepSeek-V3.2 for head_dim=576. `index_dim` adds an indexer's keys of that width in the same blocks: in
    `storage`, or for fp8_ds_mla in fp8_token.

    `windows` has the sliding window of each layer, the token itself included, or None where a layer attends to all
    tokens. Layers with a window have blocks of their own.

    Examples:
        >>> am.CacheSpec(layers=32, kv_heads=8, head_dim=128, storage="int8").value_dim
        128
        >>> am.CacheSpec(layers=61, kv_heads=1, head_dim=576, latent=True, storage="fp8_ds_mla").value_dim
        512
    """

    layers: int
    kv_heads: int | Sequence[int]
    head_dim: int | Sequence[int]
    value_dim: int | Sequence[int] | None = None
    storage: str = "bf16"
    k_scale: float | Tensor | None = None
    v_scale: float | Tensor | None = None
    latent: bool = False
    index_dim: int | None = None
    windows: Sequence[int | None] = ()

    def __post_init__(self) -> None:
        check_positive(layers=self.layers)
        check_bool(latent=self.latent)
        check_choice("storage", self.storage, (*PLAIN, "fp8_ds_mla") if self.latent else STORAGES)
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self._latent_dim(self.head_dim) or self.head_dim)
        for name in ("kv_heads", "head_dim", "value_dim"):
            numbers = _by_layer(name, getattr(self, name), self.layers)
            object.__setattr__(self, name, numbers[0] if len(set(numbers)) == 1 else numbers)
        for shape in dict.fromkeys(self.shapes):
            self._check_storage(*shape)
        self._check_index()
        cpu, heads = torch.device("cpu"), self.kv_heads if isinstance(self.kv_heads, int) else None
        for name in ("k_scale", "v_scale"):
            fp8_scale(name, getattr(self, name), self.storage, heads, cpu)  # raises
        self._check_windows()

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """The kv heads, and the widths of keys and values, of each layer."""
        given = (self.kv_heads, self.head_dim, self.value_dim)
        by_layer = [[each] * self.layers if isinstance(each, int) else list(each or ()) for each in given]
        return list(zip(*by_layer, strict=True))

    def _latent_dim(self, head_dim: object) -> int | None:
        """The width of the values in a latent of `head_dim` features, where the storage type determines it."""
        is_known = self.storage == "fp8_ds_mla" and isinstance(head_dim, int)
        return head_dim // LATENT_GROUP * LATENT_GROUP if is_known else None  # type: ignore[operator]

    def _check_storage(self, kv_heads: int, head_dim: int, value_dim: int) -> None:
        """Raise ValueError unless keys and values of these widths can be stored."""
        storage, latent_dim = self.storage, self._latent_dim(head_dim)
        check_storage(storage, head_dim)
        if not self.latent:
            check_storage(storage, value_dim)
        elif kv_heads != 1 or value_dim > head_dim:
            raise ValueError(
                f"a latent cache has one kv head, whose values are among its {head_dim} features, got "
                f"kv_heads={kv_heads} and value_dim={value_dim}"
            )
        elif value_dim != (latent_dim or value_dim):
            raise ValueError(
                f"value_dim must be {latent_dim} for storage {storage!r} and head_dim={head_dim}, got {value_dim}"
            )

    def _check_index(self) -> None:
        storage, index_dim = self.storage, self.index_dim
        if index_dim is not None:
            check_positive(index_dim=index_dim)
            if not self.latent:
                raise ValueError(f"index_dim must be None unless latent=True, got {index_dim}")
            if storage not in PLAIN and index_dim % 4:
                raise ValueError(f"index_dim must be a multiple of 4 for storage {storage!r}, got {index_dim}")

    def _check_windows(self) -> None:
        windows = self.windows
        if not isinstance(windows, list | tuple) or len(windows) not in (0, self.layers):
            raise ValueError(
                f"windows must have a window or None for each of {self.layers} layers, got {shown(windows)}"
            )
        for i, each in enumerate(windows):
            if each is not None:
                check_count(f"windows[{i}]", each, least=1)
        if self.index_dim is not None and self.window is not None:
            raise ValueError(f"windows must be None in every layer of a cache with index_dim, got {shown(windows)}")

    @property
    def window(self) -> int | None:
        """The widest window; None if no layer has one."""
        return max((each for each in self.windows if each is not None), default=None)

    def of_heads(self, heads: Sequence[range]) -> CacheSpec:
        """What a rank stores that has some of the kv heads of each layer. A single scale applies to all heads."""
        first = heads[0]
        k_scale, v_scale = (
            scale[first.start : first.stop] if isinstance(scale, Tensor) and scale.dim() else scale
            for scale in (self.k_scale, self.v_scale)
        )
        return replace(self, kv_heads=[*map(len, heads)], k_scale=k_scale, v_scale=v_scale)


def _by_layer(name: str, given: object, layers: int) -> tuple[int, ...]:
    """A positive number for each layer, from one for all of them or a list with one for each."""
    if not isinstance(given, list | tuple):
        check_positive(**{name: given})
        return (given,) * layers  # type: ignore[return-value]
    if len(given) != layers:
        raise ValueError(f"{name} must be a number, or have one for each of {layers} layers, got {shown(given)}")
    return tuple(check_count(f"{name}[{i}]", each, least=1) for i, each in enumerate(given))
