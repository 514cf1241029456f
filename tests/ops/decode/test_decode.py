"""decode_attention(): every option on its own, for every backend, against float64."""

import inspect
import math

import pytest
import torch

from attnmesh import decode_attention, paged_decode_attention
from attnmesh.ops.storage import Quantized, values_of
from attnmesh.testing.decode import DecodeProblem, random_decode
from helpers.cases import sweep
from helpers.decode import (
    BACKENDS,
    check_backend,
    decode_by_loops,
    device_of,
    interpreted,
    problem_for,
    supported_dtype,
)

ON_EACH = pytest.mark.parametrize("backend", BACKENDS)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EDGES = [0, 1, 14, 15, 16, 17, 31, 32, 33, 36]  # positions at the ends of tiles and blocks of 16


# Tokens, heads, widths, dtypes.


@pytest.mark.parametrize(
    ("tokens", "group", "backend"),
    [(1, 1, "cpu"), (2, 3, "triton"), (4, 8, "cpu"), sweep(5, 7, "triton"), sweep(7, 64, "cpu"), sweep(8, 1, "triton")],
)
def test_tokens_and_query_heads_per_kv_head(tokens, group, backend):
    paged = {"block_size": 8} if (tokens + group) % 2 else {}
    check_backend(problem_for(backend, [22, tokens - 1], tokens=tokens, group=group, dims=(16, 16), **paged), backend)


@ON_EACH
@pytest.mark.parametrize("kv_heads", [1, 3, 5])
def test_any_number_of_kv_heads(kv_heads, backend):
    check_backend(problem_for(backend, [22], kv_heads=kv_heads, group=2, tokens=2), backend)


@pytest.mark.parametrize(
    ("dims", "backend"),
    [
        ((16, 128), "cpu"),
        ((48, 32), "triton"),
        ((33, 17), "triton"),
        sweep((80, 96), "cpu"),
        sweep((128, 128), "triton"),
        sweep((192, 128), "cpu"),
        sweep((256, 256), "cpu"),
    ],
)
def test_any_width_of_keys_and_values(dims, backend):
    check_backend(problem_for(backend, [18, 40], dims=dims, tokens=2), backend)
    check_backend(problem_for(backend, [18, 40], dims=dims, block_size=16), backend)


@pytest.mark.parametrize(
    ("storage", "block_size", "backend"),
    [
        ("plain", None, "cpu"),
        sweep("plain", 16, "triton"),
        sweep("fp8", 16, "triton"),
        sweep("fp8 heads", None, "triton"),
        sweep("int8", 16, "cpu"),
        sweep("bfp8", None, "cpu"),
    ],
)
def test_values_that_are_the_first_columns_of_the_keys(storage, block_size, backend):
    """As multi-head latent attention stores them: one kv head, the values within the keys."""
    problem = problem_for(
        backend, [40, 17], tokens=2, group=16, kv_heads=1, dims=(576, 512), v_in_k=True,
        block_size=block_size, storage=storage, dtype=torch.bfloat16,
    )  # fmt: skip
    assert values_of(problem.k).data_ptr() == values_of(problem.v).data_ptr()
    check_backend(problem, backend)


@pytest.mark.parametrize(
    ("storage", "dtype", "block_size", "backend"),
    [
        ("plain", torch.float32, None, "cpu"),
        ("fp8", torch.float16, 7, "triton"),
        sweep("fp8 heads", torch.bfloat16, None, "triton"),
        sweep("int8", torch.bfloat16, 7, "cpu"),
        sweep("bfp8", torch.float32, 7, "triton"),
        sweep("bfp8", torch.float16, None, "cpu"),
    ],
)
def test_every_storage_under_every_dtype_of_queries(storage, dtype, block_size, backend):
    if dtype == torch.bfloat16 and supported_dtype(backend, dtype) != dtype:
        pytest.skip("the interpreter's bfloat16 products are wrong")
    how = {"storage": storage, "dtype": dtype, "block_size": block_size, "kv_heads": 3}
    check_backend(problem_for(backend, [45, 3, -1], tokens=3, dims=(48, 32), **how), backend)


