"""Query-distributed causal attention on virtual ranks and by value: exact, balanced, and whole in the end."""

import itertools
import re
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partialmethod

import pytest
import torch
import torch.nn.functional as F
from test_streams import device as replay  # noqa: F401  (a fixture)
from torch import Tensor

from attnmesh import Causal, Documents, Full, SlidingWindow, Zigzag, attention, run_virtual
from attnmesh.comm import Comm, SubComm
from attnmesh.comm.base import Finished
from attnmesh.core.masks import Coverage
from attnmesh.core.visibility import Kind, Patch
from attnmesh.ops.dense import blockwise
from attnmesh.ops.dense.aten import Aten
from attnmesh.ops.dense.call import Call
from attnmesh.ops.dense.triton_tiles import DenseTiles
from attnmesh.ops.merge import StreamPair
from attnmesh.parallel.query_distributed import gather_ring_outputs, ring_chunks, ring_distributed_attention
from attnmesh.testing.attention import (
    NAMES,
    assert_attention_close,
    forward_backward,
    random_inputs,
    reference_results,
    virtual_results,
)
from attnmesh.testing.errors import ROUNDING, assert_close, relative_error
from helpers.cases import first, sweep
from helpers.memory import peak_bytes

Pairs = int | tuple[int, ...]

RINGS = (1, 2, 3, 4, 5, 8)
LENGTHS = (0, 1, 3, 7, 32, 37, 67)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEADS = ((2, 2), (4, 2), (3, 1))
FOLDS = (2, 3, (2, 1, 3), (0, 2, 1))


def folded_ring(pairs: Pairs) -> int:
    return len(pairs) if isinstance(pairs, tuple) else 3


def local_results(inputs: Sequence[Tensor], ring_size: int, ring_id: int, **how: object) -> list[Tensor]:
    """One device's out, lse, dq, dk, dv; the gradients of out and lse are those of its own rows."""
    layout = Zigzag(how.get("pairs", 1))
    mine = [*inputs[:3], *(layout.shard(x, 2, ring_size, ring_id) for x in inputs[3:])]
    if "group" not in how:
        how |= {"ring_size": ring_size, "ring_id": ring_id}
    return forward_backward(lambda q, k, v: ring_distributed_attention(q, k, v, return_lse=True, **how), mine)


def with_a_group(inputs: Sequence[Tensor], ring_size: int, **how: object) -> list[Tensor]:
    """The whole out, lse, dq, dk, dv of a ring of virtual ranks."""
    ranks = run_virtual(ring_size, lambda comm: gathered_results(inputs, comm, **how))
    return ring_as_one(ranks, how.get("pairs", 1))


def gathered_results(inputs: Sequence[Tensor], comm: Comm, **how: object) -> list[Tensor]:
    """A rank's whole out and lse, its dq, and dk and dv as summed over the ring."""
    out, lse, *grads = local_results(inputs, comm.world, comm.rank, group=comm, **how)
    gather = {"length": inputs[0].shape[2], "group": comm, "pairs": how.get("pairs", 1)}
    return [gather_ring_outputs(out, **gather), gather_ring_outputs(lse, **gather), *grads]


def ring_as_one(ranks: Sequence[list[Tensor]], pairs: Pairs = 1) -> list[Tensor]:
    """What all ranks of a ring have found: the same bits on each, but for dq."""
    for other in ranks[1:]:
        for name, mine, theirs in zip(NAMES, ranks[0], other, strict=True):
            assert name == "dq" or torch.equal(mine, theirs), name
    out, lse, _, dk, dv = ranks[0]
    return [out, lse, whole_dq([found[2] for found in ranks], pairs), dk, dv]


def by_value(inputs: Sequence[Tensor], ring_size: int, **how: object) -> list[Tensor]:
    """The same from devices that do not talk: outputs put in order, the parts of dk and dv summed here."""
    layout = Zigzag(how.get("pairs", 1))
    found = [local_results(inputs, ring_size, ring_id, **how) for ring_id in range(ring_size)]
    out, lse, dq, dk, dv = zip(*found, strict=True)
    whole = [layout.unshard(out, 2), layout.unshard(lse, 2), whole_dq(dq, layout.pairs)]
    return [
        *whole,
        sum(part.double() for part in dk).to(dk[0].dtype),
        sum(part.double() for part in dv).to(dv[0].dtype),
    ]


def whole_dq(parts: Sequence[Tensor], pairs: Pairs) -> Tensor:
    """Each device's own rows; all its others must be zero."""
    layout, world = Zigzag(pairs), len(parts)
    for ring_id, part in enumerate(parts):
        foreign = torch.ones(part.shape[2], dtype=torch.bool)
        foreign[layout.positions(part.shape[2], world, ring_id)] = False
        assert not part[:, :, foreign].any(), ring_id
    return layout.unshard([layout.shard(part, 2, world, i) for i, part in enumerate(parts)], 2)


