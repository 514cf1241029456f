"""Which tokens of a batch belong together: documents that are packed into a row, and padding, as a mask.

The mask is derived from `[batch, tokens]` tensors on the host. No `[tokens, tokens]` tensor is ever made. Host tensors
are read by numpy: torch would divide these short operations among threads, and wait for them on a busy machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from attnmesh.core.masks import Causal, Chunked, Documents, Full, Mask, PerSequence, Slices
from attnmesh.utils.validation import shown

IGNORED_LABEL = -100
"""The label of tokens without a loss, as in torch and Transformers."""


@dataclass(frozen=True)
class Packing:
    """The documents and the padding of a batch: `mask` allows pairs of tokens of the same document.

    A token of padding attends to nothing, and nothing attends to it. `first[b]` is the first token of row b that is not
    padding. A batch without documents and padding has `mask=None`.
    """

    mask: Mask | None
    first: tuple[int, ...]
    length: int
    known_numbers: Tensor | None = field(default=None, repr=False, compare=False)

    def apply(self, layer: Mask) -> Mask:
        """The mask of a layer within the documents. Chunks of chunked attention begin after the padding."""
        if isinstance(layer, Chunked) and any(self.first):
            layer = Causal() & _per_row([_chunks(layer.size, begin, self.length) for begin in self.first])
        return layer if self.mask is None else layer & self.mask

    def numbers(self) -> Tensor | None:
        """The number of the document of each token, int32 [B, S] on the host, -1 for padding; None without a mask.

        A compiled graph takes it in place of the mask: see `packing_of_numbers`.
        """
        if self.mask is None or self.known_numbers is not None:
            return self.known_numbers
        at = torch.arange(self.length, dtype=torch.int64, device="cpu")
        follows, real = (self.mask.visible(at, keys).expand(len(self.first), -1) for keys in (at - 1, at))
        return (~follows).cumsum(-1).masked_fill(~real, -1).int()


def packing_of(starts: Tensor | None, real: Tensor | None, shape: tuple[int, int]) -> Packing:
    """The packing of a batch of this shape [B, S].

    Args:
        starts: bool [B, S] on the host, the tokens that begin a document; None if every row is one document.
        real: bool [B, S] on the host, the tokens that are not padding; None if there is no padding.
    """
    rows, length = shape
    every = [
        _row(None if starts is None else starts[i], None if real is None else real[i], length) for i in range(rows)
    ]
    masks = [mask for mask, _ in every]
    first = tuple(begin for _, begin in every)
    if all(isinstance(mask, Full) for mask in masks):
        return Packing(None, first, length)
    numbers = np.zeros(shape, dtype=np.int32)
    if starts is not None:
        known = starts.shape[1]
        numbers[:, :known] = starts.numpy().cumsum(-1, dtype=np.int32)
        numbers[:, known:] = numbers[:, known - 1 : known]
    if real is not None:
        numbers[~real.numpy()] = -1
    return Packing(_per_row(masks), first, length, torch.from_numpy(numbers))


_latest: deque[tuple[Tensor, Packing]] = deque(maxlen=8)


def packing_of_numbers(numbers: Tensor) -> Packing:
    """The packing that has these `numbers`; that of one of the latest calls if the numbers are equal."""
    for known, packing in tuple(_latest):
        if torch.equal(known, numbers):
            return packing
    real = numbers >= 0
    shape = numbers.shape[0], numbers.shape[1]
    packing = packing_of(number_starts(numbers), None if bool(real.all()) else real, shape)
    _latest.append((numbers.clone(), packing))
    return packing


def number_starts(numbers: Tensor) -> Tensor:
    """The tokens [B, S] whose document has another number than that of the token before."""
    starts = torch.ones_like(numbers, dtype=torch.bool)
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return starts


def document_starts(position_ids: Tensor) -> Tensor:
    """The tokens [B, S] whose position does not follow that of the token before: as Transformers finds packed rows."""
    if position_ids.device.type == "cpu":
        positions = position_ids.numpy()
        first = np.ones_like(positions[:, :1], dtype=bool)
        return torch.from_numpy(np.concatenate([first, positions[:, 1:] != positions[:, :-1] + 1], 1))
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return starts


def check_gaps(position_ids: Tensor | None, starts: Tensor | None, real: Tensor) -> None:
    """Raise ValueError for padding inside a document; between two documents it is allowed."""
    for row in range(real.shape[0]):
        tokens = real[row].numpy()
        begins = np.flatnonzero(np.diff(tokens, prepend=False) & tokens)
        for begin in begins.tolist()[1:]:
            before = int(np.flatnonzero(tokens[:begin])[-1])
            if starts is None or position_ids is None or position_ids[row, begin] > position_ids[row, before]:
                raise ValueError(
                    f"attention_mask must hide tokens before, after or between documents, got row {row} with hidden "
                    f"tokens {before + 1} to {begin - 1} inside a document (position_ids that restart begin a new one)"
                )


def lengths_to_positions(
    document_lengths: Sequence[Sequence[int]], real: Tensor | None, shape: tuple[int, int]
) -> Tensor:
    """position_ids [B, S] that restart with every document, from the lengths of the documents of every row."""
    rows, length = shape
    if not _is_lengths(document_lengths) or len(document_lengths) != rows:
        raise ValueError(
            f"document_lengths must be a list of {rows} lists of positive lengths, one for each row of input_ids, got "
            f"{shown(document_lengths)}"
        )
    positions = np.zeros(shape, dtype=np.int64)
    for row, lengths in enumerate(document_lengths):
        tokens = length if real is None else int(real[row].numpy().sum())
        if sum(lengths) != tokens:
            raise ValueError(
                f"document_lengths[{row}] must add up to the {tokens} tokens of the row that are not padding, got "
                f"{shown(list(lengths))}, which add up to {sum(lengths)}"
            )
        begin = 0 if real is None or not tokens else int(real[row].numpy().argmax())
        for count in lengths:
            positions[row, begin : begin + count] = np.arange(count)
            begin += count
    return torch.from_numpy(positions)


def _is_lengths(value: object) -> bool:
    return isinstance(value, Sequence) and all(
        isinstance(row, Sequence)
        and not isinstance(row, str)
        and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in row)
        for row in value
    )


def _row(starts: Tensor | None, real: Tensor | None, length: int) -> tuple[Mask, int]:
    """The mask of one row, and its first token that is not padding."""
    begin, end = 0, length
    if starts is None and real is None:
        return Full(), begin
    cuts = np.zeros(max(length, 1), dtype=bool)
    if real is not None:
        tokens = np.flatnonzero(real.numpy())
        if not tokens.size:
            return Slices([]), length
        begin, end = int(tokens[0]), int(tokens[-1]) + 1
        cuts[1:] |= np.diff(real.numpy())
    if starts is not None:
        cuts[: len(starts)] |= starts.numpy()
    inside = [at for at in np.flatnonzero(cuts).tolist() if begin < at < end]
    mask: Mask = Full()
    if inside:
        bounds = sorted({0, begin, *inside, end, length})
        mask = Documents([b - a for a, b in pairwise(bounds)])
    if begin > 0 or end < length:
        tokens_only = Slices([(range(begin, end), range(begin, end), "full")])
        mask = tokens_only & mask if inside else tokens_only
    return mask, begin


def _per_row(masks: Sequence[Mask]) -> Mask:
    """One mask if all rows have the same."""
    return masks[0] if all(mask == masks[0] for mask in masks) else PerSequence(masks)


def _chunks(size: int, begin: int, length: int) -> Mask:
    """Chunks of `size` tokens from token `begin` on."""
    bounds = [*([0] if begin else []), *range(begin, length, size), length]
    return Documents([b - a for a, b in pairwise(bounds)])
