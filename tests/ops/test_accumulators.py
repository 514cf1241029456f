"""Running sums: whatever the order and the cuts, they hold what merging or adding everything at once gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnmesh.core.state import State, merge, merge_sinks
from attnmesh.ops.merge import GradAccumulator, StateAccumulator

SHAPE = (2, 3, 10, 4)


def accumulator(dtype: torch.dtype = torch.float32, **how: object) -> StateAccumulator:
    """For queries that are wider than the values."""
    return StateAccumulator(torch.empty(*SHAPE[:3], 7, dtype=dtype), SHAPE[3], **how)


def state(
    rows: int = SHAPE[2], *, dtype: torch.dtype = torch.float32, blind: float = 0.0, batch: int = SHAPE[0]
) -> State:
    """A random state over some rows; a share of them has seen nothing, and holds NaN."""
    out, lse = torch.randn(batch, SHAPE[1], rows, SHAPE[3]), 4 * torch.randn(batch, SHAPE[1], rows)
    nothing = torch.rand(lse.shape) < blind
    out[nothing], lse[nothing] = torch.nan, -torch.inf
    return State(out.to(dtype), lse.to(torch.float64 if dtype == torch.float64 else torch.float32))


def copied(part: State) -> State:
    """The sum takes over what it is given."""
    return State(part.out.clone(), part.lse.clone())


def spread(part: State, row: int, sequence: int = 0) -> State:
    """The part as a state of all rows: the others have seen nothing."""
    whole = State.identity(SHAPE, dtype=part.lse.dtype)
    place = slice(sequence, sequence + part.lse.shape[0]), slice(None), slice(row, row + part.lse.shape[2])
    whole.out[place], whole.lse[place] = part.out.to(part.lse.dtype), part.lse
    return whole


def summed(parts: list[tuple], dtype: torch.dtype = torch.float32, sinks: Tensor | None = None) -> State:
    """The sum of parts (state, row) or (state, row, sequence)."""
    total = accumulator(dtype, sinks=sinks)
    for part, *at in parts:
        total.add(copied(part), *at)
    return total.finish(dtype)


def assert_same(found: State, expected: State) -> None:
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.out.to(expected.out.dtype), expected.out, rtol=1e-5, atol=1e-5)


def assert_rounded_once(found: Tensor, exact: Tensor) -> None:
    """No further from float64 than sums in the accumulation type and one rounding at the end."""
    wide = torch.float64 if found.dtype == torch.float64 else torch.float32
    rtol, atol = torch.finfo(found.dtype).eps, 32 * torch.finfo(wide).eps
    torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize("memory", [(3, 0, 1, 2), (0, 2, 1, 3)], ids=["columns", "rows"])
def test_kernels_finish_for_queries_of_any_strides(device, memory, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("attnmesh.ops.merge._use_triton", lambda x: True)
    back = [memory.index(i) for i in range(4)]
    like = torch.empty(SHAPE, dtype=torch.float16, device=device).permute(memory).contiguous().permute(back)
    parts = [State(*(x.to(device) for x in state())) for _ in range(3)]
    expected = merge([copied(part) for part in parts])
    total = StateAccumulator(like, SHAPE[3])
    for part in parts:
        total.add(part)
    found = total.finish(torch.float16)
    torch.testing.assert_close(found.lse, expected.lse)
    torch.testing.assert_close(found.out.float(), expected.out, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("in_triton", [False, True])
def test_sinks_join_whether_there_are_parts_or_only_a_total_or_nothing(device, in_triton, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("attnmesh.ops.merge._use_triton", lambda x: in_triton)
    like, sinks = torch.empty(SHAPE, device=device), torch.randn(SHAPE[1], device=device)
    nothing = StateAccumulator(like, SHAPE[3], sinks=sinks).finish(torch.float32)
    assert not nothing.out.any()
    torch.testing.assert_close(nothing.lse, sinks[:, None].expand(SHAPE[:3]))
    part = State(*(x.to(device) for x in state()))
    right = merge_sinks(part, sinks[None, :, None])
    for waits in (True, False):
        total = StateAccumulator(like, SHAPE[3], sinks=sinks)
        if waits:
            total.add(copied(part))
        else:
            total.replace(copied(part))
        found = total.finish(torch.float32)
        torch.testing.assert_close(found.lse, right.lse)
        torch.testing.assert_close(found.out, right.out, atol=1e-6, rtol=1e-5)


# Below, at and above any number of parts that a sum may let wait.
COUNTS = [1, 2, 3, 4, 5, 8, 11]


@pytest.mark.parametrize(("count", "blind"), [(1, 0.0), (2, 0.5), (3, 1.0), (5, 0.0), (8, 0.5), (11, 1.0)])
def test_a_state_sum_is_the_merge_of_all_parts(count, blind):
    parts = [state(blind=blind) for _ in range(count)]
    if count == 1:  # a part alone is handed on as it is: backends leave 0 where nothing was seen
        parts = [State(part.out.masked_fill(part.lse.unsqueeze(-1) == -torch.inf, 0.0), part.lse) for part in parts]
    found = summed([(part, 0) for part in parts])
    assert_same(found, merge(parts))
    assert not found.out[found.lse == -torch.inf].any()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_parts_may_cover_any_rows_of_any_sequences_in_any_order(data):
    parts = []
    for _ in range(data.draw(st.integers(1, 9))):
        row, sequence = data.draw(st.integers(0, SHAPE[2])), data.draw(st.integers(0, SHAPE[0] - 1))
        rows, batch = data.draw(st.integers(0, SHAPE[2] - row)), data.draw(st.integers(1, SHAPE[0] - sequence))
        parts.append((state(rows, blind=0.3, batch=batch), row, sequence))
    expected = merge(spread(*part) for part in parts)
    assert_same(summed(parts), expected)
    assert_same(summed(data.draw(st.permutations(parts))), expected)


def test_one_part_of_some_rows_leaves_the_others_unseen():
    part = state(4)
    found = summed([(part, 3)])
    assert torch.equal(found.out[:, :, 3:7], part.out)
    assert torch.equal(found.lse[:, :, 3:7], part.lse)
    for rows in (slice(0, 3), slice(7, None)):
        assert not found.out[:, :, rows].any()
        assert (found.lse[:, :, rows] == -torch.inf).all()


def test_a_sum_of_nothing_is_the_identity():
    found = accumulator(torch.bfloat16).finish(torch.bfloat16)
    assert found.out.dtype == torch.bfloat16
    assert found.lse.dtype == torch.float32
    assert not found.out.any()
    assert (found.lse == -torch.inf).all()


@pytest.mark.parametrize(
    ("dtype", "count"),
    [
        (torch.float16, 1),
        (torch.bfloat16, 3),
        (torch.bfloat16, 8),
        (torch.float32, 2),
        (torch.float32, 5),
        (torch.float64, 11),
    ],
)
def test_out_is_finished_in_the_type_asked_for_and_lse_stays_wide(dtype, count):
    parts = [state(dtype=dtype) for _ in range(count)]
    found = summed([(part, 0) for part in parts], dtype)
    assert found.out.dtype == dtype
    assert found.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = merge(State(part.out.double(), part.lse.double()) for part in parts)
    assert_rounded_once(found.out, exact.out)
    torch.testing.assert_close(found.lse.double(), exact.lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("count", "dtype"), [(0, torch.float16), (1, torch.float32), (2, torch.bfloat16), (5, torch.float64)]
)
def test_sinks_join_before_out_is_rounded(count, dtype):
    sinks = torch.tensor([2.0, -torch.inf, -1.0], dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    parts = [state(dtype=dtype, blind=0.5) for _ in range(count)]
    as_part = State(torch.zeros(SHAPE, dtype=torch.float64), sinks.double()[:, None].expand(SHAPE[:3]))
    exact = merge([*(State(part.out.double(), part.lse.double()) for part in parts), as_part])
    found = summed([(part, 0) for part in parts], dtype, sinks)
    assert_rounded_once(found.out, exact.out)
    torch.testing.assert_close(found.lse.double(), exact.lse, rtol=1e-6, atol=1e-6)
    into = State(torch.empty(SHAPE, dtype=dtype), torch.empty_like(found.lse))
    total = accumulator(dtype, sinks=sinks)
    for part in parts:
        total.add(copied(part))
    total.finish_into(into)
    assert torch.equal(into.out, found.out)
    assert torch.equal(into.lse, found.lse)


def test_what_the_last_call_completes_is_the_result():
    """A kernel has merged the sinks and the parts before: they do not count again."""
    total, result = accumulator(torch.float16, sinks=torch.ones(SHAPE[1])), state(dtype=torch.float16)
    total.add(state())
    with pytest.raises(AssertionError, match="another call follows"):
        total.complete(result)
    total.last_call = True
    total.complete(result)
    into = State(torch.empty(SHAPE, dtype=torch.float16), torch.empty(SHAPE[:3]))
    total.finish_into(into)
    for found in (into, total.finish(torch.float16)):
        assert torch.equal(found.out, result.out)
        assert torch.equal(found.lse, result.lse)


def test_many_bf16_parts_round_once():
    """In bf16 sixty-four equal parts would drift by percents; in float32, rounded at the end, they do not."""
    out = torch.randn(SHAPE).bfloat16()
    found = summed([(State(out, torch.zeros(SHAPE[:3])), 0)] * 64, torch.bfloat16)
    assert torch.equal(found.out, out)
    torch.testing.assert_close(found.lse, torch.full(SHAPE[:3], 64.0).log())


def test_extreme_lse_neither_overflow_nor_vanish():
    loud, faint = state(), state()
    found = summed([(State(faint.out, faint.lse - 1e4), 0), (State(loud.out, loud.lse + 1e4), 0)])
    torch.testing.assert_close(found.out, loud.out)
    torch.testing.assert_close(found.lse, loud.lse + 1e4)


@pytest.mark.parametrize("before", [0, 1, 3, 4, 6])
def test_a_kernel_may_continue_the_total_in_place(before):
    parts = [state() for _ in range(before + 1)]
    total = accumulator()
    for part in parts[:-1]:
        total.add(copied(part))
    assert (total.flush() is None) == (before == 0)
    so_far = total.total()
    if before:
        assert_same(so_far, merge(parts[:-1]))
    continued = merge([so_far, parts[-1]])
    so_far.out.copy_(continued.out)
    so_far.lse.copy_(continued.lse)
    assert_same(total.finish(torch.float32), merge(parts))


def test_a_kernel_may_replace_the_total_and_more_may_come():
    parts = [state() for _ in range(6)]
    total = accumulator()
    assert total.flush() is None
    total.replace(copied(parts[0]))
    for part in parts[1:]:
        total.add(copied(part))
    assert_same(total.finish(torch.float32), merge(parts))


# Gradients.


def gradients(count: int, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, int, int]]:
    """Random parts of random rows and sequences, the first of all."""
    parts = [(torch.randn(SHAPE).to(dtype), 0, 0)]
    for at in range(count - 1):
        row = int(torch.randint(SHAPE[2], ()))
        rows = int(torch.randint(SHAPE[2] - row + 1, ()))
        sequence = at % SHAPE[0]
        parts.append((torch.randn(SHAPE[0] - sequence, SHAPE[1], rows, SHAPE[3]).to(dtype), row, sequence))
    return parts


def plain_sum(parts: list[tuple[Tensor, int, int]]) -> Tensor:
    total = torch.zeros(SHAPE, dtype=torch.float64)
    for part, row, sequence in parts:
        total[sequence : sequence + part.shape[0], :, row : row + part.shape[2]] += part
    return total


def filled(parts: list[tuple[Tensor, int, int]], dtype: torch.dtype = torch.float32) -> GradAccumulator:
    grads = GradAccumulator(torch.empty(SHAPE, dtype=dtype))
    for part, *at in parts:
        grads.add(part.clone(), *at)
    return grads


@pytest.mark.parametrize(
    ("count", "dtype"),
    [
        (1, torch.float16),
        (2, torch.float32),
        (3, torch.bfloat16),
        (5, torch.float32),
        (8, torch.bfloat16),
        (11, torch.float64),
    ],
)
def test_a_gradient_sum_is_the_plain_sum_rounded_once(count, dtype):
    parts = gradients(count, dtype)
    found = filled(parts, dtype).finish()
    assert found.dtype == dtype
    assert_rounded_once(found, plain_sum(parts))


@pytest.mark.parametrize("count", COUNTS)
def test_a_kernel_may_add_to_the_total_and_more_may_come(count):
    parts = gradients(count)
    grads = filled(parts)
    by_kernel, late = torch.randn(SHAPE), torch.randn(SHAPE)
    total = grads.total()
    assert total.dtype == torch.float32
    assert_rounded_once(total, plain_sum(parts))
    total += by_kernel
    grads.add(late.clone())
    assert_rounded_once(grads.finish(), plain_sum([*parts, (by_kernel, 0, 0), (late, 0, 0)]))


@pytest.mark.parametrize(("settled", "count"), [(False, 1), (False, 2), (False, 11), (True, 3), (True, 5), (True, 8)])
def test_pouring_adds_everything_once(settled, count):
    """Into a strided target, as a message is; what was poured is spent."""
    parts = gradients(count)
    grads = filled(parts)
    if settled:
        grads.total()
    message = torch.randn(SHAPE[2], *SHAPE[:2], SHAPE[3])
    before = message.clone()
    target = message.permute(1, 2, 0, 3)
    grads.add_to(target)
    expected = plain_sum(parts) + before.permute(1, 2, 0, 3)
    assert_rounded_once(target, expected)
    grads.add_to(target)
    assert_rounded_once(target, expected)


def test_a_gradient_sum_of_nothing_is_zero():
    assert torch.equal(filled([]).finish(), torch.zeros(SHAPE))
    target = torch.randn(SHAPE)
    before = target.clone()
    filled([]).add_to(target)
    assert torch.equal(target, before)


@pytest.mark.parametrize("overwritten", [True, False])
def test_a_kernel_computes_a_gradient_sum_in_the_memory_that_is_given(overwritten):
    memory = torch.full(SHAPE, torch.nan)
    total = GradAccumulator(torch.empty(SHAPE, dtype=torch.bfloat16), memory=lambda: memory)
    assert total.empty
    assert not total.in_memory
    where = total.total(overwritten=overwritten)
    assert where is memory
    assert total.in_memory
    assert where.isnan().all() if overwritten else (where == 0).all()
    where.fill_(2.0)
    assert total.total() is memory  # and is not overwritten any more
    total.add(torch.ones(SHAPE))
    assert not total.in_memory  # until the part is added
    assert (total.finish() == 3).all()


def test_parts_do_not_use_the_memory_that_is_given():
    def memory() -> Tensor:
        raise AssertionError("memory that no kernel asked for")

    total = GradAccumulator(torch.empty(SHAPE), memory=memory)
    target = torch.ones(SHAPE)
    total.add(torch.ones(SHAPE))
    assert not total.in_memory
    total.add_to(target)
    assert (target == 2).all()
