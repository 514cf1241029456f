"""Token generation over ranks against float64: every way to spread a block's cache, and every stage and exchange.

A block generates tokens after prompts of different lengths, a few at a time, and each of its answers is compared with
plain torch over the whole sequences. The pools, and the inputs of sequences that wait, are poisoned. All ranks must
hold the same bits in the end; with `split_size`, also those of one rank alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmesh.comm import Comm, SoloComm
from attnmesh.kv_cache.sequence import ShardedSequence
from attnmesh.ops.block.config import AttentionConfig, AttentionWeights
from attnmesh.ops.block.stages import Norm, Rope
from attnmesh.ops.decode.call import MAX_DECODE_TOKENS
from attnmesh.ops.storage import PLAIN, dequantize, quantize
from attnmesh.parallel.decode.block import AttentionBlock
from attnmesh.parallel.decode.exchange import Exchange
from attnmesh.plan.decode import DecodeSharding
from attnmesh.verify.decode import fill_with_poison
from attnmesh.verify.mode import Compared, ComparedMode

_HIDDEN, _HEAD_DIM, _BLOCK_SIZE, _SPLIT = 48, 32, 4, 8
_PROMPTS = (3, 13, 9)  # of each sequence; the first is shorter than a window, and fewer than some CP ranks
_NEW = 12  # tokens a sequence after its prompt
_LENGTHS = tuple(prompt + _NEW for prompt in _PROMPTS)
_EPS = Norm(1e-5)
_ONE_RANK = DecodeSharding()


def generation_modes(comm: Comm) -> Iterator[ComparedMode]:
    """Every factorisation of the world, and every way on one that has ranks for it, each way on another."""
    shardings = _factorisations(comm.world)
    for tp_kvdp_cp, way in zip(shardings, cycle(_EVERYWHERE), strict=False):
        yield _mode(comm, tp_kvdp_cp, way)
    for number, way in enumerate(_WAYS):
        if fitting := [sizes for sizes in shardings if way.fits(*sizes)]:
            yield _mode(comm, fitting[number % len(fitting)], way)


@dataclass(frozen=True)
class _Way:
    """What a block computes, how its cache is stored and how its ranks exchange."""

    name: str
    storage: str
    tokens: int  # new ones a step
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # of the block
    interleave: int = 1
    kvdp: bool = False  # whether it says something about KVDP ranks: there must be some
    cp: bool = False
    sinks: bool = False
    few_kv_heads: bool = False  # one for all, and query heads that do not divide

    def fits(self, _tp: int, kvdp: int, cp: int) -> bool:
        return (kvdp > 1 or not self.kvdp) and (cp > 1 or not self.cp)

    def heads(self, world: int) -> tuple[int, int]:
        """Query and kv heads, for any factorisation of the world."""
        return (world + 1, 1) if self.few_kv_heads else (2 * world, world)


_EVERYWHERE = (_Way("fp32", "fp32", 1), _Way("bf16", "bf16", 3))
_NORMS = {"norm": _EPS, "norm_before_rope": _EPS, "norm_after_rope": _EPS}
_WAYS = (
    _Way("norms", "bf16", 1, _NORMS),
    _Way("sinks window", "fp32", 3, {"window": 5}, sinks=True),
    _Way("one kv head", "fp32", 1, {"rope": Rope.plain(_HEAD_DIM // 2, layout="pairs")}, few_kv_heads=True),
    _Way("int8", "int8", 1, sinks=True),
    _Way("fp8", "fp8", 3, _NORMS),
    _Way("bfp8", "bfp8", 1, {"window": 5}),
    _Way("all_gather in and out", "fp32", 3, options={"exchange": Exchange(kvdp="all_gather")}, kvdp=True),
    _Way("own kv rows", "int8", 3, options={"kv_rows": "own"}, kvdp=True),
    _Way("all_to_all out", "bf16", 1, options={"exchange": Exchange(cp="all_to_all")}, cp=True, sinks=True),
    _Way("reduce_scatter out", "fp32", 3, options={"exchange": Exchange(cp="reduce_scatter")}, cp=True, sinks=True),
    _Way("all_reduce out", "bf16", 1, {"window": 5}, {"exchange": Exchange(cp="all_reduce")}, interleave=2, cp=True),
    _Way("replicate_q", "fp32", 3, {"window": 5}, {"exchange": Exchange(replicate_q=True)}, interleave=3, cp=True),
    _Way("split_size", "fp32", 3, {"window": 5}, {"split_size": _SPLIT}, interleave=2 * _SPLIT),
    _Way("split_size same bits", "fp32", 1, options={"split_size": _SPLIT}, interleave=_SPLIT, sinks=True),
)  # fmt: skip


def _factorisations(world: int) -> list[tuple[int, int, int]]:
    """Every (tp, kvdp, cp) of so many ranks."""
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    return [(tp, kvdp, world // tp // kvdp) for tp in sizes for kvdp in sizes if world // tp % kvdp == 0]


def _mode(comm: Comm, sizes: tuple[int, int, int], way: _Way) -> ComparedMode:
    sharding = DecodeSharding(*sizes, way.interleave)
    q_heads, kv_heads = way.heads(comm.world)
    dtype = "fp32" if way.storage == "fp32" else "bf16"
    shape = f"{len(_PROMPTS)}x{q_heads}/{kv_heads}x{way.tokens}:{max(_LENGTHS)}x{_HEAD_DIM} {dtype}"
    compared = _same_bits if way.name.endswith("same bits") else _generated
    return ComparedMode(
        f"generation {sharding} {way.name}", shape, partial(compared, comm, sharding, way), together=True
    )


class _Problem(NamedTuple):
    """A whole model's block, and x [B, L, hidden] for all positions of all sequences."""

    config: AttentionConfig
    weights: AttentionWeights
    x: Tensor


