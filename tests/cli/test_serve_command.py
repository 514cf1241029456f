"""`attnmesh serve`: what it refuses before any rank starts, and how signals end it."""

import json
import re
import signal
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

for name in ("transformers", "openai", "fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(name)

from attnmesh.generation.generator import Generator, generate  # noqa: E402
from attnmesh.generation.sampling import Sampling  # noqa: E402
from attnmesh.models.loading import load_model  # noqa: E402
from attnmesh.plan.decode import DecodeSharding  # noqa: E402
from helpers.cases import in_turn  # noqa: E402
from helpers.cli import assert_refused, words  # noqa: E402
from helpers.cli import run as run_command  # noqa: E402
from helpers.commands import ATTNMESH, TORCHRUN, Command  # noqa: E402
from helpers.serving import write_model  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--host", "0.0.0.0"), "--host must be one of 127.0.0.1, ::1, localhost without a key"),
        (("--ranks", 3, "--groups", 2), "--groups must divide the 3 ranks, got 2"),
        (
            ("--prefill-ranks", 2),
            "--prefill-ranks and --decode-ranks must be given together, got --prefill-ranks 2 alone",
        ),
        (
            ("--decode-ranks", 2),
            "--prefill-ranks and --decode-ranks must be given together, got --decode-ranks 2 alone",
        ),
        (("--prefill-ranks", 0, "--decode-ranks", 2), "0"),
        (
            ("--ranks", 3, "--prefill-ranks", 2, "--decode-ranks", 2),
            "--prefill-ranks + --decode-ranks must be the number of ranks, 3, got 2 + 2",
        ),
        (
            ("--device", "cuda", "--prefill-ranks", 1, "--decode-ranks", 1),
            "--prefill-ranks is tested on the CPU only, and requires --device cpu, got cuda",
        ),
        (
            ("--virtual", "--prefill-ranks", 1, "--decode-ranks", 1),
            "--prefill-ranks must be processes, which step on their own, got --virtual",
        ),
        (
            ("--tp", 2, "--prefill-ranks", 2, "--decode-ranks", 2),
            "--prefill-ranks 2 is for whole weights on every rank, got a sharding",
        ),
        (("--prefill-ranks", 2, "--decode-ranks", 3, "--groups", 2), "--groups must divide the 3 ranks, got 2"),
        (("--reproducible", "--storage", "int8"), "--reproducible requires a KV cache that is not quantized"),
        (("--reproducible", "--ranks", 2, "--tp", 2), "--reproducible requires whole weights on every rank"),
        (
            ("--reproducible", "--prefill-ranks", 1, "--decode-ranks", 1),
            "--reproducible is for ranks that compute everything, got --prefill-ranks 1",
        ),
        (("--groups", 2, "--tp", 2), "--groups is for whole weights on every rank, got --groups 2"),
        (("--ranks", 3, "--kvdp", 2), "--tp x --kvdp x --cp must be the number of ranks, 3, got --kvdp 2"),
        (("--cp", 4, "--sharding", "auto"), "--sharding auto chooses all of --tp, --kvdp and --cp, got --cp 4"),
        (("--ranks", 3, "--tp", 3), "tp must divide the kv heads or be a multiple of them, got tp=3"),
        (("--ranks", 5, "--sharding", "auto"), "over 5 ranks: it has 4 query heads and 2 kv heads"),
        (
            ("--sharding", "auto", "--memory", "1MB", "--cache-tokens", "1M"),
            "per rank (19.07 kB of weights, 67.17 MB of KV cache",
        ),
        (("--tp", 2, "--memory", "1MB", "--cache-tokens", "1M"), "and --memory is 1 MB; reduce --cache-tokens"),
        (("--tool-call-parser", "xml"), "--tool-call-parser must be one of hermes, llama3_json, mistral, qwen3_coder,"),
        (("--reasoning-parser", "r1"), "--reasoning-parser must be think or none, got 'r1'"),
        (("--ssl-keyfile", "/no/key"), "--ssl-keyfile requires --ssl-certfile, got --ssl-keyfile /no/key alone"),
        (("--ssl-certfile", "/no/file"), "--ssl-certfile /no/file must be a certificate and its key"),
        (("--model", "/no/model"), "/no/model"),
        (("--port", 65536), "65536"),
        (("--cache-tokens", "many"), "many"),
        (("--cache-tokens", "1000G"), "1000G"),
        (("--storage", "int4"), "storage must be None or one of fp32, fp8, int8, bfp8 for a model in torch.float32"),
    ],
)
def test_options_that_are_refused(model, options, message):
    assert_refused(run_command("serve", "--model", model, *options), message)


