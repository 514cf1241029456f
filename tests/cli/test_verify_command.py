"""`attnmesh verify` passes correct results and reports faults in every family."""

import os
import re
import subprocess
import sys

import pytest
import torch

from attnmesh import ContextParallel, State
from attnmesh.core.ranges import InterleavedShard
from attnmesh.kv_cache.block_manager import BlockManager
from attnmesh.kv_cache.pools import Pools
from attnmesh.kv_cache.sharded import StepTensors
from attnmesh.ops.decode import api
from attnmesh.ops.decode.cpu import Cpu
from attnmesh.ops.dense.call import Result
from attnmesh.ops.launch import Recent
from attnmesh.ops.merge import GradAccumulator
from attnmesh.ops.sparse.arguments import RowBounds
from attnmesh.ops.sparse.torch_backend import RunningTopK
from attnmesh.parallel import recurrent
from attnmesh.parallel.decode.exchange import HeadExchange
from attnmesh.parallel.sparse.groups import RowSharding
from attnmesh.parallel.sparse.keys import SequenceSharding, _RingGradReturn
from attnmesh.verify import run as verify
from helpers.cases import sweep
from helpers.cli import run as run_command


@pytest.fixture(autouse=True)
def not_under_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def leave_only(some: str, monkeypatch):
    modes = verify.modes
    monkeypatch.setattr(
        verify, "modes", lambda *args: [mode for mode in modes(*args) if re.match(some, f"{mode.name} {mode.shape}")]
    )


@pytest.fixture
def few_modes(monkeypatch):
    """Enough of what verify would do, in a tenth of the time."""
    leave_only(r"((ring|allgather) auto zigzag|attention auto) causal 2x4/2x263x32 (fp32|bf16)$", monkeypatch)


def run(*arguments: str):
    return run_command(*arguments)


def counts(output: str) -> tuple[int, int]:
    """How many modes passed and how many failed, as the last line says."""
    passed, failed = re.search(r"(\d+) passed, (\d+) failed", output).groups()
    return int(passed), int(failed)


@pytest.mark.sweep
def test_verify_on_virtual_ranks_finds_everything_right():
    ran = run("verify", "--ranks", "2", "--virtual", "--seed", "1")
    assert ran.exit_code == 0, ran.output
    assert "attnmesh verify: 2 ranks, cpu, seed 1" in ran.output
    for column in ("mode", "shape", "worst", "error", "bound", "verdict"):
        assert column in ran.output
    for mode in (
        "merge causal",
        "attention auto causal",
        "ring auto zigzag causal",
        "decode auto contiguous own causal plain",
        "decode cpu paged split_size same bits",
        "cache fp8 append fork truncate",
        "cache int8 prefix same bits",
        "block CP2 reduce_scatter out",
        "block KVDP2 all_gather in and out",
        "block TP2 fp32",
        "sparse attention documents",
        "sparse dense loss causal strided",
        "sparse top-k same bits",
        "sparse attention CP2 ring",
        "sparse loss TP2",
        "sparse CP2 allgather zigzag same bits",
    ):
        assert mode in ran.output
    passed, failed = counts(ran.stdout)
    assert passed == len(re.findall(r"\bok\b", ran.stdout)) >= 36  # 3 layouts, 6 masks, 2 dtypes
    assert failed == 0
    assert "WRONG" not in ran.output


def test_a_pattern_selects_modes_and_every_mode_is_a_line():
    ran = run(
        "verify",
        "--ranks",
        "2",
        "--virtual",
        "--seed",
        "1",
        "--only",
        "^ring auto zigzag causal 2x4/2x263x32 ..(32|16)$",
    )
    assert ran.exit_code == 0
    assert counts(ran.stdout) == (2, 0)
    assert [line[:31] for line in ran.stderr.splitlines()] == [
        f"{number} of 2: ok: ring auto zigzag ca" for number in (1, 2)
    ]


@pytest.mark.parametrize("only", ["query-distributed prefix causal paged", r"block \S+ int8"])
def test_a_mode_of_each_operation_is_right(only):
    ran = run("verify", "--ranks", "2", "--virtual", "--seed", "1", "--only", only)
    assert ran.exit_code == 0, ran.output
    assert counts(ran.stdout)[0] >= 1


