"""The backward of dense attention over latents: interpreted here, and on a Hopper GPU at real sizes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attnmesh import Causal, Documents, Prefix, SlidingWindow, attention
from attnmesh.core.masks import Mask
from attnmesh.testing.attention import NAMES, assert_attention_close, forward_backward, reference_results
from attnmesh.testing.errors import ROUNDING, assert_close
from helpers.cases import first, make_mask, sweep
from helpers.dense_kernels import dense, mask_case
from helpers.triton_compile import assert_fit, compiled_for_hopper

pytest.importorskip("triton")

from attnmesh.core.visibility import Patch
from attnmesh.ops.dense import dispatch, gluon, latent_backward, triton_backward
from attnmesh.ops.dense.call import Call, Scores
from attnmesh.ops.dense.latent_backward import LatentTiles
from attnmesh.ops.dense.triton_tiles import Bounds

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
runs = pytest.mark.skipif(torch.cuda.is_available() and not HOPPER, reason="a GPU without its copy engine")
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
gradients = partial(triton_backward.gradients, by=latent_backward.backward)
SMALL = LatentTiles(chunk_rows=200, chunk_keys=128)  # of which a case has several, the last of fewer rows
SCALE = 0.05


def surrounded(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Random rows [B, S, H, D] in memory that is NaN before, between and after the sequences."""
    batch, length, *rest = shape
    memory = torch.full((batch, length + 5, *rest), torch.nan, device=device, dtype=dtype)
    memory[:, 2:-3] = torch.randn(shape, device=device)
    return memory[:, 2:-3]


class Case:
    """Queries, latents, the upstream gradients of both outputs, and the gradients in float64 and in 16 bits."""

    def __init__(
        self, device: torch.device, mask: str, heads: int = 16, q_len: int = 29, kv_len: int = 150, *, batch: int = 1,
        width: int = 576, heads_first: bool = False,
    ):  # fmt: skip
        torch.manual_seed(q_len)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
        new = partial(surrounded, device=device, dtype=dtype)
        if heads_first:
            self.q, self.grad_out = (new(batch, heads, q_len, n) for n in (width, 512))
        else:
            self.q, self.grad_out = (new(batch, q_len, heads, n).transpose(1, 2) for n in (width, 512))
        self.k = new(batch, kv_len, 1, width).transpose(1, 2)
        self.seen, self.visible = mask_case(mask, q_len, kv_len, batch, device)
        grad_lse = torch.randn(batch, heads, q_len, device=device)
        leaves = [x.double().requires_grad_() for x in self.inputs]
        out, lse = dense(*leaves, SCALE, self.visible, torch.float64)
        self.exact = torch.autograd.grad((out, lse), leaves, (self.grad_out.double(), grad_lse.double()))
        leaves = [x.clone().requires_grad_() for x in self.inputs]
        plain = dense(*leaves, SCALE, self.visible, dtype)
        self.plain = torch.autograd.grad(plain, leaves, (self.grad_out, grad_lse.to(dtype)))
        self.lse = lse.detach().float()
        # A loss over lse = -inf may well send NaN back; such rows have no gradient all the same.
        self.delta = triton_backward.delta(
            out.detach().to(dtype), self.grad_out, grad_lse.masked_fill(lse.isneginf(), torch.nan)
        )

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.k[..., :512]

    def gradients(self, **how: object) -> list[Tensor | None]:
        how = {"needs": (True, True, True), "scale": SCALE, "tiles": SMALL, **self.seen} | how
        return gradients(*self.inputs, self.grad_out, self.lse, self.delta, **how)

    def check(self, found: list[Tensor | None]) -> None:
        for name, *three in zip(("dq", "dk", "dv"), found, self.plain, self.exact, strict=True):
            if three[0] is not None:
                assert_close(name, *three, rounding=ROUNDING[self.q.dtype])


