"""Every decoder of the installed Transformers: right over ranks, or refused with a ValueError. Never wrong."""

import warnings

import pytest
import torch

from attnmesh.integrations.transformers_attention import register_attention
from helpers.decoder_types import NotMadeError, WrongError, all_types, quiet, train


def verdict(kind):
    """ "right", "wrong", "refused", or "not made" where one process fails with so small a configuration."""
    try:
        train(kind)
    except NotMadeError as error:
        return f"not made: {error}"
    except ValueError:
        return "refused"
    except WrongError as error:
        return f"wrong: {error}"
    return "right"


@pytest.mark.sweep
def test_every_decoder_is_right_or_refused():
    register_attention()
    with torch.random.fork_rng(), warnings.catch_warnings():
        quiet()
        found = {kind: verdict(kind) for kind in all_types()}
    kinds = {word: [kind for kind, said in found.items() if said.startswith(word)] for word in ("right", "refused")}
    assert not {kind: said for kind, said in found.items() if said.startswith("wrong")}
    assert {"cpmant", "rwkv"} <= set(kinds["refused"])  # which read neither masks nor keyword arguments
    assert len(kinds["right"]) >= 90
    assert len(kinds["refused"]) >= 45
