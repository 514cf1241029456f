"""Descriptors of the copy engine: made in one place, and usable in any thread."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import attnmesh as am
from attnmesh.core.state import State
from attnmesh.ops import gluon
from attnmesh.ops.dense import gluon_backward, gluon_forward
from attnmesh.ops.sparse import gluon_topk
from attnmesh.testing.decode import random_decode
from helpers.sparse_kernels import indexer_call

SOURCE = Path(am.__file__).parent


def test_one_module_makes_descriptors():
    """The others would launch without a context in a thread that has none."""
    using = [path.name for path in SOURCE.rglob("*.py") if "TensorDescriptor" in path.read_text()]
    assert using == ["gluon.py"]


def test_a_context_is_made_current_once_in_a_thread(monkeypatch):
    recorded = []

    class Stream:
        def __init__(self, device):
            self.device = device

        def record_event(self):
            recorded.append(self.device)

    monkeypatch.setattr(gluon, "_contexts", gluon._Contexts())
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)

    def twice():
        for index in (0, 0, 1, -1, 0):
            gluon.ensure_context(index)

    twice()
    in_new_thread(twice)
    assert recorded == [0, 1, 0, 1]


def in_new_thread(function):
    """What a function returns in a thread that has called nothing before."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


# On a GPU: each kernel in a new thread, with tensors of this one.


def qkv(length: int = 512, heads: tuple[int, int] = (8, 2)) -> list[torch.Tensor]:
    shapes = (heads[0], heads[1], heads[1])
    return [torch.randn(2, n, length, 128, dtype=torch.bfloat16, device="cuda") for n in shapes]


def dense():
    q, k, v = qkv()
    return lambda: [am.attention(q, k, v, mask=am.Causal(), backend="gluon")]


def dense_with_gradients():
    leaves = [x.requires_grad_() for x in qkv()]
    return lambda: torch.autograd.grad(am.attention(*leaves, mask=am.Causal(), backend="gluon").sum(), leaves)


def dense_backward():
    """The gradients are there before: filling them would be the first operation of the thread."""
    q, k, v = qkv()
    lse, delta = (torch.randn(q.shape[:3], device="cuda") + shift for shift in (8, 0))
    grad_out = torch.randn_like(q)
    fresh = [[torch.zeros(x.shape, device="cuda") for x in (q, k, v)] for _ in range(3)]

    def run():
        grads = fresh.pop()
        how = dict(zip(("grad_q", "grad_k", "grad_v"), grads, strict=True))
        gluon_backward.backward(q, k, v, grad_out, lse, delta, scale=0.1, causal=True, bounds=None, **how)
        return grads

    return run


def state():
    q, k, v = qkv()
    before = State(torch.randn(q.shape, device="cuda"), torch.randn(q.shape[:3], device="cuda"))
    how = {"scale": 0.1, "causal": True, "bounds": None, "out_dtype": torch.bfloat16}
    return lambda: gluon_forward.forward(q, k, v, state=before, **how)


def decode(backend: str = "gluon", **how):
    shape = {"group": 64, "kv_heads": 1, "block_size": 64, "dtype": torch.bfloat16, "at": "int32", "device": "cuda"}
    latent = {"dims": (576, 512), "v_in_k": True}
    problem = random_decode([300, 70], **shape | (latent if "dims" not in how else {}) | how)
    return lambda: problem.run(backend)


def sparse_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, kv = (torch.randn(*shape, 576, dtype=torch.bfloat16, device="cuda") for shape in ((64, 64), (500,)))
    return q, kv, torch.randint(0, 500, (64, 128), dtype=torch.int32, device="cuda")


def sparse():
    q, kv, indices = sparse_inputs()
    return lambda: am.sparse_attention(q, kv, indices, scale=0.04, d_v=512)


def sparse_with_gradients():
    q, kv, indices = sparse_inputs()
    leaves = [q.requires_grad_(), kv.requires_grad_()]
    return lambda: torch.autograd.grad(am.sparse_attention(*leaves, indices, scale=0.04, d_v=512)[0].sum(), leaves)


