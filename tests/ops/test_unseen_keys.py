"""Keys that no row sees, and rows that see no key, may hold NaN or infinity: nothing of it reaches other rows."""

import pytest
import torch

from attnmesh import Causal, Documents, Mask, SlidingWindow, attention
from attnmesh.testing.attention import NAMES, assert_attention_close, forward_backward, random_inputs
from helpers.cases import in_turn

# Irregular positions, several runs, steps, and a single run before or among the keys.
POSITIONS = {
    "irregular": (torch.tensor([3, 90, 41, 7, 90, 44, 6]), torch.tensor([2, 60, 5, 88, 43, 42, 61, 6, 91, 87, 20, 4])),
    "runs": (torch.cat([torch.arange(4), torch.arange(30, 37)]), torch.arange(48)),
    "step": (torch.arange(0, 60, 10), torch.arange(64)),
    "before and after": (torch.arange(40), torch.arange(20, 25)),
    "chunk": (torch.arange(20, 27), torch.arange(48)),
    "after the keys": (torch.tensor([0, 5]), torch.tensor([0, 2])),
    "before the keys": (torch.tensor([-1, 2]), torch.arange(9)),
}
MASKS = [SlidingWindow(2), Causal() & SlidingWindow(4), SlidingWindow(1, 2), Causal(), Documents([16] * 8)]


def assert_poison_stays(backend: str, mask: Mask, positions: str, poison: float, **inputs) -> None:
    q_at, k_at = POSITIONS[positions]
    clean = random_inputs(len(q_at), len(k_at), **inputs)
    visible = mask.visible(q_at[:, None], k_at)
    unseen = [~visible.any(1), ~visible.any(0), ~visible.any(0)]
    for x, rows in zip(clean, unseen, strict=False):
        x[:, :, rows] = 0.0
    spoiled = [x.clone() for x in clean]
    for x, rows in zip(spoiled, unseen, strict=False):
        x[:, :, rows] = poison

    def attend(q, k, v):
        at = {"q_positions": q_at, "k_positions": k_at}
        return attention(q, k, v, mask=mask, return_lse=True, backend=backend, **at)

    results = forward_backward(attend, spoiled)
    at = {"q_positions": q_at.to(clean[0].device), "k_positions": k_at.to(clean[0].device)}
    assert_attention_close(results, clean, mask, **at)
    for name, grad, rows in zip(NAMES[2:], results[2:], unseen, strict=True):
        assert (grad[:, :, rows] == 0).all(), name


@pytest.mark.parametrize(
    ("backend", "positions", "mask", "poison"),  # every mask at all positions
    in_turn(["aten", "torch", "reference"], POSITIONS, MASKS * len(POSITIONS), [torch.nan, torch.inf]),
    ids=str,
)
def test_poison_reaches_nothing(backend, positions, mask, poison):
    assert_poison_stays(backend, mask, positions, poison)


@pytest.mark.parametrize("positions", ["irregular", "runs", "chunk"])
def test_poison_reaches_nothing_through_the_kernels(device, positions):
    assert_poison_stays("triton", MASKS[1], positions, torch.nan, heads=(2, 1), batch=1, device=device)
