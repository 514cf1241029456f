"""Odd but valid calls against float64: nothing to compute, one row, odd widths, any scale, poison in unused memory.

Every call is drawn from a seed, which a failure names.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh.testing.attention import assert_attention_close, forward_backward, random_inputs, reference_results
from attnmesh.testing.decode import random_decode
from attnmesh.testing.sparse import INDEX_SCALE, SCALE, OneDevice, Reference, random_sparse_problem
from helpers.cases import first
from helpers.decode import assert_decode_close

DTYPES = (torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64)
NEAR = {torch.float16: 0.01, torch.bfloat16: 0.05}
SCALES = (None, 0.0, 1e-30, -0.7, 40.0, 1e4)


@contextmanager
def naming(said: str) -> Iterator[None]:
    """Name the call in failures of the body."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{said}: {error}") from error


# Dense attention.


def draw_mask(random: Random, keys: int) -> am.Mask:
    left, right = random.choice([0, 1, 3, 40]), random.choice([0, 0, 2])
    cuts = sorted(random.choices(range(keys + 1), k=random.choice([0, 1, 3, 12])))
    documents = am.Documents([b - a for a, b in zip([0, *cuts], [*cuts, keys], strict=True)])
    masks = (am.Full(), am.Causal(), am.SlidingWindow(left, right), am.Causal() & am.SlidingWindow(left), documents)
    return random.choice((*masks, am.Causal() & documents))


def draw_positions(random: Random, count: int, keys: int) -> Tensor | None:
    """None, a chunk, with steps, in any order, repeated, far away, negative; of any integer dtype."""
    kind = random.choice(["none", "chunk", "step", "order", "repeated", "far", "negative"])
    dtype = random.choice([torch.int64, torch.int32])
    if kind == "none":
        return None
    if kind == "chunk":
        return torch.arange(count, dtype=dtype) + random.randrange(keys + 2)
    if kind == "step":
        return torch.arange(count, dtype=dtype) * random.randint(1, 5)
    if kind == "order":
        return torch.tensor(random.sample(range(2 * count + 1), count), dtype=dtype)
    low, high = {"repeated": (0, count), "far": (2**40, 2**40 + 2 * count), "negative": (-count, count)}[kind]
    return torch.tensor([random.randint(low, high) for _ in range(count)], dtype=torch.int64)


def odd_attention(seed: int) -> str:
    random = Random(seed)
    rows, keys = random.choice([0, 1, 1, 2, 7, 30]), random.choice([0, 1, 2, 9, 31])
    heads = random.choice([(1, 1), (3, 1), (4, 2), (2, 2)])
    batch, dim, dtype = random.choice([0, 1, 1, 2]), random.choice([1, 2, 3, 7, 8, 17, 33]), random.choice(DTYPES)
    mask = draw_mask(random, keys)
    q_at = draw_positions(random, rows, keys)
    k_at = None if isinstance(mask, am.Documents) else draw_positions(random, keys, keys)
    scale, backend = random.choice(SCALES), random.choice(["aten", "reference", "auto"])
    inputs = random_inputs(rows, keys, heads=heads, dtype=dtype, batch=batch, head_dim=dim, seed=seed)
    at = {
        "q_positions": torch.arange(rows) if q_at is None else q_at.long(),
        "k_positions": torch.arange(keys) if k_at is None else k_at.long(),
    }
    visible = mask.visible(at["q_positions"][:, None], at["k_positions"])
    poison = random.choice([0.0, math.nan, math.inf])
    clean = [x.clone() for x in inputs]
    for x, spoiled, unseen in zip(clean, inputs, (~visible.any(1), ~visible.any(0), ~visible.any(0)), strict=False):
        x[:, :, unseen] = 0.0
        spoiled[:, :, unseen] = poison
    said = f"attention {seed}: {rows}x{keys} {heads} {batch} {dim} {dtype} {mask} {scale} {backend} {poison}"

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return am.attention(
            q, k, v, mask=mask, scale=scale, q_positions=q_at, k_positions=k_at, return_lse=True, backend=backend
        )

    results = forward_backward(attend, inputs)
    if scale is not None and abs(scale) > 1:  # rounding decides which of two nearly equal keys wins
        assert_finite(results, reference_results(clean, mask, scale=scale, **at), said)
    else:
        assert_near(said, results, clean, mask, scale=scale, **at)
    return said


