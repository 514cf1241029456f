"""`attnmesh serve` with the client of openai: answers are those of the model alone; limits, errors and ends."""

import asyncio
import concurrent.futures
import http.client
import json
import logging
import re
import ssl
import subprocess
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import attnmesh as am
from attnmesh.generation.generator import Generator
from attnmesh.generation.sampling import Sampling
from attnmesh.models.loading import load_model
from attnmesh.plan.decode import DecodeSharding
from attnmesh.training.data_parallel import GradientReduction
from helpers.processes import run_processes

for name in ("transformers", "openai", "fastapi", "uvicorn", "prometheus_client", "llguidance"):
    pytest.importorskip(name)

import openai  # noqa: E402

from attnmesh.serving.answers import Answers  # noqa: E402
from attnmesh.serving.server import Certificate, _log_to_stderr, serve  # noqa: E402
from helpers.cases import sweep  # noqa: E402
from helpers.serving import NAME, Server, settings, virtual_server, write_model  # noqa: E402

PROMPT = "a b c d e f g h i j"
NOT_OF_OPENAI = ("top_k", "min_p", "min_tokens", "stop_token_ids", "repetition_penalty")
BIAS = torch.tensor([-100.0 * (i == 4) + 3.5 * (i == 9) for i in range(16)])
SAMPLED = {"temperature": 1.0, "seed": 5, "top_p": 0.9}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with virtual_server(model, tmp_path_factory.mktemp("run"), sharding=DecodeSharding(cp=2)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return server.client()


@pytest.fixture(scope="module")
def alone(model):
    """The request that a `Generator` on one rank answers, from the arguments of `submit`."""
    loaded, tokenizer = load_model(model)

    def answer(prompt=PROMPT, **how):
        generator = Generator(loaded, tokenizer, cache_tokens=400)
        request = generator.submit(prompt, **{"max_new_tokens": 12, **how})
        list(generator.stream(request))
        return request

    return answer


def complete(client, prompt=PROMPT, **how):
    extra = {name: how.pop(name) for name in NOT_OF_OPENAI if name in how}
    how = {"max_tokens": 12, "temperature": 0, "extra_body": extra, **how}
    return client.completions.create(model=NAME, prompt=prompt, **how)


def chat(client, content=PROMPT, **how):
    messages = [{"role": "user", "content": content}]
    return client.chat.completions.create(model=NAME, messages=messages, **{"max_tokens": 12, "temperature": 0, **how})


# Answers.


def test_completions_are_those_of_the_model_alone(client, alone):
    wanted = alone()
    found = complete(client)
    assert (found.object, found.model, found.id[:5]) == ("text_completion", NAME, "cmpl-")
    assert [(choice.index, choice.text) for choice in found.choices] == [(0, wanted.text)]
    assert found.choices[0].finish_reason == wanted.finish_reason
    assert found.usage.prompt_tokens == 10
    assert found.usage.completion_tokens == len(wanted.ids)
    assert found.usage.total_tokens == 10 + len(wanted.ids)
    ids = wanted.prompt
    assert complete(client, ids).choices[0].text == wanted.text
    assert complete(client, [[*ids, 4], ids]).choices[1].text == wanted.text
    assert complete(client, max_tokens=3).choices[0].text == alone(max_new_tokens=3).text
    assert complete(client, "a").choices[0].text == alone("a").text  # one token on two ranks


def test_reproducible_answers_have_the_log_probabilities_of_the_trainer(model, tmp_path):
    with virtual_server(model, tmp_path, sharding=DecodeSharding(cp=2), reproducible=True) as server:
        found = complete(server.client(), logprobs=1, temperature=0.8, seed=4, max_tokens=6).choices[0].logprobs
    trainer, tokenizer = load_model(model)
    prompt = tokenizer(PROMPT)["input_ids"]
    ids = torch.tensor([[*prompt, *tokenizer.convert_tokens_to_ids(found.tokens)]])

    def train(comm):
        cp = am.ContextParallel(comm, reproducible=True)
        GradientReduction(trainer, cp)
        inputs = am.shard_inputs(cp, ids, ids)
        return am.gather_log_probs(inputs, trainer(**inputs).logits).detach()

    [expected] = am.run_virtual(1, train)
    assert found.token_logprobs == expected[0, len(prompt) - 1 : -1].tolist()


@pytest.mark.sweep
def test_samples_differ_and_a_seed_repeats_them(client, alone):
    prompts = [PROMPT, "c b a"]
    found = complete(client, prompts, n=3, **SAMPLED)
    assert [choice.index for choice in found.choices] == list(range(6))
    wanted = [alone(p, sampling=Sampling(1.0, 0.9, seed=5), sample=i).text for p in prompts for i in range(3)]
    assert [choice.text for choice in found.choices] == wanted
    assert len(set(wanted)) > 3
    free = {complete(client, temperature=1.0).choices[0].text for _ in range(3)}  # another seed for each
    assert len(free) > 1


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ({"stop": ["zz", "g"]}, {"stop_strings": ["zz", "g"]}),
        sweep({"stop_token_ids": [6]}, {"stop": [1, 6]}),
        sweep({"stop_token_ids": [6], "min_tokens": 9}, {"stop": [1, 6], "min_new_tokens": 9}),
        sweep(
            {"frequency_penalty": 1.5, "presence_penalty": 0.5},
            {"sampling": Sampling(presence_penalty=0.5, frequency_penalty=1.5)},
        ),
        sweep(
            {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2, **SAMPLED},
            {"sampling": Sampling(1.0, 0.9, 5, 3, 0.1, 1.2)},
        ),
        sweep({"logit_bias": {"4": -100, "9": 3.5}}, {"logits_processors": [lambda _, x: x + BIAS]}),
    ],
    ids=lambda value: "-".join(value),
)
def test_options_reach_the_generator(client, alone, how, options):
    found, wanted = complete(client, **how), alone(**options)
    assert found.choices[0].text == wanted.text
    assert found.choices[0].finish_reason == wanted.finish_reason
    assert wanted.text != alone().text


