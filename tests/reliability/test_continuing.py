"""After a failure the program goes on: on a new group of the ranks that are left, or restarted by torchrun."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.comm import Comm
from attnmesh.utils.optional import installed
from tests.helpers.processes import Died, Raised, run_processes

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_context_parallel.py"
STEPS, LENGTH, FEATURES = 6, 41, 8
TOLERANCE = 1e-5  # of the example, in float32; observed: 2e-7

Faults = dict[int, tuple[int, int, str]]
"""By number of ranks: the rank that fails, at which step, and how."""

_kept = []  # what a program may keep of a failed group


def recipe(name: str) -> Any:
    """A function that docs/cluster.md defines."""
    blocks = re.findall(r"^```python\n(.*?)^```\n", (ROOT / "docs" / "cluster.md").read_text(), flags=re.M | re.S)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if f"def {name}" in block), names)
    return names[name]


def fail(kind: str) -> None:
    if kind == "raise":
        raise RuntimeError("a bug of one rank")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])


def train(file: Path, faults: Faults) -> tuple[list[float], int]:
    """The losses of all steps, continued from a checkpoint, and the number of ranks."""
    cp = am.ContextParallel(schedule="ring")
    _kept.append(cp)
    weight = torch.randn(3, FEATURES, FEATURES, generator=torch.Generator().manual_seed(0)).double()
    losses: list[float] = []
    if file.exists():
        state = torch.load(file)
        weight, losses = state["weight"], state["losses"]
    cp.comm.agree("checkpoint", {"steps": len(losses)})
    x = cp.shard(torch.randn(1, 2, LENGTH, FEATURES, generator=torch.Generator().manual_seed(1)).double(), 2)
    rank, step, kind = faults.get(cp.world, (-1, -1, ""))
    while len(losses) < STEPS:
        weight = weight.detach().requires_grad_()
        if (cp.rank, len(losses)) == (rank, step):
            fail(kind)
        out = cp.attention(*(x @ w for w in weight), mask=am.Causal(), length=LENGTH)
        loss = out.square().sum() / LENGTH
        loss.backward()
        weight = weight.detach() - 0.05 * cp.comm.all_reduce(weight.grad)
        losses.append(cp.comm.all_reduce(loss.detach()).item())
        if cp.rank == 0:
            torch.save({"weight": weight, "losses": losses}, file.with_suffix(".unfinished"))
            file.with_suffix(".unfinished").replace(file)
    return losses, cp.world


def thread_names() -> Counter[str]:
    return Counter(thread.name for thread in threading.enumerate())


def sockets() -> set[str]:
    links = set()
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the folder itself
            links.add(os.readlink(file))
    return {link for link in links if link.startswith("socket:")}


def await_until(condition: Callable[[], bool]) -> None:
    """Wait until what is ending has ended, at most 10 s."""
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def continue_training(comm: Comm, port: int, file: Path, faults: Faults, timeout: float) -> dict[str, Any]:
    rank, world = comm.rank, comm.world
    comm.agree("start", {})  # starts what a process has once
    comm.barrier()
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    store.set(f"pid/{rank}", str(os.getpid()))
    await_until(lambda: "attnmesh monitor" not in thread_names())
    began, before, threads = time.monotonic(), sockets(), thread_names()
    assert "attnmesh monitor" not in threads
    run = recipe("train_on_survivors")
    losses, ranks = run(lambda: train(file, faults), store, rank, world, timeout=timeout, wait=2)
    seconds = time.monotonic() - began
    if any(kind == "stop" for _, _, kind in faults.values()):
        os.kill(int(store.get(f"pid/{faults[world][0]}")), signal.SIGCONT)
    await_until(lambda: thread_names() <= threads and sockets() <= before)
    return {
        "losses": losses, "ranks": ranks, "seconds": seconds, "groups": len(_kept),
        "threads left": thread_names() - threads,
        "sockets left": sockets() - before,
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
    }  # fmt: skip


def results_after(faults: Faults, folder: Path, timeout: float) -> list[Any]:
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    file = folder / "checkpoint.pt"
    return run_processes(max(faults), continue_training, store.port, file, faults, timeout, strict=False)


def check_survivors(results: list[dict[str, Any]], expected: list[float], ranks: int, groups: int) -> None:
    assert len(results) == ranks
    for result in results:
        assert result["losses"] == pytest.approx(expected, rel=1e-9)
        assert (result["ranks"], result["groups"]) == (ranks, groups)
        assert result["threads left"] == Counter()
        assert result["sockets left"] == set()
        assert result["children"] == ""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_training_continues_on_the_ranks_that_are_left(tmp_path):
    """One of three ranks is killed; two finish, with the losses of one process."""
    results = results_after({3: (1, 2, "kill")}, tmp_path, timeout=20)
    assert results[1] == Died(-signal.SIGKILL)
    check_survivors([results[0], results[2]], train(tmp_path / "alone.pt", {})[0], ranks=2, groups=2)


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_training_continues_after_two_failures(tmp_path):
    """Four ranks; one is killed; of the three that are left one raises; two finish, with the losses of one process."""
    results = results_after({4: (1, 2, "kill"), 3: (2, 4, "raise")}, tmp_path, timeout=60)
    assert [result.exitcode for result in results if isinstance(result, Died)] == [-signal.SIGKILL]
    assert [result.message for result in results if isinstance(result, Raised)] == ["a bug of one rank"]
    finished = [result for result in results if isinstance(result, dict)]
    check_survivors(finished, train(tmp_path / "alone.pt", {})[0], ranks=2, groups=3)
    assert max(result["seconds"] for result in finished) < 40  # nothing waited for the timeout


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_that_comes_late_is_left_out(tmp_path):
    """A stopped rank goes on after the others have finished without it: it is told so, and joins nothing."""
    results = results_after({3: (1, 2, "stop")}, tmp_path, timeout=3)
    assert (results[1].type, results[1].message) == ("SystemExit", "this process arrived after the others had gone on")
    check_survivors([results[0], results[2]], train(tmp_path / "alone.pt", {})[0], ranks=2, groups=2)


def generate(model: Any, comm: Comm | None) -> list[int]:
    generator = am.Generator(model, None, comm, cache_tokens=128)
    return [token.id for token in generator.generate([list(range(50))], max_new_tokens=8)]


def continue_generating(comm: Comm, port: int) -> tuple[list[int], list[int]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    rank, world = comm.rank, comm.world
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    am.register_attention()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, attn_implementation="attnmesh")
    ).eval()  # fmt: skip
    alone = generate(model, None)

    def on_survivors() -> list[int]:
        generator = am.Generator(model, None, am.comm_from(), cache_tokens=128)
        for i, _ in enumerate(generator.generate([list(range(50))], max_new_tokens=8)):
            if generator.comm.world == world and generator.comm.rank == 1 and i == 3:
                fail("kill")
        return generate(model, generator.comm)

    return recipe("train_on_survivors")(on_survivors, store, rank, world, timeout=20, wait=0.5), alone


@pytest.mark.sweep
@pytest.mark.skipif(not installed("transformers"), reason="transformers is not installed")
def test_a_new_generator_on_the_ranks_that_are_left_gives_the_same_tokens():
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    results = run_processes(3, continue_generating, store.port, strict=False)
    assert isinstance(results[1], Died)
    for tokens, alone in (results[0], results[2]):
        assert tokens == alone


# torchrun.


@contextmanager
def torchrun(log: Path, *options: str) -> Iterator[subprocess.Popen]:
    """torchrun in a session of its own. Whatever is left of it is killed at the end."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2", *options]
    with log.open("w") as output:
        agent = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        yield agent
    finally:
        kill_all(agent)


