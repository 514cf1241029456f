"""`AttentionBlock` over ranks: every sharding of its cache, and every stage and exchange.

A block generates tokens after prompts of different lengths, and each output is compared with plain torch over whole
sequences. All ranks must hold the same bits; with `split_size`, also the bits of a single rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from attnmesh.comm import Comm, SoloComm
from attnmesh.ops.block.config import AttentionConfig, AttentionWeights
from attnmesh.ops.storage import PLAIN
from attnmesh.parallel.decode.exchange import Exchange
from attnmesh.plan.decode import DecodeSharding
from attnmesh.testing.block import BlockRunner, poisoned_cache, random_block, reference_block, shard_block
from attnmesh.testing.errors import Comparison
from attnmesh.verify.mode import Mode

_HIDDEN, _HEAD_DIM, _SPLIT = 48, 32, 8
_PROMPTS = (3, 13, 9)  # of each sequence; the first is shorter than a window and than some numbers of CP ranks
_NEW_TOKENS = 12  # per sequence
_LENGTHS = tuple(prompt + _NEW_TOKENS for prompt in _PROMPTS)


@dataclass(frozen=True)
class _Case:
    """The stages of a block, the storage of its cache and the exchanges of its ranks."""

    name: str
    storage: str
    tokens: int  # per step
    stages: dict[str, Any] = field(default_factory=dict)  # of `random_block`
    options: dict[str, Any] = field(default_factory=dict)  # of the block
    interleave: int = 1
    kvdp: bool = False  # needs more than one KVDP rank
    cp: bool = False  # needs more than one CP rank
    one_kv_head: bool = False  # and query heads that do not divide evenly

    def fits(self, _tp: int, kvdp: int, cp: int) -> bool:
        return (kvdp > 1 or not self.kvdp) and (cp > 1 or not self.cp)

    def heads(self, world: int) -> tuple[int, int]:
        """Return query and KV heads that fit every factorization of the world size."""
        return (world + 1, 1) if self.one_kv_head else (2 * world, world)


_NORMS = {"norm": True, "norm_before_rope": True, "norm_after_rope": True}
_SINKS, _WINDOW = {"sinks": True}, {"window": 5}
_EVERY_SHARDING = (_Case("fp32", "fp32", 1), _Case("bf16", "bf16", 3))
_CASES = (
    _Case("norms", "bf16", 1, _NORMS),
    _Case("sinks window", "fp32", 3, _SINKS | _WINDOW),
    _Case("one kv head", "fp32", 1, {"rope": "pairs", "rotary_dim": _HEAD_DIM // 2}, one_kv_head=True),
    _Case("int8", "int8", 1, _SINKS),
    _Case("fp8", "fp8", 3, _NORMS),
    _Case("bfp8", "bfp8", 1, _WINDOW),
    _Case("prefill", "fp32", _NEW_TOKENS, _SINKS | _WINDOW, interleave=2),
    _Case("prefill int8", "int8", _NEW_TOKENS, _NORMS),
    _Case("all_gather in and out", "fp32", 3, options={"exchange": Exchange(kvdp="all_gather")}, kvdp=True),
    _Case("own kv rows", "int8", 3, options={"kv_rows": "own"}, kvdp=True),
    _Case("all_to_all out", "bf16", 1, _SINKS, {"exchange": Exchange(cp="all_to_all")}, cp=True),
    _Case("reduce_scatter out", "fp32", 3, _SINKS, {"exchange": Exchange(cp="reduce_scatter")}, cp=True),
    _Case("all_reduce out", "bf16", 1, _WINDOW, {"exchange": Exchange(cp="all_reduce")}, interleave=2, cp=True),
    _Case("replicate_q", "fp32", 3, _WINDOW, {"exchange": Exchange(replicate_q=True)}, interleave=3, cp=True),
    _Case("split_size", "fp32", 3, _WINDOW, {"split_size": _SPLIT}, interleave=2 * _SPLIT),
    _Case("split_size same bits", "fp32", 1, _SINKS, {"split_size": _SPLIT}, interleave=_SPLIT),
    _Case("ALiBi window", "fp32", 3, {"alibi": True} | _WINDOW, interleave=2, cp=True),
    _Case("prefill softcap ALiBi", "fp32", _NEW_TOKENS, {"alibi": True, "softcap": 1.5}),
)


def block_modes(comm: Comm) -> Iterator[Mode]:
    """Yield every factorization of the world size, and every case on one that fits, each on another."""
    sizes = [n for n in range(1, comm.world + 1) if comm.world % n == 0]
    shardings = [(tp, kvdp, comm.world // tp // kvdp) for tp in sizes for kvdp in sizes if comm.world // tp % kvdp == 0]
    for sharding, case in zip(shardings, cycle(_EVERY_SHARDING), strict=False):
        yield _mode(comm, sharding, case)
    for number, case in enumerate(_CASES):
        if fitting := [sizes for sizes in shardings if case.fits(*sizes)]:
            yield _mode(comm, fitting[number % len(fitting)], case)


def _mode(comm: Comm, sizes: tuple[int, int, int], case: _Case) -> Mode:
    sharding = DecodeSharding(*sizes, case.interleave)
    q_heads, kv_heads = case.heads(comm.world)
    dtype = "fp32" if case.storage == "fp32" else "bf16"
    shape = f"{len(_PROMPTS)}x{q_heads}/{kv_heads}x{case.tokens}:{max(_LENGTHS)}x{_HEAD_DIM} {dtype}"
    compute = _same_bits if case.name.endswith("same bits") else _generate
    return Mode(f"block {sharding} {case.name}", shape, partial(compute, comm, sharding, case), collective=True)


def _random(case: _Case, world: int, seed: int, device: str) -> tuple[AttentionConfig, AttentionWeights, Tensor]:
    """Return a block and its inputs [B, L, hidden], the same on every rank."""
    dtype = PLAIN.get(case.storage, torch.bfloat16)
    config, weights = random_block(
        *case.heads(world), _HEAD_DIM, _HIDDEN, **case.stages, dtype=dtype, seed=seed, device=device
    )
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(_PROMPTS), max(_LENGTHS), _HIDDEN, generator=generator, dtype=torch.float32, device="cpu")
    return config, weights, x.to(device, dtype)


def _outputs(
    comm: Comm, sharding: DecodeSharding, case: _Case, config: AttentionConfig, weights: AttentionWeights, x: Tensor
) -> Tensor:
    """Return the block's outputs at every position; 0 past the end of a sequence."""
    block = shard_block(config, weights, sharding, comm, **case.options)
    cache = poisoned_cache(block, len(x), x.shape[1], storage=case.storage)
    outputs = BlockRunner(block, cache, x).generate(_PROMPTS, _NEW_TOKENS // case.tokens, case.tokens)
    for i, length in enumerate(_LENGTHS):
        outputs[i, length:] = 0
    return outputs


def _generate(comm: Comm, sharding: DecodeSharding, case: _Case, seed: int, device: str) -> list[Comparison]:
    """Compare each sequence with float64, and the outputs of every rank with rank 0's."""
    config, weights, x = _random(case, comm.world, seed, device)
    actual = _outputs(comm, sharding, case, config, weights, x)
    copies = comm.all_gather(actual, [actual.shape] * comm.world)
    if comm.rank > 0:
        return []
    exact, plain = (
        reference_block(config, weights, x, dtype=dtype, storage=case.storage) for dtype in (torch.float64, x.dtype)
    )
    results = [Comparison(f"sequence {i}", actual[i, :n], exact[i, :n], plain[i, :n]) for i, n in enumerate(_LENGTHS)]
    return [*results, *(Comparison(f"bits of rank {rank}", copy, actual) for rank, copy in enumerate(copies))]


def _same_bits(comm: Comm, sharding: DecodeSharding, case: _Case, seed: int, device: str) -> list[Comparison]:
    """Compare the heads of all ranks with a single rank's, bitwise.

    Inputs and weights are small multiples of 1/8: their projections are exact in any order of summation.
    """
    config, weights, x = _random(case, comm.world, seed, device)
    exact_weights = AttentionWeights((weights.qkv * _HIDDEN**0.5).round() / 8, sinks=weights.sinks)
    own = _outputs(comm, sharding, case, config, exact_weights, x.round())
    heads = [len(sharding.q_heads(rank, config.q_heads)) for rank in range(comm.world)]
    parts = comm.all_gather(own, [(*own.shape[:2], n, own.shape[3]) for n in heads])
    if comm.rank > 0:
        return []
    alone = _outputs(SoloComm(), DecodeSharding(), case, config, exact_weights, x.round())
    return [Comparison("out bits", torch.cat(parts, 2), alone)]