@pytest.mark.parametrize("key", ["short", "with spaces in it all", "schlüssel-schlüssel"])
def test_keys_that_are_refused(model, tmp_path, key):
    file = tmp_path / "key"
    file.write_text(key)
    assert_refused(run_command("serve", "--model", model, "--api-key-file", file), "at least 16 printable ASCII")
    ran = run_command("serve", "--model", model, env={"ATTNMESH_API_KEY": key})
    assert_refused(ran, "ATTNMESH_API_KEY must have at least 16 printable ASCII")
    assert key not in ran.output


def test_a_cache_that_does_not_fit_is_refused(model, monkeypatch):
    monkeypatch.setattr("attnmesh.cli.language_model.free_memory", lambda device: 2**30)
    ran = run_command("serve", "--model", model, "--ranks", 1, "--cache-tokens", "10M")
    assert_refused(ran, "of KV cache) on cpu, which has", "reduce --cache-tokens")
    ran = run_command("serve", "--model", model, "--ranks", 4, "--cache-tokens", "3M")  # four groups, each with as many
    assert_refused(ran, "4 x (", "805.3 MB of KV cache) on cpu, which has")


def test_the_kv_cache_of_a_rank_has_its_part_of_tokens_and_sequences(model, monkeypatch):
    sizes = []
    monkeypatch.setattr("attnmesh.launch.run", lambda serve, ranks, **how: None)
    monkeypatch.setattr("attnmesh.cli.serve._on_signals", lambda settings: None)
    monkeypatch.setattr("attnmesh.cli.serve.kv_cache_bytes", lambda config, storage, *size: sizes.append(size) or 0)
    usual = ("serve", "--model", model, "--virtual", "--ranks", 4, "--cache-tokens", 601, "--max-sequences", 6)
    ran = run_command(*usual, "--groups", 2)
    assert ran.exit_code == 0, ran.output
    assert sizes == [(301, 3)]


@pytest.mark.parametrize(
    ("options", "sharding", "said"),
    [
        (("--groups", 2), DecodeSharding(kvdp=2, cp=2), ""),
        ((), DecodeSharding(kvdp=4), ""),
        (("--tp", 2, "--kvdp", 2), DecodeSharding(tp=2, kvdp=2), "Weights and KV cache: TP2-KVDP2."),
        (("--sharding", "auto"), DecodeSharding(tp=4), "Weights and KV cache: TP4, the fastest of 6 that fit"),
        (
            ("--sharding", "auto", "--memory", "110kB", "--max-sequences", 1),
            DecodeSharding(tp=2, cp=2),
            "Weights and KV cache: TP2-CP2, the fastest of 2 that fit, 69.25 kB of 110 kB",
        ),
    ],
)
def test_how_the_ranks_divide_the_model(model, monkeypatch, options, sharding, said):
    calls = []
    monkeypatch.setattr("attnmesh.launch.run", lambda serve, ranks, **how: calls.append(how))
    monkeypatch.setattr("attnmesh.cli.serve._on_signals", lambda settings: None)
    ran = run_command("serve", "--model", model, "--ranks", 4, "--virtual", "--cache-tokens", 600, *options)
    assert ran.exit_code == 0, ran.output
    (how,) = calls
    assert how["settings"].sharding == sharding
    assert how["settings"].shard_weights == (how["shared_model"] is None) == bool(said)
    assert said in words(ran.output)


