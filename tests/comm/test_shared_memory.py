"""Small messages between processes of one host: results as over gloo, in any order, and nothing left behind."""

import atexit
import contextlib
import os
import random
import signal
import time
from collections import deque
from ctypes import addressof, create_string_buffer
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from attnmesh.comm import Comm, CommError, comm_from, in_flight, recording, run_virtual
from attnmesh.comm.in_flight import IS_AVAILABLE, RingReader, RingWriter, Segment, largest_message
from helpers.processes import Died, run_processes

pytestmark = pytest.mark.skipif(not IS_AVAILABLE, reason="needs Linux")


# One ring, both ends in this process.


def test_a_ring_keeps_order_and_bytes_and_refuses_what_does_not_fit():
    nbytes, draw = 8192, random.Random(1)
    largest = largest_message(nbytes)
    segment, _ = Segment.create(nbytes)
    writer, reader = RingWriter(segment, 0, nbytes), RingReader(segment, 0, nbytes)
    writer.initialize()
    written: deque[tuple[int, bytes]] = deque()
    refused = 0
    for tag in range(2000):
        message = draw.randbytes(draw.choice([1, 63, 64, 65, largest - 1, largest, draw.randint(1, largest)]))
        buffer = create_string_buffer(message, len(message))
        if writer.write(tag, addressof(buffer), len(message), tag % 3):
            written.append((tag, message))
        else:
            refused += 1
            assert len(written) >= 3  # so many always fit
        while written and (draw.random() < 0.45 or len(written) > 40):
            assert reader.has_message()
            expected_tag, expected = written.popleft()
            tag_read, size, sent, kind = reader.header()
            assert (tag_read, size, kind) == (expected_tag, len(expected), expected_tag % 3)
            assert 0 < sent <= time.perf_counter()
            found = create_string_buffer(size)
            reader.read(addressof(found), size)
            assert found.raw == expected
        assert bool(written) or not reader.has_message()
    assert refused > 10


def test_a_sleeping_end_wakes_or_gives_up():
    segment, _ = Segment.create(8192)
    writer, reader = RingWriter(segment, 0, 8192), RingReader(segment, 0, 8192)
    writer.initialize()
    begin = time.monotonic()
    assert not reader.sleep(0.05)
    assert not writer.sleep(0.05)
    assert 0.09 < time.monotonic() - begin < 5
    buffer = create_string_buffer(8)
    writer.write(1, addressof(buffer), 8, 0)
    assert reader.sleep(5)
    reader.read(addressof(buffer), 8)
    assert writer.sleep(5)


def test_a_segment_is_opened_by_its_own_name_only():
    segment, name = Segment.create(8192)
    Segment.open(name).memory[5] = 7
    assert segment.memory[5] == 7
    with pytest.raises(OSError, match="not attnmesh-0"):
        Segment.open(name.replace("attnmesh-", "attnmesh-0"))
    segment.forget_name()
    with pytest.raises(FileNotFoundError):
        Segment.open(name)


def test_memory_is_bounded_for_any_number_of_ranks():
    sizes = {n: in_flight._ring_bytes(n) for n in range(2, 1025)}
    assert sizes[2] == sizes[8] == 516 << 10
    assert 128 << 10 <= largest_message(sizes[2]) < 129 << 10
    assert largest_message(8 << 10) > 1900
    assert sizes[64] == 8 << 10
    assert {sizes[n] for n in range(65, 1025)} == {0}  # over gloo
    assert max(n * (n - 1) * size for n, size in sizes.items()) <= 32 << 20


def test_a_send_waits_for_its_receipt_as_long_as_the_timeout_allows():
    segment, _ = in_flight._created(2)
    segment.forget_name()
    sender, receiver = (
        in_flight.LocalPeers(rank, {i: os.pidfd_open(os.getpid()) for i in range(2)}, [os.getpid()], segment)
        for rank in range(2)
    )
    x, y = torch.arange(3.0), torch.zeros(3)
    (sent,), begin = sender.post(1, [], [(x, 1)]), time.monotonic()
    with pytest.raises(RuntimeError, match="Timed out"):
        sent.wait(timedelta(seconds=0.1))
    assert time.monotonic() - begin >= 0.1
    (received,) = receiver.post(1, [(y, 0)], [])
    received.wait(timedelta(seconds=5))
    assert torch.equal(x, y)
    sent.wait(timedelta(seconds=5))  # the receiver has sent the receipt, and does nothing more


