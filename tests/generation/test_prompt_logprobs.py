"""Log-probabilities of prompts are those of one pass of Transformers, on any number of ranks."""

import pytest
import torch

import attnmesh as am
from attnmesh.generation.generator import Generator
from helpers.cases import sweep
from helpers.models import attnmesh_model, logits_of, on_virtual_ranks, random_ids, use_small_blocks

pytest.importorskip("transformers")


def wanted(ids, top):
    scores = torch.log_softmax(logits_of("llama", ids).double(), -1)[:-1]
    own = scores[range(len(ids) - 1), ids[1:]]
    ranks = 1 + (scores > own[:, None]).sum(-1)
    return own.tolist(), ranks.tolist(), scores.topk(top).indices.tolist()


def check(request, ids, top):
    own, ranks, tops = wanted(ids, top)
    found = request.prompt_logprobs
    assert [each.logprob for each in found] == pytest.approx(own, abs=1e-4)
    assert [each.rank for each in found] == ranks
    assert [[token for token, _ in each.top_logprobs] for each in found] == tops


@pytest.mark.parametrize("length", [1, 5, 90])
@pytest.mark.parametrize(
    "sharding",
    [am.DecodeSharding(), am.DecodeSharding(cp=2), sweep(am.DecodeSharding(cp=3)), am.DecodeSharding(kvdp=2)],
    ids=str,
)
def test_log_probabilities_of_prompts(sharding, length):
    prompts = [random_ids(length, seed=i) for i in range(2)]  # of both groups, with kvdp=2

    def rank(comm):
        generator = Generator(
            attnmesh_model("llama"), comm=comm, cache_tokens=400, max_sequences=2, sharding=sharding, prefill_chunk=48
        )
        list(generator.generate([prompts[0]], max_new_tokens=2))  # cached tokens are computed again
        plain = [generator.submit(ids, max_new_tokens=4) for ids in prompts]
        requests = [generator.submit(ids, max_new_tokens=4, prompt_logprobs=3, logprobs=1) for ids in prompts]
        for request in (*plain, *requests):
            list(generator.stream(request))
        assert [each.ids for each in plain] == [each.ids for each in requests]
        return requests

    for requests in on_virtual_ranks(sharding.ranks, rank):
        for ids, request in zip(prompts, requests, strict=True):
            check(request, ids, 3)


def test_a_model_with_sharded_weights():
    sharding, ids = am.DecodeSharding(tp=2), random_ids(70, seed=3)

    def rank(comm):
        model = am.models.shard_model(attnmesh_model("llama"), sharding, comm)
        generator = Generator(model, comm=comm, cache_tokens=200, sharding=sharding)
        request = generator.submit(ids, max_new_tokens=2, prompt_logprobs=2)
        list(generator.stream(request))
        return request

    for request in on_virtual_ranks(2, rank):
        check(request, ids, 2)


def test_a_prompt_that_is_preempted_is_scored_once(monkeypatch):
    use_small_blocks(monkeypatch)
    generator = Generator(attnmesh_model("llama"), cache_tokens=80, max_sequences=2, step_tokens=20)
    ids = random_ids(40, seed=4)
    first = generator.submit(random_ids(8, seed=5), max_new_tokens=70, stop=[])
    second = generator.submit(ids, max_new_tokens=30, stop=[], prompt_logprobs=1)
    for request in (first, second):
        list(generator.stream(request))
    assert generator.stats.preemptions > 0
    check(second, ids, 1)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"prompt_logprobs": -1}, "prompt_logprobs must be an integer >= 0, got -1"),
        ({"prompt_logprobs": 102}, "prompt_logprobs must be at most 101, got 102"),
        ({"prompt_logprobs": 1, "num_beams": 2}, "num_beams must be 1 with .* prompt_logprobs"),
        ({"prompt_logprobs": 1, "speculative": True}, "speculative must be False with .* prompt_logprobs"),
        ({"priority": 0.5}, "priority must be an integer >= -2147483648, got 0.5"),
        ({"skip_special_tokens": 1}, "skip_special_tokens must be True or False, got 1"),
        ({"grammar": "start: /a/"}, "grammar must be None without a tokenizer, got 'start: /a/'"),
        ({"grammar": 3}, "grammar must be"),
        ({"grammar": "start: /a/", "stop": []}, "stop must have a token with a grammar, got none"),
        ({"grammar": "start: /a/", "min_new_tokens": 2}, "min_new_tokens must be 0 with a grammar, got 2"),
    ],
)
def test_options_that_are_refused(how, message):
    generator = Generator(attnmesh_model("llama"), cache_tokens=64, max_sequences=2)
    with pytest.raises(ValueError, match=message):
        generator.submit([1, 2], max_new_tokens=4, **how)


def test_requests_with_a_lower_priority_come_first():
    generator = Generator(attnmesh_model("llama"), cache_tokens=64, max_sequences=1)
    order = [generator.submit([1, 2, 3 + i], max_new_tokens=3, priority=p) for i, p in enumerate([0, 5, -1, 0])]
    ended = []
    while len(ended) < len(order):
        generator.step()
        ended += [i for i, each in enumerate(order) if each.finished and i not in ended]
    assert ended == [2, 0, 3, 1]
