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
    are for fp8: values are saturated at 448 times the scale. `value_dim` is `head_dim` by default.

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
    kv_heads: int
    head_dim: int
    value_dim: int | None = None
    storage: str = "bf16"
    k_scale: float | Tensor | None = None
    v_scale: float | Tensor | None = None
    latent: bool = False
    index_dim: int | None = None
    windows: Sequence[int | None] = ()

    def __post_init__(self) -> None:
        check_positive(layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim)
        check_bool(latent=self.latent)
        check_choice("storage", self.storage, (*PLAIN, "fp8_ds_mla") if self.latent else STORAGES)
        # The width of the values in a latent, where the storage type determines it.
        latent_dim = self.head_dim // LATENT_GROUP * LATENT_GROUP if self.storage == "fp8_ds_mla" else 0
        value_dim = (latent_dim or self.head_dim) if self.value_dim is None else self.value_dim
        check_positive(value_dim=value_dim)
        object.__setattr__(self, "value_dim", value_dim)
        self._check_storage(value_dim, latent_dim or value_dim)
        cpu = torch.device("cpu")
        for name in ("k_scale", "v_scale"):
            fp8_scale(name, getattr(self, name), self.storage, self.kv_heads, cpu)  # raises
        self._check_windows()

    def _check_storage(self, value_dim: int, latent_dim: int) -> None:
        """Raise ValueError unless keys, values and index keys of these widths can be stored."""
        storage, head_dim, index_dim = self.storage, self.head_dim, self.index_dim
        check_storage(storage, head_dim)
        if not self.latent:
            check_storage(storage, value_dim)
        elif self.kv_heads != 1 or value_dim > head_dim:
            raise ValueError(
                f"a latent cache has one kv head, whose values are among its {head_dim} features, got "
                f"kv_heads={self.kv_heads} and value_dim={value_dim}"
            )
        elif value_dim != latent_dim:
            raise ValueError(
                f"value_dim must be {latent_dim} for storage {storage!r} and head_dim={head_dim}, got {value_dim}"
            )
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

    def of_heads(self, heads: range) -> CacheSpec:
        """What a rank with some of the kv heads stores. A single scale applies to all heads."""
        k_scale, v_scale = (
            scale[heads.start : heads.stop] if isinstance(scale, Tensor) and scale.dim() else scale
            for scale in (self.k_scale, self.v_scale)
        )
        return replace(self, kv_heads=len(heads), k_scale=k_scale, v_scale=v_scale)
