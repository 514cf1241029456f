"""The shapes and cases of the decode benchmark, their bytes and operations, and random inputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.calibration.timing import Run
from attnmesh.ops.decode.api import decode_attention, paged_decode_attention
from attnmesh.ops.storage import PLAIN, Quantized, Stored, bytes_per_token, quantize

MAX_PLAIN_LENGTH = 16384  # keys: the plain softmax computation is not run over more
MAX_BYTES = 100e9  # of keys and values: what a device must have room for


class Shape(NamedTuple):
    """One decode step: `batch` sequences with one new token each, over `length` keys."""

    batch: int
    q_heads: int
    kv_heads: int
    length: int
    head_dim: int

    @property
    def flops(self) -> float:
        """Operations of both products, a multiplication and an addition each."""
        return 4.0 * self.batch * self.length * self.head_dim * self.q_heads

    def cache_bytes(self, storage: str) -> float:
        """Return the bytes of keys and values as they are stored, scales included."""
        return 2.0 * self.batch * self.length * self.kv_heads * bytes_per_token(storage, self.head_dim)

    def speeds(self, us: float, storage: str = "bf16") -> dict[str, object]:
        """Return the time, bandwidth and operations per second."""
        return {"us": us, "tb_per_s": self.cache_bytes(storage) / us / 1e6, "tflops": self.flops / us / 1e6}


class Case(NamedTuple):
    """One call of attnmesh."""

    shape: Shape
    storage: str = "bf16"
    paged: bool = True
    tokens: int = 1
    max_splits: int | None = None


def kernel_key(case: Case) -> str:
    """Cases with the same name share most of their kernels: neither length nor how many splits, beyond one, matters."""
    shape, storage, paged, tokens, most = case
    splits = "free" if most is None else min(most, 2)
    return repr((shape.head_dim, shape.q_heads // shape.kv_heads, shape.batch, storage, paged, tokens, splits))


SHAPES = tuple(
    Shape(*numbers)
    for numbers in (
        (1, 32, 8, 131072, 128), (16, 32, 8, 8192, 128), (64, 32, 8, 4096, 128), (128, 32, 8, 1024, 128),
        (1, 32, 8, 1024, 128), (32, 64, 8, 8192, 64), (8, 8, 1, 131072, 64), (16, 8, 1, 16384, 128),
    )
)  # fmt: skip
CPU_SHAPES = tuple(
    Shape(*numbers)
    for numbers in ((1, 32, 8, 16384, 128), (8, 32, 8, 2048, 128), (1, 8, 1, 65536, 64), (16, 8, 1, 4096, 128))
)
LENGTHS = tuple(2**n for n in range(10, 18))
GRID = tuple(
    shape
    for head_dim, batch, length in product((64, 128, 256), (8, 16, 32), LENGTHS)
    if (shape := Shape(batch, 8, 1, length, head_dim)).cache_bytes("bf16") <= MAX_BYTES
)
GRID_STORAGES = ("bf16", "bfp8")
LLAMA = tuple(Shape(1, 32 // ways, 8 // ways, length, 128) for ways, length in product((1, 2, 4, 8), LENGTHS))
STORAGE_SHAPES = (Shape(1, 32, 8, 131072, 128), Shape(16, 32, 8, 8192, 128))
STORED_AS = ("bf16", "fp8", "int8", "bfp8")
TOKEN_SHAPES = (Shape(1, 32, 8, 131072, 128), Shape(8, 32, 8, 16384, 128))
TOKENS = (1, 2, 4, 8)
SPLIT_SHAPES = tuple(
    Shape(*numbers)
    for numbers in ((1, 4, 1, 131072, 128), (1, 8, 2, 131072, 128), (1, 32, 8, 131072, 128), (16, 8, 1, 16384, 128))
)
MAX_SPLITS = (1, 2, 4, 8, 16, 32, 64, 128, None)
ACCURACY_SHAPE = Shape(1, 8, 2, 4096, 128)


BLOCK_SIZE = 16
_CHUNK_VALUES = 2**26  # values quantized at once: all of a large pool would need several times its size


def backend_on(q: Tensor) -> str:
    """Return the backend by name: "auto" would measure the reference where a kernel does not support the call."""
    return "triton" if q.is_cuda else "cpu"


@dataclass(frozen=True)
class Contiguous:
    """Caches [B, Hkv, L, D], what torch's own attention takes."""

    q: Tensor
    k: Tensor
    v: Tensor
    cur_pos: Tensor

    def decode(self, max_splits: int | None = None) -> Tensor:
        """Run attnmesh's decode."""
        return decode_attention(
            self.q, self.k, self.v, cur_pos=self.cur_pos, max_splits=max_splits, backend=backend_on(self.q)
        )