@pytest.mark.parametrize("block_size", [None, 7])
def test_the_reference_and_auto_serve_float64(block_size):
    problem = random_decode([20, 3], tokens=3, dtype=torch.float64, block_size=block_size)
    check_backend(problem, "reference")
    check_backend(problem, "auto")


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [(torch.float32, "cpu"), (torch.float32, "triton"), sweep(torch.float16, "cpu"), sweep(torch.float16, "triton")],
)
def test_large_scores_do_not_overflow(dtype, backend):
    problem = problem_for(backend, [30, 45], tokens=2, dtype=dtype)
    for scale in (40.0, -40.0):
        found = check_backend(problem, backend, scale=scale)
        assert found.lse.abs().max() > 300


@ON_EACH
@pytest.mark.parametrize("sign", [1, -1])
def test_a_row_whose_scores_are_all_far_from_zero(sign, backend):
    """Where every score is -200, exp of it is 0 in float32, and of +200 infinite."""
    problem = problem_for(backend, [30], dtype=torch.float32)
    width = values_of(problem.k).shape[2]
    far = torch.full((1, 1, 1, width), 200.0 * sign, device=problem.q.device)
    check_backend(problem.with_options(mask=far), backend)
    check_backend(problem.with_options(mask=far, max_splits=3), backend)


# Positions.


@pytest.mark.parametrize(
    ("how", "tokens", "backend"),
    [
        ({}, 1, "cpu"),
        ({}, 4, "triton"),
        ({"window": 5}, 1, "cpu"),
        sweep({"window": 5}, 4, "triton"),
        sweep({"split_size": 16}, 1, "triton"),
        sweep({"split_size": 16}, 4, "cpu"),
    ],
    ids=str,
)
def test_every_position_to_past_two_blocks_of_a_cache(how, tokens, backend):
    if interpreted(backend) and how:
        pytest.skip("as for pools, where it is done")
    for first in range(0, 37, 37 if interpreted(backend) else 10):
        positions = EDGES if interpreted(backend) else list(range(first, min(first + 10, 37)))
        check_backend(problem_for(backend, positions, tokens=tokens, dims=(16, 16), **how), backend)


@pytest.mark.parametrize(
    ("sinks", "block_size", "at", "backend"),
    [
        (False, None, "list", "cpu"),
        (False, None, "int64", "triton"),
        (False, 16, "list", "triton"),
        (True, None, "int32", "cpu"),
        (True, 16, "int32", "triton"),
        (True, 16, "int64", "cpu"),
    ],
)
def test_minus_one_skips_a_sequence(sinks, block_size, at, backend):
    problem = problem_for(backend, [-1, 20, -1, 5], tokens=2, at=at, block_size=block_size, sinks=sinks)
    out, lse = check_backend(problem, backend)
    assert not out[[0, 2]].any()
    assert (lse[[0, 2]] == -torch.inf).all()  # its sinks too
    assert lse[[1, 3]].isfinite().all()


@ON_EACH
@pytest.mark.parametrize("block_size", [None, 16])
def test_nothing_but_skipped_sequences(block_size, backend):
    out, lse = check_backend(problem_for(backend, [-1, -1], tokens=3, block_size=block_size, sinks=True), backend)
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize(
    ("sinks", "tokens", "backend"),
    [
        (False, 2, "cpu"),
        (False, 5, "cpu"),
        sweep(False, 8, "triton"),
        sweep(True, 2, "triton"),
        sweep(True, 5, "triton"),
        sweep(True, 8, "cpu"),
    ],
)
def test_tokens_before_position_zero_attend_to_nothing(sinks, tokens, backend):
    positions = list(range(tokens))
    problem = problem_for(backend, positions, tokens=tokens, sinks=sinks, kv_heads=1)
    out, lse = check_backend(problem, backend)
    for sequence, last in enumerate(positions):
        blind = tokens - 1 - last
        assert not out[sequence, :, :blind].any()
        alone = problem.options["sinks"].float() if sinks else torch.full((2,), -torch.inf, device=out.device)
        torch.testing.assert_close(lse[sequence, :, :blind], alone[:, None].expand(-1, blind))
        assert out[sequence, :, blind:].any(-1).all()


