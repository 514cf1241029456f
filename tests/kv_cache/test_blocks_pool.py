"""The books of the blocks: free before cached, the least recently used first, the end of a prefix before its begin."""

from array import array

import pytest

from attnmesh import CacheFull
from attnmesh.kv_cache.block_pool import Blocks, link_digest, root_digest


def digest(*ids: int) -> bytes:
    return link_digest(root_digest(""), array("q", ids))


def test_blocks_are_taken_and_given_back():
    blocks = Blocks(3)
    held = blocks.take(2)
    assert held == [0, 1]
    assert (blocks.free, blocks.cached) == (1, 0)
    blocks.audit([held])
    blocks.release(held)
    assert (blocks.free, blocks.cached) == (3, 0)
    blocks.audit([])


def test_a_block_is_given_back_with_its_last_holder():
    blocks = Blocks(2)
    (block,) = blocks.take(1)
    blocks.hold(block)
    blocks.release([block])
    assert blocks.holders(block) == 1
    assert blocks.free == 1
    blocks.audit([[block]])
    blocks.release([block])
    assert blocks.free == 2


def test_none_is_freed_twice():
    blocks = Blocks(2)
    held = blocks.take(1)
    blocks.release(held)
    with pytest.raises(RuntimeError, match="block 0 is held by nobody"):
        blocks.release(held)


def test_free_blocks_go_before_cached_ones():
    blocks = Blocks(3)
    held = blocks.take(1)
    blocks.register(held[0], digest(1))
    blocks.release(held)
    assert (blocks.free, blocks.cached) == (2, 1)
    others = blocks.take(2)
    assert blocks.find(digest(1)) == held[0]
    assert held[0] not in others
    assert blocks.evictions == 0
    assert blocks.take(1) == held
    assert blocks.evictions == 1
    assert blocks.find(digest(1)) is None


def test_the_least_recently_used_is_evicted_first():
    blocks = Blocks(3)
    a, b, c = blocks.take(3)
    for block in (a, b, c):
        blocks.register(block, digest(block))
        blocks.release([block])
    blocks.hold(a)  # used again
    blocks.release([a])
    assert [blocks.take(1)[0] for _ in range(3)] == [b, c, a]


def test_the_beginning_of_a_prefix_lives_longest():
    blocks = Blocks(3)
    chain = blocks.take(3)
    for block in chain:
        blocks.register(block, digest(block))
    blocks.release(chain)
    assert [blocks.take(1)[0] for _ in range(3)] == chain[::-1]


def test_of_two_equal_blocks_the_first_stays_findable():
    blocks = Blocks(2)
    first, second = blocks.take(2)
    blocks.register(first, digest(1))
    blocks.register(second, digest(1))
    assert blocks.find(digest(1)) == first
    blocks.release([second])
    assert (blocks.free, blocks.cached) == (1, 0)
    blocks.release([first])
    assert (blocks.free, blocks.cached) == (1, 1)


def test_a_forgotten_block_is_free_when_it_goes_back():
    blocks = Blocks(1)
    held = blocks.take(1)
    blocks.register(held[0], digest(1))
    blocks.forget(held[0])
    blocks.forget(held[0])
    assert blocks.find(digest(1)) is None
    blocks.release(held)
    assert (blocks.free, blocks.cached) == (1, 0)


def test_full_says_the_numbers():
    blocks = Blocks(4)
    held = blocks.take(2)
    blocks.register(held[0], digest(1))
    blocks.release(held[:1])
    with pytest.raises(CacheFull, match="4 more blocks needed, 2 are free and 1 can be evicted of num_blocks=4") as e:
        blocks.take(4)
    assert (e.value.needed, e.value.free, e.value.cached, e.value.total) == (4, 2, 1, 4)
    with pytest.raises(CacheFull, match="0 can be evicted"):
        blocks.check_room(3, keeping=held[:1])
    blocks.audit([held[1:]])


def test_digests_say_all_tokens_before_and_the_key():
    names = {
        digest(1, 2),
        digest(2, 1),
        digest(1),
        link_digest(digest(1), array("q", [2])),
        link_digest(digest(2), array("q", [1])),
        link_digest(root_digest("tenant"), array("q", [1, 2])),
        root_digest(""),
        root_digest("tenant"),
    }
    assert len(names) == 8
    assert digest(1, 2) == digest(1, 2)


@pytest.mark.parametrize(
    "fault",
    [
        lambda blocks: blocks._free.pop(),  # lost
        lambda blocks: blocks._free.append(0),  # in two states
        lambda blocks: blocks._holders.__setitem__(0, 2),  # held by a ghost
        lambda blocks: blocks._by_digest.clear(),  # cached, but not to be found
        lambda blocks: blocks._digests.__setitem__(3, b"x"),  # free, but findable
        lambda blocks: blocks._cached.popitem(),
    ],
)
def test_the_audit_finds_a_planted_fault(fault):
    blocks = Blocks(4)
    held = blocks.take(2)
    blocks.register(held[1], digest(1))
    blocks.release(held[1:])
    blocks.audit([held[:1]])
    fault(blocks)
    with pytest.raises(AssertionError):
        blocks.audit([held[:1]])
