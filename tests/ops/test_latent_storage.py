"""The storage types of sparse attention: latents of MLA in 656 bytes, and an indexer's keys with a scale per token."""

import pytest
import torch

from attnmesh import Quantized, decode_attention, quantize
from attnmesh.ops.storage import bytes_per_token, dequantize, storage_of, values_of, width_of
from attnmesh.sparse import unpack_index_keys, unpack_latent


def latents(*shape: int, seed: int = 0) -> torch.Tensor:
    """Of all sizes; groups of zeros and of numbers below the smallest scale are among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * torch.exp2(
        torch.randint(-9, 12, (*shape[:-1], 1), generator=generator)
    )
    rows = x.view(-1, shape[-1])
    rows[0::5, :128] = 0.0
    rows[1::5, :128] *= 1e-6
    rows[2::5, 0] = 448.0  # of a scale of exactly 1
    return x.bfloat16()


def as_flashmla_stores_it(x: torch.Tensor) -> torch.Tensor:
    """The bytes by FlashMLA's published rule, group by group."""
    width = x.shape[-1] // 128 * 128
    parts, scales = [], []
    for group in x[..., :width].float().split(128, -1):
        scale = torch.pow(2, (group.abs().amax(-1) / 448.0).clamp_min(1e-4).log2().ceil())
        parts.append((group / scale[..., None]).to(torch.float8_e4m3fn).view(torch.uint8))
        scales.append(scale)
    rope = x[..., width:].contiguous().view(torch.uint8)
    return torch.cat([*parts, torch.stack(scales, -1).view(torch.uint8), rope], -1)


@pytest.mark.parametrize("dim", [576, 144, 384 + 126])
def test_the_bytes_are_those_of_flashmla(dim):
    x = latents(3, 4, 1, dim)
    expected, stored = as_flashmla_stores_it(x), quantize(x, "fp8_ds_mla")
    assert expected.shape[-1] == bytes_per_token("fp8_ds_mla", dim)
    unpacked = unpack_latent(expected, dim % 128)
    for name in ("values", "scales", "rope"):
        ours, theirs = (getattr(each, name).contiguous().view(torch.uint8) for each in (stored, unpacked))
        assert torch.equal(ours, theirs), name
    assert storage_of(stored) == "fp8_ds_mla"
    assert width_of(stored) == dim


def test_what_comes_back():
    x = latents(7, 5, 1, 576)
    stored = quantize(x, "fp8_ds_mla")
    back = dequantize(stored, torch.float64)
    assert torch.equal(back[..., 512:], x[..., 512:].double())  # the rope part is kept
    scale = stored.scales.double().repeat_interleave(128, -1)
    error = (back - x.double()).abs()[..., :512]
    assert (error <= torch.maximum(x.double().abs()[..., :512] * 2**-4, scale * 2**-10)).all()
    # Scales are powers of two: nothing is lost in bfloat16, nor when the numbers are stored a second time.
    assert torch.equal(dequantize(stored, torch.bfloat16).double(), back)
    assert torch.equal(dequantize(quantize(back, "fp8_ds_mla"), torch.float64), back)


def test_scales_of_other_projects_are_any_float32():
    raw = as_flashmla_stores_it(latents(2, 3, 1, 576))
    cache = unpack_latent(raw)
    cache.scales.mul_(1.234)
    exact = cache.values.double().unflatten(-1, (4, 128)) * cache.scales.double()[..., None]
    assert torch.equal(dequantize(cache, torch.float64)[..., :512], exact.flatten(-2))


def test_views_write_through_to_the_bytes():
    raw = torch.zeros(3, 6, 1, 656, dtype=torch.uint8)[:, :4]  # blocks with a gap, as FlashMLA's tests make them
    cache, x = unpack_latent(raw), quantize(latents(3, 4, 1, 576), "fp8_ds_mla")
    for name in ("values", "scales", "rope"):
        target, source = (getattr(each, name) for each in (cache, x))
        if name == "values":
            target, source = target.view(torch.uint8), source.view(torch.uint8)
        target.copy_(source)
    assert torch.equal(raw, as_flashmla_stores_it(latents(3, 4, 1, 576)))


