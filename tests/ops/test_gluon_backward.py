"""The backward for Hopper in Gluon: emulated against float64 autograd, compiled, and run where there is such a GPU."""

from importlib.metadata import version
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.cases import else_sweep, first, in_turn, sweep
from helpers.dense_kernels import MASKS, dense, mask_case, relative, score_terms
from helpers.gluon import emulated
from helpers.triton_compile import assert_fit, compiled_for_hopper, count

pytest.importorskip("triton")

from attnmesh.ops.dense import gluon_backward
from attnmesh.ops.dense.gluon_backward import BackwardTiles
from attnmesh.ops.dense.triton_tiles import ScoreTerms

ONE_AND_MANY = [range(1), sweep(range(1, 4))]
CPU = torch.device("cpu")


class Case:
    """Inputs within larger tensors of NaN, and the gradients that autograd gives in float64."""

    def __init__(
        self, mask, q_len=150, kv_len=150, heads=(4, 2), head_dim=64, value_dim=None, batch=1,
        dtype=torch.float16, softcap=False, device=CPU, alibi=False,
    ):  # fmt: skip
        value_dim = value_dim or head_dim
        sizes = [
            (heads[0], q_len, head_dim), (heads[1], kv_len, head_dim), (heads[1], kv_len, value_dim),
            (heads[0], q_len, value_dim),
        ]  # fmt: skip
        self.q, self.k, self.v, self.grad_out = (_amid_nan(batch, *size, dtype, device) for size in sizes)
        self.scale = head_dim**-0.5
        self.terms = score_terms(softcap, alibi, heads[0], q_len, kv_len, device, ascending=True)
        self.seen, visible = mask_case(mask, q_len, kv_len, batch, device)
        leaves = [x.double().requires_grad_() for x in (self.q, self.k, self.v)]
        out, lse = dense(*leaves, self.scale, visible, torch.float64, self.terms)
        self.lse = lse.detach().float()
        # A part of the gradient may come through the lse; that of rows without keys is not defined.
        grad_lse = torch.randn(lse.shape, dtype=torch.float64, device=device)
        upstream = self.grad_out.double(), torch.where(lse.isneginf(), 0.0, grad_lse)
        self.truth = torch.autograd.grad((out, lse), leaves, upstream)
        delta = (out.detach() * upstream[0]).sum(-1) - grad_lse
        self.delta = delta.masked_fill(lse.isneginf(), torch.nan).float()

    def sums(self) -> list[Tensor]:
        """Float32 gradients to add to."""
        return [torch.randn(x.shape, dtype=torch.float32, device=x.device) for x in (self.q, self.k, self.v)]

    def run(self, module, grads, **how) -> None:
        grad_q, grad_k, grad_v = grads
        module.backward(
            self.q, self.k, self.v, self.grad_out, self.lse, self.delta, scale=self.scale, **self.seen,
            terms=self.terms, grad_q=grad_q, grad_k=grad_k, grad_v=grad_v, **how,
        )  # fmt: skip

    def check(self, module, needs_q: bool = True, **how) -> None:
        before = self.sums()
        after = [x.clone() if needs_q or x is not before[0] else None for x in before]
        self.run(module, after, **how)
        self.compare([None if y is None else y - x for x, y in zip(before, after, strict=True)])

    def compare(self, grads) -> None:
        tolerance = {torch.float16: 5e-4, torch.bfloat16: 4e-3}[self.q.dtype]
        for grad, truth in zip(grads, self.truth, strict=True):
            assert grad is None or relative(grad, truth) < tolerance

    def ordered(self, module, rows: slice = slice(None), **how) -> list[Tensor]:
        """The deterministic gradients from some of the rows, in float32."""
        q, grad_out, lse, delta = (x[:, :, rows] for x in (self.q, self.grad_out, self.lse, self.delta))
        grads = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, self.k, self.v)]
        seen = dict(self.seen)
        if seen["bounds"] is not None:
            seen["bounds"] = tuple(x[:, :, rows] for x in seen["bounds"])
        module.backward(
            q, self.k, self.v, grad_out, lse, delta, scale=self.scale, **seen, terms=self.terms, deterministic=True,
            grad_q=grads[0], grad_k=grads[1], grad_v=grads[2], **how,
        )  # fmt: skip
        return grads


