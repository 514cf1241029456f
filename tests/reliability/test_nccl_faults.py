"""A rank fails over NCCL: every other rank raises CommError in time, also where its thread waits for the device.

Three or four ranks share one GPU. The ranks of a program go through all its cells, each on a process group of its own;
a rank that was stopped goes on later. Killed ranks have worlds of their own. `-s` shows the outcome of every cell.
"""

import time
from datetime import timedelta
from itertools import product

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.comm import CommError
from attnmesh.testing.block import random_block
from helpers.cases import else_sweep
from helpers.faults import PROGRAMS, Setting, check_cells, check_killed, moments
from helpers.processes import run_processes

pytestmark = [
    pytest.mark.cuda, pytest.mark.ranks,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]  # fmt: skip

TIMEOUT = 5.0
FAULTS = ("late", "disagreeing", "raising", "sleeping", "hung")


def new_comm(world, timeout):
    """A group of all ranks whose communicator exists: many of them start at the same time on one GPU."""
    torch.cuda.set_device(0)
    group = dist.new_group(list(range(world)), backend="nccl", timeout=timedelta(seconds=timeout))
    comm = am.comm_from(group, timeout=60)
    comm.agree("warm up", {"device": "cuda"})
    comm.timeout = timeout
    am.comm_from(None).barrier()  # no rank fails before all have connected
    return comm


SETTING = Setting(new_comm, "cuda", TIMEOUT, late=1.5, disagreeing=20, tolerance=1e-4)


# Every program, fault and moment, most of which last until a timeout; over gloo the whole matrix runs on the CPU. Ranks
# that hang or sleep leave others waiting for the device: for each kind of message.
FEW = {
    ("ring", "hung"), ("ring", "raising"), ("allgather", "sleeping"), ("ulysses", "late"), ("ulysses", "disagreeing"),
    ("two-level", "hung"), ("compiled", "raising"), ("sparse", "sleeping"), ("tp", "disagreeing"), ("kvdp", "late"),
    ("cp", "hung"), ("generate", "sleeping"), ("unshard", "raising"), ("query-distributed", "late"),
}  # fmt: skip
FEW_KILLED = {
    ("ring", "backward"), ("allgather", "forward"), ("ulysses", "backward"), ("two-level", "between"),
    ("compiled", "forward"), ("sparse", "backward"), ("tp", "forward"), ("kvdp", "between"), ("cp", "before"),
    ("generate", "forward"), ("unshard", "before"), ("query-distributed", "backward"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("program", "fault"), else_sweep(product(PROGRAMS, FAULTS), lambda program, fault: (program, fault) in FEW)
)
def test_every_other_rank_raises_in_time(program, fault):
    cells = [(fault, moment) for moment in moments(program)]
    check_cells(program, cells, SETTING, timeout=200, backend="nccl")


@pytest.mark.parametrize(
    ("program", "moment"),
    else_sweep(
        [(program, moment) for program in PROGRAMS for moment in moments(program)],
        lambda program, moment: (program, moment) in FEW_KILLED,
    ),
)
def test_a_killed_rank_is_reported(program, moment):
    """Long before the timeout, which is minutes."""
    check_killed(program, moment, SETTING, timeout=100, backend="nccl", limit=20)


# Subgroups: a rank hangs in one dimension of a mesh, and all ranks of the others raise too.


def hang_in_a_mesh(comm):
    from torch.distributed.device_mesh import init_device_mesh

    torch.cuda.set_device(0)
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("cp", "kvdp"))
    for name in (None, "cp", "kvdp"):
        am.comm_from(None if name is None else mesh[name], timeout=TIMEOUT)
    sharding = am.DecodeSharding(1, 2, 2, interleave=2)
    config, weights = random_block(q_heads=4, kv_heads=2, head_dim=16, hidden=48, device="cuda")
    mine = weights.shard(config, sharding, am.decode.decode_rank(mesh, sharding))
    block = am.AttentionBlock(config, mine, sharding, mesh)
    cache = block.make_cache(batch=2, num_blocks=32, block_size=4, max_length=64)
    sequences = [cache.allocate(0) for _ in range(2)]
    begin = time.monotonic()
    try:
        for step in range(4):
            if step == 2 and comm.rank == 3:
                time.sleep(SETTING.away)
            if step == 2:
                begin = time.monotonic()
            block(torch.ones(2, 1, 48, device="cuda"), cache, cache.append(sequences, 1)).sum().item()
    except CommError as error:
        return str(error), time.monotonic() - begin
    return "nothing", 0.0


def test_a_rank_that_hangs_in_a_mesh_ends_all_its_groups():
    ranks = run_processes(4, hang_in_a_mesh, timeout=100, backend="nccl")
    print(ranks)
    for text, seconds in ranks[:3]:
        assert "did not arrive" in text
        assert seconds < TIMEOUT + 10
