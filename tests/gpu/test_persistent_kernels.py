"""Every persistent kernel with several items per program, unequal ones and empty ones among them, against float64.

Such a kernel may pass any test in which each program has one item, or items of one length, and hang in the first call
that is neither. So each must have cases here: a kernel that is missing in the tables below fails a test. On a Hopper
GPU the cases run at sizes that give each multiprocessor at least three items; elsewhere the same checks run small, and
kernels in Gluon emulated.
"""

import ast
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

import attnmesh as am
from attnmesh.core.state import State
from attnmesh.ops.decode import gluon_fp8, gluon_grouped, gluon_latent, gluon_narrow
from attnmesh.ops.dense import gluon_backward, gluon_forward
from attnmesh.ops.dense.triton_tiles import PLAIN
from attnmesh.ops.sparse import gluon_decode, gluon_distribution, gluon_topk, triton_topk
from attnmesh.ops.storage import Quantized, dequantize
from attnmesh.testing.attention import assert_attention_close, forward_backward, random_inputs
from attnmesh.testing.decode import poison_cache, random_decode
from attnmesh.testing.errors import ROUNDING, assert_close
from helpers import sparse_kernels
from helpers.cases import first, sweep
from helpers.chosen_keys import ChosenKeys, Indexer, assert_results, assert_topk, random_lengths
from helpers.decode import assert_decode_close
from helpers.dense_kernels import dense, even_terms, mask_case, relative
from helpers.gluon import emulated
from helpers.persistent import Launch, constants_through_modules, loops_over_items, signs_of_items, watched_launches

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
LEAST = 3  # items per program


# Dense attention.