@ON_EACH
@pytest.mark.parametrize("share", [None, "cache"])
def test_by_default_a_sequence_is_as_long_as_its_cache(share, backend):
    check_backend(problem_for(backend, [29, 29, 29], tokens=3, at=None, share=share), backend)


@ON_EACH
def test_a_token_sees_itself_first_and_one_more_key_a_token(backend):
    """The lse of tokens whose every score is 0 counts the keys they see."""
    problem = problem_for(backend, [7, 19], tokens=4, dtype=torch.float32)
    lse = check_backend(problem, backend, scale=0.0).lse
    torch.testing.assert_close(lse[0, 0].exp().cpu(), torch.tensor([5.0, 6, 7, 8]))
    torch.testing.assert_close(lse[1, 1].exp().cpu(), torch.tensor([17.0, 18, 19, 20]))


@ON_EACH
def test_lse_is_returned_on_demand_and_is_the_natural_logarithm(backend):
    problem = problem_for(backend, [0, 9], dtype=torch.float32)
    out = problem.attend(backend)
    assert isinstance(out, torch.Tensor)
    both = problem.attend(backend, return_lse=True)
    assert torch.equal(both[0], out)
    assert both[1].dtype == torch.float32
    key = problem.valid[0][0, :, 0].repeat_interleave(2, 0)  # of the only position that sequence 0 has
    score = (problem.q[0, :, 0].double() * key).sum(-1) / math.sqrt(32)
    torch.testing.assert_close(both[1][0, :, 0].double(), score, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(both[1][1, 0], torch.logsumexp(by_loops_scores(problem), 0), rtol=1e-6, atol=1e-6)


def by_loops_scores(problem: DecodeProblem) -> torch.Tensor:
    """The scores of sequence 1 under its first head, [keys, 1]."""
    keys = problem.valid[0][1, 0, : problem.options["cur_pos"][1] + 1]
    return (keys @ problem.q[1, 0].double().T / math.sqrt(32)).float()


# Who sees whom.


@pytest.mark.parametrize(
    ("kind", "shape", "backend"),
    [
        ("bool", "", "cpu"),
        ("bool", "h", "triton"),
        sweep("bool", "bh", "cpu"),
        sweep("bool", "bht", "cpu"),
        sweep("added", "b", "triton"),
        sweep("added", "t", "cpu"),
        sweep("added", "bt", "triton"),
        sweep("added", "ht", "triton"),
    ],
)
def test_masks_of_every_shape(kind, shape, backend):
    for seed, (width, block_size) in enumerate([("", None), (" short", 16)]):
        how = {"tokens": 3, "group": 3, "key_range": f"{kind} {shape}{width}", "block_size": block_size, "seed": seed}
        check_backend(problem_for(backend, [26, -1, 40], capacity=50, dims=(16, 16), **how), backend)


@pytest.mark.parametrize(
    ("how", "kind", "backend"),
    [
        ({"window": 6}, "bool", "cpu"),
        ({"window": 6}, "added", "triton"),
        ({"sinks": True}, "bool", "cpu"),
        ({"sinks": True}, "added", "triton"),
        ({"max_splits": 4}, "bool", "triton"),
        ({"split_size": 16}, "added", "cpu"),
    ],
    ids=str,
)
def test_masks_under_every_option(how, kind, backend):
    check_backend(problem_for(backend, [26, 40, 1], tokens=3, capacity=50, key_range=f"{kind} bht", **how), backend)


@ON_EACH
def test_a_mask_lifts_causality_among_the_new_tokens_but_not_past_the_last(backend):
    problem = problem_for(backend, [9, 4], tokens=4, capacity=20, dtype=torch.float32)
    everything = torch.ones(1, 1, 1, 20, dtype=torch.bool, device=problem.q.device)
    lse = check_backend(problem, backend, mask=everything, scale=0.0).lse
    torch.testing.assert_close(lse.exp()[:, 0].cpu(), torch.tensor([[10.0] * 4, [5.0] * 4]))


@pytest.mark.parametrize(("width", "backend"), [(1, "cpu"), (5, "triton"), sweep(16, "cpu"), sweep(17, "triton")])
def test_keys_from_the_end_of_a_mask_on_are_not_seen(width, backend):
    problem = problem_for(backend, [19, 3], tokens=2, capacity=20, dtype=torch.float32)
    for mask in (torch.ones(1, 1, 1, width, dtype=torch.bool), torch.zeros(1, 1, 1, width)):
        lse = check_backend(problem, backend, mask=mask.to(problem.q.device), scale=0.0).lse
        torch.testing.assert_close(lse.exp()[:, 0, 0].cpu(), torch.tensor([float(width), min(width, 4.0)]))


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        (torch.float16, "cpu"),
        sweep(torch.float16, "triton"),
        sweep(torch.float32, "cpu"),
        sweep(torch.float32, "triton"),
        sweep(torch.bfloat16, "cpu"),
        sweep(torch.bfloat16, "triton"),
    ],
)
def test_a_mask_may_be_strided_expanded_and_of_any_floating_type(dtype, backend):
    problem = problem_for(backend, [19, 3], tokens=2, capacity=20, kv_heads=2)
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(2, 20, 2, generator=generator).to(dtype).to(problem.q.device)
    check_backend(problem.with_options(mask=base.permute(0, 2, 1)[:, None].expand(2, 4, 2, 20)), backend)
    check_backend(problem.with_options(mask=(base > 0).permute(0, 2, 1)[:, None].expand(2, 4, 2, 20)), backend)
    wide = torch.randn(1, 4, 1, 40, generator=generator).to(dtype).to(problem.q.device)
    check_backend(problem.with_options(mask=wide[..., ::2]), backend)


