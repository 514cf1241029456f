"""Sparse attention on one device: masks by name, random calls, and the error rule for their results.

The float64 results are computed from valid inputs. Backends get NaN wherever they must not read: keys that no valid
index names, queries that see nothing, the memory around every view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from attnmesh import SparseMask, sparse_attention
from attnmesh.ops.sparse import reference
from attnmesh.testing.errors import ROUNDING, assert_close

CUDA = torch.cuda.is_available()
# Interpreted kernels take long: by default only the tests of the kernels themselves run them.
INTERPRETED = () if CUDA else (pytest.mark.sweep,)
BACKENDS = ("torch", pytest.param("triton", marks=INTERPRETED))
# In Triton's interpreter products of bfloat16 are wrong; no kernel computes in float64.
DTYPES = {
    "torch": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "triton": (torch.float32, torch.float16, *((torch.bfloat16,) if CUDA else ())),
}
EVERY = [("torch", dtype) for dtype in DTYPES["torch"]]
EVERY += [pytest.param("triton", dtype, marks=INTERPRETED) for dtype in DTYPES["triton"]]


def with_dtypes(cases: Iterable) -> list:
    """(*case, backend, dtype): every case with the next dtype of torch, and of Triton."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*case, backend, dtypes[i % len(dtypes)], marks=() if backend == "torch" else INTERPRETED)
        for backend, dtypes in DTYPES.items()
        for i, case in enumerate(cases)
    ]


LOW, HIGH = -(2**31), 2**31 - 1  # the ends of int32: indices that name no key


def device_of(backend: str) -> torch.device:
    """Return the device on which a backend computes."""
    return torch.device("cuda" if backend in ("gluon", "triton") and CUDA else "cpu")


# Masks.


def _zigzag(s_q: int) -> Tensor:
    """Positions in no order, one of them before the beginning."""
    at = torch.arange(s_q)
    return torch.cat((at[::2].flip(0) * 3, at[1::2])) - 1