# Who answers what.


def test_the_chunks_of_256_positions_on_four_devices():
    chunks = [ring_chunks(256, 4, ring_id) for ring_id in range(4)]
    assert chunks[0] == (range(32), range(224, 256))
    assert chunks[1] == (range(32, 64), range(192, 224))
    assert chunks[2] == (range(64, 96), range(160, 192))
    assert chunks[3] == (range(96, 128), range(128, 160))


def test_chunks_of_any_length_on_any_ring():
    for ring_size, length in itertools.product(range(1, 10), range(41)):
        early, late = zip(*(ring_chunks(length, ring_size, ring_id) for ring_id in range(ring_size)), strict=True)
        chunks = [*early, *reversed(late)]
        assert [p for chunk in chunks for p in chunk] == list(range(length))
        sizes = list(map(len, chunks))
        assert max(sizes) - min(sizes) <= 1
        if length % (2 * ring_size) == 0:
            assert len(set(sizes)) == 1


def test_finer_chunks_are_two_for_each_pair():
    assert ring_chunks(64, 2, 0, 2) == (range(8), range(16, 24), range(40, 48), range(56, 64))
    assert [len(ring_chunks(64, 3, ring_id, (2, 0, 1))) for ring_id in range(3)] == [4, 0, 2]


@pytest.mark.parametrize("ring_size", RINGS)
def test_every_device_computes_an_equal_share_of_chunk_pairs_and_none_that_is_hidden(ring_size):
    chunks = [chunk for i in range(ring_size) for chunk in ring_chunks(64 * ring_size, ring_size, i)]
    seen = {Coverage.FULL: 0, Coverage.PARTIAL: 0}
    for ring_id in range(ring_size):
        mine = ring_chunks(64 * ring_size, ring_size, ring_id)
        verdicts = [Causal().coverage(q, k) for q in mine for k in chunks]
        assert sum(v is not Coverage.EMPTY for v in verdicts) == 2 * ring_size + 1  # 9 for four devices
        assert verdicts.count(Coverage.PARTIAL) == 2  # the diagonal alone
        for verdict in seen:
            seen[verdict] += verdicts.count(verdict)
    assert sum(seen.values()) == ring_size * (2 * ring_size + 1)  # of 36 for four devices


def planned(length: int, ring_size: int, ring_id: int, pairs: Pairs = 1) -> Patch:
    chunks = Zigzag(pairs).ranges(length, ring_size, ring_id)
    return Patch(Causal(), chunks, (range(chunks[-1].stop),))


@pytest.mark.parametrize("ring_size", [4, 8])
@pytest.mark.parametrize("pairs", [1, 2])
def test_the_plan_is_balanced(ring_size, pairs):
    for length in (32768, 32768 + 2 * ring_size - 1, 32768 + ring_size, 32769):
        work = [planned(length, ring_size, ring_id, pairs).pairs for ring_id in range(ring_size)]
        assert sum(work) == length * (length + 1) // 2
        assert max(work) * ring_size <= 1.03 * sum(work)
        if length == 32768:
            assert len(set(work)) == 1


def test_only_squares_on_the_diagonal_carry_a_mask():
    for ring_size, ring_id in ((4, 0), (4, 1), (4, 3), (1, 0)):
        for block in planned(256, ring_size, ring_id).blocks:
            assert block.kind is Kind.FULL or (block.kind is Kind.CAUSAL and len(block.q) == len(block.k))


# Exact.


@pytest.mark.parametrize(
    ("ring_size", "dtype"),
    [
        (1, torch.float32),
        (5, torch.float32),
        (2, torch.bfloat16),
        (8, torch.bfloat16),
        (3, torch.float16),
        (4, torch.float64),
    ],
)
def test_a_ring_is_exact(ring_size, dtype):
    which = RINGS.index(ring_size) + DTYPES.index(dtype)
    for length in (LENGTHS[which % 4], LENGTHS[4 + which % 3]):  # a short one and a long one
        inputs = random_inputs(length, heads=HEADS[which % 3], dtype=dtype, seed=which)
        assert_attention_close(with_a_group(inputs, ring_size), inputs, Causal())


