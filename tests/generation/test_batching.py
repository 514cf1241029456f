"""Continuous batching: every answer is that of the request alone, whatever runs beside it and on however many ranks."""

import copy
import math
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnmesh as am
from attnmesh.generation.generator import Generator
from attnmesh.generation.models import BLOCK_SIZE
from attnmesh.generation.requests import StopStrings
from attnmesh.generation.sampling import InvalidLogits, Sampling
from attnmesh.plan.decode import DecodeSharding
from helpers.cases import sweep
from helpers.models import (
    STOP,
    VOCABULARY,
    OneLayer,
    attnmesh_model,
    check_blocks,
    generated_rows,
    greedy_tokens,
    logits_of,
    on_virtual_ranks,
    random_ids,
    transformers_model,
    use_small_blocks,
)
from helpers.processes import run_processes

DOCUMENT = random_ids(40, 1, high=30)
SAMPLED = Sampling(0.8, 0.95, seed=5, top_k=20, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.3)
# (step of submission, prompt, max_new_tokens, sampling): some begin alike.
REQUESTS = [
    (0, DOCUMENT, 30, Sampling()),
    (0, [*DOCUMENT[:33], 9, 9], 12, SAMPLED),
    (1, random_ids(9, 2), 40, Sampling()),
    (3, [*DOCUMENT, 10], 25, Sampling(1.0, seed=3)),
    (3, random_ids(5, 4), 1, Sampling()),
    (20, DOCUMENT, 8, Sampling()),
]


def make(comm=None, sharding=None, model=None, *, shard_weights=False, **how):
    how = {"cache_tokens": 72, "max_sequences": 4, "step_tokens": 16, **how}
    model = attnmesh_model("llama") if model is None else model
    if shard_weights:
        model = am.models.shard_model(model, sharding, comm)
    return Generator(model, None, comm, sharding=sharding, **how)


def answers(comm=None, sharding=None, shard_weights=False):
    """Submit requests at different steps, and cancel one that is not in the list."""
    generator = make(comm, sharding, shard_weights=shard_weights)
    handles, steps, cancelled, events = [], 0, None, []
    while len(handles) < len(REQUESTS) or generator.num_unfinished:
        for at, prompt, most, sampling in REQUESTS[len(handles) :]:
            if at <= steps:
                handles.append(generator.submit(prompt, max_new_tokens=most, sampling=sampling))
        if steps == 4:
            cancelled = generator.submit(random_ids(20, 7), max_new_tokens=40)
        if steps == 12:
            generator.cancel(cancelled)
        events += generator.step()
        check_blocks(generator)
        steps += 1
    by_request = [[token for token in events if token.row == handle.number] for handle in handles]
    assert by_request == [handle.tokens for handle in handles]
    assert cancelled.finish_reason == "cancelled"
    assert all(handle.finish_reason in ("stop", "length") for handle in handles)
    return [handle.ids for handle in handles], generator.stats


def alone(prompt, most, sampling):
    if sampling.greedy:
        return greedy_tokens("llama", prompt, most)
    return generated_rows(make(cache_tokens=200), [prompt], max_new_tokens=most, sampling=sampling)[0]


@pytest.fixture(scope="module")
def expected():
    return [alone(*request) for _, *request in REQUESTS]


