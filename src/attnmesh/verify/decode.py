"""Decode against float64: what `attnmesh verify` checks of token generation on one device (and see `verify_cache`).

Whatever a call has no business with is poisoned: keys past a sequence's end and before its window, blocks that are
nobody's, the queries of a skipped sequence. A quantized cache is compared with what it stands for. Where results must
not depend on something at all, they are compared bit by bit: such a result has no plain computation, and a bound of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmesh.core.state import State
from attnmesh.ops.decode import api, reference
from attnmesh.ops.decode.call import build_call
from attnmesh.ops.storage import PLAIN, Quantized, Stored, dequantize, quantize
from attnmesh.verify.mode import Compared, ComparedMode

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
BLOCK_SIZE, CAPACITY = 16, 304
POSITIONS = (2, 299, 130)  # the first is shorter than four new tokens: some of its rows see nothing
SPLIT = 64

_NOBODYS = (-1, 2**31 - 1)  # what table entries hold that nobody reads
_OPTIONS: dict[str, Any] = dict.fromkeys(
    ("cur_pos", "mask", "tree", "scale", "window", "sinks", "max_splits", "split_size")
) | {"share_cache": False}


def decode_modes(device: str) -> list[ComparedMode]:
    """Every mode of decode that exists on this device."""
    fused = "cpu" if device == "cpu" else "triton"
    cases = [*_plain_cases("auto", (4,)), *_plain_cases(fused, (1, 4)), *_option_cases(fused)]
    calls = [ComparedMode(case.name, case.shape, partial(_decoded, case)) for case in cases]
    fixed = [_Case(fused, paged, torch.bfloat16, 1, "split_size same bits", split=SPLIT) for paged in (False, True)]
    steady = [ComparedMode(case.name, case.shape, partial(_alone_and_together, case)) for case in fixed]
    return [*calls, *steady]


@dataclass(frozen=True)
class _Case:
    """A decode call in words."""

    backend: str
    paged: bool
    dtype: torch.dtype
    tokens: int
    how: str = ""
    storage: str = "plain"
    dims: tuple[int, int] = (HEAD_DIM, HEAD_DIM)
    window: int | None = None
    split: int | None = None

    @property
    def name(self) -> str:
        return f"decode {self.backend} {'paged' if self.paged else 'contiguous'} {self.how or f'T={self.tokens}'}"

    @property
    def shape(self) -> str:
        return shape_of(len(POSITIONS), self.tokens, CAPACITY, self.dims, self.dtype)


def _plain_cases(backend: str, counts: tuple[int, ...]) -> Iterator[_Case]:
    for paged, tokens, dtype in product((False, True), counts, (torch.float32, torch.bfloat16)):
        yield _Case(backend, paged, dtype, tokens)


def _option_cases(backend: str) -> Iterator[_Case]:
    """Every option over both kinds of cache, in one precision there and in the other here."""
    fp32, bf16 = torch.float32, torch.bfloat16
    for paged, (dtype, other) in ((False, (fp32, bf16)), (True, (bf16, fp32))):
        case = partial(_Case, backend, paged)
        yield case(dtype, 4, "window", window=37)
        yield case(other, 1, "sinks")
        yield case(dtype, 4, "boolean mask")
        yield case(other, 4, "additive mask")
        yield case(dtype, 4, "tree")
        yield case(other, 4, "share_cache")
        yield case(dtype, 1, "skipped sequence")
        yield case(other, 4, "split_size", split=SPLIT)
        yield case(dtype, 1, "Dv != D", dims=(48, 32))
    yield _Case(backend, True, bf16, 1, "v in k", dims=(48, 32))
    for storage in ("fp8", "int8", "bfp8"):
        yield _Case(backend, True, bf16, 1, storage, storage)
        yield _Case(backend, False, fp32, 4, f"{storage} window", storage, window=37)


class _Problem(NamedTuple):
    """A call's arguments, poisoned, and q, k and v in the clear."""

    q: Tensor
    k: Stored
    v: Stored
    table: Tensor | None
    options: dict[str, Any]
    clear: tuple[Tensor, Tensor, Tensor]

    def decoded(self, backend: str) -> State:
        """Out and lse through the front door."""
        if self.table is None:
            return State(*api.decode_attention(self.q, self.k, self.v, **self.options, backend=backend))
        return State(*api.paged_decode_attention(self.q, self.k, self.v, self.table, **self.options, backend=backend))


