"""The notice board, where one rank's note changes while another reads it."""

import pytest
import torch.distributed as dist

from attnmesh.comm.agreement import Claim
from attnmesh.comm.base import CommError
from attnmesh.comm.board import Board


class Interrupted:
    """A store in which something happens between a look at a claim and the reading of it."""

    def __init__(self, store, happens):
        self._store, self._happens = store, happens

    def __getattr__(self, name):
        return getattr(self._store, name)

    def get(self, key):
        self._happens()
        return self._store.get(key)


def test_a_claim_withdrawn_while_it_is_read_is_no_claim():
    store, claim = dist.HashStore(), Claim("ring", {"n": "1"})
    other = Board(store, 1, 3)

    def other_gives_up():
        with pytest.raises(CommError, match=r"ranks 0, 2 did not come|rank 2 did not come"):
            other.compare(claim, timeout=0.0)
        other._round -= 1  # what it does again on every look is the same thing

    other_gives_up()
    other._set(other._claim_key(1, 1), claim.to_json())
    with pytest.raises(CommError, match=r"rank 0 was about to start ring.n=1., but ranks 1, 2 did not come"):
        Board(Interrupted(store, other_gives_up), 0, 3).compare(claim, timeout=0.2)
