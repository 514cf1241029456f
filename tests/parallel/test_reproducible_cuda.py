"""reproducible=True on a GPU: the bits of one call for any rows, order, ranks, layout and schedule, at real sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh.comm import Comm
from attnmesh.core.tree import Node, TreeSum
from attnmesh.ops.dense import aligned_tiles, triton_backward, triton_forward
from attnmesh.ops.dense.reproducible_kernels import KEYS
from attnmesh.plan.leaves import leaf_size
from attnmesh.testing.attention import (
    assert_attention_close,
    forward_backward,
    random_inputs,
    shard_results,
    virtual_results,
)
from attnmesh.training.data_parallel import GradientReduction
from helpers.cases import sweep
from helpers.processes import run_processes

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LEAF = leaf_size("cuda")
LENGTH = 2 * LEAF + 404
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MASKS: dict[str, am.Mask] = {
    "causal": am.Causal(),
    "full": am.Full(),
    "window": am.SlidingWindow(700, 3),
    "documents": am.Causal() & am.Documents([1000, 0, 57, 61, LENGTH - 1118]),
    "union": am.SlidingWindow(40) | am.Global(5),
    "prefix": am.Prefix(150),
    "per sequence": am.PerSequence([am.Causal(), am.SlidingWindow(17)]),
    "padding": am.Padding([0, 610]) & am.Causal(),
}
CASES = [
    # mask, dtype, heads, widths of keys and values, score terms: every kind of kernel, one part of a mask and several
    ("causal", BF16, (4, 2), (128, 128), {}),
    ("window", FP16, (3, 1), (64, 64), {"softcap": 3.0}),
    ("union", BF16, (4, 2), (64, 64), {}),
    ("documents", BF16, (2, 2), (192, 128), {}),
    ("per sequence", BF16, (2, 1), (256, 256), {}),
    ("causal", FP32, (2, 1), (64, 64), {"slopes": [0.3, 0.02]}),
    ("padding", FP16, (2, 2), (24, 40), {"scale": -0.3}),
    sweep("prefix", BF16, (8, 1), (80, 80), {"slopes": [0.3, 0.02, 0.1, 0.2, 0.5, 0.0, 1.0, 0.01]}),
    sweep("full", FP32, (2, 2), (128, 128), {}),
    sweep("union", FP32, (4, 1), (40, 24), {"softcap": 2.0}),
    sweep("causal", BF16, (2, 1), (576, 512), {}),
]
every_case = pytest.mark.parametrize(("name", "dtype", "heads", "widths", "terms"), CASES)
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


def problem(
    name: str, dtype: torch.dtype, heads: tuple[int, int], widths: tuple[int, int], terms: dict[str, Any]
) -> tuple[list[Tensor], am.Mask, Tensor, dict[str, Any]]:
    how = dict(terms)
    if "slopes" in how:
        how["alibi_slopes"] = torch.tensor(how.pop("slopes"), device="cuda")
    inputs = random_inputs(
        LENGTH, heads=heads, dtype=dtype, head_dim=widths[0], value_dim=widths[1], device="cuda"
    )  # fmt: skip
    return inputs, MASKS[name], torch.linspace(-1, 2, heads[0], device="cuda"), how


def results(inputs: list[Tensor], mask: am.Mask, sinks: Tensor | None, **how: Any) -> list[Tensor]:
    """out, lse, dq, dk, dv, and dsinks if there are sinks."""

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return am.attention(q, k, v, mask=mask, sinks=sinks, return_lse=True, reproducible=True, **how)

    return forward_backward(attend, inputs, sinks)


def assert_same_bits(actual: list[Tensor], expected: list[Tensor], at: object = "") -> None:
    for name, a, b in zip(NAMES, actual, expected, strict=False):
        different = (a != b) | (a.signbit() != b.signbit())
        assert not bool(different.any()), (name, at, int(different.sum()), different.nonzero()[:3].tolist())


@every_case
def test_all_results_obey_the_error_rule(name, dtype, heads, widths, terms):
    inputs, mask, sinks, how = problem(name, dtype, heads, widths, terms)
    assert_attention_close(results(inputs, mask, sinks, **how), inputs, mask, sinks=sinks, **how)


@every_case
def test_chunks_of_a_prompt_and_single_tokens_have_the_bits_of_the_whole(name, dtype, heads, widths, terms):
    (q, k, v, *_), mask, sinks, how = problem(name, dtype, heads, widths, terms)
    how |= {"mask": mask, "sinks": sinks, "return_lse": True, "reproducible": True}
    whole = am.attention(q, k, v, **how)
    cuts = [range(at, min(at + 1000, LENGTH)) for at in range(0, LENGTH, 1000)]
    cuts += [range(at, at + 65) for at in (0, 61, KEYS - 3, LEAF - 7)] + [range(3, LENGTH, 7)]
    cuts += [range(at, at + 1) for at in (0, 1, KEYS, 1057, LENGTH - 1)]
    for rows in cuts:
        at = torch.tensor(rows)
        part = am.attention(q[:, :, at], k, v, q_positions=at, **how)
        assert_same_bits(list(part), [x[:, :, at] for x in whole], rows)


@every_case
def test_neither_the_order_of_rows_nor_the_batch_nor_the_memory_changes_a_bit(name, dtype, heads, widths, terms):
    inputs, mask, sinks, how = problem(name, dtype, heads, widths, terms)
    whole = results(inputs, mask, sinks, **how)
    assert_same_bits(results(inputs, mask, sinks, **how), whole, "again")
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    found = results([x[:, :, order] for x in inputs], mask, sinks, q_positions=order, k_positions=order, **how)
    back = order.argsort()
    assert_same_bits([x if x.ndim == 1 else x[:, :, back] for x in found], whole, "order")
    other_memory = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    assert_same_bits(results(other_memory, mask, sinks, **how), whole, "memory")
    if mask.sequences is None:
        found = results([x[1:] for x in inputs], mask, sinks, **how)
        assert_same_bits(found[:5], [x[1:] for x in whole[:5]], "batch")


@pytest.mark.parametrize(
    ("name", "dtype", "heads", "widths", "terms", "ranks"),
    [
        ("causal", BF16, (8, 2), (128, 128), {}, [(2, "zigzag", "allgather"), (8, "contiguous", "allgather"),
                                                  (3, "striped", "ulysses"), (4, "zigzag", "ulysses+allgather")]),
        ("window", BF16, (2, 2), (64, 64), {}, [(4, "striped", "allgather"), (6, "zigzag", "allgather")]),
        ("union", FP16, (4, 4), (64, 64), {}, [(3, "zigzag", "allgather"), (4, "contiguous", "ulysses+allgather")]),
        ("documents", BF16, (4, 2), (192, 128), {}, [(3, "zigzag", "allgather"), (2, "contiguous", "ulysses")]),
        ("causal", FP32, (2, 1), (64, 64), {"slopes": [0.3, 0.02]}, [(3, "zigzag", "allgather")]),
    ],
)  # fmt: skip
def test_any_ranks_have_the_bits_of_one_device(name, dtype, heads, widths, terms, ranks):
    inputs, mask, sinks, how = problem(name, dtype, heads, widths, terms)
    whole = results(inputs, mask, sinks, **how)
    layouts = {"contiguous": am.Contiguous(), "zigzag": am.Zigzag(), "striped": am.Striped()}
    with torch.autograd.set_multithreading_enabled(False):
        for world, layout, schedule in ranks:
            how |= {"schedule": schedule, "ranks_per_node": 2 if "+" in schedule else None, "sinks": sinks}
            found = virtual_results(world, inputs, mask, layouts[layout], reproducible=True, **how)
            assert_same_bits(found, whole, (world, layout, schedule))


def on_processes(comm: Comm) -> list[Tensor]:
    inputs, _, sinks, _ = problem("causal", BF16, (4, 2), (128, 128), {})
    found = []
    for schedule, layout in (("allgather", am.Zigzag()), ("ulysses", am.Striped())):
        how = {"schedule": schedule, "sinks": sinks, "reproducible": True}
        shard = shard_results(comm, inputs, am.Causal(), layout, **how)
        cp = am.ContextParallel(comm, layout=layout)
        found += [cp.unshard(x, 2, LENGTH).cpu() for x in shard[:5]] + [comm.all_reduce(shard[5]).cpu()]
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_nccl_ranks_have_the_bits_of_one_device(world):
    """The ranks share one GPU."""
    inputs, mask, sinks, _ = problem("causal", BF16, (4, 2), (128, 128), {})
    whole = [x.cpu() for x in results(inputs, mask, sinks)]
    for found in run_processes(world, on_processes, timeout=280, backend="nccl"):
        assert_same_bits(found[:6], whole, "allgather")
        assert_same_bits(found[6:], whole, "ulysses")


def test_unseen_keys_may_hold_nan_and_keys_that_are_absent_change_no_bit():
    inputs = random_inputs(LENGTH, dtype=BF16, head_dim=64, device="cuda")
    mask = am.SlidingWindow(300)
    whole = results(inputs, mask, None)
    rows = range(LEAF + 5, LEAF + 700)
    at, start = torch.tensor(rows), rows.start - 300
    for first in (start, start - 77, 0):
        q, k, v = inputs[0][:, :, at], *(x[:, :, first : rows.stop + 90].clone() for x in inputs[1:3])
        for x in (k, v):
            x[:, :, : start - first] = torch.nan
            x[:, :, rows.stop - first :] = torch.nan
        positions = torch.arange(first, first + k.shape[2])
        part = am.attention(
            q, k, v, mask=mask, reproducible=True, return_lse=True, q_positions=at, k_positions=positions
        )  # fmt: skip
        assert_same_bits(list(part), [x[:, :, at] for x in whole[:2]], first)


def test_another_order_of_tiles_and_leaves_is_noticed(monkeypatch):
    """Faults planted: tiles that need no mask come first, and leaves are added one after another."""
    inputs = random_inputs(2 * LENGTH, heads=(2, 1), batch=1, head_dim=64, device="cuda")
    mask = am.SlidingWindow(900)
    whole = results(inputs, mask, None)
    with monkeypatch.context() as patched:
        plain = triton_forward.forward
        patched.setattr(triton_forward, "forward", lambda *args, ordered, **how: plain(*args, **how))
        with pytest.raises(AssertionError, match="out"):
            assert_same_bits(results(inputs, mask, None), whole)
    with monkeypatch.context() as patched:
        backward = triton_backward.backward
        patched.setattr(triton_backward, "backward", lambda *args, ordered, **how: backward(*args, **how))
        with pytest.raises(AssertionError, match="dq"):
            assert_same_bits(results(inputs, mask, None), whole)
    whole = results(inputs, am.Full(), None)
    with monkeypatch.context() as patched:
        patched.setattr(aligned_tiles, "total", lambda nodes, root: chained(nodes))
        patched.setattr(TreeSum, "add", lambda self, leaf, sums: self.nodes.update({Node(0, leaf): sums}))
        with pytest.raises(AssertionError, match="dk"):
            assert_same_bits(results(inputs, am.Full(), None), whole)


def chained(nodes: dict[Node, Any]) -> Any:
    """The leaves added one after another."""
    first, *others = (nodes[node] for node in sorted(nodes, key=lambda node: node.leaves.start))
    for other in others:
        first = first.add_(other)
    return first


def test_keys_with_gaps_and_float64_are_refused():
    q, k, v = random_inputs(64, dtype=BF16, device="cuda")[:3]
    at = torch.cat([torch.arange(32), torch.arange(64, 96)])
    with pytest.raises(ValueError, match="k_positions must have every key from the first to the last"):
        am.attention(q, k, v, mask=am.Full(), k_positions=at, reproducible=True)
    with pytest.raises(ValueError, match=r"its kernels take fp16, bf16 and fp32, not torch\.float64"):
        am.attention(q.double(), k.double(), v.double(), reproducible=True)


def test_memory_is_linear_in_the_length():
    """Twice the length takes at most twice the memory, and a little for a level of the tree."""
    peaks = []
    for length in (8192, 16384):
        inputs = random_inputs(length, heads=(4, 1), batch=1, dtype=BF16, head_dim=128, device="cuda")
        results(inputs, am.Causal(), None)  # compiles
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results(inputs, am.Causal(), None)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 2.4 * peaks[0], peaks


def train(comm: Comm, template: Any, steps: int) -> list[Tensor]:
    """The losses of some steps, and the parameters after them."""
    trained, device = copy.deepcopy(template).cuda(), "cuda"
    cp = am.ContextParallel(comm, reproducible=True, layout=am.Aligned(am.Zigzag(), 32))
    reduction = GradientReduction(trained, cp)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        ids = torch.randint(64, (2, 301), generator=torch.Generator().manual_seed(step)).to(device)
        loss = trained(**am.shard_inputs(cp, ids, ids)).loss
        losses.append(reduction.loss(loss))
        loss.backward()
        reduction.reduce()
        optimizer.step()
    return [torch.stack(losses).cpu(), *(weight.detach().cpu() for weight in trained.parameters())]


def train_on_processes(comm: Comm, dtype: torch.dtype, steps: int) -> list[Tensor]:
    return train(comm, small_llama(dtype), steps)


def small_llama(dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    am.register_attention()
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(config, attn_implementation="attnmesh").to(dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_training_steps_have_the_bits_of_one_rank(dtype):
    pytest.importorskip("transformers")
    alone, *_ = run_processes(1, train_on_processes, dtype, 5, timeout=280, backend="nccl")
    for world in (2, 4):
        for found in run_processes(world, train_on_processes, dtype, 5, timeout=280, backend="nccl"):
            for at, (x, y) in enumerate(zip(found, alone, strict=True)):
                assert torch.equal(x, y), (world, at)


def generate_and_score(comm: Comm, dtype: torch.dtype) -> tuple[list[int], list[float], list[float]]:
    """The tokens, their log-probabilities, and those of the trainer for the same text."""
    model = small_llama(dtype).cuda().eval()
    layout, prompt = am.Aligned(am.Zigzag(), 32), list(range(3, 60)) * 3
    generator = am.Generator(
        copy.deepcopy(model), comm=comm, cache_tokens=400, sharding=am.DecodeSharding(cp=comm.world), layout=layout,
        prefill_chunk=64 * comm.world, reproducible=True,
    )  # fmt: skip
    request = generator.submit(
        prompt, max_new_tokens=8, stop=[], logprobs=0, sampling=am.Sampling(temperature=1.0, seed=1)
    )
    tokens = list(generator.stream(request))
    cp = am.ContextParallel(comm, layout=layout, reproducible=True)
    GradientReduction(model, cp)
    ids = torch.tensor([prompt + [token.id for token in tokens]], device="cuda")
    inputs = am.shard_inputs(cp, ids, ids)
    scores = am.gather_log_probs(inputs, model(**inputs).logits).detach()[0, len(prompt) - 1 : -1]
    return [token.id for token in tokens], [token.logprob for token in tokens], scores.tolist()


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_answers_have_the_bits_of_the_trainer_at_any_number_of_ranks(dtype):
    pytest.importorskip("transformers")
    alone, *_ = run_processes(1, generate_and_score, dtype, timeout=280, backend="nccl")
    assert alone[1] == alone[2]
    for found in run_processes(2, generate_and_score, dtype, timeout=280, backend="nccl"):
        assert found == alone
