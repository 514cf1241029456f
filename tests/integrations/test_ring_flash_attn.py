"""The functions of ring_flash_attn: its scripts' inputs and more, compared with attention on one device in float64."""

import inspect
import itertools
import re
import sys
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
import attnmesh.ring_flash_attn as ring_flash_attn
from attnmesh.testing.attention import assert_attention_close, random_inputs
from helpers.cases import first
from helpers.processes import run_processes

PREPARE = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens
TENSORS = {"": "q, k, v", "kvpacked_": "q, kv", "qkvpacked_": "qkv"}
PACKED = {"": 1, "kvpacked_": 2, "qkvpacked_": 3}  # the number of tensors in the last one


@dataclass(frozen=True, eq=False)
class Case:
    """A call over ranks. `bounds` are those of documents, or of the only sequence of a batch."""

    function: str
    bounds: tuple
    heads: tuple = (5, 5)
    head_dim: int = 16
    world: int = 4
    batch: int = 1
    dtype: torch.dtype = torch.float32
    options: dict = field(default_factory=lambda: {"causal": True})

    @property
    def varlen(self):
        return "varlen" in self.function

    @property
    def total(self):
        return self.bounds[-1]

    def positions(self, rank):
        """The positions of a rank in the whole sequence, as the project's scripts cut it, and how many per document."""
        if "llama3" in self.function:
            mine = torch.arange(self.total).tensor_split(self.world)[rank]
            return mine, None
        parts = []
        for begin, end in itertools.pairwise(self.bounds):
            document = torch.arange(begin, end)
            if "zigzag" in self.function:
                chunks = document.chunk(2 * self.world)
                parts.append(torch.cat([chunks[rank], chunks[2 * self.world - 1 - rank]]))
            elif "stripe" in self.function:
                parts.append(document[rank :: self.world])
            else:
                parts.append(document.tensor_split(self.world)[rank])
        return torch.cat(parts), [len(part) for part in parts]

    def inputs(self):
        """q, k, v and the gradients of out and lse, [batch, heads, seq, head_dim]."""
        return random_inputs(
            self.total, heads=self.heads, head_dim=self.head_dim, batch=self.batch, dtype=self.dtype, seed=3
        )

    def mask(self):
        """The mask of the whole sequence, from the definitions of FlashAttention."""
        left, right = self.options.get("window_size", (-1, -1))
        right = 0 if self.options.get("causal", False) else right
        far = self.total
        mask = am.SlidingWindow(far if left < 0 else left, far if right < 0 else right)
        return mask & am.Documents([b - a for a, b in itertools.pairwise(self.bounds)])

    def results(self, comm, group=...):
        """This rank's out, lse, dq, dk, dv in the order [batch, heads, seq, head_dim], and its positions."""
        positions, lengths = self.positions(comm.rank)
        q, k, v, grad_out, grad_lse = (x[:, :, positions] for x in self.inputs())
        order = (lambda x: x[0].transpose(0, 1)) if self.varlen else (lambda x: x.transpose(1, 2))
        q, k, v, grad_out = (order(x).contiguous() for x in (q, k, v, grad_out))
        count = next(n for form, n in reversed(PACKED.items()) if form in self.function)
        single, packed = [q, k, v][: 3 - count], [q, k, v][3 - count :]
        leaves = [*single, torch.stack(packed, 1 if self.varlen else 2) if count > 1 else packed[0]]
        leaves = [x.detach().clone().requires_grad_() for x in leaves]

        more = []
        if "llama3" in self.function:
            whole = torch.tensor(self.bounds, dtype=torch.int32)
            causal = self.options.get("causal", False)
            *more, keys = PREPARE(whole, causal=causal, rank=comm.rank, world_size=comm.world)
            more += [self.heads[1] if self.heads[1] < 3 else 1, keys]
        elif self.varlen:
            more = [torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32), max(lengths)]
        function = getattr(ring_flash_attn, self.function)
        out, lse, nothing = function(
            *leaves, *more, return_attn_probs=True, group=comm if group is ... else group, **self.options
        )
        assert nothing is None
        assert out.is_contiguous()
        assert (out.dtype, lse.dtype) == (self.dtype, torch.float32)
        assert lse.shape == (out[..., 0].T.shape if self.varlen else out[..., 0].transpose(1, 2).shape)
        grad_lse = grad_lse[0] if self.varlen else grad_lse
        grads = torch.autograd.grad([out, lse], leaves, [grad_out, grad_lse])
        grads = [*grads[: 3 - count], *(grads[3 - count].unbind(1 if self.varlen else 2) if count > 1 else grads[-1:])]
        back = (lambda x: x.transpose(0, 1)[None]) if self.varlen else (lambda x: x.transpose(1, 2))
        results = [back(out.detach()), lse.detach()[None] if self.varlen else lse.detach(), *map(back, grads)]
        return positions, results

    def check(self, shards):
        """Compare the shards of all ranks with one device."""
        inputs = self.inputs()
        whole = [torch.full_like(x, torch.nan) for x in (inputs[3], inputs[4], *inputs[:3])]
        for positions, results in shards:
            for x, part in zip(whole, results, strict=True):
                x[:, :, positions] = part.to(x.dtype)
        scores = {"scale": self.options.get("softmax_scale"), "alibi_slopes": self.options.get("alibi_slopes")}
        assert_attention_close(whole, inputs, self.mask(), **scores)

    def run(self):
        self.check(am.run_virtual(self.world, self.results))


