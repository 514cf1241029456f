"""What the host does in a repeated call over ranks, counted in function calls instead of seconds, and what it keeps.

A bound may be lowered by a change, not raised. Counted are the calls of this library's functions, and of C functions by
them, outside of the kernels' own code (`ops/dense`, and the merges of states), which has bounds of its own.
"""

import gc
import sys
import weakref
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path

import pytest
import torch

import attnmesh as am
from attnmesh.comm import SoloComm, base
from attnmesh.ops.dense.aten import Aten
from attnmesh.testing.attention import random_inputs
from benchmarks.one_rank import OneRankComm

SOURCE = str(Path(am.__file__).parent)
KERNELS = tuple(f"{SOURCE}/{path}" for path in ("ops/dense/", "ops/merge.py", "core/state.py", "core/state.py"))


def counted_calls(function: Callable[[], object]) -> int:
    """The function calls of the library in a repeat of `function`."""
    count = 0

    def notice(frame, event, _):
        nonlocal count
        path = frame.f_code.co_filename
        count += event in ("call", "c_call") and path.startswith(SOURCE) and not path.startswith(KERNELS)

    for _ in range(3):
        function()
    before = sys.getprofile()
    sys.setprofile(notice)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def repeated_call(comm: OneRankComm | None, *, backward: bool, **options) -> Callable[[], None]:
    """A call of one rank, whose peers always agree."""
    cp = am.ContextParallel(comm, **options)
    q, k, v, grad = torch.randn(1, 4, 32, 16), *torch.randn(2, 1, 2, 32, 16), torch.randn(1, 4, 32, 16)
    inputs = [x.requires_grad_(backward) for x in (q, k, v)]

    def call() -> None:
        if comm is not None:
            comm.begin()
        out = cp.attention(*inputs)
        if backward:
            torch.autograd.grad(out, inputs, grad)

    return call


BOUNDS = {  # ranks, and the calls of a forward, and of a forward and backward
    "one rank": (1, {}, 19, 36),
    "ring": (8, {"schedule": "ring"}, 170, 446),
    "allgather": (8, {"schedule": "allgather"}, 194, 536),
    "ulysses": (4, {"schedule": "ulysses"}, 292, 537),
    "ring+ring": (8, {"schedule": "ring+ring", "ranks_per_node": 4}, 361, 979),
    "ulysses+ring": (4, {"schedule": "ulysses+ring", "ranks_per_node": 2}, 311, 672),
    "ulysses+allgather": (4, {"schedule": "ulysses+allgather", "ranks_per_node": 2}, 293, 654),
}


def test_a_repeated_call_makes_few_function_calls():
    above = {}
    for name, (world, options, *bounds) in BOUNDS.items():
        for backward, bound in zip((False, True), bounds, strict=True):
            comm = OneRankComm(1, world) if world > 1 else None
            calls = counted_calls(repeated_call(comm, backward=backward, **options))
            if calls > bound:
                above[name, backward] = calls
    assert not above


def test_a_mask_that_is_made_for_every_call_makes_no_more_function_calls():
    """As most programs do. Another window is another call; a mask of documents is known by its identity."""
    comm = OneRankComm(1, 8)
    cp = am.ContextParallel(comm, schedule="ring")
    q, mask = torch.randn(1, 2, 32, 16), am.SlidingWindow(100)

    def call(mask: am.Mask) -> torch.Tensor:
        comm.begin()
        return cp.attention(q, q, q, mask=mask)

    equal = iter([am.SlidingWindow(100) for _ in range(9)])
    assert counted_calls(lambda: call(next(equal))) <= counted_calls(lambda: call(mask))
    assert not torch.equal(call(am.SlidingWindow(3)), call(mask))


def test_a_stage_of_a_ring_makes_few_function_calls():
    def per_stage(*, backward: bool) -> float:
        few, many = (
            counted_calls(repeated_call(OneRankComm(1, world), backward=backward, schedule="ring")) for world in (4, 12)
        )
        return (many - few) / 8

    assert per_stage(backward=False) <= 10.5
    assert per_stage(backward=True) <= 33


