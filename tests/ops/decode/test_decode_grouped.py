"""The decode kernel for large groups of query heads on Hopper against float64: emulated, on a GPU, and compiled."""

from itertools import product
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from attnmesh.core.state import State
from attnmesh.ops.decode import gluon_grouped
from attnmesh.testing.decode import DecodeProblem, random_decode
from helpers.cases import else_sweep, first
from helpers.decode import assert_decode_close, assert_huge_scores_are_right, with_huge_scores
from helpers.gluon import emulated
from helpers.triton_compile import assert_fit, compiled_for_hopper, count


def grouped(positions: list[int], **how: object) -> DecodeProblem:
    how = {"group": 16, "kv_heads": 2, "block_size": 64, "dtype": torch.float16, "at": "int32"} | how
    return random_decode(positions, **{"dims": (128, 128)} | how)


def assert_right(kernel: ModuleType, problem: DecodeProblem) -> None:
    call = problem.call()
    assert gluon_grouped.why_not(call) is None
    state = State(*(x.fill_(torch.nan) for x in call.empty_state()))
    kernel.launch(call, state, 0)
    assert_decode_close(state, problem)


CASES = [
    ([130, 0, 63, 64, 200], {}),
    ([200, 150], {"window": 70, "tokens": 2}),
    ([300, 70], {"split_size": 100, "window": 150, "sinks": True}),
    ([130, 0, 200], {"scale": -0.05, "tokens": 8, "kv_heads": 1}),
    ([250, 90, 170], {"key_range": "intervals", "tokens": 4, "group": 20}),
    ([500, -1], {"max_splits": 3, "block_size": 16, "dims": (64, 64)}),
    ([330, 150], {"group": 70, "tokens": 2, "memory": "layer inside", "out_dtype": torch.float32}),
    ([500, 20], {"max_splits": 1, "group": 64, "sinks": True}),
    ([200, 150], {"block_size": 256, "group": 16, "tokens": 8, "window": 50, "sinks": True, "kv_heads": 1}),
]


@pytest.mark.parametrize(("positions", "how"), first(1, CASES))
def test_against_float64(positions, how):
    assert_right(emulated(gluon_grouped), grouped(positions, **how))


HUGE = [(torch.bfloat16, 20), (torch.bfloat16, 32), (torch.bfloat16, 120), (torch.float16, 28)]


@pytest.mark.parametrize(("dtype", "exponent"), first(1, HUGE))
def test_huge_scores(dtype, exponent):
    problem = with_huge_scores(grouped([130], dtype=dtype, kv_heads=1, max_splits=1), exponent)
    call = problem.call()
    state = call.empty_state()
    emulated(gluon_grouped).launch(call, state, 0)
    assert_huge_scores_are_right(state, problem)


@pytest.mark.sweep
def test_under_hostile_schedules():
    for seed in range(6):
        assert_right(emulated(gluon_grouped, seed), grouped([330, 100, 65], tokens=1 + 4 * (seed % 2)))


PLANTED = {
    "keys are read before they arrive": ("mbarrier.wait(barriers.k_ready.index(slot), turn)", "pass"),
    "sums are overwritten": ("mbarrier.wait(barriers.sums_free.index(0), (done & 1) ^ 1)", "pass"),
    "sums are not rescaled": ("sums = sums * gl.convert_layout(acc_scale, gl.SliceLayout(1, wide))[:, None]", "pass"),
    "tiles change hands between items": ("first = (step + PART) % 2 * (2 - HALVES)", "first = PART * (2 - HALVES)"),
}


@pytest.mark.sweep
@pytest.mark.parametrize("fault", PLANTED)
def test_the_emulation_finds_planted_faults(fault):
    problem = grouped([330, 130, 77, 5, 9, 600, 250], scale=0.5, kv_heads=1)

    def many_times():  # a race is lost sooner or later
        for seed in range(60):
            assert_right(emulated(gluon_grouped, seed, PLANTED[fault]), problem)

    with pytest.raises(AssertionError):
        many_times()


def test_what_it_refuses():
    def reason(**how: object) -> str | None:
        return gluon_grouped.why_not(grouped([70, 40], **how).call())

    assert reason() is None
    assert "16 or more" in reason(group=15)
    assert reason(group=8, tokens=2) is None
    assert "head_dim 64 and 128" in reason(dims=(96, 96))
    assert "head_dim 64 and 128" in reason(dims=(128, 64))
    assert "mask" in reason(key_range="bool b")
    assert "block_size" in reason(block_size=8)
    assert "fp16 and bf16" in reason(dtype=torch.float32)
    assert "plain caches" in reason(storage="int8")
    with pytest.raises(ValueError, match="backend='gluon_gqa' cannot serve this call: its kernels need a Hopper GPU"):
        grouped([70]).run("gluon_gqa")


NO_HOPPER = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9
LONG = [([9000, 3000, 4095, 17], {"tokens": 8}), ([9000, 3000], {})]


@pytest.mark.cuda
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("case", "dtype"),
    else_sweep(  # fp16 has the same kernels with other products: for one and two halves of rows, and the other head_dim
        product([*CASES, *LONG], [torch.float16, torch.bfloat16]),
        lambda case, dtype: dtype == torch.bfloat16 or case in LONG or "dims" in case[1],
    ),
)
def test_on_hopper(case, dtype):
    positions, how = case
    problem = grouped(positions, **how, dtype=dtype, device="cuda")
    assert_decode_close(problem.run("gluon_gqa"), problem)


@pytest.mark.cuda
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_huge_scores_on_hopper(dtype, tokens):
    """Exponents share a kernel, which takes seconds to compile."""
    for exponent in [exponent for each, exponent in HUGE if each == dtype]:
        problem = with_huge_scores(grouped([3000, 90, 700], dtype=dtype, tokens=tokens, device="cuda"), exponent)
        assert_huge_scores_are_right(problem.run("gluon_gqa"), problem)


def launch(group: int, tokens: int, dtype: str, head_dim: int, block_size: int, how: dict) -> None:
    """A case, in the process that compiles."""
    shape = {"group": group, "tokens": tokens, "dims": (head_dim, head_dim), "block_size": block_size}
    call = grouped([200, 70], **shape, dtype=getattr(torch, dtype), **how).call()
    gluon_grouped.launch(call, call.empty_state(), 0)


COMPILED = [
    (16, 1, "bfloat16", 128, 64, {}),
    (16, 8, "bfloat16", 128, 16, {"window": 100, "sinks": True}),
    (32, 1, "float16", 64, 256, {"key_range": "intervals", "split_size": 100}),
]


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_compiles_for_hopper():
    kernels = compiled_for_hopper(__file__, COMPILED)
    assert_fit(kernels)
    for kernel in kernels:
        if kernel["kernel"] == "_attend_kernel":
            _, _, _, head_dim, block_size, _ = kernel["case"]
            assert count(kernel, "HGMMA") == 2 * (head_dim // 16 + 4)
            assert count(kernel, "WARPGROUP.DEPBAR") == 4  # it never waits for each
            assert count(kernel, "UTMALDG") == 2 * head_dim // 64 * max(1, 64 // block_size)
