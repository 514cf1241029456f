"""reproducible=True on one device: the bits of a row do not depend on the other rows of a call, and they are right."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from attnmesh import (
    BlockCausal,
    Causal,
    Chunked,
    Documents,
    Full,
    Global,
    Mask,
    Padding,
    PerSequence,
    Prefix,
    SlidingWindow,
    attention,
    explain_attention,
)
from attnmesh.ops.dense import aligned_tiles, reproducible
from attnmesh.ops.dense.reproducible import KEYS, LEAF, ROWS, _Problem
from attnmesh.testing.attention import assert_attention_close, forward_backward, random_inputs
from helpers.cases import sweep

LENGTH = 2 * LEAF + 44

MASKS: dict[str, Mask] = {
    "full": Full(),
    "causal": Causal(),
    "window": SlidingWindow(70, 3),
    "documents": Causal() & Documents([100, 0, 57, LENGTH - 157]),
    "union": SlidingWindow(40) | Global(5),
    "prefix": Prefix(150),
    "chunked": Chunked(90) & Causal(),
    "blocks": BlockCausal(33),
    "per sequence": PerSequence([Causal(), SlidingWindow(17)]),
    "padding": Padding([0, 61]) & Causal(),
}
CASES = [
    # mask, dtype, heads, widths of keys and values, score terms
    ("causal", torch.float32, (4, 2), (16, 16), {}),
    ("window", torch.bfloat16, (3, 1), (20, 9), {"softcap": 3.0}),
    ("documents", torch.float16, (2, 2), (16, 16), {"alibi_slopes": torch.tensor([0.3, 0.02])}),
    ("union", torch.float32, (6, 2), (16, 24), {}),
    ("per sequence", torch.float64, (2, 1), (8, 8), {}),
    sweep("full", torch.float32, (5, 5), (40, 40), {}),
    sweep("prefix", torch.bfloat16, (4, 2), (64, 64), {}),
    sweep("chunked", torch.float16, (4, 1), (128, 128), {}),
    sweep("blocks", torch.float32, (1, 1), (1, 3), {}),
    sweep("padding", torch.float32, (4, 2), (16, 16), {"softcap": 2.0}),
]
every_case = pytest.mark.parametrize(("name", "dtype", "heads", "widths", "terms"), CASES)
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


def results(inputs: list[Tensor], mask: Mask, sinks: Tensor | None = None, **how: object) -> list[Tensor]:
    """out, lse, dq, dk, dv, and dsinks if there are sinks."""

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, mask=mask, sinks=sinks, return_lse=True, reproducible=True, **how)

    return forward_backward(attend, inputs, sinks)


def assert_same_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    for name, a, b in zip(NAMES, actual, expected, strict=False):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert torch.equal(a, b), name
        assert torch.equal(a.signbit(), b.signbit()), name


def problem(name: str, dtype: torch.dtype, heads: tuple[int, int], widths: tuple[int, int]) -> tuple:
    inputs = random_inputs(LENGTH, heads=heads, dtype=dtype, head_dim=widths[0], value_dim=widths[1])
    sinks = torch.linspace(-1, 2, heads[0], dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return inputs, MASKS[name], sinks


@every_case
def test_all_results_obey_the_error_rule(name, dtype, heads, widths, terms):
    inputs, mask, sinks = problem(name, dtype, heads, widths)
    assert_attention_close(results(inputs, mask, sinks, **terms), inputs, mask, sinks=sinks, **terms)


@every_case
def test_chunks_of_a_prompt_and_single_tokens_have_the_bits_of_the_whole(name, dtype, heads, widths, terms):
    (q, k, v, *_), mask, sinks = problem(name, dtype, heads, widths)
    whole = attention(q, k, v, mask=mask, sinks=sinks, return_lse=True, reproducible=True, **terms)
    cuts = [range(at, min(at + 64, LENGTH)) for at in range(0, LENGTH, 64)]
    cuts += [range(at, at + 7) for at in (0, ROWS - 3, LEAF - 7, 2 * LEAF - 1)]
    cuts += [range(at, at + 1) for at in (0, 1, ROWS, LEAF - 1, LENGTH - 1)]
    for rows in cuts:
        at = torch.arange(rows.start, rows.stop)
        part = attention(
            q[:, :, at], k, v, mask=mask, sinks=sinks, q_positions=at, return_lse=True, reproducible=True, **terms
        )
        assert_same_bits(list(part), [x[:, :, at] for x in whole])


@every_case
def test_neither_the_order_of_rows_nor_the_batch_nor_the_memory_changes_a_bit(name, dtype, heads, widths, terms):
    inputs, mask, sinks = problem(name, dtype, heads, widths)
    whole = results(inputs, mask, sinks, **terms)
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    shuffled = [x[:, :, order] for x in inputs]
    found = results(shuffled, mask, sinks, q_positions=order, k_positions=order, **terms)
    back = order.argsort()
    assert_same_bits([x if x.ndim == 1 else x[:, :, back] for x in found], whole)

    other_memory = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    assert_same_bits(results(other_memory, mask, sinks, **terms), whole)
    if mask.sequences is None:
        assert_same_bits(results([x[1:] for x in inputs], mask, sinks, **terms)[:5], [x[1:] for x in whole[:5]])


@pytest.mark.parametrize("threads", [2, sweep(4)])
def test_the_number_of_threads_changes_no_bit(threads):
    inputs, mask, sinks = problem("causal", torch.float32, (4, 2), (16, 16))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = results(inputs, mask, sinks)
        torch.set_num_threads(threads)
        assert_same_bits(results(inputs, mask, sinks), one)
    finally:
        torch.set_num_threads(before)


def test_keys_beyond_what_a_row_sees_change_no_bit():
    """Of a longer sequence, of padding, or because fewer keys were gathered."""
    inputs = random_inputs(LENGTH)
    whole = results(inputs, SlidingWindow(30))
    for rows in (range(LEAF + 5, LENGTH - 9), range(40)):
        start = max(0, rows.start - 30)
        q, k, v = inputs[0][:, :, rows.start : rows.stop], *(x[:, :, start : rows.stop] for x in inputs[1:3])
        at = {"q_positions": torch.tensor(rows), "k_positions": torch.arange(start, rows.stop)}
        part = attention(q, k, v, mask=SlidingWindow(30), reproducible=True, return_lse=True, **at)
        assert_same_bits(list(part), [x[:, :, rows.start : rows.stop] for x in whole[:2]])
    shorter = [x[:, :, :200] for x in inputs]
    longer = results([torch.cat([x, torch.zeros_like(x[:, :, :99])], 2) for x in shorter], Causal())
    assert_same_bits([x[:, :, :200] for x in longer], results(shorter, Causal()))


@pytest.mark.parametrize(("rows", "columns", "depth"), [(ROWS, KEYS, 64), (ROWS, 24, KEYS), (KEYS, 80, LEAF)])
def test_products_of_one_shape_have_the_same_bits_for_any_number_threads_and_place_in_memory(rows, columns, depth):
    """What the backend needs of torch.bmm on this machine."""
    generator = torch.Generator().manual_seed(rows)
    a, b = (torch.randn(19, *shape, generator=generator) for shape in ((rows, depth), (depth, columns)))
    one, before = torch.bmm(a, b), torch.get_num_threads()
    try:
        for threads, count, offset in ((1, 1, 0), (2, 1, 3), (1, 5, 1), (2, 19, 0), (4, 7, 2)):
            torch.set_num_threads(threads)
            moved = a.new_empty(a[:count].numel() + offset)[offset:].view(count, rows, depth).copy_(a[:count])
            assert torch.equal(torch.bmm(moved, b[:count]), one[:count]), (threads, count, offset)
            same = torch.bmm(moved, b[0].expand(count, -1, -1))
            assert torch.equal(same[0], one[0])
    finally:
        torch.set_num_threads(before)


def test_rows_without_keys_and_infinite_sinks():
    inputs = random_inputs(20, heads=(3, 1))
    q, k, v = inputs[:3]
    empty = {"q_positions": torch.arange(20), "k_positions": torch.arange(30, 50)}
    out, lse = attention(q, k, v, mask=Causal(), return_lse=True, reproducible=True, **empty)
    assert not out.any()
    assert (lse == -torch.inf).all()
    sinks = torch.tensor([torch.inf, -torch.inf, 0.5])
    out, lse = attention(q, k, v, mask=Causal(), sinks=sinks, return_lse=True, reproducible=True)
    plain = attention(q, k, v, mask=Causal(), return_lse=True, reproducible=True)
    assert not out[:, 0].any()
    assert (lse[:, 0] == torch.inf).all()
    assert_same_bits([out[:, 1], lse[:, 1]], [x[:, 1] for x in plain])
    assert all(grad.isfinite().all() for grad in results(inputs, Causal(), sinks)[2:])
    nothing = results([x[:, :, :0] for x in inputs], Causal(), sinks)
    assert nothing[0].shape == (2, 3, 0, 16)
    assert not nothing[-1].any()


def test_unseen_keys_and_rows_may_hold_nan():
    inputs = random_inputs(LENGTH)
    poisoned = [x.clone() for x in inputs]
    for x in poisoned[1:3]:
        x[:, :, 100:] = torch.nan
    at = {"q_positions": torch.arange(LENGTH).clamp(max=99)[:100]}
    q, k, v, *_ = poisoned
    out = attention(q[:, :, :100], k, v, mask=Causal(), reproducible=True, **at)
    assert torch.equal(out, attention(*inputs[:3], mask=Causal(), reproducible=True)[:, :, :100])


@pytest.mark.sweep
def test_a_graph_of_torch_compile_has_the_same_bits():
    inputs = random_inputs(50)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, mask=Causal(), return_lse=True, reproducible=True)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert_same_bits(forward_backward(compiled, inputs), forward_backward(attend, inputs))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            {"backend": "torch"},
            'backend must be "auto" with reproducible=True',
        ),
        ({"reproducible": 1}, "reproducible must be True or False, got 1"),
        ({"q_positions": torch.tensor([3, 3, 4])}, "positions must be distinct with reproducible=True"),
    ],
)
def test_what_cannot_be_reproducible_is_refused(argument, message):
    q, k, v = random_inputs(3)[:3]
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(q, k, v, **{"reproducible": True, **argument})


def test_explain_has_the_version_of_the_bits():
    choice = explain_attention(*random_inputs(3)[:3], reproducible=True)
    assert choice.backend == "reproducible"
    assert "version 1 of its bits" in choice.reason


def test_another_order_of_key_tiles_is_noticed(monkeypatch):
    """A fault planted: rows of a chunk visit two tiles in another order than rows of the whole."""
    q, k, v, *_ = random_inputs(LENGTH)
    whole = attention(q, k, v, mask=Causal(), reproducible=True)
    ascending = _Problem.keys_of

    def swapped(self: _Problem, rows: slice) -> Iterator:
        tiles = list(ascending(self, rows))
        yield from (tiles[1], tiles[0], *tiles[2:]) if len(tiles) > 1 else tiles

    monkeypatch.setattr(_Problem, "keys_of", swapped)
    at = torch.arange(200, 264)
    chunk = attention(q[:, :, at], k, v, mask=Causal(), q_positions=at, reproducible=True)
    torch.testing.assert_close(chunk, whole[:, :, at])
    with pytest.raises(AssertionError):
        assert_same_bits([chunk], [whole[:, :, at]])


def test_another_sum_of_leaves_is_noticed(monkeypatch):
    """A fault planted: leaves are added one after another instead of in the tree."""
    inputs = random_inputs(4 * LEAF, batch=1)
    whole = results(inputs, Full())

    def in_turn(nodes: dict, root: object) -> Tensor:
        parts = [nodes[node] for node in sorted(nodes, key=lambda node: node.leaves.start)]
        return sum(parts[1:], parts[0])

    class OneByOne(reproducible.TreeSum):
        def add(self, leaf: int, value: Tensor) -> None:
            self.nodes[reproducible.Node(0, leaf)] = value

    monkeypatch.setattr(reproducible, "TreeSum", OneByOne)
    assert_same_bits(results(inputs, Full()), whole)  # `total` adds the leaves in the tree all the same
    monkeypatch.setattr(aligned_tiles, "total", in_turn)
    for name, a, b in zip(NAMES[3:], results(inputs, Full())[3:], whole[3:], strict=False):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert not torch.equal(a, b), name
