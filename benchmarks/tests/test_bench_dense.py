"""The dense benchmark: its cases and operations, its checks, its processes and its command line, without a GPU."""

import json
import time
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from attnmesh.calibration import timing
from attnmesh.core.state import State
from attnmesh.ops.dense.api import attention
from benchmarks.dense import __main__ as command
from benchmarks.dense import measure, programs
from benchmarks.dense.cases import CASES, VARIANTS, Case, Part, RingCase, mask_mod, random_inputs, select, variants
from benchmarks.dense.checks import Saved, expected_backward, expected_forward, sample
from benchmarks.dense.measure import FAILED, OK, SUMMARY, WRONG, Job, Verdict, check_and_time
from benchmarks.dense.plot import plot_dense
from benchmarks.dense.programs import Program, RefusalError
from benchmarks.dense.workers import NOW, TIME_UP, supervise, supervise_many

MASKS = ("causal", "window:7", "documents:16")
K = 1024


def tiny(part: Part, mask: str = "window:7") -> Case:
    return Case(part, mask, 50, q_heads=4, kv_heads=2, key_dim=16, value_dim=8)


def run(*arguments: str):
    return CliRunner().invoke(command.app, arguments)


# Cases.


def test_the_cases_are_those_of_the_plan():
    for part in Part:
        found = [x for x in CASES if isinstance(x, Case) and x.part is part]
        assert [x[1:] for x in found if x.batch > 1] == [("causal", 8 * K, 48, 48, 128, 128, 4)]  # FlashAttention-3's
        kernels = {x[1:-1] for x in found if x.batch == 1}
        assert kernels == {
            ("causal", 8 * K, 32, 8, 128, 128), ("causal", 32 * K, 32, 8, 128, 128),
            ("causal", 128 * K, 32, 8, 128, 128), ("causal", 8 * K, 32, 8, 64, 64),
            ("causal", 8 * K, 16, 4, 256, 256), ("causal", 8 * K, 16, 16, 192, 128),
            ("causal", 2 * K, 32, 8, 128, 128), ("causal", 32 * K, 32, 8, 64, 64),
            ("causal", 32 * K, 16, 4, 256, 256), ("causal", 32 * K, 16, 16, 192, 128),
            ("window:4096", 32 * K, 32, 8, 128, 128), ("documents:2048", 32 * K, 32, 8, 128, 128),
        }  # fmt: skip
        assert [x.length for x in CASES if isinstance(x, RingCase) and x.part is part] == [32 * K, 16 * K]
    assert len({x.name for x in CASES}) == len(CASES)
    assert [x.name for x in CASES[:2]] == ["forward causal 8k D128", "backward causal 8k D128"]
    goals = {(x.part, x.mask, x.key_dim): (x.goal, x.peer) for x in CASES if isinstance(x, Case)}
    assert goals[Part.FORWARD, "causal", 128] == (1.0, "cuDNN")
    assert goals[Part.BACKWARD, "causal", 128] == (0.97, "cuDNN")
    assert goals[Part.BACKWARD, "causal", 192] == (0.95, "cuDNN")
    assert goals[Part.BACKWARD, "window:4096", 128] == (1.0, "FlexAttention")