@dataclass(frozen=True)
class Paged:
    """Pools of blocks of 16 tokens, and a table that names them in random order, as a cache long in use would."""

    q: Tensor
    k: Stored
    v: Stored
    table: Tensor
    cur_pos: Tensor

    def decode(self, max_splits: int | None = None) -> Tensor:
        """Run attnmesh's decode."""
        table, backend = self.table, backend_on(self.q)
        return paged_decode_attention(
            self.q, self.k, self.v, table, cur_pos=self.cur_pos, max_splits=max_splits, backend=backend
        )

    def to_contiguous(self) -> Contiguous:
        """Return the same keys and values as contiguous caches."""
        k, v = (self._in_order(x) for x in (self.k, self.v))
        return Contiguous(self.q, k, v, self.cur_pos)

    def _in_order(self, pool: Stored) -> Tensor:
        if isinstance(pool, Quantized):
            raise ValueError(f"only plain pools are gathered, this one is {pool.storage}")
        return pool[self.table.long()].flatten(1, 2).transpose(1, 2).contiguous()


def random_case(case: Case, device: str) -> Paged:
    """Return normal inputs of a case; all sequences have the length of the shape."""
    batch, q_heads, _, length, head_dim = case.shape
    if length % BLOCK_SIZE:
        raise ValueError(f"the length must be a multiple of the {BLOCK_SIZE} tokens of a block, got {length}")
    slots = length // BLOCK_SIZE
    q = torch.randn(batch, q_heads, case.tokens, head_dim, device=device).to(PLAIN.get(case.storage, torch.bfloat16))
    k, v = (_pool(case.shape, batch * slots, case.storage, device) for _ in range(2))
    table = torch.randperm(batch * slots, device=device).view(batch, slots).int()
    # On the device: a list would be copied there by every call.
    return Paged(q, k, v, table, torch.full((batch,), length - 1, dtype=torch.int32, device=device))


def make_run(case: Case, device: str) -> Run:
    """Return a run of the case with its own inputs."""
    paged = random_case(case, device)
    return partial(paged.decode if case.paged else paged.to_contiguous().decode, case.max_splits)


def _pool(shape: Shape, blocks: int, storage: str, device: str) -> Stored:
    block = (BLOCK_SIZE, shape.kv_heads, shape.head_dim)
    if storage in PLAIN:
        return torch.randn(blocks, *block, device=device, dtype=PLAIN[storage])
    scale = torch.full((), 8 / 448, device=device)  # fp8's; one for all pieces
    step = max(1, _CHUNK_VALUES // (BLOCK_SIZE * shape.kv_heads * shape.head_dim))
    values, scales = [], []
    for first in range(0, blocks, step):
        piece = torch.randn(min(step, blocks - first), *block, device=device)
        stored = quantize(piece, storage, scale=scale if storage == "fp8" else None, head_axis=2)
        assert isinstance(stored, Quantized)
        values.append(stored.values)
        scales.append(stored.scales)
    return Quantized(torch.cat(values), scale if storage == "fp8" else torch.cat(scales))