def _documents(s_q: int, s_kv: int) -> dict[str, Tensor]:
    """Ranges of keys: whole, empty, upside down, past both ends."""
    row = torch.arange(s_q)
    start = torch.stack((row * 0 - 5, row % 7, row + 4, row * 0))[row % 4, row]
    end = torch.stack((row * 0 + s_kv + 9, row + 3, row % 3, row * 0 + s_kv // 2))[row % 4, row]
    return {"k_start": start, "k_end": end.int()}


def _lengths(s_q: int, topk: int) -> Tensor:
    """How many indices are valid: none, some, all, more than there are."""
    return (torch.arange(s_q) * 3) % (topk + 3) - (torch.arange(s_q) % 5 == 4).int()


MASKS: dict[str, Callable[[int, int, int], SparseMask]] = {
    "all": lambda s_q, s_kv, topk: SparseMask(),
    "length": lambda s_q, s_kv, topk: SparseMask(topk_length=_lengths(s_q, topk)),
    "causal": lambda s_q, s_kv, topk: SparseMask(causal=True),
    "later": lambda s_q, s_kv, topk: SparseMask(causal=True, q_start=5),
    "strided": lambda s_q, s_kv, topk: SparseMask(causal=True, k_stride=4),  # the first three rows see nothing
    "later strided": lambda s_q, s_kv, topk: SparseMask(causal=True, q_start=9, k_stride=4),
    "positions": lambda s_q, s_kv, topk: SparseMask(causal=True, q_positions=_zigzag(s_q)),
    "strided positions": lambda s_q, s_kv, topk: SparseMask(
        causal=True, q_positions=2 * _zigzag(s_q).int(), k_stride=3
    ),
    "documents": lambda s_q, s_kv, topk: SparseMask(**_documents(s_q, s_kv)),
    "offset": lambda s_q, s_kv, topk: SparseMask(k_offset=6),
    "everything": lambda s_q, s_kv, topk: SparseMask(
        causal=True, q_positions=_zigzag(s_q) * 4, k_stride=2, k_offset=3, topk_length=_lengths(s_q, topk),
        **_documents(s_q, s_kv + 3),
    ),
}  # fmt: skip
KEY_MASKS = [name for name in MASKS if name not in ("length", "everything")]  # those that count no slots


def mask_on(mask: SparseMask, device: torch.device) -> SparseMask:
    """Return the mask with its tensors on a device."""
    tensors = {name: x.to(device) for name, x in vars(mask).items() if isinstance(x, Tensor)}
    return replace(mask, **tensors)


def random_indices(s_q: int, s_kv: int, topk: int, *, k_offset: int = 0, seed: int = 0) -> Tensor:
    """Return indices that name keys, some twice, and indices of no key: negative, past the end, the ends of int32."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(k_offset - 2, k_offset + s_kv + 3, (s_q, topk), generator=generator, dtype=torch.int32)
    odd = torch.rand(s_q, topk, generator=generator)
    return indices.masked_fill(odd < 0.04, HIGH).masked_fill(odd > 0.96, LOW)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return normal numbers that are the same in every dtype, except for rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def embedded(x: Tensor, filling: float = torch.nan) -> Tensor:
    """Return the numbers as a view, contiguous in the last dimension only; the memory around it holds `filling`."""
    wide = x.new_full([n + 2 for n in x.shape[:-1]] + [x.shape[-1] + 16], filling)
    inside = wide[tuple(slice(1, 1 + n) for n in x.shape[:-1])][..., 8 : 8 + x.shape[-1]]
    return inside.copy_(x)


# Attention.


@dataclass(frozen=True)
class AttentionCase:
    """A call of sparse attention with valid inputs on the CPU, and the gradients of its results."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    mask: SparseMask
    scale: float
    d_v: int
    v: Tensor | None = None
    sink: Tensor | None = None
    deterministic: bool = False

    @property
    def s_kv(self) -> int:
        return self.kv.shape[0]

    @property
    def valid(self) -> Tensor:
        """[s_q, topk]."""
        return reference.valid_slots(self.indices, self.s_kv, self.mask)

    @property
    def times(self) -> Tensor:
        """[s_q, s_kv]: how often a row reads a key."""
        return reference.key_counts(self.indices, self.valid, self.s_kv, self.mask.k_offset)

    @property
    def grads(self) -> list[Tensor]:
        """Of out and of lse."""
        s_q, h, _ = self.q.shape
        return [normal(s_q, h, self.d_v, dtype=self.q.dtype, seed=91), normal(s_q, h, dtype=torch.float64, seed=92)]

    @property
    def names(self) -> list[str]:
        given = {"v": self.v, "sink": self.sink}
        return ["out", "lse", "dq", "dkv", *(f"d{name}" for name, x in given.items() if x is not None)]

    def exact(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """Return the results over all keys in float64, or by the plain computation in another precision."""
        leaves = [x.to(dtype).requires_grad_() for x in (self.q, self.kv, self.v, self.sink) if x is not None]
        q, kv, *rest = leaves
        v = kv[:, : self.d_v] if self.v is None else rest.pop(0)
        out, lse = reference.attend(q, kv, v, self.times.to(dtype), self.scale, rest[0] if rest else None)
        grads = torch.autograd.grad([out, lse], leaves, [x.to(dtype) for x in self.grads])
        return [out.detach(), lse.detach(), *grads]

    def run(self, backend: str, **how: object) -> list[Tensor]:
        """Return the results of `sparse_attention` for poisoned inputs, on the CPU."""
        device = device_of(backend)
        unread, empty = ~(self.times > 0).any(0), ~self.valid.any(1)
        sides = [
            embedded(self.q.masked_fill(empty[:, None, None], torch.nan).to(device)),
            embedded(self.kv.masked_fill(unread[:, None], torch.nan).to(device)),
        ]
        if self.v is not None:
            sides.append(embedded(self.v.masked_fill(unread[:, None], torch.nan).to(device)))
        if self.sink is not None:
            sides.append(self.sink.to(device))
        leaves = [x.detach().requires_grad_() for x in sides]
        q, kv, *rest = leaves
        out, lse = sparse_attention(
            q, kv, self.indices.to(device), scale=self.scale, d_v=self.d_v,
            v=None if self.v is None else rest.pop(0), mask=mask_on(self.mask, device),
            sinks=rest[0] if rest else None, deterministic=self.deterministic, backend=backend, **how,
        )  # fmt: skip
        do, dl = (x.to(device) for x in self.grads)
        grads = torch.autograd.grad([out, lse], leaves, [do, dl.to(lse.dtype)])
        return [x.detach().cpu() for x in (out, lse, *grads)]


def random_attention(
    s_q: int = 13,
    s_kv: int = 23,
    *,
    heads: int = 4,
    d: int = 16,
    topk: int = 11,
    dtype: torch.dtype = torch.float32,
    mask: str | SparseMask = "all",
    d_v: int | None = None,
    own_values: bool = False,
    sink: bool = False,
    seed: int = 0,
) -> AttentionCase:
    """Return a call; `mask` is a name in MASKS or a mask."""
    mask = MASKS[mask](s_q, s_kv, topk) if isinstance(mask, str) else mask
    d_v = d if d_v is None else d_v
    return AttentionCase(
        normal(s_q, heads, d, dtype=dtype, seed=seed),
        normal(s_kv, d, dtype=dtype, seed=seed + 1),
        random_indices(s_q, s_kv, topk, k_offset=mask.k_offset, seed=seed + 2),
        mask,
        d**-0.5,
        d_v,
        normal(s_kv, d_v, dtype=dtype, seed=seed + 3) if own_values else None,
        normal(heads, dtype=torch.promote_types(dtype, torch.float32), seed=seed + 4) if sink else None,
    )


def check_backend(case: AttentionCase, backend: str, **how: object) -> None:
    """Assert the error rule for out, lse and every gradient."""
    assert_sparse_close(case.names, case.run(backend, **how), case.exact(case.q.dtype), case.exact())


def assert_sparse_close(
    names: Sequence[str], actual: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor]
) -> None:
    """Assert the error rule for every result, in the precision of `plain`. A position is an index of dimension 0."""
    for name, *three in zip(names, actual, plain, exact, strict=True):
        near, simple, right = (x.detach().cpu()[None, None] for x in three)
        assert_close(name, near, simple, right.double(), rounding=ROUNDING[simple.dtype])


# The indexer.


@dataclass(frozen=True)
class IndexerCase:
    """Inputs of an indexer, on the CPU."""

    iq: Tensor
    ik: Tensor
    w: Tensor
    mask: SparseMask
    scale: float = 0.7
    relu: bool = True

    @property
    def s_kv(self) -> int:
        return self.ik.shape[0]

    @property
    def leaves(self) -> list[Tensor]:
        return [x.detach().requires_grad_() for x in (self.iq, self.ik, self.w)]

    @property
    def how(self) -> dict[str, object]:
        return {"scale": self.scale, "relu": self.relu}

    def scores(self, leaves: Sequence[Tensor] | None = None) -> Tensor:
        """[s_q, s_kv] of every key, in float64 unless leaves say otherwise."""
        iq, ik, w = [x.double() for x in (self.iq, self.ik, self.w)] if leaves is None else leaves
        return reference.index_scores(iq, ik, w, self.scale, self.relu)

    @property
    def visible(self) -> Tensor:
        """[s_q, s_kv]: the keys that the mask shows to each row."""
        s_q, first = self.iq.shape[0], self.mask.k_offset
        every = torch.arange(first, first + self.s_kv, dtype=torch.int32).expand(s_q, -1)
        return reference.valid_slots(every, self.s_kv, self.mask)

    @property
    def empty_rows(self) -> Tensor:
        return ~self.visible.any(1)


def random_indexer(
    s_q: int = 13,
    s_kv: int = 23,
    *,
    heads: int = 3,
    d: int = 8,
    dtype: torch.dtype = torch.float32,
    mask: str | SparseMask = "all",
    topk: int = 11,
    seed: int = 0,
    relu: bool = True,
) -> IndexerCase:
    """Return an indexer; `mask` is a name in MASKS or a mask."""
    mask = MASKS[mask](s_q, s_kv, topk) if isinstance(mask, str) else mask
    return IndexerCase(
        normal(s_q, heads, d, dtype=dtype, seed=seed + 11),
        normal(s_kv, d, dtype=dtype, seed=seed + 12),
        normal(s_q, heads, dtype=dtype, seed=seed + 13),
        mask,
        relu=relu,
    )