def _amid_nan(batch: int, heads: int, length: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    memory = torch.full((batch + 1, length + 5, heads + 1, width), torch.nan, dtype=dtype, device=device)
    x = memory[:batch, 3 : 3 + length, :heads].transpose(1, 2)
    return x.copy_(torch.randn(x.shape, dtype=torch.float32, device=device))


def emulation(seed: int = 0, planted: tuple[str, str] | None = None, together: int = 1):
    return emulated(gluon_backward, seed, planted, together)


@pytest.mark.parametrize("mask", first(2, ["full", "random", "causal", "union", "slices", "sequences"]))
@pytest.mark.parametrize("seeds", ONE_AND_MANY, ids=["one", "many"])
def test_adds_all_gradients_under_hostile_schedules(mask, seeds):
    for seed in seeds:
        torch.manual_seed(seed)
        Case(mask, batch=2 if mask == "sequences" else 1).check(emulation(seed))


@pytest.mark.parametrize(
    ("mask", "q_len", "kv_len", "heads"),
    first(1, [
        ("full", 1, 1, (6, 2)), ("causal", 70, 300, (1, 1)), ("random", 300, 70, (3, 1)), ("causal", 129, 128, (6, 2)),
        ("random", 64, 129, (6, 2)), ("full", 300, 70, (1, 1)),
    ]),
)  # fmt: skip
def test_heads_and_lengths(mask, q_len, kv_len, heads):
    torch.manual_seed(0)
    Case(mask, q_len, kv_len, heads).check(emulation())


@pytest.mark.parametrize(
    ("mask", "widths"),
    first(1, in_turn(["causal", "union"], [
        (192, 128), (128, 128), (128, 64), (32, 80), (256, 256), (192, 192), (136, 120), (128, 256), (256, 40),
        (160, 64),
    ])),
)  # fmt: skip
def test_widths(mask, widths):
    torch.manual_seed(0)
    Case(mask, 100, 140, (2, 1), *widths).check(emulation())


def test_bf16_and_softcap():
    torch.manual_seed(0)
    Case("causal", heads=(2, 1), head_dim=128, dtype=torch.bfloat16, softcap=True).check(emulation())


@pytest.mark.parametrize(
    ("mask", "how", "tiles"),
    [
        ("causal", {"heads": (6, 2)}, None),
        sweep("random", {"q_len": 70, "kv_len": 300, "softcap": True}, None),
        sweep("union", {"head_dim": 192, "value_dim": 128}, None),
        sweep("causal", {"head_dim": 256}, None),
        sweep("slices", {}, BackwardTiles(heads=1, paired=False)),
        sweep("sequences", {"batch": 2}, BackwardTiles(held=True, stages=4)),
    ],
)
def test_slopes(mask, how, tiles):
    torch.manual_seed(0)
    Case(mask, alibi=True, **how).check(emulation(), tiles=tiles)


def test_heads_run_in_sections():
    torch.manual_seed(0)
    Case("causal", 150, 300, (5, 5), batch=3).check(emulation(), tiles=BackwardTiles(section=4))
    assert [gluon_backward._section(n) for n in (1, 16, 17, 64, 65, 192)] == [1, 16, 8, 8, 4, 4]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "tiles",
    [
        BackwardTiles(paired=False), BackwardTiles(stages=4), BackwardTiles(heads=1), BackwardTiles(held=True),
        BackwardTiles(shared_keys=True), BackwardTiles(stages=4, heads=2, shared_keys=True, grad_out_stages=2),
    ],
)  # fmt: skip
def test_tiles(tiles):
    torch.manual_seed(0)
    Case("causal", heads=(8, 2), batch=2).check(emulation(), tiles=tiles)


@pytest.mark.parametrize(
    ("length", "width", "causal", "heads"),
    [(1024, 128, True, 1), (2048, 128, True, 2), (4096, 128, True, None), (2048, 128, False, None),
     (4096, 256, True, 2), (8192, 256, True, None)],
)  # fmt: skip
def test_few_programs_divide_the_heads_of_a_group(monkeypatch, length, width, causal, heads):
    monkeypatch.setattr(gluon_backward, "_processors", lambda q: 132)
    q, v = (torch.empty(1, n, length, width, dtype=torch.bfloat16, device="meta") for n in (32, 8))
    assert BackwardTiles.pick(q, v, causal=causal).heads == heads