@pytest.mark.parametrize("dtype", first(1, DTYPES), ids=str)
def test_three_ways(dtype):
    """Distributed, torch's own attention, and float64: each pair within rounding of one another, at every position."""
    for ring_size, length in ((2, 37), (3, 64), (4, 67), (8, 13)):
        inputs = random_inputs(length, dtype=dtype, seed=length)
        inputs[4].zero_()  # torch's attention has no lse
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        torchs = dict(zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, leaves, inputs[3])), strict=True))
        exact, plain = reference_results(inputs, Causal()), reference_results(inputs, Causal(), plain=True)
        ours = with_a_group(inputs, ring_size)
        for name, mine, rough, truth in zip(NAMES, ours, plain, exact, strict=True):
            assert_close(name, mine, rough, truth, rounding=ROUNDING[dtype])
            if name != "lse":
                theirs = torchs[name].detach()
                assert_close(name, theirs, rough, truth, rounding=ROUNDING[dtype])
                assert_close(name, mine, rough, theirs.double(), rounding=2 * ROUNDING[dtype])


@pytest.mark.parametrize("ring_size", RINGS)
def test_devices_that_do_not_talk_compute_parts_of_the_whole(ring_size):
    for dtype in (torch.float32, torch.float64):
        inputs = random_inputs(29, dtype=dtype, seed=ring_size)
        assert_attention_close(by_value(inputs, ring_size), inputs, Causal())


def test_every_length_below_and_around_twice_the_ring():
    for length in range(12):
        inputs = random_inputs(length, heads=(2, 1), batch=1, seed=length)
        assert_attention_close(with_a_group(inputs, 5), inputs, Causal())


def test_a_scale_of_ones_own():
    for scale in (0.7, -0.3, 0.0):
        inputs = random_inputs(21)
        assert_attention_close(by_value(inputs, 3, scale=scale), inputs, Causal(), scale=scale)


@pytest.mark.sweep
def test_triton_kernels_serve_it_too(device):
    for run, ring_size, q_offset, mask, pairs in (
        (with_a_group, 2, 0, Causal(), 1),
        (by_value, 2, 7, Causal() & SlidingWindow(8), 2),
    ):
        inputs = random_inputs(12, 12 + q_offset, batch=1, heads=(2, 1))
        there = [x.to(device) for x in inputs]
        found = run(there, ring_size, backend="triton", q_offset=q_offset, mask=mask, pairs=pairs)
        positions = torch.arange(q_offset, 12 + q_offset)
        assert_attention_close([x.cpu() for x in found], inputs, mask, q_positions=positions)


def test_strided_inputs_are_taken_as_they_are():
    inputs = random_inputs(23)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:3]]  # as projections leave them
    odd = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in inputs[:3]]  # the head dim is not contiguous
    for given in (strided, odd):
        assert_attention_close(by_value([*given, *inputs[3:]], 3), inputs, Causal())


def test_a_ring_of_one_gives_the_bits_of_attention():
    for dtype in (torch.float32, torch.bfloat16):
        inputs = random_inputs(37, dtype=dtype)
        alone = forward_backward(lambda q, k, v: attention(q, k, v, mask=Causal(), return_lse=True), inputs)
        for name, a, b in zip(NAMES, alone, by_value(inputs, 1), strict=True):
            assert torch.equal(a, b), name


def test_a_place_and_the_group_that_has_it_mean_the_same():
    inputs = random_inputs(22)

    def rank(comm: Comm) -> bool:
        named = {"group": comm, "ring_size": comm.world, "ring_id": comm.rank}
        out = [ring_distributed_attention(*inputs[:3], **how) for how in ({"group": comm}, named)]
        return torch.equal(*out)

    assert all(run_virtual(3, rank))


# Chunks and tiles have nothing to do with each other.


@pytest.mark.parametrize(("ring_size", "tiles"), [(1, (16, 16)), sweep(2, (16, 64)), sweep(3, (64, 16))])
def test_tiles_of_any_size_serve_chunks_of_any_size(device, ring_size, tiles):
    from attnmesh.ops.dense.triton_backward import backward, delta
    from attnmesh.ops.dense.triton_forward import forward

    dtype = (torch.float32, torch.float16)[ring_size % 2]  # the interpreter's bf16 product is wrong
    inputs = random_inputs(35, heads=(2, 1), batch=1, dtype=dtype, seed=ring_size)
    q, k, v, grad_out, grad_lse = (x.to(device) for x in inputs)
    rows_keys = DenseTiles(*tiles, warps=4, stages=1)
    found = [torch.zeros(shape, device=device) for shape in (q.shape, q.shape[:3], q.shape, k.shape, v.shape)]
    for ring_id in range(ring_size):
        patch = planned(35, ring_size, ring_id)
        mine, end = Zigzag().positions(35, ring_size, ring_id).to(device), patch.k[0].stop
        seen = {"scale": 0.25, "causal": False, "bounds": patch.bounds(device)}
        args = q[:, :, mine], k[:, :, :end], v[:, :, :end]
        out, lse = forward(*args, **seen, state=None, out_dtype=torch.float32, tiles=rows_keys)
        dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in args)
        row_terms = delta(out, grad_out[:, :, mine], grad_lse[:, :, mine])
        backward(
            *args, grad_out[:, :, mine], lse, row_terms, **seen, grad_q=dq, grad_k=dk, grad_v=dv,
            query_tiles=rows_keys, key_tiles=rows_keys,
        )  # fmt: skip
        for whole, part in zip(found, (out, lse, dq), strict=False):
            whole[:, :, mine] = part
        found[3][:, :, :end] += dk
        found[4][:, :, :end] += dv
    assert_attention_close([x.cpu() for x in found], inputs, Causal(), scale=0.25)


