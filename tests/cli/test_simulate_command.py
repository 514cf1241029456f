"""`attnmesh simulate`: what the simulator says of the same program, traces, slow ranks, bad input."""

import json
import re
import time

import pytest

from attnmesh.core.layouts import Zigzag
from attnmesh.core.masks import Causal
from attnmesh.plan.shards import SCHEDULES, Shape, Workload, shards
from attnmesh.planner.auto import choose_schedule
from attnmesh.planner.catalog import cluster
from attnmesh.planner.program import program_loads
from attnmesh.planner.recurrent import KINDS, RecurrentShape, RecurrentWorkload, recurrent_program
from attnmesh.planner.schedules import program
from attnmesh.planner.simulator import Slowdown, simulate
from attnmesh.trace.timeline import read_trace
from helpers.cases import first
from helpers.cli import assert_refused, run, words

USUAL = Shape(batch=1, q_heads=32, kv_heads=8, head_dim=128, itemsize=2, sum_itemsize=4)
H200 = cluster("h200")


def simulated(*arguments: object, ranks: int = 16, length: object = "32k") -> dict:
    ran = run("simulate", "--ranks", ranks, "--length", length, *arguments, "--json")
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


def seconds(*arguments: object, **more) -> float:
    return sum(one["seconds"] for one in simulated(*arguments, **more)["runs"])


def workload(ranks: int = 16, length: int = 32768, ranks_per_node: int = 8) -> Workload:
    return Workload(shards(Causal(), Zigzag(), length, ranks), USUAL, ranks_per_node)


@pytest.mark.parametrize("schedule", first(2, ["ulysses+ring", *SCHEDULES]))
def test_seconds_are_those_of_the_same_program(schedule):
    found = simulated("--schedule", schedule, "--backward")
    ways = [simulate(program(schedule, workload(), backward=way), H200) for way in (False, True)]
    assert [one["seconds"] for one in found["runs"]] == [way.seconds for way in ways]
    assert [one["waited"] for one in found["runs"]] == [way.waited.max() for way in ways]
    assert [one["run"] for one in found["runs"]] == [f"{schedule} forward", f"{schedule} backward"]


def test_auto_is_what_the_planner_chooses():
    assert simulated("--schedule", "auto")["schedule"] == choose_schedule(workload(), H200).schedule


def test_a_model_gives_the_heads():
    given = ("--q-heads", 64, "--kv-heads", 8, "--head-dim", 128)
    assert seconds("--model", "Llama-3.1-70B") == seconds(*given) > seconds()
    heads = ("--q-heads", 128, "--kv-heads", 128, "--head-dim")
    assert seconds(*heads, 128) < seconds("--model", "deepseek-v3") < seconds(*heads, 192)  # keys of 192, values of 128


@pytest.mark.parametrize("layer", ["gated_delta_rule", "short_convolution"])
def test_a_recurrent_layer(layer):
    found = simulated("--layer", layer, "--q-heads", 32, "--kv-heads", 16, "--backward")
    dims = (3, 1) if layer == "short_convolution" else (128, 128)
    workload = RecurrentWorkload(RecurrentShape(KINDS[layer], 1, 32, 16, *dims), 32768, 16, 8)
    for way, one in zip((False, True), found["runs"], strict=True):
        whole = recurrent_program(workload, backward=way)
        assert one["seconds"] == simulate(whole, H200).seconds
        loads = program_loads(whole, 8)
        assert one["bytes_between_nodes"] == max(load.inter_node for load in loads) > 0
        assert one["bytes_sent"] == max(load.intra_node for load in loads) + one["bytes_between_nodes"]
    assert (found["layer"], found["schedule"]) == (layer, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layer", "lstm"), "--layer must be one of"),
        (("--layer", "mamba2", "--schedule", "ring"), "--schedule and --mask are of attention"),
        (("--layer", "mamba2", "--model", "llama-3.1-8b"), "has no recurrent layers"),
        (("--layer", "mamba2", "--layout", "striped"), "ranges of consecutive positions"),
    ],
)
def test_bad_recurrent_layers_are_refused(arguments, message):
    assert_refused(run("simulate", "--ranks", 8, "--length", "4k", *arguments), message)


def test_links_nodes_masks_and_layouts_are_as_asked_for():
    assert seconds("--links", "pcie,ethernet") > seconds()
    assert seconds("--ranks-per-node", 2, "--rails", 1) > seconds()
    assert seconds("--mask", "window:1024") < seconds() < seconds("--mask", "full")
    assert seconds("--mask", "window:1024") < seconds("--mask", "window:1024+global:4096") < seconds()
    assert seconds("--mask", "documents:64") < seconds()  # many documents are one launch, not a merge each
    assert seconds("--layout", "contiguous", length="1M") > seconds(length="1M")
    assert seconds("--batch", 2) > seconds()
    assert seconds("--hardware", "A100") > seconds()


def test_slower_ranks_and_links_never_make_it_faster():
    plain = seconds()
    before = plain
    for factor in (1.0, 1.5, 4.0):
        slow = seconds("--slow-rank", f"3:{factor}")
        assert slow == simulate(program("ring", workload(), backward=False), H200, slow=Slowdown({3: factor})).seconds
        assert slow >= before * (1 - 1e-9)
        before = slow
    assert before > 1.5 * plain
    assert seconds("--slow-link", "7:100") > plain
    assert seconds("--slow-rank", "3:2", "--slow-rank", "5:4") >= seconds("--slow-rank", "3:2")


