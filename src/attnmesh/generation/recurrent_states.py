"""The states of recurrent layers, beside the KV cache: one for every sequence and every recurrent call of a pass.

Every rank has the states of all sequences: a prefill over ranks ends with the final state on every rank, and a decode
step computes the same on every rank. A state is that after the last token, and there is none of earlier tokens. So a
prompt reuses no prefix, drafts are refused, and requests stay on their ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RecurrentCall:
    """One recurrent call in every pass: the module, and the shape and the dtype of the state of a sequence."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class RecurrentStates:
    """The states of at most `rows` sequences."""

    def __init__(self, calls: Sequence[RecurrentCall], rows: int, device: torch.device) -> None:
        self.calls = tuple(calls)
        self.tensors = [torch.zeros(rows, *call.shape, dtype=call.dtype, device=device) for call in calls]

    def copy(self, source: int, target: int) -> None:
        """Let the sequence in row `target` continue from the states of the sequence in row `source`."""
        for state in self.tensors:
            state[target] = state[source]

    def of(self, rows: Tensor, is_new: Tensor) -> RowStates:
        """The states of the sequences of a pass, in these rows [B]; those of new sequences [B] are 0."""
        return RowStates(self, rows, is_new)


@dataclass
class RowStates:
    """The states of the sequences of a pass: each call reads its states, and writes what they are after it."""

    states: RecurrentStates
    rows: Tensor
    is_new: Tensor
    made: int = 0

    def read(self, module: str) -> Tensor:
        """The states [B, ...] of the next call."""
        calls = self.states.calls
        if self.made == len(calls):
            raise ValueError(f"a pass must have {len(calls)} recurrent calls, got another of {module}")
        state = self.states.tensors[self.made][self.rows]
        return state.masked_fill(self.is_new.view(-1, *[1] * (state.ndim - 1)), 0.0)

    def write(self, states: Tensor) -> None:
        """The states [B, ...] after the call."""
        self.states.tensors[self.made][self.rows] = states
        self.made += 1

    def check_complete(self) -> None:
        """Raise ValueError if the model has made fewer calls than in other passes."""
        calls = self.states.calls
        if self.made != len(calls):
            raise ValueError(
                f"a pass must have {len(calls)} recurrent calls, got {self.made}: {calls[self.made].name} is missing"
            )
