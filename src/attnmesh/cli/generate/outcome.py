"""What came of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.generation.generator import GenerationStats


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer and, where they were kept, the logits [tokens, vocabulary] each was drawn from."""

    ids: list[int]
    logits: Tensor | None = None


@dataclass(frozen=True)
class Outcome:
    """All answers, and what each rank did for them."""

    answers: Sequence[Answer]
    efforts: Sequence[GenerationStats]


def everybodys(comm: Comm, effort: GenerationStats, device: torch.device) -> list[GenerationStats]:
    """The efforts of all ranks, in their order."""
    mine = torch.tensor(astuple(effort), dtype=torch.float64, device=device)
    return [_effort(x) for x in comm.all_gather(mine, [mine.shape] * comm.world)]


def _effort(numbers: Tensor) -> GenerationStats:
    names = [field.name for field in fields(GenerationStats)]
    values: dict[str, Any] = {
        name: number if name.endswith("seconds") else int(number)
        for name, number in zip(names, numbers.tolist(), strict=True)
    }
    return GenerationStats(**values)
