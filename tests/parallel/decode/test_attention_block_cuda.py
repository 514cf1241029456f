"""The sharded block on a GPU: virtual ranks against float64, no host sync, and steps replayed from a CUDA graph."""

from dataclasses import replace
from itertools import product

import pytest
import torch

import attnmesh as am
from attnmesh.testing.block import random_block, reference_block, shard_block
from helpers.blocks import generate, layer_outputs, transformers_layer
from helpers.cases import else_sweep

CUDA = torch.cuda.is_available()
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not CUDA, reason="needs a GPU")]

PROMPTS, STEPS = (5, 70, 1), 12
SHARDINGS = [(1, 1, 1), (2, 1, 1), (1, 3, 1), (1, 1, 4), (2, 2, 2)]


def made(family, sharding, comm, dtype, **options):
    module = transformers_layer(family, 16, 4)
    exchange = options.get("exchange") or am.decode.Exchange()
    config, weights = am.models.attention_from_transformers(
        module, sharding, comm.rank, replicate_q=exchange.replicate_q
    )
    tensors = {name: None if x is None else x.to("cuda", dtype) for name, x in vars(weights).items()}
    return am.AttentionBlock(config, am.decode.AttentionWeights(**tensors), sharding, comm, **options)


def inputs(family, dtype):
    x = torch.randn(len(PROMPTS), max(PROMPTS) + STEPS, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    return x.cuda(), layer_outputs(transformers_layer(family, 16, 4, torch.float64), x.double())


def error(seen, truth):
    fed = ~seen.isnan().any(-1)
    assert [row.sum().item() for row in fed] == [n + STEPS for n in PROMPTS]
    return ((seen.double().cpu() - truth).abs().nan_to_num(0).amax() / truth.abs().max()).item()


@pytest.mark.parametrize(
    ("family", "sharding", "dtype", "most"),
    else_sweep(  # each family and sharding in both dtypes; chunks of a prompt are cut before any kernel sees them
        product(["qwen3", "gpt-oss"], SHARDINGS, [torch.float32, torch.bfloat16], [8, 33, 70]),
        lambda family, sharding, dtype, most: (
            most == (33 if dtype == torch.bfloat16 else 8 if family == "qwen3" else 70)
        ),
    ),
)
def test_generates_what_the_module_says(family, sharding, dtype, most):
    x, truth = inputs(family, dtype)
    sharding = am.DecodeSharding(*sharding, interleave=2)
    bound = 1e-5
    if dtype is torch.bfloat16:
        plain = layer_outputs(transformers_layer(family, 16, 4, dtype), x.cpu())
        bound = 2 * ((plain.double() - truth).abs().amax() / truth.abs().max()).item()
    for seen in am.run_virtual(
        sharding.ranks, lambda comm: generate(made(family, sharding, comm, dtype), x, PROMPTS, STEPS, most=most)
    ):
        assert error(seen, truth) <= bound


@pytest.mark.parametrize(
    "exchange",
    [
        am.decode.Exchange(kvdp="all_gather", cp="reduce_scatter"),
        am.decode.Exchange(cp="all_reduce"),
        am.decode.Exchange(replicate_q=True),
    ],
)
def test_every_exchange(exchange):
    x, truth = inputs("gpt-oss", torch.float32)
    sharding = am.DecodeSharding(1, 2, 2)

    def rank(comm):
        return generate(made("gpt-oss", sharding, comm, torch.float32, exchange=exchange), x, PROMPTS, STEPS)

    for seen in am.run_virtual(4, rank):
        assert error(seen, truth) <= 1e-5


@pytest.mark.parametrize("sharding", [(1, 1, 1), (1, 2, 2)])
def test_softcap_and_slopes(sharding):
    x, _ = inputs("qwen3", torch.float32)
    config, weights = random_block(16, 4, hidden=48, softcap=0.8, alibi=True, window=9, device="cuda")
    truth = reference_block(config, weights, x).cpu()
    sharding = am.DecodeSharding(*sharding, interleave=2)
    for seen in am.run_virtual(
        sharding.ranks,
        lambda comm: generate(shard_block(config, weights, sharding, comm), x, PROMPTS, STEPS, most=33),
    ):
        assert error(seen, truth) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_cp(dtype):
    """Of attention: cuBLAS sums a narrower projection in another order, so here ranks project alike, and not back."""
    x, _ = inputs("gpt-oss", dtype)
    found = []
    for cp in (1, 2, 8):
        sharding = am.DecodeSharding(cp=cp, interleave=8)

        def rank(comm, sharding=sharding):
            block = made("gpt-oss", sharding, comm, dtype, split_size=8, exchange=am.decode.Exchange(replicate_q=True))
            block.weights = replace(block.weights, out=None, out_bias=None)
            cache = block.make_cache(batch=1, num_blocks=32, block_size=4, max_length=80)
            sequence = cache.allocate(80)
            return torch.cat([block(part, cache, cache.append([sequence], 8)) for part in x[:1, :80].split(8, 1)], 2)

        found.append(torch.cat(am.run_virtual(cp, rank), 1))
    assert found[0].shape == (1, 16, 80, 8)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("storage", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("family", ["qwen3", "gpt-oss"])
def test_a_captured_step_serves_all_later_ones(family, storage):
    x, _ = inputs(family, torch.bfloat16)
    sharding = am.DecodeSharding()
    block = made(family, sharding, am.comm_from(None), torch.bfloat16)
    eager = generate(block, x, PROMPTS, STEPS, storage=storage)

    cache = block.make_cache(batch=3, num_blocks=70, block_size=4, max_length=max(PROMPTS) + STEPS, storage=storage)
    sequences = [cache.allocate(n) for n in PROMPTS]
    fed = torch.zeros(3, 1, 48, device="cuda", dtype=torch.bfloat16)
    for sequence, length in zip(sequences, PROMPTS, strict=True):
        while sequence.length < length:
            count, begin = min(8, length - sequence.length), sequence.length
            step = cache.append([sequence], count)
            rows = torch.zeros(3, count, 48, device="cuda", dtype=torch.bfloat16)
            rows[sequence.row] = x[sequences.index(sequence), begin : begin + count]
            block(rows, cache, step)

    def feed():
        step = cache.append(sequences, 1)
        for i, sequence in enumerate(sequences):
            fed[sequence.row] = x[i, sequence.length - 1]
        return step

    def check(out):
        for i, sequence in enumerate(sequences):
            assert torch.equal(out[sequence.row, 0], eager[i, sequence.length - 1])

    check(block(fed, cache, feed()))  # warm
    graph = torch.cuda.CUDAGraph()
    step = feed()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = block(fed, cache, step)
    graph.replay()
    check(out)
    for _ in range(STEPS - 2):
        step = feed()
        graph.replay()
        cache.mark_written(step)
        check(out)


def test_a_step_waits_for_nothing():
    sharding = am.DecodeSharding(1, 1, 1)
    block = made("gpt-oss", sharding, am.comm_from(None), torch.bfloat16)
    cache = block.make_cache(batch=2, num_blocks=32, block_size=4, max_length=60)
    sequences = [cache.allocate(40), cache.allocate(40)]
    x = torch.randn(2, 8, 48, device="cuda", dtype=torch.bfloat16)
    for tokens in (8, 1, 3):
        block(x[:, :tokens].contiguous(), cache, cache.append(sequences, tokens))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for tokens in (8, 1, 3):
            block(x[:, :tokens].contiguous(), cache, cache.append(sequences, tokens))
    finally:
        torch.cuda.set_sync_debug_mode("default")