# Only what is seen is touched.


@pytest.mark.parametrize("backend", ["aten", sweep("triton")])
def test_what_a_device_does_not_see_may_be_anything(device, backend):
    length, ring_size = 31, 3 if backend == "aten" else 2  # the interpreter takes a second for two devices
    inputs = [x.to(device if backend == "triton" else "cpu") for x in random_inputs(length, heads=(1, 1), batch=1)]
    for ring_id in range(ring_size):
        patch = planned(length, ring_size, ring_id)
        clean = local_results(inputs, ring_size, ring_id, backend=backend)
        q, k, v = (x.clone() for x in inputs[:3])
        foreign = torch.ones(length, dtype=torch.bool)
        foreign[Zigzag().positions(length, ring_size, ring_id)] = False
        q[:, :, foreign] = torch.nan
        k[:, :, patch.k[0].stop :] = v[:, :, patch.k[0].stop :] = torch.nan
        poisoned = local_results([q, k, v, *inputs[3:]], ring_size, ring_id, backend=backend)
        for name, a, b in zip(NAMES, clean, poisoned, strict=True):
            assert torch.equal(a, b), name


def test_a_device_holds_its_rows_and_no_copy_of_the_keys():
    q, k, v = (torch.randn(1, 2, 4096, 32) for _ in range(3))

    def peak(ring_size: int, ring_id: int) -> int:
        return peak_bytes(lambda: ring_distributed_attention(q, k, v, ring_size=ring_size, ring_id=ring_id))

    whole = peak(1, 0)
    assert whole >= q.nbytes  # its out at least
    for ring_id in (0, 3, 7):
        assert peak(8, ring_id) < 6 * q.nbytes // 8  # rows, out, and a few parts: an eighth each


# Folded finer.


@pytest.mark.parametrize("pairs", [3, (0, 2, 1), *map(sweep, (2, (2, 1, 3)))], ids=str)
def test_finer_and_uneven_folds_give_the_same(pairs):
    for length in (5, 47):
        inputs = random_inputs(length, seed=length)
        assert_attention_close(with_a_group(inputs, folded_ring(pairs), pairs=pairs), inputs, Causal())
        assert_attention_close(by_value(inputs, folded_ring(pairs), pairs=pairs), inputs, Causal())


@pytest.mark.parametrize("pairs", [2, (2, 1, 1)], ids=str)
def test_the_ring_takes_a_finer_fold_as_well(pairs):
    inputs = random_inputs(47)
    for mask in (Causal(), SlidingWindow(9, 3)):
        assert_attention_close(virtual_results(3, inputs, mask, Zigzag(pairs)), inputs, mask)


# Whole again.


def test_the_mesh_of_eight_by_four():
    """32 ranks: eight ways of heads, each a ring of four."""
    inputs = random_inputs(53, heads=(16, 8), batch=1)
    ways = list(zip(*(x.chunk(8, 1) for x in inputs), strict=True))

    def rank(comm: Comm) -> list[Tensor]:
        way = comm.rank // 4
        return gathered_results(ways[way], SubComm(comm, range(4 * way, 4 * way + 4)))

    found = run_virtual(32, rank)
    by_way = [ring_as_one(found[first : first + 4]) for first in range(0, 32, 4)]
    assert_attention_close([torch.cat(parts, 1) for parts in zip(*by_way, strict=True)], inputs, Causal())


def layer(x: Tensor, weights: Sequence[Tensor], attend) -> Tensor:
    """Projections, attention, projection; two query heads on one kv head."""
    q, k, v = ((x @ w).unflatten(-1, (-1, 8)).transpose(1, 2) for w in weights[:3])
    return attend(q, k, v).transpose(1, 2).flatten(2) @ weights[3]


