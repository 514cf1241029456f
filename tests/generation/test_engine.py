"""Sequences spread over ranks: the logits of one process, every position held once, and room that is kept."""

import copy
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import attnmesh as am
from attnmesh.core import ranges
from attnmesh.generation.engine import Engine
from attnmesh.generation.norms import one_call, use_one_call
from attnmesh.generation.rank_memory import BLOCK_SIZE
from helpers.models import KINDS, LAYOUTS, VOCABULARY, attnmesh_model, logits_of, on_virtual_ranks, random_ids

TEXT = random_ids(80, seed=1)
OTHER = random_ids(80, seed=2)


def far_apart(found, expected):
    """The largest difference, relative to the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())


def poison(engine):
    """Whatever was never written is no number."""
    for layer in range(engine.model.config.num_hidden_layers):
        engine.cache.keys(layer).fill_(torch.nan)
        engine.cache.values(layer).fill_(torch.nan)


# Logits.


def a_long_story(kind, layout, prefill_chunk):
    """Everything that a engine does, in one story: logits as they come, and the text that each of them follows."""

    def rank(comm):
        engine = Engine(
            attnmesh_model(kind), comm, cache_tokens=400, max_sequences=4, layout=layout, prefill_chunk=prefill_chunk
        )
        poison(engine)
        found = []

        def seen(logits, ids):
            found.extend((row, list(ids[: len(ids) - len(logits) + 1 + i])) for i, row in enumerate(logits))

        a = engine.prefill(TEXT[:45])
        seen(a.logits[None], TEXT[:45])
        for begin, end in ((45, 46), (46, 52)):
            seen(engine.decode([a], [TEXT[begin:end]])[0], TEXT[:end])
        engine.truncate(a, 50)
        seen(engine.decode([a], [OTHER[:3]])[0], TEXT[:50] + OTHER[:3])
        b = engine.prefill(TEXT[:30] + OTHER[:20])  # while a is in use
        seen(b.logits[None], b.ids)
        assert (b.reused, b is a) == (30, False)
        c = engine.prefill(OTHER[:9])
        seen(c.logits[None], c.ids)
        for _ in range(3):  # three of different lengths at a time
            logits = engine.decode([c, a, b], [OTHER[20:22], OTHER[30:32], OTHER[40:42]])
            for row, sequence in zip(logits, (c, a, b), strict=True):
                seen(row, sequence.ids)
        engine.release(a)
        again = engine.prefill(TEXT[:50] + OTHER[:2] + TEXT[60:])
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
        ("llama", 1, "striped", 16), ("qwen2", 2, "striped", 16), ("qwen3", 3, "zigzag", 16),
        ("mistral", 2, "contiguous", 11), ("gpt_oss", 4, "zigzag", None),
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


def test_logits_that_are_valid_until_the_next_step_are_kept_apart():
    """As those of a CUDA graph: each prompt is known but for its last token, which takes a decode step."""
    engine = Engine(attnmesh_model("llama"), cache_tokens=200, max_sequences=2)
    for _ in range(2):
        a, b = engine.prefill(TEXT[:20]), engine.prefill(OTHER[:20])
        for ids, sequence in ((TEXT, a), (OTHER, b)):
            assert far_apart(sequence.logits, logits_of("llama", ids[:20])[-1]) < 1e-5
            engine.release(sequence)
        forward, buffer = engine._forward, torch.empty(1, 1, VOCABULARY)
        engine._forward_step = lambda *step, forward=forward, buffer=buffer: buffer.copy_(forward(*step))
    assert (a.reused, b.reused) == (19, 19)


@pytest.mark.parametrize("world", [2, 5])
def test_text_fed_token_by_token_has_the_logits_of_one_pass(world):
    expected = logits_of("qwen3", TEXT)

    def rank(comm):
        engine = Engine(attnmesh_model("qwen3"), comm, cache_tokens=100)
        sequence = engine.prefill(TEXT[:1])  # fewer tokens than ranks: all ranks read them
        rows = [sequence.logits, *(engine.decode([sequence], [[token]])[0, 0] for token in TEXT[1:18])]
        return torch.stack(rows)

    for found in on_virtual_ranks(world, rank):
        assert far_apart(found, expected[:18]) < 1e-5


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # some CPUs cannot multiply bf16, and say so
def test_half_precision_reads_as_well_as_one_process():
    exact = logits_of("llama", TEXT)[59].double()
    plain = logits_of("llama", TEXT[:60], torch.bfloat16)[-1].double()

    def rank(comm):
        engine = Engine(attnmesh_model("llama", torch.bfloat16), comm, cache_tokens=100, prefill_chunk=24)
        return engine.prefill(TEXT[:60]).logits

    for found in on_virtual_ranks(3, rank):
        assert found.dtype == torch.bfloat16
        assert far_apart(found.double(), exact) <= 2 * far_apart(plain, exact)


# Who holds what.


class Recorder:
    """In place of a model: its keys are token ids and its values positions, so a cache can be read like a book."""

    class Config(SimpleNamespace):
        pass

    config_class, _supports_attention_backend, _is_stateful = Config, True, False  # as a PreTrainedModel has them

    def __init__(self):
        self.config = self.Config(
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

    def forward(self, *, input_ids, position_ids, past_key_values, logits_to_keep, **_):
        k, v = (x[:, None, :, None].float().expand(-1, 1, -1, 16) for x in (input_ids, position_ids))
        past_key_values.update(k, v, 0)
        return SimpleNamespace(logits=input_ids[:, -logits_to_keep:, None].float())

    __call__ = forward


def in_the_cache(engine, sequence):
    """Positions and token ids, as this rank's blocks have them."""
    kept, pools = sequence.stored.parts[0], (engine.cache.values(0), engine.cache.keys(0))
    return [pool[kept.blocks].flatten(0, 1)[: kept.length, 0, 0].long().tolist() for pool in pools]