@ON_EACH
def test_a_mask_that_lies_as_low_as_its_type_goes(backend):
    """Padding is often written so: such keys count for nothing, unless all keys of a row are such."""
    problem = problem_for(backend, [19, 3], tokens=2, capacity=20, dtype=torch.float16)
    for dtype, low in ((torch.float16, torch.finfo(torch.float16).min), (torch.float32, -1e30)):
        mask = torch.zeros(2, 1, 1, 20, dtype=dtype, device=problem.q.device)
        mask[0, ..., :15], mask[1] = low, low
        check_backend(problem.with_options(mask=mask), backend)
        check_backend(problem.with_options(mask=mask, max_splits=3), backend)


@pytest.mark.parametrize(
    ("key_range", "tokens", "backend"),
    [
        ("tree", 1, "cpu"),
        sweep("tree", 2, "cpu"),
        sweep("tree", 5, "triton"),
        sweep("trees", 1, "triton"),
        sweep("trees", 2, "triton"),
        sweep("trees", 8, "cpu"),
    ],
)
def test_trees(key_range, tokens, backend):
    hows = [{}, {"block_size": 16}, {"window": 4}, {"split_size": 16}, {"sinks": True}]
    for seed, how in enumerate(hows[tokens % 3 :: 2] if interpreted(backend) else hows):
        positions = [21, max(tokens - 2, 0), 15 + tokens]  # the new tokens across a block, and from before 0
        check_backend(
            problem_for(backend, positions, tokens=tokens, key_range=key_range, seed=seed, dims=(16, 16), **how),
            backend,
        )


@ON_EACH
def test_a_tree_names_columns_by_row(backend):
    """Two drafts after one token: 0 -> 1 -> 2 and 0 -> 3. Row t of the tree is what token t sees."""
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]], dtype=torch.bool)
    problem = problem_for(backend, [13], tokens=4, dtype=torch.float32)
    lse = check_backend(problem, backend, tree=tree.to(problem.q.device), scale=0.0).lse
    torch.testing.assert_close(lse[0, 0].exp().cpu(), torch.tensor([11.0, 12, 13, 12]))
    causal = torch.ones(4, 4, dtype=torch.bool, device=problem.q.device).tril()
    found, expected = problem.run(backend, tree=causal), problem.run(backend)
    torch.testing.assert_close(found.out, expected.out)
    torch.testing.assert_close(found.lse, expected.lse)


