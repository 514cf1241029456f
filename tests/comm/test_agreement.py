"""Agreement before an exchange: equal values pass, anything else is an error on every rank."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from attnmesh.comm import Comm, CommError, SoloComm, run_virtual
from attnmesh.comm.agreement import AgreementStore
from attnmesh.comm.base import Signature, disagreement
from attnmesh.utils.text import see

agreement, base = (sys.modules[each.__module__] for each in (AgreementStore, Comm))
DISAGREE = see("debugging.md#ranks-disagree")


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


def test_lists_tuples_and_sizes_compare_equal():
    shapes = [[2, 3], (2, 3), torch.Size([2, 3])]
    assert errors_of(3, lambda comm: comm.agree("ring", {"shape": shapes[comm.rank]})) == [None] * 3


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([(2, 3), (2, 4), (2, 3)], "ring: ranks disagree: value is (2, 3) on ranks 0, 2 but (2, 4) on rank 1"),
        (
            [torch.float32, torch.float32, torch.float16],
            "ring: ranks disagree: value is torch.float32 on ranks 0, 1 but torch.float16 on rank 2",
        ),
    ],
)
def test_a_different_value_is_an_error_on_every_rank(values, words):
    errors = errors_of(3, lambda comm: comm.agree("ring", {"value": values[comm.rank], "same": 1}))
    assert errors == [words + DISAGREE] * 3


def test_a_value_that_only_some_ranks_have():
    values = [{"a": 1}, {"a": 1, "b": 2}]
    words = "op: ranks disagree: b is (not given) on rank 0 but 2 on rank 1"
    assert errors_of(2, lambda comm: comm.agree("op", values[comm.rank])) == [words + DISAGREE] * 2


def test_different_operations():
    names = ["ring", "gather"]
    words = "ranks called different operations: ring(n=1) on rank 0 but gather(n=1) on rank 1"
    assert errors_of(2, lambda comm: comm.agree(names[comm.rank], {"n": 1})) == [words + DISAGREE] * 2


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_on_one_rank_is_raised_on_all(failing):
    def program(comm: Comm) -> None:
        comm.agree("ring", {"n": comm.rank}, error="k is short" if comm.rank == failing else None)

    assert errors_of(3, program) == [f"ring: k is short (on rank {failing})"] * 3


def test_ranks_can_continue_after_a_disagreement():
    def program(comm: Comm) -> float:
        with pytest.raises(ValueError, match="disagree"):
            comm.agree("op", {"n": comm.rank})
        with pytest.raises(ValueError, match="on rank 1"):
            comm.agree("op", {"n": 1}, error="mine" if comm.rank == 1 else None)
        comm.agree("op", {"n": 1})
        return comm.all_reduce(torch.ones(1)).item()

    assert run_virtual(3, program) == [3.0] * 3


def test_an_error_is_never_remembered():
    def program(comm: Comm) -> None:
        comm.agree("op", {"n": 1})
        for _ in range(2):
            with pytest.raises(ValueError, match="on rank"):
                comm.agree("op", {"n": 1}, error="all of us")

    run_virtual(2, program)


def test_one_rank_remembers_while_another_has_new_values():
    def program(comm: Comm) -> None:
        comm.agree("ring", {"n": 1})
        comm.agree("ring", {"n": 1 if comm.rank == 0 else 2})
        comm.barrier()

    with pytest.raises(CommError) as caught:
        run_virtual(2, program)
    assert "rank 0 is waiting for rank 1 to receive" in str(caught.value)
    assert "rank 1 is waiting for rank 0 to agree on ring(n=2)" in str(caught.value)


def test_an_error_that_other_ranks_miss_is_not_ignored():
    """Rank 1 catches its own error and goes on, while rank 0 is in the operation that both once agreed on."""

    def program(comm: Comm) -> None:
        comm.agree("ring", {"n": 1})
        if comm.rank == 1:
            with pytest.raises(ValueError, match="k is short"):
                comm.agree("ring", {"n": 1}, error="k is short")
        comm.barrier()

    with pytest.raises(CommError, match="rank 1 is waiting for rank 0 to learn that ring: k is short"):
        run_virtual(2, program)


def test_signature_survives_json():
    signature = Signature("op", {"shape": "(1, 2)", "name": 'a "b"\n'}, "é")
    assert Signature.from_json(signature.to_json()) == signature
    assert disagreement({0: signature, 3: signature}) == "op: é (on ranks 0, 3)"


def test_a_new_group_ignores_the_keys_of_the_last_one():
    store = HashStore()
    for generation in range(3):
        stores = [AgreementStore(store, rank, 2) for rank in range(2)]
        for round_ in range(3):
            signature = Signature("op", {"generation": str(generation), "round": str(round_)})
            with ThreadPoolExecutor(2) as pool:
                both = list(pool.map(lambda store, signature=signature: store.compare(signature, timeout=10), stores))
            assert both == [{0: signature, 1: signature}] * 2
        stores[generation % 2].report_failure("the end")
        assert "the end" in stores[1 - generation % 2].causes()[0]


def test_a_rank_that_waits_looks_often_and_at_bounded_intervals(monkeypatch):
    slept, sleep = [], time.sleep
    monkeypatch.setattr(agreement.time, "sleep", lambda seconds: (slept.append(seconds), sleep(min(seconds, 0.001))))
    with pytest.raises(CommError, match="rank 1 did not arrive"):
        AgreementStore(HashStore(), 0, 2).compare(Signature("op", {}), timeout=0.2)
    assert slept[0] == agreement._MIN_POLL_INTERVAL
    assert max(slept) == agreement._MAX_POLL_INTERVAL


def test_agreements_are_remembered_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(base, "_MAX_REMEMBERED", 3)

    def program(comm: Comm) -> list[int]:
        sizes = []
        for n in (*range(7), 6, 0):
            comm.agree("ring", {"n": n})
            sizes.append(len(comm._agreed))
        return sizes

    assert run_virtual(2, program) == [[1, 2, 3, 1, 2, 3, 1, 1, 2]] * 2


class LostStore:
    """The store of a group whose serving rank has died."""

    def _lost(self, *args: object) -> None:
        raise RuntimeError("Connection reset by peer\nstack of C++ frames")

    add = set = get = check = delete_key = _lost


def test_a_lost_store_is_a_comm_error():
    store = AgreementStore(LostStore(), rank=1, world=2)
    lost = r"the group's store is lost: its process, .* has ended \(Connection reset by peer\)\. See "
    with pytest.raises(CommError, match=lost):
        store.compare(Signature("op", {}), timeout=1)
    store.report_failure("nobody can hear this")


class Interrupted:
    """A store in which something happens between a look at a signature and the reading of it."""

    def __init__(self, store, happens):
        self._store, self._happens = store, happens

    def __getattr__(self, name):
        return getattr(self._store, name)

    def get(self, key):
        self._happens()
        return self._store.get(key)


def test_a_signature_withdrawn_while_it_is_read_is_ignored(monkeypatch):
    monkeypatch.setattr("attnmesh.comm.agreement.CAUSE_SEARCH", 0.0)
    store, signature = HashStore(), Signature("ring", {"n": "1"})
    other = AgreementStore(store, 1, 3)

    def other_gives_up():
        with pytest.raises(CommError, match=r"ranks 0, 2 did not arrive|rank 2 did not arrive"):
            other.compare(signature, timeout=0.0)
        other._round -= 1  # what it does again on every look is the same thing

    other_gives_up()
    other._set(other._signature_key(1, 1), signature.to_json())
    late = r"^ranks? .*2 did not arrive within 0.2 s \[rank 0 was about to start ring\(n=1\)\]\. See "
    with pytest.raises(CommError, match=late):
        AgreementStore(Interrupted(store, other_gives_up), 0, 3).compare(signature, timeout=0.2)


def test_a_rank_that_waits_polls_the_store_at_least_twenty_times_per_second(monkeypatch):
    monkeypatch.setattr(agreement, "CAUSE_SEARCH", 0.0)
    slept, sleep = [], time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept.append(seconds), sleep(seconds)))
    with pytest.raises(CommError, match="rank 1 did not arrive"):
        AgreementStore(HashStore(), 0, 2).compare(Signature("ring", {}), timeout=0.3)
    assert slept[0] < 0.001
    assert max(slept) <= 0.05


def test_the_memory_of_agreements_is_bounded():
    comm = SoloComm()
    for i in range(5000):
        comm.agree("ring", {"n": i})
    assert len(comm._agreed) <= 4096