@pytest.mark.parametrize("shape", [(5, 8, 1, 128), (2, 3, 2, 20)])
def test_index_keys(shape):
    x = latents(*shape)
    stored = quantize(x, "fp8_token")
    assert storage_of(stored) == "fp8_token"
    assert stored.scales.shape == shape[:-1]
    assert bytes_per_token("fp8_token", shape[-1]) == shape[-1] + 4
    assert (torch.frexp(stored.scales).mantissa == 0.5).all()
    assert (stored.values.float().abs().amax(-1) <= 448).all()
    back = dequantize(stored, torch.float64)
    assert torch.equal(dequantize(quantize(back, "fp8_token"), torch.float64), back)
    error, scale = (back - x.double()).abs(), stored.scales.double()[..., None]
    assert (error <= torch.maximum(x.double().abs() * 2**-4, scale * 2**-10)).all()


@pytest.mark.parametrize("shape", [(5, 8 * 132), (5, 8, 1, 132), (5, 8, 132)])
def test_index_keys_of_deepgemm(shape):
    x = latents(5, 8, 1, 128)
    stored = quantize(x, "fp8_token")
    values, scales = stored.values.view(torch.uint8).flatten(1), stored.scales.flatten(1).view(torch.uint8)
    cache = unpack_index_keys(torch.cat([values, scales], 1).view(shape), 8)
    assert torch.equal(dequantize(cache, torch.float64), dequantize(stored, torch.float64))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: quantize(torch.ones(2, 512), "fp8_ds_mla"), "must be a multiple of 128 plus an even rope part"),
        (lambda: quantize(torch.ones(2, 100), "fp8_ds_mla"), "head_dim must be a multiple of 128 plus"),
        (lambda: quantize(torch.ones(2, 128), "fp8_token"), r"at least \[tokens, heads, head_dim\]"),
        (lambda: quantize(torch.ones(2, 3, 128), "fp8_token", scale=torch.ones(())), "scale must be None"),
        (lambda: unpack_latent(torch.zeros(2, 655, dtype=torch.uint8)), "cache must have 132 bytes per 128 values"),
        (lambda: unpack_latent(torch.zeros(2, 656)), "cache must be uint8 or float8_e4m3fn"),
        (lambda: unpack_latent(torch.zeros(2, 658, dtype=torch.uint8)[:, 1:657]), "strides in multiples of 4 bytes"),
        (lambda: unpack_index_keys(torch.zeros(2, 100, dtype=torch.uint8), 8), "times D . 4 bytes per block"),
        (lambda: unpack_index_keys(torch.zeros(2, 264, 2, dtype=torch.uint8)[..., 0], 8), "contiguous blocks"),
        (lambda: with_part(scales=torch.ones(2, 3, 1, 3)), r"scales must be float32 \[2, 3, 1, 4\]"),
        (lambda: with_part(rope=torch.ones(2, 3, 1, 64)), "rope must be bfloat16"),
        (lambda: with_part(values=torch.ones(2, 3, 1, 512)), "values beside a rope part must be float8_e4m3fn"),
    ],
)  # fmt: skip
def test_what_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        wrong()


def with_part(**part: torch.Tensor) -> Quantized:
    stored = quantize(latents(2, 3, 1, 576), "fp8_ds_mla")
    return Quantized(**{name: part.get(name, getattr(stored, name)) for name in ("values", "scales", "rope")})


@pytest.mark.parametrize("storage", ["fp8_ds_mla", "fp8_token"])
def test_dense_decode_refuses_them(storage):
    cache = quantize(torch.ones(1, 1, 8, 576), storage)
    with pytest.raises(ValueError, match=f"k_cache must be stored as one of bf16.* got {storage}"):
        decode_attention(torch.ones(1, 2, 1, values_of(cache).shape[-1]), cache, cache)
