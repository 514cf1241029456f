"""The GPU that a kernel is launched on, as far as its tiles depend on it."""

import functools
import logging
from typing import Any, NamedTuple

import torch

from attnmesh.utils.optional import installed

_LOG = logging.getLogger(__name__)


class GPU(NamedTuple):
    """A compute capability, 90 for 9.0, and the bytes of shared memory that one program may use."""

    capability: int
    shared_memory: int

    @property
    def tensor_memory(self) -> bool:
        """Whether products accumulate in tensor memory: on Blackwell, except for the GPUs of 12.0."""
        return 100 <= self.capability < 120


HOPPER = GPU(90, 227 * 1024)
WITHOUT_GPU = HOPPER  # assumed for tensors in host memory, where kernels are interpreted


def gpu_of(device: torch.device) -> GPU:
    """The GPU of a device."""
    return _gpu_of(device) if device.type == "cuda" else WITHOUT_GPU


def is_hopper(device: torch.device) -> bool:
    """Whether a device is a GPU of compute capability 9.0 of NVIDIA: AMD's have such numbers, too."""
    return device.type == "cuda" and torch.version.hip is None and gpu_of(device).capability // 10 == 9


def starts_early(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it runs: programmatic dependent launch, from Hopper on."""
    import triton

    return torch.version.hip is None and gpu_of(device).capability >= 90 and not triton.knobs.runtime.interpret


@functools.cache
def _gpu_of(device: torch.device) -> GPU:
    log_compile_times()
    properties: Any = torch.cuda.get_device_properties(device)  # its type lacks shared_memory_per_block_optin
    return GPU(
        10 * properties.major + properties.minor, int(getattr(properties, "shared_memory_per_block_optin", 48 * 1024))
    )


def log_compile_times() -> None:
    """Log, at INFO, how long Triton compiles each kernel of this package, unless a program listens to Triton itself."""
    if installed("triton"):
        from triton import knobs

        if knobs.compilation.listener is None:
            knobs.compilation.listener = _compiled


def _compiled(*, src: Any, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
    if getattr(getattr(src, "fn", None), "__module__", "").startswith("attnmesh."):
        name, seconds = metadata.get("name", "a kernel"), times.total / 1e6
        _LOG.info("%s %s in %.2f s", "read" if cache_hit else "compiled", name, seconds)
