"""Invalid decode arguments raise ValueError with the argument and its value."""

import re
from dataclasses import replace

import pytest
import torch

from attnmesh import decode_attention
from attnmesh.core.state import State
from attnmesh.ops.storage import Quantized
from attnmesh.testing.decode import DecodeProblem, random_decode
from attnmesh.verify.decode import STORAGES
from helpers.decode import BACKENDS

META = torch.device("meta")


def cached(**how: object) -> DecodeProblem:
    """Two sequences of 20, 4 query heads, 2 kv heads."""
    return random_decode([19, 7], tokens=3, capacity=20, **how)


def pooled(**how: object) -> DecodeProblem:
    """The same in blocks of 8: 3 slots, 7 blocks."""
    return random_decode([19, 7], tokens=3, capacity=24, block_size=8, **how)


def having(problem: DecodeProblem, **parts: object) -> DecodeProblem:
    return replace(problem, **parts)


def on_meta(stored: torch.Tensor | Quantized) -> torch.Tensor | Quantized:
    if isinstance(stored, Quantized):
        return Quantized(stored.values.to(META), stored.scales.to(META))
    return stored.to(META)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def quantized(values: list[int], scales: list[int], dtype: torch.dtype) -> Quantized:
    kind = torch.float8_e4m3fn if dtype == "fp8" else torch.int8
    return Quantized(torch.zeros(values).to(kind), torch.zeros(scales).to(torch.float32 if dtype == "fp8" else dtype))