def test_a_trace_has_the_ranks_that_were_asked_for(tmp_path):
    path = tmp_path / "trace.json"
    found = simulated("--trace", path, "--trace-ranks", "0-2,9", "--backward")
    spans = read_trace(path)
    assert {span.rank for span in spans} == {0, 1, 2, 9}
    assert {span.track for span in spans} >= {"compute", "send", "receive"}
    both = sum(one["seconds"] for one in found["runs"])
    assert max(span.end for span in spans) == pytest.approx(both, rel=0.2)
    forward = found["runs"][0]["seconds"]
    assert max(span.end for span in spans) > forward  # the backward comes after it
    simulated("--trace", path)
    assert {span.rank for span in read_trace(path)} == set(range(16))
    simulated("--trace", path, ranks=2)
    assert {span.rank for span in read_trace(path)} == {0, 1}


def test_what_a_person_reads_is_what_machines_read(tmp_path):
    ran = run("simulate", "--ranks", 8, "--length", "16k", "--trace", tmp_path / "out.json")
    said = words(ran.output)
    assert ran.exit_code == 0
    assert "8 x h200, one node, nvlink4" in said
    assert "ring: 16,384 tokens over 8 ranks, zigzag, causal" in said
    assert "out.json (open it in" in said.replace(" .json", ".json")


def test_more_ranks_than_positions_is_a_run_all_the_same():
    ran = run("simulate", "--ranks", 16, "--length", 5)
    assert ran.exit_code == 0
    assert "nan" not in ran.output
    assert seconds(length=5) > 0


@pytest.mark.timeout(60)
def test_256_ranks_are_quick():
    begin = time.process_time()
    found = simulated("--schedule", "ring+ring", ranks=256, length="1M")
    assert time.process_time() - begin < 20
    assert found["runs"][0]["seconds"] > 0


def test_rounds_of_many_ranks_are_counted_with_an_estimate(capsys, monkeypatch):
    monkeypatch.setattr("attnmesh.cli.output._LINE_EVERY", 0.0)
    ran = run("simulate", "--ranks", 64, "--length", "64k")
    assert ran.exit_code == 0
    lines = [line for line in ran.stderr.splitlines() if " of 65: simulating ring forward on 64 ranks" in line]
    assert lines[0].startswith("0 of 65: ")
    assert lines[-1].startswith("63 of 65: ")
    assert re.search(", about [0-9]+ s left$", lines[-1])
    ran = run("simulate", "--ranks", 32, "--length", "64k", "--schedule", "auto")
    assert "18 of 236: choosing a schedule for 32 ranks" in ran.stderr  # rounds, of the schedules with fewest first


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--length", "lots"), "got 'lots'"),
        (("--length", "0"), "got '0'"),
        (("--ranks", 0), "0 is not in the range"),
        (("--ranks", 12), "--ranks must be a multiple of the 8 ranks per node, got 12"),
        (("--schedule", "rong"), "schedule must be one of auto, ring, allgather"),
        (("--schedule", "ring+ring"), "schedule='ring+ring'"),
        (("--mask", "window:0"), "mask window:N must have a number N of at least 1"),
        (("--mask", "window:"), "got 'window:'"),
        (("--mask", "prefix:9", "--ranks", 1024), "--mask prefix:9 can be simulated on at most 512 ranks (causal,"),
        (("--layout", "spiral"), "'spiral' is not one of"),
        (("--q-heads", 6, "--kv-heads", 4), "--kv-heads must divide the 6 query heads, got 4"),
        (("--model", "lama-3.1-8b"), "Did you mean llama-3.1-8b"),
        (
            ("--model", "llama-3.1-8b", "--q-heads", 8),
            "--q-heads, --kv-heads and --head-dim cannot be used with --model",
        ),
        (("--hardware", "h20"), "Did you mean h200"),
        (("--links", "nvlnk4"), "Did you mean nvlink4"),
        (("--slow-rank", "x"), "--slow-rank must be RANK:FACTOR, such as 3:1.5, got 'x'"),
        (("--slow-rank", "1:"), "--slow-rank must be RANK:FACTOR"),
        (("--slow-link", "1:fast"), "--slow-link must be RANK:FACTOR"),
        (("--slow-rank", "8:2"), "--slow-rank must name a rank in 0..7, got '8:2'"),
        (("--slow-link", "-1:2"), "--slow-link must name a rank in 0..7, got '-1:2'"),
        (("--slow-rank", "1:0"), "from 1e-06 to 1e+06, got 0.0 for rank 1"),
        (("--slow-rank", "1:nan"), "got nan for rank 1"),
        (("--trace", "no/such/folder/x.json"), "--trace must be in an existing folder, got no/such/folder/x.json"),
        (("--trace", "."), "--trace must be a file, got the folder ."),
        (("--trace-ranks", "0"), "--trace-ranks 0 requires --trace"),
        (("--trace", "x.json", "--trace-ranks", "0-8"), "--trace-ranks must be within 0..7, got '0-8'"),
        (("--trace", "x.json", "--trace-ranks", "first"), "--trace-ranks must be ranks such as 0-7,12, got 'first'"),
        (("--trace", "x.json", "--trace-ranks", "5-2"), "--trace-ranks must be within 0..7, got '5-2'"),
    ],
)
def test_what_cannot_be_simulated_is_a_clear_error(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    usual = () if "--length" in arguments else ("--length", "8k")
    ranks = () if "--ranks" in arguments else ("--ranks", 8)
    assert_refused(run("simulate", *usual, *ranks, *arguments), said)
    assert not list(tmp_path.iterdir())


def test_as_many_ranks_as_other_masks_can_have(monkeypatch):
    monkeypatch.setattr("attnmesh.cli.simulate.MAX_RANKS_OF_OTHER_MASKS", 8)
    assert simulated("--mask", "prefix:9", ranks=8, length="1k")["runs"]
    assert_refused(run("simulate", "--ranks", 16, "--length", "1k", "--mask", "prefix:9"), "on at most 8 ranks")