def _decoded(case: _Case, seed: int, device: str) -> list[Compared]:
    problem = _drawn(case, seed, device)
    return by_definition(problem.decoded(case.backend), *problem.clear, **problem.options)


def _alone_and_together(case: _Case, seed: int, device: str) -> list[Compared]:
    """With splits of a fixed size, a sequence by itself has the bits it has in a batch."""
    problem = _drawn(case, seed, device)
    together = problem.decoded(case.backend)
    results = []
    for i in range(len(POSITIONS)):
        one = slice(i, i + 1)
        own = problem._replace(q=problem.q[one], options=problem.options | {"cur_pos": problem.options["cur_pos"][one]})
        if problem.table is None:
            assert isinstance(problem.k, Tensor)
            assert isinstance(problem.v, Tensor)
            own = own._replace(k=problem.k[one], v=problem.v[one])
        else:
            own = own._replace(table=problem.table[one])
        alone = own.decoded(case.backend)
        results.append(Compared("out bits", together.out[one], alone.out))
        results.append(Compared("lse bits", together.lse[one], alone.lse))
    return results


def by_definition(found: State, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> list[Compared]:
    """Beside float64 and the plain computation in the dtype of q, over caches in the clear [B or 1, Hkv, L, D]."""
    options = _OPTIONS | {name: value for name, value in options.items() if name in _OPTIONS}
    mask = options["mask"]
    if mask is not None and mask.is_floating_point():
        options["mask"] = torch.where(mask.isnan(), 0.0, mask)
    dtype = q.dtype
    exact = reference.run(build_call(q.double(), k.double(), v.double(), None, **options))
    plain = reference.run(build_call(q, k.to(dtype), v.to(dtype), None, **options), plain=True)
    return [Compared("out", found.out, exact.out, plain.out), Compared("lse", found.lse, exact.lse, plain.lse)]


def _drawn(case: _Case, seed: int, device: str) -> _Problem:
    dice = torch.Generator().manual_seed(seed)
    dim, value_dim = case.dims
    positions = [-1 if case.how == "skipped sequence" and i == 2 else at for i, at in enumerate(POSITIONS)]
    shared = case.how == "share_cache"
    batch, owners = len(positions), 1 if shared else len(positions)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=dice)

    def stored(x: Tensor) -> Stored:
        return x.to(case.dtype) if case.storage == "plain" else quantize(x, case.storage)

    k = stored(normal(owners, KV_HEADS, CAPACITY, dim))
    inside = case.how == "v in k"  # the values are the keys' first columns, in the same memory
    v = _columns(k, value_dim) if inside else stored(normal(owners, KV_HEADS, CAPACITY, value_dim))
    q = normal(batch, HEADS, case.tokens, dim).to(case.dtype)
    clear = (q, dequantize(k, torch.float64), dequantize(v, torch.float64))
    q = torch.where(torch.tensor(positions).view(-1, 1, 1, 1) < 0, torch.nan, q)

    live = _live(positions, case, shared)
    table, k = _placed(k, live, case.paged, dice)
    if inside:
        v = _columns(k, value_dim)
    else:
        _, v = _placed(v, live, case.paged, dice, table)
    options = {"cur_pos": torch.tensor(positions, dtype=torch.int32).to(device), "return_lse": True}
    options |= {"window": case.window, "split_size": case.split, "share_cache": shared}
    options |= {name: x.to(device) for name, x in _sight(case, positions, dice).items()}
    where = None if table is None else table.to(device)
    at_home = [x.to(device) for x in clear]
    k = each(lambda x: x.to(device), k)
    v = _columns(k, value_dim) if inside else each(lambda x: x.to(device), v)
    return _Problem(q.to(device), k, v, where, options, (at_home[0], at_home[1], at_home[2]))


