"""Subgroups of a comm: operations, rank numbers, traffic and agreement."""

import pytest
import torch

from attnmesh.comm import Comm, CommError, IndependentSubComm, SubComm, run_virtual

WORLD = 6
NODES = [range(3), range(3, 6)]
PLACES = [range(i, 6, 3) for i in range(3)]


def of(comm: Comm, parts: list[range]) -> SubComm:
    """The part of the world that this rank is in."""
    return SubComm(comm, next(part for part in parts if comm.rank in part))


every_split = pytest.mark.parametrize("parts", [NODES, PLACES, [[4, 0, 2], [1, 5, 3]], [range(6)]], ids=str)


def members_of(parts, rank: int) -> list[int]:
    return list(next(part for part in parts if rank in part))


@every_split
def test_members_are_numbered_in_the_order_in_which_they_are_named(parts):
    found = run_virtual(WORLD, lambda comm: (of(comm, parts).rank, of(comm, parts).world))
    for rank, numbers in enumerate(found):
        members = members_of(parts, rank)
        assert numbers == (members.index(rank), len(members))


@every_split
def test_an_exchange_reaches_the_member_of_that_number(parts):
    def rank(comm: Comm) -> tuple[int, int]:
        sub = of(comm, parts)
        got = torch.zeros(1)
        right, left = (sub.rank + 1) % sub.world, (sub.rank - 1) % sub.world
        sub.exchange([(torch.full((1,), 10.0 + comm.rank), right)], [(got, left)]).wait()
        return int(got)

    for me, got in enumerate(run_virtual(WORLD, rank)):
        members = members_of(parts, me)
        assert got == 10 + members[members.index(me) - 1]


@every_split
def test_collectives_stay_among_the_members(parts):
    def rank(comm: Comm):
        sub = of(comm, parts)
        mine = torch.full((sub.rank + 1,), float(comm.rank))  # parts of different sizes
        gathered = sub.all_gather(mine, [(i + 1,) for i in range(sub.world)])
        traded = sub.all_to_all([torch.tensor([comm.rank, to]) for to in range(sub.world)], [(2,)] * sub.world)
        total = sub.all_reduce(torch.tensor([float(comm.rank), 1.0]))
        sub.barrier()
        return [x.tolist() for x in gathered], [x.tolist() for x in traded], total.tolist()

    for me, (gathered, traded, total) in enumerate(run_virtual(WORLD, rank)):
        members = members_of(parts, me)
        assert gathered == [[float(member)] * (at + 1) for at, member in enumerate(members)]
        assert traded == [[member, members.index(me)] for member in members]
        assert total == [float(sum(members)), float(len(members))]


def test_parts_of_two_kinds_can_be_under_way_at_once():
    """As in a ring of rings: keys of the next node travel while the present ones turn within the node."""

    def rank(comm: Comm) -> tuple[float, float]:
        inside, outside = of(comm, NODES), of(comm, PLACES)
        near, far, mine = torch.zeros(1), torch.zeros(1), torch.full((1,), float(comm.rank))
        travelling = outside.exchange([(mine, (outside.rank + 1) % 2)], [(far, (outside.rank - 1) % 2)])
        inside.exchange([(mine, (inside.rank + 1) % 3)], [(near, (inside.rank - 1) % 3)]).wait()
        travelling.wait()
        return float(near), float(far)

    assert run_virtual(WORLD, rank) == [(2, 3), (0, 4), (1, 5), (5, 0), (3, 1), (4, 2)]


def test_bytes_count_in_the_part_and_in_the_whole():
    def rank(comm: Comm) -> None:
        inside, outside = of(comm, NODES), of(comm, PLACES)
        got, mine = torch.zeros(4), torch.zeros(4)
        inside.exchange([(mine, (inside.rank + 1) % 3)], [(got, (inside.rank - 1) % 3)]).wait()
        assert (inside.traffic.messages, inside.traffic.bytes) == (1, 16)
        assert (outside.traffic.messages, outside.traffic.bytes) == (0, 0)
        assert (comm.traffic.messages, comm.traffic.bytes) == (1, 16)
        outside.all_gather(mine, [(4,), (4,)])
        assert outside.traffic.by_op == {"all_gather": (1, 16)}
        assert comm.traffic.bytes == 32
        inside.exchange([], []).wait()
        inside.all_to_all([mine[:0]] * 3, [(0,)] * 3)
        assert comm.traffic.bytes == 32

    run_virtual(WORLD, rank)


def test_a_part_of_one_needs_nobody():
    def rank(comm: Comm) -> None:
        alone = SubComm(comm, [comm.rank])
        x = torch.randn(3)
        assert torch.equal(alone.all_reduce(x), x)
        assert torch.equal(alone.all_gather(x, [(3,)])[0], x)
        assert torch.equal(alone.all_to_all([x], [(3,)])[0], x)
        alone.barrier()
        assert (alone.rank, alone.world, alone.traffic.bytes, comm.traffic.bytes) == (0, 1, 0, 0)

    run_virtual(3, rank)


