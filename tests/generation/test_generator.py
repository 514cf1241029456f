"""Tokens over ranks: those that `model.generate` of one process says, however they are come by."""

import copy
import itertools
from typing import ClassVar

import pytest
import torch

import attnmesh as am
from attnmesh.comm import CommError
from attnmesh.generation.engine import Engine
from attnmesh.generation.generator import Generator, generate
from attnmesh.generation.prompts import eos_tokens
from attnmesh.generation.requests import Token
from attnmesh.generation.sampling import PromptLookup, Sampling
from attnmesh.ops.decode.call import MAX_DECODE_TOKENS
from attnmesh.plan.decode import DecodeSharding
from attnmesh.verify.mode import covering_rows
from helpers.cases import sweep
from helpers.models import (
    KINDS,
    LAYOUTS,
    POSITIONS,
    STOP,
    VOCABULARY,
    attnmesh_model,
    generated_rows,
    greedy_tokens,
    on_virtual_ranks,
    random_ids,
    transformers_model,
    use_small_blocks,
)

MOST = 12


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    use_small_blocks(monkeypatch)


# Of different lengths, and repetitive, so that there are drafts.
PROMPTS = [random_ids(n, seed, high=30) * 3 for n, seed in ((7, 1), (13, 2), (5, 3))]


def second(kind, prompts):
    """Another question about the same: it begins with the prompt, and some of the answer."""
    return [[*prompt, *greedy_tokens(kind, prompt, MOST)[:4], 9, 9, 8] for prompt in prompts]


class HalfRight(PromptLookup):
    """Drafts from texts that it knows to the end; the fifth token of every seven is another."""

    texts: ClassVar[list[list[int]]] = []

    def draft(self, ids, most):
        known = next(text for text in self.texts if text[: len(ids)] == list(ids))
        wrong = [token if at % 7 != 5 else (token + 1) % VOCABULARY for at, token in enumerate(known)]
        return wrong[len(ids) : len(ids) + most]


def check_tokens(kind, world, layout, batch, speculative, reuse, prefill_chunk, most=MOST):
    rounds = [PROMPTS[:batch], second(kind, PROMPTS[:batch])] if reuse else [PROMPTS[:batch]]
    expected = [[greedy_tokens(kind, prompt, most) for prompt in prompts] for prompts in rounds]
    HalfRight.texts = [
        [*p, *new] for prompts, row in zip(rounds, expected, strict=True) for p, new in zip(prompts, row, strict=True)
    ]

    def rank(comm):
        generator = Generator(
            attnmesh_model(kind), None, comm, cache_tokens=600, max_sequences=batch, layout=LAYOUTS[layout],
            prefill_chunk=prefill_chunk,
        )  # fmt: skip
        rows = [generated_rows(generator, prompts, max_new_tokens=most, speculative=speculative) for prompts in rounds]
        return rows, generator.stats

    found = on_virtual_ranks(world, rank)
    for rows, stats in found:
        assert rows == expected
        assert stats.generated_tokens == stats.decode_steps + stats.accepted_tokens + len(rounds) or batch > 1
        assert (stats.reused_tokens > 0) == reuse or batch > 1
    drafted, accepted = (
        sum(getattr(stats, name) for _, stats in found) for name in ("draft_tokens", "accepted_tokens")
    )
    assert 0 < accepted < drafted if speculative else accepted == drafted == 0


@pytest.mark.parametrize(
    ("kind", "world", "layout", "batch", "speculative", "reuse", "prefill_chunk"),
    [
        ("llama", 2, "zigzag", 1, False, False, None),
        sweep("gpt_oss", 3, "contiguous", 1, True, True, None),
    ],
)
def test_tokens_are_those_of_one_process(kind, world, layout, batch, speculative, reuse, prefill_chunk, monkeypatch):
    monkeypatch.setattr("attnmesh.generation.requests.PromptLookup", HalfRight)
    check_tokens(kind, world, layout, batch, speculative, reuse, prefill_chunk)


