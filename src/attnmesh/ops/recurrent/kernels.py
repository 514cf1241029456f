"""Recurrences with one decay per head on GPUs: the gated delta rule, Mamba-2 and lightning attention in Triton.

A forward is two launches: what chunks need no state for, then the pass over them that writes the outputs. Nothing but
the inputs is saved: the backward computes the states of all chunks again, their gradients in reverse, and then the
gradients of all inputs, in parallel over chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnmesh.core.segment import Segment
from attnmesh.ops.launch import Launch, Recent, cdiv, interpreted, repeat
from attnmesh.ops.recurrent.layer import Chunks
from attnmesh.utils.optional import installed

KEY_DIM = 128  # of all tiles: fewer channels of keys are filled up with 0
_VALUE_DIMS = (64, 128)  # that have run on a GPU
_launches: Recent[Launch] = Recent()


class Inputs(NamedTuple):
    """The inputs of `S = exp(g) S`, then `S += k u^T`; the output is `scale q^T S + skip v`.

    `u` is `beta v`, or with `delta` the delta rule's `beta (v - k^T S)`. Without `beta` it is 1, without `skip` 0. q
    and k are [B, G, S, K], v is [B, H, S, V], g and beta are [B, H, S], and skip is [H], not with `delta`; `ages` as
    `document_ages` returns them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    skip: Tensor | None
    ages: Tensor | None
    scale: float
    delta: bool


class Tiles(NamedTuple):
    """Positions of a chunk, columns of a state per program of a pass, and (warps, pipeline stages) of every kernel."""

    chunk: int
    columns: int
    prepare: tuple[int, int]
    states: tuple[int, int]
    state_gradients: tuple[int, int]
    gradients: tuple[int, int]
    delta_gradients: tuple[int, int]


# By bytes per element: what ran on an H200 with Triton 3.6. All widths take them, filled up with 0: a run with 32
# columns and 16-bit inputs ended in an illegal memory access, whose cause is not known.
TILES = {
    2: Tiles(64, 64, (4, 1), (4, 3), (4, 2), (8, 1), (8, 1)),
    4: Tiles(32, 32, (4, 1), (4, 2), (4, 2), (8, 1), (8, 1)),
}


