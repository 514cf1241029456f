"""Attention blocks of any configuration, what they should say in float64, and sequences fed to them step by step."""

from dataclasses import fields, replace

import torch

import attnmesh as am
from attnmesh.ops.storage import values_of


def made(
    q_heads=8, kv_heads=2, head_dim=8, hidden=24, *, window=None, sinks=False, out=True, biases=True, norm=False,
    before=False, after=False, rope="halves", rotary=None, scale=None, dtype=torch.float32,
):  # fmt: skip
    """A configuration with these stages, and a whole model's weights, always the same ones."""
    config = am.AttentionConfig(
        hidden, q_heads, kv_heads, head_dim, window=window, scale=scale, norm=am.Norm(1e-2) if norm else None,
        norm_before_rope=am.Norm(1e-3) if before else None, norm_after_rope=am.Norm(1e-1) if after else None,
        rope=rope and am.Rope.plain(rotary or head_dim, 100.0, rope),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape, around=0.0, size=1.0):
        return (around + size * torch.randn(*shape, generator=generator)).to(dtype)

    rows = (q_heads + 2 * kv_heads) * head_dim
    weights = {
        "qkv": drawn(rows, hidden, size=hidden**-0.5),
        "qkv_bias": drawn(rows, size=0.3) if biases else None,
        "out": drawn(hidden, q_heads * head_dim, size=(q_heads * head_dim) ** -0.5) if out else None,
        "out_bias": drawn(hidden) if out and biases else None,
        "sinks": drawn(q_heads, around=1.0) if sinks else None,
        "norm": drawn(hidden, around=1.0, size=0.3) if norm else None,
    }
    for when, there in (("before", before), ("after", after)):
        for x in "qk":
            weights[f"{x}_norm_{when}_rope"] = drawn(head_dim, around=1.0, size=0.3) if there else None
    return config, am.AttentionWeights(**weights)


def inputs(sequences, length, config, dtype=torch.float32):
    """X [sequences, length, hidden] of whole sequences, always the same ones."""
    return torch.randn(sequences, length, config.hidden, generator=torch.Generator().manual_seed(3)).to(dtype)


def exact(weights, sequences, length):
    """Weights and inputs of a few bits each, so that projections are exact, in whatever order a BLAS sums."""
    generator = torch.Generator().manual_seed(5)

    def few_bits(*shape):
        return torch.randint(-3, 4, shape, generator=generator).float() / 4

    bias = None if weights.qkv_bias is None else few_bits(*weights.qkv_bias.shape)
    weights = replace(weights, qkv=few_bits(*weights.qkv.shape), qkv_bias=bias)
    return weights, few_bits(sequences, length, weights.qkv.shape[1])


