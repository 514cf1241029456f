"""Masks compared with torch's FlexAttention on one device: forward, and forward with backward.

Each mask is one of the library's and, for FlexAttention, a `mask_mod` as its users write it, compiled, with a block
mask that is made beforehand. Both results and all gradients must be equal to rounding. FLOPs count visible pairs only:
4 per pair, head and column forward, 14 with the backward.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from attnmesh.calibration.timing import Run, queued
from attnmesh.cli.options import Device, check_device
from attnmesh.cli.output import Rows
from attnmesh.core.masks import BlockCausal, Causal, Chunked, Documents, Global, Mask, Prefix, SlidingWindow
from attnmesh.core.visibility import Patch
from attnmesh.ops.dense.api import attention, explain_attention
from benchmarks.common import JsonOption, LengthsOption, QuickOption, make_app, publish
from benchmarks.peers import HEAD_DIM, HEADS, KV_HEADS, compile_flex, random_inputs, run_backward

MaskMod = Callable[[Any, Any, Any, Any], Any]
_FLOPS = {"forward": 4, "forward+backward": 14}
_TOLERANCE = 0.01  # relative, between two results that were rounded to bf16


@dataclass(frozen=True)
class Case:
    """A mask, and the same mask for FlexAttention."""

    name: str
    mask: Mask
    mask_mod: MaskMod


def cases(length: int) -> list[Case]:
    """The masks of a sequence of this length, which is a multiple of 8,192."""
    quarter = length // 4
    return [
        Case("causal", Causal(), lambda b, h, q, k: q >= k),
        Case("prefix of a quarter", Prefix(quarter), lambda b, h, q, k: (k < quarter) | (q >= k)),
        Case(
            "causal documents of 2,048", Causal() & Documents([2048] * (length // 2048)),
            lambda b, h, q, k: (q >= k) & (q // 2048 == k // 2048),
        ),
        Case(
            "documents of 2,048", Documents([2048] * (length // 2048)),
            lambda b, h, q, k: q // 2048 == k // 2048,
        ),
        Case("window of 4,096", SlidingWindow(4095), lambda b, h, q, k: (q >= k) & (q - k <= 4095)),
        Case(
            "4 global tokens, window of 1,024", Causal() & (Global(4) | SlidingWindow(1023)),
            lambda b, h, q, k: (q >= k) & ((k < 4) | (q - k <= 1023)),
        ),
        Case(
            "256 global tokens, window of 4,096", Causal() & (Global(256) | SlidingWindow(4095)),
            lambda b, h, q, k: (q >= k) & ((k < 256) | (q - k <= 4095)),
        ),
        Case("block-causal, 256", BlockCausal(256), lambda b, h, q, k: q // 256 >= k // 256),
        Case("block-causal, 1,024", BlockCausal(1024), lambda b, h, q, k: q // 1024 >= k // 1024),
        Case("chunks of 8,192", Chunked(8192), lambda b, h, q, k: (q >= k) & (q // 8192 == k // 8192)),
    ]  # fmt: skip


def measure_masks(length: int, *, rounds: int, only: Sequence[str] = ()) -> Iterator[tuple[str, Rows]]:
    """A section for every mask, with a line for each direction: bf16, batch 1, 32/8 heads, D=128."""
    for case in cases(length):
        if only and case.name not in only:
            continue
        run_flex = compile_flex(case.mask_mod, length)
        pairs = Patch(case.mask, (range(length),), (range(length),)).pairs
        lines: Rows = []
        for direction, flops in _FLOPS.items():
            q, k, v, grad = random_inputs(length, direction != "forward")
            own = {
                backend: partial(attention, mask=case.mask, backend=backend) for backend in ("triton", "auto")
            }  # fmt: skip
            _assert_equal(case.name, run_flex, own["triton"], q, k, v, grad)
            runs: dict[str, Run] = {
                name: partial(_run, function, q, k, v, grad) for name, function in {"flex": run_flex, **own}.items()
            }
            times = queued(runs, rounds)
            tflops = {name: flops * pairs * HEADS * HEAD_DIM / ms / 1e9 for name, ms in times.items()}
            lines.append({
                "mask": case.name, "direction": direction, "visible": pairs / length**2,
                "flex_ms": times["flex"], "triton_ms": times["triton"],
                "flex_tflops": tflops["flex"], "triton_tflops": tflops["triton"],
                "triton/flex": tflops["triton"] / tflops["flex"],
                "auto": explain_attention(q, k, v, mask=case.mask).backend, "auto_tflops": tflops["auto"],
            })  # fmt: skip
            del q, k, v, grad, runs
        gc.collect()
        torch.cuda.empty_cache()
        yield f"{case.name}, {length} tokens (bf16, {HEADS}/{KV_HEADS} heads, D={HEAD_DIM})", lines


def _run(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None) -> Tensor:
    return run_backward(function(q, k, v), (q, k, v), grad)


def _assert_equal(
    name: str, flex: Callable[..., Tensor], own: Callable[..., Tensor],
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None,
) -> None:  # fmt: skip
    """Raise AssertionError if out or a gradient differs by more than the rounding of both."""
    found = []
    for function in (flex, own):
        out = function(q, k, v)
        grads = () if grad is None else torch.autograd.grad(out, [q, k, v], grad)
        found.append([out.detach(), *grads])
    for what, theirs, ours in zip(("out", "grad_q", "grad_k", "grad_v"), *found, strict=False):
        error = float((theirs.float() - ours.float()).norm() / theirs.float().norm())
        assert error < _TOLERANCE, f"{name}: {what} differs from FlexAttention's by {error:.2g}"


def main(
    lengths: LengthsOption = None,
    only: Annotated[list[str] | None, typer.Option(help="Name of a mask. Repeatable.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of times each program is timed.")] = 3,
    quick: QuickOption = False,
    json: JsonOption = None,
) -> None:
    """Compare masks with FlexAttention on one GPU."""
    check_device(Device.CUDA)
    names = {case.name for case in cases(8192)}
    if only and not set(only) <= names:
        raise typer.BadParameter(f"must be one of {', '.join(sorted(names))}", param_hint="--only")
    sections = (
        section
        for length in ([8192] if quick else lengths or [32768])
        for section in measure_masks(length, rounds=1 if quick else rounds, only=only or ())
    )
    publish("masks", "cuda", sections, json)


app = make_app(main)

if __name__ == "__main__":
    app()
