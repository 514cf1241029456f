"""What is studied: lengths, ranks and models."""

from __future__ import annotations

from dataclasses import dataclass

from attnmesh.plan.workload import Shape

HARDWARE = "h200"
SHAPE = Shape(batch=1, q_heads=64, kv_heads=8, head_dim=128, itemsize=2, sum_itemsize=4)  # a layer of Llama-3.1-70B
CONTEXT = 1 << 20  # of token generation


@dataclass(frozen=True)
class Scope:
    """How far the studies go."""

    lengths: tuple[int, ...]
    worlds: tuple[int, ...]
    both_ways: int  # the length at which gradients are simulated, too
    slow_worlds: tuple[int, ...]  # with somebody slow among them
    slow_length: int
    models: tuple[str, ...]
    batches: tuple[int, ...]
    devices: tuple[int, ...]


FULL = Scope(
    lengths=(128 << 10, 1 << 20, 10 << 20, 100 << 20),
    worlds=(8, 16, 64, 256, 1024, 4096),
    both_ways=1 << 20,
    slow_worlds=(64, 1024),
    slow_length=1 << 20,
    models=("gpt-oss-120b", "llama-3.1-70b"),
    batches=(1, 8, 64),
    devices=(8, 16, 32, 64),
)
QUICK = Scope(
    lengths=(128 << 10,),
    worlds=(8, 16),
    both_ways=128 << 10,
    slow_worlds=(16,),
    slow_length=128 << 10,
    models=("gpt-oss-120b",),
    batches=(1,),
    devices=(8, 16),
)
