"""Recurrent layers over ranks: the error rule for results and gradients, bytes of the plan, refusals on every rank."""

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from attnmesh import Balanced, Causal, ContextParallel, Contiguous, Layout, Striped, Zigzag, run_virtual
from attnmesh.comm import Comm, recording
from attnmesh.ops.recurrent.api import scan
from attnmesh.ops.recurrent.layer import Recurrence
from attnmesh.ops.recurrent.layers import GatedDeltaRule, ShortConvolution
from attnmesh.parallel import context, recurrent
from attnmesh.plan.recurrent import ScanPlan, divided_plan, gathered_plan, halo_plan, planned_segments
from attnmesh.testing.recurrent import (
    KINDS,
    Results,
    assert_errors,
    one_process,
    over_ranks,
    packed,
    random_layer,
    random_state,
    sharded,
    to_dtype,
)
from attnmesh.trace.timeline import Span
from helpers.cases import in_turn, sweep
from helpers.processes import run_processes

LAYOUTS = {"contiguous": Contiguous(), "zigzag": Zigzag(), "balanced": Balanced(Causal())}


def fixed_plan(parts: int, layout, length, world, heads, sizes, columns, final) -> ScanPlan:
    """The plan with columns in so many parts, where a state has enough; gathered for 0."""
    segments = planned_segments(layout, length, world)
    if parts == 0:
        return gathered_plan(segments, world, heads, sizes, final)
    return divided_plan(segments, world, heads, sizes, parts if columns % parts == 0 else 1, final)


@pytest.fixture
def fix_plan(monkeypatch):
    def fix(parts: int) -> None:
        monkeypatch.setattr(recurrent, "scan_plan", partial(fixed_plan, parts))

    return fix


def check(kind: str, layout: Layout, worlds, how: str, length: int, batch: int, with_state: bool) -> None:
    layer, documents = random_layer(kind, length, batch=batch), packed(length, batch, how)
    state = random_state(layer) if with_state else None
    exact = one_process(layer, state, documents)
    single, state = to_dtype(layer, torch.float32), None if state is None else state.float()
    plain = one_process(single, state, documents)
    for world in worlds:

        def rank(comm: Comm) -> tuple[Results, dict[str, float]]:
            return over_ranks(ContextParallel(comm, layout=layout), single, state, documents, length)

        for found, sizes in run_virtual(world, rank):
            assert_errors(found, plain, exact, (kind, layout, world, how, length, batch), sizes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("parts", "layout", "world", "how", "length", "batch", "with_state"),
    [
        (1, "zigzag", 3, "rows", 37, 2, True),
        (0, "balanced", 4, "rows", 37, 2, True),
        (5, "contiguous", 2, "whole", 150, 1, False),
    ],
)
def test_results_and_gradients_are_those_of_one_process(
    kind, parts, layout, world, how, length, batch, with_state, fix_plan
):
    fix_plan(parts)
    check(kind, LAYOUTS[layout], [world], how, length, batch, with_state)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "layout", "how"), in_turn(KINDS, LAYOUTS, ["whole", "same", "rows", "same", "rows", "whole", "rows"])
)
def test_every_world_layout_and_packing(kind, layout, how, fix_plan):
    lengths = {1: 129, 2: 41, 3: 7}  # by batch; with 7, some of 8 ranks hold nothing
    for (batch, length), with_state in product(lengths.items(), (False, True)):
        for parts, worlds in ((0, (2, 5)), (1, (1, 3, 8)), (5, (3, 4))):
            fix_plan(parts)
            check(kind, LAYOUTS[layout], worlds, how, length, batch, with_state)


@pytest.mark.parametrize(
    ("kind", "layout", "world", "how", "length"),
    [
        ("gated delta rule", "zigzag", 2, "rows", 37), ("mamba2", "contiguous", 3, "whole", 20),
        sweep("lightning", "balanced", 3, "same", 70), sweep("gated delta rule", "zigzag", 5, "whole", 7),
    ],
)  # fmt: skip
def test_kernels_over_ranks(kind, layout, world, how, length, monkeypatch):
    """Their backward exchanges the gradients of states between two passes. With 7 positions, some ranks hold none."""
    pytest.importorskip("triton")
    monkeypatch.setattr(context, "use_kernels", lambda layer: True)
    check(kind, LAYOUTS[layout], [world], how, length, 1, True)