@pytest.mark.parametrize(
    ("mask", "tiles"),
    first(1, [
        ("causal", None), ("causal", BackwardTiles(heads=1)), ("union", BackwardTiles(shared_keys=True)),
    ]),
)  # fmt: skip
def test_overwrites_in_any_dtype(mask, tiles):
    torch.manual_seed(0)
    case = Case(mask, 150, 400)  # causal: nobody sees the last keys
    grads = [torch.full(x.shape, torch.nan, dtype=x.dtype) for x in (case.q, case.k, case.v)]
    case.run(emulation(), grads, overwrite=True, tiles=tiles)
    case.compare(grads)


def test_in_parts_that_add_up():
    """As a ring does: the keys in several calls, the lse and the row sums of all of them."""
    torch.manual_seed(0)
    case = Case("causal", 150, 150, (2, 1))
    first, end = torch.zeros(150, dtype=torch.int32), torch.arange(1, 151, dtype=torch.int32)
    grads = [torch.zeros(x.shape, dtype=torch.float32) for x in (case.q, case.k, case.v)]
    for keys in (range(40), range(40, 47), range(47, 150)):
        at = slice(keys.start, keys.stop)
        bounds = tuple((x.clamp(keys.start, keys.stop) - keys.start)[None, None] for x in (first, end))
        emulation().backward(
            case.q, case.k[:, :, at], case.v[:, :, at], case.grad_out, case.lse, case.delta, scale=case.scale,
            causal=False, bounds=bounds, grad_q=grads[0], grad_k=grads[1][:, :, at], grad_v=grads[2][:, :, at],
        )  # fmt: skip
    case.compare(grads)


@pytest.mark.parametrize("tiles", [None, sweep(BackwardTiles(shared_keys=True))])
def test_deterministic_and_single_gradients(tiles):
    torch.manual_seed(0)
    case = Case("causal", heads=(2, 1))
    case.check(emulation(), tiles=tiles, deterministic=True)
    whole = case.sums()
    for i, truth in enumerate(case.truth):
        grads = [x.clone() if i == j else None for j, x in enumerate(whole)]
        case.run(emulation(), grads, tiles=tiles)
        assert relative(grads[i] - whole[i], truth) < 5e-4


@pytest.mark.parametrize(
    ("mask", "q_len", "heads", "widths", "tiles"),
    first(2, [
        ("causal", 150, (4, 2), (64, 64), None), ("random", 200, (3, 1), (64, 64), None),
        ("union", 200, (2, 1), (64, 64), None), ("full", 70, (2, 2), (128, 80), None),
        ("slices", 200, (2, 1), (64, 64), None), ("causal", 200, (3, 1), (64, 64), BackwardTiles(held=True)),
    ]),
)  # fmt: skip
@pytest.mark.parametrize("seeds", ONE_AND_MANY, ids=["one", "many"])
def test_key_tiles_add_in_their_order(mask, q_len, heads, widths, tiles, seeds):
    """The bits of programs that run together are the bits of programs that run one after another.

    With a part of the rows, their gradients have the same bits.
    """
    torch.manual_seed(0)
    case = Case(mask, q_len, 300, heads, *widths)
    expected = case.ordered(emulation(), tiles=tiles)
    case.compare(expected)
    for seed in seeds:
        found = case.ordered(emulation(seed, together=4), tiles=tiles)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    if mask != "causal":
        rows = slice(30, q_len - 5)
        assert torch.equal(case.ordered(emulation(), rows, tiles=tiles)[0], expected[0][:, :, rows])


@pytest.mark.parametrize(("mask", "heads"), [("causal", None), sweep("causal", 1), sweep("union", None)])
def test_new_gradients_of_a_first_call_and_of_a_repeat(mask, heads):
    """Written once, or summed by several programs or launches; the repeat has other values."""
    module = emulation()
    for seed in range(2):
        torch.manual_seed(seed)
        case = Case(mask, 100, 140, (4, 2))
        found = module.gradients(
            case.q, case.k, case.v, case.grad_out, case.lse, case.delta, needs=(True, True, True), scale=case.scale,
            **case.seen, terms=case.terms, tiles=BackwardTiles(heads=heads),
        )  # fmt: skip
        case.compare(found)
        for x, grad in zip((case.q, case.k, case.v), found, strict=True):
            assert (grad.dtype, grad.stride()) == (x.dtype, torch.empty_like(x).stride())


