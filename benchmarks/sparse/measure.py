"""Sparse attention, its distribution, and the indexer's top-k and loss: time, speed, and error against float64."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Collection, Iterator
from functools import partial

import torch
from torch import Tensor

from attnmesh.cli.output import Rows
from attnmesh.ops.sparse.arguments import SparseMask, TopKIndices
from attnmesh.ops.sparse.attention import attention_distribution, sparse_attention
from attnmesh.ops.sparse.indexer import indexer_topk
from attnmesh.ops.sparse.indexer_loss import AttentionTarget, indexer_kl_loss
from benchmarks.sparse import checks as exact
from benchmarks.sparse import roofline
from benchmarks.sparse.cases import (
    Attention,
    AttentionInputs,
    Indexer,
    IndexerInputs,
    Sizes,
    attention_inputs,
    indexer_inputs,
    keep_rows,
    sample_rows,
    sizes,
)
from benchmarks.sparse.checks import ROUNDED, SUMMED, Verdict, judge, relative_error, topk_error, worst_error
from benchmarks.sparse.roofline import Peaks, Program, Runner, Work, free_memory, measure_peaks

DISTRIBUTION = "attention_distribution"
FORWARD, BACKWARD, DETERMINISTIC = "forward", "backward", "backward, deterministic"


def measure_distribution(runner: Runner) -> Rows:
    """Measure the distribution at every length."""
    return [_distribution(runner, shape) for shape in runner.sizes.lengths]


def measure_attention(runner: Runner) -> Rows:
    """Measure forward and backward at every length, and with few heads."""
    return [row for shape in (*runner.sizes.lengths, runner.sizes.few_heads) for row in _attention(runner, shape)]


def _distribution(runner: Runner, shape: Attention) -> dict[str, object]:
    free_memory(runner.device)
    x = attention_inputs(shape, runner.device, runner.dtype)
    lse = _attend(runner, shape, x)[1]
    run = partial(
        attention_distribution, x.q, x.kv, x.indices, lse, scale=x.scale, backend=runner.backend
    )  # fmt: skip
    rows = sample_rows(shape.s_q, runner.device)
    verdict = judge((run()[rows], exact.distribution(x, rows, lse), SUMMED))
    ms = runner.milliseconds({DISTRIBUTION: run})[DISTRIBUTION]
    return runner.row(DISTRIBUTION, shape.heads, shape.s_kv, roofline.distribution(shape), ms, verdict)


def _attention(runner: Runner, shape: Attention) -> Rows:
    free_memory(runner.device)
    x = attention_inputs(shape, runner.device, runner.dtype)
    grad = torch.randn(shape.s_q, shape.heads, shape.d_v, device=runner.device, dtype=runner.dtype)
    rows = sample_rows(shape.s_q, runner.device)
    forward = partial(_attend, runner, shape, x)
    backwards = {name: _backward(runner, shape, x, name == DETERMINISTIC) for name in (BACKWARD, DETERMINISTIC)}

    out, lse = forward()
    expected = exact.attention(x, rows, shape.d_v)
    verdicts = {FORWARD: judge((out[rows], expected.out, ROUNDED), (lse[rows], expected.lse, SUMMED))}
    for name, backward in backwards.items():
        verdicts[name] = _judged_backward(shape, x, rows, backward, grad)
    free_memory(runner.device)

    programs = {FORWARD: forward, **{name: partial(run, grad) for name, run in backwards.items()}}
    works = {FORWARD: roofline.forward(shape)}
    return [
        runner.row(name, shape.heads, shape.s_kv, works.get(name, roofline.backward(shape)), ms, verdicts[name])
        for name, ms in runner.milliseconds(programs).items()
    ]


def _attend(runner: Runner, shape: Attention, x: AttentionInputs, deterministic: bool = False) -> tuple[Tensor, ...]:
    return sparse_attention(
        x.q, x.kv, x.indices, scale=x.scale, d_v=shape.d_v, deterministic=deterministic, backend=runner.backend
    )


def _backward(
    runner: Runner, shape: Attention, x: AttentionInputs, deterministic: bool
) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Return the backward alone, repeatable after one forward: dq and dkv from a gradient of out."""
    leaves = x.q.detach().requires_grad_(), x.kv.detach().requires_grad_()
    out = _attend(runner, shape, x._replace(q=leaves[0], kv=leaves[1]), deterministic)[0]
    return lambda grad: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def _judged_backward(
    shape: Attention, x: AttentionInputs, rows: Tensor, backward: Callable[[Tensor], tuple[Tensor, ...]], grad: Tensor
) -> Verdict:
    """Judge a backward in which only some rows have a gradient: the gradients of all keys are then theirs."""
    d_q, d_kv = backward(keep_rows(rows, grad))
    expected_q, expected_kv = exact.attention_gradients(x, rows, shape.d_v, grad)
    return judge((d_q[rows], expected_q, ROUNDED), (d_kv, expected_kv, ROUNDED))


