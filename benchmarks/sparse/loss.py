"""The indexer's whole loss step, where attention looks and forward and backward of the loss, beside the naive one."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from attnmesh.cli.output import Rows
from attnmesh.ops.sparse.attention import attention_distribution, sparse_attention
from attnmesh.ops.sparse.indexer_loss import indexer_kl_loss
from benchmarks.sparse import exact, roofline
from benchmarks.sparse.guard import ROUNDED, SUMMED, Verdict, judged, relative_error
from benchmarks.sparse.inputs import Attended, Indexed, attention_inputs, indexer_inputs, only, some_rows
from benchmarks.sparse.naive import Step, naive_step, rows_that_fit
from benchmarks.sparse.stage import Program, Stage, freed

SPARSE, DENSE = "sparse loss", "dense loss"
_MOST_SCORES = 2**28  # of dense attention's lse, at a time


def measure_loss(stage: Stage) -> Rows:
    """Over the slots, as in training, and over all keys, as in the warm-up."""
    shape, indexer = stage.sizes.loss
    x = attention_inputs(shape, stage.device, stage.dtype)
    i = indexer_inputs(indexer, stage.device, stage.dtype)
    lse = sparse_attention(x.q, x.kv, x.indices, scale=x.scale, d_v=shape.d_v, backend=stage.backend)[1]
    return [
        *_side_by_side(stage, x, i, lse, dense=False),
        *_side_by_side(stage, x, i, dense_lse(x), dense=True),
    ]


def _side_by_side(stage: Stage, x: Attended, i: Indexed, lse: Tensor, *, dense: bool) -> Rows:
    freed(stage.device)
    shape, indexer = stage.sizes.loss
    rows = some_rows(shape.s_q, stage.device)
    grad = torch.ones(shape.s_q, device=stage.device)
    step = partial(_dense_step if dense else _sparse_step, stage, x, i, lse)
    expected = exact.loss_gradients(x, i, rows, dense=dense)
    ours, naively = (DENSE, f"{DENSE}, naive") if dense else (SPARSE, f"{SPARSE}, naive")
    verdicts = {ours: judged_step(step(only(rows, grad)), expected, rows)}
    freed(stage.device)
    naive = partial(naive_step, x, i, dense=dense)
    fits = rows_that_fit(shape.s_q, lambda count: naive(grad, at_once=count))
    verdicts[naively] = Verdict(relative_error(naive(grad, at_once=fits)[0][rows], expected[0]), "peer")
    del expected
    freed(stage.device)

    programs: dict[str, Program] = {ours: partial(step, grad), naively: partial(naive, grad, at_once=fits)}
    at_once = {ours: shape.s_q, naively: fits}
    times = stage.milliseconds(programs)
    work = (roofline.dense_loss if dense else roofline.sparse_loss)(shape, indexer)
    found = []
    for name, ms in times.items():
        row = stage.row(name, shape.heads, shape.s_kv, work, ms, verdicts[name])
        row |= {"at_once": at_once[name], "over_ours": ms / times[ours]}
        freed(stage.device)
        added = stage.added_bytes(programs[name])
        found.append(row if added is None else row | {"added_gb": added / 1e9})
    return found


def _sparse_step(stage: Stage, x: Attended, i: Indexed, lse: Tensor, grad: Tensor) -> Step:
    target = attention_distribution(x.q, x.kv, x.indices, lse, scale=x.scale, backend=stage.backend)
    iq, ik, w = (t.detach().requires_grad_() for t in i)
    loss = indexer_kl_loss(iq, ik, w, x.indices, target, reduction="none", backend=stage.backend)
    return _differentiated(loss, iq, ik, w, grad)


def _dense_step(stage: Stage, x: Attended, i: Indexed, lse: Tensor, grad: Tensor) -> Step:
    iq, ik, w = (t.detach().requires_grad_() for t in i)
    loss = indexer_kl_loss(
        iq, ik, w, q=x.q, k=x.kv, lse=lse, attn_scale=x.scale, mode="dense", reduction="none", backend=stage.backend
    )  # fmt: skip
    return _differentiated(loss, iq, ik, w, grad)


def _differentiated(loss: Tensor, iq: Tensor, ik: Tensor, w: Tensor, grad: Tensor) -> Step:
    d_iq, d_ik, d_w = torch.autograd.grad(loss, (iq, ik, w), grad)
    return loss.detach(), d_iq, d_ik, d_w


def judged_step(found: Step, expected: Step, rows: Tensor) -> Verdict:
    """The rows' loss and gradients, and that of all keys, to which no other row gave."""
    loss, d_iq, d_ik, d_w = found
    return judged(
        (loss[rows], expected[0], SUMMED), (d_iq[rows], expected[1], ROUNDED),
        (d_ik, expected[2], ROUNDED), (d_w[rows], expected[3], ROUNDED),
    )  # fmt: skip


def dense_lse(x: Attended) -> Tensor:
    """[s_q, heads] over all keys, in float32, some rows at a time."""
    keys = x.kv.float()
    step = max(1, _MOST_SCORES // (x.q.shape[1] * keys.shape[0]))
    return torch.cat([(q.float() @ keys.T * x.scale).logsumexp(-1) for q in x.q.split(step)])