# The project's six scripts, each with 8 ranks, 5 heads, causal, of (length or cu_seqlens) and head_dim.
SCRIPTS = {
    "ring_flash_attn_qkvpacked_func": ((0, 3816), 128, (0, 36)),
    "ring_flash_attn_varlen_qkvpacked_func": ((0, 120, 1248, 4232), 128, (0, 4, 16, 48)),
    "zigzag_ring_flash_attn_qkvpacked_func": ((0, 3824), 128, (0, 48)),
    "zigzag_ring_flash_attn_varlen_qkvpacked_func": ((0, 128, 1248, 4240), 128, (0, 8, 24, 56)),
    "stripe_flash_attn_qkvpacked_func": ((0, 3824), 128, (0, 48)),
    "llama3_flash_attn_varlen_qkvpacked_func": ((0, 120, 1248, 4232), 8, (0, 3, 17, 52)),
}


def script(function, *, whole=False, world=4):
    bounds, head_dim, small = SCRIPTS[function]
    return Case(function, bounds, head_dim=head_dim, world=8) if whole else Case(function, small, world=world)


@pytest.mark.parametrize("function", first(4, SCRIPTS))
def test_the_inputs_of_its_scripts(function):
    script(function).run()


@pytest.mark.sweep
@pytest.mark.parametrize("function", ["zigzag_ring_flash_attn_varlen_qkvpacked_func"])
def test_the_inputs_of_its_scripts_in_their_sizes(function):
    script(function, whole=True).run()


ALIBI = {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])}
GAINED = [
    Case("ring_flash_attn_func", (0, 40), (4, 2), options={"causal": False}, batch=2),
    Case("ring_flash_attn_kvpacked_func", (0, 40), (4, 2), options={"causal": True, "window_size": (7, 5)}, batch=2),
    Case("ring_flash_attn_kvpacked_func", (0, 40), (4, 1), options={"window_size": (3, 9), "softmax_scale": 0.4}),
    Case("ring_flash_attn_func", (0, 40), (4, 2), options={"window_size": (-1, 6), **ALIBI}),
    Case("zigzag_ring_flash_attn_func", (0, 48), (4, 2), options={"causal": False, "window_size": (6, -1)}, batch=2),
    Case("zigzag_ring_flash_attn_kvpacked_func", (0, 48), (4, 2), options={"causal": True, "window_size": (11, -1)}),
    Case("stripe_flash_attn_func", (0, 40), (4, 2), options={"causal": False}, batch=2),
    Case("stripe_flash_attn_kvpacked_func", (0, 40), (4, 2), options={"causal": True, "window_size": (0, 0), **ALIBI}),
    Case("ring_flash_attn_varlen_func", (0, 8, 8, 40), (4, 2), options={"causal": False, "deterministic": True}),
    Case("ring_flash_attn_varlen_kvpacked_func", (0, 8, 40), (4, 2), options={"causal": True, "window_size": (9, 0)}),
    Case("zigzag_ring_flash_attn_varlen_func", (0, 8, 40), (4, 2), options={"causal": True, **ALIBI}),
    Case("zigzag_ring_flash_attn_varlen_kvpacked_func", (0, 8, 40), (4, 2), options={"window_size": (3, 3)}),
    Case("llama3_flash_attn_varlen_func", (0, 3, 3, 29, 40), (4, 2), options={"causal": False}),
    Case(
        "llama3_flash_attn_varlen_kvpacked_func", (0, 23, 40), (4, 2), options={"window_size": (9, -1), "causal": True}
    ),
    Case("llama3_flash_attn_varlen_func", (0, 5, 23, 41), (4, 2)),  # a length that the ranks do not divide
    Case("llama3_flash_attn_varlen_func", (0, 2, 3), (4, 2)),  # a rank without positions
    Case("ring_flash_attn_func", (0, 41), (4, 2), options={"causal": True, "length": 41}),
    Case("stripe_flash_attn_qkvpacked_func", (0, 39), options={"causal": True, "length": 39}),
    Case("ring_flash_attn_varlen_func", (0, 9, 39), (4, 2), options={"causal": True, "document_lengths": [9, 30]}),
    Case("zigzag_ring_flash_attn_func", (0, 48), (4, 2), dtype=torch.bfloat16),
]


