"""Requests that go on in another generator, on other ranks or later: the tokens are those of one generator."""

import json

import pytest

import attnmesh as am
from attnmesh.comm import IndependentSubComm
from attnmesh.generation.agreement import config_digest, digest
from attnmesh.generation.generator import Generator
from attnmesh.generation.sampling import Sampling
from attnmesh.plan.decode import DecodeSharding
from helpers.cases import sweep
from helpers.models import (
    attnmesh_model,
    check_blocks,
    on_virtual_ranks,
    random_ids,
    tiny_tokenizer,
    use_small_blocks,
)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    use_small_blocks(monkeypatch)


# A long prompt that is not complete, answers of two kinds, a search, and one that waits.
REQUESTS = [
    (random_ids(30, 1), {"max_new_tokens": 9}),
    (random_ids(9, 2), {"max_new_tokens": 12, "sampling": Sampling(1.0, seed=3), "logprobs": 2}),
    (random_ids(70, 3), {"max_new_tokens": 4, "min_new_tokens": 2}),
    (random_ids(5, 4), {"max_new_tokens": 6, "num_beams": 2}),
    (random_ids(6, 5), {"max_new_tokens": 5, "speculative": True}),
]


def make(comm=None, sharding=None, kind="llama", storage=None, weights=None):
    model = attnmesh_model(kind)
    if weights is not None:
        model = am.models.shard_model(model, sharding, comm)
    return Generator(
        model, None, comm, cache_tokens=200, max_sequences=5, step_tokens=24, sharding=sharding, storage=storage
    )


def submit(generator, requests=REQUESTS):
    return [generator.submit(prompt, stop=(), **how) for prompt, how in requests]


def finish(generator, requests):
    while generator.num_unfinished:
        generator.step()
        check_blocks(generator)
    return [[(token.id, token.top_logprobs and token.top_logprobs[0][0]) for token in each.tokens] for each in requests]


def expected(kind="llama", storage=None):
    generator = make(kind=kind, storage=storage)
    return finish(generator, submit(generator))


@pytest.mark.parametrize(
    ("before", "after", "kind", "storage"),
    [
        (DecodeSharding(cp=2), DecodeSharding(kvdp=2), "llama", None),
        sweep(DecodeSharding(kvdp=2), DecodeSharding(cp=2, interleave=4), "llama", "int8"),
        sweep(DecodeSharding(cp=2), DecodeSharding(kvdp=2), "deepseek_v3", None),  # latents
    ],
    ids=str,
)
def test_the_same_ranks_go_on_with_another_sharding(before, after, kind, storage):
    def rank(comm):
        source, target = (make(comm, sharding, kind, storage) for sharding in (before, after))
        old = submit(source)
        for _ in range(4):
            source.step()
        begun = sum(len(each.tokens) for each in old)
        new = am.generation.move_requests(source, target, comm)
        assert source.num_unfinished == len(source.engine.cache.sequences) == 0
        assert {each.finish_reason for each in old} == {"moved"}
        before_moving = target.stats.prefill_tokens
        found = finish(target, new)
        assert target.stats.prefill_tokens - before_moving < sum(len(prompt) for prompt, _ in REQUESTS)
        return begun, found

    for begun, found in on_virtual_ranks(2, rank):
        assert begun > 3
        assert found == expected(kind, storage)


def test_prefill_ranks_hand_over_to_decode_ranks():
    """Two ranks compute prompts, two others go on, one of which has weights of two: tokens of one process."""

    def rank(comm):
        parts = [[0, 1], [2, 3]]
        side = comm.rank // 2
        own = IndependentSubComm(comm, parts[side])
        if side == 0:
            source, target = make(own, DecodeSharding(cp=2)), None
        else:
            source, target = None, make(own, DecodeSharding(tp=2), weights=True)
        found = []
        for some in (REQUESTS[:2], REQUESTS[2:]):
            if source is not None:
                submit(source, some)
                source.step()
            found += am.generation.move_requests(source, target, comm)
            if target is not None:
                target.step()
        return None if target is None else finish(target, found)

    assert on_virtual_ranks(4, rank) == [None, None, expected(), expected()]


