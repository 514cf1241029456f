"""What tests of decode share: calls drawn at random, poisoned wherever nobody may look, and the rule answers obey.

Every cache drawn here is written in the clear first, which is what float64 results are computed from. Then all that a
kernel has no business with is poisoned: positions past a sequence's end (the tail of its last block among them), blocks
that a window has left behind, keys outside all tokens' intervals, blocks nobody owns, the memory around a view, the
queries of a skipped sequence, an additive mask past the end. Table entries that nobody reads hold -1 or numbers far
outside the pool.

An answer's error against float64 is at most twice that of the plain computation in the dtype of q, and no row is more
than four times as bad as the plain computation's worst; lse is right to a few units of float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attending import FLOOR
from attnmesh import decode_attention, paged_decode_attention
from attnmesh.core.state import State
from attnmesh.ops.decode import reference
from attnmesh.ops.decode.call import build_call
from attnmesh.ops.storage import Quantized, Stored, dequantize, quantize

CUDA = torch.cuda.is_available()
BACKENDS = ("cpu", "triton")
LSE_UNITS = 16  # of float32, relative to max(1, |lse|)
GARBAGE = (-1, 2**31 - 1, -1, -(2**31))  # what table entries hold that nobody reads

# How a mask may be broadcast: the letters of the dimensions that it has in full.
MASK_SHAPES = ("", "b", "h", "t", "bh", "bt", "ht", "bht")
STORAGES = ("plain", "fp8", "fp8 heads", "int8", "bfp8")


def home(backend: str) -> torch.device:
    """Where a backend computes."""
    return torch.device("cuda" if backend == "triton" and CUDA else "cpu")


def spoken(backend: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype, or float16 for bfloat16 in Triton's interpreter, whose bfloat16 products are wrong."""
    return torch.float16 if backend == "triton" and not CUDA and dtype == torch.bfloat16 else dtype


def slow(backend: str) -> bool:
    """Whether a call takes a tenth of a second and more: in Triton's interpreter."""
    return backend == "triton" and not CUDA


def made(backend: str, positions: Sequence[int], **how: object) -> Problem:
    """A call for a backend, where it computes; for the interpreter of one kv head, unless told otherwise."""
    how = {"dtype": torch.float16, "kv_heads": 1 if slow(backend) else 2} | how
    how["dtype"] = spoken(backend, how["dtype"])
    return drawn(positions, device=home(backend), **how)


@dataclass(frozen=True)
class Problem:
    """One decode call: its arguments, poisoned, and the caches [B or 1, Hkv, capacity, D] in the clear, in float64."""

    q: Tensor
    k: Stored
    v: Stored
    table: Tensor | None
    options: dict
    clear: tuple[Tensor, Tensor]

    def run(self, backend: str, **more: object) -> State:
        """Out and lse, through the front door."""
        return State(*self.attend(backend, return_lse=True, **more))

    def attend(self, backend: str, **more: object) -> Tensor | tuple[Tensor, Tensor]:
        how = {**self.options, **more, "backend": backend}
        if self.table is None:
            return decode_attention(self.q, self.k, self.v, **how)
        return paged_decode_attention(self.q, self.k, self.v, self.table, **how)

    def call(self):
        """As a value."""
        return build_call(self.q, self.k, self.v, self.table, **_FULL | self.options)

    def exact(self) -> State:
        """In float64, from the clear."""
        return self._by_definition(torch.float64)

    def plain(self) -> State:
        """As simply as can be in the dtype of q, from the clear."""
        return self._by_definition(self.q.dtype, plain=True)

    def _by_definition(self, dtype: torch.dtype, *, plain: bool = False) -> State:
        options = _FULL | self.options
        if dtype == torch.float64:
            options["out_dtype"] = None
        if options["cur_pos"] is None:
            options["cur_pos"] = [self.clear[0].shape[2] - 1] * self.q.shape[0]
        mask = options["mask"]
        if mask is not None and mask.dtype != torch.bool:
            options["mask"] = torch.where(mask.isnan(), 0.0, mask).double()
        q = torch.where(self.q.isnan(), 0.0, self.q).to(dtype)
        return reference.run(build_call(q, *(x.to(dtype) for x in self.clear), None, **options), plain=plain)

    def but(self, **options: object) -> Problem:
        """The same with other options."""
        return replace(self, options=self.options | options)


_NONE = ("cur_pos", "mask", "tree", "scale", "window", "sinks", "max_splits", "split_size")
_FULL = dict.fromkeys(_NONE) | {"share_cache": False}


