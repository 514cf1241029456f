"""The decode benchmark: its formulas, rows, plots and command line, and failures of peers."""

import json
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from attnmesh.calibration import timing
from attnmesh.ops.storage import STORAGES, Quantized, values_of
from benchmarks import timers
from benchmarks.decode import cases as decode_cases
from benchmarks.decode import jax as decode_jax
from benchmarks.decode import latent as decode_latent
from benchmarks.decode import measure as decode
from benchmarks.decode import measure as decode_parts
from benchmarks.decode import peers as decode_peers
from benchmarks.decode.__main__ import app
from benchmarks.decode.cases import BLOCK_SIZE, Case, Shape, kernel_key, make_run, random_case
from benchmarks.decode.measure import (
    CPU_PARTS,
    Part,
    cases,
    group_by_kernel,
    measure_cpu_shapes,
    measure_storage_accuracy,
    run_once,
)
from benchmarks.decode.plot import plot_decode

TINY = Shape(2, 4, 2, 64, 32)
LONG = Shape(1, 4, 2, 32768, 16)
SHAPE_COLUMNS = ["batch", "q_heads", "kv_heads", "length", "head_dim"]
SPEEDS = ["us", "tb_per_s", "tflops"]


def run(*arguments: str):
    return CliRunner().invoke(app, arguments)


def unfolded(output: str) -> str:
    """Return the text of a box without frames and spaces: a narrow one breaks lines anywhere."""
    return "".join(output.replace("│", "").split())


def timed_here(runs, *, rounds=15, failures=None):
    """`cold` without a GPU: everything runs once and takes as many microseconds as there are runs before it, plus 1."""
    times = {}
    for at, (name, run) in enumerate(runs.items()):
        try:
            assert torch.isfinite(run()).all()
            times[name] = 1.0 + at
        except Exception as error:
            if failures is None:
                raise
            failures[name] = timing.reason(error)
    return times


@pytest.fixture
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(decode, "cold", timed_here)
    monkeypatch.setattr(decode, "random_case", lambda case, device: random_case(case, "cpu"))
    monkeypatch.setattr(decode, "make_run", lambda case, device: make_run(case, "cpu"))


# Formulas and cases.


def test_operations_and_bytes_are_the_formulas():
    shape = Shape(3, 32, 8, 4096, 128)
    assert shape.flops == 4 * 3 * 4096 * 128 * 32
    assert shape.cache_bytes("bf16") == 2 * 3 * 4096 * 8 * 128 * 2
    assert shape.cache_bytes("int8") == 2 * 3 * 4096 * 8 * (128 + 4)
    assert shape.cache_bytes("bfp8") == 2 * 3 * 4096 * 8 * (128 + 8)
    speeds = shape.speeds(100.0, "fp8")
    assert speeds["tb_per_s"] == pytest.approx(2 * 3 * 4096 * 8 * 128 / 100e-6 / 1e12)
    assert speeds["tflops"] == pytest.approx(shape.flops / 100e-6 / 1e12)


@pytest.mark.parametrize("storage", [name for name in STORAGES if name != "fp8"])
def test_bytes_are_those_that_a_pool_takes(storage):
    paged = random_case(Case(TINY, storage), "cpu")
    held = [t for x in (paged.k, paged.v) for t in ((x.values, x.scales) if isinstance(x, Quantized) else (x,))]
    assert sum(t.nbytes for t in held) == TINY.cache_bytes(storage)


def test_the_shapes_are_those_of_the_plan():
    assert len(decode_cases.SHAPES) == 8
    assert len(decode_cases.GRID) == 3 * 3 * 8  # nothing was too large
    assert {(s.q_heads, s.kv_heads) for s in decode_cases.LLAMA} == {(32, 8), (16, 4), (8, 2), (4, 1)}
    assert decode_cases.LENGTHS[0] == 1024
    assert decode_cases.LENGTHS[-1] == 131072
    assert all(case.shape.length % BLOCK_SIZE == 0 for case in cases(list(Part)))


