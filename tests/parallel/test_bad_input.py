"""What does not fit raises ValueError on every rank, with the explanation; nothing hangs, nothing is ignored."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from attnmesh import (
    Causal,
    ContextParallel,
    Contiguous,
    Documents,
    Full,
    SlidingWindow,
    Striped,
    Zigzag,
    attention,
    run_virtual,
)
from attnmesh.comm import Comm, CommError
from attnmesh.core.masks import Padding
from attnmesh.testing.attention import forward_backward, random_inputs
from helpers.processes import run_processes

LENGTH, WORLD, GUILTY = 12, 3, 1


def attend(comm: Comm, given: dict[str, object], **how: object) -> torch.Tensor:
    """A call in which all is well, but for what is given. `how` is as in ContextParallel."""
    call = {name: torch.ones(1, 2, LENGTH // comm.world, 16) for name in "qkv"} | {"length": LENGTH} | given
    return ContextParallel(comm, **how).attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)


def said(comm: Comm, program) -> str:
    """The ValueError that the rank gets, in words, or what else happened."""
    try:
        program(comm)
    except ValueError as error:
        return str(error)
    except Exception as error:
        return f"not a ValueError but {type(error).__name__}: {error}"
    return "nothing was raised"


def assert_all_say(words: str, program, world: int = WORLD) -> None:
    for rank, message in enumerate(run_virtual(world, lambda comm: said(comm, program), timeout=30)):
        assert re.search(words, message), f"rank {rank}: {message}"


def shape(*sizes: int) -> torch.Tensor:
    return torch.ones(*sizes)


# On one rank only: (what that rank gives, what all must hear).
WRONG_ALONE = {
    "heads that do not divide": (
        {"q": shape(1, 3, 4, 16)},
        r"got q_heads=3 and kv_heads=2 \(on rank 1",
    ),
    "a short shard": ({n: shape(1, 2, 3, 16) for n in "qkv"}, "holds 4 of 12 positions, but its shard has 3"),
    "a long shard": ({n: shape(1, 2, 5, 16) for n in "qkv"}, "holds 4 of 12 positions, but its shard has 5"),
    "short queries": ({"q": shape(1, 2, 3, 16)}, "of 3 holds 4 of 12 positions, but its shard has 3"),
    "long keys": ({n: shape(1, 2, 5, 16) for n in "kv"}, "of 3 holds 4 of 12 keys, but its shard has 5"),
    "k and v of two shapes": ({"v": shape(1, 2, 3, 16)}, "k and v must have the same batch size, heads and length"),
    "k of another dtype": ({"k": shape(1, 2, 4, 16).half()}, "q, k and v must have the same dtype"),
    "k on another device": ({"k": shape(1, 2, 4, 16).to("meta")}, "q, k and v must be on the same device"),
    "three dimensions": ({"q": shape(2, 4, 16)}, r"q must be \[batch, heads, seq, head_dim\], got shape \(2, 4, 16\)"),
    "integers": ({"v": shape(1, 2, 4, 16).long()}, "v must be floating point, got torch.int64"),
    "no tensor": ({"q": None}, "q must be a tensor, got NoneType"),
    "too short documents": ({"mask": Documents([5, 6])}, r"sequence length 12, but \(5, 6\) add up to 11"),
    "no mask": ({"mask": None}, "mask must be an attnmesh mask .* got None"),
    "scale NaN": ({"scale": float("nan")}, "scale must be a finite number, got nan"),
    "scale no number": ({"scale": "a"}, "scale must be .*'a'"),
    "softcap 0": ({"softcap": 0}, "softcap must be a positive number, got 0"),
    "sinks of other heads": (
        {"sinks": shape(3)},
        r"sinks must be floating point \[2\], one per query head, got torch.float32 \(3,\)",
    ),
    "sinks of integers": ({"sinks": shape(2).long()}, r"sinks must be floating point \[2\], .* got torch.int64"),
    "sinks in a list": ({"sinks": [0.0, 0.0]}, r"sinks must be a tensor \[heads\], got list"),
    "sinks on another device": ({"sinks": shape(2).to("meta")}, "sinks must be on the device of q, cpu, got meta"),
    "slopes of other heads": ({"alibi_slopes": shape(2, 1)}, r"alibi_slopes must be floating point \[2\]"),
    "slopes with a gradient": (
        {"alibi_slopes": shape(2).requires_grad_()},
        "alibi_slopes must be constants without a gradient, got requires_grad=True",
    ),
    "a mask for two sequences": (
        {"mask": Causal() & Padding([12, 12])},
        "mask must have one mask per sequence of the batch of 1, got 2",
    ),
    "a negative length": ({"length": -1}, "length must be an integer >= 0, got -1"),
    "half a length": ({"length": 12.5}, "length must be .*12.5"),
    "a negative key_length": ({"key_length": -3}, "key_length must be an integer >= 0, got -3"),
    "half a key_length": ({"key_length": 4.5}, "key_length must be an integer >= 0, got 4.5"),
    "a key_length of True": ({"key_length": True}, "key_length must be an integer >= 0, got True"),
    "a key_length that does not fit": ({"key_length": 9}, "of 3 holds 3 of 9 keys, but its shard has 4"),
    "a key_layout that does not fit": (
        {"key_layout": Zigzag((2, 1, 2))},
        r"under Zigzag\(\(2, 1, 2\)\) rank . of 3 holds . of 12 keys, but its shard has 4",
    ),
    "no key_layout": ({"key_layout": "striped"}, "key_layout must be a layout .* got 'striped'"),
    "documents of the queries": (
        {"mask": Documents([5, 7]), "key_length": 9} | {n: shape(1, 2, 3, 16) for n in "kv"},
        r"sequence length 9, but \(5, 7\) add up to 12",
    ),
    "another batch": ({n: shape(2, 2, 4, 16) for n in "qkv"}, "batch is 1 on ranks 0, 2 but 2 on rank 1"),
    "other query heads": ({"q": shape(1, 4, 4, 16)}, "query heads is 2 on ranks 0, 2 but 4 on rank 1"),
    "other kv heads": ({n: shape(1, 1, 4, 16) for n in "kv"}, "kv heads is 2 on ranks 0, 2 but 1 on rank 1"),
    "another head_dim": ({n: shape(1, 2, 4, 8) for n in "qkv"}, "head_dim is 16 on ranks 0, 2 but 8 on rank 1"),
    "another dtype": (
        {n: shape(1, 2, 4, 16).double() for n in "qkv"},
        "dtype is torch.float32 on ranks 0, 2 but torch.float64 on rank 1",
    ),
    "another device": (
        {n: shape(1, 2, 4, 16).to("meta") for n in "qkv"},
        r"no backend serves this call: .* torch: tensors on meta have no values \(on rank 1\)",
    ),
    "another mask": (
        {"mask": SlidingWindow(3)},
        r"mask is Causal\(\) on ranks 0, 2 but SlidingWindow\(left=3, right=0\)",
    ),
    "another return_lse": ({"return_lse": True}, "return_lse is False on ranks 0, 2 but True on rank 1"),
    "another scale": ({"scale": 0.5}, "scale is 0.25 on ranks 0, 2 but 0.5 on rank 1"),
    "another softcap": ({"softcap": 0.5}, "softcap is None on ranks 0, 2 but 0.5 on rank 1"),
    "sinks alone": ({"sinks": shape(2)}, "sinks is None on ranks 0, 2 but torch.float32 on rank 1"),
    "slopes alone": ({"alibi_slopes": shape(2)}, "alibi_slopes is False on ranks 0, 2 but True on rank 1"),
    "values of another width": ({"v": shape(1, 2, 4, 8)}, "head_dim of v is 16 on ranks 0, 2 but 8 on rank 1"),
    "another key_length": (
        {n: shape(1, 2, 2, 16) for n in "kv"} | {"key_length": 6},
        "key_length is 12 on ranks 0, 2 but 6 on rank 1",
    ),
    "another key_layout": (
        {"key_layout": Contiguous()},
        r"key_layout is Zigzag\(\) on ranks 0, 2 but Contiguous\(\) on rank 1",
    ),
    "another length": (
        {n: shape(1, 2, 5, 16) for n in "qkv"} | {"length": 14},
        "length is 12 on ranks 0, 2 but 14 on rank 1",
    ),
}


@pytest.mark.parametrize("what", WRONG_ALONE)
def test_one_rank_is_wrong_and_all_hear_it(what):
    wrong, words = WRONG_ALONE[what]
    assert_all_say(words, lambda comm: attend(comm, wrong if comm.rank == GUILTY else {}))


@pytest.mark.parametrize("what", [what for what, (_, words) in WRONG_ALONE.items() if " on ranks " not in words])
def test_all_ranks_are_wrong_and_all_hear_it(what):
    wrong, words = WRONG_ALONE[what]
    assert_all_say(words.partition(r" \(on rank")[0], lambda comm: attend(comm, wrong))


def test_ranks_with_other_layouts_or_backends():
    layouts, backends = (Zigzag(), Striped(), Zigzag()), ("auto", "auto", "aten")
    assert_all_say(
        r"layout is Zigzag\(\) on ranks 0, 2 but Striped\(\) on rank 1",
        lambda comm: attend(comm, {}, layout=layouts[comm.rank]),
    )
    assert_all_say(
        "backend is auto on ranks 0, 1 but aten on rank 2", lambda comm: attend(comm, {}, backend=backends[comm.rank])
    )


def test_ranks_with_other_schedules_or_nodes():
    schedules, inners = ("ring", "allgather", "ring"), (None, 1, 3)
    assert_all_say(
        "schedule is ring on ranks 0, 2 but allgather on rank 1",
        lambda comm: attend(comm, {}, schedule=schedules[comm.rank]),
    )
    assert_all_say(
        "ranks_per_node is 3 on ranks 0, 2 but 1 on rank 1",
        lambda comm: attend(comm, {}, ranks_per_node=inners[comm.rank]),
    )


@pytest.mark.parametrize("schedule", ["ulysses+ring", "ulysses+allgather", "ring+ring"])
@pytest.mark.parametrize("ranks_per_node", [None, 1, 4])
def test_two_levels_where_there_is_only_one(schedule, ranks_per_node):
    per_node = ranks_per_node or 4
    words = rf"schedule='{re.escape(schedule)}' .* two-dimensional mesh.* above 1 .* got {per_node} of 4 ranks per node"
    assert_all_say(words, lambda comm: attend(comm, {}, schedule=schedule, ranks_per_node=ranks_per_node), world=4)


@pytest.mark.parametrize("schedule", ["ulysses+ring", "ulysses+allgather"])
@pytest.mark.parametrize(
    ("layout", "key_layout"), [(Striped(), None), (Zigzag(), Striped()), (Striped(), Contiguous())]
)
def test_shards_that_a_node_cannot_take_together(schedule, layout, key_layout):
    assert_all_say(
        rf"schedule='{re.escape(schedule)}' .* in this layout the shards of a node interleave",
        lambda comm: attend(comm, {"key_layout": key_layout}, schedule=schedule, layout=layout, ranks_per_node=2),
        world=4,
    )


def test_tensors_that_are_parts_of_others():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x = DTensor.from_local(shape(1, 2, 6, 16), mesh)
        for attends in (attention, ContextParallel(mesh).attention):
            with pytest.raises(ValueError, match=r"q must be a plain tensor, got a DTensor: .*, x.to_local\(\)"):
                attends(x, x, x)
            assert attends(*[x.to_local()] * 3).shape == x.shape
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("ranks_per_node", [0, -2, 3, 5, 8, True, 2.0, "2"], ids=repr)
def test_nodes_that_do_not_divide_the_ranks(ranks_per_node):
    words = f"ranks_per_node must be an integer that divides the 4 ranks, got {ranks_per_node!r}"
    assert_all_say(words, lambda comm: attend(comm, {}, ranks_per_node=ranks_per_node), world=4)


@pytest.mark.parametrize("names", [("q", ""), ("k", ""), ("qkv", "q"), ("q", "k")])
def test_ranks_that_want_gradients_of_other_things(names):
    """Gradients of keys travel: ranks must know from the others whether any will come."""

    def program(comm: Comm) -> None:
        wanted = names[comm.rank == GUILTY]
        attend(comm, {n: torch.ones(1, 2, 4, 16, requires_grad=n in wanted) for n in "qkv"})

    assert_all_say("gradient of . is (True|False) on ranks 0, 2 but (True|False) on rank 1", program)


def test_a_rank_without_gradients_among_others():
    def program(comm: Comm) -> None:
        with torch.set_grad_enabled(comm.rank != GUILTY):
            attend(comm, {"q": torch.ones(1, 2, 4, 16, requires_grad=True)})

    assert_all_say("gradient of q is True on ranks 0, 2 but False on rank 1", program)


def test_one_rank_wants_dk_and_the_other_dv():
    """Each must get its own in full, or all must hear that this cannot be; never half of a gradient."""
    inputs = random_inputs(10)
    everything = forward_backward(lambda q, k, v: attention(q, k, v, mask=Causal(), return_lse=True), inputs)

    def rank(comm: Comm) -> str | torch.Tensor:
        cp = ContextParallel(comm)
        q, k, v, *grads = (cp.shard(x, 2).clone() for x in inputs)
        mine = (k, v)[comm.rank].requires_grad_()
        try:
            torch.autograd.backward(cp.attention(q, k, v, length=10, return_lse=True), grads)
        except ValueError as error:
            return str(error)
        return mine.grad

    results = run_virtual(2, rank)
    if all(isinstance(result, str) for result in results):
        assert all("gradient of k" in result for result in results)
        return
    for rank, (result, whole) in enumerate(zip(results, everything[3:], strict=True)):
        torch.testing.assert_close(result, Zigzag().shard(whole, 2, 2, rank))


def test_uneven_shards_need_a_length():
    def program(comm: Comm) -> None:
        rows = Contiguous().local_length(11, WORLD, comm.rank)
        attend(comm, {n: torch.ones(1, 2, rows, 16) for n in "qkv"} | {"length": None}, layout=Contiguous())

    assert_all_say("length", program)


def test_a_backend_that_cannot_serve_is_refused_on_every_rank():
    """Even on a rank that holds no positions and has nothing to compute."""

    def program(comm: Comm) -> None:
        rows = Zigzag().local_length(2, WORLD, comm.rank)
        attend(comm, {n: torch.ones(1, 2, rows, 8) for n in "qkv"} | {"length": 2}, backend="triton")

    assert_all_say("backend='triton' cannot serve this call: its kernels take head_dim 16 to 576, not 8", program)


def test_a_dtype_that_the_kernel_does_not_take_is_refused_on_every_rank():
    eighth = torch.ones(1, 2, 4, 16).to(torch.float8_e4m3fn)
    assert_all_say("float8_e4m3fn", lambda comm: attend(comm, dict.fromkeys("qkv", eighth), backend="aten"))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            {"schedule": "tree"},
            r"schedule must be one of auto, ring, allgather, ulysses, ulysses\+ring, ulysses\+allgather, ring\+ring, "
            "got 'tree'",
        ),
        ({"schedule": None}, "schedule must be one of auto, .*, got None"),
        ({"backend": "cuda"}, "backend must be one of auto, aten, triton, gluon, torch, got 'cuda'"),
        ({"backend": "reference"}, "backend must be one of auto, aten, triton, gluon, torch, got 'reference'"),
        ({"layout": "zigzag"}, r"layout must be a layout \(Contiguous\(\), Zigzag\(\), \.\.\.\), got 'zigzag'"),
        ({"layout": Zigzag}, r"layout must be a layout .* got <class"),
        ({"group": 3}, "group must be a Comm, ProcessGroup, DeviceMesh or None, got int"),
    ],
)
def test_unknown_ways_to_spread_a_sequence(how, words):
    with pytest.raises(ValueError, match=words):
        ContextParallel(**how)


@pytest.mark.parametrize(
    ("good", "bad", "words"),
    [
        ({"length": 1}, {"length": True}, "length must be an integer >= 0, got True"),
        ({"length": 1}, {"length": 1.0}, "length must be an integer >= 0, got 1.0"),
        ({"key_length": 1}, {"key_length": 1.0}, "key_length must be an integer >= 0, got 1.0"),
    ],
)
def test_an_equal_argument_of_a_wrong_type_is_refused_after_a_right_one(good, bad, words):
    q, context = shape(1, 2, 1, 16), ContextParallel()
    context.attention(q, q, q, **good)
    with pytest.raises(ValueError, match=words):
        context.attention(q, q, q, **bad)


def test_alone_bad_input_is_just_as_bad():
    with pytest.raises(ValueError, match="holds 5 of 5 positions, but its shard has 4"):
        ContextParallel().attention(*(torch.ones(1, 2, 4, 16),) * 3, length=5)


# Gathering.


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        pytest.param({"x": torch.ones(1, 2, 5, 3)}, "holds 4 of 12 positions, but its shard has 5", id="a long shard"),
        pytest.param({"length": 13}, "length is 12 on ranks 0, 2 but 13 on rank 1", id="another length"),
        pytest.param({"length": -1}, "length must be an integer >= 0, got -1", id="a negative length"),
        pytest.param({"dim": 7}, "dim .*7", id="no such dimension"),
        pytest.param({"x": torch.ones(1, 2, 4, 5)}, "other dimensions is", id="another shape"),
        pytest.param({"x": torch.ones(1, 2, 4, 3).half()}, "dtype is torch.float32 on ranks 0, 2", id="another dtype"),
        pytest.param(
            {"x": torch.ones(1, 2, 4, 3, requires_grad=True)}, "gradient.* is False on ranks 0, 2", id="gradients"
        ),
    ],
)
def test_one_rank_gathers_something_else_and_all_hear_it(wrong, words):
    def program(comm: Comm) -> None:
        call = {"x": torch.ones(1, 2, 4, 3), "dim": 2, "length": 12} | (wrong if comm.rank == GUILTY else {})
        whole = ContextParallel(comm).unshard(**call)
        if whole.requires_grad:
            whole.sum().backward()

    assert_all_say(words, program)


def test_a_dimension_that_is_not_there_is_an_error_everywhere():
    with pytest.raises((ValueError, IndexError), match="dim"):
        ContextParallel().unshard(torch.ones(1, 2, 4, 4), 7, 4)


# Afterwards.


def test_after_a_refusal_all_goes_on():
    def program(comm: Comm) -> torch.Tensor:
        for _ in range(2):
            with pytest.raises(ValueError, match="must be a multiple of kv_heads"):
                attend(comm, {"q": torch.ones(1, 3, 4, 16)} if comm.rank == GUILTY else {})
            with pytest.raises(ValueError, match="ranks disagree: mask"):
                attend(comm, {"mask": Full() if comm.rank == GUILTY else Causal()})
        return attend(comm, {})

    for out in run_virtual(WORLD, program):
        torch.testing.assert_close(out, torch.ones(1, 2, 4, 16))


def test_a_rank_that_goes_wrong_after_the_first_call_makes_all_raise():
    """What was agreed once is not compared again: the others may learn of it as a CommError, but they do learn."""

    def program(comm: Comm) -> str:
        attend(comm, {})
        try:
            attend(comm, {"q": torch.ones(1, 3, 4, 16)} if comm.rank == GUILTY else {})
        except (ValueError, CommError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"

    messages = run_virtual(WORLD, program, timeout=30)
    assert messages[GUILTY].startswith(
        "ValueError: ContextParallel.attention: q_heads must be a multiple of kv_heads, got q_heads=3"
    )
    for rank in (0, 2):
        assert messages[rank].startswith(("CommError", "ValueError"))


# Between real processes.


def one_wrong_process(comm: Comm) -> list[str]:
    comm.timeout = 10
    heard = []
    for what in ("heads that do not divide", "a short shard", "too short documents", "another dtype", "another mask"):
        wrong = WRONG_ALONE[what][0]
        heard.append(said(comm, lambda comm, wrong=wrong: attend(comm, wrong if comm.rank == GUILTY else {})))
    attend(comm, {})  # and all goes on
    return heard


def test_one_process_is_wrong_and_all_hear_it():
    for heard in run_processes(3, one_wrong_process):
        assert re.search(WRONG_ALONE["heads that do not divide"][1], heard[0])
        assert re.search(WRONG_ALONE["a short shard"][1], heard[1])
        assert re.search(WRONG_ALONE["too short documents"][1], heard[2])
        assert re.search(WRONG_ALONE["another dtype"][1], heard[3])
        assert re.search(WRONG_ALONE["another mask"][1], heard[4])


def one_wrong_process_later(comm: Comm) -> str:
    comm.timeout = 20
    attend(comm, {})
    try:
        attend(comm, {"q": torch.ones(1, 3, 4, 16)} if comm.rank == GUILTY else {})
    except (ValueError, CommError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_a_process_that_goes_wrong_after_the_first_call_makes_all_raise():
    messages = run_processes(3, one_wrong_process_later)
    assert messages[GUILTY].startswith(
        "ValueError: ContextParallel.attention: q_heads must be a multiple of kv_heads, got q_heads=3"
    )
    for rank in (0, 2):
        assert messages[rank].startswith(("CommError", "ValueError"))


def test_shards_in_the_order_of_flash_attention_warn_or_raise_on_every_rank():
    def rank(comm: Comm) -> None:
        cp = ContextParallel(comm, schedule="ring")
        shard = torch.ones(1, 600, 8, 16)  # [batch, seq, heads, head_dim]
        with pytest.raises(ValueError, match=r"got q \[1, 600, 8, 16\] .* pass x.transpose\(1, 2\)"):
            cp.attention(shard, shard, shard)
        few = torch.ones(1, 12, 4, 16)  # as many positions as heads over all ranks
        cp.attention(few[:, :8], few[:, :8], few[:, :8])
        cp.attention(few, few, few)

    with pytest.warns(UserWarning, match=r"got q \[1, 12, 4, 16\]") as caught:
        run_virtual(2, rank)
    assert {warning.filename for warning in caught} == {__file__}