def assert_near(said: str, results: list[Tensor], inputs: list[Tensor], mask: am.Mask, **how: object) -> None:
    """The error rule; of a few numbers in half precision, two computations may differ by more than a factor of two."""
    near = NEAR.get(inputs[0].dtype)
    if near is None:
        with naming(said):
            assert_attention_close(results, inputs, mask, **how)
        return
    for result, exact in zip(results, reference_results(inputs, mask, **how), strict=True):
        assert_finite([result], [exact], said)
        error = (result.double() - exact).nan_to_num(0.0).norm()
        assert error <= near * (exact.nan_to_num(0.0, 0.0, 0.0).norm() + 0.1), f"{said}: error {error}"


def assert_finite(results: list[Tensor], exact: list[Tensor], said: str) -> None:
    for result, wanted in zip(results, exact, strict=True):
        assert torch.equal(result.isfinite(), wanted.to(result.dtype).isfinite()), said  # fp16 may overflow


def odd_context(seed: int) -> str:
    """Fewer rows than ranks, nothing at all, keys of another length."""
    random = Random(seed)
    world, length = random.choice([1, 2, 3, 5]), random.choice([0, 1, 2, 3, 11])
    keys = random.choice([length, length, random.choice([0, 1, 8])])
    mask = random.choice([am.Full(), am.Causal(), am.Causal() & am.SlidingWindow(1), am.SlidingWindow(0, 1)])
    layout = random.choice([am.Contiguous(), am.Zigzag(), am.Striped(), am.Balanced(mask)])
    schedule = random.choice(["ring", "allgather", "ulysses"])
    batch, dim = random.choice([0, 1, 2]), random.choice([1, 5, 8])
    heads, scale = random.choice([(world, 1), (2 * world, 2 * world)]), random.choice((None, 0.0, -0.5))
    inputs = random_inputs(length, keys, heads=heads, batch=batch, head_dim=dim, seed=seed)
    said = f"context {seed}: {world} ranks {length}x{keys} {heads} {mask} {layout} {schedule} {batch} {dim} {scale}"

    def attend(comm: am.comm.Comm) -> list[Tensor]:
        cp = am.ContextParallel(comm, layout=layout, schedule=schedule)
        own = [layout.shard(x, 2, world, comm.rank) for x in inputs]
        parts = forward_backward(
            lambda q, k, v: cp.attention(
                q, k, v, mask=mask, scale=scale, length=length, key_length=keys, return_lse=True
            ),
            own,
        )
        return [cp.unshard(x, 2, n) for x, n in zip(parts, (length, length, length, keys, keys), strict=True)]

    for results in am.run_virtual(world, attend):
        assert_near(said, results, inputs, mask, scale=scale)
    return said


