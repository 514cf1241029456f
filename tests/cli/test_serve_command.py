"""`attnmesh serve`: what it refuses before any rank starts, and how signals end it."""

import json
import re
import signal
import threading
import urllib.request
from pathlib import Path

import pytest

for name in ("transformers", "openai", "fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(name)

from helpers.cli import assert_refused  # noqa: E402
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
        (("--ranks", 3, "--kvdp", 2), "--kvdp must divide the 3 ranks, got 2"),
        (("--model", "/no/model"), "/no/model"),
        (("--port", 65536), "65536"),
        (("--cache-tokens", "many"), "many"),
        (("--cache-tokens", "1000G"), "1000G"),
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


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["INT", "TERM"])
@pytest.mark.parametrize("how", ["parent", "all", "virtual", "torchrun"])
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
        thread = threading.Thread(target=lambda: answers.append(urllib.request.urlopen(call, timeout=60).read()))
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
            assert [line for line in found.noise if "Loading m" not in line] == []


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(model):
    with Command(*ATTNMESH, "serve", "--model", model, "--port", 0, "--ranks", 2, "--grace", 600) as command:
        url = re.search(r"http://\S+", command.line())[0]
        body = {"model": Path(model).name, "prompt": "a b c", "max_tokens": 1900, "min_tokens": 1900, "stream": True}
        call = urllib.request.Request(
            f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(call, timeout=60) as answer:
            answer.readline()
            command.signal(signal.SIGTERM)
            for _ in range(40):  # two signals at the same time may be one
                answer.readline()
            command.signal(signal.SIGTERM)
            found = command.wait(30)
        assert (found.code, found.left) == (143, [])
        assert "attnmesh serve: terminated" in found.noise
