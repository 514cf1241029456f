"""Everything a decode call may be, crossed with everything else: every two of the values below meet in some case."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from attnmesh.testing.decode import DecodeProblem, random_decode
from attnmesh.verify.decode import AXES, STORAGES, UNSERVED, decode_problem
from attnmesh.verify.mode import covering_rows
from helpers.decode import (
    BACKENDS,
    assert_decode_close,
    check_backend,
    decode_by_loops,
    device_of,
    interpreted,
    supported_dtype,
)

CASES = covering_rows(AXES, UNSERVED)


def named(case: dict) -> str:
    return "-".join(str(value).replace("torch.", "").replace(" ", "") for value in case.values())


def problem_of(case: dict, seed: int, *, backend: str = "cpu", dtype: torch.dtype | None = None) -> DecodeProblem:
    dtype = supported_dtype(backend, case["dtype"] if dtype is None else dtype)
    return decode_problem(case, seed, dtype=dtype, device=device_of(backend))


def test_the_axes_have_the_values_of_the_pairs_that_are_left_out():
    for pair in UNSERVED:
        for name, value in pair:
            assert value in AXES[name]
    assert len(CASES) < 100


def is_left_to_sweep(seed: int, backend: str) -> bool:
    """Three of four cases in the interpreter, and those with many splits, rows or keys, which take ten seconds."""
    case = CASES[seed]
    long = case["splits"] == ("split_size", 13) or case["group"] == 64 or case["cache"] == 256
    return interpreted(backend) and (long or seed % 4 != 0)


@pytest.mark.parametrize(
    ("seed", "backend"),
    [
        pytest.param(
            seed, backend, id=f"{named(case)}-{backend}",
            marks=[pytest.mark.sweep] if is_left_to_sweep(seed, backend) else [],
        )
        for seed, case in enumerate(CASES) for backend in BACKENDS
    ],
)  # fmt: skip
def test_every_pair_is_right(seed, backend):
    check_backend(problem_of(CASES[seed], seed, backend=backend), backend)


@pytest.mark.parametrize("seed", range(0, len(CASES), 5), ids=lambda seed: named(CASES[seed]))
def test_the_reference_is_what_loops_over_the_keys_give(seed):
    case = CASES[seed] | {"group": min(CASES[seed]["group"], 3)}
    problem = problem_of(case, seed, dtype=torch.float64)
    found, exact, loops = problem.run("reference"), problem.exact(), decode_by_loops(problem)
    for state in (found, exact):
        torch.testing.assert_close(state.lse, loops.lse, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state.out, loops.out, rtol=1e-12, atol=1e-12)


@st.composite
def problems(draw, backend: str, most: int):
    """A call of any shape."""
    tokens = draw(st.integers(1, 8))
    batch = draw(st.integers(1, 3))
    paged = draw(st.booleans())
    storage = draw(st.sampled_from(STORAGES))
    width = st.integers(1, 3).map(lambda n: 16 * n) if storage == "bfp8" else st.integers(16, 50)
    v_in_k = draw(st.booleans())
    dims = sorted([draw(width), draw(width)], reverse=True) if v_in_k else [draw(width), draw(width)]
    where = draw(st.lists(st.integers(-1, most), min_size=batch, max_size=batch))
    split = draw(st.sampled_from([None, "max_splits", "split_size"]))
    key_range = draw(st.sampled_from(["causal", *AXES["key_range"]]))
    alone = key_range == "intervals"  # without a window or a cache for all
    return random_decode(
        where,
        tokens=tokens,
        group=draw(st.integers(1, 9)),
        kv_heads=draw(st.integers(1, 3)),
        dims=tuple(dims),
        v_in_k=v_in_k,
        block_size=draw(st.integers(1, 40)) if paged else None,
        capacity=max(where) + 1 + draw(st.integers(0, 30)) or 1,
        storage=storage,
        dtype=supported_dtype(backend, draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))),
        share=draw(st.sampled_from([None] + ["cache"] * (not alone) + ["blocks"] * paged)),
        memory=draw(st.sampled_from(["own", "layer", "layer inside"] + ["token major"] * (not paged))),
        key_range=key_range,
        window=None if alone else draw(st.none() | st.integers(1, most)),
        sinks=draw(st.booleans()),
        at=draw(st.sampled_from(["list", "int32", "int64"])),
        device=device_of(backend),
        seed=draw(st.integers(0, 2**16)),
        **({} if split is None else {split: draw(st.integers(1, 50))}),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_shape_is_right(backend):
    phases = [Phase.generate] if interpreted(backend) else list(Phase)  # no time for smaller examples of a failure
    # On a GPU each shape is a kernel to compile; interpreted, each takes seconds, and pairs are met above.
    most = 3 if interpreted(backend) else 15 if backend == "triton" else 40

    @settings(max_examples=most, deadline=None, derandomize=True, phases=phases)
    @given(problems(backend, 60))
    def right(problem):
        check_backend(problem, backend)

    right()


@settings(max_examples=12, deadline=None, derandomize=True)
@given(problems("reference", 20))
def test_the_reference_is_what_loops_give_for_any_shape(problem):
    found = problem.exact()
    loops = decode_by_loops(problem)
    torch.testing.assert_close(found.lse, loops.lse, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.out, loops.out, rtol=1e-12, atol=1e-12)
    assert_decode_close(problem.run("reference"), problem)
