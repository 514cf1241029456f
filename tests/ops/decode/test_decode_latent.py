"""paged_decode_attention() over latents in fp8 (`fp8_ds_mla`), which are keys and values."""

from dataclasses import replace

import pytest
import torch

from attnmesh import BlockCache, CacheSpec, decode_attention, paged_decode_attention, quantize
from attnmesh.ops.decode.api import choose
from attnmesh.ops.decode.triton import Triton
from attnmesh.ops.storage import dequantize, unpack_latent
from attnmesh.testing.decode import DecodeProblem
from helpers.cases import first, in_turn
from helpers.decode import assert_decode_close, problem_for

CASES = [
    {"dims": (144, 128), "key_range": "tree", "tokens": 2},
    {"dims": (144, 128), "window": 9, "sinks": True},
    {"dims": (576, 512), "group": 16, "tokens": 2},
    {"dims": (144, 128), "split_size": 16, "kv_heads": 2},
    {"dims": (192, 128), "key_range": "intervals", "tokens": 3},
    {"dims": (144, 128), "share": "cache"},
    {"dims": (144, 128), "memory": "layer inside", "kv_heads": 2},
    {"dims": (144, 128), "dtype": torch.float32, "key_range": "bias bht", "tokens": 2},
]


def latent(backend: str, positions: list[int], **how: object) -> DecodeProblem:
    return problem_for(
        backend, positions, **{"v_in_k": True, "storage": "fp8_ds_mla", "block_size": 16, "kv_heads": 1} | how
    )


@pytest.mark.parametrize(("how", "backend"), first(1, in_turn(CASES, ["triton", "cpu", "reference"])), ids=str)
def test_against_float64(backend, how):
    problem = latent(backend, [40, 15, -1], **how)
    assert_decode_close(problem.run(backend), problem)


def test_the_bytes_of_other_projects_are_read_in_place():
    """656 bytes per token: values, scales and rope part side by side."""
    problem = latent("triton", [40, 15], dims=(576, 512), group=16)
    parts = [x.contiguous().view(torch.uint8) for x in (problem.k.values, problem.k.scales, problem.k.rope)]
    cache = unpack_latent(torch.cat(parts, -1))
    assert cache.values.stride()[:2] == (16 * 656, 656)
    packed = replace(problem, k=cache, v=cache)
    assert_decode_close(packed.run("triton"), packed)
    if not problem.q.is_cuda:
        assert_decode_close(packed.run("cpu"), packed)


def test_the_pool_of_a_block_cache():
    cache = BlockCache(
        CacheSpec(layers=1, kv_heads=1, head_dim=144, value_dim=128, storage="fp8_ds_mla", latent=True),
        num_blocks=4,
        block_size=4,
        max_sequences=1,
        max_length=12,
        device="cpu",
    )
    q, new = torch.randn(2, 1, 4, 7, 144, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    row = cache.allocate(7)
    cache.write(0, cache.append([row], 7), new[:, :1])
    pool, table = cache.keys(0), cache.block_table[:1]
    found = paged_decode_attention(q, pool, pool, table, cur_pos=[6])
    k = dequantize(quantize(new[:, :1], "fp8_ds_mla"), torch.float32)
    torch.testing.assert_close(found, decode_attention(q, k, k[..., :128]), rtol=1e-4, atol=1e-4)


def test_what_is_refused():
    problem = latent("reference", [40], dims=(144, 128))
    copied = quantize(torch.ones(*problem.k.values.shape[:3], 144), "fp8_ds_mla")
    with pytest.raises(ValueError, match="v_pool must be k_pool itself if it is stored as fp8_ds_mla"):
        replace(problem, v=copied).run("auto")
    with pytest.raises(ValueError, match="must have the same head_dim, got 128 and 144"):
        replace(problem, q=problem.q[..., :128]).run("auto")
    with pytest.raises(ValueError, match=r"k_cache must be stored as .*bfp8 for dense attention, got fp8_ds_mla"):
        decode_attention(problem.q, problem.k, problem.v)
    wide = latent("reference", [40], dims=(400, 384))
    assert "a power of two" in Triton().why_not(wide.call())
    assert choose(wide.call(), "auto").name == ("reference" if wide.q.is_cuda else "cpu")
    assert_decode_close(wide.run("auto"), wide)