@ON_EACH
def test_a_tree_of_which_a_token_sees_nothing_new(backend):
    problem = problem_for(backend, [13, 2], tokens=3)
    tree = torch.zeros(3, 3, dtype=torch.bool, device=problem.q.device)
    assert check_backend(problem, backend, tree=tree).lse[1].isneginf().all()


@pytest.mark.parametrize(
    ("block_size", "window", "backend"),
    [
        (None, 1, "cpu"),
        (None, 16, "triton"),
        (None, 1000, "cpu"),
        (8, 2, "triton"),
        sweep(8, 17, "cpu"),
        sweep(8, 41, "triton"),
    ],
)
def test_windows(block_size, window, backend):
    check_backend(
        problem_for(backend, [40, 16, 3], tokens=3, block_size=block_size, window=window, dims=(16, 16)), backend
    )


@ON_EACH
def test_a_window_counts_the_token_itself(backend):
    problem = problem_for(backend, [19], tokens=3, window=1)
    values = problem.valid[1][0, :, 17:20].repeat_interleave(2, 0)
    torch.testing.assert_close(check_backend(problem, backend).out[0].double(), values)


@pytest.mark.parametrize(
    ("dtype", "how", "backend"),
    [
        (torch.float32, {}, "cpu"),
        (torch.float32, {"window": 3}, "triton"),
        (torch.float32, {"max_splits": 3}, "cpu"),
        sweep(torch.float16, {}, "triton"),
        sweep(torch.float16, {"block_size": 16}, "triton"),
        sweep(torch.float16, {"split_size": 16}, "cpu"),
    ],
    ids=str,
)
def test_sinks(dtype, how, backend):
    for seed in range(1 if interpreted(backend) else 2):  # in float32, and in the dtype of q
        problem = problem_for(backend, [30, 0, 45], tokens=2, group=3, sinks=True, dtype=dtype, seed=seed, **how)
        check_backend(problem, backend)
        problem.options["sinks"][0] = -torch.inf  # is none
        problem.options["sinks"][1] = 30.0  # takes nearly everything
        check_backend(problem, backend)


@pytest.mark.parametrize(
    ("block_size", "scale", "backend"),
    [
        (None, 0.0, "cpu"),
        (None, 1, "cpu"),
        (None, 1.7, "triton"),
        sweep(16, 0.0, "triton"),
        sweep(16, 1, "triton"),
        sweep(16, -0.3, "cpu"),
    ],
)
def test_scale(block_size, scale, backend):
    how = {"block_size": block_size, "sinks": True}
    check_backend(problem_for(backend, [30, 9], tokens=2, scale=scale, **how), backend)
    check_backend(
        problem_for(backend, [30, 9], tokens=2, scale=scale, key_range="added t", **how), backend
    )  # which it does not scale


@pytest.mark.parametrize(
    ("storage", "block_size", "backend"),
    [
        ("plain", None, "cpu"),
        ("plain", None, "triton"),
        ("plain", 16, "cpu"),
        sweep("int8", None, "triton"),
        sweep("int8", 16, "cpu"),
        ("int8", 16, "triton"),
    ],
)
def test_shared_cache(storage, block_size, backend):
    how = {"block_size": block_size, "storage": storage, "share": "cache"}
    problem = problem_for(backend, [30, 9, -1, 44], tokens=2, **how)
    assert values_of(problem.k).shape[0] == 1 or problem.table.shape[0] == 1
    check_backend(problem, backend)
    check_backend(problem_for(backend, [33], tokens=2, **how), backend)


# Splits.


@pytest.mark.parametrize(
    ("how", "block_size", "backend"),
    [  # one split, more of them than keys, splits that do not divide a block, and one that is longer than the cache
        ({"max_splits": 1}, None, "triton"),
        ({"max_splits": 5}, 16, "triton"),
        ({"max_splits": 1000}, None, "cpu"),
        sweep({"split_size": 1}, 16, "cpu"),
        sweep({"split_size": 10}, 16, "triton"),
        sweep({"split_size": 1000}, None, "cpu"),
    ],
    ids=str,
)
def test_any_splits(how, block_size, backend):
    last = 20 if how.get("split_size") == 1 else 70
    check_backend(
        problem_for(backend, [last, 0, 15][: 2 if interpreted(backend) else 3], tokens=2, block_size=block_size, **how),
        backend,
    )


