"""The sharded block against Transformers' own attention: every factorisation of up to 8 ranks, every position."""

from functools import cache

import pytest
import torch

import attnmesh as am
from helpers.blocks import FAMILIES, block_from_layer, factorizations, generate, layer_outputs, transformers_layer
from helpers.cases import first


def heads_for(world):
    return (12, 6) if world % 3 == 0 else (16, 4)


@cache
def inputs(family, heads, prompts, steps):
    """X [B, L, hidden], and what the module says in float64."""
    module = transformers_layer(family, *heads)
    shape = len(prompts), max(prompts) + steps, module.config.hidden_size
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return x, layer_outputs(transformers_layer(family, *heads, torch.float64), x.double())


def assert_right(seen, truth, prompts, steps, bound=1e-5):
    """Every position that was fed, against the largest of the true outputs."""
    for row, length in enumerate(n + steps for n in prompts):
        error = (seen[row, :length].double() - truth[row, :length]).abs().max() / truth.abs().max()
        assert error <= bound, (row, error)  # NaN fails
        assert seen[row, length:].isnan().all()


def assert_matches(family, sharding, prompts, steps):
    tp, kvdp, cp = sharding
    heads = heads_for(tp * kvdp * cp)
    x, truth = inputs(family, heads, prompts, steps)
    interleave = (1, 2, 4, 8)[sum(map(ord, family)) % 4]  # by token, by half a block, by a block, by two
    sharding = am.DecodeSharding(tp, kvdp, cp, interleave)

    def rank(comm):
        return generate(block_from_layer(transformers_layer(family, *heads), sharding, comm), x, prompts, steps)

    for seen in am.run_virtual(sharding.ranks, rank):
        assert_right(seen, truth, prompts, steps)


def case(family, sharding):
    return pytest.param(family, sharding, id=f"{family}-{'x'.join(map(str, sharding))}")


def rotated(world):
    """Each factorization with one of the families, in turn; a single rank with all of them."""
    for at, sharding in enumerate(factorizations(world)):
        for family in FAMILIES if world == 1 else [FAMILIES[at % len(FAMILIES)]]:
            yield case(family, sharding)


@pytest.mark.parametrize(("family", "sharding"), first(1, [*rotated(1), *rotated(2)]))
def test_matches_the_module_in_every_factorisation(family, sharding):
    assert_matches(family, sharding, prompts=(5, 17, 1), steps=4)


@pytest.mark.sweep
@pytest.mark.parametrize(("family", "sharding"), rotated(8))
def test_matches_the_module_over_64_steps_in_every_factorisation(family, sharding):
    assert_matches(family, sharding, prompts=(5, 11, 1), steps=64)


def test_large_worlds_have_every_family():
    for world in (4, 8):
        assert {each.values[0] for each in rotated(world)} == set(FAMILIES)