# Ranks.


def connected(comm: Comm) -> Comm:
    """A new group in which ranks have agreed."""
    fresh = comm_from(dist.new_group(list(range(comm.world))), timeout=20)
    fresh.agree("start", {})
    return fresh


def numbers(sender: int, receiver: int, number: int, size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=_generator(sender, receiver, number))


def _generator(*seeds: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(seed * 1009**i for i, seed in enumerate(seeds)))


def verbs(comm: Comm) -> list[object]:
    comm.agree("start", {})
    rank, world, seen = comm.rank, comm.world, []
    x = torch.arange(rank * 5.0)
    seen.append([part.tolist() for part in comm.all_gather(x, [(5 * i,) for i in range(world)])])
    parts = [torch.full((i + 1, 2), 10.0 * rank + i, requires_grad=True) for i in range(world)]
    seen.append([part.tolist() for part in comm.all_to_all(parts, [(rank + 1, 2)] * world)])
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        y = (torch.randn(301, generator=_generator(rank)) * 100).to(dtype)
        seen.append(comm.all_reduce(y).tolist())
        seen.append(comm.reduce_scatter(list(y[:300].chunk(world))).tolist())
    comm.barrier()
    return seen


def any_order(comm: Comm) -> None:
    """Exchanges of small and large messages are waited for in another order on every rank."""
    largest = comm._local_peers.largest
    others, pending = [i for i in range(comm.world) if i != comm.rank], {}
    for number, size in enumerate([1, 7, largest, largest + 1, 5, 3 * largest, 64]):
        comm.note("exchange", str(number))
        sends = [(numbers(comm.rank, i, number, size + i), i) for i in others]
        recvs = [(torch.empty(size + comm.rank, dtype=torch.uint8), i) for i in others]
        pending[number] = comm.exchange(sends, recvs), sends, recvs
    order = list(pending)
    random.Random(comm.rank).shuffle(order)
    for number in order:
        work, _, recvs = pending[number]
        work.wait()
        for buffer, i in recvs:
            assert torch.equal(buffer, numbers(i, comm.rank, number, buffer.numel()))


def full_rings(comm: Comm) -> None:
    """More is in flight than the rings hold, in both directions; rank 0 waits for the last one first."""
    right, left, size = (comm.rank + 1) % comm.world, (comm.rank - 1) % comm.world, comm._local_peers.largest
    pending = []
    for number in range(12):
        comm.note("exchange", str(number))
        buffer = torch.empty(size, dtype=torch.uint8)
        pending.append((comm.exchange([(numbers(comm.rank, right, number, size), right)], [(buffer, left)]), buffer))
    is_full = torch.tensor([any(peer.unsent for peer in comm._local_peers._peers.values())])
    for number in reversed(range(12)) if comm.rank == 0 else range(12):
        work, buffer = pending[number]
        work.wait()
        assert torch.equal(buffer, numbers(left, comm.rank, number, size))
    assert any(comm.all_gather(is_full, [(1,)] * comm.world))  # a rank that posts late finds its peers reading


def no_gloo(comm: Comm) -> None:
    """Small messages do not reach the backend, and equal tags match in order."""
    comm._post_to_backend = None
    right, left = (comm.rank + 1) % comm.world, (comm.rank - 1) % comm.world
    buffers = [torch.empty(3) for _ in range(4)]
    sends = [(torch.full((3,), 10.0 * comm.rank + i), right) for i in range(4)]
    comm.exchange(sends, [(buffer, left) for buffer in buffers]).wait()
    assert [buffer[0].item() for buffer in buffers] == [10.0 * left + i for i in range(4)]
    with recording(comm) as recorder:
        pending = comm.exchange(sends[:1], [(buffers[0], left)])
        time.sleep(0.05)
        pending.wait()
    spans = {span.track: span for span in recorder.spans()}
    assert spans["receive"].end <= spans["wait"].end
    assert spans["send"].begin <= spans["send"].end <= spans["wait"].end