@pytest.mark.parametrize("case", first(5, GAINED), ids=lambda case: case.function)
def test_what_is_gained(case):
    case.run()


def test_a_zigzag_of_any_length_is_that_of_the_layout():
    inputs = random_inputs(45, heads=(4, 2))

    def rank(comm):
        cp = am.ContextParallel(comm, layout=am.Zigzag())
        q, k, v = (cp.shard(x, 2).transpose(1, 2) for x in inputs[:3])
        out = ring_flash_attn.zigzag_ring_flash_attn_func(q, k, v, causal=True, group=comm, length=45)
        return cp.unshard(out, 1, 45).transpose(1, 2)

    expected = am.attention(*inputs[:3], mask=am.Causal())
    assert torch.allclose(am.run_virtual(4, rank)[0], expected, atol=1e-5)


def test_without_return_attn_probs_it_is_out_alone():
    q = torch.randn(1, 6, 2, 8)
    out = ring_flash_attn.ring_flash_attn_func(q, q, q)  # one rank, without torch.distributed
    expected = am.attention(*[q.transpose(1, 2)] * 3).transpose(1, 2)
    assert torch.allclose(out, expected, atol=1e-6)


# What llama3 is given.


@pytest.mark.parametrize(
    ("bounds", "causal"),
    [((0, 7, 14, 16), True), ((0, 4, 4, 8, 16), True), ((0, 1, 2, 16), True), ((0, 16), False), ((0, 5, 24), False)],
)
def test_prepared_lengths_are_those_of_this_ranks_parts_of_documents(bounds, causal):
    world = 8
    document = torch.bucketize(torch.arange(bounds[-1]), torch.tensor(bounds[1:]), right=True)
    for rank, rows in enumerate(torch.arange(bounds[-1]).chunk(world)):
        whole = torch.tensor(bounds, dtype=torch.int32)
        q, k, longest_q, longest_k, keys = PREPARE(whole, causal=causal, rank=rank, world_size=world)
        assert q.dtype == k.dtype == torch.int32
        assert type(longest_q) is type(longest_k) is int
        assert (longest_q, longest_k) == (q.diff().max(), k.diff().max())
        visible = torch.isin(document, document[rows]) & ((torch.arange(bounds[-1]) <= rows[-1]) | (not causal))
        assert torch.equal(torch.arange(bounds[-1])[keys], visible.nonzero().flatten())
        mine, seen = (document[at].unique_consecutive(return_counts=True)[1] for at in (rows, visible))
        assert q.diff()[q.diff() > 0].tolist() == mine.tolist()
        assert k.diff()[q.diff() > 0].tolist() == seen.tolist()
        assert q[0] == k[0] == 0


def local_llama3(comm, bounds=(0, 5, 20, 32), *, causal=True, **changes):
    """The arguments of this rank, of which some are changed."""
    prepared = PREPARE(torch.tensor(bounds), causal=True, rank=comm.rank, world_size=comm.world)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
    arguments = dict(zip(names, prepared, strict=True)) | {"heads_k_stride": 1, "causal": causal, "group": comm}
    rows = torch.linspace(-1, 1, bounds[-1] * 16).view(-1, 2, 8).tensor_split(comm.world)[comm.rank]
    return (
        {"q": rows, "k": rows, "v": rows}
        | arguments
        | {name: change(arguments[name]) if callable(change) else change for name, change in changes.items()}
    )


