"""The scaling benchmark: its rows, tables, plots and command line."""

import json
import re
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from attnmesh.plan.shards import SCHEDULES
from attnmesh.planner.catalog import cluster
from attnmesh.planner.program import Load
from attnmesh.planner.simulator import Simulated
from benchmarks.scaling import study, tables
from benchmarks.scaling.__main__ import app
from benchmarks.scaling.plot import plot_scaling
from benchmarks.scaling.study import (
    QUICK,
    SHAPE,
    Part,
    SimulatedRun,
    decode_rows,
    find_bottleneck,
    one_device_seconds,
    prefill_rows,
    sharding_kind,
    simulate_run,
    slow_rows,
    workload_for,
)
from helpers.cases import sweep

H200 = cluster(study.HARDWARE)
LENGTH = QUICK.lengths[0]


def flat(rows):
    return list(chain.from_iterable(rows))


@pytest.fixture(scope="module")
def prefill():
    return flat(prefill_rows(QUICK, H200))


@pytest.fixture(scope="module")
def sections(prefill):
    return {
        Part.PREFILL.value: prefill,
        Part.DECODE.value: flat(decode_rows(QUICK, H200)),
        Part.SLOW.value: flat(slow_rows(QUICK, H200)),
    }


# Rows.


def test_every_schedule_is_there_where_it_can_serve(prefill):
    flat_ones = [name for name in SCHEDULES if "+" not in name]
    for direction in ("forward", "forward+backward"):
        for world, expected in ((8, flat_ones), (16, list(SCHEDULES))):
            these = [x["schedule"] for x in prefill if (x["ranks"], x["direction"]) == (world, direction)]
            assert these == expected


def test_times_add_up(prefill):
    for row in prefill:
        assert 0 < row["computed"] <= row["seconds"] * (1 + 1e-9)
        assert row["exposed_communication"] == pytest.approx(1 - row["computed"] / row["seconds"])
        assert row["efficiency"] <= 1.15  # calls of less than the whole sequence run at a better rate, but not more
        assert row["inter_node_bytes"] == 0 or row["ranks"] > 8


def test_efficiency_is_one_devices_time_over_that_of_all(prefill):
    row = next(x for x in prefill if (x["schedule"], x["ranks"], x["direction"]) == ("ring", 16, "forward"))
    pairs = LENGTH * (LENGTH + 1) // 2
    alone = H200.device.seconds("attention", 4.0 * 64 * 128 * pairs)
    assert one_device_seconds(LENGTH, H200, backward=False) == pytest.approx(alone)
    assert row["efficiency"] == pytest.approx(alone / 16 / row["seconds"])


def test_twice_the_ranks_take_at_least_half_the_time_but_for_better_rates(prefill):
    forward = {(x["schedule"], x["ranks"]): x["seconds"] for x in prefill if x["direction"] == "forward"}
    for schedule in ("ring", "allgather", "ulysses"):
        assert forward[schedule, 16] >= 0.48 * forward[schedule, 8]


@pytest.mark.parametrize(
    ("schedule", "end"),
    [
        ("ring", "intra_node"),
        ("allgather", "intra_node"),
        ("ulysses", "intra_node"),
        ("ulysses+ring", "intra_node"),
        ("ulysses+allgather", "intra_node"),
        sweep("ring+ring", "intra_node"),
        ("ring", "inter_node"),
        sweep("allgather", "inter_node"),
        sweep("ulysses", "inter_node"),
        sweep("ulysses+ring", "inter_node"),
        sweep("ulysses+allgather", "inter_node"),
        sweep("ring+ring", "inter_node"),
    ],
)
def test_wider_links_are_never_slower(schedule, end):
    link = getattr(H200, end)
    narrow = replace(H200, **{end: replace(link, bandwidth=link.bandwidth / 8)})
    workload = workload_for(LENGTH, 16, H200)
    usual, slower = (simulate_run(schedule, workload, which, backward=False).ran.seconds for which in (H200, narrow))
    assert slower >= usual


def test_two_levels_send_less_between_nodes_than_one(prefill):
    inter_node = {
        x["schedule"]: x["inter_node_bytes"] for x in prefill if (x["ranks"], x["direction"]) == (16, "forward")
    }
    assert max(inter_node[name] for name in inter_node if "+" in name) < min(
        inter_node[name] for name in inter_node if "+" not in name
    )