@pytest.mark.parametrize("apart", [False, True])
def test_keys_and_values_of_a_ring_stage_are_overwritten_in_a_repeat(apart):
    """In one buffer, as a ring has them: both are zeroed at once, and nothing beside them. Or in two."""
    module = emulation()
    for seed in range(2):
        torch.manual_seed(seed)
        case = Case("causal", 100, 140, (4, 2))
        grad_q = torch.zeros(case.q.shape)
        memory = torch.full((140 + 2, 1, 2, 128), torch.nan)
        grad_k, grad_v = (x.permute(1, 2, 0, 3) for x in memory[1:-1].split([64, 64], 3))
        if apart:
            grad_v = torch.full(grad_v.shape, torch.nan)
        case.run(module, (grad_q, grad_k, grad_v), overwrite_keys=True, tiles=BackwardTiles(heads=1))
        case.compare([grad_q, grad_k, grad_v])
        assert memory[[0, -1]].isnan().all()


def test_nothing_to_add():
    q, k = torch.empty(1, 2, 0, 64, dtype=torch.float16), torch.ones(1, 2, 5, 64, dtype=torch.float16)
    grad = torch.ones(1, 2, 5, 64, dtype=torch.float16)
    rows = torch.empty(1, 2, 0, dtype=torch.float32)
    how = {"scale": 1.0, "causal": False, "bounds": None}
    gluon_backward.backward(q, k, k, q, rows, rows, **how, grad_k=grad)
    assert grad.eq(1).all()
    gluon_backward.backward(q, k, k, q, rows, rows, **how, grad_k=grad, overwrite=True)
    assert grad.eq(0).all()


PLANTED = {
    "nobody waits for the queries": (
        "mbarrier.wait(barriers.q_ready.index(stage), turn)\n", "pass\n"),
    "the producer overwrites queries": ("mbarrier.wait(barriers.q_free.index(stage), turn ^ 1)", "pass"),
    "ds is read before the other has written it": (
        "mbarrier.wait(barriers.ds_ready.index(at), (step // 2) & 1)", "pass"),
    "ds is not fenced": ("fence_async_shared()\n                    at = 0", "at = 0"),
    "grad_q is used too early": (
        "- i) + K_BLOCKS, (parts[i],) + acc_v)", "- i) + K_BLOCKS + 1, (parts[i],) + acc_v)"),
    "grad_q is overwritten before it is added": (
        "mbarrier.wait(barriers.grad_q_free.index(HALF), (uses & 1) ^ 1)", "pass"),
    "the last keys need no mask": ("edge = gl.where(key_begin + KEYS > kv_len, 0, edge)", "pass"),
    "heads of the group are left out": ("kv_head = stream // splits % kv_heads", "kv_head = stream * 0"),
}  # fmt: skip


PLANTED_WITH_SHARED_KEYS = {
    "grad_out is given back too soon": (
        "acc_v = steps.finish(0, acc_v)\n            mbarrier.arrive(barriers.grad_out_free.index(at), count=1)",
        "mbarrier.arrive(barriers.grad_out_free.index(at), count=1)\n            acc_v = steps.finish(0, acc_v)"),
    "weights are read too early": ("mbarrier.wait(barriers.weights_ready.index(0), step & 1)", "pass"),
    "weights are overwritten": ("mbarrier.wait(barriers.weights_free.index(0), (step & 1) ^ 1)", "pass"),
    "ds is not fenced": ("memory.ds.index(0).store(ds)\n            fence_async_shared()",
                         "memory.ds.index(0).store(ds)"),
    "grad_q is that of the next rows": (
        "if step >= LATE:\n                head", "if step >= 0:\n                head"),
}  # fmt: skip