KEY_RANGE = (zeros(2, 3).int(), zeros(2, 3).int() + 5)
OPTIONS = {  # message: options of the call
    "cur_pos[0] is 24, but must be 0 to": {"cur_pos": [24, 1]},
    "cur_pos[1] is 99, but must be 0 to": {"cur_pos": torch.tensor([1, 99])},
    "cur_pos[1] is -2, but must be 0 to": {"cur_pos": [1, -2]},
    "cur_pos[0] is -7,": {"cur_pos": torch.tensor([-7, 1], dtype=torch.int32)},
    "cur_pos must have one position per sequence, 2, got 3": {"cur_pos": [1, 2, 3]},
    "cur_pos must have one position per sequence, 2, got 1": {"cur_pos": torch.tensor([1])},
    "cur_pos must be integers, got [1.0, 2.0]": {"cur_pos": [1.0, 2.0]},
    "cur_pos must be int32 or int64 [batch], got torch.float32 (2,)": {"cur_pos": torch.ones(2)},
    "cur_pos must be int32 or int64 [batch], got torch.int16 (2,)": {"cur_pos": torch.ones(2, dtype=torch.int16)},
    "cur_pos must be int32 or int64 [batch], got torch.int64 (2, 1)": {"cur_pos": torch.ones(2, 1).long()},
    "cur_pos must be a list or on the device of q, cpu, got meta": {"cur_pos": torch.ones(2, device=META).long()},
    "window must be a positive integer or None, got 0": {"window": 0},
    "window must be a positive integer or None, got -3": {"window": -3},
    "window must be a positive integer or None, got 2.5": {"window": 2.5},
    "max_splits must be a positive integer or None, got 0": {"max_splits": 0},
    "split_size must be a positive integer or None, got -16": {"split_size": -16},
    "got max_splits=4 and split_size=16": {"max_splits": 4, "split_size": 16},
    "scale must be a finite number, got nan": {"scale": float("nan")},
    "scale must be a finite number, got inf": {"scale": float("inf")},
    "scale must be a finite number, got '1'": {"scale": "1"},
    "mask and tree are mutually exclusive": {"mask": zeros(1, 1, 1, 4), "tree": zeros(3, 3, dtype=torch.bool)},
    "got torch.float32 (3, 1, 1, 4)": {"mask": zeros(3, 1, 1, 4)},
    "got torch.float32 (1, 2, 1, 4)": {"mask": zeros(1, 2, 1, 4)},
    "got torch.float32 (1, 1, 2, 4)": {"mask": zeros(1, 1, 2, 4)},
    "got torch.float32 (3, 4)": {"mask": zeros(3, 4)},
    "the capacity of the cache, got 25": {"mask": zeros(1, 1, 1, 25)},
    "mask must be a boolean or floating point tensor [2 or 1, 4 or 1, 3 or 1, up to": {
        "mask": zeros(1, 1, 1, 4, dtype=torch.int32)
    },
    "got list": {"mask": [[[[True]]]]},
    "mask must be on the device of q, cpu, got meta": {"mask": zeros(1, 1, 1, 4).to(META)},
    "tree must be a boolean tensor [3, 3] or [2, ...], got torch.float32 (3, 3)": {"tree": zeros(3, 3)},
    "tree must be [3, 3] or [2, 3, 3], got shape (1, 2, 2)": {"tree": zeros(2, 2, dtype=torch.bool)},
    "tree must be [3, 3] or [2, 3, 3], got shape (3, 3, 3)": {"tree": zeros(3, 3, 3, dtype=torch.bool)},
    "tree must be [3, 3] or [2, 3, 3], got shape (3,)": {"tree": zeros(3, dtype=torch.bool)},
    "tree must be on the device of q, cpu, got meta": {"tree": zeros(3, 3, dtype=torch.bool).to(META)},
    "sinks must be floating point [4], one per query head, got torch.float32 (2,)": {"sinks": zeros(2)},
    "sinks must be floating point [4], one per query head, got torch.int64 (4,)": {"sinks": zeros(4).long()},
    "sinks must be floating point [4], one per query head, got float": {"sinks": 1.0},
    "sinks must be on the device of q, cpu, got meta": {"sinks": zeros(4).to(META)},
    "(q has 2, share_cache=True), got 2": {"share_cache": True},
    "key_range must be a tuple of two tensors, (first, end), got tuple": {"key_range": (zeros(2, 3).int(),)},
    "key_range must be a tuple of two tensors, (first, end), got Tensor": {"key_range": zeros(2, 2, 3).int()},
    "key_range first must be int32 or int64 [2, 3], got torch.float32 (2, 3)": {"key_range": (zeros(2, 3),) * 2},
    "key_range end must be int32 or int64 [2, 3], got torch.int32 (2, 4)": {
        "key_range": (zeros(2, 3).int(), zeros(2, 4).int())
    },
    "key_range end must be int32 or int64 [2, 3], got NoneType": {"key_range": (zeros(2, 3).int(), None)},
    "key_range first must be on the device of q, cpu, got meta": {"key_range": (zeros(2, 3).int().to(META),) * 2},
    "key_range first must not decrease from token to token, got [0, 4, 3] for sequence 1 (at token 2)": {
        "key_range": (torch.tensor([[0, 4, 5], [0, 4, 3]]), torch.tensor([[6, 6, 6]] * 2))
    },
    "key_range end must not decrease from token to token, got [6, 5, 6] for sequence 0 (at token 1)": {
        "key_range": (zeros(2, 3).int(), torch.tensor([[6, 5, 6], [6, 6, 6]]))
    },
    "key_range and window are mutually exclusive": {"key_range": KEY_RANGE, "window": 4},
    "key_range and mask are mutually exclusive": {"key_range": KEY_RANGE, "mask": zeros(1, 1, 1, 4)},
    "key_range and tree are mutually exclusive": {"key_range": KEY_RANGE, "tree": zeros(3, 3, dtype=torch.bool)},
    "out_dtype must be None or torch.float32, got torch.float16": {"out_dtype": torch.float16},
    "out_dtype must be None or torch.float32, got torch.float64": {"out_dtype": torch.float64},
    "backend must be one of auto, cpu, gluon, gluon_gqa, triton, reference, got 'cuda'": {"backend": "cuda"},
}


@pytest.mark.parametrize("said", OPTIONS)
def test_options(said):
    options = {"backend": "auto"} | OPTIONS[said]
    for make in (cached, pooled):
        with pytest.raises(ValueError, match=re.escape(said)):
            make().attend(**options)