def check_positions(engine):
    for sequence in engine.sequences:
        positions, ids = in_the_cache(engine, sequence)
        assert positions == ranges.as_tensor(sequence.local.ranges).tolist()
        assert ids == [sequence.ids[p] for p in positions]
        # All ranks know of all, and every position is somebody's, once.
        everybody = sorted(p for held in sequence.shards.by_rank for p in ranges.as_tensor(held.ranges).tolist())
        assert everybody == list(range(len(sequence.ids)))
        assert sequence.local is sequence.shards.by_rank[engine.comm.rank]
    facts = [(r.ids, r.shards.counts, r.max_tokens, r.active, r.reused) for r in engine.sequences]
    engine.comm.agree("books", {"sequences": str(facts)}, force=True)


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
        engine = Engine(
            Recorder(), comm, cache_tokens=tokens, max_sequences=sequences, layout=LAYOUTS[layout],
            prefill_chunk=prefill_chunk,
        )  # fmt: skip
        for what, how, which in events:
            busy = [sequence for sequence in engine.sequences if sequence.active]
            if what == "read":
                text, at, length = how
                at = int(at * length)
                ids = TEXT[:at] + (OTHER if text else TEXT)[at:length]
                before = [(sequence, list(sequence.ids)) for sequence in engine.sequences]
                try:
                    sequence = engine.prefill(ids, max_new_tokens=which)
                except ValueError as error:
                    if "do not fit beside" not in str(error):
                        raise
                    assert [(sequence, sequence.ids) for sequence in engine.sequences] == before
                    continue
                assert (sequence.ids, float(sequence.logits), sequence.active) == (ids, ids[-1], True)
                assert sum(r.max_tokens for r in engine.sequences) <= tokens
            elif what == "rest":
                if how < len(busy):
                    engine.release(busy[how])
            elif which < len(busy):
                sequence = busy[which]
                if what == "cut":
                    engine.truncate(sequence, 1 + int(how * (len(sequence.ids) - 1)))
                elif len(sequence.ids) + how <= sequence.max_tokens:
                    engine.decode([sequence], [OTHER[-how:]])
            check_positions(engine)

    on_virtual_ranks(world, rank)


