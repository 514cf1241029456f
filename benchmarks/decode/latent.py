"""`python -m benchmarks.decode.latent`: MLA decode, the Gluon kernels against the Triton kernel in one run on Hopper.

First both are compared with float64 on ragged sequences, while processes compile the kernels of all shapes. Then each
shape is timed, and a line printed as soon as it is known: microseconds with a cold L2, operations per second and bytes
per second. Neither floor can be passed: 2 * (576 + 512) operations per query row and key, and 1152 bytes per key, or
656 in `fp8_ds_mla`.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from typing import Annotated, NamedTuple

import torch
import typer
from torch import Tensor

from attnmesh.calibration.timing import Run, cold, reason
from attnmesh.ops.decode.api import paged_decode_attention
from attnmesh.ops.storage import Stored, quantize
from attnmesh.testing.decode import random_decode
from benchmarks.common import make_app
from benchmarks.timers import measured_floor

BACKENDS = ("gluon", "triton")
BLOCK_SIZE, KEY_DIM, VALUE_DIM = 64, 576, 512
SCALE = (128 + 64) ** -0.5
_ROUNDS = 7


class Latent(NamedTuple):
    """One decode step over latent caches of equal length."""

    batch: int
    heads: int
    length: int
    tokens: int = 1
    fp8: bool = False  # latents in fp8_ds_mla

    @property
    def flops(self) -> float:
        """Operations of both products, as if every token attended to all keys."""
        return 2.0 * (KEY_DIM + VALUE_DIM) * self.batch * self.heads * self.tokens * self.length

    @property
    def bytes(self) -> float:
        """Bytes of the cache, read once."""
        return (656.0 if self.fp8 else 2.0 * KEY_DIM) * self.batch * self.length


SHAPES = (
    Latent(128, 128, 4096), Latent(128, 16, 4096), Latent(128, 128, 32768), Latent(128, 16, 32768),
    Latent(1, 128, 131072), Latent(1, 16, 131072), Latent(128, 64, 8192), Latent(128, 128, 4096, tokens=2),
    Latent(128, 16, 32768, fp8=True), Latent(1, 16, 131072, fp8=True), Latent(128, 128, 4096, fp8=True),
)  # fmt: skip


def random_run(shape: Latent, device: str) -> dict[str, Run]:
    """Runs of both backends on the same inputs; blocks are in random order."""
    slots = -(-shape.length // BLOCK_SIZE)
    q = torch.randn(shape.batch, shape.heads, shape.tokens, KEY_DIM, device=device, dtype=torch.bfloat16)
    pool = torch.randn(shape.batch * slots, BLOCK_SIZE, 1, KEY_DIM, device=device, dtype=torch.bfloat16)
    cache: Stored = quantize(pool, "fp8_ds_mla") if shape.fp8 else pool
    values = cache if shape.fp8 else pool[..., :VALUE_DIM]
    table = torch.randperm(shape.batch * slots, device=device).view(shape.batch, slots).int()
    last = torch.full((shape.batch,), shape.length - 1, dtype=torch.int32, device=device)
    attend = partial(
        paged_decode_attention, q, cache, values, table, cur_pos=last, scale=SCALE
    )  # fmt: skip
    return {name: partial(attend, backend=name) for name in BACKENDS}


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """The norm of the difference over the norm; rows that are not finite in `exact` must be equal."""
    finite = exact.isfinite()
    return float((actual.double() - exact)[finite].norm() / exact[finite].norm())


def check(device: str, positions: tuple[int, ...] = (1000, 77, -1, 640, 63, 64)) -> None:
    """Compare both backends with float64, and require an error at most twice that of the plain computation."""
    for how in (
        {"group": 128}, {"group": 16, "tokens": 4, "sinks": True, "window": 300}, {"group": 16, "split_size": 192},
        {"group": 64, "key_range": "intervals", "tokens": 2}, {"group": 16, "storage": "fp8_ds_mla"},
    ):  # fmt: skip
        problem = random_decode(
            positions, dims=(KEY_DIM, VALUE_DIM), kv_heads=1, v_in_k=True, block_size=BLOCK_SIZE,
            dtype=torch.bfloat16, at="int32", device=device, **how,
        )  # fmt: skip
        exact, plain = problem.exact(), problem.plain()
        allowed = 2 * relative_error(plain.out, exact.out) + 1e-3
        for name in BACKENDS:
            state = problem.run(name)
            out, lse = relative_error(state.out, exact.out), relative_error(state.lse, exact.lse)
            print(f"{name:7} {how}: error of out {out:.2e} (at most {allowed:.2e}), of lse {lse:.1e}", flush=True)
            if not (out <= allowed and lse < 1e-5):
                raise SystemExit(f"{name} is wrong")


def run_once(shape: Latent, backend: str) -> None:
    """Leave the kernels of a shape in Triton's cache on disk; in a process of its own."""
    random_run(shape, "cuda")[backend]()
    torch.cuda.synchronize()


def main(
    seconds: Annotated[float, typer.Option(help="Start no shape after this many seconds.")] = 80.0,
    checks: Annotated[bool, typer.Option(help="Compare with float64 first.")] = True,
) -> None:
    """Measure MLA decode steps."""
    start = time.monotonic()
    work = list(product(SHAPES, BACKENDS))
    with ProcessPoolExecutor(len(work), mp_context=multiprocessing.get_context("spawn")) as processes:
        compiling = [processes.submit(run_once, *each) for each in work]
        if checks:
            check("cuda")
        for running, each in zip(compiling, work, strict=True):
            if error := running.exception():
                print(f"{each}: {reason(error)}", flush=True)
    print(f"[{time.monotonic() - start:5.1f} s] {torch.cuda.get_device_name()}, {measured_floor()}", flush=True)
    for shape in SHAPES:
        if time.monotonic() - start > seconds:
            print(f"stopped after {seconds} s", flush=True)
            return
        runs = random_run(shape, "cuda")
        difference = relative_error(runs["gluon"](), runs["triton"]().double())
        times = cold(runs, rounds=_ROUNDS)
        speeds = [
            f"{name} {us:8.1f} us {shape.flops / us / 1e6:6.1f} TFLOP/s {shape.bytes / us / 1e6:5.2f} TB/s"
            for name, us in times.items()
        ]
        ratio = f"triton/gluon {times['triton'] / times['gluon']:.2f}, difference {difference:.1e}"
        print(f"[{time.monotonic() - start:5.1f} s] {shape}: {'; '.join(speeds)}; {ratio}", flush=True)
        del runs


app = make_app(main)

if __name__ == "__main__":
    app()
