"""The CPU backend against the specification in float64; what it must not read holds NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnmesh.core.state import State, merge, merge_stacked
from attnmesh.ops.decode import cpu_keys, reference
from attnmesh.ops.decode.api import PagedStep
from attnmesh.ops.decode.call import DecodeCall, Splits, build_call
from attnmesh.ops.decode.cpu import Cpu, adjacent_keys, short_keys
from attnmesh.ops.decode.cpu_keys import KeyPart, split_keys
from attnmesh.ops.storage import PLAIN, Quantized, Stored, quantize
from helpers.cases import sweep

BLOCK = 16
OPTIONS = ("cur_pos", "mask", "tree", "scale", "window", "sinks", "max_splits", "split_size")


@dataclass(frozen=True)
class Case:
    """Random numbers of a call: q, and what the cache stands for, [B or 1, Hkv, L, D]."""

    q: Tensor
    k: Tensor
    v: Tensor

    @staticmethod
    def of(B: int = 2, group: int = 4, Hkv: int = 2, T: int = 1, L: int = 100, D: int = 32, Dv: int | None = None,
           shared: bool = False, dtype: torch.dtype = torch.float32) -> Case:  # fmt: skip
        torch.manual_seed(B * 7919 + L)
        owners = 1 if shared else B
        return Case(
            torch.randn(B, Hkv * group, T, D, dtype=torch.float64).to(dtype),
            torch.randn(owners, Hkv, L, D, dtype=torch.float64),
            torch.randn(owners, Hkv, L, Dv or D, dtype=torch.float64),
        )

    def contiguous(self, storage: str = "fp32", **options: Any) -> DecodeCall:
        """The call over a cache."""
        return self._call(*(_stored(x, storage, 1) for x in (self.k, self.v)), None, options)

    def paged(self, storage: str = "fp32", block_size: int = BLOCK, **options: Any) -> DecodeCall:
        """The call over a pool of shuffled blocks, two of which are nobody's."""
        owners, _, length, _ = self.k.shape
        slots = -(-length // block_size)
        table = torch.randperm(owners * slots + 2)[: owners * slots].view(owners, slots).int()

        def pool(x: Tensor) -> Stored:
            padded = torch.nn.functional.pad(x, (0, 0, 0, slots * block_size - length))
            blocks = torch.zeros(owners * slots + 2, block_size, *x.shape[1::2], dtype=x.dtype)
            blocks[table.long()] = padded.unflatten(2, (slots, block_size)).permute(0, 2, 3, 1, 4)
            return _stored(blocks, storage, 2)

        return self._call(pool(self.k), pool(self.v), table, options)

    def _call(self, k: Stored, v: Stored, table: Tensor | None, options: dict[str, Any]) -> DecodeCall:
        if table is not None and "cur_pos" not in options:
            options["cur_pos"] = [self.k.shape[2] - 1] * self.q.shape[0]
        q = self.q.to(k.dtype) if isinstance(k, Tensor) else self.q
        shared = self.k.shape[0] < q.shape[0]
        return build_call(q, k, v, table, share_cache=shared, **{name: options.get(name) for name in OPTIONS})


def _stored(x: Tensor, storage: str, head_axis: int) -> Stored:
    if storage == "fp64":
        return x
    scale = torch.linspace(0.01, 0.02, x.shape[head_axis]) if storage == "fp8" else None
    return quantize(x, storage, scale=scale, head_axis=head_axis)


def poisoned(call: DecodeCall) -> DecodeCall:
    """The same call; keys and values that nobody sees are NaN, or belong to a scale of NaN."""
    seen = reference.visible_pairs(call).any(1).any(1)  # [B, N]
    if call.shared:
        seen = seen.any(0, keepdim=True)
    if call.table is not None:
        by_slot = seen.unflatten(1, (-1, call.block_size))
        used = torch.zeros(reference.values_of(call.k).shape[:2], dtype=torch.bool)
        used[call.table.long()] = by_slot  # no two slots name one block here

    def spoiled(x: Tensor) -> Tensor:
        x = x.clone()
        if call.table is None:
            x.transpose(1, 2)[~seen] = torch.nan
        else:
            x[~used] = torch.nan
        return x

    def one(stored: Stored) -> Stored:
        if isinstance(stored, Tensor):
            return spoiled(stored)
        if stored.storage == "int8":
            return Quantized(stored.values, spoiled(stored.scales))
        if stored.storage == "fp8":
            return Quantized(spoiled(stored.values.float()).to(stored.values.dtype), stored.scales)
        return stored

    return replace(call, k=one(call.k), v=one(call.v))


def exact(call: DecodeCall) -> State:
    k, v = (x.double() if isinstance(x, Tensor) else x for x in (call.k, call.v))
    return reference.run(replace(call, q=call.q.double(), k=k, v=v))


def check(call: DecodeCall) -> State:
    """At most twice the error of a plain computation in this precision, and an lse to a few float32 ulps."""
    call = poisoned(call)
    got, want, plain = Cpu().run(call), exact(call), reference.run(call, plain=True)
    assert (got.out.dtype, got.lse.dtype, got.out.shape) == (call.q.dtype, plain.lse.dtype, plain.out.shape)
    floor = 1e-13 if call.q.dtype == torch.float64 else 2e-6
    error, allowed = (got.out - want.out).abs().amax(), 2 * (plain.out - want.out).abs().amax() + floor
    assert error <= allowed, f"out is off by {error:.2e}, a plain computation by {allowed:.2e}"
    assert not got.out[want.lse == -torch.inf].any()
    torch.testing.assert_close(got.lse.double(), want.lse, atol=floor, rtol=floor, equal_nan=False)
    return got


@pytest.mark.parametrize(
    ("group", "tokens", "paged"),
    [(1, 1, False), (7, 8, False), (8, 4, False), (1, 8, True), (3, 4, True), (8, 1, True)],
)
def test_groups_and_tokens(group: int, tokens: int, paged: bool) -> None:
    case = Case.of(B=3, group=group, T=tokens, L=90)
    options: dict[str, Any] = {"cur_pos": [89, tokens - 1, 40]}
    check(case.paged(**options) if paged else case.contiguous(**options))


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("paged", [False, True])
def test_every_position_past_two_blocks(tokens: int, paged: bool) -> None:
    length = 2 * BLOCK + 3
    case = Case.of(B=length + 1, group=2, Hkv=1, T=tokens, L=length)
    options: dict[str, Any] = {"cur_pos": list(range(-1, length))}  # fewer keys than tokens among them
    state = check(case.paged(**options) if paged else case.contiguous(**options))
    assert (state.lse[0] == -torch.inf).all()


@pytest.mark.parametrize(
    ("storage", "paged"),
    [("bf16", False), ("fp8", False), ("int8", False), ("fp64", False), ("fp16", True), ("fp32", True), ("bfp8", True)],
)
def test_storages(storage: str, paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_keys, "_CHUNK_BYTES", 1)  # 256 keys at a time: three chunks
    case = Case.of(B=2, group=4, T=2, L=600)
    for dtype in {torch.float32, torch.bfloat16} if storage not in (*PLAIN, "fp64") else {torch.float32}:
        narrow = replace(case, q=case.q.to(dtype))
        options: dict[str, Any] = {"cur_pos": [599, 300], "window": 500}
        check(narrow.paged(storage, **options) if paged else narrow.contiguous(storage, **options))


@pytest.mark.parametrize(
    ("widths", "storage", "paged"),
    [
        ((576, 512), "fp32", False),
        ((576, 512), "bf16", False),
        ((32, 48), "int8", False),
        ((576, 512), "int8", True),
        ((32, 48), "fp32", True),
        ((32, 48), "bf16", True),
    ],
)
def test_values_of_another_width(widths: tuple[int, int], storage: str, paged: bool) -> None:
    case = Case.of(B=2, group=16, Hkv=1, L=70, D=widths[0], Dv=widths[1])
    check(case.paged(storage) if paged else case.contiguous(storage))


@pytest.mark.parametrize(
    ("shape", "added", "paged"),
    [
        ((1, 1, 1), False, False),
        ((3, 8, 4), False, False),
        ((1, 8, 1), True, False),
        ((3, 1, 4), False, True),
        ((1, 1, 1), True, True),
        ((3, 8, 4), True, True),
    ],
)
def test_masks(shape: tuple[int, int, int], added: bool, paged: bool) -> None:
    case = Case.of(B=3, T=4, L=80)
    torch.manual_seed(1)
    mask: Tensor = torch.rand(*shape, 70) < 0.3  # keys that nobody sees, and none from 70 on
    mask[..., :1] = False  # a sequence of one key sees nothing
    if added:
        mask = torch.randn(mask.shape).masked_fill(~mask, -torch.inf)
    for window in (None, 20):
        options: dict[str, Any] = {"mask": mask, "cur_pos": [79, 0, 50], "window": window}
        check(case.paged(**options) if paged else case.contiguous(**options))


def test_a_mask_that_ends_before_the_window() -> None:
    call = Case.of(B=1, L=80).contiguous(mask=torch.ones(1, 1, 1, 5, dtype=torch.bool), window=3)
    assert (check(call).lse == -torch.inf).all()
    sinks = torch.randn(8)
    torch.testing.assert_close(check(replace(call, sinks=sinks)).lse[0, :, 0], sinks)


@pytest.mark.parametrize("paged", [False, True])
def test_trees(paged: bool) -> None:
    case = Case.of(B=4, T=4, L=80)
    torch.manual_seed(2)
    tree = torch.rand(4, 4, 4) < 0.4
    tree[0, :, 2] = False  # a new token that nobody sees
    for window in (None, 3):
        options: dict[str, Any] = {"tree": tree, "cur_pos": [79, 2, -1, 3], "window": window}
        check(case.paged(**options) if paged else case.contiguous(**options))


@pytest.mark.parametrize(
    ("window", "tokens", "paged"),
    [(1, 1, False), (5, 1, False), (40, 4, False), (40, 1, True), (1, 4, True), (5, 4, True)],
)
def test_windows_and_sinks(window: int, tokens: int, paged: bool) -> None:
    case = Case.of(B=4, T=tokens, L=80)
    sinks = torch.randn(8)
    sinks[3] = -torch.inf
    options: dict[str, Any] = {"window": window, "sinks": sinks, "cur_pos": [79, 0, -1, 41]}
    check(case.paged(**options) if paged else case.contiguous(**options))


def test_what_a_window_left_behind_needs_no_block() -> None:
    call = Case.of(B=1, L=80).paged(window=20)
    assert call.table is not None
    table = call.table.clone()
    table[:, :3] = -1
    torch.testing.assert_close(Cpu().run(replace(call, table=table)).out, Cpu().run(call).out, rtol=0, atol=0)


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
@pytest.mark.parametrize("paged", [False, True])
def test_a_shared_cache(storage: str, paged: bool) -> None:
    case = Case.of(B=5, T=2, L=80, shared=True)
    tree = torch.rand(5, 2, 2) < 0.5
    mask = torch.rand(5, 1, 2, 80) < 0.5
    for options in ({}, {"tree": tree}, {"mask": mask}, {"split_size": 16}):
        chosen: dict[str, Any] = {"cur_pos": [60, 60, 60, -1, 79], **options}
        check(case.paged(storage, **chosen) if paged else case.contiguous(storage, **chosen))


@pytest.mark.parametrize("scale", [0.0, -0.5, 2.0])
def test_scales(scale: float) -> None:
    check(Case.of(T=2).contiguous(scale=scale))


@pytest.mark.parametrize(
    ("group", "options"),
    [(1, {}), (1, {"split_size": 100}), (2, {"max_splits": 1}), (2, {"split_size": 1}), (8, {"max_splits": 3})],
    ids=str,
)
def test_splits(group: int, options: dict[str, int]) -> None:
    """One kv head and more keys than a part: the threads share them."""
    check(Case.of(B=1, group=group, Hkv=1, L=1500).contiguous(**options))


def test_caches_that_lie_otherwise() -> None:
    case = Case.of(B=2, L=80)
    call = case.contiguous()
    want = Cpu().run(call)
    by_token = replace(call, **{n: getattr(call, n).transpose(1, 2).contiguous().transpose(1, 2) for n in "kv"})
    by_column = replace(call, **{n: getattr(call, n).transpose(2, 3).contiguous().transpose(2, 3) for n in "kv"})
    part = replace(call, **{n: torch.cat([getattr(call, n)] * 2, -1)[..., :32] for n in "kv"})
    for other in (by_token, by_column, part):
        torch.testing.assert_close(Cpu().run(other), want)


@pytest.mark.parametrize(
    ("storage", "paged", "tokens"),
    [
        ("fp32", False, 1),
        ("bf16", False, 1),
        ("fp8", True, 1),
        ("int8", False, 3),
        sweep("fp32", True, 3),
        sweep("bf16", True, 3),
    ],
)
def test_split_size_fixes_the_bits_of_a_sequence(storage: str, paged: bool, tokens: int) -> None:
    """Alone, in any batch, beside any lengths, in any capacity: the same bits."""
    case = Case.of(B=5, T=tokens, L=700)
    options: dict[str, Any] = {
        "split_size": 64,
        "window": 400,
        "sinks": torch.randn(8),
        "cur_pos": [699, 300, -1, 300, 5],
    }
    call = case.paged(storage, **options) if paged else case.contiguous(storage, **options)
    whole = Cpu().run(call)

    def picked(sequences: list[int], capacity: int) -> DecodeCall:
        index = torch.tensor(sequences)
        chosen = replace(call, q=call.q[index], cur_pos=call.cur_pos[index])
        if call.table is not None:
            return replace(chosen, table=call.table[index, : -(-capacity // BLOCK)])
        return replace(chosen, k=_rows(call.k, index, capacity), v=_rows(call.v, index, capacity))

    for sequences, capacity in (([0], 700), ([1], 301), ([4], 6), ([3, 1, 3], 400), ([4, 2, 0, 1], 700)):
        part = Cpu().run(picked(sequences, capacity))
        assert torch.equal(part.out, whole.out[sequences])
        assert torch.equal(part.lse, whole.lse[sequences])


def _rows(stored: Stored, index: Tensor, capacity: int) -> Stored:
    if isinstance(stored, Tensor):
        return stored[index, :, :capacity]
    values = stored.values.view(torch.int8)[index, :, :capacity].view(stored.values.dtype)
    return Quantized(values, stored.scales if stored.storage == "fp8" else stored.scales[index, :, :capacity])


def test_pieces_cover_a_span_in_order() -> None:
    for span, plain in ((range(50), range(50)), (range(3, 50), range(9, 44)), (range(5, 20), range(0))):
        for size, origin, most in ((1, 0, 3), (7, 0, 2), (7, plain.start, 64), (64, 0, 1)):
            found: list[KeyPart] = list(split_keys(span, plain, size, origin, most))
            assert [at for piece in found for at in range(piece.first, piece.end)] == list(span)
            for piece in found:
                assert (piece.end - piece.first) % piece.parts == 0
                assert (piece.end - piece.first) // piece.parts <= size
                assert piece.parts <= most
                assert all((at in plain) == piece.unmasked for at in range(piece.first, piece.end))


@pytest.mark.parametrize("n", [1, 3])
def test_parts_merge_as_states_do(n: int) -> None:
    parts = [State(torch.randn(n, 2, 4, 8), 30 * torch.randn(n, 2, 4)) for _ in range(5)]
    for i, part in enumerate(parts):  # rows that some parts, and that no part, saw
        part.lse[:, 0, : i % 3 + 1], part.out[:, 0, : i % 3 + 1] = -torch.inf, 0.0
    torch.testing.assert_close(merge_stacked(parts, n), merge(parts))


def test_nothing_to_do() -> None:
    call = Case.of(B=2, L=10).contiguous(cur_pos=[-1, -1], sinks=torch.randn(8))
    state = Cpu().run(replace(call, k=call.k * torch.nan, v=call.v * torch.nan))
    assert not state.out.any()
    assert (state.lse == -torch.inf).all()
    empty = Case.of(B=0, L=10).contiguous()
    assert Cpu().run(empty).out.shape == (0, 8, 1, 32)


@pytest.mark.parametrize(
    ("group", "by_head", "options"),
    [
        (3, False, {}),
        (4, True, {}),
        (3, False, {"window": 600}),
        (4, True, {"window": 600}),
        sweep(4, False, {"sinks": True}),
        sweep(3, True, {"max_splits": 1}),
    ],
    ids=str,
)
def test_adjacent_blocks_are_read_in_place(group: int, by_head: bool, options: dict[str, Any]) -> None:
    """Keys that are adjacent in the pool are not gathered, whether those of a token or of a head lie together."""
    pools = torch.randn(2, 150, 16, 3, 32)
    if by_head:
        pools = pools.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)
    last, table = [1100, 900], torch.stack([torch.arange(75, 145), torch.arange(70)]).int()
    if options.get("sinks"):
        options = {"sinks": torch.randn(3 * group)}
    q = torch.randn(2, 3 * group, 1, 32)
    step = PagedStep(table, torch.tensor(last, dtype=torch.int32))
    arguments = {name: value for name, value in options.items() if name != "max_splits"}
    got = [step(q, *pools, scale=None, **arguments).out for _ in range(2)]  # the second layer is not checked again
    call = build_call(
        q, *pools, table, cur_pos=last, mask=None, tree=None, scale=None, window=None, sinks=None, share_cache=False,
        max_splits=None, split_size=None,
    )  # fmt: skip
    call = replace(call, **({"splits": Splits(1)} if "max_splits" in options else options))
    assert adjacent_keys(call) is not None
    check(call)
    for out in got:
        torch.testing.assert_close(out, exact(call).out.to(out.dtype), rtol=1e-4, atol=1e-5)
    assert adjacent_keys(replace(call, table=table.flip(1))) is None


@pytest.mark.parametrize(
    ("group", "storage", "options"),
    [
        (3, "fp32", {}),  # the rows of a kv head one by one
        (4, "bf16", {"sinks": True}),
        (4, "fp32", {"window": 9}),
        (3, "fp32", {"window": 9, "sinks": True}),
        (1, "fp64", {}),
    ],
    ids=str,
)
def test_short_caches_of_a_batch_are_one_call(group: int, storage: str, options: dict[str, Any]) -> None:
    """Also after its end and before its window a sequence reads no key."""
    case = Case.of(B=5, group=group, Hkv=2, L=40, dtype=PLAIN.get(storage, torch.float64))
    if options.get("sinks"):
        options = {**options, "sinks": torch.randn(2 * group)}
    call = poisoned(case.paged(storage, cur_pos=[39, 0, 16, 15, 7], **options))
    assert short_keys(call) is not None
    check(call)
    wide = replace(call, rounded=False)
    into = State(torch.zeros_like(wide.empty_state().out), torch.zeros_like(wide.empty_state().lse))
    assert Cpu().run(wide, into).out is into.out
    for x, y in zip(into, Cpu().run(wide), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"B": 1}, {}),
        ({"T": 2}, {}),
        ({"Dv": 16}, {}),
        ({"L": 3000}, {}),
        ({}, {"cur_pos": [9, -1]}),
        ({}, {"split_size": 16}),
    ],
    ids=str,
)
def test_other_calls_are_not_one_call_of_short_caches(shape: dict[str, Any], options: dict[str, Any]) -> None:
    """A single sequence, several tokens, values of another width, long caches, a skipped sequence, fixed splits."""
    call = Case.of(**shape).paged(**options)
    assert short_keys(call) is None
    check(call)


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("storage", ["fp32", "int8"])
def test_a_later_step_has_a_table_and_positions_of_its_own(storage: str, tokens: int) -> None:
    """What an earlier step of the same shapes derived from its own is not used again; another batch is checked anew."""
    pools = [_stored(torch.randn(40, 16, 2, 32), storage, 2) for _ in range(2)]
    step = PagedStep(torch.arange(8).view(2, 4).int(), torch.tensor([30, 20], dtype=torch.int32))
    scattered = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    ranges = (torch.tensor([[3] * tokens] * 2), torch.tensor([[15] * tokens] * 2))
    steps = [
        (torch.arange(20, 28).view(2, 4), [31, 45], {}),  # adjacent blocks, at other places
        (scattered[:8].view(2, 4), [32, 7], {}),  # gathered ones
        (scattered[8:16].view(2, 4), [33, 50], {"window": 9}),
        (torch.arange(4).view(1, 4), [12], {}),
        (torch.arange(8).view(2, 4), [21, 30], {"key_range": ranges}),
        (torch.arange(8).view(2, 4), [21, 30], {"key_range": tuple(x - 2 for x in ranges)}),
    ]
    for table, last, options in steps:
        q, cur_pos = torch.randn(len(last), 4, tokens, 32), torch.tensor(last, dtype=torch.int32)
        step.advance(table.int(), cur_pos)
        for _ in range(2):  # layers
            got = step(q, *pools, scale=None, **options).out
            alone = PagedStep(table.int(), cur_pos)(q, *pools, scale=None, **options).out
            assert torch.equal(got, alone)
