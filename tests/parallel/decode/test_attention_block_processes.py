"""The sharded block between real processes over gloo: exact, as between virtual ranks, also on meshes."""

import re
import time

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import attnmesh as am
from attnmesh.plan.decode import Place
from attnmesh.testing.block import BlockRunner, poisoned_cache, random_block, reference_block, shard_block
from helpers.blocks import (
    assert_outputs_close,
    fed_lengths,
    generate,
    layer_outputs,
    random_sequences,
    transformers_layer,
)
from helpers.processes import run_processes

SHARDINGS = [(4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1)]  # CP2 with TP2 and with KVDP2: the meshes and exchanges below
FAMILIES = ("qwen3", "gpt-oss")
HEADS, PROMPTS, STEPS = (8, 4), (3, 13), 2


def problem(family):
    """A module's configuration, its whole weights, inputs, and what it says about them in float64."""
    config, weights = am.models.attention_from_transformers(transformers_layer(family, *HEADS))
    x = random_sequences(len(PROMPTS), max(PROMPTS) + STEPS, config)
    return config, weights, x, layer_outputs(transformers_layer(family, *HEADS, torch.float64), x.double())


def assert_same_but_for_blas(seen, same):
    """Attention gives the same bits; a projection's last ones are BLAS's, which asks where its operands lie."""
    torch.testing.assert_close(torch.from_numpy(seen), torch.from_numpy(same), rtol=1e-5, atol=1e-5, equal_nan=True)


def every_sharding(comm, problems):
    """The outputs of one problem per sharding, in turn. Under some of them, prompts are one step, or two."""
    found = []
    for at, sharding in enumerate(SHARDINGS):
        config, weights, x = problems[at % len(problems)]
        block = shard_block(config, weights, am.DecodeSharding(*sharding, interleave=2), comm)
        found.append(generate(block, x, PROMPTS, STEPS, most=(8, 8, 10, 13)[at]).numpy())
    return found


# Fewer sequences than ranks, other collectives, and meshes.


def few_steps(block, batch=3):
    x = random_sequences(batch, 16, block.config)
    feeding = BlockRunner(block, poisoned_cache(block, batch, 16), x).allocate(*range(batch)).feed_until(0, 6)
    feeding.feed(range(batch), 5)
    feeding.feed(sorted({0, batch - 1}), 1)
    return feeding.outputs.numpy()


def every_exchange(comm):
    config, weights = random_block(9, 3, sinks=True, window=5)
    found = []
    for sharding, exchange, split_size in (
        (am.DecodeSharding(1, 2, 2), am.decode.Exchange("all_gather", "reduce_scatter"), None),
        (am.DecodeSharding(1, 2, 2), am.decode.Exchange("all_to_all", "all_reduce", replicate_q=True), None),
        (am.DecodeSharding(1, 1, 4, 4), am.decode.Exchange(), 4),
        (am.DecodeSharding(1, 4, 1), am.decode.Exchange("all_gather"), None),
    ):
        own = weights.shard(config, sharding, comm.rank, replicate_q=exchange.replicate_q)
        block = am.AttentionBlock(config, own, sharding, comm, exchange=exchange, split_size=split_size)
        found += [few_steps(block, batch) for batch in (3, 1)]
    return found


MESHES = [
    ((2, 2), ("kvdp", "cp")),  # another order than the sharding's, in which kvdp varies fastest
    ((2, 2), ("cp", "tp")),
    ((2, 1, 2), ("kvdp", "tp", "cp")),
    ((4,), ("cp",)),
]


def on_a_mesh(shape, names):
    """The rank in the sharding's order, and the outputs."""
    config, weights = random_block(8, 4, sinks=True)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    at = dict(zip(names, mesh.get_coordinate(), strict=True))
    sharding = am.DecodeSharding(**dict(zip(names, shape, strict=True)), interleave=2)
    rank = sharding.rank(Place(**{name: at.get(name, 0) for name in Place._fields}))
    assert am.decode.decode_rank(mesh, sharding) == rank
    block = am.AttentionBlock(config, weights.shard(config, sharding, rank), sharding, mesh)
    assert block.rank == rank
    assert block.make_cache(batch=3, num_blocks=4, block_size=4, max_length=16).rank == rank
    return rank, few_steps(block)


def everything(comm, problems):
    """All checks in one launch: starting processes takes longer than the checks."""
    return every_sharding(comm, problems), every_exchange(comm), [on_a_mesh(*mesh) for mesh in MESHES]


@pytest.fixture(scope="module")
def problems():
    return [problem(family) for family in FAMILIES]


@pytest.fixture(scope="module")
def processes(problems):
    return run_processes(4, everything, [each[:3] for each in problems])


