"""Query-distributed attention over a paged cache: exact, in bounded memory, and only what is seen is read."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnmesh import (
    BlockCache,
    CacheSpec,
    Causal,
    Chunked,
    Global,
    Mask,
    Padding,
    PerSequence,
    Quantized,
    SlidingWindow,
    Zigzag,
    attention,
    run_virtual,
)
from attnmesh.comm import Comm
from attnmesh.core.state import State
from attnmesh.ops import paged
from attnmesh.ops.dense import reference
from attnmesh.parallel.query_distributed import gather_ring_outputs, ring_distributed_attention
from attnmesh.testing.decode import DecodeProblem, random_decode
from attnmesh.testing.errors import ROUNDING, assert_close
from helpers.cases import in_turn, sweep
from helpers.masks import batch_masks
from helpers.memory import peak_bytes

WINDOW = 9


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one block: every test reads several."""
    monkeypatch.setattr(paged, "_PART_BYTES", 1)


def ring_of(problem: DecodeProblem, ring_size: int, **how: object) -> State:
    """The whole out and lse, from devices that do not talk."""
    q, offsets = problem.q, offsets_of(problem)
    ranks = [
        ring_distributed_attention(
            q, problem.k, problem.v, block_table=problem.table, q_offset=offsets, ring_size=ring_size, ring_id=i,
            return_lse=True, **how,
        )
        for i in range(ring_size)
    ]  # fmt: skip
    layout = Zigzag(how.get("pairs", 1))
    return State(*(layout.unshard(parts, 2) for parts in zip(*ranks, strict=True)))


def offsets_of(problem: DecodeProblem) -> list[int]:
    return [last + 1 - problem.q.shape[2] for last in problem.options["cur_pos"]]


def expected(problem: DecodeProblem, mask: Mask, *, plain: bool, **terms: object) -> State:
    """The same in float64, or by the plain computation in the dtype of q, sequence by sequence."""
    states = []
    for i, offset in enumerate(offsets_of(problem)):
        end = offset + problem.q.shape[2]
        q = problem.q[i : i + 1].to(problem.q.dtype if plain else torch.float64)
        k, v = (x[i : i + 1, :, :end].to(q.dtype) for x in problem.valid)
        positions = torch.arange(offset, end), torch.arange(end)
        states.append(
            reference.attention(q, k, v, mask.of_sequence(i), q.shape[3] ** -0.5, *positions, plain=plain, **terms)
        )
    return State(*(torch.cat(parts) for parts in zip(*states, strict=True)))


def assert_exact(found: State, problem: DecodeProblem, mask: Mask, **terms: object) -> None:
    exact, plain = (expected(problem, mask, plain=plain, **terms) for plain in (False, True))
    for name, *each in zip(("out", "lse"), found, plain, exact, strict=True):
        assert_close(name, *each, rounding=ROUNDING[problem.q.dtype])
    assert found.out.dtype == problem.q.dtype


CASES = [  # positions of the last queries, queries, block size, storage, dtype, window, ring, pairs
    ([40, 40], 17, 8, "plain", torch.float32, None, 3, 1),
    ([40, 22, 16], 17, 8, "plain", torch.float16, None, 2, 1),
    ([51, 30], 11, 5, "plain", torch.bfloat16, WINDOW, 2, 2),
    ([63], 64, 16, "plain", torch.float64, None, 4, 1),
    ([37], 3, 1, "plain", torch.float32, WINDOW, 4, 1),
    ([45, 45], 20, 16, "fp8", torch.float32, None, 2, 1),
    ([45, 31], 20, 7, "fp8 heads", torch.float16, WINDOW, 3, 1),
    ([45, 45], 20, 8, "int8", torch.bfloat16, None, 2, (2, 1)),
    ([29, 60], 30, 32, "bfp8", torch.float32, WINDOW, 1, 1),
]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_ring_over_a_cache_is_exact(case):
    positions, tokens, block_size, storage, dtype, window, ring_size, pairs = case
    problem = random_decode(
        positions, tokens=tokens, block_size=block_size, storage=storage, dtype=dtype, window=window,
        memory="layer", share="blocks" if storage == "plain" and window is None else None,
    )  # fmt: skip
    mask = Causal() if window is None else Causal() & SlidingWindow(window - 1)
    assert_exact(ring_of(problem, ring_size, mask=mask, pairs=pairs), problem, mask)