@pytest.mark.parametrize("block_size", [None, 8])
def test_key_range_of_a_shared_cache(block_size):
    problem = random_decode([19, 7], tokens=3, block_size=block_size, share="cache")
    with pytest.raises(ValueError, match="key_range and share_cache are mutually exclusive"):
        problem.attend("auto", key_range=KEY_RANGE)


def test_out_of_float64_is_float64():
    problem = cached(dtype=torch.float64)
    assert problem.attend("auto", out_dtype=torch.float64).dtype == torch.float64
    with pytest.raises(ValueError, match=r"out_dtype must be None or torch.float64, got torch.float32"):
        problem.attend("auto", out_dtype=torch.float32)


def room(*shape: int, dtype: torch.dtype = torch.float32) -> State:
    return State(zeros(*shape, dtype=dtype), zeros(*shape[:3]))


INTO = {  # message: argument
    "into must be a State (out, lse) of two tensors, got Tensor": zeros(2, 4, 3, 32),
    "into must be a State (out, lse) of two tensors, got tuple": (zeros(2, 4, 3, 32), None),
    "into.out must have shape (2, 4, 3, 32), got (2, 4, 3, 31)": room(2, 4, 3, 31),
    "into.lse must have shape (2, 4, 3), got (2, 3, 4)": State(zeros(2, 4, 3, 32), zeros(2, 3, 4)),
    "into.out must be torch.float32, got torch.float64": room(2, 4, 3, 32, dtype=torch.float64),
    "into.lse must be torch.float32, got torch.float16": State(zeros(2, 4, 3, 32), zeros(2, 4, 3).half()),
    "into.out must be on the device of q, cpu, got meta": State(zeros(2, 4, 3, 32).to(META), zeros(2, 4, 3)),
    "into.lse must be on the device of q, cpu, got meta": State(zeros(2, 4, 3, 32), zeros(2, 4, 3).to(META)),
    "the last dimension of into.out must be contiguous, got strides (384, 96, 1, 3)": State(
        zeros(2, 4, 32, 3).transpose(2, 3), zeros(2, 4, 3)
    ),
    "into.out must not require a gradient": State(zeros(2, 4, 3, 32).requires_grad_(), zeros(2, 4, 3)),
}


@pytest.mark.parametrize("said", INTO)
def test_into(said):
    with pytest.raises(ValueError, match=re.escape(said)):
        pooled().attend("auto", into=INTO[said])


def test_into_has_the_output_dtype():
    problem = pooled(dtype=torch.float16)
    for dtype, out_dtype in ((torch.float16, torch.float32), (torch.float32, torch.float16)):
        said = f"into.out must be {out_dtype} (out_dtype), got {dtype}"
        with pytest.raises(ValueError, match=re.escape(said)):
            problem.attend("auto", into=room(2, 4, 3, 32, dtype=dtype), out_dtype=out_dtype)
    said = "into.out must be torch.float16 or torch.float32, got torch.bfloat16"
    with pytest.raises(ValueError, match=re.escape(said)):
        problem.attend("auto", into=room(2, 4, 3, 32, dtype=torch.bfloat16))


