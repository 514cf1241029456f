"""Sequences spread over ranks: the logits of one process, every position held once, and room that is kept."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnmesh as am
from attnmesh.core import ranges
from attnmesh.generation.engine import BLOCK_SIZE, Reader
from helpers.models import KINDS, LAYOUTS, attnmesh_model, logits_of, on_virtual_ranks, random_ids

TEXT = random_ids(80, seed=1)
OTHER = random_ids(80, seed=2)


def far_apart(found, expected):
    """The largest difference, relative to the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())


def poison(reader):
    """Whatever was never written is no number."""
    for layer in range(reader.model.config.num_hidden_layers):
        reader.cache.keys(layer).fill_(torch.nan)
        reader.cache.values(layer).fill_(torch.nan)


# Logits.


def a_long_story(kind, layout, prefill_chunk):
    """Everything that a reader does, in one story: logits as they come, and the text that each of them follows."""

    def rank(comm):
        reader = Reader(attnmesh_model(kind), comm, tokens=400, sequences=4, layout=layout, prefill_chunk=prefill_chunk)
        poison(reader)
        found = []

        def seen(logits, ids):
            found.extend((row, list(ids[: len(ids) - len(logits) + 1 + i])) for i, row in enumerate(logits))

        a = reader.read(TEXT[:45])
        seen(a.logits[None], TEXT[:45])
        for begin, end in ((45, 46), (46, 52)):
            seen(reader.step([a], [TEXT[begin:end]])[0], TEXT[:end])
        reader.truncate(a, 50)
        seen(reader.step([a], [OTHER[:3]])[0], TEXT[:50] + OTHER[:3])
        b = reader.read(TEXT[:30] + OTHER[:20])  # while a is in use
        seen(b.logits[None], b.ids)
        assert (b.reused, b is a) == (30, False)
        c = reader.read(OTHER[:9])
        seen(c.logits[None], c.ids)
        for _ in range(3):  # three of different lengths at a time
            logits = reader.step([c, a, b], [OTHER[20:22], OTHER[30:32], OTHER[40:42]])
            for row, reading in zip(logits, (c, a, b), strict=True):
                seen(row, reading.ids)
        reader.rest(a)
        again = reader.read(TEXT[:50] + OTHER[:2] + TEXT[60:])
        assert (again is a, again.reused) == (True, 52)
        seen(again.logits[None], again.ids)
        return found

    return rank


def check_story(kind, world, layout, prefill_chunk):
    found = on_virtual_ranks(world, a_long_story(kind, LAYOUTS[layout], prefill_chunk))
    for at, (logits, ids) in enumerate(found[0]):
        assert far_apart(logits, logits_of(kind, ids)[-1]) < 1e-5, at  # 1e-4 is what is promised
        for other in found[1:]:
            assert torch.equal(other[at][0], logits)


@pytest.mark.parametrize(
    ("kind", "world", "layout", "prefill_chunk"),
    [
        ("llama", 4, "zigzag", None), ("llama", 1, "striped", 16), ("qwen2", 2, "striped", 16),
        ("qwen3", 3, "zigzag", 16), ("mistral", 4, "striped", None), ("mistral", 2, "contiguous", 11),
        ("gpt_oss", 4, "zigzag", 16), ("gpt_oss", 2, "striped", None),
    ],
)  # fmt: skip
def test_logits_are_those_of_one_process_at_every_step(kind, world, layout, prefill_chunk):
    check_story(kind, world, layout, prefill_chunk)


@pytest.mark.slow
@pytest.mark.parametrize("prefill_chunk", [None, 10, 16, 33])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_one_process_everywhere(kind, world, layout, prefill_chunk):
    check_story(kind, world, layout, prefill_chunk)


