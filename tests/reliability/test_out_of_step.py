"""One rank calls something else than the others, with arguments that were agreed on before: an error on every rank.

Each case makes its calls in step once, so that nothing is left to be compared, and then differs on the last rank.
"""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.comm import Comm, CommError
from attnmesh.testing.block import poisoned_cache, random_block, shard_block
from helpers.cases import first
from helpers.processes import run_processes

CASES = {}


def case(fn):
    CASES[fn.__name__] = fn
    return fn


def is_odd(comm: Comm) -> bool:
    return comm.rank == comm.world - 1


# Attention: what is different, as (arguments of the others, arguments of the last rank).

ATTENTION = {
    "mask": ({"mask": am.Causal()}, {"mask": am.Full()}),
    "window": ({"mask": am.Causal() & am.SlidingWindow(2)}, {"mask": am.Causal() & am.SlidingWindow(3)}),
    "scale": ({"scale": 0.5}, {"scale": 0.25}),
    "query heads": ({"heads": 4}, {"heads": 8}),
    "kv heads": ({"kv_heads": 4}, {"kv_heads": 2}),
    "head_dim": ({"dim": 16}, {"dim": 32}),
    "batch": ({"batch": 1}, {"batch": 2}),
    "length": ({"rows": 4}, {"rows": 6}),
    "dtype": ({"dtype": torch.float32}, {"dtype": torch.float64}),
    "return_lse": ({"return_lse": False}, {"return_lse": True}),
    "gradients": ({"grad": False}, {"grad": True}),
}


def attend(context, *, batch=1, heads=4, kv_heads=4, rows=4, dim=16, dtype=torch.float32, grad=False, **options):
    q, k, v = (torch.randn(batch, n, rows, dim, dtype=dtype, requires_grad=grad) for n in (heads, kv_heads, kv_heads))
    return context.attention(q, k, v, length=rows * context.world, **options)


def attention_case(schedule, usual, odd):
    def run(comm):
        context = am.ContextParallel(comm, schedule=schedule)
        for arguments in (usual, odd):
            attend(context, **arguments)
        attend(context, **(odd if is_odd(comm) else usual))

    return run


for schedule in ("ring", "allgather", "ulysses"):
    for what, (usual, odd) in ATTENTION.items():
        CASES[f"{schedule}, another {what}"] = attention_case(schedule, usual, odd)


@case
def another_layout(comm):
    layouts = am.Zigzag(), am.Contiguous()
    contexts = [am.ContextParallel(comm, schedule="ulysses", layout=layout) for layout in layouts]
    for context in contexts:
        attend(context)
    attend(contexts[is_odd(comm)])


@case
def another_schedule(comm):
    contexts = [am.ContextParallel(comm, schedule=schedule) for schedule in ("ring", "allgather")]
    for context in contexts:
        attend(context)
    attend(contexts[is_odd(comm)])


@case
def calls_in_another_order(comm):
    context = am.ContextParallel(comm, schedule="ring")
    masks = am.Causal(), am.Full()
    for mask in masks:
        attend(context, mask=mask)
    for mask in reversed(masks) if is_odd(comm) else masks:
        attend(context, mask=mask)


@case
def one_call_more(comm):
    context = am.ContextParallel(comm, schedule="ulysses")
    for _ in range(3 if is_odd(comm) else 2):
        attend(context)
    context.unshard(torch.zeros(4), 0, 4 * comm.world)
    context.unshard(torch.zeros(4), 0, 4 * comm.world)


@case
def one_call_more_before_an_agreement(comm):
    comm.agree("a", {})
    if is_odd(comm):
        comm.agree("a", {})
    comm.agree("b", {})


@case
def unshard_for_attention(comm):
    context = am.ContextParallel(comm, schedule="ulysses")
    attend(context)
    context.unshard(torch.zeros(4), 0, 4 * comm.world)
    context.unshard(torch.zeros(4), 0, 4 * comm.world) if is_odd(comm) else attend(context)


@case
def backwards_in_another_order(comm):
    context = am.ContextParallel(comm, schedule="ring")
    outs = [attend(context, grad=True) for _ in range(2)]
    for out in reversed(outs) if is_odd(comm) else outs:
        out.sum().backward()


