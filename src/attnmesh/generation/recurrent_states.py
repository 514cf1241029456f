"""The states of recurrent layers, beside the KV cache: one for every sequence and every recurrent call of a pass.

A rank has the states of the sequences that it computes, whole: a prefill over ranks ends with the final state on every
rank, and a decode step computes the same on every rank.

A prompt continues from the blocks of an earlier prompt only where a state is kept: `BlockManager.keep_state` has the
policy, and the numbers of at most `KEPT_STATES` states for each sequence of a batch. Here are their tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.kv_cache.sequence import Sequence as CacheSequence
from attnmesh.ops.recurrent.api import scan
from attnmesh.ops.recurrent.layer import RecurrentLayer, of_batch

KEPT_STATES = 2
"""States that are kept for later prompts, for each sequence of a batch."""


@dataclass(frozen=True)
class RecurrentCall:
    """One recurrent call in every pass: the module, and the shape and the dtype of the state of a sequence."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class RecurrentStates:
    """The states of the sequences of `kvdp_ranks`, which are in these `rows` of a batch, and their kept states.

    What concerns the sequences of other KVDP ranks is ignored: their ranks do the same.
    """

    def __init__(
        self, calls: Sequence[RecurrentCall], kvdp_ranks: range, rows: range, device: torch.device
    ) -> None:  # fmt: skip
        self.calls, self._kvdp_ranks, self._rows = tuple(calls), kvdp_ranks, rows
        count = (1 + KEPT_STATES) * len(rows)
        self.tensors = [torch.zeros(count, *call.shape, dtype=call.dtype, device=device) for call in calls]

    def row(self, sequence: CacheSequence) -> int:
        """Where the states of a sequence are."""
        return sequence.row - self._rows.start

    def fork(self, source: CacheSequence, sequence: CacheSequence) -> None:
        """Let a sequence continue from the states of another one."""
        if self.has(sequence):
            self._copy(self.row(source), self.row(sequence))

    def keep(self, sequence: CacheSequence, kept: int) -> None:
        """Store the states of a sequence as a kept state."""
        if self.has(sequence):
            self._copy(self.row(sequence), self._kept_row(sequence, kept))

    def resume(self, sequence: CacheSequence) -> None:
        """Let a new sequence continue from the kept state that it has found."""
        if self.has(sequence) and sequence.state >= 0:
            self._copy(self._kept_row(sequence, sequence.state), self.row(sequence))

    def _kept_row(self, sequence: CacheSequence, kept: int) -> int:
        of_group = KEPT_STATES * len(self._rows) // len(self._kvdp_ranks)
        return len(self._rows) + self._kvdp_ranks.index(sequence.kvdp_rank) * of_group + kept

    def _copy(self, source: int, target: int) -> None:
        for state in self.tensors:
            state[target] = state[source]

    def of(self, rows: Tensor, is_new: Tensor, has_drafts: bool = False) -> RowStates:
        """The states of the sequences of a pass, in these rows [B]; the states of new sequences [B] are 0."""
        return RowStates(self, rows, is_new, [] if has_drafts else None)

    @property
    def num_bytes(self) -> int:
        """The bytes of the states of a sequence."""
        return sum(state[0].nbytes for state in self.tensors)

    def has(self, sequence: CacheSequence | None) -> bool:
        """Whether these are the states of the ranks that compute a sequence."""
        return sequence is not None and sequence.kvdp_rank in self._kvdp_ranks

    def packed(self, sequence: CacheSequence) -> Tensor:
        """The states of a sequence as bytes, uint8 [num_bytes]."""
        row = self.row(sequence)
        return torch.cat([state[row].reshape(-1).view(torch.uint8) for state in self.tensors])

    def unpack(self, sequence: CacheSequence, packed: Tensor) -> None:
        """Let a sequence continue from states that `packed` returned."""
        row = self.row(sequence)
        for state, part in zip(self.tensors, packed.split([x[0].nbytes for x in self.tensors]), strict=True):
            state[row] = part.clone().view(state.dtype).view(state.shape[1:])  # aligned for its dtype


@dataclass
class RowStates:
    """The states of the sequences of a pass: each call reads its states, and writes what they are after it."""

    states: RecurrentStates
    rows: Tensor
    is_new: Tensor
    drafted: list[RecurrentLayer] | None = None  # the inputs of each call, of a pass with drafts
    made: int = 0

    def read(self, module: str) -> Tensor:
        """The states [B, ...] of the next call."""
        calls = self.states.calls
        if self.made == len(calls):
            raise ValueError(f"a pass must have {len(calls)} recurrent calls, got another of {module}")
        return self._before(self.made)

    def _before(self, call: int) -> Tensor:
        state = self.states.tensors[call][self.rows]
        return state.masked_fill(self.is_new.view(-1, *[1] * (state.ndim - 1)), 0.0)

    def write(self, states: Tensor, layer: RecurrentLayer) -> None:
        """The states [B, ...] after the call of a layer; with drafts, they stay as they were until `accept`."""
        if self.drafted is None:
            self.states.tensors[self.made][self.rows] = states
        else:
            self.drafted.append(layer)
        self.made += 1

    def accept(self, counts: Sequence[int]) -> None:
        """Compute the states after so many tokens of each sequence."""
        assert self.drafted is not None
        for count in sorted(set(counts)):
            at = torch.tensor([i for i, each in enumerate(counts) if each == count], device=self.rows.device)
            for call, layer in enumerate(self.drafted):
                accepted = of_batch(layer, at).rows(range(count))
                _, states = scan(accepted, initial_state=self._before(call)[at], return_final_state=True)
                self.states.tensors[call][self.rows[at]] = states

    def check_complete(self) -> None:
        """Raise ValueError if the model has made fewer calls than in other passes."""
        calls = self.states.calls
        if self.made != len(calls):
            raise ValueError(
                f"a pass must have {len(calls)} recurrent calls, got {self.made}: {calls[self.made].name} is missing"
            )