TOPK = {False: "indexer_topk", True: "indexer_topk, causal"}
IN_TORCH = {False: "torch", True: "torch, causal"}
_MAX_TOPK_SCORES = 2**29  # of all heads, at a time: what torch's way takes from memory


def measure_topk(runner: Runner) -> Rows:
    """Measure top-k over every number of keys, without a mask and causal (the rows are the last of the sequence)."""
    return [row for shape in runner.sizes.indexers for causal in (False, True) for row in _topk(runner, shape, causal)]


def _topk(runner: Runner, shape: Indexer, causal: bool) -> Rows:
    free_memory(runner.device)
    x = indexer_inputs(shape, runner.device, runner.dtype)
    mask = SparseMask(causal=True, q_start=shape.s_kv - shape.s_q) if causal else SparseMask()
    ends = mask.bounds(shape.s_q, shape.s_kv, shape.topk, x.iq.device).hi
    ours = partial(indexer_topk, x.iq, x.ik, x.w, shape.topk, mask=mask, backend=runner.backend)
    torchs = partial(torch_topk, x, shape.topk, ends)

    slots = ours()
    rows = sample_rows(shape.s_q, runner.device)
    scores = exact.index_scores(x, rows)
    at = torch.arange(shape.s_kv, device=runner.device)
    scores = scores.masked_fill(at >= ends[rows, None], -torch.inf)
    verdicts = {
        TOPK[causal]: judge_topk(slots, scores, rows),
        IN_TORCH[causal]: Verdict(topk_error(torchs()[1][rows], scores), "peer"),
    }
    held = sum(t.nbytes for t in x)
    least = held + sum(t.nbytes for t in slots if t is not None)
    del slots, scores
    free_memory(runner.device)

    programs: dict[str, Program] = {TOPK[causal]: ours, IN_TORCH[causal]: torchs}
    times = runner.milliseconds(programs)
    work = roofline.topk(shape, causal=causal)
    found = []
    for name, ms in times.items():
        row = runner.row(name, shape.heads, shape.s_kv, work, ms, verdicts[name]) | {
            "over_ours": ms / times[TOPK[causal]]
        }
        added = runner.added_bytes(programs[name])
        found.append(row if added is None else row | {"memory_over_io": (held + added) / least})
    return found


def judge_topk(slots: TopKIndices, scores: Tensor, rows: Tensor) -> Verdict:
    """Judge the keys chosen for these rows by exact scores, the scores returned with them, and their order."""
    assert slots.scores is not None
    chosen = slots.indices[rows]
    order = 0.0 if bool((slots.indices.diff(dim=1) > 0).all()) else torch.inf
    of_chosen = relative_error(slots.scores[rows], scores.gather(1, chosen.clamp(min=0).long()))
    return worst_error((topk_error(chosen, scores), SUMMED), (of_chosen, SUMMED), (order, SUMMED))