def test_a_mode_has_the_same_inputs_whatever_else_runs(few_modes):
    def error(*only: str) -> list[str]:
        stdout = run("verify", "--ranks", "2", "--virtual", "--seed", "1", *only).stdout
        return [line for line in stdout.splitlines() if "│ allgather auto zigzag causal" in line]

    alone, beside = error("--only", "allgather auto zigzag causal"), error()
    assert [line.split("│")[4] for line in alone] == [line.split("│")[4] for line in beside]
    assert len(alone) == 2


def test_no_mode_begins_after_the_time_limit(few_modes):
    ran = run("verify", "--ranks", "2", "--virtual", "--time-limit", "0")
    assert ran.exit_code == 0
    assert re.search(r"0 passed, 0 failed, 6 not run \(--time-limit 0, 0 s\)", ran.stdout)


def test_a_pattern_without_modes_is_refused():
    ran = run("verify", "--ranks", "2", "--virtual", "--only", "rign")
    assert ran.exit_code == 2
    assert "must match some of" in ran.stderr
    assert "'rign'" in ran.stderr


def slightly_louder(attend):
    """An error of a ten thousandth, on the last rank only."""

    def attention(self, *args, **kwargs):
        out, lse = attend(self, *args, **kwargs)
        return (out * 1.0001, lse) if self.rank == self.world - 1 else (out, lse)

    return attention


def off_in_lse(attend):
    def attention(self, *args, **kwargs):
        out, lse = attend(self, *args, **kwargs)
        return out, lse + 1e-4 * self.rank

    return attention


def nan_in_one_place(attend):
    def attention(self, *args, **kwargs):
        out, lse = attend(self, *args, **kwargs)
        out = out.clone()
        if self.rank == 0 and out.numel():
            out[-1, -1, -1, -1] = torch.nan
        return out, lse

    return attention


def test_verify_sees_a_fault_in_the_states_of_ranks(monkeypatch):
    """The states that other ranks send are a thousandth too large."""
    leave_only(r"recurrent over ranks zigzag (gated delta rule|mamba2) .* fp(32|64)$", monkeypatch)
    scan = recurrent.forward_scan
    monkeypatch.setattr(recurrent, "forward_scan", lambda *arguments: 1.001 * scan(*arguments))
    ran = run("verify", "--ranks", "2", "--virtual", "--seed", "1")
    assert ran.exit_code == 1
    assert counts(ran.stdout)[1] == ran.stdout.count("WRONG") > 0


@pytest.mark.parametrize(
    "fault",
    [off_in_lse, *(sweep(fault) for fault in (slightly_louder, nan_in_one_place))],
)
def test_verify_sees_a_faulty_answer(fault, few_modes, monkeypatch):
    monkeypatch.setattr(ContextParallel, "attention", fault(ContextParallel.attention))
    ran = run("verify", "--ranks", "2", "--virtual", "--seed", "1")
    assert ran.exit_code == 1
    assert len(re.findall(r"(ring|allgather) auto zigzag \w+ .* fp32 .*WRONG", ran.stdout)) == 2
    assert not re.search(r"attention .*WRONG", ran.output)
    assert counts(ran.stdout) == (ran.stdout.count(" ok "), ran.stdout.count("WRONG"))


def test_verify_sees_a_wrong_gradient_of_sinks(monkeypatch):
    leave_only(r"(attention auto|ring|ulysses auto) .*sinks .*x37[:x].* fp32$", monkeypatch)
    monkeypatch.setattr(Result, "sink_gradient", lambda self, sinks: sinks.detach())
    ran = run("verify", "--ranks", "2", "--virtual", "--seed", "1")
    assert ran.exit_code == 1
    passed, failed = counts(ran.stdout)
    assert passed == 0
    assert failed == len(re.findall(r"dsinks .*WRONG", ran.stdout)) >= 3