def test_the_gradients_of_a_whole_layer():
    length, ring_size = 19, 3
    x = torch.randn(2, length, 16, dtype=torch.float64)
    weights = [torch.randn(16, n, dtype=torch.float64, requires_grad=True) for n in (16, 8, 8, 16)]
    loss_of = torch.randn(2, length, 16, dtype=torch.float64)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=Causal(), backend="reference")

    expected_out = layer(x, weights, plain)
    expected = torch.autograd.grad((expected_out * loss_of).sum(), weights)

    def rank(comm: Comm) -> tuple[Tensor, ...]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return gather_ring_outputs(ring_distributed_attention(q, k, v, group=comm), length=length, group=comm)

        mine = [w.detach().clone().requires_grad_() for w in weights]
        out = layer(x, mine, attend)
        # All ranks compute the same loss: each takes its share.
        return out.detach(), *torch.autograd.grad((out * loss_of).sum() / ring_size, mine)

    ranks = run_virtual(ring_size, rank)
    for out, _, of_keys, of_values, _ in ranks:
        torch.testing.assert_close(out, expected_out)
        torch.testing.assert_close(of_keys, expected[1])  # whole on every rank
        torch.testing.assert_close(of_values, expected[2])
    for at in (0, 3):  # of queries and of the output: a part from each
        torch.testing.assert_close(sum(grads[1 + at] for grads in ranks), expected[at])


def test_gathering_in_a_world_of_one():
    local = torch.randn(1, 2, 9, 4, requires_grad=True)
    whole = gather_ring_outputs(local, length=9)
    whole.backward(torch.ones_like(whole))
    assert torch.equal(whole, local)
    assert torch.equal(local.grad, torch.ones_like(local))


# Gradients go to those who want them; nothing else travels.


@pytest.mark.parametrize("wanted", ["", "q", "k", "v", "qk", "kv", "qkv"])
def test_gradients_of_what_was_asked_for_travel_in_float32_and_nothing_else_does(wanted):
    inputs = [x.bfloat16() for x in random_inputs(23)]
    due = dict(zip("qkv", with_a_group(inputs, 3)[2:], strict=True))

    def rank(comm: Comm) -> list[Tensor | None]:
        leaves = [x.clone().requires_grad_(name in wanted) for name, x in zip("qkv", inputs, strict=False)]
        out, lse = ring_distributed_attention(*leaves, group=comm, return_lse=True)
        assert out.requires_grad == lse.requires_grad == bool(wanted)
        assert comm.traffic.bytes == 0
        if wanted:
            mine = [Zigzag().shard(x, 2, 3, comm.rank) for x in inputs[3:]]
            torch.autograd.backward([out, lse], [mine[0], mine[1].float()])
        whole = 4 * inputs[1].numel()
        assert comm.traffic.bytes == len(set(wanted) & {"k", "v"}) * round(2 * 2 / 3 * whole)
        return [x.grad for x in leaves]

    for ring_id, grads in enumerate(run_virtual(3, rank)):
        for name, grad in zip("qkv", grads, strict=True):
            if name not in wanted:
                assert grad is None
            elif name == "q":
                own = [Zigzag().shard(x, 2, 3, ring_id) for x in (grad, due["q"])]
                assert torch.equal(*own)
            else:
                assert torch.equal(grad, due[name])


@pytest.mark.parametrize("heard", ["out", "lse"])
def test_a_loss_of_out_alone_or_of_lse_alone(heard):
    inputs = random_inputs(23)
    at = NAMES.index(heard)
    inputs[4 - at].zero_()

    def rank(comm: Comm) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        results = ring_distributed_attention(*leaves, group=comm, return_lse=True)
        grad = Zigzag().shard(inputs[3 + at], 2, 3, comm.rank)
        return [*(x.detach() for x in results), *torch.autograd.grad(results[at], leaves, grad)]

    out, lse, dq, dk, dv = zip(*run_virtual(3, rank), strict=True)
    found = [Zigzag().unshard(out, 2), Zigzag().unshard(lse, 2), whole_dq(dq, 1), dk[1], dv[2]]
    assert_attention_close(found, inputs, Causal())


# On a device of its own.


BUSY = 20_000_000  # device cycles, about 10 ms: the device is kept behind the host, so that a missing wait shows