def test_a_stream_has_the_same_text(client, alone):
    wanted = [alone(sampling=Sampling(1.0, 0.9, seed=5), sample=i) for i in range(2)]
    chunks = list(complete(client, n=2, stream=True, stream_options={"include_usage": True}, **SAMPLED))
    *chunks, last = chunks
    for i, request in enumerate(wanted):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == i]
        assert "".join(choice.text for choice in own) == request.text
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + [request.finish_reason]
    assert last.choices == []
    assert last.usage.completion_tokens == sum(len(request.ids) for request in wanted)
    assert len({chunk.id for chunk in chunks}) == 1


def test_chats_use_the_template(client, alone):
    wanted = alone([0, *range(3, 13), 13, 14])  # <s>, the prompt, k l
    found = chat(client)
    assert (found.object, found.choices[0].message.role) == ("chat.completion", "assistant")
    assert found.choices[0].message.content == wanted.text
    assert found.usage.prompt_tokens == 13
    parts = [{"type": "text", "text": "a b c d e f "}, {"type": "text", "text": "g h i j"}]
    assert chat(client, parts).choices[0].message.content == wanted.text
    chunks = list(chat(client, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == wanted.text
    assert chunks[-1].choices[0].finish_reason == wanted.finish_reason
    every = chat(client, max_tokens=openai.omit, temperature=1, seed=0)  # what is left of the cache
    assert every.choices[0].finish_reason == "stop" or every.usage.total_tokens == 200


def test_log_probabilities_are_those_of_the_model(client, alone, model):
    wanted = alone(logprobs=2)
    tokens = [token for token in wanted.tokens if token.id != 1]
    found = complete(client, logprobs=2).choices[0].logprobs
    tokenizer = load_model(model)[1]
    words = tokenizer.convert_ids_to_tokens([token.id for token in tokens])
    assert found.tokens == words
    assert found.token_logprobs == pytest.approx([token.logprob for token in tokens], abs=1e-4)
    assert [sorted(each.values()) for each in found.top_logprobs] == [
        pytest.approx(sorted(x for _, x in token.top_logprobs), abs=1e-4) for token in tokens
    ]
    assert found.text_offset[:3] == [0, 1, 3]
    ids = [0, *range(3, 13), 13, 14]
    of_chat = chat(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    wanted = [token for token in alone(ids, logprobs=3).tokens if token.id != 1]
    assert [each.logprob for each in of_chat] == pytest.approx([token.logprob for token in wanted], abs=1e-4)
    assert [[top.logprob for top in each.top_logprobs] for each in of_chat] == [
        pytest.approx([x for _, x in token.top_logprobs], abs=1e-4) for token in wanted
    ]
    assert all(bytes(each.bytes).decode() == each.token for each in of_chat)
    assert [each.token for each in of_chat] == tokenizer.convert_ids_to_tokens([token.id for token in wanted])
    streamed = [chunk.choices[0].logprobs for chunk in complete(client, logprobs=1, stream=True)]
    assert [word for each in streamed for word in each.tokens] == words
    assert [at for each in streamed for at in each.text_offset] == found.text_offset


def test_models_are_listed(server, client):
    assert server.settings.is_serving
    assert [each.id for each in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.sweep
def test_many_clients_at_once_get_their_own_answers(client, alone):
    prompts = [f"{word} a b c {word}" for word in "abcdefgh"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda prompt: complete(client, prompt).choices[0].text, prompts))
    assert found == [alone(prompt).text for prompt in prompts]


# Errors and limits.


@pytest.mark.parametrize(
    ("how", "message", "param"),
    [
        ({"temperature": -1}, "temperature must be 0 or more, got -1", "temperature"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, got 0", "top_p"),
        ({"n": 0}, "n must be an integer from 1 to 1024, got 0", "n"),
        ({"max_tokens": "many"}, "max_tokens must be an integer from 1 to .*, got 'many'", "max_tokens"),
        ({"max_tokens": 191}, "a prompt of 10 tokens and an answer of 191 exceed 200 tokens", "prompt"),
        ({"prompt": "a " * 400}, "a prompt of 400 tokens and an answer of 12 exceed 200 tokens", "prompt"),
        ({"prompt": []}, r"prompt must be a text, a list of token ids, or a list of these, got \[\]", "prompt"),
        ({"prompt": [3, 16]}, "prompt must have token ids 0 to 15, got 3 to 16", None),
        ({"prompt": ""}, "prompt is empty", None),
        ({"stop": [""]}, "stop must be a text or at most 16 texts", "stop"),
        ({"logprobs": 21}, "logprobs must be an integer from 0 to 20, got 21", "logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias must be an object whose names are token ids, got 'a'", "logit_bias"),
        ({"logit_bias": {"16": 1}}, "logit_bias and stop_token_ids must have token ids below 16", None),
        ({"echo": 1}, "echo must be true or false, got 1", "echo"),
        ({"best_of": 2}, "best_of is not supported, got 2: it must be left out or 1", "best_of"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search is not supported, got True", "use_beam_search"),
        ({"seed": -1}, "seed must be an integer from 0 to", "seed"),
        ({"min_tokens": 13}, "min_tokens must be at most 12, got 13", "min_tokens"),
        ({"extra_body": {"top_q": 1}}, "unknown parameter 'top_q', got 1: /docs has those that are served", "top_q"),
        ({"stream_options": 3}, "stream_options must be an object such as", "stream_options"),
        ({"presence_penalty": -3e38}, "presence_penalty must be a number from -2 to 2, got -3e", "presence_penalty"),
        ({"frequency_penalty": 2.1}, "frequency_penalty must be a number from -2 to 2", "frequency_penalty"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty must be a number from 0.01 to 100", "repetition_penalty"),
        (
            {"stop_token_ids": list(range(16)), "min_tokens": 1},
            "min_tokens must be 0 if every token is one of stop_token_ids",
            "min_tokens",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_refused(client, how, message, param):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        complete(client, **how)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("messages", "how", "message"),
    [
        ([], {}, r"messages must be a list of messages, got \[\]"),
        ([{"content": "a"}], {}, r"messages\[0\] must be an object such as"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], {}, "parts of type text"),
        ([{"role": "user", "content": "a", "tool_calls": [{}]}], {}, r"messages\[0\].tool_calls is not supported, got"),
        (
            [{"role": "user", "content": "a b"}],
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools must be left out: the chat template of tiny has no tools",
        ),
        ([{"role": "user", "content": "a b"}], {"functions": [{"name": "f"}]}, "functions is not supported, got"),
        ([{"role": "user", "content": "a b"}], {"top_logprobs": 1}, "top_logprobs requires logprobs: true"),
    ],
)
def test_chats_that_cannot_be_answered_are_refused(client, messages, how, message):
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(model=NAME, messages=messages, **how)


def raw(server, method, path, body=None, **headers):
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, json.loads(text) if text.startswith("{") else text


@pytest.mark.parametrize(
    ("status", "message", "request_"),
    [
        (404, "Not Found", ("GET", "/v1/nothing")),
        (405, "Method Not Allowed", ("GET", "/v1/completions")),
        (415, "Content-Type must be", ("POST", "/v1/completions", b"{}", ("Content-Type", "text/plain"))),
        (413, "the body must have at most 10000 bytes", ("POST", "/v1/completions", b" " * 10_001)),
        (413, "the body must have at most 10000 bytes", ("POST", "/v1/completions", iter([b" " * 6000] * 2))),
        (400, "the body must be JSON", ("POST", "/v1/completions", b"\xff")),
        (400, "the body must be JSON", ("POST", "/v1/completions", b'{"temperature": NaN}')),
        (400, "the body must be JSON", ("POST", "/v1/chat/completions", b"[" * 9000)),
        (400, "lone surrogate", ("POST", "/v1/completions", rb'{"model": "tiny", "prompt": "a \ud800 b"}')),
        (400, "lone surrogate", ("POST", "/v1/completions", rb'{"model": "tiny", "prompt": "a", "\uDfff": 1}')),
        (400, "lone surrogate", ("POST", "/v1/chat/completions", rb'{"messages": [{"role": "a", "\ud9ab": 1}]}')),
        (404, "the model must be 'tiny'", ("POST", "/v1/completions", rb'{"prompt": "a", "model": "\ud83d\ude00"}')),
        (400, "the body must be a JSON object, got [1]", ("POST", "/v1/chat/completions", b"[1]")),
        (400, "model must be the name of a model, got 3", ("POST", "/v1/completions", b'{"prompt": "a", "model": 3}')),
        (404, "/v1/embeddings is not served", ("POST", "/v1/embeddings", b"{}")),
        (404, "the model must be 'tiny', got 'b'", ("POST", "/v1/completions", b'{"prompt": "a", "model": "b"}')),
        (403, "the host must be one of localhost", ("GET", "/v1/models", None, ("Host", "attacker.example"))),
        (403, "the host must be one of localhost", ("GET", "/metrics", None, ("Host", "attacker.example:80"))),
    ],
)  # fmt: skip
def test_http_errors_have_the_format_of_openai(server, status, message, request_):
    method, path, *rest = request_
    body, header = (*rest, None, None)[:2]
    found, answer = raw(server, method, path, body, **dict([header or ("Content_Type", "application/json")]))
    assert found == status
    assert message in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


def test_a_full_queue_refuses_more_and_goes_on(server, client):
    with pytest.raises(openai.BadRequestError, match=r"9 samples .* the queue takes 8") as caught:
        complete(client, n=9)  # 429 would have clients try again
    assert caught.value.param == "n"
    answers = complete(client, n=5, stream=True, max_tokens=150, min_tokens=150)
    next(iter(answers))
    with pytest.raises(openai.RateLimitError, match=r"5 requests are in progress or waiting, and 4 more are too many"):
        complete(client, n=4)
    answers.close()
    eventually(lambda: metric(server, "attnmesh_requests_in_progress") == 0)
    assert len(complete(client, n=8).choices) == 8


def metric(server, name):
    text = raw(server, "GET", "/metrics")[1]
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def eventually(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [True, sweep(False)])
def test_a_client_that_goes_away_cancels_its_request(server, client, stream, alone):
    before = metric(server, 'attnmesh_answers_total{finish_reason="cancelled"}')
    long = {"max_tokens": 180, "min_tokens": 180, "n": 3}
    if stream:
        answers = complete(client, stream=True, **long)
        next(iter(answers))
        assert metric(server, "attnmesh_requests_in_progress") == 3
        answers.close()
    else:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
        body = json.dumps({"model": NAME, "prompt": PROMPT, **long})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        eventually(lambda: metric(server, "attnmesh_requests_in_progress") == 3)
        connection.close()
    eventually(lambda: metric(server, "attnmesh_requests_in_progress") == 0)
    assert metric(server, 'attnmesh_answers_total{finish_reason="cancelled"}') == before + 3
    assert complete(client).choices[0].text == alone().text


def test_a_stream_that_is_cancelled_leaves_no_task():
    async def main():
        queue = SimpleNamespace(submit=lambda submissions, listen: [], cancel=lambda tickets: None)
        gone = asyncio.create_task(asyncio.Event().wait())
        waiting = asyncio.create_task(Answers(queue, None, [], gone)._next())
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait({waiting})
        await asyncio.sleep(0.01)
        return asyncio.all_tasks() == {asyncio.current_task(), gone}

    assert asyncio.run(main())


def test_metrics_count(server, client):
    names = [f"attnmesh_{each}_total" for each in ("prompt_tokens", "generated_tokens")]
    names.append("attnmesh_time_to_first_token_seconds_count")
    before = [metric(server, name) for name in names]
    complete(client, n=2, min_tokens=12)
    after = [metric(server, name) for name in names]
    assert [now - was for now, was in zip(after, before, strict=True)] == [10, 24, 2]
    assert raw(server, "GET", "/health") == (200, {"status": "ok"})


def test_the_log_goes_to_stderr_unless_it_goes_somewhere_already(monkeypatch):
    log, package = logging.getLogger("attnmesh.serving"), logging.getLogger("attnmesh")
    for above, added in (([logging.NullHandler()], 1), ([logging.NullHandler(), logging.StreamHandler()], 0)):
        for each, handlers in ((log, []), (logging.root, []), (package, above)):
            monkeypatch.setattr(each, "handlers", handlers)
        _log_to_stderr()
        assert len(log.handlers) == added


# Keys, ends and failures.


def test_a_key_is_required_of_clients_once_there_is_one(model, tmp_path):
    with virtual_server(model, tmp_path, ranks=1, api_keys=("k" * 16, "m" * 20)) as server:
        for wrong in ("k" * 15, "k" * 17, "none"):
            with pytest.raises(openai.AuthenticationError, match="Authorization must be 'Bearer'"):
                server.client(api_key=wrong).models.list()
        assert raw(server, "GET", "/metrics")[0] == raw(server, "POST", "/v1/completions", b"x")[0] == 401
        assert raw(server, "GET", "/health")[0] == 200
        assert raw(server, "GET", "/v1/models", Host="any.example", Authorization="Bearer " + "k" * 16)[0] == 200
        for key in ("k" * 16, "m" * 20):
            assert len(complete(server.client(api_key=key)).choices) == 1


def test_a_certificate_encrypts(model, tmp_path):
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*made, *subject, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with pytest.raises(ValueError, match=r"--ssl-certfile .*key.pem must be a certificate and its key"):
        Certificate(key).check()
    files = Certificate(certificate, key)
    files.check()
    with virtual_server(model, tmp_path, ranks=1, certificate=files) as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=certificate)
        connection = http.client.HTTPSConnection(server.url.removeprefix("https://"), timeout=60, context=context)
        connection.request("GET", "/v1/models")
        assert connection.getresponse().status == 200
        connection.close()
        with pytest.raises((http.client.HTTPException, OSError)):  # not encrypted
            raw(SimpleNamespace(url=server.url.replace("https", "http")), "GET", "/v1/models")


def refusal(client):
    try:
        complete(client, max_tokens=1)
    except openai.InternalServerError as error:
        return str(error)
    return ""


def test_the_end_of_a_server_lets_answers_end(model, tmp_path, alone):
    with virtual_server(model, tmp_path, grace=300) as server:
        client = server.client()
        answers = iter(complete(client, stream=True, max_tokens=60, min_tokens=60))
        parts = [next(answers)]
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        while not (message := refusal(client)):
            parts.append(next(answers))  # it is noticed before the next step
        assert "the server is shutting down" in message
        assert raw(server, "GET", "/health")[0] == 503
        parts += answers
        stopping.join()
        assert server.error is None
    assert "".join(part.choices[0].text for part in parts) == alone(max_new_tokens=60, min_new_tokens=60).text
    with pytest.raises(openai.APIConnectionError):
        client.models.list()


def test_clients_are_told_of_answers_that_do_not_end_in_time(model, tmp_path):
    with virtual_server(model, tmp_path, grace=0) as server:
        answers = complete(server.client(), stream=True, n=3, max_tokens=180, min_tokens=180)
        next(iter(answers))
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(answers)
        stopping.join()
        assert server.error is None


def test_a_failure_ends_the_server_and_its_answers(model, tmp_path, monkeypatch, caplog):
    with virtual_server(model, tmp_path) as server:
        monkeypatch.setattr(Generator, "step", lambda self: 1 / 0)
        with pytest.raises(openai.InternalServerError, match="the server has failed: ZeroDivisionError"):
            complete(server.client())
        server.wait()
        assert isinstance(server.error, ZeroDivisionError)
    lines = [record.getMessage() for record in caplog.records if record.name == "attnmesh.serving"]
    assert lines[0] == "the server has failed: ZeroDivisionError: division by zero"
    assert re.fullmatch(r"the server has shut down: 1 HTTP requests in \d+ s", lines[1])


def test_a_rank_that_was_killed_is_answered_with_an_error(model, tmp_path):
    """Rank 0 learns it from the process that started the ranks, also while it has nothing to do."""
    with virtual_server(model, tmp_path, ranks=1) as server:
        assert server.settings.fail() > 5
        server.wait()
        assert isinstance(server.error, am.comm.CommError)


def check_answers(client, alone):
    """Answers of concurrent requests are those of the model alone; after one that is refused and one that is left."""
    prompts = [f"{word} a b c {word}" for word in "abcd"]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: complete(client, prompt).choices[0].text, prompts))
    assert found == [alone(prompt).text for prompt in prompts]
    with pytest.raises(openai.BadRequestError):
        complete(client, [3, 99])
    answers = complete(client, stream=True, max_tokens=150, min_tokens=150)
    next(iter(answers))
    answers.close()
    assert "".join(chunk.choices[0].text for chunk in complete(client, stream=True)) == alone().text
    sampled = complete(client, **SAMPLED)
    assert sampled.choices[0].text == alone(sampling=Sampling(1.0, 0.9, seed=5)).text


@pytest.mark.parametrize(
    "sharding",
    [
        DecodeSharding(tp=2),
        sweep(DecodeSharding(cp=3)),
        sweep(DecodeSharding(tp=2, kvdp=2)),
    ],
    ids=str,
)
def test_a_server_with_sharded_weights(model, tmp_path, alone, sharding):
    with virtual_server(model, tmp_path, sharding.ranks, sharding=sharding, shard_weights=True) as server:
        check_answers(server.client(), alone)


def serve_on_process(comm, how):
    serve(comm, settings=how)
    return comm.rank


@pytest.mark.sweep
@pytest.mark.parametrize("shard_weights", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("sharding", [DecodeSharding(cp=2), DecodeSharding(kvdp=2)], ids=str)
def test_a_server_over_processes(model, tmp_path, alone, sharding, shard_weights):
    how = settings(model, tmp_path, sharding=sharding, shard_weights=shard_weights)
    ranks = []
    server = Server(tmp_path, how, lambda: ranks.extend(run_processes(2, serve_on_process, how, timeout=200)))
    check_answers(server.client(), alone)
    server.stop()
    assert (ranks, server.error) == ([0, 1], None)


def test_a_port_in_use_is_reported_before_the_model_is_loaded(server, tmp_path):
    how = settings(tmp_path / "no model", tmp_path, port=int(server.url.rpartition(":")[2]))
    with pytest.raises(ValueError, match=r"cannot listen on host 127.0.0.1 and port \d+: Address already in use"):
        am.run_virtual(1, partial(serve, settings=how))
