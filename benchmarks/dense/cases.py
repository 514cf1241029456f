"""What the dense benchmark measures, as values: cases in order of importance, their operations, masks and inputs."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmesh.cli.options import parse_mask
from attnmesh.core.masks import Causal, Mask
from attnmesh.core.visibility import Patch

_K = 1024


class Part(enum.StrEnum):
    """Which kernels to measure."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Case(NamedTuple):
    """One call: bf16, under a causal mask that may be narrower, as `attnmesh verify --mask` names it."""

    part: Part
    mask: str
    length: int
    q_heads: int = 32
    kv_heads: int = 8
    key_dim: int = 128
    value_dim: int = 128
    batch: int = 1

    @property
    def name(self) -> str:
        """For people and for `--only`."""
        dims = f"{self.key_dim}/{self.value_dim}" if self.key_dim != self.value_dim else str(self.key_dim)
        length = f"{self.length // _K}k" if self.length % _K == 0 else str(self.length)
        batch = "" if self.batch == 1 else f"{self.batch}x"
        return f"{self.part} {self.mask} {batch}{length} D{dims}"

    @property
    def causal(self) -> bool:
        """Whether the mask is the plain causal one, which kernels know without bounds."""
        return self.mask == "causal"

    @property
    def peer(self) -> str:
        """The implementation that the goal refers to."""
        return "cuDNN" if self.causal else "FlexAttention"

    @property
    def goal(self) -> float:
        """The least speed over that of the peer."""
        if not self.causal or (self.part is Part.FORWARD and self.key_dim == 128):
            return 1.0
        return 0.97 if self.key_dim == 128 else 0.95

    @property
    def flops(self) -> int:
        """Operations of the products over visible pairs: two products forward, five backward."""
        columns = {
            Part.FORWARD: self.key_dim + self.value_dim,
            Part.BACKWARD: 3 * self.key_dim + 2 * self.value_dim,
        }
        return 2 * self.batch * self.q_heads * self.patch.pairs * columns[self.part]

    @property
    def patch(self) -> Patch:
        """The mask over the whole sequence."""
        return Patch(self.visible, (range(self.length),), (range(self.length),))

    @property
    def visible(self) -> Mask:
        """The mask."""
        return Causal() if self.causal else Causal() & parse_mask(self.mask, self.length)

    def shortened(self) -> Case:
        """A call that compiles the same kernels."""
        return self._replace(length=8 * _K)


class RingCase(NamedTuple):
    """One rank of eight of a ring, by the backend `auto`."""

    part: Part
    length: int
    world: int = 8

    @property
    def name(self) -> str:
        """For people and for `--only`."""
        return f"{self.part} ring of {self.world}, {self.length // _K}k"


AnyCase = Case | RingCase
_F, _B = Part.FORWARD, Part.BACKWARD
_D64 = {"key_dim": 64, "value_dim": 64}
_MLA = {"q_heads": 16, "kv_heads": 16, "key_dim": 192, "value_dim": 128}
_FA3 = {"q_heads": 48, "kv_heads": 48, "batch": 4}  # of FlashAttention-3's published figures
_D256 = {"q_heads": 16, "kv_heads": 4, "key_dim": 256, "value_dim": 256}
# A run that is cut off by its time limit has measured the first ones.
CASES: tuple[AnyCase, ...] = (
    *(Case(part, "causal", length * _K) for length in (8, 32) for part in Part),
    *(Case(part, mask, 32 * _K) for part in Part for mask in ("window:4096", "documents:2048")),
    *(Case(part, "causal", 8 * _K, **dims) for dims in (_D64, _MLA, _D256) for part in Part),
    *(Case(part, "causal", 8 * _K, **_FA3) for part in Part),
    *(RingCase(part, 32 * _K) for part in Part),
    *(Case(part, "causal", 2 * _K) for part in Part),
    *(Case(part, "causal", 128 * _K) for part in Part),
    *(RingCase(part, 16 * _K) for part in Part),
    *(Case(part, "causal", 32 * _K, **dims) for dims in (_D64, _MLA, _D256) for part in Part),
)

_LONGEST_TRIED = {Part.FORWARD: 128 * _K, Part.BACKWARD: 32 * _K}
# Changes to the default tiles of the Gluon kernels, by part and the widths of keys and values: see `GluonTiles` and
# `BackwardTiles`.
VARIANTS: dict[tuple[Part, int, int], tuple[dict[str, Any], ...]] = {
    (_F, 128, 128): ({"section": 8},),
    (_F, 192, 128): ({"keys": 64, "stages": 3}, {"keys": 64, "stages": 4}),
    (_F, 256, 256): ({"keys": 32, "stages": 4},),
    (_B, 128, 128): ({"paired": False},),
    (_B, 192, 128): ({"shared_keys": True, "stages": 3, "grad_out_stages": 2},),
    (_B, 256, 256): ({"heads": 4},),
}  # fmt: skip


def variants(case: Case) -> tuple[dict[str, Any], ...]:
    """The changes to the default tiles that are tried for a case, with the default first; none at long lengths."""
    if case.length > _LONGEST_TRIED[case.part]:
        return ({},)
    return ({}, *VARIANTS.get((case.part, case.key_dim, case.value_dim), ()))


def select(parts: Collection[Part], patterns: Collection[str]) -> list[AnyCase]:
    """The cases of these parts whose name contains one of the patterns, in which * and ? are wildcards."""
    return [
        case
        for case in CASES
        if case.part in parts and (not patterns or any(fnmatchcase(case.name, f"*{x}*") for x in patterns))
    ]


MaskMod = Callable[[Any, Any, Any, Any], Any]


def mask_mod(mask: str) -> MaskMod:
    """The mask as FlexAttention's users write it."""
    kind, _, size = mask.partition(":")
    n = int(size or 0)
    if kind == "window":
        return lambda b, h, q, k: (q >= k) & (q - k < n)
    if kind == "documents":
        return lambda b, h, q, k: (q >= k) & (q // n == k // n)
    return lambda b, h, q, k: q >= k


@dataclass(frozen=True)
class Inputs:
    """Random tensors of a case, [B, S, H, D] transposed as projections leave them."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    first: Tensor  # of the keys that a row sees, int32 [1, 1, rows]
    end: Tensor
    scale: float
    causal: bool

    @property
    def arguments(self) -> dict[str, Any]:
        """The scale and the mask, as our kernels take them."""
        bounds = None if self.causal else (self.first, self.end)
        return {"scale": self.scale, "causal": self.causal, "bounds": bounds}


def random_inputs(case: Case, device: str, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Normal numbers; scores are about normal, too."""

    def drawn(heads: int, width: int) -> Tensor:
        return torch.randn(case.batch, case.length, heads, width, device=device, dtype=dtype).transpose(1, 2)

    first, end = case.patch.bounds(torch.device(device))
    return Inputs(
        drawn(case.q_heads, case.key_dim), drawn(case.kv_heads, case.key_dim), drawn(case.kv_heads, case.value_dim),
        drawn(case.q_heads, case.value_dim), first, end, case.key_dim**-0.5, case.causal,
    )  # fmt: skip
