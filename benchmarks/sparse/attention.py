"""Attention over chosen keys, and its distribution: time, speed, and how far from float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from attnmesh.cli.output import Rows
from attnmesh.ops.sparse.attention import attention_distribution, sparse_attention
from benchmarks.sparse import exact, roofline
from benchmarks.sparse.cases import Attention
from benchmarks.sparse.guard import ROUNDED, SUMMED, Verdict, judged
from benchmarks.sparse.inputs import Attended, attention_inputs, only, some_rows
from benchmarks.sparse.stage import Stage, freed

DISTRIBUTION = "attention_distribution"
FORWARD, BACKWARD, DETERMINISTIC = "forward", "backward", "backward, deterministic"


def measure_distribution(stage: Stage) -> Rows:
    """At every length."""
    return [_distribution(stage, shape) for shape in stage.sizes.lengths]


def measure_attention(stage: Stage) -> Rows:
    """Forward and backward at every length, and with few heads."""
    return [row for shape in (*stage.sizes.lengths, stage.sizes.few_heads) for row in _attention(stage, shape)]


def _distribution(stage: Stage, shape: Attention) -> dict[str, object]:
    freed(stage.device)
    x = attention_inputs(shape, stage.device, stage.dtype)
    lse = _attend(stage, shape, x)[1]
    run = partial(
        attention_distribution, x.q, x.kv, x.indices, lse, scale=x.scale, backend=stage.backend
    )  # fmt: skip
    rows = some_rows(shape.s_q, stage.device)
    verdict = judged((run()[rows], exact.distribution(x, rows, lse), SUMMED))
    ms = stage.milliseconds({DISTRIBUTION: run})[DISTRIBUTION]
    return stage.row(DISTRIBUTION, shape.heads, shape.s_kv, roofline.distribution(shape), ms, verdict)


def _attention(stage: Stage, shape: Attention) -> Rows:
    freed(stage.device)
    x = attention_inputs(shape, stage.device, stage.dtype)
    grad = torch.randn(shape.s_q, shape.heads, shape.d_v, device=stage.device, dtype=stage.dtype)
    rows = some_rows(shape.s_q, stage.device)
    forward = partial(_attend, stage, shape, x)
    backwards = {name: _backward(stage, shape, x, name == DETERMINISTIC) for name in (BACKWARD, DETERMINISTIC)}

    out, lse = forward()
    expected = exact.attention(x, rows, shape.d_v)
    verdicts = {FORWARD: judged((out[rows], expected.out, ROUNDED), (lse[rows], expected.lse, SUMMED))}
    for name, backward in backwards.items():
        verdicts[name] = _judged_backward(shape, x, rows, backward, grad)
    freed(stage.device)

    programs = {FORWARD: forward, **{name: partial(run, grad) for name, run in backwards.items()}}
    works = {FORWARD: roofline.forward(shape)}
    return [
        stage.row(name, shape.heads, shape.s_kv, works.get(name, roofline.backward(shape)), ms, verdicts[name])
        for name, ms in stage.milliseconds(programs).items()
    ]


def _attend(stage: Stage, shape: Attention, x: Attended, deterministic: bool = False) -> tuple[Tensor, ...]:
    return sparse_attention(
        x.q, x.kv, x.indices, scale=x.scale, d_v=shape.d_v, deterministic=deterministic, backend=stage.backend
    )


def _backward(
    stage: Stage, shape: Attention, x: Attended, deterministic: bool
) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """The backward alone, again and again after one forward: dq and dkv from a gradient of out."""
    leaves = x.q.detach().requires_grad_(), x.kv.detach().requires_grad_()
    out = _attend(stage, shape, x._replace(q=leaves[0], kv=leaves[1]), deterministic)[0]
    return lambda grad: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def _judged_backward(
    shape: Attention, x: Attended, rows: Tensor, backward: Callable[[Tensor], tuple[Tensor, ...]], grad: Tensor
) -> Verdict:
    """Only some rows have a gradient here: then those of all keys are theirs, and can be held against float64."""
    d_q, d_kv = backward(only(rows, grad))
    expected_q, expected_kv = exact.attention_gradients(x, rows, shape.d_v, grad)
    return judged((d_q[rows], expected_q, ROUNDED), (d_kv, expected_kv, ROUNDED))
