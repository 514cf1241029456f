"""Sparse decode over ranks: each holds some positions; keys and results are those of one rank, ties included."""

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh.comm import Comm, SoloComm
from attnmesh.ops.sparse import reference
from attnmesh.ops.storage import dequantize
from helpers.cases import sweep
from helpers.processes import run_processes

DIM, VALUES, INDEX_DIM, INDEX_HEADS, HEADS, BLOCK, TOPK = 144, 128, 16, 3, 6, 4, 7
LENGTHS, TOKENS, SCALE = (21, 3, 34), 2, 0.11


def drawn(*shape: int, seed: int, whole: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if whole is not None:
        return torch.randint(-whole, whole + 1, shape, generator=generator).float()
    return torch.randn(*shape, generator=generator)


class Problem:
    """The latents and index keys of three sequences, and the queries of their last two tokens.

    Index scores are whole numbers, exact in any order of summation and often equal.
    """

    def __init__(self, storage: str = "fp8_ds_mla", whole: bool = True) -> None:
        self.storage = storage
        small = {"whole": 2} if whole else {}
        self.latents = [drawn(1, 1, n, DIM, seed=i) for i, n in enumerate(LENGTHS)]
        self.index_keys = [drawn(1, 1, n, INDEX_DIM, seed=10 + i, **small) for i, n in enumerate(LENGTHS)]
        self.q = drawn(len(LENGTHS), TOKENS, HEADS, DIM, seed=20)
        self.iq = drawn(len(LENGTHS), TOKENS, INDEX_HEADS, INDEX_DIM, seed=21, **small)
        self.w = drawn(len(LENGTHS), TOKENS, INDEX_HEADS, seed=22, **small)
        self.sinks = drawn(HEADS, seed=23)
        self.cur_pos = [n - 1 for n in LENGTHS]

    def cache(self, decode: am.sparse.SparseDecode) -> am.BlockCache:
        """This rank's cache, written in two steps."""
        cache = am.BlockCache(
            am.CacheSpec(
                layers=1,
                kv_heads=1,
                head_dim=DIM,
                value_dim=VALUES,
                index_dim=INDEX_DIM,
                storage=self.storage,
                latent=True,
            ),
            num_blocks=40,
            block_size=BLOCK,
            device="cpu",
            max_sequences=3,
            max_length=64,
            shard=decode.shard,
        )
        sequences = [cache.allocate(n) for n in LENGTHS]
        for sequence, n, latent, index in zip(sequences, LENGTHS, self.latents, self.index_keys, strict=True):
            for part in (slice(0, n // 2), slice(n // 2, n)):
                new = cache.append([sequence], part.stop - part.start)
                cache.write(0, new, latent[:, :, part], index_k=index[:, :, part])
        return cache


def step(
    comm: Comm, problem: Problem, interleave: int = 1, heads: tuple[int, ...] | None = None, backend: str = "auto"
) -> list[Tensor]:
    """Select keys and attend: indices, scores, lengths, out and lse of this rank."""
    decode = am.sparse.SparseDecode(comm, interleave=interleave, heads=heads)
    cache = problem.cache(decode)
    top = decode.indexer_topk(
        problem.iq, cache.index_keys(0), cache.block_table, problem.w, TOPK, cur_pos=problem.cur_pos, backend=backend
    )
    own = slice(None)
    if heads is not None:
        own = slice(sum(heads[: comm.rank]), sum(heads[: comm.rank + 1]))
    out, lse = decode.attention(
        problem.q[:, :, own], cache.keys(0), cache.block_table, top.indices, scale=SCALE, d_v=VALUES,
        sinks=problem.sinks[own], backend=backend,
    )  # fmt: skip
    return [top.indices, top.scores, top.lengths, out, lse]


def truth(problem: Problem) -> tuple[list[list[int]], Tensor, Tensor]:
    """The best keys of every token, and out and lse over them, in float64."""
    index_storage = "fp8_token" if problem.storage == "fp8_ds_mla" else problem.storage
    best, outs, lses = [], [], []
    for b, n in enumerate(LENGTHS):
        index, latent = (
            dequantize(am.quantize(x[0, 0][:, None, None], kind), torch.float64, head_axis=2)[:, 0, 0]
            for x, kind in ((problem.index_keys[b], index_storage), (problem.latents[b], problem.storage))
        )
        scores = reference.index_scores(problem.iq[b].double(), index, problem.w[b].double())
        visible = torch.arange(n) <= torch.arange(n - TOKENS, n)[:, None]
        for t, keys in enumerate(reference.topk_keys(scores, visible, TOPK)):
            best.append(keys)
            s = problem.q[b, t].double() @ latent[keys].T * SCALE
            lse = torch.cat([s, problem.sinks.double()[:, None]], 1).logsumexp(1)
            outs.append(torch.exp(s - lse[:, None]) @ latent[keys][:, :VALUES])
            lses.append(lse)
    shape = (len(LENGTHS), TOKENS)
    return best, torch.stack(outs).unflatten(0, shape), torch.stack(lses).unflatten(0, shape)


def check(ranks: list[list[Tensor]], problem: Problem, heads: tuple[int, ...] | None = None) -> None:
    best, out, lse = truth(problem)
    for indices, scores, lengths, *_ in ranks:
        assert [[i for i in row if i >= 0] for row in indices.flatten(0, 1).tolist()] == best
        assert torch.equal(lengths.flatten(), torch.tensor([len(keys) for keys in best], dtype=torch.int32))
        assert torch.equal(scores, ranks[0][1])
    if heads is None:
        states = [rank[3:] for rank in ranks]
        assert all(torch.equal(x, y) for state in states for x, y in zip(state, states[0], strict=True))
    else:
        states = [[torch.cat([rank[i] for rank in ranks], 2) for i in (3, 4)]]
    for got_out, got_lse in states:
        torch.testing.assert_close(got_out.double(), out, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(got_lse.double(), lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("world", "interleave", "storage", "heads"),
    [
        (1, 1, "fp8_ds_mla", None),
        (2, 1, "fp8_ds_mla", (2, 4)),
        (3, 4, "fp32", None),
        sweep(4, 3, "fp8_ds_mla", (1, 2, 1, 2)),
        sweep(2, 16, "fp32", None),
    ],
)
def test_virtual_ranks(world, interleave, storage, heads):
    problem = Problem(storage)
    check(am.run_virtual(world, lambda comm: step(comm, problem, interleave, heads)), problem, heads)


@pytest.mark.sweep
def test_virtual_ranks_with_the_kernels():
    problem = Problem()
    check(am.run_virtual(2, lambda comm: step(comm, problem, 2, backend="triton")), problem)


def test_the_same_keys_as_one_rank_where_sums_are_rounded():
    problem = Problem(whole=False)
    one = step(SoloComm(), problem)
    for rank in am.run_virtual(3, lambda comm: step(comm, problem)):
        assert all(torch.equal(x, y) for x, y in zip(rank[:3], one[:3], strict=True))


def on_processes(comm: Comm) -> list[list[float]]:
    return [x.tolist() for x in step(comm, Problem(), 2, (3, 3))]


@pytest.mark.sweep
def test_two_processes():
    ranks = [[torch.tensor(x) for x in rank] for rank in run_processes(2, on_processes)]
    for rank in ranks:
        rank[2] = rank[2].int()
    check(ranks, Problem(), (3, 3))


# Ranks that disagree.


def refused(change: dict[str, object], said: str) -> None:
    """Rank 1 calls with something else: every rank raises."""
    problem = Problem()

    def rank(comm: Comm) -> str:
        decode = am.sparse.SparseDecode(comm)
        cache = problem.cache(decode)
        given = {"indices": torch.zeros(3, TOKENS, 4, dtype=torch.int32), "scale": 0.1, "q": problem.q}
        if comm.rank == 1:
            given |= change
        q, indices = given.pop("q"), given.pop("indices")
        with pytest.raises(ValueError, match=said) as error:
            decode.attention(q, cache.keys(0), cache.block_table, indices, **given)
        return str(error.value)

    assert len(am.run_virtual(2, rank)) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"indices": torch.ones(3, TOKENS, 4, dtype=torch.int32)}, "indices must be the same on every rank"),
        ({"scale": 0.2}, "scale"),
        ({"indices": torch.ones(3, TOKENS, 5, dtype=torch.int32)}, "topk"),
        ({"q": torch.ones(3, TOKENS, HEADS, 3)}, "pool must have 3 features per key"),
        ({"sinks": torch.ones(HEADS)}, "sinks"),
    ],
)
def test_ranks_that_disagree(change, said):
    refused(change, said)