def test_a_table_names_every_block_once_in_random_order():
    paged = random_case(Case(TINY), "cpu")
    assert paged.table.dtype == torch.int32
    assert paged.table.shape == (TINY.batch, TINY.length // BLOCK_SIZE)
    flat = paged.table.flatten().tolist()
    assert sorted(flat) == list(range(values_of(paged.k).shape[0]))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_pool_made_in_pieces_is_whole(storage, monkeypatch):
    monkeypatch.setattr("benchmarks.decode.cases._CHUNK_VALUES", 3 * BLOCK_SIZE * TINY.kv_heads * TINY.head_dim)
    paged = random_case(Case(TINY, storage), "cpu")
    assert values_of(paged.k).shape == (8, BLOCK_SIZE, TINY.kv_heads, TINY.head_dim)
    assert torch.isfinite(paged.decode()).all()


def test_blocks_that_do_not_fit_the_length_are_refused():
    with pytest.raises(ValueError, match="multiple of the 16 tokens of a block, got 65"):
        random_case(Case(TINY._replace(length=65)), "cpu")


def test_gathered_and_paged_hold_the_same_numbers():
    paged = random_case(Case(TINY, "fp32"), "cpu")
    torch.testing.assert_close(paged.decode(), paged.to_contiguous().decode())
    with pytest.raises(ValueError, match="this one is int8"):
        random_case(Case(TINY, "int8"), "cpu").to_contiguous()


def test_kernels_that_cases_share_are_compiled_by_one_process():
    few = [Case(TINY), Case(TINY), Case(TINY._replace(length=128)), Case(TINY, paged=False), Case(TINY, tokens=2)]
    assert sorted(map(len, group_by_kernel(few))) == [1, 1, 2]
    most = [kernel_key(Case(TINY, max_splits=n)) for n in (None, 1, 2, 128)]
    assert len(set(most)) == 3
    assert most[2] == most[3]
    for share in group_by_kernel(few):
        run_once(share, "cpu")


def test_every_part_says_what_it_compiles():
    for part in Part:
        assert cases([part])
    assert set(cases(list(Part))) == {case for part in Part for case in cases([part])}


# Timing.


def test_cold_flushes_before_every_replay_and_goes_round(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def elapsed_time(self, other):
            return 0.005

    def captured(name, run):
        return SimpleNamespace(replay=run)

    monkeypatch.setattr(timing, "_captured", captured)
    monkeypatch.setattr(timing, "_buffer", lambda: SimpleNamespace(sum=lambda: log.append("flush")))
    cuda = SimpleNamespace(
        Event=Event,
        synchronize=lambda: None,
        _sleep=lambda n: None,
        current_stream=lambda: 0,
        set_stream=lambda s: None,
    )
    monkeypatch.setattr(timing.torch, "cuda", cuda)
    times = timing.cold({"a": lambda: log.append("a"), "b": lambda: log.append("b")}, rounds=2)
    assert times == {"a": 5.0, "b": 5.0}
    assert log == ["flush", "event", "a", "event", "flush", "event", "b", "event"] * 2


def test_cold_leaves_out_what_fails_and_says_why(monkeypatch):
    def captured(name, run):
        raise RuntimeError("no kernel for this\nand a long story")

    cuda = SimpleNamespace(
        synchronize=lambda: None, _sleep=lambda n: None, current_stream=lambda: 0, set_stream=lambda s: None
    )
    monkeypatch.setattr(timing, "_captured", captured)
    monkeypatch.setattr(timing, "_buffer", lambda: None)
    monkeypatch.setattr(timing.torch, "cuda", cuda)
    failures = {}
    assert timing.cold({"a": None}, failures=failures) == {}
    assert failures == {"a": "RuntimeError: no kernel for this"}
    with pytest.raises(RuntimeError, match="no kernel"):
        timing.cold({"a": None})


def test_wall_takes_turns_and_does_not_count_the_first():
    log = []
    times = timers.wall({"a": lambda: log.append("a"), "b": lambda: log.append("b")}, rounds=2)
    assert log == ["a", "b"] * 3
    assert set(times) == {"a", "b"}


# Peers.


def test_the_plain_computation_is_attention():
    given = random_case(Case(TINY, "fp32"), "cpu").to_contiguous()
    torch.testing.assert_close(decode_peers.plain_softmax(given.q, given.k, given.v), given.decode())


def test_a_wrong_answer_is_no_time():
    right = torch.ones(4)
    decode_peers.check_result(lambda: right * 1.01, right)()
    for wrong in (right * 1.1, right * torch.nan):
        with pytest.raises(RuntimeError, match="wrong answer"):
            decode_peers.check_result(partial(torch.clone, wrong), right)()


def test_failing_peers_are_cells(without_a_gpu, monkeypatch):
    def broken(given):
        def run():
            raise RuntimeError("no flex here")

        return run

    monkeypatch.setattr(decode_peers, "_flex", broken)
    monkeypatch.setattr(decode, "jax_paged", lambda shapes: ["no jax here"] * len(shapes))
    times = decode.measure_shapes([TINY, LONG], every_peer=True)
    rows = decode.peer_rows([TINY, LONG], times)
    assert [list(row) for row in rows] == [[*SHAPE_COLUMNS, *decode.PEER_COLUMNS]] * 2
    short, long = rows
    assert short["FlexDecoding"] == "RuntimeError: no flex here"
    assert short["JAX Pallas"] == "no jax here"
    assert isinstance(short["cuDNN"], str)  # there is none on a CPU
    assert isinstance(short["plain softmax"], float)
    assert long["plain softmax"] == "not run"
    assert all(isinstance(row[ours], float) for row in rows for ours in decode.OURS)

    fast = decode.speed_rows([TINY, LONG], times, 4.0)
    assert [list(row) for row in fast] == [[*SHAPE_COLUMNS, *SPEEDS, "share_of_read_bandwidth", "cudnn_over_ours"]] * 2
    assert fast[0]["share_of_read_bandwidth"] == pytest.approx(fast[0]["tb_per_s"] / 4.0)
    assert fast[0]["cudnn_over_ours"] == short["cuDNN"]
    assert decode.speed_rows([TINY], [{"paged": 2.0, "cuDNN": 3.0}], 4.0)[0]["cudnn_over_ours"] == 1.5


def test_our_own_failure_is_raised(without_a_gpu, monkeypatch):
    monkeypatch.setattr(decode, "check_result", lambda run, expected: decode_peers.check_result(run, expected + 1))
    with pytest.raises(RuntimeError, match=r"paged decode at .*wrong answer"):
        decode.measure_shapes([TINY], every_peer=False)


def test_without_peers_only_cudnn_is_measured(without_a_gpu, monkeypatch):
    monkeypatch.setattr(decode, "jax_paged", None)
    (found,) = decode.measure_shapes([TINY], every_peer=False)
    assert list(found) == ["paged", "contiguous", "cuDNN"]


def jax_script(tmp_path, monkeypatch, text):
    path = tmp_path / "script.py"
    path.write_text(text)
    monkeypatch.setattr(decode_jax, "__file__", str(path))


def test_jax_that_crashes_keeps_what_it_said(tmp_path, monkeypatch):
    said = 'print(\'{"us": 3.5}\', flush=True); print("oh no", file=sys.stderr, flush=True); os._exit(7)'
    jax_script(tmp_path, monkeypatch, f"import os, sys; {said}")
    assert decode_peers.jax_paged([TINY] * 3) == [3.5, "exit status 7 oh no", "exit status 7 oh no"]


def test_jax_that_hangs_is_given_up(tmp_path, monkeypatch):
    jax_script(tmp_path, monkeypatch, "import time; time.sleep(60)")
    (cell,) = decode_peers.jax_paged([TINY], timeout=0.5)
    assert cell.startswith("TimeoutExpired")


def test_jax_that_is_not_there_or_finds_no_gpu_says_so():
    (cell,) = decode_peers.jax_paged([TINY])
    assert "jax" in cell.lower() or isinstance(cell, float)


def test_the_jax_script_imports_nothing_of_ours(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jax", None)
    decode_jax.main(json.dumps({"block_size": 16, "shapes": [TINY]}))
    assert "failed" in json.loads(capsys.readouterr().out)


# Parts.


def test_rows_of_every_part_are_whole(without_a_gpu):
    rows = decode.measure_lengths([TINY, LONG], ("bf16", "bfp8"))
    assert [list(row) for row in rows] == [["storage", *SHAPE_COLUMNS, *SPEEDS, "speed_up_over_plain"]] * 4
    assert [row["speed_up_over_plain"] for row in rows] == [2.0, "not run", "not run", "not run"]
    rows = decode.measure_storages([TINY], ("bf16", "fp8", "int8", "bfp8"))
    assert [list(row) for row in rows] == [[*SHAPE_COLUMNS, "storage", *SPEEDS, "speed_up_over_bf16"]] * 4
    assert [row["speed_up_over_bf16"] for row in rows] == [1 / 1, 1 / 2, 1 / 3, 1 / 4]
    rows = decode.measure_tokens([TINY], (1, 2, 4, 8))
    assert [row["over_one_token"] for row in rows] == [1, 2, 3, 4]
    rows = decode.measure_splits([TINY], (1, 2, None))
    assert [(row["max_splits"], row["us"], row["over_fastest"]) for row in rows] == [
        (1, 1, 1),
        (2, 2, 2),
        ("free", 3, 3),
    ]


def test_accuracy_knows_more_bits_from_fewer():
    rows = measure_storage_accuracy("cpu", Shape(1, 4, 2, 256, 64), STORAGES)
    assert [list(row) for row in rows] == [["data", "storage", "queries", "out", "lse"]] * 2 * len(STORAGES)
    out = {(row["data"], row["storage"]): row["out"] for row in rows}
    assert out["normal", "fp32"] < 1e-5 < out["normal", "fp16"] < out["normal", "bf16"] < 5e-3
    assert out["normal", "bf16"] < out["normal", "int8"] < out["normal", "fp8"] < 0.1
    assert out["outlier channels", "int8"] > 3 * out["normal", "int8"]


def test_the_cpu_is_measured_beside_torch():
    (row,) = measure_cpu_shapes([TINY], rounds=2)
    speeds = [f"{name}_gb_per_s" for name in ("torch", "contiguous", "paged")]
    assert list(row) == [*SHAPE_COLUMNS, "torch_ms", "contiguous_over_torch", "paged_over_torch", *speeds]
    seconds = row["torch_ms"] / 1e3
    assert row["torch_gb_per_s"] == pytest.approx(TINY.cache_bytes("fp32") / 1e9 / seconds)
    assert row["paged_over_torch"] == pytest.approx(row["torch_gb_per_s"] / row["paged_gb_per_s"])


# The command.


def canned():
    """Sections as a run on a GPU leaves them, without one."""

    def line(shape, **more):
        return {**shape._asdict(), **more}

    grid = [
        line(Shape(batch, 8, 1, length, head_dim), storage=storage, **Shape(batch, 8, 1, length, head_dim).speeds(50.0))
        for storage in ("bf16", "bfp8")
        for head_dim in (64,)
        for batch in (8, 16)
        for length in (1024, 2048)
    ]
    splits = [line(TINY, max_splits=most, us=9.0, times_best=1.0) for most in (1, 2, 4, "free")]
    return {decode_parts.GRID: grid, decode_parts.SPLITS: splits}


@pytest.mark.sweep
def test_pictures_are_drawn_from_rows(tmp_path):
    pytest.importorskip("matplotlib")
    names = ["decode-tflops.svg", "decode-bandwidth.svg", "decode-splits.svg"]
    assert [path.name for path in plot_decode(canned(), tmp_path / "new")] == names
    for name in names:
        assert (tmp_path / "new" / name).read_text().startswith("<?xml")
    assert plot_decode({"something else": []}, tmp_path) == []


def test_every_point_is_in_its_picture(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr("benchmarks.decode.plot._saved", lambda pyplot, figure, path: figures.append(figure))
    sections = canned()
    for rows in sections.values():
        for at, row in enumerate(rows):
            row |= {"us": 9.0 + at, "tflops": 1.0 + at, "tb_per_s": 1.0 + at}
    plot_decode(sections, tmp_path)
    random_case = [
        (panel, y) for figure in figures for panel in figure.axes for line in panel.lines for y in line.get_ydata()
    ]
    assert len(random_case) == 8 + 8 + 3 + 2  # a line across has two ends
    for panel, y in random_case:
        low, high = panel.get_ylim()
        assert low < y < high


def test_pictures_are_drawn_from_a_file(tmp_path):
    pytest.importorskip("matplotlib")
    source = tmp_path / "decode.json"
    source.write_text(json.dumps({"sections": canned()}))
    assert run("--from", str(source), "--plot", str(tmp_path / "plots")).exit_code == 0
    assert len(list((tmp_path / "plots").glob("*.svg"))) == 3
    refused = run("--from", str(source))
    assert refused.exit_code == 2
    assert "give--plotandnootheroption" in unfolded(refused.output)


def test_help_names_the_parts():
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    for part in Part:
        assert part.value in shown.output


def test_the_command_measures_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(decode_cases, "CPU_SHAPES", (TINY,))
    monkeypatch.setattr(decode_cases, "ACCURACY_SHAPE", TINY)
    saved = tmp_path / "decode.json"
    ran = run("--device", "cpu", "--json", str(saved))
    assert ran.exit_code == 0, ran.output
    written = json.loads(saved.read_text())
    assert written["benchmark"] == "decode"
    assert "torch" in written["machine"]
    assert list(written["sections"]) == [decode_parts.CPU, decode_parts.ACCURACY]
    assert written["sections"][decode_parts.CPU][0]["length"] == TINY.length
    only = run("--device", "cpu", "--only", "accuracy", "--json", str(saved))
    assert only.exit_code == 0
    assert list(json.loads(saved.read_text())["sections"]) == [decode_parts.ACCURACY]


@pytest.mark.parametrize("part", [part for part in Part if part not in CPU_PARTS])
def test_a_part_for_gpus_is_refused_on_the_cpu(part):
    ran = run("--device", "cpu", "--only", part.value)
    assert ran.exit_code == 2
    assert "measuredonaGPUonly" in unfolded(ran.output)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_a_clear_error():
    ran = run("--device", "cuda")
    assert ran.exit_code == 2
    assert "no CUDA device is available" in ran.output


def test_what_was_measured_before_a_failure_is_kept(tmp_path, monkeypatch):
    def measured(device, parts):
        yield "first", [{"us": 1.0}]
        raise RuntimeError("the second part failed")

    monkeypatch.setattr("benchmarks.decode.__main__.measure_decode", measured)
    saved = tmp_path / "decode.json"
    assert run("--device", "cpu", "--json", str(saved)).exit_code == 1
    assert json.loads(saved.read_text())["sections"] == {"first": [{"us": 1.0}]}


def test_a_run_on_a_gpu_goes_through_every_part(monkeypatch, without_a_gpu):
    for name, value in {
        "SHAPES": (TINY,), "GRID": (TINY,), "LLAMA": (TINY,), "STORAGE_SHAPES": (TINY,), "TOKEN_SHAPES": (TINY,),
        "SPLIT_SHAPES": (TINY,), "ACCURACY_SHAPE": TINY,
    }.items():  # fmt: skip
        monkeypatch.setattr(decode_cases, name, value)
    compiled = []
    monkeypatch.setattr(decode_parts, "compile_kernels", lambda cases, device: compiled.extend(cases))
    monkeypatch.setattr(decode_parts, "measured_floor", lambda: {"empty_graph_us": 4.5, "read_tb_per_s": 4.0})
    monkeypatch.setattr(decode_parts, "_accuracy", lambda device: measure_storage_accuracy("cpu", TINY, ("fp8",)))
    monkeypatch.setattr(decode, "jax_paged", lambda shapes: ["no jax"] * len(shapes))
    monkeypatch.setattr(decode_peers, "_flex", lambda given: given.decode)
    sections = dict(decode_parts.measure_decode("cuda", list(Part)))
    assert list(sections) == [
        decode_parts.FLOOR, decode_parts.SHAPES, decode_parts.PEERS, decode_parts.GRID, decode_parts.LLAMA,
        decode_parts.STORAGE, decode_parts.TOKENS, decode_parts.SPLITS, decode_parts.ACCURACY,
    ]  # fmt: skip
    assert all(sections.values())
    assert compiled
    assert list(dict(decode_parts.measure_decode("cuda", [Part.TOKENS]))) == [decode_parts.FLOOR, decode_parts.TOKENS]


def test_latent_floors_and_checks(monkeypatch, capsys):
    shape = decode_latent.Latent(128, 128, 4096)
    assert shape.flops == 2 * 1088 * 128 * 128 * 4096
    assert shape.bytes == 128 * 4096 * 1152
    monkeypatch.setattr(decode_latent, "BACKENDS", ("reference",))
    assert set(decode_latent.random_run(decode_latent.Latent(2, 3, 65), "cpu")) == {"reference"}
    decode_latent.check("cpu", (20, 65))
    assert capsys.readouterr().out.count("error of out") == 5
    monkeypatch.setattr(decode_latent, "relative_error", lambda actual, exact: torch.nan)
    with pytest.raises(SystemExit, match="reference is wrong"):
        decode_latent.check("cpu", (20, 65))