@pytest.mark.parametrize("pairs", [1, sweep(2), 3])
def test_a_device_is_exact_on_its_lanes(device, pairs):
    dtype, length, limit = (torch.bfloat16, 800, 8e-3) if device.type == "cuda" else (torch.float32, 200, 2e-6)
    q, k, v, grad = (torch.randn(1, heads, length, 64, device=device).to(dtype) for heads in (4, 2, 2, 4))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    whole = attention(*wide, mask=Causal(), backend="reference")
    for ring_id in range(4):
        own = Zigzag(pairs).positions(length, 4, ring_id).to(device)
        grads = torch.autograd.grad(whole[:, :, own], wide, grad[:, :, own].double(), retain_graph=True)
        exact = [whole.detach()[:, :, own], *grads]
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        if device.type == "cuda":
            torch.cuda._sleep(BUSY)
        out = ring_distributed_attention(*leaves, ring_size=4, ring_id=ring_id, pairs=pairs)
        found = [out.detach(), *torch.autograd.grad(out, leaves, grad[:, :, own])]
        for name, mine, truth in zip(("out", "dq", "dk", "dv"), found, exact, strict=True):
            assert relative_error(mine, truth) < limit, name


@pytest.fixture
def laned(replay, monkeypatch):  # noqa: F811
    """Blocks on the CPU take the two lanes of a device that only keeps vector clocks."""
    monkeypatch.setattr(blockwise, "_use_two_streams", bool)
    return replay


def run_two_layers(pairs: Pairs, ring_size: int, ring_id: int) -> None:
    for _ in range(2):
        inputs = random_inputs(8 * ring_size, batch=1, heads=(1, 1))
        local_results(inputs, ring_size, ring_id, pairs=pairs)


def test_no_memory_is_used_again_while_another_lane_reads_it(laned):
    for pairs, ring_size in ((1, 1), (1, 4), (2, 3), (3, 4), ((3, 0, 1), 3)):
        for ring_id in range(ring_size):
            run_two_layers(pairs, ring_size, ring_id)
    assert not laned.races
    assert all(stream.clock[stream.name] > 1 for stream in laned.streams)


def test_lanes_change_no_result(laned):
    for pairs in (1, 3):
        inputs = random_inputs(61)
        assert_attention_close(by_value(inputs, 3, pairs=pairs), inputs, Causal())


def test_the_replay_notices_sums_that_do_not_wait(laned, monkeypatch):
    monkeypatch.setattr(StreamPair, "exclusive", lambda self: nullcontext())
    run_two_layers(3, 4, 1)
    assert any("memory" in race for race in laned.races)


def test_the_longest_chunk_goes_first(laned, monkeypatch):
    """Then short ones fill the gaps at the end; so do blocks in the backward."""
    taken = []

    def noted(self, call: Call, *more, original):
        taken.append(call.visibility)
        original(self, call, *more)

    monkeypatch.setattr(Aten, "forward", partialmethod(noted, original=Aten.forward))
    monkeypatch.setattr(Aten, "backward", partialmethod(noted, original=Aten.backward))
    leaves = [x.requires_grad_() for x in random_inputs(96)[:3]]
    out = ring_distributed_attention(*leaves, ring_size=2, ring_id=1, pairs=3)
    chunks = list(Zigzag(3).ranges(96, 2, 1))
    assert [visibility.q for visibility in taken] == [
        (chunk,) for chunk in (chunks[2], chunks[4], chunks[3], chunks[1], chunks[0])
    ]
    taken.clear()
    out.sum().backward()
    blocks = [visibility.blocks[0] for visibility in taken]
    # The fifth is a causal square: half of it counts.
    assert [(len(block.q), len(block.k)) for block in blocks[:5]] == [(16, 40), (8, 80), (8, 64), (8, 24), (16, 16)]


def test_virtual_ranks_share_a_stream_and_go_without_lanes(laned):
    inputs = random_inputs(48)
    run_virtual(3, lambda comm: local_results(inputs, 3, comm.rank, group=comm))
    assert all(stream.name not in stream.clock for stream in laned.streams)


# What does not fit raises ValueError, on every rank, with the explanation.


def attend(given: dict[str, object]) -> Tensor:
    """A call in which all is well, but for what is given."""
    call = {name: torch.ones(1, 2, 12, 16) for name in "qkv"} | given
    return ring_distributed_attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)


BAD_PLACES = {
    "neither": ({}, "pass group, or both ring_size and ring_id, got ring_size=None and ring_id=None"),
    "half a place": ({"ring_size": 4}, "pass group, or both ring_size and ring_id, got ring_size=4 and ring_id=None"),
    "the other half": ({"ring_id": 0}, "pass group, or both .* got ring_size=None and ring_id=0"),
    "no ring": ({"ring_size": 0, "ring_id": 0}, "ring_size must be an integer >= 1, got 0"),
    "beyond the ring": ({"ring_size": 4, "ring_id": 4}, "ring_id must be 0 to 3, got 4"),
    "before the ring": ({"ring_size": 4, "ring_id": -1}, "ring_id must be 0 to 3, got -1"),
    "a ring of True": ({"ring_size": True, "ring_id": 0}, "ring_size must be an integer >= 1, got True"),
    "half a ring": ({"ring_size": 2.5, "ring_id": 0}, "ring_size must be an integer >= 1, got 2.5"),
    "the id False": ({"ring_size": 4, "ring_id": False}, "ring_id must be 0 to 3, got False"),
    "an id in words": ({"ring_size": 4, "ring_id": "0"}, "ring_id must be 0 to 3, got '0'"),
    "no such group": ({"group": "sequence"}, "group must be a Comm, ProcessGroup, DeviceMesh or None, got str"),
}


