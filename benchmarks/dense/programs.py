"""The programs that are compared: cuDNN and FlashAttention-2 through torch, FlexAttention, and our own kernels.

A forward returns out and, if the kernel gives it, lse. A backward is the whole call as torch's kernels do it: the row
sums, and gradients in the dtype of the inputs. A stage of ours is what a ring launches: it continues a float32 state,
or adds to float32 gradients with row sums that are given.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmesh.core.state import State
from benchmarks.dense.cases import Case, Inputs, Part, mask_mod, variants
from benchmarks.dense.checks import Saved
from benchmarks.peers import PEERS, compile_flex, one_device

aten = torch.ops.aten
Results = dict[str, Tensor]

FLEX, TRITON, GLUON, STAGE, SAME_BITS = "FlexAttention", "Triton", "Gluon", "Gluon stage", "Gluon deterministic"
THEIRS = (*PEERS, FLEX)
_LONGEST_WITH_ALL = 32 * 1024  # beyond it, a run takes too long for programs that no goal refers to


class RefusalError(Exception):
    """The kernel does not serve the call."""


class Program(NamedTuple):
    """`run`; if it works in place, `begin` brings its memory to the start. The time of `less` is not counted."""

    run: Callable[[], Results]
    begin: Callable[[], object] = lambda: None
    less: Callable[[], Results] | None = None


def names(case: Case, *, with_variants: bool) -> list[str]:
    """The programs of a case, peers first."""
    peers = PEERS if case.causal else (FLEX,)
    tried = variants(case) if with_variants else ({},)
    if case.length > _LONGEST_WITH_ALL:
        return [case.peer, *map(label, tried)]
    others = [STAGE] if (case.key_dim, case.value_dim) == (128, 128) else []
    if others and case.part is Part.BACKWARD:
        others.append(SAME_BITS)
    return [*peers, TRITON, *map(label, tried), *others]


def label(variant: dict[str, Any]) -> str:
    """The Gluon kernel with a change to its tiles."""
    return " ".join([GLUON, *(f"{field}={int(value)}" for field, value in variant.items())])


def build(name: str, case: Case, x: Inputs, saved: Saved | None) -> Program:
    """One of the `names`, on these inputs; a backward also needs what the forward left."""
    if saved is None:
        return _build_forward(name, case, x)
    return _build_backward(name, case, x, saved)


def save_forward(x: Inputs) -> Saved:
    """What the Triton kernels leave for a backward."""
    from attnmesh.ops.dense import triton_backward, triton_forward

    out, lse = triton_forward.forward(x.q, x.k, x.v, **x.arguments, state=None, out_dtype=x.q.dtype)
    return Saved(out, lse, triton_backward.delta(out, x.grad_out, None))


def _build_forward(name: str, case: Case, x: Inputs) -> Program:
    if name in PEERS:
        return Program(lambda: {"out": one_device(name, x.q, x.k, x.v, None)})
    if name == FLEX:
        flex = _lazy_flex(case)
        return Program(lambda: {"out": flex()(x.q, x.k, x.v)})
    if name == TRITON:
        from attnmesh.ops.dense import triton_forward

        run = partial(triton_forward.forward, x.q, x.k, x.v, **x.arguments, state=None, out_dtype=x.q.dtype)
        return Program(lambda: run()._asdict())
    gluon = _gluon_forward(x)
    forward = partial(gluon.forward, x.q, x.k, x.v, **x.arguments)
    if name == STAGE:
        shape = (*x.q.shape[:3], x.v.shape[3])
        state = State.identity(shape, dtype=torch.float32, device=x.q.device)
        return Program(
            lambda: forward(state=state, out_dtype=torch.float32)._asdict(),
            begin=lambda: (state.out.zero_(), state.lse.fill_(-torch.inf)),
        )
    tiles = gluon.pick_tiles(case.key_dim, case.value_dim)._replace(**_variant(name, case))
    return Program(lambda: forward(state=None, out_dtype=x.q.dtype, tiles=tiles)._asdict())


def _build_backward(name: str, case: Case, x: Inputs, saved: Saved) -> Program:
    if name == "cuDNN":
        return Program(_cudnn_backward(x))
    if name == "FlashAttention-2":
        return Program(_flash_backward(x))
    if name == FLEX:
        return _flex_backward(case, x)
    from attnmesh.ops.dense import triton_backward

    inputs = (x.q, x.k, x.v, x.grad_out, saved.lse)

    def whole(backward: Callable[..., None], **how: Any) -> Results:
        delta = triton_backward.delta(saved.out, x.grad_out, None)
        grads = [torch.empty_like(t) for t in (x.q, x.k, x.v)]
        backward(*inputs, delta, **x.arguments, **_named(grads, "grad_"), overwrite=True, **how)
        return _named(grads, "d")

    if name == TRITON:
        return Program(partial(whole, triton_backward.backward))
    gluon = _gluon_backward(x)
    if name == STAGE:
        totals = [torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (x.q, x.k, x.v)]

        def stage() -> Results:
            gluon.backward(*inputs, saved.delta, **x.arguments, **_named(totals, "grad_"))
            return _named(totals, "d")

        return Program(stage, begin=lambda: [total.zero_() for total in totals])
    if name == SAME_BITS:
        return Program(partial(whole, gluon.backward, deterministic=True))
    tiles = gluon.BackwardTiles.pick(x.q, x.v, causal=x.causal)._replace(**_variant(name, case))
    return Program(partial(whole, gluon.backward, tiles=tiles))


def _named(grads: list[Tensor], prefix: str) -> Results:
    return dict(zip((f"{prefix}q", f"{prefix}k", f"{prefix}v"), grads, strict=True))


def _variant(name: str, case: Case) -> dict[str, Any]:
    return next(variant for variant in variants(case) if label(variant) == name)


def _gluon_forward(x: Inputs) -> Any:
    from attnmesh.ops.dense import gluon_forward

    _need_hopper(x)
    if (why := gluon_forward.why_not(x.q, x.v)) is not None:
        raise RefusalError(why)
    return gluon_forward


def _gluon_backward(x: Inputs) -> Any:
    from attnmesh.ops.dense import gluon_backward

    _need_hopper(x)
    if (why := gluon_backward.why_not(x.q, x.v)) is not None:
        raise RefusalError(why)
    return gluon_backward


def _need_hopper(x: Inputs) -> None:
    if torch.cuda.get_device_capability(x.q.device)[0] != 9:
        raise RefusalError("its kernel needs a Hopper GPU")


# Peers' own forwards run before their backwards are timed: each reads the results in the layout that it writes.


def _cudnn_backward(x: Inputs) -> Callable[[], Results]:
    @cache
    def forward() -> Any:
        return aten._scaled_dot_product_cudnn_attention(x.q, x.k, x.v, None, True, 0.0, True, False, scale=x.scale)

    def run() -> Results:
        out, lse, _, _, q_len, kv_len, seed, offset, *_ = forward()
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            x.grad_out, x.q, x.k, x.v, out, lse, seed, offset, None, None, None, q_len, kv_len, 0.0, True, scale=x.scale
        )
        return _named(list(grads), "d")

    return run


def _flash_backward(x: Inputs) -> Callable[[], Results]:
    q, k, v, grad_out = (t.transpose(1, 2) for t in (x.q, x.k, x.v, x.grad_out))
    sizes = (None, None, x.q.shape[2], x.k.shape[2], 0.0, True)

    @cache
    def forward() -> Any:
        return aten._flash_attention_forward(q, k, v, *sizes, False, scale=x.scale)

    def run() -> Results:
        out, lse, *state, _ = forward()
        grads = aten._flash_attention_backward(grad_out, q, k, v, out, lse, *sizes, *state, scale=x.scale)
        return _named([grad.transpose(1, 2) for grad in grads], "d")

    return run


def _flex_backward(case: Case, x: Inputs) -> Program:
    """Forward and backward, less the forward: a graph of a backward alone cannot be captured through autograd."""
    flex = _lazy_flex(case)
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]

    def forward() -> Results:
        return {"out": flex()(*leaves).detach()}

    def run() -> Results:
        grads = torch.autograd.grad(flex()(*leaves), leaves, x.grad_out)
        return _named(list(grads), "d")

    return Program(run, less=forward)


def _lazy_flex(case: Case) -> Callable[[], Callable[..., Tensor]]:
    """Compiled at the first call: what it cannot do is that call's error."""
    return cache(lambda: compile_flex(mask_mod(case.mask), case.length))
