"""The small stages of an attention block: RMSNorm, rotary embedding, and the heads they make, against float64."""

import dataclasses
import math

import pytest
import torch

from attnmesh.decode import AttentionConfig, AttentionWeights, Norm, Rope
from attnmesh.ops.block.config import keys_and_values, queries, split_and_rotate
from attnmesh.ops.block.norm_rope import LAYOUTS, rms_norm


def rounded_once(got, right):
    """Whether every number is off by at most half a step, and a few of float32's from before."""
    before = 16 * torch.finfo(torch.promote_types(got.dtype, torch.float32)).eps * right.abs().max()
    return bool(((got.double() - right).abs() <= torch.finfo(got.dtype).eps / 2 * right.abs() + before).all())


# RMSNorm.


@pytest.mark.parametrize(
    ("dtype", "weighed"),
    [
        (torch.float64, None),
        (torch.float32, "its own"),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float64),
    ],
)
def test_rms_norm_is_rounded_once(dtype, weighed, device):
    x = (torch.randn(5, 7, 48, dtype=torch.float64, device=device) * 3).to(dtype)
    kind = dtype if weighed == "its own" else weighed
    weight = None if kind is None else torch.randn(48, device=device).to(kind)
    wide = x.double()
    right = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (1.0 if weight is None else weight.double())
    got = rms_norm(x, weight, Norm(1e-3))
    assert got.dtype == dtype
    if dtype == torch.float32 and kind == torch.float64:
        right = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.float().double()
    assert rounded_once(got, right)


def test_a_row_of_zeros_stays_finite():
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), Norm(1e-6)), torch.zeros(2, 8))


@pytest.mark.parametrize("eps", [0.0, -1e-6, math.nan, math.inf, None, "1e-6"])
def test_eps_is_checked(eps):
    with pytest.raises(ValueError, match="eps must be a positive number, got"):
        Norm(eps)


# Rotary embedding.


def by_complex_numbers(rope, x, positions, angles_in=torch.float64):
    """In float64, all but the angles: pairs are complex numbers, and turning is a product."""
    half = rope.dim // 2
    wide = x.double()
    turning = wide[..., : rope.dim]
    if rope.layout == "halves":
        numbers = torch.complex(turning[..., :half], turning[..., half:])
    else:
        numbers = torch.view_as_complex(turning.unflatten(-1, (half, 2)).contiguous())
    frequencies = torch.tensor(rope.frequencies, dtype=angles_in, device=x.device)
    angles = (positions.to(angles_in)[:, None, :, None] * frequencies).double()
    turned = torch.view_as_real(numbers * torch.polar(torch.full_like(angles, rope.factor), angles))
    flat = turned.transpose(-1, -2).flatten(-2) if rope.layout == "halves" else turned.flatten(-2)
    return torch.cat([flat, wide[..., rope.dim :]], -1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dim", "head_dim"), [(32, 32), (12, 32), (2, 3)])
def test_turning_is_a_product_of_complex_numbers(layout, dim, head_dim, device):
    rope = dataclasses.replace(Rope.plain(dim, 500.0, layout), factor=1.25)
    x = torch.randn(2, 3, 4, head_dim, dtype=torch.float64, device=device)
    positions = torch.tensor([[0, 1, 2, 3], [7, 1000, 131071, 5]], device=device)
    got = rope.rotate(x, positions)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, by_complex_numbers(rope, x, positions), rtol=0, atol=1e-9)
    torch.testing.assert_close(got, rope.rotate(x, positions.int()), rtol=0, atol=0)
    assert not torch.allclose(got, by_complex_numbers(dataclasses.replace(rope, factor=1.0), x, positions), atol=1e-3)
    if dim > 2:
        other = dataclasses.replace(rope, layout=LAYOUTS[layout == "halves"])
        assert not torch.allclose(got, other.rotate(x, positions), atol=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_turning_is_rounded_once(layout, dtype, device):
    rope = Rope.plain(24, 300.0, layout)
    x = torch.randn(2, 3, 5, 32, device=device).to(dtype)
    positions = torch.randint(0, 20, (2, 5), device=device)
    got = rope.rotate(x, positions)
    assert got.dtype == dtype
    assert rounded_once(got, by_complex_numbers(rope, x, positions))


def test_positions_below_zero_count_as_zero(device):
    rope = Rope.plain(8)
    x = torch.randn(1, 2, 3, 8, device=device)
    got = rope.rotate(x, torch.tensor([[-1, 3, -(2**31)]], device=device, dtype=torch.int32))
    assert torch.equal(got[:, :, [0, 2]], x[:, :, [0, 2]])
    assert not torch.allclose(got[:, :, 1], x[:, :, 1])


def test_turning_keeps_what_queries_and_keys_say_of_one_another(device):
    """Their product depends on the distance of positions only."""
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64, device=device)

    def product(rope, at, to):
        q_at, k_to = (torch.tensor([[n]], device=device) for n in (at, to))
        return (rope.rotate(q, q_at) * rope.rotate(k, k_to)).sum()

    for layout in LAYOUTS:
        rope = Rope.plain(16, layout=layout)
        torch.testing.assert_close(product(rope, 5, 2), product(rope, 103, 100))
        assert (product(rope, 5, 2) - product(rope, 5, 4)).abs() > 1e-6


