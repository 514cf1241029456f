"""What the page at `/` shows, as `/events` reports it: which rank holds what, and the requests in progress."""

import json
import time
import urllib.error
import urllib.request
from contextlib import closing

import pytest

import attnmesh as am
from attnmesh.generation.generator import Generator
from attnmesh.plan.decode import DecodeSharding
from helpers.models import attnmesh_model

for name in ("transformers", "openai", "fastapi", "uvicorn", "prometheus_client", "llguidance"):
    pytest.importorskip(name)

from attnmesh.serving.metrics import RankMemory, Status, memory_of_ranks  # noqa: E402
from helpers.serving import virtual_server, write_model  # noqa: E402

PROMPT = list(range(2, 15))  # 13 tokens


@pytest.mark.parametrize(
    ("sharding", "held"),
    [
        (DecodeSharding(cp=3), [5, 4, 4]),  # 13 positions, one by one
        (DecodeSharding(cp=2, interleave=4), [8, 5]),
        (DecodeSharding(kvdp=2, cp=2), [7, 0, 6, 0]),  # in group 0
        (DecodeSharding(tp=2, cp=2), [7, 6, 7, 6]),  # a rank has the weights and the heads of its part
    ],
    ids=str,
)
def test_every_rank_is_described(sharding, held):
    whole = attnmesh_model("llama")
    weights = sum(each.nbytes for each in (*whole.parameters(), *whole.buffers()))

    def rank(comm):
        model = whole if sharding.tp == 1 else am.models.shard_model(whole, sharding, comm)
        generator = Generator(model, None, comm, cache_tokens=64, max_sequences=2, sharding=sharding)
        request = generator.submit(PROMPT, max_new_tokens=3, stop=[])
        while not request.tokens:
            generator.step()
        status = Status(generator, memory_of_ranks(comm, generator), None)
        return status.snapshot(), generator.engine.cache.local.stored_tensors[0].nbytes

    found, cache = am.run_virtual(sharding.ranks, rank)[0]
    assert [each["tokens"] for each in found["ranks"]] == held
    assert [each["rank"] for each in found["ranks"]] == list(range(sharding.ranks))
    assert all(each["cache_bytes"] >= 2 * cache for each in found["ranks"])
    heads = [each["kv_heads"] for each in found["ranks"]]
    assert heads == ([[0, 2]] * sharding.ranks if sharding.tp == 1 else [[0, 1], [0, 1], [1, 2], [1, 2]])
    parts = {each["weight_bytes"] for each in found["ranks"]}
    assert parts == {weights} if sharding.tp == 1 else max(parts) < 0.6 * weights
    (request,) = found["requests"]
    assert (request["prompt"], request["new"], request["most"], sum(request["held"])) == (13, 1, 3, 13)
    assert found["ranks"][0]["blocks"]["used"] > 0


def test_decode_ranks_follow_the_prefill_ranks():
    generator = Generator(attnmesh_model("llama"), cache_tokens=64)
    memory = [RankMemory(3, 4), RankMemory(5, 6), RankMemory(7, 8)]
    found = Status(generator, memory, DecodeSharding(kvdp=2)).snapshot()["ranks"]
    assert [each["side"] for each in found] == ["prefill", "decode", "decode"]
    assert [(each["weight_bytes"], each["cache_bytes"]) for each in found] == [(3, 4), (5, 6), (7, 8)]
    assert ["blocks" in each for each in found] == [True, False, False]  # what they store is not known here


def first_event(url, **headers):
    with closing(
        urllib.request.urlopen(urllib.request.Request(f"{url}/events", headers=headers), timeout=20)
    ) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        return json.loads(answer.readline().removeprefix(b"data: "))


def test_events_need_a_key_and_end_with_the_server(tmp_path):
    key = "a-key-of-the-test"
    with virtual_server(write_model(tmp_path), tmp_path, api_keys=(key,), sharding=DecodeSharding(cp=2)) as server:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            first_event(server.url)
        bearer = {"Authorization": f"Bearer {key}"}
        assert first_event(server.url, **bearer)["generated_tokens"] == 0
        server.client(api_key=key).completions.create(model="tiny", prompt="a b c", max_tokens=5, temperature=0)
        found = first_event(server.url, **bearer)
        assert (found["in_flight"], found["prompt_tokens"], found["generated_tokens"] > 0) == (0, 3, True)
        with closing(urllib.request.urlopen(server.url, timeout=20)) as page:  # without a key
            assert b"<title>attnmesh" in page.read()
            assert "connect-src 'self'" in page.headers["Content-Security-Policy"]
        request = urllib.request.Request(f"{server.url}/events", headers=bearer)
        with closing(urllib.request.urlopen(request, timeout=20)) as watching:
            began = time.monotonic()
            server.settings.stop()
            assert watching.read().endswith(b"\n\n")
            assert time.monotonic() - began < 4  # before the server would have to end it
