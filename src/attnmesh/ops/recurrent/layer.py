"""What recurrent layers share: their inputs, the checks of them, and where documents start.

Positions are the third dimension of every input that has them: [B, H, S, D], [B, H, S] or [B, C, S]. Keys may have
fewer heads than values, as in grouped attention: head h of the values reads head `h // (heads // groups)` of the keys.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmesh.core.masks import Documents, PerSequence
from attnmesh.core.segment import Segment, scan, total
from attnmesh.core.state import accumulation_dtype
from attnmesh.utils.validation import check_number, check_tensor, check_type, shown

Form = Literal["scalar", "diagonal", "dense"]

_LONG_AGO = 2**31
"""How long ago the document of position 0 started: longer than any layer looks back."""


class Sizes(NamedTuple):
    """The sizes of a layer's inputs."""

    batch: int
    heads: int
    groups: int
    length: int
    key_dim: int
    value_dim: int


class Chunks(ABC):
    """A range of positions, computed as far as that needs no incoming state."""

    @abstractmethod
    def total(self) -> Segment:
        """The segment of the whole range: transition [B, H, ...] and update [B, H, K, V]."""

    @abstractmethod
    def run(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs [B, H, positions, V] and the state after the range, from the state [B, H, K, V] before it."""


class SegmentedChunks(Chunks):
    """Chunks whose segments are stored one by one."""

    segments: Segment
    """Of the chunks, [n, B, G, H / G, ...] in the order of positions."""

    @abstractmethod
    def outputs(self, states: Tensor) -> Tensor:
        """The outputs [B, H, positions, V], from the incoming state of every chunk."""

    def total(self) -> Segment:
        transition, update = total(self.segments)
        return Segment(transition.flatten(1, 2), update.flatten(1, 2))

    def run(self, state: Tensor) -> tuple[Tensor, Tensor]:
        states = scan(self.segments, state.reshape(self.segments.update.shape[1:]))
        return self.outputs(states[:-1]), states[-1].flatten(1, 2)


@dataclass(frozen=True, eq=False)
class RecurrentLayer(ABC):
    """The inputs of a recurrent layer: what `scan` and `ContextParallel.recurrent` compute.

    Nothing is checked before that, so that an error on one rank is raised on all of them.

    Examples:
        >>> x, weight = torch.randn(2, 6, 10), torch.randn(6, 4)
        >>> layer = am.recurrent.ShortConvolution(x, weight)
        >>> isinstance(layer, am.recurrent.RecurrentLayer), layer.state_shape
        (True, (2, 6, 3))
        >>> layer.rows(range(4, 10)).x.shape
        torch.Size([2, 6, 6])
    """

    _DIMS: ClassVar[dict[str, str]]
    """The dimensions of every input, as words; "seq" is that of positions."""
    _OPTIONAL: ClassVar[tuple[str, ...]] = ()
    _OUTPUT: ClassVar[str] = "v"
    """The input whose shape and dtype the output has."""

    def _tensors(self) -> dict[str, Tensor]:
        """The inputs that are given, by name."""
        return {name: x for name in self._DIMS if isinstance(x := getattr(self, name), Tensor)}

    def _dimensions(self) -> dict[str, int]:
        """The sizes of the inputs, by the names in `_DIMS`; ValueError if the inputs do not fit together."""
        sizes: dict[str, int] = {}
        first: Tensor | None = None
        for name, words in self._DIMS.items():
            x, dims = getattr(self, name), words.split()
            if x is None and name in self._OPTIONAL:
                continue
            check_tensor(name, x, f"[{', '.join(dims)}]")
            first = x if first is None else first
            if x.ndim != len(dims) or not x.dtype.is_floating_point or x.device != first.device:
                raise ValueError(f"{name} must be floating point [{', '.join(dims)}] on {first.device}, got {shown(x)}")
            for dim, n in zip(dims, x.shape, strict=True):
                if sizes.setdefault(dim, n) != n:
                    allowed = [sizes.get(d, m) for d, m in zip(dims, x.shape, strict=True)]
                    raise ValueError(f"{name} must be [{', '.join(dims)}] = {allowed}, got {shown(x)}")
        heads, groups = sizes.get("heads", 0), sizes.get("groups", 1)
        if groups == 0 or heads % groups:
            raise ValueError(
                f"the heads of {self._OUTPUT} must be a multiple of the heads of the keys, got {heads} and {groups}"
            )
        return sizes

    @abstractmethod
    def _check(self) -> Sizes:
        """The sizes; ValueError if the inputs do not fit together."""

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, ...]:
        """The shape of a state."""

    def _why_no_kernels(self) -> str | None:
        """Why GPU kernels do not serve these inputs; None if they do."""
        return f"a {type(self).__name__} has no kernels"

    @abstractmethod
    def _run(self, state: Tensor, ages: Tensor | None, kernels: bool) -> tuple[Tensor, Tensor]:
        """The outputs and the state after the last position, from the state before the first.

        With `kernels`, the inputs are as given, else in `compute_dtype`. There is at least one position. `ages` is as
        `document_ages` returns it.
        """

    @abstractmethod
    def _run_reference(self, state: Tensor, ages: Tensor | None) -> tuple[Tensor, Tensor]:
        """`_run` position by position: the definition of the layer."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of states and sums: float64 if an input is, else float32."""
        dtype = torch.float32
        for x in self._tensors().values():
            dtype = torch.promote_types(dtype, accumulation_dtype(x.dtype))
        return dtype

    def rows(self, rows: range) -> Self:
        """The layer of some consecutive positions."""
        check_type("rows", rows, range, "a range of positions")
        if rows.step != 1 or not 0 <= rows.start <= rows.stop <= self._check().length:
            raise ValueError(f"rows must be a range of step 1 in 0..{self._check().length}, got {shown(rows)}")
        with_positions = {name: x for name, x in self._tensors().items() if "seq" in self._DIMS[name].split()}
        return replace(self, **{name: x[:, :, rows.start : rows.stop] for name, x in with_positions.items()})

    def _in_compute_dtype(self) -> Self:
        """The layer with all inputs in `compute_dtype`."""
        dtype = self.compute_dtype
        return replace(self, **{name: x.to(dtype) for name, x in self._tensors().items()})

    def _options(self) -> dict[str, object]:
        """The fields that are no tensors, and which of the optional inputs are given."""
        named = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in self._DIMS}
        return named | {name: getattr(self, name) is not None for name in self._OPTIONAL}