def _generated(comm: Comm, sharding: DecodeSharding, way: _Way, seed: int, device: str) -> list[Compared]:
    """Each sequence beside float64 and the plain computation; other ranks' answers beside rank 0's."""
    problem = _drawn(way, comm.world, seed, device)
    found = _answers(comm, sharding, way, problem)
    everybodys = comm.all_gather(found, [found.shape] * comm.world)
    if comm.rank > 0:
        return []
    exact, plain = (_by_definition(problem, way.storage, dtype) for dtype in (torch.float64, problem.x.dtype))
    results = [Compared(f"sequence {i}", found[i, :n], exact[i, :n], plain[i, :n]) for i, n in enumerate(_LENGTHS)]
    return [*results, *(Compared(f"bits of rank {rank}", x, found) for rank, x in enumerate(everybodys))]


def _same_bits(comm: Comm, sharding: DecodeSharding, way: _Way, seed: int, device: str) -> list[Compared]:
    """Attention by all ranks has the bits of attention by one.

    Heads come back as they are, and are projected from small whole numbers: such sums are exact in any order.
    """
    config, weights, x = _drawn(way, comm.world, seed, device)
    qkv = (weights.qkv * _HIDDEN**0.5).round() / 8
    problem = _Problem(config, AttentionWeights(qkv, sinks=weights.sinks), x.round())
    own = _answers(comm, sharding, way, problem)
    widths = [len(sharding.q_heads(rank, config.q_heads)) * _HEAD_DIM for rank in range(comm.world)]
    parts = comm.all_gather(own, [(*own.shape[:2], width) for width in widths])
    if comm.rank > 0:
        return []
    return [Compared("out bits", torch.cat(parts, -1), _answers(SoloComm(), _ONE_RANK, way, problem))]