@pytest.mark.parametrize(
    ("how", "backend"),
    [
        ({"max_splits": 4}, "cpu"),
        sweep({"max_splits": 4}, "triton"),
        sweep({"split_size": 16}, "cpu"),
        ({"split_size": 16}, "triton"),
    ],
    ids=str,
)
def test_splits_of_which_some_rows_see_nothing(how, backend):
    """A mask that leaves one split empty, two splits, all of them."""
    problem = problem_for(backend, [60], tokens=4, capacity=64, **how)
    mask = torch.zeros(1, 1, 4, 64, dtype=torch.bool, device=problem.q.device)
    mask[..., 1, 20:25], mask[..., 2, :1], mask[..., 3, 60:] = True, True, True
    lse = check_backend(problem, backend, mask=mask).lse
    assert lse[:, :, 0].isneginf().all()
    assert lse[:, :, 1:].isfinite().all()
    check_backend(problem, backend, mask=mask, sinks=torch.randn(lse.shape[1], device=problem.q.device))


# Memory.


@pytest.mark.parametrize(
    ("memory", "storage", "backend"),
    [
        ("own", "plain", "cpu"),
        ("own", "bfp8", "triton"),
        ("token major", "fp8", "triton"),
        sweep("token major", "fp8 heads", "cpu"),
        sweep("layer", "fp8 heads", "triton"),
        sweep("layer inside", "int8", "cpu"),
    ],
)
def test_caches_may_be_views(memory, storage, backend):
    check_backend(
        problem_for(backend, [20, 33], tokens=3, capacity=40, memory=memory, storage=storage, kv_heads=2), backend
    )


@pytest.mark.parametrize(
    ("block_size", "q_memory", "backend"),
    [
        (None, "own", "cpu"),
        (None, "transposed", "cpu"),
        (None, "fused", "triton"),
        sweep(16, "own", "triton"),
        sweep(16, "transposed", "triton"),
        sweep(16, "fused", "cpu"),
    ],
)
def test_queries_may_be_views(block_size, q_memory, backend):
    check_backend(
        problem_for(backend, [20, 33], tokens=3, q_memory=q_memory, block_size=block_size, kv_heads=2), backend
    )


@pytest.mark.parametrize(
    ("storage", "block_size", "backend"),
    [
        ("plain", None, "cpu"),
        ("plain", 16, "triton"),
        ("fp8", 16, "triton"),
        ("fp8 heads", None, "triton"),
        ("int8", 16, "cpu"),
        ("bfp8", None, "cpu"),
    ],
)
def test_nothing_that_is_passed_is_written(storage, block_size, backend):
    problem = problem_for(
        backend,
        [20, -1],
        tokens=2,
        capacity=40,
        storage=storage,
        block_size=block_size,
        sinks=True,
        key_range="added t",
        at="int32",
    )
    passed = [problem.q, problem.table, *(problem.options[name] for name in ("mask", "sinks", "cur_pos"))]
    for cache in (problem.k, problem.v):
        passed += [cache.values, cache.scales] if isinstance(cache, Quantized) else [cache]
    before = [None if x is None else x.clone() for x in passed]
    problem.run(backend)
    for x, copy in zip(passed, before, strict=True):
        if x is not None:
            same = x.view(torch.uint8) if x.itemsize == 1 else x
            assert ((same == copy.view(same.dtype)) | (same != same)).all()


@pytest.mark.parametrize(
    ("block_size", "backend"), [(None, "cpu"), sweep(None, "triton"), sweep(16, "cpu"), (16, "triton")]
)
def test_twice_is_the_same_bits(block_size, backend):
    problem = problem_for(backend, [20, 70], tokens=2, block_size=block_size)
    first, second = problem.run(backend), problem.run(backend)
    assert torch.equal(first.out, second.out)
    assert torch.equal(first.lse, second.lse)