@pytest.mark.parametrize("kind", ["gated delta rule", "mamba2", "mamba1", "convolution"])
@pytest.mark.parametrize(
    ("layout", "final", "parts"),
    [
        ("zigzag", False, 1),
        ("contiguous", True, 5),
        ("balanced", True, 0),
        sweep("contiguous", False, 0),
        sweep("balanced", True, 1),
    ],
)
def test_bytes_sent_are_those_of_the_plan(kind, layout, final, parts, fix_plan):
    fix_plan(parts)
    world, length, batch = 4, 26, 2
    layer = to_dtype(random_layer(kind, length, batch=batch, heads=6), torch.bfloat16)

    def rank(comm: Comm) -> tuple[int, int]:
        cp = ContextParallel(comm, layout=LAYOUTS[layout])
        mine = sharded(cp, layer)
        mine = replace(mine, **{name: x.clone().requires_grad_() for name, x in mine._tensors().items()})
        comm.traffic.reset()
        result = cp.recurrent(mine, length=length, return_final_state=final)
        forward = comm.traffic.bytes
        sum(x.float().sum() for x in (result if final else [result])).backward()
        return forward, comm.traffic.bytes - forward

    if isinstance(layer, ShortConvolution):
        plan = halo_plan(LAYOUTS[layout], length, world, layer.weight.shape[1] - 1, final)
        planned = [
            (plan.bytes_sent(r, batch * 6 * 2), plan.bytes_sent(r, batch * 6 * 4, backward=True)) for r in range(world)
        ]
    else:
        assert isinstance(layer, Recurrence)
        columns = layer.state_shape[3]
        plan = recurrent.scan_plan(LAYOUTS[layout], length, world, 6, recurrent.segment_sizes(layer), columns, final)
        planned = [(plan.bytes_sent(r), plan.bytes_sent(r, backward=True)) for r in range(world)]
    assert run_virtual(world, rank) == planned
    assert all(sum(sent) for sent in zip(*planned, strict=True))


def test_the_last_range_is_computed_while_segments_travel(monkeypatch):
    """Forward and backward. Rank 0 holds the first and the last range of three."""
    events, here = [], threading.local()
    rows, posts, waits = GatedDeltaRule.rows, recurrent._Exchange.post, recurrent._Exchange.wait

    def logged(name: str, function=None):
        def call(*arguments):
            if here.rank == 0:
                events.append(name)
            return function(*arguments) if function else None

        return call

    def logged_rows(layer, run):
        part, name = rows(layer, run), "last" if run.start else "first"
        logged(name)()
        part.v.register_hook(logged(f"gradient of {name}"))
        return part

    monkeypatch.setattr(recurrent._Exchange, "post", logged("post", posts))
    monkeypatch.setattr(recurrent._Exchange, "wait", logged("wait", waits))
    monkeypatch.setattr(GatedDeltaRule, "rows", logged_rows)
    layer = to_dtype(random_layer("gated delta rule", 40), torch.float32)

    def rank(comm: Comm) -> list[Span]:
        here.rank = comm.rank
        mine = sharded(ContextParallel(comm), layer)
        mine = replace(mine, v=mine.v.clone().requires_grad_())
        with recording(comm) as recorder:
            out = ContextParallel(comm).recurrent(mine, length=40)
        out.sum().backward()
        return recorder.spans()

    spans = run_virtual(2, rank)[0]
    assert [span.name for span in spans if span.track == "compute"] == ["segments", "last range", "outputs"]
    assert events == ["first", "post", "last", "wait", "post", "gradient of last", "wait", "gradient of first"]


def test_ranks_without_positions_take_part_in_the_backward():
    layer = to_dtype(random_layer("gated delta rule", 2), torch.float32)

    def rank(comm: Comm) -> list[Tensor]:
        cp = ContextParallel(comm, layout=Contiguous())
        mine = sharded(cp, layer)
        mine = replace(mine, **{name: x.clone().requires_grad_() for name, x in mine._tensors().items()})
        cp.recurrent(mine, length=2).sum().backward()
        return [x.grad for x in mine._tensors().values()]

    for grads in run_virtual(4, rank):
        assert all(grad is not None for grad in grads)