@pytest.mark.parametrize("world", [8, 16])
def test_bytes_are_those_of_the_complexity_table(prefill, world):
    """As docs/scaling.md has them: K and Q are all bytes of keys and values, and of queries; n ranks per node."""
    n, nodes = 8, world // 8
    queries, keys = LENGTH * SHAPE.query_row, LENGTH * SHAPE.key_row
    rows = {x["schedule"]: x for x in prefill if (x["ranks"], x["direction"]) == (world, "forward")}
    assert rows["ring"]["intra_node_bytes"] == keys * (world - 1) // world
    assert rows["allgather"]["intra_node_bytes"] == keys * (n - 1) // world
    assert rows["allgather"]["inter_node_bytes"] == keys * (world - n) // world
    copies = max(1, min(world, SHAPE.q_heads) // SHAPE.kv_heads)
    traded = (2 * queries + copies * keys) * (world - 1) // world**2
    assert rows["ulysses"]["intra_node_bytes"] + rows["ulysses"]["inter_node_bytes"] == traded
    if nodes > 1:
        between = keys * (nodes - 1) // nodes // n
        assert {rows[name]["inter_node_bytes"] for name in rows if "+" in name} == {between}
        assert rows["ring+ring"]["intra_node_bytes"] == keys * (n - 1) // n
        assert rows["ulysses+ring"]["intra_node_bytes"] == (2 * queries + keys) // world * (n - 1) // n
        exchanges = {name: rows[name]["exchanges"] for name in rows}
        assert exchanges["ring"] == world - 1
        assert exchanges["ulysses"] == 2
        assert exchanges["ulysses+ring"] == nodes - 1 + 2
        assert exchanges["ring+ring"] == nodes * (n - 1)


# Memory.


def test_a_ring_holds_two_blocks_of_keys_beside_its_own():
    workload = workload_for(LENGTH, 8, H200)
    block = LENGTH // 8 * SHAPE.key_row
    found = simulate_run("ring", workload, H200, backward=False)
    assert found.exchanges == 7
    assert found.arrived == 2 * block


def test_an_all_gather_holds_two_groups_of_all_keys():
    workload = workload_for(LENGTH, 8, H200)
    found = simulate_run("allgather", workload, H200, backward=False)
    assert found.exchanges == 4
    assert found.arrived == 2 * (LENGTH * 7 // 8) * SHAPE.key_row // 4  # the rank with the last rows sees all of them


def test_ulysses_holds_all_rows_of_its_heads_and_their_results():
    workload = workload_for(LENGTH, 8, H200)
    found = simulate_run("ulysses", workload, H200, backward=False)
    others = LENGTH * 7 // 8
    assert found.exchanges == 2
    assert found.arrived == others * (SHAPE.query_row + SHAPE.key_row) // 8 + others * SHAPE.query_row // 8


# The bottleneck.


def run_of(computed, seconds, *, intra_node=0, inter_node=0, exchanges=1, sends=1):
    worked = np.array(computed)
    ran = Simulated(np.full(len(worked), float(seconds)), worked, seconds - worked, [])
    return SimulatedRun(ran, Load(0, intra_node, inter_node), exchanges, sends, 0, 0.0)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (run_of([9.5, 9.5], 10), "computing"),
        (run_of([9.5, 0.0], 10), "ranks without heads"),
        (run_of([1.0, 1.0], 10, inter_node=int(9 * H200.inter_node.bandwidth)), f"{H200.inter_node.name} bytes"),
        (run_of([1.0, 1.0], 10, intra_node=int(9 * H200.intra_node.bandwidth)), f"{H200.intra_node.name} bytes"),
        (run_of([1.0, 1.0], 10, exchanges=int(9 / H200.intra_node.latency)), "latency"),
        (
            run_of([4.0, 4.0], 10, inter_node=int(6 * H200.inter_node.bandwidth)),
            f"{H200.inter_node.name} bytes, then computing",
        ),
        (run_of([0.5, 0.5], 10, inter_node=int(6 * H200.inter_node.bandwidth)), f"{H200.inter_node.name} bytes"),
        (
            run_of([4.0, 0.0], 10, inter_node=int(6 * H200.inter_node.bandwidth)),
            f"{H200.inter_node.name} bytes, then ranks without heads",
        ),
    ],
)
def test_bottleneck(run, words):
    assert find_bottleneck(run, 9.0, H200) == words


def test_work_that_grew_by_being_divided_is_not_called_computing():
    assert find_bottleneck(run_of([10.0, 10.0], 10), 5.0, H200) == "small kernels, merging"


# Slow ranks, and token generation.


def test_a_slow_rank_or_link_never_helps(sections):
    for row in sections["slow"]:
        assert 1 <= row["slow_rank"] <= 1.5 + 1e-9
        assert 1 <= row["slow_link"] <= 4 + 1e-9


