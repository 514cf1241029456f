"""attention() with values of another width than keys, softcap, sinks and ALiBi slopes: all backends and gradients."""

from itertools import product

import pytest
import torch
from torch import Tensor

from attnmesh import attention, explain_attention
from attnmesh.core.masks import (
    BlockCausal,
    Causal,
    Documents,
    Full,
    Global,
    Mask,
    Padding,
    PerSequence,
    Prefix,
    SlidingWindow,
)
from attnmesh.testing.attention import assert_attention_close, forward_backward, random_inputs
from helpers.cases import else_sweep, in_turn, sweep

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
WINDOW_AND_SINK_TOKENS = Causal() & (Global(3) | SlidingWindow(10))
MASKS = [
    Full(), Causal(), SlidingWindow(9, 3), Causal() & Documents([20, 0, 30, 17]), WINDOW_AND_SINK_TOKENS, Prefix(20),
    BlockCausal(16), Global(5, both=True) | SlidingWindow(7, 7), Causal() & Padding([67, 30]),
    PerSequence([Causal(), SlidingWindow(5)]),
]  # fmt: skip
# (head_dim, value_dim, softcap, sinks, slopes): each of them alone, and all together.
SCORES = {
    "narrow values": (24, 8, None, False, False),
    "wide values": (8, 24, None, False, False),
    "softcap": (16, 16, 1.5, False, False),
    "sinks": (16, 16, None, True, False),
    "slopes": (16, 16, None, False, True),
    "all": (24, 16, 1.5, True, True),
}
PLAIN = ("narrow values", "wide values", "sinks")  # what torch's fused kernels serve


def check(
    inputs: list[Tensor], mask: Mask, backend: str, *, sinks: Tensor | None = None, at: dict | None = None, **terms
) -> list[Tensor]:
    """Compares with float64 and returns out, lse and the gradients."""
    where = at or {}

    def attend(q, k, v, sinks=None):
        return attention(q, k, v, mask=mask, sinks=sinks, return_lse=True, backend=backend, **terms, **where)

    found = forward_backward(attend, inputs, sinks)
    assert_attention_close(found, inputs, mask, sinks=sinks, **terms, **where)
    return found


def terms_named(name: str, device: str | torch.device = "cpu") -> tuple[dict, dict]:
    """The widths, and the other terms of the scores."""
    head_dim, value_dim, softcap, sinks, slopes = SCORES[name]
    sink = torch.randn(4, generator=torch.Generator().manual_seed(5)).to(device) if sinks else None
    terms = {"softcap": softcap, "alibi_slopes": SLOPES.to(device) if slopes else None, "sinks": sink}
    return {"head_dim": head_dim, "value_dim": value_dim}, terms


@pytest.mark.parametrize(("backend", "mask"), in_turn(["aten", "torch", "reference"], MASKS), ids=str)
def test_every_mask_with_some_terms(backend, mask):
    names = [name for name in SCORES if backend != "aten" or name in PLAIN]
    for at, name in enumerate(names):
        if (at + MASKS.index(mask)) % 3 == 0:
            widths, terms = terms_named(name)
            dtype = DTYPES[(at + MASKS.index(mask)) // 3 % 4]
            check(random_inputs(67, dtype=dtype, seed=at, **widths), mask, backend, **terms)


def test_triton_serves_parts_sequences_and_all_terms(device):
    widths, terms = terms_named("all", device)
    mask = PerSequence([WINDOW_AND_SINK_TOKENS, SlidingWindow(5)])
    check(random_inputs(17, dtype=torch.float16, device=device, **widths), mask, "triton", **terms)


@pytest.mark.sweep
@pytest.mark.parametrize(("mask", "name"), in_turn(MASKS, SCORES), ids=str)
def test_triton_with_every_mask_and_term(mask, name, device):
    widths, terms = terms_named(name, device)
    if min(widths.values()) < 16:
        widths = {each: 16 + width for each, width in widths.items()}
    dtype = (torch.float32, torch.float16)[MASKS.index(mask) % 2]
    check(random_inputs(67, dtype=dtype, device=device, **widths), mask, "triton", **terms)


@pytest.mark.sweep
@pytest.mark.parametrize(("mask", "backend", "dtype"), in_turn(MASKS, ["aten", "torch", "reference"], DTYPES), ids=str)
def test_every_mask_term_and_dtype(mask, backend, dtype):
    for at, name in enumerate(SCORES):
        if backend == "aten" and name not in PLAIN:
            continue
        widths, terms = terms_named(name)
        check(random_inputs(67, dtype=dtype, seed=at, **widths), mask, backend, **terms)


def is_of_its_own(mask: Mask, dtype: torch.dtype) -> bool:
    """Whether no other case has its kernels: those of a dtype differ by causal, one interval of keys, and several."""
    few = {
        torch.float32: (Causal(), WINDOW_AND_SINK_TOKENS), torch.float16: (SlidingWindow(9, 3),),
        torch.float64: (Causal(),),
    }  # fmt: skip
    return dtype == torch.bfloat16 or mask in few[dtype]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("mask", "dtype"), else_sweep(product(MASKS, DTYPES), is_of_its_own), ids=str)
