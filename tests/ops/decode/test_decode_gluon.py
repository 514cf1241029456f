"""The MLA decode kernels for Hopper against float64: emulated, on a Hopper GPU, and compiled."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from attnmesh.core.state import State
from attnmesh.decode import check_decode_errors
from attnmesh.ops.decode import gluon, gluon_common, gluon_fp8, gluon_latent, gluon_narrow, reference
from attnmesh.ops.decode.api import choose
from attnmesh.ops.decode.call import DecodeCall
from attnmesh.ops.launch import GPU
from attnmesh.testing.decode import DecodeProblem, random_decode
from helpers.cases import else_sweep, first
from helpers.decode import assert_decode_close, assert_huge_scores_are_right, with_huge_scores
from helpers.gluon import emulated
from helpers.triton_compile import assert_fit, compiled_for_hopper, count


def latent(positions: list[int], **how: object) -> DecodeProblem:
    """A call over a latent cache; everything that may not be read is NaN."""
    how = {"group": 16, "kv_heads": 1, "block_size": 64, "dtype": torch.float16, "at": "int32"} | how
    return random_decode(positions, dims=(576, 512), v_in_k=True, **how)


def run(kernel: ModuleType, problem: DecodeProblem) -> State:
    call = problem.call()
    assert gluon_common.why_not(call) is None
    state = State(*(x.fill_(torch.nan) for x in call.empty_state()))
    kernel.launch(call, state, 0)
    return state


def assert_right(kernel: ModuleType, problem: DecodeProblem) -> State:
    state = run(kernel, problem)
    assert_decode_close(state, problem)
    return state


CASES = [
    ([130, 0, 63, 64, 200], {}),
    ([130, -1, 64], {"group": 128}),
    ([70, 300], {"group": 40, "tokens": 3}),
    ([5, 190], {"group": 16, "tokens": 8, "sinks": True}),
    ([200, 150], {"window": 70, "tokens": 2}),
    ([200, 3, 129], {"window": 7, "sinks": True}),
    ([250, 90, 170], {"key_range": "intervals", "tokens": 4}),
    ([300, 70], {"split_size": 128}),
    ([300, 70], {"split_size": 100, "window": 150, "sinks": True}),
    ([500], {"max_splits": 3}),
    ([500, 20], {"max_splits": 1}),
    ([150, 90], {"block_size": 16}),
    ([150, 300], {"block_size": 32, "tokens": 2}),
    ([150, 300], {"block_size": 128}),
    ([150, 300], {"block_size": 256, "share": "blocks"}),
    ([100, 70], {"kv_heads": 2}),
    ([100, 70], {"kv_heads": 2, "memory": "layer inside", "out_dtype": torch.float32}),
    ([100, 70], {"scale": -0.05}),
    ([-1, -1], {"sinks": True}),
]


NARROW_CASES = [
    ([130, 0, 63, 64, 200], {}),
    ([5, 190], {"group": 5, "tokens": 3, "sinks": True}),
    ([200, 3, 129], {"window": 7, "sinks": True}),
    ([250, 90, 170], {"key_range": "intervals", "group": 8, "tokens": 2}),
    ([300, 70], {"split_size": 100, "window": 150}),
    ([500, 20], {"max_splits": 3, "block_size": 16}),
    ([100, 70], {"kv_heads": 2, "memory": "layer inside", "out_dtype": torch.float32, "scale": -0.05}),
    ([-1, 150], {"scale": 0.0, "block_size": 256}),
]


FP8 = {"storage": "fp8_ds_mla", "dtype": torch.bfloat16}
FP8_CASES = [
    ([130, 0, 63, 64, 200], FP8),
    ([330, 150], {"group": 64, "tokens": 2, "block_size": 16, **FP8}),
    ([200, 150], {"window": 70, "tokens": 2, "sinks": True, **FP8}),
    ([250, 90, 170], {"key_range": "intervals", "tokens": 4, "block_size": 128, **FP8}),
    ([300, 70], {"split_size": 128, "kv_heads": 2, **FP8}),
    ([500], {"max_splits": 3, "memory": "layer inside", "scale": -0.05, **FP8}),
    ([-1, 150], {"group": 5, "out_dtype": torch.float32, "block_size": 256, **FP8}),
]
WIDENED_CASES = [
    ([130, 0, 63, 64, 200], {"group": 40, **FP8}),
    ([330, 150], {"group": 64, "tokens": 2, "block_size": 16, "sinks": True, **FP8}),
    ([200, 150], {"group": 48, "window": 70, "block_size": 32, "out_dtype": torch.float32, **FP8}),
    ([250, 90, 170], {"group": 40, "key_range": "intervals", "tokens": 2, "block_size": 128, **FP8}),
    ([300, 70], {"group": 40, "split_size": 128, "kv_heads": 2, "scale": -0.05, **FP8}),
    ([500, -1, 20], {"group": 128, "max_splits": 3, "memory": "layer inside", "block_size": 256, **FP8}),
]


@pytest.mark.parametrize(("positions", "how"), first(1, CASES))
def test_against_float64(positions, how):
    assert_right(emulated(gluon_latent), latent(positions, **how))


@pytest.mark.parametrize(("positions", "how"), first(1, NARROW_CASES))
def test_few_rows_against_float64(positions, how):
    assert_right(emulated(gluon_narrow), latent(positions, **how))


@pytest.mark.parametrize(("positions", "how"), first(1, FP8_CASES))
def test_fp8_against_float64(positions, how):
    assert_right(emulated(gluon_fp8, seed=8), latent(positions, **how))


@pytest.mark.parametrize(("positions", "how"), first(1, WIDENED_CASES))
def test_widened_fp8_against_float64(positions, how):
    assert_right(emulated(gluon_latent, seed=8), latent(positions, **how))


HUGE = [
    (kernel, *huge) for kernel in (gluon_latent, gluon_narrow)
    for huge in ((torch.bfloat16, 20), (torch.bfloat16, 32), (torch.bfloat16, 120), (torch.float16, 28))
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "dtype", "exponent"), first(1, HUGE))
def test_huge_scores(kernel, dtype, exponent):
    problem = with_huge_scores(latent([130], dtype=dtype, max_splits=1), exponent)
    assert_huge_scores_are_right(run(emulated(kernel), problem), problem)


def with_extreme_queries(problem: DecodeProblem) -> DecodeProblem:
    """Rows of 0, of subnormal numbers, of numbers near the largest ones, of few large ones, of 0 but in the tail."""
    exponents = torch.tensor([-160, -133, -128, -120, -90, -40, -14, 0, 4, 13, 17, 40, 90, 120, 0, 0])
    q = torch.ldexp(problem.q.double(), exponents[:, None, None].to(problem.q.device))
    q[:, 14, :, 5:] *= 2.0**-30
    q[:, 15, :, :512] = 0
    return replace(problem, q=q.to(problem.q.dtype))


def assert_right_for_extreme_queries(state: State, problem: DecodeProblem) -> None:
    exact = problem.exact()
    torch.testing.assert_close(state.out.double(), exact.out, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(state.lse.double(), exact.lse, rtol=2e-6, atol=2e-6)


def with_nan(problem: DecodeProblem) -> DecodeProblem:
    """NaN and infinity in what is read of every sequence but the first."""
    problem = replace(problem, q=problem.q.clone())
    block = problem.table[:, 0].tolist()
    problem.k.values.view(torch.uint8)[block[1], 3, 0, 300] = 0x7F
    problem.k.values.view(torch.uint8)[block[2], 60, 0, 1] = 0xFF
    for sequence, value in ((3, torch.nan), (4, torch.inf), (5, -torch.inf)):
        for quarter in range(4):
            problem.k.scales[block[sequence], 10 + quarter, 0, quarter] = value
    for sequence, column, value in ((6, 5, torch.nan), (7, 520, torch.nan), (8, 200, torch.inf), (9, 575, -torch.inf)):
        problem.q[sequence, sequence, 0, column] = value
    problem.k.scales[block[8], 7] = 0.0  # times infinity
    problem.k.rope[block[9], 8] = 0.0
    return problem


def assert_nan_as_in_the_reference(state: State, problem: DecodeProblem) -> None:
    plain = reference.run(problem.call())
    wrong = plain.out.isnan().all(-1)
    assert wrong.flatten(1).sum(1).tolist() == [0, 16, 16, 16, 16, 16, 1, 1, 1, 1]
    assert torch.equal(state.lse.isnan(), wrong)
    assert torch.equal(state.out.isnan(), wrong[..., None].expand_as(state.out))
    torch.testing.assert_close(state.out[~wrong].float(), plain.out[~wrong].float(), rtol=2e-2, atol=2e-2)


@pytest.mark.sweep
@pytest.mark.parametrize("kernel", [gluon_fp8, gluon_latent])
def test_fp8_queries_of_any_size(kernel):
    problem = with_extreme_queries(latent([40], **FP8))
    assert_right_for_extreme_queries(run(emulated(kernel), problem), problem)


@pytest.mark.sweep
@pytest.mark.parametrize("kernel", [gluon_fp8, gluon_latent])
def test_fp8_nan(kernel):
    problem = with_nan(latent([70, 63, 64, 65, 70, 100, 63, 63, 63, 63], **FP8))
    assert_nan_as_in_the_reference(run(emulated(kernel), problem), problem)


def with_scales(problem: DecodeProblem, exponents: torch.Tensor) -> DecodeProblem:
    """Scales times 2 to the power of exponents [keys, 4], in every sequence."""
    factors = torch.exp2(exponents).to(problem.q.device)
    valid = problem.valid[0].clone()
    valid[..., :512] *= factors[: valid.shape[2]].double().repeat_interleave(128, 1)
    scales = problem.k.scales
    for blocks in problem.table:
        for i, block in enumerate(blocks[: valid.shape[2] // scales.shape[1]].tolist()):
            if 0 <= block < len(scales):
                scales[block, :, 0] *= factors[i * scales.shape[1] :][: scales.shape[1]]
    return replace(problem, valid=(valid, valid[..., :512]))


def unequal_scales(keys: int) -> dict[str, torch.Tensor]:
    """Exponents of scales, which are no powers of two."""
    key, generator = torch.arange(keys)[:, None], torch.Generator().manual_seed(0)
    return {
        "between powers of two": torch.rand(keys, 4, generator=generator),
        "growing": (key - keys) / keys * 30 + torch.zeros(4),
        "falling": key / keys * -30 + torch.zeros(4),
        "of quarters": torch.tensor([0.3, -9.2, 3.6, -5.5]).expand(keys, 4),
        "random": 18 * torch.rand(keys, 4, generator=generator) - 15,
        "tiny": torch.full((keys, 4), -30.3),
        "large": torch.full((keys, 4), 40.3),
    }


def at_scales(kernel: ModuleType, name: str, keys: int, **how: object) -> None:
    problem = with_scales(latent([keys - 1, keys // 3], **FP8, **how), unequal_scales(-(-keys // 64) * 64)[name])
    if name == "large":
        problem.q.mul_(2.0**-40)
    state, exact = run(kernel, problem), problem.exact()
    # Products of values and scales are rounded to 11 bits; columns of small values are as right as others.
    error, size = (x.double().unflatten(-1, (4, 128)).norm(dim=-1) for x in (state.out - exact.out, exact.out))
    assert (error <= 1e-2 * size).all()
    torch.testing.assert_close(state.lse.double(), exact.lse, rtol=1e-3, atol=5e-3)


@pytest.mark.sweep
@pytest.mark.parametrize("name", unequal_scales(64))
def test_unequal_scales(name):
    at_scales(emulated(gluon_latent), name, 300, group=40)


@pytest.mark.sweep
def test_under_hostile_schedules():
    problem = latent([330, 100], tokens=2)
    for seed in range(5):
        assert_right(emulated(gluon_latent, seed), problem)
        assert_right(emulated(gluon_narrow, seed), latent([330, 100]))
        assert_right(emulated(gluon_fp8, seed), latent([330, 100], **FP8))
        assert_right(emulated(gluon_latent, seed), latent([330, 100, 70], tokens=3, **FP8))


@pytest.mark.sweep
def test_bits_of_a_sequence_depend_on_that_sequence_only():
    for kernel, how in ((gluon_latent, {}), (gluon_latent, FP8), (gluon_fp8, FP8)):
        problem = latent([300, 70, 129], split_size=64, sinks=True, **how)
        together = run(emulated(kernel), problem)
        for i in (0, 2):
            alone = run(emulated(kernel, seed=i), problem.sequence(i))
            assert torch.equal(alone.out, together.out[i : i + 1])
            assert torch.equal(alone.lse, together.lse[i : i + 1])


@pytest.mark.sweep
@pytest.mark.parametrize(("value", "how"), [(10_000, {"split_size": 64}), (-1, {}), (-(2**31), {"max_splits": 1})])
def test_an_entry_outside_the_pool(value, how):
    problem = latent([100, 200], **how)
    table = problem.table.clone()
    table[1, 2] = value
    found = run(emulated(gluon_latent), replace(problem, table=table))
    with pytest.raises(ValueError, match=rf"block_table\[1, 2\] is {value}, outside the pool"):
        check_decode_errors()
    assert found.out[1].isnan().all()
    assert found.lse[1].isnan().all()
    exact = problem.exact()
    torch.testing.assert_close(found.out[0].double(), exact.out[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found.lse[0].double(), exact.lse[0], rtol=1e-4, atol=1e-4)


@pytest.mark.sweep
def test_a_position_past_the_table():
    problem = latent([100, 200])
    call = replace(problem.call(), cur_pos=torch.tensor([10**6, 200], dtype=torch.int32))
    state = call.empty_state()
    emulated(gluon_latent).launch(call, state, 0)
    with pytest.raises(ValueError, match=r"cur_pos\[0\] is 1000000, beyond the cache"):
        check_decode_errors()
    assert state.out[0].isnan().all()
    assert state.out[1].isfinite().all()


PLANTED = {
    "keys are read before they arrive": ("mbarrier.wait(barriers.k_ready.index(at % RING), at // RING & 1)", "pass"),
    "no fence shows the weights": (
        "common.fence_and_arrive(barriers.weights_ready, slot)", "mbarrier.arrive(barriers.weights_ready.index(slot))",
    ),
    "sums are not rescaled": ("left = left * acc_scale[:, None]", "pass"),
    "keys past the end are not cleared": ("common.clear_outside(memory.k, step, key, item, SHAPE)", "pass"),
    "a split is written elsewhere": ("gl.where(item.starts, 1, 0)", "gl.where(item.starts, 0, 1)"),
}  # fmt: skip


PLANTED_WIDENED = {
    "codes are read before they arrive": ("mbarrier.wait(codes.ready.index(quarter % 2), quarter // 2)", "pass"),
    "keys are overwritten while they are read": (
        "mbarrier.wait(barriers.k_free.index(at % RING), (at // RING & 1) ^ 1)\n                widen",
        "pass\n                widen",
    ),
    "the scales of another tile": ("mbarrier.wait(codes.scales_ready.index(0), step & 1)", "pass"),
    "no fence shows the keys": (
        "common.fence_and_arrive(barriers.k_ready, at % RING)", "mbarrier.arrive(barriers.k_ready.index(at % RING))",
    ),
}  # fmt: skip


PLANTED_SCALES = {
    "sums keep their unit": ("store(acc_scale * ratio)", "store(acc_scale)"),
    "the tail of queries keeps its unit": ("scale_tail(memory.q_tail, ratio)", "pass"),
    "the largest scores keep their unit": ("raw_max *= ratio", "pass"),
    "results keep their unit": ("memory.weight.store(weight * unit)", "memory.weight.store(weight)"),
}


@pytest.mark.sweep
@pytest.mark.parametrize("fault", PLANTED_SCALES)
def test_the_emulation_finds_forgotten_units(fault):
    with pytest.raises(AssertionError):
        at_scales(emulated(gluon_latent, planted=PLANTED_SCALES[fault]), "growing", 300, group=40)


PLANTED_NARROW = {
    "keys are overwritten while they are read": (
        "mbarrier.wait(barriers.k_free.index(at % RING), (at // RING & 1) ^ 1)", "pass",
    ),
    "keys are read before they arrive": ("mbarrier.wait(barriers.k_ready.index(at % RING), at // RING & 1)", "pass"),
    "results are overwritten": ("mbarrier.wait(barriers.result_free.index(0), (done & 1) ^ 1)", "pass"),
    "keys past the end are not cleared": ("common.clear_outside(memory.k, step, key, item, SHAPE)", "pass"),
}  # fmt: skip


PLANTED_FP8 = {
    "keys are overwritten while they are read": (
        "mbarrier.wait(barriers.k_free.index(slot), (step // RING & 1) ^ 1)", "pass",
    ),
    "value consumers do not wait for weights": (
        "mbarrier.wait(barriers.weights_ready.index(slot), step // RING & 1)", "pass",
    ),
    "the scales of another quarter": ("slice(quarter, 1, dim", "slice(quarter // 2, 1, dim"),
    "a byte without its sign": ("0xB391", "0x0301"),
    "no fence shows the queries": ("common.fence_warps()", "common.group_barrier()"),
}  # fmt: skip
ALL_PLANTED = (
    (gluon_latent, {}, PLANTED), (gluon_latent, FP8, PLANTED_WIDENED), (gluon_narrow, {}, PLANTED_NARROW),
    (gluon_fp8, FP8, PLANTED_FP8),
)  # fmt: skip
FAULTS = [
    pytest.param(kernel, how, planted[fault], id=fault) for kernel, how, planted in ALL_PLANTED for fault in planted
]


@pytest.mark.parametrize(("kernel", "how", "fault"), first(1, FAULTS))
def test_the_emulation_finds_planted_faults(kernel, how, fault):
    problem = latent([330, 130, 7, 5], scale=0.3, **how)

    def many_times():  # a race is lost sooner or later
        for seed in range(12):
            assert_right(emulated(kernel, seed, fault), problem)

    with pytest.raises(AssertionError):
        many_times()


def test_what_it_refuses():
    def reason(**how: object) -> str | None:
        return gluon_common.why_not(latent([70, 40], **how).call())

    assert reason() is None
    assert "mask" in reason(key_range="bool b")
    assert "mask" in reason(key_range="tree", tokens=2)
    assert "share_cache" in reason(share="cache")
    assert "block_size" in reason(block_size=8)
    assert "fp16 and bf16" in reason(dtype=torch.float32)
    problem = latent([70, 40])
    assert "v_pool as k_pool" in gluon_common.why_not(replace(problem, v=problem.v.clone()).call())
    assert "v_pool as k_pool" in gluon_common.why_not(replace(problem, v=problem.v[..., :256]).call())
    quantized = random_decode([70], dims=(576, 512), storage="fp8", block_size=64, dtype=torch.float16)
    assert "v_pool as k_pool" in gluon_common.why_not(quantized.call())


def test_no_other_gpu_serves_it(monkeypatch):
    with pytest.raises(ValueError, match="backend='gluon' cannot serve this call: its kernels need a Hopper GPU"):
        latent([70], device="cpu").run("gluon")
    call = on_a_gpu(latent([70]), monkeypatch, capability=80)
    assert choose(call, "auto").name == "triton"
    with pytest.raises(ValueError, match="need a Hopper GPU"):
        choose(call, "gluon")


def test_auto_takes_it_for_the_calls_that_it_serves(monkeypatch):
    assert choose(on_a_gpu(latent([70]), monkeypatch), "auto").name == "gluon"
    assert choose(on_a_gpu(latent([70]), monkeypatch), "triton").name == "triton"
    assert choose(on_a_gpu(latent([70], key_range="tree", tokens=2), monkeypatch), "auto").name == "triton"
    narrow = random_decode([70], dims=(128, 128), block_size=64, dtype=torch.float16)
    assert choose(on_a_gpu(narrow, monkeypatch), "auto").name == "triton"


@pytest.mark.parametrize(
    ("group", "tokens", "head_dim", "name"),
    [(16, 4, 128, "gluon_gqa"), (32, 4, 128, "gluon_gqa"), (16, 2, 128, "triton"), (16, 4, 64, "triton")],
)
def test_auto_takes_large_groups_to_the_kernel_that_reads_keys_once(group, tokens, head_dim, name, monkeypatch):
    dims = head_dim, head_dim
    problem = random_decode([70], dims=dims, group=group, tokens=tokens, block_size=64, dtype=torch.float16)
    assert choose(on_a_gpu(problem, monkeypatch), "auto").name == name
    assert choose(on_a_gpu(problem, monkeypatch), "gluon_gqa").name == "gluon_gqa"


def on_a_gpu(problem: DecodeProblem, monkeypatch, capability: int = 90) -> DecodeCall:
    """The call as if its tensors were on a GPU."""
    monkeypatch.setattr(gluon, "gpu_of", lambda device: GPU(capability, 227 * 1024))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(capability, 10))
    call = problem.call()
    return replace(call, q=call.q.as_subclass(OnGPU))


class OnGPU(torch.Tensor):
    """A tensor that reports a GPU."""

    is_cuda = True
    device = torch.device("cuda", 0)


NO_HOPPER = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9
LONG = [9000, 3000, 4095, 17]
PLAIN = [*CASES, *(case for case in NARROW_CASES if case not in CASES), (LONG, {"group": 128}), (LONG, {})]


@pytest.mark.cuda
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("positions", "how"),
    else_sweep(  # fp16 has the same kernels with other products: once for each of them
        [
            *((at, {"dtype": dtype, **how}) for dtype in (torch.float16, torch.bfloat16) for at, how in PLAIN),
            *FP8_CASES,
            *WIDENED_CASES,
            *((LONG, how) for how in (FP8, FP8 | {"group": 128})),
        ],
        lambda positions, how: how["dtype"] == torch.bfloat16 or positions is LONG,
    ),
)
def test_on_hopper(positions, how):
    problem = latent(positions, **how, device="cuda")
    assert_decode_close(problem.run("gluon"), problem)


@pytest.mark.cuda
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("kernel", [gluon_latent, gluon_narrow])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_huge_scores_on_hopper(kernel, dtype):
    """Exponents share a kernel, which takes seconds to compile."""
    problem = latent([3000, 90, 700], dtype=dtype, group=128 if kernel is gluon_latent else 16, device="cuda")
    for exponent in [exponent for *which, exponent in HUGE if which == [kernel, dtype]]:
        huge = with_huge_scores(problem, exponent)
        assert_huge_scores_are_right(huge.run("gluon"), huge)


@pytest.mark.cuda
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("kernel", [gluon_fp8, gluon_latent])
@pytest.mark.parametrize("how", [{}, {"split_size": 64}, {"scale": -0.05}], ids=str)
def test_fp8_queries_of_any_size_and_nan_on_hopper(kernel, how):
    problem = with_extreme_queries(latent([300, 100], **FP8, **how, device="cuda"))
    assert_right_for_extreme_queries(run(kernel, problem), problem)
    problem = with_nan(latent([70, 63, 640, 65, 700, 100, 63, 630, 63, 63], **FP8, **how, device="cuda"))
    assert_nan_as_in_the_reference(run(kernel, problem), problem)


@pytest.mark.cuda
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("name", unequal_scales(64))
def test_unequal_scales_on_hopper(name):
    at_scales(gluon_latent, name, 1000, group=128, device="cuda")


@pytest.mark.cuda
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("value", [10_000, -1, -(2**31)])
@pytest.mark.parametrize(
    "how",
    [
        {"group": 128}, {"split_size": 64}, {"max_splits": 1, "group": 64}, FP8, FP8 | {"split_size": 64},
        FP8 | {"group": 128},
    ],
    ids=str,
)  # fmt: skip
def test_an_entry_outside_the_pool_on_hopper(how, value):
    problem = latent([100, 500, 200], **{"dtype": torch.bfloat16, "device": "cuda", "sinks": True} | how)
    table = problem.table.clone()
    table[1, 2] = value
    right = problem.run("gluon")  # first: a call raises what an earlier one has found
    found = replace(problem, table=table).run("gluon")
    with pytest.raises(ValueError, match=rf"block_table\[1, 2\] is {value}, outside the pool"):
        check_decode_errors()
    assert found.out[1].isnan().all()
    assert found.lse[1].isnan().all()
    assert torch.equal(found.out[[0, 2]], right.out[[0, 2]])
    assert torch.equal(found.lse[[0, 2]], right.lse[[0, 2]])


@pytest.mark.cuda
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("how", [{}, {"split_size": 128}, {"window": 100, "tokens": 2}], ids=str)
def test_a_captured_step_replays_with_new_positions_and_tables_on_hopper(how):
    steps = [[3, 17, 40], [310, 0, 5], [-1, 100, 250], [319, 319, 319]]
    shape = {"group": 64, "dtype": torch.bfloat16, "device": "cuda", "capacity": 320, "sinks": True, **how}
    *drawn, held = (latent(step, seed=2 * i, **shape) for i, step in enumerate(steps))
    held.run("gluon")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = held.run("gluon")
    for problem in drawn:
        held.q.copy_(problem.q)
        held.table.copy_(problem.table)
        held.k[: len(problem.k)].copy_(problem.k)
        for name in ("cur_pos", "sinks"):
            held.options[name].copy_(problem.options[name])
        graph.replay()
        torch.cuda.synchronize()
        assert_decode_close(State(out, lse), problem)


@pytest.mark.cuda
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("how", [{"group": 128}, {"group": 16}, FP8, FP8 | {"group": 128}], ids=str)
def test_the_same_bits_again_and_again_on_hopper(how):
    """A result that moves is a race."""
    problem = latent([5000 + 7 * i for i in range(40)], **{"dtype": torch.bfloat16} | how, device="cuda")
    first = problem.run("gluon")
    for _ in range(20):
        again = problem.run("gluon")
        assert torch.equal(again.out, first.out)
        assert torch.equal(again.lse, first.lse)


def launch(group: int, tokens: int, dtype: str, block_size: int, how: dict) -> None:
    """A case, in the process that compiles."""
    problem = latent([200, 70], group=group, tokens=tokens, dtype=getattr(torch, dtype), block_size=block_size, **how)
    call = problem.call()
    gluon.Gluon().launch(call, call.empty_state(), None, 0)


COMPILED = [
    (128, 1, "bfloat16", 64, {}),
    (16, 1, "float16", 64, {"sinks": True, "max_splits": 4}),
    (16, 8, "bfloat16", 16, {"window": 100, "sinks": True}),
    (64, 3, "bfloat16", 256, {"key_range": "intervals", "split_size": 100}),
    (128, 2, "float16", 128, {"split_size": 64, "out_dtype": None}),
    (16, 2, "bfloat16", 64, {"window": 100}),
    (16, 1, "bfloat16", 64, {"storage": "fp8_ds_mla"}),
    (128, 1, "bfloat16", 32, {"storage": "fp8_ds_mla", "sinks": True, "split_size": 64}),
    (16, 8, "bfloat16", 16, {"storage": "fp8_ds_mla", "key_range": "intervals", "max_splits": 4}),
    (8, 2, "bfloat16", 128, {"storage": "fp8_ds_mla", "window": 100, "scale": -0.05}),
]


def widens(kernel: dict) -> bool:
    group, tokens, _, _, how = kernel["case"]
    return group * tokens > 32 and "storage" in how


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_compiles_for_hopper():
    kernels = compiled_for_hopper(__file__, COMPILED)
    # What the score consumer and the value consumer push out are addresses; Triton 3.7 pushes out a few more.
    # Where keys are widened, the score consumer has 136 registers instead of 168.
    assert_fit(kernels, lambda kernel: (1000 if widens(kernel) else 420) if kernel["kernel"] == "_attend_kernel" else 8)
    for kernel in kernels:
        if kernel["kernel"] == "_attend_kernel":
            # All products of a tile are under way at once. Where the compiler cannot allow that, it waits for each.
            group, tokens, _, block_size, how = kernel["case"]
            narrow = group * tokens <= (32 if "storage" in how else 16)
            assert count(kernel, "HGMMA") == (36 + 32 if narrow else 36 + 2 * 8)
            assert count(kernel, "WARPGROUP.DEPBAR") <= 11
            if not narrow:  # results of 16 bits are stored 16 bytes at a time
                assert count(kernel, "STG.E.128") == 32
            copies = 6 if "storage" in how else 9  # with those of the scales
            if widens(kernel):
                copies = 10  # the first ones of an item are apart
            assert not kernel["overwritten"]
            assert count(kernel, "UTMALDG") == copies * max(1, 64 // block_size)
