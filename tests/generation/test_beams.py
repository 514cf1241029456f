"""Beam search: the tokens of Transformers, whatever the ranks; beams share blocks, and leave none behind."""

from functools import cache

import pytest
import torch

import attnmesh as am
from attnmesh.generation.batching import Callbacks
from attnmesh.generation.generator import Generator
from attnmesh.generation.requests import BeamSearch
from helpers.cases import sweep
from helpers.models import (
    VOCABULARY,
    attnmesh_model,
    check_blocks,
    generated_rows,
    on_virtual_ranks,
    random_ids,
    transformers_model,
    use_small_blocks,
)

PROMPTS = [random_ids(n, seed) for n, seed in ((9, 1), (40, 2), (5, 3))]
ENDS = list(range(20, 32))  # many: answers of all lengths are found


@cache
def beam_tokens(kind, prompt, beams, most, ends):
    """The tokens of Transformers' beam search in one process."""
    ids = torch.tensor([prompt])
    # As eos_token_id=None in a call is that of the generation config, no token ends an answer by an unknown one.
    out = transformers_model(kind).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=beams, max_new_tokens=most,
        eos_token_id=list(ends) or VOCABULARY + 1, pad_token_id=VOCABULARY + 2,
    )  # fmt: skip
    return [token for token in out[0, len(prompt) :].tolist() if token != VOCABULARY + 2]


def expected(kind, beams, most, ends, prompts=PROMPTS):
    return [beam_tokens(kind, tuple(prompt), beams, most, tuple(ends)) for prompt in prompts]


@pytest.mark.parametrize(
    ("kind", "beams", "most", "ends"),
    [
        ("llama", 3, 8, ENDS),
        sweep("llama", 2, 12, []),
        sweep("gpt_oss", 4, 15, ENDS),
        sweep("mistral", 7, 9, ENDS[:2]),
        sweep("deepseek_v3", 3, 1, ENDS),
    ],
)
def test_the_answers_of_transformers(kind, beams, most, ends):
    wanted = expected(kind, beams, most, ends)
    generator = Generator(attnmesh_model(kind), cache_tokens=900, max_sequences=3 * beams)
    for _ in range(2):  # the second time, prompts are cached
        assert generated_rows(generator, PROMPTS, max_new_tokens=most, stop=ends, num_beams=beams) == wanted
    greedy = generated_rows(generator, PROMPTS, max_new_tokens=most, stop=ends)
    assert greedy == expected(kind, 1, most, ends)
    if most > 1:
        assert greedy != wanted


@pytest.mark.parametrize(
    ("kind", "sharding", "whole"),
    [
        sweep("llama", am.DecodeSharding(kvdp=2, cp=2), True),
        sweep("llama", am.DecodeSharding(tp=2, kvdp=1, cp=2), False),
        sweep("deepseek_v3", am.DecodeSharding(tp=1, kvdp=2, cp=2), False),
        sweep("gpt_oss", am.DecodeSharding(kvdp=3), True),
        sweep("qwen2", am.DecodeSharding(cp=3), True),
    ],
    ids=str,
)
def test_over_ranks(kind, sharding, whole, monkeypatch):
    use_small_blocks(monkeypatch)
    wanted = expected(kind, 3, 12, ENDS)

    def rank(comm):
        model = attnmesh_model(kind) if whole else am.models.shard_model(attnmesh_model(kind), sharding, comm)
        generator = Generator(
            model, None, comm, cache_tokens=300, max_sequences=12, sharding=sharding, prefill_chunk=16
        )
        rows = [generated_rows(generator, PROMPTS, max_new_tokens=12, stop=ENDS, num_beams=3) for _ in range(2)]
        return rows, generator.stats.reused_tokens

    for rows, reused in on_virtual_ranks(sharding.ranks, rank):
        assert rows == [wanted, wanted]
        assert reused > 0


@pytest.mark.parametrize(("world", "prompts"), [(2, 1), (3, 2), (4, 3)])
def test_groups_are_chosen_for_prompts_and_not_for_beams(world, prompts):
    """The beams of a prompt are in one group: groups that were chosen for as many sequences would have no room."""

    def rank(comm):
        tokens = list(
            am.generate(
                attnmesh_model("llama"), None, PROMPTS[:prompts], comm, max_new_tokens=8, stop=ENDS, num_beams=3
            )
        )
        generator = Generator(
            attnmesh_model("llama"), None, comm, cache_tokens=200, max_sequences=world, sharding=apart
        )
        with pytest.raises(
            ValueError, match=f"num_beams must be at most 1, as max_sequences={world} has 1 in each of kvdp={world} "
        ):
            generator.generate(PROMPTS[:1], max_new_tokens=8, num_beams=2)
        return [[token.id for token in tokens if token.row == row] for row in range(prompts)]

    apart = am.DecodeSharding(kvdp=world)
    assert on_virtual_ranks(world, rank) == [expected("llama", 3, 8, ENDS)[:prompts]] * world


