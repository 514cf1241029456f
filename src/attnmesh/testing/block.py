"""Attention blocks with random weights, their outputs in float64, and sequences fed to them step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.kv_cache.sequence import Sequence as CacheSequence
from attnmesh.kv_cache.sharded import ShardedCache
from attnmesh.ops.block.config import AttentionConfig, AttentionWeights
from attnmesh.ops.block.norm_rope import Layout as RopeLayout
from attnmesh.ops.block.norm_rope import Norm, Rope
from attnmesh.ops.decode.call import MAX_DECODE_TOKENS
from attnmesh.ops.storage import PLAIN, dequantize, quantize
from attnmesh.parallel.decode.block import AttentionBlock
from attnmesh.parallel.decode.exchange import Exchange
from attnmesh.plan.decode import DecodeSharding
from attnmesh.testing.decode import poison_cache


def random_block(
    q_heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 8,
    hidden: int = 24,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    alibi: bool = False,
    out: bool = True,
    biases: bool = True,
    norm: bool = False,
    norm_before_rope: bool = False,
    norm_after_rope: bool = False,
    rope: RopeLayout | None = "halves",
    rotary_dim: int | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 7,
    device: torch.device | str = "cpu",
) -> tuple[AttentionConfig, AttentionWeights]:
    """Return a configuration with these stages, and the weights of the whole block."""
    config = AttentionConfig(
        hidden, q_heads, kv_heads, head_dim, window=window, scale=scale, softcap=softcap,
        norm=Norm(1e-2) if norm else None,
        norm_before_rope=Norm(1e-3) if norm_before_rope else None,
        norm_after_rope=Norm(1e-1) if norm_after_rope else None,
        rope=Rope.plain(rotary_dim or head_dim, 100.0, rope) if rope else None,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        return (mean + std * torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")).to(
            device, dtype
        )

    rows = (q_heads + 2 * kv_heads) * head_dim
    weights: dict[str, Any] = {
        "qkv": normal(rows, hidden, std=hidden**-0.5),
        "qkv_bias": normal(rows, std=0.3) if biases else None,
        "out": normal(hidden, q_heads * head_dim, std=(q_heads * head_dim) ** -0.5) if out else None,
        "out_bias": normal(hidden) if out and biases else None,
        "sinks": normal(q_heads, mean=1.0) if sinks else None,
        "norm": normal(hidden, mean=1.0, std=0.3) if norm else None,
    }
    for name, present in (("norm_before_rope", norm_before_rope), ("norm_after_rope", norm_after_rope)):
        for x in "qk":
            weights[f"{x}_{name}"] = normal(head_dim, mean=1.0, std=0.3) if present else None
    weights["alibi_slopes"] = normal(q_heads, std=0.3).abs() if alibi else None
    return config, AttentionWeights(**weights)


def reference_block(
    config: AttentionConfig,
    weights: AttentionWeights,
    x: Tensor,
    *,
    dtype: torch.dtype = torch.float64,
    storage: str | None = None,
) -> Tensor:
    """Return the block's output for whole sequences x [B, L, hidden], computed in `dtype`, all positions at once.

    [B, L, hidden], or the heads [B, L, Hq, D] of a block without an output projection. `storage` rounds keys and
    values as a cache of that storage type does.
    """
    tensors = {field.name: getattr(weights, field.name) for field in fields(weights)}
    w: dict[str, Any] = {name: None if tensor is None else tensor.to(dtype) for name, tensor in tensors.items()}
    x = _rms_norm(x.to(dtype), w["norm"], config.norm)
    projected = x @ w["qkv"].T + (0.0 if w["qkv_bias"] is None else w["qkv_bias"])
    heads = projected.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
    q, k, v = heads.split([config.q_heads, config.kv_heads, config.kv_heads], 1)
    q, k = (
        _rms_norm(
            _rotate(_rms_norm(y, w[f"{name}_norm_before_rope"], config.norm_before_rope), config.rope),
            w[f"{name}_norm_after_rope"],
            config.norm_after_rope,
        )
        for name, y in (("q", q), ("k", k))
    )
    k, v = (_as_stored(y, storage).repeat_interleave(config.q_heads // config.kv_heads, 1) for y in (k, v))
    at = torch.arange(x.shape[1], device=x.device)
    visible = at[:, None] >= at
    if config.window:
        visible &= at[:, None] < at + config.window
    scale = config.head_dim**-0.5 if config.scale is None else config.scale
    scores = q @ k.transpose(2, 3) * scale
    if config.softcap is not None:
        scores = config.softcap * (scores / config.softcap).tanh()
    if w["alibi_slopes"] is not None:
        scores = scores - w["alibi_slopes"][:, None, None] * (at[:, None] - at).abs()
    scores = scores.masked_fill(~visible, -torch.inf)
    if w["sinks"] is not None:
        scores = torch.cat([scores, w["sinks"][:, None, None].expand(*scores.shape[:3], 1)], -1)
    attended: Tensor = (scores.softmax(-1)[..., : x.shape[1]] @ v).transpose(1, 2)
    if w["out"] is not None:
        attended = attended.flatten(2) @ w["out"].T + (0.0 if w["out_bias"] is None else w["out_bias"])
    return attended


def _rms_norm(x: Tensor, weight: Tensor | None, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (1.0 if weight is None else weight)


def _rotate(x: Tensor, rope: Rope | None) -> Tensor:
    """Rotate pairs by position times frequency; angles and products are float32 or wider."""
    if rope is None:
        return x
    wide = torch.promote_types(x.dtype, torch.float32)
    rotated, rest = x[..., : rope.dim].to(wide), x[..., rope.dim :]
    halves = rope.layout == "halves"
    a, b = rotated.chunk(2, -1) if halves else (rotated[..., ::2], rotated[..., 1::2])
    frequencies = torch.tensor(rope.frequencies, dtype=torch.float64, device=x.device)
    angles = torch.arange(x.shape[2], device=x.device).double()[:, None] * frequencies
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    pairs = [a * cos - b * sin, a * sin + b * cos]
    rotated = torch.cat(pairs, -1) if halves else torch.stack(pairs, -1).flatten(-2)
    return torch.cat([rotated.to(x.dtype), rest], -1)


def _as_stored(x: Tensor, storage: str | None) -> Tensor:
    if storage is None or storage in PLAIN:
        return x
    scale = x.new_ones((), dtype=torch.float32) if storage == "fp8" else None
    return dequantize(quantize(x, storage, scale=scale), x.dtype)


def shard_block(
    config: AttentionConfig, weights: AttentionWeights, sharding: DecodeSharding, comm: Comm, **options: Any
) -> AttentionBlock:
    """Return one rank's block, from the weights of the whole block."""
    exchange = options.get("exchange") or Exchange()
    own = weights.shard(config, sharding, comm.rank, replicate_q=exchange.replicate_q)
    return AttentionBlock(config, own, sharding, comm, **options)