@pytest.mark.parametrize("world", [2, 5])
def test_text_fed_token_by_token_has_the_logits_of_one_pass(world):
    expected = logits_of("qwen3", TEXT)

    def rank(comm):
        reader = Reader(attnmesh_model("qwen3"), comm, tokens=100)
        reading = reader.read(TEXT[:1])  # fewer tokens than ranks: all ranks read them
        rows = [reading.logits, *(reader.step([reading], [[token]])[0, 0] for token in TEXT[1:18])]
        return torch.stack(rows)

    for found in on_virtual_ranks(world, rank):
        assert far_apart(found, expected[:18]) < 1e-5


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # some CPUs cannot multiply bf16, and say so
def test_half_precision_reads_as_well_as_one_process():
    exact = logits_of("llama", TEXT)[59].double()
    plain = logits_of("llama", TEXT[:60], torch.bfloat16)[-1].double()

    def rank(comm):
        reader = Reader(attnmesh_model("llama", torch.bfloat16), comm, tokens=100, prefill_chunk=24)
        return reader.read(TEXT[:60]).logits

    for found in on_virtual_ranks(3, rank):
        assert found.dtype == torch.bfloat16
        assert far_apart(found.double(), exact) <= 2 * far_apart(plain, exact)


# Who holds what.


class Recorder:
    """In place of a model: its keys are token ids and its values positions, so a cache can be read like a book."""

    def __init__(self):
        self.config = SimpleNamespace(
            model_type="llama", _attn_implementation="attnmesh", num_hidden_layers=1, num_key_value_heads=1,
            num_attention_heads=1, hidden_size=16, head_dim=16,
        )  # fmt: skip
        self._weight = torch.zeros(1, 16)

    def get_input_embeddings(self):
        return SimpleNamespace(weight=self._weight)

    def get_output_embeddings(self):
        return None

    def modules(self):
        return []

    def __call__(self, *, input_ids, position_ids, past_key_values, logits_to_keep, **_):
        k, v = (x[:, None, :, None].float().expand(-1, 1, -1, 16) for x in (input_ids, position_ids))
        past_key_values.update(k, v, 0)
        return SimpleNamespace(logits=input_ids[:, -logits_to_keep:, None].float())


def in_the_cache(reader, reading):
    """Positions and token ids, as this rank's blocks have them."""
    kept, pools = reading.kept, (reader.cache.values(0), reader.cache.keys(0))
    return [pool[kept.blocks].flatten(0, 1)[: kept.length, 0, 0].long().tolist() for pool in pools]


def check_books(reader):
    for reading in reader.readings:
        positions, ids = in_the_cache(reader, reading)
        assert positions == ranges.as_tensor(reading.held.runs).tolist()
        assert ids == [reading.ids[p] for p in positions]
        # All ranks know of all, and every position is somebody's, once.
        everybody = sorted(p for held in reading.shares.ranks for p in ranges.as_tensor(held.runs).tolist())
        assert everybody == list(range(len(reading.ids)))
        assert reading.held is reading.shares.ranks[reader.comm.rank]
    facts = [(r.ids, r.shares.counts, r.room, r.busy, r.reused) for r in reader.readings]
    reader.comm.agree("books", {"readings": str(facts)}, anew=True)


@st.composite
def adventures(draw):
    world = draw(st.integers(1, 5))
    text = st.tuples(st.integers(0, 1), st.floats(0, 1), st.integers(1, 60))  # of two texts, where they part, how long
    event = st.one_of(
        st.tuples(st.just("read"), text, st.integers(0, 12)),
        st.tuples(st.just("step"), st.integers(1, 8), st.integers(0, 3)),
        st.tuples(st.just("cut"), st.floats(0, 1), st.integers(0, 3)),
        st.tuples(st.just("rest"), st.integers(0, 3), st.none()),
    )
    return (
        world, draw(st.sampled_from(sorted(LAYOUTS))), draw(st.sampled_from([None, 10, 16, 31])),
        draw(st.sampled_from([60, 100, 300])), draw(st.integers(1, 3)), draw(st.lists(event, min_size=1, max_size=14)),
    )  # fmt: skip