def test_beams_share_the_prompt_and_leave_no_blocks_behind():
    most, beams, prompt = 36, 4, random_ids(100, 5)
    generator = Generator(attnmesh_model("llama"), cache_tokens=100 + 4 * 44, max_sequences=4)
    engine, used = generator.engine, []
    decode = engine.decode

    def counting(sequences, *new):
        used.append((len(sequences), engine.cache.local.stats().used))
        return decode(sequences, *new)

    engine.decode = counting
    for _ in range(2):
        rows = generated_rows(generator, [prompt], max_new_tokens=most, stop=[], num_beams=beams)
        assert rows == expected("llama", beams, most, [], [prompt])
    assert max(number for number, _ in used) == beams
    assert max(blocks for _, blocks in used) <= 3 + beams * 3  # full blocks of the prompt, and of each beam its own
    assert engine.cache.local.stats().used == 0
    assert am.generate(attnmesh_model("llama"), None, [prompt], max_new_tokens=5, stop=[], num_beams=2)


# (prompt, beams, max_new_tokens, stop)
REQUESTS = [
    (random_ids(55, 9), 1, 27, []),
    (PROMPTS[2], 3, 25, []),
    (PROMPTS[1], 3, 14, ENDS),
    (PROMPTS[0], 2, 14, ENDS),
]


def submitted(comm=None, sharding=None, shard_weights=False):
    """Searches and a plain request that are submitted at different steps, with too little room for all of them."""
    model = attnmesh_model("llama")
    model = am.models.shard_model(model, sharding, comm) if shard_weights else model
    groups = 1 if sharding is None else sharding.kvdp
    generator = Generator(
        model, None, comm, cache_tokens=82, max_sequences=4 * groups, step_tokens=16, sharding=sharding
    )
    requests, gone, steps = [], None, 0
    while len(requests) < len(REQUESTS) or generator.num_unfinished:
        if steps % 2 == 0 and len(requests) < len(REQUESTS):
            prompt, beams, most, ends = REQUESTS[len(requests)]
            requests.append(generator.submit(prompt, max_new_tokens=most, stop=ends, num_beams=beams))
        if steps == 3:
            gone = generator.submit(random_ids(6, 4), max_new_tokens=20, stop=[], num_beams=2)
        if steps == 12:
            generator.cancel(gone)
        tokens = generator.step()
        check_blocks(generator)
        for request in requests[1:]:  # all tokens in one step
            assert not request.tokens or request.finished
            assert [token for token in tokens if token.row == request.number] in ([], request.tokens)
        steps += 1
    assert gone.finish_reason == "cancelled"
    assert all(request.search is None for request in requests)
    for request in requests:
        assert request.finish_reason == ("stop" if request.ids[-1] in request.options.stop else "length")
    return [request.ids for request in requests], generator.stats.preemptions


@pytest.mark.parametrize(
    ("sharding", "shard_weights"),
    [
        (am.DecodeSharding(), False),
        sweep(am.DecodeSharding(kvdp=2, cp=2), False),
        sweep(am.DecodeSharding(tp=2, kvdp=1, cp=2), True),
        sweep(am.DecodeSharding(kvdp=2), True),
        sweep(am.DecodeSharding(cp=3), False),
    ],
    ids=str,
)
def test_submitted_searches(sharding, shard_weights, monkeypatch):
    """They join and leave at any step and are preempted, beside others: the answers are those of Transformers."""
    use_small_blocks(monkeypatch, 2)  # without room for all requests at once
    wanted = [expected("llama", beams, most, ends, [prompt])[0] for prompt, beams, most, ends in REQUESTS]
    for ids, preemptions in on_virtual_ranks(sharding.ranks, lambda comm: submitted(comm, sharding, shard_weights)):
        assert ids == wanted
        assert preemptions > 0 or sharding.ranks > 1


def best_of_all(log_probs, beams, most, ends):
    """Beam search over fixed log-probabilities per last token, written as one loop over whole answers."""
    running, finished = [(0.0, (0,))], []
    while True:
        length = len(running[0][1])
        every = sorted(
            (
                (score + of_token, (*ids, token))
                for score, ids in running for token, of_token in enumerate(log_probs[ids[-1]])
            ),
            reverse=True,
        )  # fmt: skip
        ending = [ids[-1] in ends or length == most for _, ids in every]
        finished += [(score / length, ids) for (score, ids), end in zip(every[:beams], ending, strict=False) if end]
        finished = sorted(finished, reverse=True)[:beams]
        running = [each for each, end in zip(every, ending, strict=True) if not end][:beams]
        if not running or (len(finished) == beams and running[0][0] / length <= finished[-1][0]):
            return list(finished[0][1][1:])