def poisoned_cache(
    block: AttentionBlock, batch: int, length: int, block_size: int = 4, num_blocks: int | None = None, **options: Any
) -> ShardedCache:
    """Return a cache with space for a batch of sequences of this length, filled with poison."""
    own = -(-batch // block.sharding.kvdp)
    blocks = own * -(-length // block_size) + own if num_blocks is None else num_blocks
    cache = block.make_cache(batch=batch, num_blocks=blocks, block_size=block_size, max_length=length, **options)
    for layer in range(options.get("layers", 1)):
        poison_cache(cache.keys(layer))
        poison_cache(cache.values(layer))
    return cache


class BlockRunner:
    """Feeds sequences to a block step by step. Sequence i is fed x[i], whichever row of the batch it has.

    `outputs` [sequences, L, ...] are those so far, NaN elsewhere. Rows that are not in a step hold NaN in the block's
    input.
    """

    def __init__(self, block: AttentionBlock, cache: ShardedCache, x: Tensor) -> None:
        self.block, self.cache, self.x = block, cache, x
        self.sequences: dict[int, CacheSequence] = {}
        self.outputs: Tensor | None = None

    def allocate(self, *which: int, prompts: Sequence[Any] | None = None) -> BlockRunner:
        """Allocate these sequences, for prompts given as lengths or token ids."""
        for i, prompt in zip(which, prompts or [0] * len(which), strict=True):
            self.sequences[i] = self.cache.allocate(prompt)
        return self

    def feed(self, which: Iterable[int], tokens: int = 1, **options: Any) -> Tensor:
        """Run one step with the next tokens of these sequences; returns the block's output [batch, tokens, ...]."""
        starts = {i: self.sequences[i].length for i in which}
        step = self.cache.append([self.sequences[i] for i in starts], tokens)
        return self.record(starts, self.block(self.inputs(starts, tokens), self.cache, step, **options))

    def inputs(self, starts: dict[int, int], tokens: int) -> Tensor:
        """Return the block's input for a step of sequences that begin at these positions."""
        x = self.x.new_full((self.cache.batch, tokens, self.x.shape[-1]), torch.nan)
        for i, start in starts.items():
            x[self.sequences[i].row] = self.x[i, start : start + tokens]
        return x

    def record(self, starts: dict[int, int], out: Tensor) -> Tensor:
        """Keep the outputs of a step."""
        out = out if out.ndim == 3 else out.transpose(1, 2)  # [batch, tokens, ...]
        if self.outputs is None:
            self.outputs = out.new_full((*self.x.shape[:2], *out.shape[2:]), torch.nan)
        for i, start in starts.items():
            self.outputs[i, start : start + out.shape[1]] = out[self.sequences[i].row]
        return out

    def feed_until(self, i: int, length: int, most: int = MAX_DECODE_TOKENS) -> BlockRunner:
        """Feed one sequence until it has this length, at most `most` tokens per step."""
        while self.sequences[i].length < length:
            self.feed([i], min(most, length - self.sequences[i].length))
        return self

    def generate(self, prompts: Sequence[int], steps: int, tokens: int = 1, most: int = MAX_DECODE_TOKENS) -> Tensor:
        """Feed prompts of these lengths, then `steps` steps of `tokens` tokens per sequence; returns `outputs`.

        A step of a prompt has at most `most` tokens.
        """
        self.allocate(*range(len(prompts)), prompts=prompts)
        for i, length in enumerate(prompts):
            self.feed_until(i, length, most)
        for _ in range(steps):
            self.feed(range(len(prompts)), tokens)
        assert self.outputs is not None
        return self.outputs

    def truncate(self, i: int, length: int) -> None:
        """Remove the tokens past `length`, and their outputs."""
        self.cache.truncate(self.sequences[i], length)
        if self.outputs is not None:
            self.outputs[i, length:] = torch.nan

    def free(self, i: int) -> None:
        """Free a sequence."""
        self.cache.free(self.sequences.pop(i))