def test_a_part_of_a_part():
    def rank(comm: Comm) -> list[float]:
        half = of(comm, [range(4), range(4, 8)])
        pair = SubComm(half, range(half.rank // 2 * 2, half.rank // 2 * 2 + 2))
        return pair.all_reduce(torch.tensor([float(comm.rank)])).tolist()

    assert run_virtual(8, rank) == [[1.0], [1.0], [5.0], [5.0], [9.0], [9.0], [13.0], [13.0]]


def test_it_takes_over_what_the_parent_is():
    def rank(comm: Comm) -> None:
        comm.timeout = 7
        sub = of(comm, NODES)
        assert (sub.timeout, sub.shares_stream) == (7, True)
        assert sub.buffer((2, 3), dtype=torch.half, device=torch.device("cpu")).shape == (2, 3)

    run_virtual(WORLD, rank)


def test_members_without_this_rank_are_refused():
    def rank(comm: Comm) -> None:
        others = [other for other in range(3) if other != comm.rank]
        with pytest.raises(
            ValueError, match=rf"members must include this rank \({comm.rank}\), got \[{others[0]}, {others[1]}"
        ):
            SubComm(comm, others)

    run_virtual(3, rank)


def test_peers_are_members_and_not_ranks_of_the_whole():
    def rank(comm: Comm) -> None:
        sub = of(comm, NODES)
        for peer in (3, -1):
            with pytest.raises(ValueError, match=rf"peer must be in 0..2, got {peer}"):
                sub.exchange([(torch.zeros(1), peer)], [])
        with pytest.raises(ValueError, match="peer must be another rank"):
            sub.exchange([(torch.zeros(1), sub.rank)], [])

    run_virtual(WORLD, rank)


def test_all_ranks_of_the_whole_agree_through_a_part():
    def rank(comm: Comm) -> str:
        sub = of(comm, NODES)
        sub.agree("work", {"size": 1})
        with pytest.raises(ValueError, match="size is 2 on ranks 0, 1, 2, 3, 4 but 3 on rank 5") as caught:
            sub.agree("work", {"size": 3 if comm.rank == 5 else 2})
        return str(caught.value)

    assert len(set(run_virtual(WORLD, rank))) == 1


def test_a_rank_that_fails_lets_all_of_the_parent_know():
    heard = []

    class Listening(SubComm):
        def fail(self, message: str) -> None:
            heard.append(message)

    def rank(comm: Comm) -> None:
        SubComm(Listening(comm, [0, 1]), [comm.rank]).fail(f"rank {comm.rank} is lost")

    run_virtual(2, rank)
    assert sorted(heard) == ["rank 0 is lost", "rank 1 is lost"]


# Independent subgroups.

PARTS = [[0, 2], [1, 3]]


def independent(comm: Comm) -> IndependentSubComm:
    return IndependentSubComm(comm, PARTS[comm.rank % 2])


def test_independent_subgroups_do_not_compare_their_calls():
    def rank(comm: Comm) -> float:
        sub = independent(comm)
        sub.agree("work", {"size": comm.rank % 2})
        if comm.rank % 2:  # and one part does more than the other
            sub.agree("more", {})
            sub.all_reduce(torch.ones(1))
        total = sub.all_reduce(torch.tensor([float(comm.rank)]))
        comm.agree("together again", {"all": "alike"})
        return float(total)

    assert run_virtual(4, rank) == [2.0, 4.0, 2.0, 4.0]


def test_messages_of_an_independent_subgroup_count_in_the_parent():
    def rank(comm: Comm) -> None:
        sub = independent(comm)
        sub.all_gather(torch.zeros(4), [(4,), (4,)])
        assert sub.traffic.bytes == comm.traffic.bytes == 16

    run_virtual(4, rank)


def test_an_error_in_an_independent_subgroup_is_raised():
    def rank(comm: Comm) -> None:
        with pytest.raises(ValueError, match="work: too much"):
            independent(comm).agree("work", {}, error="too much")

    run_virtual(4, rank)


def test_a_member_that_raises_ends_the_wait_of_the_others():
    heard = {}

    def rank(comm: Comm) -> None:
        if comm.rank == 2:
            raise OSError("gone")
        try:
            sub = independent(comm)
            sub.all_reduce(torch.ones(1))
            comm.barrier()
        except CommError as error:
            heard[comm.rank] = str(error)
            raise

    with pytest.raises(OSError, match="gone"):
        run_virtual(4, rank, timeout=20)
    assert set(heard) == {0, 1, 3}
