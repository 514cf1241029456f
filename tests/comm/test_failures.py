"""What the error of each rank says when one fails: the first cause, once, with ranks as the whole job numbers them."""

import multiprocessing
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from attnmesh.comm import Comm, CommError, comm_from
from attnmesh.comm.agreement import AgreementStore
from attnmesh.comm.base import Signature
from attnmesh.comm.health.group_store import WaitStatus
from attnmesh.comm.health.monitor import Monitor
from attnmesh.comm.in_flight import InFlightMessage
from attnmesh.comm.process_group import Batch
from attnmesh.utils.text import see, without_link
from helpers.cases import sweep
from helpers.processes import Died, run_processes


def stores(global_ranks):
    store = dist.HashStore()
    return [AgreementStore(store, rank, len(global_ranks), global_ranks) for rank in range(len(global_ranks))]


def test_a_cause_that_many_ranks_report_is_told_once():
    first, second, third = stores([0, 1, 2])
    assert third.causes() == []
    first.report_failure("out of memory")
    second.report_causes(third.causes())
    assert third.causes() == ["rank 0 failed: out of memory"]


def test_ranks_of_a_subgroup_are_named_by_their_global_numbers():
    first, second = stores([4, 7])
    assert first.names([0, 1]) == "global ranks 4, 7"
    first.report_failure("out of memory")
    error = second.error(second.causes(), "was in ring")
    assert without_link(str(error)) == (
        "global rank 4 failed: out of memory [global rank 7 was in ring, in the group of global ranks 4, 7]"
    )


def test_the_rank_that_everyone_waits_for_is_found_behind_those_who_wait():
    first, second, third, _ = stores([0, 1, 2, 3])
    first.begin_search(WaitStatus([1], "ring"))
    assert second.is_searching()
    second.report_waiting(WaitStatus([2], "ring"))
    third.report_waiting(WaitStatus([8], "barrier", in_group=False))
    assert first.causes_of_absence("did not arrive within 3 s") == ["rank 8 did not arrive within 3 s"]
    third.report_waiting(WaitStatus([3], "ring"))
    first.report_end(3, "its process has ended")
    assert first.causes_of_absence("did not arrive") == ["rank 3 is dead: its process has ended"]


def test_ranks_that_wait_for_one_another_are_told_apart_by_their_calls():
    first, second, third = stores([0, 1, 2])
    first.begin_search(WaitStatus([1], "ring"))
    second.report_waiting(WaitStatus([0], "gather"))
    third.report_waiting(WaitStatus([0], "ring"))
    assert first.causes_of_absence("") == ["ranks wait for one another: ring on ranks 0, 2 but gather on rank 1"]
    second.report_waiting(WaitStatus([2], "barrier", in_group=False))
    late = "rank 1 did not arrive within 3 s, waiting in another group: barrier"
    assert first.causes_of_absence("did not arrive within 3 s") == [late]
    first.report_end(2, "its process has ended")  # after it has said that it waits: the others wait for it, perhaps
    assert first.causes_of_absence("did not arrive within 3 s") == ["rank 2 is dead: its process has ended"]


def test_a_search_for_a_rank_that_arrives_after_all_leaves_nothing_behind():
    first, second = stores([0, 1])
    first.begin_search(WaitStatus([1], "ring"))
    second.report_waiting(WaitStatus([0], "ring"))
    first.end_search()
    assert not second.is_searching()
    assert first.causes_of_absence("did not arrive") == []


def test_a_rank_that_waits_reports_it_when_another_searches_for_a_cause():
    def stop() -> None:
        raise CommError("stop")

    first, second, _ = stores([0, 1, 2])
    first.begin_search(WaitStatus([1], "ring"))
    with pytest.raises(CommError, match="stop"):
        second.share("host", "here", range(3), 5, stop)
    assert first.causes_of_absence("did not arrive") == ["rank 2 did not arrive"]


def test_a_rank_with_an_error_waits_until_all_ranks_have_arrived():
    first, second = stores([0, 1])
    signature = Signature("ring", {}, "k is short")
    first.compare(signature, 5, lambda: None)
    assert not first.all_arrived(0.1, lambda: None)
    assert first.all_arrived(5, lambda: second.compare(signature, 5, lambda: None))


def test_one_comparison_tells_that_ranks_are_out_of_step():
    first, second, third = stores([0, 1, 2])
    first.report_causes(["ranks are out of step at call 3: a on rank 0 but b on rank 1"])
    second.report_causes(["ranks are out of step at call 3: b on rank 1 but a on rank 2"])
    assert third.causes() == ["ranks are out of step at call 3: a on rank 0 but b on rank 1"]


def test_the_failure_of_a_rank_in_another_group_comes_before_what_follows_from_it():
    first, second, _ = stores([0, 2, 4])
    first.begin_search(WaitStatus([2], "ring"))
    second.report_elsewhere(["global rank 3 is dead: its process has ended"])
    follows = ["global rank 3 is dead: its process has ended", "global rank 2 did not arrive within 3 s"]
    assert first.causes_of_absence("did not arrive within 3 s") == follows
    second.report_waiting(WaitStatus([8], "barrier", in_group=False))  # in a group that it has made since
    assert first.causes_of_absence("did not arrive within 3 s") == follows
    first.report_end(1, "its process has ended")
    assert first.causes_of_end([1]) == [follows[0], "global rank 2 is dead: its process has ended"]


def test_threads_that_ask_for_the_monitor_at_once_get_one():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            (store,) = stores([0])
            monitor = Monitor(store, 0, [0], {}, store.causes)
            with ThreadPoolExecutor(8) as pool:
                assert len(set(pool.map(lambda _, m=monitor: m.call(threading.get_ident), range(16)))) == 1
            monitor.end()
            monitor.join(time.monotonic() + 1)
    finally:
        sys.setswitchinterval(interval)


