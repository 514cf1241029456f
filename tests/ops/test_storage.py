"""How keys and values are stored: what comes back, how far off it may be, what it weighs, what is refused."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnmesh.ops.storage import (
    PLAIN,
    STORAGES,
    Quantized,
    bytes_per_token,
    dequantize,
    quantize,
    storage_of,
    values_of,
)

QUANTIZED = ("fp8", "int8", "bfp8")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bound(x: Tensor, storage: str) -> Tensor:
    """How far off each number may come back, from the definition of a storage."""
    x = x.double().abs()
    if storage in PLAIN:
        return x * torch.finfo(PLAIN[storage]).eps / 2 + torch.finfo(PLAIN[storage]).smallest_normal
    if storage == "fp8":  # three bits after the leading one, and steps of 2**-9 below 2**-6, of what 448 stands for
        scale = x.max() / 448
        return torch.maximum(x * 2**-4, scale * 2**-10) * (1 + 1e-5)
    if storage == "int8":  # half a step of 127 to a token's largest
        return (x.amax(-1, keepdim=True) / 127 / 2).expand_as(x) * (1 + 1e-5)
    # bfp8: 64 to 127 steps to the largest of 16; half a step, or the last half of one at 127.
    top = 2.0 ** torch.floor(torch.log2(x.unflatten(-1, (-1, 16)).amax(-1, keepdim=True).clamp(min=1e-300)))
    step = (top / 64).expand(*x.shape[:-1], x.shape[-1] // 16, 16).flatten(-2)
    return torch.where(x > 127.5 * step, step, step / 2)


@pytest.mark.parametrize(
    ("size", "shape", "storage"),
    [
        (1.0, (2, 3, 5, 32), "bf16"),
        (1.0, (7, 48), "fp32"),
        (1e-4, (2, 3, 5, 32), "int8"),
        (1e-4, (4, 16, 2, 128), "fp8"),
        (300.0, (4, 16, 2, 128), "bfp8"),
        (300.0, (1, 1, 1, 16), "fp16"),
    ],
)
def test_what_comes_back_is_as_near_as_the_storage_allows(size, shape, storage):
    for seed in range(5):
        x = size * drawn(*shape, seed=seed)
        stored = quantize(x, storage)
        back = dequantize(stored, torch.float64)
        assert back.dtype == torch.float64
        assert back.shape == x.shape
        assert values_of(stored).shape == x.shape
        assert storage_of(stored) == storage
        assert ((back - x.double()).abs() <= bound(x, storage)).all()


@pytest.mark.parametrize("storage", QUANTIZED)
def test_the_numbers_are_by_definition(storage):
    """values and scales, one by one, as the storages are described."""
    stored = quantize(drawn(2, 3, 4, 32), storage)
    back = dequantize(stored, torch.float64)
    for index in [(0, 0, 0, 0), (1, 2, 3, 31), (0, 1, 2, 16), (1, 0, 3, 15)]:
        value = float(stored.values[index].float())
        if storage == "fp8":
            scale = float(stored.scales)
        elif storage == "int8":
            scale = float(stored.scales[index[:3]])
        else:
            scale = 2.0 ** int(stored.scales[(*index[:3], index[3] // 16)])
        assert float(back[index]) == value * scale


@pytest.mark.parametrize("storage", STORAGES)
def test_what_came_back_stays(storage):
    """Storing again what came back changes nothing more: bfp8 and plain exactly, the others to a rounding of scales."""
    once = dequantize(quantize(drawn(3, 2, 4, 32), storage), torch.float32)
    twice = dequantize(quantize(once, storage), torch.float32)
    if storage in ("fp8", "int8"):
        torch.testing.assert_close(twice, once, rtol=1e-6, atol=0)
    else:
        assert torch.equal(twice, once)


@pytest.mark.parametrize(
    ("dtype", "storage"),
    [
        (torch.float16, "bf16"),
        (torch.float16, "int8"),
        (torch.bfloat16, "fp8"),
        (torch.bfloat16, "bfp8"),
        (torch.float32, "fp16"),
        (torch.float64, "fp32"),
    ],
)
def test_any_dtype_in_and_out(dtype, storage):
    x = drawn(2, 2, 3, 32).to(dtype)
    stored = quantize(x, storage)
    same = quantize(x.float(), storage)
    assert torch.equal(dequantize(stored, torch.float32), dequantize(same, torch.float32))
    back = dequantize(stored, dtype)
    assert back.dtype == dtype
    # Computed in float32 at least, and rounded once.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(back, dequantize(stored, wide).to(dtype))


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_of_zeros_come_back_as_zeros(storage):
    x = drawn(2, 2, 3, 32)
    x[0, 0, 1], x[1] = 0.0, 0.0
    back = dequantize(quantize(x, storage), torch.float32)
    assert torch.equal(back == 0, back.abs() == 0)
    assert not back[0, 0, 1].any()
    assert not back[1].any()
    assert back.isfinite().all()
    assert not dequantize(quantize(torch.zeros(1, 1, 1, 16), storage), torch.float32).any()


@pytest.mark.parametrize(
    ("shape", "storage"),
    [
        ((0, 2, 3, 16), "bf16"),
        ((0, 2, 3, 16), "fp16"),
        ((0, 2, 3, 16), "int8"),
        ((2, 2, 0, 16), "fp32"),
        ((2, 2, 0, 16), "fp8"),
        ((2, 2, 0, 16), "bfp8"),
    ],
)
def test_nothing_is_stored_as_nothing(shape, storage):
    stored = quantize(torch.empty(shape), storage)
    assert dequantize(stored, torch.float32).shape == shape


@pytest.mark.parametrize(
    ("power", "storage"), [(-149, "fp32"), (-145, "fp8"), (-127, "fp8"), (-120, "int8"), (120, "int8"), (127, "bfp8")]
)
def test_huge_and_tiny_numbers(power, storage):
    """Down to the smallest number there is and up to the largest: finite, of the right sign, no further off than usual
    but for steps that float32 cannot say."""
    x = drawn(4, 2, 8, 32).clamp(-1.99, 1.99).double()
    x[0, 0, 0, :3] = torch.tensor([1.99, -1.99, 1.0])
    x = (x * 2.0**power).float()
    back = dequantize(quantize(x, storage), torch.float64)
    assert back.isfinite().all()
    assert ((back == 0) | (back.sign() == x.sign())).all()
    smallest = {"fp32": 0.0, "fp8": 448 * 2.0**-149, "int8": 127 * 2.0**-149, "bfp8": 2.0**-126}[storage]
    assert ((back - x.double()).abs() <= bound(x, storage) * (1 + 1e-5) + smallest).all()


def test_int8_of_numbers_so_small_that_their_scale_is_rounded():
    """The largest of a token by 127 is then so rounded that numbers could count more than 127 of it."""
    x = torch.tensor([[steps, -steps, steps // 2, 0] for steps in range(1, 1000)]).double() * 2.0**-149
    back = dequantize(quantize(x.float(), "int8"), torch.float64)
    assert ((back - x).abs() <= 127 * 2.0**-149).all()
    assert ((back == 0) | (back.sign() == x.sign())).all()


def test_bfp8_has_the_exponent_of_the_largest_of_sixteen():
    x = torch.zeros(1, 1, 1, 48)
    x[..., 0], x[..., 5] = 1.0, 0.49
    x[..., 16:32] = 1.999  # rounds up, beyond 127 steps: it saturates
    x[..., 40] = -96.0
    stored = quantize(x, "bfp8")
    assert stored.scales.flatten().tolist() == [-6, -6, 0]
    assert stored.values[..., :6].flatten().tolist() == [64, 0, 0, 0, 0, 31]
    assert stored.values[..., 16:32].flatten().tolist() == [127] * 16
    assert stored.values[..., 40].item() == -96


def test_int8_has_the_scale_of_its_token_and_head():
    x = drawn(2, 3, 4, 16)
    stored = quantize(x, "int8")
    assert stored.scales.shape == (2, 3, 4)
    torch.testing.assert_close(stored.scales, x.abs().amax(-1) / 127)
    assert (stored.values.abs().amax(-1) == 127).all()
    assert int(stored.values.min()) >= -127  # and never -128


def test_fp8_maps_its_largest_to_448():
    x = drawn(2, 3, 4, 16)
    stored = quantize(x, "fp8")
    assert stored.scales.shape == ()
    assert float(stored.values.float().abs().max()) == 448.0
    torch.testing.assert_close(stored.scales, x.abs().max() / 448)


@pytest.mark.parametrize("axis", [1, 2])
def test_fp8_scales_of_heads(axis):
    x = drawn(5, 3, 3, 16)
    scale = torch.tensor([0.01, 0.1, 1.0])
    stored = quantize(x, "fp8", scale=scale, head_axis=axis)
    back = dequantize(stored, torch.float32, head_axis=axis)
    for head in range(3):
        mine = x.select(axis, head)
        expected = (mine / scale[head]).to(torch.float8_e4m3fn).float() * scale[head]
        assert torch.equal(back.select(axis, head), expected)
    assert torch.equal(stored.scales, scale)


def test_fp8_saturates():
    x = torch.tensor([[449.0, -1e30, 500.0, 448.0, 3.0, torch.inf, -torch.inf, 0.0]])
    back = dequantize(quantize(x, "fp8", scale=torch.ones(())), torch.float32)
    assert back.tolist() == [[448.0, -448.0, 448.0, 448.0, 3.0, 448.0, -448.0, 0.0]]
    halved = dequantize(quantize(x, "fp8", scale=torch.tensor(0.5)), torch.float32)
    assert halved.tolist() == [[224.0, -224.0, 224.0, 224.0, 3.0, 224.0, -224.0, 0.0]]


@pytest.mark.parametrize(
    ("storage", "expected"),
    [("bf16", 256), ("fp16", 256), ("fp32", 512), ("fp8", 128), ("int8", 132), ("bfp8", 136)],
)
def test_bytes_per_token(storage, expected):
    assert bytes_per_token(storage, 128) == expected
    for head_dim in (16, 64, 576):
        stored = quantize(torch.zeros(1, 1, 1, head_dim), storage)
        parts = [stored] if isinstance(stored, Tensor) else [stored.values, stored.scales]
        if storage == "fp8":
            parts = parts[:1]  # one scale for all
        assert bytes_per_token(storage, head_dim) == sum(x.numel() * x.itemsize for x in parts)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=16, max_size=16),
    st.sampled_from(QUANTIZED),
)
def test_any_sixteen_numbers(numbers, storage):
    x = torch.tensor(numbers, dtype=torch.float32)[None]
    back = dequantize(quantize(x, storage), torch.float64)
    smallest = {"fp8": 448 * 2.0**-149, "int8": 127 * 2.0**-149, "bfp8": 2.0**-126}[storage]
    assert ((back - x.double()).abs() <= bound(x, storage) * (1 + 1e-5) + smallest).all()


def test_strides_are_free():
    """As a pool with a head's scales next to one another."""
    stored = quantize(drawn(4, 8, 2, 32), "int8")
    scales = stored.scales.transpose(1, 2).contiguous().transpose(1, 2)
    assert not scales.is_contiguous()
    values = stored.values.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(dequantize(Quantized(values, scales), torch.float32), dequantize(stored, torch.float32))