@runs
@pytest.mark.parametrize(
    ("mask", "how"),
    first(5, [
        ("causal", {"kv_len": 29, "batch": 2}),
        ("union", {"heads": 20}),
        ("sequences", {"batch": 2, "heads_first": True}),
        ("slices", {"q_len": 40, "kv_len": 270}),
        ("full", {"width": 512, "heads": 48, "q_len": 9}),
        ("random", {"heads": 1, "q_len": 250, "heads_first": True}),
        ("window", {"q_len": 70, "kv_len": 70}), ("documents", {"kv_len": 29}), ("random", {}),
        ("causal", {"heads": 128, "q_len": 7, "kv_len": 7}), ("full", {"q_len": 1, "kv_len": 1}),
    ]),
)  # fmt: skip
def test_chunks_of_unequal_rows_and_keys(device, mask, how):
    case = Case(device, mask, **how)
    found = case.gradients()
    case.check(found)
    for x, grad in zip(case.inputs, found, strict=True):
        assert (grad.dtype, grad.stride()) == (x.dtype, torch.empty_like(x).stride())


@runs
@pytest.mark.parametrize("alone", range(3))
def test_one_gradient(device, alone):
    case = Case(device, "documents")
    needs = tuple(i == alone for i in range(3))
    found = case.gradients(needs=needs)
    assert tuple(x is not None for x in found) == needs
    case.check(found)


@runs
@pytest.mark.parametrize("heads_first", [False, sweep(True)])
def test_adds_to_float32_gradients(device, heads_first):
    """As a stage of a ring does: the keys in several calls, the lse and the row sums of all of them."""
    case = Case(device, "random", heads_first=heads_first)
    q, k, v = case.inputs
    grad_q, grad_k, grad_v = (torch.ones_like(x, dtype=torch.float32) for x in (q, k, v))
    for begin, stop in ((0, 70), (70, 71), (71, 150)):
        at = slice(begin, stop)
        bounds = tuple(x.clamp(begin, stop) - begin for x in case.seen["bounds"])
        latent_backward.backward(
            q, k[:, :, at], v[:, :, at], case.grad_out, case.lse, case.delta, scale=SCALE, causal=False, bounds=bounds,
            grad_q=grad_q, grad_k=grad_k[:, :, at], grad_v=grad_v[:, :, at], overwrite_keys=begin == 70, tiles=SMALL,
        )  # fmt: skip
    added = torch.ones(150, 1, device=device)
    added[70] = 0
    case.check([grad_q - 1, grad_k - added, grad_v - added])


@runs
def test_what_is_overwritten_may_hold_anything(device):
    """Rows and keys that take no part in any product, too."""
    case = Case(device, "slices", q_len=40, kv_len=270)
    grads = [torch.full_like(x, torch.nan, dtype=dtype) for x in case.inputs for dtype in (x.dtype, torch.float32)]
    for given in (grads[::2], grads[1::2]):
        latent_backward.backward(
            *case.inputs, case.grad_out, case.lse, case.delta, scale=SCALE, **case.seen, tiles=SMALL, overwrite=True,
            **dict(zip(("grad_q", "grad_k", "grad_v"), given, strict=True)),
        )  # fmt: skip
        case.check(given)
    for how in ({"q_len": 0}, {"kv_len": 0}):
        rows, keys = how.get("q_len", 3), how.get("kv_len", 3)
        q, k = torch.ones(1, 16, rows, 576, device=device).half(), torch.ones(1, 1, keys, 576, device=device).half()
        terms = torch.zeros(1, 16, rows, device=device)
        options = {"needs": (True, True, True), "scale": 1.0, "causal": False, "bounds": None}
        found = gradients(q, k, k[..., :512], q[..., :512], terms, terms, **options)
        assert not any(x.any() for x in found)