# The tensors themselves: what is said, and the call that is wrong.
TENSORS = {
    "q must be [batch, heads, tokens, head_dim], got shape (4, 3, 32)": lambda p: having(p, q=p.q[0]),
    "1 to 8 tokens per sequence, got 0": lambda p: having(p, q=p.q[:, :, :0]),
    "1 to 8 tokens per sequence, got 9": lambda p: having(p, q=p.q.repeat(1, 1, 3, 1)),
    "q must be floating point, got torch.int64": lambda p: having(p, q=p.q.long()),
    "q must be a tensor, got list": lambda p: having(p, q=[]),
    "k_cache must be a tensor or Quantized, got NoneType": lambda p: having(p, k=None),
    "v_cache must be a tensor or Quantized, got tuple": lambda p: having(p, v=(p.v, p.v)),
    "got q_heads=3 and kv_heads=2": lambda p: having(p, q=p.q[:, :3]),
    "got q_heads=0 and kv_heads=2": lambda p: having(p, q=p.q[:, :0]),
    "q and k_cache must have the same head_dim, got 16 and 32": lambda p: having(p, q=p.q[..., :16]),
    "head_dim must be at least 1, got 0": lambda p: having(p, q=p.q[..., :0], k=p.k[..., :0]),
    "the head_dim of v_cache must be at least 1, got 0": lambda p: having(p, v=p.v[..., :0]),
    "q, k_cache and v_cache must be on the same device, got k_cache on meta and q on cpu": lambda p: having(
        p, k=on_meta(p.k)
    ),
    "q, k_cache and v_cache must be on the same device, got v_cache on meta and q on cpu": lambda p: having(
        p, v=on_meta(p.v)
    ),
    "got torch.float64 and torch.float32": lambda p: having(p, q=p.q.double()),
    "k_cache and v_cache must have the same storage type, got fp32 and fp16": lambda p: having(p, v=p.v.half()),
    "k_cache and v_cache must have the same storage type, got int8 and fp32": lambda p: having(
        p, k=quantized([*p.k.shape], [*p.k.shape[:3]], torch.float32)
    ),
    "k_cache and v_cache must have the same storage type, got int8 and bfp8": lambda p: having(
        p,
        k=quantized([*p.k.shape], [*p.k.shape[:3]], torch.float32),
        v=quantized([*p.v.shape], [*p.v.shape[:3], 2], torch.int8),
    ),
    "got a tensor of torch.int8": lambda p: having(p, k=p.k.to(torch.int8), v=p.v.to(torch.int8)),
    "got a tensor of torch.float8_e5m2": lambda p: having(p, k=p.k.to(torch.float8_e5m2), v=p.v.to(torch.float8_e5m2)),
    "k_cache must have one fp8 scale per kv head, 2, got 3": lambda p: having(
        p, k=quantized([*p.k.shape], [3], "fp8"), v=quantized([*p.v.shape], [2], "fp8")
    ),
    "v_cache must have one fp8 scale per kv head, 2, got 1": lambda p: having(
        p, k=quantized([*p.k.shape], [2], "fp8"), v=quantized([*p.v.shape], [1], "fp8")
    ),
    "q must not require a gradient": lambda p: having(p, q=p.q.clone().requires_grad_()),
    "k_cache must not require a gradient": lambda p: having(p, k=p.k.clone().requires_grad_()),
    "v_cache must not require a gradient": lambda p: having(p, v=p.v.clone().requires_grad_()),
}


@pytest.mark.parametrize("said", TENSORS)
def test_tensors(said):
    for make in (cached, pooled):
        expected = said if make is cached else re.sub("([kv])_cache", r"\1_pool", said)
        with pytest.raises(ValueError, match=re.escape(expected)):
            TENSORS[said](make()).attend("auto")