@pytest.mark.parametrize("what", BAD_PLACES)
def test_a_place_that_cannot_be(what):
    given, words = BAD_PLACES[what]
    with pytest.raises(ValueError, match=words):
        attend(given)
    if {"ring_size", "ring_id"} == set(given):
        with pytest.raises(ValueError, match=words):
            ring_chunks(12, **given)


@pytest.mark.parametrize("length", [-1, 1.5, True, None])
def test_a_length_that_cannot_be(length):
    for ask in (lambda: ring_chunks(length, 2, 0), lambda: gather_ring_outputs(torch.ones(1, 1, 4), length=length)):
        with pytest.raises(ValueError, match=f"length must be an integer >= 0, got {length}"):
            ask()


# What one rank gives, and what all must hear.
BAD_INPUT = {
    "queries and keys of two lengths": (
        {"q": torch.ones(1, 2, 11, 16)},
        "k must hold the positions up to the last query, 11 for q_offset=0 and 11 queries, got 12",
    ),
    "k and v of two shapes": (
        {"v": torch.ones(1, 2, 11, 16)},
        "k and v must have the same batch size, heads and length",
    ),
    "heads that do not divide": ({"q": torch.ones(1, 3, 12, 16)}, "got q_heads=3 and kv_heads=2"),
    "three dimensions": ({"q": torch.ones(2, 12, 16)}, r"q must be \[batch, heads, seq, head_dim\]"),
    "no tensor": ({"k": None}, "k must be a tensor, got NoneType"),
    "k of another dtype": ({"k": torch.ones(1, 2, 12, 16).half()}, "q, k and v must have the same dtype"),
    "scale NaN": ({"scale": float("nan")}, "scale must be a finite number, got nan"),
    "another place": ({"ring_id": 2}, "ring_id must be that of the group, 1, or None, got 2"),
    "another ring": ({"ring_size": 4}, "ring_size must be that of the group, 3, or None, got 4"),
    "no pairs": ({"pairs": 0}, "Zigzag.pairs must be an integer >= 1, .*got 0"),
    "pairs for two": ({"pairs": (1, 2)}, r"Zigzag.pairs must have one entry for each of 3 ranks, got \(1, 2\)"),
    "pairs in a list": ({"pairs": [1, 1, 1]}, r"Zigzag.pairs must be an integer >= 1, or a tuple .*got \[1, 1, 1\]"),
    "no such backend": ({"backend": "cuda"}, "backend must be one of .*got 'cuda'"),
    "a backend that holds every score": ({"backend": "reference"}, "backend must be one of .*got 'reference'"),
    "a backend that cannot": (
        {"backend": "triton", **{n: torch.ones(1, 2, 12, 8) for n in "qkv"}},
        "backend='triton' cannot serve this call: its kernels take head_dim 16 to 576, not 8",
    ),
    "an offset beyond the keys": ({"q_offset": 1}, "k must hold .* 13 for q_offset=1 and 12 queries, got 12"),
    "an offset of True": ({"q_offset": True}, "q_offset must be an integer >= 0, got True"),
    "no mask": ({"mask": None}, r"mask must be an attnmesh mask .*got None"),
    "a mask that is not causal": ({"mask": Full()}, r"mask must be causal, but Full\(\) .* position 0 attend to later"),
    "documents without Causal": (
        {"mask": Documents([4, 8])},
        "position 0 attend to later keys: intersect it with Causal",
    ),
    "a window to the right": ({"mask": SlidingWindow(3, 1)}, "mask must be causal, but SlidingWindow"),
    "documents of another length": ({"mask": Causal() & Documents([4, 7])}, "must add up to the sequence length 12"),
    "another mask": ({"mask": SlidingWindow(3)}, r"mask is Causal\(\) on ranks 0, 2 but SlidingWindow"),
    "another offset": (
        {"q": torch.ones(1, 2, 11, 16), "q_offset": 1},
        "length is 12 on ranks 0, 2 but 11 on rank 1; q_offset is 0 on ranks 0, 2 but 1 on rank 1",
    ),
    "other pairs": ({"pairs": 2}, "pairs is 1 on ranks 0, 2 but 2 on rank 1"),
    "another scale": ({"scale": 0.5}, "scale is 0.25 on ranks 0, 2 but 0.5 on rank 1"),
    "another length": ({n: torch.ones(1, 2, 13, 16) for n in "qkv"}, "length is 12 on ranks 0, 2 but 13 on rank 1"),
    "another batch": ({n: torch.ones(2, 2, 12, 16) for n in "qkv"}, "batch is 1 on ranks 0, 2 but 2 on rank 1"),
    "gradients": ({"k": torch.ones(1, 2, 12, 16, requires_grad=True)}, "gradient of k is False on ranks 0, 2 but True"),
    "another backend": ({"backend": "aten"}, "backend is auto on ranks 0, 2 but aten on rank 1"),
}


