"""Decode with a softcap, ALiBi slopes, and queries narrower than the cache, against dense attention in float64."""

import pytest
import torch
from torch import Tensor

import attnmesh as am
from helpers.cases import sweep
from helpers.decode import CUDA, device_of

LAST = (30, 17, -1)  # the last is skipped
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0])


def problem(backend: str, tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Queries, and keys and values [B, 2, 32, 32], where nothing may be read after the last position."""
    device = device_of(backend)
    q = torch.randn(3, 4, tokens, 32).to(device, dtype)
    k, v = torch.randn(2, 3, 2, 32, 32).to(device)
    for x in (k, v):
        for sequence, last in enumerate(LAST):
            x[sequence, :, last + 1 :] = torch.nan
    return q, k, v


def paged(x: Tensor) -> Tensor:
    """A cache as a pool of blocks of 16 tokens, one sequence after another."""
    return x.transpose(1, 2).unflatten(1, (2, 16)).flatten(0, 1)


def decode(q: Tensor, k: Tensor, v: Tensor, pages: bool, **how) -> list[Tensor]:
    """out and lse of either public function."""
    if not pages:
        return list(am.decode_attention(q, k, v, cur_pos=list(LAST), return_lse=True, **how))
    table = torch.arange(6, dtype=torch.int32, device=q.device).view(3, 2)
    return list(am.paged_decode_attention(q, paged(k), paged(v), table, cur_pos=list(LAST), return_lse=True, **how))


def check(found: list[Tensor], q: Tensor, k: Tensor, v: Tensor, mask: am.Mask, rtol: float = 2e-6, **terms) -> None:
    """Each sequence as dense attention over its keys, in float64."""
    terms = {name: x.double() if isinstance(x, Tensor) else x for name, x in terms.items()}
    for sequence, last in enumerate(LAST[:2]):
        at = torch.arange(last + 1 - q.shape[2], last + 1)
        own = [x[sequence : sequence + 1, :, : last + 1].double() for x in (k, v)]
        exact = am.attention(
            q[sequence : sequence + 1].double(), *own, mask=mask, q_positions=at, return_lse=True, backend="reference",
            **terms,
        )  # fmt: skip
        for mine, truth, tolerance in zip(found, exact, (rtol, 2e-6), strict=True):
            torch.testing.assert_close(mine[sequence : sequence + 1].double(), truth, rtol=tolerance, atol=tolerance)
    assert not found[0][2].any()
    assert found[1][2].isneginf().all()


@pytest.mark.parametrize(
    ("backend", "pages"),
    [
        ("reference", False),
        sweep("triton", False),
        sweep("cpu", False),
        sweep("reference", True),
        sweep("triton", True),
        sweep("cpu", True),
    ],
)
def test_softcap_and_slopes_are_those_of_attention(backend, pages):
    for tokens, window in ((1, None), (3, 9)):
        q, k, v = problem(backend, tokens)
        terms = {"alibi_slopes": SLOPES.to(q.device), "sinks": torch.randn(4).to(q.device)}
        if backend != "cpu":
            terms["softcap"] = 0.7
        mask = am.Causal() if window is None else am.SlidingWindow(window - 1)
        check(decode(q, k, v, pages, window=window, backend=backend, **terms), q, k, v, mask, **terms)


def test_a_softcap_alone_and_slopes_beside_a_bias_or_a_tree():
    q, k, v = problem("auto", 2)
    check(decode(q, k, v, False, softcap=1.5), q, k, v, am.Causal(), softcap=1.5)
    tree = torch.ones(2, 2, dtype=torch.bool).tril()
    check(decode(q, k, v, True, alibi_slopes=SLOPES, tree=tree), q, k, v, am.Causal(), alibi_slopes=SLOPES)
    at = torch.tensor(LAST)[:, None, None, None] - 1 + torch.arange(2)[:, None] - torch.arange(32)
    causal = torch.where(at >= 0, 0.0, -torch.inf)
    check(decode(q, k, v, True, alibi_slopes=SLOPES, mask=causal), q, k, v, am.Causal(), alibi_slopes=SLOPES)


def test_what_cannot_be_served_says_so():
    q, k, v = problem("cpu", 1)
    with pytest.raises(ValueError, match=r"backend='cpu' cannot serve this call: .*no softcap"):
        decode(q, k, v, False, softcap=1.0, backend="cpu")
    ranges = torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="key_range and alibi_slopes are mutually exclusive"):
        decode(q, k, v, False, alibi_slopes=SLOPES, key_range=ranges)
    with pytest.raises(ValueError, match=r"alibi_slopes must be floating point \[4\]"):
        decode(q, k, v, False, alibi_slopes=SLOPES[:2])
    with pytest.raises(ValueError, match=r"softcap must be"):
        decode(q, k, v, False, softcap=0.0)


@pytest.mark.parametrize(
    ("backend", "pages"),
    [
        ("auto", False),
        sweep("reference", False),
        sweep("triton", False),
        sweep("auto", True),
        sweep("reference", True),
        sweep("triton", True),
    ],
)
def test_narrow_queries_over_a_float32_cache(backend, pages):
    dtype = torch.bfloat16 if backend != "triton" or CUDA else torch.float16
    q, k, v = problem(backend, 2, dtype)
    found = decode(q, k, v, pages, backend=backend)
    assert found[0].dtype == dtype
    check(found, q, k, v, am.Causal(), rtol=torch.finfo(dtype).eps)
    exact = decode(q, k, v, pages, backend=backend, out_dtype=torch.float32)
    check(exact, q, k, v, am.Causal())  # keys and values are not rounded to the dtype of q
    torch.testing.assert_close(found[0], exact[0].to(dtype), rtol=0, atol=0)
    if pages:
        for wide in (dtype, torch.float32):
            into = am.State(
                torch.empty(3, 4, 2, 32, dtype=wide, device=q.device), torch.empty(3, 4, 2, device=q.device)
            )
            decode(q, k, v, True, backend=backend, into=into)
            torch.testing.assert_close(into.out, exact[0].to(wide), rtol=0, atol=0)


def test_a_cache_narrower_than_the_queries_is_refused():
    q, k, v = problem("auto", 1)
    with pytest.raises(ValueError, match="the same dtype, or k_cache be float32 or Quantized"):
        decode(q, k.half(), v.half(), False)