def _answers(comm: Comm, sharding: DecodeSharding, way: _Way, problem: _Problem) -> Tensor:
    """What a block says at every position, [B, L, ...]; 0 past the end of a sequence."""
    config, weights, x = problem
    exchange = way.options.get("exchange", Exchange())
    own = weights.shard(config, sharding, comm.rank, replicate_q=exchange.replicate_q)
    block = AttentionBlock(config, own, sharding, comm, **way.options)
    batch, longest, _ = x.shape
    cache = block.make_cache(
        batch=batch, num_blocks=batch * -(-longest // _BLOCK_SIZE), block_size=_BLOCK_SIZE, max_length=longest,
        storage=way.storage,
    )  # fmt: skip
    for pool in (cache.keys(0), cache.values(0)):
        fill_with_poison(pool)
    width = config.hidden if weights.out is not None else len(sharding.q_heads(block.rank, config.q_heads)) * _HEAD_DIM
    found = x.new_zeros(batch, longest, width)
    sequences = [cache.allocate(prompt) for prompt in _PROMPTS]  # which row one gets is the cache's choice

    def feed(some: list[ShardedSequence], tokens: int) -> None:
        places = [(sequences.index(each), each.row, slice(each.length, each.length + tokens)) for each in some]
        step = cache.append(some, tokens)
        fed = x.new_full((batch, tokens, config.hidden), torch.nan)
        for i, row, positions in places:
            fed[row] = x[i, positions]
        said = block(fed, cache, step)
        by_token = said if said.ndim == 3 else said.transpose(1, 2).flatten(2)
        for i, row, positions in places:
            found[i, positions] = by_token[row]

    for sequence, prompt in zip(sequences, _PROMPTS, strict=True):
        while sequence.length < prompt:
            feed([sequence], min(MAX_DECODE_TOKENS, prompt - sequence.length))
    for _ in range(_NEW // way.tokens):
        feed(sequences, way.tokens)
    return found


def _drawn(way: _Way, world: int, seed: int, device: str) -> _Problem:
    """The same on every rank."""
    dice = torch.Generator().manual_seed(seed)
    q_heads, kv_heads = way.heads(world)
    options = {"rope": Rope.plain(_HEAD_DIM, theta=100.0)} | way.config
    config = AttentionConfig(_HIDDEN, q_heads, kv_heads, _HEAD_DIM, **options)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=dice) * scale).to(device, PLAIN.get(way.storage, torch.bfloat16))

    def about_one(there: Norm | None, width: int) -> Tensor | None:
        return None if there is None else 1 + normal(width, scale=0.3)

    rows = (q_heads + 2 * kv_heads) * _HEAD_DIM
    weights = AttentionWeights(
        normal(rows, _HIDDEN, scale=_HIDDEN**-0.5),
        normal(rows, scale=0.3),
        out=normal(_HIDDEN, q_heads * _HEAD_DIM, scale=(q_heads * _HEAD_DIM) ** -0.5),
        out_bias=normal(_HIDDEN, scale=0.3),
        norm=about_one(config.norm, _HIDDEN),
        q_norm_before_rope=about_one(config.norm_before_rope, _HEAD_DIM),
        k_norm_before_rope=about_one(config.norm_before_rope, _HEAD_DIM),
        q_norm_after_rope=about_one(config.norm_after_rope, _HEAD_DIM),
        k_norm_after_rope=about_one(config.norm_after_rope, _HEAD_DIM),
        sinks=normal(q_heads) if way.sinks else None,
    )
    return _Problem(config, weights, normal(len(_PROMPTS), max(_LENGTHS), _HIDDEN))


def _by_definition(problem: _Problem, storage: str, dtype: torch.dtype) -> Tensor:
    """All positions at once, [B, L, hidden], in plain torch of a dtype, over keys and values as a cache stores them."""
    config, whole, x = problem
    tensors = {each.name: getattr(whole, each.name) for each in fields(whole)}
    w = AttentionWeights(**{name: tensor.to(dtype) for name, tensor in tensors.items() if tensor is not None})
    x = _normed(x.to(dtype), w.norm, config.norm)
    heads = F.linear(x, w.qkv, w.qkv_bias).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
    q, k, v = heads.split([config.q_heads, config.kv_heads, config.kv_heads], 1)
    at = torch.arange(x.shape[1], device=x.device)
    q = _stages(q, at, config, w.q_norm_before_rope, w.q_norm_after_rope)
    k = _stages(k, at, config, w.k_norm_before_rope, w.k_norm_after_rope)
    k, v = (_stored(each, storage).repeat_interleave(config.q_heads // config.kv_heads, 1) for each in (k, v))

    seen = at[:, None] >= at
    if config.window is not None:
        seen &= at[:, None] - at < config.window
    scores = (q @ k.mT * config.head_dim**-0.5).masked_fill(~seen, -torch.inf)
    if w.sinks is not None:
        scores = torch.cat([scores, w.sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    out = scores.softmax(-1)[..., : len(at)] @ v
    assert w.out is not None
    return F.linear(out.transpose(1, 2).flatten(2), w.out, w.out_bias)


def _stages(x: Tensor, at: Tensor, config: AttentionConfig, before: Tensor | None, after: Tensor | None) -> Tensor:
    assert config.rope is not None
    turned = config.rope.rotate(_normed(x, before, config.norm_before_rope), at.expand(len(x), -1))
    return _normed(turned, after, config.norm_after_rope)


def _normed(x: Tensor, weight: Tensor | None, norm: Norm | None) -> Tensor:
    return x if norm is None else F.rms_norm(x, x.shape[-1:], weight, norm.eps)


def _stored(x: Tensor, storage: str) -> Tensor:
    """What a cache makes of keys or values; a plain one keeps them."""
    if storage in PLAIN:
        return x
    scale = x.new_ones((), dtype=torch.float32) if storage == "fp8" else None
    return dequantize(quantize(x, storage, scale=scale), x.dtype)