def test_plain_wavelengths():
    rope = Rope.plain(8, 10000.0)
    assert rope.dim == 8
    assert rope.frequencies == pytest.approx((1.0, 0.1, 0.01, 0.001), rel=1e-6)
    assert Rope.plain(8, 10000.0) == rope
    assert len({rope, Rope.plain(8), Rope.plain(8, 500.0)}) == 2  # hashable, by value
    assert rope.on(torch.device("cpu")) is Rope.plain(8).on(torch.device("cpu"))  # made once
    assert rope.on(torch.device("cpu")).tolist() == list(rope.frequencies)


def test_llama3_stretches_long_waves_and_keeps_short_ones():
    plain, scaled = Rope.plain(64, 500000.0), Rope.llama3(64, 500000.0, 8.0, 1.0, 4.0, 8192)
    waves = [2 * math.pi / f for f in plain.frequencies]
    ratios = [b / a for a, b in zip(plain.frequencies, scaled.frequencies, strict=True)]
    kinds = set()
    for wave, ratio in zip(waves, ratios, strict=True):
        if wave < 8192 / 4:
            assert ratio == 1
            kinds.add("kept")
        elif wave > 8192:
            assert ratio == pytest.approx(1 / 8)
            kinds.add("stretched")
        else:
            assert 1 / 8 < ratio < 1
            kinds.add("between")
    assert kinds == {"kept", "stretched", "between"}
    assert ratios == sorted(ratios, reverse=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rope(()), "frequencies must be a tuple that contains one number per pair, got \\(\\)"),
        (lambda: Rope((0.1,)), "frequencies must be finite float32 numbers, got 0.1"),
        (lambda: Rope((1.0, math.inf)), "frequencies\\[1\\] must be a finite number, got inf"),
        (lambda: Rope((1.0,), "thirds"), "layout must be one of halves, pairs, got 'thirds'"),
        (lambda: Rope((1.0,), factor=math.nan), "factor must be a finite number, got nan"),
        (lambda: Rope.plain(7), "dim must be a positive even integer .*, got 7"),
        (lambda: Rope.plain(8, 0.0), "theta must be a positive number, got 0.0"),
        (lambda: Rope.llama3(8, 1e4, 8.0, 4.0, 4.0, 8192), "low_freq_factor must be below .* got 4.0 and 4.0"),
    ],
)
def test_a_rope_is_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# The configuration.


def test_a_config_is_a_value():
    config = AttentionConfig(64, 8, 2, 16, rope=Rope.plain(16), norm=Norm(1e-6), window=9, scale=0.5)
    assert config == AttentionConfig(64, 8, 2, 16, rope=Rope.plain(16), norm=Norm(1e-6), window=9, scale=0.5)
    assert len({config, dataclasses.replace(config), dataclasses.replace(config, window=8)}) == 2


