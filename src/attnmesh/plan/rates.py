"""What a machine can do, in round numbers: enough to rank schedules, not to predict a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Machine:
    """Rates of one rank."""

    name: str
    flops: float  # a second, in attention kernels
    near: float  # bytes a second to ranks of the same node
    far: float  # bytes a second to ranks of other nodes
    step: float  # seconds that one more stage costs: launches, a last wave that does not fill the device, a merge
    launch: float = 3e-6  # seconds that one more small operation costs


GPU = Machine("a GPU of the H200's kind", flops=5e14, near=3e11, far=4e10, step=3e-5)
CPU = Machine("a CPU process", flops=5e10, near=4e9, far=1e9, step=2e-4, launch=1e-5)


def machine(device: str) -> Machine:
    """The machine to plan for, by the type of torch device: anything but a CPU is taken for a GPU."""
    return CPU if torch.device(device).type == "cpu" else GPU


@dataclass(frozen=True)
class Link:
    """What small messages cost."""

    latency: float  # seconds until a message is there, however small
    message: float  # seconds until a rank has started one and can start the next
    bandwidth: float  # bytes a second that a rank sends


GPU_LINK = Link(latency=5e-6, message=5e-7, bandwidth=GPU.near)
CPU_LINK = Link(latency=5e-5, message=2e-5, bandwidth=CPU.near)


def link(device: str) -> Link:
    """The link to plan for, by the type of torch device."""
    return CPU_LINK if machine(device) is CPU else GPU_LINK
