"""Process groups: the same verbs between real processes, and no hang when one of them fails."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from attnmesh import ContextParallel
from attnmesh.comm import Comm, CommError, SubComm, comm_from, run_virtual
from attnmesh.comm.process_group import GroupComm
from attnmesh.utils.text import without_link
from helpers.processes import Died, Raised, run_processes

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn]


# Every verb, on real and on virtual ranks.


def every_verb(comm: Comm) -> dict[str, object]:
    rank, world = comm.rank, comm.world
    after, before = (rank + 1) % world, (rank - 1) % world
    random = torch.Generator().manual_seed(rank)  # virtual ranks share the global one
    seen: dict[str, object] = {}

    for dtype in DTYPES:
        small, large = torch.ones(3).to(dtype), torch.full((2, 2), float(rank)).to(dtype)
        got_small, got_large = torch.empty_like(small), torch.empty_like(large)
        comm.exchange([(small, after), (large, after)], [(got_small, before), (got_large, before)]).wait()
        seen[f"exchange {dtype}"] = [got_small.float().tolist(), got_large.float().tolist()]
    comm.exchange([], []).wait()

    x = torch.randn(rank, 3, generator=random)
    seen["all_gather"] = [part.tolist() for part in comm.all_gather(x, [(i, 3) for i in range(world)])]
    view = torch.arange(6.0).view(2, 3).t() + rank
    seen["all_gather of a view"] = [part.tolist() for part in comm.all_gather(view, [(3, 2)] * world)]
    nothing = comm.all_gather(torch.empty(0, 2), [(0, 2)] * world)
    seen["all_gather of nothing"] = [tuple(part.shape) for part in nothing]
    parts = [torch.full((rank, i), float(10 * rank + i), requires_grad=True) for i in range(world)]
    seen["all_to_all"] = [part.tolist() for part in comm.all_to_all(parts, [(i, rank) for i in range(world)])]
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        total = comm.all_reduce((torch.randn(7, 3, generator=random) * 100).to(dtype))
        seen[f"all_reduce {dtype}"] = total.tolist()
    seen["all_reduce of nothing"] = comm.all_reduce(torch.empty(0)).tolist()
    comm.barrier()
    seen["traffic"] = dict(comm.traffic.by_op)
    return seen


def misused(comm: Comm) -> None:
    with pytest.raises(ValueError, match="peer must be another rank"):
        comm.exchange([(torch.zeros(1), comm.rank)], [])
    with pytest.raises(ValueError, match="must be contiguous"):
        comm.exchange([(torch.zeros(2, 3).t(), (comm.rank + 1) % comm.world)], [])
    with pytest.raises(ValueError, match=r"cannot carry meta tensors, only cpu \(gloo\), cuda \(gloo\)"):
        comm.exchange([(torch.zeros(1, device="meta"), (comm.rank + 1) % comm.world)], [])


def agreements(comm: Comm) -> None:
    for _ in range(2):
        comm.agree("ring", {"shape": (1, 2), "dtype": torch.float32})
    with pytest.raises(ValueError, match=r"^ring: ranks disagree: n is 0 on ranks 0, 1 but 1 on rank 2\. See "):
        comm.agree("ring", {"n": comm.rank // 2})
    with pytest.raises(ValueError, match=r"different operations: a\(\) on ranks 0, 2 but b\(\) on rank 1\. See "):
        comm.agree("aba"[comm.rank], {})
    for guilty in range(comm.world):
        with pytest.raises(ValueError, match=rf"^ring: k is short \(on rank {guilty}\)$"):
            comm.agree("ring", {"n": 1}, error="k is short" if comm.rank == guilty else None)
    comm.agree("ring", {"n": 1})


def subsets(comm: Comm) -> None:
    """Ranks of a comm are ranks of its group, wherever they are in the world."""
    members = [2, 0]
    group = dist.new_group(members)
    if comm.rank not in members:
        with pytest.raises(ValueError, match="not a member"):
            comm_from(group)
        return
    pair = comm_from(group)
    assert pair is comm_from(group)
    assert pair is not comm
    assert (pair.rank, pair.world) == (dist.get_group_rank(group, comm.rank), 2)
    got = torch.empty(1)
    pair.exchange([(torch.tensor([float(comm.rank)]), 1 - pair.rank)], [(got, 1 - pair.rank)]).wait()
    assert got.item() == 2 - comm.rank
    assert pair.all_reduce(torch.tensor([comm.rank])).item() == 2
    with pytest.raises(ValueError, match="n is 0 on global rank 0 but 1 on global rank 2"):
        pair.agree("op", {"n": pair.rank})


def two_threads(comm: Comm) -> None:
    """A second thread is refused while another waits, which goes on; one thread after the other is not."""
    own, store = comm_from(dist.new_group(), timeout=20), dist.distributed_c10d._get_default_store()
    sub = SubComm(own, range(own.world))
    own.agree("start", {})
    if comm.rank == 0:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(own.barrier)
            while own.waiting is None:
                time.sleep(0.001)
            calls = own.log.count
            for call in (
                lambda: own.agree("start", {}),
                lambda: own.note("backward"),
                lambda: own.exchange([], []),
                lambda: own.all_reduce(torch.ones(1)),
                lambda: sub.all_reduce(torch.ones(1)),
            ):
                with pytest.raises(RuntimeError, match="two threads use one comm at the same time"):
                    call()
            assert own.log.count == calls
            store.set("refused", "yes")
            waiting.result()
            assert pool.submit(own.all_reduce, torch.ones(1)).result().item() == comm.world
    else:
        store.wait(["refused"])
        own.barrier()
        own.all_reduce(torch.ones(1))


def meshes(comm: Comm) -> None:
    mesh = init_device_mesh("cpu", (1, comm.world), mesh_dim_names=("dp", "cp"))
    with pytest.raises(ValueError, match=r"one-dimensional, got 2 dimensions \('dp', 'cp'\).*mesh\[\"cp\"\]"):
        comm_from(mesh)
    along = comm_from(mesh["cp"])
    assert along is comm_from(mesh["cp"])
    assert (along.rank, along.world) == (comm.rank, comm.world)
    assert along.all_reduce(torch.ones(1)).item() == comm.world
    alone = comm_from(mesh["dp"])
    assert (alone.rank, alone.world) == (0, 1)
    alone.agree("op", {"n": comm.rank})
    assert alone.all_reduce(torch.ones(1)).item() == 1


def timeouts(comm: Comm) -> None:
    """Without a timeout of one's own that of the group counts; a group that was given none has that of the world."""
    assert comm_from(dist.group.WORLD).timeout == comm.timeout == 30
    ranks = list(range(comm.world))
    assert comm_from(dist.new_group(ranks, timeout=timedelta(seconds=7))).timeout == 7
    assert comm_from(dist.new_group(ranks, timeout=timedelta(seconds=40))).timeout == 40
    given_none = dist.new_group(ranks)
    assert ContextParallel(given_none).comm.timeout == 30
    assert comm_from(given_none, timeout=3).timeout == comm_from(given_none).timeout == 3