def test_ranks_exchange_lengths_that_were_not_prepared_here():
    function = ring_flash_attn.llama3_flash_attn_varlen_func

    def rank(comm):
        expected = function(**local_llama3(comm))
        assert "all_gather" not in comm.traffic.by_op  # which the schedule does not use
        copies = local_llama3(comm, cu_seqlens_q=torch.clone)
        gathers = []
        for _ in range(3):
            assert torch.equal(function(**copies), expected)
            gathers.append(comm.traffic.by_op["all_gather"][0])
        assert gathers == [2, 2, 2]  # once for the tensor, not once per call
        copies["cu_seqlens_q"].add_(0)  # other contents, as far as is known
        function(**copies)
        assert comm.traffic.by_op["all_gather"][0] == 4

    am.run_virtual(4, rank)


# Refusals.


def messages(world, program):
    """The ValueError that each rank gets."""

    def rank(comm):
        try:
            program(comm)
        except ValueError as error:
            return str(error)
        return "nothing was raised"

    return am.run_virtual(world, rank, timeout=30)


def arguments(function, comm):
    """A valid call of a function over two ranks, by name."""
    x = torch.linspace(-1, 1, 4 * 2 * 8).view(4, 2, 8)
    given = {"causal": True, "group": comm}
    if "llama3" in function:
        given = {name: value for name, value in local_llama3(comm, (0, 3, 8)).items() if name not in "qkv"}
    elif "varlen" in function:
        given |= {"cu_seqlens": torch.tensor([0, 2, 4]), "max_seqlen": 2}
    names = TENSORS[next(form for form in reversed(PACKED) if form in function)].split(", ")
    tensors = {name: x if len(name) == 1 else torch.stack([x] * len(name), 1) for name in names}
    return given | {name: x if "varlen" in function else x[None] for name, x in tensors.items()}


FUNCTIONS = [name for name in ring_flash_attn.__all__ if name.endswith("func")]
REFUSED = {
    "dropout_p": (0.1, r"dropout_p must be 0.*got 0.1"),
    "softmax_scale": (float("nan"), "softmax_scale must be a finite number, got nan"),
    "causal": (None, "causal must be True or False, got None"),
    "window_size": ((-2, 0), r"window_size must be two integers \(left, right\), each >= 0 or -1.*got \(-2, 0\)"),
    "window_size ": (3, "window_size must be two integers.*got 3"),
    "alibi_slopes": (torch.ones(1, 2), r"alibi_slopes must be floating point \[2\], one per query head, .*\(1, 2\)"),
    "deterministic": (1, "deterministic must be True or False, got 1"),
    "return_attn_probs": ("yes", "return_attn_probs must be True or False, got 'yes'"),
}


@pytest.mark.parametrize(("i", "function"), enumerate(FUNCTIONS))
def test_what_cannot_be_honored_raises_on_every_rank(i, function):
    def call_with(comm, wrong):
        guilty = i % 2 or comm.rank  # all ranks, or one
        given = arguments(function, comm) | (wrong if guilty else {})
        return getattr(ring_flash_attn, function)(**given)

    for name, (value, words) in REFUSED.items():
        for message in messages(2, partial(call_with, wrong={name.strip(): value})):
            assert re.search(words, message), (name, message)
    assert set(messages(2, partial(call_with, wrong={}))) == {"nothing was raised"}


def tokens(*shape):
    return torch.ones(shape)


