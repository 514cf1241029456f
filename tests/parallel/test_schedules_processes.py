"""Every schedule between real processes over gloo, on meshes of one and two dimensions: the same answers, no hang."""

import os
import re
import time

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from attnmesh import (
    Causal,
    ContextParallel,
    Contiguous,
    Documents,
    Full,
    Zigzag,
    attention_context_parallel,
    gather_ring_outputs,
    ring_distributed_attention,
    run_virtual,
)
from attnmesh.comm import Comm, CommError
from attnmesh.plan.shards import SCHEDULES
from attnmesh.testing.attention import (
    assert_attention_close,
    forward_backward,
    random_inputs,
    shard_inputs,
    shard_results,
)
from helpers.cases import sweep
from helpers.processes import Died, run_processes

CASES = [
    # mask, length, key length, heads, dtype, width of values, softcap
    (Causal(), 21, 21, (4, 2), torch.float32, 8, None),
    (Full(), 13, 18, (3, 3), torch.bfloat16, 12, 3.0),
    (Causal() & Documents([9, 2, 12]), 23, 23, (6, 1), torch.float16, 8, None),
]


def assert_exact(cp: ContextParallel, workload: tuple, seed: int = 0) -> None:
    """out, lse, dq, dk and dv of the whole sequence are right on every rank."""
    mask, length, key_length, heads, dtype, value_dim, softcap = workload
    inputs = random_inputs(
        length, key_length, heads=heads, dtype=dtype, head_dim=8, value_dim=value_dim, seed=seed
    )  # fmt: skip

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return cp.attention(
            q, k, v, mask=mask, softcap=softcap, length=length, key_length=key_length, return_lse=True
        )  # fmt: skip

    found = forward_backward(attend, shard_inputs(inputs, cp.comm, cp.layout))
    lengths = [length] * 3 + [key_length] * 2
    whole = [cp.unshard(x, 2, n) for x, n in zip(found, lengths, strict=True)]
    assert_attention_close(whole, inputs, mask, softcap=softcap)


def every_schedule(comm: Comm, kind: str, *, full: bool = True) -> tuple[int, int]:
    if kind == "ranks_per_node":
        group, how = comm, {"ranks_per_node": 2}
    else:
        names = ("node", "cp") if kind == "names" else None
        group, how = init_device_mesh("cpu", (2, 2), mesh_dim_names=names), {}
    # Otherwise the two kinds of levels, and on nodes the choice: `shards_and_traffic` has every schedule there.
    few = ("ring+ring", "ulysses+allgather", *(["auto"] if kind == "ranks_per_node" else []))
    schedules = (*SCHEDULES, "auto") if full else few
    for i, schedule in enumerate(schedules):
        cp = ContextParallel(group, schedule=schedule, **how)
        for case in CASES if full else [CASES[i % len(CASES)]]:
            assert_exact(cp, case)
    return cp.rank, cp.world


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["ranks_per_node", "no names", "names"])
def test_every_schedule_on_four_processes_in_every_combination(kind):
    assert run_processes(4, every_schedule, kind) == [(rank, 4) for rank in range(4)]


def shards_and_traffic(comm: Comm) -> list[tuple[list[list[float]], int, int]]:
    done = []
    for schedule in SCHEDULES:
        comm.traffic.reset()
        inputs, sinks = random_inputs(21, head_dim=8, value_dim=12), torch.linspace(-1, 1, 4)
        shards = shard_results(
            comm, inputs, Causal(), Zigzag(), schedule=schedule, ranks_per_node=2, sinks=sinks
        )  # fmt: skip
        done.append(([x.flatten().tolist() for x in shards], comm.traffic.messages, comm.traffic.bytes))
    return done


def four_processes(comm: Comm) -> tuple[object, str, list[str]]:
    """All checks on four processes in one launch, which takes longer than most of them."""
    found = shards_and_traffic(comm)
    for kind in ("ranks_per_node", "no names", "names"):
        assert every_schedule(comm, kind, full=False) == (comm.rank, 4)
    refuse_meshes_of_other_parallelism()
    return found, on_a_mesh_in_another_order(comm), refusals(comm)


def test_four_processes_match_virtual_ranks_and_the_reference_and_raise_together():
    found, orders, raised = zip(*run_processes(4, four_processes), strict=True)
    assert list(found) == run_virtual(4, shards_and_traffic)
    (order,) = set(orders)
    assert order == "right" or order.startswith("refused: ")
    for messages in raised:
        for message, expected in zip(messages, REFUSALS, strict=True):
            assert re.search(expected, message), message


# Meshes over some of the ranks, or in another order.


def on_two_replicas(comm: Comm) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "node", "cp"))
    replica, *_ = mesh.get_coordinate()
    for schedule in ("ulysses+ring", "ring+ring"):
        cp = ContextParallel(mesh["node", "cp"], schedule=schedule)
        assert (cp.rank, cp.world) == (comm.rank % 4, 4)
        assert_exact(cp, CASES[0], seed=replica)  # each replica has a sequence of its own


@pytest.mark.sweep
def test_two_dimensions_of_a_mesh_of_three():
    run_processes(8, on_two_replicas)


def on_some_ranks(comm: Comm) -> str:
    mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("node", "cp"))
    if comm.rank == 4:
        with pytest.raises(ValueError, match="not a member"):
            ContextParallel(mesh)
        return "raised"
    for schedule in ("ulysses+allgather", "ring+ring"):
        assert_exact(ContextParallel(mesh, schedule=schedule), CASES[0])
    return "right"


