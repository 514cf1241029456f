"""The sparse benchmark: its roofline, rows, plot and command line, and that wrong results are detected."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from attnmesh.calibration import timing
from attnmesh.ops.sparse.arguments import TopKIndices
from attnmesh.ops.sparse.indexer_loss import AttentionTarget, indexer_kl_loss
from benchmarks.sparse import cases, measure, roofline
from benchmarks.sparse.__main__ import app
from benchmarks.sparse.cases import Attention, Indexer, sizes
from benchmarks.sparse.checks import ROUNDED, Verdict, judge, topk_error
from benchmarks.sparse.measure import Part
from benchmarks.sparse.plot import plot_sparse
from benchmarks.sparse.roofline import Peaks, Runner, Work, measure_peaks

QUICK = sizes("cpu", quick=True)
FULL = sizes("cuda", quick=False)
RUNNER = Runner("cpu", QUICK, Peaks(0.01, 0.01))
REACHED = ["operation", "heads", "s_kv", "ms", "tflops", "bound", "share_of_bound", "error", "verdict"]


def run(*arguments: str):
    return CliRunner().invoke(app, arguments)


def unfolded(output: str) -> str:
    """Return the text of a box without frames and spaces: a narrow one breaks lines anywhere."""
    return "".join(output.replace("│", "").split())


# The roofline.


@pytest.mark.parametrize(("s_kv", "gigabytes"), [(8192, 0.683), (32768, 0.711), (131072, 0.824)])
def test_the_distribution_matches_the_count_by_hand(s_kv, gigabytes):
    work = roofline.distribution(Attention(4096, s_kv, 128, 576, 512, 2048))
    assert work.flops == 2 * 4096 * 128 * 2048 * 576
    assert work.flops / 1e12 == pytest.approx(1.237, abs=5e-4)
    assert work.gather / 1e9 == pytest.approx(9.66, abs=5e-3)
    assert work.gather_64 / 1e9 == pytest.approx(19.33, abs=5e-3)
    by_hand = 4096 * 128 * 576 * 2 + s_kv * 1152 + 4096 * 2048 * (4 + 4) + 4096 * 128 * 4
    assert work.bytes == by_hand
    assert by_hand / 1e9 == pytest.approx(gigabytes, abs=5e-4)
    assert Peaks(790.0, 4.3).operations_ms(work) == pytest.approx(1.566, abs=5e-4)


def test_attention_matches_the_count_by_hand():
    shape = Attention(4096, 32768, 128, 576, 512, 2048)
    forward, backward = roofline.forward(shape), roofline.backward(shape)
    assert forward.flops / 1e12 == pytest.approx(2.336, abs=5e-4)
    assert backward.flops / 1e12 == pytest.approx(5.91, abs=5e-3)
    peaks = Peaks(790.0, 4.3)
    assert peaks.bound(forward) == ("operations", pytest.approx(2.958, abs=1e-3))
    assert peaks.bound(backward) == ("operations", pytest.approx(7.48, abs=5e-3))
    q, keys, out, slots, lse = 603979776, 37748736, 536870912, 33554432, 2097152
    assert forward.bytes == q + keys + out + slots + lse
    assert backward.bytes == 2 * (q + keys + out) + slots + lse
    assert forward[2:] == backward[2:] == roofline.distribution(shape)[2:]


def test_a_program_of_64_heads_gathers_once_for_16_and_twice_for_65():
    shape = Attention(4096, 32768, 16, 576, 512, 2048)
    assert roofline.forward(shape).gather_64 == roofline.forward(shape).gather
    assert roofline.forward(shape._replace(heads=65)).gather_64 == 2 * roofline.forward(shape).gather


def test_the_indexer_matches_the_count_by_hand():
    shape = Indexer(4096, 32768, 64, 128, 2048)
    full, causal = (roofline.topk(shape, causal=causal) for causal in (False, True))
    assert full.flops / 1e12 == pytest.approx(2.20, abs=5e-3)
    seen = sum(32768 - 4096 + row + 1 for row in range(4096))
    assert causal.flops == 2 * seen * 64 * 128
    assert full.bytes == causal.bytes == 67108864 + 8388608 + 1048576 + 4096 * (2048 * 8 + 4)
    assert full.gather == full.gather_64 == 0


def test_the_loss_takes_four_products():
    attention, indexer = FULL.loss
    sparse, dense = roofline.sparse_loss(attention, indexer), roofline.dense_loss(attention, indexer)
    assert sparse.flops == 2 * 4096 * 2048 * (128 * 576 + 3 * 64 * 128)
    assert dense.flops == sparse.flops * 32768 // 2048
    assert sparse.gather == 4096 * 2048 * (576 + 128) * 2
    assert sparse.gather_64 == 4096 * 2048 * (2 * 576 + 128) * 2
    assert sparse.bytes - dense.bytes == 4096 * 2048 * 4
    assert dense.gather == 0


def test_the_larger_bound_is_named():
    peaks = Peaks(tflops=100.0, tb_per_s=2.0)
    assert peaks.bound(Work(10**12, 10**9)) == ("operations", pytest.approx(10.0))
    assert peaks.bound(Work(10**10, 10**9)) == ("bytes", pytest.approx(0.5))
    speeds = Runner("cpu", QUICK, peaks).speeds(Work(10**12, 10**9), 20.0)
    assert speeds == {
        "ms": 20.0,
        "tflops": pytest.approx(50.0),
        "bound": "operations",
        "share_of_bound": pytest.approx(0.5),
    }


def test_ceilings_count_both_ways_of_a_copy(monkeypatch):
    monkeypatch.setattr("benchmarks.sparse.roofline.wall", lambda runs, rounds: dict.fromkeys(runs, 0.5))
    peaks = measure_peaks("cpu", QUICK)
    assert peaks.tflops == pytest.approx(2 * QUICK.matmul**3 / 0.5 / 1e12)
    assert peaks.tb_per_s == pytest.approx(2 * QUICK.copied / 0.5 / 1e12)


def test_the_shapes_are_those_of_the_plan():
    assert [tuple(x) for x in FULL.lengths] == [(4096, n, 128, 576, 512, 2048, 2) for n in (8192, 32768, 131072)]
    assert tuple(FULL.few_heads) == (4096, 32768, 16, 576, 512, 2048, 2)
    assert [tuple(x) for x in FULL.indexers] == [(4096, n, 64, 128, 2048, 2) for n in (32768, 131072)]
    assert [x.s_kv for x in FULL.loss] == [32768, 32768]
    for device in ("cpu", "cuda"):
        for quick in (True, False):
            given = sizes(device, quick)
            # The last rows of a causal sequence see at least topk keys: no slot of the top-k stays empty.
            assert all(x.s_kv - x.s_q + 1 >= x.topk for x in given.indexers)
            assert all(x.s_kv >= x.topk for x in (*given.lengths, given.few_heads, *given.loss))


# Inputs.


def test_indices_are_distinct_uniform_and_in_no_order(monkeypatch):
    monkeypatch.setattr(cases, "_CHUNK_VALUES", 7 * 64)  # pieces of 7 rows
    found = cases.random_indices(400, 64, 16, "cpu")
    assert found.dtype == torch.int32
    assert found.shape == (400, 16)
    assert all(len(set(row)) == 16 for row in found.tolist())
    assert 0 <= int(found.min()) <= int(found.max()) < 64
    times = torch.bincount(found.flatten(), minlength=64).double()  # each 100 on average, give or take 9
    assert float((times - 100).abs().max()) < 50
    ascending = (found.diff(dim=1) > 0).double().mean()
    assert 0.45 < float(ascending) < 0.55


def test_indices_are_drawn_without_all_keys_of_all_rows_in_memory(monkeypatch):
    drawn = []
    rand = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *shape, **more: drawn.append(shape) or rand(*shape, **more))
    monkeypatch.setattr(cases, "_CHUNK_VALUES", 256)
    cases.random_indices(10, 64, 8, "cpu")
    assert drawn == [(4, 64), (4, 64), (2, 64)]


def test_a_gradient_of_some_rows_is_zero_in_the_others():
    grad = torch.randn(5, 3)
    rows = cases.sample_rows(5, "cpu", count=2)
    assert rows.tolist() == [0, 4]
    kept = cases.keep_rows(rows, grad)
    torch.testing.assert_close(kept[rows], grad[rows], rtol=0, atol=0)
    assert not kept[1:4].any()


# The guard.


def test_what_is_too_far_is_wrong():
    right = torch.ones(4, dtype=torch.float64)
    assert judge((right.float(), right, 1e-3), (right * 1.001, right, 1e-2)) == (pytest.approx(1e-3), "ok")
    assert judge((right, right, 1e-3), (right * 1.1, right, 1e-2)) == (pytest.approx(0.1), "WRONG")
    assert judge((right * torch.nan, right, 1e-3), (right, right, 1e-3)) == (math.inf, "WRONG")


def test_a_choice_is_held_against_exact_scores():
    scores = torch.tensor([[3.0, 1.0, -math.inf, 2.0, 0.0]], dtype=torch.float64)
    size = math.sqrt((9 + 1 + 4) / 4)

    def error(*keys):
        return topk_error(torch.tensor([keys], dtype=torch.int32), scores)

    assert error(0, 3) == 0
    assert error(0, 1) == pytest.approx(1 / size)  # below the second best by 1
    assert error(1, 3) == pytest.approx(1 / size)  # the best was left out: 1 above the second
    assert error(0, 2) == error(0, 0) == error(0, -1) == error(0, 5) == math.inf
    assert topk_error(torch.tensor([[1, 4]], dtype=torch.int32), torch.zeros(1, 5).double() + 0.5) == 0  # all equal


@pytest.mark.parametrize("spoil", ["none", "order", "scores", "choice"])
def test_top_k_is_judged_by_choice_scores_and_order(spoil):
    exact = torch.randn(6, 32, dtype=torch.float64)
    indices = exact.topk(4, 1).indices.sort(1).values
    if spoil == "choice":
        indices[3] = (-exact[3]).topk(4).indices.sort().values
    scores = exact.gather(1, indices).float()
    if spoil == "order":
        indices, scores = indices.flip(1), scores.flip(1)
    if spoil == "scores":
        scores[3] += 0.1
    slots = TopKIndices(indices.int(), scores, torch.full((6,), 4))
    assert measure.judge_topk(slots, exact, torch.arange(6)).verdict == ("ok" if spoil == "none" else "WRONG")


def wrong_tenth(function):
    """An operation whose first result is a tenth too large."""

    def spoiled(*args, **kwargs):
        found = function(*args, **kwargs)
        return (found[0] * 1.1, *found[1:]) if isinstance(found, tuple) else found * 1.1

    return spoiled


@pytest.mark.parametrize(
    ("name", "run_part", "wrong"),
    [
        ("attention_distribution", measure.measure_distribution, {"attention_distribution"}),
        ("sparse_attention", measure.measure_attention, {"forward", "backward", "backward, deterministic"}),
        ("indexer_kl_loss", measure.measure_loss, {"sparse loss", "dense loss"}),
    ],
)
def test_wrong_operations_are_found(name, run_part, wrong, monkeypatch):
    assert measure.wrong_rows(run_part(RUNNER)) == []
    monkeypatch.setattr(measure, name, wrong_tenth(getattr(measure, name)))
    found = run_part(RUNNER)
    assert {row["operation"] for row in measure.wrong_rows(found)} == wrong


def test_rounding_to_bf16_is_far_from_wrong(monkeypatch):
    monkeypatch.setattr("benchmarks.sparse.roofline.dtype_on", lambda device: torch.bfloat16)
    for _, run_part in measure._TITLES.values():
        for row in run_part(RUNNER):
            assert row["verdict"] in ("ok", "peer")
            assert row["error"] < ROUNDED / 4 or row["verdict"] == "peer"


def test_a_wrong_result_ends_with_1(monkeypatch, tmp_path):
    rows = [{"operation": "forward", "ms": 1.0, **Verdict(0.5, "WRONG")._asdict()}]
    monkeypatch.setitem(measure._TITLES, Part.DIST, (measure.DIST, lambda runner: rows))
    saved = tmp_path / "sparse.json"
    ran = run("--device", "cpu", "--quick", "--only", "dist", "--json", str(saved))
    assert ran.exit_code == 1
    assert "WRONG results" in ran.output
    assert json.loads(saved.read_text())["sections"][measure.DIST][0]["verdict"] == "WRONG"


# Timing and memory.


def test_queued_takes_turns_and_fills_slices(monkeypatch):
    log = []
    took = {"short": 20.0, "long": 250.0}

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = len(log)

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return sum(took[name] for name in log[self.at : other.at])

    monkeypatch.setattr(timing.torch, "cuda", SimpleNamespace(Event=Event))
    times = timing.queued({name: lambda name=name: log.append(name) for name in took}, rounds=2)
    assert times == took
    # Once to compile; then, in turns, once to see how long it takes and 5 times to fill a slice; the long one once.
    assert log == ["short", "long"] + (["short"] * 6 + ["long"]) * 2


def test_the_naive_computation_takes_as_many_rows_as_fit():
    tried = []

    def needs(rows):
        tried.append(rows)
        if rows > 3:
            raise torch.OutOfMemoryError("too much")

    assert measure.max_rows(20, needs) == 3
    assert tried == [20, 10, 5, 3]
    with pytest.raises(RuntimeError, match="not even one row"):
        measure.max_rows(2, lambda rows: needs(rows + 10))


@pytest.mark.parametrize("at_once", [16, 5])
@pytest.mark.parametrize("dense", [False, True])
def test_the_naive_computation_is_the_loss(dense, at_once):
    attention, indexer = QUICK.loss
    x = cases.attention_inputs(attention, "cpu", torch.float64)
    i = cases.indexer_inputs(indexer, "cpu", torch.float64)
    grad = torch.randn(attention.s_q, dtype=torch.float64)
    every = torch.arange(attention.s_kv).expand(attention.s_q, -1)
    lse = (torch.einsum("ihd,jd->ihj", x.q, x.kv) * x.scale).gather(
        2, (every if dense else x.indices.long())[:, None].expand(-1, attention.heads, -1)
    ).logsumexp(-1)  # fmt: skip
    leaves = [t.detach().double().requires_grad_() for t in i]
    loss = indexer_kl_loss(
        *leaves, None if dense else x.indices, AttentionTarget(x.q, x.kv, lse, x.scale), reduction="none"
    )  # fmt: skip
    expected = (loss, *torch.autograd.grad(loss, leaves, grad))
    found = measure.naive_step(x, cases.IndexerInputs(*leaves), grad, dense=dense, at_once=at_once)
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got, right.detach(), rtol=1e-4, atol=1e-6, check_dtype=False)  # p is float32 there
    if dense:
        torch.testing.assert_close(measure.dense_lse(x).double(), lse, rtol=1e-5, atol=1e-5)


# Rows and the picture.


@pytest.fixture(scope="module")
def measured():
    """Every section as a run on an H200 leaves it, at a size for the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "added_bytes", lambda self, program: 1000 if program() else 0)
        return {title: run_part(RUNNER) for title, run_part in measure._TITLES.values()}