WAYS = {
    "kind": KINDS, "world": [1, 2, 4], "layout": ["zigzag", "striped"], "batch": [1, 3], "speculative": [False, True],
    "reuse": [False, True], "prefill_chunk": [None, 16],
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("way", covering_rows(WAYS), ids=lambda way: "-".join(map(str, way.values())))
def test_tokens_are_those_of_one_process_in_all_pairs_of_ways(way, monkeypatch):
    monkeypatch.setattr("attnmesh.generation.requests.PromptLookup", HalfRight)
    check_tokens(**way, most=24)


# Groups of ranks.


@pytest.mark.parametrize(("kvdp", "cp", "batch"), [(3, 1, 2), sweep(2, 2, 3), sweep(2, 2, 1), sweep(4, 1, 3)])
def test_sequences_are_dealt_to_groups(kvdp, cp, batch):
    speculative = kvdp + batch == 5
    expected = [greedy_tokens("llama", prompt, MOST) for prompt in PROMPTS[:batch]]
    sharding = DecodeSharding(kvdp=kvdp, cp=cp)

    def rank(comm):
        generator = Generator(attnmesh_model("llama"), None, comm, cache_tokens=400, max_sequences=3, sharding=sharding)
        rows = generated_rows(generator, PROMPTS[:batch], max_new_tokens=MOST, speculative=speculative)
        again = generated_rows(generator, PROMPTS[:batch], max_new_tokens=MOST, speculative=speculative)
        assert generator.engine.cache.sequences == {}
        return rows, again, generator.stats

    found = on_virtual_ranks(kvdp * cp, rank)
    for me, (rows, again, stats) in enumerate(found):
        assert rows == again == expected
        mine = range(sharding.place(me).kvdp, batch, kvdp)  # in turn
        held = sum(len(PROMPTS[number]) + len(expected[number]) for number in mine)
        assert held / cp - 2 * len(mine) <= stats.cached_tokens <= held / cp + 8 * len(mine)  # with drafts
        assert stats.generated_tokens == 2 * sum(len(expected[number]) for number in mine)
        assert stats.rank == me
    assert sum(stats.generated_tokens for *_, stats in found) == cp * 2 * sum(map(len, expected))


@pytest.mark.parametrize(("sequences", "expected"), [(1, (1, 4)), (3, (2, 2)), (9, (4, 1))])
def test_without_a_sharding_the_recommended_one_is_taken(sequences, expected):
    def rank(comm):
        sharding = Generator(attnmesh_model("llama"), None, comm, cache_tokens=100, max_sequences=sequences).sharding
        return sharding.kvdp, sharding.cp

    assert on_virtual_ranks(4, rank) == [expected] * 4


@pytest.mark.parametrize("sharding", [DecodeSharding(cp=2), DecodeSharding(kvdp=2, cp=2), DecodeSharding(tp=3)])
def test_a_sharding_for_other_ranks_is_refused(sharding):
    def rank(comm):
        with pytest.raises(ValueError, match="sharding must be kvdp x cp = 3 ranks and tp = 1 for a model"):
            Generator(attnmesh_model("llama"), None, comm, cache_tokens=100, sharding=sharding)

    on_virtual_ranks(3, rank)


# Drawn tokens.


def drawn(world, prompts, sampling, sharding=None, most=8):
    def rank(comm):
        generator = Generator(attnmesh_model("llama"), None, comm, cache_tokens=500, max_sequences=3, sharding=sharding)
        return generated_rows(generator, prompts, max_new_tokens=most, sampling=sampling, stop=())

    found = on_virtual_ranks(world, rank)
    assert all(rows == found[0] for rows in found)
    return found[0]


def test_a_seed_says_the_same_over_any_ranks_and_beside_any_rows():
    sampling = Sampling(1.0, 0.9, seed=11)
    alone = drawn(1, PROMPTS, sampling)
    assert drawn(3, PROMPTS, sampling, DecodeSharding(cp=3)) == alone
    assert drawn(4, PROMPTS, sampling, DecodeSharding(kvdp=2, cp=2)) == alone
    assert drawn(2, PROMPTS[:1], sampling) == alone[:1]
    assert drawn(2, PROMPTS, Sampling(1.0, 0.9, seed=12)) != alone
    assert len({tuple(row) for row in drawn(1, PROMPTS[:1] * 3, sampling)}) == 3  # the same prompt, another generator


def test_a_tiny_top_p_is_greedy():
    assert drawn(2, PROMPTS[:1], Sampling(1.0, 1e-9)) == drawn(2, PROMPTS[:1], Sampling())


@pytest.mark.parametrize("how", [{}, sweep({"sampling": Sampling(1.0, seed=3)}), sweep({"speculative": True})])
def test_ranks_agree_on_tokens_even_where_their_logits_differ(how, monkeypatch):
    """A rank of another make may round otherwise: here all its logits are wrong, and it goes along all the same."""
    prefill, step = Engine.prefill, Engine.decode

    def disturbed(engine, logits):
        return logits.flip(-1) if engine.comm.rank == 1 else logits

    def generated(comm):
        generator = Generator(attnmesh_model("qwen3"), None, comm, cache_tokens=400)
        return generated_rows(generator, PROMPTS[1:2], max_new_tokens=MOST, stop=(), **how)

    expected = on_virtual_ranks(2, generated)[0]
    monkeypatch.setattr(Engine, "prefill", lambda self, *args: disturbed(self, prefill(self, *args)))
    monkeypatch.setattr(Engine, "decode", lambda self, *args: disturbed(self, step(self, *args)))
    assert on_virtual_ranks(2, generated) == [expected] * 2


# Drafts.


def test_drafts_make_fewer_steps_of_repetitive_text():
    """Where nothing comes of attention, the last token says what comes next, and soon all goes round in circles."""
    plainly, forgetful = copy.deepcopy(transformers_model("llama")), copy.deepcopy(attnmesh_model("llama"))
    for model in (plainly, forgetful):
        for layer in model.model.layers:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    ids = torch.tensor([random_ids(4, 1)])
    circling = plainly.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=100, eos_token_id=-1
    )
    prompt, expected = circling[0, :64].tolist(), circling[0, 64:].tolist()

    def rank(comm):
        found = []
        for speculative in (False, True):
            generator = Generator(forgetful, None, comm, cache_tokens=400)
            found += [
                generated_rows(generator, [prompt], max_new_tokens=40, stop=(), speculative=speculative),
                generator.stats,
            ]
        return found

    for stepped, without, drafted, stats in on_virtual_ranks(2, rank):
        assert stepped == drafted == [expected]
        assert (without.decode_steps, without.draft_tokens, without.accepted_tokens, without.generated_tokens) == (
            39,
            0,
            0,
            40,
        )
        assert stats.accepted_tokens == stats.draft_tokens  # all drafts are right here
        assert stats.decode_steps + stats.accepted_tokens == 39  # the first token comes with the prompt
        assert stats.decode_steps < 20
        assert stats.generated_tokens == 40