@pytest.mark.parametrize("name", ["q", "g"])
def test_a_gradient_of_one_input_only(name):
    """Ranks agree on what needs a gradient, so that all of them take part in the exchanges of the backward."""
    layer = to_dtype(random_layer("gated delta rule", 13), torch.float32)

    def rank(comm: Comm) -> Tensor:
        cp = ContextParallel(comm, layout=Zigzag())
        mine = sharded(cp, layer)
        x = getattr(mine, name).clone().requires_grad_()
        out = cp.recurrent(replace(mine, **{name: x}), length=13)
        out.square().sum().backward()
        return cp.unshard(x.grad, 2, 13)

    x = getattr(layer, name).clone().requires_grad_()
    scan(replace(layer, **{name: x})).square().sum().backward()
    for found in run_virtual(3, rank):
        torch.testing.assert_close(found, x.grad)


def test_states_go_from_call_to_call():
    """A sequence in two calls over ranks, with gradients through the state between them."""
    layer = to_dtype(random_layer("mamba2", 30), torch.float32)
    dt = layer.dt.clone().requires_grad_()
    scan(replace(layer, dt=dt)).square().sum().backward()

    def rank(comm: Comm) -> Tensor:
        cp = ContextParallel(comm, layout=Zigzag())
        mine, state, loss = layer.dt.clone().requires_grad_(), None, 0.0
        for rows in (range(17), range(17, 30)):
            part = replace(layer, dt=mine).rows(rows)
            out, state = cp.recurrent(sharded(cp, part), length=len(rows), initial_state=state, return_final_state=True)
            loss = loss + out.square().sum()
        loss.backward()
        return comm.all_reduce(mine.grad)

    for found in run_virtual(3, rank):
        torch.testing.assert_close(found, dt.grad)


def _rank_of_a_process(comm: Comm) -> None:
    for kind in ("kda", "convolution"):
        layer = random_layer(kind, 23, batch=2)
        documents, state = packed(23, 2, "rows"), random_state(layer)
        exact = one_process(layer, state, documents)
        found, _ = over_ranks(ContextParallel(comm, layout=Zigzag()), layer, state, documents, 23)
        for name in exact:
            torch.testing.assert_close(found[name], exact[name])


@pytest.mark.sweep
def test_real_processes():
    run_processes(3, _rank_of_a_process)


# Refusals.

layer = GatedDeltaRule(*(x.float() for x in random_layer("gated delta rule", 4)._tensors().values()))


def refused_on_every_rank(world: int, call: Callable[[ContextParallel], object], message: str, **options) -> None:
    def rank(comm: Comm) -> None:
        cp = ContextParallel(comm, **options)
        with pytest.raises(ValueError, match=message):
            call(cp)

    run_virtual(world, rank)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cp: cp.recurrent(layer, length=9), "with length=9 under Zigzag.. rank 0 of 2 holds 5 of 9 positions"),
        (lambda cp: cp.recurrent(layer.q, length=8), "layer must be a recurrent layer"),
        (lambda cp: cp.recurrent(layer, documents=packed(9, 1, "same")), "documents must add up to the length of"),
        (lambda cp: cp.recurrent(layer, initial_state=torch.ones(2)), r"initial_state must be floating point \[1, 4"),
        (
            lambda cp: cp.recurrent(replace(layer, scale=float(cp.rank + 1))),
            "ranks disagree: scale is 1.0 on rank 0 but 2.0 on rank 1",
        ),
        (
            lambda cp: cp.recurrent(replace(layer, g=layer.g.clone().requires_grad_(cp.rank == 1))),
            "ranks disagree: gradients is",
        ),
        (lambda cp: cp.recurrent(layer, return_final_state=cp.rank == 0), "ranks disagree: return_final_state is"),
    ],
)
def test_what_is_wrong_is_refused_on_every_rank(call, message):
    refused_on_every_rank(2, call, message)


def test_striped_positions_are_refused():
    message = re.escape("layout must give ranks ranges of consecutive positions for a recurrent layer (Contiguous,")
    refused_on_every_rank(2, lambda cp: cp.recurrent(layer), message, layout=Striped())


def test_an_error_on_one_rank_is_raised_on_all():
    bad = replace(layer, beta=layer.beta[:, :1])
    refused_on_every_rank(3, lambda cp: cp.recurrent(bad if cp.rank == 1 else layer), r"beta must be .* \(on rank 1\)")
