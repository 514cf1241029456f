"""Tokens are drawn as often as their logits say."""

import math

import pytest
import torch

from attnmesh.generation.sampling import Sampling

SHARES = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1], dtype=torch.float64)
DRAWS = 2000


def frequencies(sampling, logits=None, draws=DRAWS):
    dice = sampling.dice(0)
    logits = SHARES.log() if logits is None else logits
    drawn = torch.tensor([sampling.draw(logits, dice) for _ in range(draws)])
    return torch.bincount(drawn, minlength=len(logits)) / draws


def close(found, expected):
    """Within five standard deviations, which chance leaves once in a million."""
    return ((found - expected).abs() <= 5 * (expected * (1 - expected) / DRAWS).sqrt()).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_temperature_sharpens_or_flattens(temperature):
    expected = SHARES ** (1 / temperature)
    assert close(frequencies(Sampling(temperature)), expected / expected.sum())


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.3, [1]), (0.4, [1]), (0.41, [1, 3]), (0.7, [1, 3]), (0.84, [1, 3, 2]), (1.0, range(5))]
)
def test_top_p_keeps_the_likeliest_that_make_it_up(top_p, kept):
    expected = torch.zeros(5, dtype=torch.float64)
    expected[list(kept)] = SHARES[list(kept)]
    found = frequencies(Sampling(1.0, top_p - 1e-9 if top_p < 1 else top_p))
    assert (found[expected == 0] == 0).all()
    assert close(found, expected / expected.sum())


def test_temperature_comes_before_top_p():
    flat = SHARES**0.1 / (SHARES**0.1).sum()
    assert (frequencies(Sampling(10.0, 0.95), draws=300) > 0).sum() == 5  # all are about as likely by then
    assert (frequencies(Sampling(10.0, float(flat.max()) * 0.9), draws=300) > 0).sum() == 1


def test_a_tiny_top_p_and_a_tiny_temperature_are_greedy():
    logits = torch.randn(200)
    for sampling in (Sampling(), Sampling(1.0, 1e-12), Sampling(1e-6), Sampling(1e-320)):
        assert sampling.draw(logits, sampling.dice(3)) == int(logits.argmax())
    assert Sampling().greedy
    assert not Sampling(1e-320).greedy


def test_a_row_s_dice_are_its_own():
    logits = torch.randn(1000)

    def drawn(seed, row):
        sampling = Sampling(1.0, seed=seed)
        dice = sampling.dice(row)
        return tuple(sampling.draw(logits, dice) for _ in range(5))

    assert drawn(3, 1) == drawn(3, 1)
    assert len({drawn(seed, row) for seed in range(4) for row in range(4)}) == 16


def test_half_precision_is_drawn_like_double():
    sampling = Sampling(0.7, 0.9)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        logits = torch.randn(64).to(dtype)
        a, b = sampling.dice(0), sampling.dice(0)
        draws = [(sampling.draw(logits, a), sampling.draw(logits.double(), b)) for _ in range(20)]
        assert all(x == y for x, y in draws)


def test_impossible_tokens_are_never_drawn():
    logits = torch.tensor([0.0, -math.inf, 0.0, -math.inf])
    found = frequencies(Sampling(1.0), logits, 500)
    assert found[1] == found[3] == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0 or more, got -0.1"),
        ({"temperature": math.nan}, "temperature must be 0 or more, got nan"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.01}, "top_p must be above 0 and at most 1, got 1.01"),
        ({"top_p": math.nan}, "top_p must be above 0 and at most 1, got nan"),
        ({"seed": -1}, "seed must be an integer from 0 to .*, got -1"),
        ({"seed": 2**60}, "seed must be an integer from 0 to .*, got 1152921504606846976"),
        ({"seed": 1.5}, "seed must be an integer from 0 to .*, got 1.5"),
    ],
)
def test_what_cannot_be_drawn_with_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**given)
