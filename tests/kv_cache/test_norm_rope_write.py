"""Between projections and attention: torch against float64, the kernel against torch, every byte around the slots."""

import pytest
import torch

from attnmesh import BlockCache, CacheSpec
from attnmesh.decode import AttentionConfig, AttentionWeights, Norm, Rope
from attnmesh.kv_cache import norm_rope_write as module
from attnmesh.kv_cache.norm_rope_write import ProjectedKV, norm_rope_write
from attnmesh.kv_cache.pools import write_tokens
from attnmesh.ops.block.config import split_and_rotate
from attnmesh.ops.block.norm_rope import LAYOUTS
from attnmesh.ops.storage import PLAIN, STORAGES, dequantize
from helpers.cases import sweep

BLOCKS, BLOCK_SIZE = 6, 4
OWN = range(1, 3)
NAME_OF = {dtype: name for name, dtype in PLAIN.items()}


def kernel(*args):
    pytest.importorskip("triton")
    from attnmesh.kv_cache import triton_write

    module._check(*args[:4], args[5])
    return triton_write.norm_rope_write(*args)


def torch_path(*args):
    if args[0].is_cuda:
        pytest.skip("the device says which way is taken: torch's is the CPU's")
    return norm_rope_write(*args)


WAYS = pytest.mark.parametrize("way", [torch_path, kernel])


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def pool(storage, kv_heads, dim, device):
    """A poisoned cache of two layers, of which the second is written."""
    scale = torch.linspace(0.01, 0.03, kv_heads) if storage == "fp8" else None
    cache = BlockCache(
        CacheSpec(layers=2, kv_heads=kv_heads, head_dim=dim, storage=storage, k_scale=scale, v_scale=scale),
        num_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        device=device,
        max_sequences=2,
        max_length=8,
    )
    for x in memory(cache):
        x.fill_(torch.nan if x.dtype.is_floating_point else 0x55)
    return cache


def memory(cache) -> list[torch.Tensor]:
    return list(cache.stored_tensors)


def bits(cache) -> list[torch.Tensor]:
    return [raw(x).clone() for x in memory(cache)]


def stages(
    dim, *, before=True, layout="halves", after=True, weighed=True, rotary=None, dtype=torch.float32, device="cpu"
):
    """A configuration with these stages, and the weights of its norms."""
    rope = layout and Rope.plain(rotary or dim, 100.0, layout)
    if rope:
        rope = Rope(rope.frequencies, layout, 1.5)
    config = AttentionConfig(
        64, 60, 60, dim, rope=rope, norm_before_rope=Norm(1e-5) if before else None,
        norm_after_rope=Norm(1e-2) if after else None,
    )  # fmt: skip
    names = [f"{x}_norm_{when}_rope" for x in "qk" for when, there in (("before", before), ("after", after)) if there]
    norms = {name: (torch.rand(dim, device=device) + 0.5).to(dtype) for name in names} if weighed else {}
    return config, AttentionWeights(torch.empty(0), **norms)


class Step:
    """Projections of one step, of which some tokens are padding (NaN), and where they go."""

    def __init__(self, q_heads, kv_heads, dim, *, batch=4, tokens=2, own=OWN, dtype, device, only_own=False):
        width = (q_heads + 2 * kv_heads) * dim
        # A view of something wider, as a projection with padded columns is.
        self.qkv = torch.randn(batch, tokens, width + 3, device=device).to(dtype)[..., 1:-2]
        self.own, self.kv_heads, self.dim = own, kv_heads, dim
        self.positions = torch.randint(0, 50, (batch, tokens), device=device, dtype=torch.int32)
        places = torch.randperm(BLOCKS * BLOCK_SIZE, device=device)[: len(own) * tokens]
        self.slots = places.view(len(own), tokens).clone()
        self.padding = torch.zeros(batch, tokens, dtype=torch.bool, device=device)
        self.padding[-1, -1] = True
        self.padding[max(own.stop - 1, 0), 0] = True
        self.slots[self.padding[own.start : own.stop]] = -1
        self.positions[self.padding] = -1
        self.qkv[self.padding] = torch.nan
        self.q, self.kv = self.qkv.split([q_heads * dim, 2 * kv_heads * dim], -1)
        self.given_kv = self.kv[own.start : own.stop].clone() if only_own else self.kv

    def new(self, cache) -> ProjectedKV:
        return ProjectedKV(self.given_kv, self.own, self.slots, cache.keys(1), cache.values(1))

    def in_float64(self, config, weights):
        """What the message and the cache should hold, as [B, heads, T, D]."""
        wide = AttentionWeights(**{name: None if x is None else x.double() for name, x in vars(weights).items()})
        return split_and_rotate(self.q.double(), self.kv.double(), self.positions, config, wide)


