"""What a review of the Triton kernels found: positions and sinks of any stride, huge numbers, faults among others."""

from dataclasses import replace

import pytest
import torch

from attnmesh import decode_attention, paged_decode_attention
from attnmesh.decode import check_decode_errors
from attnmesh.ops.decode import device_errors as faults
from attnmesh.ops.decode.triton import Triton
from attnmesh.ops.storage import Quantized, dequantize, quantize
from attnmesh.testing.decode import random_decode
from helpers.cases import first, sweep
from helpers.decode import CUDA, device_of, problem_for

HERE = device_of("triton")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(HERE)


def assert_like_reference(*args: object, **how: object) -> None:
    found, expected = (decode_attention(*args, **how, return_lse=True, backend=b) for b in ("triton", "reference"))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, atol=2e-3, rtol=2e-3)


Q, K, V = normal(4, 2, 8, 32), normal(4, 1, 40, 32, seed=1), normal(4, 1, 40, 32, seed=2)


@pytest.mark.parametrize("dtype", [torch.int32, sweep(torch.int64)])
def test_positions_of_any_stride(dtype):
    column = torch.tensor([[5, 30], [17, 30], [3, 30], [39, 30]], dtype=dtype, device=HERE)[:, 0]
    assert_like_reference(Q, K, V, cur_pos=column)
    assert_like_reference(Q, K, V, cur_pos=column[:1].expand(4))


@pytest.mark.parametrize("backend", first(2, ["triton", "reference", *([] if CUDA else ["cpu"])]))
def test_an_infinite_sink_takes_all_weight(backend):
    sinks = torch.tensor([torch.inf, -torch.inf], device=HERE)
    cur_pos = [39, 20, -1, 0]
    out, lse = decode_attention(Q, K, V, cur_pos=cur_pos, sinks=sinks, return_lse=True, backend=backend)
    assert (out[:, 0] == 0).all()
    assert (lse[[0, 1, 3], 0] == torch.inf).all()
    assert (lse[2] == -torch.inf).all()
    without = decode_attention(Q, K, V, cur_pos=cur_pos, backend=backend)
    torch.testing.assert_close(out[:, 1], without[:, 1])


def test_sinks_of_any_stride():
    assert_like_reference(Q, K, V, sinks=torch.tensor([[1.0, 9.0], [2.0, 9.0]], device=HERE)[:, 0])


@pytest.mark.parametrize("window", first(1, [2**31 - 1, 2**40, *(sweep(window) for window in (40, 2**31))]))
def test_a_window_wider_than_any_cache(window):
    assert_like_reference(Q, K, V, cur_pos=[0, 3, 39, 2], window=window)
    assert_like_reference(Q, K, V, cur_pos=[0, 3, 39, 2], window=window, split_size=16)


@pytest.mark.parametrize("size", [2**30, sweep(2**31 - 1), sweep(2**31), sweep(2**40)])
def test_a_split_longer_than_any_cache(size):
    assert_like_reference(Q, K, V, split_size=size)


@pytest.mark.parametrize("how", [{}, sweep({"split_size": 64})], ids=str)
def test_int8_values_that_are_zero(how):
    """In all keys of a piece, or of a sequence: their weights are summed all the same."""
    v = normal(2, 1, 300, 32, seed=2)
    v[0, :, :200], v[1] = 0.0, 0.0
    q = normal(2, 2, 1, 32).half()
    assert_like_reference(q, quantize(normal(2, 1, 300, 32, seed=1), "int8"), quantize(v, "int8"), **how)


def test_values_that_are_wider_than_the_keys_in_their_memory():
    both = normal(2, 1, 20, 16)
    assert_like_reference(normal(2, 2, 1, 8), both[..., :8], both)


@pytest.mark.parametrize("storage", ["fp8", "int8"])
def test_bytes_that_begin_at_an_odd_place(storage):
    def moved(x: torch.Tensor) -> Quantized:
        stored = quantize(x, storage)
        room = torch.zeros(stored.values.numel() + 1, dtype=torch.int8, device=HERE)[1:].view(stored.values.shape)
        room.copy_(stored.values.view(torch.int8))
        return Quantized(room.view(stored.values.dtype), stored.scales)

    assert_like_reference(Q.half(), moved(K), moved(V))


@pytest.mark.parametrize(
    ("key_range", "storage"), [("mask", "plain"), sweep("mask", "bfp8"), ("added", "fp8"), sweep("tree", "int8")]
)
def test_what_nobody_sees_may_hold_anything(key_range, storage):
    q = normal(2, 2, 2, 32).half()
    k, v = (normal(2, 1, 40, 32, seed=seed).half() for seed in (1, 2))
    if key_range == "tree":
        how, hidden = {"tree": torch.tensor([[True, False]] * 2, device=HERE)}, slice(39, 40)
    else:
        mask = torch.ones(1, 1, 1, 40, dtype=torch.bool, device=HERE)
        hidden = slice(0, 5)
        mask[..., hidden] = False
        how = {
            "mask": mask if key_range == "mask" else torch.zeros(mask.shape, device=HERE).masked_fill(~mask, -torch.inf)
        }
    k, v = (x if storage == "plain" else quantize(x, storage) for x in (k, v))
    expected = decode_attention(q, k, v, **how, backend="triton")
    for x in (k, v):
        if storage == "plain":
            x[:, :, hidden] = torch.nan
        else:
            x.values.view(torch.uint8)[:, :, hidden] = 0x7F  # NaN in fp8, 127 in the others
            if storage != "fp8":
                x.scales[:, :, hidden] = 127 if storage == "bfp8" else torch.nan
    assert torch.equal(decode_attention(q, k, v, **how, backend="triton"), expected)


