"""`attnmesh plan prefill` and `attnmesh plan decode --model`: rankings, advice, bad input."""

import json
import re
from io import StringIO

import pytest
from rich.console import Console

from attnmesh.cli.plan import show_ranking
from attnmesh.planner import models as known_models
from attnmesh.planner.catalog import cluster
from attnmesh.planner.decode import DecodeRequest, decode_ranking
from attnmesh.planner.models import model
from attnmesh.planner.prefill import PrefillRequest, prefill_ranking
from helpers.cases import sweep
from helpers.cli import assert_refused, run, words

SMALL = ("--model", "llama-3.1-8b", "--length", "32k", "--ranks", "4")
BOTH = pytest.mark.parametrize("what", ["prefill", "decode"])


def plan(what: str, *arguments: object):
    batch = () if what == "prefill" or "--batch" in arguments else ("--batch", "2")
    return run("plan", what, *arguments, *batch)


def as_json(what: str, *arguments: object) -> dict:
    ran = plan(what, *arguments, "--json")
    assert ran.exit_code in (0, 1), ran.output
    return json.loads(ran.stdout)


# What is said.


@BOTH
def test_a_plan_prints_the_best_first_and_why_the_others_lose(what):
    ran = plan(what, *SMALL)
    assert ran.exit_code == 0, ran.output
    llama, h200 = model("llama-3.1-8b"), cluster("h200")
    asked = {"prefill": (PrefillRequest, 1), "decode": (DecodeRequest, 2)}[what]
    task = asked[0](llama, 32768, asked[1], 4, h200)
    ranking = prefill_ranking(task) if what == "prefill" else decode_ranking(task)
    assert ranking.best is not None
    assert ran.output.startswith(f"{ranking.best.name}: ")
    said = words(ran.output)
    assert f"Bottleneck: {ranking.best.bottleneck}." in said
    assert f"Next: {ranking.options[1].name}, {ranking.why(ranking.options[1])}" in said
    assert "4 x h200, one node, nvlink4; device figures: measured on one H200" in said
    places = [said.rindex(f" {option.name} ") for option in ranking.options[:6]]
    assert places == sorted(places)
    for option in ranking.options[:6]:
        assert ranking.why(option) in said


@BOTH
def test_json_says_the_same(what):
    found = as_json(what, *SMALL)
    assert plan(what, *SMALL).output.startswith(f"{found['best']}: ")
    assert found["best"] == found["plans"][0]["plan"]
    assert [option["seconds"] for option in found["plans"]] == sorted(o["seconds"] for o in found["plans"])
    for option in found["plans"]:
        assert option["fits"]
        parts = option["memory"]
        assert parts["total"] == pytest.approx(parts["weights"] + parts["kv_cache"] + parts["activations"])
    assert (found["device_memory"], found["advice"]) == (141e9, "")


@BOTH
def test_names_files_and_folders_of_a_model_are_one(what, tmp_path):
    text = (known_models._FOLDER / "llama-3.1-8b.json").read_text()
    (tmp_path / "config.json").write_text(text)
    names = ("llama-3.1-8b", "Meta-Llama/Llama-3.1-8B-Instruct", tmp_path, tmp_path / "config.json")
    found = [as_json(what, "--model", name, "--length", "32768", "--ranks", 4) for name in names]
    assert all(one["plans"] == found[0]["plans"] for one in found)


@pytest.mark.parametrize(("what"), [("prefill"), sweep("decode")])
def test_machines_are_as_they_were_asked_for(what, tmp_path):
    common = ("--model", "qwen3-8b", "--length", "16k", "--ranks", 8)
    plain = as_json(what, *common)
    slow = as_json(what, *common, "--links", "ethernet", "--ranks-per-node", 2, "--rails", 1)
    assert "4 nodes of 2, ethernet within nodes, ethernet between nodes (1 ports per node)" in slow["cluster"]
    assert slow["plans"][0]["seconds"] >= plain["plans"][0]["seconds"]
    file = tmp_path / "mine.toml"
    file.write_text(
        '[device.h200]\nmemory_gb = 12\n[device.toy]\nsource = "made up"\nmemory_gb = 50\nlaunch_us = 1\n'
        'peak_tflops = 1\npeak_gbs = 1\nintra_node = "pcie"\ninter_node = "pcie"\nranks_per_node = 8\nrails = 1\n'
    )
    assert as_json(what, *common, "--hardware-file", file)["device_memory"] == 12e9
    toy = as_json(what, *common, "--hardware-file", file, "--hardware", "Toy")
    assert toy["cluster"] == "8 x toy, one node, pcie; device figures: made up"
    assert toy["plans"][0]["seconds"] > 100 * plain["plans"][0]["seconds"]