def test_chunks_leave_out_keys_that_no_row_sees():
    """A causal mask, documents, and bounds that the host does not know."""
    q, k = torch.empty(1, 16, 100, 576), torch.empty(1, 1, 1000, 576)
    end = 9 * torch.arange(100, dtype=torch.int32)[None, None] + 9
    tiles = LatentTiles(chunk_rows=16 * 40, chunk_keys=512)
    chunks, most = latent_backward._chunks(Bounds.of((end - 9, end)), q, k, tiles)
    spans = [(positions, [keys for _, keys in parts]) for positions, parts in chunks[0]]
    assert spans == [
        (slice(0, 40), [slice(0, 384)]), (slice(40, 80), [slice(256, 768)]), (slice(80, 100), [slice(640, 1000)])
    ]  # fmt: skip
    assert most == 640 * 512
    on_device = Bounds(end - 9, end, (100, 0), 1, {})
    chunks, _ = latent_backward._chunks(on_device, q, k, tiles)
    assert [keys for _, keys in chunks[0][0][1]] == [slice(0, 512), slice(512, 1000)]


def test_what_is_not_served_has_a_reason(monkeypatch):
    q, k = torch.empty(1, 16, 200, 576).half(), torch.empty(1, 1, 200, 576).half()
    v = k[..., :512]

    def call(q: Tensor, v: Tensor, mask: Mask = Causal(), softcap: float | None = None) -> Call:  # noqa: B008
        patch = Patch(mask, (range(q.shape[2]),), (range(200),))
        return Call(q, k, v, patch, Scores(1.0, softcap=softcap))

    def reason(*given: Any, **options: Any) -> str | None:
        return latent_backward.why_not(call(*given, **options))

    assert reason(q, v) is None
    assert "v = k[..., :512]" in reason(q, v.clone())
    assert "softcap" in reason(q, v, softcap=2.0)
    few, narrow = (q[:, :, :100], v), (q, v, Documents([20] * 10))
    for served, why in ((few, "so few rows and keys"), (narrow, "attends to so few keys")):
        assert reason(*served) is None
        # By name it is served: only "auto" minds the time.
        monkeypatch.setattr(gluon, "is_hopper", lambda device: True)
        assert dispatch.choose_backward(call(*served), "gluon").backend == "gluon"
        assert any(why in reason for _, reason in dispatch.choose_backward(call(*served), "auto").why_not)
    assert latent_backward.why_slower(call(q, v, Documents([100, 100]))) is None
    torch.use_deterministic_algorithms(True)
    try:
        assert "CUBLAS_WORKSPACE_CONFIG" in reason(q, v)
    finally:
        torch.use_deterministic_algorithms(False)


def test_chunks_of_the_usual_size():
    """Positions: bounded by memory, by the waste under a causal mask, and from below by the speed of products."""
    positions = {
        (128, 8192): 128, (32, 8192): 512, (16, 8192): 1024, (128, 4096): 256, (32, 4096): 512, (128, 2048): 256,
        (128, 32768): 128, (16, 512): 1024,
    }  # fmt: skip
    for (heads, length), expected in positions.items():
        assert latent_backward._positions(heads, length, length, LatentTiles()) == expected


def launch(width: int, heads: int, dtype: str) -> None:
    """A case, in the process that compiles."""
    q, k = (torch.zeros(1, n, 10, width, dtype=getattr(torch, dtype)) for n in (heads, 1))
    terms = torch.zeros(1, heads, 10)
    gradients(
        q, k, k[..., :512], q[..., :512], terms, terms, needs=(True, True, True), scale=0.1, causal=True, bounds=None
    )


def test_compiles_for_hopper():
    """Three programs on a processor: that many registers, and that much shared memory."""
    kernels = compiled_for_hopper(__file__, [(576, 128, "bfloat16"), (512, 16, "float16")])
    assert_fit(kernels)
    for kernel in kernels:
        assert kernel["wgmma"]
        assert kernel["registers"] <= 168
        assert 3 * (kernel["shared"] + 1024) <= 228 * 1024


# On a GPU: by `attention`.