def answer(config, weights, x):
    """The block's answer for whole sequences x [B, L, hidden] in float64, or its heads' [B, L, q, D] without `out`."""
    w = {field.name: getattr(weights, field.name) for field in fields(weights)}
    w = {name: None if tensor is None else tensor.double() for name, tensor in w.items()}
    x = x.double()
    if config.norm:
        x = _normed(x, w["norm"], config.norm)
    projected = x @ w["qkv"].T + (0.0 if w["qkv_bias"] is None else w["qkv_bias"])
    heads = projected.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
    q, k, v = heads.split([config.q_heads, config.kv_heads, config.kv_heads], 1)
    q, k = (_staged(name, y, config, w) for name, y in (("q", q), ("k", k)))
    k, v = (y.repeat_interleave(config.q_heads // config.kv_heads, 1) for y in (k, v))
    at = torch.arange(x.shape[1])
    seen = at[:, None] >= at
    if config.window:
        seen &= at[:, None] < at + config.window
    scale = config.head_dim**-0.5 if config.scale is None else config.scale
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
    if w["sinks"] is not None:
        scores = torch.cat([scores, w["sinks"][:, None, None].expand(*scores.shape[:3], 1).to(scores)], -1)
    attended = (scores.softmax(-1)[..., : x.shape[1]] @ v).transpose(1, 2)
    if w["out"] is None:
        return attended
    return attended.flatten(2) @ w["out"].T + (0.0 if w["out_bias"] is None else w["out_bias"])


def _normed(x, weight, norm):
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (1.0 if weight is None else weight)


def _staged(name, x, config, w):
    if config.norm_before_rope:
        x = _normed(x, w[f"{name}_norm_before_rope"], config.norm_before_rope)
    if config.rope:
        x = _turned(x, config.rope)
    if config.norm_after_rope:
        x = _normed(x, w[f"{name}_norm_after_rope"], config.norm_after_rope)
    return x


def _turned(x, rope):
    """Pairs as complex numbers, turned by position * frequency."""
    turning, rest = x[..., : rope.dim], x[..., rope.dim :]
    pairs = (
        turning.unflatten(-1, (2, -1)).transpose(-1, -2) if rope.layout == "halves" else turning.unflatten(-1, (-1, 2))
    )
    angles = torch.arange(x.shape[2]).double()[:, None] * torch.tensor(rope.frequencies).double()
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    )
    turned = turned.transpose(-1, -2).flatten(-2) if rope.layout == "halves" else turned.flatten(-2)
    return torch.cat([turned, rest], -1)


def block_with(config, weights, sharding, comm, **options):
    """A rank's block, from a whole model's weights."""
    exchange = options.get("exchange") or am.Exchange()
    own = weights.shard(config, sharding, comm.rank, replicate_q=exchange.replicate_q)
    return am.AttentionBlock(config, own, sharding, comm, **options)


def cache_for(block, batch, length, block_size=4, **options):
    """A cache with room for a batch of sequences of this length, and with NaN (or rubbish) in all of it."""
    own = -(-batch // block.sharding.kvdp)
    blocks = options.pop("num_blocks", own * -(-length // block_size) + own)
    cache = block.make_cache(batch=batch, num_blocks=blocks, block_size=block_size, max_length=length, **options)
    for pool in pools_of(cache):
        pool.fill_(torch.nan) if pool.dtype.is_floating_point else pool.fill_(0x55)
    return cache


def pools_of(cache, layers=1):
    """The memory of a cache: keys, values and, where they are a token's, their scales. fp8 as bytes."""
    found = []
    for stored in (pool for layer in range(layers) for pool in (cache.keys(layer), cache.values(layer))):
        values = values_of(stored)
        found.append(values.view(torch.int8) if values.dtype == torch.float8_e4m3fn else values)
        if not isinstance(stored, torch.Tensor) and stored.scales.ndim > 1:
            found.append(stored.scales)
    return found


def state_of(cache, layers=1):
    """All of a cache's memory and tables, bit by bit, and its books in words."""
    memory = [pool.contiguous().view(torch.uint8).clone() for pool in (*pools_of(cache, layers), cache.block_table)]
    return memory, [str(stats) for stats in cache.stats()]


def same(one, other):
    """Whether two states of a cache are equal to the last bit."""
    return one[1] == other[1] and all(map(torch.equal, one[0], other[0]))


class Feeding:
    """Sequences on their way through a block. Sequence i is fed x[i], whatever row of the batch it has.

    `seen` [sequences, L, ...] are the outputs so far, NaN where none are. Rows that are not in a step hold NaN in what
    the block is given.
    """

    def __init__(self, block, cache, x):
        self.block, self.cache, self.x = block, cache, x
        self.held, self.seen = {}, None

    def begin(self, *which, prompts=None):
        """Allocate these sequences, for prompts that are counts or ids."""
        for i, prompt in zip(which, prompts or [0] * len(which), strict=True):
            self.held[i] = self.cache.allocate(prompt)
        return self

    def feed(self, which, tokens=1, **options):
        """The next tokens of these sequences, in one step."""
        begins = {i: self.held[i].length for i in which}
        step = self.cache.append([self.held[i] for i in which], tokens)
        x = self.given(begins, tokens)
        return self.record(begins, self.block(x, self.cache, step, **options))

    def given(self, begins, tokens):
        x = self.x.new_full((self.cache.batch, tokens, self.x.shape[-1]), torch.nan)
        for i, begin in begins.items():
            x[self.held[i].row] = self.x[i, begin : begin + tokens]
        return x

    def record(self, begins, out):
        out = out if out.ndim == 3 else out.transpose(1, 2)  # [batch, tokens, ...]
        if self.seen is None:
            self.seen = out.new_full((*self.x.shape[:2], *out.shape[2:]), torch.nan)
        for i, begin in begins.items():
            self.seen[i, begin : begin + out.shape[1]] = out[self.held[i].row]
        return out

    def until(self, i, length, most=8):
        """Feed one sequence, up to `most` tokens at a time."""
        while self.held[i].length < length:
            self.feed([i], min(most, length - self.held[i].length))
        return self

    def truncate(self, i, length):
        """Give back tokens, and forget what was said about them."""
        self.cache.truncate(self.held[i], length)
        self.seen[i, length:] = torch.nan

    def free(self, i):
        self.cache.free(self.held.pop(i))


def assert_close(seen, truth, bound=1e-5):
    """Every position that was fed, relative to the largest true output; and some were fed."""
    fed = ~seen.flatten(2).isnan().all(-1)
    assert fed.any()
    error = (seen.double() - truth)[fed].abs().max() / truth.abs().max()
    assert error <= bound, error  # NaN fails


def lengths_of(seen):
    """How many positions of every sequence were fed, and that no gap is among them."""
    fed = ~seen.flatten(2).isnan().all(-1)
    lengths = fed.sum(1)
    assert torch.equal(fed, torch.arange(fed.shape[1]) < lengths[:, None])
    return lengths.tolist()