def padded_all_gather(comm: Comm) -> None:
    """NCCL's way, which gloo can show as well."""
    shapes = [(0,), (2, 2), (3,)]
    got = comm._padded_all_gather("all_gather", torch.full(shapes[comm.rank], float(comm.rank)), shapes)
    for i, shape in enumerate(shapes):
        assert torch.equal(got[i], torch.full(shape, float(i)))


def reinitialised(comm: Comm) -> None:
    """A new default group gets a new comm; the old one says what became of it."""
    store = dist.distributed_c10d._get_default_store()
    rank, world = comm.rank, comm.world
    assert comm_from(None) is comm
    comm.agree("before", {"n": 1})
    dist.destroy_process_group()
    assert comm_from(None).world == 1
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world)
    fresh = comm_from(None, timeout=20)
    assert fresh is not comm
    assert fresh is comm_from(dist.group.WORLD)
    with pytest.raises(CommError, match="process group of this comm has been destroyed"):
        comm.barrier()
    with pytest.raises(ValueError, match="n is 0 on rank 0 but 1 on rank 1 but 2 on rank 2"):
        fresh.agree("after", {"n": rank})
    assert fresh.all_reduce(torch.ones(1)).item() == world


def all_that_works(comm: Comm) -> dict[str, object]:
    timeouts(comm)
    comm.timeout = 20
    seen = every_verb(comm)
    misused(comm)
    agreements(comm)
    subsets(comm)
    two_threads(comm)
    meshes(comm)
    padded_all_gather(comm)
    reinitialised(comm)
    return seen


