"""The Hopper kernel of sparse decode over fp8_ds_mla against float64: emulated, and on a Hopper GPU."""

from dataclasses import replace

import pytest
import torch
from test_paged_sparse_decode import Case, random_case, run_unpoisoned

from attnmesh.decode import check_decode_errors
from attnmesh.ops.sparse import decode_kernels, gluon_decode, triton_decode
from attnmesh.ops.storage import Quantized
from attnmesh.sparse import paged_sparse_decode_attention
from helpers.cases import first, sweep
from helpers.gluon import emulated

LOCATE = triton_decode.locate
WIDTHS = {"dim": 576, "storage": "fp8_ds_mla"}
CASES = {
    "one tile": {"heads": 5, "topk": 40, "lengths": (50, 0, 9)},
    "several tiles, two tiles of heads": {
        "heads": 70,
        "topk": 200,
        "lengths": (300, 90, 260),
        "counts": True,
        "seed": 1,
    },
    "slots and sinks": {"heads": 64, "topk": 130, "lengths": (150, 70), "slots": True, "sinks": True, "seed": 3},
    "one index": {"heads": 1, "topk": 1, "lengths": (1,), "tokens": 1},
}


def by_gluon(monkeypatch: pytest.MonkeyPatch, seed: int = 0, planted: tuple[str, str] | None = None) -> None:
    """Let the emulated kernel attend. It starts early: slots are there only once it has waited for them."""
    kernel = emulated(gluon_decode, seed, planted)

    def locate(*args):
        results = LOCATE(*args)
        located = [x.clone() for x in results]
        for x in results:
            x.zero_()
        kernel.gdc_wait = lambda: [x.copy_(y) for x, y in zip(results, located, strict=True)]
        return results

    monkeypatch.setattr(decode_kernels, "gluon_decode", kernel)
    monkeypatch.setattr(triton_decode, "locate", locate)
    monkeypatch.setattr(decode_kernels, "fastest_way", lambda call, backend: decode_kernels.Way.GLUON)


@pytest.mark.parametrize("seeds", [range(1), sweep(range(1, 4))], ids=["one", "many"])
@pytest.mark.parametrize("name", first(2, CASES))
def test_under_hostile_schedules(name, seeds, monkeypatch):
    for seed in seeds:
        by_gluon(monkeypatch, seed)
        case = random_case(dtype=torch.float16, **WIDTHS | CASES[name])
        replace(case, scale=0.6 if seed % 2 else case.scale).check("triton")


@pytest.mark.parametrize("split_size", [64, sweep(70)])
def test_splits(split_size, monkeypatch):
    by_gluon(monkeypatch)
    case = random_case(
        (150, 0, 90), heads=9, topk=140, tokens=1, sinks=True, counts=True, dtype=torch.float16, **WIDTHS
    )
    case.check("triton", split_size=split_size)
    case.check("triton", split_size=split_size, out_dtype=torch.float32)


@pytest.mark.parametrize("split_size", [None, sweep(32)])
def test_faults(split_size, monkeypatch):
    by_gluon(monkeypatch)
    case = random_case((40, 30), topk=50, dtype=torch.float16, sinks=True, **WIDTHS)
    case.table[1, 0] = 10**6
    out, lse, top = run_unpoisoned(case, "triton", **({} if split_size is None else {"split_size": split_size}))
    with pytest.raises(ValueError, match="is 1000000, outside the pool"):
        check_decode_errors()
    for x in (out, lse, top):
        assert x[1].isnan().all()
        assert not x[0].isnan().any()


PLANTED = {
    "scales are read before they arrive": ("mbarrier.wait(barriers.scales_ready.index(stage), turn)", "pass"),
    "queries are overwritten too soon": ("mbarrier.wait(barriers.q_free.index(0), (served & 1) ^ 1)", "pass"),
    "weights are not fenced": (
        "to(memory.tail.dtype))\n    fence_async_shared()", "to(memory.tail.dtype))",
    ),
    "scales of the tile after": ("scales.index(stage).slice", "scales.index(1 - stage).slice"),
    "sums are not rescaled": ("rescale.index(stage).load(down)", "rescale.index(stage).load(down) * 0 + 1"),
    "slots are read before they are located": ("gdc_wait()  # for", "pass  # for"),
}  # fmt: skip