def test_a_stop_within_a_draft_ends_the_row(monkeypatch):
    prompt = PROMPTS[0]
    expected = greedy_tokens("llama", prompt, MOST)
    end = next(i for i in range(3, MOST) if expected[i] not in expected[:i])
    assert end < MAX_DECODE_TOKENS < MOST - 1
    monkeypatch.setattr(PromptLookup, "draft", lambda self, ids, most: expected[len(ids) - len(prompt) :][:most])

    def rank(comm):
        generator = Generator(attnmesh_model("llama"), None, comm, cache_tokens=200)
        rows = generated_rows(generator, [prompt], max_new_tokens=MOST, stop=[expected[end]], speculative=True)
        stats = generator.stats
        return rows, stats.decode_steps, stats.generated_tokens, stats.draft_tokens, stats.accepted_tokens

    # The first token comes with the prompt, all others with one step. What was drafted past the stop was of no use.
    found = ([expected[: end + 1]], 1, end + 1, MAX_DECODE_TOKENS - 1, end - 1)
    assert on_virtual_ranks(2, rank) == [found] * 2


# When it ends.


def test_a_row_ends_with_a_stop_token_and_the_others_go_on():
    rows = [greedy_tokens("gpt_oss", prompt, MOST) for prompt in PROMPTS]
    stop = rows[0][2]
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in rows]
    assert len(expected[0]) <= 3 < max(map(len, expected))

    def rank(comm):
        generator = Generator(attnmesh_model("gpt_oss"), None, comm, cache_tokens=500, max_sequences=3)
        return generated_rows(generator, PROMPTS, max_new_tokens=MOST, stop=[stop, 100_000])

    assert on_virtual_ranks(2, rank) == [expected] * 2