@pytest.mark.sweep
def test_verify_sees_gradients_that_get_lost_on_their_way(few_modes, monkeypatch):
    monkeypatch.setattr(GradAccumulator, "add_to", lambda self, target: None)
    ran = run("verify", "--ranks", "2", "--virtual", "--seed", "1")
    assert ran.exit_code == 1
    assert len(re.findall(r"(ring|allgather) auto zigzag \w+ .*(dk|dv).*WRONG", ran.stdout)) == 4
    assert counts(ran.stdout) == (2, 4)


@pytest.fixture
def one_devices_modes(monkeypatch):
    """Only the modes of token generation on one device."""
    leave_only(r"(decode cpu (contiguous|paged)|cache) ", monkeypatch)


def louder(run):
    def faulty(self, call, into=None):
        state = run(self, call, into)
        return State(state.out * 1.0001, state.lse)

    return faulty


def by_the_batch(run):
    """Right but for the last bit of a float32, which changes with the number of sequences."""

    def faulty(self, call, into=None):
        state = run(self, call, into)
        return State(state.out, state.lse * (1 + torch.finfo(torch.float32).eps * (call.q.shape[0] > 1)))

    return faulty


@pytest.mark.parametrize(
    ("place", "name", "fault", "wrong"),
    [
        sweep(Cpu, "run", louder, r"(decode|cache).*fp32"),
        (Cpu, "run", by_the_batch, r"decode.*split_size same bits"),
        sweep(Pools, "copy_blocks", lambda copy: lambda *args: None, r"cache.*fork"),
        sweep(BlockManager, "cache_full_blocks", lambda register: lambda *args: None, r"│ cache "),
    ],
)
def test_verify_sees_a_fault_in_token_generation(place, name, fault, wrong, one_devices_modes, monkeypatch):
    monkeypatch.setattr(place, name, fault(getattr(place, name)))
    monkeypatch.setattr(api, "_prepared", Recent())  # calls that repeat keep the function that runs them
    ran = run("verify", "--ranks", "2", "--virtual", "--seed", "1")
    assert ran.exit_code == 1
    lines = [line for line in ran.stdout.splitlines() if re.search(r"│ (decode|cache) .*(ok|WRONG)", line)]
    assert len(lines) == sum(counts(ran.stdout)) >= 15
    found = {line for line in lines if "WRONG" in line}
    zero = re.compile(r"│ +0\.000 │[^│]+│ ok")  # an error of 0: no row sees a key
    assert found == {line for line in lines if re.search(wrong, line) and not zero.search(line)}


@pytest.fixture
def block_modes(monkeypatch):
    """Some modes of a block over ranks, those with a fault in the test below among them."""
    some = r"block (TP2 fp32|CP2 (fp32|norms|all_reduce|replicate_q|split_size)|KVDP2 (sinks|own|all_gather))"
    leave_only(some, monkeypatch)


def as_the_first_rank(length):
    """Every rank believes that it holds as many positions as the first one of its share, which has most."""
    return lambda self, n, rank=None: length(self, n, 0 if isinstance(n, torch.Tensor) else rank)


def without_a_window(sight):
    return lambda self, window: sight(self, None)


def louder_from_one_rank(scatter_heads):
    def faulty(self, out):
        return scatter_heads(self, out * (1 + 1e-4 * (self.comm.rank == 1)))

    return faulty


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("place", "name", "fault", "wrong"),
    [
        sweep(InterleavedShard, "length", as_the_first_rank, r" CP2 "),
        sweep(StepTensors, "key_range", without_a_window, r" CP2 (all_reduce|replicate_q|split_size(?! same))"),
        (HeadExchange, "scatter_heads", louder_from_one_rank, r" KVDP2 .*fp32 "),
    ],
)
def test_verify_sees_a_fault_in_a_block_over_ranks(place, name, fault, wrong, block_modes, monkeypatch):
    monkeypatch.setattr(place, name, fault(getattr(place, name)))
    monkeypatch.setattr(api, "_prepared", Recent())  # calls that repeat keep the function that runs them
    ran = run("verify", "--ranks", "2", "--virtual", "--seed", "1")
    assert ran.exit_code == 1
    lines = [line for line in ran.stdout.splitlines() if "│ block" in line]
    assert len(lines) == sum(counts(ran.stdout)) == 9
    found = {line for line in lines if "WRONG" in line}
    assert found == {line for line in lines if re.search(wrong, line)}
    assert found