@pytest.mark.parametrize(
    ("said", "make", "wrong"),
    [
        ("k_cache must be [batch, kv heads, length, head_dim], got shape (2, 20, 32)", cached,
         {"k": lambda p: p.k[:, 0]}),
        ("v_cache must be [batch, kv heads, length, head_dim], got shape (2, 20, 32)", cached,
         {"v": lambda p: p.v[:, 0]}),
        ("got (2, 2, 19, 32) and (2, 2, 20, 32)", cached, {"k": lambda p: p.k[:, :, 1:]}),
        ("got (2, 2, 20, 32) and (2, 1, 20, 32)", cached, {"v": lambda p: p.v[:, 1:]}),
        ("k_cache must have a batch of 2 (q has 2, share_cache=False), got 1", cached,
         {"k": lambda p: p.k[1:], "v": lambda p: p.v[1:]}),
        ("k_cache must have a batch of 1 (q has 1, share_cache=False), got 2", cached, {"q": lambda p: p.q[1:]}),
        ("k_pool must be [num_blocks, block_size, kv heads, head_dim], got shape (8, 2, 32)", pooled,
         {"k": lambda p: p.k[0]}),
        ("v_pool must be [num_blocks, block_size, kv heads, head_dim], got shape (8, 2, 32)", pooled,
         {"v": lambda p: p.v[0]}),
        ("k_pool and v_pool must have the same shape up to head_dim, got (7, 8, 2, 32) and (6, 8, 2, 32)", pooled,
         {"v": lambda p: p.v[1:]}),
        ("block_size must be 1 to 256, got 0", pooled, {"k": lambda p: p.k[:, :0], "v": lambda p: p.v[:, :0]}),
        ("block_size must be 1 to 256, got 264", pooled,
         {"k": lambda p: p.k.repeat(1, 33, 1, 1), "v": lambda p: p.v.repeat(1, 33, 1, 1)}),
        ("block_table must be int32 [batch, slots], got torch.int64 (2, 3)", pooled,
         {"table": lambda p: p.table.long()}),
        ("block_table must be int32 [batch, slots], got torch.int32 (3,)", pooled, {"table": lambda p: p.table[0]}),
        ("block_table must be a tensor int32 [batch, slots], got list", pooled, {"table": lambda p: p.table.tolist()}),
        ("block_table must be on the device of q, cpu, got meta", pooled, {"table": lambda p: p.table.to(META)}),
        ("block_table must have a batch of 2 (q has 2, share_cache=False), got 1", pooled,
         {"table": lambda p: p.table[:1]}),
        ("block_table must have a batch of 1 (q has 1, share_cache=False), got 2", pooled, {"q": lambda p: p.q[:1]}),
        ("cur_pos[0] is 19, but must be 0 to 15", pooled, {"table": lambda p: p.table[:, :2]}),
        ("cur_pos[0] is 19, but must be 0 to 17", cached,
         {"k": lambda p: p.k[:, :, :18], "v": lambda p: p.v[:, :, :18]}),
    ],
)  # fmt: skip
def test_caches_and_pools(said, make, wrong):
    problem = make()
    with pytest.raises(ValueError, match=re.escape(said)):
        having(problem, **{name: change(problem) for name, change in wrong.items()}).attend("auto")


@pytest.mark.parametrize("make", [cached, pooled])
@pytest.mark.parametrize("storage", STORAGES[1:])
def test_quantized_caches_on_another_device(storage, make):
    problem = make(storage=storage)
    with pytest.raises(ValueError, match=r"got v_(cache|pool) on meta and q on cpu"):
        having(problem, v=on_meta(problem.v)).attend("auto")


@pytest.mark.parametrize("name", ["sinks", "mask"])
def test_a_gradient_that_nobody_would_compute(name):
    """A learned sink, or bias: its gradient would be missing in silence."""
    option = {"sinks": zeros(4), "mask": zeros(1, 1, 1, 4)}[name].requires_grad_()
    with pytest.raises(ValueError, match=f"{name} must not require a gradient"):
        cached().attend("auto", **{name: option})
    with torch.no_grad():
        cached().attend("auto", **{name: option})


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_refuses_what_it_cannot_serve_and_says_so(backend):
    problem = random_decode([3], dtype=torch.float64)
    if backend == "cpu":
        problem = having(problem, q=problem.q.to(META), k=problem.k.to(META), v=problem.v.to(META)).with_options(
            cur_pos=None
        )
    with pytest.raises(ValueError, match=f"backend='{backend}' cannot serve this call: "):
        problem.attend(backend)


def test_nothing_is_refused_that_is_right():
    """The cases above are each one mistake away from these."""
    for make in (cached, pooled):
        for storage in STORAGES:
            make(storage=storage).attend("auto")
    problem = cached()
    with torch.no_grad():
        having(problem, q=problem.q.clone().requires_grad_()).attend("auto")
    decode_attention(problem.q, problem.k, problem.v)