def live_through(adventure):
    world, layout, prefill_chunk, tokens, sequences, events = adventure

    def rank(comm):
        reader = Reader(
            Recorder(), comm, tokens=tokens, sequences=sequences, layout=LAYOUTS[layout], prefill_chunk=prefill_chunk
        )  # fmt: skip
        for what, how, which in events:
            busy = [reading for reading in reader.readings if reading.busy]
            if what == "read":
                text, at, length = how
                at = int(at * length)
                ids = TEXT[:at] + (OTHER if text else TEXT)[at:length]
                before = [(reading, list(reading.ids)) for reading in reader.readings]
                try:
                    reading = reader.read(ids, more=which)
                except ValueError as error:
                    if "do not fit beside" not in str(error):
                        raise
                    assert [(reading, reading.ids) for reading in reader.readings] == before
                    continue
                assert (reading.ids, float(reading.logits), reading.busy) == (ids, ids[-1], True)
                assert sum(r.room for r in reader.readings) <= tokens
            elif what == "rest":
                if how < len(busy):
                    reader.rest(busy[how])
            elif which < len(busy):
                reading = busy[which]
                if what == "cut":
                    reader.truncate(reading, 1 + int(how * (len(reading.ids) - 1)))
                elif len(reading.ids) + how <= reading.room:
                    reader.step([reading], [OTHER[-how:]])
            check_books(reader)

    on_virtual_ranks(world, rank)


@settings(max_examples=40, deadline=None)
@given(adventures())
def test_every_position_is_held_once_whatever_happens(adventure):
    live_through(adventure)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(adventures())
def test_every_position_is_held_once_whatever_happens_for_long(adventure):
    live_through(adventure)


@pytest.mark.parametrize("prefill_chunk", [None, 20])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_rank_holds_its_share(world, layout, prefill_chunk):
    def rank(comm):
        reader = Reader(Recorder(), comm, tokens=1000, layout=LAYOUTS[layout], prefill_chunk=prefill_chunk)
        reading = reader.read(random_ids(501, 3), more=300)
        for _ in range(25):
            reader.step([reading], [[5] * 8])
        pool = reader.cache.stats().total * BLOCK_SIZE
        return len(reading.held), pool

    for held, pool in on_virtual_ranks(world, rank):
        assert abs(held - 701 / world) <= 3
        assert pool <= 1000 / world + 6 * BLOCK_SIZE  # there is no room for much more than that


def test_cuts_leave_no_rank_with_more_than_there_is_room_for():
    """A zigzag's first rank has all of a short beginning, and a long document's is more than many a share."""

    def rank(comm):
        reader = Reader(Recorder(), comm, tokens=200)
        reader.rest(reader.read(random_ids(160, 1)))
        for seed in range(2, 6):
            reading = reader.read([*random_ids(20, 1), seed, *random_ids(169, seed)])
            assert reading.reused == 20
            check_books(reader)
            assert max(reading.shares.counts) - min(reading.shares.counts) <= 1
            reader.rest(reading)

    on_virtual_ranks(4, rank)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_conversation_of_many_turns_stays_even(layout):
    text = random_ids(400, 1)

    def rank(comm):
        reader = Reader(Recorder(), comm, tokens=400, layout=LAYOUTS[layout])
        for length in range(9, 380, 9):
            reading = reader.read(text[:length])
            assert reading.reused == max(0, length - 9)
            assert max(reading.shares.counts) - min(reading.shares.counts) <= 3
            reader.rest(reading)
        check_books(reader)

    on_virtual_ranks(4, rank)


def test_what_one_rank_has_kept_is_read_again_where_it_would_be_too_much():
    text = random_ids(400, 1)

    def rank(comm):
        reader = Reader(Recorder(), comm, tokens=400, layout=am.Contiguous())
        reader.rest(reader.read(text))
        reused = []
        for length in range(109, 200, 9):  # its first rank alone has the first hundred tokens
            reading = reader.read([*text[:100], 2, *random_ids(length - 101, 2)])
            reused.append(reading.reused)
            check_books(reader)
            reader.rest(reading)
        return reused

    found = on_virtual_ranks(4, rank)
    assert all(reused == found[0] for reused in found)
    assert found[0].count(0) == 1


def test_ranks_may_have_uneven_shares():
    def rank(comm):
        reader = Reader(attnmesh_model("llama"), comm, tokens=90, layout=am.Zigzag(pairs=(1, 3)))
        reading = reader.read(TEXT[:79])
        return reading.logits, len(reading.held)

    found = on_virtual_ranks(2, rank)
    assert [held for _, held in found] == [19, 60] or [held for _, held in found] == [20, 59]
    for logits, _ in found:
        assert far_apart(logits, logits_of("llama", TEXT[:79])[-1]) < 1e-5


# What was read before.


