"""The calls that are timed: every kind of kernel, through the library's own functions, at several sizes.

Attention is timed as schedules call it: full rectangles and causal squares, with fewer KV heads than query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from attnmesh.core.masks import Causal, Full
from attnmesh.ops.decode.api import decode_attention
from attnmesh.ops.dense.api import attention
from attnmesh.ops.recurrent.api import scan
from attnmesh.ops.recurrent.layers import GatedDeltaRule
from attnmesh.ops.sparse.attention import sparse_attention
from attnmesh.ops.sparse.indexer import indexer_topk
from attnmesh.planner.hardware import Curve
from attnmesh.planner.program import KernelKind
from attnmesh.planner.recurrent import BACKWARD, RecurrentShape

Run = Callable[[], Tensor]


@dataclass(frozen=True)
class KernelSample:
    """One call of a kind of kernel."""

    kind: KernelKind
    size: float  # in the unit of the kind: operations or bytes
    make: Callable[[], Run]  # creates the inputs, so that only one sample's inputs are in memory
    causal: bool = False  # whether it is a causal square
    before: Callable[[], Run] | None = None  # a call that `make` includes and whose time is subtracted


@dataclass(frozen=True)
class Sizes:
    """The sizes that are timed on a device type."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    sides: tuple[int, ...]  # rows and keys of an attention call
    long: tuple[tuple[int, int, int], ...]  # rows, query heads and KV heads of causal squares as in Ulysses
    matmuls: tuple[int, ...]  # rows, columns and depth of a matrix product
    copies: tuple[int, ...]  # rows that are copied, as into a message
    caches: tuple[int, ...]  # keys of a decode step
    sparse_rows: tuple[int, ...]
    sparse_keys: int
    sparse: tuple[int, int, int, int]  # heads, width of keys, width of values, keys per query
    indexer: tuple[int, int, int]  # heads, width, number of selected keys
    recurrent: tuple[int, ...]  # positions of a gated delta rule


_CPU = Sizes(
    torch.float32, 4, 2, 64, sides=(32, 64, 128, 256, 512, 1024, 2048), long=(), matmuls=(128, 512, 1024),
    copies=(16, 128, 1024, 8192), caches=(1024, 16384, 65536), sparse_rows=(16, 64), sparse_keys=2048,
    sparse=(16, 192, 128, 256), indexer=(16, 64, 256), recurrent=(128, 512, 2048),
)  # fmt: skip
_CPU_QUICK = Sizes(
    torch.float32, 4, 2, 64, sides=(64, 256, 512), long=(), matmuls=(128, 512), copies=(128, 4096), caches=(1024, 8192),
    sparse_rows=(8,), sparse_keys=512, sparse=(8, 192, 128, 128), indexer=(8, 64, 128), recurrent=(128, 512),
)  # fmt: skip
_CUDA = Sizes(
    torch.bfloat16, 32, 8, 128, sides=(256, 512, 1024, 2048, 4096, 8192, 16384, 32768), long=((131072, 8, 2),),
    matmuls=(64, 256, 512, 1024, 2048, 4096, 8192), copies=(1, 16, 64, 1024, 8192, 65536, 524288),
    caches=(1024, 8192, 65536, 524288), sparse_rows=(256, 1024, 4096), sparse_keys=32768,
    sparse=(128, 576, 512, 2048), indexer=(64, 128, 2048), recurrent=(512, 2048, 8192, 32768),
)  # fmt: skip
_CUDA_QUICK = Sizes(
    torch.bfloat16, 32, 8, 128, sides=(512, 2048, 8192), long=(), matmuls=(1024, 4096), copies=(1024, 65536),
    caches=(8192, 65536), sparse_rows=(256,), sparse_keys=8192, sparse=(128, 576, 512, 2048), indexer=(64, 128, 2048),
    recurrent=(2048, 8192),
)  # fmt: skip


def kernel_samples(device: str, *, quick: bool) -> list[KernelSample]:
    """All calls that are timed on a device, kind by kind."""
    sizes = {"cpu": (_CPU, _CPU_QUICK), "cuda": (_CUDA, _CUDA_QUICK)}[device][quick]
    kinds = [_attention, _matmuls, _copies, _decode, _sparse, _indexer, _recurrent]
    return [sample for kind in kinds for sample in kind(sizes, device)]