def test_the_first_of_each_case_is_the_best(sections):
    rows = sections["decode"]
    for devices in QUICK.devices:
        first, *others = [x for x in rows if x["devices"] == devices]
        assert first["fits"]
        assert all(first["seconds"] <= x["seconds"] for x in others if x["fits"])
        assert len({x["kind"] for x in (first, *others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("sharding", "kind"),
    [
        ("TP8", "TP"),
        ("TP4-CP2", "TP-CP"),
        ("TP2-KVDP4", "TP-KVDP"),
        ("KVDP2-CP4", "TP-KVDP-CP"),
        ("2 x TP4", "replicas"),
    ],
)
def test_sharding_kind(sharding, kind):
    assert sharding_kind(sharding) == kind


# Tables and pictures.


def test_tables_have_every_row_once(sections):
    text = tables.all_tables(sections)
    lines = text.splitlines()
    assert min(line.count("|") for line in lines if line.startswith("|")) >= 3
    whole = [line for line in lines if line.startswith("|") and line.count("|") == 11 and line[2].isdigit()]
    assert len(whole) == len(sections["prefill"])
    assert sum("computing" in line for line in whole) == sum(
        "computing" in x["bottleneck"] for x in sections["prefill"]
    )
    for row in sections["slow"]:
        assert f"| {row['slow_rank']:.3f} | {row['slow_link']:.3f} |" in text
    assert len([line for line in lines if "**" in line]) == 4  # two worlds, two directions


def test_what_does_not_fit_is_never_the_best(prefill):
    rows = [dict(row) for row in prefill if (row["ranks"], row["direction"]) == (8, "forward")]
    best = min(rows, key=lambda row: row["seconds"])
    best["fits"] = False
    text = tables.all_tables({"prefill": rows})
    assert f"{best['efficiency']:.3f}*" in text
    assert f"**{best['efficiency']:.3f}*" not in text


def test_tables_report_that_nothing_fits(sections):
    rows = [{**row, "fits": False} for row in sections["decode"]]
    assert tables.all_tables({"decode": rows}).count("nothing fits") == len(QUICK.devices)


@pytest.mark.sweep
def test_pictures_are_drawn_and_the_same_each_time(sections, tmp_path):
    first = {path.name: path.read_text() for path in plot_scaling(sections, tmp_path)}
    assert set(first) == {"scaling-prefill.svg", "scaling-decode.svg"}
    assert all("<svg" in text for text in first.values())
    plain = json.loads(json.dumps(sections))  # as from a file
    assert {path.name: path.read_text() for path in plot_scaling(plain, tmp_path)} == first


def test_a_documents_tables_are_made_anew(sections):
    title = next(line for line in tables.all_tables(sections).splitlines() if line.startswith("Efficiency"))
    text = f"# Head\n\n<!-- {title} -->\n| old |\n|--:|\n| 7 |\n\nAfter it.\n\n<!-- something else -->\n| kept |\n"
    made = tables.replace_tables(text, sections)
    assert "| 7 |" not in made
    assert "| tokens | GPUs | ring |" in made
    assert made.endswith("|\n\nAfter it.\n\n<!-- something else -->\n| kept |\n")
    assert tables.replace_tables(made, sections) == made


def test_the_documents_tables_are_those_of_its_data():
    docs = Path(__file__).parents[2] / "docs"
    saved = json.loads((docs / "data" / "scaling.json").read_text())["sections"]
    text = (docs / "scaling.md").read_text()
    titles = {line for line in tables.all_tables(saved).splitlines() if line and not line.startswith("|")}
    shown = set(re.findall(r"<!-- (.+) -->", text))
    assert shown <= titles
    assert "Efficiency, forward" in shown
    assert tables.replace_tables(text, saved) == text


# The command.


def run(*arguments):
    return CliRunner().invoke(app, arguments)


def test_a_saved_study_says_the_same(tmp_path, sections):
    saved = tmp_path / "new" / "scaling.json"
    ran = run("--quick", "--only", "slow", "--only", "decode", "--json", str(saved))
    assert ran.exit_code == 0, ran.output
    again = run("--from", str(saved), "--plot", str(tmp_path / "pictures"))
    assert again.exit_code == 0, again.output
    assert again.stdout.strip() == ran.stdout.strip()
    kept = json.loads(saved.read_text())
    assert kept["benchmark"] == "scaling"
    assert set(kept["sections"]) == {"slow", "decode"}
    assert kept["sections"]["slow"] == sections["slow"]
    assert (tmp_path / "pictures" / "scaling-decode.svg").exists()
    assert not (tmp_path / "pictures" / "scaling-prefill.svg").exists()


def test_rows_before_a_failure_are_saved(tmp_path, monkeypatch):
    def breaking(scope, machines):
        yield [{"schedule": "ring"}]
        raise RuntimeError("the machine went down")

    monkeypatch.setitem(study._ROWS, Part.SLOW, breaking)
    saved = tmp_path / "scaling.json"
    assert isinstance(run("--only", "slow", "--json", str(saved)).exception, RuntimeError)
    assert json.loads(saved.read_text())["sections"] == {"slow": [{"schedule": "ring"}]}


def test_from_takes_nothing_else(tmp_path):
    saved = tmp_path / "scaling.json"
    saved.write_text("{}")
    refused = run("--from", str(saved), "--quick")
    assert refused.exit_code == 2
    assert "--from" in refused.output


def test_other_hardware_changes_the_figures(tmp_path, sections):
    file = tmp_path / "mine.toml"
    file.write_text("[link.infiniband]\nbandwidth_gbs = 5\n")
    found = flat(rows for _, rows in study.study((Part.SLOW,), quick=True, hardware_file=file))
    assert found[1]["schedule"] == "allgather"
    assert found[1]["seconds"] > sections["slow"][1]["seconds"]
