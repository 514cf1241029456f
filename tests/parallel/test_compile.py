"""`torch.compile`: a layer with attention over ranks is one graph, and says what it says uncompiled."""

import gc
import math
import shutil
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from attnmesh import (
    Causal,
    ContextParallel,
    Contiguous,
    Documents,
    Full,
    Layout,
    Mask,
    SlidingWindow,
    SparseParallel,
    Striped,
    Zigzag,
    run_virtual,
)
from attnmesh.comm import Comm, SoloComm
from attnmesh.core import masks
from attnmesh.core.layouts import Balanced, Joint
from attnmesh.core.mask_encoding import _KINDS, decode, encode
from attnmesh.core.masks import BlockCausal, Chunked, Global, Padding, PerSequence, Prefix, Slices
from attnmesh.parallel import operator
from attnmesh.plan.shards import SCHEDULES
from attnmesh.testing.attention import assert_attention_close, forward_backward, random_inputs
from helpers.cases import MASKS, first, make_mask, sweep
from helpers.processes import run_processes

WIDTH, HEADS, KV_HEADS = 32, 4, 2


class Layer(nn.Module):
    """A transformer layer, grouped-query heads, sinks and all; with `lse` it has a say in the output and a gradient."""

    def __init__(self, cp: ContextParallel) -> None:
        super().__init__()
        self.cp = cp
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, WIDTH * (HEADS + 2 * KV_HEADS) // HEADS, bias=False)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.gather = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(
        self, x: Tensor, mask: Mask, length: int | None = None, scale: float | None = None, lse: bool = True
    ) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        call = {"mask": mask, "length": length, "scale": scale, "sinks": self.sinks}
        if lse:
            out, weight = self.cp.attention(q, k, v, **call, return_lse=True)
            out = out * weight.unsqueeze(-1).sigmoid()
        else:
            out = self.cp.attention(q, k, v, **call)
        x = x + self.gather(out.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def layer(cp: ContextParallel) -> Layer:
    torch.manual_seed(0)
    return Layer(cp)


def results(layer: Layer, run: Callable[..., Tensor], x: Tensor, *call: object) -> dict[str, Tensor]:
    """The output and every gradient of `run`, which is the layer or the layer compiled."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = run(x, *call)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return {"y": y.detach(), "x": x.grad, **{name: p.grad.clone() for name, p in layer.named_parameters()}}


def assert_same(layer: Layer, compiled: Callable[..., Tensor], x: Tensor, *call: object) -> None:
    expected, found = results(layer, layer, x, *call), results(layer, compiled, x, *call)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "name",
    first(1, ["causal", "all three", *(sweep(name) for name in ("full", "window"))]),
)
def test_a_layer_is_one_graph_with_the_same_results(name):
    one = layer(ContextParallel())
    compiled = torch.compile(one, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 24, WIDTH)
    assert_same(one, compiled, x, make_mask(name, 24), 24, 0.7)


@pytest.mark.sweep
def test_another_mask_is_never_mistaken_for_the_first():
    one, x = layer(ContextParallel()), torch.randn(1, 20, WIDTH)
    compiled = torch.compile(one, backend="aot_eager", fullgraph=True)
    masks = [Causal(), Full(), SlidingWindow(3), SlidingWindow(5), SlidingWindow(3, 5), Causal() & SlidingWindow(3)]
    masks += [Documents([8, 12]), Documents([12, 8]), Documents([4, 4, 12]), Causal() & Documents([12, 8])]
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=len(masks)):
        for mask in [*masks, *masks]:
            torch.testing.assert_close(compiled(x, mask), one(x, mask))


def test_masks_may_be_made_and_joined_inside_the_graph():
    cp = ContextParallel()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        mask = Causal() & (Global(2) | SlidingWindow(4)) & Documents([q.shape[2] - 3, 3])
        return cp.attention(q, k, v, mask=mask, return_lse=True)

    inputs = random_inputs(19)
    found = forward_backward(torch.compile(attend, backend="aot_eager", fullgraph=True), inputs)
    assert_attention_close(found, inputs, Causal() & (Global(2) | SlidingWindow(4)) & Documents([16, 3]))


NEW_MASKS = [
    Causal() & (Global(3) | SlidingWindow(5)),
    PerSequence([Causal(), Causal() & Documents([9, 10])]),
    Slices([((0, 10), (0, 10), "causal"), (range(10, 19), (0, 19), "full")]),
    Global(2, both=True) | SlidingWindow(3, 3),
    Prefix(9), Chunked(4), BlockCausal(5), Documents([10, 9], prefixes=[3, 2]),
    Causal() & Padding([15, 19]), Causal() & Padding([15, 19], side="left", length=19),
]  # fmt: skip


@pytest.mark.parametrize("mask", [*NEW_MASKS[:1], *(sweep(m) for m in NEW_MASKS[1:])])
def test_score_terms_and_every_kind_of_mask_are_one_graph(mask):
    cp = ContextParallel()
    inputs, sinks = random_inputs(19, value_dim=24), torch.linspace(-1, 1, 4)
    more = {"softcap": 2.0, "alibi_slopes": torch.linspace(0.1, 0.5, 4)}

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return cp.attention(q, k, v, mask=mask, sinks=sinks, return_lse=True, **more)

    found = forward_backward(torch.compile(attend, backend="aot_eager", fullgraph=True), inputs, sinks)
    assert_attention_close(found, inputs, mask, sinks=sinks, **more)


def test_an_equal_mask_or_another_context_does_not_recompile():
    counter = CompileCounterWithBackend("aot_eager")
    one, x = layer(ContextParallel()), torch.randn(1, 20, WIDTH)
    compiled = torch.compile(one, backend=counter, fullgraph=True)
    for _ in range(2):
        assert_same(one, compiled, x, Causal() & Documents([8, 12]))
        one.cp = ContextParallel(layout=Striped())
    assert counter.frame_count == 1


@pytest.mark.sweep
def test_the_graph_for_many_windows_and_lengths_is_the_same():
    counter = CompileCounterWithBackend("aot_eager")
    one = layer(ContextParallel())
    compiled = torch.compile(one, backend=counter, fullgraph=True)
    for n in (20, 23, 29):
        assert_same(one, compiled, torch.randn(1, n, WIDTH), SlidingWindow(n // 3), n)
    assert counter.frame_count == 2  # one for the first numbers, one for any


@pytest.mark.sweep
def test_dynamic_shapes():
    counter = CompileCounterWithBackend("aot_eager")
    one = layer(ContextParallel())
    compiled = torch.compile(one, backend=counter, fullgraph=True, dynamic=True)
    for n in (16, 21):
        assert_same(one, compiled, torch.randn(2, n, WIDTH), Causal())
    assert counter.frame_count == 1


@pytest.mark.parametrize("needed", [(True, False, False), sweep((False, True, True)), sweep((False,) * 3)])
def test_only_the_needed_gradients(needed):
    cp, inputs = ContextParallel(), random_inputs(18)
    whole = forward_backward(lambda q, k, v: cp.attention(q, k, v, return_lse=True), inputs)
    compiled = torch.compile(lambda q, k, v: cp.attention(q, k, v), backend="aot_eager", fullgraph=True)
    q, k, v = (x.clone().requires_grad_(need) for x, need in zip(inputs, needed, strict=False))
    out = compiled(q, k, v)
    torch.testing.assert_close(out.detach(), whole[0])
    assert out.requires_grad == any(needed)
    if any(needed):
        expected = torch.autograd.grad(
            cp.attention(q, k, v), [x for x in (q, k, v) if x.requires_grad], inputs[3], materialize_grads=True
        )
        out.backward(inputs[3])
        found = [x.grad for x in (q, k, v)]
        assert [x is not None for x in found] == list(needed)
        for x, y in zip((x for x in found if x is not None), expected, strict=True):
            torch.testing.assert_close(x, y)


def test_wrong_arguments_raise_when_the_graph_runs():
    cp = ContextParallel()
    compiled = torch.compile(cp.attention, backend="aot_eager", fullgraph=True)
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(ValueError, match=r"under Zigzag.* holds 9 of 9 positions, but its shard has 8"):
        compiled(q, q, q, length=9)
    with pytest.raises(ValueError, match="add up to the sequence length 8"):
        compiled(q, q, q, mask=Documents([3]))


def test_cross_attention():
    cp = ContextParallel()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return cp.attention(q, k, v, mask=Full(), key_length=29, key_layout=Striped(), return_lse=True)

    inputs = random_inputs(18, 29)
    assert_attention_close(
        forward_backward(torch.compile(attend, backend="aot_eager", fullgraph=True), inputs), inputs, Full()
    )


# Encoding of masks and layouts.


@pytest.mark.parametrize("mask", [*(make_mask(name, 40) for name in MASKS), *NEW_MASKS], ids=str)
def test_masks_survive_encoding(mask):
    found = decode(encode(mask))
    assert found == mask
    assert str(found) == str(mask)  # ranks compare it
    assert hash(found) == hash(mask)


@pytest.mark.parametrize(
    "layout",
    [
        *(Contiguous(), Striped(), Zigzag(), Zigzag(3), Zigzag((2, 0, 1))),
        *(Balanced(Causal() & Documents([3, 9])), Joint((8, Contiguous()), (4, Zigzag(2)))),
    ],
)
def test_layouts_survive_encoding(layout):
    assert decode(encode(layout)) == layout


def test_every_mask_and_layout_can_be_encoded():
    known = {kind for kind in (*subclasses(Mask), *subclasses(Layout)) if kind.__module__.startswith("attnmesh")}
    assert {kind for kind in known if kind.__name__ in masks.__all__ or issubclass(kind, Layout)} == set(_KINDS)


def subclasses(kind: type) -> list[type]:
    return [below for one in kind.__subclasses__() for below in (one, *subclasses(one))]


class Everything(Causal):
    """Looks like a mask that is known."""


def test_a_custom_mask_is_rejected():
    with pytest.raises(ValueError, match="masks and layouts of attnmesh only, got Everything"):
        encode(Everything())


# The operators themselves.


@pytest.mark.parametrize("dtype", [sweep(torch.float32), torch.bfloat16])
def test_operators_pass_opcheck(dtype):
    cp, inputs = ContextParallel(), random_inputs(18, dtype=dtype)
    q, k, v, sinks = (x.clone().requires_grad_() for x in (*inputs[:3], torch.randn(4)))
    call = (cp._handle, None, encode(Causal()), 0.3, None, 18, None, None, True)
    # A kernel may add up in another order when it runs again.
    close = {"atol": 1e-5, "rtol": 1e-5 if dtype != torch.bfloat16 else 2e-2}
    torch.library.opcheck(torch.ops.attnmesh.context_attention, (q, k, v, sinks, None, *call, [True] * 4), **close)
    utils = {"test_utils": ("test_schema", "test_faketensor"), **close}  # the rest does not depend on the arguments
    strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    torch.library.opcheck(torch.ops.attnmesh.context_attention, (*strided, None, None, *call, [False] * 4), **utils)

    strided += [sinks.detach(), None]
    out, lse = cp.attention(*strided[:3], sinks=strided[3], return_lse=True)
    every, one, last = [True] * 4, [False, True, False, False], [False, False, False, True]
    torch.library.opcheck(torch.ops.attnmesh.context_attention, (*strided, *call[:-1], False, [False] * 4), **utils)
    for *grads, needed in ((*inputs[3:], every), (inputs[3], None, one), (None, inputs[4], every), (*inputs[3:], last)):
        arguments = (*strided, out, lse, *grads, *call, needed)
        torch.library.opcheck(torch.ops.attnmesh.context_attention_backward, arguments, **utils)


def test_only_a_backward_keeps_its_context_alive():
    def attend(cp: ContextParallel, q: Tensor) -> Tensor:
        return cp.attention(q, q, q)

    gc.collect()
    before = len(operator._contexts)
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    out = torch.compile(attend, backend="aot_eager", fullgraph=True)(ContextParallel(), q)
    gc.collect()
    assert len(operator._contexts) == before + 1
    (found,) = torch.autograd.grad(out.sum(), q)
    (expected,) = torch.autograd.grad(attend(ContextParallel(), q).sum(), q)
    torch.testing.assert_close(found, expected)
    del out
    gc.collect()
    assert len(operator._contexts) == before


def test_a_deleted_context_raises():
    number = int(ContextParallel()._handle)
    gc.collect()
    with pytest.raises(RuntimeError, match="the ContextParallel of a compiled attention was deleted"):
        operator._context(torch.tensor(number))


# More ranks than one.


def compiled_on(comm: Comm, mask: str, contexts: Sequence[dict[str, object]], *, lse: bool) -> int:
    """A layer over ranks whose shards differ in length, compiled, against the same layer on one rank, uncompiled.

    Every one of the contexts is served by the same graph. Returns how many graphs were compiled on the way.
    """
    length = 27
    counter = CompileCounterWithBackend("aot_eager")
    shared, alone = layer(ContextParallel(comm)), layer(ContextParallel(SoloComm()))
    compiled = torch.compile(shared, backend=counter, fullgraph=True)
    whole = torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(1))
    weight = torch.linspace(-1, 1, whole.numel()).view_as(whole)
    due = whole.clone().requires_grad_()
    call = make_mask(mask, length), length, 0.4, lse
    expected = alone(due, *call)
    (expected * weight).sum().backward()
    for options in contexts:
        cp = shared.cp = ContextParallel(comm, **options)
        x = cp.shard(whole, 1).clone().requires_grad_()
        shared.zero_grad()
        y = compiled(x, *call)
        (y * cp.shard(weight, 1)).sum().backward()
        torch.testing.assert_close(cp.unshard(y, 1, length), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(x.grad, cp.shard(due.grad, 1), rtol=1e-4, atol=1e-5)
        for found, known in zip(shared.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(comm.all_reduce(found.grad), known.grad, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(cp.unshard(compiled(x, *call), 1, length), expected, rtol=1e-4, atol=1e-5)
    return counter.frame_count


@pytest.mark.sweep
def test_every_schedule_on_virtual_ranks():
    def rank(comm: Comm) -> int:
        contexts = [{"schedule": schedule, "layout": Contiguous(), "ranks_per_node": 2} for schedule in SCHEDULES]
        zigzag = {"schedule": "ring", "layout": Zigzag()}
        return compiled_on(comm, "causal & documents", [zigzag, *contexts, {"schedule": "ulysses"}], lse=False)

    assert run_virtual(4, rank) == [2] * 4  # one with gradients and one without


def on_processes(comm: Comm) -> None:
    """In one run: a new process spends seconds importing what compiles."""
    compiled_on(comm, "all three", [{}, {"layout": Striped(), "schedule": "ulysses"}], lse=True)
    ranks_that_need_different_gradients_raise(comm)


def ranks_that_need_different_gradients_raise(comm: Comm) -> None:
    q, k = torch.randn(1, 2, 8, 16, requires_grad=comm.rank == 0), torch.randn(1, 2, 8, 16)
    with pytest.raises(ValueError, match="ranks disagree: gradient of q is True on rank 0 but False on rank 1"):
        torch.compile(ContextParallel(comm).attention, backend="aot_eager", fullgraph=True)(q, k, k)


@pytest.mark.sweep
def test_a_layer_on_two_processes():
    run_processes(2, on_processes)


@pytest.mark.sweep
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler")
def test_a_layer_through_inductor():
    one = layer(ContextParallel())
    compiled = torch.compile(one, fullgraph=True)
    assert_same(one, compiled, torch.randn(2, 24, WIDTH), Causal(), None, 1 / math.sqrt(3))


@pytest.mark.sweep
def test_a_sparse_context_may_be_constructed_in_a_compiled_function(one_rank_group):
    def attend(q: Tensor) -> Tensor:
        indices = torch.arange(6, dtype=torch.int32).expand(6, 6)
        return SparseParallel().sparse_attention(q, q[:, 0], indices, scale=0.5)[0]

    q = torch.randn(6, 2, 16)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(attend, backend="eager")(q), attend(q))


@pytest.fixture
def one_rank_group():
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_context_may_be_constructed_in_a_compiled_function(one_rank_group):
    def attend(q: Tensor) -> Tensor:
        return ContextParallel(schedule="ring").attention(q, q, q) * 2

    q = torch.randn(1, 2, 6, 16)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(attend, backend="eager")(q), attend(q))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="constructed outside of a compiled graph"):
        torch.compile(attend, backend="eager", fullgraph=True)(q)