def test_values_in_keys_that_nobody_sees():
    x = normal(1, 1, 40, 48).half()
    mask = torch.ones(1, 1, 1, 40, dtype=torch.bool, device=HERE)
    mask[..., :5] = False
    q = normal(1, 2, 1, 48).half()
    expected = decode_attention(q, x, x[..., :32], mask=mask, backend="triton")
    x[:, :, :5] = torch.nan
    assert torch.equal(decode_attention(q, x, x[..., :32], mask=mask, backend="triton"), expected)


# Faults among sequences that share a cache. The front door refuses them on the CPU, so the backend is called itself.


def reported() -> str:
    with pytest.raises(ValueError, match="in an earlier decode call") as caught:
        check_decode_errors() if CUDA else faults.raise_device_error(HERE)
    return str(caught.value)


@pytest.mark.parametrize(
    ("share", "block_size", "past", "dtype"),
    [
        (None, None, 200, torch.int32),
        (None, None, 2**31, torch.int64),
        sweep(None, 16, 200, torch.int64),
        sweep("cache", None, 2**31 - 1, torch.int32),
        sweep("cache", 16, 2**31 - 1, torch.int64),
        sweep("cache", 16, 2**40 + 5, torch.int32),
    ],
)
def test_a_position_past_the_cache_is_no_matter_to_the_others(share, block_size, past, dtype):
    if past >= 2**31 and dtype == torch.int32:
        pytest.skip("does not fit")
    call = problem_for("triton", [50, 20, 40], share=share, block_size=block_size, capacity=64, sinks=True).call()
    expected = Triton().run(replace(call, cur_pos=torch.tensor([50, -1, 40], dtype=dtype, device=HERE)))
    found = Triton().run(replace(call, cur_pos=torch.tensor([50, past, 40], dtype=dtype, device=HERE)))
    assert f"cur_pos[1] is {past}, beyond the cache" in reported()
    assert found.out[1].isnan().all()
    assert found.lse[1].isnan().all()
    assert expected.out[[0, 2]].any()
    assert torch.equal(found.out[[0, 2]], expected.out[[0, 2]])
    assert torch.equal(found.lse[[0, 2]], expected.lse[[0, 2]])


def test_an_entry_outside_the_pool_is_no_matter_to_sequences_that_end_before():
    call = problem_for("triton", [60, 20, -1], share="cache", block_size=16).call()
    expected = Triton().run(call)
    table = call.table.clone()
    table[0, 3] = -7
    found = Triton().run(replace(call, table=table))
    assert "block_table[0, 3] is -7, outside the pool" in reported()
    assert found.out[0].isnan().all()
    assert torch.equal(found.out[1:], expected.out[1:])
    assert torch.equal(found.lse[1:], expected.lse[1:])


@pytest.mark.parametrize("position", [-2, -(2**31), -(2**40) + 5])
def test_any_position_below_0_skips(position):
    call = problem_for("triton", [30, 30]).call()
    found = Triton().run(replace(call, cur_pos=torch.tensor([30, position], device=HERE)))
    assert found.lse[1].isneginf().all()
    assert not found.out[1].any()


def test_scales_farther_apart_than_32_bits_reach():
    """While their values are close, and their strides fit: an untouched page costs nothing."""
    problem = random_decode([2], kv_heads=1, storage="bfp8", dtype=torch.float16, device=HERE)
    far = torch.empty(2**31 + 64, dtype=torch.int8, device=HERE).as_strided((1, 1, 3, 2), (1, 1, 2**30, 1))
    expected = problem.run("triton")
    found = replace(problem, k=Quantized(problem.k.values, far.copy_(problem.k.scales))).run("triton")
    assert torch.equal(found.out, expected.out)


@pytest.mark.parametrize("dims", [(64, 64), sweep((128, 192)), sweep((64, 80))])
def test_bfp8_of_any_scale(dims):
    """Read by words, or by bytes in the last case; with scales that alone are not numbers of fp16."""
    problem = random_decode([40, 19], dims=dims, storage="bfp8", dtype=torch.float16, block_size=16, device=HERE)
    for x, low in ((problem.k, -27), (problem.v, -31)):
        x.scales.copy_(torch.arange(x.scales.numel(), device=HERE).view(x.scales.shape) % 24 + low)
    q, k, v = problem.q.float(), dequantize(problem.k, torch.float32), dequantize(problem.v, torch.float32)
    how = {"cur_pos": problem.options["cur_pos"], "backend": "reference"}
    expected = paged_decode_attention(q, k, v, problem.table, **how)
    rounded = paged_decode_attention(*(x.half() for x in (q, k, v)), problem.table, **how)
    found = problem.run("triton").out
    assert (found - expected).norm() <= 2 * (rounded - expected).norm()


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_a_list_of_positions_is_refused_under_capture():
    """Its copy to the device would be captured with an address that is freed by the time of a replay."""
    decode_attention(Q, K, V, cur_pos=[3, 3, 3, 3])
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="while a CUDA graph is captured"), torch.cuda.graph(graph):
        decode_attention(Q, K, V, cur_pos=[3, 3, 3, 3])
