"""`BlockCache`, operation by operation: what is found again, what is shared, what is refused."""

import pytest
import torch

from attnmesh import BlockCache, paged_decode_attention
from attnmesh.decode import CacheFull, content_ids
from attnmesh.kv_cache import pools as tables
from attnmesh.ops.storage import STORAGES, values_of
from helpers.caches import cache_sizes

PROMPT = list(range(100, 111))  # 2 full blocks of 4, and 3 more


def make(**more) -> BlockCache:
    sizes = {
        "layers": 2, "num_blocks": 12, "block_size": 4, "kv_heads": 2, "head_dim": 16, "storage": "fp32",
        "device": "cpu", "max_sequences": 4, "max_length": 24,
    }  # fmt: skip
    return BlockCache(**cache_sizes(**sizes | more))


def rows_of(ids, *, layer=0, heads=2, dim=16, dtype=torch.float32):
    """Keys [1, heads, T, dim] of tokens: the same ids give the same numbers."""
    rows = [torch.randn(heads, dim, generator=torch.Generator().manual_seed(7 * id + layer)) for id in ids]
    return torch.stack(rows, 1)[None].to(dtype)


def fill(cache, sequence, ids, *, layers=(0, 1), given=True):
    new = cache.append([sequence], [list(ids)] if given else len(ids))
    for layer in layers:
        k = rows_of(ids, layer=layer)
        cache.write(layer, new, k, -k)
    return new


