"""`BlockPool`: free blocks before cached ones, least recently used first, the end of a prefix before its start."""

from array import array

import pytest

from attnmesh.decode import CacheFull
from attnmesh.kv_cache.block_manager import BlockPool, block_hash, root_hash


def digest(*ids: int) -> bytes:
    return block_hash(root_hash(""), array("q", ids))


def test_blocks_are_taken_and_given_back():
    blocks = BlockPool(3)
    held = blocks.allocate(2)
    assert held == [0, 1]
    assert (len(blocks.free_blocks), len(blocks.cached_blocks)) == (1, 0)
    blocks.check_invariants([held])
    blocks.free(held)
    assert (len(blocks.free_blocks), len(blocks.cached_blocks)) == (3, 0)
    blocks.check_invariants([])


def test_a_block_is_given_back_with_its_last_holder():
    blocks = BlockPool(2)
    (block,) = blocks.allocate(1)
    blocks.acquire(block)
    blocks.free([block])
    assert blocks.ref_counts[block] == 1
    assert len(blocks.free_blocks) == 1
    blocks.check_invariants([[block]])
    blocks.free([block])
    assert len(blocks.free_blocks) == 2


def test_none_is_freed_twice():
    blocks = BlockPool(2)
    held = blocks.allocate(1)
    blocks.free(held)
    with pytest.raises(RuntimeError, match="block 0 has a reference count of 0"):
        blocks.free(held)


def test_free_blocks_go_before_cached_ones():
    blocks = BlockPool(3)
    held = blocks.allocate(1)
    blocks.add_hash(held[0], digest(1))
    blocks.free(held)
    assert (len(blocks.free_blocks), len(blocks.cached_blocks)) == (2, 1)
    others = blocks.allocate(2)
    assert blocks.lookup(digest(1)) == held[0]
    assert held[0] not in others
    assert blocks.evictions == 0
    assert blocks.allocate(1) == held
    assert blocks.evictions == 1
    assert blocks.lookup(digest(1)) is None


def test_the_least_recently_used_is_evicted_first():
    blocks = BlockPool(3)
    a, b, c = blocks.allocate(3)
    for block in (a, b, c):
        blocks.add_hash(block, digest(block))
        blocks.free([block])
    blocks.acquire(a)  # used again
    blocks.free([a])
    assert [blocks.allocate(1)[0] for _ in range(3)] == [b, c, a]


def test_the_beginning_of_a_prefix_lives_longest():
    blocks = BlockPool(3)
    chain = blocks.allocate(3)
    for block in chain:
        blocks.add_hash(block, digest(block))
    blocks.free(chain)
    assert [blocks.allocate(1)[0] for _ in range(3)] == chain[::-1]


@pytest.mark.parametrize("freed", [0, 1])
def test_of_two_equal_blocks_the_one_in_use_stays_findable(freed):
    blocks = BlockPool(2)
    both = blocks.allocate(2)
    for block in both:
        blocks.add_hash(block, digest(1))
    assert blocks.lookup(digest(1)) == both[0]
    blocks.free([both.pop(freed)])
    assert (len(blocks.free_blocks), len(blocks.cached_blocks)) == (1, 0)
    assert blocks.lookup(digest(1)) == both[0]
    blocks.check_invariants([both])
    blocks.free(both)
    assert (len(blocks.free_blocks), len(blocks.cached_blocks)) == (1, 1)
    assert blocks.lookup(digest(1)) == both[0]
    blocks.check_invariants([])


def test_a_cached_block_is_free_once_a_used_one_has_its_content():
    blocks = BlockPool(2)
    first, second = blocks.allocate(2)
    blocks.add_hash(first, digest(1))
    blocks.free([first])
    blocks.add_hash(second, digest(1))
    assert blocks.lookup(digest(1)) == second
    assert (len(blocks.free_blocks), len(blocks.cached_blocks)) == (1, 0)
    blocks.check_invariants([[second]])


def test_a_forgotten_block_is_free_when_it_goes_back():
    blocks = BlockPool(1)
    held = blocks.allocate(1)
    blocks.add_hash(held[0], digest(1))
    blocks.remove_hash(held[0])
    blocks.remove_hash(held[0])
    assert blocks.lookup(digest(1)) is None
    blocks.free(held)
    assert (len(blocks.free_blocks), len(blocks.cached_blocks)) == (1, 0)


def test_full_says_the_numbers():
    blocks = BlockPool(4)
    held = blocks.allocate(2)
    blocks.add_hash(held[0], digest(1))
    blocks.free(held[:1])
    with pytest.raises(CacheFull, match="4 more blocks needed, 2 are free and 1 can be evicted of num_blocks=4") as e:
        blocks.allocate(4)
    assert (e.value.needed, e.value.free, e.value.cached, e.value.total) == (4, 2, 1, 4)
    with pytest.raises(CacheFull, match="0 can be evicted"):
        blocks.check_available(3, keep=held[:1])
    blocks.check_invariants([held[1:]])


def test_digests_say_all_tokens_before_and_the_key():
    names = {
        digest(1, 2),
        digest(2, 1),
        digest(1),
        block_hash(digest(1), array("q", [2])),
        block_hash(digest(2), array("q", [1])),
        block_hash(root_hash("tenant"), array("q", [1, 2])),
        root_hash(""),
        root_hash("tenant"),
    }
    assert len(names) == 8
    assert digest(1, 2) == digest(1, 2)


@pytest.mark.parametrize(
    "fault",
    [
        lambda blocks: blocks.free_blocks.pop(),  # lost
        lambda blocks: blocks.free_blocks.append(0),  # in two states
        lambda blocks: blocks.ref_counts.__setitem__(0, 2),  # held by a ghost
        lambda blocks: blocks._blocks_of_hash.clear(),  # cached, but not to be found
        lambda blocks: blocks.hash_of_block.__setitem__(3, b"x"),  # free, but findable
        lambda blocks: blocks.cached_blocks.popitem(),
    ],
)
def test_the_audit_finds_a_planted_fault(fault):
    blocks = BlockPool(4)
    held = blocks.allocate(2)
    blocks.add_hash(held[1], digest(1))
    blocks.free(held[1:])
    blocks.check_invariants([held[:1]])
    fault(blocks)
    with pytest.raises(AssertionError):
        blocks.check_invariants([held[:1]])
