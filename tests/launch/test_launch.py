"""The launcher: results in rank order, options as keyword arguments, and errors of ranks raised by the caller."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch

from attnmesh import launch
from attnmesh.comm import Comm, CommError, VirtualComm
from attnmesh.comm.health import monitor
from helpers.cases import sweep
from helpers.processes import _context


@pytest.fixture(autouse=True)
def not_under_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


class UnpicklableError(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def work(comm: Comm, *, add: float, fail: str = "") -> tuple[int, int, float, int]:
    total = float(comm.all_reduce(torch.tensor([float(comm.rank)])))
    if comm.rank == 1:
        if fail == "ValueError":
            raise ValueError("add must be small, got 1")
        if fail == "Unpicklable":
            raise UnpicklableError(1, 2)
        if fail == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fail == "exit":
            raise SystemExit(3)
    if fail:
        comm.barrier()  # ranks that lose their peer must not be blamed
    return comm.rank, comm.world, total + add, torch.get_num_threads()


def test_virtual_ranks_return_their_results_in_order():
    found = launch.run(work, 3, virtual=True, add=0.5)
    assert [result[:3] for result in found] == [(0, 3, 3.5), (1, 3, 3.5), (2, 3, 3.5)]
    assert len(launch.run(work, virtual=True, add=0)) == launch.DEFAULT_RANKS
    assert launch.run(lambda comm: isinstance(comm, VirtualComm), 1, virtual=True) == [True]
    with pytest.raises(ValueError, match="add must be small, got 1"):
        launch.run(work, 2, virtual=True, add=0, fail="ValueError")


@pytest.mark.sweep
def test_processes_return_their_results_in_order():
    assert launch.run(work, 2, threads=1, add=0.5) == [(0, 2, 1.5, 1), (1, 2, 1.5, 1)]


def of_the_fork_server(*args) -> None:
    """A process of `launch` that is a child of another one than the caller."""
    launch._end_with_parent = lambda: None
    launch._process(*args)


def fork_server(kind: str) -> SimpleNamespace:
    assert kind == "spawn"
    return SimpleNamespace(Process=lambda target, args: _context.Process(target=of_the_fork_server, args=args))


@pytest.mark.parametrize("start", ["forked", sweep("spawned")])
@pytest.mark.parametrize(
    ("fail", "error", "message"),
    [
        ("ValueError", ValueError, "^add must be small, got 1\n"),
        sweep("Unpicklable", RuntimeError, "UnpicklableError: 1 and 2"),
        ("killed", CommError, r"rank \d of 2 (was killed \(SIGKILL\)|failed: .*); the other ranks were stopped"),
        sweep("exit", CommError, r"rank \d of 2 (exited with code 3|failed: .*); "),
    ],
)
def test_the_error_of_a_process_is_raised(fail, error, message, start, monkeypatch):
    """Forks start at once; spawned processes, which import torch for seconds, run in the tests of `calibrate` too."""
    if start == "forked":
        monkeypatch.setattr(launch, "multiprocessing", SimpleNamespace(get_context=fork_server))
    with pytest.raises(error, match=message) as raised:
        launch.run(work, 2, threads=1, timeout=60, add=0, fail=fail)
    if error is not CommError:
        assert "raised on rank 1 of 2" in "".join(raised.value.__notes__)


@pytest.mark.parametrize(("options", "given"), [({}, "device 'cpu'"), ({"device": "cuda", "virtual": True}, "virtual")])
def test_only_processes_on_a_gpu_share_it(options, given):
    with pytest.raises(ValueError, match=f"share_gpu requires processes with device 'cuda', got {given}"):
        launch.run(work, 2, share_gpu=True, add=0, **options)


@pytest.mark.cuda
@pytest.mark.ranks
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_ranks_share_a_gpu_over_nccl():
    assert launch.run(on_a_gpu, 2, device="cuda", share_gpu=True) == [("nccl", 0, 1.0)] * 2


def on_a_gpu(comm: Comm) -> tuple[str, int, float]:
    """The backend, the GPU's index, and the sum of all ranks."""
    total = comm.all_reduce(torch.tensor([float(comm.rank)], device="cuda"))
    return torch.distributed.get_backend(), torch.cuda.current_device(), float(total)


def test_torchrun_sets_the_number_of_ranks(monkeypatch):
    assert (launch.world_size(), launch.world_size(7), launch.under_torchrun()) == (launch.DEFAULT_RANKS, 7, False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert (launch.world_size(), launch.under_torchrun()) == (5, True)
    for options in ({"ranks": 3}, {"virtual": True}):
        with pytest.raises(ValueError, match=rf"number of ranks \(5\); got {next(iter(options))}="):
            launch.run(work, **options, add=0)


def refuse(comm: Comm) -> None:
    raise ValueError("add must be a number")


def test_a_rank_of_torchrun_returns_its_own_result(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    assert [result[:3] for result in launch.run(work, add=0.5)] == [(0, 1, 0.5)]
    assert not torch.distributed.is_initialized()
    with pytest.raises(ValueError, match="add must be a number") as raised:
        launch.run(refuse)
    assert raised.value.__notes__ == ["raised on rank 0 of 1"]


def test_torch_does_not_abort_a_process_before_the_end_of_another_is_raised():
    """Its watchdog does that after four times this setting, once NCCL reports an error."""
    assert 4 * int(launch._END_SOON["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"]) / 1000 >= 2 * monitor._ARRIVAL