def workers(agent: subprocess.Popen) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()]


def kill_all(agent: subprocess.Popen) -> None:
    if agent.poll() is None:
        for pid in [agent.pid, *workers(agent)]:
            os.kill(pid, signal.SIGKILL)
        agent.wait()


def steps(*logs: Path) -> list[int]:
    return [int(step) for log in logs for step in re.findall(r"^step +(\d+)  loss", log.read_text(), flags=re.M)]


def wait_for_step(step: int, *logs: Path) -> None:
    deadline = time.monotonic() + 120
    while step not in steps(*logs):
        assert time.monotonic() < deadline, "\n".join(log.read_text() for log in logs)
        time.sleep(0.05)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> list[float]:
    file = tmp_path_factory.mktemp("alone") / "losses.json"
    command = [sys.executable, str(EXAMPLE), "--device", "cpu", "--steps", "60", "--losses", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)
    return json.loads(file.read_text())


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(not installed("transformers"), reason="transformers is not installed")
@pytest.mark.parametrize("lost", ["a worker", "a node"])
def test_torchrun_restarts_the_example_from_its_checkpoint(tmp_path, uninterrupted, lost):
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    losses = tmp_path / "losses.json"
    program = [
        str(EXAMPLE), "--device", "cpu", "--steps", "60", "--timeout", "20",
        "--checkpoint", str(tmp_path / "checkpoints"), "--losses", str(losses),
    ]  # fmt: skip
    if lost == "a worker":
        with torchrun(logs[0], "--standalone", *program) as agent:
            wait_for_step(12, logs[0])
            os.kill(workers(agent)[1], signal.SIGKILL)
            assert agent.wait(120) == 0, logs[0].read_text()
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        rendezvous = [
            "--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test",
            "--rdzv-conf", "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3",
        ]  # fmt: skip
        with torchrun(logs[0], *rendezvous, *program) as first:
            time.sleep(1)  # the first one serves the rendezvous
            with torchrun(logs[1], *rendezvous, *program) as second:
                wait_for_step(12, *logs)
                kill_all(second)
            assert first.wait(120) == 0, logs[0].read_text()
    printed = steps(*(log for log in logs if log.exists()))
    restarts = [(before, after) for before, after in pairwise(printed) if after != before + 1]
    assert len(restarts) == 1, restarts
    assert restarts[0][1] >= 11  # it continued from step 10 or later
    assert json.loads(losses.read_text()) == pytest.approx(uninterrupted, rel=TOLERANCE)