def some_share(comm: Comm) -> None:
    """Ranks 0 and 1 share memory; rank 2 does not, and is reached over gloo."""
    if comm.rank == 2:
        os.environ[in_flight.VARIABLE] = "0"
    fresh = connected(comm)
    os.environ.pop(in_flight.VARIABLE, None)
    assert (fresh._local_peers is None) == (comm.rank == 2)
    for _ in range(3):
        assert fresh.all_reduce(torch.ones(5)).tolist() == [3.0] * 5


def refused(comm: Comm) -> None:
    """One rank has no memory, or cannot open that of another: all use gloo."""

    def fail(*_: object) -> None:
        raise OSError("no")

    for rank, name in ((0, "create"), (1, "open")):
        working = getattr(Segment, name)
        if comm.rank == rank:
            setattr(Segment, name, fail)
        fresh = connected(comm)
        setattr(Segment, name, working)
        assert fresh._local_peers is None
        assert fresh.all_reduce(torch.ones(1)).item() == comm.world


def made_again(comm: Comm) -> None:
    """Groups come and go, and leave no descriptor or mapping behind; those who wait for a destroyed one raise."""

    def left() -> tuple[int, int]:
        with open("/proc/self/maps") as file:
            maps = sum("memfd:attnmesh" in line for line in file)
        kinds = []
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # another thread, or listdir itself, has closed it
                kinds.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return maps, sum("pidfd" in kind for kind in kinds)

    before = left()
    for _ in range(2):
        group = dist.new_group(list(range(comm.world)))
        fresh = comm_from(group, timeout=20)
        fresh.agree("start", {})
        assert fresh.all_reduce(torch.ones(1)).item() == comm.world
        comm.barrier()
        dist.destroy_process_group(group)
        del group, fresh
    comm.barrier()
    assert left() == before

    group = dist.new_group(list(range(comm.world)))
    fresh = comm_from(group, timeout=20)
    fresh.agree("start", {})
    begin = time.monotonic()
    if comm.rank == 1:
        dist.destroy_process_group(group)
        del group, fresh
    else:
        with pytest.raises(
            CommError, match=r"^rank 1 has closed its connection: .*receiving 4 bytes from rank 1: Conn"
        ):
            fresh.exchange([], [(torch.empty(1), 1)]).wait()
    assert time.monotonic() - begin < 10


def forked(comm: Comm) -> None:
    fresh = connected(comm)
    child = os.fork()
    if child == 0:
        try:
            fresh.barrier()
        except CommError as error:
            atexit._run_exitfuncs()  # as a child that ends by itself
            os._exit(3 if "forked" in str(error) else 4)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    comm.barrier()
    fresh.barrier()  # the parents have neither failed nor ended
    got = torch.empty(1)
    peer = (comm.rank + 1) % comm.world
    fresh.exchange([(torch.ones(1), (comm.rank - 1) % comm.world)], [(got, peer)]).wait()
    assert got.item() == 1


def interrupted(comm: Comm) -> None:
    """Ctrl-C ends a wait at once; the comm, which may have lost a message, says so."""
    fresh = connected(comm)
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            fresh.exchange([], [(torch.empty(1), 1)]).wait()
        assert time.monotonic() - begin < 10
        with pytest.raises(CommError, match="earlier wait for a message was interrupted"):
            fresh.exchange([], [(torch.empty(1), 1)])
    comm.barrier()


def everything(comm: Comm) -> list[object]:
    os.environ.pop(in_flight.VARIABLE, None)
    comm.timeout = 20
    seen = verbs(comm)
    assert comm._local_peers is not None
    for scene in (any_order, full_rings, some_share, refused, forked, made_again, interrupted):
        scene(comm)
        comm.barrier()
    no_gloo(connected(comm))
    return seen


