"""A valid call of every public callable, for the argument fuzzer.

A function or constructor has a factory of its arguments; a method has one that takes the instance. Tensors and caches
are made anew for each call, because a call may change them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attnmesh as am
from attnmesh.comm import SoloComm
from attnmesh.generation import GenerationStats
from attnmesh.ops.block.norm_rope import Norm, Rope
from attnmesh.plan.decode import DecodeShape, Place
from attnmesh.plan.shards import Shape, Workload, shards
from attnmesh.planner.catalog import catalog, cluster
from attnmesh.planner.decode import DecodeRequest
from attnmesh.planner.models import model as known_model
from attnmesh.planner.prefill import PrefillRequest
from attnmesh.planner.schedules import program
from attnmesh.planner.simulator import Slowdown
from attnmesh.report import GeneratedAnswer, schedule_report
from attnmesh.testing.block import random_block
from attnmesh.testing.recurrent import KINDS, random_layer, to_dtype
from attnmesh.trace.timeline import Span, write_trace
from helpers import models

Arguments = dict[str, Any]


def rows(*shape: int) -> Tensor:
    """A small tensor that is the same in every call."""
    return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)


def _sharded() -> dict[str, object]:
    ids = torch.ones(2, 6, dtype=torch.int64)
    return am.shard_inputs(am.ContextParallel(SoloComm()), ids, ids)


def _qkv(length: int = 6) -> Arguments:
    return {"q": rows(1, 4, length, 8), "k": rows(1, 2, length, 8), "v": rows(1, 2, length, 8)}


def _recurrent_layers(length: int = 6) -> dict[str, am.recurrent.RecurrentLayer]:
    layers = (random_layer(kind, length, key_dim=8, value_dim=8) for kind in KINDS)
    return {type(layer).__name__: to_dtype(layer, torch.float32) for layer in layers}


def _delta_rule(length: int = 6) -> am.recurrent.RecurrentLayer:
    return _recurrent_layers(length)["GatedDeltaRule"]


def _decode() -> Arguments:
    return {"q": rows(2, 4, 1, 16), "k_cache": rows(2, 2, 8, 16), "v_cache": rows(2, 2, 8, 16)}


def _paged() -> Arguments:
    return {
        "q": rows(2, 4, 2, 16), "k_pool": rows(4, 4, 2, 16), "v_pool": rows(4, 4, 2, 16),
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), "cur_pos": [5, 6],
    }  # fmt: skip


def _paged_sparse(**more: Any) -> Arguments:
    return {
        "q": rows(2, 2, 2, 16), "pool": rows(4, 4, 1, 16), "block_table": torch.tensor([[0, 1], [2, 3]]).int(),
        "indices": torch.tensor([[[0, 5, -1]] * 2] * 2, dtype=torch.int32), "scale": 0.5, **more,
    }  # fmt: skip


def _paged_index() -> Arguments:
    return {
        "iq": rows(2, 2, 2, 16), "pool": am.quantize(rows(4, 4, 1, 16), "fp8_token"), "w": rows(2, 2, 2), "topk": 3,
        "block_table": torch.tensor([[0, 1], [2, 3]]).int(),
    }  # fmt: skip


def _indices() -> Tensor:
    return torch.tensor([[0, 1, -1]] * 6, dtype=torch.int32)


def _sparse(**more: Any) -> Arguments:
    return {"q": rows(6, 2, 8), "kv": rows(6, 8), "indices": _indices(), "scale": 0.5, **more}


def _distribution() -> Arguments:
    return {"q": rows(6, 2, 8), "k": rows(6, 8), "indices": _indices(), "lse": rows(6, 2), "scale": 0.5}


def _indexer(**more: Any) -> Arguments:
    return {"iq": rows(6, 2, 8), "ik": rows(6, 8), "w": rows(6, 2), **more}


def _dense_loss(n: int = 6) -> Arguments:
    target = am.sparse.AttentionTarget(rows(n, 2, 8), rows(n, 8), rows(n, 2), 0.5)
    return {"iq": rows(n, 2, 8), "ik": rows(n, 8), "w": rows(n, 2), "indices": None, "target": target}


def _sparse_loss() -> Arguments:
    return _indexer(indices=_indices(), target=rows(6, 3).abs())


CONFIG = am.decode.AttentionConfig(24, 4, 2, 8)
SHARDING = am.DecodeSharding()


def _weights() -> am.decode.AttentionWeights:
    return random_block(4, 2, 8, 24, sinks=True, alibi=True)[1]


def _block() -> Arguments:
    config, weights = random_block(4, 2, 8, 24, sinks=True, alibi=True)
    return {"config": config, "weights": weights, "sharding": SHARDING, "comm": SoloComm()}


def _make_cache() -> Arguments:
    return {"batch": 2, "num_blocks": 8, "block_size": 4, "max_length": 16, "storage": "fp32"}


def _score_terms() -> Arguments:
    return {"softcap": 2.0, "sinks": rows(4), "alibi_slopes": rows(4)}


def _block_call(block: am.AttentionBlock) -> Arguments:
    cache = block.make_cache(**_make_cache())
    step = cache.append([cache.allocate(4)], 2)
    return {"x": rows(2, 2, 24), "cache": cache, "step": step}


def _spec() -> Arguments:
    return {
        "layers": 1, "kv_heads": 2, "head_dim": 16, "value_dim": 16, "storage": "fp8", "k_scale": 1.0,
        "v_scale": torch.ones(2), "windows": (None,),
    }  # fmt: skip


def _latent_spec() -> Arguments:
    return {
        "layers": 2, "kv_heads": 1, "head_dim": 144, "value_dim": 128, "index_dim": 8, "storage": "fp8_ds_mla",
        "latent": True,
    }  # fmt: skip


def _sizes() -> Arguments:
    return {"spec": am.CacheSpec(**_spec()), "num_blocks": 8, "block_size": 4, "device": "cpu", "max_length": 16}


def _new(cache: am.BlockCache) -> Any:
    return cache.append([cache.allocate([1, 2, 3, 4])], 2)


def _stored_cache(comm: am.comm.Comm | None = None, sharding: am.DecodeSharding = SHARDING) -> am.ShardedCache:
    cache = am.ShardedCache(sharding, 0 if comm is None else comm.rank, batch=2, **_sizes())
    cache.mark_written(cache.append([cache.allocate([1, 2, 3])], 3))
    return cache


def _cache_folder() -> Path:
    folder = Path(tempfile.mkdtemp())
    am.decode.save_cache(_stored_cache(), folder, SoloComm())
    return folder


def _requests_folder() -> Path:
    folder = Path(tempfile.mkdtemp())
    am.generation.save_requests(am.Generator(**_generator()), folder)
    return folder


def _step(cache: am.ShardedCache) -> Any:
    return cache.append([cache.allocate([1, 2, 3, 4])], 2)


@cache
def model() -> Any:
    """A small language model."""
    return models.attnmesh_model("llama")


@cache
def model_folder() -> Path:
    """The folder of a small language model."""
    return models.write_folder(Path(tempfile.mkdtemp(prefix="attnmesh-arguments-")))


def _generator() -> Arguments:
    return {
        "model": model(), "tokenizer": None, "comm": SoloComm(), "cache_tokens": 64, "max_sequences": 2,
        "storage": "int8", "prefill_chunk": 8, "step_tokens": 16,
    }  # fmt: skip


def _generate() -> Arguments:
    return {
        "prompts": [[9, 10, 11, 12], [13, 14, 15]], "max_new_tokens": 1, "sampling": am.Sampling(), "stop": [7],
        "num_beams": 1,
    }  # fmt: skip


def _submit() -> Arguments:
    return {
        "prompt": [9, 10, 11, 12], "max_new_tokens": 2, "sampling": am.Sampling(), "stop": [7], "stop_strings": [],
        "min_new_tokens": 1, "logprobs": 2, "logits_processors": [lambda ids, logits: logits], "sample": 1,
        "num_beams": 1,
    }  # fmt: skip


def _shape() -> Shape:
    return Shape(batch=1, q_heads=4, kv_heads=2, head_dim=8, itemsize=2, sum_itemsize=4, value_dim=12)


def _workload() -> Workload:
    return Workload(shards(am.Causal(), am.Zigzag(), 64, 4), _shape(), 2)


@cache
def _report() -> Any:
    return schedule_report(am.Causal(), am.Zigzag(), 64, 2, _shape())


@cache
def hardware_file() -> Path:
    """A file that updates the catalog."""
    path = Path(tempfile.mkdtemp(prefix="attnmesh-arguments-")) / "hardware.toml"
    path.write_text("[device.h200]\nmemory_gb = 100\n")
    return path


@cache
def trace_file() -> Path:
    """A trace of one span."""
    path = Path(tempfile.mkdtemp(prefix="attnmesh-arguments-")) / "trace.json"
    write_trace(path, [Span(0, "compute", "a", 0.0, 1.0)], title="test")
    return path


def _request() -> Arguments:
    sizes = {"context": 1024, "batch": 2, "devices": 2, "cluster": cluster("h200")}
    return {"model": known_model("llama-3.1-8b"), "kv_itemsize": 2.0, **sizes}


def _linear_weights() -> Arguments:
    q, k, v = rows(32, 24), rows(16, 24), rows(16, 24)
    biases = (rows(32), rows(16), rows(16))
    return {"q": q, "k": k, "v": v, "biases": biases, "out": rows(24, 32), "sinks": rows(4)}


CALLS: dict[str, list[Callable[..., Arguments]]] = {
    # Attention.
    "attention": [
        lambda: {**_qkv(), "mask": am.Causal(), "q_positions": torch.arange(6), "k_positions": torch.arange(6)},
        lambda: {**_qkv(), "backend": "reference"},
        lambda: {**_qkv(), "softcap": 2.0, "sinks": rows(4), "alibi_slopes": rows(4), "backend": "torch"},
    ],
    "explain_attention": [
        lambda: {**_qkv(), "mask": am.Causal(), "q_positions": torch.arange(6)},
        lambda: {**_qkv(), "softcap": 2.0, "sinks": rows(4), "alibi_slopes": rows(4)},
    ],
    "attention_context_parallel": [
        lambda: {
            "group": SoloComm(), "length": 6, "mask": am.Full(), "buffers": [rows(2, 6)], "buffer_seq_dims": [1],
            "no_restore_buffers": [], "layout": am.Zigzag(), "schedule": "ring", "backend": "auto",
        },
    ],
    "merge": [lambda: {"states": [am.State(rows(2, 3), rows(2)), am.State(rows(2, 3), rows(2))]}],
    "merge_sinks": [lambda: {"state": am.State(rows(2, 3), rows(2)), "sinks": rows(2)}],
    "State.identity": [lambda: {"shape": (2, 3), "dtype": torch.float32, "device": "cpu"}],
    "ring_chunks": [lambda: {"length": 64, "ring_size": 4, "ring_id": 1, "pairs": (1, 1, 1, 1)}],
    "ring_distributed_attention": [
        lambda: {
            **_qkv(), "q": rows(1, 4, 4, 8), "ring_size": 2, "ring_id": 0, "pairs": 1, "q_offset": 2,
            "mask": am.SlidingWindow(2), **_score_terms(),
        },
        lambda: {**_qkv(), "group": SoloComm()},
        lambda: {
            "q": rows(2, 4, 5, 16), "k": rows(4, 4, 2, 16), "v": rows(4, 4, 2, 16), "q_offset": [3, 1],
            "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), "ring_size": 2, "ring_id": 1,
        },
    ],
    "gather_ring_outputs": [lambda: {"local_out": rows(1, 4, 6, 8), "length": 6, "group": SoloComm()}],
    # Masks and layouts.
    "SlidingWindow": [lambda: {"left": 2, "right": 1}],
    "Documents": [lambda: {"lengths": [4, 2], "prefixes": [1, 2]}],
    "Prefix": [lambda: {"n": 2}],
    "Chunked": [lambda: {"size": 2}],
    "BlockCausal": [lambda: {"size": 2}],
    "Global": [lambda: {"n": 2, "both": True}],
    "Padding": [lambda: {"lengths": [4, 2], "side": "left", "length": 6}],
    "PerSequence": [lambda: {"masks": [am.Causal(), am.Full()]}],
    "Slices": [lambda: {"slices": [((0, 2), (1, 3), "causal")]}],
    "Mask.draw": [lambda mask: {"length": mask.length, "size": 3}],
    "Mask.of_sequence": [lambda mask: {"index": 0}],
    "Balanced": [lambda: {"mask": am.Causal()}],
    "Joint": [lambda: {"parts": ((4, am.Zigzag()), (2, am.Striped()))}],
    "Aligned": [lambda: {"layout": am.Zigzag(), "size": 4}],
    "Zigzag": [lambda: {"pairs": 2}, lambda: {"pairs": (1, 2)}],
    "Mask.visible": [lambda mask: {"q_pos": torch.arange(4), "k_pos": torch.arange(4)}],
    "Mask.check": [lambda mask: {"length": 6}],
    "Layout.ranges": [lambda layout: {"length": 6, "world": 2, "rank": 1}],
    "Layout.positions": [lambda layout: {"length": 6, "world": 2, "rank": 1}],
    "Layout.local_length": [lambda layout: {"length": 6, "world": 2, "rank": 1}],
    "Layout.chunks": [lambda layout: {"length": 6, "world": 2, "rank": 1}],
    "Layout.shard": [lambda layout: {"x": rows(2, 6), "dim": 1, "world": 2, "rank": 1}],
    "Layout.unshard": [
        lambda layout: {"shards": [layout.shard(rows(2, 6), 1, 2, rank) for rank in range(2)], "dim": 1},
    ],
    # Context parallelism.
    "ContextParallel": [
        lambda: {"group": SoloComm(), "layout": am.Zigzag(), "schedule": "ring", "ranks_per_node": 1},
    ],
    "ContextParallel.attention": [
        lambda cp: {**_qkv(), "mask": am.Causal(), "length": 6, "key_length": 6, "key_layout": am.Zigzag()},
    ],
    "ContextParallel.explain": [
        lambda cp: {
            "length": 64, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 12, "key_length": 64, "device": "cpu"
        },
    ],
    "ContextParallel.recurrent": [
        lambda cp: {
            "layer": _delta_rule(), "length": 6, "documents": am.Documents([2, 4]), "initial_state": rows(1, 4, 8, 8),
            "return_final_state": True,
        },
    ],
    "ContextParallel.explain_recurrent": [
        lambda cp: {"layer": _delta_rule(), "length": 64, "return_final_state": True, "device": "cpu"},
    ],
    "ContextParallel.positions": [lambda cp: {"length": 6}],
    "ContextParallel.shard": [lambda cp: {"x": rows(2, 6), "dim": 1}],
    "ContextParallel.unshard": [lambda cp: {"x": rows(2, 6), "dim": 1, "length": 6}],
    "ContextParallel.with_layout": [lambda cp: {"layout": am.Striped()}],
    # Recurrent layers.
    "scan": [
        lambda: {
            "layer": _delta_rule(), "documents": am.Documents([2, 4]), "initial_state": rows(1, 4, 8, 8),
            "return_final_state": True,
        },
    ],
    **{
        name: [lambda name=name: dict(_recurrent_layers()[name]._tensors())]
        for name in ("GatedDeltaRule", "KimiDeltaAttention", "LightningAttention", "RWKV7", "Mamba1", "Mamba2",
                     "ShortConvolution")
    },
    "RecurrentLayer.rows": [lambda layer: {"rows": range(1, 4)}],
    "Segment.identity": [lambda: {"shape": (2, 3), "dtype": torch.float32, "device": "cpu"}],
    "Segment.apply": [lambda segment: {"state": rows(3, 2)}],
    "Segment.after": [lambda segment: {"earlier": am.recurrent.Segment(rows(3, 3), rows(3, 2))}],
    "shard_inputs": [
        lambda: {"cp": am.ContextParallel(SoloComm()), "input_ids": torch.ones(2, 6, dtype=torch.int64),
                 "labels": torch.ones(2, 6, dtype=torch.int64), "position_ids": torch.arange(6)[None],
                 "attention_mask": torch.ones(2, 6, dtype=torch.int64), "num_items_in_batch": 3},
        lambda: {"cp": am.ContextParallel(SoloComm()), "input_ids": torch.ones(2, 6, dtype=torch.int64),
                 "document_lengths": [[2, 4], [6]]},
    ],
    "gather_log_probs": [lambda: {"inputs": _sharded(), "logits": rows(2, 6, 5)}],
    # Decode.
    "decode_attention": [
        lambda: {**_decode(), "cur_pos": torch.tensor([5, 7]), "sinks": rows(4), "window": 3},
        lambda: {**_decode(), "mask": torch.ones(1, 1, 1, 8, dtype=torch.bool)},
        lambda: {**_decode(), "tree": torch.ones(1, 1, dtype=torch.bool), "softcap": 2.0, "alibi_slopes": rows(4)},
        lambda: {**_decode(), "key_range": (torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1, dtype=torch.int32))},
        lambda: {
            "q": rows(2, 4, 1, 16), "k_cache": am.quantize(rows(2, 2, 8, 16), "int8"),
            "v_cache": am.quantize(rows(2, 2, 8, 16), "int8"), "backend": "reference",
        },
    ],
    "paged_decode_attention": [
        lambda: {**_paged(), "into": am.State(torch.empty(2, 4, 2, 16), torch.empty(2, 4, 2))},
        lambda: {
            **_paged(), "cur_pos": torch.tensor([5, 6], dtype=torch.int32), "softcap": 2.0, "alibi_slopes": rows(4),
            "backend": "reference",
        },
    ],
    "paged_prefill_attention": [
        lambda: {**_paged(), "q": rows(2, 4, 5, 16), "sinks": rows(4), "window": 3},
        lambda: {
            **_paged(), "q": rows(2, 4, 5, 16), "query_lengths": [5, 2], "causal": False, "softcap": 2.0,
            "alibi_slopes": rows(4),
        },
        lambda: {
            **_paged(), **{pool: am.quantize(rows(4, 4, 2, 16), "int8") for pool in ("k_pool", "v_pool")},
            "cur_pos": torch.tensor([5, -1], dtype=torch.int32), "backend": "torch",
        },
    ],
    "paged_sparse_decode_attention": [
        lambda: _paged_sparse(sinks=rows(2), d_v=8),
        lambda: _paged_sparse(
            q=rows(2, 2, 2, 144), pool=am.quantize(rows(4, 4, 1, 144), "fp8_ds_mla"), block_table=None, split_size=16,
            out_dtype=torch.float32, return_max_logits=True,
        ),
    ],
    "paged_indexer_topk": [
        lambda: {**_paged_index(), "cur_pos": [5, 6]},
        lambda: {**_paged_index(), "cur_pos": torch.tensor([5, 6]), "relu": False, "scale": 0.5},
        lambda: {**_paged_index(), "key_range": (torch.zeros(2, 2, dtype=torch.int32),) * 2, "cur_pos": None},
    ],
    "quantize": [
        lambda: {"x": rows(2, 2, 8, 16), "storage": "fp8", "scale": torch.ones(2), "head_axis": 1},
        lambda: {"x": rows(2, 2, 8, 16), "storage": "int8"},
        lambda: {"x": rows(2, 2, 8, 16), "storage": "bfp8"},
    ],
    "dequantize": [
        lambda: {"stored": am.quantize(rows(2, 2, 8, 16), "fp8", scale=torch.ones(2)), "dtype": torch.float32},
        lambda: {"stored": rows(2, 2, 8, 16), "dtype": torch.float16},
    ],
    "Quantized": [
        lambda: {"values": torch.zeros(2, 2, 8, 16, dtype=torch.int8), "scales": torch.ones(2, 2, 8)},
        lambda: {"values": torch.zeros(2, 16, dtype=torch.int8), "scales": torch.ones(2, 1, dtype=torch.int8)},
        lambda: {"values": torch.zeros(2, 16).to(torch.float8_e4m3fn), "scales": torch.ones(())},
        lambda: {"values": torch.zeros(2, 128).to(torch.float8_e4m3fn), "scales": torch.ones(2, 1),
                 "rope": torch.ones(2, 4, dtype=torch.bfloat16)},
    ],
    "unpack_latent": [lambda: {"cache": torch.zeros(2, 4, 1, 656, dtype=torch.uint8), "rope_dim": 64}],
    "unpack_index_keys": [lambda: {"cache": torch.zeros(2, 4 * 132, dtype=torch.uint8), "block_size": 4}],
    "CacheSpec": [_spec, _latent_spec],
    "BlockCache": [lambda: {**_sizes(), "max_sequences": 2}],
    "content_ids": [lambda: {"content": b"an image", "count": 3}],
    "BlockCache.allocate": [lambda cache: {"prompt": [1, 2, 3], "cache_key": "a"}, lambda cache: {"prompt": 3}],
    "BlockCache.find_prefix": [lambda cache: {"prompt": [1, 2, 3], "cache_key": "a"}],
    "BlockCache.append": [
        lambda cache: {"sequences": [cache.allocate(0)], "tokens": [[1, 2]]},
    ],
    "BlockCache.check_append": [lambda cache: {"sequences": [cache.allocate(0)], "tokens": 2}],
    "BlockCache.fork": [lambda cache: {"sequence": cache.allocate(2)}],
    "BlockCache.free": [lambda cache: {"sequence": cache.allocate(2)}],
    "BlockCache.truncate": [lambda cache: {"sequence": cache.allocate(2), "length": 0}],
    "BlockCache.keys": [lambda cache: {"layer": 0}],
    "BlockCache.values": [lambda cache: {"layer": 0}],
    "BlockCache.mark_written": [lambda cache: {"new": _new(cache), "layer": 0}],
    "BlockCache.write": [
        lambda cache: {"layer": 0, "new": _new(cache), "k": rows(1, 2, 2, 16), "v": rows(1, 2, 2, 16)},
    ],
    "ShardedCache": [lambda: {**_sizes(), "sharding": SHARDING, "rank": 0, "batch": 2}],
    "ShardedCache.allocate": [lambda cache: {"prompt": [1, 2, 3], "cache_key": "a"}],
    "ShardedCache.append": [lambda cache: {"sequences": [cache.allocate(0)], "tokens": [[1, 2]]}],
    "ShardedCache.check_step": [lambda cache: {"step": _step(cache), "layer": 0}],
    "ShardedCache.fork": [lambda cache: {"sequence": cache.allocate(2)}],
    "ShardedCache.free": [lambda cache: {"sequence": cache.allocate(2)}],
    "ShardedCache.truncate": [lambda cache: {"sequence": cache.allocate(2), "length": 0}],
    "ShardedCache.keys": [lambda cache: {"layer": 0}],
    "ShardedCache.values": [lambda cache: {"layer": 0}],
    "ShardedCache.mark_written": [lambda cache: {"step": _step(cache), "layer": 0}],
    "ShardedCache.write": [
        lambda cache: {"layer": 0, "step": _step(cache), "k": rows(2, 2, 2, 16), "v": rows(2, 2, 2, 16)},
    ],
    "reshard": [
        lambda: {"cache": _stored_cache(), "to": SHARDING, "comm": SoloComm(), "ranks": [0], "num_blocks": 8,
                 "block_size": 4, "max_length": 16, "device": "cpu", "message_bytes": 4096},
        lambda: {"cache": _stored_cache(), "to": SHARDING, "comm": SoloComm(), "into": _stored_cache(), "rows": [0]},
    ],
    "save_cache": [lambda: {"cache": _stored_cache(), "folder": Path(tempfile.mkdtemp()), "comm": SoloComm()}],
    "load_cache": [
        lambda: {"folder": _cache_folder(), "to": SHARDING, "comm": SoloComm(), "ranks": [0], "num_blocks": 8,
                 "block_size": 4, "max_length": 16, "device": "cpu"},
    ],
    "PrefillKV": [
        lambda: {"keys": [rows(1, 2, 3, 16)], "values": [rows(1, 2, 3, 16)], "layout": am.Contiguous(), "length": 6,
                 "rank": 1, "world": 2, "ids": [[1, 2, 3, 4, 5, 6]]},
    ],
    # Sharded generation.
    "Norm": [lambda: {"eps": 1e-6}],
    "Rope": [lambda: {"frequencies": (1.0, 0.5), "layout": "halves", "factor": 1.0}],
    "Rope.plain": [lambda: {"dim": 8, "theta": 10000.0, "layout": "pairs"}],
    "Rope.llama3": [
        lambda: {"dim": 8, "theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_length": 8192},
    ],
    "Rope.on": [lambda rope: {"device": torch.device("cpu")}],
    "Rope.cos_sin": [lambda rope: {"positions": torch.tensor([[0, 1, 2]])}],
    "Rope.rotate": [lambda rope: {"x": rows(1, 2, 3, 8), "positions": torch.tensor([[0, 1, 2]])}],
    "AttentionConfig": [
        lambda: {"hidden": 24, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "norm": Norm(1e-6), "rope": Rope.plain(8),
                 "window": 4, "scale": 0.5, "softcap": 2.0},
    ],
    "AttentionWeights": [lambda: vars(_weights())],
    "AttentionWeights.check": [lambda weights: {"config": CONFIG, "sharding": SHARDING, "rank": 0}],
    "AttentionWeights.shard": [lambda weights: {"config": CONFIG, "sharding": SHARDING, "rank": 0}],
    "AttentionWeights.whole": [_linear_weights],
    "AttentionBlock": [_block],
    "AttentionBlock.make_cache": [lambda block: _make_cache()],
    "AttentionBlock.__call__": [
        _block_call,
        lambda block: {**_block_call(block), "cos_sin": (rows(2, 2, 4), rows(2, 2, 4))},
    ],
    "DecodeSharding": [lambda: {"tp": 2, "kvdp": 2, "cp": 2, "interleave": 4}],
    "DecodeSharding.check_heads": [lambda sharding: {"q_heads": 16, "kv_heads": 2}],
    "DecodeSharding.cp_heads": [lambda sharding: {"rank": 1, "q_heads": 16}],
    "DecodeSharding.group_heads": [lambda sharding: {"rank": 1, "q_heads": 16}],
    "DecodeSharding.q_heads": [lambda sharding: {"rank": 1, "q_heads": 16}],
    "DecodeSharding.replicated_q_heads": [lambda sharding: {"rank": 1, "q_heads": 16}],
    "DecodeSharding.kv_heads": [lambda sharding: {"rank": 1, "kv_heads": 2}],
    "DecodeSharding.cp_peers": [lambda sharding: {"rank": 1}],
    "DecodeSharding.kvdp_peers": [lambda sharding: {"rank": 1}],
    "DecodeSharding.owner": [lambda sharding: {"position": 5}],
    "DecodeSharding.place": [lambda sharding: {"rank": 1}],
    "DecodeSharding.position_shard": [lambda sharding: {"rank": 1}],
    "DecodeSharding.rank": [lambda sharding: {"place": Place(0, 1, 1)}],
    "DecodeSharding.sequences": [lambda sharding: {"rank": 1, "batch": 4}],
    "Exchange": [lambda: {"kvdp": "all_gather", "cp": "reduce_scatter", "replicate_q": True}],
    "Exchange.combine": [
        lambda exchange: {
            "sharding": am.DecodeSharding(cp=2), "shape": DecodeShape(1, 1, 4, 2, 8, 32), "device": "cpu",
        },
    ],
    "decode_rank": [lambda: {"group": SoloComm(), "sharding": SHARDING}],
    "attention_from_transformers": [
        lambda: {"module": model().model.layers[0].self_attn, "input_norm": model().model.layers[0].input_layernorm},
    ],
    "recommend_sharding": [
        lambda: {"batch": 2, "q_heads": 16, "kv_heads": 2, "ranks": 4, "context": 1024, "hidden": 64, "kv_bytes": 64},
        lambda: {"batch": 2, "q_heads": 16, "kv_heads": 2, "ranks": 4, "context": 1024, "cluster": cluster("h200")},
    ],
    # Language models.
    "load_model": [
        lambda: {"path": model_folder(), "device": "cpu", "dtype": torch.float32},
        lambda: {"path": model_folder(), "sharding": am.DecodeSharding(), "comm": None},
    ],
    "Sampling": [
        lambda: {
            "temperature": 0.5, "top_p": 0.9, "seed": 1, "top_k": 8, "min_p": 0.1, "repetition_penalty": 1.5,
            "presence_penalty": 0.5, "frequency_penalty": 0.25,
        },
    ],
    "Sampling.generator": [lambda sampling: {"row": 1, "token": 2}],
    "Sampling.sample": [
        lambda sampling: {
            "logits": rows(16), "generator": sampling.generator(0), "prompt": [1, 2, 3], "answer": [4, 5],
        },
    ],
    "shard_model": [lambda: {"model": model(), "sharding": am.DecodeSharding(), "comm": None}],
    "Generator": [_generator],
    "move_requests": [
        lambda: {"source": am.Generator(**_generator()), "target": am.Generator(**_generator()), "comm": SoloComm(),
                 "requests": []},
    ],
    "save_requests": [lambda: {"generator": am.Generator(**_generator()), "folder": Path(tempfile.mkdtemp())}],
    "load_requests": [lambda: {"generator": am.Generator(**_generator()), "folder": _requests_folder()}],
    "Generator.generate": [lambda generator: _generate()],
    "Generator.submit": [lambda generator: _submit()],
    "Generator.stream": [lambda generator: {"request": generator.submit(**_submit())}],
    "Generator.cancel": [lambda generator: {"request": generator.submit(**_submit())}],
    "generate": [lambda: {"model": model(), "tokenizer": None, **_generate(), "comm": SoloComm(), "storage": "fp8",
                          "prefill_chunk": 8}],
    # Sparse attention.
    "sparse_attention": [lambda: _sparse(d_v=8, sinks=rows(2)), lambda: _sparse(v=rows(6, 4))],
    "attention_distribution": [_distribution],
    "indexer_topk": [lambda: _indexer(topk=2)],
    "indexer_scores_at": [lambda: _indexer(indices=_indices())],
    "indexer_kl_loss": [
        lambda: {**_sparse_loss(), "row_mask": torch.ones(6, dtype=torch.bool), "reduction": "mean_rows"},
        _dense_loss,
    ],
    "canonicalize": [lambda: {"indices": _indices(), "scores": rows(6, 3), "s_kv": 6}],
    "convert_lse": [lambda: {"lse": rows(6, 2), "src": "e", "dst": "2"}],
    "SparseMask": [
        lambda: {"topk_length": torch.ones(6, dtype=torch.int32), "causal": True, "q_start": 1, "k_stride": 2,
                 "k_start": torch.zeros(6, dtype=torch.int64), "k_end": torch.ones(6, dtype=torch.int64)},
    ],
    "SparseParallel": [lambda: {"tp": SoloComm(), "cp": SoloComm(), "length": 6, "key_length": 6}],
    "SparseDecode": [lambda: {"cp": None, "interleave": 2, "heads": [2], "check_indices": False}],
    "SparseDecode.indexer_topk": [lambda decode: {**_paged_index(), "cur_pos": [5, 6]}],
    "SparseDecode.attention": [lambda decode: _paged_sparse(sinks=rows(2), d_v=8)],
    "SparseParallel.sparse_attention": [lambda parallel: _sparse(d_v=8, sinks=rows(2))],
    "SparseParallel.attention_distribution": [lambda parallel: _distribution()],
    "SparseParallel.indexer_topk": [lambda parallel: _indexer(topk=2)],
    "SparseParallel.indexer_scores_at": [lambda parallel: _indexer(indices=_indices())],
    "SparseParallel.indexer_kl_loss": [lambda parallel: _sparse_loss(), lambda parallel: _dense_loss()],
    # Ranks.
    "comm_from": [lambda: {"group": SoloComm(), "timeout": 30.0}],
    "run_virtual": [lambda: {"world": 2, "fn": lambda comm: comm.rank, "timeout": 30.0}],
    "recording": [lambda: {"comm": SoloComm(), "device": "cpu"}],
    # Plans, the planner and reports.
    "shards": [
        lambda: {"mask": am.Causal(), "layout": am.Zigzag(), "length": 64, "world": 4, "key_layout": am.Zigzag(),
                 "key_length": 64},
    ],
    "Shape": [lambda: vars(_shape())],
    "Shape.with_heads": [lambda shape: {"q_heads": 8, "kv_heads": 2}],
    "Workload": [lambda: vars(_workload())],
    "program": [lambda: {"schedule": "ring", "workload": _workload(), "backward": False}],
    "cluster": [
        lambda: {"device": "h200", "ranks_per_node": 4, "intra_node": "nvlink4", "inter_node": None, "rails": 4},
    ],
    "schedule_cost": [
        lambda: {"schedule": "ring", "workload": _workload(), "cluster": cluster("h200"), "backward": False},
    ],
    "simulate": [
        lambda: {"program": program("ring", _workload(), backward=False), "cluster": cluster("h200"),
                 "slow": Slowdown(), "keep": [0, 1]},
    ],
    "Catalog.device": [lambda catalog: {"name": "h200"}],
    "Catalog.link": [lambda catalog: {"name": "nvlink4"}],
    "Catalog.cluster": [lambda catalog: {"device": "h200", "ranks_per_node": 4, "intra_node": "nvlink4", "rails": 4}],
    "catalog": [lambda: {"extra": hardware_file()}],
    "default_cluster": [lambda: {"device": "cpu"}],
    "load": [lambda: {"path": hardware_file()}],
    "compare_shardings": [lambda: {"q_heads": 16, "kv_heads": 2, "ranks": 4}],
    "model": [lambda: {"name_or_path": "llama-3.1-8b"}],
    "read_config": [lambda: {"path": model_folder() / "config.json"}],
    "read_model_config": [lambda: {"path": model_folder() / "config.json", "name": "tiny"}],
    "PrefillRequest": [_request],
    "DecodeRequest": [lambda: {**_request(), "tokens": 1}],
    "prefill_ranking": [lambda: {"request": PrefillRequest(**_request())}],
    "decode_ranking": [lambda: {"request": DecodeRequest(**_request())}],
    "Slowdown": [lambda: {"ranks": {0: 1.5}, "links": {1: 2.0}}],
    "Slowdown.check": [lambda slow: {"world": 4}],
    "Slowdown.computing": [lambda slow: {"world": 4}],
    "write_trace": [
        lambda: {"path": Path(tempfile.gettempdir()) / "attnmesh-trace.json", "title": "test", "metadata": {"a": 1},
                 "spans": [Span(0, "compute", "a", 0.0, 1.0)]},
    ],
    "read_trace": [lambda: {"path": trace_file()}],
    "schedule_report": [
        lambda: {"mask": am.Causal(), "layout": am.Zigzag(), "length": 64, "world": 2, "shape": _shape(),
                 "ranks_per_node": 1, "device": "cpu", "facts": {"a": 1}, "figures": {"t": [{"a": 1}]}},
    ],
    "generation_report": [
        lambda: {"answers": [GeneratedAnswer("q", "a", 3, 2)], "stats": [GenerationStats(0)], "facts": {"a": 1},
                 "ranks_per_node": 1},
    ],
    "write_report": [lambda: {"path": Path(tempfile.gettempdir()) / "attnmesh-report.html", "report": _report()}],
}  # fmt: skip

RECEIVERS: dict[str, Callable[[], Any]] = {
    "Comm": SoloComm,
    "AttentionWeights": _weights,
    "Catalog": catalog,
    "DecodeSharding": lambda: am.DecodeSharding(tp=2, kvdp=2, cp=2, interleave=4),
    "ContextParallel": lambda: am.ContextParallel(SoloComm()),
    "Exchange": am.decode.Exchange,
    "Zigzag": am.Zigzag,
    "Rope": lambda: Rope.plain(8),
    "Segment": lambda: am.recurrent.Segment(rows(3, 1), rows(3, 2)),
    "SparseMask": lambda: am.SparseMask(causal=True),
}
"""How to make the instance of a class; by default from the first valid call of its constructor."""

WORLD, SHARDED = 2, am.DecodeSharding(cp=2)


def _on_ranks(comm: am.comm.Comm) -> tuple[am.AttentionBlock, Arguments]:
    config, weights = random_block(4, 2, 8, 24)
    block = am.AttentionBlock(config, weights.shard(config, SHARDED, comm.rank), SHARDED, comm)
    return block, _block_call(block)


def _block_on_ranks(comm: am.comm.Comm) -> tuple[None, Arguments]:
    config, weights = random_block(4, 2, 8, 24)
    shard = weights.shard(config, SHARDED, comm.rank)
    return None, {"config": config, "weights": shard, "sharding": SHARDED, "comm": comm}


def _rows_of(comm: am.comm.Comm, **whole: Any) -> Arguments:
    """Rows of this rank, of tensors whose first dimension is the sequence."""
    layout = am.Contiguous()
    return {
        name: layout.shard(x, 0, comm.world, comm.rank) if isinstance(x, Tensor) else x for name, x in whole.items()
    }


def _sparse_on_ranks(arguments: Callable[[], Arguments]) -> Callable[[am.comm.Comm], tuple[Any, Arguments]]:
    return lambda comm: (am.SparseParallel(cp=comm), _rows_of(comm, **arguments()))


def _cancel_on_ranks(comm: am.comm.Comm) -> tuple[Any, Arguments]:
    generator = am.Generator(**{**_generator(), "comm": comm})
    return generator, {"request": generator.submit(**_submit())}


COLLECTIVE: dict[str, Callable[[am.comm.Comm], tuple[Any, Arguments]]] = {
    "ContextParallel.attention": lambda comm: (
        am.ContextParallel(comm, schedule="ring"), {**_qkv(3), "length": 6, "mask": am.Causal(), **_score_terms()},
    ),
    "ContextParallel.recurrent": lambda comm: (
        am.ContextParallel(comm),
        {"layer": _delta_rule(3), "length": 6, "documents": am.Documents([2, 4]), "initial_state": rows(1, 4, 8, 8)},
    ),
    "ContextParallel.unshard": lambda comm: (am.ContextParallel(comm), {"x": rows(2, 3), "dim": 1, "length": 6}),
    "ring_distributed_attention": lambda comm: (None, {**_qkv(), "group": comm}),
    "gather_ring_outputs": lambda comm: (None, {"local_out": rows(1, 4, 3, 8), "length": 6, "group": comm}),
    "AttentionBlock": _block_on_ranks,
    "AttentionBlock.__call__": _on_ranks,
    "SparseParallel.sparse_attention": _sparse_on_ranks(lambda: _sparse(d_v=8)),
    "SparseDecode.indexer_topk": lambda comm: (am.sparse.SparseDecode(comm), {**_paged_index(), "cur_pos": [5, 6]}),
    "SparseDecode.attention": lambda comm: (am.sparse.SparseDecode(comm), _paged_sparse(d_v=8)),
    "SparseParallel.attention_distribution": _sparse_on_ranks(_distribution),
    "SparseParallel.indexer_topk": _sparse_on_ranks(lambda: _indexer(topk=2)),
    "SparseParallel.indexer_scores_at": _sparse_on_ranks(lambda: _indexer(indices=_indices())),
    "SparseParallel.indexer_kl_loss": lambda comm: (am.SparseParallel(cp=comm), _dense_loss(3)),
    "reshard": lambda comm: (
        None, {"cache": _stored_cache(comm, SHARDED), "to": SHARDED, "comm": comm, "num_blocks": 8, "ranks": [1, 0]},
    ),
    "Generator": lambda comm: (None, {**_generator(), "comm": comm}),
    "shard_model": lambda comm: (None, {"model": model(), "sharding": SHARDED, "comm": comm}),
    "Generator.generate": lambda comm: (am.Generator(**{**_generator(), "comm": comm}), _generate()),
    "Generator.submit": lambda comm: (am.Generator(**{**_generator(), "comm": comm}), _submit()),
    "Generator.cancel": _cancel_on_ranks,
}  # fmt: skip
"""Calls that all ranks make together, on `WORLD` ranks: an error on one rank is raised on all of them."""

NOT_FUZZED = {
    **{
        f"Comm.{name}": "messages between ranks, inside executors and on tensors that were checked"
        for name in (
            "agree",
            "all_gather",
            "all_reduce",
            "all_to_all",
            "buffer",
            "exchange",
            "fail",
            "log_of",
            "note",
            "reduce_scatter",
            "replaying",
        )
    },
    "Intervals.boundaries": "called by plans for every block",
    "Mask.intervals": "called by plans for every block",
    "Mask.trapezoids": "called by plans with positions that were checked",
    "Intervals.pairs": "called by plans for every block",
    "Intervals.rows_seen": "called by plans for every block",
    "Mask.coverage": "called by plans for every block",
    "Intervals.key_range": "called by plans for every row",
    "Layout.assign": "called by ranges with numbers that were checked",
    "Intervals.key_ranges": "called by kernels with positions that were checked",
    "SparseMask.bounds": "called by kernels with the sizes of tensors that were checked",
    "CacheSpec.of_heads": "called by ShardedCache with its own heads",
    "BlockCache.write_slots": "called by ShardedCache, whose `write` passes them on",
    "BlockCache.extend": "called by ShardedCache and Scheduler; `append` checks the same arguments",
    "BlockCache.check_extend": "called by ShardedCache and Scheduler; `check_append` checks the same arguments",
    "BlockCache.check_allocate": "called by Scheduler; `allocate` checks the same prompt",
    "BlockCache.reusable": "called by Scheduler with its own numbers",
    "BlockCache.chunk_end": "called by Scheduler with its own sequences",
    "BlockCache.keep_state": "called by Scheduler with its own sequences",
    "BlockCache.has": "called by ShardedCache with what it was given",
    **dict.fromkeys(
        (f"Generator.{name}" for name in ("states", "requests_from", "adopt", "end_moved")),
        "called by move_requests, save_requests and load_requests",
    ),
    "BlockCache.slots_of": "called by passes with their own tokens",
    "BlockCache.index_keys": "as `keys`, of a cache with an indexer",
    "BlockCache.restore": "called by reshard with the sequences of another cache",
    "ShardedCache.restore": "called by reshard with the sequences of another cache",
    "BlockCache.mark_restored": "called by reshard with the sequences that it restored",
    "ShardedCache.mark_restored": "called by reshard with the sequences that it restored",
    "PrefillKV.read": "called by reshard with the pieces of its plan",
    "BlockCache.upload": "called by ShardedCache with its own numbers",
    "ContextParallel.agreed_executor": "the interface of compiled operators, which pass checked options",
    "ContextParallel.executor": "the interface of compiled operators, which pass checked options",
    "Catalog": "read from a file, which is checked",
    **dict.fromkeys(
        ("GradientReduction", *(f"GradientReduction.{name}" for name in ("num_items", "loss"))),
        "requires processes and a model that DDP or FSDP2 wraps: tests/training/test_data_parallel.py",
    ),
    "enable": "requires verl: tests/stacks/test_verl.py",
    "GenerationStats": "a result",
    "Token": "a result",
    **dict.fromkeys(
        ("Request", *(f"Request.{name}" for name in ("choose", "add", "fail", "draft", "from_json"))),
        "made and changed by a Generator",
    ),
    **dict.fromkeys(
        ("GatedDeltaRule", "KimiDeltaAttention", "LightningAttention", "RWKV7", "Mamba1", "Mamba2", "ShortConvolution"),
        "records that scan and ContextParallel.recurrent check, on all ranks: tests/ops/recurrent, tests/parallel",
    ),
    "GeneratedAnswer": "a record that is only shown",
    "GenerationReport": "a result",
    "ScheduleReport": "a result",
}
"""Public callables that take nothing from a user, and why."""

SKIPPED = {
    ("load_model", "path", "None"): "the default model, which is large and not installed everywhere",
    ("run_virtual", "fn", "class"): "raises what the function raises",
}
"""Single cases that are not run, and why."""
