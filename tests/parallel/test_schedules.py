"""Every schedule on virtual ranks: exact for any layout, mask, heads and lengths; repeatable, lean, and on its plan."""

import copy
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnmesh import (
    Causal,
    ContextParallel,
    Contiguous,
    Documents,
    Full,
    Layout,
    Mask,
    SlidingWindow,
    Striped,
    Zigzag,
    attention,
    run_virtual,
)
from attnmesh.comm import Comm
from attnmesh.comm.base import Finished, Pending
from attnmesh.core.layouts import Balanced, Joint
from attnmesh.core.state import accumulation_dtype
from attnmesh.ops.dense import aten
from attnmesh.ops.dense.aten import Aten
from attnmesh.plan.shards import SCHEDULES, Shape, Workload, shards
from attnmesh.planner.auto import choose_schedule
from attnmesh.planner.catalog import default_cluster
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.schedules import loads
from attnmesh.testing.attention import (
    NAMES,
    assert_attention_close,
    forward_backward,
    random_inputs,
    reference_results,
    shard_inputs,
    shard_results,
    virtual_results,
)
from attnmesh.testing.errors import relative_error
from helpers import clusters
from helpers.cases import MASKS, device_of, first, in_turn, make_mask, sweep
from helpers.memory import peak_bytes

ULYSSES = ("ulysses", "ulysses+ring", "ulysses+allgather")
FLAT = tuple(name for name in SCHEDULES if "+" not in name)
LAYOUTS = ("contiguous", "zigzag", "zigzag of two pairs", "striped", "balanced", "joint")
HEADS = ((1, 1), (2, 2), (4, 2), (3, 1), (5, 5), (6, 2))
DTYPES = (torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.float64)

Mesh = tuple[int, int | None]  # ranks, and ranks per node
MESHES: dict[str, list[Mesh]] = {
    name: [(2, None), (3, None), (5, None)] if name in FLAT else [(6, 2), (6, 3)] for name in SCHEDULES
}

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


def schedules(*chosen: str) -> pytest.MarkDecorator:
    """These schedules; the others are sweeps."""
    return pytest.mark.parametrize("schedule", [name if name in chosen else sweep(name) for name in SCHEDULES])


pytestmark = pytest.mark.usefixtures("one_thread")