def _sight(case: _Case, positions: list[int], dice: torch.Generator) -> dict[str, Tensor]:
    """The options that say who sees whom, and sinks."""
    shape = (len(positions), HEADS, case.tokens, CAPACITY)
    seen = torch.rand(shape, generator=dice) < 0.7
    seen[1, 0, 0] = False  # a row that sees nothing
    if case.how == "boolean mask":
        return {"mask": seen}
    if case.how == "additive mask":
        past = torch.arange(CAPACITY) > torch.tensor(positions)[:, None, None, None]
        added = torch.where(seen, torch.randn(shape, generator=dice), -torch.inf)
        return {"mask": torch.where(past, torch.nan, added)}
    if case.how == "tree":
        return {"tree": seen[:, 1, :, : case.tokens]}
    return {"sinks": torch.randn(HEADS, generator=dice)} if case.how == "sinks" else {}


def _live(positions: list[int], case: _Case, shared: bool) -> Tensor:
    """What sequences may read, [owners, CAPACITY]; of what a window has left behind, only whole blocks are poisoned."""
    keys, last = torch.arange(CAPACITY), torch.tensor(positions)[:, None]
    live = keys <= last
    if case.window is not None:
        step = BLOCK_SIZE if case.paged else 1
        live &= keys >= (last - case.tokens + 2 - case.window).clamp(min=0) // step * step
    return live.any(0, keepdim=True) if shared else live


def _placed(
    cache: Stored, live: Tensor, paged: bool, dice: torch.Generator, table: Tensor | None = None
) -> tuple[Tensor | None, Stored]:
    """A cache [owners, Hkv, L, D] with only what is live in it, or a pool of it in random order and its table."""
    used = live.unflatten(1, (-1, BLOCK_SIZE)).any(-1)
    blocks = int(used.sum()) + 3  # three are nobody's
    if paged and table is None:
        table = torch.tensor(_NOBODYS, dtype=torch.int32)[torch.arange(used.numel()) % 2].view(used.shape)
        table[used] = torch.randperm(blocks, generator=dice)[: blocks - 3].int()

    def one(x: Tensor) -> Tensor:
        bits = x.view(torch.int8) if x.itemsize == 1 else x
        shown = live.view(live.shape[0], 1, -1, *[1] * (x.ndim - 3))
        bits = torch.where(shown, bits, poison(bits.dtype))
        if table is not None:
            rows = bits.unflatten(2, (-1, BLOCK_SIZE)).transpose(1, 2).transpose(2, 3)[used]
            bits = torch.full((blocks, *rows.shape[1:]), poison(bits.dtype), dtype=bits.dtype)
            bits[table[used].long()] = rows
        return bits.contiguous().view(x.dtype)

    return table, each(one, cache)


def poison(dtype: torch.dtype) -> float:
    """NaN; in a byte 127, which is fp8's NaN, the largest int8, and as a power of two beyond everything."""
    return 127 if dtype.itemsize == 1 else torch.nan


def fill_with_poison(pool: Stored) -> None:
    """What nobody writes will show if it is read."""
    if isinstance(pool, Quantized) and pool.storage == "fp8":
        pool = pool.values.view(torch.int8)  # as bytes, which can be filled on every device
    each(lambda x: x.fill_(poison(x.dtype)), pool)


def each(change: Callable[[Tensor], Tensor], cache: Stored) -> Stored:
    """A change of the values and, unless they are fp8's, of the scales; those only follow to another device."""
    if isinstance(cache, Tensor):
        return change(cache)
    values = change(cache.values)
    return Quantized(values, cache.scales.to(values.device) if cache.storage == "fp8" else change(cache.scales))


def _columns(cache: Stored, count: int) -> Stored:
    assert isinstance(cache, Tensor)
    return cache[..., :count]


def shape_of(batch: int, tokens: int, length: int, dims: tuple[int, int], dtype: torch.dtype) -> str:
    """The problem in words: tokens:keys where other modes have the length, D/Dv where the two differ."""
    name = next(name for name, plain in PLAIN.items() if plain == dtype)
    width = f"{dims[0]}" if dims[0] == dims[1] else f"{dims[0]}/{dims[1]}"
    return f"{batch}x{HEADS}/{KV_HEADS}x{tokens}:{length}x{width} {name}"
