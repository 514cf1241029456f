"""Where states of recurrent layers are kept, and which prefixes prompts then reuse."""

import pytest

import attnmesh as am
from attnmesh.core.ranges import InterleavedShard

SPEC = am.CacheSpec(layers=1, kv_heads=1, head_dim=16)
PROMPT = list(range(10))


def make(num_states=4, num_blocks=32, ranks=1):
    return am.BlockCache(
        SPEC, num_blocks=num_blocks, block_size=4, max_sequences=4, max_length=64, device="meta",
        num_states=num_states, shard=InterleavedShard(ranks, 0),
    )  # fmt: skip


def compute(cache, sequence):
    """Compute a prompt, pass by pass; the lengths at which states are kept."""
    kept = []
    while sequence.length < len(sequence.ids):
        cache.mark_written(cache.append([sequence], cache.chunk_end(sequence) - sequence.length))
        in_answer = sequence.length == len(sequence.ids)
        kept += [] if cache.keep_state(sequence, in_answer=in_answer) is None else [sequence.length]
    return kept


def answer(cache, sequence, tokens):
    kept = []
    for token in tokens:
        cache.mark_written(cache.append([sequence], [[token]]))
        kept += [] if cache.keep_state(sequence, in_answer=True) is None else [sequence.length]
    return kept


def reused(cache, prompt):
    return cache.find_prefix([*prompt, -1])


@pytest.mark.parametrize(
    ("length", "ranks", "kept"),
    [(10, 1, [8]), (8, 1, [4, 8]), (9, 1, [8]), (3, 1, []), (4, 1, [4]), (20, 2, [16]), (16, 2, [8, 16]), (7, 2, [])],
)
def test_states_are_kept_at_the_last_boundary_of_a_prompt(length, ranks, kept):
    """The last token of a prompt is always computed: where it ends a block, the state before that block counts."""
    cache = make(ranks=ranks)
    sequence = cache.allocate(list(range(length)))
    assert compute(cache, sequence) == kept
    cache.free(sequence)
    assert reused(cache, range(length)) == (kept or [0])[-1]
    assert reused(cache, range(max(0, length - 5))) == 0 if len(kept) < 2 else kept[0]


def test_blocks_without_a_state_are_not_reused():
    """The second prompt that has a beginning in common keeps a state there, which the third continues from."""
    cache = make()
    common, ends, found = list(range(13)), ([20] * 9, [30] * 9, [40] * 9), []
    for end in ends:
        sequence = cache.allocate([*common, *end])
        found.append((sequence.cached, sequence.state, compute(cache, sequence)))
        cache.free(sequence)
    assert found == [(0, -1, [20]), (0, -1, [12, 20]), (12, 1, [20])]


def test_the_latest_state_of_an_answer_is_kept():
    """And none before it, while the state of the prompt stays: an answer takes one state, however long it is."""
    cache = make()
    sequence = cache.allocate(PROMPT)
    assert compute(cache, sequence) == [8]
    assert answer(cache, sequence, range(50, 63)) == [12, 16, 20]
    cache.free(sequence)
    answered = [*PROMPT, *range(50, 63)]
    assert [reused(cache, answered[:n]) for n in (10, 13, 17, 23)] == [8, 8, 8, 20]


def test_states_that_were_not_used_for_longest_are_replaced():
    cache = make(num_states=2)
    prompts = [[first, *PROMPT] for first in range(3)]
    for prompt in prompts[:2]:
        compute(cache, cache.allocate(prompt))
    assert cache.allocate([*prompts[0], 7]).state == 0  # now the other one is replaced
    compute(cache, cache.allocate(prompts[2]))
    assert [reused(cache, prompt) for prompt in prompts] == [8, 0, 8]


def test_states_go_with_their_blocks():
    """A state whose block was evicted is replaced first, although it was used later than another."""
    cache, other = make(num_states=2, num_blocks=6), [5] * 10
    first, second = cache.allocate(PROMPT), cache.allocate(other)
    for sequence in (first, second):
        compute(cache, sequence)
    cache.free(second)  # its blocks are evicted first
    cache.free(first)
    compute(cache, cache.allocate([6] * 10))
    assert [reused(cache, prompt) for prompt in (PROMPT, other)] == [8, 0]
    cache.clear()
    assert reused(cache, PROMPT) == 0


@pytest.mark.parametrize("forget", [True, False])
def test_states_are_forgotten(forget):
    """Of a sequence that may be invalid, or of all that has finished."""
    cache = make()
    sequence = cache.allocate(PROMPT)
    compute(cache, sequence)
    cache.free(sequence, forget=forget)
    assert reused(cache, PROMPT) == (0 if forget else 8)
    cache.forget_cached()
    again = cache.allocate(PROMPT)
    assert (again.cached, compute(cache, again)) == (0, [8])
