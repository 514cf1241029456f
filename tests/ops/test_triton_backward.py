"""The backward kernels against float64 autograd, in Triton's interpreter or on the GPU where there is one."""

import pytest
import torch
from torch import Tensor

from attnmesh.ops.dense.triton_backward import backward, delta
from attnmesh.ops.dense.triton_tiles import DenseTiles

CUDA = torch.cuda.is_available()
# The interpreter's bf16 dot is wrong, and each of its tiles takes milliseconds: small tiles, small shapes.
DTYPES = [torch.float16, torch.float32] + [torch.bfloat16] * CUDA
TILES = {"query_tiles": DenseTiles(16, 16, 4, 1), "key_tiles": DenseTiles(16, 16, 4, 1)}
HEADS = {"mha": (2, 2), "gqa": (8, 2), "mqa": (3, 1)}
SCALE = 0.2


def make_bounds(q_len: int, kv_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Monotone intervals, with rows that see nothing at both ends."""
    first = torch.randint(0, kv_len // 2, (q_len,)).sort().values
    end = torch.maximum(first, torch.randint(kv_len // 3, kv_len, (q_len,)).sort().values)
    first[:3], end[:3], first[-2:], end[-2:] = 0, 0, kv_len, kv_len
    return first.int().to(device), end.int().to(device)


def visible(visibility: str, q_len: int, kv_len: int, device: torch.device) -> dict:
    """What to tell the kernel, and the same as intervals for the definition."""
    rows = torch.arange(q_len, device=device)
    if visibility == "full":
        return {"told": {"causal": False, "bounds": None}, "bounds": (0 * rows, 0 * rows + kv_len)}
    if visibility == "causal":
        return {"told": {"causal": True, "bounds": None}, "bounds": (0 * rows, rows + 1)}
    bounds = make_bounds(q_len, kv_len, device)
    return {"told": {"causal": False, "bounds": bounds}, "bounds": bounds}


def dense(q: Tensor, k: Tensor, v: Tensor, bounds: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The definition, differentiable: rows that see nothing give 0 and -inf, and no gradient."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    keys = torch.arange(k.shape[2], device=k.device)
    seen = (keys >= bounds[0][:, None]) & (keys < bounds[1][:, None])
    some = seen.any(-1)
    # Rows that see nothing get finite scores here and are cut off after, which keeps NaN out of autograd.
    scores = (q @ k.transpose(-1, -2) * SCALE).masked_fill(~seen & some[:, None], -torch.inf)
    out = torch.where(some[:, None], scores.softmax(-1) @ v, 0.0)
    return out, torch.where(some, scores.logsumexp(-1), -torch.inf)


class Case:
    """Inputs, upstream gradients of both outputs, and the gradients that autograd gives in some dtype."""

    def __init__(self, device, dtype, visibility, heads=(2, 2), q_len=45, kv_len=45, head_dim=32):
        sizes = [(q_len, heads[0]), (kv_len, heads[1]), (kv_len, heads[1]), (q_len, heads[0])]
        tensors = [torch.randn(1, s, h, head_dim, device=device).to(dtype).transpose(1, 2) for s, h in sizes]
        self.q, self.k, self.v, self.grad_out = tensors
        self.grad_lse = torch.randn(1, heads[0], q_len, device=device)
        self.told, self.bounds = visible(visibility, q_len, kv_len, device).values()
        with torch.no_grad():
            self.out, lse = dense(*(x.double() for x in (self.q, self.k, self.v)), self.bounds)
        self.lse = lse.float()
        # A loss over lse = -inf may well send NaN back; such rows have no gradient all the same.
        self.grad_lse[self.lse.isneginf()] = torch.nan
        self.delta = delta(self.out.to(dtype), self.grad_out, self.grad_lse)

    def autograd(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in (self.q, self.k, self.v)]
        out, lse = dense(*leaves, self.bounds)
        upstream = (self.grad_out.to(dtype), self.grad_lse.to(dtype).nan_to_num(0.0))
        return torch.autograd.grad((out, lse), leaves, upstream)

    def buffers(self) -> list[Tensor]:
        """Float32 gradients to add to, strided: full of ones."""
        return [
            torch.ones_like(x, dtype=torch.float32, memory_format=torch.preserve_format)
            for x in (self.q, self.k, self.v)
        ]

    def run(self, grads, **tiles) -> None:
        grad_q, grad_k, grad_v = grads
        backward(
            self.q, self.k, self.v, self.grad_out, self.lse, self.delta,
            scale=SCALE, **self.told, grad_q=grad_q, grad_k=grad_k, grad_v=grad_v, **tiles,
        )  # fmt: skip


def relative(x: Tensor, truth: Tensor) -> float:
    return float((x.double() - truth).norm() / truth.norm())


def check(case: Case, grads: list[Tensor], dtype: torch.dtype) -> None:
    for mine, exact, plain in zip(grads, case.autograd(torch.float64), case.autograd(dtype), strict=True):
        # The buffers held ones, whose float32 rounding is the floor.
        assert relative(mine - 1, exact) <= 2 * relative(plain, exact) + 2e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("visibility", ["full", "causal", "bounds"])
def test_adds_all_gradients(device, visibility, heads, dtype):
    length = 20 if heads == "gqa" else 33
    case = Case(device, dtype, visibility, HEADS[heads], length, length)
    grads = case.buffers()
    case.run(grads, **TILES)
    check(case, grads, dtype)


@pytest.mark.parametrize(("q_len", "kv_len"), [(70, 33), (16, 80), (9, 64)])
def test_any_lengths(device, q_len, kv_len):
    case = Case(device, torch.float32, "bounds", (1, 1), q_len, kv_len, head_dim=24)
    grads = case.buffers()
    case.run(grads, query_tiles=DenseTiles(16, 32, 4, 1), key_tiles=DenseTiles(32, 16, 4, 1))
    check(case, grads, torch.float32)


def test_keys_in_parts_add_up(device):
    """With the lse and delta of the whole softmax, parts of the keys give the same as all of them."""
    case = Case(device, torch.float32, "bounds", (2, 1), 33, 48)
    grads = case.buffers()
    for begin, stop in [(20, 48), (0, 20)]:
        rows = slice(begin, stop)
        bounds = tuple((bound.clamp(begin, stop) - begin).int() for bound in case.bounds)
        backward(
            case.q, case.k[:, :, rows], case.v[:, :, rows], case.grad_out, case.lse, case.delta,
            scale=SCALE, causal=False, bounds=bounds,
            grad_q=grads[0], grad_k=grads[1][:, :, rows], grad_v=grads[2][:, :, rows], **TILES,
        )  # fmt: skip
    check(case, grads, torch.float32)


@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)])
def test_computes_only_what_is_asked(device, wanted):
    case = Case(device, torch.float32, "causal", (1, 1), 20, 20)
    all_grads, some_grads = case.buffers(), case.buffers()
    case.run(all_grads, **TILES)
    case.run([grad if want else None for grad, want in zip(some_grads, wanted, strict=True)], **TILES)
    for some, every, want in zip(some_grads, all_grads, wanted, strict=True):
        assert torch.equal(some, every if want else torch.ones_like(some))


def test_no_keys_and_no_rows(device):
    for q_len, kv_len in [(0, 5), (5, 0)]:
        q = torch.zeros(1, 1, q_len, 32, device=device)
        k = torch.zeros(1, 1, kv_len, 32, device=device)
        rows = torch.zeros(1, 1, q_len, device=device)
        grads = [torch.ones_like(q), torch.ones_like(k), torch.ones_like(k)]
        backward(
            q, k, k, q, rows, rows, scale=SCALE, causal=False, bounds=None,
            grad_q=grads[0], grad_k=grads[1], grad_v=grads[2],
        )  # fmt: skip
        assert all((grad == 1).all() for grad in grads)


@pytest.mark.parametrize("with_lse", [True, False])
def test_delta(device, with_lse):
    out = torch.randn(2, 33, 3, 24, device=device).half().transpose(1, 2)
    grad_out = torch.randn(2, 3, 33, 24, device=device)
    grad_lse = torch.randn(2, 33, 3, device=device).transpose(1, 2) if with_lse else None
    expected = (out.double() * grad_out.double()).sum(-1) - (grad_lse.double() if with_lse else 0)
    torch.testing.assert_close(delta(out, grad_out, grad_lse).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("visibility", ["full", "causal", "bounds"])
def test_default_tiles(device, visibility, head_dim, dtype):
    case = Case(device, dtype, visibility, (8, 2), 1000, 1000, head_dim)
    grads = case.buffers()
    case.run(grads)
    check(case, grads, dtype)
    again = case.buffers()
    case.run(again)
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))  # deterministic
