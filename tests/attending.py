"""What tests of attention share: random inputs, float64 results, and the rule that an answer must obey.

The error against float64 is at most twice that of the plain computation in the same precision (over everything),
and the worst position is at most four times as bad as the plain computation's worst position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from attnmesh import (
    Causal,
    Comm,
    ContextParallel,
    Contiguous,
    Documents,
    Full,
    Layout,
    Mask,
    SlidingWindow,
    Striped,
    Zigzag,
    run_virtual,
)
from attnmesh.ops.dense import reference

NAMES = ("out", "lse", "dq", "dk", "dv")
HEADS = {"mha": (2, 2), "gqa": (4, 2), "mqa": (3, 1)}
LAYOUTS = {"contiguous": Contiguous(), "zigzag": Zigzag(), "striped": Striped()}
MASKS = ("full", "causal", "window", "documents", "causal & documents", "causal & window", "all three")

# What is zero but for rounding: less than the rounding of the answer itself.
FLOOR = {
    torch.float64: 1e-13,
    torch.float32: 4 * torch.finfo(torch.float32).eps,
    torch.float16: torch.finfo(torch.float16).eps / 8,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps / 8,
}

Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def mask_named(name: str, length: int) -> Mask:
    """The mask of that name for `length` positions; one of the documents is empty."""
    documents = Documents([length // 5, 0, length // 2, length - length // 5 - length // 2])
    return {
        "full": Full(),
        "causal": Causal(),
        "window": SlidingWindow(9, 3),
        "documents": documents,
        "causal & documents": Causal() & documents,
        "causal & window": Causal() & SlidingWindow(11),
        "all three": Causal() & SlidingWindow(6, 2) & documents,
    }[name]


def drawn(
    q_len: int,
    k_len: int | None = None,
    *,
    heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype = torch.float32,
    batch: int = 2,
    head_dim: int = 16,
    seed: int = 0,
) -> list[Tensor]:
    """q, k, v and the gradients of out and lse."""
    generator = torch.Generator().manual_seed(seed)
    k_len = q_len if k_len is None else k_len

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, grad_out = (normal(batch, heads[0], q_len, head_dim) for _ in range(2))
    k, v = (normal(batch, heads[1], k_len, head_dim) for _ in range(2))
    grad_lse = normal(batch, heads[0], q_len).to(torch.float64 if dtype == torch.float64 else torch.float32)
    return [q, k, v, grad_out, grad_lse]


def differentiated(attend: Attend, inputs: Sequence[Tensor]) -> list[Tensor]:
    """out, lse, dq, dk, dv; the gradients flow through out and through lse."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out, lse = attend(*leaves)
    grads = torch.autograd.grad([out, lse], leaves, [inputs[3].to(out.dtype), inputs[4].to(lse.dtype)])
    return [out.detach(), lse.detach(), *grads]


def by_definition(
    inputs: Sequence[Tensor],
    mask: Mask,
    *,
    scale: float | None = None,
    q_at: Tensor | None = None,
    k_at: Tensor | None = None,
    plain: bool = False,
) -> list[Tensor]:
    """What attention is: in float64, or with `plain` as simply as can be in the inputs' own precision."""
    q, k = inputs[:2]
    q_at = torch.arange(q.shape[2]) if q_at is None else q_at.long()
    k_at = torch.arange(k.shape[2]) if k_at is None else k_at.long()
    scale = q.shape[3] ** -0.5 if scale is None else scale

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return reference.attention(q, k, v, mask, scale, q_at, k_at, plain=plain)

    return differentiated(attend, inputs if plain else [x.double() for x in inputs])


def assert_right(found: Sequence[Tensor], inputs: Sequence[Tensor], mask: Mask, **how: object) -> None:
    """Every result at every position obeys the rule. `how` is as in `by_definition`."""
    exact = by_definition(inputs, mask, **how)
    plain = by_definition(inputs, mask, **how, plain=True)
    for name, *three in zip(NAMES, found, plain, exact, strict=True):
        assert_near(name, *three, floor=FLOOR[inputs[0].dtype])


def assert_near(name: str, found: Tensor, plain: Tensor, exact: Tensor, *, floor: float) -> None:
    assert found.shape == exact.shape, name
    assert torch.equal(found.isfinite(), exact.isfinite()), f"{name}: NaN or inf where it should not be"
    assert torch.equal(found.isneginf(), exact.isneginf()), name
    size = _by_position(exact)
    if not size.numel():
        return
    one = (exact.numel() / size.numel()) ** 0.5  # the size of a position of ones: gradients cancel down from there
    error, allowed = (_by_position(x.double().sub(exact).nan_to_num(nan=0.0)) for x in (found, plain))
    bound = 2 * allowed.norm() + floor * (size.norm() + one)
    assert error.norm() <= bound, f"{name}: error {error.norm():.2e} > {bound:.2e}, of {size.norm():.2e}"
    bound, worst = 4 * allowed.max() + 4 * floor * (size.max() + one), int(error.argmax())
    assert error[worst] <= bound, f"{name}: position {worst} is off by {error[worst]:.2e} > {bound:.2e}"


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Norm of the error by norm of the answer."""
    return float((found.double() - exact).norm() / exact.norm())


def peak_bytes(fn: Callable[[], object]) -> int:
    """The most memory that torch holds at once on the CPU while `fn` runs, over what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        kept = fn()
    del kept
    sizes = [e.nbytes() for e in watched.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(sizes), default=0)


def _by_position(x: Tensor) -> Tensor:
    """The norm at each position of [B, H, S] or [B, H, S, D], leaving out what is -inf."""
    return x.nan_to_num(neginf=0.0).movedim(2, 0).flatten(1).norm(dim=1)


def shard_results(
    comm: Comm,
    inputs: Sequence[Tensor],
    mask: Mask,
    layout: Layout,
    *,
    scale: float | None = None,
    backend: str = "auto",
    schedule: str = "ring",
    ranks_per_node: int | None = None,
    key_layout: Layout | None = None,
) -> list[Tensor]:
    """One rank's shards of out, lse, dq, dk, dv. Keys may have a length and a layout of their own."""
    cp = ContextParallel(comm, layout=layout, schedule=schedule, backend=backend, ranks_per_node=ranks_per_node)
    length, key_length = inputs[0].shape[2], inputs[1].shape[2]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return cp.attention(
            q, k, v, mask=mask, scale=scale, length=length, key_length=None if key_length == length else key_length,
            key_layout=key_layout, return_lse=True,
        )  # fmt: skip

    return differentiated(attend, shards_of(inputs, comm, layout, key_layout))


def shards_of(inputs: Sequence[Tensor], comm: Comm, layout: Layout, key_layout: Layout | None = None) -> list[Tensor]:
    """One rank's shards of q, k, v and of the gradients of out and lse."""
    q, k, v, *grads = inputs
    sides = ((q, layout), (k, key_layout or layout), (v, key_layout or layout), *((x, layout) for x in grads))
    return [held.shard(x, 2, comm.world, comm.rank) for x, held in sides]


def ring_results(
    world: int, inputs: Sequence[Tensor], mask: Mask, layout: Layout, *, key_layout: Layout | None = None, **how: object
) -> list[Tensor]:
    """The whole out, lse, dq, dk, dv of `world` virtual ranks; around a ring unless `how` names another schedule."""
    shards = run_virtual(world, lambda comm: shard_results(comm, inputs, mask, layout, key_layout=key_layout, **how))
    held = [layout] * 3 + [key_layout or layout] * 2
    return [side.unshard(parts, 2) for side, parts in zip(held, zip(*shards, strict=True), strict=True)]