def test_messages_progress_while_a_rank_waits_for_an_agreement():
    first, second = stores([0, 1])
    signature, arrived = Signature("ring", {}), []

    def progress() -> None:  # what the other rank needs to arrive
        arrived.append(second.compare(signature, 5, lambda: None))

    monitor = Monitor(first, 0, [0, 1], {}, first.causes)
    try:
        assert [monitor.compare(signature, 5, progress)] == arrived
    finally:
        monitor.end()


class Queued:
    """A work of NCCL: waiting for it orders streams, whatever becomes of its messages."""

    def wait(self, *_) -> bool:
        return True


def begins_twice_and_waits_too_late(comm):
    """Threads ask for the comm of a new group at once; then its messages are ended before they are waited for."""
    group = dist.new_group([0, 1])
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(comm_from, [group] * 8))
    assert len(made) == 1
    own = made.pop()
    own.agree("start", {})
    own.nccl.watch = lambda operation: None
    batch = Batch(own, "exchange", [InFlightMessage(torch.zeros(1), 1 - comm.rank, False)], [Queued()], blocking=False)
    own._end_all(["rank 5 is dead"], "was in exchange")
    return error_of(batch.wait)


def test_one_comm_for_all_threads_and_no_result_of_ended_messages():
    for error in run_processes(2, begins_twice_and_waits_too_late):
        assert error.startswith("rank 5 is dead")


def waits_for_the_rank_before(rank, world, port, results):
    """Rank 0 serves the store and ends; each rank waits for the one before it, and stays after its error."""
    os.environ["ATTNMESH_SHARED_MEMORY"] = "0"
    store = dist.TCPStore("127.0.0.1", port, None, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    comm = comm_from(None)
    comm.agree("start", {})
    comm.barrier()
    if rank == 0:
        os._exit(1)
    begin = time.monotonic()
    error = error_of(comm.exchange([], [(torch.zeros(4), rank - 1)]).wait)
    results.put((error, time.monotonic() - begin))
    time.sleep(60)


@pytest.mark.sweep
def test_a_lost_store_does_not_keep_ranks_waiting():
    context = multiprocessing.get_context("forkserver")
    results = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [
        context.Process(target=waits_for_the_rank_before, args=(i, 4, port, results), daemon=True) for i in range(4)
    ]
    try:
        for process in ranks:
            process.start()
        for _ in range(3):
            error, seconds = results.get(timeout=50)
            assert "rank 0" in error
            assert seconds < 12
    finally:
        for process in ranks:
            process.kill()
            process.join()


def error_of(action) -> str:
    with pytest.raises(CommError) as caught:
        action()
    return str(caught.value)


def fails_in_a_mesh(comm: Comm, fault: str) -> str:
    """Rank 3 fails in its row, {2, 3}. Rank 0 waits for rank 2 in a column, and rank 1 for rank 3."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    row, column = (comm_from(mesh[name]) for name in ("cp", "dp"))
    for each in (row, column):
        each.agree("start", {})
        each.timeout = 1.0
    comm.barrier()

    def step() -> None:
        row.barrier()
        column.barrier()

    raised = dist.distributed_c10d._get_default_store()
    if comm.rank < 3:
        error = error_of(step)
        raised.add("raised", 1)
        return error
    if fault == "raises":
        row.fail("ValueError: bad batch")
    while raised.add("raised", 0) < 3:
        time.sleep(0.05)
    return ""


@pytest.mark.parametrize("fault", ["hangs", sweep("raises")])
def test_all_groups_of_a_mesh_learn_the_first_cause(fault):
    cause = "did not arrive within 1 s" if fault == "hangs" else "failed: ValueError: bad batch"
    for rank, error in enumerate(run_processes(4, fails_in_a_mesh, fault)[:3]):
        group = {0: "0, 2", 1: "1, 3", 2: "2, 3"}[rank]
        assert error.startswith(f"global rank 3 {cause}")
        assert f"[global rank {rank} was in " in error
        assert error.endswith(f", in the group of global ranks {group}]{see('debugging.md#commerror')}")
        assert len(without_link(error)) < 300


def served_by_rank_0(comm: Comm, fault: str) -> str:
    """Rank 0 serves the store of the group, and ends."""
    served, rank, world = dist.distributed_c10d._get_default_store(), comm.rank, comm.world
    dist.destroy_process_group()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        served.set("port of rank 0", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(served.get("port of rank 0")), None, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    own = comm_from(timeout=60)
    own.agree("start", {})
    own.barrier()
    watches = own._monitor._neighbors._watches
    while rank > 0 and not (0 in watches and watches[0].is_verified):
        time.sleep(0.05)
    own.barrier()
    if rank == 0:
        if fault == "raises":
            own.fail("ValueError: bad batch")
        os._exit(7)
    return error_of(lambda: own.exchange([], [(torch.empty(1), rank - 1)]).wait())


@pytest.mark.parametrize("fault", ["raises", sweep("dies")])
def test_the_cause_is_known_although_the_store_has_ended_with_its_rank(fault):
    ended, *errors = run_processes(4, served_by_rank_0, fault, strict=False)
    assert ended == Died(7)
    cause = "rank 0 failed: ValueError: bad batch" if fault == "raises" else "rank 0 is dead: its process has ended"
    for rank, error in enumerate(errors, 1):
        assert isinstance(error, str), error
        assert error.startswith(f"{cause} [rank {rank} was in ")