def test_rows_are_whole_and_right(measured):
    assert [list(row) for row in measured[measure.DIST]] == [REACHED] * 2
    assert [list(row) for row in measured[measure.ATTENTION]] == [REACHED] * 9
    assert [list(row) for row in measured[measure.TOPK_TITLE]] == [[*REACHED, "over_ours", "memory_over_io"]] * 4
    assert [list(row) for row in measured[measure.LOSS]] == [[*REACHED, "at_once", "over_ours", "added_gb"]] * 4
    for rows in measured.values():
        assert measure.wrong_rows(rows) == []
        for row in rows:
            assert row["error"] < 1e-4
            assert row["tflops"] > 0
    assert {(row["heads"], row["s_kv"]) for row in measured[measure.ATTENTION]} == {(4, 64), (4, 96), (2, 96)}
    ours, theirs = measured[measure.TOPK_TITLE][:2]
    assert ours["over_ours"] == 1
    assert theirs["over_ours"] == pytest.approx(theirs["ms"] / ours["ms"])
    assert theirs["verdict"] == "peer"
    held = 4 * (16 * 4 * 16 + 96 * 16 + 16 * 4)
    assert ours["memory_over_io"] == pytest.approx((held + 1000) / (held + 16 * (2 * 24 + 1) * 4))