PLANTED_BY_HALF = {
    "sums are used too early": ("finished = warpgroup_mma_wait(0, acc_k + acc_v)",
                                "finished = warpgroup_mma_wait(1, acc_k + acc_v)"),
    "the second half has the terms of the first": (
        "memory.delta.index(stage).slice(half * ROWS, ROWS)", "memory.delta.index(stage).slice(0, ROWS)"),
    "ds is read before the other has written it": (
        "mbarrier.wait(barriers.ds_ready.index(0), step & 1 ^ 1)", "pass"),
    "ds of the same step is multiplied": ("(step + 1) % 2, FIRST + half", "step % 2, FIRST + half"),
    "grad_q is used too early": ("K_BLOCKS + V_BLOCKS, [part]", "K_BLOCKS + V_BLOCKS + 1, [part]"),
    "a block of grad_q is overwritten before it is added": (
        "mbarrier.wait(barriers.grad_q_free.index(HALF), (uses & 1) ^ 1)", "pass"),
    "the last grad_q is left out": ("1 if HALF == 0 or SHAPE.halved else 0", "1 if HALF == 0 else 0"),
}  # fmt: skip


@pytest.mark.parametrize("fault", first(2, PLANTED))
def test_the_emulation_finds_planted_faults(fault):
    torch.manual_seed(0)
    case = Case("causal", 300, 150, (4, 2))
    case.lse -= 200.0 * (fault == "the last keys need no mask")  # exp2 of it is infinite
    _find(case, PLANTED[fault])


@pytest.mark.sweep
@pytest.mark.parametrize("fault", PLANTED_WITH_SHARED_KEYS)
def test_the_emulation_finds_faults_with_shared_keys(fault):
    torch.manual_seed(0)
    # Without grad_q there is another reason to wait for what was there.
    how = {"needs_q": False} if fault == "weights are overwritten" else {}
    _find(Case("causal", 300, 150, (2, 1), 192), PLANTED_WITH_SHARED_KEYS[fault], **how)


@pytest.mark.sweep
@pytest.mark.parametrize("fault", PLANTED_BY_HALF)
def test_the_emulation_finds_faults_by_half(fault):
    torch.manual_seed(0)
    _find(Case("causal", 300, 150, (2, 1), 192, 128), PLANTED_BY_HALF[fault])


PLANTED_IN_TURNS = {
    "a program adds before its turn": ("while seen < turns.before:", "while seen < 0:"),
    "the counter of other rows is read ahead": (
        "seen = _seen(turns, next_head, next_row, work)", "seen = _seen(turns, head, row, work)"),
    "a program ends its turn before its sums are in memory": (
        "wait_for_adds()\n        if row < work.q_len:", "if row < work.q_len:"),
    "a key tile that no row sees is waited for": ("stops > 0, tiles + 1", "stops >= 0, tiles + 1"),
    "rows that the last tile does not have are waited for": ("before = last", "before, stop = last, work.q_len"),
    "the rows of the last tile are not": ("mask=tiles < before, other=0", "mask=tiles < before - 1, other=0"),
}  # fmt: skip


@pytest.mark.parametrize("fault", first(1, PLANTED_IN_TURNS))
def test_the_emulation_finds_faults_in_turns(fault):
    torch.manual_seed(0)
    case = Case("slices" if "no row sees" in fault else "random", 200, 400, (2, 1))
    expected = case.ordered(emulation())
    together = 1 if fault.endswith("waited for") else 4  # programs that wait for ever do so alone, too

    def many_times():
        for seed in range(20):
            found = case.ordered(emulation(seed, PLANTED_IN_TURNS[fault], together))
            assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))

    with pytest.raises(AssertionError):
        many_times()


def _find(case: Case, planted: tuple[str, str], **how: Any) -> None:
    def many_times():  # a race is lost sooner or later
        for seed in range(20):
            case.check(emulation(seed, planted), **how)

    with pytest.raises(AssertionError):
        many_times()


def launch(visibility: str, dtype: str, head_dim: int, value_dim: int, how: dict) -> None:
    """A case, in the process that compiles."""
    how = dict(how)
    softcap, needs_q, overwrite = how.pop("softcap", None), how.pop("needs_q", True), how.pop("overwrite", False)
    ordered = how.pop("ordered", False)
    positions = torch.zeros(256, dtype=torch.int32)
    slopes = (torch.empty(8), positions, positions) if how.pop("alibi", False) else ()
    q, k = (torch.empty(1, heads, 256, head_dim, dtype=getattr(torch, dtype)) for heads in (8, 2))
    v, grad_out = (torch.empty(1, heads, 256, value_dim, dtype=getattr(torch, dtype)) for heads in (2, 8))
    rows = torch.empty(1, 8, 256, dtype=torch.float32)
    bounds = (torch.zeros(1, 1, 256, dtype=torch.int32),) * 2 if visibility == "bounds" else None
    grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=torch.float32) for x in (q, k, v))
    gluon_backward.backward(
        q, k, v, grad_out, rows, rows, scale=0.1, causal=visibility == "causal", bounds=bounds,
        grad_q=grad_q if needs_q else None, grad_k=grad_k, grad_v=grad_v, overwrite=overwrite,
        terms=ScoreTerms(softcap, *slopes), deterministic=ordered, tiles=BackwardTiles(**how),
    )  # fmt: skip