@BOTH
def test_an_eight_bit_cache_is_about_half(what):
    full, eight = (as_json(what, *SMALL, "--storage", storage) for storage in ("bf16", "fp8"))
    cache = [{o["plan"]: o["memory"]["kv_cache"] for o in found["plans"]} for found in (full, eight)]
    assert all(0.5 <= cache[1][way] / nbytes < 0.55 for way, nbytes in cache[0].items())


def test_tables_hide_some_and_all_shows_them():
    common = ("--model", "gpt-oss-20b", "--length", "8k", "--ranks", 8, "--batch", 8)
    short, every = plan("decode", *common).output, plan("decode", *common, "--all").output
    hidden = re.search(r"(\d+) more plans are hidden \(show them with --all\)", words(short))
    assert hidden is not None
    assert "are hidden" not in every
    found = as_json("decode", *common)["plans"]
    assert len(found) == 12 + int(hidden[1])
    assert all(f"│ {option['plan']} " in every for option in found)


@pytest.mark.parametrize("width", [80, sweep(110), sweep(140)])
def test_tables_of_usual_widths_do_not_fold_and_keep_the_why(width):
    ranking = decode_ranking(DecodeRequest(model("gpt-oss-20b"), 8192, 8, 8, cluster("h200")))
    console = Console(width=width, file=StringIO())
    show_ranking(console, ranking, "plans", "a cluster", tokens=1, show_all=False)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    for option in ranking.options[:12]:
        (line,) = (line for line in lines if f"│ {option.name} " in line)
        assert ranking.why(option) in line
    header = next(line for line in lines if "┃" in line)
    assert ("KV cache" in header, "bytes sent" in header) == (width >= 130, width >= 100)


# Nothing fits.


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        ("prefill", ("--model", "llama-3.1-405b", "--length", "128k", "--ranks", 1)),
        sweep("decode", ("--model", "deepseek-v3", "--length", "128k", "--ranks", 8, "--hardware", "h100")),
        sweep("decode", ("--model", "llama-3.1-70b", "--length", "1M", "--ranks", 6, "--batch", 4)),
    ],
)
def test_where_nothing_fits_the_number_of_devices_that_is_advised_does(what, arguments):
    ran = plan(what, *arguments)
    assert ran.exit_code == 1
    assert ran.output.startswith("No plan fits: the smallest needs ")
    found = as_json(what, *arguments)
    assert (found["best"], not any(option["fits"] for option in found["plans"])) == (None, True)
    assert found["advice"] in words(ran.output)
    advised = re.search(r"(\d+) ranks would be enough", found["advice"])
    assert advised is not None
    given = list(arguments)
    given[given.index("--ranks") + 1] = int(advised[1])
    assert as_json(what, *given)["best"] is not None


def test_a_large_cache_is_advised_to_be_stored_in_eight_bits():
    found = as_json("decode", "--model", "llama-3.1-8b", "--length", "1M", "--ranks", 1, "--batch", 4)
    assert "An 8-bit KV cache (--storage fp8) takes half the memory." in found["advice"]
    found = as_json("decode", "--model", "deepseek-v3", "--length", "1k", "--ranks", 1)
    assert "8-bit" not in found["advice"]


def test_more_devices_than_can_share_the_heads_is_no_plan():
    ran = plan("decode", "--model", "llama-3.1-8b", "--length", "128k", "--ranks", 128, "--batch", 1)
    assert ran.exit_code == 1
    assert words(ran.output).startswith("No plan for 128 ranks: ")
    assert "At most 32 ranks can be used." in words(ran.output)
    large = ("--model", "llama-3.1-405b", "--length", "1M", "--hardware", "cpu")
    ran = plan("decode", *large, "--ranks", 128, "--batch", 1)
    assert (ran.exit_code, "No plan uses more ranks." in words(ran.output)) == (1, True)
    ran = plan("decode", *large, "--ranks", 32, "--batch", 1)
    assert "Even 128 ranks, the most that a plan can use, would not be enough." in words(ran.output)