def layout_named(name: str, mask: Mask, length: int) -> Layout:
    return {
        "contiguous": Contiguous(),
        "zigzag": Zigzag(),
        "zigzag of two pairs": Zigzag(2),
        "striped": Striped(),
        "balanced": Balanced(mask),
        "joint": Joint((length - length // 3, Zigzag()), (length // 3, Contiguous())),
    }[name]


def way(schedule: str, mesh: Mesh | None = None) -> dict[str, object]:
    """How to run a schedule, on a few ranks unless said otherwise."""
    world, ranks_per_node = mesh or ((3, None) if schedule in FLAT else (4, 2))
    return {"world": world, "schedule": schedule, "ranks_per_node": ranks_per_node}


def comm_way(schedule: str) -> tuple[int, dict[str, object]]:
    """The same for programs that make their own ContextParallel: the world, and its arguments."""
    how = way(schedule)
    return how.pop("world"), how


def whole(parts: Sequence[Sequence[Tensor]], layout: Layout) -> list[Tensor]:
    return [layout.unshard(part, 2) for part in zip(*parts, strict=True)]


def assert_same_bits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for name, a, b in zip(NAMES, found, expected, strict=True):
        assert torch.equal(a, b), name


# Exact.


@pytest.mark.parametrize("schedule", ["ulysses+ring", "ulysses+allgather"])
def test_shards_of_a_node_that_interleave_are_refused(schedule):
    world, how = comm_way(schedule)
    inputs = random_inputs(37, head_dim=8)

    def rank(comm: Comm) -> None:
        with pytest.raises(ValueError, match=r"schedule=.* in this layout the shards of a node interleave"):
            shard_results(comm, inputs, Causal(), Striped(), **how)

    run_virtual(world, rank)


@schedules("allgather", "ulysses+ring")
def test_every_length_up_to_twice_the_world_and_more(schedule):
    for length in (0, 1, 2, 3, 5, 8, 9):
        inputs = random_inputs(length, heads=(2, 1), head_dim=8, seed=length)
        found = virtual_results(inputs=inputs, mask=Causal(), layout=Zigzag(), **way(schedule))
        assert_attention_close(found, inputs, Causal())


@schedules("ring", "allgather", "ulysses", "ulysses+ring")
def test_ranks_that_hold_nothing_take_part(schedule):
    pairs = (2, 0, 1) if schedule in FLAT else (0, 0, 2, 1)  # all of a node, for once
    for layout in (Zigzag(pairs), Zigzag(pairs[::-1])):
        inputs = random_inputs(23, heads=(4, 2), head_dim=8)
        assert_attention_close(
            virtual_results(inputs=inputs, mask=Causal(), layout=layout, **way(schedule)), inputs, Causal()
        )


@pytest.mark.parametrize(
    ("schedule", "scale"),
    [
        ("ring", 0.7),
        ("ring+ring", 0.7),
        ("allgather", -0.3),
        ("ulysses+ring", -0.3),
        ("ulysses", 0),
        ("ulysses+allgather", 0),
    ],
)
def test_a_scale_of_ones_own(schedule, scale):
    inputs = random_inputs(21, head_dim=8)
    found = virtual_results(inputs=inputs, mask=Causal(), layout=Zigzag(), scale=scale, **way(schedule))
    assert_attention_close(found, inputs, Causal(), scale=scale)


@pytest.mark.parametrize("schedule", ["ulysses+ring", "ulysses+allgather"])
def test_stripes_too_short_to_interleave_are_taken_together(schedule):
    for layout in (Joint((3, Striped()), (3, Striped())), Joint((4, Striped()), (2, Striped())), Striped()):
        length = 4 if layout == Striped() else 6
        inputs = random_inputs(length, heads=(4, 2), head_dim=8)
        assert_attention_close(
            virtual_results(inputs=inputs, mask=Causal(), layout=layout, **way(schedule)), inputs, Causal()
        )


@pytest.mark.parametrize(("schedule", "mask"), [("allgather", Causal()), sweep("ulysses", SlidingWindow(5, 1))])
def test_triton_kernels_serve(schedule, mask):
    inputs = random_inputs(11, batch=1, heads=(2, 1), device=device_of("triton"))
    found = virtual_results(2, inputs, mask, Zigzag(), backend="triton", schedule=schedule)
    assert_attention_close(found, inputs, mask)


# Queries of one sequence, keys of another.

PAIRS = [
    (Zigzag(), Contiguous()),
    (Contiguous(), Zigzag(2)),
    (Zigzag(2), None),
    (Striped(), Zigzag()),
    (Contiguous(), Striped()),
]


@schedules("ring", "ulysses", "ring+ring")
def test_keys_that_only_some_ranks_hold(schedule):
    pairs = (2, 0, 1) if schedule in FLAT else (0, 0, 2, 1)
    inputs = random_inputs(22, 15, heads=(3, 3), head_dim=8)
    for mask in (Full(), Causal()):
        found = virtual_results(inputs=inputs, mask=mask, layout=Zigzag(), key_layout=Zigzag(pairs), **way(schedule))
        assert_attention_close(found, inputs, mask)


# The same bits.


@pytest.mark.parametrize(
    ("schedule", "mask"),
    [
        ("ring", "causal"),
        ("ulysses+ring", "causal"),
        ("ulysses+allgather", "causal"),
        sweep("allgather", "all three"),
        sweep("ulysses", "all three"),
        sweep("ring+ring", "all three"),
    ],
)
def test_two_runs_give_the_same_bits(schedule, mask):
    dtype = {"causal": torch.bfloat16, "all three": torch.float16}[mask]
    inputs, mask = random_inputs(37, dtype=dtype, heads=(3, 1)), make_mask(mask, 37)
    first, second = (virtual_results(inputs=inputs, mask=mask, layout=Zigzag(), **way(schedule)) for _ in range(2))
    assert_same_bits(first, second)


def test_a_world_of_one_gives_the_bits_of_attention_around_a_ring_and_the_right_ones_otherwise():
    for at, mask in enumerate(MASKS):  # seven, three dtypes in turn: masks do not ask for the dtype
        dtype = (torch.float32, torch.bfloat16, torch.float16)[at % 3]
        mask, inputs = make_mask(mask, 37), random_inputs(37, dtype=dtype, heads=(10, 5), head_dim=8)
        alone = forward_backward(lambda *qkv, mask=mask: attention(*qkv, mask=mask, return_lse=True), inputs)
        for schedule in FLAT:
            found = virtual_results(1, inputs, mask, Zigzag(), schedule=schedule)
            if schedule == "ring":
                assert_same_bits(found, alone)
            assert_attention_close(found, inputs, mask)


# The error does not grow.


@pytest.mark.parametrize(
    ("schedule", "kernels", "most"),
    [
        ("allgather", "float32", 1.05),
        ("ring+ring", "bf16", 1.5),
        *(sweep(*case) for case in in_turn(SCHEDULES, ["bf16", "float32"], [1.5, 1.05])),
    ],
)
def test_the_error_in_bf16_does_not_grow_with_the_ranks(schedule, kernels, most, monkeypatch):
    # Where kernels compute in float32, all there is to see is how often ranks round; in bf16, parts are rounded too.
    monkeypatch.setattr(aten, "_widened", torch.Tensor.float if kernels == "float32" else lambda x: x)
    for heads in ((8, 8), (8, 1)):  # one kv head for all: what eight ranks find for it is summed
        inputs = random_inputs(64, dtype=torch.bfloat16, head_dim=16, batch=1, heads=heads)
        exact = reference_results(inputs, Causal())
        one = virtual_results(1, inputs, Causal(), Zigzag())
        mesh = (8, None if schedule in FLAT else 4)
        eight = virtual_results(inputs=inputs, mask=Causal(), layout=Zigzag(), **way(schedule, mesh))
        for name, a, b, e in zip(NAMES, one, eight, exact, strict=True):
            if name != "lse":  # float32 on either side
                assert relative_error(b, e) <= most * relative_error(a, e), (name, heads)


# Who wants gradients.


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        ("ring", ""),
        ("allgather", "q"),
        ("ulysses", "k"),
        ("ulysses+ring", "v"),
        ("ulysses+allgather", "qk"),
        sweep("ring+ring", "qv"),
        sweep("ring", "kv"),
    ],
)
def test_gradients_go_to_those_who_want_them(schedule, wanted):
    world, how = comm_way(schedule)
    for mask, heads in (("causal & documents", (6, 6)), ("causal", (3, 1))):
        inputs, mask, layout = random_inputs(23, heads=heads, head_dim=8), make_mask(mask, 23), Contiguous()
        expected = dict(zip("qkv", reference_results(inputs, mask)[2:], strict=True))

        def rank(comm: Comm, inputs=inputs, mask=mask, layout=layout) -> list[Tensor | None]:
            cp = ContextParallel(comm, layout=layout, **how)
            shards = [x.clone() for x in shard_inputs(inputs, comm, layout)]
            for name, x in zip("qkv", shards, strict=False):
                x.requires_grad_(name in wanted)
            out, lse = cp.attention(*shards[:3], mask=mask, length=23, return_lse=True)
            assert out.requires_grad == lse.requires_grad == bool(wanted)
            if wanted:
                torch.autograd.backward([out, lse], shards[3:])
            return [x.grad for x in shards[:3]]

        for name, parts in zip("qkv", zip(*run_virtual(world, rank), strict=True), strict=True):
            if name in wanted:
                torch.testing.assert_close(layout.unshard(parts, 2).double(), expected[name], rtol=1e-4, atol=1e-5)
            else:
                assert parts == (None,) * world