def test_every_sharding_is_exact_and_equal_to_virtual_ranks(processes, problems):
    virtual = am.run_virtual(4, lambda comm: every_sharding(comm, [each[:3] for each in problems]))
    for (outputs, _, _), same_outputs in zip(processes, virtual, strict=True):
        for at, (seen, same) in enumerate(zip(outputs, same_outputs, strict=True)):
            assert_outputs_close(torch.from_numpy(seen), problems[at % len(problems)][3])
            assert fed_lengths(torch.from_numpy(seen)) == [n + STEPS for n in PROMPTS]
            assert_same_but_for_blas(seen, same)


def test_every_exchange_is_exact_and_equal_to_virtual_ranks(processes):
    config, weights = random_block(9, 3, sinks=True, window=5)
    truths = [reference_block(config, weights, random_sequences(batch, 16, config)) for batch in (3, 1)]
    for (_, outputs, _), same_outputs in zip(processes, am.run_virtual(4, every_exchange), strict=True):
        for at, (seen, same) in enumerate(zip(outputs, same_outputs, strict=True)):
            assert_outputs_close(torch.from_numpy(seen), truths[at % 2])
            assert_same_but_for_blas(seen, same)


def test_a_mesh_with_its_dimensions_in_another_order(processes):
    config, weights = random_block(8, 4, sinks=True)
    truth = reference_block(config, weights, random_sequences(3, 16, config))
    for at, (shape, _) in enumerate(MESHES):
        ranks, outputs = zip(*(meshes[at] for *_, meshes in processes), strict=True)
        assert sorted(ranks) == [0, 1, 2, 3]
        assert (list(ranks) == [0, 1, 2, 3]) == (shape == (4,))
        for seen in outputs:
            assert_outputs_close(torch.from_numpy(seen), truth)


def on_half_of_the_ranks(comm):
    """Two replicas of a mesh of three dimensions, each with sequences of its own."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "kvdp"))
    config, weights = random_block(8, 4)
    sharding = am.DecodeSharding(kvdp=2, cp=2)
    own = weights.shard(config, sharding, comm.rank % 4)
    return few_steps(am.AttentionBlock(config, own, sharding, mesh["cp", "kvdp"]))


@pytest.mark.sweep
def test_two_dimensions_of_a_mesh_of_three():
    config, weights = random_block(8, 4)
    truth = reference_block(config, weights, random_sequences(3, 16, config))
    for seen in run_processes(8, on_half_of_the_ranks):
        assert_outputs_close(torch.from_numpy(seen), truth)


# Errors.


def refusals(comm):
    """What every rank hears about one rank's mistakes, and how long it takes."""
    comm.timeout = 20
    config, weights = random_block(8, 4)
    sharding = am.DecodeSharding(kvdp=2, cp=2)
    own = weights.shard(config, sharding, comm.rank)
    guilty = comm.rank == 2
    swapped = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("cp", "dp"))
    block = am.AttentionBlock(config, own, sharding, comm)
    cache = poisoned_cache(block, 2, 16)
    sequence = cache.allocate(0)
    step = cache.append([sequence], 2)
    x = torch.ones(2, 2, 24)

    def elsewhere():
        other = am.DecodeSharding(kvdp=2, cp=2, interleave=2) if guilty else sharding
        am.AttentionBlock(config, own, other, comm)

    ways = [
        lambda: am.AttentionBlock(config, own, sharding, comm, split_size=3 if guilty else None),
        elsewhere,
        lambda: am.AttentionBlock(config, own, sharding, swapped),
        lambda: block(x[:1] if guilty else x, cache, step),
        lambda: block(x, cache, None if guilty else step),
    ]
    heard = []
    for way in ways:
        began = time.monotonic()
        try:
            way()
            heard.append(("nothing was raised", 0.0))
        except ValueError as error:
            heard.append((str(error), time.monotonic() - began))
    seen = block(x, cache, step)[sequence.row]  # and all goes on
    return heard, seen.numpy()


def test_a_mistake_on_one_rank_is_heard_on_all_at_once():
    words = [
        "interleave of the sharding must be a multiple of split_size.*on rank 2",
        "ranks disagree: sharding is .*interleave=2",
        "mesh must have dimensions named tp, cp, kvdp",
        r"x must be .* got \[1, 2, 24\] \(on rank 2\)",
        r"step must be what append of the cache returned, got None \(on rank 2\)",
    ]
    config, weights = random_block(8, 4)
    truth = reference_block(config, weights, torch.ones(1, 2, 24))
    for heard, seen in run_processes(4, refusals):
        for (message, seconds), due in zip(heard, words, strict=True):
            assert re.search(due, message), message
            assert seconds < 5
        assert_outputs_close(torch.from_numpy(seen)[None], truth)