# Bad input.


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--model", "lama-3.1-8b", "Did you mean llama-3.1-8b"),
        ("--model", "no/such/config.json", "there is no config file or folder no/such/config.json"),
        ("--hardware", "h20", "unknown device 'h20'. Did you mean h200"),
        ("--hardware", "", "unknown device ''"),
        ("--links", "nvlnk4", "unknown intra_node link 'nvlnk4'. Did you mean nvlink4"),
        ("--links", "nvlink4,infinband", "unknown inter_node link 'infinband'. Did you mean infiniband"),
        ("--ranks", "0", "0 is not in the range"),
        ("--ranks", "many", "'many' is not a valid int"),
        ("--batch", "0", "0 is not in the range"),
        ("--ranks-per-node", "0", "0 is not in the range"),
        ("--rails", "0", "0 is not in the range"),
        ("--storage", "fp4", "bfp8, fp8_token, fp8_ds_mla, got 'fp4'"),
        ("--hardware-file", "no_such.toml", "--hardware-file must be an existing file, got no_such.toml"),
    ],
)
def test_what_cannot_be_planned_is_a_clear_error(option, value, said):
    given = {"--model": "llama-3.1-8b", "--length": "32k", "--ranks": "4", "--batch": "2", option: value}
    what = "decode" if option in ("--model", "--batch", "--links") else "prefill"  # both share their options
    assert_refused(run("plan", what, *(part for pair in given.items() for part in pair)), said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"hidden_size": 64, "num_hidden_layers": 2}', "has no num_attention_heads"),
        ("heads: 8", "is not JSON"),
        ("[1, 2]", "config.json"),
        ("", "is not JSON"),
        ('{"num_attention_heads": 8, "num_key_value_heads": 3, "hidden_size": 64, "num_hidden_layers": 2, '
         '"vocab_size": 10, "intermediate_size": 5}', "num_key_value_heads"),
        ('{"num_attention_heads": 0, "hidden_size": 64, "num_hidden_layers": 2}', "num_attention_heads"),
        ('{"num_attention_heads": "eight", "hidden_size": 64, "num_hidden_layers": 2}', "num_attention_heads"),
    ],
)  # fmt: skip
def test_configs_that_say_too_little_or_nonsense_are_refused(text, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(text)
    assert_refused(plan("prefill", "--model", "config.json", "--length", "1k", "--ranks", 2), said)
    assert_refused(plan("decode", "--model", ".", "--length", "1k", "--ranks", 2), said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[device.h200]\nmemory_gbs = 3\n", "'memory_gbs'. Did you mean memory_gb"),
        ('[device.h200]\nmemory_gb = "much"\n', "memory_gb"),
        ("[device.h200\n", "mine.toml"),
        ('[device.h200]\nintra_node = "string"\n', "unknown link in mine.toml: device.h200.intra_node names 'string'"),
    ],
)
def test_hardware_files_with_mistakes_are_refused(text, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(text)
    assert_refused(plan("prefill", *SMALL, "--hardware-file", "mine.toml"), said)


def test_a_folder_is_no_hardware_file_and_an_empty_one_no_model(tmp_path):
    assert_refused(plan("prefill", *SMALL, "--hardware-file", tmp_path), "--hardware-file must be an existing file")
    assert_refused(plan("prefill", "--model", tmp_path, "--length", "1k", "--ranks", 1), "has no config.json")


@pytest.mark.parametrize("option", ["--q-heads", "--kv-heads", "--head-dim", "--hidden"])
def test_a_model_and_numbers_exclude_one_another(option):
    assert_refused(plan("decode", *SMALL, option, 8), "cannot be used with --model")


def test_a_model_needs_a_context():
    assert_refused(plan("decode", "--model", "llama-3.1-8b", "--ranks", 2), "--length is required")


@pytest.mark.parametrize(
    ("name", "storage", "reasons"),
    [
        ("llama-3.1-8b", "bf16", []),
        sweep("llama-3.1-8b", "fp8", []),
        sweep("deepseek-v3", "bf16", ["quantized weights are not loaded"]),
        sweep("deepseek-v3", "fp8_ds_mla", ["quantized weights are not loaded"]),
        sweep("deepseek-v3", "fp8", ["quantized weights are not loaded", "latents are not stored as fp8"]),
    ],
)
def test_plans_that_generate_does_not_run_are_marked(name, storage, reasons):
    arguments = ("--model", name, "--length", "8k", "--ranks", 8, "--storage", storage)
    found = as_json("decode", *arguments)["not_run"]
    assert len(found) == len(reasons)
    assert all(reason in one for reason, one in zip(reasons, found, strict=True))
    printed = words(plan("decode", *arguments).output)
    assert ("attnmesh generate does not run these plans as estimated" in printed) == bool(reasons)
    assert ("with --sharding auto run TP8" in printed) == (name == "llama-3.1-8b")


def test_the_memory_of_a_rank_may_be_given():
    found = as_json("decode", *SMALL, "--memory", "6GB")
    assert (found["device_memory"], found["best"]) == (6e9, None)
    assert as_json("prefill", *SMALL, "--memory", "1.5TiB")["device_memory"] == 1.5 * 2**40
    assert_refused(plan("decode", *SMALL, "--memory", "0GB"), "a size must be above 0 with a unit")
    heads = ("--q-heads", 8, "--kv-heads", 2, "--ranks", 2)
    assert_refused(plan("decode", *heads, "--memory", "1GB"), "--memory requires --model")