@pytest.mark.parametrize(
    ("schedule", "heard"),
    [
        ("ring", "out"),
        ("ulysses+ring", "out"),
        ("ulysses+allgather", "out"),
        ("allgather", "lse"),
        ("ulysses", "lse"),
        ("ring+ring", "lse"),
    ],
)
def test_a_loss_of_out_alone_or_of_lse_alone(schedule, heard):
    inputs = random_inputs(23, head_dim=8)
    at = NAMES.index(heard)
    inputs[4 - at].zero_()
    world, how = comm_way(schedule)

    def rank(comm: Comm) -> list[Tensor]:
        cp = ContextParallel(comm, **how)
        shards = [cp.shard(x, 2) for x in inputs]
        leaves = [x.clone().requires_grad_() for x in shards[:3]]
        results = cp.attention(*leaves, length=23, return_lse=True)
        return [*(x.detach() for x in results), *torch.autograd.grad(results[at], leaves, shards[3 + at])]

    assert_attention_close(whole(run_virtual(world, rank), Zigzag()), inputs, Causal())


@every_schedule
def test_a_loss_of_the_lse_on_one_rank_only(schedule):
    inputs = random_inputs(23, head_dim=8)
    world, how = comm_way(schedule)

    def rank(comm: Comm) -> list[Tensor]:
        cp = ContextParallel(comm, **how)
        shards = [cp.shard(x, 2) for x in inputs]
        leaves = [x.clone().requires_grad_() for x in shards[:3]]
        results = cp.attention(*leaves, length=23, return_lse=True)
        heard = 2 if comm.rank == 1 else 1
        grads = torch.autograd.grad(results[:heard], leaves, shards[3 : 3 + heard])
        return [*(x.detach() for x in results), *grads]

    found = whole(run_virtual(world, rank), Zigzag())
    by_rank = [Zigzag().shard(inputs[4], 2, world, r) * (r == 1) for r in range(world)]
    assert_attention_close(found, [*inputs[:4], Zigzag().unshard(by_rank, 2)], Causal())


