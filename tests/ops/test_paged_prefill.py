"""Many new tokens over a paged cache: every position against float64, with what is not to be read set to NaN."""

import re

import pytest
import torch

import attnmesh as am
from attnmesh.core.masks import Causal, SlidingWindow
from attnmesh.core.ranges import InterleavedShard
from attnmesh.core.visibility import InterleavedPatch, Kind
from attnmesh.ops import paged
from attnmesh.ops.dense import reference
from attnmesh.ops.storage import dequantize
from attnmesh.testing.decode import poison_cache
from attnmesh.testing.errors import ROUNDING, assert_close

Q_HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 4


def problem(lengths, tokens, storage="fp32", dtype=torch.float32, capacity=64, seed=0):
    """Queries, pools, a table of shuffled blocks, and k and v [B, H, L, D] of the stored values in float64."""
    generator = torch.Generator().manual_seed(seed)
    batch, slots = len(lengths), capacity // BLOCK
    q = torch.randn(batch, Q_HEADS, tokens, DIM, generator=generator).to(dtype)
    whole = [torch.randn(batch, KV_HEADS, capacity, DIM, generator=generator).to(dtype) for _ in range(2)]
    used = [-(-length // BLOCK) for length in lengths]
    order = torch.randperm(sum(used) + 3, generator=generator)
    table = torch.full((batch, slots), -1, dtype=torch.int32)
    pools, exact, at = [], [], 0
    for x in whole:
        scale = torch.tensor(0.02) if storage == "fp8" else None
        pool = am.quantize(
            torch.zeros(len(order), BLOCK, KV_HEADS, DIM, dtype=dtype), storage, scale=scale, head_axis=2
        )
        poison_cache(pool)
        pools.append(pool)
        exact.append(dequantize(am.quantize(x, storage, scale=scale), torch.float64))
    for b, count in enumerate(used):
        for slot in range(count):
            block, at = int(order[at]), at + 1
            table[b, slot] = block
            keys = slice(slot * BLOCK, min((slot + 1) * BLOCK, lengths[b]))
            for x, pool in zip(whole, pools, strict=True):
                given = x[b, :, keys].transpose(0, 1)
                put(pool, block, am.quantize(given, storage, **scale_of(pool)))
    return q, pools, table, exact


def scale_of(pool):
    return {"scale": pool.scales} if isinstance(pool, am.Quantized) and pool.storage == "fp8" else {}


def put(pool, block, tokens):
    if isinstance(pool, torch.Tensor):
        pool[block, : len(tokens)] = tokens
        return
    pool.values.view(torch.int8)[block, : len(tokens.values)] = tokens.values.view(torch.int8)
    if pool.storage != "fp8":
        pool.scales[block, : len(tokens.values)] = tokens.scales


def expected(q, exact, lengths, window=None, sinks=None, dtype=torch.float64):
    """Out and lse by the reference, one sequence at a time."""
    tokens = q.shape[2]
    mask = Causal() if window is None else SlidingWindow(window - 1)
    out = torch.zeros(*q.shape[:3], DIM, dtype=dtype)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=dtype)
    for b, length in enumerate(lengths):
        rows = min(tokens, length)
        if rows:  # else the sequence is skipped
            if sinks is not None:
                lse[b] = sinks.to(dtype)[:, None]
            k, v = (x[b : b + 1, :, :length].to(dtype) for x in exact)
            at = torch.arange(length - rows, length)
            state = reference.attention(
                q[b : b + 1, :, tokens - rows :].to(dtype), k, v, mask, DIM**-0.5, at, torch.arange(length),
                sinks=None if sinks is None else sinks.to(dtype),
            )  # fmt: skip
            out[b, :, tokens - rows :], lse[b, :, tokens - rows :] = state.out[0], state.lse[0]
    return out, lse


def assert_exact(lengths, tokens, storage="fp32", dtype=torch.float32, window=None, sinks=False, **options):
    q, pools, table, exact = problem(lengths, tokens, storage, dtype)
    sinks = torch.randn(Q_HEADS, generator=torch.Generator().manual_seed(1)).to(dtype) if sinks else None
    last = [length - 1 for length in lengths]
    got = am.decode.paged_prefill_attention(
        q, *pools, table, cur_pos=last, window=window, sinks=sinks, return_lse=True, **options
    )
    truth = expected(q, exact, lengths, window, sinks)
    plain = expected(q, exact, lengths, window, sinks, dtype)
    assert got[0].dtype == dtype
    for name, mine, naive, right in zip(("out", "lse"), got, plain, truth, strict=True):
        assert_close(name, mine.double(), naive.double(), right, rounding=ROUNDING[dtype])


@pytest.mark.parametrize(
    ("part_bytes", "window", "sinks"), [(1, None, False), (1 << 12, 1, True), (64 << 20, 7, False), (1, 40, True)]
)
def test_every_position_of_ragged_sequences(part_bytes, window, sinks, monkeypatch):
    """Lengths below T, at T, after a prefix, a skipped sequence, and two that share a call."""
    monkeypatch.setattr(paged, "_PART_BYTES", part_bytes)
    assert_exact([13, 64, 5, 0, 1, 37, 37], 13, window=window, sinks=sinks)


@pytest.mark.parametrize("causal", [True, False])
def test_other_numbers_of_new_tokens_in_one_call(causal, monkeypatch):
    """All of T, fewer after a prefix, a whole prompt, none, and more than the sequence has tokens."""
    monkeypatch.setattr(paged, "_PART_BYTES", 1 << 12)
    lengths, counts = [50, 37, 9, 20, 4], [13, 5, 9, 0, 7]
    q, pools, table, exact = problem(lengths, 13)
    terms = {"softcap": 2.0, "alibi_slopes": torch.rand(Q_HEADS), "sinks": torch.randn(Q_HEADS)}
    out, lse = am.decode.paged_prefill_attention(
        q, *pools, table, cur_pos=[n - 1 for n in lengths], query_lengths=counts, causal=causal, return_lse=True,
        **terms,
    )  # fmt: skip
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        rows = min(count, length)
        k, v = (x[b : b + 1, :, :length] for x in exact)
        state = am.attention(
            q[b : b + 1, :, 13 - rows :].double(), k, v, mask=am.Causal() if causal else am.Full(),
            q_positions=torch.arange(length - rows, length), return_lse=True, backend="reference",
            **{name: x.double() if isinstance(x, torch.Tensor) else x for name, x in terms.items()},
        )  # fmt: skip
        assert not out[b, :, : 13 - rows].any()
        for mine, truth in zip((out, lse), state, strict=True):
            torch.testing.assert_close(mine[b, :, 13 - rows :].double(), truth[0], rtol=2e-6, atol=2e-6)
    assert lse[3].isneginf().all()  # without new tokens, as a skipped sequence


def test_numbers_of_new_tokens_that_cannot_be():
    q, pools, table, _ = problem([20, 20], 3)
    for wrong, message in (
        ([3, 4], r"query_lengths\[1\] must be .*, got 4"),
        ([3], "query_lengths must have one number for each of 2 sequences"),
        (torch.rand(2), "query_lengths must be a list, or an int32 or int64 tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            am.decode.paged_prefill_attention(q, *pools, table, cur_pos=[19, 19], query_lengths=wrong)
    with pytest.raises(ValueError, match="window must be None with causal=False, got 4"):
        am.decode.paged_prefill_attention(q, *pools, table, cur_pos=[19, 19], window=4, causal=False)


@pytest.mark.parametrize("storage", ["fp8", "int8", "bfp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quantized_storage(storage, dtype):
    assert_exact([50, 19], 19, storage, dtype)


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_half_precision(storage):
    assert_exact([50, 19], 19, storage, torch.bfloat16)


def test_it_is_what_decode_computes():
    q, pools, table, _ = problem([40, 9, 0], 8)
    position = {"cur_pos": torch.tensor([39, 8, -1]), "window": 11, "sinks": torch.randn(Q_HEADS), "return_lse": True}
    many, few = (
        attend(q, *pools, table, **position)
        for attend in (am.decode.paged_prefill_attention, am.paged_decode_attention)
    )
    for x, y in zip(many, few, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_the_bits_of_a_sequence_do_not_depend_on_its_blocks_and_neighbours():
    q, (k, v), table, _ = problem([40, 33], 17)
    together = am.decode.paged_prefill_attention(q, k, v, table, cur_pos=[39, 32])
    order = torch.randperm(len(k))
    moved = torch.where(table < 0, -1, order.argsort()[table.clamp(min=0)]).int()
    alone = am.decode.paged_prefill_attention(q[1:], k[order], v[order], moved[1:], cur_pos=[32])
    assert torch.equal(alone[0], together[1])


def test_memory_is_bounded_by_a_part(monkeypatch):
    """No more keys are gathered at a time than a part has, whatever the cache holds."""
    monkeypatch.setattr(paged, "_PART_BYTES", 1 << 12)
    most, read = 0, paged.PagedKV.read

    def watched(self, keys, dtype):
        nonlocal most
        k, v = read(self, keys, dtype)
        most = max(most, k.nbytes + v.nbytes)
        return k, v

    monkeypatch.setattr(paged.PagedKV, "read", watched)
    assert_exact([64], 16)
    assert 0 < most <= 1 << 12


def test_a_window_leaves_early_blocks_unread():
    q, pools, table, exact = problem([60], 10)
    table[0, :10] = 12345  # positions 0 to 39
    got = am.decode.paged_prefill_attention(q, *pools, table, cur_pos=[59], window=8)
    torch.testing.assert_close(got.double(), expected(q, exact, [60], 8)[0], rtol=1e-5, atol=1e-5)


def test_no_tokens_and_no_sequences():
    q, pools, table, _ = problem([20], 12)
    assert am.decode.paged_prefill_attention(q[:, :, :0], *pools, table, cur_pos=[19]).shape == (1, Q_HEADS, 0, DIM)
    assert am.decode.paged_prefill_attention(q[:0], *pools, table[:0], cur_pos=[]).shape == (0, Q_HEADS, 12, DIM)


WRONG = {
    r"cur_pos must have one position for each of 2 sequences, got \[1\]": {"cur_pos": [1]},
    r"cur_pos\[1\] must be -1 to 63, got 64|cur_pos\[1\] .* got 64": {"cur_pos": [9, 64]},
    r"cur_pos\[0\] .* got -2": {"cur_pos": [-2, 9]},
    "cur_pos must be a list, or an int32": {"cur_pos": torch.ones(2)},
    r"cur_pos\[0\] .* got 1.5": {"cur_pos": [1.5, 2]},
    "window must be": {"window": 0},
    "sinks must be floating point": {"sinks": torch.ones(3)},
    "scale must be": {"scale": "1"},
    "return_lse must be": {"return_lse": 1},
    r"block_table\[1, 5\] is -1, but the pool has blocks": {"cur_pos": [9, 21]},
    "block_table must be int32": {"block_table": torch.zeros(2, 16)},
    "k_pool must be a pool": {"k_pool": torch.zeros(3, 4)},
    "v_pool must": {"v_pool": torch.zeros(9, 4, 3, 16)},
    "q must be floating point": {"q": torch.zeros(2, 4, 3, 16, dtype=torch.int32)},
    "reference": {"backend": "reference"},
    "backend must be one of": {"backend": "cpu"},
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_arguments(words):
    q, (k, v), table, _ = problem([20, 20], 9)
    given = {"q": q, "k_pool": k, "v_pool": v, "block_table": table, "cur_pos": [19, 19]} | WRONG[words]
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        am.decode.paged_prefill_attention(**given)
    assert re.search(words, str(raised.value)), raised.value


# Keys of one rank.


@pytest.mark.parametrize(("ranks", "interleave", "window"), [(2, 1, None), (2, 1, 30), (3, 2, 6), (4, 8, 1)])
def test_blocks_of_interleaved_keys_are_every_visible_pair_once(ranks, interleave, window):
    mask = Causal() if window is None else SlidingWindow(window - 1)
    for rank in range(ranks):
        shard = InterleavedShard(ranks, rank, interleave)
        for q, keys in ((range(9), range(3)), (range(30, 51), range(2, 13)), (range(7, 8), range(4))):
            keys = range(keys.start, min(keys.stop, shard.length(q.stop)))
            patch = InterleavedPatch(mask, q, shard, keys)
            at = shard.position(torch.arange(keys.start, max(keys) + 1 if keys else keys.start))
            visible = mask.visible(torch.arange(q.start, q.stop)[:, None], at[None])
            first, end = (x[0, 0] for x in patch.bounds(torch.device("cpu")))
            j = torch.arange(len(keys))
            assert torch.equal((first[:, None] <= j) & (j < end[:, None]), visible)
            count = torch.zeros(len(q), len(keys), dtype=torch.int64)
            for block in patch.blocks:
                part = visible[block.q.start : block.q.stop, block.k.start : block.k.stop]
                assert block.kind is Kind.PARTIAL or part.all()
                count[block.q.start : block.q.stop, block.k.start : block.k.stop] += part
            assert torch.equal(count, visible.long())
            assert all(
                torch.equal(x, y)
                for x, y in zip(patch.positions("cpu"), (torch.arange(q.start, q.stop), at), strict=True)
            )
            rows, unseen = patch.unseen(torch.device("cpu"))
            assert torch.equal(torch.zeros(len(q), dtype=torch.bool) if rows is None else rows[0], ~visible.any(1))
            assert torch.equal(
                torch.zeros(len(keys), dtype=torch.bool) if unseen is None else unseen[0], ~visible.any(0)
            )


@pytest.mark.parametrize("backend", ["aten", "torch", "triton"])
def test_states_over_the_keys_of_every_rank_merge_to_the_whole(backend, monkeypatch):
    """Each rank holds some keys of a sequence, in blocks of its own, and reads a few of them at a time."""
    monkeypatch.setattr(paged, "_PART_BYTES", 1 << 12)
    dtype, storage, bound = (torch.float16, "fp16", 1e-3) if backend == "triton" else (torch.float32, "fp32", 1e-5)
    q, pools, table, exact = problem([45], 14, storage, dtype)
    mask, positions = SlidingWindow(24), range(31, 45)
    states = []
    for rank in range(2):
        shard = InterleavedShard(2, rank, 3)
        own = torch.cat([torch.arange(run.start, run.stop, run.step) for run in shard.ranges(45)]).sort().values
        at = table[0, own // BLOCK].long(), own % BLOCK
        blocks = -(-len(own) // BLOCK)
        stored = [torch.full((blocks + 1, BLOCK, KV_HEADS, DIM), torch.nan, dtype=dtype) for _ in pools]
        for mine, pool in zip(stored, pools, strict=True):
            mine[1:].view(-1, KV_HEADS, DIM)[: len(own)] = pool[at]
        kv = paged.PagedKV(*stored, torch.arange(1, blocks + 1, dtype=torch.int32)[None], shard=shard)
        scores = paged.Scores(DIM**-0.5)
        states.append(
            paged.paged_attention(q, (positions,), kv, mask=mask, scores=scores, backend=backend, rounded=False)
        )
    whole = am.merge(states)
    truth = expected(q, exact, [45], 25)
    torch.testing.assert_close(whole.out.double(), truth[0], rtol=bound, atol=bound)
    torch.testing.assert_close(whole.lse.double(), truth[1], rtol=bound, atol=bound)
    assert all(state.out.dtype == torch.float32 and (state.out.half() != state.out).any() for state in states)
    with pytest.raises(ValueError, match="mask must be one interval per query"):
        paged.paged_attention(q, (positions,), kv, mask=mask | am.Global(2), scores=scores)


@pytest.mark.sweep
def test_the_kernels_of_gpus():
    assert_exact([20, 13, 5], 13, window=11, sinks=True, backend="triton")


def test_latents_are_read_once():
    """Values that are features of the keys stay so: kernels may read them together."""
    pool = torch.randn(4, 16, 1, 24)
    kv = paged.PagedKV(pool, pool[..., :8], torch.tensor([[2, 0], [1, 3]], dtype=torch.int32))
    keys, values = kv.read(range(3, 30), torch.float32)
    assert values.data_ptr() == keys.data_ptr()
    assert torch.equal(keys[1, 0], torch.cat([pool[1], pool[3]])[3:30, 0])
    assert torch.equal(values, keys[..., :8])
    apart = paged.PagedKV(pool, pool[..., :8].clone(), kv.block_table).read(range(3, 30), torch.float32)[1]
    assert torch.equal(apart, values)