def test_ranks_that_prefill_and_ranks_that_decode(model, monkeypatch):
    calls = []
    monkeypatch.setattr("attnmesh.launch.run", lambda serve, ranks, **how: calls.append((ranks, how)))
    monkeypatch.setattr("attnmesh.cli.serve._on_signals", lambda settings: None)
    ran = run_command("serve", "--model", model, "--prefill-ranks", 3, "--decode-ranks", 2, "--cache-tokens", 600)
    assert ran.exit_code == 0, ran.output
    ((ranks, how),) = calls
    assert ranks == 5
    assert (how["settings"].prefill_ranks, how["settings"].sharding) == (3, DecodeSharding(kvdp=2))
    assert "on 5 ranks (3 prefill, 2 decode)" in words(ran.output)


@pytest.mark.sweep
@pytest.mark.parametrize("start", [ATTNMESH, [*TORCHRUN, *ATTNMESH]], ids=["processes", "torchrun"])
def test_a_server_with_ranks_that_prefill(model, start):
    """Concurrent answers of unequal length, streamed and sampled, are those of one process."""
    sides = (1, 1) if start != ATTNMESH else (2, 2)
    options = ("--port", 0, "--served-model-name", "m", "--prefill-ranks", sides[0], "--decode-ranks", sides[1])
    prompts = [("a b c d e f g h " * n)[: 2 * length - 1] for n, length in ((1, 3), (4, 30), (9, 70), (2, 12), (1, 1))]
    with Command(*start, "serve", "--model", model, *options, "--max-sequences", 3) as command:
        url = re.search(r"http://\S+", command.line())[0]
        answers = [[] for _ in prompts]
        how = {"max_tokens": 40, "min_tokens": 40, "temperature": 1, "seed": 4}
        threads = [asked(url, found, prompt=prompt, **how) for found, prompt in zip(answers, prompts, strict=True)]
        for thread in threads:
            thread.join()
        command.signal(signal.SIGTERM)
        found = command.wait(60)
        assert found.left == []
        assert found.code == 0 or start != ATTNMESH  # torchrun reports the signal
    loaded, tokenizer = load_model(model)
    for ((status, text),), prompt in zip(answers, prompts, strict=True):
        alone = Generator(loaded, tokenizer, cache_tokens=400)
        request = alone.submit(prompt, max_new_tokens=40, min_new_tokens=40, sampling=Sampling(1.0, seed=4))
        list(alone.stream(request))
        assert (status, json.loads(text)["choices"][0]["text"]) == (200, request.text)


