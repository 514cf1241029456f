"""Ring context parallelism on virtual ranks: exact, repeatable, lean, and as much traffic as the plan says."""

import random
from functools import partial

import pytest
import torch
from torch import Tensor

from attnmesh import Causal, ContextParallel, Contiguous, Full, SlidingWindow, Striped, Zigzag, attention, run_virtual
from attnmesh.comm import Comm
from attnmesh.comm.base import Finished, Pending
from attnmesh.ops.dense import aten
from attnmesh.ops.dense.dispatch import choose_fused, choose_fused_backward
from attnmesh.parallel import ring
from attnmesh.parallel.executor import copy_rows
from attnmesh.plan.ring import Joined, ring_plan
from attnmesh.plan.shards import shards
from attnmesh.testing.attention import (
    NAMES,
    assert_attention_close,
    forward_backward,
    random_inputs,
    reference_results,
    shard_results,
    virtual_results,
)
from attnmesh.testing.errors import relative_error
from helpers.cases import LAYOUTS, first, make_mask, sweep
from helpers.memory import peak_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(layout: str, mask: str, world: int, length: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = random_inputs(length, heads=heads, dtype=dtype, seed=length + world)
    mask = make_mask(mask, length)
    assert_attention_close(virtual_results(world, inputs, mask, LAYOUTS[layout]), inputs, mask)


# Exact.


def test_every_length_up_to_twice_the_world_and_more():
    for length in range(14):
        check(list(LAYOUTS)[length % len(LAYOUTS)], "causal", 4, length, (2, 1), torch.float32)


def test_a_scale_of_ones_own_goes_around():
    inputs = random_inputs(21)
    found = virtual_results(3, inputs, Causal(), Striped(), scale=0.7)
    assert_attention_close(found, inputs, Causal(), scale=0.7)


@pytest.mark.parametrize(("layout", "mask"), [(Zigzag(), Causal()), sweep(Contiguous(), SlidingWindow(5, 1))])
def test_triton_kernels_go_around(layout, mask, device):
    inputs = random_inputs(19, batch=1, heads=(2, 1), device=device)
    assert_attention_close(virtual_results(3, inputs, mask, layout, backend="triton"), inputs, mask)


@pytest.fixture
def latents(monkeypatch):
    """Emulates the kernel for latents, which reads only k. Returns a function that makes shards of q, k and v."""
    pytest.importorskip("triton")
    from attnmesh.ops.dense import gluon, gluon_latent, triton_forward

    def forward(q, k, v, **options):
        return triton_forward.forward(q, k, k[..., :512], **options)

    monkeypatch.setattr(gluon, "is_hopper", lambda device: True)
    monkeypatch.setattr(gluon_latent, "forward", forward)
    monkeypatch.setattr(gluon_latent, "_LEAST_FILLED", 0.0)
    q, k = torch.randn(1, 1, 8, 576).half(), torch.randn(1, 1, 8, 576).half()
    apart = torch.randn(1, 1, 8, 512).half()

    def make(cp: ContextParallel, shared: bool) -> list[Tensor]:
        rows, keys = cp.shard(q, 2), cp.shard(k, 2)
        return [rows, keys, keys[..., :512] if shared else cp.shard(apart, 2)]

    return make


def test_a_kernel_that_reads_only_k_is_not_kept_for_values_of_their_own(latents):
    def rank(comm: Comm) -> None:
        cp = ContextParallel(comm, layout=Contiguous(), schedule="ring", backend="gluon")
        attend = partial(cp.attention, mask=Causal(), scale=0.05)
        for _ in range(2):
            q, k, v = latents(cp, shared=True)
            out = cp.unshard(attend(q, k, v), 2, length=8)
        expected = attention(*(cp.unshard(x, 2, length=8).double() for x in (q, k, v)), mask=Causal(), scale=0.05)
        assert relative_error(out, expected) < 1e-3
        with pytest.raises(ValueError, match="values must be the first 512 features of the keys"):
            attend(*latents(cp, shared=False))

    run_virtual(2, rank)


def test_ranks_agree_on_whether_v_is_a_view_of_k(latents):
    def rank(comm: Comm) -> None:
        cp = ContextParallel(comm, layout=Contiguous(), schedule="ring")
        with pytest.raises(ValueError, match="v is a view of k"):
            cp.attention(*latents(cp, shared=comm.rank == 0), mask=Causal(), scale=0.05, length=8)

    run_virtual(2, rank)
    run_virtual(9, rank)  # one has no keys


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_without_keys_agree_on_whether_v_is_a_view_of_k(latents, shared):
    def rank(comm: Comm) -> None:
        cp = ContextParallel(comm, layout=Contiguous(), schedule="ring")
        q, k, v = latents(cp, shared=True)
        if not shared:  # parts of one projection
            k, v = torch.cat((k, v + 1), dim=-1).split((576, 512), dim=-1)
        out = cp.unshard(cp.attention(q, k, v, mask=Causal(), scale=0.05, length=8), 2, length=8)
        whole = (cp.unshard(x, 2, length=8).double() for x in (q, k, v))
        assert relative_error(out, attention(*whole, mask=Causal(), scale=0.05)) < 1e-3

    run_virtual(9, rank)


def test_double_precision_goes_around():
    inputs = random_inputs(29, dtype=torch.float64)
    assert_attention_close(virtual_results(3, inputs, Causal(), Zigzag()), inputs, Causal())


# Joined blocks.


@pytest.fixture
def joined(monkeypatch):
    """Stages of three blocks forward and two backward, which only GPUs have by themselves."""
    blocks = Joined(forward=3, backward=2)
    monkeypatch.setattr(ring, "joined_blocks", lambda *_: blocks)
    return blocks


@pytest.mark.parametrize(
    ("layout", "mask", "world"),
    first(
        5,
        [
            (Zigzag(), "causal", 8),
            (Contiguous(), "causal & documents", 5),
            (Zigzag(2), "window", 4),
            (Zigzag(), "all three", 6),
            (Striped(), "causal", 4),  # not joined
            (Contiguous(), "full", 8),
            (Zigzag(), "causal & window", 5),
            (Zigzag(), "documents", 8),
        ],
    ),
    ids=str,
)
def test_joined_blocks_give_the_results_of_one_device(layout, mask, world, joined):
    for length in (67, world + 1):
        inputs, given = random_inputs(length, heads=(4, 2), seed=length), make_mask(mask, length)
        assert_attention_close(virtual_results(world, inputs, given, layout), inputs, given)


def test_joined_blocks_with_slopes_and_sinks(joined):
    inputs = random_inputs(50, heads=(4, 2))
    mask, terms = make_mask("causal & documents", 50), {"sinks": torch.randn(4), "alibi_slopes": torch.rand(4)}
    assert_attention_close(virtual_results(5, inputs, mask, Zigzag(), **terms), inputs, mask, **terms)


# The same bits.


@pytest.mark.parametrize(
    ("mask", "layout"),
    [
        ("full", "contiguous"),
        sweep("causal", "zigzag"),
        sweep("window", "striped"),
        ("documents", "contiguous"),
        sweep("causal & documents", "zigzag"),
        sweep("causal & window", "striped"),
        ("all three", "contiguous"),
    ],
)
def test_two_runs_give_the_same_bits(mask, layout):
    inputs = random_inputs(67, dtype=torch.bfloat16)
    first, second = (virtual_results(4, inputs, make_mask(mask, 67), LAYOUTS[layout]) for _ in range(2))
    for name, a, b in zip(NAMES, first, second, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("mask", "layout"),
    [
        ("full", "contiguous"),
        ("causal", "zigzag"),
        ("window", "striped"),
        ("documents", "contiguous"),
        ("causal & documents", "zigzag"),
        ("causal & window", "striped"),
        ("all three", "contiguous"),
    ],
)
def test_a_world_of_one_gives_the_bits_of_attention(mask, layout):
    half = random.Random(f"{layout} {mask}").choice(DTYPES[1:])
    mask = make_mask(mask, 67)
    cp = ContextParallel(layout=LAYOUTS[layout], schedule="ring")
    for dtype in (torch.float32, half):
        inputs = random_inputs(67, dtype=dtype)
        alone = forward_backward(lambda q, k, v: attention(q, k, v, mask=mask, return_lse=True), inputs)
        solo = forward_backward(lambda q, k, v: cp.attention(q, k, v, mask=mask, return_lse=True), inputs)
        virtual = virtual_results(1, inputs, mask, LAYOUTS[layout])
        for name, a, b, c in zip(NAMES, alone, solo, virtual, strict=True):
            assert torch.equal(a, b), name
            assert torch.equal(a, c), name


# The error does not grow.


@pytest.mark.parametrize("native", [False, True], ids=["as this machine computes", "in bf16 kernels"])
def test_the_error_in_bf16_does_not_grow_with_the_ranks(native, monkeypatch):
    if native:  # where the processor has no bf16, aten computes in float32, and there is nothing to see
        monkeypatch.setattr(aten, "_widened", lambda x: x)
    inputs = random_inputs(256, dtype=torch.bfloat16, head_dim=32, batch=1)
    exact = reference_results(inputs, Causal())
    one, eight = (virtual_results(world, inputs, Causal(), Zigzag(), backend="aten") for world in (1, 8))
    for name, a, b, e in zip(NAMES, one, eight, exact, strict=True):
        if name != "lse":  # float32 on either side
            assert relative_error(b, e) <= 1.5 * relative_error(a, e), name


# Who wants gradients.


@pytest.mark.parametrize("wanted", ["", "q", "k", "v", "qk", "qv", "kv"])
def test_gradients_go_to_those_who_want_them(wanted):
    inputs, world, layout = random_inputs(23), 3, Zigzag()
    expected = dict(zip("qkv", virtual_results(world, inputs, Causal(), layout)[2:], strict=True))

    def rank(comm: Comm) -> list[Tensor | None]:
        cp = ContextParallel(comm, layout=layout, schedule="ring")
        shards = [cp.shard(x, 2).clone() for x in inputs]
        for name, x in zip("qkv", shards, strict=False):
            x.requires_grad_(name in wanted)
        out, lse = cp.attention(*shards[:3], length=23, return_lse=True)
        assert out.requires_grad == lse.requires_grad == bool(wanted)
        if wanted:
            torch.autograd.backward([out, lse], shards[3:])
        return [x.grad for x in shards[:3]]

    grads = run_virtual(world, rank)
    for name, parts in zip("qkv", zip(*grads, strict=True), strict=True):
        if name in wanted:
            torch.testing.assert_close(layout.unshard(parts, 2), expected[name])
        else:
            assert parts == (None,) * world


def test_without_return_lse_only_out_comes_back():
    inputs = random_inputs(24)

    def rank(comm: Comm) -> Tensor:
        cp = ContextParallel(comm, schedule="ring")
        return cp.attention(*(cp.shard(x, 2) for x in inputs[:3]))

    out = Zigzag().unshard(run_virtual(3, rank), 2)
    torch.testing.assert_close(out, attention(*inputs[:3], mask=Causal()))


# Traffic.


@pytest.mark.parametrize(
    ("mask", "layout", "dtype"),
    [
        ("full", "contiguous", torch.float32),
        ("causal", "zigzag", torch.float16),
        ("window", "striped", torch.float32),
        ("documents", "contiguous", torch.float16),
        ("causal & documents", "zigzag", torch.float32),
        ("causal & window", "striped", torch.float16),
        ("all three", "contiguous", torch.float32),
    ],
)
def test_ranks_send_what_the_plan_says_and_no_byte_more(mask, layout, dtype):
    check_traffic(make_mask(mask, 67), LAYOUTS[layout], dtype, Joined())


def test_joined_blocks_send_what_the_plan_says_and_no_byte_more(joined):
    check_traffic(Causal(), Zigzag(), torch.float16, joined)
    check_traffic(make_mask("all three", 67), Contiguous(), torch.float32, joined)


def check_traffic(mask, layout, dtype, joined) -> None:
    length, world, batch, heads, head_dim = 67, 4, 2, (4, 2), 16
    inputs = random_inputs(length, heads=heads, batch=batch, head_dim=head_dim, dtype=dtype)

    def rank(comm: Comm) -> list[tuple[int, int]]:
        cp = ContextParallel(comm, layout=layout, schedule="ring")
        shards = [cp.shard(x, 2) for x in inputs]
        leaves = [x.clone().requires_grad_() for x in shards[:3]]
        results = cp.attention(*leaves, mask=mask, length=length, return_lse=True)
        sent = [(comm.traffic.messages, comm.traffic.bytes)]
        comm.traffic.reset()
        torch.autograd.backward(results, shards[3:])
        return [*sent, (comm.traffic.messages, comm.traffic.bytes)]

    sent = run_virtual(world, rank)
    row = 2 * batch * heads[1] * head_dim  # K and V, kv heads as they are
    forward, backward = (ring_plan(shards(mask, layout, length, world), blocks) for blocks in joined)
    for r in range(world):
        keys = [sum(len(stage.sent) + len(stage.own_sent) for stage in plan.stages(r)) for plan in (forward, backward)]
        assert sent[r][0] == (keys[0], forward.rows_sent(r) * row * dtype.itemsize)
        grads = sum(len(stage.sent) + len(stage.returned) for stage in backward.stages(r))
        backward_bytes = backward.rows_sent(r) * row * dtype.itemsize + backward.grad_rows_sent(r) * row * 4
        assert sent[r][1] == (keys[1] + grads, backward_bytes)


def test_nothing_travels_that_nobody_needs():
    """A full ring sends each key once to every other rank; a short window only its halo; no gradients, none sent."""

    def sent(mask, wanted: str) -> tuple[int, int]:
        def rank(comm: Comm) -> tuple[int, int]:
            cp = ContextParallel(comm, layout=Contiguous(), schedule="ring")
            q, k, v = (
                cp.shard(x, 2).clone().requires_grad_(n in wanted)
                for n, x in zip("qkv", random_inputs(64), strict=False)
            )
            out = cp.attention(q, k, v, mask=mask)
            forward = comm.traffic.bytes
            out.sum().backward()
            return forward, comm.traffic.bytes - forward

        return tuple(map(sum, zip(*run_virtual(4, rank), strict=True)))

    row = 2 * 2 * 2 * 16 * 4
    assert sent(Full(), "q") == (64 * 3 * row, 64 * 3 * row)  # keys travel again, gradients do not
    assert sent(Full(), "k")[1] == 64 * 3 * row + 64 * 3 * row
    assert sent(SlidingWindow(5), "q") == (3 * 5 * row, 3 * 5 * row)


# Memory and overlap.


class Spy(Comm):
    """A comm that writes down what goes through it. Tensors are kept, so that no address comes twice."""

    def __init__(self, ranks_per_node: Comm) -> None:
        super().__init__(ranks_per_node.rank, ranks_per_node.world, ranks_per_node.timeout)
        self.ranks_per_node, self.events, self.messages = ranks_per_node, [], []

    def _exchange(self, verb, sends, recvs) -> Pending:
        kind = str((*sends, *recvs)[0][0].dtype).removeprefix("torch.")
        self.events.append(f"post {kind}")
        self.messages += [tensor for tensor, _ in (*sends, *recvs)]
        return SpiedPending(self.ranks_per_node._exchange(verb, sends, recvs), self.events, kind)

    def _compare(self, claim):
        return self.ranks_per_node._compare(claim)


class SpiedPending(Pending):
    def __init__(self, ranks_per_node: Pending, events: list[str], kind: str) -> None:
        self.ranks_per_node, self.events, self.kind = ranks_per_node, events, kind

    def wait(self) -> None:
        self.events.append(f"wait {self.kind}")
        self.ranks_per_node.wait()


class Noting:
    """A backend that notes when it computes."""

    def __init__(self, ranks_per_node, events: list[str]) -> None:
        self.ranks_per_node, self.events = ranks_per_node, events

    def forward(self, *args) -> None:
        self.events.append("compute")
        self.ranks_per_node.forward(*args)

    def prepare(self, *args) -> None:
        self.ranks_per_node.prepare(*args)

    def backward(self, *args) -> None:
        self.events.append("compute")
        self.ranks_per_node.backward(*args)


def spied(world: int, mask, monkeypatch) -> list[tuple[list[str], list[str], list[Tensor], list[Tensor]]]:
    """For every rank: events of the forward and of the backward, messages of either. In bf16."""
    inputs = random_inputs(8 * world, dtype=torch.bfloat16)
    events_of: dict[int, list[str]] = {}  # by where a rank's queries lie: all ranks share one process

    def noting(choose):
        return lambda call, *args: Noting(choose(call, *args), events_of[call.q.data_ptr()])

    def rank(comm: Comm):
        spy = Spy(comm)
        cp = ContextParallel(spy, layout=Contiguous(), schedule="ring")
        shards = [cp.shard(x, 2) for x in inputs]
        leaves = [x.clone().requires_grad_() for x in shards[:3]]
        events_of[leaves[0].data_ptr()] = spy.events
        results = cp.attention(*leaves, mask=mask, return_lse=True)
        forward, sent = spy.events.copy(), spy.messages.copy()
        torch.autograd.backward(results, shards[3:])
        return forward, spy.events[len(forward) :], sent, spy.messages[len(sent) :]

    monkeypatch.setattr(ring, "choose_fused", noting(choose_fused))
    monkeypatch.setattr(ring, "choose_fused_backward", noting(choose_fused_backward))
    return run_virtual(world, rank)


def test_the_next_keys_are_on_their_way_before_the_present_ones_are_computed(monkeypatch):
    for forward, backward, _, _ in spied(4, Full(), monkeypatch):
        stage = ["post bfloat16", "compute", "wait bfloat16"]
        assert forward == [*stage, *stage, *stage, "compute"]
        keys = [event for event in backward if not event.endswith("float32")]
        assert keys == [*stage, *stage, *stage, "compute"]


def test_gradients_travel_in_float32_while_the_next_block_is_computed(monkeypatch):
    for _, backward, _, _ in spied(4, Full(), monkeypatch):
        gradients = [event for event in backward if event == "compute" or event.endswith("float32")]
        hop = ["post float32", "compute", "wait float32"]
        assert gradients == ["compute", "compute", *hop, *hop, "post float32", "wait float32"]


def test_keys_live_in_exactly_two_buffers(monkeypatch):
    for _, _, *passes in spied(5, Full(), monkeypatch):
        for messages in passes:
            keys = [x for x in messages if x.dtype == torch.bfloat16]
            assert len(keys) == 8  # four sent, four received
            assert len({x.untyped_storage().data_ptr() for x in keys}) == 2


class Alone(Comm):
    """One rank of a world whose others agree with everything and send nothing: its memory is that of a real one."""

    def _exchange(self, verb, sends, recvs) -> Pending:
        return Finished()

    def _compare(self, claim):
        return {self.rank: claim}


@pytest.mark.parametrize(
    ("mask", "layout"),
    [
        (Full(), "contiguous"),
        sweep(Full(), "zigzag"),
        sweep(Full(), "striped"),
        sweep(Causal(), "contiguous"),
        sweep(Causal(), "zigzag"),
        sweep(Causal(), "striped"),
    ],
    ids=str,
)
def test_memory_does_not_grow_with_the_ranks(mask, layout):
    """Twice the sequence on twice the ranks: each holds as much as before, forward and backward."""

    def peak(world: int, rank: int) -> int:
        inputs, comm = random_inputs(128 * world, dtype=torch.bfloat16, batch=1), Alone(rank, world, 10)
        return peak_bytes(lambda: shard_results(comm, inputs, mask, LAYOUTS[layout]))

    def worst(world: int) -> int:
        return max(peak(world, world // 2), peak(world, world - 1))

    worst(8), worst(16)  # what is made once and kept
    small, large = worst(8), worst(16)
    assert small > 0
    assert abs(large - small) <= 0.05 * small


# In company.


def test_several_layers_in_one_graph():
    inputs = random_inputs(30, heads=(2, 2))
    masks = (Causal(), SlidingWindow(4), Causal())

    def layers(attend, q, k, v):
        x = q
        for mask in masks:
            out, lse = attend(x, k + x, v, mask)
            x = x + out
        return x, lse

    def rank(comm: Comm) -> list[Tensor]:
        cp = ContextParallel(comm, layout=Striped(), schedule="ring")

        def attend(q, k, v, mask):
            return cp.attention(q, k, v, mask=mask, return_lse=True)

        return forward_backward(lambda *qkv: layers(attend, *qkv), [cp.shard(x, 2) for x in inputs])

    def alone(q, k, v, mask):
        return attention(q, k, v, mask=mask, return_lse=True, backend="reference")

    found = [Striped().unshard(parts, 2) for parts in zip(*run_virtual(3, rank), strict=True)]
    exact = forward_backward(lambda *qkv: layers(alone, *qkv), [x.double() for x in inputs])
    for a, e in zip(found, exact, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=1e-4)


def test_shards_may_be_views():
    inputs, world, layout = random_inputs(26), 3, Striped()

    def rank(comm: Comm) -> list[Tensor]:
        cp = ContextParallel(comm, layout=layout, schedule="ring")

        def attend(q, k, v):
            return cp.attention(q, k, v, length=26, return_lse=True)

        shards = [cp.shard(x, 2) for x in inputs]
        q, k, v, grad_out = shards[:4]
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
        k = k.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
        v = torch.stack([v, torch.full_like(v, torch.nan)], -1)[..., 0]
        grad_out = grad_out.transpose(2, 3).contiguous().transpose(2, 3)
        assert not any(x.is_contiguous() for x in (q, k, v, grad_out))
        return forward_backward(attend, [q, k, v, grad_out, shards[4]])

    found = [layout.unshard(parts, 2) for parts in zip(*run_virtual(world, rank), strict=True)]
    assert_attention_close(found, inputs, Causal())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dim", [1, -2])
def test_unshard_gives_the_whole_and_gradients_are_summed_over_ranks(dim, layout):
    whole, weights = torch.randn(2, 11, 3), torch.randn(3, 2, 11, 3)

    def rank(comm: Comm) -> Tensor:
        cp = ContextParallel(comm, layout=layout, schedule="ring")
        shard = cp.shard(whole, dim).clone().requires_grad_()
        again = cp.unshard(shard, dim, 11)
        assert torch.equal(again, whole)
        (again * weights[comm.rank]).sum().backward()
        return shard.grad

    grads = layout.unshard(run_virtual(3, rank), dim)
    torch.testing.assert_close(grads, weights.sum(0))


def test_positions_are_those_of_the_shard():
    def rank(comm: Comm) -> None:
        cp = ContextParallel(comm, schedule="ring")
        assert (cp.rank, cp.world) == (comm.rank, 3)
        assert torch.equal(cp.positions(17), cp.shard(torch.arange(17), 0))

    run_virtual(3, rank)


@pytest.mark.parametrize(
    ("dtype", "width", "begin"),
    [
        (torch.bfloat16, 64, 0),
        (torch.float32, 64, 8),
        (torch.float64, 64, 1),
        (torch.float32, 3, 0),
        (torch.bfloat16, 8, 0),
    ],
)
def test_rows_are_copied_whatever_their_alignment(dtype, width, begin):
    source = torch.randn(2, 5, 3, 80).to(dtype).transpose(1, 2)[..., begin : begin + width]
    memory = torch.zeros(5, 2, 3, 2 * width, dtype=dtype)
    target = memory.permute(1, 2, 0, 3)[..., width:]
    copy_rows(target, source)
    assert torch.equal(target, source)
    assert (memory[..., :width] == 0).all()