@pytest.mark.usefixtures("small_parts")
def test_softcap_sinks_and_alibi_slopes():
    problem = random_decode([40, 29], tokens=11, block_size=8)
    terms = {"softcap": 2.0, "sinks": torch.randn(4), "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])}
    assert_exact(ring_of(problem, 2, **terms), problem, Causal(), **terms)


MASKS = [
    Chunked(7),
    Causal() & (Global(5) | SlidingWindow(6)),
    Causal() & PerSequence([SlidingWindow(5), Chunked(16) | Global(2)]),
    Causal() & Padding([41, 25]),
]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(("positions", "mask"), in_turn([[40, 29], [40, 40], [40, 29]], MASKS), ids=str)
def test_masks_of_several_intervals_and_sequences(positions, mask):
    check_with_only_the_blocks_that_are_seen(random_decode(positions, tokens=11, block_size=4), 1, mask)


def check_with_only_the_blocks_that_are_seen(problem: DecodeProblem, ring_size: int, mask: Mask) -> None:
    """The blocks that no query attends to are not in the table."""
    block_size, tokens = problem.k.shape[1], problem.q.shape[2]
    for i, offset in enumerate(offsets_of(problem)):
        queries, keys = torch.arange(offset, offset + tokens), torch.arange(block_size * problem.table.shape[1])
        seen = mask.of_sequence(i).visible(queries[:, None], keys).any(0).unflatten(0, (-1, block_size)).any(1)
        problem.table[i, ~seen] = -1
    assert_exact(ring_of(problem, ring_size, mask=mask), problem, mask)


@pytest.mark.parametrize("examples", [6, sweep(40)])
@pytest.mark.usefixtures("small_parts")
def test_any_causal_mask_over_a_cache_is_exact(examples):
    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        batch, tokens = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 20))
        last = tokens - 1 + data.draw(st.integers(0, 20))
        mask = Causal() & data.draw(batch_masks(last + 1, batch))
        problem = random_decode([last] * batch, tokens=tokens, block_size=data.draw(st.integers(1, 6)), dims=(8, 8))
        check_with_only_the_blocks_that_are_seen(problem, 1, mask)

    check()


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(8))
def test_random_rings_over_random_caches_are_exact(seed, monkeypatch):
    draw = random.Random(seed)
    monkeypatch.setattr(paged, "_PART_BYTES", draw.choice([1, 1 << 12, 1 << 14, 1 << 30]))
    tokens, window = draw.choice([1, 2, 9, 30]), draw.choice([None, None, 1, 5, 40])
    positions = [tokens - 1 + draw.choice([0, 1, 13, 40]) for _ in range(draw.choice([1, 1, 2, 3]))]
    storage = draw.choice(["plain", "fp8", "fp8 heads", "int8", "bfp8"])
    dims = draw.choice([(16, 16), (32, 16), (16, 48)] if storage == "bfp8" else [(5, 5), (16, 7), (8, 24)])
    problem = random_decode(
        positions, tokens=tokens, window=window, storage=storage, dims=dims, seed=seed,
        block_size=draw.choice([1, 3, 8, 16, 64]), group=draw.choice([1, 3]), kv_heads=draw.choice([1, 2]),
        dtype=draw.choice([torch.float32, torch.float16, torch.bfloat16]), memory=draw.choice(["own", "layer"]),
    )  # fmt: skip
    mask = Causal() if window is None else Causal() & SlidingWindow(window - 1)
    pairs = draw.choice([1, 2])
    assert_exact(ring_of(problem, draw.choice([1, 2, 5]), mask=mask, pairs=pairs), problem, mask)


@pytest.mark.usefixtures("small_parts")
def test_triton_kernels_serve_it_too(device):
    problem = random_decode([19, 13], tokens=10, block_size=8, group=2, kv_heads=1, dims=(16, 16), device=device)
    found = ring_of(problem, 1, backend="triton")
    cpu = random_decode([19, 13], tokens=10, block_size=8, group=2, kv_heads=1, dims=(16, 16))
    assert_exact(State(*(x.cpu() for x in found)), cpu, Causal())


def test_a_group_agrees_and_gathers():
    problem = random_decode([40, 29], tokens=23, block_size=8)

    def rank(comm: Comm) -> list[Tensor]:
        local = ring_distributed_attention(
            problem.q, problem.k, problem.v, block_table=problem.table, q_offset=offsets_of(problem), group=comm,
            return_lse=True,
        )  # fmt: skip
        assert comm.traffic.bytes == 0
        return [gather_ring_outputs(x, length=23, group=comm) for x in local]

    for found in run_virtual(3, rank):
        assert_exact(State(*found), problem, Causal())