@pytest.mark.parametrize(
    ("sizes", "more", "message"),
    [
        ((0, 8, 2, 16), {}, "hidden must be a positive integer, got 0"),
        ((64, 8.0, 2, 16), {}, "q_heads must be a positive integer, got 8.0"),
        ((64, 8, True, 16), {}, "kv_heads must be a positive integer, got True"),
        ((64, 8, 2, -1), {}, "head_dim must be a positive integer, got -1"),
        ((64, 8, 3, 16), {}, "q_heads must be a multiple of kv_heads, got q_heads=8 and kv_heads=3"),
        ((64, 8, 2, 16), {"rope": Rope.plain(18)}, "rope.dim must be at most head_dim=16, got 18"),
        ((64, 8, 2, 16), {"window": 0}, "window must be a positive integer, got 0"),
        ((64, 8, 2, 16), {"scale": math.nan}, "scale must be a finite number, got nan"),
    ],
)
def test_a_config_is_checked(sizes, more, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(*sizes, **more)


# Heads.


def test_heads_are_split_as_the_projection_has_them(device):
    """Without stages, every number is where it was."""
    config = AttentionConfig(8, 4, 2, 3)
    weights = AttentionWeights(torch.empty(0))
    qkv = torch.arange(2 * 5 * 8 * 3, device=device).view(2, 5, 24).double()  # 4 + 2 * 2 heads of 3
    q, k, v = split_and_rotate(*qkv.split([12, 12], -1), torch.zeros(2, 5, dtype=torch.int32), config, weights)
    assert [tuple(x.shape) for x in (q, k, v)] == [(2, 4, 5, 3), (2, 2, 5, 3), (2, 2, 5, 3)]
    for head in range(8):
        x = torch.cat([q, k, v], 1)[:, head]
        assert torch.equal(x, qkv[..., head * 3 : head * 3 + 3])


@pytest.mark.parametrize(
    ("dtype", "stages"),
    [
        (torch.float64, "before"),
        (torch.float32, "rope"),
        (torch.float16, "after"),
        (torch.bfloat16, "before rope after"),
    ],
)
def test_stages_come_in_order_and_round_once(dtype, stages, device):
    D, norm = 16, Norm(1e-2)
    config = AttentionConfig(
        8, 4, 2, D, rope=Rope.plain(12) if "rope" in stages else None,
        norm_before_rope=norm if "before" in stages else None,
        norm_after_rope=norm if "after" in stages else None,
    )  # fmt: skip
    names = [f"{x}_norm_{when}_rope" for x in "qk" for when in ("before", "after")]
    norms = {name: (torch.rand(D, device=device) + 0.5).to(dtype) for name in names}
    weights = AttentionWeights(torch.empty(0), **norms)
    q, kv = (torch.randn(2, 3, n * D, device=device).to(dtype) for n in (4, 4))
    positions = torch.tensor([[0, 1, 2], [9, 10, 11]], device=device)

    def stagewise(x, before, after, kind):
        """Each stage written out, rounding to `kind` after every one."""
        angles_in = torch.float64 if kind == torch.float64 else torch.float32
        if "before" in stages:
            x = (x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt() * before).to(kind)
        if "rope" in stages:
            x = by_complex_numbers(config.rope, x, positions, angles_in).to(kind)
        if "after" in stages:
            x = (x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt() * after).to(kind)
        return x

    q_heads, k_heads, v_heads = (
        x.unflatten(-1, (-1, D)).transpose(1, 2) for x in (q, kv[..., : 2 * D], kv[..., 2 * D :])
    )
    got_q, (got_k, got_v) = queries(q, positions, config, weights), keys_and_values(kv, positions, config, weights)
    assert torch.equal(got_v, v_heads)
    for got, x, (before, after) in ((got_q, q_heads, names[:2]), (got_k, k_heads, names[2:])):
        before, after = norms[before], norms[after]
        right = stagewise(x.double(), before.double(), after.double(), torch.float64)
        assert got.dtype == dtype
        assert rounded_once(got, right)
        if dtype.itemsize == 2 and len(stages.split()) > 1:  # rounding in between would be seen
            assert not rounded_once(stagewise(x, before, after, dtype), right)