def test_stops_are_the_model_s_own_unless_given():
    generator = Generator(attnmesh_model("llama"), None, cache_tokens=200)
    assert eos_tokens(generator.model) == {STOP}
    prompt = random_ids(12, seed=10)
    row = greedy_tokens("llama", prompt, 20)
    assert (len(row), row[-1]) == (5, STOP)
    assert generated_rows(generator, [prompt], max_new_tokens=20) == [row]
    further = generated_rows(generator, [prompt], max_new_tokens=20, stop=())[0]
    assert (further[: len(row)], len(further)) == (row, 20)


def test_one_token_is_enough():
    def rank(comm):
        return [token.id for token in generate(attnmesh_model("llama"), None, PROMPTS[:1], comm, max_new_tokens=1)]

    assert on_virtual_ranks(2, rank) == [greedy_tokens("llama", PROMPTS[0], MOST)[:1]] * 2


def test_who_has_heard_enough_may_leave():
    def rank(comm):
        generator = Generator(attnmesh_model("llama"), None, comm, cache_tokens=100)
        heard = generator.generate(PROMPTS[:1], max_new_tokens=MOST)
        first = next(heard)
        heard.close()
        assert generator.num_unfinished == len(generator.engine.cache.sequences) == 0
        return first.id, generated_rows(generator, PROMPTS[:1], max_new_tokens=MOST)[0]

    expected = greedy_tokens("llama", PROMPTS[0], MOST)
    assert on_virtual_ranks(2, rank) == [(expected[0], expected)] * 2


@pytest.mark.parametrize("generators", [1, 2])
def test_iterators_take_turns(generators):
    """Those of one generator run one another's requests; zip() takes all tokens of the last one, and no more."""

    def rank(comm):
        several = [
            Generator(attnmesh_model("llama"), None, comm, cache_tokens=100, max_sequences=6) for _ in range(generators)
        ]
        iterators = [
            several[i % generators].generate([prompt], max_new_tokens=3) for i, prompt in enumerate(PROMPTS[:2])
        ]
        both = [[token.id for token in tokens] for tokens in zip(*iterators, strict=False)]
        (left,) = several[-1].generate(PROMPTS[:1], max_new_tokens=1, num_beams=3)
        held = several[0].generate(PROMPTS[:2], max_new_tokens=1)  # two tokens in the last step
        next(held)
        request = several[0].submit(PROMPTS[0], max_new_tokens=1)
        if comm.rank:  # ranks may differ in whether they ask once more
            next(held)
        else:
            list(held)
        assert [token.id for token in several[0].stream(request)] == [left.id]
        assert several[0].step() == list(held) == []
        return both

    expected = list(zip(*(greedy_tokens("llama", prompt, 3) for prompt in PROMPTS[:2]), strict=True))
    assert on_virtual_ranks(2, rank) == [list(map(list, expected))] * 2


def test_more_prompts_than_sequences_or_room_wait():
    def rank(comm):
        generator = Generator(attnmesh_model("llama"), None, comm, cache_tokens=60, max_sequences=2)
        rows = [], [], []
        for token in generator.generate(PROMPTS, max_new_tokens=MOST):
            rows[token.row].append(token.id)
        return list(rows)

    assert on_virtual_ranks(2, rank) == [[greedy_tokens("llama", prompt, MOST) for prompt in PROMPTS]] * 2


def test_stop_strings_end_rows_as_they_end_requests():
    class Letters:
        def __call__(self, text):
            return {"input_ids": list(map(ord, text))}

        def decode(self, ids, skip_special_tokens):
            return "".join(chr(33 + token) for token in ids)

    expected = greedy_tokens("llama", PROMPTS[0], MOST)
    word = "".join(chr(33 + token) for token in expected[3:5])

    def rank(comm):
        generator = Generator(attnmesh_model("llama"), Letters(), comm, cache_tokens=60)
        how = {"max_new_tokens": MOST, "stop_strings": [word]}
        row = [token.id for token in generator.generate([PROMPTS[0]], speculative=True, **how)]
        request = generator.submit(PROMPTS[0], speculative=True, **how)
        return row, [token.id for token in generator.stream(request)], request.finish_reason

    assert on_virtual_ranks(2, rank) == [(expected[:5], expected[:5], "stop")] * 2


