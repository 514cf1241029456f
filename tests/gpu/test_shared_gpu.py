"""Processes that share one GPU, which interrupts their kernels in turn: each kernel ends, with its results as alone.

What a kernel leaves undefined in shared memory may go well until the GPU saves and restores a program, as for a second
process, a debugger or a display.
"""

import faulthandler
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh.testing.decode import random_decode
from helpers.chosen_keys import ChosenKeys, random_lengths
from helpers.processes import run_processes

PROCESSES, SECONDS = 3, 8.0
_LIMIT = 280  # seconds, of which the first rank compiles most
Call = Callable[[], tuple[Tensor, ...]]


def training(length: int, heads: tuple[int, int], widths: tuple[int, int]) -> Call:
    shapes = ((heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1]))
    q, k, v = (torch.randn(1, h, length, d, device="cuda").bfloat16().requires_grad_() for h, d in shapes)
    grad = torch.randn(1, heads[0], length, widths[1], device="cuda").bfloat16()
    lengths = [int(n) + 1 for n in random_lengths(40, length // 45)]
    mask = am.Documents([*lengths, length - sum(lengths)]) & am.Causal()

    def call() -> tuple[Tensor, ...]:
        out = am.attention(q, k, v, mask=mask)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)

    return call


def sparse(rows: int, keys: int, heads: int, topk: int, *, deterministic: bool) -> Call:
    case = ChosenKeys.draw(rows, keys, heads, 576, 512, topk, device="cuda", dtype=torch.bfloat16)
    q, kv = (x.detach().requires_grad_() for x in (case.q, case.kv))
    grad = torch.randn(rows, heads, 512, device="cuda").bfloat16()
    mask = am.SparseMask(topk_length=case.lengths)

    def call() -> tuple[Tensor, ...]:
        how = {"scale": case.scale, "mask": mask}
        out, lse = am.sparse_attention(q, kv, case.indices, d_v=512, deterministic=deterministic, **how)
        p = am.attention_distribution(q.detach(), kv.detach(), case.indices, lse.detach(), **how)
        return out.detach(), lse.detach(), p, *torch.autograd.grad(out, (q, kv), grad)

    return call


def topk(rows: int, keys: int) -> Call:
    iq, ik = torch.randn(rows, 64, 128, device="cuda").bfloat16(), torch.randn(keys, 128, device="cuda").bfloat16()
    w, mask = torch.rand(rows, 64, device="cuda"), am.SparseMask(causal=True, q_start=keys - rows)
    return lambda: (am.indexer_topk(iq, ik, w, 2048, scale=0.01, mask=mask).scores.sort().values,)


def decode(sequences: int, longest: int, **how: object) -> Call:
    positions = (random_lengths(sequences, longest) - 1).tolist()
    how = {"block_size": 64, "dtype": torch.bfloat16, "at": "int32", "device": "cuda"} | how
    problem = random_decode(positions, **how)
    return lambda: tuple(problem.run("auto"))


MLA = {"kv_heads": 1, "dims": (576, 512), "v_in_k": True}
CALLS: dict[str, Callable[[], Call]] = {
    "D 128": lambda: training(32768, (16, 4), (128, 128)),
    "D 64": lambda: training(16384, (16, 4), (64, 64)),
    "D 192/128": lambda: training(8192, (16, 16), (192, 128)),
    "D 256": lambda: training(8192, (8, 4), (256, 256)),
    "sparse": lambda: sparse(1500, 4000, 64, 512, deterministic=False),
    "sparse, 128 heads": lambda: sparse(800, 4000, 128, 512, deterministic=True),
    "top-k": lambda: topk(2048, 8192),
    "GQA": lambda: decode(300, 1200, group=64, kv_heads=2, dims=(128, 128)),
    "MLA": lambda: decode(300, 1200, group=128, **MLA),
    "MLA, 16 heads": lambda: decode(300, 1200, group=16, **MLA),
    "MLA in fp8": lambda: decode(300, 1200, group=128, **MLA | {"storage": "fp8_ds_mla"}),
}  # fmt: skip


def differences(found: tuple[Tensor, ...], alone: tuple[Tensor, ...]) -> Iterator[float]:
    """The largest differences, relative to the largest number: sums by atomics come in any order."""
    for x, y in zip(found, alone, strict=True):
        x, y = (each.double().nan_to_num(neginf=-100.0) for each in (x, y))
        yield float((x - y).abs().max() / y.abs().max().clamp(min=1e-6))


def repeat_among_others(comm: am.comm.Comm, seconds: float) -> dict[str, int]:
    """How often each call has run while other processes used the GPU, too; its results are those it has alone."""
    torch.manual_seed(comm.rank)
    comm.timeout = 180  # the first rank compiles
    faulthandler.dump_traceback_later(_LIMIT - 20, exit=True)  # where a stuck rank is; what it ran is printed last
    calls = {name: make() for name, make in CALLS.items()}  # every rank at once: this takes time on the CPU
    alone = {}
    for rank in range(comm.world):
        if rank == comm.rank:
            for name, call in calls.items():
                say(comm, "first", name)
                alone[name] = call()
                torch.cuda.synchronize()
        comm.barrier()
    counts, names = dict.fromkeys(calls, 0), list(calls)
    names = names[comm.rank * 4 :] + names[: comm.rank * 4]  # not the same at the same time
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name in names:
            say(comm, f"round {counts[name]}", name)
            for _ in range(5):
                found = calls[name]()
            worst = max(differences(found, alone[name]))
            assert worst < 0.02, f"{name} differs by {worst} from what it is alone, in round {counts[name]}"
            counts[name] += 1
    comm.barrier()
    faulthandler.cancel_dump_traceback_later()
    return counts


def say(comm: am.comm.Comm, *words: str) -> None:
    """Tells what a rank is about to run: pytest shows it if the test fails."""
    print(f"{time.monotonic():.1f} rank {comm.rank}:", *words, file=sys.stderr, flush=True)


@pytest.mark.cuda
@pytest.mark.exclusive
@pytest.mark.gpu_memory(30)
@pytest.mark.timeout(_LIMIT + 20)
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9, reason="kernels of Hopper"
)
def test_kernels_end_among_other_processes():
    """Every rank runs every call at least twice."""
    found = run_processes(PROCESSES, repeat_among_others, SECONDS, timeout=_LIMIT, backend="gloo")
    assert all(count >= 2 for counts in found for count in counts.values()), found
