"""Counts that size a plan have limits, in every function that takes them."""

import pytest

from attnmesh.core.layouts import Zigzag
from attnmesh.core.masks import Causal
from attnmesh.plan.shards import shards
from attnmesh.planner.catalog import cluster
from attnmesh.planner.decode import DecodeRequest
from attnmesh.planner.models import ModelConfig, model
from attnmesh.planner.prefill import PrefillRequest
from attnmesh.planner.program import Program
from attnmesh.planner.recommend import compare_shardings, recommend_sharding
from attnmesh.planner.simulator import simulate
from attnmesh.utils.sizes import MAX_BATCH, MAX_LENGTH, MAX_RANKS, check_sizes, divisors

H200, LLAMA = cluster("h200"), model("llama-3.1-8b")
CALLS = {
    "DecodeRequest": (
        lambda **given: DecodeRequest(
            **{"model": LLAMA, "cluster": H200, "context": 9, "batch": 2, "devices": 2, **given}
        ),
        ("context", "batch", "devices", "tokens"),
    ),
    "PrefillRequest": (
        lambda **given: PrefillRequest(
            **{"model": LLAMA, "cluster": H200, "context": 9, "batch": 2, "devices": 2, **given}
        ),
        ("context", "batch", "devices"),
    ),
    "recommend_sharding": (
        lambda **given: recommend_sharding(
            **{"batch": 2, "q_heads": 8, "kv_heads": 2, "ranks": 2, "context": 9, **given}
        ),
        ("batch", "q_heads", "kv_heads", "ranks", "context", "head_dim", "tokens", "layers", "hidden"),
    ),
    "compare_shardings": (
        lambda **given: compare_shardings(**{"q_heads": 8, "kv_heads": 2, "ranks": 2, **given}),
        ("q_heads", "kv_heads", "ranks"),
    ),
    "ModelConfig": (
        lambda **given: ModelConfig(**{"q_heads": 8, "kv_heads": 2, "head_dim": 8, "hidden": 64, **given}),
        ("q_heads", "kv_heads", "head_dim", "hidden", "layers", "vocab_size", "intermediate_size"),
    ),
    "cluster": (lambda **given: cluster("h200", **given), ("ranks_per_node", "rails")),
    "shards": (lambda world: shards(Causal(), Zigzag(), 64, world), ("world",)),
    "simulate": (lambda world: simulate(Program("any", world, lambda: iter(())), H200), ("world",)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("wrong", [0, -1, 2**63, 10**30, 2.5, "2", True, float("nan"), [2]], ids=repr)
def test_every_count_is_checked(call, wrong):
    function, names = CALLS[call]
    for name in names:
        with pytest.raises(ValueError, match=rf"{name} must be (an integer >= 1|at most \d+), got |positive integer"):
            function(**{name: wrong})


def test_the_limits_are_those_that_are_stated():
    check_sizes(ranks=MAX_RANKS, batch=MAX_BATCH, layers=4096)
    for name, most in {"devices": 16384, "context": 2**27, "batch": 65536, "layers": 4096, "tokens": 4096}.items():
        check_sizes(**{name: most})
        with pytest.raises(ValueError, match=f"^{name} must be at most {most}, got {most + 1}$"):
            check_sizes(**{name: most + 1})


def test_elements_are_counted_in_an_integer_of_64_bits():
    check_sizes(batch=2, context=MAX_LENGTH, q_heads=2**14, head_dim=2**14)
    with pytest.raises(ValueError, match=r"^batch x context x q_heads x head_dim must be at most 2\*\*56, got 4 x 134"):
        check_sizes(batch=4, context=MAX_LENGTH, q_heads=2**14, head_dim=2**14)


def test_windows_are_one_for_each_layer():
    with pytest.raises(ValueError, match="windows must have one entry for each of 2 layers, got 1"):
        ModelConfig(8, 2, 8, 64, layers=2, windows=(4,))


def test_divisors():
    for n in range(1, 400):
        assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]