@pytest.mark.parametrize("mask", MASKS)
def test_operations_and_masks_equal_a_count_by_brute_force(mask):
    forward, backward = (tiny(part, mask) for part in Part)
    at = torch.arange(50)
    visible = forward.visible.visible(at[:, None], at)
    assert torch.equal(visible, mask_mod(mask)(0, 0, at[:, None], at))
    first, end = forward.patch.bounds(torch.device("cpu"))
    assert torch.equal(visible, (at >= first[0, 0, :, None]) & (at < end[0, 0, :, None]))
    pairs = sum(
        q >= k and {"causal": True, "window:7": q - k < 7, "documents:16": q // 16 == k // 16}[mask]
        for q in range(50)
        for k in range(50)
    )
    assert forward.flops == 2 * 4 * pairs * (16 + 8)  # scores and out
    assert backward.flops == 2 * 4 * pairs * (16 + 16 + 16 + 8 + 8)  # scores, dq and dk; dp and dv


def test_operations_of_the_large_cases():
    assert Case(Part.FORWARD, "causal", 8 * K).flops == 4 * 32 * 128 * (8 * K * (8 * K + 1) // 2)
    published = Case(Part.FORWARD, "causal", 8 * K, 48, 48, batch=4)
    assert published.flops == 4 * 4 * 48 * 128 * (8 * K * (8 * K + 1) // 2)
    assert published.name == "forward causal 4x8k D128"
    window = sum(min(row + 1, 4096) for row in range(32 * K))
    assert Case(Part.BACKWARD, "window:4096", 32 * K).flops == 10 * 32 * 128 * window


def test_only_selects_by_part_of_the_name():
    assert select(tuple(Part), ()) == list(CASES)
    assert [x.name for x in select((Part.BACKWARD,), ("causal 8k D128", "ring*16k"))] == [
        "backward causal 8k D128",
        "backward ring of 8, 16k",
    ]
    assert len(select(tuple(Part), ("8k D64",))) == 2


def test_variants_change_fields_that_tiles_have():
    forward = pytest.importorskip("attnmesh.ops.dense.gluon_forward")
    backward = pytest.importorskip("attnmesh.ops.dense.gluon_backward")
    for (part, key_dim, value_dim), changes in VARIANTS.items():
        default = forward.pick_tiles(key_dim, value_dim) if part is Part.FORWARD else None
        if default is None:
            q, v = (torch.empty(1, 1, 1, width, dtype=torch.bfloat16, device="cpu") for width in (key_dim, value_dim))
            default = backward.BackwardTiles.pick(q, v)
        for change in changes:
            assert default._replace(**change) != default
    for case in CASES:
        if isinstance(case, Case):
            found = programs.names(case, with_variants=True)
            assert len(found) == len(set(found)) >= len(variants(case)) + (2 if case.length <= 32 * K else 1)
            tried = (case.part, case.key_dim, case.value_dim) in VARIANTS and (
                case.length <= 32 * K or case.part is Part.FORWARD
            )
            assert (len(variants(case)) > 1) == tried
            assert all(programs._variant(programs.label(x), case) == x for x in variants(case))


def test_peers_depend_on_the_mask():
    assert programs.names(tiny(Part.FORWARD, "causal"), with_variants=False) == [
        "cuDNN", "FlashAttention-2", "Triton", "Gluon",
    ]  # fmt: skip
    wide = Case(Part.FORWARD, "window:4096", 8 * K)
    assert programs.names(wide, with_variants=False) == ["FlexAttention", "Triton", "Gluon", "Gluon stage"]
    assert programs.label({"keys": 64, "bulk": False}) == "Gluon keys=64 bulk=0"


# The check against float64.


def test_samples_lie_on_both_sides_of_tile_edges():
    at = sample(8192, torch.device("cpu")).tolist()
    assert {0, 8191} <= set(at)
    assert sum(x % 128 == 0 and x - 1 in at for x in at) >= 14
    assert sample(3, torch.device("cpu")).max() <= 2


def stand_in(x, mask, dtype=torch.float32) -> tuple[State, dict[str, torch.Tensor]]:
    """Out and lse, and the gradients, by the reference in another precision."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in (x.q, x.k, x.v)]
    state = attention(*leaves, mask=mask, return_lse=True, backend="reference")
    grads = torch.autograd.grad(state[0], leaves, x.grad_out.to(dtype))
    return State(*(t.detach() for t in state)), dict(zip(("dq", "dk", "dv"), grads, strict=True))


def problem(part: Part, mask: str, dtype=torch.float32):
    """A case, its inputs, right results, and the judge of others."""
    case = tiny(part, mask)
    x = random_inputs(case, "cpu", dtype)
    state, grads = stand_in(x, case.visible)
    if part is Part.FORWARD:
        return case, state._asdict(), expected_forward(x)
    saved = Saved(*state, (state.out * x.grad_out).sum(-1))
    return case, grads, expected_backward(x, saved)


@pytest.mark.parametrize("part", Part)
@pytest.mark.parametrize("mask", MASKS)
def test_right_results_pass_and_each_wrong_one_is_found(part, mask):
    _, right, exact = problem(part, mask)
    error, passed = exact.judge(right)
    assert passed
    assert error < 1e-5
    assert exact.judge({name: x.bfloat16() for name, x in right.items()})[1]
    assert not exact.judge({})[1]
    for name, x in right.items():
        at = exact.results[name][0][5]
        for spoil in (lambda t: t * 1.1, lambda t: t * torch.nan, lambda t: -t):
            spoiled = x.clone()
            spoiled[0, 1, at] = spoil(spoiled[0, 1, at])  # one row of one head
            assert not exact.judge(right | {name: spoiled})[1]


def test_the_kernels_for_hopper_pass_in_the_emulator():
    gluon_forward = pytest.importorskip("attnmesh.ops.dense.gluon_forward")
    from helpers.gluon import emulated

    case = Case(Part.FORWARD, "window:40", 130, q_heads=2, kv_heads=1, key_dim=64, value_dim=64)
    x = random_inputs(case, "cpu", torch.float16)
    tiles = gluon_forward.GluonTiles(64, 2)
    arguments = {**x.arguments, "state": None, "out_dtype": torch.float16, "tiles": tiles}
    found = emulated(gluon_forward).forward(x.q, x.k, x.v, **arguments)
    assert expected_forward(x).judge(found._asdict())[1]
    shifted = {**arguments, "bounds": (x.first, x.end + 1)}  # every row sees one key too many
    wrong = emulated(gluon_forward).forward(x.q, x.k, x.v, **shifted)
    assert not expected_forward(x).judge(wrong._asdict())[1]


# Checks and times of one case.


def timed(runs, rounds, failures):
    """A timer: milliseconds by the order of the runs; one cannot be captured."""
    found = {name: float(n + 1) for n, name in enumerate(runs)}
    assert all(isinstance(run_once(), torch.Tensor) for run_once in runs.values())
    if "fails" in found:
        failures["fails"] = "no graph"
        del found["fails"]
    return found


def test_a_wrong_program_is_named_and_not_timed():
    case, right, exact = problem(Part.BACKWARD, "window:7")
    log = []

    def build(name):
        if name == "refuses":
            raise RefusalError("its kernel does not take head_dim 16")
        results = right | {"dk": 2 * right["dk"]} if name == "wrong" else right
        return Program(lambda: {key: x.clone() for key, x in results.items()}, partial(log.append, f"begin {name}"))

    names = ("cuDNN", "wrong", "refuses", "fails", "good")
    messages = list(check_and_time(Job(case, names, 3), build, exact, lambda: None, timed))
    assert [value for kind, value in messages if kind == NOW] == [*names, "timing"]
    verdicts = [value for kind, value in messages if kind == "verdict"]
    assert [x.verdict for x in verdicts] == [OK, WRONG, "cannot", OK, OK]
    assert str(verdicts[1]).startswith("wrong: WRONG error ")
    assert log.count("begin good") == 2  # before the check and before it is timed
    (rows,) = (value for kind, value in messages if kind == "rows")
    by_name = {row["program"]: row for row in rows}
    assert by_name["cuDNN"]["ms"] == 1.0
    assert by_name["good"]["ms"] == 3.0
    assert by_name["good"]["tflops"] == pytest.approx(case.flops / 3.0 / 1e9)
    assert by_name["good"]["of_cuDNN"] == pytest.approx(1 / 3)
    assert by_name["wrong"]["ms"] == by_name["refuses"]["ms"] == by_name["fails"]["ms"] == ""
    assert by_name["fails"]["verdict"] == f"{FAILED} no graph"
    assert by_name["refuses"]["verdict"] == "cannot its kernel does not take head_dim 16"
    assert [row["program"] for row in measure.wrong_rows(rows)] == ["wrong", "fails"]


def test_results_are_poisoned_before_the_next_program():
    case, right, exact = problem(Part.FORWARD, "causal")
    memory = {name: x.clone() for name, x in right.items()}  # as an allocator hands out again
    first = Program(lambda: memory)
    (found,) = (
        v for k, v in check_and_time(Job(case, ("a",), 0), lambda n: first, exact, lambda: None, timed) if k != NOW
    )
    assert found.verdict == OK
    lazy = Program(lambda: memory)  # writes nothing
    messages = list(check_and_time(Job(case, ("b",), 0), lambda n: lazy, exact, lambda: None, timed))
    assert messages[-1][1].verdict == WRONG


def test_a_peer_that_cannot_is_not_a_failure_of_ours():
    case, _, exact = problem(Part.FORWARD, "causal")

    def build(name):
        raise RuntimeError("No available kernel.\nAborting")

    verdicts = [
        value
        for kind, value in check_and_time(Job(case, ("cuDNN", "Triton"), 0), build, exact, lambda: None, timed)
        if kind == "verdict"
    ]
    assert [(x.verdict, x.why) for x in verdicts] == [
        ("cannot", "RuntimeError: No available kernel."), (FAILED, "RuntimeError: No available kernel."),
    ]  # fmt: skip


def test_a_device_that_is_lost_ends_the_job():
    case, _, exact = problem(Part.FORWARD, "causal")

    def lost(*_):
        raise RuntimeError("illegal memory access")

    with pytest.raises(RuntimeError, match="illegal"):
        list(check_and_time(Job(case, ("Gluon",), 1), lost, exact, lost, timed))


def test_the_forward_of_flex_is_not_counted():
    verdicts = [Verdict("FlexAttention", OK, 1e-3), Verdict("Gluon", OK, 1e-3)]
    times = {"FlexAttention": 7.0, ("FlexAttention", "less"): 2.0, "Gluon": 4.0}
    flex, gluon = measure.rows(tiny(Part.BACKWARD), verdicts, times, {})
    assert flex["ms"] == 5.0
    assert gluon["of_FlexAttention"] == pytest.approx(5 / 4)
    flex, gluon = measure.rows(tiny(Part.BACKWARD), verdicts, times, {("FlexAttention", "less"): "no graph"})
    assert (flex["ms"], flex["verdict"], gluon["of_FlexAttention"]) == ("", f"{FAILED} no graph", "")


def test_interleaved_leaves_out_what_cannot_be_captured(monkeypatch):
    monkeypatch.setattr(timing.torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(timing.torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(timing, "_between_events", lambda run, times: 50.0)

    class Graph:
        def replay(self):
            pass

    def captured(name, run):
        if name == "bad":
            raise RuntimeError("no capture")
        return Graph()

    monkeypatch.setattr(timing, "_captured", captured)
    failures = {}
    assert timing.interleaved({"good": None, "bad": None}, 2, failures=failures) == {"good": 50.0}
    assert failures == {"bad": "RuntimeError: no capture"}
    with pytest.raises(RuntimeError, match="no capture"):
        timing.interleaved({"bad": None}, 2)


# Processes. They are forked here: a new one would import torch for seconds.


def scripted(job):
    """A job is a list of what happens."""
    for action in job:
        if action == "hang":
            time.sleep(60)
        elif action == "raise":
            raise RuntimeError("illegal memory access")
        elif action == "die":
            raise SystemExit(7)
        else:
            yield action


def without_hang(job, name):
    return [x for x in job if x not in ("hang", "raise")] if name == "Gluon" else None


def test_a_hanging_or_dying_job_is_named_and_the_others_go_on():
    jobs = [
        [(NOW, "Gluon"), ("rows", 1), "hang"],
        [(NOW, "Gluon"), "raise", ("rows", 2)],
        [(NOW, "Triton"), "die"],
        [("rows", 3)],
    ]
    found = list(
        supervise(
            scripted, jobs, silence=0.2, deadline=time.monotonic() + 60, retry=without_hang, start="fork"
        )
    )  # fmt: skip
    assert [tuple(x) for x in found] == [
        (0, "rows", 1), (0, "lost", ("Gluon", "no answer for 0.2 s")), (0, "rows", 1), (0, "done", None),
        (1, "lost", ("Gluon", "RuntimeError: illegal memory access")), (1, "rows", 2), (1, "done", None),
        (2, "lost", ("Triton", "its process ended with status 7")),
        (3, "rows", 3), (3, "done", None),
    ]  # fmt: skip


def test_the_deadline_ends_everything():
    begin = time.monotonic()
    jobs = [[("rows", 1)], [(NOW, "Gluon"), "hang"], [("rows", 2)]]
    found = list(supervise(scripted, jobs, silence=60, deadline=begin + 0.3, start="fork"))
    assert time.monotonic() - begin < 5
    assert [tuple(x) for x in found] == [
        (0, "rows", 1), (0, "done", None), (1, "lost", ("Gluon", TIME_UP)), (2, "lost", ("", TIME_UP)),
    ]  # fmt: skip


def test_several_processes_share_the_jobs():
    jobs = [[("verdict", n)] for n in range(5)]
    found = list(supervise_many(scripted, jobs, 2, silence=30, deadline=time.monotonic() + 60, start="fork"))
    assert sorted(x.job for x in found if x.kind == "done") == [0, 1, 2, 3, 4]
    assert all(x.job == x.value for x in found if x.kind == "verdict")


# The whole measurement, with processes that are played.


def test_programs_are_compiled_once_for_all_lengths():
    jobs = [measure.job_of(case, with_variants=False, rounds=3) for case in CASES]
    compiled = measure.compile_jobs(jobs)
    ours = [job for job in compiled if job.names == ("Gluon",) and job.case.part is Part.FORWARD]
    assert [job.case.name for job in ours] == [
        "forward causal 8k D128", "forward window:4096 8k D128", "forward documents:2048 8k D128",
        "forward causal 8k D64", "forward causal 8k D192/128", "forward causal 8k D256", "forward causal 4x8k D128",
    ]  # fmt: skip
    assert {job.case.length for job in compiled if job.names == ("FlexAttention",)} == {32 * K}
    assert not any(job.names[0] in ("cuDNN", "FlashAttention-2") for job in compiled)
    assert {job.names[0] for job in compiled if isinstance(job.case, RingCase)} == {"auto"}
    assert all(job.rounds == 0 for job in compiled)


def played(job):
    """What a process would yield, at once: Triton hangs, a Gluon variant is wrong when it is compiled."""
    if not job.rounds:
        wrong = job.names[0] == "Gluon keys=64 stages=3"
        yield "verdict", Verdict(job.names[0], WRONG if wrong else OK, 0.5 if wrong else 1e-3)
        return
    if isinstance(job.case, RingCase):
        yield "rows", [{"backend": name, "efficiency": 0.9} for name in job.names]
        return
    verdicts = [Verdict(name, OK, 1e-3) for name in job.names]
    yield "verdict", verdicts[0]
    yield "rows", measure.rows(job.case, verdicts, {name: 2.0 if name == "cuDNN" else 1.0 for name in job.names}, {})


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(measure, "measure_job", played)
    for name, function in (("supervise", supervise), ("supervise_many", supervise_many)):
        monkeypatch.setattr(measure, name, partial(function, start="fork"))
    monkeypatch.setattr(measure, "_MOST_PROCESSES", 2)
    monkeypatch.setattr(command, "check_device", lambda device: None)
    monkeypatch.setattr("attnmesh.cli.output.machine", lambda device: {"processor": "none"})


def test_a_run_prints_and_saves(without_gpu, tmp_path):
    saved = tmp_path / "dense.json"
    ran = run(
        "--part", "forward", "--only", "causal 8k D192/128", "--only", "ring*16k", "--variants", "--time-limit", "60",
        "--json", str(saved),
    )  # fmt: skip
    assert ran.exit_code == 1  # a wrong variant
    assert "Gluon keys=64 stages=3: WRONG 0.5" in ran.output
    assert "WRONG or FAILED programs" in ran.output
    facts = json.loads(saved.read_text())
    assert facts["benchmark"] == "dense"
    assert facts["machine"] == {"processor": "none"}
    sections = facts["sections"]
    assert [title.split(" (")[0] for title in sections][:2] == ["forward causal 8k D192/128", "forward ring of 8, 16k"]
    case, ring, bad, summary = sections.values()
    assert "Gluon keys=64 stages=3" not in [row["program"] for row in case]
    assert [row["backend"] for row in ring] == ["auto"]
    assert bad == [{"case": "forward causal 8k D192/128", "program": "Gluon keys=64 stages=3", "why": "WRONG 0.5"}]
    assert summary == sections[SUMMARY]
    assert summary[0]["ratio"] == 2.0
    assert summary[0]["goal"] == "0.95 of cuDNN"


@pytest.mark.sweep
def test_speeds_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    lines = []
    for case in CASES[:2]:
        verdicts = [Verdict(name, OK, 1e-3) for name in programs.names(case, with_variants=False)]
        lines.append(measure.summary_row(case, measure.rows(case, verdicts, {x.name: 1.0 for x in verdicts[1:]}, {})))
    plot_dense({SUMMARY: lines}, tmp_path / "dense.svg")
    assert (tmp_path / "dense.svg").stat().st_size > 0


def test_the_command_line(monkeypatch):
    listed = run("--list", "--part", "backward", "--only", "window")
    assert listed.exit_code == 0
    assert listed.output.split("\n")[0] == "backward window:4096 32k D128"
    assert run("--only", "no such case").exit_code == 2
    assert run("--part", "sideways").exit_code == 2
    assert run("--time-limit", "0").exit_code == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("--only", "causal 8k").exit_code == 2