SHAPES = [
    ("ring_flash_attn_func", {"q": tokens(4, 2, 8)}, r"q must be \[batch, seq, heads, head_dim\], got .*4, 2, 8"),
    ("ring_flash_attn_func", {"k": None}, "k must be a tensor, got NoneType"),
    ("ring_flash_attn_func", {"k": tokens(1, 4, 3, 8)}, "k and v must have the same batch size, heads and length"),
    ("ring_flash_attn_func", {"q": tokens(1, 4, 3, 8)}, "q_heads must be a multiple of kv_heads"),
    ("ring_flash_attn_func", {"length": 9}, "rank . of 2 holds . of 9 positions, but its shard has 4"),
    ("ring_flash_attn_func", {"length": "8"}, "length must be an integer >= 0, got '8'"),
    ("zigzag_ring_flash_attn_kvpacked_func", {"kv": tokens(1, 4, 3, 2, 8)}, r"kv must be \[batch, seq, 2, heads, head"),
    ("stripe_flash_attn_qkvpacked_func", {"qkv": tokens(1, 4, 2, 2, 8)}, r"qkv must be \[batch, seq, 3, heads, head"),
    ("ring_flash_attn_varlen_func", {"q": tokens(1, 4, 2, 8)}, r"q must be \[tokens, heads, head_dim\], got"),
    ("ring_flash_attn_varlen_func", {"cu_seqlens": torch.tensor([0, 3])}, "cu_seqlens must end with the 4 tokens .* 3"),
    ("ring_flash_attn_varlen_func", {"cu_seqlens": torch.tensor([1, 4])}, r"begin with 0 and not decrease, got \(1, 4"),
    ("ring_flash_attn_varlen_func", {"cu_seqlens": torch.tensor([0, 5, 4])}, "begin with 0 and not decrease"),
    ("ring_flash_attn_varlen_func", {"cu_seqlens": [0, 4]}, "cu_seqlens must be a tensor, got list"),
    ("ring_flash_attn_varlen_func", {"cu_seqlens": tokens(2)}, r"cu_seqlens must be int32 or int64 \[documents \+ 1\]"),
    ("ring_flash_attn_varlen_func", {"max_seqlen": 1}, "max_seqlen must be at least the longest document .* 2, got 1"),
    ("ring_flash_attn_varlen_func", {"max_seqlen": None}, "max_seqlen must be an integer >= 0, got None"),
    ("ring_flash_attn_varlen_func", {"document_lengths": [4, 5]}, r"document_lengths \[4, 5\] under Contiguous"),
    ("ring_flash_attn_varlen_func", {"document_lengths": 8}, "document_lengths must be a list of lengths, got 8"),
    ("ring_flash_attn_varlen_func", {"document_lengths": [-1]}, r"document_lengths\[0\] must be an integer >= 0"),
    ("llama3_flash_attn_varlen_func", {"heads_k_stride": 3}, "heads_k_stride must divide the 2 kv heads, got 3"),
    ("llama3_flash_attn_varlen_func", {"heads_k_stride": 0}, "heads_k_stride must be an integer >= 1, got 0"),
    ("llama3_flash_attn_varlen_func", {"local_k_slice": None}, "local_k_slice must be slice, got None"),
    ("llama3_flash_attn_varlen_func", {"local_k_slice": slice(None)}, "local_k_slice must be a slice of two integers"),
    ("llama3_flash_attn_varlen_func", {"local_k_slice": slice(0, 7)}, "cu_seqlens_k and local_k_slice must have"),
    ("llama3_flash_attn_varlen_func", {"max_seqlen_q": 0}, "max_seqlen_q must be at least the longest document"),
    ("llama3_flash_attn_varlen_func", {"max_seqlen_k": 0}, "max_seqlen_k must be at least the longest document"),
    ("llama3_flash_attn_varlen_func", {"causal": False}, r"prepare_cu_seqlens returns for causal=False"),
    ("llama3_flash_attn_varlen_func", {"cu_seqlens_q": torch.tensor([0, 1, 2, 4])}, "cu_seqlens_k and local_k_slice"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "wrong", "words"), SHAPES)
def test_wrong_shapes_and_lengths_raise_on_every_rank(function, wrong, words):
    for message in messages(2, lambda comm: getattr(ring_flash_attn, function)(**arguments(function, comm) | wrong)):
        assert re.search(words, message), message


