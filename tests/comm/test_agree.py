"""Agreement before an exchange: equal facts pass, anything else is an error on every rank."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from attnmesh.comm import Comm, CommError, run_virtual
from attnmesh.comm.agreement import Claim, complaint
from attnmesh.comm.board import Board


def errors_of(world, program):
    """What each rank raised from `program`, as text, or None."""

    def attempt(comm: Comm) -> str | None:
        try:
            program(comm)
        except ValueError as error:
            return str(error)
        return None

    return run_virtual(world, attempt)


def test_agreement_passes_and_sends_nothing():
    def program(comm: Comm) -> int:
        for _ in range(3):
            comm.agree("ring", {"shape": (2, 3), "dtype": torch.bfloat16})
        return comm.traffic.messages

    assert run_virtual(3, program) == [0, 0, 0]


def test_a_shape_is_a_shape_however_it_is_written():
    shapes = [[2, 3], (2, 3), torch.Size([2, 3])]
    assert errors_of(3, lambda comm: comm.agree("ring", {"shape": shapes[comm.rank]})) == [None] * 3


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([(2, 3), (2, 4), (2, 3)], "ring: ranks disagree: fact is (2, 3) on ranks 0, 2 but (2, 4) on rank 1"),
        (
            [torch.float32, torch.float32, torch.float16],
            "ring: ranks disagree: fact is torch.float32 on ranks 0, 1 but torch.float16 on rank 2",
        ),
    ],
)
def test_a_different_fact_is_an_error_with_both_sides_on_every_rank(values, words):
    assert errors_of(3, lambda comm: comm.agree("ring", {"fact": values[comm.rank], "same": 1})) == [words] * 3


def test_a_fact_that_only_some_ranks_give():
    facts = [{"a": 1}, {"a": 1, "b": 2}]
    words = "op: ranks disagree: b is (not given) on rank 0 but 2 on rank 1"
    assert errors_of(2, lambda comm: comm.agree("op", facts[comm.rank])) == [words] * 2


def test_different_operations():
    names = ["ring", "gather"]
    words = "ranks are about to do different things: ring(n=1) on rank 0 but gather(n=1) on rank 1"
    assert errors_of(2, lambda comm: comm.agree(names[comm.rank], {"n": 1})) == [words] * 2


@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_one_ranks_own_error_is_everybodys(guilty):
    def program(comm: Comm) -> None:
        comm.agree("ring", {"n": comm.rank}, error="k is short" if comm.rank == guilty else None)

    assert errors_of(3, program) == [f"ring: k is short (said by rank {guilty})"] * 3


def test_ranks_go_on_together_after_a_disagreement():
    def program(comm: Comm) -> float:
        with pytest.raises(ValueError, match="disagree"):
            comm.agree("op", {"n": comm.rank})
        with pytest.raises(ValueError, match="said by rank 1"):
            comm.agree("op", {"n": 1}, error="mine" if comm.rank == 1 else None)
        comm.agree("op", {"n": 1})
        return comm.all_reduce(torch.ones(1)).item()

    assert run_virtual(3, program) == [3.0] * 3


def test_an_error_is_never_remembered():
    def program(comm: Comm) -> None:
        comm.agree("op", {"n": 1})
        for _ in range(2):
            with pytest.raises(ValueError, match="said by rank"):
                comm.agree("op", {"n": 1}, error="all of us")

    run_virtual(2, program)


def test_one_rank_remembers_while_another_comes_with_something_new():
    def program(comm: Comm) -> None:
        comm.agree("ring", {"n": 1})
        comm.agree("ring", {"n": 1 if comm.rank == 0 else 2})
        comm.barrier()

    with pytest.raises(CommError) as caught:
        run_virtual(2, program)
    assert "rank 0 is waiting for rank 1 to receive" in str(caught.value)
    assert "rank 1 is waiting for rank 0 to agree on ring(n=2)" in str(caught.value)


def test_an_error_that_others_do_not_come_to_hear_is_not_passed_over():
    """Rank 1 catches its own error and goes on, while rank 0 is in the operation that both once agreed on."""

    def program(comm: Comm) -> None:
        comm.agree("ring", {"n": 1})
        if comm.rank == 1:
            with pytest.raises(ValueError, match="k is short"):
                comm.agree("ring", {"n": 1}, error="k is short")
        comm.barrier()

    with pytest.raises(CommError, match="rank 1 is waiting for rank 0 to hear that ring: k is short"):
        run_virtual(2, program)


def test_claims_survive_their_journey():
    claim = Claim.of("op", {"shape": (1, 2), "name": 'a "b"\n'}, "é")
    assert Claim.from_json(claim.to_json()) == claim
    assert complaint({0: claim, 3: claim}) == "op: é (said by ranks 0, 3)"


def test_a_group_made_again_does_not_read_the_notes_of_the_last_one():
    store = HashStore()
    for generation in range(3):
        boards = [Board(store, rank, 2) for rank in range(2)]
        for round_ in range(3):
            claim = Claim.of("op", {"generation": generation, "round": round_}, None)
            with ThreadPoolExecutor(2) as pool:
                both = list(pool.map(lambda board, claim=claim: board.compare(claim, timeout=10), boards))
            assert both == [{0: claim, 1: claim}] * 2
        boards[generation % 2].report_failure("the end")
        assert "the end" in boards[1 - generation % 2].failures()


class LostStore:
    """The store of a group whose serving rank has died."""

    def _lost(self, *args: object) -> None:
        raise RuntimeError("Connection reset by peer\nstack of C++ frames")

    add = set = get = check = delete_key = _lost


def test_a_lost_store_is_a_comm_error():
    board = Board(LostStore(), rank=1, world=2)
    with pytest.raises(CommError, match=r"rank 1 lost the group's store .*: Connection reset by peer$"):
        board.compare(Claim.of("op", {}, None), timeout=1)
    board.report_failure("nobody can hear this")
    assert board.explain() == ""
