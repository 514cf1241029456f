"""The sharded block over NCCL ranks that share a GPU: outputs, groups of a mesh, steps replayed from a CUDA graph."""

import gc
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import attnmesh as am
from attnmesh.testing.block import random_block, reference_block
from helpers.cases import sweep
from helpers.processes import run_processes

needs_gpu = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
BATCH, LENGTH, HIDDEN = 4, 20, 64
ORDERS = [(2, 2, 2), (1, 2, 2), (2, 1, 2), (1, 1, 4), (4, 1, 1), (1, 4, 1), (1, 3, 1), (1, 1, 3), (1, 1, 2), (1, 2, 1)]


def model(device):
    config, weights = random_block(q_heads=8, kv_heads=4, head_dim=16, hidden=HIDDEN, device=device)
    x = torch.randn(BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(3)).to(device)
    return config, weights, x


def block_on(ranks, sharding, config, weights):
    """A block on a comm, or on a mesh."""
    own = weights.shard(config, sharding, am.decode.decode_rank(ranks, sharding))
    return am.AttentionBlock(config, own, sharding, ranks)


def started(block):
    cache = block.make_cache(batch=BATCH, num_blocks=80, block_size=4, max_length=LENGTH)
    return cache, [cache.allocate(0) for _ in range(BATCH)]


def inputs(x, sequences, at):
    """The tokens of a step, whichever row a sequence has."""
    step = torch.empty_like(x[:, :1])
    for i, sequence in enumerate(sequences):
        step[sequence.row] = x[i, at]
    return step


def outputs(out, sequences):
    return torch.stack([out[sequence.row, 0] for sequence in sequences])


def eager(block, x):
    cache, sequences = started(block)
    return torch.stack([
        outputs(block(inputs(x, sequences, at), cache, cache.append(sequences, 1)), sequences) for at in range(LENGTH)
    ], 1)  # fmt: skip


def replayed(block, x, comm):
    """The first two steps run eagerly; the third is captured, and replayed for it and all that follow."""
    cache, sequences = started(block)
    found, fed = [], torch.empty_like(x[:, :1])
    for at in range(2):
        found.append(outputs(block(inputs(x, sequences, at), cache, cache.append(sequences, 1)), sequences))
    step = cache.append(sequences, 1)
    fed.copy_(inputs(x, sequences, 2))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block(fed, cache, step)
    for at in range(2, LENGTH):
        if at > 2:
            step = cache.append(sequences, 1)
            fed.copy_(inputs(x, sequences, at))
        with comm.replaying("decode step"):
            graph.replay()
        if at > 2:
            cache.mark_written(step)
        found.append(outputs(out, sequences).clone())
    found = torch.stack(found, 1).cpu()
    del graph, out
    gc.collect()  # NCCL destroys a communicator only after the graphs with its messages
    return found


def every_sharding(comm):
    torch.cuda.set_device(0)
    config, weights, x = model("cuda")
    exact = reference_block(config, weights, x).double().cpu()
    worst, graphs = 0.0, 0.0
    for sizes in ORDERS:
        sharding = am.DecodeSharding(*sizes, interleave=2)
        if sharding.ranks != comm.world:
            continue
        named = [(name, size) for name, size in zip(("tp", "kvdp", "cp"), sizes, strict=True) if size > 1]
        mesh = init_device_mesh("cuda", tuple(n for _, n in named), mesh_dim_names=tuple(name for name, _ in named))
        for ranks in (comm, mesh):
            block = block_on(ranks, sharding, config, weights)
            got = eager(block, x)
            worst = max(worst, ((got.double().cpu() - exact).abs().max() / exact.abs().max()).item())
            again = replayed(block, x, comm)
            graphs = max(graphs, (again - got.cpu()).abs().max().item())
    torch.cuda.synchronize()
    return worst, graphs


@pytest.mark.parametrize("world", [2, 4, *(sweep(world) for world in (3, 8))])
@pytest.mark.cuda
@pytest.mark.ranks
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_steps_are_right_and_a_captured_step_serves_all_later_ones(world):
    ranks = run_processes(world, every_sharding, timeout=300, backend="nccl")
    print(world, ranks)
    for worst, graphs in ranks:
        assert worst < 1e-5
        assert graphs == 0


def groups_made(comm, device):
    """The groups that are created on this rank, in order, and how many of them for a second block on the same mesh."""
    made = []
    create = dist.distributed_c10d._new_group_with_tag

    def noted(ranks=None, *args, **options):
        made.append(None if ranks is None else tuple(map(int, ranks)))
        return create(ranks, *args, **options)

    dist.distributed_c10d._new_group_with_tag = noted
    config, weights, x = model(device)
    mesh = init_device_mesh(device, (2, 2, 1), mesh_dim_names=("dp", "kvdp", "cp"))
    counts = [len(made)]
    for _ in range(2):
        block = block_on(mesh["kvdp", "cp"], am.DecodeSharding(1, 2, 1), config, weights)
        cache, sequences = started(block)
        block(inputs(x, sequences, 0), cache, cache.append(sequences, 1))
        am.ContextParallel(mesh["kvdp"])
        counts.append(len(made))
    return made, counts


@pytest.mark.ranks
@pytest.mark.parametrize("backend", [sweep("gloo"), pytest.param("nccl", marks=needs_gpu)])
def test_groups_are_created_once_and_in_the_same_order_on_all_ranks(backend):
    ranks = run_processes(4, groups_made, "cuda" if backend == "nccl" else "cpu", backend=backend)
    for made, (mesh, first, second) in ranks:
        assert len(made) == len(ranks[0][0])  # groups of other ranks count: creating one is a call of all
        assert first - mesh <= 2
        assert second == first
    assert ranks[0][0]
    by_call = list(zip(*(made for made, _ in ranks), strict=True))
    for groups in by_call:  # the ranks of a call agree on the group that contains them
        for (i, one), (j, other) in itertools.combinations(enumerate(groups), 2):
            if one is not None and other is not None and i in one and j in one:
                assert one == other