@pytest.mark.parametrize(
    ("world", "sharding"),
    [
        (1, DecodeSharding()),
        sweep(2, DecodeSharding(cp=2)),
        sweep(2, DecodeSharding(kvdp=2)),
        sweep(4, DecodeSharding(kvdp=2, cp=2)),
        sweep(4, DecodeSharding(cp=4)),
        sweep(4, DecodeSharding(kvdp=4)),
        sweep(3, DecodeSharding(cp=3)),
    ],
)
def test_every_answer_is_that_of_the_request_alone(world, sharding, expected, monkeypatch):
    use_small_blocks(monkeypatch, max(1, 2 // sharding.cp))  # without room for all requests at once
    found = on_virtual_ranks(world, lambda comm: answers(comm, sharding))
    assert all(ids == expected for ids, _ in found)
    assert all(stats.reused_tokens for _, stats in found) or sharding.kvdp > 1
    assert found[0][1].preemptions > 0 or sharding.kvdp > 1 or world > 2  # more ranks have more room


@pytest.mark.parametrize(
    "sharding",
    [
        DecodeSharding(tp=2),
        sweep(DecodeSharding(kvdp=2)),
        sweep(DecodeSharding(cp=2)),
        sweep(DecodeSharding(kvdp=3)),
        sweep(DecodeSharding(tp=4)),
        sweep(DecodeSharding(tp=2, kvdp=2)),
        sweep(DecodeSharding(kvdp=2, cp=2)),
        sweep(DecodeSharding(tp=2, cp=3)),
    ],
    ids=str,
)
def test_every_answer_with_sharded_weights(sharding, expected, monkeypatch):
    """Requests that join, leave, are preempted and share prefixes, where all ranks compute all of them together."""
    use_small_blocks(monkeypatch, max(1, 2 // sharding.cp))
    found = on_virtual_ranks(sharding.ranks, lambda comm: answers(comm, sharding, shard_weights=True))
    assert all(ids == expected for ids, _ in found)
    assert all(stats.reused_tokens for _, stats in found)
    assert len({stats.preemptions for _, stats in found}) == 1
    assert found[0][1].preemptions > 0 or sharding.kvdp * sharding.cp > 1


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("sharding", "shard_weights"), [(DecodeSharding(cp=2), False), (DecodeSharding(kvdp=2), True)], ids=str
)
def test_every_answer_over_processes(sharding, shard_weights, expected):
    assert [ids for ids, _ in run_processes(2, answers, sharding, shard_weights)] == [expected] * 2


def test_streams_of_several_requests_may_be_read_in_any_order(expected):
    generator = make(cache_tokens=200)
    handles = [generator.submit(p, max_new_tokens=n, sampling=s) for _, p, n, s in REQUESTS[:4]]
    first = generator.stream(handles[0])
    assert next(first).id == expected[0][0]
    assert [token.id for token in generator.stream(handles[2])] == expected[2]
    assert [expected[0][0], *(token.id for token in first)] == expected[0]
    assert [token.id for token in generator.stream(handles[0])] == expected[0]  # a finished one, again
    assert [token.id for token in generator.stream(handles[3])] == expected[3]
    while generator.num_unfinished:
        generator.step()
    assert generator.step() == []
    assert handles[1].ids == expected[1]


def test_long_prompts_do_not_delay_answers():
    generator = make(cache_tokens=400, step_tokens=16)
    answer = generator.submit(random_ids(6, 1), max_new_tokens=20, stop=())
    generator.step()
    long = generator.submit(random_ids(120, 2), max_new_tokens=4, stop=())
    for n in range(2, 9):
        assert [token.row for token in generator.step()] == [answer.number]
        assert len(answer.tokens) == n
    assert [token.row for token in generator.step()] == [answer.number, long.number]  # 15 tokens a step


def test_requests_share_the_blocks_of_a_common_prefix():
    generator = make(cache_tokens=4 * BLOCK_SIZE, max_sequences=4, step_tokens=600)
    prompt = random_ids(3 * BLOCK_SIZE, 3)
    handles = [generator.submit([*prompt, n], max_new_tokens=6, stop=()) for n in (8, 9, 10)]
    generator.step()
    assert [len(handle.sequences) for handle in handles] == [1, 0, 0]  # the others wait for its prompt
    generator.step()
    assert generator.engine.cache.local.stats().used == 3 + len(handles)
    while generator.num_unfinished:
        generator.step()
    assert generator.stats.preemptions == 0
    assert generator.stats.reused_tokens == 2 * len(prompt)
    assert [handle.ids for handle in handles] == [
        generated_rows(make(cache_tokens=300), [handle.prompt], max_new_tokens=6, stop=())[0] for handle in handles
    ]


def test_an_answer_is_reused_by_the_next_question():
    generator = make(cache_tokens=200)
    handle = generator.submit(DOCUMENT, max_new_tokens=BLOCK_SIZE, stop=())
    list(generator.stream(handle))
    again = generator.submit([*DOCUMENT, *handle.ids, 9, 9], max_new_tokens=3)
    list(generator.stream(again))
    assert len(DOCUMENT) < 2 * BLOCK_SIZE == generator.stats.reused_tokens  # full blocks


def test_a_short_common_prefix_does_not_cost_a_long_one():
    """Such as that of a chat template, which all conversations begin with."""
    generator = make(cache_tokens=6 * BLOCK_SIZE, max_sequences=3, step_tokens=400)
    long, short = random_ids(3 * BLOCK_SIZE + 5, 3), BLOCK_SIZE + 6

    def reused(prompt):
        before = generator.stats.reused_tokens
        list(generator.stream(generator.submit(prompt, max_new_tokens=2, stop=())))
        check_blocks(generator)
        return generator.stats.reused_tokens - before

    assert reused(long) == 0
    assert [reused([*long[:short], n, n]) for n in (9, 10, 11)] == [BLOCK_SIZE] * 3
    assert reused([*long, 9]) == reused([*long, 10]) == 3 * BLOCK_SIZE


# Options.


def test_log_probabilities_are_those_of_the_model():
    generator = make(cache_tokens=200)
    handle = generator.submit(DOCUMENT, max_new_tokens=5, logprobs=3, sampling=Sampling(2.0, seed=1))
    greedy = generator.submit(DOCUMENT, max_new_tokens=5, logprobs=0)
    tokens = list(generator.stream(handle))
    scores = logits_of("llama", [*DOCUMENT, *handle.ids])[len(DOCUMENT) - 1 : -1].double().log_softmax(-1)
    for token, row in zip(tokens, scores, strict=True):
        assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-4)
        assert [id for id, _ in token.top_logprobs] == row.topk(3).indices.tolist()
        assert [x for _, x in token.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    assert all(token.top_logprobs == () and token.logprob < 0 for token in generator.stream(greedy))


def test_groups_send_as_many_log_probabilities_as_each_request_asked_for():
    def answers(comm=None):
        generator = make(comm, None if comm is None else DecodeSharding(kvdp=2), cache_tokens=200)
        requests = [
            generator.submit(DOCUMENT[n:], max_new_tokens=3, stop=(), logprobs=most)
            for n, most in enumerate((2, None, 0, 3))
        ]
        while generator.num_unfinished:
            generator.step()
        return [[(token.id, *token.top_logprobs) for token in each.tokens] for each in requests]

    expected = answers()
    for found in am.run_virtual(2, answers):
        for row, right in zip(found, expected, strict=True):
            for (id, *top), (right_id, *right_top) in zip(row, right, strict=True):
                assert (id, [name for name, _ in top]) == (right_id, [name for name, _ in right_top])
                assert [x for _, x in top] == pytest.approx([x for _, x in right_top], abs=1e-4)


def test_the_fewest_new_tokens_come_before_any_stop():
    free = greedy_tokens("llama", DOCUMENT, 6)
    generator = make(cache_tokens=200)
    handle = generator.submit(DOCUMENT, max_new_tokens=6, stop=free[:1], min_new_tokens=3)
    list(generator.stream(handle))
    assert free[0] not in handle.ids[:3]
    assert len(handle.ids) >= 3
    stopped = generator.submit(DOCUMENT, max_new_tokens=6, stop=free[:1])
    list(generator.stream(stopped))
    assert stopped.ids == free[:1]
    assert stopped.finish_reason == "stop"


def test_logits_processors_of_transformers_change_the_logits_before_a_token_is_chosen():
    from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, SequenceBiasLogitsProcessor

    free = greedy_tokens("llama", DOCUMENT, 8)
    processors = [NoRepeatNGramLogitsProcessor(1), SequenceBiasLogitsProcessor([[[free[1]], -1e9]])]
    ids = torch.tensor([DOCUMENT])
    out = transformers_model("llama").generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8,
        logits_processor=LogitsProcessorList(processors),
    )  # fmt: skip
    wanted = out[0, len(DOCUMENT) :].tolist()

    def rank(comm):
        generator = make(comm, cache_tokens=200)
        changed = generator.submit(DOCUMENT, max_new_tokens=8, logits_processors=processors, logprobs=0)
        plain = generator.submit(DOCUMENT, max_new_tokens=8)
        while generator.num_unfinished:
            generator.step()
        return changed.ids, plain.ids, changed.tokens[0].logprob

    for changed, plain, logprob in on_virtual_ranks(2, rank):
        assert (changed, plain) == (wanted, free)
        of_model = logits_of("llama", DOCUMENT)[-1].double().log_softmax(-1)
        assert logprob == pytest.approx(float(of_model[wanted[0]]), abs=1e-4)


@pytest.mark.parametrize("sharding", [DecodeSharding(cp=2), sweep(DecodeSharding(kvdp=2))])
def test_a_logits_processor_that_fails_ends_its_request_only(sharding, expected):
    def of_first_rank(ids, scores, rank):
        if ids.shape[1] == len(DOCUMENT) + 2:
            raise ArithmeticError("no more")
        return scores if rank == 0 else scores[0]  # of another shape

    def rank(comm):
        generator, rank = make(comm, sharding, cache_tokens=200), comm.rank % sharding.cp
        bad = generator.submit(DOCUMENT, logits_processors=[lambda *x: of_first_rank(*x, rank)])
        good = generator.submit(DOCUMENT, max_new_tokens=30)
        while generator.num_unfinished:
            generator.step()
        check_blocks(generator)
        assert good.ids == expected[0]
        assert bad.finish_reason == "error"
        return str(bad.error), len(bad.ids)

    first, second = on_virtual_ranks(2, rank)
    if sharding.kvdp == 2:  # the other group does not call it
        assert first == ("no more", 2)
        assert second == ("request 0: a logits processor raised an exception on another rank", 2)
    else:
        assert first == ("request 0: a logits processor raised an exception on another rank", 0)
        assert "logits_processors[0] must return logits, floating point [1, 101], got" in second[0]


def test_parallel_samples_share_the_prompt_and_differ_in_their_random_numbers():
    """Also where a prompt takes many chunks: the others wait for it."""
    prompt = random_ids(3 * BLOCK_SIZE + 5, 3)
    generator = make(cache_tokens=5 * BLOCK_SIZE, step_tokens=64, prefill_chunk=16)
    how = {"max_new_tokens": 6, "stop": (), "sampling": Sampling(1.0, seed=5)}
    samples = [generator.submit(prompt, sample=i, **how) for i in range(4)]
    assert generator.num_waiting == 4
    generator.step()
    assert generator.num_waiting == 3
    while generator.num_unfinished:
        generator.step()
    assert generator.stats.prefill_tokens == len(prompt) + 3 * 5  # what follows the last full block, once for each
    assert generator.stats.preemptions == 0
    assert len({tuple(each.ids) for each in samples}) == 4
    rows = generated_rows(make(cache_tokens=600), [prompt] * 4, **how)
    assert [each.ids for each in samples] == rows


@pytest.mark.parametrize("sharding", [DecodeSharding(cp=2), sweep(DecodeSharding(kvdp=2))])
def test_a_reset_forgets_what_is_finished_and_nothing_else(sharding, expected):
    def rank(comm):
        generator = make(comm, sharding, cache_tokens=200)
        long = generator.submit(DOCUMENT, max_new_tokens=30)
        list(generator.stream(generator.submit([9, *DOCUMENT], max_new_tokens=3, stop=())))
        generator.reset_prefix_cache()
        check_blocks(generator)
        assert len(generator.engine.cache.sequences) == 1
        before = generator.stats.reused_tokens
        again = generator.submit([9, *DOCUMENT], max_new_tokens=3, stop=())
        while generator.num_unfinished:
            generator.step()
        assert long.ids == expected[0]
        assert len(again.ids) == 3
        assert generator.stats.reused_tokens == before
        assert len(list(generator.generate([DOCUMENT], max_new_tokens=3, stop=()))) == 3
        generator.reset_prefix_cache()
        assert all(stats.free == stats.total for stats in generator.engine.cache.stats())
        tokens = generator.generate([DOCUMENT], max_new_tokens=3, stop=())
        next(tokens)
        generator.reset_prefix_cache()
        return 1 + len(list(tokens))

    assert on_virtual_ranks(2, rank) == [3, 3]


class Letters:
    """A tokenizer whose tokens are letters."""

    def __call__(self, text):
        return {"input_ids": [ord(letter) - ord("a") + 8 for letter in text]}

    def decode(self, ids, **_):
        return "".join(chr(ord("a") + (token - 8) % 26) for token in ids)


def test_stop_strings_end_an_answer_and_are_not_part_of_its_text():
    generator = make(cache_tokens=200)
    generator.tokenizer = Letters()
    free = generator.submit("hello", max_new_tokens=12, stop=())
    text = "".join(token.text for token in generator.stream(free))
    assert len(text) == 12
    end = text[5:8]
    assert text.find(end) == 5
    handle = generator.submit("hello", max_new_tokens=12, stop=(), stop_strings=["?", end, text[6:]])
    pieces = [token.text for token in generator.stream(handle)]
    assert ("".join(pieces), handle.text, handle.finish_reason) == (text[:5], text[:5], "stop")
    assert len(handle.tokens) == 8
    assert pieces[5:] == ["", "", ""]  # held back, not returned and taken back
    cut = generator.submit("hello", max_new_tokens=6, stop=(), stop_strings=[end])
    list(generator.stream(cut))
    assert (cut.text, cut.finish_reason) == (text[:6], "length")  # what was held back is returned at the end
    late = generator.submit("hello", max_new_tokens=12, stop=(), stop_strings=[end], min_new_tokens=9)
    list(generator.stream(late))
    assert late.text.startswith(text[:9])


@settings(max_examples=40)
@given(
    st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(st.integers(1, 5))
)
def test_stop_strings_are_found_however_the_text_is_divided(text, strings, sizes):
    stop, returned, found, at = StopStrings(strings), "", False, 0
    while at < len(text) and not found:
        size = sizes.pop() if sizes else 1
        piece, found = stop.add(text[at : at + size])
        returned, at = returned + piece, at + size
    places = [place for string in strings if (place := text[:at].find(string)) >= 0]
    assert found == bool(places)
    if found:
        assert returned == text[: min(places)]
    else:
        assert returned + stop.held == text
        assert not stop.held or any(string.startswith(stop.held) for string in strings)


# Errors.


def test_a_step_has_room_for_answers_and_a_prompt():
    with pytest.raises(ValueError, match=r"step_tokens must be at least 6, one for each of 4 sequences .*, got 5"):
        make(step_tokens=5)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"prompt": random_ids(60, 1)}, "prompt has 60 tokens, and max_new_tokens=20 .* more than cache_tokens=72"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1, VOCABULARY]}, f"prompt must have token ids 0 to {VOCABULARY - 1}"),
        ({"prompt": "text"}, "prompt must be token ids without a tokenizer, got text, 'text'"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a positive integer, got 0"),
        ({"min_new_tokens": 21}, "min_new_tokens must be at most 20, got 21"),
        ({"logprobs": VOCABULARY + 1}, f"logprobs must be at most {VOCABULARY}, got"),
        ({"sampling": 0.5}, "sampling must be .*Sampling, got 0.5"),
        ({"stop_strings": ["."]}, "stop_strings must be empty without a tokenizer"),
        ({"stop": ["a"]}, "stop must be 64-bit integers"),
        ({"logits_processors": [min, 3]}, r"logits_processors\[1\] must be a function, got 3"),
        ({"sample": -1}, "sample must be"),
    ],
)
def test_what_cannot_be_served_is_refused_and_others_go_on(how, message):
    generator = make()
    handle = generator.submit(DOCUMENT[:9], max_new_tokens=3, stop=())
    generator.step()
    with pytest.raises(ValueError, match=message):
        generator.submit(**{"prompt": DOCUMENT, "max_new_tokens": 20, **how})
    assert [token.id for token in generator.stream(handle)] == handle.ids
    assert len(handle.ids) == 3