def test_a_part_of_the_requests_moves_and_the_others_go_on():
    """Those whose prompts are computed move, in any order, into a generator that is in use."""

    def rank(comm):
        source, target = make(comm, DecodeSharding(cp=2)), make(comm, DecodeSharding(kvdp=2))
        there = target.submit(REQUESTS[1][0], stop=(), **REQUESTS[1][1])
        old = submit(source)
        found = {}
        while source.num_unfinished:
            source.step()
            target.step()
            ready = [each for each in reversed(old) if each.tokens and not each.finished]
            moved = am.generation.move_requests(source, target, comm, requests=ready)
            assert all(each.finish_reason == "moved" for each in ready)
            found |= {old.index(each): new for each, new in zip(ready, moved, strict=True)}
            check_blocks(source)
        requests = [found.get(at, each) for at, each in enumerate(old)]
        return len(found), finish(target, requests), finish(target, [there])

    for moved, found, there in on_virtual_ranks(2, rank):
        assert moved == 4  # all but the search, whose tokens come at its end
        assert found == expected()
        assert there == expected()[1:2]


def test_requests_that_are_named_wrongly_are_refused_on_every_rank():
    def rank(comm):
        source, target = make(comm, DecodeSharding(cp=2)), make(comm, DecodeSharding(kvdp=2))
        first, second = submit(source, REQUESTS[:2])
        other = target.submit([8, 9], max_new_tokens=1, stop=())
        source.step()
        target.step()
        for requests, message in (
            ([other], "request must be one that submit\\(\\) of this Generator returned"),
            ([first, first], "requests must be in progress, each once"),
            (first, "requests must be a list of requests"),
            ([first if comm.rank else second], "source must be the same, after the same calls, on all its ranks"),
        ):
            with pytest.raises(ValueError, match=message):
                am.generation.move_requests(source, target, comm, requests=requests)
        with pytest.raises(ValueError, match="requests must be in progress"):
            am.generation.move_requests(target, source, comm, requests=[other])
        with pytest.raises(ValueError, match="requests must be None on ranks without their source"):
            am.generation.move_requests(None, target, comm, requests=[first])
        assert am.generation.move_requests(source, target, comm, requests=[]) == []
        return finish(source, [first, second])

    assert on_virtual_ranks(2, rank) == [expected()[:2]] * 2


@pytest.mark.parametrize("kind", ["llama", sweep("deepseek_v3")])
def test_requests_that_are_saved_go_on_later_on_other_ranks(kind, tmp_path):
    def write(comm):
        generator = make(comm, DecodeSharding(kvdp=2), kind)
        requests = submit(generator)
        for _ in range(4):
            generator.step()
        am.generation.save_requests(generator, tmp_path / "requests")
        return finish(generator, requests)

    def read(comm):
        generator = make(comm, DecodeSharding(cp=3), kind)
        return finish(generator, am.generation.load_requests(generator, tmp_path / "requests"))

    assert on_virtual_ranks(2, write) == [expected(kind)] * 2
    assert on_virtual_ranks(3, read) == [expected(kind)] * 3


