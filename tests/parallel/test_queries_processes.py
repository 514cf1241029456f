"""Query-distributed causal attention between real processes over gloo: the same answers, errors heard by all."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from attnmesh import Causal, Zigzag, run_virtual
from attnmesh.comm import Comm, CommError
from attnmesh.parallel.query_distributed import gather_ring_outputs, ring_distributed_attention
from attnmesh.testing.attention import assert_attention_close, forward_backward, random_inputs
from helpers.processes import run_processes

EXAMPLE = Path(__file__).parents[2] / "examples" / "query_distributed_mesh.py"


def whole_results(comm: Comm, group: object, inputs: list[Tensor], pairs: int | tuple[int, ...] = 1) -> list[Tensor]:
    """out, lse, dq, dk, dv of the whole sequence, on every rank; `group` has the ranks of `comm`."""
    mine = [*inputs[:3], *(Zigzag(pairs).shard(x, 2, comm.world, comm.rank) for x in inputs[3:])]
    how = {"group": group, "pairs": pairs}
    out, lse, dq, dk, dv = forward_backward(
        lambda q, k, v: ring_distributed_attention(q, k, v, return_lse=True, **how), mine
    )
    out, lse = (gather_ring_outputs(x, length=inputs[0].shape[2], **how) for x in (out, lse))
    return [out, lse, comm.all_reduce(dq), dk, dv]


def core_cases(comm: Comm) -> int:
    cases = [(0, 1), (2, 1), (37, 2), (41, (2, *[1] * (comm.world - 1)))]
    for seed, (length, pairs) in enumerate(cases):
        inputs = random_inputs(length, dtype=(torch.float32, torch.bfloat16)[seed % 2], seed=seed)
        assert_attention_close(whole_results(comm, comm, inputs, pairs), inputs, Causal())
    return len(cases)


def results_and_traffic(comm: Comm) -> tuple[list[list[float]], int]:
    results = whole_results(comm, comm, random_inputs(37, dtype=torch.bfloat16))
    return [x.flatten().tolist() for x in results], comm.traffic.bytes


def three_processes(comm: Comm) -> tuple[tuple[list[list[float]], int], list[str]]:
    found = results_and_traffic(comm)
    assert core_cases(comm) == 4
    return found, one_wrong_process(comm)


def test_processes_match_virtual_ranks_and_the_reference_and_raise_together():
    messages = (
        "11 for q_offset=0 and 11 queries, got 12",
        "ring_id must be that of the group",
        "Zigzag.pairs must",
        "local_out must have 4 rows",
    )
    ranks = run_processes(3, three_processes)
    assert [found for found, _ in ranks] == run_virtual(3, results_and_traffic)
    for _, raised in ranks:
        for expected, message in zip(messages, raised, strict=True):
            assert expected in message


def on_a_mesh(comm: Comm) -> None:
    """Two ways of heads, two of queries, from one mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "sequence"))
    way, place = mesh.get_coordinate()
    inputs = [x.chunk(2, 1)[way] for x in random_inputs(29)]
    for group in (mesh["sequence"], mesh["sequence"].get_group()):
        mine = [*inputs[:3], *(Zigzag().shard(x, 2, 2, place) for x in inputs[3:])]
        out, _, _, dk, dv = forward_backward(
            lambda q, k, v, group=group: ring_distributed_attention(q, k, v, return_lse=True, group=group), mine
        )
        whole = gather_ring_outputs(out, length=29, group=group)
        expected = whole_results_alone(inputs)
        for found, due in zip((whole, dk, dv), expected, strict=True):
            torch.testing.assert_close(found, due)
    with pytest.raises(ValueError, match=r"got dimensions \('heads', 'sequence'\) of shape \(2, 2\): pass one"):
        ring_distributed_attention(*inputs[:3], group=mesh)


def whole_results_alone(inputs: list[Tensor]) -> list[Tensor]:
    """out, dk, dv of a ring of one, which the tests on virtual ranks know to be right."""
    out, _, _, dk, dv = forward_backward(
        lambda q, k, v: ring_distributed_attention(q, k, v, return_lse=True, ring_size=1, ring_id=0), inputs
    )
    return [out, dk, dv]


@pytest.mark.sweep
def test_the_sequence_dimension_of_a_device_mesh():
    run_processes(4, on_a_mesh)


def one_wrong_process(comm: Comm) -> list[str]:
    comm.timeout = 10
    q = torch.ones(1, 2, 12, 16)
    wrong = [
        lambda: ring_distributed_attention(q if comm.rank != 1 else q[:, :, :11], q, q, group=comm),
        lambda: ring_distributed_attention(q, q, q, group=comm, ring_id=0 if comm.rank == 1 else None),
        lambda: ring_distributed_attention(q, q, q, group=comm, pairs=0 if comm.rank == 1 else 1),
        lambda: gather_ring_outputs(q[:, :, : 5 if comm.rank == 1 else 4], length=12, group=comm),
    ]
    heard = []
    for call in wrong:
        with pytest.raises(ValueError, match=r"\(on rank 1\)") as caught:
            call()
        heard.append(str(caught.value))
    torch.testing.assert_close(ring_distributed_attention(q, q, q, group=comm), q[:, :, :4])  # and all goes on
    return heard


def one_leaves_before_the_backward(comm: Comm) -> str:
    comm.timeout = 4
    q, k, v = (x.requires_grad_() for x in random_inputs(24)[:3])
    out = ring_distributed_attention(q, k, v, group=comm)
    if comm.rank == 1:
        return "gone"
    try:
        out.sum().backward()
    except CommError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.sweep
def test_a_process_that_stays_away_from_the_backward_is_missed_in_time():
    first, gone, third = run_processes(3, one_leaves_before_the_backward)
    assert gone == "gone"
    for message in (first, third):
        assert "rank 1 did not arrive within 4 s" in message
        assert "backward of attention" in message


def run_example(*arguments: str, processes: int = 0) -> subprocess.CompletedProcess[str]:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes else []
    return subprocess.run(
        [sys.executable, *start, str(EXAMPLE), *arguments],
        capture_output=True, text=True, timeout=500, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.sweep
def test_the_example_under_torchrun():
    ran = run_example("--head-ranks", "2", "--sequence-ranks", "2", "--length", "140", "--prefix", "9", processes=4)
    assert ran.returncode == 0, ran.stderr
    found = re.findall(r"rank (\d): heads of group (\d), (\d+) of 131 queries", ran.stdout)
    shares = [Zigzag().local_length(131, 2, place) for place in range(2)]
    assert sorted(tuple(map(int, row)) for row in found) == [(i, i // 2, shares[i % 2]) for i in range(4)]


@pytest.mark.sweep
def test_the_example_alone_says_how_to_start_it():
    ran = run_example()
    assert ran.returncode == 2
    assert "a mesh of shape (8, 4) needs 32 processes: start it with torchrun --nproc-per-node 32" in ran.stderr