def test_every_mask_and_term_on_a_gpu(mask, dtype):
    for name in SCORES:
        widths, terms = terms_named(name, "cuda")
        inputs = random_inputs(67, dtype=dtype, device="cuda", **widths)
        for backend in ("auto", "torch"):
            check(inputs, mask, backend, **terms)


@pytest.mark.parametrize(
    ("backend", "widths"),
    [
        ("aten", (192, 128)),
        ("aten", (40, 72)),
        ("aten", (256, 256)),
        ("torch", (576, 512)),
        ("torch", (64, 32)),
        ("torch", (1, 3)),
    ],
)
def test_widths_of_models_and_odd_ones(backend, widths):
    for at, mask in enumerate((Causal(), SlidingWindow(7))):
        dtype = DTYPES[(at + widths[0]) % 4]
        inputs = random_inputs(33, 35, dtype=dtype, batch=1, heads=(2, 1), head_dim=widths[0], value_dim=widths[1])
        out, *_ = check(inputs, mask, backend)
        assert out.shape == (1, 2, 33, widths[1])


@pytest.mark.parametrize("positions", ["shuffled", "strided", "chunk"])
def test_slopes_go_by_positions(positions):
    generator = torch.Generator().manual_seed(3)
    q_at, k_at = {
        "shuffled": (torch.randperm(21, generator=generator), torch.randperm(30, generator=generator)),
        "strided": (torch.arange(0, 63, 3), torch.arange(0, 60, 2)),
        "chunk": (torch.arange(20, 41), torch.arange(30)),
    }[positions]
    for mask in (Causal(), WINDOW_AND_SINK_TOKENS, PerSequence([Full(), SlidingWindow(4)])):
        at = {"q_positions": q_at, "k_positions": k_at}
        check(random_inputs(21, 30), mask, "auto", at=at, alibi_slopes=SLOPES, sinks=torch.zeros(4), softcap=3.0)


@pytest.mark.parametrize("backend", ["aten", sweep("torch")])
def test_tiles_of_long_sequences(backend, monkeypatch):
    """Several tiles of rows and of keys, and windows narrower than a tile of rows."""
    monkeypatch.setattr("attnmesh.ops.dense.torch_tiles._SCORES", {"cpu": 1})  # 16 rows x 128 keys
    for mask in (Causal(), Causal() & SlidingWindow(5), WINDOW_AND_SINK_TOKENS, Documents([50, 7, 143])):
        check(random_inputs(200, heads=(4, 2), batch=1), mask, backend, sinks=torch.ones(4))


@pytest.mark.parametrize("backend", ["aten", "torch", "reference", "triton"])
def test_a_row_without_keys_has_the_lse_of_its_sink(backend, device):
    device = device if backend == "triton" else "cpu"
    inputs, sinks = random_inputs(6, 4, device=device), torch.tensor([0.5, -2.0, 30.0, -torch.inf], device=device)
    at = {"q_positions": torch.arange(-3, 3), "k_positions": torch.arange(4)}
    out, lse, dq, *_, dsinks = check(inputs, Causal(), backend, sinks=sinks, at=at)
    torch.testing.assert_close(lse[:, :, :3], sinks[:, None].expand(2, 4, 3), rtol=2e-7, atol=0)
    assert not out[:, :, :3].any()
    assert not dq[:, :, :3].any()
    assert dsinks[3] == 0