# What it says of itself.


def test_stats():
    def rank(comm):
        generator = Generator(attnmesh_model("llama"), None, comm, cache_tokens=300)
        generated_rows(generator, PROMPTS[1:2], max_new_tokens=MOST, stop=())
        generated_rows(generator, [[*PROMPTS[1], 9]], max_new_tokens=1)
        return generator.stats, comm.traffic.bytes

    # 39 tokens of the prompt, of which 4 blocks on 2 ranks are reused, and one more; the last token is never read.
    found, most = on_virtual_ranks(2, rank), 39 + MOST - 1
    assert sum(stats.cached_tokens for stats, _ in found) == most
    for stats, sent in found:
        token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, numbers, bytes
        assert (stats.prefill_tokens, stats.reused_tokens, stats.generated_tokens, stats.decode_steps) == (
            39 + 8,
            32,
            MOST + 1,
            MOST - 1,
        )
        assert (stats.kv_bytes, stats.kv_bytes_unsharded) == (stats.cached_tokens * token, most * token)
        assert 0 < stats.bytes_sent <= sent
        assert min(stats.prefill_seconds, stats.decode_seconds) > 0


def test_text_comes_along():
    class Tokenizer:
        def __call__(self, text):
            return {"input_ids": [ord(letter) for letter in text]}

        def decode(self, ids, skip_special_tokens):
            return "".join(chr(token) for token in ids if token != STOP or not skip_special_tokens)

    prompt = "Kn mod th sol"
    ids = [ord(letter) for letter in prompt]
    assert max(ids) >= VOCABULARY
    prompt = "".join(chr(32 + ord(letter) % 64) for letter in prompt)
    expected = greedy_tokens("llama", [ord(letter) for letter in prompt], MOST)

    def rank(comm):
        return list(generate(attnmesh_model("llama"), Tokenizer(), [prompt], comm, max_new_tokens=MOST))

    for tokens in on_virtual_ranks(2, rank):
        assert tokens == [Token(0, token, "" if token == STOP else chr(token)) for token in expected]


def test_the_call_gives_up_its_cache_and_takes_all_options():
    how = {
        "sharding": DecodeSharding(cp=2),
        "prefill_chunk": 9,
        "speculative": True,
        "stop": [3],
    }

    def rank(comm):
        rows = [[], []]
        for token in generate(attnmesh_model("llama"), None, PROMPTS[:2], comm, max_new_tokens=MOST, **how):
            rows[token.row].append(token.id)
        return rows

    expected = [greedy_tokens("llama", prompt, MOST) for prompt in PROMPTS[:2]]
    assert on_virtual_ranks(2, rank) == [expected] * 2
    assert [t.id for t in generate(attnmesh_model("llama"), None, PROMPTS[:1], max_new_tokens=MOST)] == expected[0]


# What is refused.


