"""Virtual ranks: every verb, backward, and every way a rank can let the others down."""

import queue
import signal
import threading
import time

import pytest
import torch
from torch import Tensor

from attnmesh.comm import Comm, CommError, Pending, SoloComm, comm_from, run_virtual


def neighbours(comm: Comm) -> tuple[int, int]:
    return (comm.rank + 1) % comm.world, (comm.rank - 1) % comm.world


def shift(comm: Comm, x: Tensor) -> Tensor:
    """Pass `x` on to the next rank; return what comes from the last one."""
    arriving = torch.empty_like(x)
    after, before = neighbours(comm)
    comm.exchange([(x, after)], [(arriving, before)]).wait()
    return arriving


class Shifted(torch.autograd.Function):
    """A ring shift whose gradient travels back, as in ring attention."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return shift(comm, x.contiguous())

    @staticmethod
    def backward(ctx, grad):
        comm = ctx.comm
        after, before = neighbours(comm)
        arriving = torch.empty_like(grad)
        comm.exchange([(grad.contiguous(), before)], [(arriving, after)]).wait()
        return arriving, None


def test_results_come_in_rank_order():
    assert run_virtual(5, lambda comm: (comm.rank, comm.world)) == [(rank, 5) for rank in range(5)]


def test_world_must_be_positive():
    with pytest.raises(ValueError, match="world must be an integer >= 1, got 0"):
        run_virtual(0, lambda comm: None)


def test_exchange_fills_buffers_and_matches_in_order():
    def program(comm: Comm) -> list[float]:
        after, before = neighbours(comm)
        first, second = torch.empty(2), torch.empty(2, 2)
        pending = comm.exchange(
            [(torch.full((2,), float(comm.rank)), after), (torch.full((4,), comm.rank + 0.5), after)],
            [(first, before), (second, before)],
        )
        pending.wait()
        pending.wait()
        return [*first.tolist(), *second.flatten().tolist()]

    for rank, got in enumerate(run_virtual(3, program)):
        before = (rank - 1) % 3
        assert got == [before] * 2 + [before + 0.5] * 4


def test_messages_cross_batches_in_order():
    def program(comm: Comm) -> list[float]:
        peer = 1 - comm.rank
        if comm.rank == 0:
            batches = [comm.exchange([(torch.tensor([float(i)]), peer)], []) for i in range(3)]
            for batch in reversed(batches):
                batch.wait()
            return []
        buffers = [torch.empty(1) for _ in range(3)]
        comm.exchange([], [(buffer, peer) for buffer in buffers]).wait()
        return [buffer.item() for buffer in buffers]

    assert run_virtual(2, program)[1] == [0, 1, 2]


def test_posted_messages_travel_while_a_rank_computes():
    """A rank may post, compute and only then wait, with more messages under way than it has waited for."""

    def program(comm: Comm) -> float:
        after, before = neighbours(comm)
        x, total = torch.tensor([float(comm.rank)]), 0.0
        for _ in range(comm.world):
            arriving = torch.empty_like(x)
            pending: Pending = comm.exchange([(x, after)], [(arriving, before)])
            total += x.item()
            pending.wait()
            x = arriving
        return total

    assert run_virtual(4, program) == [6.0] * 4


def test_all_gather_of_unequal_and_empty_shapes():
    shapes = [(2, 3), (0, 3), (1,), ()]

    def program(comm: Comm) -> list[Tensor]:
        x = torch.full(shapes[comm.rank], float(comm.rank))
        return comm.all_gather(x, shapes)

    for gathered in run_virtual(4, program):
        assert [tuple(part.shape) for part in gathered] == shapes
        assert all((part == rank).all() for rank, part in enumerate(gathered))


def test_all_gather_takes_views_and_does_not_share_memory_between_ranks():
    def program(comm: Comm) -> list[list[float]]:
        x = (torch.arange(6.0).view(2, 3) + 10 * comm.rank).t()
        gathered = comm.all_gather(x, [(3, 2)] * comm.world)
        comm.barrier()
        gathered[1 - comm.rank].zero_()
        comm.barrier()
        return x.tolist()

    first, second = run_virtual(2, program)
    assert first == [[0, 3], [1, 4], [2, 5]]
    assert second == [[10, 13], [11, 14], [12, 15]]


def test_all_to_all_of_unequal_shapes():
    def program(comm: Comm) -> list[Tensor]:
        parts = [torch.full((comm.rank, to), 10.0 * comm.rank + to) for to in range(comm.world)]
        return comm.all_to_all(parts, [(source, comm.rank) for source in range(comm.world)])

    for rank, arrived in enumerate(run_virtual(3, program)):
        for source, part in enumerate(arrived):
            assert torch.equal(part, torch.full((source, rank), 10.0 * source + rank))


def test_collectives_come_to_lie_in_a_buffer():
    def rank(comm):
        room = torch.full((6 + 1,), -1.0)
        got = comm.all_gather(torch.full((comm.rank + 1,), float(comm.rank)), [(1,), (2,), (3,)], into=room[:6])
        traded = torch.empty(3, 2)
        parts = [torch.full((2,), 10.0 * comm.rank + to) for to in range(3)]
        mine = comm.all_to_all(parts, [(2,)] * 3, into=traded)
        assert all(part.untyped_storage().data_ptr() == room.untyped_storage().data_ptr() for part in got)
        assert all(part.untyped_storage().data_ptr() == traded.untyped_storage().data_ptr() for part in mine)
        return room.tolist(), traded[:, 0].tolist()

    for me, (room, traded) in enumerate(run_virtual(3, rank)):
        assert room == [0, 1, 1, 2, 2, 2, -1]
        assert traded == [me, 10 + me, 20 + me]


def test_a_buffer_that_does_not_fit_is_refused():
    for into in (torch.empty(3), torch.empty(4, dtype=torch.int64), torch.empty(2, 4).T[:2]):
        with pytest.raises(ValueError, match=r"into must be contiguous with 4 elements of torch\.float32"):
            run_virtual(2, lambda comm, into=into: comm.all_gather(torch.zeros(2), [(2,)] * 2, into=into))


def test_reduce_scatter_gives_each_rank_the_sum_of_its_part():
    inputs = [[torch.randn(to, 3) for to in range(4)] for _ in range(4)]
    for me, share in enumerate(run_virtual(4, lambda comm: comm.reduce_scatter(inputs[comm.rank]))):
        expected = inputs[0][me] + inputs[1][me] + inputs[2][me] + inputs[3][me]
        assert torch.equal(share, expected)


@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (0, 4)])
def test_all_reduce_sums_in_rank_order_with_the_same_bits_everywhere(shape):
    inputs = [torch.randn(shape) * 10.0**rank for rank in range(5)]
    expected = inputs[0].clone()
    for x in inputs[1:]:
        expected += x
    for total in run_virtual(5, lambda comm: comm.all_reduce(inputs[comm.rank])):
        assert torch.equal(total, expected)


def test_all_reduce_of_16_bit_rounds_once():
    inputs = [torch.randn(64, dtype=torch.bfloat16) for _ in range(8)]
    exact = torch.stack([x.double() for x in inputs]).sum(0).bfloat16()
    (total, *_) = run_virtual(8, lambda comm: comm.all_reduce(inputs[comm.rank]))
    assert torch.equal(total, exact)


def test_traffic():
    def program(comm: Comm) -> dict[str, tuple[int, int]]:
        shift(comm, torch.zeros(5))
        comm.exchange([], []).wait()
        comm.exchange([(torch.zeros(0), 1 - comm.rank % 2)] if comm.rank < 2 else [], []).wait()
        comm.all_gather(torch.zeros(comm.rank), [(rank,) for rank in range(4)])
        comm.all_to_all([torch.zeros(to, dtype=torch.int8) for to in range(4)], [(comm.rank,)] * 4)
        comm.all_reduce(torch.zeros(4, dtype=torch.float64))
        comm.barrier()
        counted = dict(comm.traffic.by_op)
        assert comm.traffic.messages == sum(messages for messages, _ in counted.values())
        assert comm.traffic.bytes == sum(nbytes for _, nbytes in counted.values())
        comm.traffic.reset()
        assert (comm.traffic.messages, comm.traffic.bytes, comm.traffic.by_op) == (0, 0, {})
        return counted

    for rank, counted in enumerate(run_virtual(4, program)):
        assert counted == {
            "exchange": (1, 20),
            "all_gather": (1, 4 * rank * 3),
            "all_to_all": (1, 6 - rank),
            "all_reduce": (1, 48),  # 2 x 3/4 x 32
            "barrier": (1, 0),
        }


def test_forward_and_backward():
    def program(comm: Comm) -> tuple[Tensor, Tensor]:
        x = torch.full((3,), comm.rank + 1.0, requires_grad=True)
        y = Shifted.apply(Shifted.apply(x, comm) * (comm.rank + 1), comm)
        (y * (10 ** torch.arange(3.0))).sum().backward()
        return y.detach(), x.grad

    for rank, (y, grad) in enumerate(run_virtual(3, program)):
        scale = torch.tensor([1.0, 10.0, 100.0])
        assert torch.equal(y, torch.full((3,), float(((rank - 1) % 3 + 1) * ((rank - 2) % 3 + 1))))
        assert torch.equal(grad, scale * ((rank + 1) % 3 + 1))


def test_ranks_inherit_gradient_mode_and_autocast():
    def program(comm: Comm) -> tuple[bool, bool, torch.dtype]:
        x = torch.ones(2, 2)
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), (x @ x).dtype

    assert run_virtual(2, program) == [(True, False, torch.float32)] * 2
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert run_virtual(2, program) == [(False, False, torch.bfloat16)] * 2
    with torch.inference_mode():
        assert run_virtual(2, program)[0][1]


def test_ranks_take_turns_in_the_same_order_every_time():
    def trace() -> list[tuple[int, int]]:
        steps = []

        def program(comm: Comm) -> None:
            for step in range(5):
                steps.append((comm.rank, step))
                shift(comm, torch.zeros(1))

        run_virtual(4, program)
        return steps

    assert trace() == trace() == trace()


@pytest.mark.parametrize("kind", ["sends", "recvs"])
def test_bad_messages(kind):
    def post(comm: Comm, tensor: Tensor, peer: int) -> None:
        comm.exchange(**{"sends": [], "recvs": [], kind: [(tensor, peer)]})

    with pytest.raises(ValueError, match=rf"{kind}\[0\]: peer must be another rank, got 0"):
        run_virtual(2, lambda comm: post(comm, torch.zeros(1), comm.rank))
    with pytest.raises(ValueError, match=rf"{kind}\[0\]: peer must be in 0..1, got 2"):
        run_virtual(2, lambda comm: post(comm, torch.zeros(1), 2))
    with pytest.raises(ValueError, match=r"must be contiguous, got shape \(3, 2\) with strides \(1, 3\)"):
        run_virtual(2, lambda comm: post(comm, torch.zeros(2, 3).t(), 1 - comm.rank))


def test_bad_collectives():
    with pytest.raises(ValueError, match=r"x must have shape shapes\[0\] = \(3,\), got \(2,\)"):
        run_virtual(2, lambda comm: comm.all_gather(torch.zeros(2), [(3,)] * 2))
    with pytest.raises(ValueError, match="shapes must have one entry for each of 2 ranks, got 1"):
        run_virtual(2, lambda comm: comm.all_gather(torch.zeros(2), [(2,)]))
    parts = [torch.zeros(2), torch.zeros(2).half()]
    with pytest.raises(ValueError, match="parts must share one dtype and device"):
        run_virtual(2, lambda comm: comm.all_to_all(parts, [(2,), (2,)]))


@pytest.mark.parametrize(
    ("sent", "wanted", "words"),
    [
        (torch.zeros(2, 3), torch.zeros(5), r"rank 0 sends float32\[2, 3\].*rank 1 receives float32\[5\]"),
        (torch.zeros(2), torch.zeros(2).int(), r"rank 0 sends float32\[2\].*rank 1 receives int32\[2\]"),
    ],
)
def test_messages_that_do_not_fit_raise_on_both_ranks(sent, wanted, words):
    heard = {}

    def program(comm: Comm) -> None:
        batch = ([(sent, 1)], []) if comm.rank == 0 else ([], [(wanted, 0)])
        try:
            comm.exchange(*batch).wait()
        except ValueError as error:
            heard[comm.rank] = str(error)
            raise

    with pytest.raises(ValueError, match=words):
        run_virtual(2, program)
    assert heard[0] == heard[1]


def test_deadlock_is_found_at_once_and_says_who_waits_for_what():
    def program(comm: Comm) -> None:
        comm.exchange([], [(torch.empty(3), neighbours(comm)[1])]).wait()

    started = time.monotonic()
    with pytest.raises(CommError) as caught:
        run_virtual(3, program)
    assert time.monotonic() - started < 5
    for rank in range(3):
        waits = f"rank {rank} is waiting for rank {(rank - 1) % 3} to send float32[3] (exchange)"
        assert waits in str(caught.value)


def test_a_rank_that_returns_early_leaves_nobody_waiting():
    def program(comm: Comm) -> None:
        if comm.rank != 1:
            comm.barrier()

    with pytest.raises(CommError, match=r"deadlock.*rank 1 is finished \(returned\)"):
        run_virtual(3, program)


@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_the_first_error_is_raised_as_it_was_with_its_rank(guilty):
    heard = {}

    def program(comm: Comm) -> None:
        if comm.rank == guilty:
            raise ZeroDivisionError("my fault")
        try:
            comm.barrier()
        except CommError as error:
            heard[comm.rank] = str(error)
            raise

    with pytest.raises(ZeroDivisionError, match="my fault") as caught:
        run_virtual(3, program)
    assert caught.value.__notes__ == [f"raised on virtual rank {guilty} of 3"]
    assert len(heard) == 2
    assert all(f"rank {guilty} raised ZeroDivisionError: my fault" in message for message in heard.values())


def test_an_error_in_backward_ends_the_others_too():
    class Faulty(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise KeyError("in backward")

    def program(comm: Comm) -> None:
        x = torch.ones(2, requires_grad=True)
        y = Shifted.apply(x, comm)
        (Faulty.apply(y) if comm.rank == 1 else y).sum().backward()

    with pytest.raises(KeyError, match="in backward"):
        run_virtual(3, program)


def test_when_all_ranks_raise_alike_rank_0_speaks():
    def program(comm: Comm) -> None:
        shift(comm, torch.zeros(1))
        raise ValueError(f"rank {comm.rank} says so")

    with pytest.raises(ValueError, match="rank 0 says so"):
        run_virtual(4, program)


def test_a_rank_that_never_ends_is_named():
    stop = threading.Event()

    def program(comm: Comm) -> None:
        if comm.rank == 1:
            stop.wait(20)
        comm.barrier()

    try:
        with pytest.raises(CommError, match=r"within 0.3 s: rank 0 is waiting for rank 1 .*; rank 1 is running"):
            run_virtual(2, program, timeout=0.3)
    finally:
        stop.set()


def test_ranks_end_if_their_caller_is_interrupted():
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()

    def program(comm: Comm) -> None:
        if comm.rank == 0:
            time.sleep(0.1)  # the caller waits
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        deadline = time.monotonic() + 5
        try:
            while time.monotonic() < deadline:
                comm.barrier()
        except CommError as error:
            ended.put(str(error))

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores the signal
    try:
        with pytest.raises(KeyboardInterrupt):
            run_virtual(2, program)
    finally:
        signal.signal(signal.SIGINT, before)
    for _ in range(2):
        assert "run_virtual was interrupted" in ended.get(timeout=10)


def test_the_comm_ends_with_its_run():
    (comm, _) = run_virtual(2, lambda comm: comm)
    with pytest.raises(RuntimeError, match="outside its own thread or after its run"):
        comm.barrier()


def test_runs_nest_but_do_not_mix():
    def outer(comm: Comm) -> list[float]:
        ranks_per_node = run_virtual(2, lambda inside: inside.all_reduce(torch.tensor([float(inside.rank + 1)])).item())
        return comm.all_reduce(torch.tensor(ranks_per_node)).tolist()

    assert run_virtual(3, outer) == [[9.0, 9.0]] * 3

    with pytest.raises(RuntimeError, match="virtual rank 0 was used outside its own thread"):
        run_virtual(2, lambda comm: run_virtual(2, lambda inside: comm.barrier()))


def test_many_ranks():
    def program(comm: Comm) -> float:
        x = torch.tensor([float(comm.rank)])
        for _ in range(comm.world):
            x = shift(comm, x)
        return x.item()

    assert run_virtual(32, program) == [float(rank) for rank in range(32)]


@pytest.mark.parametrize("make", ["solo", "virtual"])
def test_a_world_of_one(make):
    def program(comm: Comm) -> None:
        assert (comm.rank, comm.world) == (0, 1)
        x = torch.arange(3.0)
        assert torch.equal(comm.all_reduce(x), x)
        assert comm.all_reduce(x) is not x
        assert torch.equal(comm.all_gather(x, [(3,)])[0], x)
        assert torch.equal(comm.all_to_all([x], [(3,)])[0], x)
        comm.exchange([], []).wait()
        comm.barrier()
        comm.agree("op", {"shape": (3,)})
        with pytest.raises(ValueError, match=r"op: no good \(on rank 0\)"):
            comm.agree("op", {"shape": (3,)}, error="no good")
        with pytest.raises(ValueError, match="peer must be another rank"):
            comm.exchange([(x, 0)], [])
        assert (comm.traffic.messages, comm.traffic.bytes) == (0, 0)

    if make == "solo":
        assert isinstance(comm_from(None), SoloComm)
        program(comm_from(None))
    else:
        run_virtual(1, program)


def test_comm_from_returns_a_comm_as_it_is_and_refuses_what_names_no_ranks():
    comm = SoloComm()
    assert comm_from(comm, timeout=7) is comm
    assert comm.timeout == 7
    with pytest.raises(ValueError, match="timeout must be positive seconds, at most 1,000,000, got 0"):
        comm_from(comm, timeout=0)
    with pytest.raises(ValueError, match="group must be a Comm, ProcessGroup, DeviceMesh or None, got str"):
        comm_from("cp")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_ranks_share_the_callers_stream_and_keep_backward_on_their_thread():
    stream = torch.cuda.Stream()

    def program(comm: Comm) -> Tensor:
        assert torch.cuda.current_stream() == stream
        x = torch.full((1 << 20,), comm.rank + 1.0, device="cuda", requires_grad=True)
        (Shifted.apply(x, comm) * (comm.rank + 1)).sum().backward()
        return x.grad

    with torch.cuda.stream(stream):
        for rank, grad in enumerate(run_virtual(4, program)):
            assert (grad == (rank + 1) % 4 + 1).all()
