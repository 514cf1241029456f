"""A script: JAX's paged attention (Pallas) timed at some shapes, a line of JSON for each as it is known.

It imports nothing of ours, and so no torch. JAX has no graphs to replay, so its own clock is the wall's: a chain of
calls inside one jit, each attending with the result of the one before, divided by their number. The host is out of
the picture, but nothing is flushed: a cache that fits the L2 is read from there. Parameters are JAX's defaults.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from importlib import import_module
from typing import Any

_CALLS = 20
_ROUNDS = 5


def main(request: str) -> None:
    """Time every shape of a request `{"block_size": .., "shapes": [[B, Hq, Hkv, L, D], ..]}`."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the calling process uses memory, too
    wanted = json.loads(request)
    for shape in wanted["shapes"]:
        try:
            said: dict[str, object] = {"us": microseconds(*shape, block_size=wanted["block_size"])}
        except Exception as error:  # whatever JAX raises is an answer
            said = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:100]}
        print(json.dumps(said), flush=True)


def microseconds(batch: int, q_heads: int, kv_heads: int, length: int, head_dim: int, *, block_size: int) -> float:
    """The median of a call's share of a chain."""
    jax = import_module("jax")
    if jax.default_backend() != "gpu":
        raise RuntimeError(f"JAX finds no GPU, it computes on the {jax.default_backend()}")
    paged = import_module("jax.experimental.pallas.ops.gpu.paged_attention").paged_attention
    inputs = _inputs(jax, batch, q_heads, kv_heads, length, head_dim, block_size)

    @jax.jit  # type: ignore[untyped-decorator]
    def chain(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
        return jax.lax.fori_loop(0, _CALLS, lambda _, x: paged(x, k, v, table, lengths).astype(x.dtype), q)

    out = chain(*inputs).block_until_ready()
    if not bool(jax.numpy.isfinite(out).all()):
        raise RuntimeError("computed NaN or infinity")
    samples = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        chain(*inputs).block_until_ready()
        samples.append(time.perf_counter() - start)
    return 1e6 * statistics.median(samples) / _CALLS


def _inputs(
    jax: Any, batch: int, q_heads: int, kv_heads: int, length: int, head_dim: int, block_size: int
) -> tuple[Any, ...]:
    """q, pools [Hkv, blocks, block_size, D], a shuffled table, lengths."""
    slots = length // block_size
    keys = jax.random.split(jax.random.key(0), 4)
    bf16, i32 = jax.numpy.bfloat16, jax.numpy.int32
    q = jax.random.normal(keys[0], (batch, q_heads, head_dim), bf16)
    k, v = (jax.random.normal(key, (kv_heads, batch * slots, block_size, head_dim), bf16) for key in keys[1:3])
    table = jax.random.permutation(keys[3], batch * slots).reshape(batch, slots).astype(i32)
    return q, k, v, table, jax.numpy.full((batch,), length, i32)


if __name__ == "__main__":
    main(sys.argv[1])
