"""One message on its way through a process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Parcel:
    """One message on its way, and the buffer that the wire sees: the tensor itself, or its pinned twin."""

    tensor: Tensor
    peer: int
    send: bool
    staged: Tensor | None = None

    @property
    def wire(self) -> Tensor:
        """What the backend reads or writes."""
        return self.tensor if self.staged is None else self.staged

    def unstage(self) -> None:
        """Take what has arrived to where it was wanted."""
        if self.staged is not None and not self.send:
            self.tensor.copy_(self.staged, non_blocking=True)

    def __str__(self) -> str:
        doing, whom = ("sending", "to") if self.send else ("receiving", "from")
        return f"{doing} {self.tensor.nbytes} bytes {whom} rank {self.peer}"


def stage(parcels: Sequence[Parcel]) -> None:
    """Give CUDA tensors pinned host buffers, filled where they are to be sent."""
    on_device = [parcel for parcel in parcels if parcel.tensor.is_cuda]
    for parcel in on_device:
        parcel.staged = torch.empty_like(parcel.tensor, device="cpu", pin_memory=True)
        if parcel.send:
            parcel.staged.copy_(parcel.tensor, non_blocking=True)
    for device in {parcel.tensor.device for parcel in on_device if parcel.send}:
        torch.cuda.current_stream(device).synchronize()  # gloo reads host memory and knows no streams
