"""Whole paths at the sizes of real models, against float64.

The training step of a sparse layer, a packed batch, decode steps of ragged sequences, and text from a model. Each is a
function of its sizes, which are tiny where there is no GPU.
"""

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh.core.state import State
from attnmesh.ops.storage import Quantized, Stored, dequantize
from attnmesh.testing.attention import NAMES, forward_backward, reference_results
from attnmesh.testing.decode import UNUSED_ENTRIES, change_stored, poison_cache
from attnmesh.testing.errors import ROUNDING, assert_close
from helpers.cases import sweep
from helpers.chosen_keys import ChosenKeys, Indexer, assert_results, assert_topk, random_lengths
from helpers.decode import LSE_UNITS, assert_decode_close

CUDA = torch.cuda.is_available()
on_gpu = [pytest.mark.cuda, pytest.mark.skipif(not CUDA, reason="needs a GPU")]


def draw(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


# A layer with sparse attention, as it is trained.


class Layer(NamedTuple):
    """A layer: rows from position `first` on over so many keys."""

    rows: int
    keys: int
    first: int
    heads: int
    d: int
    d_v: int
    topk: int
    index_heads: int
    index_dim: int


V32 = Layer(4096, 32768, 32768 - 4096, heads=128, d=576, d_v=512, topk=2048, index_heads=64, index_dim=128)
SMALL = Layer(40, 100, 60, heads=3, d=24, d_v=16, topk=30, index_heads=4, index_dim=8)


def check_layer(size: Layer, device: str, dtype: torch.dtype, backend: str = "auto") -> None:
    """Select keys, attend to them, let the indexer learn the attention: everything forward and backward.

    The rows of `out` and `dq` that are compared are a few; the gradients of keys are those of all rows.
    """
    q, kv = draw(device, dtype, size.rows, size.heads, size.d), draw(device, dtype, size.keys, size.d)
    iq = draw(device, dtype, size.rows, size.index_heads, size.index_dim)
    ik, w = draw(device, dtype, size.keys, size.index_dim), torch.randn(size.rows, size.index_heads, device=device)
    for keys in (kv, ik):
        keys[size.first + size.rows :] = torch.nan  # beyond the last row
    leaves = [x.requires_grad_() for x in (q, kv, iq, ik, w)]
    scale, how = 2 * size.d**-0.5, {"backend": backend}
    indexer = Indexer(iq.detach(), ik.detach(), w.detach(), size.index_dim**-0.5)

    causal = am.SparseMask(causal=True, q_start=size.first)
    top = am.indexer_topk(iq, ik, w, size.topk, scale=indexer.scale, mask=causal, **how)
    mask = am.SparseMask(topk_length=top.lengths)
    out, lse = am.sparse_attention(q, kv, top.indices, scale=scale, d_v=size.d_v, mask=mask, **how)
    p = am.attention_distribution(q, kv, top.indices, lse, scale=scale, mask=mask, **how)
    loss = am.indexer_kl_loss(
        iq, ik, w, top.indices, p, mask=mask, scale=indexer.scale, reduction="none", **how
    )  # fmt: skip
    upstream = [torch.randn_like(x) for x in (out, lse, loss)]
    gradients = torch.autograd.grad([out, lse, loss], leaves, upstream)

    some = torch.arange(0, size.rows, max(1, size.rows // 256), device=device)
    visible = size.first + 1 + torch.arange(size.rows, device=device)
    assert_topk(top, indexer, size.topk, torch.zeros_like(visible), visible, some)
    valid = torch.arange(size.topk, device=device) < top.lengths[:, None]
    chosen = ChosenKeys(q.detach(), kv.detach(), top.indices, valid, scale, size.d_v)
    exact, plain = (chosen.results(*upstream[:2], keep=some, dtype=x) for x in (torch.float64, dtype))
    found = dict(zip(("out", "lse", "distribution", "dq"), (x[some] for x in (out, lse, p, gradients[0])), strict=True))
    assert_results(found | {"dkv": gradients[1]}, plain, exact, dtype)
    exact, plain = (indexer.losses(chosen, p, upstream[2], dtype=x) for x in (torch.float64, dtype))
    found = dict(zip(("loss", "d_iq", "d_ik", "d_w"), (loss, *gradients[2:]), strict=True))
    assert_results(found, plain, exact, dtype)


@pytest.mark.parametrize("place", ["end", "beginning"])
@pytest.mark.parametrize(
    ("size", "device", "dtype"),
    [
        pytest.param(SMALL, "cpu", torch.float32, id="small"),
        pytest.param(SMALL, "cpu", torch.bfloat16, id="small bf16"),
        pytest.param(V32, "cuda", torch.bfloat16, id="V3.2", marks=on_gpu),
    ],
)
def test_the_step_of_a_sparse_layer(size, device, dtype, place):
    check_layer(size if place == "end" else size._replace(first=0), device, dtype)


# A packed batch.


def document_lengths(total: int, longest: int) -> list[int]:
    """Unequal lengths that add up, of which some are 1."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        drawn = int(longest ** float(torch.rand((), generator=generator)))  # as many short ones as long ones
        lengths += [min(left, drawn), *([1, 1] if len(lengths) % 5 == 0 and left > drawn + 2 else [])]
    return lengths


def check_packed(
    length: int, longest: int, heads: tuple[int, int], head_dim: int, device: str, dtype: torch.dtype
) -> None:
    """Every document, forward and backward, is what it would be alone."""
    q, grad_out = (draw(device, dtype, 1, heads[0], length, head_dim) for _ in range(2))
    k, v = (draw(device, dtype, 1, heads[1], length, head_dim) for _ in range(2))
    inputs = [q, k, v, grad_out, torch.randn(1, heads[0], length, device=device)]
    lengths = document_lengths(length, longest)
    assert min(lengths) == 1
    assert max(lengths) > longest // 4
    mask = am.Documents(lengths) & am.Causal()
    found = forward_backward(lambda *x: am.attention(*x, mask=mask, return_lse=True), inputs)
    ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    exact, plain = ([torch.empty(x.shape, dtype=kept, device=device) for x in found] for kept in (torch.float64, dtype))
    group = heads[0] // heads[1]
    for begin, stop in pairwise(ends):
        # A few heads at a time, where a document's scores of all heads are too many.
        at_once = heads[1] if stop - begin <= 512 else 1
        for first in range(0, heads[1], at_once):
            of_q, of_k = slice(first * group, (first + at_once) * group), slice(first, first + at_once)
            sides = (of_q, of_k, of_k, of_q, of_q)
            part = [x[:, side, begin:stop] for x, side in zip(inputs, sides, strict=True)]
            for into, way in ((exact, False), (plain, True)):
                results = reference_results(part, am.Causal(), plain=way)
                for target, side, result in zip(into, (of_q, of_q, of_q, of_k, of_k), results, strict=True):
                    target[:, side, begin:stop] = result
    for name, *three in zip(NAMES, found, plain, exact, strict=True):
        assert_close(name, *three, rounding=ROUNDING[dtype])


@pytest.mark.parametrize(
    ("length", "longest", "heads", "head_dim", "device", "dtype"),
    [
        pytest.param(300, 90, (4, 2), 16, "cpu", torch.float32, id="small"),
        pytest.param(300, 90, (4, 2), 16, "cpu", torch.bfloat16, id="small bf16"),
        pytest.param(32768, 5000, (32, 8), 128, "cuda", torch.bfloat16, id="32k", marks=on_gpu),
    ],
)
def test_a_packed_batch(length, longest, heads, head_dim, device, dtype):
    check_packed(length, longest, heads, head_dim, device, dtype)


# A decode step.


class Heads(NamedTuple):
    """The query heads, KV heads and widths of a decode step; values are in the keys where KV heads have latents."""

    q: int
    kv: int
    dims: tuple[int, int]
    storage: str = "plain"

    @property
    def latent(self) -> bool:
        return self.dims[0] != self.dims[1]


GQA, MLA = Heads(32, 8, (128, 128)), Heads(128, 1, (576, 512))
SHAPES = {
    "GQA": GQA, "GQA, 64 heads of a KV head": Heads(128, 2, (128, 128)), "MLA": MLA,
    "MLA, 16 heads": MLA._replace(q=16), "MLA in fp8": MLA._replace(storage="fp8_ds_mla"),
}  # fmt: skip


class Pages(NamedTuple):
    """A block table whose unused entries are garbage, for a pool of so many blocks, and the slots that are used."""

    table: Tensor
    live: Tensor

    @classmethod
    def of(cls, lengths: Tensor, longest: int, block_size: int = 64) -> "Pages":
        used = torch.arange(-(-longest // block_size)) < -(-lengths[:, None] // block_size)
        blocks = int(used.sum()) + 3
        garbage = torch.tensor(UNUSED_ENTRIES, dtype=torch.int32)
        table = garbage[torch.arange(used.numel()) % len(garbage)].view(used.shape)
        table[used] = torch.randperm(blocks)[: int(used.sum())].int()
        live = torch.zeros(blocks, block_size, dtype=torch.bool)
        for entries, taken, length in zip(table, used, lengths.tolist(), strict=True):
            live[entries[taken].long()] = (torch.arange(int(taken.sum()) * block_size) < length).view(-1, block_size)
        return cls(table, live)

    def pools(self, heads: int, width: int, storage: str, device: str, dtype: torch.dtype) -> tuple[Stored, Stored]:
        """A random pool, and the same with poison in all slots that are not used."""
        x = draw(device, dtype, *self.live.shape, heads, width)
        pool: Stored = x if storage == "plain" else am.quantize(x, storage)
        poison, live = change_stored(torch.clone, pool), self.live.to(device)
        poison_cache(poison)
        parts = [[y] if isinstance(y, Tensor) else [y.values, y.scales, y.rope] for y in (pool, poison)]
        for good, bad in zip(*parts, strict=True):
            if good is not None:
                good, bad = (y.view(torch.int8) if y.itemsize == 1 else y for y in (good, bad))
                bad[live] = good[live]
        return pool, poison

    def slots(self, sequence: int, length: int, device: str) -> Tensor:
        """Where the tokens of a sequence lie in the pool."""
        size = self.live.shape[1]
        begins = self.table[sequence, : -(-length // size)].long()[:, None] * size
        return (begins + torch.arange(size)).flatten()[:length].to(device)


def check_decode_step(shape: Heads, sequences: int, longest: int, tokens: int, device: str, dtype: torch.dtype) -> None:
    """Sequences of 0, 1 and many tokens; unused entries of the table are garbage, unused slots of the pool are NaN."""
    lengths = random_lengths(sequences, longest)
    pages = Pages.of(lengths, longest)
    k, k_poisoned = pages.pools(shape.kv, shape.dims[0], shape.storage, device, dtype)
    if shape.latent:
        v, v_poisoned = k, k_poisoned if isinstance(k, Quantized) else k_poisoned[..., : shape.dims[1]]
    else:
        v, v_poisoned = pages.pools(shape.kv, shape.dims[1], shape.storage, device, dtype)
    q = draw(device, dtype, sequences, shape.q, tokens, shape.dims[0])
    cur_pos = (lengths - 1).int().to(device)
    found = State(
        *am.paged_decode_attention(q, k_poisoned, v_poisoned, pages.table.to(device), cur_pos=cur_pos, return_lse=True)
    )
    exact, plain = (
        State(*(torch.cat(x) for x in zip(*alone(q, k, v, pages, lengths, shape, x), strict=True)))
        for x in (torch.float64, dtype)
    )
    problem: Any = SimpleNamespace(q=q, options={}, exact=lambda: exact, plain=lambda: plain)
    # There are many more rows than in a test, and each lse is that of sums over the width.
    assert_decode_close(found, problem, 2 * LSE_UNITS * max(1.0, problem.q.shape[-1] / 128))
    am.decode.check_decode_errors()


def alone(
    q: Tensor, k: Stored, v: Stored, pages: Pages, lengths: Tensor, shape: Heads, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """Out and lse of one sequence after another."""
    tokens = q.shape[2]
    for b, length in enumerate(lengths.tolist()):
        at = pages.slots(b, length, q.device)
        keys, rows = (dequantized(side, at, dtype) for side in (k, v))
        queries = q[b].to(dtype).unflatten(0, (shape.kv, -1))  # [kv heads, group, tokens, d]
        scores = torch.einsum("hgtd,nhd->hgtn", queries, keys) * shape.dims[0] ** -0.5
        own = length - tokens + torch.arange(tokens, device=q.device)
        seen = torch.arange(length, device=q.device) <= own[:, None]
        scores = scores.masked_fill(~seen, -torch.inf)
        p = scores.masked_fill(~seen.any(1, keepdim=True), 0.0).softmax(-1) * seen.any(1, keepdim=True)
        out = torch.einsum("hgtn,nhd->hgtd", p, rows[..., : shape.dims[1]])
        yield out.flatten(0, 1)[None], scores.logsumexp(-1).flatten(0, 1)[None]


def dequantized(pool: Stored, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Some slots of a pool, [slots, heads, width]."""
    some = change_stored(lambda x: x.flatten(0, 1)[slots].unsqueeze(0), pool)
    return dequantize(some, dtype, head_axis=2)[0]


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize(
    ("shape", "sequences", "longest", "device", "dtype"),
    [
        pytest.param(Heads(4, 2, (16, 16)), 12, 90, "cpu", torch.float32, id="small"),
        pytest.param(Heads(4, 1, (24, 16)), 12, 90, "cpu", torch.bfloat16, id="small latent"),
        pytest.param(MLA._replace(q=4, storage="fp8_ds_mla"), 12, 90, "cpu", torch.bfloat16, id="small fp8"),
        *(pytest.param(shape, 300, 4000, "cuda", torch.bfloat16, id=n, marks=on_gpu) for n, shape in SHAPES.items()),
    ],
)
def test_a_decode_step(shape, sequences, longest, device, dtype, tokens):
    check_decode_step(shape, sequences, longest, tokens, device, dtype)


class SparseStep(NamedTuple):
    """A decode step with sparse attention over fp8 caches."""

    sequences: int
    longest: int
    heads: int
    topk: int
    index_heads: int


def check_sparse_decode_step(size: SparseStep, tokens: int, device: str, dtype: torch.dtype) -> None:
    """Select keys of paged sequences and attend to them; most sequences have fewer keys than would be selected."""
    lengths = random_lengths(size.sequences, size.longest)
    pages = Pages.of(lengths, size.longest)
    pool, poisoned = pages.pools(1, 576, "fp8_ds_mla", device, dtype)
    index_pool, index_poisoned = pages.pools(1, 128, "fp8_token", device, dtype)
    q = draw(device, dtype, size.sequences, tokens, size.heads, 576)
    iq = draw(device, dtype, size.sequences, tokens, size.index_heads, 128)
    w = torch.randn(size.sequences, tokens, size.index_heads, device=device)
    table, cur_pos = pages.table.to(device), (lengths - 1).int().to(device)
    top = am.sparse.paged_indexer_topk(iq, index_poisoned, table, w, size.topk, cur_pos=cur_pos, scale=0.1)
    results = am.sparse.paged_sparse_decode_attention(q, poisoned, table, top, scale=0.06, return_max_logits=True)
    am.decode.check_decode_errors()

    slots = torch.zeros_like(top.indices)
    for b, length in enumerate(lengths.tolist()):
        at = pages.slots(b, length, device)
        indexer = Indexer(iq[b], dequantized(index_pool, at, torch.float64)[:, 0], w[b], 0.1)
        end = (length - tokens + 1 + torch.arange(tokens, device=device)).clamp(min=0)
        of_one = type(top)(*(x[b] for x in top))
        assert_topk(of_one, indexer, size.topk, torch.zeros_like(end), end, torch.arange(tokens, device=device))
        if length:
            slots[b] = at[top.indices[b].long().clamp(min=0)].int()
    every = torch.arange(pages.live.numel(), device=device)
    case = ChosenKeys(
        q.flatten(0, 1), dequantized(pool, every, torch.float64)[:, 0], slots.flatten(0, 1),
        torch.arange(size.topk, device=device) < top.lengths.flatten()[:, None], 0.06, 512,
    )  # fmt: skip
    found = dict(zip(("out", "lse", "max_logits"), (x.flatten(0, 1) for x in results), strict=True))
    zeros = torch.zeros_like(found["out"]), torch.zeros_like(found["lse"])
    assert_results(found, case.results(*zeros, dtype=dtype), case.results(*zeros), dtype)


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize(
    ("size", "device", "dtype"),
    [
        pytest.param(SparseStep(12, 150, 4, 70, 3), "cpu", torch.float32, id="small"),
        pytest.param(SparseStep(300, 4000, 128, 2048, 64), "cuda", torch.bfloat16, id="V3.2", marks=on_gpu),
    ],
)
def test_a_sparse_decode_step(size, device, dtype, tokens):
    check_sparse_decode_step(size, tokens, device, dtype)


# Text.


def check_generation(device: str, prompt_lengths: list[int], new_tokens: int, head_dim: int) -> None:
    """A random model says greedily what Transformers' own attention makes it say.

    Where two tokens are about as likely, rounding decides, and the texts part: there, and from there on, each token is
    one of the likeliest in float64 for the text before it.
    """
    transformers = pytest.importorskip("transformers")
    from attnmesh.integrations.transformers_attention import register_attention

    register_attention()
    config = transformers.LlamaConfig(
        vocab_size=211, hidden_size=6 * head_dim, intermediate_size=8 * head_dim, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=4096,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, 0.0 if weight.dim() > 1 else 1.0, 1.5 * weight.shape[-1] ** -0.5)
    model = model.to(device).eval()
    prompts = [torch.randint(1, 211, (n,)).tolist() for n in prompt_lengths]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        said = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens)
        expected.append(said[0, len(prompt) :].tolist())

    model.set_attn_implementation("attnmesh")
    room = sum(prompt_lengths) + len(prompts) * (new_tokens + 64)
    generator = am.Generator(model, cache_tokens=room, max_sequences=len(prompts))
    found: list[list[int]] = [[] for _ in prompts]
    for token in generator.generate(prompts, max_new_tokens=new_tokens, stop=[]):
        found[token.row].append(token.id)
    model.set_attn_implementation("eager")
    model.double()
    compared = 0
    for prompt, mine, theirs in zip(prompts, found, expected, strict=True):
        assert len(mine) == new_tokens
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *mine]], device=device)).logits[0, len(prompt) - 1 : -1]
        first, second = logits.topk(2).values.T
        behind = first - logits.gather(1, torch.tensor(mine, device=device)[:, None])[:, 0]
        assert behind.max() < 1e-3, f"token {int(behind.argmax())} is not the likeliest"
        sure = int(((first - second > 2e-3).int().cumprod(0)).sum())  # tokens before the first that is not certain
        assert mine[:sure] == theirs[:sure]
        compared += sure
    assert compared >= new_tokens // 2, "too many tokens are about as likely: choose other weights"


@pytest.mark.parametrize(
    ("device", "prompt_lengths", "new_tokens", "head_dim"),
    [
        sweep("cpu", [1, 37, 9], 20, 8, id="small"),
        pytest.param("cuda", [1, 600, 37, 130], 200, 64, id="200 tokens", marks=on_gpu),
    ],
)
def test_text(device, prompt_lengths, new_tokens, head_dim):
    check_generation(device, prompt_lengths, new_tokens, head_dim)
