"""Decode in Triton, host side: one launch attends over splits of the keys, a second merges the splits.

Tile sizes follow fixed rules rather than autotuning: the order of the sums, and so the result, must not depend on a
timing. Tuned on an H200 (docs/benchmarks.md); tests/ops/test_triton_compiles.py checks that none spills on sm_90.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmesh.core.state import State
from attnmesh.ops.decode.call import DecodeCall
from attnmesh.ops.decode.device_errors import MAX_SEQUENCES, error_record, raise_device_error
from attnmesh.ops.launch import Launch, cdiv, gpu_of, interpreted, next_power_of_2, prepare, starts_early
from attnmesh.ops.storage import Quantized, Stored, values_of
from attnmesh.utils.optional import installed, require

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_HEAD_DIM = 1024
_LOG2_E = 1.4426950408889634
_NO_SPLIT = 2**30  # longer than any sequence; the sum of two still fits 32 bits
_GROUPED = ("bfp8", "fp8_ds_mla")
_RESERVED = 2048  # bytes of shared memory for reductions
_SEQUENCES_PER_LAUNCH = 1024  # every program reads the lengths of all of them


class DecodeTiles(NamedTuple):
    """The tile of one program, its warps and pipeline stages, and the resident programs per multiprocessor."""

    rows: int  # at most: fewer query heads and tokens use a smaller tile
    keys: int
    warps: int
    stages: int
    resident: int
    heads: int = 1  # kv heads that a program reads


_MIN_ROWS = 8  # to which the tensor cores pad
# Of paged calls with so few rows.
_TWO_HEADS = DecodeTiles(_MIN_ROWS, 32, 4, 3, 2, heads=2)
_NARROW_HEADS = DecodeTiles(_MIN_ROWS, 128, 4, 3, 3)
# Padded head_dim -> tiles. Two tiles in flight for each of two or three programs saturate the memory bandwidth.
_SIXTEEN_BITS = {
    64: DecodeTiles(64, 64, 4, 3, 3),
    128: DecodeTiles(32, 64, 4, 3, 2),
    256: DecodeTiles(32, 32, 4, 3, 2),
    1024: DecodeTiles(32, 32, 8, 2, 1),
}
_EIGHT_BITS = {
    64: DecodeTiles(32, 64, 4, 3, 3),
    128: DecodeTiles(32, 64, 4, 3, 3),
    256: DecodeTiles(32, 32, 4, 3, 2),
    1024: DecodeTiles(32, 32, 8, 2, 1),
}
# Powers of two take registers.
_BFP8 = _EIGHT_BITS | {256: DecodeTiles(16, 32, 4, 3, 2)}
# float32 runs without tensor cores (tf32 would not be float32): a thread then keeps much of both operands in registers.
_FLOAT32 = {
    64: DecodeTiles(16, 16, 4, 2, 2),
    128: DecodeTiles(16, 16, 4, 2, 2),
    256: DecodeTiles(16, 16, 8, 2, 1),
    1024: DecodeTiles(8, 16, 8, 1, 1),
}


def pick_tiles(call: DecodeCall) -> DecodeTiles:
    """The tiles of a call. With fixed splits, rows and keys do not depend on the number and lengths of sequences."""
    if call.q.dtype == torch.float32:
        table = _FLOAT32
    elif isinstance(call.k, Tensor):
        table = _SIXTEEN_BITS
    elif call.k.storage in _GROUPED and not _reads_pairs(call):
        table = _SIXTEEN_BITS  # each value is multiplied by the scale of its group, which takes registers
    elif call.k.storage == "bfp8":
        table = _BFP8
    else:
        table = _EIGHT_BITS
    width = max(call.q.shape[3], call.value_dim)
    tiles = next(tiles for limit, tiles in table.items() if width <= limit)
    if table is _SIXTEEN_BITS:
        tiles = _tiles_of_few_rows(call, tiles)
    while _shared_memory(tiles, call) > gpu_of(call.q.device).shared_memory:
        if tiles.stages > 2:
            tiles = tiles._replace(stages=tiles.stages - 1)
        elif tiles.keys > 16:
            tiles = tiles._replace(keys=tiles.keys // 2)
        elif tiles.rows > 8:
            tiles = tiles._replace(rows=tiles.rows // 2)
        else:
            break  # Triton raises OutOfResources
    return tiles


def _tiles_of_few_rows(call: DecodeCall, tiles: DecodeTiles) -> DecodeTiles:
    """Other tiles, measured to be faster, for paged calls with at most 8 rows per program."""
    rows = call.group * call.q.shape[2] * (call.q.shape[0] if _is_read_once(call) else 1)
    width = max(call.q.shape[3], call.value_dim)
    if not call.paged or rows > _MIN_ROWS or width > 128:
        return tiles
    if width <= 64:
        return _NARROW_HEADS if call.kv_heads > 1 and isinstance(call.k, Tensor) else tiles
    two = 2 * rows <= _MIN_ROWS and _reads_two_heads(call)
    # With fixed splits the keys of a tile must not depend on the batch.
    if _is_one_long_sequence(call, tiles) and not (two and call.splits.size is not None):
        return tiles._replace(stages=2, resident=3)
    return _TWO_HEADS if two else tiles


def _is_read_once(call: DecodeCall) -> bool:
    """Whether sequences that share a cache are rows of one tile, which reads it once.

    Not with fixed splits, whose tiles must not depend on the batch, nor with a window: keys between two windows may
    hold anything.
    """
    return call.shared and call.splits.size is None and call.window is None


def _reads_two_heads(call: DecodeCall) -> bool:
    """Whether one program can read two kv heads, adjacent in a pool, so that half the programs divide the keys.

    Not under a mask: keys that it hides from the rows of one head may hold anything.
    """
    plain = isinstance(call.k, Tensor) and isinstance(call.v, Tensor) and not v_in_k(call)
    square = call.q.shape[3] == call.value_dim == next_power_of_2(call.value_dim)
    return plain and square and call.mask is None and call.kv_heads % 2 == 0


def _is_one_long_sequence(call: DecodeCall, tiles: DecodeTiles) -> bool:
    """Whether three programs per multiprocessor have 32 tiles each: 5% faster than two with more tiles in flight.

    For several sequences it is not: three programs would divide them where two do not.
    """
    keys = call.capacity if call.window is None else min(call.capacity, call.window)
    programs = 3 * multiprocessors(call.q.device)
    return call.q.shape[0] == 1 and keys * call.kv_heads >= 32 * tiles.keys * programs


def _shared_memory(tiles: DecodeTiles, call: DecodeCall) -> int:
    """Bytes of the queries, the weights, and the keys and values of all stages except the stage in registers.

    With one stage keys and values take turns, as they are multiplied: dequantized.
    """
    q_size, size = call.q.element_size(), values_of(call.k).element_size()
    widths = sum(_blocks(call.q.shape[3])), next_power_of_2(call.value_dim)
    loaded = sum(widths) * (tiles.stages - 1) * size if tiles.stages > 1 else max(widths) * q_size
    return tiles.rows * (widths[0] + tiles.keys) * q_size + tiles.keys * tiles.heads * loaded + _RESERVED


def _reads_pairs(call: DecodeCall) -> bool:
    """Whether pairs of values of an 8-bit cache are read as 16-bit words: faster, needs even widths and strides."""
    if isinstance(call.k, Tensor) or isinstance(call.v, Tensor) or call.q.dtype == torch.float32:
        return False
    if call.k.storage == "fp8_ds_mla":
        return False
    head_dim, value_dim, width = call.q.shape[3], call.value_dim, 32
    if call.k.storage == "bfp8":  # its scales are read by four; the widest tiles have no registers for it
        if max(head_dim, value_dim) > 256 or not all(
            x.scales.stride(3) == 1 and _divisible(x.scales, 4) for x in (call.k, call.v)
        ):
            return False
        width = 64
    return (
        head_dim >= width
        and next_power_of_2(head_dim) == head_dim
        and value_dim % width == 0
        and all(_divisible(x.values, 2) for x in (call.k, call.v))
    )


def _divisible(x: Tensor, n: int) -> bool:
    """Whether the last dimension of a tensor of bytes can be read n bytes at a time."""
    return all(stride % n == 0 for stride in (*x.stride()[:3], x.storage_offset(), x.data_ptr()))


@functools.cache
def count_partitions(sequences: int, heads: int, slots: int) -> int:
    """The number of partitions, of `heads` programs each, that fill the `slots` for resident programs on the device.

    If the sequences are equally long (which the host does not know), a divisor of their number splits none of them and
    leaves nothing to merge, and with a multiple no program works on two. Either saves more than the few slots it leaves
    empty.
    """
    fill = max(1, slots // heads)
    whole = [n for n in range(1, sequences + 1) if sequences % n == 0 and _occupancy(n * heads, slots) >= 0.9]
    if whole:
        return min(whole)
    even = fill - fill % sequences
    return even if even >= 0.9 * fill else fill


def _occupancy(programs: int, slots: int) -> float:
    """The fraction of the slots that programs occupy, over all waves that they need."""
    return programs / (cdiv(programs, slots) * slots)


_MAX_MERGED_SPLITS = 512  # of one sequence and head: loaded together, none waits for another


class MergeTile(NamedTuple):
    """The tile of one program of the merge kernel, and its warps."""

    splits: int
    rows: int
    columns: int
    warps: int


def pick_merge_tile(splits: int, rows: int, value_dim: int, fixed: bool) -> MergeTile:
    """All splits of a head at once if possible, with rows and columns that make 1024 elements per warp.

    Programs of one warp need no barriers and fit beside the programs of the split kernel, whose end they wait for. Many
    rows would make too many of them. With a fixed split size the tile must not depend on the number of splits, which
    would change the order of the sums.
    """
    splits = 16 if fixed else min(max(2, next_power_of_2(splits)), _MAX_MERGED_SPLITS)
    warps = 1 if splits <= 64 and rows <= 16 and value_dim <= 128 else 4
    cells = 1024 * warps // splits
    columns = min(max(16, next_power_of_2(value_dim)), cells)
    return MergeTile(splits, max(1, min(rows, cells // columns)), columns, warps)


def _blocks(head_dim: int) -> tuple[int, int]:
    """The columns of the tiles of a key: a power of two, and the rest or 0."""
    main = max(16, 1 << (head_dim.bit_length() - 1))
    return main, max(16, next_power_of_2(head_dim - main)) if head_dim > main else 0


class Triton:
    """Backend over the split kernel and the merge kernel."""

    name = "triton"

    def why_not(self, call: DecodeCall) -> str | None:
        """The reason why this backend cannot serve the call; None if it can."""
        width = max(call.q.shape[3], call.value_dim)
        if call.q.dtype not in _DTYPES:
            return f"its kernels take queries in fp16, bf16 and fp32, not {call.q.dtype}"
        if width > _MAX_HEAD_DIM:
            return f"its kernels take head_dim up to {_MAX_HEAD_DIM}, not {width}"
        if values_of(call.k).stride(-1) != 1 or values_of(call.v).stride(-1) != 1:
            return "its kernels take caches whose last dimension is contiguous"
        rope = rope_of(call.k)
        if rope is not None and (rope.stride(-1) != 1 or call.value_dim != next_power_of_2(call.value_dim)):
            return "its kernels take fp8_ds_mla caches of a power of two of values and a contiguous rope part"
        if call.q.shape[0] > MAX_SEQUENCES:
            return f"its kernels take up to {MAX_SEQUENCES} sequences, not {call.q.shape[0]}"
        if not installed("triton"):
            return "triton is not installed (pip install 'attnmesh[triton]')"
        if not call.q.is_cuda and not interpreted():
            return "it needs a GPU (or TRITON_INTERPRET=1 set before triton is imported)"
        fp8 = isinstance(call.k, Quantized) and call.k.storage in ("fp8", "fp8_ds_mla")
        if call.q.is_cuda and fp8 and torch.cuda.get_device_capability(call.q.device) < (8, 9):
            return "its kernels need compute capability 8.9 to read fp8 caches"
        return None

    def run(self, call: DecodeCall, into: State | None = None, tiles: DecodeTiles | None = None) -> State:
        """Out and lse, in two launches per 1024 sequences. Raises errors that earlier calls have recorded."""
        return _Run(self, tiles)(call, into)

    def prepared(self) -> Callable[[DecodeCall, State | None], State]:
        """`run` for calls of one signature."""
        return _Run(self)

    def launch(self, call: DecodeCall, state: State, tiles: DecodeTiles | None, first_sequence: int) -> Launches:
        """Launches the kernels for up to 1024 sequences."""
        return _launch(call, state, tiles or pick_tiles(call), first_sequence)


class _Run:
    """`Triton.run` for calls of one signature: all repeat the launches of the first."""

    def __init__(self, backend: Triton, tiles: DecodeTiles | None = None) -> None:
        self._backend, self._tiles = backend, tiles
        self._empty: list[tuple[torch.Size, tuple[int, ...], torch.dtype]] = []  # of out and lse
        self._launches: dict[tuple[int, int], Launches] = {}  # by their sequences

    def __call__(self, call: DecodeCall, into: State | None = None) -> State:
        device, batch = call.q.device, call.q.shape[0]
        raise_device_error(device)
        if into is not None:
            state = into
        elif self._empty:
            state = State(*[torch.empty_strided(*shape, dtype=x, device=device) for *shape, x in self._empty])
        else:
            state = call.empty_state()
            self._empty = [(x.shape, x.stride(), x.dtype) for x in state]
        if not state.out.numel():
            return state
        if batch <= _SEQUENCES_PER_LAUNCH:
            self._run(call, state, 0, batch)
            return state
        for first in range(0, batch, _SEQUENCES_PER_LAUNCH):
            some = slice(first, first + _SEQUENCES_PER_LAUNCH)
            self._run(_sequences(call, some), State(state.out[some], state.lse[some]), first, some.stop)
        return state

    def _run(self, call: DecodeCall, state: State, first: int, stop: int) -> None:
        launches = self._launches.get((first, stop))
        if launches is None:
            self._launches[first, stop] = self._backend.launch(call, state, self._tiles, first)
        else:
            launches(call, state)


class Launches(NamedTuple):
    """The launches of a call, which calls of the same signature repeat."""

    attend: Launch
    merge: Launch
    copied: bool  # the kernels read copies of some tensors
    parts: int  # elements of the buffer of splits
    fixed: tuple[Tensor | None, ...]  # tensors of every call

    def __call__(self, call: DecodeCall, state: State) -> None:
        """Out and lse of a call."""
        tensors = _tensors(_readable(call) if self.copied else call, state)
        parts = torch.empty_strided((self.parts,), (1,), dtype=torch.float32, device=call.q.device)
        self.attend(*tensors, parts, *self.fixed)
        self.merge(*tensors, parts, *self.fixed)


def _tensors(call: DecodeCall, state: State) -> tuple[Tensor | None, ...]:
    """All tensors of a call."""
    k, v = call.k, call.v
    first, end = (None, None) if call.key_range is None else call.key_range
    others = call.table, call.cur_pos, first, end, call.mask, call.tree, call.sinks, state.out, state.lse
    if isinstance(k, Tensor):
        assert isinstance(v, Tensor)
        return (call.q, k, v, *others)
    assert isinstance(v, Quantized)
    return (call.q, k.values, k.scales, k.rope, v.values, v.scales, v.rope, *others)


def _readable(call: DecodeCall) -> DecodeCall:
    """The call with copies of tensors that the kernels cannot read."""
    changed: dict[str, Any] = {}
    if call.q.stride(-1) != 1:
        changed["q"] = call.q.contiguous()
    if call.table is not None and call.table.stride(1) != 1:
        changed["table"] = call.table.contiguous()
    for name, x in (("cur_pos", call.cur_pos), ("sinks", call.sinks)):
        if x is not None and not x.is_contiguous():
            changed[name] = x.contiguous()
    if call.key_range is not None and not all(x.is_contiguous() for x in call.key_range):
        changed["key_range"] = tuple(x.contiguous() for x in call.key_range)
    return replace(call, **changed) if changed else call


@dataclass(frozen=True)
class Schedule:
    """What the split kernels and the merge kernel have in common."""

    call: DecodeCall
    rows: int  # of a tile
    heads: int  # tiles of rows of all kv heads
    owners: int  # sequences, or 1 if they share a cache and are rows of one tile
    partitions: int
    fixed: bool
    sources: tuple[Any, ...]  # table and its stride, cur_pos, key range
    written: tuple[Any, ...]  # out and lse with their strides
    parts: tuple[Tensor, Tensor]  # out and lse of splits, in one buffer
    numbers: tuple[Any, ...]
    constants: dict[str, Any]
    given: tuple[Tensor | None, ...]  # all tensors
    copied: bool

    @classmethod
    def of(cls, given: DecodeCall, state: State, tiles: DecodeTiles) -> Schedule:
        """The schedule of a call, and the buffers that it needs."""
        call = _readable(given)
        q = call.q
        batch, _, tokens, _ = q.shape
        shared = _is_read_once(call)
        kv_heads, group = call.kv_heads // tiles.heads, call.group * tiles.heads
        rows = group * tokens * (batch if shared else 1)
        row_tile = min(max(_MIN_ROWS, next_power_of_2(rows)), tiles.rows)
        heads = kv_heads * cdiv(rows, row_tile)
        owners = 1 if shared else batch

        fixed = call.splits.size is not None or call.splits.max_count == 1
        unit = min(call.splits.size or _NO_SPLIT, _NO_SPLIT) if fixed else tiles.keys
        units = owners * cdiv(call.capacity, unit)
        partitions = max(1, min(units, count_partitions(owners, heads, tiles.resident * multiprocessors(q.device))))
        partial_rows = heads * (units if fixed else 2 * partitions) * row_tile
        parts = torch.empty(partial_rows * (call.value_dim + 1), dtype=torch.float32, device=q.device)

        table = (call.table, 0)
        if call.table is not None and call.table.shape[0] > 1:
            table = (call.table, call.table.stride(0))
        # The window is limited so that differences fit 32 bits.
        window = None if call.window is None else min(call.window, max(1, call.capacity))
        num_blocks = values_of(call.k).shape[0]
        with torch.cuda.device_of(q):
            early = starts_early(q.device)
        return cls(
            call, row_tile, heads, owners, partitions, fixed,
            (*table, call.cur_pos, *((None, None) if call.key_range is None else call.key_range)),
            (state.out, state.out.stride()[:3], state.lse, state.lse.stride()),
            (parts[: partial_rows * call.value_dim], parts[partial_rows * call.value_dim :]),
            (batch, kv_heads, num_blocks, call.capacity, window, partitions, None if fixed else call.splits.max_count),
            {
                "TOKENS": tokens, "GROUP": group, "ROWS": row_tile, "DV": call.value_dim,
                "BLOCK_SIZE": call.block_size if call.paged else 0, "UNIT": unit, "FIXED": fixed, "SHARED": shared,
                "BATCH": next_power_of_2(batch), "EARLY": early,
            },
            (*_tensors(call, state), parts),
            call is not given,
        )  # fmt: skip

    def launch(
        self, kernel: Any, args: Sequence[Any], first_sequence: int, more: Tensor | None = None, **options: Any
    ) -> Launches:
        """Launches the kernel that attends over splits, and the kernel that merges them and records errors.

        `more` is a tensor of `args` besides the tensors of the call. Errors are of sequences from `first_sequence` on.
        """
        call, errors = self.call, error_record(self.call.q.device)
        merged = pick_merge_tile(self.partitions // self.owners + 2, self.rows, call.value_dim, self.fixed)
        grid = (self.owners * self.heads, self.rows // merged.rows, cdiv(call.value_dim, merged.columns))
        tensors = (*self.given, errors, more)
        with torch.cuda.device_of(call.q):
            return Launches(
                prepare(kernel, (self.partitions * self.heads,), args, tensors, **options),
                prepare(
                    _kernel("merge"), grid,
                    (
                        *self.parts, *self.sources, call.sinks, *self.written, errors, first_sequence, *self.numbers
                    ),
                    tensors, **self.constants, SPLITS=merged.splits, SOME_ROWS=merged.rows, COLUMNS=merged.columns,
                    num_warps=merged.warps, **({"launch_pdl": True} if self.constants["EARLY"] else {}),
                ),
                self.copied, sum(x.numel() for x in self.parts), (errors, more),
            )  # fmt: skip


def _launch(call: DecodeCall, state: State, tiles: DecodeTiles, first_sequence: int) -> Launches:
    schedule = Schedule.of(call, state, tiles)
    call, constants = schedule.call, schedule.constants
    q = call.q
    head_dim, block_size, unit = q.shape[3], constants["BLOCK_SIZE"], constants["UNIT"]
    storage = "plain" if isinstance(call.k, Tensor) else call.k.storage
    words = _reads_pairs(call)
    k, *k_parts = _parts(call, call.k, words)
    # Of a latent cache, whose values are in the keys, the kernel gets the rope part in place of the values.
    rope = rope_of(call.v)
    v, *v_parts = _parts(call, call.v if rope is None else rope, words)
    shifts = _scale_shifts(q.device) if words and storage == "bfp8" else None
    mask, tree = (_as_bytes(x) for x in (call.mask, call.tree))
    main, tail = _blocks(head_dim)
    args = (
        q, q.stride()[:3], k, v, *k_parts, *v_parts, shifts, *schedule.sources,
        mask, _broadcast_strides(mask, 4), 0 if mask is None else mask.shape[3],
        tree, _broadcast_strides(tree, 3), call.sinks, *schedule.written, *schedule.parts, *schedule.numbers,
        call.scale * _LOG2_E, None if call.softcap is None else call.softcap * _LOG2_E,
    )  # fmt: skip
    return schedule.launch(
        _kernel("split"), args, first_sequence, shifts,
        **constants, KEYS=tiles.keys, D=head_dim, MAIN=main, TAIL=tail,
        BLOCK_DV=max(16, next_power_of_2(call.value_dim)),
        STORAGE=storage, PAIRED=words,
        V_IN_K=v_in_k(call) and call.value_dim == main,  # narrower keys are padded rather than read
        COMPILED=not interpreted(), HEADS=tiles.heads,
        ALIGNED=unit % tiles.keys == 0 and (tiles.keys % max(block_size, 1) == 0 or block_size % tiles.keys == 0),
        WIDE=max(_reach(call.k), _reach(call.v)) >= 2**31, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def _sequences(call: DecodeCall, some: slice) -> DecodeCall:
    """The call restricted to a slice of its sequences."""

    def part(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[0] == 1 else x[some]

    return replace(
        call,
        q=call.q[some],
        cur_pos=call.cur_pos[some],
        table=part(call.table),
        mask=part(call.mask),
        tree=part(call.tree),
        key_range=None if call.key_range is None else (call.key_range[0][some], call.key_range[1][some]),
        k=_rows(call, call.k, some),
        v=_rows(call, call.v, some),
    )


def _rows(call: DecodeCall, cache: Stored, some: slice) -> Stored:
    """A slice of the sequences of a contiguous cache; all of a pool or of a shared cache."""
    if call.paged or values_of(cache).shape[0] == 1:
        return cache
    if isinstance(cache, Tensor):
        return cache[some]
    return replace(
        cache, values=cache.values[some], scales=cache.scales if cache.storage == "fp8" else cache.scales[some]
    )


def _kernel(name: str) -> Any:
    return getattr(require("attnmesh.ops.decode.triton_kernels", extra="triton"), f"{name}_kernel")


def _parts(
    call: DecodeCall, stored: Stored, words: bool
) -> tuple[Tensor, tuple[int, ...], Tensor | None, tuple[int, ...]]:
    """Values and scales, each with its strides by (block or sequence, token, head)."""
    values = values_of(stored)
    values = values.view(torch.int16) if words else values

    def strides(x: Tensor) -> tuple[int, ...]:
        if call.paged:
            return x.stride()[:3]
        return (0 if x.shape[0] == 1 else x.stride(0), x.stride(2), x.stride(1))  # a cache of batch size 1 is shared

    if isinstance(stored, Tensor):
        return values, strides(values), None, (0, 0, 0, 0)
    scales = stored.scales
    if stored.storage == "fp8":
        return values, strides(values), scales, (scales.stride(0) if scales.ndim else 0, 0, 0, 0)
    if words and stored.storage == "bfp8":
        scales = scales.view(torch.int32)
    return values, strides(values), scales, (*strides(scales), scales.stride(3) if scales.ndim == 4 else 0)


@functools.cache
def _scale_shifts(device: torch.device) -> Tensor:
    """The shifts that move each of the four scales in a word of a bfp8 cache to its upper end."""
    return torch.tensor([24, 16, 8, 0], dtype=torch.int32, device=device)


def _as_bytes(x: Tensor | None) -> Tensor | None:
    return x.view(torch.uint8) if x is not None and x.dtype == torch.bool else x


def _broadcast_strides(x: Tensor | None, ndim: int) -> tuple[int, ...]:
    if x is None:
        return (0,) * ndim
    return tuple(0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True))


def v_in_k(call: DecodeCall) -> bool:
    """Whether the values are the first columns of the keys (MLA): they are then read once."""
    k, v = call.k, call.v
    return rope_of(k) is not None or (
        isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and k.data_ptr() == v.data_ptr()
        and k.stride() == v.stride()
        and v.shape[3] <= k.shape[3]
    )


def rope_of(stored: Stored) -> Tensor | None:
    """The rope part of a cache that is stored as `fp8_ds_mla`; None for others."""
    return stored.rope if isinstance(stored, Quantized) else None


def _reach(stored: Stored) -> int:
    """The largest offset from the beginning of a cache or of its scales."""
    parts = (stored,) if isinstance(stored, Tensor) else (stored.values, stored.scales, stored.rope)
    return max(_extent(x) for x in parts if x is not None)


def _extent(x: Tensor) -> int:
    """The offset of the last element of a tensor from the first."""
    return sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The multiprocessors of a GPU; 2 elsewhere, so that interpreted kernels have several partitions."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
