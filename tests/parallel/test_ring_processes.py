"""Ring context parallelism between real processes over gloo: the same answers, and no hang when a rank is lost."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from attnmesh import Causal, ContextParallel, Documents, Full, Layout, Mask, SlidingWindow, Zigzag, run_virtual
from attnmesh.comm import Comm, CommError
from attnmesh.testing.attention import assert_attention_close, random_inputs, shard_results
from helpers.cases import HEADS, LAYOUTS, MASKS, make_mask, sweep
from helpers.processes import Died, run_processes


def whole_results(comm: Comm, inputs: list[Tensor], mask: Mask, layout: Layout) -> list[Tensor]:
    """out, lse, dq, dk, dv of the whole sequence, on every rank."""
    cp = ContextParallel(comm, layout=layout, schedule="ring")
    return [cp.unshard(x, 2, inputs[0].shape[2]) for x in shard_results(comm, inputs, mask, layout)]


def core_cases(comm: Comm) -> int:
    done = 0
    for m, mask in enumerate(MASKS):
        layout = list(LAYOUTS)[m % len(LAYOUTS)]
        length = (0, 1, 5, 64, 67)[done % 5]
        dtype, heads = (torch.float16, torch.bfloat16)[done % 2], (HEADS["gqa"], HEADS["mha"])[done % 3 == 0]
        inputs, mask = random_inputs(length, heads=heads, dtype=dtype, seed=done), make_mask(mask, length)
        assert_attention_close(whole_results(comm, inputs, mask, LAYOUTS[layout]), inputs, mask)
        done += 1
    return done


def shards_and_traffic(comm: Comm) -> tuple[list[list[float]], int, int]:
    shards = shard_results(comm, random_inputs(67), Causal(), Zigzag())
    return [x.flatten().tolist() for x in shards], comm.traffic.messages, comm.traffic.bytes


def three_processes(comm: Comm) -> tuple[list[list[float]], int, int]:
    """In one launch: the same bits and bytes as virtual ranks, the reference, and a mask with a long description."""
    found = shards_and_traffic(comm)
    assert core_cases(comm) == len(MASKS)
    long_documents(comm)
    return found


def test_processes_match_virtual_ranks_and_the_reference():
    assert run_processes(3, three_processes) == run_virtual(3, shards_and_traffic)


def on_a_mesh(comm: Comm) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    replica, place = mesh.get_coordinate()
    cp = ContextParallel(mesh["cp"])
    assert (cp.rank, cp.world) == (place, 2)
    for mask in (Causal(), Full()):
        inputs = random_inputs(21, seed=replica)  # each replica has a sequence of its own
        assert_attention_close(whole_results(cp.comm, inputs, mask, Zigzag()), inputs, mask)
    assert_attention_close(
        whole_results(ContextParallel(mesh["cp"].get_group()).comm, inputs, mask, Zigzag()), inputs, mask
    )
    with pytest.raises(ValueError, match="group must be a Comm, ProcessGroup, DeviceMesh or None, got str"):
        ContextParallel("cp")


@pytest.mark.sweep
def test_the_context_dimension_of_a_device_mesh():
    run_processes(4, on_a_mesh)


SCRIPT = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, {tests!r})
from attnmesh import Causal, ContextParallel, Striped
from attnmesh.testing.attention import assert_attention_close, random_inputs, shard_results

torch.set_num_threads(1)
dist.init_process_group("gloo")
cp = ContextParallel(layout=Striped())
inputs = random_inputs(33)
found = [cp.unshard(x, 2, 33) for x in shard_results(cp.comm, inputs, Causal(), Striped())]
assert_attention_close(found, inputs, Causal())
print(f"rank {{cp.rank}} of {{cp.world}} is right", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.sweep
def test_a_script_under_torchrun(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1])))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ran.returncode == 0, ran.stderr
    assert "rank 0 of 2 is right" in ran.stdout
    assert "rank 1 of 2 is right" in ran.stdout


def one_dies(comm: Comm, when: str) -> tuple[str, float]:
    comm.timeout = 30
    cp = ContextParallel(comm, schedule="ring")
    inputs = random_inputs(66)
    q, k, v = (cp.shard(x, 2).clone().requires_grad_() for x in inputs[:3])
    cp.attention(q, k, v).sum().backward()  # all is well
    began = time.monotonic()
    try:
        if comm.rank == 1 and when == "forward":
            comm._exchange_with = lambda *messages: os._exit(7)  # in the middle: agreed, and then gone
        out = cp.attention(q, k, v)
        if comm.rank == 1:
            comm._exchange_with = lambda *messages: os._exit(7)
        out.sum().backward()
    except CommError as error:
        return str(error), time.monotonic() - began
    return "nothing", time.monotonic() - began


@pytest.mark.parametrize("when", ["forward", sweep("backward")])
def test_a_rank_that_dies_during_attention_is_noticed_in_time(when):
    first, gone, third = run_processes(3, one_dies, when, strict=False)
    assert gone == Died(7)
    for message, seconds in (first, third):
        assert message.startswith("rank 1 is dead: its process has ended [rank ")
        call = "ContextParallel.attention" if when == "forward" else "backward of attention"
        assert f"was in exchange ({call}), " in message
        assert seconds < 10


def one_raises(comm: Comm) -> tuple[str, float]:
    comm.timeout = 30
    cp = ContextParallel(comm, schedule="ring")
    q, k, v = (cp.shard(x, 2) for x in random_inputs(66)[:3])
    cp.attention(q, k, v)
    began = time.monotonic()
    try:
        if comm.rank == 0:
            raise ZeroDivisionError("my fault")
        cp.attention(q, k, v)
    except CommError as error:
        return str(error), time.monotonic() - began
    return "nothing", time.monotonic() - began


def test_a_rank_that_raises_between_two_calls_is_noticed_in_time():
    gone, second = run_processes(2, one_raises, strict=False)
    assert gone.type == "ZeroDivisionError"
    assert second[0].startswith("rank 0 is dead: its process has ended [rank 1 was in exchange")
    assert second[1] < 10


def long_documents(comm: Comm) -> None:
    """A mask with a long description."""
    inputs = random_inputs(90, batch=1, heads=(2, 1))
    mask = Causal() & Documents([1] * 30 + [2] * 30) & SlidingWindow(1)
    assert_attention_close(whole_results(comm, inputs, mask, Zigzag()), inputs, mask)