@settings(max_examples=15, deadline=None)
@given(adventures())
def test_every_position_is_held_once_whatever_happens(adventure):
    live_through(adventure)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(adventures())
def test_every_position_is_held_once_whatever_happens_for_long(adventure):
    live_through(adventure)


@pytest.mark.parametrize(
    ("world", "layout", "prefill_chunk"),
    [(2, "zigzag", 20), (3, "striped", None), (4, "contiguous", 20), (4, "zigzag", None), (2, "contiguous", None)],
)
def test_a_rank_stores_its_share(world, layout, prefill_chunk):
    def rank(comm):
        engine = Engine(Recorder(), comm, cache_tokens=1000, layout=LAYOUTS[layout], prefill_chunk=prefill_chunk)
        sequence = engine.prefill(random_ids(501, 3), max_new_tokens=300)
        for _ in range(25):
            engine.decode([sequence], [[5] * 8])
        pool = engine.cache.stats().total * BLOCK_SIZE
        return len(sequence.local), pool

    for held, pool in on_virtual_ranks(world, rank):
        assert abs(held - 701 / world) <= 3
        assert pool <= 1000 / world + 6 * BLOCK_SIZE  # there is no room for much more than that


def test_cuts_leave_no_rank_with_more_than_there_is_room_for():
    """A zigzag's first rank has all of a short beginning, and a long document's is more than many a share."""

    def rank(comm):
        engine = Engine(Recorder(), comm, cache_tokens=200)
        engine.release(engine.prefill(random_ids(160, 1)))
        for seed in range(2, 6):
            sequence = engine.prefill([*random_ids(20, 1), seed, *random_ids(169, seed)])
            assert sequence.reused == 20
            check_positions(engine)
            assert max(sequence.shards.counts) - min(sequence.shards.counts) <= 1
            engine.release(sequence)

    on_virtual_ranks(4, rank)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_conversation_of_many_turns_stays_even(layout):
    text = random_ids(400, 1)

    def rank(comm):
        engine = Engine(Recorder(), comm, cache_tokens=400, layout=LAYOUTS[layout])
        for length in range(9, 200, 9):
            sequence = engine.prefill(text[:length])
            assert sequence.reused == max(0, length - 9)
            assert max(sequence.shards.counts) - min(sequence.shards.counts) <= 3
            engine.release(sequence)
        check_positions(engine)

    on_virtual_ranks(4, rank)


def test_what_one_rank_has_kept_is_read_again_where_it_would_be_too_much():
    text = random_ids(400, 1)

    def rank(comm):
        engine = Engine(Recorder(), comm, cache_tokens=400, layout=am.Contiguous())
        engine.release(engine.prefill(text))
        reused = []
        for length in range(109, 200, 9):  # its first rank alone has the first hundred tokens
            sequence = engine.prefill([*text[:100], 2, *random_ids(length - 101, 2)])
            reused.append(sequence.reused)
            check_positions(engine)
            engine.release(sequence)
        return reused

    found = on_virtual_ranks(4, rank)
    assert all(reused == found[0] for reused in found)
    assert found[0].count(0) == 1


def test_ranks_may_have_uneven_shares():
    def rank(comm):
        engine = Engine(attnmesh_model("llama"), comm, cache_tokens=90, layout=am.Zigzag(pairs=(1, 3)))
        sequence = engine.prefill(TEXT[:79])
        return sequence.logits, len(sequence.local)

    found = on_virtual_ranks(2, rank)
    assert [held for _, held in found] == [19, 60] or [held for _, held in found] == [20, 59]
    for logits, _ in found:
        assert far_apart(logits, logits_of("llama", TEXT[:79])[-1]) < 1e-5


