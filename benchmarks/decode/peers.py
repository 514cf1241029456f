"""What decode is compared with, on the same numbers: torch's kernels, FlexDecoding, the plain computation, JAX."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from attnmesh.calibration.timing import Run, reason
from benchmarks.decode.cases import BLOCK_SIZE, MAX_PLAIN_LENGTH, Contiguous, Shape
from benchmarks.peers import PEERS

Cell = float | str  # a time, or why there is none
_TOLERANCE = 0.05  # relative; bf16 errors are a tenth of it, a wrong answer is many times as much


def torch_peers(given: Contiguous) -> dict[str, Run]:
    """Every peer in this process by its name; the plain computation where the keys are not too many for it."""
    peers: dict[str, Run] = {peer: partial(sdpa, peer, given) for peer in PEERS}
    peers["FlexDecoding"] = _flex(given)
    if plain_fits(given.k.shape[2]):
        peers["plain softmax"] = partial(plain_softmax, given.q, given.k, given.v)
    return peers


def sdpa(peer: str, given: Contiguous) -> Tensor:
    """Torch's attention by one of its kernels."""
    with sdpa_kernel(PEERS[peer]):
        return F.scaled_dot_product_attention(given.q, given.k, given.v, enable_gqa=True)


def plain_fits(length: int) -> bool:
    """Whether the plain computation is run over so many keys."""
    return length <= MAX_PLAIN_LENGTH


def plain_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two products and a softmax, each with its result in memory, in the dtype of q."""
    group_by_kernel = q.view(k.shape[0], k.shape[1], -1, k.shape[3])  # the query heads of a kv head as rows
    weights = torch.softmax(group_by_kernel @ k.mT / math.sqrt(k.shape[3]), -1)
    return (weights @ v).view(q.shape)


def check_result(run: Run, expected: Tensor) -> Run:
    """A run that raises when its answer is not the expected one: a peer must compute the same thing."""

    def safely() -> Tensor:
        out = run()
        if not (out.is_cuda and torch.cuda.is_current_stream_capturing()):
            error = float((out.float() - expected).norm() / expected.norm())
            if not error < _TOLERANCE:
                raise RuntimeError(f"wrong answer, error {error:.2g}")
        return out

    return safely


def _flex(given: Contiguous) -> Run:
    """Compiled at the first call: a length or a head_dim it cannot do is that call's error, not ours."""
    compiled: list[Run] = []

    def run() -> Tensor:
        if not compiled:
            compiled.append(_compiled_flex(given))
        return compiled[0]()

    return run


def _compiled_flex(given: Contiguous) -> Run:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # slow to import

    torch.compiler.reset()  # each shape its own kernel, none with symbols for sizes
    length = given.k.shape[2]
    blocks = create_block_mask(lambda b, h, q, k: k < length, None, None, 1, length, device=given.q.device)
    fast = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def run() -> Tensor:
        out = fast(given.q, given.k, given.v, block_mask=blocks, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out

    return run


def jax_paged(shapes: Sequence[Shape], timeout: float = 120.0) -> list[Cell]:
    """Microseconds of JAX's paged attention at every shape, or why there are none.

    In a process of its own: JAX's libraries and torch's may not agree, and a crash there is a cell here.
    """
    from benchmarks.decode import jax

    request = json.dumps({"block_size": BLOCK_SIZE, "shapes": shapes})
    command = [sys.executable, "-P", str(jax.__file__), request]
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complained:
        try:
            ended = subprocess.run(command, stdout=said, stderr=complained, timeout=timeout, check=False)
            why = f"exit status {ended.returncode}"
        except (OSError, subprocess.TimeoutExpired) as error:
            why = reason(error)
        said.seek(0)
        complained.seek(0)
        last = [line.strip() for line in complained if line.strip()][-1:]
        cells = [_cell(line) for line in said if line.startswith("{")]
    return (cells + [" ".join([why, *last])[:100]] * len(shapes))[: len(shapes)]


def _cell(line: str) -> Cell:
    found = json.loads(line)
    return float(found["us"]) if "us" in found else str(found["failed"])