@ON_EACH
@pytest.mark.parametrize("block_size", [None, 16])
def test_no_batch_at_all_is_no_mistake(block_size, backend):
    problem = problem_for(backend, [], tokens=3, block_size=block_size, dims=(32, 16), kv_heads=2)
    out, lse = problem.run(backend)
    assert out.shape == (0, 4, 3, 16)
    assert lse.shape == (0, 4, 3)


@ON_EACH
def test_a_cache_of_no_length_holds_skipped_sequences(backend):
    device = device_of(backend)
    problem = problem_for(backend, [3, 3])
    problem = DecodeProblem(problem.q, problem.k[:, :, :0], problem.v[:, :, :0], None, {}, ())
    for cur_pos in (None, [-1, -1], torch.tensor([-1, -1], device=device)):
        out, lse = problem.run(backend, cur_pos=cur_pos)
        assert not out.any()
        assert (lse == -torch.inf).all()


@ON_EACH
def test_an_inner_no_grad_is_enough_for_parameters(backend):
    problem = problem_for(backend, [9], dtype=torch.float32)
    expected = problem.attend(backend)
    with torch.no_grad():
        problem.q.requires_grad_()
        assert torch.equal(problem.attend(backend), expected)


def test_auto_is_a_backend_that_serves():
    for block_size in (None, 16):
        check_backend(random_decode([20, 3], tokens=2, block_size=block_size), "auto")


def test_backends_agree_on_a_step_of_a_model_in_use():
    """One call written out by hand, without the helpers."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 2, 50, 16, generator=generator) for _ in range(2))
    q = torch.randn(2, 4, 1, 16, generator=generator)
    out = decode_attention(q, k, v, cur_pos=[49, 10], backend="cpu")
    for b, last in enumerate((49, 10)):
        for h in range(4):
            scores = (q[b, h, 0] @ k[b, h // 2, : last + 1].T / 4).softmax(0)
            torch.testing.assert_close(out[b, h, 0], scores @ v[b, h // 2, : last + 1])


def test_the_two_calls_take_the_same_options():
    ours, paged = (list(inspect.signature(f).parameters) for f in (decode_attention, paged_decode_attention))
    assert ours[3:] == paged[4:]
    assert ours[:3] == ["q", "k_cache", "v_cache"]
    assert paged[:4] == ["q", "k_pool", "v_pool", "block_table"]


def test_an_option_that_does_not_exist():
    q, k, table = torch.ones(1, 2, 1, 8), torch.ones(1, 2, 4, 8), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"^decode_attention\(\) got an unexpected keyword argument 'max_split'"):
        decode_attention(q, k, k, max_split=3)
    with pytest.raises(TypeError, match=r"^decode_attention\(\) got an unexpected keyword argument 'into'"):
        decode_attention(q, k, k, into=None)
    with pytest.raises(TypeError, match=r"paged_decode_attention\(\) got an unexpected keyword argument 'splits'"):
        paged_decode_attention(q, k.transpose(1, 2), k.transpose(1, 2), table, cur_pos=[3], splits=3)


@pytest.mark.sweep
@ON_EACH
def test_long_caches(backend):
    lengths = [700, 130] if interpreted(backend) else [5000, 1, 777, 2048]
    for dtype in DTYPES:
        for how in ({}, {"window": 300}, {"split_size": 128}, {"max_splits": 7}, {"block_size": 64}):
            check_backend(
                problem_for(backend, lengths, tokens=4, dims=(64, 64), dtype=dtype, sinks=True, **how), backend
            )


def test_the_loops_see_what_is_right_by_hand():
    """The yardstick's yardstick: two keys, one of them twice as near."""
    problem = random_decode([1], group=1, kv_heads=1, dims=(16, 16), dtype=torch.float64)
    problem.q.zero_()
    problem.q[..., 0] = 4 * math.log(3)
    problem.k[..., 0] = torch.tensor([0.0, 1.0])
    problem.v[...] = torch.tensor([1.0, 5.0])[:, None]
    out, lse = decode_by_loops(problem)
    torch.testing.assert_close(out, torch.full_like(out, 4.0))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(4)))