def check_dense_forward(
    kernel: ModuleType, mask: str, heads: tuple[int, int], lengths: tuple[int, int], widths: tuple[int, int], *,
    batch: int = 1, stages: int = 1, sinks: bool = False, slopes: bool = False, dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda", **how: object,
) -> None:  # fmt: skip
    """One launch, or several over a part of the keys each, from state to state; slopes are those of even positions."""
    if mask == "sequences":
        batch = 3
    q_len, kv_len = lengths
    shapes = [(heads[0], q_len, widths[0]), (heads[1], kv_len, widths[0]), (heads[1], kv_len, widths[1])]
    q, k, v = (torch.randn(batch, *shape, device=device).to(dtype) for shape in shapes)
    given = torch.randn(heads[0], device=device) if sinks else None
    seen, visible = mask_case(mask, q_len, kv_len, batch, q.device)
    state, whole, terms = None, seen["bounds"], PLAIN
    for stage in range(stages):
        begin, stop = (kv_len * n // stages for n in (stage, stage + 1))
        last = stage == stages - 1
        if stages > 1:
            seen["bounds"] = tuple(x.clamp(begin, stop) - begin for x in whole)
        if slopes:
            of_heads = 2.0 ** -torch.arange(1.0, heads[0] + 1, device=device)
            terms, _ = even_terms(of_heads, (range(q_len),), (range(kv_len),))
            _, how["terms"] = even_terms(of_heads, (range(q_len),), (range(begin, stop),))
        state = kernel.forward(
            q, k[:, :, begin:stop], v[:, :, begin:stop], scale=0.2, **seen, state=state,
            out_dtype=q.dtype if last else torch.float32, sinks=given if last else None, **how,
        )  # fmt: skip
    exact, plain = (dense(q, k, v, 0.2, visible, x, terms, given) for x in (torch.float64, dtype))
    for name, *three in zip(("out", "lse"), state, plain, exact, strict=True):
        assert_close(name, *three, rounding=ROUNDING[dtype])


def unequal_documents(length: int) -> list[int]:
    """Documents of lengths that have nothing to do with tiles, some of a single position."""
    ends = [0, *(end for end in accumulate([1, 1, 130, 1, 517, 64, 3, 1025, 200, 1, 1, 77] * length) if end < length)]
    return [stop - begin for begin, stop in zip(ends, [*ends[1:], length], strict=True)]


def check_dense_training(
    backend: str, kind: str, length: int, heads: tuple[int, int], widths: tuple[int, int], *, batch: int = 1,
    deterministic: bool = False, dtype: torch.dtype = torch.bfloat16, device: str = "cuda",
) -> None:  # fmt: skip
    """Out, lse and all gradients by the public function."""
    documents = am.Documents(unequal_documents(length)) & am.Causal()
    mask = {
        "documents": documents, "causal": am.Causal(), "window": am.SlidingWindow(150, 0),
        "union": am.SlidingWindow(100, 0) | am.Prefix(length // 5),
    }[kind]  # fmt: skip
    inputs = random_inputs(
        length, heads=heads, dtype=dtype, batch=batch, head_dim=widths[0], value_dim=widths[1], device=device
    )
    attend = partial(am.attention, mask=mask, return_lse=True, backend=backend)
    torch.use_deterministic_algorithms(deterministic)
    try:
        results = forward_backward(attend, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_attention_close(results, inputs, mask)


# Decode.


def ragged_positions(sequences: int, longest: int, seed: int = 0) -> list[int]:
    """The last position of each sequence; those that are skipped, of one key, and at the edges of a tile among them."""
    return (random_lengths(sequences, longest, seed) - 1).tolist()


def check_decode(kernel: ModuleType | str, sequences: int, longest: int, **how: object) -> None:
    """A backend by its name, or the launcher of an emulated kernel."""
    how = {"block_size": 64, "dtype": torch.bfloat16, "at": "int32"} | how
    problem = random_decode(ragged_positions(sequences, longest), **how)
    if isinstance(kernel, str):
        found = problem.run(kernel)
    else:
        call = problem.call()
        found = State(*(x.fill_(torch.nan) for x in call.empty_state()))
        kernel.launch(call, found, 0)
    assert_decode_close(found, problem)


MLA = {"kv_heads": 1, "dims": (576, 512), "v_in_k": True}
FP8_MLA = MLA | {"storage": "fp8_ds_mla"}


# Sparse attention.


def check_sparse(
    s_q: int, s_kv: int, heads: int, d: int, d_v: int, topk: int, *, max_logits: bool = False, sinks: bool = False,
    deterministic: bool = False, dtype: torch.dtype = torch.bfloat16, device: str = "cuda", backend: str = "auto",
) -> None:  # fmt: skip
    """Out, lse, the largest scores and all gradients."""
    case = ChosenKeys.draw(s_q, s_kv, heads, d, d_v, topk, device=device, dtype=dtype, sinks=sinks)
    leaves = [x.detach().requires_grad_() for x in (case.q, case.kv, case.sinks) if x is not None]
    grads = [torch.randn(s_q, heads, d_v, device=device).to(dtype), torch.randn(s_q, heads, device=device)]
    results = am.sparse_attention(
        leaves[0], leaves[1], case.indices, scale=case.scale, d_v=d_v, mask=am.SparseMask(topk_length=case.lengths),
        sinks=leaves[2] if sinks else None, return_max_logits=max_logits, deterministic=deterministic, backend=backend,
    )  # fmt: skip
    found = dict(zip(("out", "lse", "max_logits"), results, strict=False))
    found |= dict(zip(("dq", "dkv", "dsinks"), torch.autograd.grad(results[:2], leaves, grads), strict=False))
    assert_results(found, case.results(*grads, dtype=dtype), case.results(*grads), dtype)


def check_distribution(
    s_q: int, s_kv: int, heads: int, d: int, topk: int, *, kernel: ModuleType | None = None,
    dtype: torch.dtype = torch.bfloat16, device: str = "cuda",
) -> None:  # fmt: skip
    """By the public function, or by an emulated kernel."""
    case = ChosenKeys.draw(s_q, s_kv, heads, d, d, topk, device=device, dtype=dtype)
    zeros = torch.zeros(s_q, heads, d, device=device), torch.zeros(s_q, heads, device=device)
    exact, plain = case.results(*zeros), case.results(*zeros, dtype=dtype)
    lse = exact["lse"].float()
    if kernel is None:
        mask = am.SparseMask(topk_length=case.lengths)
        found = am.attention_distribution(case.q, case.kv, case.indices, lse, scale=case.scale, mask=mask)
    else:
        bounds = [torch.full((s_q,), end, dtype=torch.int32, device=device) for end in (0, s_kv)]
        found = sparse_kernels.distribution(
            kernel,
            case.q,
            case.kv,
            case.indices,
            *bounds,
            case.lengths,
            lse,
            k_offset=0,
            scale=case.scale,
            head_group=heads,
        )[0]
    assert_results({"distribution": found}, plain, exact, dtype)


def check_topk(
    kernel: ModuleType, s_q: int, s_kv: int, heads: int, d: int, topk: int, *, dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda", **how: object,
) -> None:  # fmt: skip
    """Rows that see any number of keys, none, or all; the score of some keys is NaN."""
    iq, ik = (torch.randn(*n, d, device=device).to(dtype) for n in ((s_q, heads), (s_kv,)))
    ik[7::50] = torch.nan
    indexer = Indexer(iq, ik, torch.randn(s_q, heads, device=device), (heads * d) ** -0.5)
    hi = random_lengths(s_q, s_kv).to(device)
    lo = torch.minimum(hi, random_lengths(s_q, s_kv // 3, seed=1).to(device))
    found = sparse_kernels.topk(kernel, iq, ik, indexer.w, topk, lo, hi, scale=indexer.scale, relu=True, **how)
    assert_topk(found, indexer, topk, lo, hi, torch.arange(s_q, device=device))


def check_sparse_decode(
    sequences: int, tokens: int, heads: int, topk: int, *, longest: int, dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda", backend: str = "auto", **how: object,
) -> None:  # fmt: skip
    """Out, lse and the largest scores of tokens that read unequal numbers of slots of a poisoned pool."""
    size, rows = 64, sequences * tokens
    blocks = -(-longest // size)
    table = torch.randperm(sequences * blocks + 2)[: sequences * blocks].view(sequences, blocks).to(device)
    x = torch.randn((sequences * blocks + 2) * size, 576, device=device)
    pool = am.quantize(x.to(dtype).view(-1, size, 1, 576), "fp8_ds_mla")
    positions = torch.randint(0, longest, (sequences, tokens, topk), device=device)
    slots = table[torch.arange(sequences, device=device)[:, None, None], positions // size] * size + positions % size
    lengths = random_lengths(rows, topk).to(device)
    valid = torch.arange(topk, device=device) < lengths[:, None]
    keys = dequantize(pool, torch.float64, head_axis=2)[:, :, 0].flatten(0, 1)
    sinks = torch.randn(heads, device=device)
    q = torch.randn(rows, heads, 576, device=device).to(dtype)
    case = ChosenKeys(q, keys, slots.flatten(0, 1).int(), valid, 0.08, 512, sinks)

    dead = torch.ones(len(keys), dtype=torch.bool, device=device)
    dead[case.keys[valid]] = False
    poison = Quantized(*(x.clone() for x in (pool.values, pool.scales, pool.rope)))
    poison_cache(poison)
    for part, bad in ((pool.values, poison.values), (pool.scales, poison.scales), (pool.rope, poison.rope)):
        if part.itemsize == 1:
            part, bad = part.view(torch.int8), bad.view(torch.int8)
        part.flatten(0, 1)[dead] = bad.flatten(0, 1)[dead]
    results = am.sparse.paged_sparse_decode_attention(
        q.unflatten(0, (sequences, tokens)), pool, table.int(),
        am.sparse.TopKIndices(positions.int(), None, lengths.view(sequences, tokens)), scale=case.scale,
        sinks=sinks, return_max_logits=True, backend=backend, **how,
    )  # fmt: skip
    found = dict(zip(("out", "lse", "max_logits"), (x.flatten(0, 1) for x in results), strict=True))
    zeros = torch.zeros(rows, heads, 512, device=device), torch.zeros(rows, heads, device=device)
    assert_results(found, case.results(*zeros, dtype=dtype), case.results(*zeros), dtype)
    am.decode.check_decode_errors()


# The kernels, how many items a program of a launch has, and the cases of each.


def by_items(launch: Launch) -> float:
    return launch.args["work_tiles" if "work_tiles" in launch.args else "items"] / launch.programs


def by_sequences(launch: Launch) -> float:
    """Shares are cut from a list of all keys: those of a share belong to so many sequences, on average."""
    return int((launch.args["cur_pos"] >= 0).sum()) / launch.args["partitions"]


ITEMS: dict[str, Callable[[Launch], float]] = {
    "dense.gluon_forward._forward_kernel": by_items,
    "sparse.gluon_forward._forward_kernel": by_items,
    "sparse.gluon_decode._attend_kernel": by_items,
    "sparse.gluon_distribution._distribution_kernel": lambda x: x.args["s_q"] / x.programs,
    "sparse.gluon_topk._topk_kernel": lambda x: (
        min(x.args["groups"] * x.args["items"], x.args["s_q"]) / x.programs  # units to score, rows to select from
    ),
    "sparse.triton_topk._topk_kernel": lambda x: x.args["groups"]
    * (x.args["items"] + x.args["SHAPE"].rows)
    / x.programs,
    "decode.gluon_latent._attend_kernel": by_sequences,
    "decode.gluon_narrow._attend_kernel": by_sequences,
    "decode.gluon_fp8._attend_kernel": by_sequences,
    "decode.gluon_grouped._attend_kernel": by_sequences,
    "decode.triton_kernels.split_kernel": by_sequences,
    # Their programs have one item and wait for others that add to the same keys, or the same rows.
    "dense.gluon_backward_kernel.backward_kernel": lambda x: x.programs / processors(),
    "dense.triton_backward._grad_key_kernel": lambda x: x.programs / processors(),
}
ONE_ITEM = {
    "dense.triton_backward._rows_per_key_tile_kernel": "the number of programs is part of an address",
    "recurrent.triton_chunks.gradients_kernel": "the number of programs is part of an address",
    "recurrent.triton_chunks.delta_gradients_kernel": "the number of programs is part of an address",
    "sparse.triton_paged_topk._select_kernel": "the loop bisects the scores of one row",
    "sparse.gluon_paged_select.select_kernel": "the loop searches for one of the scores of one row",
    "sparse.gluon_paged_select.gather_kernel": "the loop searches for one of the scores of one row",
}


def processors() -> int:
    return torch.cuda.get_device_properties("cuda").multi_processor_count if torch.cuda.is_available() else 1


def topk_of(kernel: ModuleType, **how: object) -> Callable[[], None]:
    return partial(check_topk, kernel, 700, 5000, 64, 128, **{"topk": 512} | how)


FORWARD, STATES = partial(check_dense_forward, gluon_forward), {"stages": 3, "sinks": True}
DECODE = partial(check_decode, device="cuda")
IN_TURNS = partial(check_dense_training, "gluon", deterministic=True)
ON_GPU: dict[str, dict[str, Callable[[], None]]] = {
    "dense.gluon_forward._forward_kernel": {
        "slices": partial(FORWARD, "slices", (8, 2), (2100, 2100), (128, 128), batch=3),
        "sequences": partial(FORWARD, "sequences", (8, 2), (2100, 1900), (64, 64)),
        "documents, wide": partial(FORWARD, "documents", (8, 2), (2100, 2100), (256, 256), batch=3),
        "union, sinks": partial(FORWARD, "union", (16, 2), (2100, 2100), (192, 128), batch=2, sinks=True),
        "causal": partial(FORWARD, "causal", (16, 4), (3300, 3300), (128, 128)),
        "slopes": partial(FORWARD, "causal", (16, 4), (3300, 3300), (128, 128), slopes=True),
        "slopes, states": partial(FORWARD, "random", (8, 2), (2100, 2100), (64, 64), batch=3, slopes=True, **STATES),
        "states": partial(FORWARD, "slices", (8, 2), (2100, 2100), (128, 128), batch=3, **STATES),
        "states, random": partial(FORWARD, "random", (8, 2), (2100, 2100), (64, 64), batch=3, **STATES),
        "training, documents": partial(check_dense_training, "gluon", "documents", 2500, (16, 4), (128, 128), batch=2),
        "training, window": partial(check_dense_training, "gluon", "window", 2500, (8, 4), (64, 64), batch=3),
        "training, union": partial(check_dense_training, "gluon", "union", 2500, (8, 2), (128, 128), batch=3),
        "training, wide": partial(check_dense_training, "gluon", "documents", 2500, (8, 2), (256, 256), batch=3),
        "training, MLA": partial(check_dense_training, "gluon", "causal", 2500, (16, 16), (192, 128), batch=2),
    },
    "dense.gluon_backward_kernel.backward_kernel": {
        "documents": partial(IN_TURNS, "documents", 2500, (16, 8), (128, 128), batch=3),
        "causal": partial(IN_TURNS, "causal", 3300, (16, 8), (64, 64), batch=3),
        "union": partial(IN_TURNS, "union", 2500, (16, 8), (96, 64), batch=3),
        "window": partial(IN_TURNS, "window", 2500, (24, 8), (128, 80), batch=3),
    },
    "dense.triton_backward._grad_key_kernel": {
        "documents": partial(check_dense_training, "triton", "documents", 2500, (16, 8), (128, 128), batch=3),
        "union": partial(check_dense_training, "triton", "union", 2500, (8, 4), (64, 64), batch=3),
    },
    "sparse.gluon_forward._forward_kernel": {
        "16 heads": partial(check_sparse, 600, 700, 16, 576, 512, 256, max_logits=True, sinks=True),
        "64 heads, 512": partial(check_sparse, 600, 700, 64, 512, 512, 256, max_logits=True),
        "64 heads, 2048 keys": partial(check_sparse, 600, 4000, 64, 576, 512, 2048, deterministic=True),
        "128 heads": partial(check_sparse, 400, 700, 128, 576, 512, 256, sinks=True),
        "128 heads, 512": partial(check_sparse, 400, 4000, 128, 512, 512, 2048, max_logits=True, sinks=True),
        "128 heads, 2048 keys": partial(check_sparse, 400, 4000, 128, 576, 512, 2048, max_logits=True),
        "128 heads, deterministic": partial(check_sparse, 400, 4000, 128, 576, 512, 512, deterministic=True),
        "70 heads, 16 bits": partial(check_sparse, 400, 700, 70, 576, 512, 200, dtype=torch.float16),
    },
    "sparse.gluon_distribution._distribution_kernel": {
        "16 heads": partial(check_distribution, 600, 700, 16, 576, 256),
        "64 heads": partial(check_distribution, 600, 4000, 64, 512, 2048),
        "128 heads": partial(check_distribution, 600, 4000, 128, 576, 2048),
        "128 heads, narrow": partial(check_distribution, 600, 700, 128, 128, 300),
    },
    "sparse.gluon_topk._topk_kernel": {
        "many keys": topk_of(gluon_topk, topk=2048),
        "few keys": topk_of(gluon_topk, topk=100),
        "a small workspace": topk_of(gluon_topk, workspace=1),
    },
    "sparse.triton_topk._topk_kernel": {
        "many keys": topk_of(triton_topk, topk=2048),
        "a small workspace": topk_of(triton_topk, workspace=1),
        "float32": topk_of(triton_topk, dtype=torch.float32),
    },
    "sparse.gluon_decode._attend_kernel": {
        "128 heads": partial(check_sparse_decode, 300, 2, 128, 512, longest=700),
        "16 heads": partial(check_sparse_decode, 500, 1, 16, 300, longest=400),
        "splits": partial(check_sparse_decode, 200, 1, 64, 700, longest=900, split_size=128),
    },
    "decode.gluon_latent._attend_kernel": {
        "128 heads": partial(DECODE, "gluon", 480, 190, group=128, **MLA),
        "two tokens, window": partial(DECODE, "gluon", 480, 190, group=64, tokens=2, window=70, **MLA),
        "splits": partial(DECODE, "gluon", 480, 190, group=32, split_size=64, sinks=True, **MLA),
        "fp8, 128 heads": partial(DECODE, "gluon", 480, 190, group=128, **FP8_MLA),
    },
    "decode.gluon_narrow._attend_kernel": {
        "16 heads": partial(DECODE, "gluon", 480, 190, group=16, **MLA),
        "8 heads, two tokens": partial(DECODE, "gluon", 480, 190, group=8, tokens=2, sinks=True, **MLA),
    },
    "decode.gluon_fp8._attend_kernel": {
        "32 heads": partial(DECODE, "gluon", 480, 190, group=32, **FP8_MLA),
        "16 heads, window": partial(DECODE, "gluon", 480, 190, group=16, window=70, **FP8_MLA),
    },
    "decode.gluon_grouped._attend_kernel": {
        "64 heads": partial(DECODE, "gluon_gqa", 480, 300, group=64, kv_heads=2, dims=(128, 128)),
        "8 tokens": partial(DECODE, "gluon_gqa", 480, 300, group=8, tokens=8, kv_heads=2, dims=(64, 64), sinks=True),
    },
    "decode.triton_kernels.split_kernel": {
        "GQA": partial(DECODE, "triton", 600, 150, group=4, kv_heads=16, dims=(64, 64), block_size=16),
        "int8, window": partial(
            DECODE, "triton", 600, 150, group=4, kv_heads=16, dims=(64, 64), storage="int8", window=40
        ),
    },
}  # fmt: skip


def assert_many_items(launches: list[Launch], kernel: str) -> None:
    """Assert that the kernel was launched, with several items for each program."""
    found = [ITEMS[kernel](launch) for launch in launches if launch.kernel == kernel]
    assert found, f"{kernel} was not launched, but {sorted({launch.kernel for launch in launches})}"
    assert max(found) >= LEAST, f"{max(found):.1f} items per program of {kernel}"


def test_kernels_name_their_constants():
    """Triton's cache does not know a constant that is read through a module: a kernel would keep the one of before."""
    assert not constants_through_modules()


def test_every_persistent_kernel_has_cases():
    """A new one must be given cases, or a reason why a program of it has one item; none may be left that is gone."""
    found = loops_over_items()
    assert set(found) == set(ITEMS) | set(ONE_ITEM), f"kernels with loops over items are {sorted(found.items())}"
    assert set(ON_GPU) == set(ITEMS)
    assert all(ON_GPU.values())
    of_gluon = {kernel for kernel in ITEMS if "gluon" in kernel} - {"sparse.gluon_forward._forward_kernel"}
    assert set(EMULATED) == of_gluon  # the missing one has emulated cases in test_sparse_forward_kernels


@pytest.mark.parametrize(
    ("body", "signs"),
    [
        ("for item in range(gl.program_id(0), items, gl.num_programs(0)): pass", {"num_programs"}),
        ("ticket = tl.atomic_add(counter, 1)", {"atomic"}),
        ("while at < stop: at += 1", {"while"}),
        ("tl.atomic_add(target, sums)", set()),
        ("for tile in range(begin, stop): pass", set()),
    ],
)
def test_signs_of_several_items(body, signs):
    (function,) = ast.parse(f"def kernel():\n    {body}").body
    assert signs_of_items(function) == signs


@pytest.mark.cuda
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(("kernel", "case"), [(kernel, case) for kernel, cases in ON_GPU.items() for case in cases])
def test_on_hopper(kernel, case, monkeypatch):
    with watched_launches(monkeypatch) as launches:
        ON_GPU[kernel][case]()
    torch.cuda.synchronize()
    assert_many_items(launches, kernel)


# Kernels in Gluon emulated, and the checks themselves where there is no GPU.


def emulated_backward(seed: int) -> None:
    """Programs run together, and wait for others."""
    q, k, v, grad_out = (torch.randn(1, heads, n, 64).half() for heads, n in ((2, 130), (1, 400), (1, 400), (2, 130)))
    seen, visible = mask_case("union", 130, 400, 1, q.device)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = dense(*leaves, 0.2, visible, torch.float64)
    truth = torch.autograd.grad(out, leaves, grad_out.double())
    delta = (out.detach() * grad_out).sum(-1).float()
    found = emulated(gluon_backward, seed, together=3).gradients(
        q, k, v, grad_out, lse.detach().float(), delta, needs=(True,) * 3, scale=0.2, **seen, deterministic=True
    )
    assert all(relative(x, exact) < 1e-3 for x, exact in zip(found, truth, strict=True))


def emulated_topk(seed: int) -> None:
    how = {"dtype": torch.float16, "device": "cpu", "block": 32, "unit_tiles": 1, "workspace": 1, "programs": 1}
    check_topk(emulated(gluon_topk, seed, ("\nPART = 1024", "\nPART = 32")), 7, 200, 64, 64, 9, **how)


def emulated_distribution(seed: int) -> None:
    kernel = emulated(gluon_distribution, seed)
    kernel.multiprocessors = lambda *_: 2
    check_distribution(9, 220, 70, 128, 200, kernel=kernel, dtype=torch.float16, device="cpu")


def emulated_sparse_decode(seed: int) -> None:
    """The kernel's launcher, over slots that are located already."""
    from attnmesh.ops.sparse import decode_kernels

    kernel = emulated(gluon_decode, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_kernels, "gluon_decode", kernel)
        patch.setattr(decode_kernels, "fastest_way", lambda call, backend: decode_kernels.Way.GLUON)
        how = {"longest": 200, "dtype": torch.float16, "device": "cpu", "backend": "triton"}
        check_sparse_decode(5, 2, 16, 130, **how)


def emulated_decode(module: ModuleType, seed: int, **how: object) -> None:
    check_decode(emulated(module, seed), 10, 100, **{"dtype": torch.float16} | how)


EMULATED: dict[str, Callable[[int], None]] = {
    "dense.gluon_forward._forward_kernel": lambda seed: check_dense_forward(
        emulated(gluon_forward, seed), "slices", (4, 2), (400, 300), (64, 64), stages=1 + seed % 2,
        slopes=seed % 3 == 0, dtype=torch.float16, device="cpu", tiles=gluon_forward.GluonTiles(keys=64, stages=2),
    ),
    "dense.gluon_backward_kernel.backward_kernel": emulated_backward,
    "sparse.gluon_topk._topk_kernel": emulated_topk,
    "sparse.gluon_distribution._distribution_kernel": emulated_distribution,
    "sparse.gluon_decode._attend_kernel": emulated_sparse_decode,
    "decode.gluon_latent._attend_kernel": lambda seed: emulated_decode(
        gluon_latent, seed, group=20, **MLA if seed % 2 == 0 else FP8_MLA | {"dtype": torch.bfloat16}
    ),
    "decode.gluon_narrow._attend_kernel": lambda seed: emulated_decode(gluon_narrow, seed, group=16, **MLA),
    "decode.gluon_fp8._attend_kernel": lambda seed: emulated_decode(
        gluon_fp8, seed, group=16, **FP8_MLA | {"dtype": torch.bfloat16}
    ),
    "decode.gluon_grouped._attend_kernel": lambda seed: emulated_decode(
        gluon_grouped, seed, group=16, kv_heads=1, dims=(64, 64)
    ),
}  # fmt: skip


@pytest.mark.parametrize("seeds", [range(1), sweep(range(1, 8))], ids=["one", "many"])
@pytest.mark.parametrize("kernel", first(4, EMULATED))
def test_emulated(kernel, seeds, monkeypatch):
    for seed in seeds:
        with watched_launches(monkeypatch) as launches:
            EMULATED[kernel](seed)
        assert_many_items(launches, kernel)


SMALL = {"device": "cpu", "dtype": torch.float32}
ON_CPU: dict[str, Callable[[], None]] = {
    "dense": partial(check_dense_training, "auto", "union", 90, (4, 2), (16, 16), **SMALL),
    "documents": partial(check_dense_training, "auto", "documents", 300, (4, 2), (16, 16), **SMALL),
    "sparse": partial(check_sparse, 25, 90, 5, 24, 16, 70, max_logits=True, sinks=True, backend="torch", **SMALL),
    "bf16": partial(check_sparse, 25, 90, 5, 24, 16, 70, device="cpu", dtype=torch.bfloat16, backend="torch"),
    "distribution": partial(check_distribution, 25, 90, 5, 24, 70, **SMALL),
    "top-k": partial(check_topk, triton_topk, 15, 60, 3, 16, 20, **SMALL),
    "sparse decode": partial(check_sparse_decode, 9, 2, 5, 40, longest=130, backend="torch", **SMALL),
    "decode": partial(check_decode, "cpu", 9, 150, dtype=torch.float32),
}  # fmt: skip


@pytest.mark.parametrize("case", first(4, ON_CPU))
def test_the_checks_on_a_cpu(case):
    ON_CPU[case]()


@pytest.mark.parametrize("number", range(3))
def test_the_checks_find_a_program_that_falls_behind(number, monkeypatch):
    """A row has the result of the row before."""
    original = am.sparse_attention

    def behind(*args, **how):
        return [x.roll(1, 0) if i == number else x for i, x in enumerate(original(*args, **how))]

    monkeypatch.setattr(am, "sparse_attention", behind)
    with pytest.raises(AssertionError, match=("out", "lse", "max_logits")[number]):
        check_sparse(25, 90, 5, 24, 16, 70, max_logits=True, backend="torch", **SMALL)


def test_launches_are_watched_by_their_names(monkeypatch):
    with watched_launches(monkeypatch) as launches:
        check_topk(triton_topk, 15, 60, 3, 16, 20, dtype=torch.float32, device=device())
    assert [launch.kernel for launch in launches] == ["sparse.triton_topk._topk_kernel"]
    assert launches[0].args["s_q"] == 15
    with pytest.raises(AssertionError, match="was not launched"):
        assert_many_items(launches, "decode.triton_kernels.split_kernel")
    few = [Launch("sparse.gluon_forward._forward_kernel", 8, {"items": 16})]
    with pytest.raises(AssertionError, match=r"2\.0 items per program"):
        assert_many_items(few, "sparse.gluon_forward._forward_kernel")


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