def tolerated_spills(kernel: dict) -> int:
    """From width 128 on, bytes of addresses and counters, of which a step loads a few while products run.

    Below, a softcap leaves no registers for two values.
    """
    _, _, key_dim, value_dim, how = kernel["case"]
    if max(key_dim, value_dim) <= 64:
        return 8 if "softcap" in how else 0
    most = 144 if "ordered" in how or key_dim + value_dim > 256 else 96
    newer = tuple(map(int, version("triton").split(".")[:2])) >= (3, 7)  # spills up to 24 bytes more
    return most + 24 if newer and key_dim + value_dim > 256 else most


def assert_sound(kernels: list[dict]) -> None:
    kernels = [kernel for kernel in kernels if kernel["kernel"] == "backward_kernel"]
    assert_fit(kernels, tolerated_spills)
    for kernel in kernels:
        assert not kernel["overwritten"], kernel["case"]
        case, waits, adds = (kernel["case"], *(count(kernel, x) for x in ("WARPGROUP.DEPBAR", "UTMAREDG")))
        needs_q = case[4].get("needs_q", True)
        assert (adds > 0) == needs_q
        how = {**case[4], "needs_q": needs_q, "key_dim": case[2], "value_dim": case[3]}
        assert waits == expected_waits(**how), case


def expected_waits(
    *, needs_q: bool, key_dim: int, value_dim: int, paired: bool = True, shared_keys: bool = False, **_: Any
) -> int:
    """The waits for products: the compiler added none, so that they are under way together.

    In each step for scores, for grad_weights and for grad_v, once for each block of grad_q, and at the end of a turn.
    """
    blocks = (key_dim + 63) // 64 if needs_q else 0
    if shared_keys:
        # The first consumer has a step of grad_q after its loop.
        return 2 + 2 * (blocks // 2) + 2 + (blocks - blocks // 2)
    if key_dim + value_dim > 256 or key_dim > 128:
        # A wait for scores and grad_weights of each half; after the loop, both consumers have a step of grad_q.
        return 2 * (2 * 2 + 1 + blocks)
    steps = 2 if needs_q and paired else 1
    return 2 * (3 * steps + 1 + (needs_q and paired))


def test_the_kernel_of_a_whole_call_compiles():
    assert_sound(compiled_for_hopper(__file__, [("causal", "bfloat16", 128, 128, {"overwrite": True})]))


KERNELS = [
    ("causal", "bfloat16", 128, 128, {}), ("bounds", "bfloat16", 128, 128, {"heads": 1}),
    ("full", "bfloat16", 96, 96, {"needs_q": False}), ("causal", "bfloat16", 64, 128, {"paired": False}),
    ("causal", "bfloat16", 64, 64, {"stages": 4, "held": True}),
    ("bounds", "bfloat16", 64, 64, {"stages": 4, "held": True, "softcap": 30.0}),
    ("causal", "bfloat16", 64, 64, {"stages": 4, "held": True, "ordered": True}),
    ("bounds", "bfloat16", 128, 128, {"ordered": True}),
    ("full", "float16", 32, 48, {"softcap": 30.0}), ("causal", "bfloat16", 192, 128, {}),
    ("bounds", "bfloat16", 192, 128, {"overwrite": True}), ("full", "bfloat16", 192, 128, {"softcap": 30.0}),
    ("causal", "bfloat16", 192, 64, {}), ("causal", "bfloat16", 256, 256, {"shared_keys": True}),
    ("bounds", "bfloat16", 192, 192, {"shared_keys": True, "grad_out_stages": 2}),
    ("bounds", "bfloat16", 128, 128, {"alibi": True, "paired": False}),
    ("causal", "bfloat16", 64, 64, {"alibi": True, "stages": 4, "held": True}),
    ("bounds", "bfloat16", 256, 256, {"alibi": True, "shared_keys": True}),
]  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("cases", [KERNELS[:8], KERNELS[8:15], KERNELS[15:]], ids=["narrow", "wide", "slopes"])
def test_every_kernel_compiles(cases):
    assert_sound(compiled_for_hopper(__file__, cases))


NO_HOPPER = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9


WIDTHS = [(128, 128), (64, 64), (96, 96), (64, 128), (192, 128), (192, 192), (256, 256)]


def is_of_its_own(mask: str, widths: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether a case is the only one of its kernels, which no bounds, causal, or the number of bounds choose.

    Masks with as many bounds as others run with one width. fp16 has other products and results.
    """
    if dtype == torch.float16:
        return (mask, widths) in (("union", (128, 128)), ("random", (256, 256))) or (
            mask == "causal" and widths in ((64, 64), (128, 128), (192, 128))
        )
    return mask in ("full", "causal", "random", "union") or widths == (128, 128)


def test_what_it_refuses():
    q, v = (torch.empty(1, 1, 4, d, dtype=torch.bfloat16) for d in (256, 128))
    assert gluon_backward.why_not(q, v) is None
    assert "fp16 and bf16" in gluon_backward.why_not(q.float(), v.float())
    assert "not 256 (keys) and 100 (values)" in gluon_backward.why_not(q, v[..., :100])


@pytest.mark.cuda
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("mask", "widths", "dtype"), else_sweep(product(MASKS, WIDTHS, [torch.float16, torch.bfloat16]), is_of_its_own)
)
def test_the_kernel_on_hopper(device, mask, widths, dtype):
    torch.manual_seed(0)
    case = Case(mask, 777, 1001 if mask == "full" else 777, (8, 2), *widths, batch=2, dtype=dtype, device=device)
    assert gluon_backward.why_not(case.q, case.v) is None
    narrow = (BackwardTiles(heads=1), BackwardTiles(paired=False)) if max(widths) <= 128 else ()
    for tiles in (None, BackwardTiles(shared_keys=True), *narrow):
        case.check(gluon_backward, tiles=tiles)
    case.check(gluon_backward, deterministic=True)


@pytest.mark.cuda
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("mask", "widths"),
    [("causal", (128, 128)), ("union", (256, 256)), sweep("causal", (64, 64)), sweep("union", (192, 128))],
)
def test_slopes_on_hopper(device, mask, widths):
    torch.manual_seed(0)
    Case(mask, 777, 777, (8, 2), *widths, dtype=torch.bfloat16, device=device, alibi=True).check(gluon_backward)


@pytest.mark.cuda
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("mask", ["causal", "full", "random", "union"])
@pytest.mark.parametrize("widths", [(128, 128), (64, 64), (192, 128), (256, 256)])
def test_deterministic_on_hopper(device, mask, widths):
    """In every run; and with a part of the rows, if key tiles take turns."""
    torch.manual_seed(0)
    case = Case(mask, 2000, 2000, (8, 2), *widths, dtype=torch.bfloat16, device=device)
    expected = case.ordered(gluon_backward)
    case.compare(expected)
    for _ in range(20):
        found = case.ordered(gluon_backward)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    if mask != "causal" and max(widths) <= 128:
        rows = slice(500, 1900)
        assert torch.equal(case.ordered(gluon_backward, rows)[0], expected[0][:, :, rows])


@pytest.mark.cuda
@pytest.mark.skipif(NO_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("widths", "shared_keys"), [((128, 128), False), ((128, 128), True), ((192, 128), False), ((256, 256), True)]
)
def test_the_same_bits_again_and_again_on_hopper(device, widths, shared_keys):
    """A result that moves is a race: dk and dv are sums of one program (dq is not), of many items, many times."""
    torch.manual_seed(0)
    case = Case("causal", 3000, 3000, (16, 4), *widths, dtype=torch.bfloat16, device=device)
    first: list[torch.Tensor] = []
    for _ in range(20):
        grads = [torch.zeros(x.shape, dtype=torch.float32, device=device) for x in (case.q, case.k, case.v)]
        case.run(gluon_backward, grads, tiles=BackwardTiles(shared_keys=shared_keys))
        first = first or grads
        assert all(torch.equal(x, y) for x, y in zip(grads[1:], first[1:], strict=True))