def test_handles_that_are_unknown_or_finished():
    generator, other = make(), make()
    handle, foreign = generator.submit([8, 9], max_new_tokens=1), other.submit([8, 9], max_new_tokens=1)
    for unknown in (foreign, 0, None):
        for operation in (generator.cancel, generator.stream):
            with pytest.raises(ValueError, match=r"request must be one that submit\(\) of this Generator returned"):
                operation(unknown)
    generator.step()
    with pytest.raises(ValueError, match=r"request must be in progress, got Request\(0: 2 \+ 1 tokens, length\)"):
        generator.cancel(handle)
    waiting = [generator.submit([8, n], max_new_tokens=4) for n in range(10, 16)]
    generator.cancel(waiting[-1])  # before it was admitted
    with pytest.raises(ValueError, match=r"got Request\(6: 2 \+ 0 tokens, cancelled\)"):
        generator.cancel(waiting[-1])
    assert list(generator.stream(waiting[-1])) == []


def test_generate_and_submit_run_beside_each_other(expected):
    generator = make(cache_tokens=200)
    handle = generator.submit(DOCUMENT, max_new_tokens=30)
    generator.step()
    tokens = generator.generate([DOCUMENT, DOCUMENT[:9]], max_new_tokens=30)
    first = next(tokens)
    assert (first.row, first.id) == (0, expected[0][0])
    other = generator.submit([*DOCUMENT, 10], max_new_tokens=25, sampling=Sampling(1.0, seed=3))
    assert {token.row for _ in range(3) for token in generator.step()} == {handle.number, other.number}  # no rows
    assert [token.id for token in generator.stream(other)] == expected[3]
    assert [token.id for token in (first, *tokens) if token.row == 0] == expected[0]
    assert [token.id for token in generator.stream(handle)] == expected[0]
    assert generator.num_unfinished == 0