def torch_topk(x: IndexerInputs, topk: int, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores and indices, computed in chunks of rows with all scores in memory, in the dtype of the inputs."""
    s_q, heads, d = x.iq.shape
    s_kv = x.ik.shape[0]
    at = torch.arange(s_kv, device=x.ik.device)
    step = max(1, _MAX_TOPK_SCORES // (heads * s_kv))
    found = []
    for start in range(0, s_q, step):
        some = slice(start, start + step)
        dots = (x.iq[some].reshape(-1, d) @ x.ik.T).view(-1, heads, s_kv).relu_()
        scores = (x.w[some, None].to(dots.dtype) @ dots).squeeze(1).float()
        found.append(scores.masked_fill_(at >= ends[some, None], -torch.inf).topk(topk, 1))
    return torch.cat([best.values for best in found]), torch.cat([best.indices.int() for best in found])


Step = tuple[Tensor, Tensor, Tensor, Tensor]  # each row's loss, and the gradients by iq, ik and w


def naive_step(x: AttentionInputs, i: IndexerInputs, grad: Tensor, *, dense: bool, at_once: int) -> Step:
    """Return the loss step over the named keys or all keys, in chunks of `at_once` rows."""
    parts = []
    d_ik = torch.zeros_like(i.ik)
    for start in range(0, x.q.shape[0], at_once):
        some = slice(start, start + at_once)
        hidden = None if dense else _hidden(x.indices[some], i.ik.shape[0])
        p = _target(x, some, hidden)
        leaves = [t.detach().requires_grad_() for t in (i.iq[some], i.ik, i.w[some])]
        loss = _row_loss(IndexerInputs(*leaves), p, hidden)
        d_iq, of_keys, d_w = torch.autograd.grad(loss, leaves, grad[some])
        d_ik += of_keys
        parts.append((loss.detach(), d_iq, d_w))
    losses, d_iqs, d_ws = zip(*parts, strict=True)
    return torch.cat(losses), torch.cat(d_iqs), d_ik, torch.cat(d_ws)


def max_rows(s_q: int, run: Callable[[int], object]) -> int:
    """Return how many rows per chunk fit into memory, by halving until they do."""
    rows = s_q
    while not _fits(run, rows):
        if rows == 1:
            raise RuntimeError("not even one row of the naive computation fits into memory")
        rows = -(-rows // 2)
        torch.cuda.empty_cache()
    return rows


def _fits(run: Callable[[int], object], rows: int) -> bool:
    try:
        run(rows)
    except torch.OutOfMemoryError:
        return False
    return True


def _hidden(indices: Tensor, s_kv: int) -> Tensor:
    hidden = torch.ones(indices.shape[0], s_kv, dtype=torch.bool, device=indices.device)
    return hidden.scatter_(1, indices.long(), False)


@torch.no_grad()
def _target(x: AttentionInputs, some: slice, hidden: Tensor | None) -> Tensor:
    """[rows, s_kv]: the mean over heads of softmax."""
    q = x.q[some]
    scores = (q.flatten(0, 1) @ x.kv.T).view(q.shape[0], q.shape[1], -1).mul_(x.scale)
    if hidden is not None:
        scores.masked_fill_(hidden[:, None], -torch.inf)
    return torch.softmax(scores, -1, dtype=torch.float32).mean(1)


def _row_loss(i: IndexerInputs, p: Tensor, hidden: Tensor | None) -> Tensor:
    rows, heads, d = i.iq.shape
    dots = (i.iq.reshape(-1, d) @ i.ik.T).view(rows, heads, -1).relu()
    scores = (i.w[:, None].to(dots.dtype) @ dots).squeeze(1).float()
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    log_q = torch.log_softmax(scores, -1)
    if hidden is not None:
        log_q = log_q.masked_fill(hidden, 0.0)
    loss: Tensor = (torch.special.xlogy(p, p) - p * log_q).sum(-1)
    return loss


SPARSE, DENSE = "sparse loss", "dense loss"
_MAX_LSE_SCORES = 2**28  # of dense attention's lse, at a time


def measure_loss(runner: Runner) -> Rows:
    """Measure the loss over the named keys, as in training, and over all keys, as in warm-up."""
    shape, indexer = runner.sizes.loss
    x = attention_inputs(shape, runner.device, runner.dtype)
    i = indexer_inputs(indexer, runner.device, runner.dtype)
    lse = sparse_attention(x.q, x.kv, x.indices, scale=x.scale, d_v=shape.d_v, backend=runner.backend)[1]
    return [
        *_side_by_side(runner, x, i, lse, dense=False),
        *_side_by_side(runner, x, i, dense_lse(x), dense=True),
    ]


def _side_by_side(runner: Runner, x: AttentionInputs, i: IndexerInputs, lse: Tensor, *, dense: bool) -> Rows:
    free_memory(runner.device)
    shape, indexer = runner.sizes.loss
    rows = sample_rows(shape.s_q, runner.device)
    grad = torch.ones(shape.s_q, device=runner.device)
    step = partial(_dense_step if dense else _sparse_step, runner, x, i, lse)
    expected = exact.loss_gradients(x, i, rows, dense=dense)
    ours, naively = (DENSE, f"{DENSE}, naive") if dense else (SPARSE, f"{SPARSE}, naive")
    verdicts = {ours: judge_step(step(keep_rows(rows, grad)), expected, rows)}
    free_memory(runner.device)
    naive = partial(naive_step, x, i, dense=dense)
    fits = max_rows(shape.s_q, lambda count: naive(grad, at_once=count))
    verdicts[naively] = Verdict(relative_error(naive(grad, at_once=fits)[0][rows], expected[0]), "peer")
    del expected
    free_memory(runner.device)

    programs: dict[str, Program] = {ours: partial(step, grad), naively: partial(naive, grad, at_once=fits)}
    at_once = {ours: shape.s_q, naively: fits}
    times = runner.milliseconds(programs)
    work = (roofline.dense_loss if dense else roofline.sparse_loss)(shape, indexer)
    found = []
    for name, ms in times.items():
        row = runner.row(name, shape.heads, shape.s_kv, work, ms, verdicts[name])
        row |= {"at_once": at_once[name], "over_ours": ms / times[ours]}
        free_memory(runner.device)
        added = runner.added_bytes(programs[name])
        found.append(row if added is None else row | {"added_gb": added / 1e9})
    return found


def _sparse_step(runner: Runner, x: AttentionInputs, i: IndexerInputs, lse: Tensor, grad: Tensor) -> Step:
    target = attention_distribution(x.q, x.kv, x.indices, lse, scale=x.scale, backend=runner.backend)
    iq, ik, w = (t.detach().requires_grad_() for t in i)
    loss = indexer_kl_loss(iq, ik, w, x.indices, target, reduction="none", backend=runner.backend)
    return _differentiated(loss, iq, ik, w, grad)


def _dense_step(runner: Runner, x: AttentionInputs, i: IndexerInputs, lse: Tensor, grad: Tensor) -> Step:
    iq, ik, w = (t.detach().requires_grad_() for t in i)
    loss = indexer_kl_loss(
        iq, ik, w, None, AttentionTarget(x.q, x.kv, lse, x.scale), reduction="none", backend=runner.backend
    )  # fmt: skip
    return _differentiated(loss, iq, ik, w, grad)


def _differentiated(loss: Tensor, iq: Tensor, ik: Tensor, w: Tensor, grad: Tensor) -> Step:
    d_iq, d_ik, d_w = torch.autograd.grad(loss, (iq, ik, w), grad)
    return loss.detach(), d_iq, d_ik, d_w


def judge_step(found: Step, expected: Step, rows: Tensor) -> Verdict:
    """Judge the loss and gradients of these rows, and the gradient of all keys, to which no other row contributes."""
    loss, d_iq, d_ik, d_w = found
    return judge(
        (loss[rows], expected[0], SUMMED), (d_iq[rows], expected[1], ROUNDED),
        (d_ik, expected[2], ROUNDED), (d_w[rows], expected[3], ROUNDED),
    )  # fmt: skip


def dense_lse(x: AttentionInputs) -> Tensor:
    """Return the lse [s_q, heads] over all keys in float32, in chunks of rows."""
    keys = x.kv.float()
    step = max(1, _MAX_LSE_SCORES // (x.q.shape[1] * keys.shape[0]))
    return torch.cat([(q.float() @ keys.T * x.scale).logsumexp(-1) for q in x.q.split(step)])


class Part(enum.StrEnum):
    """What to measure."""

    DIST = "dist"
    ATTENTION = "attention"
    TOPK = "topk"
    LOSS = "loss"


CEILINGS = "peak rates of this run: a large matrix product, and a large copy (bytes read and written)"
ROOFLINE = (
    "roofline: operations, compulsory bytes, and bytes of the keys that indices name, gathered once for all heads of a "
    "query or once per 64 heads (partly from L2, so not a bound); ms at the peak rates"
)
_METHOD = (
    "uniformly random distinct indices in random order; share_of_bound: the larger bound over the time; error: "
    "relative, of a few rows against float64"
)
DIST = f"attention_distribution, all heads summed ({_METHOD})"
ATTENTION = f"sparse_attention ({_METHOD})"
TOPK_TITLE = (
    "indexer_topk and torch: all scores in chunks of rows and torch.topk, in the dtype of the inputs (causal: the rows "
    "are the last of the sequence); memory_over_io: peak memory with inputs over that of inputs and outputs"
)
LOSS = (
    "the indexer's whole loss step (attention distribution, forward and backward of the loss) and the naive one "
    "with all scores in memory (`at_once`: rows per chunk, as many as fit); added_gb: peak memory above the inputs"
)
_TITLES: dict[Part, tuple[str, Callable[[Runner], Rows]]] = {
    Part.DIST: (DIST, measure_distribution),
    Part.ATTENTION: (ATTENTION, measure_attention),
    Part.TOPK: (TOPK_TITLE, measure_topk),
    Part.LOSS: (LOSS, measure_loss),
}
_ABSOLUTE = re.compile(r"(^|_)(ms|tflops|tb_per_s)$")


def measure_sparse(device: str, parts: Collection[Part], *, quick: bool) -> Iterator[tuple[str, Rows]]:
    """Yield titles and rows as they are measured; on a CPU only ratios."""
    for title, rows in _measured(device, parts, sizes(device, quick)):
        yield title, rows if device == "cuda" else _ratios(rows)


def _measured(device: str, parts: Collection[Part], given: Sizes) -> Iterator[tuple[str, Rows]]:
    peaks = measure_peaks(device, given)
    if device == "cuda":
        yield CEILINGS, [dict(peaks._asdict())]
    yield ROOFLINE, roofline_rows(given, parts, peaks)
    runner = Runner(device, given, peaks)
    for part, (title, measure) in _TITLES.items():
        if part in parts:
            free_memory(device)
            yield title, measure(runner)


def roofline_rows(given: Sizes, parts: Collection[Part], peaks: Peaks) -> Rows:
    """Return the work of every operation and the least time for it."""
    return [
        {
            "operation": operation, "s_q": s_q, "heads": heads, "s_kv": s_kv, "tflop": work.flops / 1e12,
            "flop_ms": peaks.operations_ms(work),
            "gb": work.bytes / 1e9, "bytes_ms": peaks.bytes_ms(work.bytes),
            "gather_gb": work.gather / 1e9, "gather_ms": peaks.bytes_ms(work.gather),
            "gather64_gb": work.gather_64 / 1e9, "gather64_ms": peaks.bytes_ms(work.gather_64),
        }
        for operation, s_q, heads, s_kv, work in _works(given, parts)
    ]  # fmt: skip


def wrong_rows(rows: Rows) -> Rows:
    """Return the rows whose results are wrong."""
    return [row for row in rows if row.get("verdict") == "WRONG"]


def _works(given: Sizes, parts: Collection[Part]) -> Iterator[tuple[str, int, int, int, Work]]:
    if Part.DIST in parts:
        for x in given.lengths:
            yield DISTRIBUTION, x.s_q, x.heads, x.s_kv, roofline.distribution(x)
    if Part.ATTENTION in parts:
        for x in (*given.lengths, given.few_heads):
            yield FORWARD, x.s_q, x.heads, x.s_kv, roofline.forward(x)
            yield BACKWARD, x.s_q, x.heads, x.s_kv, roofline.backward(x)
    if Part.TOPK in parts:
        for i in given.indexers:
            for causal, name in TOPK.items():
                yield name, i.s_q, i.heads, i.s_kv, roofline.topk(i, causal=causal)
    if Part.LOSS in parts:
        x, i = given.loss
        yield SPARSE, x.s_q, x.heads, x.s_kv, roofline.sparse_loss(x, i)
        yield DENSE, x.s_q, x.heads, x.s_kv, roofline.dense_loss(x, i)


def _ratios(rows: Rows) -> Rows:
    """Return the rows without times and rates: at small sizes on a shared machine only ratios are meaningful."""
    return [{name: value for name, value in row.items() if not _ABSOLUTE.search(name)} for row in rows]