@pytest.mark.parametrize("backend", ["torch", sweep("reference")])
def test_gradients_agree_with_finite_differences(backend):
    q, k, v = (
        x.requires_grad_()
        for x in random_inputs(5, batch=1, heads=(2, 1), head_dim=2, value_dim=1, dtype=torch.float64)[:3]
    )
    sinks = torch.tensor([-1.0, 1.0], dtype=torch.float64, requires_grad=True)

    def attend(q, k, v, sinks):
        terms = {"softcap": 1.0, "alibi_slopes": SLOPES[:2], "sinks": sinks}
        return attention(q, k, v, mask=WINDOW_AND_SINK_TOKENS, return_lse=True, backend=backend, **terms)

    assert torch.autograd.gradcheck(attend, (q, k, v, sinks))


def test_only_the_sinks_may_want_a_gradient():
    q, k, v, grad_out, _ = random_inputs(9, dtype=torch.bfloat16)
    sinks = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    attention(q, k, v, mask=Causal(), sinks=sinks).backward(grad_out)
    assert sinks.grad is not None
    assert sinks.grad.dtype == torch.bfloat16
    exact = sinks.detach().double().requires_grad_()
    wide = [x.double() for x in (q, k, v)]
    attention(*wide, mask=Causal(), sinks=exact, backend="reference").backward(grad_out.double())
    torch.testing.assert_close(sinks.grad.double(), exact.grad, rtol=2e-2, atol=2e-2)


def test_autocast_does_not_round_the_scores():
    inputs = random_inputs(33)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = forward_backward(
            lambda *qkv: attention(*qkv, mask=Causal(), softcap=2.0, return_lse=True, backend="torch"), inputs
        )
    assert_attention_close(found, inputs, Causal(), softcap=2.0)


def test_auto_serves_every_call_without_the_reference():
    q, k, v = random_inputs(5, value_dim=8)[:3]
    assert explain_attention(q, k, v).backend == "aten"
    choice = explain_attention(q, k, v, softcap=30.0)
    assert choice.backend == "torch"
    assert dict(choice.why_not)["aten"] == "torch's fused kernels take no softcap and no ALiBi slopes"
    assert explain_attention(q, k, v, alibi_slopes=SLOPES).backend == "torch"
    assert explain_attention(q, k, v, sinks=SLOPES).backend == "aten"


BAD = {
    "softcap of zero": ({"softcap": 0.0}, "softcap must be a positive number, got 0.0"),
    "softcap of infinity": ({"softcap": float("inf")}, "softcap must be a positive number, got inf"),
    "softcap that is true": ({"softcap": True}, "softcap must be a positive number, got True"),
    "sinks of kv heads": ({"sinks": torch.zeros(2)}, r"sinks must be floating point \[4\], one per query head"),
    "integer sinks": ({"sinks": torch.zeros(4, dtype=torch.long)}, "sinks must be floating point .* torch.int64"),
    "a number for sinks": ({"sinks": 1.0}, r"sinks must be a tensor \[heads\], got float"),
    "sinks elsewhere": ({"sinks": torch.zeros(4, device="meta")}, "sinks must be on the device of q, cpu, got meta"),
    "slopes of a batch": ({"alibi_slopes": torch.zeros(2, 4)}, r"alibi_slopes must be floating point \[4\]"),
    "slopes with a gradient": ({"alibi_slopes": SLOPES.clone().requires_grad_()}, "alibi_slopes must be constants"),
    "a mask of another batch": ({"mask": Padding([6, 6, 6])}, "one mask per sequence of the batch of 2, got 3"),
    "aten with a softcap": ({"softcap": 1.0, "backend": "aten"}, "backend='aten' cannot serve .* no softcap"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_terms_are_errors_that_name_them(what):
    wrong, words = BAD[what]
    q, k, v = random_inputs(6)[:3]
    for ask in (attention, explain_attention):
        with pytest.raises(ValueError, match=words):
            ask(q, k, v, **wrong)