@pytest.mark.parametrize("world", [1, 2])
def test_invalid_logits_end_their_request_only(world, expected):
    model = copy.deepcopy(attnmesh_model("llama"))
    with torch.no_grad():
        model.get_input_embeddings().weight[VOCABULARY - 1] = math.nan  # no other prompt or answer has it

    def rank(comm):
        generator = make(comm, DecodeSharding(cp=world), model, cache_tokens=200)
        good, bad = generator.submit(DOCUMENT, max_new_tokens=30), generator.submit([9, 9, VOCABULARY - 1])
        while generator.num_unfinished:
            generator.step()
        assert good.ids == expected[0]
        assert (bad.finish_reason, bad.ids) == ("error", [])
        with pytest.raises(InvalidLogits, match=r"request 1: the logits have a NaN .* after 0 tokens"):
            list(generator.stream(bad))
        check_blocks(generator)

    on_virtual_ranks(world, rank)


def test_ranks_that_differ_raise_on_all():
    def rank(comm):
        generator = make(comm)
        handles = [generator.submit(DOCUMENT[:n], max_new_tokens=3, stop=()) for n in (8, 9)]
        with pytest.raises(ValueError, match="submit: ranks disagree: prompt is"):
            generator.submit(DOCUMENT[: 9 + comm.rank], max_new_tokens=3)
        with pytest.raises(ValueError, match="cancel: ranks disagree: request is 0 on rank 0 but 1 on rank 1"):
            generator.cancel(handles[comm.rank])
        with pytest.raises(ValueError, match=r"max_new_tokens must be a positive integer, got 0 .on rank 1"):
            generator.submit(DOCUMENT, max_new_tokens=1 - comm.rank)
        while generator.num_unfinished:
            generator.step()
        return [handle.ids for handle in handles]

    expected = [generated_rows(make(cache_tokens=200), [DOCUMENT[:n]], max_new_tokens=3, stop=())[0] for n in (8, 9)]
    assert on_virtual_ranks(2, rank) == [expected] * 2


