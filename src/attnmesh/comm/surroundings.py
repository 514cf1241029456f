"""The thread-local state of torch, carried from one thread to others."""

from contextlib import ExitStack

import torch


class Surroundings:
    """The caller's thread-local torch state, to be found again on the ranks' threads."""

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = {
            device: torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
        }
        self.default_device = torch.get_default_device()
        cuda = torch.cuda.is_initialized()
        self.stream = torch.cuda.current_stream() if cuda else None

    def recreated(self) -> ExitStack:
        """A context with the same state."""
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(self.inference))
        stack.enter_context(torch.set_grad_enabled(self.grad))
        # Backward must stay on the rank's thread: CUDA's would move to a thread that holds no baton.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        for device, dtype in self.autocast.items():
            stack.enter_context(torch.autocast(device, dtype))
        if self.default_device.type != "cpu":
            stack.enter_context(self.default_device)
        if self.stream is not None:
            stack.enter_context(torch.cuda.device(self.stream.device))
            stack.enter_context(torch.cuda.stream(self.stream))
        return stack
