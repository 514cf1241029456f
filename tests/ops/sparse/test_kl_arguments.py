"""The indexer's loss: what it refuses before it computes, and gradients that are rounded once however keys come."""

import pytest
import torch

import attnmesh as am
from attnmesh.ops.sparse import indexer_loss


def inputs(dtype: torch.dtype = torch.float32, s_kv: int = 9) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"iq": (6, 2, 4), "ik": (s_kv, 4), "w": (6, 2), "q": (6, 3, 8), "k": (s_kv, 8), "lse": (6, 3)}
    return {name: torch.randn(*shape, generator=g).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("mode", ["sparse", "dense"])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"mask": None}, "mask must be a SparseMask, got NoneType"),
        ({"row_mask": torch.ones(6)}, r"row_mask must be bool \[6\], got torch.float32 \[6\]"),
        ({"global_rows": 0}, "global_rows must be at least 1, got 0"),
        ({"global_rows": 2.5}, "global_rows must be at least 1, got 2.5"),
    ],
)
def test_what_is_wrong_is_named(wrong, words, mode):
    indices = torch.zeros(6, 2, dtype=torch.int32) if mode == "sparse" else None
    with pytest.raises(ValueError, match=words):
        am.indexer_kl_loss(**inputs(), indices=indices, attn_scale=1.0, mode=mode, **wrong)


def dense_gradients(given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    leaves = {name: given[name].clone().requires_grad_() for name in ("iq", "ik", "w")}
    loss = am.indexer_kl_loss(**given | leaves, attn_scale=0.4, mode="dense")
    return list(torch.autograd.grad(loss, list(leaves.values())))


def test_many_stretches_of_keys_round_no_more_than_one(monkeypatch):
    given = inputs(torch.bfloat16, 128 * 12)
    true = dense_gradients({name: x.double() for name, x in given.items()})
    whole = dense_gradients(given)
    monkeypatch.setattr(indexer_loss, "_MAX_CHUNK_SLOTS", 1)  # a stretch is 128 keys then
    for found, plain, exact in zip(dense_gradients(given), whole, true, strict=True):
        error, least = ((x.double() - exact).abs().mean() for x in (found, plain))
        assert error <= 1.02 * least
