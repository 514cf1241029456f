"""Both ways to write to the cache leave the bits that `quantize` says, in their slots and nowhere else."""

import pytest
import torch

from attnmesh import BlockCache, CacheSpec
from attnmesh.kv_cache import pools as write
from attnmesh.ops.storage import PLAIN, STORAGES, Quantized, quantize, storage_of, values_of
from helpers.cases import in_turn

BLOCKS, BLOCK_SIZE = 5, 4


def torch_path(keys, values, slots, k, v):
    write._write(keys, slots, k)
    write._write(values, slots, v)


def kernel(*args):
    pytest.importorskip("triton")
    from attnmesh.kv_cache import triton_write

    triton_write.write_tokens(*args)


PATHS = pytest.mark.parametrize("way", [torch_path, kernel])


def raw(x: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, as integers: NaN equals NaN, and 0 is not -0."""
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def tensors(stored) -> list[torch.Tensor]:
    if not isinstance(stored, Quantized):
        return [stored]
    return [stored.values] if stored.storage == "fp8" else [stored.values, stored.scales]


def pools(storage, heads, dim, value_dim, device, scale=None):
    """The pools of a cache, every byte of them poisoned."""
    cache = BlockCache(
        CacheSpec(
            layers=2, kv_heads=heads, head_dim=dim, value_dim=value_dim, storage=storage, k_scale=scale, v_scale=scale
        ),
        num_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        device=device,
        max_sequences=2,
        max_length=8,
    )
    for x in cache.stored_tensors:
        x.fill_(torch.nan if x.dtype.is_floating_point else 0x55)
    return cache


def numbers(*shape, dtype, device):
    """Of all sizes, with zeros, whole groups of zeros, halves to round, tiny and huge ones."""
    x = torch.randn(shape, device=device) * torch.exp2(torch.randint(-6, 7, (*shape[:-1], 1), device=device))
    x[..., ::5] = torch.randint(-9, 10, x[..., ::5].shape, device=device) / 2
    x[..., -1] = x.abs().amax(-1)
    rows = x.view(-1, shape[-1])  # every seventh of a kind: some are in every head and at every token
    steps = torch.arange(shape[-1], device=device)
    rows[0::7] = 0.0
    rows[1::7, ::2] = -0.0
    rows[2::7] = steps * 2.0**-10  # fp8's smallest, and the ties between them
    rows[3::7] = torch.linspace(-900, 900, shape[-1], device=device)  # past fp8's largest
    rows[4::7] = torch.where(steps == 0, 127.0, steps % 127 - 0.5)  # int8's scale is 1: every step is a tie
    return x.to(dtype)


def check(way, storage, dtype, device, *, dims=(32, 16), heads=3, sequences=2, tokens=4, scale=None, skipped=True):
    cache = pools(storage, heads, *dims, device, scale)
    slots = torch.full((sequences, tokens), -1)
    places = torch.randperm(BLOCKS * BLOCK_SIZE)[: sequences * tokens]
    slots.view(-1)[:] = places
    if skipped:
        slots[-1, 1], slots[0, 0] = -1, -7
    slots = slots.to(device)
    k, v = (numbers(sequences, heads, tokens, dim, dtype=dtype, device=device) for dim in dims)
    if way is kernel and storage == "bf16" and device.type == "cpu":
        k, v = k.bfloat16().to(dtype), v.bfloat16().to(dtype)  # the interpreter cuts off where it should round
    before = [raw(x).clone() for x in cache.stored_tensors]
    way(cache.keys(1), cache.values(1), slots, k, v)

    named = torch.zeros(BLOCKS * BLOCK_SIZE, dtype=torch.bool, device=device)
    named[slots[slots >= 0]] = True
    for pool, x in ((cache.keys(1), k), (cache.values(1), v)):
        scales = pool.scales if storage == "fp8" else None
        wanted = quantize(x.transpose(1, 2)[slots >= 0], storage, scale=scales)
        assert storage_of(pool) == storage
        for got, right in zip(tensors(pool), tensors(wanted), strict=True):
            assert torch.equal(raw(got).flatten(0, 1)[slots[slots >= 0]], raw(right)), (storage, got.dtype)
    for x, old in zip(cache.stored_tensors, before, strict=True):
        new = raw(x)
        assert torch.equal(new[0], old[0])  # the other layer
        assert torch.equal(new[1].flatten(0, 1)[~named], old[1].flatten(0, 1)[~named])
        assert not torch.equal(new[1].flatten(0, 1)[named], old[1].flatten(0, 1)[named])  # the poison can be seen


@PATHS
@pytest.mark.parametrize(
    ("storage", "dtype"), in_turn(STORAGES, [torch.float16, torch.float32, torch.bfloat16, torch.float32])
)
def test_the_bits_are_those_of_quantize(way, storage, dtype, device):
    check(way, storage, dtype, device)


@PATHS
@pytest.mark.parametrize("storage", STORAGES)
def test_any_head_dims_and_head_counts(way, storage, device):
    """Dimensions that fill no power of two, more heads than one program takes, one token."""
    check(way, storage, torch.float32, device, dims=(80, 48), heads=5, sequences=1, tokens=3)
    check(way, storage, torch.float16, device, dims=(16, 128), heads=33, sequences=2, tokens=2)
    check(way, storage, torch.float32, device, sequences=6, tokens=1, skipped=False)  # one call on the CPU
    if storage != "bfp8":
        check(way, storage, torch.float32, device, dims=(6, 3), heads=2, sequences=2, tokens=3)


@PATHS
@pytest.mark.parametrize("storage", ["fp32", "int8"])
def test_float64_is_written_as_float32(way, storage, device):
    check(way, storage, torch.float64, device)


@PATHS
@pytest.mark.parametrize(
    "scale", [0.37, torch.tensor(2.0), torch.tensor([0.25, 1 / 3, 7.0])], ids=["number", "0d", "1d"]
)
def test_fp8_scales(way, scale, device):
    check(way, "fp8", torch.float32, device, scale=scale)


@PATHS
def test_every_fp8_number_and_every_tie_between_two(way, device):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()].sort().values
    ties = (codes[1:] + codes[:-1]) / 2
    x = torch.cat([codes, ties, torch.nextafter(ties, codes[1:]), torch.nextafter(ties, codes[:-1])])
    x = torch.nn.functional.pad(x, (0, -len(x) % 128)).view(1, -1, 1, 128).to(device)
    cache = pools("fp8", x.shape[1], 128, 128, device)
    way(cache.keys(0), cache.values(0), torch.tensor([[6]], device=device), x, -x)
    for pool, given in ((cache.keys(0), x), (cache.values(0), -x)):
        wanted = given[0, :, 0].to(torch.float8_e4m3fn)
        assert torch.equal(raw(pool.values)[1, 2], raw(wanted))
        assert len(raw(wanted).unique()) == len(codes)  # every code, both zeros too


@PATHS
@pytest.mark.parametrize("storage", ["int8", "bfp8"])
def test_the_smallest_and_the_largest_numbers(way, storage, device):
    x = torch.zeros(1, 8, 1, 16, device=device)
    for head, size in enumerate([0.0, 1e-45, 2e-43, 1e-38, 2**-120.0, 1e38, 3.4e38, 2.0**127]):
        x[0, head, 0] = torch.linspace(-1, 1, 16, device=device) * size
    cache = pools(storage, 8, 16, 16, device)
    way(cache.keys(0), cache.values(0), torch.tensor([[0]], device=device), x, x.flip(-1))
    for pool, given in ((cache.keys(0), x), (cache.values(0), x.flip(-1))):
        wanted = quantize(given[:, :, 0], storage)
        assert torch.equal(pool.values[0, :1], wanted.values)
        assert torch.equal(raw(pool.scales)[0, :1], raw(wanted.scales))
        assert wanted.values[0, 2].abs().amax() in (0, 127) or storage == "bfp8"  # no step wraps around


@PATHS
@pytest.mark.parametrize("storage", ["fp32", "int8", "bfp8"])
def test_inputs_of_any_strides(way, storage, device):
    x = torch.randn(2, 3, 4, 32, device=device)
    slots = torch.tensor([[1, 5, 9], [2, -1, 3]], device=device)
    for given in (x.transpose(1, 2), torch.cat([x, x], -1).transpose(1, 2)[..., ::2]):
        assert not given.is_contiguous()
        plain, strided = pools(storage, 4, 32, 32, device), pools(storage, 4, 32, 32, device)
        way(plain.keys(0), plain.values(0), slots, given.contiguous(), -given.contiguous())
        way(strided.keys(0), strided.values(0), slots, given, -given)
        both = (cache.stored_tensors for cache in (plain, strided))
        for a, b in zip(*both, strict=True):
            assert torch.equal(raw(a), raw(b))


@pytest.mark.parametrize("storage", STORAGES)
def test_the_pools_are_what_paged_decode_reads(storage, device):
    cache = pools(storage, 3, 32, 16, device, None)
    for stored, dim in ((cache.keys(0), 32), (cache.values(1), 16)):
        assert storage_of(stored) == storage
        assert values_of(stored).shape == (BLOCKS, BLOCK_SIZE, 3, dim)
        if torch.device(device).type == "cpu" and storage in PLAIN:
            assert values_of(stored).permute(2, 0, 1, 3).is_contiguous()  # a head's tokens lie next to one another
        else:
            assert values_of(stored).is_contiguous()
        if storage in ("int8", "bfp8"):
            one_head = stored.scales[0, :, 0]
            assert one_head.is_contiguous()  # a head's tokens lie next to one another
    assert storage in PLAIN or isinstance(cache.keys(0), Quantized)


@PATHS
@pytest.mark.parametrize("storage", STORAGES)
def test_the_cache_writes_to_its_slots(way, storage, device, monkeypatch):
    monkeypatch.setattr("attnmesh.kv_cache.cache.write_tokens", way)
    cache = pools(storage, 2, 32, 16, device)
    new = cache.append([cache.allocate(5), cache.allocate(3)], 3)
    k, v = (torch.randn(2, 2, 3, dim, device=device).bfloat16() for dim in (32, 16))
    cache.write(1, new, k, v)
    assert new.slots.tolist() == [[0, 1, 2], [8, 9, 10]]
    for pool, x in ((cache.keys(1), k), (cache.values(1), v)):
        wanted = quantize(x.transpose(1, 2), storage, head_axis=2, scale=pool.scales if storage == "fp8" else None)
        for got, right in zip(tensors(pool), tensors(wanted), strict=True):
            assert torch.equal(raw(got)[[0, 2], :3], raw(right))
    poisoned = cache.keys(0)
    assert torch.equal(raw(tensors(poisoned)[0]), raw(tensors(pools(storage, 2, 32, 16, device).keys(0))[0]))


def test_the_device_says_which_way_is_taken(monkeypatch, device):
    taken = []
    monkeypatch.setattr(write, "_write", lambda pool, slots, x: taken.append("torch"))
    monkeypatch.setattr(
        write, "_triton", lambda: type("Kernel", (), {"write_tokens": lambda *_: taken.append("triton")})
    )
    slots = torch.zeros(1, 1, dtype=torch.int64, device=device)
    write.write_tokens(slots, slots, slots, slots, slots)
    assert taken == (["triton"] if device.type == "cuda" else ["torch", "torch"])


def test_a_wrong_rounding_would_be_seen(monkeypatch, device):
    """Halves away from 0, as many kernels round, and the numbers above notice."""
    real = quantize

    def away(x, storage, **more):
        stored = real(x, storage, **more)
        wide = x.float() / torch.where(stored.scales > 0, stored.scales, 1.0)[..., None]
        return Quantized((wide.abs() + 0.5).floor().copysign(wide).to(torch.int8), stored.scales)

    monkeypatch.setattr(write, "quantize", away)
    with pytest.raises(AssertionError):
        check(torch_path, "int8", torch.float32, device)
