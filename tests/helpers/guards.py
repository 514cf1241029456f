"""Guard zones: tensors inside larger buffers, so that a kernel that writes or reads beside them is noticed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

ZONE = 1 << 14  # bytes before and after each tensor: more than a row of any tile of these tests
FILL = 0xFF  # NaN in every floating-point type, -1 in the others


class GuardZones:
    """Memory with a zone before and after every tensor."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def empty(self, *size: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """A contiguous tensor of NaN, or of -1, like the zones around it."""
        count = torch.Size(size).numel() * dtype.itemsize
        buffer = torch.full((ZONE + -(-count // 16) * 16 + ZONE,), FILL, dtype=torch.uint8, device=device)
        self._buffers.append(buffer)
        return buffer[ZONE : ZONE + count].view(dtype).view(size)

    def copy(self, x: Tensor) -> Tensor:
        """A contiguous copy of x."""
        return self.empty(*x.shape, dtype=x.dtype, device=x.device).copy_(x)

    def addresses(self) -> list[tuple[int, int]]:
        """The first address of each zone, and that after it."""
        begins = [(buffer.data_ptr(), buffer.data_ptr() + buffer.numel() - ZONE) for buffer in self._buffers]
        return [(begin, begin + ZONE) for both in begins for begin in both]

    def check(self) -> None:
        """Raise AssertionError if something was written outside of the tensors."""
        for buffer in self._buffers:
            assert (buffer[:ZONE] == FILL).all(), f"written before a tensor of {buffer.numel() - 2 * ZONE} bytes"
            assert (buffer[-ZONE:] == FILL).all(), f"written after a tensor of {buffer.numel() - 2 * ZONE} bytes"


@contextmanager
def guard_zones() -> Iterator[GuardZones]:
    """Within the context, `torch.empty`, `zeros`, `full` and the like have zones; at its end these are checked."""
    zones = GuardZones()
    made = {name: getattr(torch, name) for name in ("empty", "zeros", "empty_like", "zeros_like", "full")}

    def guarded(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made_in_zones(*args: Any, **options: Any) -> Tensor:
            x = make(*args, **options)
            if not x.is_contiguous():
                return x
            with mock.patch.multiple(torch, **made):
                return zones.copy(x)

        return made_in_zones

    patches = {name: guarded(make) for name, make in made.items()}
    with mock.patch.multiple(torch, **patches), _without_access_to(zones):
        yield zones
    zones.check()


@contextmanager
def _without_access_to(zones: GuardZones) -> Iterator[None]:
    """In Triton's interpreter a load or store that reaches into a zone is an error, also if its values are not used."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder

    def checked(access: Callable[..., Any], mask_at: int) -> Callable[..., Any]:
        def masked_access(self: Any, pointers: Any, *args: Any) -> Any:
            reached = pointers.data[args[mask_at].data]
            for begin, end in zones.addresses():
                assert not ((reached >= begin) & (reached < end)).any(), "a load or store reaches beside a tensor"
            return access(self, pointers, *args)

        return masked_access

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    with mock.patch.multiple(
        InterpreterBuilder, create_masked_load=checked(load, 0), create_masked_store=checked(store, 1)
    ):
        yield