def odd_queries(seed: int) -> str:
    """Query-distributed attention of a prompt after a prefix, under a causal mask."""
    random = Random(seed)
    world, rows, offset = random.choice([1, 2, 3, 5]), random.choice([0, 1, 2, 9, 30]), random.choice([0, 0, 1, 8, 33])
    mask = am.Causal() & draw_mask(random, offset + rows)
    pairs = random.choice([1, 1, 2, (2, *[0] * (world - 1)), tuple(range(1, world + 1))])
    sizes = {"heads": random.choice([(1, 1), (3, 1), (4, 2)]), "batch": random.choice([0, 1, 2])}
    widths = {"head_dim": random.choice([1, 7, 16]), "value_dim": random.choice([None, 3, 8])}
    scale, dtype = random.choice([None, 0.0, -0.7]), random.choice(DTYPES)
    inputs = random_inputs(rows, offset + rows, **sizes, **widths, dtype=dtype, seed=seed)
    said = f"queries {seed}: {rows} after {offset} of {world} {pairs} {sizes} {widths} {mask} {scale} {dtype}"
    layout, how = am.Zigzag(pairs), {"q_offset": offset, "mask": mask, "scale": scale, "pairs": pairs}

    def attend(comm: am.comm.Comm) -> list[Tensor]:
        own = [x if i < 3 else layout.shard(x, 2, world, comm.rank) for i, x in enumerate(inputs)]
        out, lse, dq, dk, dv = forward_backward(
            lambda q, k, v: am.ring_distributed_attention(q, k, v, group=comm, return_lse=True, **how), own
        )
        whole = [am.gather_ring_outputs(x, length=rows, group=comm, pairs=pairs) for x in (out, lse)]
        return [*whole, comm.all_reduce(dq), dk, dv]

    for results in am.run_virtual(world, attend):
        positions = torch.arange(offset, offset + rows)
        assert_near(said, results, inputs, mask, scale=scale, q_positions=positions)
    return said


# Decode.


def odd_decode(seed: int) -> str:
    random = Random(seed)
    batch, capacity = random.choice([0, 1, 2, 3]), random.choice([1, 2, 17, 40])
    positions = [random.choice([-1, 0, capacity - 1, random.randrange(capacity)]) for _ in range(batch)]
    how = {
        "tokens": random.choice([1, 1, 2, 8]), "group": random.choice([1, 1, 2, 5]), "kv_heads": random.choice([1, 2]),
        "dims": random.choice([(1, 1), (5, 3), (16, 16), (33, 7)]), "block_size": random.choice([None, None, 1, 3, 16]),
        "dtype": random.choice(DTYPES), "q_memory": random.choice(["own", "transposed", "fused"]),
        "window": random.choice([None, None, 1, 2, 100]), "sinks": random.random() < 0.3,
        "key_range": random.choice(["causal", "causal", "tree", "trees", "bool bht", "bias h", "bool t short"]),
        "scale": random.choice((None, 0.0, -0.3, 0.5)), "memory": random.choice(["own", "layer", "layer inside"]),
        "at": random.choice(["list", "int32", "int64"]), "seed": seed,
    }  # fmt: skip
    if random.random() < 0.2:
        how |= {"key_range": "intervals", "window": None}
    elif random.random() < 0.2:
        how["share"] = "cache"
    if random.random() < 0.3:
        how["split_size"] = random.choice([1, 3, 16, 100])
    said = f"decode {seed}: {positions} of {capacity} {how}"
    problem = random_decode(positions, capacity=capacity, **how)
    with naming(said):
        assert_decode_close(problem.run(random.choice(["cpu", "reference"])), problem)
    return said


# Sparse attention and the indexer.


def odd_sparse(seed: int) -> str:
    random = Random(seed)
    rows, keys = random.choice([0, 1, 2, 9]), random.choice([0, 1, 3, 12])
    sizes = {
        "heads": random.choice([1, 3]), "topk": random.choice([1, 2, 7]), "width": random.choice([1, 5, 16]),
        "d_v": random.choice([1, 4]), "index_heads": random.choice([1, 3]), "index_width": random.choice([1, 6]),
    }  # fmt: skip
    mask = random.choice([{}, {"causal": True}, {"causal": True, "k_stride": 3, "q_start": 2}])
    if random.random() < 0.4:
        mask = mask | {"topk_length": torch.tensor([random.randint(-1, 9) for _ in range(rows)], dtype=torch.int32)}
    given = random_sparse_problem(rows, keys, **sizes, seed=seed, **mask)
    said = f"sparse {seed}: {rows}x{keys} {sizes} {mask}"
    found, exact = (
        sparse_results(functions, problem)
        for functions, problem in ((OneDevice, given.poisoned().to(torch.float32)), (Reference, given))
    )
    for name, result in found.items():
        assert result.shape == exact[name].shape, f"{said}: {name}"
        assert torch.equal(result.isfinite(), exact[name].isfinite()), f"{said}: {name} is not finite"
        wrong = (result.double() - exact[name]).nan_to_num(0.0).norm()
        bound = 1e-4 * (exact[name].nan_to_num(0.0, 0.0, 0.0).norm() + 1)
        assert wrong <= bound, f"{said}: error of {name} {wrong:.2e} > {bound:.2e}"
    return said