def test_ranks_of_one_host():
    before = os.listdir("/dev/shm")
    assert run_processes(3, everything) == run_virtual(3, verbs)
    assert os.listdir("/dev/shm") == before


def lost(comm: Comm) -> tuple[str, float]:
    comm.agree("ring", {})
    comm.timeout = 20
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(CommError) as caught:
        comm.exchange([(torch.ones(2), 1)], []).wait() if comm.rank == 0 else comm.barrier()
    return str(caught.value), time.monotonic() - begin


def test_a_killed_rank_is_noticed_by_those_who_send_and_those_who_receive():
    (sending, seconds), gone, (receiving, _) = run_processes(3, lost, strict=False)
    assert gone == Died(-9)
    # The first to notice tells the other one.
    assert sending.startswith("rank 1 is dead: its process has ended [rank 0 was in ")
    assert receiving.startswith("rank 1 is dead: its process has ended [rank 2 was in ")
    assert seconds < 10


def connect_with_myself(last_answer):
    """Two ranks of one process, of which the other one answers at last."""
    mine = f"{in_flight._host()}|{os.getpid()}"

    def share(name, value, ranks):
        return {"host": {0: mine, 1: mine}, "segment": {0: value}}.get(name) or last_answer()

    return in_flight.connect(0, 2, share)


@pytest.mark.skipif(not in_flight._host(), reason="needs shared memory")
def test_nothing_is_left_open_if_the_others_do_not_answer():
    def fails():
        raise CommError("rank 1 is dead")

    before = os.listdir("/proc/self/fd")
    with pytest.raises(CommError):
        connect_with_myself(fails)
    assert connect_with_myself(lambda: {0: "yes", 1: "no"}) is None
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.skipif(not in_flight._host(), reason="needs shared memory")
def test_ranks_of_all_groups_count_as_those_who_share_the_cores(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    first = connect_with_myself(lambda: {0: "yes", 1: "yes"})
    assert not first._is_crowded
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "10000")
    second = connect_with_myself(lambda: {0: "yes", 1: "yes"})
    assert first._is_crowded
    assert second._is_crowded


# Random programs.


def random_program(comm: Comm, seed: int) -> int:
    """Exchanges between random ranks, of random sizes, posted and waited for at random times."""
    comm.agree("start", {"seed": seed})
    draw, own = random.Random(seed), random.Random(seed * 100 + comm.rank)
    largest = comm._local_peers.largest
    pending, received = [], 0
    for number in range(150):
        comm.note("exchange", str(number))
        sends, recvs = [], []
        for _ in range(draw.randint(1, 2 * comm.world)):
            sender, receiver = draw.sample(range(comm.world), 2)
            size = draw.choice([1, 100, draw.randint(1, 5000), draw.randint(1, largest), largest, largest + 1])
            if comm.rank == sender:
                sends.append((numbers(sender, receiver, number * 31 + size, size), receiver))
            if comm.rank == receiver:
                recvs.append((torch.empty(size, dtype=torch.uint8), sender, number * 31 + size))
        work = comm.exchange(sends, [(buffer, sender) for buffer, sender, _ in recvs])
        pending.append((work, recvs))
        if draw.random() < 0.1:
            comm.barrier()
        while pending and own.random() < 0.6:
            received += check(comm, *pending.pop(own.randrange(len(pending))))
    while pending:
        received += check(comm, *pending.pop(own.randrange(len(pending))))
    comm.barrier()
    return received


def check(comm, work, recvs) -> int:
    work.wait()
    for buffer, sender, number in recvs:
        assert torch.equal(buffer, numbers(sender, comm.rank, number, buffer.numel()))
    return len(recvs)


def random_programs(comm: Comm, seeds: list[int]) -> int:
    os.environ.pop(in_flight.VARIABLE, None)
    comm.timeout = 30
    return sum(random_program(comm, seed) for seed in seeds)


@pytest.mark.sweep
def test_random_programs():
    seeds = [random.randrange(1 << 20) for _ in range(6)]
    print("seeds", seeds)
    assert all(received > 500 for received in run_processes(3, random_programs, seeds))
