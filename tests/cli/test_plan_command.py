"""`attnmesh plan decode`: what it prints is what the planner says."""

import json
import re

import pytest

from attnmesh import recommend_sharding
from attnmesh.planner.catalog import cluster
from attnmesh.planner.recommend import compare_shardings
from attnmesh.utils.text import readable_bytes
from helpers.cli import run as run_command

HEADS = ("--q-heads", "64", "--kv-heads", "8")


def run(*arguments: str):
    return run_command("plan", "decode", *arguments)


def words(output: str) -> str:
    """The text without frames and folds."""
    return " ".join(re.sub(r"[^\w\s.,:;/()\[\]=?-]", " ", output).split())


def table_rows(output: str) -> list[list[str]]:
    """The rows of all tables; a folded row has its lines joined."""
    rows: list[list[str]] = []
    for line in output.splitlines():
        if "│" in line:
            cells = [cell.strip() for cell in line.split("│")[1:-1]]
            if cells[0]:
                rows.append(cells)
            else:
                rows[-1] = [f"{above} {below}".strip() for above, below in zip(rows[-1], cells, strict=True)]
    return rows


def test_a_plan_of_numbers_prints_choice_reason_alternatives_and_comparison():
    ran = run(*HEADS, "--batch", "2", "--ranks", "64", "--length", "131072", "--head-dim", "64", "--hidden", "2880")
    assert ran.exit_code == 0, ran.output
    found = recommend_sharding(2, 64, 8, 64, 131072, head_dim=64, hidden=2880)
    assert ran.output.startswith("TP8-KVDP2-CP4 over 64 ranks\n")
    assert found.reason in words(ran.output)
    for name, nbytes in found.choice.sent.items():
        assert (f"{name} {readable_bytes(nbytes)}" in words(ran.output)) == (nbytes > 0)
    assert "KV cache of one layer in bf16, 131,072 tokens per sequence" in ran.output
    rows = table_rows(ran.output)
    assert rows[:5] == [list(option.row().values()) for option in (found.choice, *found.alternatives)]
    ways = compare_shardings(64, 8, 64)
    assert rows[5] == ["W_kv replication", *(way.w_kv for way in ways)]
    assert rows[8:] == [
        ["X input activation", *(way.x for way in ways)],
        ["KV cache per rank", *(way.kv_cache for way in ways)],
    ]


def test_without_a_context_bytes_of_the_cache_are_not_known():
    ran = run(*HEADS, "--batch", "8", "--ranks", "64")
    assert ran.exit_code == 0, ran.output
    assert {row[2] for row in table_rows(ran.output)[:5]} == {"?"}


def test_storage_and_tokens_change_what_they_are_about():
    common = (*HEADS, "--batch", "8", "--ranks", "64", "--length", "1000")
    plain, eight_bits, drafts = (
        table_rows(run(*common, *more).output)[0] for more in ((), ("--storage", "int8"), ("--tokens", "4"))
    )
    assert (plain[2], eight_bits[2], drafts[2]) == ("512 kB", "264 kB", "512 kB")
    assert plain[7:9] == eight_bits[7:9]
    assert (plain[7], drafts[7]) == ("3.584 kB", "14.34 kB")


CONFIG = {
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "hidden_size": 2880, "num_hidden_layers": 36
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_a_config_file_gives_the_cache_of_all_layers(config):
    ran = run("--config", str(config), "--batch", "64", "--ranks", "64", "--length", "131072")
    assert ran.exit_code == 0, ran.output
    assert "KV cache of 36 layers in bf16" in ran.output
    first = table_rows(ran.output)[0]
    assert (first[0], first[2]) == ("TP8-KVDP8", "9.664 GB")
    assert first[8] == readable_bytes(2 * 63 * 64 * 2880 * 2 / 64)  # an all-reduce of [64, 1, 2880] over 64 ranks


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--batch", "1", "--ranks", "8"), "--model, or --config, or --q-heads and --kv-heads are required"),
        (
            ("--batch", "1", "--ranks", "8", "--q-heads", "8"),
            "--model, or --config, or --q-heads and --kv-heads are required",
        ),
        ((*HEADS, "--batch", "1", "--ranks", "128"), "got q_heads=64 for 8 x 1 x 16 = 128 ranks"),
        ((*HEADS, "--batch", "1", "--ranks", "8", "--storage", "fp4"), "storage must be one of bf16"),
        ((*HEADS, "--batch", "1"), "Missing option --ranks"),
        ((*HEADS, "--batch", "0", "--ranks", "8"), "0 is not in the range"),
        (("--config", "no_such.json", "--batch", "1", "--ranks", "8"), "no_such.json does not exist"),
    ],
)
def test_what_cannot_be_planned_is_a_clear_error(arguments, said):
    ran = run(*arguments)
    assert ran.exit_code == 2
    assert said in words(ran.output)
    assert "Traceback" not in ran.output


@pytest.mark.parametrize("option", ["--q-heads", "--kv-heads", "--head-dim", "--hidden"])
def test_a_config_and_numbers_exclude_one_another(config, option):
    ran = run("--config", str(config), "--batch", "1", "--ranks", "8", option, "8")
    assert ran.exit_code == 2
    assert "cannot be used with --config" in words(ran.output)


def test_a_config_with_something_missing_is_a_clear_error(config):
    config.write_text(json.dumps({name: n for name, n in CONFIG.items() if name != "num_hidden_layers"}))
    ran = run("--config", str(config), "--batch", "1", "--ranks", "8")
    assert ran.exit_code == 2
    assert "has no num_hidden_layers" in words(ran.output)


def test_heads_as_json_say_the_same():
    ran = run(*HEADS, "--batch", "2", "--ranks", "64", "--length", "128k", "--json")
    assert ran.exit_code == 0, ran.output
    said, found = json.loads(ran.stdout), recommend_sharding(2, 64, 8, 64, 131072)
    assert said["best"] == str(found.choice.sharding) == said["plans"][0]["plan"]
    assert said["plans"][0]["bytes_sent"] == found.choice.sent
    assert [option["seconds"] for option in said["plans"]] == [None] * 5


def test_heads_on_machines_go_by_time():
    common = (*HEADS, "--batch", "2", "--ranks", "64", "--head-dim", "64", "--hidden", "2880")
    ran = run(*common, "--length", "2k", "--hardware", "H200")
    assert ran.exit_code == 0, ran.output
    found = recommend_sharding(2, 64, 8, 64, 2048, head_dim=64, hidden=2880, cluster=cluster("h200"))
    assert ran.output.startswith(f"{found.choice.sharding} over 64 ranks\n")
    assert found.reason in words(ran.output)
    said = json.loads(run(*common, "--length", "2k", "--links", "pcie,ethernet", "--json").stdout)
    slower = cluster("h200", intra_node="pcie", inter_node="ethernet")
    again = recommend_sharding(2, 64, 8, 64, 2048, head_dim=64, hidden=2880, cluster=slower)
    assert said["plans"][0]["seconds"] == again.choice.seconds > found.choice.seconds
    ran = run(*common, "--hardware", "h200")
    assert (ran.exit_code, "--length is required" in words(ran.output)) == (2, True)


def test_help_comes_without_a_command():
    assert "decode" in run_command("plan").output


def test_shardings_are_counted_while_they_are_timed(monkeypatch):
    monkeypatch.setattr("attnmesh.cli.output._LINE_EVERY", 0.0)
    ran = run(*HEADS, "--batch", "2", "--ranks", "16", "--length", "4096", "--hardware", "h200")
    assert "1 of 3: comparing shardings over 16 ranks, about" in ran.stderr
