"""`BlockCache` of latents: one vector per token, in plain dtypes or V3.2's bytes, and an indexer's keys beside it."""

import pytest
import torch
import torch.nn.functional as F

from attnmesh import BlockCache, quantize
from attnmesh.kv_cache import pools as write
from attnmesh.ops.storage import dequantize, storage_of
from helpers.caches import cache_sizes

STORAGES = ("bf16", "fp32", "fp8_ds_mla")
DIM, VALUE_DIM, INDEX_DIM = 144, 128, 48


def make(storage: str = "fp8_ds_mla", **more: object) -> BlockCache:
    sizes = {"head_dim": DIM, "value_dim": VALUE_DIM, "index_dim": INDEX_DIM, "kv_heads": 1, "latent": True}
    sizes |= {"layers": 2, "num_blocks": 6, "block_size": 4, "max_sequences": 3, "max_length": 12, "device": "cpu"}
    return BlockCache(**cache_sizes(**sizes | {"storage": storage} | more))


def tokens(count: int, dim: int, seed: int) -> torch.Tensor:
    return torch.randn(1, 1, count, dim, generator=torch.Generator().manual_seed(seed)) * 3


def read(cache: BlockCache, row: int, length: int, layer: int, pool: str) -> torch.Tensor:
    """The tokens of a sequence, [length, D], by the block table."""
    stored = dequantize(getattr(cache, pool)(layer), torch.float32)
    at = torch.arange(length)
    blocks = cache.block_table[row, at // 4].long()
    return stored[blocks, at % 4, 0]


def expected(x: torch.Tensor, storage: str) -> torch.Tensor:
    return dequantize(quantize(x.transpose(1, 2), storage), torch.float32)[0, :, 0]


@pytest.mark.parametrize("storage", STORAGES)
def test_written_tokens_come_back_also_after_a_fork(storage):
    cache = make(storage)
    sequence = cache.allocate(6)
    latent, index = tokens(6, DIM, 1), tokens(6, INDEX_DIM, 2)
    new = cache.append([sequence], 6)
    for layer in range(2):
        cache.write(layer, new, latent * (layer + 1), index_k=index * (layer + 1))
    fork = cache.fork(sequence)
    more = cache.append([fork], 1)  # copies the block that both have
    for layer in range(2):
        cache.write(layer, more, tokens(1, DIM, 3), index_k=tokens(1, INDEX_DIM, 4))
    index_storage = "fp8_token" if storage == "fp8_ds_mla" else storage
    for layer, (row, length) in enumerate([(0, 6), (1, 6)]):
        assert torch.equal(read(cache, row, length, layer, "keys"), expected(latent * (layer + 1), storage))
        assert torch.equal(read(cache, row, length, layer, "index_keys"), expected(index * (layer + 1), index_storage))
    assert torch.equal(read(cache, 1, 7, 0, "keys")[6:], expected(tokens(1, DIM, 3), storage))
    assert storage_of(cache.keys(0)) == storage
    assert storage_of(cache.index_keys(0)) == index_storage


def test_values_are_a_view_of_the_keys():
    cache = make("bf16")
    assert cache.values(1).data_ptr() == cache.keys(1).data_ptr()
    assert cache.values(1).shape == (6, 4, 1, VALUE_DIM)
    assert make("fp8_ds_mla", value_dim=None).keys(0).values.shape == (6, 4, 1, VALUE_DIM)


def test_the_bytes_of_a_token():
    cache = make("fp8_ds_mla", head_dim=576, value_dim=512, index_dim=128)
    stored = sum(x.numel() * x.element_size() for x in cache.stored_tensors)
    assert stored == 2 * 6 * 4 * (656 + 132)


@pytest.mark.parametrize("storage", STORAGES)
def test_the_kernel_leaves_the_same_bits(storage, device):
    pytest.importorskip("triton")
    from attnmesh.kv_cache import triton_write

    def bits(cache):
        return [x.clone().view(torch.uint8) for x in cache.stored_tensors]

    for dtype in (torch.float32, torch.float16):
        caches = [make(storage, device=device) for _ in range(2)]
        slots = torch.tensor([[3, -1, 9], [20, 0, -1]], device=device)
        latent, index = (
            torch.randn(2, 3, 1, dim, device=device).transpose(1, 2).to(dtype) * 30 for dim in (DIM, INDEX_DIM)
        )
        latent[0, 0, 0, :7] = torch.tensor([0.0, -0.0, 1e-7, 448.0, 232.0, 240.0, -1e-3], device=device)
        if device.type == "cpu":  # the interpreter cuts off where it should round to bfloat16
            latent, index = latent.bfloat16().to(dtype), index.bfloat16().to(dtype)
        # What lies beside a token must not change its scale.
        latent, index = (F.pad(x.transpose(1, 2), (0, 1), value=6e4)[..., :-1].transpose(1, 2) for x in (latent, index))
        before = bits(caches[0])
        for rows, cache in zip((write._write, triton_write.write_rows), caches, strict=True):
            rows(cache.keys(1), slots, latent)
            rows(cache.index_keys(0), slots, index)
        for x, y, old in zip(*map(bits, caches), before, strict=True):
            assert torch.equal(x, y)
            assert not torch.equal(x, old)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kv_heads": 2}, "a latent cache has one kv head"),
        ({"latent": False}, "storage must be .*bfp8, got 'fp8_ds_mla'"),
        ({"storage": "int8"}, "storage must be .*fp8_ds_mla, got 'int8'"),
        ({"value_dim": 64}, "value_dim must be 128 for storage 'fp8_ds_mla' and head_dim=144"),
        ({"head_dim": 128}, "head_dim must be a multiple of 128 plus"),
        ({"index_dim": 30}, "index_dim must be a multiple of 4"),
        ({"index_dim": 32, "latent": False, "storage": "bf16"}, "index_dim must be None unless latent=True"),
        ({"storage": "bf16", "value_dim": 145}, "among its 144 features"),
    ],
)
def test_sizes_that_do_not_fit(given, said):
    with pytest.raises(ValueError, match=said):
        make(**given)


def test_tensors_that_are_not_stored():
    cache = make()
    new = cache.append([cache.allocate(1)], 1)
    latent, index = tokens(1, DIM, 1), tokens(1, INDEX_DIM, 2)
    with pytest.raises(ValueError, match="v must be None, for this cache does not store it"):
        cache.write(0, new, latent, latent, index)
    with pytest.raises(ValueError, match="index_k must be a tensor, got None"):
        cache.write(0, new, latent)
    with pytest.raises(ValueError, match=r"index_k must be \[1, 1, 1, 48\]"):
        cache.write(0, new, latent, index_k=latent)
    with pytest.raises(ValueError, match=r"has no pool of values: they are in keys\(1\)"):
        cache.values(1)
    with pytest.raises(ValueError, match="only if it was made with index_dim"):
        make(index_dim=None).index_keys(0)
    dense = make("bf16", latent=False, index_dim=None)
    with pytest.raises(ValueError, match="v must be a tensor, got None"):
        dense.write(0, dense.append([dense.allocate(1)], 1), latent)