def read(cache, sequence, layer=0):
    """A sequence's keys [length, heads, dim], through the tables on the device."""
    length = int(cache.cur_pos[sequence.row]) + 1
    row = cache.block_table[sequence.row, : -(-length // 4)].long()
    assert (row >= 0).all()
    return values_of(cache.keys(layer))[row].flatten(0, 1)[:length]


def wanted(ids, layer=0):
    return rows_of(ids, layer=layer)[0].transpose(0, 1)


def test_a_prompt_is_found_again():
    cache = make()
    a = cache.allocate(PROMPT)
    assert (a.length, a.cached, a.row) == (0, 0, 0)
    assert repr(a) == "Sequence(row=0, length=0, cached=0)"
    fill(cache, a, PROMPT)
    b = cache.allocate(PROMPT)
    assert (b.length, b.cached) == (8, 8)
    assert b.blocks[:2] == a.blocks[:2]
    assert b.blocks[2] != a.blocks[2]
    fill(cache, b, PROMPT[8:])
    for sequence in (a, b):
        for layer in (0, 1):
            assert torch.equal(read(cache, sequence, layer), wanted(PROMPT, layer))
    stats = cache.stats()
    assert (stats.lookups, stats.hits, stats.hit_rate) == (22, 8, 8 / 22)
    assert (stats.total, stats.used, stats.free, stats.cached) == (12, 4, 8, 0)


def test_the_last_token_of_a_prompt_is_never_found():
    cache = make()
    fill(cache, cache.allocate(PROMPT), PROMPT)
    assert cache.allocate(PROMPT[:8]).cached == 4
    assert cache.allocate(PROMPT[:9]).cached == 8
    assert cache.allocate(PROMPT[:4]).cached == 0


def test_another_key_or_another_beginning_finds_nothing():
    cache = make()
    fill(cache, cache.allocate(PROMPT, cache_key="a"), PROMPT)
    assert cache.allocate(PROMPT, cache_key="b").cached == 0
    assert cache.allocate([0, *PROMPT[1:]], cache_key="a").cached == 0
    assert cache.allocate(PROMPT, cache_key="a").cached == 8
    assert cache.stats().hits == 8


def test_an_image_in_a_prompt_has_ids_of_its_content():
    cache = make()
    text, question = list(range(6)), [7, 8, 9]

    def prompt(image):
        return [*text, *content_ids(image, 9), *question]

    new = cache.append([cache.allocate(prompt(b"a cat"))], 18)
    for layer in (0, 1):
        cache.write(layer, new, *[rows_of([3] * 18, layer=layer)] * 2)  # of the placeholders
    assert cache.find_prefix(prompt("a cat")) == 16
    assert cache.find_prefix(prompt(b"a dog")) == 4  # the block before the image
    assert cache.fork(cache.allocate(prompt(b"a cat"))).ids[6:15].tolist() == content_ids(b"a cat", 9)


def test_ids_of_content_are_no_token_ids_and_depend_on_all_of_it():
    one, other = content_ids(b"x" * 10_000, 50), content_ids(b"x" * 9_999 + b"y", 50)
    assert max(one) < 0
    assert len({*one, *other}) == 100
    assert one[:7] == content_ids(b"x" * 10_000, 7)
    assert content_ids("é", 2) == content_ids("é".encode(), 2)
    assert content_ids(b"", 0) == []
    for wrong, message in (((3, 2), "content must be bytes or a string"), ((b"x", -1), "count must be")):
        with pytest.raises(ValueError, match=message):
            content_ids(*wrong)


def test_generated_tokens_are_found_too_unless_anonymous():
    cache = make()
    a = cache.allocate(PROMPT)
    fill(cache, a, PROMPT)
    fill(cache, a, [7])
    assert cache.allocate([*PROMPT, 7, 8]).cached == 12
    cache = make()
    a = cache.allocate(PROMPT)
    fill(cache, a, PROMPT, given=False)  # the prompt's own ids, by their number
    fill(cache, a, [7], given=False)  # nobody knows which
    assert cache.allocate([*PROMPT, 7, 8]).cached == 8


def test_a_freed_prefix_stays_until_there_is_no_room():
    cache = make(num_blocks=4)
    a = cache.allocate(PROMPT)
    fill(cache, a, PROMPT)
    cache.free(a)
    assert (cache.stats().cached, cache.stats().free) == (2, 2)
    b = cache.allocate(PROMPT)
    assert b.cached == 8
    assert torch.equal(read(cache, b), wanted(PROMPT[:8]))
    cache.free(b)
    cache.free(cache.allocate(12))  # needs one of the two cached: the end of the prefix
    assert cache.stats().evictions == 1
    assert cache.allocate(PROMPT).cached == 4


def test_nothing_is_found_before_all_layers_are_written():
    cache = make()
    a = cache.allocate(PROMPT)
    first = cache.append([a], 5)
    second = cache.append([a], 6)
    k = rows_of(PROMPT)
    for layer in (0, 1):
        cache.write(layer, second, k[:, :, 5:], k[:, :, 5:])
    assert cache.allocate(PROMPT).cached == 0
    cache.write(1, first, k[:, :, :5], k[:, :, :5])
    assert cache.allocate(PROMPT).cached == 0
    cache.write(0, first, k[:, :, :5], k[:, :, :5])
    assert cache.allocate(PROMPT).cached == 8


def test_chunks_of_a_prompt_always_have_room():
    cache = make(num_blocks=6)
    a = cache.allocate(PROMPT)
    b = cache.allocate(12)
    with pytest.raises(CacheFull, match="1 more blocks needed, 0 are free and 0 can be evicted"):
        cache.allocate(1)
    for begin in range(0, 11, 3):
        fill(cache, a, PROMPT[begin : begin + 3])
    cache.append([b], 12)
    assert torch.equal(read(cache, a), wanted(PROMPT))
    with pytest.raises(CacheFull):
        cache.append([b], 1)


def test_a_reused_prefix_decodes_to_the_same_bits():
    q = torch.randn(4, 4, 1, 16)
    for storage in STORAGES:
        cache = make(storage=storage)
        dtype = q.dtype if storage in ("fp8", "int8", "bfp8") else values_of(cache.keys(0)).dtype
        first = cache.allocate(PROMPT)
        fill(cache, first, PROMPT)
        found, alone = cache.allocate(PROMPT), cache.allocate(PROMPT, cache_key="alone")
        assert (found.cached, alone.cached) == (8, 0)
        fill(cache, found, PROMPT[8:])
        fill(cache, alone, PROMPT)
        same = q[:1].expand(4, -1, -1, -1).to(dtype)
        for layer in (0, 1):
            out = paged_decode_attention(
                same, cache.keys(layer), cache.values(layer), cache.block_table, cur_pos=cache.cur_pos
            )
            assert torch.equal(out[found.row], out[first.row])
            assert torch.equal(out[found.row], out[alone.row])
            assert out[found.row].abs().sum() > 0
            assert (out[3] == 0).all()  # a free row is skipped


def test_a_fork_shares_until_one_appends():
    cache = make()
    a = cache.allocate(PROMPT)
    fill(cache, a, PROMPT)
    b = cache.fork(a)
    assert (b.length, b.cached, b.row) == (11, 11, 1)
    assert cache.stats().used == 3
    fill(cache, b, [7])
    fill(cache, a, [8])
    assert cache.stats().used == 4
    assert a.blocks[:2] == b.blocks[:2]
    for layer in (0, 1):
        assert torch.equal(read(cache, a, layer), wanted([*PROMPT, 8], layer))
        assert torch.equal(read(cache, b, layer), wanted([*PROMPT, 7], layer))


def test_forks_that_append_together_copy_all_but_once():
    cache = make(num_blocks=5)
    a = cache.allocate(PROMPT)
    fill(cache, a, PROMPT)
    twins = [a, cache.fork(a), cache.fork(a)]
    new = cache.append(twins, [[1], [2], [3]])  # two copies, and two blocks are free
    assert cache.stats().used == 5
    k = torch.cat([rows_of([id]) for id in (1, 2, 3)])
    cache.write(0, new, k, k)
    for id, sequence in enumerate(twins, 1):
        assert torch.equal(read(cache, sequence), wanted([*PROMPT, id]))


def test_a_fork_needs_what_it_forks_to_be_written():
    cache = make()
    a = cache.allocate(PROMPT)
    fill(cache, a, PROMPT[:8])
    fill(cache, a, PROMPT[8:], layers=(0,))
    with pytest.raises(ValueError, match="tokens from 8 on that are not written"):
        cache.fork(a)


def test_a_prompt_outstanding_stays_with_the_first_of_a_fork():
    cache = make()
    a = cache.allocate(PROMPT)
    fill(cache, a, PROMPT[:6])
    b = cache.fork(a)
    assert (len(a.blocks), len(b.blocks)) == (3, 2)
    fill(cache, b, [1, 2, 3])
    fill(cache, a, PROMPT[6:])
    assert torch.equal(read(cache, a), wanted(PROMPT))
    assert torch.equal(read(cache, b), wanted([*PROMPT[:6], 1, 2, 3]))


def test_rejected_drafts_are_truncated():
    cache = make()
    a = cache.allocate(PROMPT)
    fill(cache, a, PROMPT)
    fill(cache, a, [1, 2, 3, 4])
    cache.truncate(a, 12)
    assert (a.length, int(cache.cur_pos[0]), len(a.blocks)) == (12, 11, 3)
    fill(cache, a, [5])
    assert torch.equal(read(cache, a), wanted([*PROMPT, 1, 5]))


def test_truncating_into_a_registered_block_keeps_what_others_find():
    cache = make()
    a = cache.allocate(PROMPT)
    fill(cache, a, PROMPT)
    cache.truncate(a, 6)
    b = cache.allocate(PROMPT)  # block 1 is full and findable still
    assert b.cached == 8
    fill(cache, a, [1, 2])
    assert a.blocks[1] != b.blocks[1]
    assert torch.equal(read(cache, b), wanted(PROMPT[:8]))
    assert torch.equal(read(cache, a), wanted([*PROMPT[:6], 1, 2]))


def test_truncating_into_a_registered_block_of_ones_own_forgets_it():
    cache = make()
    a = cache.allocate(PROMPT)
    fill(cache, a, PROMPT)
    cache.truncate(a, 6)
    fill(cache, a, [1, 2])
    assert cache.stats().used == 2  # no copy: nobody else had it
    assert cache.allocate(PROMPT).cached == 4
    assert cache.allocate([*PROMPT[:6], 1, 2, 3]).cached == 8


def test_tokens_that_are_gone_are_not_written():
    cache = make()
    a, b = cache.allocate(4), cache.allocate(4)
    new = cache.append([a, b], 4)
    assert new.slots.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    cache.truncate(a, 2)
    cache.free(b)
    assert new.slots.tolist() == [[0, 1, -1, -1], [-1] * 4]
    c = cache.allocate([1, 2, 3, 4])
    fill(cache, c, [1, 2, 3, 4])
    for layer in (0, 1):
        cache.write(layer, new, torch.full((2, 2, 4, 16), 9.0), torch.full((2, 2, 4, 16), 9.0))
    assert torch.equal(read(cache, c), wanted([1, 2, 3, 4]))
    assert (read(cache, a) == 9).all()
    cache.fork(a)  # nothing waits any more


def test_of_equal_blocks_those_of_the_live_sequence_are_reused():
    cache = make()
    a, b = cache.allocate(PROMPT), cache.allocate(PROMPT)  # at the same time: neither finds the other
    fill(cache, a, PROMPT)
    fill(cache, b, PROMPT)
    assert not set(a.blocks) & set(b.blocks)
    cache.free(b)
    assert (cache.stats().used, cache.stats().cached) == (3, 0)
    assert cache.allocate(PROMPT).blocks[:2] == a.blocks[:2]


@pytest.mark.parametrize("freed", [0, 1])
def test_content_is_found_while_a_live_sequence_holds_it(freed):
    cache = make(num_blocks=8)
    pair = [cache.allocate(PROMPT), cache.allocate(PROMPT)]  # neither is written yet, so both compute it
    for sequence in pair:
        fill(cache, sequence, PROMPT)
    cache.free(pair[freed])
    others = cache.allocate(5 * 4)  # all that is free
    assert cache.stats().free == 0
    assert cache.find_prefix(PROMPT) == 8
    assert torch.equal(read(cache, pair[1 - freed]), wanted(PROMPT))
    cache.free(others)
    found = cache.allocate(PROMPT)
    assert found.blocks[:2] == pair[1 - freed].blocks[:2]
    cache._pool.check_invariants([found.blocks, pair[1 - freed].blocks])


def test_after_clear_nothing_is_left_and_nothing_of_before_is_accepted():
    cache = make()
    address = cache.block_table.data_ptr()
    old = [cache.allocate(PROMPT), cache.allocate(5)]
    fill(cache, old[0], PROMPT)
    pending = cache.append([old[1]], 5)
    cache.clear()
    assert (cache.stats().free, cache.stats().cached, cache.free_rows) == (12, 0, 4)
    assert (cache.block_table == -1).all()
    assert (cache.cur_pos == -1).all()
    for sequence in old:
        with pytest.raises(ValueError, match=r"belongs to another cache, or was ended by clear\(\)"):
            cache.append([sequence], 1)
    with pytest.raises(ValueError, match="new must be what append of this cache returned"):
        cache.write(0, pending, *[rows_of(range(5))] * 2)
    again = cache.allocate(PROMPT)
    assert (again.cached, again.row, cache.block_table.data_ptr()) == (0, 0, address)
    fill(cache, again, PROMPT)
    assert torch.equal(read(cache, again), wanted(PROMPT))


def test_rows_run_out():
    cache = make(max_sequences=2)
    a = cache.allocate(PROMPT)
    cache.allocate(0)
    for operation in (lambda: cache.allocate([1]), lambda: cache.fork(a)):
        with pytest.raises(CacheFull, match="1 more sequences needed, all of max_sequences=2 are in use") as caught:
            operation()
        assert (caught.value.resource, caught.value.total) == ("sequences", 2)
    cache.free(a)
    assert cache.allocate([1]).row == 0


def test_the_tables_stay_where_they_are_and_little_is_uploaded(monkeypatch):
    cache = make(num_blocks=200, max_sequences=8, max_length=400)
    uploads = []
    real = torch.tensor

    def counted(data, **more):
        uploads.append(len(data))
        return real(data, **more)

    where = (
        cache.block_table.data_ptr(),
        cache.cur_pos.data_ptr(),
        cache.block_table.shape,
        cache.block_table.stride(),
    )
    monkeypatch.setattr(tables.torch, "tensor", counted)
    a = cache.allocate(PROMPT)
    assert uploads == [2 * 3]  # three blocks: where, and which
    cache.append([a], 11)
    assert uploads[1:] == [2 * 1 + 11]  # a position, and the slots
    cache.append([a], 2)
    assert uploads[2:] == [2 * 2 + 2]  # a position, a block, and the slots
    cache.truncate(a, 13)
    assert len(uploads) == 3  # nothing changed, nothing sent
    cache.truncate(a, 12)
    assert uploads[3:] == [2 * 2]
    cache.free(a)
    assert uploads[4:] == [2 * 4]
    assert (cache.block_table == -1).all()
    assert (cache.cur_pos == -1).all()
    assert where == (
        cache.block_table.data_ptr(), cache.cur_pos.data_ptr(), cache.block_table.shape, cache.block_table.stride()
    )  # fmt: skip
    assert cache.block_table.dtype == cache.cur_pos.dtype == torch.int32
    assert cache.block_table.is_contiguous()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"layers": 0}, "layers must be a positive integer, got 0"),
        ({"num_blocks": -1}, "num_blocks must be a positive integer"),
        ({"block_size": 257}, "block_size must be 1 to 256, got 257"),
        ({"kv_heads": 1.5}, "kv_heads must be a positive integer, got 1.5"),
        ({"head_dim": 0}, "head_dim must be"),
        ({"value_dim": 0}, "value_dim must be"),
        ({"max_sequences": 0}, "max_sequences must be"),
        ({"max_length": 0}, "max_length must be"),
        ({"storage": "fp4"}, "storage must be one of .* got 'fp4'"),
        ({"storage": "bfp8", "value_dim": 24}, "head_dim must be a multiple of 16 for bfp8, got 24"),
        ({"storage": "int8", "k_scale": 2.0}, "k_scale must be None except for storage 'fp8', got 2.0 for 'int8'"),
        ({"v_scale": torch.ones(2)}, "v_scale must be None except for storage 'fp8'"),
        ({"storage": "fp8", "k_scale": torch.ones(3)}, r"k_scale must be a number or floating point \[\] or \[2\]"),
        ({"storage": "fp8", "k_scale": torch.ones(2).int()}, "k_scale must be a number or floating point"),
        ({"storage": "fp8", "v_scale": 0.0}, r"v_scale must be positive and finite in float32, got \[0.0\]"),
        ({"storage": "fp8", "v_scale": torch.tensor([1.0, torch.nan])}, "v_scale must be positive and finite"),
        ({"storage": "fp8", "v_scale": "1"}, "v_scale must be a number or a tensor, got str"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        make(**wrong)


NEW = torch.zeros(1, 2, 3, 16)


@pytest.mark.parametrize(
    ("operation", "said"),
    [
        (lambda c, a, new: c.allocate([1] * 25), "prompt would have 25 tokens, max_length is 24"),
        (lambda c, a, new: c.allocate(-1), "prompt, as a number of tokens, must be an integer >= 0, got -1"),
        (lambda c, a, new: c.allocate("abc"), "prompt must be a list of integers, got 'abc'"),
        (lambda c, a, new: c.allocate([1.5]), "prompt must be 64-bit integers"),
        (lambda c, a, new: c.allocate([2**63]), "prompt must be 64-bit integers"),
        (lambda c, a, new: c.allocate([1], cache_key=3), "cache_key must be a string, got 3"),
        (lambda c, a, new: c.append([a], 22), r"Sequence\(row=0, .* would have 25 tokens, max_length is 24"),
        (lambda c, a, new: c.append([a], 0), "tokens must be a positive integer, got 0"),
        (lambda c, a, new: c.append([a], None), "tokens must be a number, or a list"),
        (lambda c, a, new: c.append([a], [[1], [2]]), r"for each of 1 sequences, got \[\[1\], \[2\]\]"),
        (lambda c, a, new: c.append([a], [[]]), r"same number of ids for every sequence, at least 1, got \[0\]"),
        (lambda c, a, new: c.append([a], [["x"]]), r"tokens\[0\] must be 64-bit integers"),
        (
            lambda c, a, new: c.append([a, c.allocate(2)], [[1], [2, 3]]),
            r"same number of ids for every sequence, .* got \[1, 2\]",
        ),
        (lambda c, a, new: c.append([a], [[103, 9]]), "token 4 of .* is 9, but the prompt .* has 104"),
        (lambda c, a, new: c.append([a, a], 1), "sequences must be different ones"),
        (lambda c, a, new: c.append([], 1), "sequences must be a list of at least one"),
        (lambda c, a, new: c.append([3], 1), "what allocate or fork returned, got 3"),
        (lambda c, a, new: c.append([make().allocate(1)], 1), "belongs to another cache"),
        (lambda c, a, new: c.truncate(a, 4), r"length must be 0 to 3 for Sequence\(.*\), got 4"),
        (lambda c, a, new: c.truncate(a, -1), "length must be 0 to 3"),
        (lambda c, a, new: c.free(make().allocate(1)), "belongs to another cache"),
        (lambda c, a, new: c.keys(2), "layer must be 0 to 1, got 2"),
        (lambda c, a, new: c.values(-1), "layer must be 0 to 1, got -1"),
        (lambda c, a, new: c.write(2, new, NEW, NEW), "layer must be 0 to 1, got 2"),
        (lambda c, a, new: c.write(None, new, NEW, NEW), "layer must be 0 to 1, got None"),
        (
            lambda c, a, new: c.write(0, new, NEW, NEW),
            r"layer 0 of these tokens is already written, unwritten are \[1\]",
        ),
        (lambda c, a, new: c.write(1, new.slots, NEW, NEW), "new must be what append of this cache returned"),
        (lambda c, a, new: c.write(1, new, NEW[..., :8], NEW), r"k must be \[1, 2, 3, 16\], got \[1, 2, 3, 8\]"),
        (lambda c, a, new: c.write(1, new, NEW, NEW[:, :1]), r"v must be \[1, 2, 3, 16\], got \[1, 1, 3, 16\]"),
        (lambda c, a, new: c.write(1, new, NEW.int(), NEW), "k must be one of .* got torch.int32"),
        (lambda c, a, new: c.write(1, new, NEW, NEW.to("meta")), "v must be on the cache's device, cpu, got meta"),
        (lambda c, a, new: c.write(1, new, 3, NEW), "k must be a tensor, got int"),
        (lambda c, a, new: c.write(1, new, NEW, NEW.clone().requires_grad_()), "v requires a gradient"),
    ],
)
def test_bad_input_is_named_and_changes_nothing(operation, said):
    cache = make()
    a = cache.allocate(PROMPT)
    new = fill(cache, a, PROMPT[:3], layers=(0,))
    before = whole_state(cache, a, new)
    with pytest.raises(ValueError, match=said):
        operation(cache, a, new)
    if "same number of ids for every sequence, .* " not in said:  # that one allocates a second sequence
        assert whole_state(cache, a, new) == before


def test_a_freed_handle_is_refused():
    cache = make()
    a = cache.allocate(PROMPT)
    cache.free(a)
    assert repr(a) == "Sequence(row=0, length=0, cached=0, freed)"
    before = cache.stats()
    for operation in (cache.free, cache.fork, lambda a: cache.truncate(a, 0), lambda a: cache.append([a], 1)):
        with pytest.raises(ValueError, match="was freed"):
            operation(a)
    assert cache.stats() == before


def whole_state(cache, a, new):
    """Everything an operation could have changed."""
    return (
        cache.stats(), a.length, a.row, list(a.blocks), list(a.ids), list(a.hashes), dict(a.pending),
        sorted(new.unwritten_layers), new.slots.tolist(), cache.block_table.tolist(), cache.cur_pos.tolist(),
        list(cache._manager.free_rows),
        [x.tolist() for x in cache.stored_tensors],
        list(cache._pool.free_blocks), list(cache._pool.ref_counts), dict(cache._pool.hash_of_block),
    )  # fmt: skip