@case
def backward_before_forward(comm):
    context = am.ContextParallel(comm, schedule="ulysses")
    out = attend(context, grad=True)
    if is_odd(comm):
        out.sum().backward()
    attend(context, grad=True)
    if not is_odd(comm):
        out.sum().backward()


@case
def compiled_on_one_rank(comm):
    context = am.ContextParallel(comm, schedule="ulysses")
    compiled = torch.compile(context.attention, backend="aot_eager")
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    for attention in (context.attention, compiled):
        attention(q, k, v).sum().backward()
    (compiled if is_odd(comm) else context.attention)(q, k, v).sum().backward()


@case
def raw_messages_of_another_size(comm):
    comm.agree("mine", {})
    comm.all_gather(torch.zeros(3 + is_odd(comm)), [(3 + is_odd(comm),)] * comm.world)


@case
def raw_messages_of_another_operation(comm):
    comm.agree("mine", {})
    x = torch.zeros(4)
    comm.all_reduce(x) if is_odd(comm) else comm.all_gather(x, [(4,)] * comm.world)


# Objects with equal arguments: which of them is called, and in which order they are made.


def attend_with(contexts, order):
    for at in order:
        attend(contexts[at], heads=2, kv_heads=2)


@case
def objects_in_another_order(comm):
    contexts = [am.ContextParallel(comm, schedule="ring") for _ in range(2)]
    attend_with(contexts, (1, 0) if is_odd(comm) else (0, 1))


@case
def objects_in_another_order_that_were_called_before(comm):
    contexts = [am.ContextParallel(comm, schedule="ulysses") for _ in range(2)]
    attend_with(contexts, (0, 1))
    attend_with(contexts, (1, 0) if is_odd(comm) else (0, 1))


@case
def one_object_more(comm):
    contexts = [am.ContextParallel(comm, schedule="ring") for _ in range(1 + is_odd(comm))]
    attend(contexts[-1])


@case
def unshard_by_another_object(comm):
    contexts = [am.ContextParallel(comm) for _ in range(2)]
    contexts[is_odd(comm)].unshard(torch.zeros(4), 0, 4 * comm.world)


@case
def another_sparse_object(comm):
    objects = [am.SparseParallel(cp=comm) for _ in range(2)]
    q, kv, indices = torch.randn(4, 2, 8), torch.randn(4, 1, 8), torch.zeros(4, 4, dtype=torch.int32)
    objects[is_odd(comm)].sparse_attention(q, kv, indices, scale=0.3, d_v=8)


@case
def another_sparse_decode_object(comm):
    objects = [am.sparse.SparseDecode(comm) for _ in range(2)]
    sizes = {"num_blocks": 2, "block_size": 4, "max_sequences": 1, "max_length": 16, "device": "cpu"}
    spec = am.CacheSpec(layers=1, kv_heads=1, head_dim=96, value_dim=64, latent=True, storage="fp32")
    cache = am.BlockCache(spec, **sizes, shard=objects[0].shard)
    cache.write(0, cache.append([cache.allocate(9)], 9), torch.randn(1, 1, 9, 96))
    indices = torch.tensor([[[0, 3, 8]]], dtype=torch.int32)
    objects[is_odd(comm)].attention(
        torch.randn(1, 1, 4, 96), cache.keys(0), cache.block_table, indices, scale=0.1, d_v=64
    )


def blocks_and_caches(comm):
    config, weights = random_block(q_heads=4, kv_heads=2, head_dim=8, hidden=16)
    blocks = [shard_block(config, weights, am.DecodeSharding(cp=comm.world), comm) for _ in range(2)]
    return blocks, [poisoned_cache(blocks[0], 1, 8) for _ in range(2)]


@case
def another_block(comm):
    blocks, (cache, _) = blocks_and_caches(comm)
    blocks[is_odd(comm)](torch.randn(1, 1, 16), cache, cache.append([cache.allocate(0)], 1))


@case
def another_cache(comm):
    (block, _), caches = blocks_and_caches(comm)
    steps = [cache.append([cache.allocate(0)], 1) for cache in caches]
    at = is_odd(comm)
    block(torch.randn(1, 1, 16), caches[at], steps[at])


# Values that must be equal on all ranks.


def score_term_case(schedule, term):
    def run(comm):
        context = am.ContextParallel(comm, schedule=schedule)
        for values in (torch.ones(4), torch.full((4,), 1.0 + is_odd(comm))):
            attend(context, **{term: values})

    return run


