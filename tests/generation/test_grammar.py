"""Requests with a grammar: their answers match it, also after they were preempted or moved."""

import re

import pytest

import attnmesh as am
from attnmesh.generation.generator import Generator
from attnmesh.generation.sampling import Sampling
from attnmesh.models.loading import load_model
from helpers.models import on_virtual_ranks, use_small_blocks
from helpers.serving import write_byte_model

pytest.importorskip("llguidance")

from attnmesh.generation.sampling import grammar_of

PATTERN = "([a-c]{3} ){4}[x-z]"
HOW = {"max_new_tokens": 40, "grammar": grammar_of("regex", PATTERN), "sampling": Sampling(1.0, seed=5)}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(write_byte_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def answer(loaded):
    generator = Generator(*loaded, cache_tokens=64)
    request = generator.submit("Say it: ", **HOW)
    list(generator.stream(request))
    assert re.fullmatch(PATTERN, request.text)
    assert (request.finish_reason, request.ids[-1]) == ("stop", 1)
    return request.ids


def test_groups_of_ranks_answer_alike(loaded, answer):
    def rank(comm):
        sharding = am.DecodeSharding(kvdp=2)
        generator = Generator(*loaded, comm, cache_tokens=128, max_sequences=4, sharding=sharding)
        requests = [generator.submit("Say it: ", **HOW) for _ in range(3)]
        while not all(request.finished for request in requests):
            generator.step()
        return [request.ids for request in requests]

    assert on_virtual_ranks(2, rank) == [[answer] * 3] * 2


def test_a_request_that_is_preempted_goes_on_where_it_was(loaded, answer, monkeypatch):
    use_small_blocks(monkeypatch)
    generator = Generator(*loaded, cache_tokens=28, max_sequences=2, step_tokens=40)
    requests = [generator.submit("Say it: ", **{**HOW, "max_new_tokens": 20}) for _ in range(2)]
    while not all(request.finished for request in requests):
        generator.step()
    assert generator.stats.preemptions > 0
    assert [request.ids for request in requests] == [answer] * 2


def test_a_request_that_is_loaded_goes_on_where_it_was(loaded, answer, tmp_path):
    first, second = (Generator(*loaded, cache_tokens=64) for _ in range(2))
    first.submit("Say it: ", **HOW)
    for _ in range(6):
        first.step()
    am.generation.save_requests(first, tmp_path / "requests")
    (again,) = am.generation.load_requests(second, tmp_path / "requests")
    list(second.stream(again))
    assert again.ids == answer


def test_other_stop_tokens_end_it_where_the_grammar_can_end(loaded):
    _, tokenizer = loaded
    (bang,) = tokenizer("!")["input_ids"]
    generator = Generator(*loaded, cache_tokens=64)
    request = generator.submit("Say it: ", **{**HOW, "stop": [bang]})
    list(generator.stream(request))
    assert re.fullmatch(PATTERN + "!", request.text)
    assert request.finish_reason == "stop"


def test_a_grammar_that_cannot_be_compiled_is_refused(loaded):
    generator = Generator(*loaded, cache_tokens=64)
    with pytest.raises(ValueError, match=r"grammar cannot be compiled: .*unknown name"):
        generator.submit("a", grammar="start: missing", max_new_tokens=4)