@pytest.mark.parametrize("fault", first(1, PLANTED))
def test_the_emulation_finds_planted_faults(fault, monkeypatch):
    case = random_case((300, 40, 9), heads=16, topk=260, tokens=3, dtype=torch.float16, **WIDTHS)
    if "rescaled" in fault:
        case = replace(case, scale=0.6)  # the largest score grows from tile to tile
    case.indices[:, 1:, 20:] = -1  # a long item each for three programs, and short ones that come soon after

    def many_times():  # a race is lost sooner or later
        for seed in range(12):
            by_gluon(monkeypatch, seed, PLANTED[fault])
            case.check("triton")

    with pytest.raises(AssertionError):
        many_times()


NO_HOPPER = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9
ON_HOPPER = {
    "one sequence": {"heads": 128, "topk": 2048, "lengths": (3000,), "tokens": 1},
    "a batch": {"heads": 128, "topk": 1000, "lengths": (1500, 0, 90, 1024), "tokens": 2, "counts": True, "seed": 1},
    "slots and sinks": {"heads": 70, "topk": 130, "lengths": (150, 70), "slots": True, "sinks": True, "seed": 3},
    "few heads": {"heads": 5, "topk": 333, "lengths": (700, 700), "sinks": True},
}


@pytest.mark.cuda
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("name", ON_HOPPER)
def test_on_hopper(name):
    case = random_case(dtype=torch.bfloat16, **WIDTHS | ON_HOPPER[name])
    for how in ({}, {"split_size": 128}, {"out_dtype": torch.float32}):
        case.check("gluon", **how)


@pytest.mark.cuda
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
def test_the_same_bits_again_and_again_on_hopper():
    """A result that moves is a race: more items than the GPU has processors, many times."""
    case: Case = random_case((900,) * 80, heads=128, topk=800, tokens=2, dtype=torch.bfloat16, **WIDTHS)
    first = run_unpoisoned(case, "gluon")
    for _ in range(20):
        assert all(torch.equal(x, y) for x, y in zip(run_unpoisoned(case, "gluon"), first, strict=True))


@pytest.mark.cuda
@pytest.mark.gpu_memory(gib=40)
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("gib", [32, 33])
def test_the_end_of_a_pool_of_32_gib_on_hopper(gib):
    """Gluon serves up to 32 GiB and Triton larger pools: both reach the last block."""
    case = random_case((300, 90), heads=128, topk=130, dtype=torch.bfloat16, **WIDTHS)
    blocks, size, *_ = case.pool.values.shape
    memory = torch.empty(gib * 2**30 // (656 * size) - 1, size * 656, dtype=torch.uint8, device="cuda")
    first = len(memory) - blocks

    def at_the_end(part, begin, count):
        """A view of all blocks, FlashMLA's 656 bytes per token, whose last blocks have the contents of `part`."""
        bytes_ = memory.view(len(memory), size, 1, 656)[..., begin : begin + count].view(part.dtype)
        bytes_[first:].copy_(part)
        return bytes_

    pool = Quantized(
        at_the_end(case.pool.values, 0, 512),
        at_the_end(case.pool.scales, 512, 16),
        at_the_end(case.pool.rope, 528, 128),
    )
    assert gluon_decode.supports(case.q.cuda(), pool, 512) == (gib == 32)
    table = torch.where(case.table < 0, case.table, case.table + first).cuda()
    out, lse, _ = paged_sparse_decode_attention(
        case.q.cuda(), pool, table, case.indices.cuda(), scale=case.scale, return_max_logits=True
    )
    for actual, exact in zip((out, lse), case.exact(), strict=False):
        torch.testing.assert_close(actual.cpu().double(), exact, rtol=1e-2, atol=1e-2)