def test_a_rank_that_makes_another_number_of_steps_is_reported():
    def rank(comm):
        generator = make(comm, DecodeSharding(cp=2))
        generator.submit(DOCUMENT, max_new_tokens=9, stop=())
        generator.step()
        if comm.rank:
            generator.submit(DOCUMENT, max_new_tokens=9)
        else:
            generator.step()

    with pytest.raises((am.comm.CommError, ValueError)):
        am.run_virtual(2, rank, timeout=5)


# Interruption.


def test_after_an_interruption_every_answer_is_still_right():
    model, prompts = OneLayer(), [random_ids(n, n, high=30) for n in (13, 30, 5)]
    samplings = [Sampling(), Sampling(1.0, seed=4), Sampling(0.7, 0.9, seed=1)]

    def finish(fail_at=None):
        """Raise in pass number `fail_at`, and go on."""
        passes = iter(range(10**6))

        def hook(*_):
            if next(passes) == fail_at:
                raise KeyboardInterrupt

        generator = Generator(model, None, cache_tokens=100, max_sequences=2, step_tokens=12)
        handles = [
            generator.submit(p, max_new_tokens=7, sampling=s, stop=[STOP])
            for p, s in zip(prompts, samplings, strict=True)
        ]
        interrupted = False
        with model.embedding.register_forward_hook(hook):
            while generator.num_unfinished:
                try:
                    generator.step()
                except KeyboardInterrupt:
                    interrupted = True
        return [handle.ids for handle in handles], interrupted

    expected, _ = finish()
    results = [finish(at) for at in (0, 3, 7, 12)]
    assert all(ids == expected for ids, _ in results)
    assert all(interrupted for _, interrupted in results)