@pytest.mark.parametrize(
    ("prompts", "how", "message"),
    [
        ([], {}, r"prompts must have at least one prompt, got \[\]"),
        ([PROMPTS[0], []], {"max_new_tokens": 4}, r"prompts\[1\] is empty"),
        (
            [[8] * 503],
            {"max_new_tokens": 10},
            f"503 tokens, and max_new_tokens=10 may follow: the model has {POSITIONS}",
        ),
        ([[8, 8, 101]], {}, r"prompts\[0\] must have token ids 0 to 100, got 8 to 101"),
        ([[8, 8, -1]], {}, r"prompts\[0\] must have token ids 0 to 100, got -1 to 8"),
        (["text"], {}, r"prompts\[0\] must be token ids without a tokenizer, got text"),
        ([PROMPTS[0]], {"max_new_tokens": 0}, "max_new_tokens must be a positive integer, got 0"),
        ([PROMPTS[0]], {"max_new_tokens": True}, "max_new_tokens must be a positive integer, got True"),
        ([PROMPTS[0]], {"max_new_tokens": 2.0}, "max_new_tokens must be a positive integer, got 2.0"),
        (
            [PROMPTS[0]],
            {"speculative": True, "sampling": Sampling(0.5)},
            "sampling must be greedy",
        ),
        (
            [[8] * 98],
            {"max_new_tokens": 3},
            r"prompts\[0\] has 98 tokens, and max_new_tokens=3 may follow: the cache never holds more than .*=100",
        ),
    ],
)
def test_what_cannot_be_generated_is_refused_and_the_next_can(prompts, how, message):
    expected = greedy_tokens("llama", PROMPTS[0], 2)

    def rank(comm):
        generator = Generator(
            attnmesh_model("llama"), None, comm, cache_tokens=100, max_sequences=2, sharding=DecodeSharding(cp=3)
        )  # fmt: skip
        with pytest.raises(ValueError, match=message):
            generator.generate(prompts, **how)
        assert generator.engine.cache.sequences == {}
        return generated_rows(generator, PROMPTS[:1], max_new_tokens=2)

    assert on_virtual_ranks(3, rank) == [[expected]] * 3


@pytest.mark.parametrize("whole", [True, sweep(False)])
def test_a_prefix_is_found_in_its_group_when_the_batch_changes(whole):
    sharding, prompts = DecodeSharding(kvdp=2), [random_ids(17, seed) for seed in (1, 2)]
    longer = [[*prompt, 9] for prompt in prompts]

    def rank(comm):
        model = attnmesh_model("llama") if whole else am.models.shard_model(attnmesh_model("llama"), sharding, comm)
        generator = Generator(model, None, comm, cache_tokens=60, max_sequences=2, sharding=sharding)
        reused, rows = [], [generated_rows(generator, prompts, max_new_tokens=1)]
        for batch in (longer[:1], longer[1:], longer[::-1], [random_ids(51, 3), longer[0]]):
            before = generator.stats.reused_tokens
            rows.append(generated_rows(generator, batch, max_new_tokens=1))
            reused.append(generator.stats.reused_tokens - before)
        return rows, reused

    (rows, reused), (other, of_other) = on_virtual_ranks(2, rank)
    asked = (prompts, longer[:1], longer[1:], longer[::-1], [random_ids(51, 3), longer[0]])
    assert rows == other == [[greedy_tokens("llama", prompt, 1) for prompt in batch] for batch in asked]
    both = [a + b for a, b in zip(reused, of_other, strict=True)] if whole else reused
    assert both[:3] == [16, 16, 32]


@pytest.mark.parametrize(
    ("kind", "sharding", "whole"),
    [
        ("llama", am.DecodeSharding(cp=4), True),
        sweep("gpt_oss", am.DecodeSharding(kvdp=2, cp=3), True),
        sweep("mistral", am.DecodeSharding(tp=2, cp=3), False),
        sweep("deepseek_v3", am.DecodeSharding(cp=5), False),
    ],
)
def test_prompts_with_fewer_tokens_than_ranks(kind, sharding, whole):
    prompts = [random_ids(n, n) for n in (1, 2, 3, 5)]

    def rank(comm):
        model = attnmesh_model(kind) if whole else am.models.shard_model(attnmesh_model(kind), sharding, comm)
        generator = Generator(model, None, comm, cache_tokens=100, max_sequences=6, sharding=sharding)
        rows = [generated_rows(generator, prompts, max_new_tokens=MOST, speculative=each) for each in (True, False)]
        generator.reset_prefix_cache()
        requests = [generator.submit(prompt, max_new_tokens=MOST) for prompt in prompts]
        while generator.num_unfinished:
            generator.step()
        return *rows, [request.ids for request in requests]

    expected = [greedy_tokens(kind, prompt, MOST) for prompt in prompts]
    for of_rank in on_virtual_ranks(sharding.ranks, rank):
        assert all(rows == expected for rows in of_rank)


