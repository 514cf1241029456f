"""One token over keys that are adjacent in a pool of blocks: a single call of torch's CPU flash kernel, without a copy.

Few torch calls per layer: at the sizes of a decode step each takes as long as reading a hundred keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.decode.call import DecodeCall
from attnmesh.ops.decode.cpu_keys import VisibleKeys, adjacent_blocks

_flash = torch._scaled_dot_product_flash_attention_for_cpu
MIN_PART = 256  # keys that are worth a task of their own
MAX_SINGLE_ROWS = 3


@dataclass(frozen=True)
class AdjacentKeys:
    """The keys of one sequence: `parts` parts of `size` tokens each, which begin `step` tokens apart.

    Parts let the threads share a kv head. All have one size, so they may overlap: `bias` hides from each part the keys
    that the one before has.
    """

    begin: int  # the first token, counted in the pool
    size: int
    step: int
    parts: int
    together: bool  # the query heads of a kv head are the rows of one product
    bias: Tensor | None

    @classmethod
    def of(cls, begin: int, count: int, parts: int, together: bool, dtype: torch.dtype) -> AdjacentKeys:
        """`count` keys from token `begin` of the pool on."""
        if parts == 1:
            return cls(begin, count, 0, 1, together, None)
        size = -(-count // parts)
        while (count - size) % (parts - 1):
            size += 1
        step = (count - size) // (parts - 1)
        bias = None
        if step < size:
            bias = torch.zeros(parts, 1, 1, size, dtype=dtype, device="cpu")
            bias[1:, ..., : size - step] = -torch.inf
        return cls(begin, size, step, parts, together, bias)

    def state(self, q: Tensor, k: Tensor, v: Tensor, scale: float, *, needs_lse: bool) -> State:
        """Out [1, Hq, 1, D] and lse [1, Hq, 1] of q [1, Hq, 1, D] over pools k and v [blocks, block_size, Hkv, D].

        Without `needs_lse` the lse is undefined.
        """
        shape = q.shape
        rows = q.reshape(1, k.shape[2], -1, shape[3]) if self.together else q
        keys, values = self._in_pool(k), self._in_pool(v)
        if self.parts == 1 and not needs_lse:  # the same kernel, by a shorter way
            out = F.scaled_dot_product_attention(rows, keys, values, scale=scale, enable_gqa=not self.together)
            return State(out.view(shape) if self.together else out, out)
        if self.parts > 1:
            rows = rows.expand(self.parts, -1, -1, -1)
        out, lse = _flash(rows, keys, values, 0.0, False, attn_mask=self.bias, scale=scale)
        if self.parts > 1:
            out = (out * torch.softmax(lse, 0).unsqueeze(-1)).sum(0)
            lse = lse.logsumexp(0) if needs_lse else lse[0]
        return State(out.reshape(shape), lse.reshape(shape[:3]))

    def _in_pool(self, pool: Tensor) -> Tensor:
        """The keys or values of each part and head, [parts, Hkv, size, D], in place."""
        _, token, head, _ = pool.stride()
        return pool.as_strided(
            (self.parts, pool.shape[2], self.size, pool.shape[3]), (self.step * token, head, token, 1),
            pool.storage_offset() + self.begin * token,
        )  # fmt: skip


def adjacent_keys(call: DecodeCall) -> list[AdjacentKeys] | None:
    """The keys of each sequence, if these states are all that a call needs; else None."""
    k, v, dtype = call.k, call.v, accumulation_dtype(call.q.dtype)
    if (
        call.table is None or call.shared or call.q.shape[2] > 1 or call.mask is not None or call.tree is not None
        or call.splits.size is not None or not isinstance(k, Tensor) or not isinstance(v, Tensor)
        or k.dtype != dtype or k.shape != v.shape or not (_has_even_strides(k) and _has_even_strides(v))
    ):  # fmt: skip
        return None
    threads = torch.get_num_threads()
    # One by one, rows take the kernel's matrix-vector product, which is faster if the keys of a head are adjacent.
    together = call.group > MAX_SINGLE_ROWS or k.stride(1) > k.shape[3]
    tasks = call.kv_heads if together else call.q.shape[1]
    wanted = 1 if tasks >= 2 * threads else threads // gcd(tasks, threads)  # merging parts costs more than uneven tasks
    found = []
    for sequence, last in enumerate(call.cur_pos.tolist()):
        visible = None if last < 0 else VisibleKeys(call, range(sequence, sequence + 1), last).unmasked
        if not visible:
            return None
        slots = range(visible.start // call.block_size, -(-visible.stop // call.block_size))
        block = adjacent_blocks(call.table, sequence, slots)
        if block is None:
            return None
        parts = min(wanted, len(visible) // MIN_PART, call.splits.max_count or wanted)
        begin = visible.start + (block - slots.start) * call.block_size
        found.append(AdjacentKeys.of(begin, len(visible), max(1, parts), together, dtype))
    return found or None  # a rank may have no sequence


def _has_even_strides(pool: Tensor) -> bool:
    """Whether the tokens of adjacent blocks are equally far apart, and the numbers of a token's head adjacent."""
    return pool.stride(0) == pool.shape[1] * pool.stride(1) and (pool.stride(3) == 1 or pool.shape[3] == 1)
