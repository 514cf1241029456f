"""Parts of a world whose calls differ."""

import pytest
import torch

from attnmesh.comm import Comm, CommError, run_virtual
from attnmesh.comm.apart import ApartComm

PARTS = [[0, 2], [1, 3]]


def part(comm: Comm) -> ApartComm:
    return ApartComm(comm, PARTS[comm.rank % 2])


def test_parts_agree_on_nothing_with_one_another():
    def rank(comm: Comm) -> float:
        apart = part(comm)
        apart.agree("work", {"size": comm.rank % 2})
        if comm.rank % 2:  # and one part does more than the other
            apart.agree("more", {})
            apart.all_reduce(torch.ones(1))
        total = apart.all_reduce(torch.tensor([float(comm.rank)]))
        comm.agree("together again", {"all": "alike"})
        return float(total)

    assert run_virtual(4, rank) == [2.0, 4.0, 2.0, 4.0]


def test_its_messages_count_in_the_whole():
    def rank(comm: Comm) -> None:
        apart = part(comm)
        apart.all_gather(torch.zeros(4), [(4,), (4,)])
        assert apart.traffic.bytes == comm.traffic.bytes == 16

    run_virtual(4, rank)


def test_a_rank_s_own_mistake_is_still_a_mistake():
    def rank(comm: Comm) -> None:
        with pytest.raises(ValueError, match="work: too much"):
            part(comm).agree("work", {}, error="too much")

    run_virtual(4, rank)


def test_a_member_that_gives_up_ends_the_others_wait():
    heard = {}

    def rank(comm: Comm) -> None:
        if comm.rank == 2:
            raise OSError("gone")
        try:
            comm_of = part(comm)
            comm_of.all_reduce(torch.ones(1))
            comm.barrier()
        except CommError as error:
            heard[comm.rank] = str(error)
            raise

    with pytest.raises(OSError, match="gone"):
        run_virtual(4, rank, timeout=20)
    assert set(heard) == {0, 1, 3}