def test_ranks_that_differ_raise_on_every_rank():
    def windows(comm):
        given = arguments("ring_flash_attn_func", comm) | {"window_size": (comm.rank, 0)}
        ring_flash_attn.ring_flash_attn_func(**given)

    def lengths(comm):
        given = arguments("ring_flash_attn_varlen_func", comm)
        given["cu_seqlens"] = torch.tensor([0, 2 + comm.rank, 4])
        ring_flash_attn.ring_flash_attn_varlen_func(**given | {"max_seqlen": 4})

    def documents(comm):
        ring_flash_attn.llama3_flash_attn_varlen_func(**local_llama3(comm, (0, 3 + comm.rank, 8)))

    for program in (windows, lengths, documents):
        assert all("mask" in message for message in messages(2, program))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"cu_seqlens": torch.tensor([0, 5, 3])}, "cu_seqlens must begin with 0 and not decrease"),
        ({"causal": 1}, "causal must be True or False, got 1"),
        ({"rank": 2}, "rank must be 0 to 1, got 2"),
        ({"world_size": 0}, "world_size must be an integer >= 1, got 0"),
    ],
)
def test_prepare_refuses(wrong, words):
    given = {"cu_seqlens": torch.tensor([0, 8]), "causal": True, "rank": 0, "world_size": 2}
    with pytest.raises(ValueError, match=words):
        PREPARE(**given | wrong)


# The module.


OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None, deterministic=False, "
    "return_attn_probs=False, group=None"
)


@pytest.mark.parametrize(
    ("function", "form", "more"),
    [
        ("ring_flash_attn", "", None),
        ("zigzag_ring_flash_attn", "kvpacked_", None),
        ("stripe_flash_attn", "qkvpacked_", None),
        ("ring_flash_attn_varlen", "", "cu_seqlens, max_seqlen"),
        ("zigzag_ring_flash_attn_varlen", "kvpacked_", "cu_seqlens, max_seqlen"),
        (
            "llama3_flash_attn_varlen",
            "qkvpacked_",
            "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice",
        ),
    ],
)
def test_signatures_are_those_of_the_project(function, form, more):
    signature = inspect.signature(getattr(ring_flash_attn, f"{function}_{form}func"))
    positional = [str(p.replace(annotation=p.empty)) for p in signature.parameters.values() if p.kind != p.KEYWORD_ONLY]
    assert ", ".join(positional) == ", ".join(filter(None, (TENSORS[form], more, OPTIONS)))


@pytest.mark.parametrize(
    ("args", "named", "words"),
    [
        ((1, 2), {}, "missing a required argument: 'v'"),
        ((1, 2, 3), {"v": 3}, "multiple values for argument 'v'"),
        ((1, 2, 3), {"casual": True}, "unexpected keyword argument 'casual'"),
        (range(12), {}, "too many positional arguments"),  # length is a keyword
    ],
)
def test_arguments_that_the_signature_does_not_have_raise_type_error(args, named, words):
    with pytest.raises(TypeError, match=words):
        ring_flash_attn.ring_flash_attn_func(*args, **named)


def test_libraries_that_import_the_project_can_be_given_this_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "ring_flash_attn", ring_flash_attn)
    scope = {}
    exec("from ring_flash_attn import llama3_flash_attn_varlen_func, substitute_hf_flash_attn", scope)
    assert scope["llama3_flash_attn_varlen_func"] is ring_flash_attn.llama3_flash_attn_varlen_func


def test_later_calls_make_no_context_of_their_own(monkeypatch):
    made = []
    original = am.ContextParallel.__init__
    monkeypatch.setattr(am.ContextParallel, "__init__", lambda *args, **how: made.append(how) or original(*args, **how))

    def rank(comm):
        for function in FUNCTIONS:
            getattr(ring_flash_attn, function)(**arguments(function, comm))
        before = len(made)
        for function in FUNCTIONS:
            getattr(ring_flash_attn, function)(**arguments(function, comm))
        return len(made) - before

    assert am.run_virtual(2, rank) == [0, 0]
    assert {how["schedule"] for how in made} == {"ring", "allgather"}


def over_processes(comm):
    """All scripts on two processes, by the default group and by another, and what each rank hears of a refusal."""
    groups = [None, dist.new_group([0, 1])]
    results = [script(name, world=2).results(comm, groups[i % 2]) for i, name in enumerate(SCRIPTS)]
    given = arguments("ring_flash_attn_func", groups[1]) | {"dropout_p": 0.5 * comm.rank}
    try:
        ring_flash_attn.ring_flash_attn_func(**given)
    except ValueError as error:
        return results, str(error)
    raise AssertionError("nothing was raised")


def test_over_processes():
    ranks = run_processes(2, over_processes)
    for i, function in enumerate(SCRIPTS):
        script(function, world=2).check([results[i] for results, _ in ranks])
    for _, refused in ranks:
        assert "dropout_p must be 0: attention over ranks has no dropout, got 0.5" in refused
