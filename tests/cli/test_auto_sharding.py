"""`--sharding auto`: the fastest sharding whose weights and KV cache fit, the one that `attnmesh plan decode` names."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from attnmesh.cli.language_model import DeviceMemory  # noqa: E402
from attnmesh.cli.plan import AutoSharding  # noqa: E402
from attnmesh.generation.models import ShardedMemory  # noqa: E402
from attnmesh.plan.decode import DecodeSharding  # noqa: E402
from attnmesh.planner import models  # noqa: E402
from helpers.cases import sweep  # noqa: E402
from helpers.cli import run  # noqa: E402
from helpers.decoder_types import sharded_types  # noqa: E402
from helpers.small_models import small_config  # noqa: E402

FOLDER = Path(models.__file__).parent
K = 1024


@cache
def model(name):
    """The configuration of a model in the planner's catalog, without quantization."""
    values = json.loads((FOLDER / f"{name}.json").read_text())
    return transformers.AutoConfig.for_model(**{**values, "quantization_config": None, "dtype": "bfloat16"})


@cache
def rank_memory(name, context):
    return ShardedMemory(model(name), torch.bfloat16, cache_tokens=context)


def auto(name, ranks, context, memory):
    available = DeviceMemory("cpu", ranks, stated=int(memory * 1e9))
    held = rank_memory(name, context)
    return AutoSharding(Path(name) / "config.json", model(name), torch.bfloat16, ranks, 1, context, held, available)


def plan(tmp_path, name, ranks, context, memory):
    """What `attnmesh plan decode` prints for the same model and memory."""
    folder = tmp_path / name
    model(name).save_pretrained(folder)
    ran = run(
        "plan", "decode", "--model", folder, "--ranks", ranks, "--batch", 1, "--length", context, "--hardware", "cpu",
        "--ranks-per-node", ranks, "--memory", f"{memory}GB", "--json",
    )  # fmt: skip
    return ran.exit_code, json.loads(ran.stdout)


@pytest.mark.parametrize(
    ("name", "ranks", "context", "memory", "expected"),
    [
        ("llama-3.1-8b", 4, 8 * K, 20, "TP4"),
        sweep("qwen3-235b-a22b", 8, 128 * K, 80, "TP8"),
        ("qwen3-235b-a22b", 8, 1024 * K, 98, "TP4-CP2"),  # TP8 keeps every kv head twice
        ("gpt-oss-20b", 16, 1024 * K, 5, "TP8-CP2"),  # as above; layers with a window take little
        ("llama-3.1-70b", 8, 8 * K, 15, None),
    ],
)
def test_plan_and_auto_agree(tmp_path, name, ranks, context, memory, expected):
    code, planned = plan(tmp_path, name, ranks, context, memory)
    assert planned["best_run_here"] == expected
    assert code == (expected is None)
    if expected is None:
        with pytest.raises(ValueError, match=r"no sharding of .* fits: TP8, the smallest, takes 17\.\d+ GB per rank"):
            auto(name, ranks, context, memory).choose()
    else:
        assert str(auto(name, ranks, context, memory).choose()[0]) == expected


@pytest.mark.parametrize("name", ["llama-3.1-8b", sweep("qwen3-235b-a22b"), "gpt-oss-20b"])
def test_the_plans_memory_is_that_of_the_ranks(tmp_path, name):
    _, planned = plan(tmp_path, name, 8, 128 * K, 1000)
    for option in planned["plans"]:
        sharding = DecodeSharding(**{part[:-1].lower(): int(part[-1]) for part in option["plan"].split("-")})
        held = rank_memory(name, 128 * K).of(sharding)
        assert option["memory"]["weights"] == pytest.approx(held.weights, rel=0.003)
        if name in ("llama-3.1-8b", "qwen3-235b-a22b"):  # without windows
            assert option["memory"]["kv_cache"] == pytest.approx(held.kv_cache, rel=0.01)


def test_plans_that_do_not_run_as_they_are_are_marked():
    quantized = run(
        "plan",
        "decode",
        "--model",
        "deepseek-v3",
        "--length",
        "8k",
        "--batch",
        1,
        "--ranks",
        16,
        "--memory",
        "60GB",
        "--json",
    )
    options = {option["plan"]: option for option in json.loads(quantized.stdout)["plans"]}
    assert options["TP16"]["fits"]
    assert options["TP16"]["not_run_here"].endswith(" GB here")  # with weights in bf16
    two = run("plan", "decode", "--model", "llama-3.1-8b", "--length", "8k", "--batch", 2, "--ranks", 2, "--json")
    marked = {option["plan"]: option["not_run_here"] for option in json.loads(two.stdout)["plans"]}
    assert (marked["2 x TP1"], marked["TP2"]) == ("run as 2 commands", "")


@pytest.mark.sweep
@pytest.mark.parametrize("kind", sharded_types())
def test_every_model_that_can_be_sharded_has_a_choice(kind):
    config = small_config(kind)
    held = ShardedMemory(config, torch.float32, cache_tokens=300, max_sequences=3)
    available = DeviceMemory("cpu", 2, stated=10**9)
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):  # no plans of decode steps
        with pytest.raises(ValueError, match="model must have attention in all layers for plans of decode steps"):
            AutoSharding(Path("m"), config, torch.float32, 2, 3, 100, held, available).choose()
        return
    sharding, why = AutoSharding(Path("m"), config, torch.float32, 2, 3, 100, held, available).choose()
    assert sharding.ranks == 2
    assert why.startswith("the fastest of 3 that fit, ")


def test_what_does_not_fit_is_reported_in_bytes_and_with_enough_ranks():
    with pytest.raises(ValueError, match="no sharding of") as error:
        auto("llama-3.1-70b", 8, 8 * K, 15).choose()
    assert "of weights, " in str(error.value)
    assert "13.5 GB are usable, nine tenths of 15 GB (--memory). 16 ranks would be enough." in str(error.value)


def test_it_knows_the_memory_of_this_machine():
    measured = DeviceMemory("cpu", 2)
    assert 2**25 < measured.planned < 2**45
    assert str(measured) == "free on cpu, divided by 2 ranks"


def test_ranks_of_torchrun_plan_for_the_whole_memory_of_their_machines(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr("attnmesh.cli.language_model.total_memory", lambda device: 2 * 10**9)
    assert DeviceMemory("cpu", 2).planned == 10**9
    assert str(DeviceMemory("cpu", 2)) == "of cpu, divided by 2 ranks"
