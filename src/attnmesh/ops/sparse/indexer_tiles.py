"""Sizes of the kernels of the indexer, in Triton and in Gluon: tiles of products, and workspaces of selections."""

from typing import NamedTuple

from torch import Tensor

from attnmesh.ops.launch import gpu_of, next_power_of_2


class IndexerTiles(NamedTuple):
    """Keys and rows of one product, and the warps and pipeline stages of its program."""

    keys: int
    rows: int
    warps: int
    stages: int


# By bytes per element. Fixed rather than autotuned: the order of the sums, and so the bits of a score, must not depend
# on a timing. The compile tests check that they do not spill on sm_90. float32 runs without tensor cores: small tiles.
#
# Scores: 64 keys and four warps are the smallest product of Hopper's warp groups. The top-k takes four rows at a time:
# 256 columns, so that tensor cores and not shared memory are the bottleneck. In float32 both must be equal, or they
# would sum over heads in different orders.
SCORES = {2: IndexerTiles(keys=64, rows=1, warps=4, stages=3), 4: IndexerTiles(keys=16, rows=1, warps=8, stages=2)}
TOPK = {2: IndexerTiles(keys=64, rows=4, warps=4, stages=3), 4: IndexerTiles(keys=16, rows=1, warps=8, stages=2)}
# Gradients at slots, of a chunk of keys, and of both where the head dim exceeds 128.
GRADS = {2: IndexerTiles(keys=64, rows=1, warps=4, stages=2), 4: IndexerTiles(keys=16, rows=1, warps=8, stages=1)}
DENSE_GRADS = {2: IndexerTiles(keys=64, rows=1, warps=4, stages=3), 4: IndexerTiles(keys=16, rows=1, warps=8, stages=1)}
WIDE_GRADS = {2: IndexerTiles(keys=64, rows=1, warps=8, stages=2), 4: IndexerTiles(keys=16, rows=1, warps=16, stages=1)}

MAX_COLUMNS = 256  # rows times heads of a product
MAX_HEADS = 128  # of a product; more heads are summed block by block
MAX_GRAD_HEADS = 64  # at a time: their gradients stay in registers
MAX_GRAD_COLUMNS = 128  # of the gradients of queries and keys, likewise; wider heads take two programs
DENSE_KEY_PROGRAMS = 256  # about the number that runs at a time; with fewer tiles of keys the rows are split
LONG_ROW = 65536  # keys; selecting from such a row takes long, so the workspace of the top-k must hold many
SPAN = 1024  # keys that one program of the top-k scores at a time


def padded(n: int) -> int:
    """The extent of a tile that holds `n`: the next power of two, at least 16 for a matrix product."""
    return max(16, next_power_of_2(n))


def head_tile(heads: int) -> int:
    """The number of heads of one product."""
    return min(MAX_HEADS, padded(heads))


def grad_head_tile(heads: int) -> int:
    """The number of heads whose gradients one program computes."""
    return min(MAX_GRAD_HEADS, padded(heads))


def pick_topk_tiles(iq: Tensor, s_kv: int) -> IndexerTiles:
    """Tiles of the top-k: no more rows than fill a product or fit in shared memory beside the keys."""
    tiles, heads = TOPK[iq.element_size()], head_tile(iq.shape[1])
    rows = min(tiles.rows, MAX_COLUMNS // heads, max(1, 4 * 128 // padded(iq.shape[2])))
    # Of a few long rows each is scored by itself: there is work for all programs, and none for rows that are not there.
    together = iq.shape[1] <= heads and (s_kv <= LONG_ROW or iq.shape[0] >= 64)
    tiles = tiles._replace(rows=rows if together else 1)
    row_bytes = padded(iq.shape[2]) * iq.element_size()
    while tiles.rows * heads * row_bytes + (tiles.stages - 1) * tiles.keys * row_bytes + (tiles.rows + 1) * 1024 > (
        gpu_of(iq.device).shared_memory
    ):
        if tiles.stages > 2:
            tiles = tiles._replace(stages=tiles.stages - 1)
        elif tiles.rows > 1:
            tiles = tiles._replace(rows=tiles.rows // 2)
        else:
            break  # Triton raises OutOfResources
    return tiles


def pick_grad_tiles(iq: Tensor) -> IndexerTiles:
    """Tiles of the gradients at slots."""
    if iq.shape[2] <= MAX_GRAD_COLUMNS:
        return GRADS[iq.element_size()]
    tiles = WIDE_GRADS[iq.element_size()]  # of 64 keys, 105 KiB in 16 bits
    return tiles._replace(keys=min(tiles.keys, 32)) if gpu_of(iq.device).shared_memory < 128 * 1024 else tiles


def pick_dense_tiles(iq: Tensor) -> IndexerTiles:
    """Tiles of the gradients of a chunk of keys."""
    return (DENSE_GRADS if iq.shape[2] <= MAX_GRAD_COLUMNS else WIDE_GRADS)[iq.element_size()]


NEIGHBORS = 16  # neighbors that share a maximum
_MAX_CANDIDATES = 8192  # in registers; selection is slower for a top-k of more than 4096


def candidate_block(topk: int) -> int:
    """The number of candidates that fit in registers, BLOCK of `triton_select` and `gluon_select`."""
    return min(_MAX_CANDIDATES, max(1024, 2 * next_power_of_2(topk)))


def row_elements(row_len: int, block: int, groups: int = 0) -> int:
    """The size of a row of the workspace, a multiple of 16: the scores, and after them what `select_row` needs.

    That is BLOCK scores and BLOCK keys of candidates. With a summary also BLOCK numbers of blocks, the maxima of
    `groups` groups, and those of the blocks.
    """
    return row_len + 2 * block + (block + groups + -(-row_len // (16 * NEIGHBORS)) * 16 if groups else 0)