for schedule in ("ring", "allgather", "ulysses"):
    for term in ("sinks", "alibi_slopes"):
        CASES[f"{schedule}, other values of {term}"] = score_term_case(schedule, term)


@case
def other_sinks_written_in_place(comm):
    context, sinks = am.ContextParallel(comm, schedule="ring"), torch.ones(4)
    attend(context, sinks=sinks)
    sinks[3] += is_odd(comm)
    attend(context, sinks=sinks)


@case
def other_slopes_of_distributed_queries(comm):
    q, k, v = torch.randn(3, 1, 4, 8, 16)
    am.ring_distributed_attention(q, k, v, group=comm, alibi_slopes=torch.full((4,), 1.0 + is_odd(comm)))


@case
def other_buffers(comm):
    context, buffer = am.ContextParallel(comm), torch.ones(4 * comm.world)
    for value in (1.0, 1.0 + is_odd(comm)):
        with am.attention_context_parallel(context, buffers=[buffer.fill_(value)], buffer_seq_dims=[0]):
            attend(context)


@case
def other_sinks_of_a_block(comm):
    config, weights = random_block(q_heads=4, kv_heads=2, head_dim=8, hidden=16)
    weights = replace(weights, sinks=torch.full((4,), float(is_odd(comm))))
    shard_block(config, weights, am.DecodeSharding(cp=comm.world), comm)


# Sparse attention and its indexer.


def sparse_calls(comm, topk=4, rows=4, **options):
    sparse = am.SparseParallel(cp=comm)
    torch.manual_seed(7)
    q, kv = torch.randn(rows, 2, 8), torch.randn(rows, 1, 8)
    indices = torch.zeros(rows, topk, dtype=torch.int32)
    return sparse.sparse_attention(q, kv, indices, scale=options.pop("scale", 0.3), d_v=8, **options)


def sparse_case(odd):
    def run(comm):
        sparse_calls(comm)
        sparse_calls(comm, **odd)
        sparse_calls(comm, **(odd if is_odd(comm) else {}))

    return run


for what, odd in {"top-k": {"topk": 8}, "scale": {"scale": 0.5}, "length": {"rows": 6}}.items():
    CASES[f"sparse attention, another {what}"] = sparse_case(odd)


@case
def sparse_indexer_for_attention(comm):
    sparse = am.SparseParallel(cp=comm)
    iq, ik, w = torch.randn(4, 2, 8), torch.randn(4, 8), torch.randn(4, 2)
    sparse_calls(comm)
    sparse.indexer_topk(iq, ik, w, 4)
    sparse.indexer_topk(iq, ik, w, 4) if is_odd(comm) else sparse_calls(comm)


# Decode over a sharded cache: one rank performs another operation on its cache.

OPERATIONS = {
    "appends another number of tokens": lambda cache, a, b: cache.append([a, b], 2),
    "appends other ids": lambda cache, a, b: cache.append([a, b], [[5], [7]]),
    "appends to fewer sequences": lambda cache, a, b: cache.append([a], 1),
    "appends in another order": lambda cache, a, b: cache.append([b, a], 1),
    "truncates": lambda cache, a, b: (cache.truncate(a, 1), cache.append([a, b], 1))[1],
    "truncates to another length": lambda cache, a, b: (cache.truncate(a, 2), cache.append([a, b], 1))[1],
    "frees": lambda cache, a, b: (cache.free(b), cache.append([a], 1))[1],
    "frees the other one": lambda cache, a, b: (cache.free(a), cache.append([b], 1))[1],
    "forks": lambda cache, a, b: (cache.fork(a), cache.append([a, b], 1))[1],
    "allocates": lambda cache, a, b: (cache.allocate(2), cache.append([a, b], 1))[1],
    "frees and allocates": lambda cache, a, b: (cache.free(b), cache.append([a, cache.allocate(2)], 1))[1],
}
USUAL = lambda cache, a, b: cache.append([a, b], 1)  # noqa: E731