def as_on_a_cpu(sections):
    kept = {title: measure._ratios(rows) for title, rows in sections.items()}
    for row in (row for rows in kept.values() for row in rows):
        row.pop("memory_over_io", None)
        row.pop("added_gb", None)
    return kept


@pytest.mark.sweep
def test_the_picture_has_every_figure(measured, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: figures.append(self))
    plot_sparse(measured, tmp_path / "new" / "sparse.svg")
    plot_sparse(as_on_a_cpu(measured), tmp_path / "sparse.svg")
    by_time, by_ratio = figures
    assert len(by_time.axes) == len(by_ratio.axes) == 4
    # Curves with their bounds: 1 x 2, and (3 of 4 heads, 3 of 2) x 2.
    assert [len(panel.lines) for panel in by_time.axes[:2]] == [2, 12]
    assert [len(panel.lines) for panel in by_ratio.axes[:2]] == [1, 6]
    assert [len(panel.patches) for panel in by_time.axes[2:]] == [4, 4]  # time and memory, of two each
    assert [len(panel.patches) for panel in by_ratio.axes[2:]] == [2, 2]


@pytest.mark.parametrize("backward", [8.0, 400.0])
def test_every_point_is_well_inside_its_panel(backward, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: figures.append(self))
    times = {"forward": 4.0, "backward": backward}
    plot_sparse(
        {measure.ATTENTION: [
            {"operation": name, "heads": 128, "s_kv": s_kv, "ms": ms, "share_of_bound": 0.5}
            for name, ms in times.items() for s_kv in (8192, 32768)
        ]},
        tmp_path / "sparse.svg",
    )  # fmt: skip
    (panel,) = figures[0].axes
    heights = [panel.transAxes.inverted().transform(panel.transData.transform(point))[1]
               for line in panel.lines for point in line.get_xydata()]  # fmt: skip
    assert len(heights) == 8
    assert all(0.02 < y < 0.98 for y in heights)
    assert max(heights) - min(heights) > 0.5


