"""The calls by which kernels are compiled: what the library is called with, and what a model's layers are."""

import json

import pytest
import torch

from attnmesh.compilation import calls
from attnmesh.compilation.calls import Call, Layer, Step, layers_of
from attnmesh.compilation.run import compile_calls, make
from attnmesh.core.masks import Causal, SlidingWindow
from attnmesh.planner.models import model, read_model_config

CPU = torch.device("cpu")
PLAIN = Layer(4, 2, 16, 16, "fp32")
LATENT = Layer(4, 4, 24, 16, "bf16", latent=40, latent_value=32)
WINDOW = Layer(4, 2, 16, 16, "bf16", window=5, softcap=2.0, sinks=True)


@pytest.fixture
def made(monkeypatch):
    """The calls of operations: name, shapes of the tensors, options, and whether a backward ran."""
    found = []

    def recorded(name):
        real = getattr(calls, name)

        def call(*args, **options):
            shapes = [tuple(getattr(x, "shape", ())) for x in args]
            entry = {"name": name, "shapes": shapes, "dtype": args[0].dtype, "backward": False, **options}
            found.append(entry)
            out = real(*args, **options)
            if out.requires_grad:
                out.register_hook(lambda _: entry.update(backward=True))
            return out

        monkeypatch.setattr(calls, name, call)

    for name in ("attention", "paged_prefill_attention", "paged_decode_attention"):
        recorded(name)
    return found


def test_training_is_attention_and_its_backward(made):
    Call(Step.TRAIN, PLAIN, 40, batch=2).run(CPU)
    (call,) = made
    assert call["name"] == "attention"
    assert call["shapes"] == [(2, 4, 40, 16), (2, 2, 40, 16), (2, 2, 40, 16)]
    assert call["backward"]
    assert call["mask"] == Causal()


def test_prefill_is_a_new_prompt_and_one_that_continues(made):
    Call(Step.PREFILL, WINDOW, 41, block_size=8).run(CPU)
    new, later = made
    assert new["mask"] == Causal() & SlidingWindow(4)
    assert not new["backward"]
    assert (new["softcap"], new["sinks"].shape) == (2.0, (4,))
    assert later["name"] == "paged_prefill_attention"
    assert later["shapes"][:2] == [(1, 4, 21, 16), (6, 8, 2, 16)]
    assert (later["window"], later["cur_pos"]) == (5, [40])


def test_decode_reads_a_cache_in_its_storage(made):
    Call(Step.DECODE, PLAIN, 40, batch=3, block_size=8, storage="int8").run(CPU)
    (call,) = made
    assert call["shapes"][0] == (3, 4, 1, 16)
    assert call["cur_pos"].tolist() == [39] * 3


def test_latents_are_attended_to_in_their_width(made):
    Call(Step.DECODE, LATENT, 40, block_size=16).run(CPU)
    Call(Step.PREFILL, LATENT, 40, block_size=16).run(CPU)
    decode, new, later = made
    assert decode["shapes"][:3] == [(1, 4, 1, 40), (3, 16, 1, 40), (3, 16, 1, 32)]
    assert decode["scale"] == 24**-0.5
    assert new["shapes"] == [(1, 4, 40, 24), (1, 4, 40, 24), (1, 4, 40, 16)]
    assert later["shapes"][0] == (1, 4, 20, 40)


@pytest.mark.parametrize("step", [Step.TRAIN, Step.PREFILL])
def test_over_ranks_context_parallelism_makes_the_calls(step, made, monkeypatch):
    lengths = []
    real = calls.ContextParallel.attention
    monkeypatch.setattr(
        calls.ContextParallel, "attention",
        lambda self, q, k, v, **how: lengths.append((q.shape[2], how["length"])) or real(self, q, k, v, **how),
    )  # fmt: skip
    Call(step, WINDOW, 40, ranks=2).run(CPU)
    assert lengths == [(20, 40)] * 2
    assert [call["name"] for call in made] == ["paged_prefill_attention"] * (step is Step.PREFILL)


def test_layers_of_models(tmp_path):
    (deepseek,) = layers_of(model("deepseek-v3"), "bf16")
    assert deepseek == Layer(128, 128, 192, 128, "bf16", latent=576, latent_value=512)
    assert {(x.window, x.sinks, x.key_dim) for x in layers_of(model("gpt-oss-20b"), "bf16")} == {
        (128, True, 64), (None, True, 64),
    }  # fmt: skip
    config = {
        "model_type": "gemma2", "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64, "head_dim": 32,
        "num_hidden_layers": 2, "vocab_size": 10, "intermediate_size": 8, "sliding_window": 16,
        "attn_logit_softcapping": 50.0, "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = layers_of(read_model_config(tmp_path / "config.json"), "fp16")
    assert found == [Layer(8, 4, 32, 32, "fp16", window=window, softcap=50.0) for window in (16, None)]
    (tmp_path / "config.json").write_text(json.dumps(config | {"attn_logit_softcapping": -1}))
    with pytest.raises(ValueError, match=r"attn_logit_softcapping in .*config\.json must be"):
        read_model_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Layer(4, 3, 16, 16), "kv_heads must divide 4 query heads, got 3"),
        (lambda: Layer(4, 2, 16, 16, softcap=0.0), "softcap must be"),
        (lambda: Call(Step.TRAIN, PLAIN, 1), "length must be"),
        (lambda: Call(Step.DECODE, PLAIN, 40, storage="fp7"), "storage must be one of bf16, .* got 'fp7'"),
        (
            lambda: Call(Step.DECODE, LATENT, 40, storage="int8"),
            "storage must be one of .*fp8_ds_mla, got 'int8'",
        ),
    ],
)
def test_what_cannot_be_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_call_that_fails_has_its_error(monkeypatch):
    pytest.importorskip("triton")
    call = Call(Step.TRAIN, PLAIN, 8)
    assert make(call, "cpu").error is None

    def fail(*args, **options):
        raise RuntimeError("no memory")

    monkeypatch.setattr(calls, "attention", fail)
    assert make(call, "cpu").error == "RuntimeError: no memory"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_every_call_has_a_process_and_an_outcome():
    pytest.importorskip("triton")
    both = [Call(Step.TRAIN, PLAIN, 8), Call(Step.DECODE, LATENT, 8)]
    outcomes = list(compile_calls(both))
    assert {outcome.call for outcome in outcomes} == set(both)
    assert all(outcome.error is not None for outcome in outcomes)  # there is no GPU
