"""`attnmesh warmup`: what it refuses, what it prints, and that the first call of a program then compiles nothing."""

import json
import os
import subprocess
import sys

import pytest
import torch

from attnmesh.cli import options, warmup
from attnmesh.compilation.run import Kernel, Outcome
from helpers.cli import assert_refused, run, words

HEADS = ("--q-heads", 4, "--kv-heads", 2, "--head-dim", 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--model, or --q-heads and --head-dim, must be given"),
        (("--model", "llama-3.1-8b", "--window", 8), "--window must not be given with --model"),
        (("--model", "llama-9"), "llama-9"),
        (("learn", *HEADS), "'learn' is not one of 'train', 'prefill', 'decode'"),
        (("train", "--q-heads", 4, "--kv-heads", 3, "--head-dim", 16), "kv_heads must divide 4 query heads, got 3"),
        (("decode", *HEADS, "--storage", "fp7"), "storage must be one of"),
    ],
)
def test_nonsense_is_refused(arguments, message):
    assert_refused(run("warmup", *arguments), message)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_refuses():
    assert_refused(run("warmup", *HEADS), "cuda: no CUDA device is available")


@pytest.fixture
def without_gpu(monkeypatch):
    """The calls that would be made; the last one fails."""
    asked = []

    def compile_calls(calls, processes):
        asked.extend(calls)
        for i, call in enumerate(reversed(calls)):
            kernels = (Kernel("one_kernel", 1.5, False), Kernel("other_kernel", 0.1, True))
            yield Outcome(call, kernels, 2.0, "OutOfMemoryError: no" if i == 0 else None)

    monkeypatch.setattr(options, "check_device", lambda device: None)
    monkeypatch.setattr(warmup, "compile_calls", compile_calls)
    return asked


def test_it_prints_kernels_seconds_and_failures(without_gpu):
    pytest.importorskip("triton")
    ran = run("warmup", "train", "decode", *HEADS, "--length", "1k", "--length", "2k", "--ranks", 2)
    assert ran.exit_code == 1
    text = words(ran.output)
    assert [(str(call.step), call.length, call.ranks) for call in without_gpu] == [
        ("train", 1024, 2), ("train", 2048, 2), ("decode", 1024, 1), ("decode", 2048, 1),
    ]  # fmt: skip
    assert "failed: decode, 4/2 heads of 16, bf16, 2,048 tokens: OutOfMemoryError: no" in text
    assert "4 kernels compiled" in text
    assert "other_kernel in the cache" in text


def test_json(without_gpu):
    pytest.importorskip("triton")
    ran = run("warmup", "train", "--model", "gpt-oss-20b", "--json")
    assert ran.exit_code == 1  # of two layers, one fails
    found = json.loads(ran.output)
    assert [call["call"]["layer"]["window"] for call in found["calls"]] == [128, None]
    assert found["calls"][0]["kernels"][0] == {"name": "one_kernel", "seconds": 1.5, "was_cached": False}


FIRST_CALL = """
import torch
from triton import knobs
import attnmesh as am
compiled = []
def listen(*, metadata, cache_hit, **_):
    if not cache_hit:
        compiled.append(metadata["name"])
knobs.compilation.listener = listen
x = [torch.randn(1, 512, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]
q, k, v = (each.transpose(1, 2).requires_grad_() for each in x)
am.attention(q, k, v, mask=am.Causal()).sum().backward()
print(compiled)
"""


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_then_the_first_call_compiles_nothing(tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    how = {"env": environment, "check": True, "capture_output": True, "text": True, "timeout": 300}
    shapes = ["--q-heads", "4", "--kv-heads", "2", "--head-dim", "64", "--length", "512"]
    done = subprocess.run([sys.executable, "-m", "attnmesh.warmup", "train", *shapes, "--json"], **how)
    (call,) = json.loads(done.stdout)["calls"]
    assert call["error"] is None
    assert not any(kernel["was_cached"] for kernel in call["kernels"])
    assert subprocess.run([sys.executable, "-c", FIRST_CALL], **how).stdout.strip() == "[]"