def test_constructor():
    with pytest.raises(ValueError, match="heads must be 1 numbers, one per rank"):
        am.sparse.SparseDecode(heads=[1, 2])
    with pytest.raises(ValueError, match="interleave must be a positive integer"):
        am.sparse.SparseDecode(interleave=0)
    decode = am.sparse.SparseDecode(heads=[4])
    cache = Problem().cache(decode)
    with pytest.raises(ValueError, match="q must have 4 heads on this rank"):
        decode.attention(Problem().q, cache.keys(0), cache.block_table, torch.zeros(3, 2, 1).int(), scale=1.0)


@pytest.mark.parametrize("operation", ["attention", "indexer_topk"])
def test_a_corrupt_table_on_one_rank_is_an_error_on_all(operation):
    problem = Problem()

    def rank(comm: Comm) -> str:
        decode = am.sparse.SparseDecode(comm)
        cache = problem.cache(decode)
        if comm.rank == 1:
            cache.block_table[0, 0] = 999
        indices = torch.arange(8, dtype=torch.int32).expand(3, TOKENS, 8).clone()
        indices[1] = -1
        calls = {
            "attention": lambda: decode.attention(problem.q, cache.keys(0), cache.block_table, indices, scale=0.1),
            "indexer_topk": lambda: decode.indexer_topk(
                problem.iq, cache.index_keys(0), cache.block_table, problem.w, 3, cur_pos=problem.cur_pos
            ),
        }
        with pytest.raises(ValueError, match="is 999") as error:
            calls[operation]()
        return str(error.value)

    for said in am.run_virtual(2, rank):
        assert "block_table[0, 0] is 999" in said