def sparse_results(functions: type, problem) -> dict[str, Tensor]:
    q, kv, v, sinks = problem.leaves("q", "kv", "v", "sinks")
    options = {"scale": SCALE, "mask": problem.mask}
    out, lse = functions.sparse_attention(q, kv, problem.indices, v=v, sinks=sinks, **options)
    total = (out * problem.grad_out).sum() + (lse * problem.grad_lse).sum()
    grads = torch.autograd.grad(total, [q, kv, v, sinks])
    iq, ik, w = problem.leaves("iq", "ik", "w")
    scores = functions.indexer_scores_at(iq, ik, w, problem.indices, scale=INDEX_SCALE, mask=problem.mask)
    index_grads = torch.autograd.grad(torch.where(scores.isinf(), 0.0, scores * problem.grad_scores).sum(), [iq, ik, w])
    p = functions.attention_distribution(problem.q, problem.kv, problem.indices, problem.lse, **options)
    names = ("out", "lse", "p", "scores", "dq", "dkv", "dv", "dsinks", "diq", "dik", "dw")
    return dict(zip(names, (out.detach(), lse.detach(), p, scores.detach(), *grads, *index_grads), strict=True))


def odd_merge(seed: int) -> str:
    """States of any shape, with infinite lses, against the definition in float64."""
    random = Random(seed)
    shape = random.choice([(0, 3), (1, 1), (2, 0, 4), (5, 3), (2, 2, 2, 2)])
    generator = torch.Generator().manual_seed(seed)
    states = []
    for _ in range(random.randint(1, 5)):
        lse = torch.randn(shape[:-1], generator=generator) * random.choice([1, 50])
        odd = torch.rand(shape[:-1], generator=generator)
        lse = lse.masked_fill(odd < 0.3, -math.inf).masked_fill(odd > 0.9, math.inf)
        out = torch.randn(shape, generator=generator).masked_fill((lse == -math.inf)[..., None], math.nan)
        states.append(am.State(out, lse))
    out, lse = am.merge(states)
    lses = torch.stack([state.lse.double() for state in states])
    top = lses.amax(0).clamp(min=-1e300)
    weight = torch.where(lses == torch.inf, 1.0, torch.where(top == torch.inf, 0.0, torch.exp(lses - top)))
    total = weight.sum(0)
    values = torch.stack(
        [torch.where((state.lse == -math.inf)[..., None], 0.0, state.out.double()) for state in states]
    )
    expected = (weight[..., None] * values).sum(0) / total.clamp(min=1)[..., None]
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5, msg=f"merge {seed}")
    torch.testing.assert_close(lse.double(), torch.where(total > 0, top + total.log(), -math.inf), atol=1e-5, rtol=1e-6)
    return f"merge {seed}"


FAMILIES = {
    "attention": odd_attention,
    "context": odd_context,
    "queries": odd_queries,
    "decode": odd_decode,
    "sparse": odd_sparse,
    "merge": odd_merge,
}
QUICK = {"attention": 25, "context": 5, "queries": 5, "decode": 25, "sparse": 10, "merge": 10}


@pytest.mark.parametrize("family", first(2, FAMILIES))
def test_odd_calls(family):
    for seed in range(QUICK[family]):
        FAMILIES[family](seed)


@pytest.mark.sweep
@pytest.mark.parametrize("family", FAMILIES)
def test_more_odd_calls(family):
    for seed in range(1000, 1100):
        FAMILIES[family](seed)