@pytest.mark.sweep
def test_a_mesh_over_some_of_the_ranks():
    assert run_processes(5, on_some_ranks) == [*["right"] * 4, "raised"]


def on_a_mesh_in_another_order(comm: Comm) -> str:
    """Nodes of ranks that are no neighbours."""
    mesh = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("node", "cp"))
    try:
        for schedule in ("ulysses+ring", "ring"):
            assert_exact(ContextParallel(mesh, schedule=schedule), CASES[0])
    except ValueError as error:
        return f"refused: {error}"
    return "right"


# Errors.

OTHER_MESHES = [  # whose ranks do not all share a sequence, and what to pass instead
    (("dp", "cp"), r'pass mesh\["cp"\]'),
    (("cp", "tp"), r'pass mesh\["cp"\]'),
    (("dp_shard", "context"), r'pass mesh\["context"\]'),
    (("dp_replicate", "dp_shard"), r'one dimension of it, such as mesh\["cp"\]'),
    (("fsdp", "node"), "one dimension of it"),
    (("a", "b"), r"got dimensions \('a', 'b'\) of shape \(2, 2\)"),
    (("dp",), r"the dimension 'dp': pass mesh\[\"cp\"\] .*mesh.get_group\(\)"),
    (("dp_shard_cp",), "the dimension 'dp_shard_cp'"),
    (("tensor-parallel",), "the dimension 'tensor-parallel'"),
]
SEQUENCE_MESHES = [("node", "cp"), ("hosts", "gpus"), ("inter_node", "intra_node"), ("cp",), ("sp",), ("world",)]


def refuse_meshes_of_other_parallelism() -> None:
    x = torch.ones(1, 2, 3, 16)
    takers = [
        ContextParallel,
        lambda mesh: attention_context_parallel(mesh).__enter__(),
        lambda mesh: ring_distributed_attention(x, x, x, group=mesh),
        lambda mesh: gather_ring_outputs(x, length=12, group=mesh),
    ]
    for names, expected in OTHER_MESHES:
        mesh = init_device_mesh("cpu", (2, 2) if len(names) == 2 else (4,), mesh_dim_names=names)
        for taker in takers:
            with pytest.raises(ValueError, match=expected):
                taker(mesh)
    for names in SEQUENCE_MESHES:
        mesh = init_device_mesh("cpu", (2, 2) if len(names) == 2 else (4,), mesh_dim_names=names)
        assert ContextParallel(mesh).world == 4
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    assert ContextParallel(mesh["cp"]).world == 2
    assert ContextParallel(init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)).get_group()).world == 4


REFUSALS = [
    "schedule must be one of auto, ring, allgather, ",
    "schedule='ring.ring' .* two-dimensional mesh",
    "schedule='ulysses.ring' .* two-dimensional mesh",
    "ranks_per_node must be an integer that divides the 4 ranks, got 3",
    "ranks_per_node must be the size of the second mesh dimension, 2, got 4",
    "ranks_per_node must be the size of the second mesh dimension, 2, got 1",
    r"got dimensions \('a', 'b', 'c'\) of shape \(2, 1, 2\)",
    "mesh_dim_names",
]


def refusals(comm: Comm) -> list[str]:
    comm.timeout = 10
    flat, mesh = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    deep = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    ways = [
        (comm, {"schedule": "tree"}),
        (flat, {"schedule": "ring+ring"}),
        (comm, {"schedule": "ulysses+ring"}),
        (comm, {"ranks_per_node": 3}),
        (mesh, {"ranks_per_node": 4}),
        (mesh, {"ranks_per_node": 1}),
        (deep, {}),
        (DeviceMesh("cpu", torch.tensor([[1, 0], [3, 2]])), {}),
    ]
    heard = []
    for group, how in ways:
        try:
            ContextParallel(group, **how).attention(*(torch.ones(1, 2, 3, 16),) * 3)
            heard.append("nothing was raised")
        except ValueError as error:
            heard.append(str(error))
    assert_exact(ContextParallel(mesh, schedule="ring+ring", ranks_per_node=2), CASES[0])  # and all goes on
    return heard


def one_dies(comm: Comm, schedule: str, when: str) -> tuple[str, float]:
    comm.timeout = 30
    cp = ContextParallel(comm, layout=Contiguous(), schedule=schedule, ranks_per_node=2)
    q, k, v = (cp.shard(x, 2).clone().requires_grad_() for x in random_inputs(32)[:3])

    def attend() -> Tensor:
        return cp.attention(q, k, v, mask=Full())

    attend().sum().backward()  # all is well
    began = time.monotonic()
    try:
        if comm.rank == 1 and when == "forward":
            comm._exchange_with = lambda *messages: os._exit(7)  # in the middle: agreed, and then gone
        out = attend()
        if comm.rank == 1:
            comm._exchange_with = lambda *messages: os._exit(7)
        out.sum().backward()
    except CommError as error:
        return str(error), time.monotonic() - began
    return "nothing", time.monotonic() - began


@pytest.mark.parametrize(
    ("schedule", "when"),
    [
        ("allgather", "backward"),
        *(sweep(*workload) for workload in (("ulysses+ring", "forward"), ("ring+ring", "backward"))),
    ],
)
def test_a_rank_that_dies_is_noticed_in_time(schedule, when):
    first, gone, *others = run_processes(4, one_dies, schedule, when, strict=False)
    assert gone == Died(7)
    for message, seconds in (first, *others):
        assert message.startswith("rank 1 is dead: its process has ended [rank ")
        assert seconds < 10