# What was read before.


def test_an_idle_sequence_is_taken_over_and_a_busy_one_is_shared():
    def rank(comm):
        engine = Engine(Recorder(), comm, cache_tokens=400, max_sequences=3)
        a = engine.prefill(TEXT[:40])
        b = engine.prefill(TEXT[:50])
        assert (b is a, b.reused, engine.reused_tokens, engine.prefill_tokens) == (False, 40, 40, 50)
        engine.release(a)
        engine.release(b)
        c = engine.prefill(TEXT[:45] + OTHER[:10])  # b has more in common with it than a
        assert (c is b, c.reused, len(engine.sequences)) == (True, 45, 2)
        d = engine.prefill(TEXT[:40])  # the last token is always read: it says what comes
        assert (d is a or d is c, d.reused) == (True, 39)
        assert float(d.logits) == TEXT[39]
        check_positions(engine)

    on_virtual_ranks(3, rank)


def test_the_same_prompt_again_and_again():
    def rank(comm):
        engine = Engine(attnmesh_model("llama"), comm, cache_tokens=300, max_sequences=3)
        sequences = [engine.prefill(TEXT[:33]) for _ in range(3)]
        assert [sequence.reused for sequence in sequences] == [0, 32, 32]
        for i, sequence in enumerate(sequences):  # each goes its own way
            engine.decode([sequence], [OTHER[10 * i : 10 * i + 5]])
        return [engine.decode([r], [[9]])[0, 0] for r in sequences]

    for found in on_virtual_ranks(2, rank):
        for i, logits in enumerate(found):
            expected = logits_of("llama", [*TEXT[:33], *OTHER[10 * i : 10 * i + 5], 9])[-1]
            assert far_apart(logits, expected) < 1e-5


def test_sequences_that_nobody_uses_make_room_the_oldest_first():
    def rank(comm):
        engine = Engine(Recorder(), comm, cache_tokens=100, max_sequences=3)
        a, b, c = (engine.prefill([seed, *random_ids(29, seed)]) for seed in range(3))
        for sequence in (b, a):
            engine.release(sequence)
        d = engine.prefill([50, *random_ids(29, 50)])
        assert engine.sequences == [b, c, d]  # a was read first
        with pytest.raises(ValueError, match="41 tokens do not fit beside 60 of 2 active sequences: there is room for"):
            engine.prefill([51, *random_ids(39, 51)], max_new_tokens=1)
        assert engine.sequences == [b, c, d]  # b would not have been enough: it stays
        e = engine.prefill([51, *random_ids(38, 51)], max_new_tokens=1)
        assert engine.sequences == [c, d, e]
        check_positions(engine)
        with pytest.raises(ValueError, match="1 tokens do not fit beside 100 of 3 active sequences"):
            engine.prefill([5])
        engine.free(c)
        assert engine.sequences == [d, e]
        engine.prefill([5])

    on_virtual_ranks(2, rank)


def test_room_is_kept_for_what_a_sequence_may_grow_by():
    def rank(comm):
        engine = Engine(Recorder(), comm, cache_tokens=100, max_sequences=2)
        a = engine.prefill(TEXT[:30], max_new_tokens=40)
        with pytest.raises(ValueError, match="31 tokens do not fit beside 70"):
            engine.prefill(OTHER[:31])
        b = engine.prefill(OTHER[:30])
        for _ in range(40):
            engine.decode([a], [[1]])
        check_positions(engine)
        assert (len(a.ids), len(b.ids)) == (70, 30)

    on_virtual_ranks(3, rank)


# What is refused.


