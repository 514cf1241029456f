"""`BeamSearch`: the beams of one prompt, and which of their continuations are the next beams.

A beam is an answer in progress. In a step all beams of a prompt get their next tokens, and the best of all their
continuations are the next beams. The search is the same as in Transformers, with its defaults: scores are sums of
log-probabilities, the scores of finished answers are divided by their length, and it ends once no beam can become
better than the worst of `num_beams` finished answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_NO_BEAM = -1.0e9  # the score of beams that do not exist yet: at first all are the prompt


class Candidate(NamedTuple):
    """A continuation: the sum of its log-probabilities, the beam that it continues, and its last token."""

    score: float
    beam: int
    token: int


class BeamSearch:
    """The beams of one prompt and its finished answers: the same on all ranks."""

    def __init__(self, num_beams: int, max_new_tokens: int, stop: frozenset[int]) -> None:
        self._num_beams, self._max_new_tokens, self._stop = num_beams, max_new_tokens, stop
        self.scores = [0.0] + [_NO_BEAM] * (num_beams - 1)
        """The score of each beam, the best first."""
        self._answers: list[list[int]] = [[] for _ in range(num_beams)]
        self._finished: list[tuple[float, list[int]]] = []  # the best first
        self.is_finished = False

    def num_candidates(self, vocabulary: int) -> int:
        """The best continuations that `step` needs: enough for all beams, however many of them end the answer."""
        return min(max(2, 1 + len(self._stop)), vocabulary) * self._num_beams

    @property
    def answer(self) -> list[int]:
        """The best finished answer."""
        return self._finished[0][1]

    def best(self, logits: Tensor) -> Tensor:
        """The best continuations of the beams, from logits [beams, vocabulary]: float64 [n, 3], as in `Candidate`."""
        scores = torch.tensor(self.scores, dtype=torch.float32, device=logits.device)
        total = torch.log_softmax(logits.float(), -1) + scores[:, None]
        best = total.flatten().topk(self.num_candidates(logits.shape[-1]))
        beam = best.indices // logits.shape[-1]  # whose width may exceed the vocabulary of the model's config
        return torch.stack([best.values.double(), beam.double(), (best.indices % logits.shape[-1]).double()], -1)

    @staticmethod
    def candidates(numbers: Sequence[float]) -> list[Candidate]:
        """The continuations that `best` has found, from its numbers in a row."""
        return [
            Candidate(score, int(beam), int(token))
            for score, beam, token in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
        ]

    def step(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The next beams, from the best continuations of the beams, in descending order; none if it is finished."""
        length = len(self._answers[0]) + 1
        ends = [each.token in self._stop or length == self._max_new_tokens for each in candidates]
        for candidate, end in zip(candidates[: self._num_beams], ends, strict=False):
            if end:  # a worse one does not count: it is there only so that there are enough to go on
                answer = [*self._answers[candidate.beam], candidate.token]
                self._finished.append((candidate.score / length, answer))
        self._finished.sort(key=lambda each: -each[0])  # stable: the earlier of equal ones comes first
        del self._finished[self._num_beams :]
        beams = [candidate for candidate, end in zip(candidates, ends, strict=True) if not end][: self._num_beams]
        best = max((each.score for each in beams), default=_NO_BEAM) / length
        is_improvable = len(self._finished) < self._num_beams or best > self._finished[-1][0]
        self.is_finished = not beams or not is_improvable
        self.scores = [each.score for each in beams]
        self._answers = [[*self._answers[each.beam], each.token] for each in beams]
        return [] if self.is_finished else beams
