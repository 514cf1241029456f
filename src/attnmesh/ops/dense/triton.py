"""Backend on the library's Triton kernels: any mask by row bounds, float32 states continued in place, deterministic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnmesh.core.optional import installed, require
from attnmesh.core.state import State
from attnmesh.ops.dense.call import Call, Grads, Result
from attnmesh.ops.merge import StateAccumulator
from attnmesh.plan.blocks import Block, Kind, key_hull

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Triton:
    """Backend on the kernels in `triton_forward` and `triton_backward`."""

    name = "triton"

    def refusal(self, call: Call) -> str | None:
        """The reason why this backend cannot serve the forward; None if it can."""
        q = call.q
        if q.dtype not in _DTYPES:
            return f"its kernels take fp16, bf16 and fp32, not {q.dtype}"
        for head_dim in (q.shape[3], call.v.shape[3]):
            if not 16 <= head_dim <= 576:
                return f"its kernels take head_dim 16 to 576, not {head_dim}"
        if not installed("triton"):
            return "triton is not installed (pip install 'attnmesh[triton]')"
        if not q.is_cuda and not _interpreted():
            return "it needs a GPU (or TRITON_INTERPRET=1 set before triton is imported)"
        return None

    def backward_refusal(self, call: Call, *, grad_lse: bool = False) -> str | None:
        """The reason why this backend cannot serve the backward, with or without a gradient of lse; None if it can."""
        return self.refusal(call)

    def _forward(self) -> Callable[..., State]:
        kernel: Callable[..., State] = require("attnmesh.ops.dense.triton_forward", extra="triton").forward
        return kernel

    def _backward(self) -> Callable[..., None]:
        kernel: Callable[..., None] = require("attnmesh.ops.dense.triton_backward", extra="triton").backward
        return kernel

    def forward(self, call: Call, total: StateAccumulator) -> None:
        """Merges the attention of this call into `total`."""
        # The kernel continues the state it is given, so that partial results never round to bf16. It selects scores of
        # rows without keys away. The last call covers all rows: they are rounded, and have sinks.
        kernel = self._forward()
        call, blocks = _launches(call, zero_rows=False, all_rows=total.last_call)
        for block in blocks:
            q, k, v = _sliced(call, block)
            if total.last_call:
                how = {"state": total.flush(), "out_dtype": q.dtype, "sinks": total.sinks}
                total.complete(kernel(q, k, v, **_arguments(call, block), **how))
                continue
            state = total.flush() if len(block.q) == call.q.shape[2] else total.total()
            if state is not None:
                rows = slice(block.q.start, block.q.stop)
                state = State(state.out[:, :, rows], state.lse[:, :, rows])
            new = kernel(q, k, v, **_arguments(call, block), state=state, out_dtype=torch.float32)
            if state is None:
                total.replace(new)

    def prepare(self, call: Call, result: Result) -> None:
        """Does nothing: its blocks do not run on two streams."""

    def backward(self, call: Call, result: Result, grads: Grads) -> None:
        """Adds the gradients of this call to `grads`."""
        kernel = self._backward()
        call, blocks = _launches(call, zero_rows=True)
        every = (grads.q, call.q, "q"), (grads.k, call.k, "k"), (grads.v, call.v, "v")
        wanted = {name: (grad, x) for grad, x, name in every if grad is not None}
        # The only call writes its gradients in their dtype; others add to float32, or write the first part of a sum.
        overwrite = all(grad.one_call for grad, _ in wanted.values())
        keys_wanted = [(grad, x) for name, (grad, x) in wanted.items() if name != "q"]
        first = not overwrite and len(blocks) == 1 and len(blocks[0].k) == call.k.shape[2]
        first = first and all(grad.empty and grad.shape == x.shape for grad, x in keys_wanted)
        for block in blocks:
            q, k, v = _sliced(call, block)
            rows, keys = slice(block.q.start, block.q.stop), slice(block.k.start, block.k.stop)
            if overwrite:
                whole = len(block.q) == call.q.shape[2] and len(block.k) == call.k.shape[2]
                new = torch.empty_like if whole else torch.zeros_like
                sums = {name: new(x) for name, (_, x) in wanted.items()}
            else:
                sums = {name: grad.total(overwritten=first and name != "q") for name, (grad, _) in wanted.items()}
            parts = {f"grad_{name}": x[:, :, rows if name == "q" else keys] for name, x in sums.items()}
            kernel(
                q, k, v, result.grad_out[:, :, rows], result.lse[:, :, rows], result.delta[:, :, rows],
                **_arguments(call, block), **parts, overwrite=overwrite, overwrite_keys=first,
            )  # fmt: skip
            if overwrite:
                for name, (grad, _) in wanted.items():
                    grad.add(sums[name])


def _launches(call: Call, *, zero_rows: bool, all_rows: bool = False) -> tuple[Call, tuple[Block, ...]]:
    """A block without a mask as it is; any others as one launch over all rows and the keys that blocks include.

    With `all_rows` a block of some of the rows needs a mask, too. A call with other masks is returned without the NaN
    that unseen keys (and rows without keys) may hold.
    """
    blocks = call.visibility.blocks
    masked = [block for block in blocks if block.kind is Kind.PARTIAL or block.sequences is not None]
    rows = range(call.q.shape[2])
    if len(blocks) > 1 or masked:
        call = call.with_unseen_zeroed(zero_rows=zero_rows)
    elif not all_rows or all(block.q == rows for block in blocks):
        return call, blocks
    return call, (Block(rows, key_hull(blocks), Kind.PARTIAL),)


def _sliced(call: Call, block: Block) -> Any:
    rows, keys = slice(block.q.start, block.q.stop), slice(block.k.start, block.k.stop)
    return call.q[:, :, rows], call.k[:, :, keys], call.v[:, :, keys]


def _arguments(call: Call, block: Block) -> dict[str, Any]:
    """The visible keys and the scores of a block, as both kernels take them."""
    rows, keys = slice(block.q.start, block.q.stop), slice(block.k.start, block.k.stop)
    bounds = None
    if block.kind is Kind.PARTIAL:
        first, end = call.visibility.bounds(call.q.device)
        if len(block.q) < call.q.shape[2] or len(block.k) < call.k.shape[2]:
            first, end = ((x[..., rows] - block.k.start).clamp_(0, len(block.k)) for x in (first, end))
        bounds = first, end
    tiles = require("attnmesh.ops.dense.triton_tiles", extra="triton")
    scores = call.scores
    positions: tuple[Any, Any] = (None, None)
    if scores.alibi_slopes is not None:
        q_positions, k_positions = call.visibility.positions(call.q.device)
        positions = q_positions[rows], k_positions[keys]
    terms = tiles.ScoreTerms(scores.softcap, scores.alibi_slopes, *positions)
    return {"scale": scores.scale, "causal": block.kind is Kind.CAUSAL, "bounds": bounds, "terms": terms}


def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)