def test_a_chunked_prefill_through_a_block_cache():
    """Each chunk is written to the cache, and attends to it: the whole prompt's attention in the end."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 40, 16) for heads in (4, 2, 2))
    cache = BlockCache(
        CacheSpec(layers=1, kv_heads=2, head_dim=16, storage="fp32"),
        num_blocks=16,
        block_size=8,
        max_sequences=2,
        max_length=64,
    )
    sequences = [cache.allocate(40) for _ in range(2)]
    chunks = []
    for begin, end in ((0, 13), (13, 14), (14, 40)):
        new = cache.append(sequences, end - begin)
        cache.write(0, new, k[:, :, begin:end], v[:, :, begin:end])
        share = {"block_table": cache.block_table, "q_offset": begin, "ring_size": 2}
        parts = [
            ring_distributed_attention(q[:, :, begin:end], cache.keys(0), cache.values(0), ring_id=i, **share)
            for i in range(2)
        ]
        chunks.append(Zigzag().unshard(parts, 2))
    torch.testing.assert_close(torch.cat(chunks, 2), attention(q, k, v, mask=Causal()))


def test_a_long_prefix_needs_the_memory_of_a_part(monkeypatch):
    monkeypatch.setattr(paged, "_PART_BYTES", 1 << 18)

    def peak(prefix: int) -> int:
        q, k, v = (torch.zeros(shape) for shape in ((1, 2, 64, 32), *[(prefix // 64 + 1, 64, 2, 32)] * 2))
        table = torch.arange(prefix // 64 + 1, dtype=torch.int32)[None]
        share = {"ring_size": 1, "ring_id": 0, "q_offset": prefix, "block_table": table}
        return peak_bytes(lambda: ring_distributed_attention(q, k, v, **share))

    assert peak(16384) < peak(4096) * 1.1 + 1024 * 8


def test_values_narrower_than_keys_and_queries_without_rows():
    problem = random_decode([30], tokens=9, block_size=8, dims=(32, 16))
    assert_exact(ring_of(problem, 2), problem, Causal())
    assert ring_of(random_decode([30], tokens=1, block_size=8, dims=(32, 16)), 4).out.shape == (1, 4, 1, 16)


def call(**given: object) -> Tensor:
    """A call in which all is well, but for what is given."""
    arguments = {
        "q": torch.ones(2, 2, 6, 16), "k": torch.ones(4, 4, 2, 16), "v": torch.ones(4, 4, 2, 16),
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), "q_offset": [2, 1], "ring_size": 2,
        "ring_id": 0,
    } | given  # fmt: skip
    return ring_distributed_attention(**arguments)


BAD_INPUT = {
    "a table of int64": ({"block_table": torch.ones(2, 2).long()}, r"block_table must be int32 \[2, slots\] on cpu"),
    "a table of one sequence": ({"block_table": torch.ones(1, 2).int()}, r"block_table must be int32 \[2, slots\]"),
    "no table": ({"block_table": [[0, 1]]}, "block_table must be a tensor .*got list"),
    "too few slots": ({"q_offset": 3}, r"must have slots for .* 9 for q_offset=3 and 6 .*got \[2, 2\] slots of 4"),
    "offsets of three": ({"q_offset": [0, 1, 2]}, r"q_offset must have one entry for each of 2 .*got \[0, 1, 2\]"),
    "an offset of True": ({"q_offset": [0, True]}, "q_offset must be an integer >= 0, got True"),
    "a block outside": (
        {"block_table": torch.tensor([[0, 1], [2, 4]], dtype=torch.int32)},
        r"block_table\[1, 1\] is 4, but the pool has blocks 0 to 3",
    ),
    "an empty slot": ({"block_table": torch.full((2, 2), -1).int()}, r"block_table\[0, 0\] is -1, but the pool has"),
    "whole keys": ({"k": torch.ones(2, 16)}, "k must be a pool .*with block_table, got"),
    "another head_dim": ({"k": torch.ones(4, 4, 2, 8)}, "q and k must have the same head_dim, got 16 and 8"),
    "another dtype": ({"k": torch.ones(4, 4, 2, 16).half()}, "must have the same storage type, got fp16 and fp32"),
    "gradients of q": ({"q": torch.ones(2, 2, 6, 16, requires_grad=True)}, "q must not require a gradient"),
    "gradients of v": ({"v": torch.ones(4, 4, 2, 16, requires_grad=True)}, "v must not require a gradient .*no_grad"),
    "quantized, no table": (
        {"k": Quantized(torch.ones(4, 4, 2, 16).char(), torch.ones(4, 4, 2)), "block_table": None, "q_offset": 0},
        "k and v must be tensors without a block_table, got Quantized",
    ),
    "offsets, no table": (
        {"k": torch.ones(2, 2, 6, 16), "v": torch.ones(2, 2, 6, 16), "block_table": None},
        r"q_offset must be an integer >= 0 without a block_table, got \[2, 1\]",
    ),
}


@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input(what):
    given, words = BAD_INPUT[what]
    with pytest.raises(ValueError, match=words):
        call(**given)
    call()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_block_outside_the_pool_spoils_its_sequence_alone():
    q, k, v = (torch.ones(shape, device="cuda") for shape in ((2, 2, 6, 16), (4, 4, 2, 16), (4, 4, 2, 16)))
    table = torch.tensor([[0, 1], [2, 4]], dtype=torch.int32, device="cuda")
    out, lse = call(q=q, k=k, v=v, block_table=table, return_lse=True)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    assert torch.equal(lse.isnan(), out.isnan().all(-1))
