"""The calls of attention that a program makes, by which kernels are compiled: those of the library itself, on a GPU.

What a kernel is compiled for is decided in the library, by shapes, strides, lengths and masks. So a call here has the
shapes of the program's own: as many tokens, in the memory order that projections leave, from a cache with its blocks.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnmesh.comm.base import Comm
from attnmesh.comm.virtual import run_virtual
from attnmesh.core.masks import Causal, Mask, SlidingWindow
from attnmesh.kv_cache.cache import BlockCache
from attnmesh.kv_cache.pools import CacheSpec
from attnmesh.ops.decode.api import paged_decode_attention
from attnmesh.ops.dense.api import attention
from attnmesh.ops.paged import paged_prefill_attention
from attnmesh.ops.storage import PLAIN
from attnmesh.parallel.context import ContextParallel
from attnmesh.planner.models import ModelConfig
from attnmesh.utils.sizes import MAX_BATCH, MAX_HEAD_DIM, MAX_HEADS, MAX_LENGTH, MAX_RANKS
from attnmesh.utils.validation import check_count, check_number


class Step(enum.StrEnum):
    """What a program does."""

    TRAIN = "train"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Layer:
    """The attention of one kind of layer: heads, widths, and what its scores depend on.

    `latent` is the width of the cached vectors, of which the first `latent_value` are the values; None without.
    """

    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str = "bf16"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    latent: int | None = None
    latent_value: int | None = None

    def __post_init__(self) -> None:
        for name, most in (
            ("q_heads", MAX_HEADS), ("kv_heads", MAX_HEADS), ("key_dim", MAX_HEAD_DIM), ("value_dim", MAX_HEAD_DIM),
        ):  # fmt: skip
            check_count(name, getattr(self, name), least=1, most=most)
        if self.q_heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide {self.q_heads} query heads, got {self.kv_heads}")
        if self.window is not None:
            check_count("window", self.window, least=1)
        if self.softcap is not None:
            check_number("softcap", self.softcap, above=0)

    def __str__(self) -> str:
        width = f"{self.key_dim}" if self.key_dim == self.value_dim else f"{self.key_dim}/{self.value_dim}"
        parts = [f"{self.q_heads}/{self.kv_heads} heads of {width}, {self.dtype}"]
        if self.window is not None:
            parts.append(f"window {self.window}")
        if self.softcap is not None:
            parts.append(f"softcap {self.softcap:g}")
        parts += [name for name, given in (("sinks", self.sinks), ("ALiBi", self.alibi)) if given]
        return ", ".join(parts)

    @property
    def mask(self) -> Mask:
        """The mask of a causal language model."""
        return Causal() if self.window is None else Causal() & SlidingWindow(self.window - 1)


def layers_of(model: ModelConfig, dtype: str) -> list[Layer]:
    """The kinds of layers with attention of a model."""
    latent = model.latent
    shared: dict[str, Any] = {"dtype": dtype, "softcap": model.softcap, "sinks": model.sinks}
    if latent is None:
        heads = (model.q_heads, model.kv_heads, model.head_dim, model.head_dim)
    else:
        heads = (model.q_heads, model.q_heads, latent.nope + latent.rope, latent.value)
        shared |= {"latent": latent.cached, "latent_value": latent.kv_rank}
    return [Layer(*heads, window=window, **shared) for window in model.window_layers]


@dataclass(frozen=True)
class Call:
    """A step of one kind of layer, with `batch` sequences of `length` tokens.

    `ranks` are the ranks of context parallelism (train and prefill). The KV cache has blocks of `block_size` tokens in
    `storage`, by default the dtype.
    """

    step: Step
    layer: Layer
    length: int
    batch: int = 1
    ranks: int = 1
    block_size: int = 32
    storage: str | None = None

    def __post_init__(self) -> None:
        check_count("length", self.length, least=2, most=MAX_LENGTH)
        check_count("batch", self.batch, least=1, most=MAX_BATCH)
        check_count("ranks", self.ranks, least=1, most=MAX_RANKS)
        if self.step is not Step.TRAIN:
            self._spec()  # raises for what a cache cannot be

    def __str__(self) -> str:
        tokens = f"{self.batch} x {self.length:,} tokens" if self.batch > 1 else f"{self.length:,} tokens"
        over = f", {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.step}, {self.layer}, {tokens}{over}"

    def run(self, device: torch.device) -> None:
        """Make the call, forward and, to train, backward."""
        steps: dict[Step, Callable[[torch.device], None]] = {
            Step.TRAIN: self._train,
            Step.PREFILL: self._prefill,
            Step.DECODE: self._decode,
        }
        steps[self.step](device)

    def _train(self, device: torch.device) -> None:
        self._attend(device, backward=True)

    def _prefill(self, device: torch.device) -> None:
        """A prompt that is new, and one whose first half is in the cache."""
        layer, terms = self.layer, self._terms(device)
        with torch.no_grad():
            self._attend(device, backward=False)
            cache, sequences = self._cache(device)
            known = self.length // 2
            self._write(cache, sequences, known, device)
            self._write(cache, sequences, self.length - known, device)
            q = self._new(layer.q_heads, layer.latent or layer.key_dim, device, self.length - known)
            paged_prefill_attention(
                q, cache.keys(0), cache.values(0), cache.block_table, cur_pos=[self.length - 1] * self.batch,
                window=layer.window, scale=self._scale(), **terms,
            )  # fmt: skip

    def _decode(self, device: torch.device) -> None:
        """One new token of every sequence."""
        layer, terms = self.layer, self._terms(device)
        with torch.no_grad():
            cache, sequences = self._cache(device)
            self._write(cache, sequences, self.length - 1, device)
            self._write(cache, sequences, 1, device)
            q = self._new(layer.q_heads, layer.latent or layer.key_dim, device, 1)
            paged_decode_attention(
                q, cache.keys(0), cache.values(0), cache.block_table, cur_pos=cache.cur_pos, window=layer.window,
                scale=self._scale(), **terms,
            )  # fmt: skip

    def _attend(self, device: torch.device, *, backward: bool) -> None:
        """Self-attention of new tokens, on every rank."""
        if self.ranks == 1:
            self._attend_with(attention, self.length, device, backward)
            return

        def rank(comm: Comm) -> None:
            cp = ContextParallel(comm)
            tokens = len(cp.positions(self.length))
            self._attend_with(partial(cp.attention, length=self.length), tokens, device, backward)

        run_virtual(self.ranks, rank)

    def _attend_with(
        self, function: Callable[..., Tensor], tokens: int, device: torch.device, backward: bool
    ) -> None:  # fmt: skip
        layer, terms = self.layer, self._terms(device)
        if backward and layer.sinks:
            terms["sinks"].requires_grad_()
        leaves = [
            self._new(heads, width, device, tokens).requires_grad_(backward)
            for heads, width in (
                (layer.q_heads, layer.key_dim), (layer.kv_heads, layer.key_dim), (layer.kv_heads, layer.value_dim),
            )
        ]  # fmt: skip
        out = function(*leaves, mask=layer.mask, **terms)
        if backward:
            out.backward(self._new(layer.q_heads, layer.value_dim, device, tokens))

    def _new(self, heads: int, width: int, device: torch.device, tokens: int) -> Tensor:
        """Zeros [batch, heads, tokens, width] in the order of a projection's output."""
        return torch.zeros(self.batch, tokens, heads, width, device=device, dtype=PLAIN[self.layer.dtype]).transpose(
            1, 2
        )

    def _terms(self, device: torch.device) -> dict[str, Any]:
        layer, terms = self.layer, dict[str, Any]()
        if layer.softcap is not None:
            terms["softcap"] = layer.softcap
        if layer.sinks:
            terms["sinks"] = torch.zeros(layer.q_heads, device=device, dtype=PLAIN[layer.dtype])
        if layer.alibi:
            terms["alibi_slopes"] = torch.ones(layer.q_heads, device=device, dtype=torch.float32)
        return terms

    def _scale(self) -> float | None:
        """Of queries that were multiplied into the width of latents."""
        return None if self.layer.latent is None else self.layer.key_dim**-0.5

    def _spec(self) -> CacheSpec:
        layer = self.layer
        storage = self.storage or layer.dtype
        if layer.latent is None:
            widths: dict[str, Any] = {"head_dim": layer.key_dim, "value_dim": layer.value_dim}
        else:
            widths = {"head_dim": layer.latent, "value_dim": layer.latent_value, "latent": True}
        return CacheSpec(layers=1, kv_heads=1 if layer.latent else layer.kv_heads, storage=storage, **widths)

    def _cache(self, device: torch.device) -> tuple[BlockCache, Sequence[Any]]:
        blocks = self.batch * -(-self.length // self.block_size)
        cache = BlockCache(
            self._spec(), num_blocks=blocks, block_size=self.block_size, max_sequences=self.batch,
            max_length=self.length, device=device,
        )  # fmt: skip
        return cache, [cache.allocate(self.length) for _ in range(self.batch)]

    def _write(self, cache: BlockCache, sequences: Sequence[Any], tokens: int, device: torch.device) -> None:
        layer = self.layer
        new = cache.append(sequences, tokens)
        if layer.latent is not None:
            cache.write(0, new, self._new(1, layer.latent, device, tokens))
            return
        k, v = (self._new(layer.kv_heads, width, device, tokens) for width in (layer.key_dim, layer.value_dim))
        cache.write(0, new, k, v)