def without_counting_slots(valid):
    def faulty(self, indices):
        return valid(self._replace(slots=torch.full_like(self.slots, indices.shape[1])), indices)

    return faulty


def the_last_of_equals(update):
    """Of equal scores the highest key wins, as if keys came in descending order."""
    return lambda self, some, scores, at: update(self, some, scores.flip(1), at.flip(0))


def of_own_heads(reduce_heads):
    return lambda self, part: self.shard(part)


def without_received_grads(collect):
    """The gradients from other ranks are lost."""
    return lambda self: collect(self) and self._own


@pytest.mark.parametrize(
    ("place", "name", "fault", "modes", "wrong"),
    [
        (RowBounds, "valid", without_counting_slots, ".*(no mask|strided)", r"sparse (?!top-k|dense).*strided"),
        sweep(RunningTopK, "update", the_last_of_equals, "(top-k(?!.*documents)|loss)", r"sparse top-k"),
        sweep(RowSharding, "reduce_heads", of_own_heads, ".* [TC]P2", r"(attention|distribution|loss) TP2"),
        sweep(_RingGradReturn, "collect", without_received_grads, ".* CP2", r"(attention|loss) .*ring"),
        sweep(
            SequenceSharding, "local_mask", lambda _: lambda self, mask: mask, ".* CP2", r"CP2.*( causal +│|same bits)"
        ),
    ],
)
def test_verify_sees_a_fault_in_sparse_attention(place, name, fault, modes, wrong, monkeypatch):
    leave_only(f"sparse {modes}", monkeypatch)
    monkeypatch.setattr(place, name, fault(getattr(place, name)))
    monkeypatch.setattr(api, "_prepared", Recent())  # calls that repeat keep the function that runs them
    ran = run("verify", "--ranks", "2", "--virtual", "--seed", "1")
    assert ran.exit_code == 1
    lines = [line for line in ran.stdout.splitlines() if "│ sparse" in line]
    assert len(lines) == sum(counts(ran.stdout)) >= 10
    found = {line for line in lines if "WRONG" in line}
    assert found == {line for line in lines if re.search(wrong, line)}
    assert found != set(lines)


@pytest.mark.sweep
def test_a_seed_repeats_a_test_and_another_does_not(few_modes):
    first, again, other = (run("verify", "--ranks", "2", "--virtual", "--seed", s).stdout for s in "112")
    assert first == again
    assert re.findall(r"\de-\d\d", first)
    assert re.findall(r"[\d.]+e-\d\d", first) != re.findall(r"[\d.]+e-\d\d", other)


@pytest.mark.sweep
def test_without_a_seed_inputs_are_fresh(few_modes):
    seeds = {re.search(r"seed (\d+)", run("verify", "--ranks", "1", "--virtual").output)[1] for _ in range(2)}
    assert len(seeds) == 2


def in_a_process(*command: str, **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=550, env=env)


@pytest.mark.sweep
def test_a_wrong_answer_of_processes_is_an_exit_status_of_one(tmp_path):
    fault = "from attnmesh.ops.merge import GradAccumulator\nGradAccumulator.add_to = lambda self, target: None\n"
    (tmp_path / "sitecustomize.py").write_text(fault)  # every process imports it as it starts
    ran = in_a_process("attnmesh", "verify", "--ranks", "2", "--seed", "3", "--only", "ring", PYTHONPATH=str(tmp_path))
    assert ran.returncode == 1
    assert "attnmesh verify: 2 ranks, cpu, seed 3" in ran.stdout
    assert counts(ran.stdout)[1] > 0
    assert "Traceback" not in ran.stderr


@pytest.mark.sweep
def test_verify_joins_the_ranks_of_torchrun():
    """With every mode, over two processes."""
    ran = in_a_process(
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "attnmesh",
        "verify",
        "--seed",
        "3",
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("attnmesh verify: 2 ranks, cpu, seed 3") == 1  # rank 0 speaks for all
    assert counts(ran.stdout)[1] == 0
