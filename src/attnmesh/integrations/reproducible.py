"""Models whose bits do not depend on how tokens are divided among ranks: everything around attention, and gradients.

A leaf is a fixed number of consecutive positions of one row of the batch, and belongs to one rank as a whole. The
modules of a model that compute every token by itself (linear layers, norms, MLPs, experts, adapters, ...) are called
once per leaf, so that a leaf meets the same operations with the same shapes on whichever rank it is. The last leaf of a
row is padded: a token has its place in products of the same shape in rows of any length, and when it is generated
(`generation.reproducible`). Each call has weights of its own, by which the gradient of every leaf is known; these are
summed in an aligned binary tree (`core.tree`) over positions, rows and data ranks. The loss is summed in the same tree.
The gradient of an embedding is computed from the tokens of all ranks.

What a model computes between these modules must be exact elementwise operations and moves of data: the first call of a
model is audited.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

from attnmesh.comm import Comm
from attnmesh.core.layouts import Aligned
from attnmesh.core.tree import Node, TreeSum, cover, total
from attnmesh.integrations.recurrent_layers import is_recurrent
from attnmesh.integrations.sharded_pass import ShardedPass
from attnmesh.integrations.transformers_models import IGNORED_LABEL, changing_rotary, modules_in_forward
from attnmesh.parallel.context import ContextParallel

LEAF = 256
"""Positions of a leaf if the layout does not say otherwise (`Aligned`)."""

_ROW = 24  # a row has the leaves `row << _ROW` and following
_BUCKET = 1 << 24  # elements of the gradients that ranks exchange at once
_ATTENTION = "attention"
_ALIGNMENT = 64  # bytes, of memory that torch allocates on a CPU

_preparing = threading.Lock()  # virtual ranks may share a model
_running: ContextVar[LeafwisePass | None] = ContextVar("the reproducible pass whose model is running", default=None)
_unit: ContextVar[str | None] = ContextVar("the module that is computing one leaf, or attention", default=None)


class LeafwisePass(Protocol):
    """A pass of a model with `leaves`, which is `Leaves` where it may compute gradients."""

    leaves: Any


@dataclass(frozen=True)
class Leaves:
    """The leaves of every row of a batch, and which of them this rank has."""

    rows: int
    length: int
    size: int
    layout: Aligned
    world: int
    rank: int

    def runs(self, rank: int | None = None) -> list[range]:
        """The numbers in a row of a rank's leaves, in ascending order; of this rank by default."""
        ranges = self.layout.ranges(self.length, self.world, self.rank if rank is None else rank)
        return [range(run.start // self.size, -(-run.stop // self.size)) for run in ranges]

    @cached_property
    def tokens(self) -> list[int]:
        """The number of tokens in each leaf of a row that this rank has."""
        return [min(self.size, self.length - leaf * self.size) for run in self.runs() for leaf in run]

    def computed_rows(self, module: nn.Module) -> Sequence[int]:
        """The rows that a module computes: all of them."""
        return range(self.rows)

    def numbers(self, row: int) -> list[int]:
        """The numbers in the tree of this rank's leaves of a row. Rows of all data ranks are counted."""
        return [(row << _ROW) + leaf for run in self.runs() for leaf in run]

    def nodes(self, first_row: int, rank: int | None = None) -> list[Node]:
        """The nodes of the tree with the leaves of a rank and no others. Beyond the last leaf of a row there are none.

        The first of the rows is number `first_row` of all data ranks.
        """
        count, runs = -(-self.length // self.size), self.runs(rank)
        ranges: list[range] = []
        for row in range(first_row, first_row + self.rows):
            for run in runs:
                start, stop = (row << _ROW) + run.start, (row << _ROW) + run.stop
                if run.stop == count:
                    stop = (row + 1) << _ROW
                if ranges and ranges[-1].stop == start:
                    start = ranges.pop().start
                ranges.append(range(start, stop))
        found = [node for each in ranges for node in cover(each)]
        return [node for node in found if node.level >= _ROW or node.leaves.start % (1 << _ROW) < count]


def aligned(cp: ContextParallel, size: int) -> ContextParallel:
    """The ranks with a layout that is aligned to leaves."""
    return cp if isinstance(cp.layout, Aligned) else cp.with_layout(Aligned(cp.layout, size))


def prepare_pass(attention_pass: ShardedPass) -> None:
    """Make a pass reproducible. Raises ValueError, on all ranks alike, if it cannot be."""
    cp, length, layout = attention_pass.cp, attention_pass.length, attention_pass.cp.layout
    assert isinstance(layout, Aligned)
    empty = [rank for rank in range(cp.world) if not layout.ranges(length, cp.world, rank)]
    if empty:
        raise ValueError(
            f"input_ids must have at least {layout.size} tokens, a leaf, for each of {cp.world} ranks with a "
            f"reproducible ContextParallel, got {length} tokens, of which rank {empty[0]} has none: use fewer ranks, "
            f"ContextParallel(layout=Aligned(Zigzag(), size)) with a size below {layout.size}, or balance=False"
        )
    if not attention_pass.causal:
        raise ValueError("causal must be True with a reproducible ContextParallel, got False: encoders are not served")
    rows = attention_pass.position_ids.shape[0]
    attention_pass.leaves = Leaves(rows, length, layout.size, layout, cp.world, cp.rank)
    attention_pass.around_attention = partial(_attention, attention_pass)


@contextmanager
def _attention(attention_pass: ShardedPass) -> Iterator[None]:
    """Attention is being computed, whose bits `ContextParallel` answers for."""
    if _running.get() is not attention_pass:
        raise ValueError(
            "a model must be prepared for a reproducible ContextParallel: construct "
            "attnmesh.training.data_parallel.GradientReduction(model, cp) once, before the first call"
        )
    if _unit.get() is not None:
        raise ValueError(
            f"modules that attend must have Attention in the names of their types with a reproducible ContextParallel, "
            f"got {_unit.get()}"
        )
    with attending():
        yield


def attending() -> AbstractContextManager[None]:
    """Entered around attention in a pass with leaves."""
    return _computing(_ATTENTION)


@contextmanager
def _computing(unit: str) -> Iterator[None]:
    token = _unit.set(unit)
    try:
        yield
    finally:
        _unit.reset(token)


# One leaf.


class _Leaf(torch.autograd.Function):
    """A weight for one leaf, whose gradient goes to the sum of that weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, sums: TreeSum[Tensor], number: int) -> Tensor:
        ctx.sums, ctx.number = sums, number
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None]:
        if grad is not None:
            # A copy: autograd may use the tensor elsewhere.
            ctx.sums.add(ctx.number, grad.to(torch.float32, copy=True, memory_format=torch.contiguous_format))
        return None, None, None


class _InPlace(torch.autograd.Function):
    """The tensor, and its gradient, as a kernel would find them in memory of their own: contiguous and aligned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        found = _in_place(x)
        return x.view_as(x) if found is x else found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _in_place(grad)


def _in_place(x: Tensor) -> Tensor:
    if x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


class _Begin(torch.autograd.Function):
    """The output of a module. Its backward begins the module's, in the same order on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, begin: Callable[[], None]) -> Tensor:
        ctx.begin = begin
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.begin()
        return grad, None


def _padded(x: Tensor, size: int, dim: int) -> Tensor:
    """A whole leaf: the last token is repeated. Finite inputs give finite results, whose gradients are 0."""
    if x.shape[dim] == size:
        return x
    last = x.detach().narrow(dim, x.shape[dim] - 1, 1)
    return torch.cat([x, *[last] * (size - x.shape[dim])], dim)


def _placed(x: Tensor) -> Tensor:
    found: Tensor = _InPlace.apply(x) if x.requires_grad else _in_place(x)  # type: ignore[no-untyped-call]
    return found


@dataclass(eq=False)
class Call:
    """The gradients of one call of a module."""

    name: str
    leaves: Leaves
    first_row: int
    sums: dict[nn.Parameter, TreeSum[Tensor]]


@dataclass(eq=False)
class EmbeddingCall:
    """The gradient of one call of an embedding."""

    name: str
    leaves: Leaves
    weight: nn.Parameter
    padding_idx: int | None
    ids: Tensor  # [B, n]
    grad: Tensor  # [B, n, D], float32


class LeafwiseModel:
    """A model whose modules compute leaf by leaf in reproducible passes.

    `pending` are the gradients of backward passes, in their order.
    """

    def __init__(self) -> None:
        self.pending: list[Call | EmbeddingCall] = []
        self.first_row: Callable[[int], int] | None = None  # of this data rank, from its number of rows
        self._audited: set[object] = set()

    @contextmanager
    def entered(self, attention_pass: LeafwisePass, training: bool) -> Iterator[None]:
        """The model, or a part of it, is called with this pass."""
        if _running.get() is attention_pass:
            yield
            return
        if torch.compiler.is_compiling():
            raise ValueError("a model must not be compiled with a reproducible ContextParallel")
        kind = training, torch.is_grad_enabled()
        token = _running.set(attention_pass)
        try:
            if kind in self._audited:
                yield
            else:
                with _Audit():  # type: ignore[no-untyped-call]
                    yield
                self._audited.add(kind)
        finally:
            _running.reset(token)

    def begin_backward(self, call: Call) -> None:
        """Note that the backward of a call has begun."""
        if call not in self.pending:
            self.pending.append(call)

    def check_gradients(self, name: str) -> None:
        """Raise ValueError unless gradients can be taken."""
        if self.first_row is None:
            raise ValueError(
                f"{name}: a model that computes gradients with a reproducible ContextParallel must have a "
                f"GradientReduction: construct attnmesh.training.data_parallel.GradientReduction(model, cp) once"
            )


def make_leafwise(model: nn.Module) -> LeafwiseModel:
    """Let the modules of a model compute leaf by leaf in reproducible passes. May be called more than once."""
    with _preparing:
        return _make_leafwise(model)


def _make_leafwise(model: nn.Module) -> LeafwiseModel:
    forwards: list[Any] = [module.forward for module in model.modules()]
    state = next((each.state for each in forwards if isinstance(each, _Forward)), None) or LeafwiseModel()
    mixing = _modules_that_mix(model)
    units: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        _check_served(name, module)
        if module not in mixing:
            continue
        units |= {child: f"{name}.{own}".strip(".") for own, child in module.named_children() if child not in mixing}
        for own, _ in module.named_parameters(recurse=False):
            raise ValueError(
                f"parameters must belong to modules that compute every token by itself with a reproducible "
                f"ContextParallel, got {name}.{own} of a {type(module).__name__}"
            )
    for module, name in units.items():
        if not isinstance(module.forward, _Forward):
            kind = _EmbeddingForward if isinstance(module, nn.Embedding) else _UnitForward
            module.forward = kind(module, name, state)
    for name, module in model.named_modules():
        if module in mixing and not isinstance(module.forward, _Forward):
            if not isinstance(module, nn.ModuleList | nn.ModuleDict):
                module.forward = _OuterForward(module, name, state)
            if hasattr(type(module), "loss_function"):
                module.loss_function = _LeafwiseLoss(module.loss_function, state)
    return state


def _modules_that_mix(model: nn.Module) -> set[nn.Module]:
    """Attention, and every module that has attention or an embedding in it."""
    found: set[nn.Module] = {model}

    def visit(module: nn.Module) -> bool:
        inner = [visit(child) for child in module.children()]
        is_attention = "Attention" in type(module).__name__
        if any(inner) or is_attention:
            found.add(module)
        return any(inner) or is_attention or isinstance(module, nn.Embedding)

    visit(model)
    return found


def _check_served(name: str, module: nn.Module) -> None:
    rotary = changing_rotary(getattr(module, "config", None))
    if rotary is not None:
        raise ValueError(
            f"rope_type {rotary[0]!r} must not be used with a reproducible ContextParallel: the frequencies would "
            f"depend on the positions of a leaf"
        )
    if is_recurrent(type(module)):
        raise ValueError(
            f"layers that mix tokens must be attention with a reproducible ContextParallel, got {name}, a "
            f"{type(module).__name__}, whose sums depend on the number of ranks"
        )


class _Forward:
    """Stands for the forward of a module."""

    def __init__(self, module: nn.Module, name: str, state: LeafwiseModel) -> None:
        self.module, self.name, self.state = module, name, state
        self.__wrapped__ = module.forward  # by which `inspect.signature` finds the arguments
        self.__name__ = "forward"


class _OuterForward(_Forward):
    """A module with attention in it, or attention itself. When it is recomputed, only its arguments tell the pass."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = (kwargs.get("attention_pass"), *(x for x in args if isinstance(x, ShardedPass)))
        attention_pass: Any = next((x for x in given if x is not None), None)
        if getattr(attention_pass, "leaves", None) is None:
            return self.__wrapped__(*args, **kwargs)
        with self.state.entered(attention_pass, self.module.training):
            return self.__wrapped__(*args, **kwargs)


class _UnitForward(_Forward):
    """A module that computes every token by itself: once for each leaf."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attention_pass = _running.get()
        if attention_pass is None or _unit.get() is not None:
            return self.__wrapped__(*args, **kwargs)
        names, values = list(kwargs), [*args, *kwargs.values()]
        leaves = attention_pass.leaves
        dims = {i: self._token_dim(x, leaves) for i, x in enumerate(values) if isinstance(x, Tensor)}
        self._check(values, dims)
        call, weights = self._weights(leaves)
        tokens, dim = leaves.tokens, next(iter(dims.values()))
        parts = {
            i: [_split(row, tokens, d) for row in _split(values[i], [1] * leaves.rows, 0)] for i, d in dims.items()
        }
        outputs: list[list[Any]] = []
        with _computing(self.name):
            for row in leaves.computed_rows(self.module):
                numbers = leaves.numbers((0 if call is None else call.first_row) + row)
                outputs.append([])
                for at, number in enumerate(numbers):
                    given = [
                        _placed(_padded(parts[i][row][at], leaves.size, dims[i])) if i in parts else x
                        for i, x in enumerate(values)
                    ]
                    with _swapped(weights, call, number):
                        out = self.__wrapped__(*given[: len(args)], **dict(zip(names, given[len(args) :], strict=True)))
                    outputs[-1].append(self._checked_output(out, dim, leaves.size, tokens[at]))
        joined = [
            torch.cat([torch.cat([leaf[i] for leaf in row], dim) for row in outputs]) for i in range(len(outputs[0][0]))
        ]
        if call is not None:
            begin = partial(self.state.begin_backward, call)
            joined = [_Begin.apply(x, begin) if x.requires_grad else x for x in joined]  # type: ignore[no-untyped-call]
        return joined[0] if isinstance(out, Tensor) else tuple(joined)

    def _check(self, values: Sequence[Any], dims: Mapping[int, int]) -> None:
        if not dims:
            raise ValueError(
                f"{self.name} must be given tensors with one entry per token with a reproducible ContextParallel, got "
                f"none"
            )
        for value in values:
            inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
            if any(isinstance(x, Tensor) for x in inner):
                raise ValueError(
                    f"{self.name} must be given single tensors with a reproducible ContextParallel, got a "
                    f"{type(value).__name__} of tensors"
                )
        check_experts(self.name, self.module, next(values[i].device for i in dims))
        for module in self.module.modules():
            rate = getattr(module, "p", 0) if isinstance(module, nn.modules.dropout._DropoutNd) else 0
            if rate and module.training:
                raise ValueError(f"dropout must be 0 with a reproducible ContextParallel, got {rate} in {self.name}")
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                raise ValueError(
                    f"modules must compute every token by itself with a reproducible ContextParallel, got a "
                    f"{type(module).__name__} in {self.name}"
                )

    def _token_dim(self, x: Tensor, leaves: Any) -> int:
        """The dimension with one entry per token: 1, or 2 if heads come first."""
        tokens = sum(leaves.tokens)
        found = [dim for dim in (1, 2) if x.dim() > dim + (dim == 2) and x.shape[dim] == tokens]
        if x.dim() < 2 or x.shape[0] != leaves.rows or len(found) != 1:
            several = ", of which several dimensions may be tokens" if len(found) > 1 else ""
            raise ValueError(
                f"{self.name} must be given tensors [{leaves.rows}, {tokens}, ...] or [{leaves.rows}, heads, {tokens}, "
                f"...] with a reproducible ContextParallel, got {list(x.shape)}{several}"
            )
        return found[0]

    def _weights(self, leaves: Any) -> tuple[Call | None, list[tuple[dict[str, Any], str, nn.Parameter]]]:
        """Where the module has weights with gradients, and their sums."""
        if not torch.is_grad_enabled():
            return None, []
        weights = [
            (module._parameters, name, weight)
            for module in self.module.modules()
            for name, weight in module._parameters.items()
            if weight is not None and weight.requires_grad
        ]
        if not weights:
            return None, []
        self.state.check_gradients(self.name)
        assert self.state.first_row is not None
        sums: dict[nn.Parameter, TreeSum[Tensor]] = {weight: TreeSum() for _, _, weight in weights}
        return Call(self.name, leaves, self.state.first_row(leaves.rows), sums), weights

    def _checked_output(self, out: Any, dim: int, size: int, tokens: int) -> list[Tensor]:
        """The outputs for the tokens of a leaf of this size, in the same dimension as the inputs."""
        found = list(out) if isinstance(out, tuple) else [out]
        for x in found:
            if not isinstance(x, Tensor) or x.dim() <= dim or x.shape[0] != 1 or x.shape[dim] != size:
                got = list(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
                raise ValueError(
                    f"{self.name} must return tensors with one entry per token with a reproducible ContextParallel, "
                    f"{size} in dimension {dim}, got {got}"
                )
        whole = [_InPlace.apply(x) if x.requires_grad else x for x in found]  # type: ignore[no-untyped-call]
        return whole if tokens == size else [x.narrow(dim, 0, tokens) for x in whole]


def check_experts(name: str, module: nn.Module, device: torch.device) -> None:
    """Raise ValueError for experts on a GPU: whether their kernels have the same bits in every run was not tested."""
    found = next((each for each, _ in module.named_modules() if "expert" in each.rpartition(".")[2]), None)
    if found is not None and device.type != "cpu":
        raise ValueError(
            f"a mixture of experts must be on a CPU with a reproducible ContextParallel, got {name}.{found} on {device}"
        )


def _split(x: Tensor, sizes: list[int], dim: int) -> Sequence[Tensor]:
    return x.split(sizes, dim) if len(sizes) > 1 else (x,)


@contextmanager
def _swapped(weights: list[tuple[dict[str, Any], str, nn.Parameter]], call: Call | None, number: int) -> Iterator[None]:
    """Give the module the weights of one leaf."""
    if call is None:
        yield
        return
    own: dict[nn.Parameter, Tensor] = {}
    try:
        for parameters, name, weight in weights:
            if weight not in own:
                own[weight] = _Leaf.apply(weight, call.sums[weight], number)  # type: ignore[no-untyped-call]
            parameters[name] = own[weight]
        yield
    finally:
        for parameters, name, weight in weights:
            parameters[name] = weight


class _Rows(torch.autograd.Function):
    """Rows of an embedding [B x n, D], whose gradients are noted."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, ids: Tensor, note: Callable[[Tensor], None]) -> Tensor:
        ctx.note = note
        return F.embedding(ids.flatten(), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.note(grad)
        return None, None, None


class _EmbeddingForward(_Forward):
    """An embedding, whose gradient is a sum over the tokens of all ranks with the same id."""

    _checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        attention_pass, module = _running.get(), self.module
        assert isinstance(module, nn.Embedding)
        weight = cast(nn.Parameter, module.weight)
        if attention_pass is None or not (torch.is_grad_enabled() and weight.requires_grad):
            found: Tensor = self.__wrapped__(*args, **kwargs)
            return found
        leaves = attention_pass.leaves
        self.state.check_gradients(self.name)
        if self.state.pending:
            raise ValueError(
                "GradientReduction.reduce() must be called after every backward with a reproducible ContextParallel, "
                "got a call of the model before it"
            )
        for option in ("max_norm", "sparse", "scale_grad_by_freq"):
            if getattr(module, option):
                raise ValueError(f"{option} of {self.name} must not be set with a reproducible ContextParallel")
        shape = (leaves.rows, sum(leaves.tokens))
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor) or tuple(args[0].shape) != shape:
            given = [list(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in (*args, *kwargs.values())]
            raise ValueError(
                f"{self.name} must be given ids {list(shape)} and nothing else with a reproducible ContextParallel, "
                f"got {given}"
            )
        ids, padding = args[0], module.padding_idx

        def note(grad: Tensor) -> None:
            rows = grad.float().view(*shape, -1)
            self.state.pending.append(EmbeddingCall(self.name, leaves, weight, padding, ids, rows))

        parameters, every = module._parameters, torch.arange(ids.numel(), device=ids.device).view(shape)
        rows = _Rows.apply(weight, ids, note)  # type: ignore[no-untyped-call]
        try:  # the module looks up rows that were looked up already: it may scale them, for instance
            parameters["weight"], module.padding_idx = rows, None
            out: Tensor = self.__wrapped__(every)
        finally:
            parameters["weight"], module.padding_idx = weight, padding
        if not self._checked:
            with torch.no_grad():
                if not torch.equal(self.__wrapped__(ids), out):
                    raise ValueError(
                        f"{self.name} must look up the ids that it is given with a reproducible ContextParallel, got a "
                        f"{type(module).__name__}, which changes them"
                    )
            self._checked = True
        return out


# The loss.


@dataclass(frozen=True)
class LossSums:
    """Sums of the losses of tokens, from which the loss of all ranks is made."""

    nodes: dict[Node, Tensor]
    leaves: Leaves
    first_row: int
    items: Tensor | int


class _LeafwiseLoss:
    """The loss of a causal language model, leaf by leaf."""

    def __init__(self, original: Callable[..., Any], state: LeafwiseModel) -> None:
        self.original, self.state = original, state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attention_pass = _running.get()
        if attention_pass is None:
            return self.original(*args, **kwargs)
        name = getattr(self.original, "__name__", str(self.original))
        labels, items = kwargs.get("shift_labels"), kwargs.get("num_items_in_batch")
        logits = args[0] if args else kwargs.get("logits")
        leaves = attention_pass.leaves
        assert leaves is not None
        shape = (leaves.rows, sum(leaves.tokens))
        if name != "ForCausalLMLoss" or labels is None or items is None or tuple(labels.shape) != shape:
            raise ValueError(
                f"the loss must be ForCausalLMLoss of what shard_inputs returned with a reproducible ContextParallel, "
                f"got {name}"
            )
        if not isinstance(logits, Tensor) or tuple(logits.shape[:2]) != shape:
            raise ValueError(f"logits must be of all tokens, {list(shape)}, for the loss")
        with _computing("the loss"):
            return self._loss(logits, labels, items, leaves)

    def _loss(self, logits: Tensor, labels: Tensor, items: Tensor | int, leaves: Leaves) -> Tensor:
        first_row = 0 if self.state.first_row is None else self.state.first_row(leaves.rows)
        sums: TreeSum[Tensor] = TreeSum()
        parts: list[Tensor] = []
        for row, (row_logits, row_labels) in enumerate(zip(logits.split(1), labels.split(1), strict=True)):
            losses = _split(token_losses(row_logits[0], row_labels[0]), leaves.tokens, 0)
            for number, losses_of_leaf in zip(leaves.numbers(first_row + row), losses, strict=True):
                parts.append(losses_of_leaf.sum())
                sums.add(number, parts[-1].detach().clone())
        loss = torch.stack(parts).sum() / items
        nodes = covered(sums, leaves.nodes(first_row), parts[0].detach())
        loss.attnmesh_sums = LossSums(nodes, leaves, first_row, items)  # type: ignore[attr-defined]
        return loss


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The losses [n] of tokens, from logits [n, vocabulary] and labels [n]; one by one, for the same shapes."""
    wanted = labels.to(logits.device).long().split(1)
    losses = [
        F.nll_loss(scores, label, ignore_index=IGNORED_LABEL, reduction="none")
        for scores, label in zip(token_log_probs(logits), wanted, strict=True)
    ]
    return torch.cat(losses)


def token_log_probs(logits: Tensor) -> list[Tensor]:
    """The log-probabilities [1, vocabulary] of each token, float32, from logits [n, vocabulary]."""
    return [torch.log_softmax(_placed(scores).float(), -1) for scores in logits.split(1)]


# What is computed between modules.

_EXACT = {
    "add", "sub", "rsub", "mul", "div", "neg", "abs", "sqrt", "maximum", "minimum", "clamp", "clamp_min", "clamp_max",
    "where", "relu", "masked_fill", "fill", "zero", "copy", "cat", "stack", "view", "_unsafe_view", "_reshape_alias",
    "reshape", "transpose", "t", "permute", "unsqueeze", "squeeze", "expand", "slice", "select", "split", "unbind",
    "split_with_sizes", "narrow", "alias", "detach", "clone", "_to_copy", "lift_fresh", "embedding", "gather", "flip",
    "index_select", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "zeros", "zeros_like",
    "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full", "arange", "scalar_tensor",
    "floor", "ceil", "round", "trunc", "sign",
}  # fmt: skip
_BROADCASTING = {"add", "sub", "rsub", "mul", "div", "maximum", "minimum", "where", "expand"}


class _Audit(TorchDispatchMode):
    """Raises ValueError for what a model computes outside of its leaves, if bits may depend on the number of tokens.

    Vectors of a CPU end with elements that other code computes, so that silu of an element depends on how many elements
    there are; sums depend on it, too. Operations that are rounded correctly do not.
    """

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of every operation."""
        kwargs = kwargs or {}
        unit = _unit.get()
        if unit != _ATTENTION and torch.Tag.nondeterministic_seeded in function.tags:
            self._refuse(function, "which draws random numbers", unit)
        out = function(*args, **kwargs)
        if unit is None:
            self._check(function, args, out)
        return out

    def _check(self, function: Any, args: Sequence[Any], out: Any) -> None:
        outputs = [x for x in (out if isinstance(out, list | tuple) else [out]) if isinstance(x, Tensor)]
        if not any(x.is_floating_point() for x in outputs):
            return
        name = function._schema.name.split("::")[-1].removesuffix("_")
        if name not in _EXACT:
            self._refuse(function, "whose bits may depend on the number of tokens", None)
        if name in _BROADCASTING:
            for x in args:
                if isinstance(x, Tensor) and x.requires_grad and x.numel() < outputs[0].numel():
                    self._refuse(function, "whose gradient is a sum", None)

    def _refuse(self, function: Any, why: str, unit: str | None) -> None:
        where = unit or next((type(module).__name__ for module in modules_in_forward()), "the model")
        raise ValueError(
            f"with a reproducible ContextParallel a model must compute with modules that treat every token by itself, "
            f"and move and add their results, got {function} in {where}, {why}"
        )


# The sum over ranks.


def covered(sums: TreeSum[Tensor], nodes: Sequence[Node], like: Tensor) -> dict[Node, Tensor]:
    """The sums of these nodes; zero where no leaf has arrived."""
    found = {}
    for node in nodes:
        parts = _within(node, sums.nodes)
        found[node] = total(parts, node) if parts else torch.zeros_like(like, dtype=torch.float32)
    return found


def _within(node: Node, nodes: Mapping[Node, Tensor]) -> dict[Node, Tensor]:
    return {part: x for part, x in nodes.items() if part.leaves.start in node.leaves}


def sum_over_ranks(
    comm: Comm, own: Tensor, nodes: Sequence[Sequence[Node]], wanted: Sequence[Node] | None = None
) -> Tensor:
    """The nodes `wanted` [len(wanted), N], or the whole sum [1, N], on every rank, from the nodes of all ranks.

    `own` [number of nodes, N] are the nodes of this rank. Every rank adds a part of the elements.
    """
    size = own.shape[1]
    sizes = [len(range(rank, size, comm.world)) for rank in range(comm.world)]
    parts = [part.contiguous() for part in own.split(sizes, 1)]
    received = comm.all_to_all(parts, [(len(each), sizes[comm.rank]) for each in nodes])
    found = dict(zip(chain.from_iterable(nodes), chain.from_iterable(received), strict=True))
    if wanted is None:
        sums = [total(found)]
    else:
        sums = [total(_within(node, found), node) for node in wanted]
    return torch.cat(comm.all_gather(torch.stack(sums), [(len(sums), n) for n in sizes]), 1)


class TreeReduction:
    """The sums over ranks of the gradients and the loss of a model, in the tree."""

    def __init__(self, model: nn.Module, cp: ContextParallel, data: Comm) -> None:
        self.cp, self.data = cp, data
        self.model = make_leafwise(model)
        self.model.first_row = lambda rows: data.rank * rows

    def reduce(self) -> None:
        """Add the gradients of the backward passes since the last call to the `grad` of parameters."""
        calls, self.model.pending = self.model.pending, []
        names = zlib.crc32(repr([call.name for call in calls]).encode())
        kinds = sorted({(call.leaves.rows, call.leaves.length, str(call.leaves.layout)) for call in calls})
        self.cp.comm.agree("GradientReduction.reduce", {"checksum of modules": names, "batches": kinds})
        self.data.agree("GradientReduction.reduce", {
            "checksum of modules": names, "rows": [call.leaves.rows for call in calls[:1]]
        })  # fmt: skip
        bucket: list[tuple[Call, nn.Parameter]] = []
        for call in calls:
            if isinstance(call, EmbeddingCall) or (bucket and bucket[0][0].leaves != call.leaves):
                self._reduce_bucket(bucket)
                bucket = []
            if isinstance(call, EmbeddingCall):
                _add_grad(call.weight, self._embedding_grad(call))
                continue
            for weight in call.sums:
                bucket.append((call, weight))
                if sum(each.numel() for _, each in bucket) >= _BUCKET:
                    self._reduce_bucket(bucket)
                    bucket = []
        self._reduce_bucket(bucket)

    def loss(self, sums: LossSums) -> Tensor:
        """The loss of all ranks."""
        own = torch.stack(list(sums.nodes.values())).unsqueeze(1)
        return self._summed(own, sums.leaves, sums.first_row)[0] / sums.items

    def _summed(self, own: Tensor, leaves: Leaves, first_row: int) -> Tensor:
        nodes = [leaves.nodes(first_row, rank) for rank in range(self.cp.world)]
        if self.data.world == 1:
            return sum_over_ranks(self.cp.comm, own, nodes)[0]
        rows = [_rows(rank * leaves.rows, leaves.rows) for rank in range(self.data.world)]
        return sum_over_ranks(self.data, sum_over_ranks(self.cp.comm, own, nodes, rows[self.data.rank]), rows)[0]

    def _reduce_bucket(self, bucket: list[tuple[Call, nn.Parameter]]) -> None:
        if not bucket:
            return
        leaves, first_row = bucket[0][0].leaves, bucket[0][0].first_row
        nodes = leaves.nodes(first_row)
        sums = [covered(call.sums.pop(weight), nodes, weight) for call, weight in bucket]
        own = torch.stack([torch.cat([each[node].flatten() for each in sums]) for node in nodes])
        whole = self._summed(own, leaves, first_row)
        for (_, weight), grad in zip(bucket, whole.split([weight.numel() for _, weight in bucket]), strict=True):
            _add_grad(weight, grad.view(weight.shape))

    def _embedding_grad(self, call: EmbeddingCall) -> Tensor:
        ids, grad = (self._whole(x, call.leaves) for x in (call.ids, call.grad))
        padding = -1 if call.padding_idx is None else call.padding_idx
        summed: Tensor = torch.ops.aten.embedding_dense_backward(grad, ids, call.weight.shape[0], padding, False)
        return summed

    def _whole(self, x: Tensor, leaves: Leaves) -> Tensor:
        """The entries of all tokens of all data ranks [tokens, ...]."""
        layout, more = leaves.layout, x.shape[2:]
        counts = [layout.local_length(leaves.length, leaves.world, rank) for rank in range(leaves.world)]
        x = layout.unshard(self.cp.comm.all_gather(x.contiguous(), [(leaves.rows, n, *more) for n in counts]), 1)
        x = x.flatten(0, 1)
        tokens = self.data.all_gather(torch.tensor([len(x)], device=x.device), [(1,)] * self.data.world)
        return torch.cat(self.data.all_gather(x, [(int(n), *more) for n in tokens]))


def _rows(first: int, count: int) -> list[Node]:
    return cover(range(first << _ROW, (first + count) << _ROW))


def _add_grad(weight: nn.Parameter, grad: Tensor) -> None:
    grad = (grad + 0.0).to(weight.dtype)  # zeros are positive: how many of them were added depends on the ranks
    weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