def test_what_cannot_go_on_is_refused_on_every_rank(tmp_path):
    def rank(comm):
        source, target = make(comm, DecodeSharding(cp=2)), make(comm, DecodeSharding(kvdp=2))
        small = Generator(attnmesh_model("llama"), None, comm, cache_tokens=20, max_sequences=2)
        other = make(comm, DecodeSharding(cp=2), "qwen3")
        with pytest.raises(ValueError, match="source and target must be two Generators"):
            am.generation.move_requests(source, source, comm)
        with pytest.raises(
            ValueError, match=r"move_requests ranks: .*target must be given on each of its 2 ranks once"
        ):
            am.generation.move_requests(source, target if comm.rank else None, comm)
        request = source.submit(REQUESTS[0][0], max_new_tokens=3, logits_processors=[lambda ids, scores: scores])
        with pytest.raises(ValueError, match="request 0 must have no logits_processors to be moved"):
            am.generation.move_requests(source, target, comm)
        source.cancel(request)
        request = source.submit(REQUESTS[0][0], max_new_tokens=3, stop=())
        source.step()
        with pytest.raises(ValueError, match=r"requests\[0\] has 30 tokens, .* never holds more than cache_tokens=20"):
            am.generation.move_requests(source, small, comm)
        with pytest.raises(ValueError, match="target must have a model of the configuration that the source has"):
            am.generation.move_requests(source, other, comm)
        busy = target.submit(REQUESTS[3][0], max_new_tokens=6, num_beams=2)
        with pytest.raises(ValueError, match="target must have no beam search in progress"):
            am.generation.move_requests(source, target, comm)
        target.cancel(busy)
        full = [target.submit([8, n], max_new_tokens=30, stop=()) for n in range(6)]
        target.step()
        with pytest.raises(am.decode.CacheFull):
            am.generation.move_requests(source, target, comm)
        for each in full:
            target.cancel(each)
        (moved,) = am.generation.move_requests(source, target, comm)
        return finish(target, [moved])

    alone = make()
    wanted = finish(alone, [alone.submit(REQUESTS[0][0], max_new_tokens=3, stop=())])
    assert on_virtual_ranks(2, rank) == [wanted] * 2
    generator = make()
    for text, message in (
        ("{}", "must be what save_requests wrote"),
        ("[", "requests.json"),
        (_file([{"row": 0, "prompt": [1]}], generator), "requests must be what a Generator wrote, got KeyError"),
    ):
        (tmp_path / "requests.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            am.generation.load_requests(generator, tmp_path)
    with pytest.raises(ValueError, match=r"requests\.json"):
        am.generation.load_requests(generator, tmp_path / "nothing")


def _file(states, generator):
    values = {"model": config_digest(generator.model), "digest": digest(json.dumps(states)), "requests": states}
    return json.dumps(values)


def test_files_of_another_model_or_another_call_are_refused(tmp_path):
    """Nothing of them stays in the cache."""
    folders = [tmp_path / name for name in "ab"]
    for folder, (prompt, how) in zip(folders, REQUESTS[:2], strict=True):
        generator = make()
        generator.submit(prompt, stop=(), **how)
        generator.step()
        am.generation.save_requests(generator, folder)
    file = folders[0] / "requests.json"
    text = file.read_text()
    target = make()
    changed = json.loads(text)
    changed["requests"][0]["options"]["max_new_tokens"] = 3  # digits of a damaged file
    for damaged in (json.dumps(changed), (folders[1] / "requests.json").read_text()):
        file.write_text(damaged)
        with pytest.raises(ValueError, match=r"must be what save_requests wrote|must be of one call of save_requests"):
            am.generation.load_requests(target, folders[0])
    file.write_text(text)
    with pytest.raises(ValueError, match="must have a model of the configuration"):
        am.generation.load_requests(make(kind="qwen3"), folders[0])
    assert target.num_unfinished == len(target.engine.cache.sequences) == 0
    assert finish(target, am.generation.load_requests(target, folders[0])) == expected()[:1]


def test_options_that_the_target_cannot_honour_are_refused():
    source, target = (Generator(attnmesh_model("llama"), each, cache_tokens=60) for each in (tiny_tokenizer(), None))
    request = source.submit([8, 9], stop_strings=["d"], max_new_tokens=4, stop=())
    source.step()
    with pytest.raises(ValueError, match="stop_strings must be empty without a tokenizer"):
        am.generation.move_requests(source, target)
    assert not request.finished


def test_an_iterator_whose_rows_are_moved_says_so():
    source, target = make(), make()
    tokens = source.generate([REQUESTS[0][0]], max_new_tokens=5, stop=())
    next(tokens)
    am.generation.move_requests(source, target)
    with pytest.raises(RuntimeError, match="row 0 goes on in another Generator"):
        next(tokens)


def test_requests_move_out_of_and_into_generators_that_were_interrupted():
    """Also where the interruption came between the last token of an answer and the end of its request."""
    source, target = make(), make()
    complete, *_ = submit(source, [(REQUESTS[0][0], {"max_new_tokens": 1}), *REQUESTS[1:3]])
    there = target.submit(REQUESTS[4][0], max_new_tokens=5, stop=())
    for generator, method in ((source, "_end"), (target, "_mark_written")):
        working = getattr(generator._batch, method)
        setattr(generator._batch, method, _interrupted)
        with pytest.raises(KeyboardInterrupt):
            finish(generator, [])
        setattr(generator._batch, method, working)
    moved = am.generation.move_requests(source, target)
    assert len(complete.tokens) == 1
    assert len(moved) == 2
    found = finish(target, [*moved, there])
    assert found == [expected()[at] for at in (1, 2, 4)]


def _interrupted(*_, **__):
    raise KeyboardInterrupt


def test_ranks_of_a_generator_that_differ_are_told_when_its_requests_are_moved():
    def rank(comm):
        side = comm.rank // 2
        own = make(IndependentSubComm(comm, [2 * side, 2 * side + 1]), DecodeSharding(cp=2))
        tokens = own.generate([REQUESTS[0][0]], max_new_tokens=5, stop=()) if side == 0 else None
        if tokens is not None:
            next(tokens)
        if comm.rank == 1:  # the other rank still has it
            tokens.close()
        with pytest.raises(ValueError, match="source must be the same, after the same calls, on all its ranks"):
            am.generation.move_requests(*((own, None) if side == 0 else (None, own)), comm)
        return True

    assert on_virtual_ranks(4, rank) == [True] * 4