def test_what_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match="ids must have at least one token"):
        Engine(Recorder(), cache_tokens=10).prefill([])
    with pytest.raises(
        ValueError, match="11 tokens do not fit beside 0 of 0 active sequences: there is room for cache_tokens=10 "
    ):
        Engine(Recorder(), cache_tokens=10).prefill(TEXT[:11])

    def rank(comm):
        with pytest.raises(ValueError, match="prefill_chunk must be at least 2 tokens per rank, 6 for 3 ranks, got 5"):
            Engine(Recorder(), comm, cache_tokens=100, prefill_chunk=5)
        with pytest.raises(ValueError, match="layout must give every one of 3 ranks a part of the sequence"):
            Engine(Recorder(), comm, cache_tokens=100, layout=am.Zigzag(pairs=(1, 0, 1)))

    on_virtual_ranks(3, rank)


def test_models_of_other_numbers_are_refused():
    strange = Recorder()
    strange._weight = torch.zeros(1, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"model must be of dtype .*torch\.float32.*, got torch\.float64"):
        Engine(strange, cache_tokens=10)


def test_an_rms_norm_takes_one_call_only_where_that_has_its_bits(monkeypatch):
    class ScaledRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    norms = nn.ModuleDict({"plain": LlamaRMSNorm(48), "scaled": ScaledRMSNorm(48), "narrow": LlamaRMSNorm(48).half()})
    for norm in norms.values():
        nn.init.normal_(norm.weight)
    use_one_call(norms)
    assert [name for name, norm in norms.items() if "forward" in vars(norm)] == ["plain", "narrow"]
    calls = Mock(wraps=F.rms_norm)
    monkeypatch.setattr(F, "rms_norm", calls)
    x = torch.randn(2, 3, 48)
    assert torch.equal(norms["plain"](x), LlamaRMSNorm.forward(norms["plain"], x))
    assert not calls.called  # the model's own passes are as they were
    with one_call():
        assert torch.equal(norms["plain"](x), LlamaRMSNorm.forward(norms["plain"], x))
        assert calls.call_count == 1
        assert torch.equal(norms["narrow"](x.half()), LlamaRMSNorm.forward(norms["narrow"], x.half()))
        assert calls.call_count == 1
    copied = copy.deepcopy(norms["plain"])
    nn.init.zeros_(copied.weight)
    assert not copied(x).any()
    assert norms["plain"](x).any()
    norms.bfloat16()
    assert norms["plain"](x.bfloat16()).dtype == torch.bfloat16


def test_an_rms_norm_with_code_or_hooks_of_its_own_is_as_it_was():
    class WideRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states):  # in float32, whatever the dtype of the model
            return LlamaRMSNorm.forward(self, hidden_states.float())

    class Watcher:
        def __init__(self):
            self.lock, self.seen = threading.Lock(), []  # cannot be copied

        def watch(self, module, args, out):
            self.seen.append(out)

    watcher, watched, wide = Watcher(), LlamaRMSNorm(48), WideRMSNorm(48)
    watched.register_forward_hook(watcher.watch)
    wide.weight.data = wide.weight.data.half()
    use_one_call(nn.ModuleList([watched, wide]))
    assert "forward" in vars(watched)
    assert "forward" not in vars(wide)
    assert not watcher.seen  # nothing that the model has computed
    x = torch.randn(2, 48)
    with one_call():
        assert torch.equal(watched(x), watcher.seen[0])
        assert len(watcher.seen) == 1


def test_an_rms_norm_under_autocast_has_the_dtype_of_the_model(monkeypatch):
    norm = LlamaRMSNorm(48)
    use_one_call(norm)
    monkeypatch.setattr(F, "rms_norm", Mock())  # float32 on a GPU
    with one_call(), torch.autocast("cpu", torch.bfloat16):
        assert norm(torch.randn(2, 48)).dtype == torch.float32
    assert not F.rms_norm.called


@pytest.mark.slow
def test_a_model_can_be_compiled_as_one_graph_once_an_engine_has_it():
    norm, x = LlamaRMSNorm(48), torch.randn(2, 48)
    expected = norm(x)
    use_one_call(norm)
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)
    with one_call():
        assert torch.equal(compiled(x), expected)