def said(program, comm: Comm) -> str:
    try:
        program(comm)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def assert_all_say(words: str, program) -> None:
    for rank, message in enumerate(run_virtual(3, lambda comm: said(program, comm), timeout=30)):
        assert re.search(words, message), f"rank {rank}: {message}"


@pytest.mark.parametrize("what", BAD_INPUT)
def test_one_rank_is_wrong_and_all_hear_it(what):
    given, words = BAD_INPUT[what]
    assert_all_say(words, lambda comm: attend({"group": comm} | (given if comm.rank == 1 else {})))


@pytest.mark.parametrize("what", [what for what, (_, words) in BAD_INPUT.items() if "rank" not in words])
def test_alone_bad_input_is_just_as_bad(what):
    given, words = BAD_INPUT[what]
    if "group" not in words:
        with pytest.raises(ValueError, match=words):
            attend({"ring_size": 3, "ring_id": 1} | given)


def test_after_a_refusal_all_goes_on():
    def program(comm: Comm) -> Tensor:
        for _ in range(2):
            with pytest.raises(ValueError, match="must be a multiple of kv_heads"):
                attend({"group": comm} | ({"q": torch.ones(1, 3, 12, 16)} if comm.rank == 1 else {}))
        return attend({"group": comm})

    for out in run_virtual(3, program):
        torch.testing.assert_close(out, torch.ones(1, 2, 4, 16))


BAD_GATHERS = {
    "a row too many": (
        {"local_out": torch.ones(1, 2, 5, 3)},
        "local_out must have 4 rows for rank 1 of 3 .*, got 5",
    ),
    "two dimensions": ({"local_out": torch.ones(4, 3)}, r"local_out must be .* got shape \(4, 3\)"),
    "no tensor": ({"local_out": None}, r"local_out must be a tensor .* got NoneType"),
    "a negative length": ({"length": -1}, "length must be an integer >= 0, got -1"),
    "another length": ({"length": 13}, "length is 12 on ranks 0, 2 but 13 on rank 1"),
    "other pairs": ({"pairs": 2}, "pairs is 1 on ranks 0, 2 but 2 on rank 1"),
    "no pairs": ({"pairs": 0}, "Zigzag.pairs must be an integer >= 1, .*got 0"),
    "another shape": ({"local_out": torch.ones(1, 2, 4, 5)}, "other dimensions is"),
    "another dtype": ({"local_out": torch.ones(1, 2, 4, 3).half()}, "dtype is torch.float32 on ranks 0, 2"),
    "gradients": ({"local_out": torch.ones(1, 2, 4, 3, requires_grad=True)}, "gradients is False on ranks 0, 2"),
}


@pytest.mark.parametrize("what", BAD_GATHERS)
def test_one_rank_gathers_something_else_and_all_hear_it(what):
    given, words = BAD_GATHERS[what]

    def program(comm: Comm) -> None:
        call = {"local_out": torch.ones(1, 2, 4, 3), "length": 12} | (given if comm.rank == 1 else {})
        gather_ring_outputs(call.pop("local_out"), group=comm, **call)

    assert_all_say(words, program)


class Heard(Comm):
    """One rank of three whose others agree with everything; it remembers why it gave up."""

    reason = ""

    def _exchange(self, verb, sends, recvs):
        return Finished()

    def _compare(self, claim):
        return {self.rank: claim}

    def fail(self, message: str) -> None:
        self.reason = message


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_rank_that_fails_tells_the_others(when, monkeypatch):
    def broken(*args, **kwargs):
        raise MemoryError("not enough")

    comm = Heard(1, 3, timeout=10)
    out = attend({"group": comm, "q": torch.ones(1, 2, 12, 16, requires_grad=True)})
    monkeypatch.setattr(blockwise, when, broken)
    with pytest.raises(MemoryError, match="not enough"):
        attend({"group": comm}) if when == "forward" else out.sum().backward()
    assert comm.reason == "MemoryError: not enough"
