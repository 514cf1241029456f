"""A time counts only beside a right answer: how far results are from float64, and how far they may be."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

SUMMED = 1e-3  # products of given numbers, summed in float32
ROUNDED = 2e-2  # what was rounded to bf16 on the way: some 3e-3; a wrong answer is many times as much


class Verdict(NamedTuple):
    """The largest relative error, and whether every result is as near as it must be."""

    error: float
    verdict: str


def judged(*findings: tuple[Tensor, Tensor, float]) -> Verdict:
    """Results, what is expected of them (float64), and how far each may be away."""
    return worst(*((relative_error(got, expected), allowed) for got, expected, allowed in findings))


def worst(*errors: tuple[float, float]) -> Verdict:
    """From errors and what each may be."""
    largest = max(math.inf if math.isnan(error) else error for error, _ in errors)
    return Verdict(largest, "ok" if all(error < allowed for error, allowed in errors) else "WRONG")


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of what is expected."""
    return float((got.double() - expected).norm() / expected.norm())


def choice_error(indices: Tensor, scores: Tensor) -> float:
    """How far rows of chosen keys are from the best ones, by the exact scores [rows, s_kv] (-inf: not to be seen).

    The worst of: a key chosen below the last of the best, and one left out above it; over the root mean square of the
    scores. Rounding may exchange keys whose scores are as near as that. Infinite if a row names a key twice, or none.
    """
    topk = indices.shape[1]
    if int(indices.min()) < 0 or int(indices.max()) >= scores.shape[1]:
        return math.inf
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, indices.long(), True)
    if not bool((chosen.sum(1) == topk).all()):
        return math.inf
    last = scores.topk(topk, 1).values[:, -1]
    below = last - scores.masked_fill(~chosen, math.inf).amin(1)
    above = scores.masked_fill(chosen, -math.inf).amax(1) - last
    size = scores[scores > -math.inf].square().mean().sqrt()
    return float(torch.maximum(below, above).clamp(min=0.0).max() / size)