def test_real_ranks_do_what_virtual_ranks_do():
    """Bit for bit, sums and traffic included."""
    assert run_processes(3, all_that_works) == run_virtual(3, every_verb)


# Failures.


def timed(action) -> tuple[str, float]:
    """The CommError that must come, and the seconds it took."""
    started = time.monotonic()
    with pytest.raises(CommError) as caught:
        action()
    return str(caught.value), time.monotonic() - started


def late_in_exchange(comm: Comm) -> tuple[str, float] | None:
    """Rank 1 sleeps past the others' patience; rank 2, which waits for nobody, is not disturbed."""
    comm = comm_from(dist.new_group(), timeout=1)
    comm.agree("ring", {"n": 1})
    if comm.rank == 2:
        return None
    if comm.rank == 1:
        time.sleep(2.4)
    first = timed(lambda: comm.exchange([], [(torch.empty(3), 1 - comm.rank)]).wait())
    again, _ = timed(comm.barrier)
    assert again == f"this comm has failed before: {first[0]}"
    return first


def late_to_agree(comm: Comm) -> tuple[str, float]:
    comm = comm_from(dist.new_group(), timeout=1)
    if comm.rank == 1:
        time.sleep(2.4)
    return timed(lambda: comm.agree("ring", {"n": 7}))


def remembered_and_new(comm: Comm) -> tuple[str, float]:
    comm = comm_from(dist.new_group(), timeout=3)
    comm.agree("ring", {"n": 1})

    def go() -> None:
        comm.agree("ring", {"n": 2 if comm.rank == 1 else 1})
        comm.barrier()

    return timed(go)


def fails_out_loud(comm: Comm) -> tuple[str, float] | None:
    comm = comm_from(dist.new_group(), timeout=20)
    comm.agree("ring", {"n": 1})
    comm.barrier()
    if comm.rank == 1:
        comm.fail("out of memory")
        return None
    return timed(lambda: comm.agree("ring", {"n": 2}))


def all_that_fails(comm: Comm) -> dict[str, tuple[str, float] | None]:
    scenes = late_in_exchange, late_to_agree, remembered_and_new, fails_out_loud
    return {scene.__name__: scene(comm) for scene in scenes}


@pytest.mark.sweep
def test_ranks_that_come_late_or_not_at_all_raise_everywhere_in_time():
    ranks = run_processes(3, all_that_fails)

    message, seconds = ranks[0]["late_in_exchange"]
    late = "rank 1 did not arrive within 1 s"
    assert message.startswith(f"{late} [rank 0 was in exchange (ring), receiving 12 bytes from rank 1: Timed out")
    assert seconds < 10
    assert ranks[1]["late_in_exchange"][0].startswith(f"{late} [rank 1 was in exchange (ring)")

    for rank in (0, 2):
        message, seconds = ranks[rank]["late_to_agree"]
        assert without_link(message) == f"{late} [rank {rank} was about to start ring(n=7)]"
        assert seconds < 10
    assert without_link(ranks[1]["late_to_agree"][0]) == f"{late} [rank 1 was about to start ring(n=7)]"

    for rank in (0, 2):
        message, seconds = ranks[rank]["remembered_and_new"]
        assert "ranks are out of step at call 2: ring(n=" in message
        assert "ring(n=1) on rank" in message
        assert "ring(n=2) on rank 1" in message
        assert seconds < 10
    message, seconds = ranks[1]["remembered_and_new"]
    assert "ring(n=2)" in message
    assert "ring(n=1)" in message
    assert seconds < 10

    for rank in (0, 2):
        message, seconds = ranks[rank]["fails_out_loud"]
        assert without_link(message) == f"rank 1 failed: out of memory [rank {rank} was about to start ring(n=2)]"
        assert seconds < 10


def one_leaves(comm: Comm, how: str) -> tuple[str, float]:
    comm.timeout = 30
    comm.agree("ring", {"n": 1})
    if comm.rank == 1:
        if how == "dies":
            os._exit(7)
        if how == "raises":
            raise ZeroDivisionError("my fault")
        comm.agree("ring", {"n": 1}, error="k is short")
    peer = 1
    return timed(lambda: comm.exchange([(torch.ones(1 << 20), peer)], [(torch.empty(1 << 20), peer)]).wait())