def test_logits_that_a_callback_keeps_are_those_of_one_request():
    kept = []
    generator = make(callbacks=am.generation.Callbacks(on_logits=lambda number, logits: kept.append((number, logits))))
    requests = [generator.submit(random_ids(n, n), max_new_tokens=3, stop=[]) for n in (5, 9)]
    while generator.num_unfinished:
        generator.step()
    assert len(kept) == 6
    assert all(logits.untyped_storage().nbytes() == logits.nbytes for _, logits in kept)
    for request in requests:
        assert [int(logits.argmax()) for number, logits in kept if number == request.number] == request.ids


def test_logits_are_those_of_tokens_also_where_a_row_and_a_request_have_the_same_number():
    """Of rejected drafts there are none."""
    found = []
    callbacks = am.generation.Callbacks(on_logits=lambda label, logits: found.append((label, int(logits.argmax()))))
    generator = make(cache_tokens=200, callbacks=callbacks)
    request = generator.submit([9, 8] * 8, max_new_tokens=20, stop=(), speculative=True)
    rows = generated_rows(generator, [DOCUMENT * 2], max_new_tokens=20, stop=(), speculative=True)
    while not request.finished:
        generator.step()
    assert request.label == 0
    assert generator.stats.draft_tokens > generator.stats.accepted_tokens
    assert sorted(found) == sorted((0, token) for token in (*request.ids, *rows[0]))


def test_a_repeated_step_goes_straight_to_its_work():
    """What was decided in the first step of a shape is not decided again: a step enters few files."""
    generator = Generator(attnmesh_model("llama"), cache_tokens=200)
    generator.submit(random_ids(5, 1), max_new_tokens=20, stop=[])
    for _ in range(3):
        generator.step()
    root, entered = Path(am.__file__).parent, set()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and root in Path(frame.f_code.co_filename).parents:
            entered.add(Path(frame.f_code.co_filename).relative_to(root).as_posix())

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        generator.step()
    finally:
        sys.setprofile(before)
    assert {"generation/scheduler.py", "kv_cache/cache.py", "parallel/decode/core.py", "ops/decode/cpu.py"} <= set(
        entered
    )
    assert not {"ops/decode/call.py", "kv_cache/sequence.py", "utils/validation.py"} & set(
        entered
    )  # checks of arguments
    assert len(entered) <= 18, sorted(entered)
