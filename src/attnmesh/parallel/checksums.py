"""Checksums of tensors whose values must be equal on all ranks, and the calls in which they are compared."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmesh.comm.base import CallLog

_CHUNK = 1 << 20  # words of 8 bytes
_MULTIPLIER = 0x5851F42D4C957F2D  # odd, so that no chunk is lost
_SHOWN = 4  # values in an error
_READ_ALWAYS = 1 << 24  # bytes on the host that are read in every call, in a few milliseconds


@dataclass(frozen=True)
class Checksum:
    """A checksum of the values of a tensor; its text begins with the first of them."""

    number: int
    dtype: torch.dtype
    first: bytes = field(compare=False)

    @classmethod
    def of(cls, x: Tensor) -> Checksum:
        """The checksum of a tensor. Waits for its device."""
        shown = _SHOWN * x.element_size()
        if x.device.type == "cpu" and x.nbytes <= _READ_ALWAYS:
            # A copy, because a storage that numpy has seen cannot be resized any more, as FSDP does.
            copied = x.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy()
            return cls(zlib.crc32(copied.data), x.dtype, copied[:shown].tobytes())
        first = x.detach().contiguous().view(-1).view(torch.uint8)[:shown].to("cpu", copy=True)
        return cls(int(checksums([x], x.device)) % 2**64, x.dtype, first.numpy().tobytes())

    def __str__(self) -> str:
        values = torch.frombuffer(bytearray(self.first), dtype=self.dtype).tolist() if self.first else []
        return f"{self.number:08x} of [{', '.join(f'{value:g}' for value in values)}, ...]"


@dataclass(frozen=True)
class ValueChecks:
    """Which calls of a kind compare the values of tensors between ranks: the same ones on every rank.

    Up to 16 MiB on the host are compared in every call. To read more takes a while, and to read a device waits for it:
    larger tensors and tensors on a device are compared in the first `first` calls, and then in every `every`-th.
    """

    log: CallLog  # that counts the calls
    kind: str
    first: int
    every: int

    def is_due(self) -> bool:
        """Whether this call compares what is not compared in every call."""
        done = self.log.made(self.kind)
        return done < self.first or done % self.every == 0

    def compared(self, /, **tensors: Tensor | None) -> dict[str, object]:
        """The checksums to compare in this call, under names for an error."""
        is_due = self.is_due()
        return equal_values(
            {
                name: x
                for name, x in tensors.items()
                if x is not None and (is_due or (x.device.type == "cpu" and x.nbytes <= _READ_ALWAYS))
            }
        )

    def count(self) -> None:
        """Count a call that all ranks agreed on."""
        self.log.number(self.kind)


def equal_values(tensors: Mapping[str, Tensor | None]) -> dict[str, object]:
    """The checksums of tensors that must be equal on all ranks, under names for an error. Waits for their device."""
    return {f"checksum of {name}": Checksum.of(x) for name, x in tensors.items() if x is not None and is_readable(x)}


def is_readable(x: Tensor) -> bool:
    """Whether a tensor has values that the host can read now: not while a CUDA graph is captured."""
    if x.device.type == "cuda":
        return not torch.cuda.is_current_stream_capturing()
    return x.device.type != "meta"


def checksums(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """A checksum of the bits of each tensor, int64 [n]: words of 8 bytes times odd numbers by place, modulo 2^64.

    Integer sums are exact in any order, so a device and a host compute the same checksum. Equal numbers in
    another place, such as permuted rows, change it.
    """
    tensors = list(tensors)
    chunk = min(_CHUNK, max((x.nbytes // 8 for x in tensors), default=0) + 1)
    odd = torch.arange(1, 2 * chunk, 2, device=device)
    product = torch.empty_like(odd)
    return torch.stack([_checksum(x.to(device), odd, product) for x in tensors])


def _checksum(x: Tensor, odd: Tensor, product: Tensor) -> Tensor:
    data = x.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    rest = F.pad(data[whole:], (0, whole + 8 - data.numel()))
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for words in (*data[:whole].view(torch.int64).split(_CHUNK), rest.view(torch.int64)):
        n = len(words)
        total = total * _MULTIPLIER + torch.mul(words, odd[:n], out=product[:n]).sum()
    return total