def latents(rows: int, keys: int, heads: int, dtype: torch.dtype, *, batch: int = 1) -> list[Tensor]:
    """Queries, keys, values that are features of the keys, and the gradients of out and lse."""
    torch.manual_seed(rows)
    q, grad_out = (torch.randn(batch, rows, heads, n, device="cuda").to(dtype).transpose(1, 2) for n in (576, 512))
    k = torch.randn(batch, 1, keys, 576, device="cuda").to(dtype)
    return [q, k, k[..., :512], grad_out, torch.randn(batch, heads, rows, device="cuda")]


@pytest.fixture
def calls(monkeypatch):
    """The calls of the backward."""
    found, real = [], latent_backward.backward

    def watched(*args: object, **how: object) -> None:
        found.append(how)
        real(*args, **how)

    monkeypatch.setattr(latent_backward, "backward", watched)
    return found


def results_of(mask: Mask, inputs: list[Tensor], **how: object) -> list[Tensor]:
    return forward_backward(partial(attention, mask=mask, return_lse=True, scale=0.04, **how), inputs)


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize(
    ("mask", "heads", "dtype"),
    [
        *((make_mask(name, 700), 32, torch.bfloat16) for name in ("full", "causal", "documents", "causal & documents")),
        (SlidingWindow(90, 30), 32, torch.bfloat16),
        (SlidingWindow(100, 0) | Prefix(60), 32, torch.bfloat16),
        (SlidingWindow(30, 2) & make_mask("causal & documents", 700), 128, torch.float16),
    ],
    ids=str,
)
def test_gradients_of_attention(mask, heads, dtype, calls):
    inputs = latents(700, 700, heads, dtype)
    results = results_of(mask, inputs, backend="gluon")
    assert len(calls) == 1
    assert_attention_close(results, inputs, mask, scale=0.04)


@pytest.mark.cuda
@on_hopper
def test_a_chunk_of_a_prompt(calls):
    """Rows and keys at positions of their own. Rows of a document without keys, and keys of later rows, hold NaN."""
    inputs = latents(300, 900, 64, torch.bfloat16)
    mask = Documents([800, 100, 300]) & Causal()
    at = {
        "q_positions": torch.arange(700, 1000),
        "k_positions": torch.cat([torch.arange(60, 800), torch.arange(900, 1060)]),
    }
    exact, plain = (reference_results(inputs, mask, scale=0.04, **at, plain=plain) for plain in (False, True))
    inputs[0][:, :, 100:200] = inputs[1][:, :, 840:] = torch.nan
    results = results_of(mask, inputs, **at, backend="gluon")
    assert len(calls) == 1
    for name, *three in zip(NAMES, results, plain, exact, strict=True):
        assert_close(name, *three, rounding=ROUNDING[torch.bfloat16])


@pytest.mark.cuda
@on_hopper
def test_chunks_of_the_usual_size_in_a_graph(calls):
    """Captured, and replayed with other inputs."""
    inputs, others = (latents(n, 1000, 128, torch.bfloat16) for n in (1000, 1001))
    others = [x[:, :, :1000] for x in others]
    expected = results_of(Causal(), others)
    results_of(Causal(), inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results_of(Causal(), inputs)
    assert len(calls) == 3
    for x, y in zip(inputs, others, strict=True):
        x.copy_(y)
    graph.replay()
    for x, y in zip(found, expected, strict=True):
        assert float((x - y).double().norm() / y.double().norm()) < 1e-3


@pytest.mark.cuda
@on_hopper
def test_the_memory_of_a_chunk_is_bounded():
    """Twice as many positions take more memory for the gradients, and no more for weights."""

    def workspace(length: int) -> int:
        inputs = latents(length, length, 32, torch.bfloat16)
        terms = torch.zeros(1, 32, length, device="cuda")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        how = {"needs": (True, True, True), "scale": 0.04, "causal": False, "bounds": None}
        found = gradients(*inputs[:4], terms, terms, **how)
        sums = sum(x.numel() * (x.element_size() + 4 * (x.shape[1] == 1)) for x in found)
        return torch.cuda.max_memory_allocated() - before - sums

    assert workspace(17000) <= workspace(8500) * 1.1 <= 650e6