def kernel_curves(
    samples: Iterable[KernelSample], seconds: Sequence[float], *, causal: bool
) -> tuple[tuple[KernelKind, Curve], ...]:
    """The curve of every kind, from the seconds of each sample."""
    found: dict[KernelKind, list[tuple[float, float]]] = {}
    for sample, time in zip(samples, seconds, strict=True):
        if sample.causal == causal:
            found.setdefault(sample.kind, []).append((sample.size, time))
    return tuple((kind, Curve(tuple(sorted(pairs)))) for kind, pairs in found.items())


def empty_call(device: str) -> Run:
    """A call with almost no work: the overhead of any call."""
    one = torch.zeros(1, dtype=torch.float32, device=device)
    return lambda: one.add_(1)


def _attention(sizes: Sizes, device: str) -> Iterator[KernelSample]:
    for causal in (False, True):
        for side in sizes.sides:
            yield from _forward_and_backward(sizes, device, side, causal)
    for side, heads, kv_heads in sizes.long:
        yield from _forward_and_backward(replace(sizes, heads=heads, kv_heads=kv_heads), device, side, True)


def _forward_and_backward(sizes: Sizes, device: str, side: int, causal: bool) -> Iterator[KernelSample]:
    pairs = side * (side + 1) // 2 if causal else side * side
    operations = 4.0 * sizes.heads * sizes.head_dim * pairs
    given = partial(_attention_inputs, sizes, device, side, causal)
    yield KernelSample("attention", operations, partial(_forward, given), causal)
    if device == "cpu":  # the backward alone; on CUDA a graph has both, and the forward is subtracted
        yield KernelSample("attention backward", 2.5 * operations, partial(_backward, given), causal)
    else:
        both = partial(_forward_with_backward, given)
        yield KernelSample("attention backward", 2.5 * operations, both, causal, partial(_forward, given))


def _attention_inputs(sizes: Sizes, device: str, side: int, causal: bool) -> tuple[list[Tensor], Callable[[], Tensor]]:
    """q, k, v and the gradient of out, and their attention."""
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)
    drawn = [torch.randn(1, n, side, sizes.head_dim, device=device, dtype=sizes.dtype) for n in heads]
    q, k, v = (x.requires_grad_() for x in drawn[:3])
    return drawn, partial(attention, q, k, v, mask=Causal() if causal else Full())


def _forward(given: Callable[[], tuple[list[Tensor], Run]]) -> Run:
    return given()[1]


def _backward(given: Callable[[], tuple[list[Tensor], Run]]) -> Run:
    drawn, attend = given()
    out = attend()
    return lambda: torch.autograd.grad(out, drawn[:3], drawn[3], retain_graph=True)[0]


def _forward_with_backward(given: Callable[[], tuple[list[Tensor], Run]]) -> Run:
    drawn, attend = given()
    return lambda: torch.autograd.grad(attend(), drawn[:3], drawn[3])[0]


def _matmuls(sizes: Sizes, device: str) -> Iterator[KernelSample]:
    def product(n: int) -> Run:
        a, b = (torch.randn(n, n, device=device, dtype=sizes.dtype) for _ in range(2))
        return partial(torch.mm, a, b)

    return (KernelSample("matmul", 2.0 * n**3, partial(product, n)) for n in sizes.matmuls)


def _copies(sizes: Sizes, device: str) -> Iterator[KernelSample]:
    """Plain copies, and copies from [heads, rows] to [rows, heads], the order in messages."""

    def copy(rows: int) -> Run:
        x = torch.randn(1, sizes.kv_heads, rows, sizes.head_dim, device=device, dtype=sizes.dtype)
        return partial(torch.empty_like(x).copy_, x)

    def relayout(rows: int) -> Run:
        x = torch.randn(1, sizes.kv_heads, rows, sizes.head_dim, device=device, dtype=sizes.dtype)
        message = torch.empty(rows, 1, sizes.kv_heads, sizes.head_dim, device=device, dtype=sizes.dtype)
        return lambda: message.permute(1, 2, 0, 3).copy_(x)

    row = 2.0 * sizes.kv_heads * sizes.head_dim * sizes.dtype.itemsize  # bytes read and written
    for rows in sizes.copies:
        yield KernelSample("copy", rows * row, partial(copy, rows))
        yield KernelSample("relayout", rows * row, partial(relayout, rows))