def test_float64_is_for_references():
    assert storage_of(torch.zeros(1, dtype=torch.float64)) == "fp64"
    assert "fp64" not in STORAGES


# What is refused.


F8, I8, F16, F32 = torch.float8_e4m3fn, torch.int8, torch.float16, torch.float32
KNOWN = "storage must be one of bf16, fp16, fp32, fp8, int8, bfp8, fp8_token, fp8_ds_mla, got"


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        (f"{KNOWN} 'int4'", lambda: quantize(drawn(1, 16), "int4")),
        (f"{KNOWN} 'fp64'", lambda: bytes_per_token("fp64", 64)),
        ("head_dim must be a multiple of 16 for bfp8, got 40", lambda: bytes_per_token("bfp8", 40)),
        ("a multiple of 16 for bfp8, got 24", lambda: quantize(drawn(2, 24), "bfp8")),
        ("got a tensor of torch.int8", lambda: storage_of(torch.zeros(1, dtype=I8))),
        ("values must be float8_e4m3fn or int8, got torch.float32", lambda: made(F32, [4, 16], [4])),
        ("values must be float8_e4m3fn or int8, got torch.float8_e5m2", lambda: made(torch.float8_e5m2, [4], [])),
        ("must be float32 [] or [kv heads] (fp8) or [2, 4] (fp8_token), got", lambda: made(F8, [2, 4, 16], [2, 3])),
        ("or [4] (fp8_token), got float16 tensor []", lambda: made(F8, [4, 16], [], F16)),
        ("float32 [2, 4] (int8) or int8 [2, 4, 1] (bfp8), got float32 tensor [2]", lambda: made(I8, [2, 4, 16], [2])),
        ("float32 [2, 4] (int8) or int8 [2, 4, 1] (bfp8), got float32 tensor []", lambda: made(I8, [2, 4, 16], [])),
        ("or int8 [2, 4, 2] (bfp8), got int8 tensor [2, 4, 3]", lambda: made(I8, [2, 4, 32], [2, 4, 3], I8)),
        ("(bfp8), got float16 tensor [2, 4]", lambda: made(I8, [2, 4, 32], [2, 4], F16)),
        ("a multiple of 16 for bfp8, got 40", lambda: made(I8, [2, 4, 40], [2, 4, 2], I8)),
        (
            "values and scales must be on the same device, got cpu and meta",
            lambda: Quantized(torch.zeros(2, 4, 16, dtype=I8), torch.zeros(2, 4, device="meta")),
        ),
    ],
)
def test_refused(said, wrong):
    with pytest.raises(ValueError, match=re.escape(said)):
        wrong()


def made(kind: torch.dtype, values: list[int], scales: list[int], dtype: torch.dtype = torch.float32) -> Quantized:
    return Quantized(torch.zeros(values).to(kind), torch.zeros(scales).to(dtype))


def test_an_error_of_storing_is_what_it_should_be_at_a_glance():
    """Relative errors of normal numbers at head_dim 128: an order of magnitude nobody should lose unnoticed."""
    x = drawn(4, 4, 64, 128)
    expected = {"fp32": 0, "fp16": 2e-4, "bf16": 1.7e-3, "int8": 6.5e-3, "bfp8": 5.5e-3, "fp8": 2.6e-2}
    for storage, off in expected.items():
        error = float((dequantize(quantize(x, storage), torch.float64) - x.double()).norm() / x.double().norm())
        assert error == 0 if off == 0 else math.isclose(error, off, rel_tol=0.3), (storage, error)