def test_ranks_agree_on_a_repeated_call_in_few_function_calls():
    """The agreement and the log: what a call costs because there are other ranks."""
    agreement = base.Agreement(OneRankComm(0, 2), "attention", {"mask": am.Causal(), "length": 64})
    assert counted_calls(agreement.begin) <= 4


# What is kept.


@pytest.mark.parametrize("schedule", ["ring", "allgather", "ulysses", "ring+ring"])
def test_kernels_get_the_same_visibility_in_every_repeat(schedule, monkeypatch):
    """So that they can find what they prepared for it by identity."""
    seen: list[list[int]] = []
    for name in ("forward", "backward"):

        def compute(self, call, *rest, original):
            seen[-1].append(id(call.visibility))
            original(self, call, *rest)

        monkeypatch.setattr(Aten, name, partialmethod(compute, original=getattr(Aten, name)))
    ranks_per_node = 2 if schedule == "ring+ring" else None
    call = repeated_call(OneRankComm(1, 4), backward=True, schedule=schedule, ranks_per_node=ranks_per_node)
    for _ in range(3):
        seen.append([])
        call()
    assert seen[0]
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("schedule", ["ring", "allgather", "ulysses", "ring+ring", "ulysses+ring"])
def test_nothing_keeps_the_tensors_of_a_call(schedule):
    cp = am.ContextParallel(OneRankComm(1, 4), schedule=schedule, ranks_per_node=2 if "+" in schedule else None)
    gc.disable()  # reference counts alone must free them: memory of a GPU does not wait for a collection
    try:
        tensors = [torch.randn(1, 4, 8, 16, requires_grad=True) for _ in range(3)]
        out = cp.attention(*tensors)
        grads = torch.autograd.grad(out, tensors, torch.ones_like(out))
        kept = [weakref.ref(x) for x in (*tensors, out, *grads)]
        del tensors, out, grads
        assert not [x for x in kept if x() is not None]
    finally:
        gc.enable()


def test_calls_with_masks_that_come_and_go_have_their_own_visible_keys():
    """A repeated call is known by the identity of its mask, and a new object may be where another one was."""
    q, k, v, *_ = random_inputs(24)

    def rank(comm):
        cp = am.ContextParallel(comm, schedule="ring")
        shards = [cp.shard(x, 2) for x in (q, k, v)]
        outs = [cp.attention(*shards, mask=am.SlidingWindow(size), length=24) for size in (1, 9, 1, 3) * 3]
        return [cp.unshard(out, 2, 24) for out in outs]

    for outs in am.run_virtual(2, rank):
        for out, size in zip(outs, (1, 9, 1, 3) * 3, strict=True):
            torch.testing.assert_close(out, am.attention(q, k, v, mask=am.SlidingWindow(size)))


def test_an_argument_of_another_type_is_refused_after_valid_calls():
    """True equals 1 and 1.0, and a list that is equal to nothing is not hashable."""
    cp = am.ContextParallel(SoloComm())
    q = torch.randn(1, 1, 1, 16)
    cp.attention(q, q, q, length=1, scale=1.0)
    for options, text in (
        ({"length": True}, "length must be an integer"),
        ({"scale": True}, "scale must be a finite number"),
        ({"scale": [1.0]}, "scale must be a finite number"),
        ({"return_lse": 0}, "return_lse must be True or False"),
    ):
        with pytest.raises(ValueError, match=text):
            cp.attention(q, q, q, **({"length": 1, "scale": 1.0} | options))


def test_ranks_compare_a_repeated_call_again_when_agreements_were_forgotten(monkeypatch):
    """All forget in the same call, so that none waits for others that remember."""
    monkeypatch.setattr(base, "_MAX_REMEMBERED", 2)

    def rank(comm):
        cp, x = am.ContextParallel(comm, schedule="ring"), torch.randn(1, 1, 4, 16)
        compared = []
        compare = comm._compare
        comm._compare = lambda signature: compared.append(signature.operation) or compare(signature)
        for length in (8, 8, None, 8, None, 8):  # None has a value of its own: how the length was found
            cp.attention(x, x, x, length=length)
            if length is None:
                comm.agree("something else", {"round": len(compared)})
        return len(compared)

    counts = am.run_virtual(2, rank)
    assert counts[0] == counts[1] > 4
