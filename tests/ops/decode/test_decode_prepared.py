"""Repeated decode calls: what depends on a call's signature is decided once, and nothing else is taken for granted."""

import gc
import logging
import weakref

import pytest
import torch

pytest.importorskip("triton")

from attnmesh import decode_attention, paged_decode_attention, quantize
from attnmesh.core.state import State
from attnmesh.ops.decode import api, gluon_grouped
from attnmesh.ops.decode.call import build_call
from helpers.decode import device_of
from helpers.gluon import emulated

BACKENDS = ["cpu", "triton"]


def caches(seed: int, device: torch.device | str = "cpu") -> tuple[torch.Tensor, ...]:
    """q, two pools and a table of two sequences of up to 32 keys."""
    torch.manual_seed(seed)
    q, (k, v) = torch.randn(2, 4, 1, 64, device=device), torch.randn(2, 8, 16, 2, 64, device=device)
    return q, k, v, torch.randperm(8, device=device)[:4].int().view(2, 2)


def expected(q, k, v, table, last):
    return paged_decode_attention(q, k, v, table, cur_pos=last, backend="reference")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_repeat_reads_its_own_tensors(backend):
    """Other queries, pools, tables and positions, as lists and as tensors."""
    device = device_of(backend)
    for seed in range(3):
        given = caches(seed, device)
        for last in ([5 + seed, 31 - seed], torch.tensor([20, seed], device=device)):
            found = paged_decode_attention(*given, cur_pos=last, backend=backend)
            torch.testing.assert_close(found, expected(*given, last))


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_as_values_and_values_of_their_own(backend):
    """A call whose values are its keys has the signature of no other: the kernels read them once."""
    q, k, v, table = caches(0, device_of(backend))
    for values in (k, v, k, v):
        found = paged_decode_attention(q, k, values, table, cur_pos=[20, 7], backend=backend)
        torch.testing.assert_close(found, expected(q, k, values, table, [20, 7]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_of_other_strides_and_alignments(backend):
    device = device_of(backend)
    q, k, v, table = caches(1, device)
    wide = torch.randn(2, 4, 1, 66, device=device)
    for queries in (q, wide[..., 1:65], wide[..., 2:], q.transpose(0, 1).contiguous().transpose(0, 1), q):
        for slots in (table, table.t().contiguous().t()):
            found = paged_decode_attention(queries, k, v, slots, cur_pos=[20, 7], backend=backend)
            torch.testing.assert_close(found, expected(queries, k, v, slots, [20, 7]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_alibi_slopes_become_a_mask_in_every_call(backend):
    device = device_of(backend)
    for seed in range(2):
        given = caches(seed, device)
        slopes = torch.rand(4, device=device)
        for how in (
            {"alibi_slopes": slopes},
            {},
            {"alibi_slopes": slopes, "mask": torch.rand(2, 1, 1, 32, device=device)},
        ):
            found, exact = (
                paged_decode_attention(*given, cur_pos=[20 + seed, 7], **how, backend=name)
                for name in (backend, "reference")
            )
            torch.testing.assert_close(found, exact)


def test_quantized_pools_that_can_be_read_in_pairs_and_that_cannot():
    """Of the same shapes and strides: at even and at odd addresses."""
    q, k, v, table = caches(2)
    memory = torch.zeros(2, k.numel() + 1, dtype=torch.int8)
    for begin in (0, 1, 0):
        pools = []
        for x, into in zip((k, v), memory, strict=True):
            stored = quantize(x, "int8", head_axis=2)
            values = into[begin : begin + k.numel()].view(k.shape).copy_(stored.values)
            pools.append(type(stored)(values, stored.scales))
        found = paged_decode_attention(q.half(), *pools, table, cur_pos=[20, 7], backend="triton")
        exact = paged_decode_attention(q.half(), *pools, table, cur_pos=[20, 7], backend="reference")
        torch.testing.assert_close(found, exact, rtol=2e-3, atol=2e-3)


def test_values_are_checked_in_every_call():
    q, k, v, table = caches(3)
    last = torch.tensor([20, 7])
    paged_decode_attention(q, k, v, table, cur_pos=last)
    with pytest.raises(ValueError, match=r"cur_pos\[1\] is 32, but must be 0 to 31"):
        paged_decode_attention(q, k, v, table, cur_pos=torch.tensor([20, 32]))
    with pytest.raises(ValueError, match=r"block_table\[0, 1\] is 8, but the pool has blocks 0 to 7"):
        paged_decode_attention(q, k, v, torch.tensor([[0, 8], [1, 2]], dtype=torch.int32), cur_pos=last)
    with pytest.raises(ValueError, match="cur_pos must be integers"):
        paged_decode_attention(q, k, v, table, cur_pos=[20, "7"])
    paged_decode_attention(q, k, v, table, cur_pos=[20, 7])
    with pytest.raises(ValueError, match="cur_pos must have one position per sequence, 2, got 3"):
        paged_decode_attention(q, k, v, table, cur_pos=[20, 7, 1])
    seen = torch.tensor([[0, 1], [0, 1]])
    two = torch.cat([q, q], 2)
    paged_decode_attention(two, k, v, table, cur_pos=last, key_range=(seen, seen + 5))
    with pytest.raises(ValueError, match="key_range first must not decrease"):
        paged_decode_attention(two, k, v, table, cur_pos=last, key_range=(seen.flip(1), seen + 5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": True}, "window must be a positive integer or None, got True"),
        ({"return_lse": 1}, "return_lse must be True or False, got 1"),
        ({"share_cache": 0}, "share_cache must be True or False, got 0"),
        ({"scale": [1.0]}, "scale must be"),
        ({"backend": "cuda"}, "backend must be one of"),
        ({"cur_pos": None}, "cur_pos must be given"),
        ({"q": torch.ones(2, 4, 1, 64, requires_grad=True)}, "q must not require a gradient"),
        ({"q": torch.ones(2, 4, 1, 64).to_sparse()}, "q must be a dense tensor"),
        ({"block_table": [[0, 1], [2, 3]]}, "block_table must be a tensor"),
    ],
)
def test_what_equals_a_valid_argument_is_still_refused(change, message):
    """After a call that is right, of which it is a copy but for one argument: True equals 1, and 0 is False."""
    q, k, v, table = caches(4)
    given = {"q": q, "k_pool": k, "v_pool": v, "block_table": table, "cur_pos": [20, 7], "window": 1}
    paged_decode_attention(**given)
    with pytest.raises(ValueError, match=message):
        paged_decode_attention(**given | change)


def test_a_choice_is_logged_after_calls_that_logged_nothing(caplog):
    q, k, v, table = caches(5)
    q = torch.cat([q, q, q], 2)  # of a shape that no other test logs
    paged_decode_attention(q, k, v, table, cur_pos=[20, 7])
    with caplog.at_level(logging.INFO, "attnmesh"):
        paged_decode_attention(q, k, v, table, cur_pos=[20, 7])
    assert "decode of q (2, 4, 3, 64)" in caplog.text


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prepared_call_keeps_no_tensors(backend):
    """It outlives its first call, whose pools may take most of a GPU."""
    api._prepared.clear()
    given = caches(6, device_of(backend))
    kept = [weakref.ref(x) for x in given]
    paged_decode_attention(*given, cur_pos=[20, 7], backend=backend)
    assert len(api._prepared) == 1
    del given
    gc.collect()
    assert [x() for x in kept] == [None] * 4


def test_results_into_other_memory():
    device = device_of("triton")
    q, k, v, table = caches(7, device)
    whole, lse = paged_decode_attention(q, k, v, table, cur_pos=[20, 7], return_lse=True, backend="triton")
    for strided in (False, True, False):
        out = torch.empty(4, 2, 1, 64, device=device).transpose(0, 1) if strided else torch.empty_like(whole)
        into = State(out, torch.empty_like(lse))
        paged_decode_attention(q, k, v, table, cur_pos=[20, 7], into=into, backend="triton")
        assert torch.equal(into.out, whole)
        assert torch.equal(into.lse, lse)


def test_the_same_shapes_contiguous_and_paged():
    """A cache [8, 16, 2, 64] of 16 heads is no pool of 8 blocks."""
    torch.manual_seed(8)
    q, k, v = torch.randn(8, 16, 1, 64), *torch.randn(2, 8, 16, 2, 64)
    found = decode_attention(q, k, v)
    paged = paged_decode_attention(q[:, :2], k, v, torch.arange(8, dtype=torch.int32)[:, None], cur_pos=[15] * 8)
    for _ in range(2):
        assert torch.equal(decode_attention(q, k, v), found)
        again = paged_decode_attention(q[:, :2], k, v, torch.arange(8, dtype=torch.int32)[:, None], cur_pos=[15] * 8)
        assert torch.equal(again, paged)


def test_an_emulated_kernel_is_repeated():
    """Its descriptors for the copy engine are of other pools then."""
    gluon = emulated(gluon_grouped)
    repeat = None
    for seed in range(2):
        torch.manual_seed(seed)
        q, (k, v) = torch.randn(1, 16, 1, 64).half(), torch.randn(2, 4, 64, 1, 64).half()
        table, last = torch.randperm(4)[None].int(), torch.tensor([100 - seed])
        call = build_call(
            q, k, v, table, cur_pos=last, mask=None, tree=None, scale=None, window=None, sinks=None, share_cache=False,
            max_splits=None, split_size=None,
        )  # fmt: skip
        state = call.empty_state()
        if repeat is None:
            repeat = gluon.launch(call, state, 0)
        else:
            repeat(call, state)
        torch.testing.assert_close(state.out, expected(q, k, v, table, last), rtol=2e-3, atol=2e-3)