@every_schedule
def test_a_graph_that_is_kept_gives_the_same_gradients_again(schedule):
    world, how = comm_way(schedule)
    inputs = random_inputs(23, heads=(6, 2), head_dim=8)

    def rank(comm: Comm) -> None:
        cp = ContextParallel(comm, **how)
        shards = [cp.shard(x, 2) for x in inputs]
        leaves = [x.clone().requires_grad_() for x in shards[:3]]
        results = cp.attention(*leaves, length=23, return_lse=True)
        first, second = (torch.autograd.grad(results, leaves, shards[3:], retain_graph=True) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    run_virtual(world, rank)


@schedules("ring", "allgather", "ulysses", "ulysses+ring")
def test_without_gradients_the_answer_is_the_same(schedule):
    world, how = comm_way(schedule)
    inputs = random_inputs(23, head_dim=8)
    expected = virtual_results(inputs=inputs, mask=Causal(), layout=Zigzag(), **way(schedule))

    def rank(comm: Comm) -> list[Tensor]:
        cp = ContextParallel(comm, **how)
        with torch.no_grad():
            leaves = [cp.shard(x, 2).clone().requires_grad_() for x in inputs[:3]]
            out, lse = cp.attention(*leaves, length=23, return_lse=True)
        assert not out.requires_grad
        assert torch.equal(cp.attention(*leaves, length=23), out)  # only out comes back, and with it a graph
        return [out, lse]

    for a, b in zip(whole(run_virtual(world, rank), Zigzag()), expected, strict=False):
        assert torch.equal(a, b)


# In company.


@pytest.mark.parametrize(
    ("schedule", "reentrant"),
    [
        ("ring", False),
        ("ulysses+ring", False),
        ("ulysses+allgather", False),
        ("allgather", True),
        sweep("ulysses", True),
        sweep("ring+ring", True),
    ],
)
def test_activation_checkpointing_changes_nothing(schedule, reentrant):
    inputs = random_inputs(29, head_dim=8)
    world, how = comm_way(schedule)
    plain = virtual_results(inputs=inputs, mask=Causal(), layout=Zigzag(), **way(schedule))

    def rank(comm: Comm) -> list[Tensor]:
        cp = ContextParallel(comm, **how)
        again = 0

        def attend(q, k, v):
            nonlocal again
            again += 1
            return cp.attention(q, k, v, length=29, return_lse=True)

        leaves = [cp.shard(x, 2).clone().requires_grad_() for x in inputs[:3]]
        results = checkpoint(attend, *leaves, use_reentrant=reentrant)
        torch.autograd.backward(results, [cp.shard(x, 2) for x in inputs[3:]])
        assert again == 2
        return [*(x.detach() for x in results), *(x.grad for x in leaves)]

    assert_same_bits(whole(run_virtual(world, rank), Zigzag()), plain)


@schedules("ulysses+allgather")
def test_shards_may_be_views_and_stay_as_they_are(schedule):
    inputs, layout = random_inputs(26, head_dim=8), Contiguous()
    world, how = comm_way(schedule)

    def rank(comm: Comm) -> list[Tensor]:
        cp = ContextParallel(comm, layout=layout, **how)
        q, k, v, grad_out, grad_lse = (cp.shard(x, 2) for x in inputs)
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
        k = k.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
        v = torch.stack([v, torch.full_like(v, torch.nan)], -1)[..., 0]
        grad_out = grad_out.transpose(2, 3).contiguous().transpose(2, 3)
        grad_lse = grad_lse.transpose(0, 2).contiguous().transpose(0, 2)
        given = [q, k, v, grad_out, grad_lse]
        assert not any(x.is_contiguous() for x in given)
        before = [x.clone() for x in given]
        found = forward_backward(lambda *qkv: cp.attention(*qkv, length=26, return_lse=True), given)
        assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
        return found

    assert_attention_close(whole(run_virtual(world, rank), layout), inputs, Causal())


@pytest.mark.parametrize(
    "schedule",
    first(
        1,
        [
            pytest.param(name, marks=[pytest.mark.sweep] * (name not in ("ring", "ulysses+allgather")))
            for name in SCHEDULES
        ],
    ),
)
def test_one_context_serves_calls_of_many_kinds_in_turn(schedule):
    world, how = comm_way(schedule)
    kinds = [
        (Causal(), 24, 24, torch.float32, (4, 2), None),
        (SlidingWindow(4), 24, 24, torch.float32, (4, 2), None),
        (Causal(), 24, 24, torch.float32, (4, 2), 0.5),
        (Causal(), 24, 24, torch.bfloat16, (4, 2), None),
        (Causal(), 24, 24, torch.float32, (3, 3), None),
        (Causal(), 24, 17, torch.float32, (4, 2), None),
    ]

    def rank(comm: Comm) -> list[list[Tensor]]:
        cp = ContextParallel(comm, **how)
        found = []
        for mask, length, key_length, dtype, heads, scale in (*kinds, *kinds):
            shards = shard_inputs(
                random_inputs(length, key_length, heads=heads, dtype=dtype, head_dim=8), comm, Zigzag()
            )
            call = {"mask": mask, "length": length, "key_length": key_length, "scale": scale, "return_lse": True}
            found.append(forward_backward(lambda *qkv, call=call: cp.attention(*qkv, **call), shards))
        return found

    by_kind = list(zip(*run_virtual(world, rank), strict=True))
    for (mask, length, key_length, dtype, heads, scale), one, again in zip(
        kinds, by_kind[: len(kinds)], by_kind[len(kinds) :], strict=True
    ):
        inputs = random_inputs(length, key_length, heads=heads, dtype=dtype, head_dim=8)
        assert_attention_close(whole(one, Zigzag()), inputs, mask, scale=scale)
        assert_same_bits(whole(again, Zigzag()), whole(one, Zigzag()))


# Traffic.


class Ledger(Comm):
    """A comm that writes down what goes to which rank, and when messages are posted and waited for."""

    shares_stream = True

    def __init__(self, beneath: Comm) -> None:
        super().__init__(beneath.rank, beneath.world, beneath.timeout)
        self.beneath, self.sent, self.events = beneath, [0] * beneath.world, []

    def to_nodes(self, ranks_per_node: int) -> tuple[int, int]:
        """Bytes sent since the last time, within the node and to other nodes."""
        by_node = [0, 0]
        for peer, nbytes in enumerate(self.sent):
            by_node[peer // ranks_per_node != self.rank // ranks_per_node] += nbytes
        assert sum(by_node) == self.traffic.bytes
        self.sent = [0] * self.world
        self.traffic.reset()
        return tuple(by_node)

    def _exchange(self, verb, sends, recvs) -> Pending:
        for tensor, peer in sends:
            self.sent[peer] += tensor.nbytes
        to = sorted({peer for _, peer in (*sends, *recvs)})
        self.events.append(("post", to))
        return Waited(self.beneath._exchange(verb, sends, recvs), self.events, to)

    def _compare(self, claim):
        return self.beneath._compare(claim)


class Waited(Pending):
    def __init__(self, beneath: Pending, events: list, to: list[int]) -> None:
        self.beneath, self.events, self.to = beneath, events, to

    def wait(self) -> None:
        self.events.append(("wait", self.to))
        self.beneath.wait()


def sent_by(
    schedule: str,
    mesh: Mesh,
    inputs: Sequence[Tensor],
    mask: Mask,
    layout: Layout,
    *,
    wanted: str = "qkv",
    lse: bool = False,
    sinks: Tensor | None = None,
    key_layout: Layout | None = None,
) -> list[list[tuple[int, int]]]:
    """For every rank, bytes (within the node, to others) of a forward and of a backward."""
    world, ranks_per_node = mesh

    def rank(comm: Comm) -> list[tuple[int, int]]:
        ledger = Ledger(comm)
        cp = ContextParallel(ledger, layout=layout, schedule=schedule, ranks_per_node=ranks_per_node)
        q, k, v, *grads = (x.clone() for x in shard_inputs(inputs, comm, layout, key_layout))
        for name, x in zip("qkv", (q, k, v), strict=True):
            x.requires_grad_(name in wanted)
        results = cp.attention(
            q, k, v, mask=mask, length=inputs[0].shape[2], key_length=inputs[1].shape[2], key_layout=key_layout,
            return_lse=lse, sinks=None if sinks is None else sinks.clone().requires_grad_(),
        )  # fmt: skip
        forward = ledger.to_nodes(ranks_per_node or world)
        torch.autograd.backward(results, grads if lse else grads[:1])
        return [forward, ledger.to_nodes(ranks_per_node or world)]

    return run_virtual(world, rank)


def planned(
    schedule: str,
    mesh: Mesh,
    inputs: Sequence[Tensor],
    mask: Mask,
    layout: Layout,
    *,
    lse: bool = False,
    key_layout: Layout | None = None,
) -> list[list[tuple[int, int]]]:
    """The same by the plan."""
    q, k, v = inputs[:3]
    sizes = q.dtype.itemsize, accumulation_dtype(q.dtype).itemsize
    shape = Shape(q.shape[0], q.shape[1], k.shape[1], q.shape[3], *sizes, v.shape[3])
    positions = shards(mask, layout, q.shape[2], mesh[0], key_layout, k.shape[2])
    workload = Workload(positions, shape, mesh[1] or mesh[0], lse, "cpu")
    ways = [loads(schedule, workload, backward=backward) for backward in (False, True)]
    return [[(load.intra_node, load.inter_node) for load in ranks] for ranks in zip(*ways, strict=True)]


@pytest.mark.parametrize(
    ("schedule", "mask_name"),
    [
        ("ring", "full"),
        ("allgather", "causal"),
        ("ulysses", "window"),
        ("ulysses+ring", "documents"),
        sweep("ulysses+allgather", "causal & documents"),
        sweep("ring+ring", "causal & window"),
        sweep("ring", "all three"),
    ],
)
def test_ranks_send_the_bytes_of_the_plan(schedule, mask_name):
    draw = random.Random(f"{schedule} {mask_name}")
    able = [pair for pair in PAIRS if "ulysses+" not in schedule or Striped() not in pair]
    for key_length in draw.sample((37, 20), 1):
        mask, (layout, key_layout) = make_mask(mask_name, key_length), draw.choice(able)
        mesh = draw.choice([(5, None), (4, 2), (6, 3)] if schedule in FLAT else [(4, 2), (6, 2), (6, 3), (8, 4)])
        widths = dict(zip(("head_dim", "value_dim"), draw.choice(((8, 8), (12, 8), (8, 20))), strict=True))
        inputs = random_inputs(37, key_length, heads=draw.choice(HEADS), dtype=draw.choice(DTYPES), **widths)
        how = {"lse": key_length == 37, "key_layout": key_layout}
        sent = sent_by(schedule, mesh, inputs, mask, layout, **how)
        assert sent == planned(schedule, mesh, inputs, mask, layout, **how), (mesh, layout, key_layout)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
@every_schedule
def test_ranks_send_the_bytes_of_the_plan_in_every_layout(schedule, layout):
    if layout == "striped" and "ulysses+" in schedule:
        pytest.skip("refused")
    at = SCHEDULES.index(schedule) + LAYOUTS.index(layout)
    mesh, mask = MESHES[schedule][at % len(MESHES[schedule])], make_mask(MASKS[at % len(MASKS)], 37)
    held, draw = layout_named(layout, mask, 37), random.Random(f"{schedule} {layout}")
    for dtype in (torch.float32, draw.choice((torch.bfloat16, torch.float16))):
        inputs = random_inputs(37, heads=draw.choice(HEADS), dtype=dtype, head_dim=8)
        assert sent_by(schedule, mesh, inputs, mask, held) == planned(schedule, mesh, inputs, mask, held)


@schedules("ulysses", "ulysses+ring", "ring")
def test_ulysses_sends_the_lse_and_its_gradient_only_if_returned_or_if_sinks_need_it(schedule):
    inputs, mesh = random_inputs(24, heads=(4, 4), dtype=torch.bfloat16), (4, None if schedule in FLAT else 2)
    without, with_it = (sent_by(schedule, mesh, inputs, Causal(), Zigzag(), lse=lse) for lse in (False, True))
    assert sent_by(schedule, mesh, inputs, Causal(), Zigzag(), sinks=torch.zeros(4)) == with_it
    members = mesh[1] or mesh[0] if schedule in ULYSSES else 1
    more = 6 * 2 * 4 * 4 * (members - 1) // members  # rows, batch, heads and bytes, but for the heads that stay
    assert [[sum(way) + more for way in rank] for rank in without] == [[sum(way) for way in rank] for rank in with_it]


@schedules("ring", "allgather", "ulysses+ring")
def test_gradients_of_keys_are_sent_only_if_needed(schedule):
    inputs, mesh = random_inputs(24, heads=(4, 2), dtype=torch.bfloat16), (4, None if schedule in FLAT else 2)
    forward, backward, with_keys = [], [], []
    for rank, other in zip(
        sent_by(schedule, mesh, inputs, Full(), Zigzag(), wanted="q"),
        sent_by(schedule, mesh, inputs, Full(), Zigzag(), wanted="qk"),
        strict=True,
    ):
        forward.append(sum(rank[0]))
        backward.append(sum(rank[1]))
        with_keys.append(sum(other[1]))
    if schedule not in ULYSSES:
        assert backward == forward  # keys travel again, and nothing else
    assert all(a < b for a, b in zip(backward, with_keys, strict=True))


@pytest.mark.parametrize(
    ("schedule", "layout", "borders"),
    [
        ("ring", Contiguous(), 3),
        sweep("allgather", Contiguous(), 3),
        sweep("allgather", Zigzag(), 6),  # of seven between eight pieces, the one in the middle is rank 3's own
        sweep("ring+ring", Contiguous(), 4),  # what comes from the other node makes one more hop within this one
    ],
    ids=str,
)
def test_a_window_costs_bytes_by_its_width_and_none_by_the_length(schedule, layout, borders):
    mesh = (4, 2 if "+" in schedule else None)

    def sent(length: int, left: int) -> tuple[int, int]:
        inputs = random_inputs(length, batch=1, heads=(1, 1), head_dim=8)
        by_rank = sent_by(schedule, mesh, inputs, SlidingWindow(left), layout)
        return sum(sum(rank[0]) for rank in by_rank), sum(sum(rank[1]) for rank in by_rank)

    row = 2 * 8 * 4
    assert sent(64, 4) == sent(128, 4) == sent(256, 4)
    assert sent(128, 4)[0] <= borders * 4 * row
    assert sent(128, 8) == tuple(2 * nbytes for nbytes in sent(128, 4))


@pytest.mark.parametrize(("world", "ranks_per_node"), [(4, 2), (6, 3), sweep(6, 2)])
def test_a_ring_of_rings_takes_each_block_across_each_border_once(world, ranks_per_node):
    nodes, row = world // ranks_per_node, 2 * 2 * 2 * 16 * 4
    inputs = random_inputs(8 * world, heads=(4, 2))
    flat, rings = (
        [rank[0][1] for rank in sent_by(name, (world, ranks_per_node), inputs, Full(), Contiguous())]
        for name in ("ring", "ring+ring")
    )
    assert rings == [8 * (nodes - 1) * row] * world
    assert sum(flat) == 8 * (world - 1) * nodes * row
    assert max(rings) < max(flat)


# Overlap and memory.


def test_the_next_heads_keys_are_on_their_way_before_the_present_ones_are_computed(monkeypatch):
    events_of: dict[int, list] = {}  # by where a rank's queries lie: all ranks share one process
    for name, method in (("forward", Aten.forward), ("backward", Aten.backward)):

        def noting(self, call, *args, original=method):
            events_of[call.q.untyped_storage().data_ptr()].append(("compute", []))
            original(self, call, *args)

        monkeypatch.setattr(Aten, name, noting)

    def rank(comm: Comm) -> tuple[list[str], list[str]]:
        ledger = Ledger(comm)
        cp = ContextParallel(ledger, schedule="allgather")
        leaves = [cp.shard(x, 2).clone().requires_grad_() for x in random_inputs(24, heads=(3, 3))[:3]]
        events_of[leaves[0].untyped_storage().data_ptr()] = ledger.events
        out = cp.attention(*leaves, mask=Full())
        forward = len(ledger.events)
        out.sum().backward()
        names = [name for name, _ in ledger.events]
        return names[:forward], names[forward:]

    for forward, backward in run_virtual(2, rank):
        assert forward == ["post", "wait", "post", "compute", "wait", "post", "compute", "wait", "compute"]
        # Three groups of keys; each group's gradients go home while the next one is computed.
        first = ["post", "wait", "post", "compute", "post"]
        second = ["wait", "post", "compute", "wait", "post"]
        assert backward == [*first, *second, "wait", "compute", "wait", "post", "wait"]


def test_the_next_nodes_keys_are_on_their_way_while_the_present_ones_turn_within_the_node():
    def rank(comm: Comm) -> list:
        ledger = Ledger(comm)
        cp = ContextParallel(ledger, layout=Contiguous(), schedule="ring+ring", ranks_per_node=2)
        cp.attention(*(cp.shard(x, 2) for x in random_inputs(24)[:3]), mask=Full())
        return ledger.events

    for me, events in enumerate(run_virtual(4, rank)):
        neighbour, abroad = [me ^ 1], [me ^ 2]
        turn = [("post", neighbour), ("wait", neighbour)]
        assert events == [("post", abroad), *turn, ("wait", abroad), *turn]


class Alone(Comm):
    """One rank of a world whose others agree with everything and send nothing: its memory is that of a real one."""

    def _exchange(self, verb, sends, recvs) -> Pending:
        return Finished()

    def _compare(self, claim):
        return {self.rank: claim}


def test_an_all_gather_holds_the_keys_of_two_groups_of_heads_at_most():
    """Of eight kv heads, four travel in two groups; gathering all at once would take twice as much and more."""
    world, heads, head_dim = 16, 8, 16
    inputs = random_inputs(64 * world, batch=1, heads=(heads, heads), head_dim=head_dim)
    everything = 2 * 64 * world * heads * head_dim * 4  # K and V of all heads, gathered
    local = everything // world // 2  # one shard of one tensor
    cp = ContextParallel(Alone(3, world, 10), layout=Contiguous(), schedule="allgather")
    leaves = [cp.shard(x, 2).clone().requires_grad_() for x in inputs[:3]]

    def forward() -> Tensor:
        return cp.attention(*leaves, mask=Full())

    forward()  # what is made once and kept
    peak = peak_bytes(forward)
    assert everything / 2 <= peak <= everything / 2 + 8 * local
    out = forward()
    # Two groups of keys; gradients of one group as kernels leave them, one to be sent, one on its way.
    peak = peak_bytes(lambda: out.backward(torch.ones_like(out)))
    assert everything <= peak <= everything / 2 + 3 * everything / 4 + 10 * local


# Whichever is best.

MACHINES = [
    default_cluster("cpu"),
    clusters.cluster(flops=1e12, intra_node=1e12, inter_node=1e6),  # slow links between nodes
    clusters.cluster(flops=1e6, intra_node=1e15, inter_node=1e15),  # work counts
    clusters.cluster(flops=1e15, intra_node=1e15, inter_node=1e15, launch=1.0),  # calls count
]


SMALL = {"length": 24, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "batch": 2, "dtype": torch.float32}


def told_best(machine: Cluster, mesh: Mesh, mask: Mask, layout: Layout) -> str:
    """The schedule that `explain` names on every rank, of a call as small as can be."""

    def rank(comm: Comm) -> str:
        told = ContextParallel(comm, layout=layout, ranks_per_node=mesh[1]).explain(mask=mask, device="cpu", **SMALL)
        assert told.cluster == machine
        return told.schedule

    (name,) = set(run_virtual(mesh[0], rank))
    return name


@pytest.mark.parametrize(
    ("machine", "mesh"),
    in_turn(MACHINES, [(3, None), (4, 2)]),
    ids=["cpu", "slow links between nodes", "work counts", "calls count"],
)
def test_auto_does_what_the_schedule_it_chose_does_to_the_last_bit_and_byte(machine, mesh, monkeypatch):
    monkeypatch.setattr("attnmesh.planner.catalog.default_cluster", lambda device: machine)
    inputs, (world, ranks_per_node) = random_inputs(24, heads=(4, 2), head_dim=8), mesh
    for mask, layout in ((Causal(), Contiguous()), (Full(), Zigzag()), (SlidingWindow(3), Contiguous())):
        name = told_best(machine, mesh, mask, layout)
        assert sent_by("auto", mesh, inputs, mask, layout) == planned(name, mesh, inputs, mask, layout)
        workload = Workload(
            shards(mask, layout, 24, world), Shape(2, 4, 2, 8, 4, 4), ranks_per_node or world, lse=True, device="cpu"
        )
        name = choose_schedule(workload, machine).schedule
        found = virtual_results(world, inputs, mask, layout, schedule="auto", ranks_per_node=ranks_per_node)
        assert_attention_close(found, inputs, mask)
        assert_same_bits(
            found, virtual_results(world, inputs, mask, layout, schedule=name, ranks_per_node=ranks_per_node)
        )


def test_machines_differ_in_what_is_best(monkeypatch):
    best = set()
    for machine in MACHINES:
        monkeypatch.setattr("attnmesh.planner.catalog.default_cluster", lambda device, machine=machine: machine)
        best.add(told_best(machine, (4, 2), Causal(), Contiguous()))
    assert len(best) >= 3


def test_packed_documents_are_exact_whatever_is_chosen():
    for at, lengths in enumerate(([5] * 8, [1, 30, 2, 7], [40])):
        mask = Causal() & Documents(lengths)
        inputs = random_inputs(40, heads=(4, 2), head_dim=8)
        for turn, layout in enumerate((Zigzag(), Balanced(mask), Contiguous())):  # on each mesh with some lengths
            world, ranks_per_node = ((3, None), (4, 2))[(at + turn) % 2]
            found = virtual_results(world, inputs, mask, layout, schedule="auto", ranks_per_node=ranks_per_node)
            assert_attention_close(found, inputs, mask)


def test_a_copy_of_a_model_attends_over_the_same_ranks():
    def rank(comm: Comm) -> bool:
        layer = torch.nn.Identity()
        layer.cp = ContextParallel(comm)
        return copy.deepcopy(layer).cp is layer.cp

    assert run_virtual(2, rank) == [True, True]