def test_ranks_that_have_less_than_two_tokens_each():
    """The default prefill_chunk is large enough for the ranks, however small the cache is."""
    prompt = PROMPTS[0][:9]

    def rank(comm):
        with pytest.raises(ValueError, match="prompts must have at least one prompt"):
            am.generate(attnmesh_model("llama"), None, [], comm)
        return [token.id for token in am.generate(attnmesh_model("llama"), None, [prompt], comm, max_new_tokens=1)]

    assert on_virtual_ranks(9, rank) == [greedy_tokens("llama", prompt, 1)] * 9


@pytest.mark.parametrize(
    ("mine", "how", "message"),
    [
        (
            PROMPTS[1],
            {},
            r"generate: ranks disagree: prompts is 1 of 21 tokens \w+ on rank 0 but 1 of 39 tokens \w+ on rank 1",
        ),
        (PROMPTS[0], {"max_new_tokens": 5}, "generate: ranks disagree: max_new_tokens is 4 on rank 0 but 5 on rank 1"),
        (PROMPTS[0], {"sampling": Sampling(1.0)}, "generate: ranks disagree: sampling is"),
        (PROMPTS[0], {"stop": [4]}, r"generate: ranks disagree: stop is \(7,\) on rank 0 but \(4,\) on rank 1"),
        (
            PROMPTS[0],
            {"speculative": True},
            "generate: ranks disagree: speculative is False on rank 0 but True on rank 1",
        ),
        ([], {}, r"generate: prompts\[0\] is empty \(on rank 1\)"),
    ],
)
def test_ranks_that_ask_different_things_are_all_told(mine, how, message):
    def rank(comm):
        generator = Generator(attnmesh_model("llama"), None, comm, cache_tokens=200)
        given = {"max_new_tokens": 4} | (how if comm.rank == 1 else {})
        with pytest.raises(ValueError, match=message):
            generator.generate([mine if comm.rank == 1 else PROMPTS[0]], **given)
        return generated_rows(generator, PROMPTS[:1], max_new_tokens=4)

    assert on_virtual_ranks(2, rank) == [[greedy_tokens("llama", PROMPTS[0], MOST)[:4]]] * 2


def test_what_no_group_has_room_for_all_are_told():
    def rank(comm):
        generator = Generator(
            attnmesh_model("llama"), None, comm, cache_tokens=80, max_sequences=2, sharding=DecodeSharding(kvdp=2)
        )  # fmt: skip
        with pytest.raises(ValueError, match=r"prompts\[1\] has 82 tokens, .* may follow: the cache never holds more"):
            generator.generate([PROMPTS[0], [8] * 82], max_new_tokens=8)
        return generated_rows(generator, PROMPTS[:2], max_new_tokens=8)

    expected = [greedy_tokens("llama", prompt, MOST)[:8] for prompt in PROMPTS[:2]]
    assert on_virtual_ranks(2, rank) == [expected] * 2


def test_a_model_that_does_not_ask_us_is_refused():
    with pytest.raises(ValueError, match="attn_implementation of the model must be 'attnmesh'"):
        Generator(transformers_model("llama"), None, cache_tokens=100)


# What breaks.


@pytest.mark.parametrize(("world", "sharding"), [(3, DecodeSharding(cp=3)), (4, DecodeSharding(kvdp=2, cp=2))])
def test_a_rank_that_is_lost_ends_the_others_wait(world, sharding, monkeypatch):
    step, steps, heard = Engine.decode, itertools.count(), {}

    def lost(self, *args):
        if self.comm.rank == 0 and next(steps) == 5:
            raise OSError("the device is gone")
        return step(self, *args)

    monkeypatch.setattr(Engine, "decode", lost)

    def rank(comm):
        generator = Generator(attnmesh_model("llama"), None, comm, cache_tokens=300, max_sequences=2, sharding=sharding)
        try:
            generated_rows(generator, PROMPTS[:2], max_new_tokens=MOST, stop=())
        except CommError as error:
            heard[comm.rank] = str(error)
            raise

    with pytest.raises(OSError, match="the device is gone"):
        am.run_virtual(world, rank, timeout=30)
    assert len(heard) == world - 1
    assert all("the device is gone" in said for said in heard.values())
