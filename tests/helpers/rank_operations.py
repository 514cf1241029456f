"""The public operations over virtual ranks, and those around attention: caches, stages, layouts, sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

import attnmesh as am
from attnmesh.comm import SoloComm
from attnmesh.integrations.transformers_attention import LayerMask, transformers_attention
from attnmesh.ops.block.config import split_and_rotate
from attnmesh.ops.block.norm_rope import Norm, Rope, rms_norm
from attnmesh.ops.storage import Stored, dequantize
from attnmesh.testing.block import random_block, reference_block
from helpers.operations import WINDOW, Operation, Random, Tensors, over_ranks

WORLD, ROWS = 2, 8  # ranks, and rows of each
SCHEDULES = ("ring", "allgather", "ulysses", "ring+ring", "ulysses+ring", "ulysses+allgather")
MASKS = (
    am.Full(),
    am.Causal(),
    am.SlidingWindow(3, 1),
    WINDOW,
    am.Documents([7, 9]),
    am.Causal() & am.Documents([7, 9]),
    am.Documents([7, 9], prefixes=[3, 9]),
    am.Prefix(3),
    am.Chunked(5),
    am.BlockCausal(5),
    am.Global(2, both=True) | WINDOW,
    am.Global(3),
    am.Slices([((0, 9), (2, 12), "causal"), ((9, 16), (0, 16), "bidirectional_causal")]),
    am.PerSequence([am.Causal(), am.Prefix(3)]),
    am.Padding([5, 16]),
)
LAYOUTS = (
    am.Contiguous(),
    am.Striped(),
    am.Zigzag(),
    am.Balanced(WINDOW),
    am.Joint((9, am.Zigzag()), (7, am.Contiguous())),
)


def _of_rank(x: Tensors, rank: int) -> Tensors:
    """The inputs of one rank, whose names end with its number."""
    return {name[:-2]: one for name, one in x.items() if name.endswith(f" {rank}")}


def _per_rank(make: Callable[[Random], Tensors], world: int = WORLD) -> Callable[[Random], Tensors]:
    return lambda random: {f"{name} {rank}": x for rank in range(world) for name, x in make(random).items()}


# Context parallelism.


def _qkv(random: Random) -> Tensors:
    return {"q": random.normal(1, 4, ROWS, 16), "k": random.normal(1, 2, ROWS, 16), "v": random.normal(1, 2, ROWS, 16)}


def _qkv_and_sinks(world: int) -> Callable[[Random], Tensors]:
    """Shards of each rank, and the sinks, which are the same on all ranks."""
    shards = _per_rank(lambda random: _qkv(random) | {"v": random.normal(1, 2, ROWS, 24)}, world)
    return lambda random: shards(random) | {"sinks": random.normal(4)}


def _world_of(schedule: str) -> int:
    return 4 if "+" in schedule else 2


def _context_parallel(schedule: str) -> Callable[[Tensors, str], Tensors]:
    """Two ranks, or two nodes of two."""
    ranks_per_node = 2 if "+" in schedule else None
    world = _world_of(schedule)

    def run(x: Tensors, backend: str) -> Tensors:
        def attend(comm: am.comm.Comm) -> Tensors:
            cp = am.ContextParallel(comm, schedule=schedule, backend=backend, ranks_per_node=ranks_per_node)
            own = _of_rank(x, comm.rank) | {"sinks": x["sinks"]}
            grads = {name: one.detach().requires_grad_() for name, one in own.items()}
            out, lse = cp.attention(**grads, mask=WINDOW, return_lse=True)
            whole = cp.unshard(out, 2, world * ROWS)
            # The backward of all ranks, each in its own thread.
            found = torch.autograd.grad([whole.square().sum(), lse.sum()], list(grads.values()))
            shard = cp.shard(whole.detach(), 2)
            return {"out": out.detach(), "lse": lse.detach(), "shard": shard} | dict(
                zip(("dq", "dk", "dv", "dsinks"), found, strict=True)
            )

        return over_ranks(world, attend)

    return run


def _query_distributed(x: Tensors, backend: str) -> Tensors:
    def attend(comm: am.comm.Comm) -> Tensors:
        out, lse = am.ring_distributed_attention(**x, group=comm, return_lse=True)
        return {"out": out, "lse": lse, "whole": am.gather_ring_outputs(out, length=x["q"].shape[2], group=comm)}

    return over_ranks(WORLD, attend)


def _one_of_a_ring(x: Tensors, backend: str) -> Tensors:
    out, lse = am.ring_distributed_attention(**x, ring_size=2, ring_id=1, return_lse=True)
    return {"out": out, "lse": lse}


def _pools(random: Random) -> Tensors:
    pools = {"k": random.normal(6, 4, 2, 16), "v": random.normal(6, 4, 2, 16)}
    return {"q": random.normal(2, 4, ROWS, 16), **pools, "block_table": random.integers(0, 6, 2, 4)}


def _over_a_cache(x: Tensors, backend: str) -> Tensors:
    out, lse = am.ring_distributed_attention(**x, q_offset=[3, 7], ring_size=2, ring_id=0, return_lse=True)
    return {"out": out, "lse": lse}


def _sdpa(x: Tensors, backend: str) -> Tensors:
    def attend(comm: am.comm.Comm) -> Tensors:
        own = _of_rank(x, comm.rank)
        buffer = x["buffer"].clone(memory_format=torch.preserve_format)  # whole, and the same on all ranks
        with am.attention_context_parallel(comm, buffers=[buffer], buffer_seq_dims=[1]):
            out = F.scaled_dot_product_attention(own["q"], own["k"], own["v"], is_causal=True, enable_gqa=True)
            inside = buffer.clone()
        return {"out": out, "inside": inside, "after": buffer}

    return over_ranks(WORLD, attend)


def _collectives(x: Tensors, backend: str) -> Tensors:
    def run(comm: am.comm.Comm) -> Tensors:
        own = _of_rank(x, comm.rank)["x"]
        shapes = [own.shape] * WORLD
        gathered = torch.stack(comm.all_gather(own, shapes))
        sent = torch.stack(comm.all_to_all([own[i] for i in range(WORLD)], [own.shape[1:]] * WORLD))
        part = comm.reduce_scatter([own[i] for i in range(WORLD)])
        return {"gathered": gathered, "sent": sent, "part": part, "sum": comm.all_reduce(own)}

    return over_ranks(WORLD, run)


# Sparse attention.


def _sparse(random: Random) -> Tensors:
    keys = WORLD * ROWS
    return {
        "q": random.normal(ROWS, 2, 16), "kv": random.normal(ROWS, 16), "v": random.normal(ROWS, 5),
        "indices": random.integers(-1, keys + 1, ROWS, 6), "lse": random.normal(ROWS, 2) + 3,
        "iq": random.normal(ROWS, 3, 8), "ik": random.normal(ROWS, 8), "w": random.normal(ROWS, 3),
        "q_positions": random.integers(0, keys, ROWS), "target": random.normal(ROWS, 6).abs(),
        "row_mask": random.some(ROWS),
    }  # fmt: skip


def _sparse_parallel(schedule: str) -> Callable[[Tensors, str], Tensors]:
    def run(x: Tensors, backend: str) -> Tensors:
        def attend(comm: am.comm.Comm) -> Tensors:
            parallel = am.SparseParallel(cp=comm, schedule=schedule)
            own = _of_rank(x, comm.rank)
            grads = {name: own[name].detach().requires_grad_() for name in ("q", "kv", "v", "iq", "ik", "w")}
            q, kv, v, *indexer = grads.values()
            indices = own["indices"]
            mask = am.SparseMask(causal=True, q_positions=own["q_positions"])
            out, lse = parallel.sparse_attention(q, kv, indices, scale=0.3, v=v, mask=mask, sinks=x["sinks"])
            p = parallel.attention_distribution(q, kv, indices, own["lse"], scale=0.3)
            scores = parallel.indexer_scores_at(*indexer, indices)
            selected = parallel.indexer_topk(*indexer, 4, mask=mask)
            loss = parallel.indexer_kl_loss(*indexer, indices, own["target"], row_mask=own["row_mask"])
            dense = parallel.indexer_kl_loss(*indexer, None, am.sparse.AttentionTarget(q, kv, own["lse"], 0.3))
            total = loss + dense + scores.masked_fill(scores.isinf(), 0.0).sum()
            found = torch.autograd.grad([out.square().sum(), total], list(grads.values()))
            results = {
                "out": out,
                "lse": lse,
                "p": p,
                "scores": scores,
                "selected": selected.indices,
                "loss": loss,
                "dense": dense,
            }
            results |= {f"d{name}": grad for name, grad in zip(grads, found, strict=True)}
            return {name: one.detach() for name, one in results.items()}

        return over_ranks(WORLD, attend)

    return run


def _sparse_inputs(random: Random) -> Tensors:
    return _per_rank(_sparse)(random) | {"sinks": random.normal(2)}


# A block of a model, and its cache.

STAGES = {"norm": True, "norm_before_rope": True, "norm_after_rope": True, "sinks": True, "alibi": True}
CONFIG = random_block(4, 2, 16, 24, **STAGES)[0]


def _block_inputs(random: Random) -> Tensors:
    weights = vars(random_block(4, 2, 16, 24, **STAGES)[1])
    return dict(weights) | {"x": random.normal(2, 5, 24)}


def _block(sharding: am.DecodeSharding) -> Callable[[Tensors, str], Tensors]:
    def run(x: Tensors, backend: str) -> Tensors:
        weights = am.decode.AttentionWeights(**{name: one for name, one in x.items() if name != "x"})

        def steps(comm: am.comm.Comm) -> Tensors:
            own = weights if sharding.ranks == 1 else weights.shard(CONFIG, sharding, comm.rank)
            block = am.AttentionBlock(CONFIG, own, sharding, comm, backend=backend)
            cache = block.make_cache(batch=2, num_blocks=8, block_size=4, max_length=8)
            sequences = [cache.allocate(5), cache.allocate(5)]
            parts = x["x"].split([3, 2], 1)
            outs = [block(part, cache, cache.append(sequences, part.shape[1])) for part in parts]
            return {"out": torch.cat(outs, 1)}

        return steps(SoloComm()) if sharding.ranks == 1 else over_ranks(sharding.ranks, steps)

    return run


def _block_truth(x: Tensors) -> Tensors:
    weights = am.decode.AttentionWeights(**{name: one for name, one in x.items() if name != "x"})
    out = reference_block(CONFIG, weights, x["x"])
    return dict.fromkeys(("out", "out 0", "out 1"), out)


def _stages(x: Tensors, backend: str) -> Tensors:
    names = [f"{side}_norm_{when}_rope" for side in "qk" for when in ("before", "after")]
    weights = am.decode.AttentionWeights(x["qkv"], **{name: x[name] for name in names})
    q, k, v = split_and_rotate(x["q"], x["kv"], x["positions"], CONFIG, weights)
    turned = Rope.plain(8, 100.0, "pairs").rotate(x["heads"], x["positions"])
    normed = rms_norm(x["heads"], x["q_norm_before_rope"], Norm(1e-3))
    return {"q": q, "k": k, "v": v, "turned": turned, "normed": normed, "plain": rms_norm(x["heads"], None, Norm(1e-3))}


def _stage_inputs(random: Random) -> Tensors:
    norms = [f"{side}_norm_{when}_rope" for side in "qk" for when in ("before", "after")]
    return {
        "q": random.normal(2, 3, 64), "kv": random.normal(2, 3, 64), "heads": random.normal(2, 4, 3, 16),
        "positions": random.integers(-1, 50, 2, 3), "qkv": random.normal(128, 24),
        **{name: random.normal(16) for name in norms},
    }  # fmt: skip


def _shards_of_weights(x: Tensors, backend: str) -> Tensors:
    weights = am.decode.AttentionWeights.whole(x["q"], x["k"], x["v"], (x["qb"], x["kb"], x["vb"]), out=x["out"])
    own = weights.shard(am.decode.AttentionConfig(24, 4, 2, 8), am.DecodeSharding(tp=2), 1)
    return {"qkv": own.qkv, "qkv_bias": own.qkv_bias, "out": own.out}


def _projections(random: Random) -> Tensors:
    rows = {"q": 32, "k": 16, "v": 16}
    whole = {name: random.normal(n, 24) for name, n in rows.items()} | {
        f"{name}b": random.normal(n) for name, n in rows.items()
    }
    return whole | {"out": random.normal(24, 32)}


def _numbers(stored: Stored, head_axis: int = 1) -> Tensor:
    return dequantize(stored, torch.float32, head_axis=head_axis)


def _written(storage: str) -> Callable[[Tensors, str], Tensors]:
    def run(x: Tensors, backend: str) -> Tensors:
        scales = {"k_scale": x["k_scale"].abs() + 0.1, "v_scale": x["v_scale"].abs() + 0.1} if storage == "fp8" else {}
        spec = am.CacheSpec(layers=1, kv_heads=2, head_dim=16, storage=storage, **scales)
        sizes = {"num_blocks": 4, "block_size": 4, "max_length": 8, "device": x["k"].device}
        cache = am.BlockCache(spec, **sizes, max_sequences=2)
        cache.write(0, cache.append([cache.allocate(3), cache.allocate(3)], 3), x["k"], x["v"])
        sharded = am.ShardedCache(am.DecodeSharding(), 0, spec, batch=2, **sizes)
        sharded.write(0, sharded.append([sharded.allocate(3), sharded.allocate(3)], 3), x["k"], x["v"])
        return {
            name: _numbers(pool, 2)
            for name, pool in (
                ("keys", cache.keys(0)), ("values", cache.values(0)),
                ("sharded keys", sharded.keys(0)), ("sharded values", sharded.values(0)),
            )
        }  # fmt: skip

    return run


def _new_tokens(random: Random) -> Tensors:
    return {
        "k": random.normal(2, 2, 3, 16),
        "v": random.normal(2, 2, 3, 16),
        "k_scale": random.normal(2),
        "v_scale": random.normal(2),
    }


def _quantize(x: Tensors, backend: str) -> Tensors:
    results = {storage: _numbers(am.quantize(x["x"], storage)) for storage in ("bf16", "fp8", "int8", "bfp8")}
    return results | {"scaled": _numbers(am.quantize(x["x"], "fp8", scale=x["scale"].float().abs() + 0.1))}


# Small operations.


def _layouts(x: Tensors, backend: str) -> Tensors:
    results = {}
    for layout in LAYOUTS:
        shards = [layout.shard(x["x"], 1, WORLD, rank) for rank in range(WORLD)]
        results[f"{layout} shard"] = shards[0]
        results[f"{layout} whole"] = layout.unshard(shards, 1)
    return results


def _masks(x: Tensors, backend: str) -> Tensors:
    results = {}
    for mask in MASKS:
        results[f"{mask}"] = mask.visible(x["q"][..., None], x["k"])
        parts = mask.intervals(range(16)) if mask.sequences is None else ()
        results |= {f"{mask} {i}": bound for i, part in enumerate(parts) for bound in part.key_ranges(x["q"])}
    return results


def _canonicalize(x: Tensors, backend: str) -> Tensors:
    found = am.sparse.canonicalize(x["indices"], x["scores"], s_kv=12, unique=True)
    return {
        "indices": found.indices,
        "scores": found.scores,
        "lengths": found.lengths,
        "lse": am.sparse.convert_lse(x["scores"], "e", "2"),
    }


def _sample(x: Tensors, backend: str) -> Tensors:
    samplings = (am.Sampling(), am.Sampling(temperature=0.7, top_p=0.8, seed=3))
    return {
        f"{i}": torch.tensor(one.sample(x["logits"], one.generator(0)), device="cpu") for i, one in enumerate(samplings)
    }


def _model_inputs(x: Tensors, backend: str) -> Tensors:
    def shard(comm: am.comm.Comm) -> Tensors:
        cp = am.ContextParallel(comm, schedule="ring")
        given = am.shard_inputs(cp, x["ids"], x["labels"], position_ids=x["positions"], attention_mask=x["mask"])
        log_probs = am.gather_log_probs(given, given["attention_pass"].shard(x["logits"]))
        return {"log_probs": log_probs} | {name: one for name, one in given.items() if isinstance(one, Tensor)}

    return over_ranks(WORLD, shard)


def _transformers(x: Tensors, backend: str) -> Tensors:
    module = SimpleNamespace(layer_idx=0, training=False, is_causal=True)
    options = {"scaling": 0.25, "sliding_window": 4, "s_aux": x["sinks"]}
    rows = range(x["q"].shape[2])
    mask = LayerMask(am.SlidingWindow(3), None, None, rows, rows)
    return {"out": transformers_attention(module, x["q"], x["k"], x["v"], mask, **options)[0]}


def rank_operations() -> list[Operation]:
    """Return the operations over ranks, and those around attention."""
    names = ("attention", "shard", "unshard")
    context = tuple(f"ContextParallel.{name}" for name in names)
    sparse = ("sparse_attention", "attention_distribution", "indexer_scores_at", "indexer_topk", "indexer_kl_loss")
    collectives = tuple(f"Comm.{name}" for name in ("all_gather", "all_to_all", "reduce_scatter", "all_reduce"))
    ring = Operation(
        "ring distributed", ("ring_distributed_attention", "gather_ring_outputs"),
        _qkv, _query_distributed,
    )  # fmt: skip
    cache = Operation("ring distributed cache", ("ring_distributed_attention",), _pools, _over_a_cache)
    block = ("AttentionBlock", "AttentionBlock.__call__", "AttentionWeights", "AttentionWeights.shard")
    return [
        *(
            Operation(
                f"context parallel {schedule}", context, _qkv_and_sinks(_world_of(schedule)),
                _context_parallel(schedule),
            )
            for schedule in SCHEDULES
        ),
        ring,
        replace(ring, name="ring distributed alone", run=_one_of_a_ring, grads=("q", "k", "v")),
        cache,
        Operation(
            "sdpa", ("attention_context_parallel",),
            lambda random: _per_rank(_qkv)(random) | {"buffer": random.normal(3, WORLD * ROWS)}, _sdpa,
        ),
        Operation(
            "collectives", collectives, _per_rank(lambda random: {"x": random.normal(WORLD, 3, 4)}), _collectives
        ),
        *(
            Operation(
                f"sparse {schedule}", tuple(f"SparseParallel.{name}" for name in sparse), _sparse_inputs,
                _sparse_parallel(schedule),
            )
            for schedule in ("allgather", "ring")
        ),
        *(
            Operation(f"block {sharding}", block, _block_inputs, _block(sharding), truth=_block_truth)
            for sharding in (am.DecodeSharding(), am.DecodeSharding(cp=2), am.DecodeSharding(tp=2))
        ),
        Operation("stages", ("Rope.rotate",), _stage_inputs, _stages),
        Operation("weights", ("AttentionWeights.whole", "AttentionWeights.shard"), _projections, _shards_of_weights),
        *(
            Operation(
                f"write {storage}",
                ("CacheSpec", "BlockCache.write", "BlockCache.write_slots", "ShardedCache.write"),
                _new_tokens, _written(storage), exact="auto" if storage == "fp32" else None,
            )
            for storage in ("fp32", "fp8", "int8", "bfp8")
        ),
        Operation(
            "quantize", ("quantize", "dequantize"),
            lambda random: {"x": random.normal(2, 3, 5, 16), "scale": random.normal(3)}, _quantize, exact=None,
        ),
        Operation("layouts", tuple(f"{type(x).__name__}.{way}" for x in LAYOUTS for way in ("shard", "unshard")),
                  lambda random: {"x": random.normal(3, 16, 5)}, _layouts),
        Operation(
            "masks",
            tuple(f"{type(x).__name__}.{way}" for x in MASKS for way in ("visible", "key_ranges")),
            lambda random: {"q": random.integers(0, 16, 6), "k": random.integers(0, 16, 6)}, _masks,
        ),
        Operation(
            "canonicalize", ("canonicalize", "convert_lse"),
            lambda random: {"indices": random.integers(-2, 14, 5, 6), "scores": random.normal(5, 6)}, _canonicalize,
        ),
        Operation("sample", ("Sampling.sample",), lambda random: {"logits": random.normal(50)}, _sample),
        Operation(
            "model inputs", ("shard_inputs", "gather_log_probs"),
            lambda random: {
                "ids": random.integers(0, 9, 2, 10), "labels": random.integers(0, 9, 2, 10),
                "positions": torch.tensor([[*range(6), *range(4)], [*range(3), *range(7)]]),
                "mask": torch.ones(2, 10, dtype=torch.bool), "logits": random.normal(2, 10, 9),
            }, _model_inputs,
        ),
        Operation(
            "transformers", (), lambda random: _qkv(random) | {"sinks": random.normal(4)}, _transformers,
            ("q", "k", "v", "sinks"),
        ),
    ]  # fmt: skip