def why_no_kernels(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> str | None:
    """Why the kernels do not serve a layer with these inputs; None if they do."""
    if not installed("triton"):
        return "Triton is not installed"
    if not (q.is_cuda or q.is_meta) and not interpreted():  # plans are made with tensors that have no data
        return f"kernels need a GPU, and q is on {q.device}"
    if len({x.dtype for x in (q, k, v)}) > 1 or q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"queries, keys and values must be all float16, bfloat16 or float32, not {q.dtype}, {k.dtype}, {v.dtype}"
    if any(x is not None and x.dtype == torch.float64 for x in others):
        return "a decay or a step is float64"
    if q.shape[-1] > KEY_DIM:
        return f"states have at most {KEY_DIM} rows in registers, and key_dim is {q.shape[-1]}"
    if 0 in q.shape or 0 in v.shape:
        return "a dimension is 0"
    if not interpreted() and (q.dtype == torch.float16 or q.shape[-1] != KEY_DIM or v.shape[-1] not in _VALUE_DIMS):
        served = f"bfloat16 and float32 with key_dim {KEY_DIM} and value_dim {' or '.join(map(str, _VALUE_DIMS))}"
        return f"on GPUs only {served} are tested, not {q.dtype} with {q.shape[-1]} and {v.shape[-1]}"
    return None


class _Prepared(NamedTuple):
    """What chunks need no state for; see `triton_chunks`."""

    p: Tensor
    t: Tensor | None
    w: Tensor | None
    u: Tensor
    gates: Tensor
    whole: Tensor


class KernelChunks(Chunks):
    """A range of positions of such a recurrence."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs._replace(q=_rows(inputs.q), k=_rows(inputs.k), v=_rows(inputs.v))
        self._tiles = TILES[inputs.q.element_size()]
        self._chunks = cdiv(inputs.q.shape[2], self._tiles.chunk)
        self._prepared: _Prepared | None = None

    def run(self, state: Tensor) -> tuple[Tensor, Tensor]:
        out, final = _Run.apply(self, state, *self.tensors)  # type: ignore[no-untyped-call]
        return out, final

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The inputs that have gradients: q, k, v, g, beta and skip."""
        return self._inputs[:6]

    def of(self, tensors: Sequence[Any]) -> KernelChunks:
        """The same range of inputs that autograd has kept, or of their copies without a gradient."""
        return KernelChunks(self._inputs._replace(**dict(zip(Inputs._fields, tensors, strict=False))))

    def total(self) -> Segment:
        """The segment, without a gradient: see `state_gradient`."""
        v, g = self._inputs.v, self._inputs.g
        batch, heads, _, value_dim = v.shape
        key_dim = self._inputs.k.shape[-1]
        with torch.no_grad():
            prepared = self._prepare()
            update = g.new_empty(batch, heads, key_dim, value_dim, dtype=torch.float32)
            if self._inputs.delta:
                transition = g.new_empty(batch, heads, key_dim, key_dim, dtype=torch.float32)
                self._states(prepared, final=update, transition=transition)
            else:
                transition = prepared.whole.view(batch, heads, -1).prod(-1)[..., None, None]
                self._states(prepared, final=update)
        return Segment(transition, update)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """`run` without a gradient."""
        out, final = torch.empty_like(self._inputs.v), torch.empty_like(state, memory_format=torch.contiguous_format)
        self._states(self._prepare(), initial=state.contiguous(), final=final, out=out)
        return out, final

    def state_gradient(self, by_out: Tensor) -> Tensor:
        """The gradient of the state before the range, from that of the outputs, if nothing reads the state after it.

        With the segment of the range, that is all which a reversed scan over ranges needs.
        """
        batch, heads, _, value_dim = self._inputs.v.shape
        by_initial = by_out.new_empty(batch, heads, self._inputs.k.shape[-1], value_dim, dtype=torch.float32)
        self._state_gradients(self._prepare(for_gradients=True), _rows(by_out), None, by_initial)
        return by_initial

    def backward(self, state: Tensor, by_out: Tensor, by_final: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of `tensors` and of the state before the range, from the gradients of the results of `run`."""
        by_out = _rows(by_out)
        prepared = self._prepare(for_gradients=True)
        states = self._new_states(prepared)
        values = torch.empty_like(prepared.u)
        self._states(prepared, initial=state.contiguous(), states=states, values=values)
        by_initial = torch.empty_like(state, memory_format=torch.contiguous_format)
        by_states, by_values = torch.empty_like(states), torch.empty_like(values)
        by_final = None if by_final is None else by_final.contiguous()
        self._state_gradients(prepared, by_out, by_final, by_initial, by_states, by_values)
        grads = self._gradients(prepared, by_out, states, values, by_states, by_values)
        return *grads, by_initial

    def _prepare(self, *, for_gradients: bool = False) -> _Prepared:
        from attnmesh.ops.recurrent.triton_chunks import prepare_kernel

        q, k, v, g, beta, _, ages, scale, delta = self._inputs
        if self._prepared is not None and (self._prepared.t is not None or not (delta and for_gradients)):
            return self._prepared
        (batch, heads, length, value_dim), (_, groups, _, key_dim) = v.shape, q.shape
        tiles, size, count = self._tiles, self._tiles.chunk, batch * heads * self._chunks
        columns = self._tiles.columns
        prepared = _Prepared(
            q.new_empty(count, size, size),
            q.new_empty(count, size, size) if delta and for_gradients else None,
            q.new_empty(count, size, KEY_DIM) if delta else None,
            q.new_empty(count, cdiv(value_dim, columns) * columns, size),
            q.new_empty(count, 2, size, dtype=torch.float32),
            q.new_empty(count, dtype=torch.float32),
        )
        warps, stages = tiles.prepare
        repeat(
            _launches, prepare_kernel, (count,),
            (
                *_strided(q, k, v, g, beta), ages, _batch_stride(ages),
                prepared.p, prepared.t, prepared.w, prepared.u, prepared.gates, prepared.whole,
                length, self._chunks, heads, groups, scale,
            ),
            K=key_dim, V=value_dim, BK=KEY_DIM, BV=columns, C=size, DELTA=delta,
            **self._precision, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        self._prepared = prepared
        return prepared

    def _states(
        self, prepared: _Prepared, *, initial: Tensor | None = None, final: Tensor | None = None,
        transition: Tensor | None = None, states: Tensor | None = None, values: Tensor | None = None,
        out: Tensor | None = None,
    ) -> None:  # fmt: skip
        from attnmesh.ops.recurrent.triton_chunks import states_kernel

        q, k, v = self._inputs[:3]
        (batch, heads, length, value_dim), (_, groups, _, key_dim) = v.shape, q.shape
        columns, (warps, stages) = self._tiles.columns, self._tiles.states
        blocks = cdiv(value_dim, columns) + (0 if transition is None else cdiv(key_dim, columns))
        repeat(
            _launches, states_kernel, (blocks * batch * heads,),
            (
                *_strided(q, k), prepared.p, prepared.w, prepared.u, prepared.gates, prepared.whole,
                initial, final, transition, states, values, *_strided(out), self._inputs.skip, *_strided(v),
                length, self._chunks, heads, groups,
            ),
            K=key_dim, V=value_dim, BK=KEY_DIM, BV=columns, C=self._tiles.chunk, BLOCKS=blocks,
            DELTA=self._inputs.delta, PRECISION=self._precision["PRECISION"], num_warps=warps, num_stages=stages,
        )  # fmt: skip

    def _state_gradients(
        self, prepared: _Prepared, by_out: Tensor, by_final: Tensor | None, by_initial: Tensor,
        by_states: Tensor | None = None, by_values: Tensor | None = None,
    ) -> None:  # fmt: skip
        from attnmesh.ops.recurrent.triton_chunks import state_gradients_kernel

        q, k, v = self._inputs[:3]
        (batch, heads, length, value_dim), (_, groups, _, key_dim) = v.shape, q.shape
        columns, (warps, stages) = self._tiles.columns, self._tiles.state_gradients
        blocks = cdiv(value_dim, columns)
        repeat(
            _launches, state_gradients_kernel, (blocks * batch * heads,),
            (
                *_strided(q, k, by_out), prepared.p, prepared.w, prepared.gates, prepared.whole,
                by_final, by_initial, by_states, by_values, length, self._chunks, heads, groups,
            ),
            K=key_dim, V=value_dim, BK=KEY_DIM, BV=columns, C=self._tiles.chunk, BLOCKS=blocks,
            DELTA=self._inputs.delta, PRECISION=self._precision["PRECISION"], num_warps=warps, num_stages=stages,
        )  # fmt: skip

    def _gradients(
        self, prepared: _Prepared, by_out: Tensor, states: Tensor, values: Tensor, by_states: Tensor, by_values: Tensor
    ) -> tuple[Tensor | None, ...]:
        from attnmesh.ops.recurrent.triton_chunks import delta_gradients_kernel, gradients_kernel

        q, k, v, g, beta, skip, ages, scale, delta = self._inputs
        (batch, heads, length, value_dim), (_, groups, _, key_dim) = v.shape, q.shape
        splits = min(heads // groups, max(1, _PROGRAMS // (self._chunks * batch * groups)))
        dtype = torch.float32 if splits > 1 else q.dtype
        by_q, by_k = (q.new_empty(splits, batch, groups, length, key_dim, dtype=dtype) for _ in range(2))
        by_v, by_g = torch.empty_like(v), g.new_empty(g.shape)
        by_beta = None if beta is None else beta.new_empty(beta.shape)
        by_skip = None if skip is None else q.new_empty(batch, heads, self._chunks, dtype=torch.float32)
        part_of_k, part_of_g = by_k, by_g
        if delta:
            part_of_k, part_of_g = (x.new_empty(x.shape, dtype=torch.float32) for x in (by_k, by_g))
        columns = self._tiles.columns
        columns *= 2 if values.shape[1] % (2 * columns) == 0 else 1
        grid, sizes = (splits * self._chunks * batch * groups,), (length, self._chunks, heads, groups, splits)
        widths = {"K": key_dim, "V": value_dim, "BK": KEY_DIM, "BV": columns, "C": self._tiles.chunk}
        warps, stages = self._tiles.gradients
        repeat(
            _launches, gradients_kernel, grid,
            (
                *_strided(q, k, v, g, beta), ages, _batch_stride(ages), *_strided(by_out),
                prepared.p, states, values, by_states, by_values, by_q, part_of_k, *_strided(by_v), part_of_g, by_beta,
                skip, by_skip, *sizes, scale,
            ),
            **widths, DELTA=delta, **self._precision, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        if delta:
            warps, stages = self._tiles.delta_gradients
            repeat(
                _launches, delta_gradients_kernel, grid,
                (
                    *_strided(k, v, g, beta), ages, _batch_stride(ages),
                    prepared.t, prepared.w, prepared.u, states, by_values, part_of_k, part_of_g,
                    by_k, *_strided(by_v), by_g, by_beta, *sizes,
                ),
                **widths, **self._precision, num_warps=warps, num_stages=stages,
            )  # fmt: skip
        by_q, by_k = (x.sum(0).to(q.dtype) if splits > 1 else x[0] for x in (by_q, by_k))
        return by_q, by_k, by_v, by_g, by_beta, None if by_skip is None else by_skip.sum((0, 2))

    def _new_states(self, prepared: _Prepared) -> Tensor:
        """Memory for the state of every chunk, transposed."""
        return prepared.u.new_empty(*prepared.u.shape[:2], KEY_DIM)

    @property
    def _precision(self) -> dict[str, Any]:
        exact = self._inputs.q.dtype == torch.float32
        return {"EXACT": exact, "PRECISION": "tf32x3" if exact else "tf32"}


_PROGRAMS = 512  # that the gradients are divided into at least, if heads of a group can be divided


class _Run(torch.autograd.Function):
    """The outputs of a range and the state after it."""

    @staticmethod
    def forward(ctx: Any, chunks: KernelChunks, state: Tensor, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(state, *tensors)
        ctx.of = chunks.of
        return chunks.of(tensors).forward(state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out: Tensor, by_final: Tensor) -> tuple[Tensor | None, ...]:
        state, *tensors = ctx.saved_tensors
        *grads, by_state = ctx.of(tensors).backward(state, by_out, by_final)
        return None, by_state, *grads


def _rows(x: Tensor) -> Tensor:
    """Rows whose columns are adjacent."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strided(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Every tensor and its strides over batch, heads and positions."""
    return tuple(y for x in tensors for y in (x, (0, 0, 0) if x is None else x.stride()[:3]))


def _batch_stride(ages: Tensor | None) -> int:
    return 0 if ages is None or ages.shape[0] == 1 else ages.stride(0)