def assert_right(found: State, problem: Problem) -> None:
    """The whole answer obeys the rule, and so does each of its rows."""
    exact, plain, q = problem.exact(), problem.plain(), problem.q
    assert found.out.dtype == (problem.options.get("out_dtype") or q.dtype)
    assert found.lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    assert found.out.shape == exact.out.shape
    assert found.lse.shape == exact.lse.shape
    assert torch.equal(found.lse.isneginf(), exact.lse.isneginf()), _where(found.lse.isneginf() != exact.lse.isneginf())
    assert found.out.isfinite().all(), _where(~found.out.isfinite().all(-1))
    assert not found.out[exact.lse.isneginf()].any(), "a row that sees nothing is not 0"
    if not found.out.numel():
        return

    seen = ~exact.lse.isneginf()
    off = (found.lse.double() - exact.lse).abs().where(seen, 0.0)
    unit = 1e-13 if q.dtype == torch.float64 else LSE_UNITS * torch.finfo(torch.float32).eps
    bad = off > unit * exact.lse.abs().clamp(min=1).where(seen, 1.0)
    assert not bad.any(), f"lse is off by {off.max():.2e} {_where(bad)}"

    floor, one = FLOOR[q.dtype], found.out.shape[-1] ** 0.5
    size = exact.out.norm(dim=-1)
    error, allowed = ((x.out.double() - exact.out).norm(dim=-1) for x in (found, plain))
    bound = 4 * allowed.max() + 4 * floor * (size.max() + one)
    assert error.max() <= bound, f"out is off by {error.max():.2e} > {bound:.2e} {_where(error > bound)}"
    bound = 2 * allowed.norm() + floor * (size.norm() + one)
    assert error.norm() <= bound, f"out is off by {error.norm():.2e} > {bound:.2e} in all, of {size.norm():.2e}"


def check(problem: Problem, backend: str, **more: object) -> State:
    """The answer of a backend, which must be right."""
    found = problem.run(backend, **more)
    assert_right(found, problem.but(**more))
    return found


def _where(bad: Tensor) -> str:
    return f"at (sequence, head, token) {bad.nonzero()[:4].tolist()}"


# Drawing a call.