def distribution():
    q, kv, indices = sparse_inputs()
    lse = torch.randn(64, 64, device="cuda") + 8
    return lambda: [am.attention_distribution(q, kv, indices, lse, scale=0.04)]


def topk():
    iq, ik = (torch.randn(*shape, 128, dtype=torch.bfloat16, device="cuda") for shape in ((64, 64), (9000,)))
    w = torch.randn(64, 64, device="cuda")
    lo, hi = (torch.full((64,), n, dtype=torch.int32, device="cuda") for n in (0, 9000))
    assert gluon_topk.supports(iq, ik, 512)
    call = indexer_call(iq, ik, w, None, lo, hi, hi, scale=0.01, relu=True)
    return lambda: gluon_topk.topk(call, 512)


def table() -> torch.Tensor:
    return torch.arange(16, dtype=torch.int32, device="cuda").view(2, 8)


def paged_topk():
    iq = torch.randn(2, 1, 64, 128, dtype=torch.bfloat16, device="cuda")
    pool = am.quantize(torch.randn(16, 64, 1, 128, device="cuda"), "fp8_token")
    w, blocks = torch.randn(2, 1, 64, device="cuda"), table()
    at = torch.tensor([500, 300], device="cuda")
    return lambda: am.sparse.paged_indexer_topk(iq, pool, blocks, w, 64, cur_pos=at)


def sparse_decode():
    q = torch.randn(2, 1, 128, 576, dtype=torch.bfloat16, device="cuda")
    pool = am.quantize(torch.randn(16, 64, 1, 576, device="cuda"), "fp8_ds_mla")
    indices, blocks = torch.randint(0, 300, (2, 1, 128), dtype=torch.int32, device="cuda"), table()
    return lambda: am.sparse.paged_sparse_decode_attention(q, pool, blocks, indices, scale=0.04, d_v=512)


LAUNCHES = {
    "dense": dense,
    "dense with gradients": dense_with_gradients,
    "dense backward": dense_backward,
    "state": state,
    "decode latent": decode,
    "decode latent, few rows": lambda: decode(group=16),
    "decode fp8": lambda: decode(storage="fp8_ds_mla"),
    "decode grouped": lambda: decode("gluon_gqa", dims=(128, 128), group=64, kv_heads=2),
    "sparse": sparse,
    "sparse with gradients": sparse_with_gradients,
    "distribution": distribution,
    "top-k": topk,
    "paged top-k": paged_topk,
    "sparse decode": sparse_decode,
}
NO_HOPPER = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9
on_hopper = pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")


def assert_same(found, expected) -> None:
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.float(), y.float(), rtol=0.02, atol=0.02, equal_nan=True)


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("name", LAUNCHES)
def test_the_first_operation_of_a_thread(name):
    """The kernel is loaded before: loading would make a context current."""
    run = LAUNCHES[name]()
    expected = run()
    assert_same(in_new_thread(run), expected)


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("name", LAUNCHES)
def test_the_first_operation_of_virtual_ranks(name):
    run = LAUNCHES[name]()
    expected = run()
    for found in am.run_virtual(2, lambda comm: run()):
        assert_same(found, expected)


@pytest.mark.cuda
@on_hopper
def test_the_first_operation_of_a_thread_in_a_graph():
    """A capture in a new thread: nothing that makes a context current may be forbidden there."""
    run = dense()
    expected = run()
    graph = torch.cuda.CUDAGraph()

    def capture():
        gluon._contexts.devices = {-1}  # as if this thread had no context yet
        with torch.cuda.graph(graph):
            return run()

    found = in_new_thread(capture)
    graph.replay()
    assert_same(found, expected)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_context_of_a_tensor_is_current_for_the_driver():
    x = torch.zeros(1, device="cuda")

    def context() -> int | None:
        found = ctypes.c_void_p()
        assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(found)) == 0
        return found.value

    def before_and_after() -> tuple[int | None, int | None]:
        before = context()
        gluon.ensure_context(x.get_device())
        return before, context()

    before, after = in_new_thread(before_and_after)
    print("context of a new thread:", before)
    assert after == context() is not None
