"""`torch.compile(fullgraph=True)` of Transformers models: one graph for every packing, with the eager results."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from attnmesh import ContextParallel, register_attention, shard_inputs
from attnmesh.comm import Comm, SoloComm
from attnmesh.core.masks import Causal, Chunked, SlidingWindow
from attnmesh.integrations.transformers_attention import _traced_kind
from helpers.processes import run_processes

ROWS, LENGTH = 2, 24
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "attn_implementation": "attnmesh",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_compiled():
    register_attention()
    torch._dynamo.reset()


def llama(layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": layers}))


def ids(length: int = LENGTH) -> Tensor:
    return torch.arange(ROWS * length).mul(7).remainder(64).view(ROWS, length)


def packed(*cuts: int) -> Tensor:
    """position_ids of two documents per row."""
    return torch.stack([torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)]) for cut in cuts])


def padded(*columns: slice) -> Tensor:
    real = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    for row, hidden in enumerate(columns):
        real[row, hidden] = 0
    return real


def results(model: torch.nn.Module, run: torch.nn.Module, call: dict) -> dict[str, Tensor]:
    model.zero_grad()
    loss = run(**call).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


def assert_one_graph(model: torch.nn.Module, calls: list[dict], backend: str = "aot_eager", graphs: int = 1) -> None:
    """The compiled model has the results of the uncompiled one in all calls."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for call in calls:
        expected, found = results(model, model, call), results(model, compiled, call)
        for name, x in expected.items():
            torch.testing.assert_close(found[name], x, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
    assert counter.frame_count == graphs


def on_one_device(**more: Tensor) -> dict:
    return {"input_ids": ids(), "labels": ids(), "use_cache": False, **more}


@pytest.mark.parametrize(
    ("size", "window", "chunk", "mask"),
    [(None, 4, None, Causal()), (4, 4, None, SlidingWindow(3)), (4, 4, 8, SlidingWindow(3)), (8, 4, 8, Chunked(8))],
)
def test_the_mask_of_a_traced_layer(size, window, chunk, mask):
    assert _traced_kind(size, True, SimpleNamespace(sliding_window=window, attention_chunk_size=chunk)) == mask


@pytest.mark.parametrize(
    ("size", "window", "chunk", "served", "said"),
    [
        (4, 4, 4, True, "window from chunks"),
        (3, 4, 8, True, "window from chunks"),
        (4, 4, None, False, "must be causal"),
    ],
)
def test_a_mask_of_a_traced_layer_that_could_be_another_is_refused(size, window, chunk, served, said):
    with pytest.raises(ValueError, match=said):
        _traced_kind(size, served, SimpleNamespace(sliding_window=window, attention_chunk_size=chunk))


@pytest.mark.sweep
def test_packed_rows_on_one_device():
    assert_one_graph(llama(), [on_one_device(position_ids=at) for at in (packed(3, 7), packed(5, 11), packed(0, 24))])


@pytest.mark.sweep
def test_padded_rows_on_one_device():
    masks = padded(), padded(slice(18, None), slice(0, 5)), padded(slice(0), slice(20, None))
    assert_one_graph(llama(), [on_one_device(attention_mask=mask) for mask in masks])


@pytest.mark.sweep
def test_packed_and_padded_rows_over_ranks():
    cp = ContextParallel(SoloComm())
    calls = [
        shard_inputs(cp, ids(), ids(), position_ids=packed(3, 7)),
        shard_inputs(cp, ids(), ids(), document_lengths=[[3, 4, 5, 12], [1] * LENGTH]),
        shard_inputs(cp, ids(), ids(), attention_mask=padded(slice(18, None), slice(0, 5))),
    ]
    assert_one_graph(llama(layers=1), calls)
    with pytest.raises(RuntimeError, match="position_ids must be what shard_inputs returned, got another"):
        torch.compile(llama(1), backend="aot_eager", fullgraph=True)(**{**calls[0], "position_ids": packed(1, 2)})


@pytest.mark.sweep
def test_windows():
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5))
    cp = ContextParallel(SoloComm())
    assert_one_graph(model, [shard_inputs(cp, ids(), ids(), position_ids=packed(3 + i, 7)) for i in range(3)])
    assert_one_graph(model, [on_one_device(position_ids=packed(3 + i, 7)) for i in range(2)])


@pytest.mark.sweep
def test_lengths_compile_once_more():
    cp = ContextParallel(SoloComm())
    calls = [shard_inputs(cp, ids(n), ids(n), document_lengths=[[5, n - 5], [n]]) for n in (20, 24, 40)]
    assert_one_graph(llama(layers=1), calls, graphs=2)


def two_ranks(comm: Comm) -> None:
    register_attention()
    cp = ContextParallel(comm)
    calls = [shard_inputs(cp, ids(), ids(), position_ids=packed(3 + i, 9)) for i in range(2)]
    assert_one_graph(llama(layers=1), calls, "inductor")


@pytest.mark.sweep
def test_two_ranks():
    if not shutil.which("g++"):
        pytest.skip("inductor needs a C++ compiler")
    run_processes(2, two_ranks, timeout=550)
