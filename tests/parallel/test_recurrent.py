"""Recurrent layers over ranks: the error rule for results and gradients, bytes of the plan, refusals on every rank."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from attnmesh import Balanced, Causal, ContextParallel, Contiguous, Layout, Striped, Zigzag, run_virtual
from attnmesh.comm import Comm
from attnmesh.ops.recurrent.api import scan
from attnmesh.ops.recurrent.convolution import ShortConvolution
from attnmesh.ops.recurrent.delta_rules import GatedDeltaRule
from attnmesh.ops.recurrent.layer import Recurrence, RecurrentLayer
from attnmesh.plan.recurrent import SegmentSizes, halo_plan, scan_plan
from helpers.cases import in_turn, sweep
from helpers.processes import run_processes
from helpers.recurrent import (
    KINDS,
    Results,
    assert_errors,
    has_positions,
    packed,
    random_layer,
    random_state,
    to_dtype,
    weights_like,
    with_grads,
)

LAYOUTS = {"contiguous": Contiguous(), "zigzag": Zigzag(), "balanced": Balanced(Causal())}


def sharded(cp: ContextParallel, layer: RecurrentLayer) -> RecurrentLayer:
    return replace(layer, **{n: cp.shard(x, 2) for n, x in layer._tensors().items() if has_positions(layer, n)})


def over_ranks(
    cp: ContextParallel, layer: RecurrentLayer, state: Tensor | None, documents, length: int
) -> tuple[Results, dict[str, float]]:
    """The results of the whole sequence, on every rank, and the norms of all contributions to those that are sums.

    The losses of all ranks are summed.
    """
    mine = sharded(cp, layer)
    names = [name for name, x in layer._tensors().items() if has_positions(layer, name)]
    weights = weights_like(getattr(layer, layer._OUTPUT), 2)

    def run(mine, state):
        out, final = cp.recurrent(
            mine, length=length, documents=documents, initial_state=state, return_final_state=True
        )
        # `with_grads` multiplies with weights of its own: exchange them for this rank's share of the whole loss.
        part = weights_like(final, 3) * (1.0 if cp.rank == cp.world - 1 else 0.0)
        return Weighted.apply(out, cp.shard(weights, 2)), Weighted.apply(final, part)

    found = with_grads(mine, state, run)
    whole = {"out", *(f"gradient of {name}" for name in names)}
    sums = [name for name in found if name not in whole and name != "final state"]
    sizes = {name: float(cp.comm.all_reduce(found[name].double().norm())) for name in sums}
    results = {
        name: cp.unshard(x, 2, length) if name in whole else cp.comm.all_reduce(x.double()) if name in sums else x
        for name, x in found.items()
    }
    return results, sizes


class Weighted(torch.autograd.Function):
    """The identity, with a given gradient."""

    @staticmethod
    def forward(ctx, x, grad):
        ctx.save_for_backward(grad)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, _):
        return ctx.saved_tensors[0], None


def one_process(layer: RecurrentLayer, state: Tensor | None, documents) -> Results:
    def run(layer, state):
        return scan(layer, documents=documents, initial_state=state, return_final_state=True)

    return with_grads(layer, state, run)


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
    ("layout", "world", "how", "length", "batch", "with_state"),
    [("zigzag", 3, "rows", 37, 2, True), ("contiguous", 2, "whole", 150, 1, False)],
)
def test_results_and_gradients_are_those_of_one_process(kind, layout, world, how, length, batch, with_state):
    check(kind, LAYOUTS[layout], [world], how, length, batch, with_state)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "layout", "how"), in_turn(KINDS, LAYOUTS, ["whole", "same", "rows", "same", "rows", "whole", "rows"])
)
def test_every_world_layout_and_packing(kind, layout, how):
    lengths = {1: 129, 2: 41, 3: 7}  # by batch; with 7, some of 8 ranks hold nothing
    for (batch, length), with_state in product(lengths.items(), (False, True)):
        check(kind, LAYOUTS[layout], (1, 2, 3, 5, 8), how, length, batch, with_state)


@pytest.mark.parametrize("kind", ["gated delta rule", "mamba2", "mamba1", "convolution"])
@pytest.mark.parametrize(
    ("layout", "final"), [("zigzag", False), ("zigzag", True), sweep("contiguous", False), sweep("balanced", True)]
)
def test_bytes_sent_are_those_of_the_plan(kind, layout, final):
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
        plan = scan_plan(LAYOUTS[layout], length, world, 6, final)
        sizes = SegmentSizes(*(torch.Size(s).numel() // 6 for s in (layer._transition_shape(), layer.state_shape)))
        planned = [(plan.bytes_sent(r, sizes, 4), plan.bytes_sent(r, sizes, 4, backward=True)) for r in range(world)]
    assert run_virtual(world, rank) == planned
    assert all(sum(sent) for sent in zip(*planned, strict=True))


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