def drawn(
    positions: Sequence[int],
    *,
    tokens: int = 1,
    group: int = 2,
    kv_heads: int = 2,
    dims: tuple[int, int] = (32, 32),
    v_in_k: bool = False,
    block_size: int | None = None,
    capacity: int | None = None,
    storage: str = "plain",
    dtype: torch.dtype = torch.float32,
    share: str | None = None,
    memory: str = "own",
    q_memory: str = "transposed",
    key_range: str = "causal",
    window: int | None = None,
    sinks: bool = False,
    at: str | None = "list",
    device: torch.device | str = "cpu",
    seed: int = 0,
    **options: object,
) -> Problem:
    """A call at random.

    `block_size` asks for pools; `capacity` is then in tokens all the same. `share`: "cache" is share_cache, "blocks"
    lets the sequences' tables name the same blocks at their beginning. `v_in_k`: v is the first columns of k's memory.
    `memory` is how caches lie: "own", "token major" (not of pools), "layer" or "layer inside" of a larger one.
    `key_range`: "causal", "tree", "trees" (one a sequence), "intervals", or a mask: "bool bht", "added h", ... with
    " short" for one that ends before the cache does. `at` is how cur_pos is given: "list", "int32", "int64", or None
    for the default.
    """
    dice = torch.Generator().manual_seed(seed)
    batch = len(positions)
    step = block_size or 1
    capacity = max([-(-(at + 1) // step) * step for at in positions] + [step]) if capacity is None else capacity
    capacity = -(-capacity // step) * step
    owners = 1 if share == "cache" else batch

    # In the clear.
    k = _normal(dice, owners, kv_heads, capacity, dims[0])
    v = k[..., : dims[1]] if v_in_k else _normal(dice, owners, kv_heads, capacity, dims[1])
    live = _live(positions, tokens, capacity, window, step)  # [B, capacity]
    if key_range == "intervals":
        first, end = intervals(positions, tokens, seed)
        live &= (torch.arange(capacity) >= first[:, :1]) & (torch.arange(capacity) < end[:, -1:])
        options["key_range"] = (first.to(device), end.long().to(device))
    if share == "cache":
        live = live.any(0, keepdim=True)
    common = 0
    if share == "blocks" and batch > 1:
        assert block_size, "only pools have blocks to share"
        common = max(1, max(positions) // step // 2 + 1) * step  # of sequences of different lengths: one's tail too
        k[1:, :, :common], v[1:, :, :common] = k[:1, :, :common].clone(), v[:1, :, :common].clone()
        live[:, :common] = live[:, :common].any(0)
    k_stored = _stored(k, storage, dtype)
    v_stored = _columns(k_stored, dims[1]) if v_in_k else _stored(v, storage, dtype)
    clear = tuple(dequantize(x, torch.float64).to(device) for x in (k_stored, v_stored))

    # As it lies in memory: only what is live, poison everywhere else.
    table = None
    if block_size:
        table, blocks = _table(live, block_size, common, dice)
        where = (table, blocks, block_size)
    else:
        where = None
    k_stored = _placed(k_stored, live, where, memory, device)
    v_stored = _columns(k_stored, dims[1]) if v_in_k else _placed(v_stored, live, where, memory, device)

    q = _normal(dice, batch, group * kv_heads, tokens, dims[0]).to(dtype)
    for sequence, last in enumerate(positions):
        if last < 0:
            q[sequence] = torch.nan
    q = _view(q.to(device), q_memory)

    if key_range != "intervals":
        options |= _sight(key_range, positions, q.shape, capacity, dtype, dice, device)
    if window is not None:
        options["window"] = window
    if sinks:
        options["sinks"] = (2 * _normal(dice, group * kv_heads)).to(dtype if seed % 2 else torch.float32).to(device)
    if share == "cache":
        options["share_cache"] = True
    if at is not None:
        whole = torch.tensor(list(positions), dtype=torch.int64 if at == "int64" else torch.int32, device=device)
        options["cur_pos"] = list(positions) if at == "list" else whole
    return Problem(q, k_stored, v_stored, None if table is None else table.to(device), options, clear)


def _normal(dice: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=dice, dtype=torch.float64)


def _live(positions: Sequence[int], tokens: int, capacity: int, window: int | None, step: int) -> Tensor:
    """What each sequence may read; of what a window has left behind, only whole blocks are out of bounds."""
    keys, last = torch.arange(capacity), torch.tensor(list(positions), dtype=torch.int64)[:, None]
    live = keys <= last
    if window is not None:
        first = (last - tokens + 1 - window + 1).clamp(min=0)
        live &= keys >= first // step * step
    return live


def intervals(positions: Sequence[int], tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """First and end of what each token sees, [B, T], at random: some empty, some past either end, no gaps between."""
    dice = torch.Generator().manual_seed(seed)
    first, end = torch.zeros(2, len(positions), tokens, dtype=torch.int32)
    for b, last in enumerate(positions):
        one, other = torch.randint(-1, last + 3, (2, tokens), generator=dice).sort(1).values.tolist()
        for t in range(tokens):
            end[b, t] = other[t]
            first[b, t] = one[t] if t == 0 else min(one[t], max(other[t - 1], one[0]))
    return first, end


def _stored(x: Tensor, storage: str, dtype: torch.dtype) -> Stored:
    if storage == "plain":
        return x.to(dtype)
    if storage == "fp8 heads":  # far apart: the scale of another head is far off
        scale = x.abs().amax().float() / 448 * 1.5 ** torch.arange(x.shape[1])
        return quantize(x, "fp8", scale=scale.float())
    return quantize(x, storage)


def _columns(stored: Stored, count: int) -> Stored:
    """The first columns, in the same memory."""
    if isinstance(stored, Tensor):
        return stored[..., :count]
    scales = stored.scales[..., : count // 16] if stored.storage == "bfp8" else stored.scales
    return Quantized(stored.values[..., :count], scales)


def _table(live: Tensor, block_size: int, common: int, dice: torch.Generator) -> tuple[Tensor, int]:
    """Shuffled blocks for the slots with something live in them, and how many blocks there are: some are nobody's."""
    used = live.unflatten(1, (-1, block_size)).any(-1)
    owned, shared = used.clone(), common // block_size
    owned[1:, :shared] = False
    blocks = int(owned.sum()) + 3
    order = torch.randperm(blocks, generator=dice).int()
    table = torch.tensor(GARBAGE, dtype=torch.int32)[torch.arange(used.numel()) % len(GARBAGE)].view(used.shape)
    table[owned] = order[: int(owned.sum())]
    if shared:
        table[:, :shared] = torch.where(used[:, :shared], table[:1, :shared], table[:, :shared])
    return table, blocks


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _poison(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """NaN, or in whole numbers the largest: as values, 127; as the exponents of bfp8, 2 ** 127."""
    if dtype == torch.uint8:
        return torch.full(shape, 0x7F, dtype=dtype)  # NaN in e4m3
    return torch.full(shape, torch.nan if dtype.is_floating_point else 127, dtype=dtype)


def _placed(stored: Stored, live: Tensor, where: tuple | None, memory: str, device: torch.device | str) -> Stored:
    """What is live, in the memory of a cache or, with `where`, of a pool."""

    def one(x: Tensor) -> Tensor:  # [owners, Hkv, capacity, ...]
        bits = _bits(x)
        shown = live[:, None, :].reshape(live.shape[0], 1, live.shape[1], *[1] * (x.ndim - 3))
        bits = torch.where(shown, bits, _poison((), bits.dtype))
        if where is not None:
            bits = _paged(bits, live, *where)
        return _inside(bits.to(device), memory).view(x.dtype)

    if isinstance(stored, Tensor):
        return one(stored)
    scales = stored.scales.to(device) if stored.storage == "fp8" else one(stored.scales)
    return Quantized(one(stored.values), scales)


def _paged(x: Tensor, live: Tensor, table: Tensor, blocks: int, block_size: int) -> Tensor:
    pool = _poison((blocks, block_size, x.shape[1], *x.shape[3:]), x.dtype)
    for owner, slot in live.unflatten(1, (-1, block_size)).any(-1).nonzero().tolist():
        pool[table[owner, slot]] = x[owner, :, slot * block_size : (slot + 1) * block_size].transpose(0, 1)
    return pool


def _inside(x: Tensor, memory: str) -> Tensor:
    """The same numbers, lying otherwise; what lies around a view is poison."""
    if memory == "own":
        return x.contiguous()
    if memory == "token major":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    around = _poison((), x.dtype).to(x.device)
    if memory == "layer":
        return torch.stack([around.expand_as(x), x, around.expand_as(x)])[1]
    assert memory == "layer inside"
    return torch.stack([around.expand_as(x), x, around.expand_as(x)], 1)[:, 1]


def _view(q: Tensor, memory: str) -> Tensor:
    if memory == "own":
        return q.contiguous()
    if memory == "transposed":
        return q.transpose(1, 2).contiguous().transpose(1, 2)
    assert memory == "fused"  # [B, T, heads and more, D], as one projection of q, k and v gives it
    wide = torch.full((q.shape[0], q.shape[2], q.shape[1] + 4, q.shape[3]), torch.nan, dtype=q.dtype, device=q.device)
    wide[:, :, : q.shape[1]] = q.transpose(1, 2)
    return wide[:, :, : q.shape[1]].transpose(1, 2)


def _sight(
    key_range: str,
    positions: Sequence[int],
    shape: Sequence[int],
    capacity: int,
    dtype: torch.dtype,
    dice: torch.Generator,
    device: torch.device | str,
) -> dict:
    """The option that says who sees whom."""
    batch, heads, tokens, _ = shape
    if key_range == "causal":
        return {}

    def chance(odds: float, *size: int) -> Tensor:
        return torch.rand(*size, generator=dice) < odds

    if key_range in ("tree", "trees"):
        return {"tree": chance(0.7, *([batch] if key_range == "trees" else []), tokens, tokens).to(device)}
    kind, *rest = key_range.split()
    short = "short" in rest
    letters = "".join(part for part in rest if part != "short")
    width = max(1, (max([*positions, 0]) + 1) * 2 // 3) if short else capacity
    size = [n if letter in letters else 1 for n, letter in zip((batch, heads, tokens), "bht", strict=True)]
    mask = chance(0.7, *size, width)
    if letters:
        mask.view(-1, width)[-1] = False  # a row that sees nothing
    if kind == "bool":
        return {"mask": mask.to(device)}
    added = torch.where(mask, 2 * torch.randn(mask.shape, generator=dice), -torch.inf)
    added[chance(0.1, *added.shape)] = torch.finfo(torch.float16).min
    for sequence in range(size[0]):  # past the end
        last = positions[sequence] if size[0] > 1 or batch == 1 else max([*positions, -1])
        added[sequence, ..., last + 1 :] = torch.nan
    return {"mask": added.to(dtype if "t" in letters else torch.float32).to(device)}


# The definition once more, key by key, without the reference's code.


def by_loops(problem: Problem) -> State:
    """Out and lse in float64, from the poisoned arguments themselves; only what a row sees is ever touched."""
    options = problem.options
    q, k, v, table = problem.q, problem.k, problem.v, problem.table
    batch, heads, tokens, dim = q.shape
    pool = (k if isinstance(k, Tensor) else k.values).shape
    kv_heads, capacity = (pool[1], pool[2]) if table is None else (pool[2], pool[1] * table.shape[1])
    wide = (v if isinstance(v, Tensor) else v.values).shape[-1]
    scale = options.get("scale")
    scale = 1 / math.sqrt(dim) if scale is None else scale
    given = options.get("cur_pos")
    given = [capacity - 1] * batch if given is None else [int(p) for p in given]
    out, lse = torch.zeros(batch, heads, tokens, wide).double(), torch.full((batch, heads, tokens), -math.inf).double()
    read: dict[tuple, tuple[Tensor, Tensor]] = {}
    for b in range(batch):
        owner = 0 if options.get("share_cache") else b
        for h in range(heads):
            at = h * kv_heads // heads
            for t in range(tokens if given[b] >= 0 else 0):
                row, scores, values = q[b, h, t].double(), [], []
                for key in range(given[b] + 1):
                    bias = _bias(options, b, h, t, key, given[b] - tokens + 1)
                    if bias is None:
                        continue
                    if table is None:
                        index = (owner, at, key)
                    else:
                        index = (int(table[owner, key // pool[1]]), key % pool[1], at)
                    if index not in read:
                        read[index] = _vector(k, index, at), _vector(v, index, at)
                    scores.append(float(row @ read[index][0]) * scale + bias)
                    values.append(read[index][1])
                sinks = options.get("sinks")
                weights = scores + ([] if sinks is None else [float(sinks[h])])
                if not weights:
                    continue
                top = max(weights)
                total = sum(math.exp(score - top) for score in weights)
                lse[b, h, t] = top + math.log(total)
                for score, value in zip(scores, values, strict=True):
                    out[b, h, t].add_(value, alpha=math.exp(score - top) / total)
    return State(out, lse)


def _bias(options: dict, b: int, h: int, t: int, key: int, first_new: int) -> float | None:
    """What is added to a score, or None where the row does not see the key."""
    own = first_new + t
    if options.get("key_range") is not None:
        first, end = options["key_range"]
        return 0.0 if int(first[b, t]) <= key < int(end[b, t]) else None
    if options.get("window") is not None and key <= own - options["window"]:
        return None
    mask, tree = options.get("mask"), options.get("tree")
    if mask is not None:
        if key >= mask.shape[3]:
            return None
        said = mask[b % mask.shape[0], h % mask.shape[1], t % mask.shape[2], key].item()
        if mask.dtype == torch.bool:
            return 0.0 if said else None
        return None if said == -math.inf else said
    if tree is not None:
        if key < first_new:
            return 0.0
        return 0.0 if (tree if tree.ndim == 2 else tree[b])[t, key - first_new] else None
    return 0.0 if key <= own else None


def _vector(stored: Stored, index: tuple[int, int, int], head: int) -> Tensor:
    """One token's numbers of one head."""
    if isinstance(stored, Tensor):
        return stored[index].double()
    values = stored.values[index].double()
    if stored.storage == "fp8":
        return values * float(stored.scales if stored.scales.ndim == 0 else stored.scales[head])
    if stored.storage == "int8":
        return values * float(stored.scales[index])
    return torch.cat([values[i * 16 : i * 16 + 16] * 2.0 ** int(s) for i, s in enumerate(stored.scales[index])])


# Every pair of what a call may be.


def covering(factors: dict[str, Sequence], forbidden: set[tuple[tuple, tuple]]) -> list[dict]:
    """Few cases in which every two values of two factors meet, but for pairs that are `forbidden` to. Greedy."""
    names = list(factors)

    def allowed(a: tuple, b: tuple) -> bool:
        return (a, b) not in forbidden and (b, a) not in forbidden

    left = dict.fromkeys(pair for pair in pairs_of(factors) if allowed(*pair))
    cases = []
    while left:
        case = dict(next(iter(left)))  # the next pair in order, then whatever meets most that has not met
        for name in sorted((n for n in names if n not in case), key=lambda n: -len(factors[n])):
            best, most = None, -1
            for turn in range(len(factors[name])):
                one = (name, factors[name][(turn + len(cases)) % len(factors[name])])
                if not all(allowed(one, other) for other in case.items()):
                    continue
                met = sum((one, other) in left or (other, one) in left for other in case.items())
                if met > most:
                    best, most = one, met
            assert best is not None, f"nothing goes with {case}"
            case[name] = best[1]
        case = {name: case[name] for name in names}
        for pair in pairs_of({name: [value] for name, value in case.items()}):
            left.pop(pair, None)
        cases.append(case)
    return cases


def pairs_of(factors: dict[str, Sequence]) -> list[tuple[tuple, tuple]]:
    """Every two values of two factors, as ((name, value), (name, value)), the factors in their order."""
    names = list(factors)
    return [
        ((a, x), (b, y)) for i, a in enumerate(names) for b in names[i + 1 :] for x in factors[a] for y in factors[b]
    ]