# The command.


def test_the_command_measures_on_the_cpu(tmp_path):
    pytest.importorskip("matplotlib")
    saved, picture = tmp_path / "sparse.json", tmp_path / "sparse.svg"
    ran = run("--device", "cpu", "--quick", "--json", str(saved), "--plot", str(picture))
    assert ran.exit_code == 0, ran.output
    assert "uniformly random distinct indices" in " ".join(ran.output.split())
    assert picture.read_text().startswith("<?xml")
    written = json.loads(saved.read_text())
    assert written["benchmark"] == "sparse"
    assert list(written["sections"]) == [
        measure.ROOFLINE,
        measure.DIST,
        measure.ATTENTION,
        measure.TOPK_TITLE,
        measure.LOSS,
    ]
    columns = {name for rows in written["sections"].values() for row in rows for name in row}
    assert not [name for name in columns if name.split("_")[-1] in ("ms", "tflops", "s")]  # only ratios
    assert {"share_of_bound", "over_ours", "error", "gather_gb", "gather64_gb"} <= columns
    timed = {row["operation"] for title in list(written["sections"])[1:] for row in written["sections"][title]}
    asked = {row["operation"] for row in written["sections"][measure.ROOFLINE]}
    assert asked <= timed


def test_only_selects_parts(tmp_path):
    saved = tmp_path / "sparse.json"
    ran = run("--device", "cpu", "--quick", "--only", "topk", "--json", str(saved))
    assert ran.exit_code == 0, ran.output
    sections = json.loads(saved.read_text())["sections"]
    assert list(sections) == [measure.ROOFLINE, measure.TOPK_TITLE]
    assert {row["operation"] for row in sections[measure.ROOFLINE]} == {"indexer_topk", "indexer_topk, causal"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--only", "everything"), "'everything'isnotoneof'dist','attention','topk','loss'"),
        (("--plot", "picture.txt"), "mustendinoneof.pdf,.png,.svg,got'picture.txt'"),
        (("--plot", "picture"), "mustendinoneof.pdf,.png,.svg,got'picture'"),
        (("--device", "abacus"), "'abacus'isnotoneof"),
        (("--rounds", "3"), "Nosuchoption"),
    ],
)
def test_what_cannot_be_done_is_refused(arguments, said):
    ran = run(*arguments)
    assert ran.exit_code == 2
    assert said in unfolded(ran.output)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    ran = run("--device", "cuda", "--quick")
    assert ran.exit_code == 2
    assert "noCUDAdeviceisavailable" in unfolded(ran.output)


def test_help_names_the_parts():
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    for part in Part:
        assert part.value in shown.output