@pytest.mark.parametrize("how", ["dies", "raises", "refuses"])
def test_a_rank_that_leaves_makes_the_others_raise_at_once(how):
    first, left, third = run_processes(3, one_leaves, how, strict=False)
    for rank, (message, seconds) in ((0, first), (2, third)):
        gone = "failed in ring: k is short" if how == "refuses" else "is dead: its process has ended"
        assert message.startswith(f"rank 1 {gone} [rank {rank} was in exchange (ring), receiving 4194304 bytes from")
        assert seconds < 10
    if how == "dies":
        assert left == Died(7)
    elif how == "raises":
        assert isinstance(left, Raised)
        assert left.type == "ZeroDivisionError"
    else:
        assert (left.type, left.message) == ("ValueError", "ring: k is short (on rank 1)")


def killed_before_agreeing(comm: Comm) -> tuple[str, float]:
    comm.timeout = 30
    dist.barrier()  # every rank has connected over gloo
    if comm.rank == 1:
        os.kill(os.getpid(), 9)
    return timed(lambda: comm.agree("ring", {"n": 1}))


def test_a_rank_killed_before_an_agreement_is_named():
    (message, seconds), gone = run_processes(2, killed_before_agreeing, strict=False)
    assert gone == Died(-9)
    assert without_link(message) == "rank 1 is dead: its process has ended [rank 0 was about to start ring(n=1)]"
    assert seconds < 10


def staged_cuda(comm: Comm) -> bool:
    comm.timeout = 30
    torch.cuda.set_device(0)
    x = torch.full((1000,), float(comm.rank), device="cuda")
    got = torch.empty_like(x)
    peer = 1 - comm.rank
    comm.exchange([(x, peer)], [(got, peer)]).wait()
    gathered = comm.all_gather(x[: comm.rank], [(0,), (1,)])
    total = comm.all_reduce(x)
    return bool((got == peer).all() and gathered[1].item() == 1 and (total == 1).all() and total.is_cuda)


@pytest.mark.cuda
@pytest.mark.ranks
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_tensors_travel_over_gloo():
    assert run_processes(2, staged_cuda) == [True, True]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nccl_in_a_world_of_one():
    """One GPU holds one NCCL rank: enough to see that the native calls are made as NCCL wants them."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        comm = comm_from(None)
        x = torch.randn(5, device="cuda", dtype=torch.bfloat16)
        comm._initialize_nccl()
        comm.agree("op", {"n": 1})
        assert torch.equal(comm.all_gather(x, [(5,)])[0], x)
        assert torch.equal(comm.all_reduce(x), x)
        comm.barrier()
        with pytest.raises(ValueError, match=r"cannot carry cpu tensors, only cuda \(nccl\)"):
            comm.all_reduce(torch.zeros(1))
    finally:
        dist.destroy_process_group()


def test_messages_that_shared_memory_does_not_take_go_over_the_backend():
    messages = [SimpleNamespace(send=peer > 1, peer=peer, wire_buffer=torch.empty(peer), tag=3) for peer in (1, 2, 3)]
    comm = SimpleNamespace(
        _local_peers=SimpleNamespace(post=lambda tag, recvs, sends: [None, f"{len(recvs)}, {len(sends)}", None]),
        _post_to_backend=lambda message: f"backend, {message.peer}",
        message_errors=lambda op, messages: nullcontext(),
    )
    assert GroupComm._post(comm, "exchange", messages) == ["backend, 1", "1, 2", "backend, 3"]


def test_the_end_of_waits_reaches_shared_memory_where_ranks_share_it():
    ended = []
    peers = SimpleNamespace(stop=ended.append, leave=lambda: ended.append("left"))
    for local in (None, peers):
        GroupComm._end_waits(SimpleNamespace(_local_peers=local, world=1), "a rank failed")
    assert ended == ["a rank failed", "left"]


def test_what_an_ended_operation_received_is_not_used():
    watched, withdrawn = [], []
    comm = SimpleNamespace(
        nccl=SimpleNamespace(watch=watched.append), _broken=None,
        _caller=SimpleNamespace(withdraw=lambda: withdrawn.append("error")),
    )  # fmt: skip
    GroupComm.watch(comm, "first")
    comm._broken = "rank 1 is dead"
    with pytest.raises(CommError, match="rank 1 is dead"):
        GroupComm.watch(comm, "second")
    assert (watched, withdrawn) == (["first", "second"], ["error"])