def test_an_idle_sequence_is_taken_over_and_a_busy_one_is_shared():
    def rank(comm):
        reader = Reader(Recorder(), comm, tokens=400, sequences=3)
        a = reader.read(TEXT[:40])
        b = reader.read(TEXT[:50])
        assert (b is a, b.reused, reader.work.reused, reader.work.read) == (False, 40, 40, 50)
        reader.rest(a)
        reader.rest(b)
        c = reader.read(TEXT[:45] + OTHER[:10])  # b has more in common with it than a
        assert (c is b, c.reused, len(reader.readings)) == (True, 45, 2)
        d = reader.read(TEXT[:40])  # the last token is always read: it says what comes
        assert (d is a or d is c, d.reused) == (True, 39)
        assert float(d.logits) == TEXT[39]
        check_books(reader)

    on_virtual_ranks(3, rank)


def test_the_same_prompt_again_and_again():
    def rank(comm):
        reader = Reader(attnmesh_model("llama"), comm, tokens=300, sequences=3)
        readings = [reader.read(TEXT[:33]) for _ in range(3)]
        assert [reading.reused for reading in readings] == [0, 32, 32]
        for i, reading in enumerate(readings):  # each goes its own way
            reader.step([reading], [OTHER[10 * i : 10 * i + 5]])
        return [reader.step([r], [[9]])[0, 0] for r in readings]

    for found in on_virtual_ranks(2, rank):
        for i, logits in enumerate(found):
            expected = logits_of("llama", [*TEXT[:33], *OTHER[10 * i : 10 * i + 5], 9])[-1]
            assert far_apart(logits, expected) < 1e-5


def test_sequences_that_nobody_uses_make_room_the_oldest_first():
    def rank(comm):
        reader = Reader(Recorder(), comm, tokens=100, sequences=3)
        a, b, c = (reader.read([seed, *random_ids(29, seed)]) for seed in range(3))
        for reading in (b, a):
            reader.rest(reading)
        d = reader.read([50, *random_ids(29, 50)])
        assert reader.readings == [b, c, d]  # a was read first
        with pytest.raises(ValueError, match="41 tokens do not fit beside 60 of 2 sequences in use: there is room for"):
            reader.read([51, *random_ids(39, 51)], more=1)
        assert reader.readings == [b, c, d]  # b would not have been enough: it stays
        e = reader.read([51, *random_ids(38, 51)], more=1)
        assert reader.readings == [c, d, e]
        check_books(reader)
        with pytest.raises(ValueError, match="1 tokens do not fit beside 100 of 3 sequences in use"):
            reader.read([5])
        reader.free(c)
        assert reader.readings == [d, e]
        reader.read([5])

    on_virtual_ranks(2, rank)


def test_room_is_kept_for_what_a_sequence_may_grow_by():
    def rank(comm):
        reader = Reader(Recorder(), comm, tokens=100, sequences=2)
        a = reader.read(TEXT[:30], more=40)
        with pytest.raises(ValueError, match="31 tokens do not fit beside 70"):
            reader.read(OTHER[:31])
        b = reader.read(OTHER[:30])
        for _ in range(40):
            reader.step([a], [[1]])
        check_books(reader)
        assert (len(a.ids), len(b.ids)) == (70, 30)

    on_virtual_ranks(3, rank)


# What is refused.


def test_what_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match="a prompt must have at least one token"):
        Reader(Recorder(), tokens=10).read([])
    with pytest.raises(ValueError, match="11 tokens do not fit beside 0 of 0 sequences in use: there is room for 10"):
        Reader(Recorder(), tokens=10).read(TEXT[:11])

    def rank(comm):
        with pytest.raises(ValueError, match="prefill_chunk must be 2 tokens for each of 3 ranks or more, got 5"):
            Reader(Recorder(), comm, tokens=100, prefill_chunk=5)
        with pytest.raises(ValueError, match="layout must give every one of 3 ranks a part of the sequence"):
            Reader(Recorder(), comm, tokens=100, layout=am.Zigzag(pairs=(1, 0, 1)))

    on_virtual_ranks(3, rank)


def test_models_of_other_numbers_are_refused():
    strange = Recorder()
    strange._weight = torch.zeros(1, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"the model must be of .*torch\.float32.*, got torch\.float64"):
        Reader(strange, tokens=10)