@pytest.mark.sweep
def test_a_sharded_model_answers(model):
    options = ("--port", 0, "--served-model-name", "m", "--ranks", 2, "--sharding", "auto", "--memory", "1GiB")
    with Command(*ATTNMESH, "serve", "--model", model, *options) as command:
        url = re.search(r"http://\S+", command.line())[0]
        body = json.dumps(
            {"model": "m", "prompt": "a b c", "max_tokens": 9, "min_tokens": 9, "temperature": 0}
        ).encode()
        call = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
        answer = json.loads(urllib.request.urlopen(call, timeout=200).read())
        command.signal(signal.SIGTERM)
        found = command.wait(60)
        assert (found.code, found.left) == (0, [])
    loaded, tokenizer = load_model(model)
    tokens = generate(loaded, tokenizer, ["a b c"], max_new_tokens=9, stop=[])
    assert answer["choices"][0]["text"] == "".join(token.text for token in tokens)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("number", "how"), in_turn([signal.SIGINT, signal.SIGTERM], ["parent", "all", "virtual", "torchrun"])
)
def test_a_signal_ends_the_server_after_its_answers(model, number, how):
    ranks = {"torchrun": (), "virtual": ("--ranks", 2, "--virtual")}.get(how, ("--ranks", 2))
    start = [*TORCHRUN, *ATTNMESH] if how == "torchrun" else ATTNMESH
    options = ("--model", model, "--port", 0, "--served-model-name", "m", "--grace", 120, *ranks)
    with Command(*start, "serve", *options) as command:
        url = re.search(r"http://\S+", command.line())[0]
        body = {"model": "m", "prompt": "a b c", "max_tokens": 400, "min_tokens": 400}
        call = urllib.request.Request(
            f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        answers = []
        thread = threading.Thread(target=lambda: answers.append(urllib.request.urlopen(call, timeout=200).read()))
        thread.start()
        health = f"{url.removesuffix('/v1')}/metrics"
        while "attnmesh_requests_in_progress 1.0" not in urllib.request.urlopen(health, timeout=60).read().decode():
            pass
        command.signal_all(number) if how == "all" else command.signal(number)
        found = command.wait(60)
        thread.join()
        assert json.loads(answers[0])["usage"]["completion_tokens"] == 400
        assert found.left == []
        if how != "torchrun":  # which reports a signal itself
            assert found.code == 0
            lines = [line for line in found.noise if "Loading m" not in line]
            assert all('"GET /metrics" 200' in line for line in lines[:-2])
            assert '"POST /v1/completions" 200' in lines[-2]
            assert "INFO the server has shut down: " in lines[-1]


def asked(url, answers, **changes):
    """A thread that asks for a long answer, and appends its status and text."""
    body = {"model": "m", "prompt": "a b c", "max_tokens": 1900, "min_tokens": 1900, **changes}
    call = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})

    def ask():
        try:
            with urllib.request.urlopen(call, timeout=200) as answer:
                answers.append((answer.status, answer.read().decode()))
        except urllib.error.HTTPError as error:
            answers.append((error.code, error.read().decode()))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [("--ranks", 2, "--groups", 1), ("--prefill-ranks", 1, "--decode-ranks", 1)])
def test_a_rank_that_is_killed_is_answered_with_an_error(model, ranks):
    options = ("--model", model, "--port", 0, "--served-model-name", "m", *ranks)
    with Command(*ATTNMESH, "serve", *options, "--no-access-log") as command:
        url = re.search(r"http://\S+", command.line())[0]
        answers = []
        threads = [asked(url, answers), asked(url, answers, stream=True)]
        metrics = f"{url.removesuffix('/v1')}/metrics"
        tokens = 0.0
        while tokens < 60:  # so that the stream has begun
            text = urllib.request.urlopen(metrics, timeout=60).read().decode()
            tokens = float(re.search(r"^attnmesh_generated_tokens_total (\S+)", text, re.MULTILINE)[1])
        command.signal(signal.SIGKILL, command.ranks()[1])
        found = command.wait(60)
        for thread in threads:
            thread.join()
    assert (found.code, found.left) == (1, [])
    assert found.seconds < 30
    assert sorted(status for status, _ in answers) == [200, 500]  # the stream had begun
    assert all("the server has failed: CommError" in text and "server_error" in text for _, text in answers)
    assert "rank 1 of 2 was killed (SIGKILL)" in " ".join(found.noise)
    assert any("INFO the server has shut down" in line for line in found.noise)


@pytest.mark.sweep
def test_a_second_signal_ends_it_at_once(model):
    with Command(*ATTNMESH, "serve", "--model", model, "--port", 0, "--ranks", 2, "--grace", 600) as command:
        url = re.search(r"http://\S+", command.line())[0]
        body = {"model": Path(model).name, "prompt": "a b c", "max_tokens": 1900, "min_tokens": 1900, "stream": True}
        call = urllib.request.Request(
            f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(call, timeout=200) as answer:
            answer.readline()
            command.signal(signal.SIGTERM)
            for _ in range(40):  # two signals at the same time may be one
                answer.readline()
            command.signal(signal.SIGTERM)
            found = command.wait(60)
        assert (found.code, found.left) == (143, [])
        assert "attnmesh serve: terminated" in found.noise