def decode_case(sharding, operation):
    def run(comm):
        size = comm.world
        shardings = {"tp": (size, 1, 1), "kvdp": (1, size, 1), "cp": (1, 1, size)}
        config, weights = random_block(q_heads=12, kv_heads=6, head_dim=8, hidden=16)
        block = shard_block(config, weights, am.DecodeSharding(*shardings[sharding], interleave=2), comm)
        cache = poisoned_cache(block, 4, 32)
        a, b = cache.allocate(0), cache.allocate(0)
        for tokens in (2, 1, 1, 2):
            step = cache.append([a, b], tokens)
            block(torch.randn(4, tokens, 16), cache, step)
        for sequences in ([a], [b]):
            block(torch.randn(4, 1, 16), cache, cache.append(sequences, 1))
        step = (operation if is_odd(comm) else USUAL)(cache, a, b)
        return block(torch.randn(4, step.tokens, 16), cache, step)

    return run


for sharding in ("tp", "kvdp", "cp"):
    for what, operation in OPERATIONS.items():
        CASES[f"{sharding} decode, one rank {what}"] = decode_case(sharding, operation)


def outcome(fn, comm):
    """The type and text of the error of this rank, and the seconds that it took; an empty type if there is none."""
    begin = time.monotonic()
    try:
        fn(comm)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", time.monotonic() - begin


FEW = [
    "ulysses, another mask",
    "ring, another query heads",
    "raw_messages_of_another_size",
    "tp decode, one rank truncates",
    "objects_in_another_order",
    "another_cache",
    "ulysses, other values of sinks",
]
SOME = {*FEW, *list(CASES)[::7], *(name for name in CASES if "object" in name or "other" in name or "another_" in name)}


@pytest.mark.parametrize(
    "name", first(5, [pytest.param(name, marks=() if name in SOME else pytest.mark.sweep) for name in CASES])
)
def test_virtual_ranks_out_of_step(name):
    with pytest.raises((CommError, ValueError), match=r"out of step|deadlock|disagree") as caught:
        am.run_virtual(2, CASES[name])
    assert "rank 0" in str(caught.value)
    assert "rank 1" in str(caught.value)


def every_case(comm, names):
    outcomes = {}
    for name in names:
        group = dist.new_group(list(range(comm.world)))  # one that failed is of no use to the next case
        outcomes[name] = outcome(CASES[name], am.comm_from(group, timeout=30))
        comm.barrier()
    return outcomes


def is_reported(outcomes):
    """Whether every rank raised in time, and at least one says what differs."""
    raised = all(kind in ("CommError", "ValueError") and seconds < 10 for kind, _, seconds in outcomes)
    return raised and any("out of step" in text or "disagree" in text for _, text, _ in outcomes)


def check_processes(world, names):
    ranks = run_processes(world, every_case, names, timeout=200 + 5 * len(names))
    found = {name: [rank[name] for rank in ranks] for name in names}
    wrong = {name: outcomes for name, outcomes in found.items() if not is_reported(outcomes)}
    assert not wrong, wrong
    return ranks


def test_processes_out_of_step():
    check_processes(2, FEW)


# NCCL delivers messages whatever the calls: the monitors of the ranks compare them while the ranks go on.


def call_until_it_fails(comm, name):
    """What this rank raises, and after how many seconds from the call that differs."""
    CASES[name](comm)
    begin = time.monotonic()
    context = am.ContextParallel(comm, schedule="ulysses")
    while time.monotonic() - begin < 20:
        attend(context)
        torch.cuda.synchronize()
        time.sleep(0.01)


def nccl_cases(comm, names):
    torch.set_default_device("cuda")
    attend(am.ContextParallel(am.comm_from(dist.new_group(backend="nccl")), schedule="ulysses"))  # kernels are loaded
    outcomes = {}
    for name in names:
        group = dist.new_group(list(range(comm.world)), backend="nccl")
        begin = time.monotonic()
        outcomes[name] = outcome(lambda on, name=name: call_until_it_fails(on, name), am.comm_from(group, timeout=30))
        print(name, comm.rank, outcomes[name], time.monotonic() - begin, flush=True)
        comm.barrier()
    return outcomes


@pytest.mark.cuda
def test_nccl_ranks_out_of_step(nccl_ranks):
    names = ["ulysses, another mask", "ulysses, another scale"]  # other sizes are an error of NCCL itself
    ranks = nccl_ranks(2, nccl_cases, names, timeout=300)
    assert all(is_reported([rank[name] for rank in ranks]) for name in names), ranks


@pytest.mark.sweep
def test_processes_out_of_step_in_every_case():
    check_processes(2, list(CASES))