@pytest.mark.parametrize(("beams", "seed"), [(1, 0), (2, 1), (5, 2), (2, 3), (1, 4)])
def test_the_search_alone(beams, seed):
    """Over a vocabulary that is so small that all continuations are candidates."""
    table = torch.log_softmax(3 * torch.randn(6, 6, generator=torch.Generator().manual_seed(seed)).double(), -1)
    search, last, most, ends = BeamSearch(beams, 6, frozenset({1, 4})), [0] * beams, 6, {1, 4}
    while not search.is_finished:
        found = search.candidates(search.best(table[last]).flatten().tolist())
        last = [each.token for each in search.step(found)]
    assert search.answer == best_of_all(table.tolist(), beams, most, ends)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 0}, "num_beams must be an integer >= 1, got 0"),
        ({"num_beams": True}, "num_beams must be an integer >= 1, got True"),
        ({"num_beams": 5}, "num_beams must be at most 4, as max_sequences=4 has 4, got 5"),
        ({"num_beams": 2, "speculative": True}, "num_beams must be 1 with a sampling .* or speculative, got 2"),
        ({"num_beams": 2, "sampling": am.Sampling(1.0)}, "num_beams must be 1 with a sampling .* got 2"),
        ({"num_beams": 4, "max_new_tokens": 60}, "max_new_tokens=60 may follow in each of num_beams=4: .*=150"),
    ],
)
def test_what_is_refused(options, message):
    generator = Generator(attnmesh_model("llama"), cache_tokens=150, max_sequences=4)
    with pytest.raises(ValueError, match=message):
        generator.generate(PROMPTS[:1], **{"max_new_tokens": 5, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 0}, "num_beams must be an integer >= 1, got 0"),
        ({"num_beams": 5}, "num_beams must be at most 4, as max_sequences=4 has 4, got 5"),
        ({"num_beams": 4, "max_new_tokens": 36}, "max_new_tokens=36 may follow in each of num_beams=4: .*=150"),
        *(
            ({"num_beams": 2, **other}, "num_beams must be 1 with a sampling .*, min_new_tokens, logprobs, .* got 2")
            for other in (
                {"sampling": am.Sampling(1.0)}, {"sampling": am.Sampling(presence_penalty=1.0)}, {"logprobs": 0},
                {"min_new_tokens": 1}, {"logits_processors": [lambda ids, scores: scores]},
            )
        ),
    ],
)  # fmt: skip
def test_what_submit_refuses(options, message):
    generator = Generator(attnmesh_model("llama"), cache_tokens=150, max_sequences=4)
    with pytest.raises(ValueError, match=message):
        generator.submit(PROMPTS[0], **{"max_new_tokens": 5, **options})
    assert generator.num_unfinished == 0


def test_callbacks_and_invalid_logits():
    generator = Generator(
        attnmesh_model("llama"), cache_tokens=150, max_sequences=4, callbacks=Callbacks(on_logits=lambda *_: None)
    )
    for call in (generator.generate, lambda prompts, **how: generator.submit(prompts[0], **how)):
        with pytest.raises(ValueError, match="num_beams must be 1 for a Generator with on_logits, got 2"):
            call(PROMPTS[:1], max_new_tokens=5, num_beams=2)

    def rank(comm):
        model = am.models.shard_model(attnmesh_model("llama"), am.DecodeSharding(kvdp=2), comm)
        generator = Generator(model, None, comm, cache_tokens=150, max_sequences=8)
        model.model.norm.weight.data.neg_().log_()  # NaN
        with pytest.raises(ValueError, match="row 0: the logits have a NaN"):
            list(generator.generate(PROMPTS[::2], max_new_tokens=4, num_beams=3))
        bad = generator.submit(PROMPTS[0], max_new_tokens=4, num_beams=3)
        generator.step()
        assert (bad.finish_reason, bad.ids, str(bad.error)[:36]) == (
            "error",
            [],
            "request 2: the logits have a NaN or ",
        )
        model.model.norm.weight.data.copy_(attnmesh_model("llama").model.norm.weight)
        good = generator.submit(PROMPTS[0], max_new_tokens=4, stop=[], num_beams=3)
        assert [token.id for token in generator.stream(good)] == expected("llama", 3, 4, [], PROMPTS[:1])[0]
        return generated_rows(generator, PROMPTS[::2], max_new_tokens=4, stop=[], num_beams=3)

    assert on_virtual_ranks(2, rank) == [expected("llama", 3, 4, [], PROMPTS[::2])] * 2
