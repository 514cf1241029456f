"""Exact results in float64 at some rows and keys of the last sequence, over all the keys and rows that they meet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.dense.cases import Inputs

_TILE = 128
_EDGES = 16
_OTHERS = 32
# Of bf16's rounding: about 2e-3 to 3e-3 on average. A wrong tile, or a masked pair that counts, is many times as much.
MEAN_ERROR = 1e-2
WORST_ERROR = 5e-2
_SMALL = 1e-2  # of the median length: what is shorter (a gradient that is zero) is held against that


class Saved(NamedTuple):
    """What a forward leaves for the backward: `delta` is rowsum(out * grad_out)."""

    out: Tensor
    lse: Tensor
    delta: Tensor


def sample(length: int, device: torch.device) -> Tensor:
    """Both sides of evenly spaced edges of tiles, from the first to the last position, and positions at random."""
    tiles = torch.linspace(0, length / _TILE, _EDGES, device=device, dtype=torch.float64).round().long() * _TILE
    others = torch.randint(length, (_OTHERS,), device=device)
    return torch.cat([tiles, tiles - 1, others]).clamp(0, length - 1).unique()


class Expected(NamedTuple):
    """Float64 results by name: where they are (rows or keys) and what they are, [heads, positions, width]."""

    results: Mapping[str, tuple[Tensor, Tensor]]

    def judge(self, found: Mapping[str, Tensor]) -> tuple[float, bool]:
        """The largest mean error of the results, relative, and whether all are as near as they must be.

        An error is that of a row of a head, relative to its length; NaN and infinity are wrong wherever they are.
        """
        largest, right = 0.0, bool(found)
        for name, x in found.items():
            at, exact = self.results[name]
            got = x[-1, :, at].double().view_as(exact)
            lengths = exact.norm(dim=-1)
            errors = (got - exact).norm(dim=-1) / lengths.clamp(min=_SMALL * float(lengths.median()))
            mean = float(errors.square().mean().sqrt())
            right &= mean < MEAN_ERROR and float(errors.max()) < WORST_ERROR and bool(torch.isfinite(x).all())
            largest = max(largest, mean) if mean == mean else float("inf")
        return largest, right


def expected_forward(x: Inputs) -> Expected:
    """Out and lse of some rows."""
    rows = sample(x.q.shape[2], x.q.device)
    out, lse = [], []
    for head in range(x.q.shape[1]):
        k, v = _of_group(x, head)
        scores = (x.q[-1, head, rows].double() @ k.mT * x.scale).masked_fill(~_seen_by_rows(x, rows), -torch.inf)
        out.append(scores.softmax(-1) @ v)
        lse.append(scores.logsumexp(-1, keepdim=True))
    return Expected({"out": (rows, torch.stack(out)), "lse": (rows, torch.stack(lse))})


def expected_backward(x: Inputs, saved: Saved) -> Expected:
    """The gradients of some queries and of some keys and values, given lse and delta of all rows."""
    rows, keys = sample(x.q.shape[2], x.q.device), sample(x.k.shape[2], x.k.device)
    group = x.q.shape[1] // x.k.shape[1]
    seen_by_rows, seen_keys = _seen_by_rows(x, rows), _seen_keys(x, keys)
    dq = []
    dk = torch.zeros(x.k.shape[1], len(keys), x.k.shape[3], dtype=torch.float64, device=x.k.device)
    dv = torch.zeros(x.v.shape[1], len(keys), x.v.shape[3], dtype=torch.float64, device=x.v.device)
    for head in range(x.q.shape[1]):
        k, v = _of_group(x, head)
        q, grad_out = x.q[-1, head].double(), x.grad_out[-1, head].double()
        lse, delta = (t[-1, head].double()[:, None] for t in (saved.lse, saved.delta))
        p = torch.where(seen_by_rows, (q[rows] @ k.mT * x.scale - lse[rows]).exp(), 0.0)
        dq.append(x.scale * (p * (grad_out[rows] @ v.mT - delta[rows])) @ k)
        p = torch.where(seen_keys, (q @ k[keys].mT * x.scale - lse).exp(), 0.0)
        dv[head // group] += p.mT @ grad_out
        dk[head // group] += x.scale * (p * (grad_out @ v[keys].mT - delta)).mT @ q
    return Expected({"dq": (rows, torch.stack(dq)), "dk": (keys, dk), "dv": (keys, dv)})


def _of_group(x: Inputs, head: int) -> tuple[Tensor, Tensor]:
    kv_head = head // (x.q.shape[1] // x.k.shape[1])
    return x.k[-1, kv_head].double(), x.v[-1, kv_head].double()


def _seen_by_rows(x: Inputs, rows: Tensor) -> Tensor:
    """[rows, all keys]."""
    key = torch.arange(x.k.shape[2], device=x.k.device)
    return (key >= x.first[0, 0, rows, None]) & (key < x.end[0, 0, rows, None])


def _seen_keys(x: Inputs, keys: Tensor) -> Tensor:
    """[all rows, keys]."""
    return (keys >= x.first[0, 0, :, None]) & (keys < x.end[0, 0, :, None])
