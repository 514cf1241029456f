"""The bf16 error of a ring against its number of ranks: it must not grow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnmesh.cli.options import MeasuredDeviceOption, default_device
from attnmesh.comm import Comm, run_virtual
from attnmesh.core.layouts import Zigzag
from attnmesh.core.masks import Causal
from attnmesh.ops.dense.api import attention
from attnmesh.parallel.context import ContextParallel
from benchmarks.common import JsonOption, make_app, publish

NAMES = ("out", "lse", "dq", "dk", "dv")


def measure_accuracy(
    device: str,
    backends: Sequence[str],
    worlds: Sequence[int],
    *,
    length: int = 4096,
    heads: int = 4,
    kv_heads: int = 2,
) -> list[dict[str, object]]:
    """Relative RMS errors against float64 by backend and world: bf16, causal, zigzag, head_dim 128, seed 0."""
    generator = torch.Generator().manual_seed(0)

    def drawn(n: int) -> Tensor:
        return torch.randn(1, n, length, 128, generator=generator).to(device, torch.bfloat16)

    q, k, v, grad_out = (drawn(n) for n in (heads, kv_heads, kv_heads, heads))
    exact = _exact([x.double() for x in (q, k, v)], grad_out.double())
    rows: list[dict[str, object]] = []
    for backend in backends:
        for world in worlds:

            def rank(comm: Comm, backend: str = backend) -> list[Tensor]:
                cp = ContextParallel(comm, layout=Zigzag(), schedule="ring", backend=backend)
                q_, k_, v_, grad = (cp.shard(x, 2).clone() for x in (q, k, v, grad_out))
                inputs = [x.requires_grad_() for x in (q_, k_, v_)]
                out, lse = cp.attention(*inputs, mask=Causal(), length=length, return_lse=True)
                grads = torch.autograd.grad(out, inputs, grad)
                return [cp.unshard(x, 2, length) for x in (out.detach(), lse.detach(), *grads)]

            found = run_virtual(world, rank)[0]
            errors = {name: _error(a, b) for name, a, b in zip(NAMES, found, exact, strict=True)}
            rows.append({"backend": backend, "ranks": world, **errors})
    return rows


def _exact(inputs: list[Tensor], grad_out: Tensor) -> list[Tensor]:
    inputs = [x.requires_grad_() for x in inputs]
    out, lse = attention(*inputs, mask=Causal(), return_lse=True, backend="reference")
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, grad_out)]


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def main(device: MeasuredDeviceOption = None, json: JsonOption = None) -> None:
    """Measure the error of ring context parallelism in bf16 against the number of ranks."""
    chosen = default_device(device)
    backends: tuple[str, ...] = ("aten",)
    if chosen == "cuda":
        hopper = torch.cuda.get_device_capability()[0] == 9
        backends = (*(("gluon",) if hopper else ()), "triton", "aten")
    title = "relative RMS error against float64 (bf16, causal, zigzag, S=4096, 4/2 heads, D=128)"
    publish("accuracy", chosen, [(title, measure_accuracy(chosen, backends, (1, 2, 4, 8, 16, 32, 64)))], json)


app = make_app(main)

if __name__ == "__main__":
    app()
