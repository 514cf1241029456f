"""What the host does for a call that repeats: so many function calls, and the launches of a first call.

A count is the same on every machine, where a time is not. A change may lower the bounds here, and not raise them.
"""

import json
import sys
from collections.abc import Callable

import pytest
import torch

import attnmesh as am
from attnmesh.ops.dense import dispatch
from helpers.triton_driver import record_launches, said_by_its_own_process, skip_compilation

ON_THE_CPU = {
    "causal": 45, "a mask per call": 46, "full": 45, "with lse": 45, "window": 92, "positions": 179, "sinks": 126,
    "forward and backward": 115,
}  # fmt: skip
ON_HOPPER = {
    ("gluon", "causal"): (78, 178), ("gluon", "documents"): (85, 197),
    ("triton", "causal"): (78, 169), ("triton", "documents"): (85, 184),
}  # fmt: skip


def calls_of(run: Callable[[], object]) -> int:
    """The functions that a repeat of `run` calls from this package: its own, and those in C and in torch.

    The fewest of many repeats: a gradient at a new address takes a new descriptor.
    """
    for _ in range(3):
        run()
    return min(_count(run) for _ in range(40))


def _count(run: Callable[[], object]) -> int:
    package, count = am.__path__[0], 0

    def watch(frame, event, _):
        nonlocal count
        caller = frame.f_back if event == "call" else frame if event == "c_call" else None
        inside = caller is not None and caller.f_code.co_filename.startswith(package)
        count += inside or (event == "call" and frame.f_code.co_filename.startswith(package))

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("case", ON_THE_CPU)
def test_calls_of_a_repeat_on_the_cpu(case):
    q, k, v = torch.randn(3, 1, 4, 8, 16).unbind()
    dispatch._checked.clear()  # an equal mask of another test takes a comparison
    causal, window, at = am.Causal(), am.SlidingWindow(3), torch.arange(4, 8)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    run = {
        "causal": lambda: am.attention(q, k, v, mask=causal),
        "a mask per call": lambda: am.attention(q, k, v, mask=am.Causal()),
        "full": lambda: am.attention(q, k, v),
        "with lse": lambda: am.attention(q, k, v, mask=causal, return_lse=True),
        "window": lambda: am.attention(q, k, v, mask=window),
        "positions": lambda: am.attention(q[:, :, 4:], k, v, mask=causal, q_positions=at),
        "sinks": lambda: am.attention(q, k, v, mask=causal, sinks=q[0, :, 0, 0]),
        "forward and backward": lambda: torch.autograd.grad(am.attention(*inputs, mask=causal), inputs, q),
    }[case]
    assert calls_of(run) <= ON_THE_CPU[case]


def test_repeats_on_hopper():
    """In a process of its own (`helpers.triton_driver`): function calls, and what is launched.

    A repeat launches with the tensors of its own call, whatever those of the first call shared memory with: keys and
    values that were one tensor, or parts of one.
    """
    pytest.importorskip("triton")
    found = json.loads(said_by_its_own_process(__file__))
    for (backend, mask), (forward, both) in ON_HOPPER.items():
        calls = found["calls"][f"{backend} {mask}"]
        assert calls[0] <= forward, (backend, mask)
        assert calls[1] <= both, (backend, mask)
    assert len(found["launches"]) == 16
    for case, (repeated, first) in found["launches"].items():
        assert repeated == first, case


def main() -> None:
    passed, _ = record_launches()
    skip_compilation()
    from attnmesh.ops.dense import gluon_backward, gluon_forward, triton_backward, triton_forward
    from attnmesh.ops.dense.gluon import Gluon
    from attnmesh.ops.dense.triton import Triton

    Triton.why_not = lambda self, call: None
    Gluon._reason = lambda self, call, part: None
    kernels = gluon_forward, gluon_backward, triton_forward, triton_backward

    def drawn(width: int, shared: str) -> list[torch.Tensor]:
        if shared == "one tensor":
            x = torch.randn(1, 4, 128, width).bfloat16()
            return [x, x, x]
        if shared in ("parts of one", "parts of three"):
            several = [torch.randn(1, 128, 3, 4, width).bfloat16().transpose(1, 3).unbind(2) for _ in range(3)]
            return [several[i if shared == "parts of three" else 0][i] for i in range(3)]
        return [torch.randn(1, 4, 128, width).bfloat16() for _ in range(3)]

    masks = {"causal": am.Causal(), "documents": am.Causal() & am.Documents([50, 78])}
    grad_out = torch.randn(1, 4, 128, 128).bfloat16()
    calls = {}
    for backend, mask in ON_HOPPER:
        q, k, v = drawn(128, "nothing")
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        how = {"mask": masks[mask], "backend": backend}
        calls[f"{backend} {mask}"] = (
            calls_of(lambda q=q, k=k, v=v, how=how: am.attention(q, k, v, **how)),
            calls_of(
                lambda inputs=inputs, how=how: torch.autograd.grad(am.attention(*inputs, **how), inputs, grad_out)
            ),
        )

    def launched(inputs: list[torch.Tensor], how: dict) -> list:
        """What the driver is passed, with the names of tensors instead of their addresses."""
        names = {x.data_ptr(): name for x, name in zip(inputs, "qkv", strict=True)}
        if inputs[0].shape[3] > 128:
            names |= {x[..., 128:].data_ptr(): f"{name} from 128" for x, name in zip(inputs, "qkv", strict=True)}

        def named(x):
            if isinstance(x, torch.Tensor):
                x = x.data_ptr()
            if isinstance(x, tuple | list):
                return [named(each) for each in x]
            return names.get(x, "new" if isinstance(x, int) and x > 2**32 else repr(x))

        passed.clear()
        leaves = [x.detach().requires_grad_() for x in inputs]
        torch.autograd.grad(am.attention(*leaves, **how), leaves, torch.ones_like(inputs[0]))
        # Nobody listens: hooks and what they would be told are left out.
        told = "Hook", "LazyDict"
        return [[named(x) for x in one if x is not None and not any(t in str(type(x)) for t in told)] for one in passed]

    launches = {}
    for width in (128, 192):
        for backend in ("gluon", "triton"):
            for pair in (("one tensor", "nothing"), ("parts of one", "parts of three")):
                for before, after in (pair, pair[::-1]):
                    how = {"mask": masks["causal"], "backend": backend}
                    for kernel in kernels:
                        kernel._known.clear()
                    launched(drawn(width, before), how)
                    given = drawn(width, after)
                    again = launched(given, how)
                    for kernel in kernels:
                        kernel._known.clear()
                    launches[f"{backend} {width} {before} {after}"] = again, launched(given, how)
    print(json.dumps({"calls": calls, "launches": launches}))


if __name__ == "__main__":
    main()
