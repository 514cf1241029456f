"""What the decode benchmark measures, as values: shapes, what they ask of a device, and the cases made of them."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from attnmesh.ops.storage import bytes_per_token

PLAIN_UP_TO = 16384  # keys: the plain softmax computation is not run over more
MOST_BYTES = 100e9  # of keys and values: what a device must have room for


class Shape(NamedTuple):
    """One step of decoding: so many sequences, each of one new token, over `length` keys."""

    batch: int
    q_heads: int
    kv_heads: int
    length: int
    head_dim: int

    @property
    def flops(self) -> float:
        """Both products, a multiplication and an addition each."""
        return 4.0 * self.batch * self.length * self.head_dim * self.q_heads

    def cache_bytes(self, storage: str) -> float:
        """Keys and values as they are stored, scales included: what has to be read."""
        return 2.0 * self.batch * self.length * self.kv_heads * bytes_per_token(storage, self.head_dim)

    def speeds(self, us: float, storage: str = "bf16") -> dict[str, object]:
        """What a time says about the device."""
        return {"us": us, "tb_per_s": self.cache_bytes(storage) / us / 1e6, "tflops": self.flops / us / 1e6}


class Case(NamedTuple):
    """One call of ours."""

    shape: Shape
    storage: str = "bf16"
    paged: bool = True
    tokens: int = 1
    max_splits: int | None = None


def kernel_of(case: Case) -> str:
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
    if (shape := Shape(batch, 8, 1, length, head_dim)).cache_bytes("bf16") <= MOST_BYTES
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
MOST_SPLITS = (1, 2, 4, 8, 16, 32, 64, 128, None)
ACCURACY_SHAPE = Shape(1, 8, 2, 4096, 128)