class Recurrence(RecurrentLayer):
    """A layer whose positions map a state [B, H, K, V] to the next one."""

    _FORM: ClassVar[Form] = "dense"
    """The form of the transition of a range of positions."""

    @abstractmethod
    def _step(self, state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        """The state after position t, from the state before it, and the output [B, H, V]: the definition."""

    @abstractmethod
    def _chunks(self, ages: Tensor | None, kernels: bool) -> Chunks:
        """The positions in chunks, from the inputs and ages of `_run`."""

    def _check(self) -> Sizes:
        sizes = self._dimensions()
        heads = sizes["heads"]
        groups, value_dim = sizes.get("groups", heads), sizes.get("value_dim", 1)
        return Sizes(sizes["batch"], heads, groups, sizes["seq"], sizes["key_dim"], value_dim)

    @property
    def state_shape(self) -> tuple[int, ...]:
        sizes = self._check()
        return sizes.batch, sizes.heads, sizes.key_dim, sizes.value_dim

    def _transition_shape(self) -> tuple[int, ...]:
        """The shape of the transition of a range of positions."""
        batch, heads, rows, _ = self.state_shape
        return batch, heads, *{"scalar": (1, 1), "diagonal": (rows, 1), "dense": (rows, rows)}[self._FORM]

    def _run(self, state: Tensor, ages: Tensor | None, kernels: bool) -> tuple[Tensor, Tensor]:
        return self._chunks(ages, kernels).run(state)

    def _run_reference(self, state: Tensor, ages: Tensor | None) -> tuple[Tensor, Tensor]:
        outs = []
        for t in range(self._check().length):
            if ages is not None:
                state = state.masked_fill((ages[:, t] == 0)[:, None, None, None], 0.0)
            state, out = self._step(state, t)
            outs.append(out)
        return torch.stack(outs, 2), state

    def _per_head(self, name: str, t: int) -> Tensor:
        """An input at position t, repeated for every head that reads it."""
        x: Tensor = getattr(self, name)[:, :, t]
        heads: int = getattr(self, self._OUTPUT).shape[1]
        return x.repeat_interleave(heads // x.shape[1], 1)


def in_chunks(x: Tensor, size: int, sizes: Sizes) -> Tensor:
    """An input [B, G or H, S, ...] as [n, B, G, 1 or H / G, size, ...]: chunks, the last of them filled up with 0.

    A position whose inputs are all 0 leaves every state as it is.
    """
    count = -(-sizes.length // size)
    x = F.pad(x, (*[0, 0] * (x.ndim - 3), 0, count * size - sizes.length))
    chunks: Tensor = x.unflatten(2, (count, size)).movedim(2, 0)
    by_group: Tensor = chunks.unflatten(2, (sizes.groups, x.shape[1] // sizes.groups))
    return by_group


def check_scale(scale: object, key_dim: int) -> float:
    """The factor of the outputs; 1 / sqrt(key_dim) by default, as in attention."""
    return 1 / math.sqrt(max(key_dim, 1)) if scale is None else check_number("scale", scale)


def check_documents(documents: object, batch: int, length: int) -> tuple[Documents, ...] | None:
    """The documents of every row of the batch, or of all rows; ValueError for masks that are no documents."""
    if documents is None:
        return None
    given = documents.masks if isinstance(documents, PerSequence) else (documents,)
    masks = tuple(mask for mask in given if isinstance(mask, Documents) and mask.prefixes is None)
    if len(masks) < len(given):
        raise ValueError(
            f"documents must be Documents(lengths), or PerSequence of one for every row of the batch, got "
            f"{shown(documents)}"
        )
    if isinstance(documents, PerSequence) and len(masks) != batch:
        raise ValueError(f"documents must have a mask for each of {batch} rows of the batch, got {len(masks)}")
    for mask in masks:
        if mask.length != length:
            raise ValueError(f"documents must add up to the length of the sequence, {length}, got {shown(documents)}")
    return masks


def of_batch(layer: RecurrentLayer, at: Tensor) -> RecurrentLayer:
    """The layer of some rows of the batch, int64 [n]."""
    of_rows = {name: x for name, x in layer._tensors().items() if layer._DIMS[name].startswith("batch ")}
    return replace(layer, **{name: x[at] for name, x in of_rows.items()})


def document_ages(documents: tuple[Documents, ...] | None, rows: range, device: torch.device) -> Tensor | None:
    """How many positions ago the document of every position started, int64 [B or 1, rows]; None without documents.

    The first document has no start: what came before position 0 is in the initial state.
    """
    if documents is None or all(len(mask.bounds) <= 2 for mask in documents):
        return None
    at = torch.arange(rows.start, rows.stop, device=device)
    ages = []
    for mask in documents:
        starts = torch.tensor([-_LONG_AGO, *mask.bounds[1:-1]], device="cpu").to(device, non_blocking=True)
        ages.append(at - starts[torch.bucketize(at, starts, right=True) - 1])
    return torch.stack(ages)


def reset_at_starts(g: Tensor, ages: Tensor | None, size: int) -> Tensor:
    """Logarithms of decays [n, B, G, H / G, size, ...] with -inf where a document starts; those chunks have A = 0."""
    if ages is None:
        return g
    return g.masked_fill(starts_in_chunks(ages, g, size), -math.inf)


def starts_in_chunks(ages: Tensor, like: Tensor, size: int) -> Tensor:
    """Where documents start, as a mask of a tensor [n, B, G, H / G, size, ...]."""
    count = like.shape[0]
    starts: Tensor = F.pad(ages == 0, (0, count * size - ages.shape[1])).unflatten(1, (count, size)).movedim(1, 0)
    return starts[:, :, None, None].reshape(count, -1, 1, 1, size, *[1] * (like.ndim - 5))