def _decode(sizes: Sizes, device: str) -> Iterator[KernelSample]:
    def decode(keys: int) -> Run:
        q = torch.randn(1, sizes.heads, 1, sizes.head_dim, device=device, dtype=sizes.dtype)
        k, v = (
            torch.randn(1, sizes.kv_heads, keys, sizes.head_dim, device=device, dtype=sizes.dtype) for _ in range(2)
        )
        last = torch.full((1,), keys - 1, dtype=torch.int32, device=device)
        return partial(decode_attention, q, k, v, cur_pos=last)

    row = 2.0 * sizes.kv_heads * sizes.head_dim * sizes.dtype.itemsize
    return (KernelSample("decode", keys * row, partial(decode, keys)) for keys in sizes.caches)


def _sparse(sizes: Sizes, device: str) -> Iterator[KernelSample]:
    heads, width, values, slots = sizes.sparse

    def given(rows: int) -> tuple[list[Tensor], Run]:
        q = torch.randn(rows, heads, width, device=device, dtype=sizes.dtype, requires_grad=True)
        kv = torch.randn(sizes.sparse_keys, width, device=device, dtype=sizes.dtype, requires_grad=True)
        indices = torch.rand(rows, sizes.sparse_keys, dtype=torch.float32, device=device).argsort(1)[:, :slots].int()
        grad = torch.randn(rows, heads, values, device=device, dtype=sizes.dtype)
        return [q, kv, grad], lambda: sparse_attention(q, kv, indices, scale=width**-0.5, d_v=values)[0]

    def forward(rows: int) -> Run:
        return given(rows)[1]

    def both(rows: int) -> Run:
        (q, kv, grad), attend = given(rows)
        return lambda: torch.autograd.grad(attend(), (q, kv), grad)[0]

    for rows in sizes.sparse_rows:
        one = 2.0 * rows * heads * slots
        yield KernelSample("sparse", one * (width + values), partial(forward, rows))
        backward = one * (3 * width + 2 * values)
        yield KernelSample("sparse backward", backward, partial(both, rows), before=partial(forward, rows))


def _indexer(sizes: Sizes, device: str) -> Iterator[KernelSample]:
    heads, width, selected = sizes.indexer

    def index(rows: int) -> Run:
        iq = torch.randn(rows, heads, width, device=device, dtype=sizes.dtype)
        ik = torch.randn(sizes.sparse_keys, width, device=device, dtype=sizes.dtype)
        w = torch.randn(rows, heads, dtype=torch.float32, device=device) * (heads * width) ** -0.5
        return lambda: indexer_topk(iq, ik, w, selected).indices

    for rows in sizes.sparse_rows:
        yield KernelSample("indexer", 2.0 * rows * heads * width * sizes.sparse_keys, partial(index, rows))


def _recurrent(sizes: Sizes, device: str) -> Iterator[KernelSample]:
    """The gated delta rule, with one head of keys for two of values, as in Qwen3-Next."""
    heads, dim = sizes.heads, sizes.head_dim

    def given(length: int) -> tuple[list[Tensor], Run]:
        def drawn(*shape: int) -> Tensor:
            return torch.randn(1, *shape, device=device, dtype=sizes.dtype)

        q, k = (torch.nn.functional.normalize(drawn(heads // 2, length, dim), dim=-1) for _ in range(2))
        v, decay, beta = drawn(heads, length, dim), -drawn(heads, length).abs(), drawn(heads, length).sigmoid()
        leaves = [x.requires_grad_() for x in (q, k, v, decay, beta)]
        return [*leaves, drawn(heads, length, dim)], lambda: scan(GatedDeltaRule(q, k, v, decay, beta))

    def forward(length: int) -> Run:
        return given(length)[1]

    def both(length: int) -> Run:
        (*leaves, grad), run = given(length)
        return lambda: torch.autograd.grad(run(), leaves, grad)[0]

    shape = RecurrentShape(GatedDeltaRule, 1, heads, heads // 2, dim, dim)
    for length in sizes.recurrent:
        operations = length * shape.operations
        yield KernelSample("recurrent", operations, partial(forward, length))
        yield KernelSample(
            "recurrent backward", BACKWARD * operations, partial(both, length), before=partial(forward, length)
        )