def message_to_heads(message, step, parts):
    """The message read back part by part, as [B, heads, T, D]."""
    batch, tokens = step.positions.shape
    heads = step.q.shape[-1] // step.dim
    rows, at = [], 0
    for part in range(parts):
        count = len(range(batch)[batch * part // parts : batch * (part + 1) // parts])
        size = heads * count * tokens * step.dim
        rows.append(message[at : at + size].view(heads, count, tokens, step.dim).transpose(0, 1))
        at += size
    assert at == len(message)
    return torch.cat(rows)


def check(way, step, storage, config, weights, parts):
    """The message and plain pools are right to rounding; quantized pools hold the bits of what plain ones would."""
    dtype, device = step.q.dtype, step.q.device
    right_q, right_k, right_v = step.in_float64(config, weights)
    plain, cache = (pool(kind, step.kv_heads, step.dim, device) for kind in (NAME_OF[dtype], storage))
    before = bits(cache)
    message = way(step.q, step.positions, step.new(plain), config, weights, parts)
    again = way(step.q, step.positions, step.new(cache), config, weights, parts)
    assert message.dtype == dtype

    real = ~step.padding[:, None, :, None].expand_as(right_q)
    for sent in (message, again):
        close(message_to_heads(sent, step, parts)[real], right_q[real])
    kept = step.slots >= 0
    at = step.slots[kept]
    own = slice(step.own.start, step.own.stop)
    k, v = (x(1).flatten(0, 1)[at] for x in (plain.keys, plain.values))
    close(k, right_k[own].transpose(1, 2)[kept])
    assert torch.equal(v.double(), right_v[own].transpose(1, 2)[kept])  # values have no stages

    # As `write_tokens` would write them, and nowhere else.
    expected = pool(storage, step.kv_heads, step.dim, device)
    write_tokens(expected.keys(1), expected.values(1), at[:, None], k[:, :, None], v[:, :, None])
    assert not step.own or not any(torch.equal(*pair) for pair in zip(bits(cache), before, strict=True))
    if device.type == "cuda":  # two compiled kernels sum in different orders: a key may be off by its last bit
        alike_on_a_gpu(cache, expected, at)
    else:
        for got, wanted in zip(bits(cache), bits(expected), strict=True):
            assert torch.equal(got, wanted)


def alike_on_a_gpu(cache, expected, at):
    """Values bit for bit, keys to one step of their storage, and everything else bit for bit."""
    for x, y in zip(map(raw, cache._pools[0][1].tensors), map(raw, expected._pools[0][1].tensors), strict=True):
        assert torch.equal(x, y)
    for x, y in zip(map(raw, cache._pools[0][0].tensors), map(raw, expected._pools[0][0].tensors), strict=True):
        if x.ndim > 1:  # not fp8's scales
            assert torch.equal(x[0], y[0])
            x, y = (pool[1].flatten(0, 1).clone() for pool in (x, y))
            x[at] = y[at] = 0
        assert torch.equal(x, y)
    if len(at):
        keys = (dequantize(pool.keys(1), torch.float32, head_axis=2) for pool in (cache, expected))
        got, wanted = (x.flatten(0, 1)[at] for x in keys)
        off = (got - wanted).abs() / wanted.abs().max()
        assert off.max() <= 0.07
        assert (off > 1e-5).float().mean() <= 0.05


def close(got, right):
    """To rounding: half a step of the dtype, and a few of float32 times what an angle can be off by."""
    assert got.numel() == right.numel()
    if not got.numel():
        return
    step = torch.finfo(got.dtype).eps
    bound = step * right.abs() + 50 * torch.finfo(torch.float32).eps * right.abs().amax()
    assert ((got.double() - right).abs() <= bound).all()
    assert right.abs().amax() > 0.1


@WAYS
@pytest.mark.parametrize(
    ("before", "layout", "after"),
    [(False, None, True), (True, None, False), (True, LAYOUTS[0], True), sweep(False, LAYOUTS[1], False)],
)
def test_every_combination_of_stages(way, before, layout, after, device):
    config, weights = stages(16, before=before, layout=layout, after=after, device=device)
    step = Step(3, 2, 16, dtype=torch.float32, device=device)
    check(way, step, "int8", config, weights, parts=2)


@WAYS
@pytest.mark.parametrize(
    ("storage", "dtype"), [*((storage, torch.float32) for storage in STORAGES), ("fp16", torch.float16)]
)
def test_every_storage(way, storage, dtype, device):
    config, weights = stages(32, dtype=dtype, device=device)
    step = Step(3, 2, 32, dtype=dtype, device=device)
    if way is kernel and storage == "bf16" and device.type == "cpu":
        # The interpreter cuts off where it should round: give it keys and values that need no rounding.
        config, weights = stages(32, before=False, layout=None, after=False)
        step.kv.copy_(step.kv.bfloat16())
    check(way, step, storage, config, weights, parts=1)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter does not round to bfloat16")
@pytest.mark.parametrize("storage", STORAGES)
def test_every_storage_from_bfloat16(storage, device):
    config, weights = stages(128, dtype=torch.bfloat16, device=device)
    step = Step(8, 2, 128, dtype=torch.bfloat16, device=device)
    check(kernel, step, storage, config, weights, parts=2)


@WAYS
@pytest.mark.parametrize(("batch", "parts"), [(1, 3), (4, 2), (5, 3)], ids=lambda n: str(n))
def test_every_part_gets_its_rows(way, batch, parts, device):
    config, weights = stages(16, after=False, device=device)
    for part in {0, parts - 1}:
        own = range(batch)[batch * part // parts : batch * (part + 1) // parts]
        step = Step(3, 1, 16, batch=batch, tokens=3, own=own, dtype=torch.float32, device=device)
        check(way, step, "fp32", config, weights, parts)


@WAYS
@pytest.mark.parametrize("storage", ["fp32", "bfp8"])
def test_keys_of_the_own_rows_alone(way, storage, device):
    """A projection of K and V for these rows only leaves the same as one for all."""
    config, weights = stages(16, device=device)
    step = Step(3, 2, 16, dtype=torch.float32, device=device, only_own=True)
    assert len(step.given_kv) == 2 < len(step.q)
    check(way, step, storage, config, weights, parts=2)


@WAYS
@pytest.mark.parametrize(
    ("dim", "rotary", "q_heads", "kv_heads"),
    [(16, 10, 2, 1), (80, 48, 5, 3), (24, 2, 70, 2), (16, 16, 2, 67), (6, 6, 1, 2)],
)
def test_any_head_dims_and_head_counts(way, dim, rotary, q_heads, kv_heads, device):
    """Partial rotation, head dims that are no power of two, and more heads than one program takes."""
    layout = LAYOUTS[q_heads % 2]
    config, weights = stages(dim, layout=layout, rotary=rotary, device=device)
    step = Step(q_heads, kv_heads, dim, batch=2, own=range(2), dtype=torch.float32, device=device)
    check(way, step, "int8", config, weights, parts=2)


@WAYS
def test_without_new_tokens_nothing_is_written(way, device):
    config, weights = stages(16, device=device)
    step = Step(3, 2, 16, dtype=torch.float32, device=device)
    cache = pool("fp32", 2, 16, device)
    with_new = way(step.q, step.positions, step.new(cache), config, weights, 2)
    assert torch.equal(raw(way(step.q, step.positions, None, config, weights, 2)), raw(with_new))


@WAYS
def test_norms_without_weights(way, device):
    config, weights = stages(16, weighed=False)
    check(way, Step(3, 2, 16, dtype=torch.float32, device=device), "fp32", config, weights, parts=1)


@WAYS
def test_weights_of_another_dtype_are_not_rounded_first(way, device):
    config, weights = stages(16, dtype=torch.float32, device=device)
    check(way, Step(3, 2, 16, dtype=torch.float16, device=device), "fp16", config, weights, parts=1)


@WAYS
def test_norms_of_any_strides(way, device):
    config, weights = stages(16, device=device)
    poison = torch.tensor(torch.nan, device=device)
    apart = {
        name: torch.stack([x, poison.expand_as(x)], 1)[:, 0] if "norm" in name and x is not None else x
        for name, x in vars(weights).items()
    }
    step = Step(3, 2, 16, dtype=torch.float32, device=device)
    check(way, step, "fp32", config, AttentionWeights(**apart), parts=1)


@WAYS
def test_positions_of_any_strides_and_far_away(way, device):
    config, weights = stages(16, before=False, after=False, layout="halves", device=device)
    step = Step(3, 2, 16, dtype=torch.float32, device=device)
    wide = step.positions.repeat(1, 2)
    step.positions = wide[:, ::2].copy_(step.positions)
    assert not step.positions.is_contiguous()
    check(way, step, "fp32", config, weights, parts=2)

    # At a million, float32 angles are far from float64 ones: the same product, as Transformers has it, is asked for.
    step.positions += 1_000_000
    step.qkv.nan_to_num_()
    message = message_to_heads(way(step.q, step.positions, None, config, weights, 2), step, 2)
    plain = config.rope.rotate(step.q.unflatten(-1, (-1, 16)).transpose(1, 2).cpu(), step.positions.cpu())
    torch.testing.assert_close(message.cpu(), plain, rtol=1e-5, atol=1e-5)


@WAYS
def test_no_row_of_its_own(way, device):
    config, weights = stages(16, device=device)
    for only_own in (False, True):
        step = Step(3, 2, 16, own=range(2, 2), dtype=torch.float32, device=device, only_own=only_own)
        check(way, step, "int8", config, weights, parts=3)


@WAYS
def test_an_empty_batch(way, device):
    config, weights = stages(16, device=device)
    step = Step(3, 2, 16, batch=1, own=range(0), dtype=torch.float32, device=device)
    cache = pool("int8", 2, 16, device)
    new = ProjectedKV(step.kv[:0], range(0), step.slots, cache.keys(1), cache.values(1))
    assert way(step.q[:0], step.positions[:0], new, config, weights, 2).shape == (0,)


def test_float64_stays_float64():
    config, weights = stages(16, dtype=torch.float64)
    step = Step(3, 2, 16, dtype=torch.float64, device="cpu")
    message = message_to_heads(norm_rope_write(step.q, step.positions, None, config, weights, 3), step, 3)
    real = ~step.padding[:, None, :, None].expand_as(message)
    assert message.dtype == torch.float64
    torch.testing.assert_close(message[real], step.in_float64(config, weights)[0][real], rtol=1e-14, atol=1e-14)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the CPU computes in float64")
def test_float64_on_a_gpu_is_refused(device):
    config, weights = stages(16, dtype=torch.float64, device=device)
    step = Step(3, 2, 16, dtype=torch.float64, device=device)
    with pytest.raises(ValueError, match=r"q must not be float64 on a GPU, got torch\.float64 on cuda"):
        norm_rope_write(step.q, step.positions, None, config, weights, 1)


def test_the_device_says_which_way_is_taken(monkeypatch, device):
    taken = []
    fake = type("Kernel", (), {"norm_rope_write": lambda *_: taken.append("triton")})
    monkeypatch.setattr(module, "_triton", lambda: fake)
    config, weights = stages(16, device=device)
    step = Step(3, 2, 16, dtype=torch.float32, device=device)
    norm_rope_write(step.q, step.positions, None, config, weights, 1)
    assert taken == (["triton"] if device.type == "cuda" else [])


def test_what_does_not_fit_is_refused():
    config, weights = stages(16)
    step = Step(3, 2, 16, dtype=torch.float32, device="cpu")
    cache = pool("fp32", 2, 16, "cpu")

    def refuses(message, *, q=step.q, positions=step.positions, parts=1, **changed):
        new = ProjectedKV(**(vars(step.new(cache)) | changed))
        with pytest.raises(ValueError, match=message):
            norm_rope_write(q, positions, new, config, weights, parts)

    refuses(r"q must be \[B, T, heads \* 16\], got \[4, 2, 47\]", q=step.q[..., 1:])
    refuses(r"positions must be \[4, 2\], as in q, got \[4, 1\]", positions=step.positions[:, 1:])
    refuses("parts must be a positive integer, got 0", parts=0)
    refuses(r"rows must be consecutive rows of the batch of 4, got range\(3, 5\)", rows=range(3, 5))
    refuses(r"rows must be consecutive rows of the batch of 4, got range\(0, 4, 2\)", rows=range(0, 4, 2))
    refuses(r"kv must be \[4 or 2, 2, 64\].*got \[3, 2, 64\]", kv=step.kv[:3])
    refuses(r"kv must be \[4 or 2, 2, 64\].*got \[4, 2, 48\]", kv=step.kv[..., :48])
    refuses(r"slots must be \[2, 2\], got \[1, 2\]", slots=step.slots[:1])


@WAYS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_given_cosines_and_sines(way, layout, device):
    """Those of other positions rotate as the positions themselves do, whatever the step's positions are."""
    config, weights = stages(16, layout=layout, rotary=12, device=device)
    step = Step(3, 2, 16, dtype=torch.float32, device=device)
    other = torch.randint(0, 50, step.positions.shape, device=device)
    by_position, by_angle = (pool("fp32", 2, 16, device) for _ in range(2))
    expected = way(step.q, other, step.new(by_position), config, weights, 2)
    message = way(step.q, step.positions, step.new(by_angle), config, weights, 2, config.rope.cos_sin(other))
    real = ~step.padding[:, None, :, None].expand(4, 3, 2, 16)
    mine, theirs = (message_to_heads(each, step, 2)[real] for each in (message, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    for x, y in zip(memory(by_angle), memory(by_position), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6, equal_nan=True)
