"""Masks that users define: exact whatever their intervals do, and refused where they could be computed wrong."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmesh import Balanced, Causal, ContextParallel, CustomMask, Documents, Global, Mask, SlidingWindow, run_virtual
from attnmesh import attention as attend
from attnmesh.core.mask import IntervalMask
from attnmesh.core.visibility import Patch
from helpers.masks import covered, visible_pairs


@dataclass(frozen=True)
class Table(CustomMask):
    """Any interval for each query."""

    rows: tuple[tuple[int, int], ...]

    @property
    def length(self):
        return len(self.rows)

    def key_ranges(self, q):
        return torch.tensor(self.rows)[q].unbind(-1)


@dataclass(frozen=True)
class Mirrored(CustomMask):
    """Intervals that move back: the last query sees the first key."""

    size: int

    def key_ranges(self, q):
        return self.size - 1 - q, self.size + 1 - q


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_blocks_of_any_intervals_hold_every_visible_pair_exactly_once(data):
    length = data.draw(st.integers(1, 14))
    end = st.integers(-2, length + 2)
    mask: Mask = Table(tuple(data.draw(st.lists(st.tuples(end, end), min_size=length, max_size=length))))
    if data.draw(st.booleans()):
        mask = data.draw(st.sampled_from([mask | Causal(), mask & SlidingWindow(3, 1), mask | Global(2)]))
    q = (range(length),)
    for keys in (q, (range(0, length, 2),)):
        patch = Patch(mask, q, keys)
        assert covered(patch).tolist() == visible_pairs(mask, q, keys).int().tolist()


def test_a_mask_whose_intervals_move_back_is_exact_over_ranks():
    length, mask = 11, Causal() | Mirrored(11)
    q, k, v = (torch.randn(1, 2, length, 8, dtype=torch.float64) for _ in range(3))
    at = torch.arange(length)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.visible(at[:, None], at))

    def rank(comm):
        cp = ContextParallel(comm, layout=Balanced(mask))
        return cp.unshard(cp.attention(*(cp.shard(x, 2) for x in (q, k, v)), mask=mask, length=length), 2, length)

    for out in (attend(q, k, v, mask=mask), run_virtual(3, rank)[0]):
        assert torch.allclose(out, expected)


def test_straight_intervals_are_few_trapezoids():
    @dataclass(frozen=True)
    class Window(CustomMask):
        def key_ranges(self, q):
            return (q - 5).clamp(min=0), q + 1

    @dataclass(frozen=True)
    class Blocks(CustomMask):
        def key_ranges(self, q):
            return q // 8 * 8, q + 1

    assert len(Window().trapezoids(range(4096))) == 2
    assert len(Blocks().trapezoids(range(64))) == 8


# Definitions that are refused.


@pytest.mark.parametrize(
    ("base", "name"),
    [
        *((Mask, name) for name in ("allows", "visible", "_visible", "trapezoids", "intervals", "is_interval")),
        *((Causal, name) for name in ("allows", "_visible", "key_ranges", "key_range", "contains_query", "__and__")),
        *((Documents, name) for name in ("bounds", "boundaries")),
        *((IntervalMask, name) for name in ("key_ranges", "_visible")),
        *((CustomMask, name) for name in ("allows", "visible", "sequences", "trapezoids")),
    ],
)
def test_a_class_that_overrides_what_plans_read_is_refused(base, name):
    message = rf"Mine must not define {name}: .* attnmesh.CustomMask and define key_ranges"
    with pytest.raises(ValueError, match=message):
        type("Mine", (base,), {name: lambda self, *_: None})
    with pytest.raises(ValueError, match=message):
        type("Mine", (type("Mixin", (), {name: lambda self, *_: None}), base), {})


def test_a_subclass_without_overrides_is_its_mask():
    class Mine(Causal):
        """A name."""

        def described(self):
            return "mine"

    assert Mine().visible(torch.tensor(3), torch.tensor(3))


def test_a_mask_must_be_a_frozen_dataclass_of_hashable_fields():
    class Plain(CustomMask):
        def key_ranges(self, q):
            return q, q + 1

    class Changed(Mirrored):
        """Without the decorator its own fields would not be compared."""

    @dataclass
    class Mutable(CustomMask):
        def key_ranges(self, q):
            return q, q + 1

    @dataclass(frozen=True)
    class WithList(CustomMask):
        items: list[int] = field(default_factory=list)

        def key_ranges(self, q):
            return q, q + 1

    for kind, arguments in ((Plain, ()), (Changed, (3,)), (Mutable, ())):
        with pytest.raises(ValueError, match=f"{kind.__name__} must be a frozen dataclass"):
            kind(*arguments)
    x = torch.ones(1, 1, 4, 8)
    with pytest.raises(ValueError, match=r"mask must have hashable fields .*WithList"):
        attend(x, x, x, mask=WithList())


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        (lambda q: q, r"must return \(first, end\)"),
        (lambda q: (q, q + 0.5), "must return integers as end, got float"),
        (lambda q: (None, q), "must return integers as first, got None"),
        (lambda q: (q[:1], q), r"must return first in the shape of q, \[4\], got \[1\]"),
        (lambda q: (q, q.cumsum(0)), "its own interval"),
        (lambda q: (q.min().expand(len(q)), q + 1), "its own interval"),
        (lambda q: (0, q.max().expand(len(q)) + 1), "its own interval"),
        (lambda q: (0, q.max().expand(len(q)) - torch.rand(len(q)).mul(1e6).long()), "its own interval"),
    ],
)
def test_ranges_that_are_no_function_of_positions_are_refused(ranges, message):
    @dataclass(frozen=True)
    class Mine(CustomMask):
        def key_ranges(self, q):
            return ranges(q)

    x = torch.ones(1, 1, 4, 8)
    with pytest.raises(ValueError, match=message):
        attend(x, x, x, mask=Mine())


def test_a_mask_of_one_length_refuses_others():
    x = torch.ones(1, 1, 4, 8)
    with pytest.raises(ValueError, match="a mask of sequences of 2 positions, got 4"):
        attend(x, x, x, mask=Table(((0, 1), (0, 2))))
