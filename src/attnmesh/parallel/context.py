"""`ContextParallel`: exact attention over a sequence that is sharded over ranks."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import OBJECT, Comm, SharedValues, check_on_all_ranks, propagate_failure
from attnmesh.comm.base import Agreement
from attnmesh.core.layouts import Layout, Zigzag, check_layout, dimension, positions_checksum
from attnmesh.core.mask import And
from attnmesh.core.masks import Causal, Mask, check_mask
from attnmesh.core.state import accumulation_dtype
from attnmesh.ops.dense.call import (
    Scores,
    check_batch,
    check_dim_order,
    check_inputs,
    check_score_terms,
    resolve_scores,
    values_in_keys,
)
from attnmesh.ops.dense.dispatch import SMALL_MASKS, choose_fused, with_reproducible
from attnmesh.ops.recurrent.api import check_layer, check_state, use_kernels
from attnmesh.ops.recurrent.layer import RecurrentLayer, check_documents
from attnmesh.parallel.allgather import AllGather
from attnmesh.parallel.compiling import not_compiled
from attnmesh.parallel.executor import (
    BACKENDS,
    AttentionOptions,
    BackendName,
    Executor,
    ExecutorConfig,
    ExecutorFactory,
    Inputs,
    attend,
    score_checks,
    unshard,
)
from attnmesh.parallel.node_groups import node_groups
from attnmesh.parallel.operator import compiled_attention, context_handle
from attnmesh.parallel.recurrent import RecurrentCall, run_recurrent
from attnmesh.parallel.reproducible import (
    ReproducibleAllGather,
    ReproducibleUlysses,
    ReproducibleUlyssesAllGather,
)
from attnmesh.parallel.ring import Ring
from attnmesh.parallel.two_level import TwoLevelRing
from attnmesh.parallel.ulysses import Ulysses, UlyssesAllGather, UlyssesRing
from attnmesh.plan.recurrent import runs
from attnmesh.plan.shards import REPRODUCIBLE, SCHEDULES, ScheduleName, Shape, Workload, check_schedule, shards
from attnmesh.utils.log import log_choice, wants_choices
from attnmesh.utils.text import explained_in, see
from attnmesh.utils.validation import check_bool, check_choice, check_count, check_device, check_dtype

if TYPE_CHECKING:  # the planner is imported for schedule="auto" and explain only
    from attnmesh.planner.auto import Choice, Explanation
    from attnmesh.planner.recurrent import RecurrentExplanation

EXECUTORS: dict[str, Callable[[ExecutorConfig], Executor]] = {
    "ring": Ring.build,
    "allgather": AllGather.build,
    "ulysses": Ulysses.build,
    "ulysses+ring": UlyssesRing.build,
    "ulysses+allgather": UlyssesAllGather.build,
    "ring+ring": TwoLevelRing.build,
}
"""The executor of each of `plan.schedules.SCHEDULES`."""

_REPRODUCIBLE: dict[str, Callable[[ExecutorConfig], Executor]] = {
    "allgather": ReproducibleAllGather.build,
    "ulysses": ReproducibleUlysses.build,
    "ulysses+allgather": ReproducibleUlyssesAllGather.build,
}
"""With reproducible=True, the executor of each of `plan.schedules.REPRODUCIBLE`."""

_LOG = logging.getLogger(__name__)
_MAX_CACHED_CALLS = 512


@dataclass(frozen=True)
class _PreparedCall:
    """A call whose arguments have been checked: its executor, and the values to agree on with other ranks."""

    executor: Executor
    values: SharedValues
    scores: Scores  # without slopes, which have values of their own
    agreements: Sequence[Agreement]  # of repeated calls


class ContextParallel(ExecutorFactory):
    """Attention over a sequence whose positions are distributed over ranks by a layout.

    `group` is a ProcessGroup, a DeviceMesh, a comm, or None for the default process group (a single rank without
    torch.distributed). All its ranks share a sequence: of a mesh with a data-parallel dimension, pass `mesh["cp"]`. A
    mesh of two dimensions is (nodes, ranks per node), without names or with names that say so, such as ("node", "cp");
    names of another parallelism (dp, fsdp, tp, pp, ep, ...) raise ValueError. For other groups, pass `ranks_per_node`:
    rank `node x ranks_per_node + i` is the i-th rank of its node.

    All ranks make the same objects, and the same calls on them, in the same order with the same arguments. Ranks
    compare their arguments before the first call of a kind on an object; a difference raises ValueError on every rank.

    `schedule` is one of:

        ring               K and V of each rank travel once around all ranks
        allgather          each rank gathers the K and V it needs, a few kv heads at a time
        ulysses            an all-to-all gives each rank all rows of some heads
        ulysses+ring       ulysses within a node, ring between nodes
        ulysses+allgather  ulysses within a node, all-gather between nodes
        ring+ring          a ring within every node, and a ring between nodes
        auto               the fastest by an estimate from bytes and operations; see `explain`

    `backend` is as in `attention`. With `reproducible` the bits of out, lse and all gradients equal
    `attention(..., reproducible=True)` on the same kind of device, for any number of ranks, layout and schedule; see
    `docs/reproducibility.md`. The schedules are then "allgather", "ulysses" and "ulysses+allgather".

    Examples:
        >>> q, k, v = torch.randn(3, 1, 2, 101, 16)
        >>> def rank(comm):
        ...     cp = am.ContextParallel(comm, layout=am.Striped(), schedule="allgather")
        ...     out = cp.attention(*(cp.shard(x, dim=2) for x in (q, k, v)), length=101)  # causal by default
        ...     return cp.unshard(out, dim=2, length=101)
        >>> whole = am.attention(q, k, v, mask=am.Causal())
        >>> [torch.allclose(out, whole, atol=1e-5) for out in am.run_virtual(3, rank)]
        [True, True, True]
    """

    @not_compiled("a ContextParallel is constructed outside of a compiled graph")
    def __init__(
        self,
        group: Comm | ProcessGroup | DeviceMesh | None = None,
        *,
        layout: Layout = Zigzag(),  # noqa: B008  (immutable)
        schedule: ScheduleName = "auto",
        backend: BackendName = "auto",
        ranks_per_node: int | None = None,
        reproducible: bool = False,
    ) -> None:
        self._groups = node_groups(group, ranks_per_node)
        self._number = self._new_number()  # before an error that only this rank may raise
        check_layout("layout", layout)
        _check_names(schedule, backend, reproducible)
        self.reproducible = reproducible
        self.comm = self._groups.all_ranks
        self.layout, self.schedule, self.backend = layout, schedule, backend
        self._score_checks = score_checks(self.comm)
        self._calls: dict[object, _PreparedCall] = {}
        self._repeated: dict[object, tuple[_PreparedCall, Mask, Layout | None]] = {}
        self._kept_choices: dict[object, str] = {}  # of contexts by `with_layout`
        self._keeps_choices = False
        self._handle = context_handle(self)  # by which compiled graphs refer to it

    def _new_number(self) -> int:
        return self._groups.number("ContextParallel")

    def __deepcopy__(self, memo: object) -> ContextParallel:
        return self  # groups of ranks have no copies: a copied model is one of the same ranks

    @property
    def rank(self) -> int:
        """This rank."""
        return self.comm.rank

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.comm.world

    def with_layout(self, layout: Layout) -> ContextParallel:
        """The same ranks, schedule and backend with another layout. Nothing is sent and no group is created.

        It is meant for a batch with a layout of its own: schedule "auto" is chosen for the first such batch, and kept
        for later ones of about the same length with other documents. Between ranks it counts as the same object.
        """
        check_layout("layout", layout)
        other = copy.copy(self)
        other.layout, other._calls, other._repeated, other._keeps_choices = layout, {}, {}, True
        other._handle = context_handle(other)
        return other

    def positions(self, length: int) -> Tensor:
        """The global positions of this rank's tokens, in local order, as rotary embeddings need them."""
        return self.layout.positions(length, self.world, self.rank)

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's shard of a whole tensor along `dim`."""
        return self.layout.shard(x, dim, self.world, self.rank)

    def unshard(self, x: Tensor, dim: int, length: int) -> Tensor:
        """The whole tensor, on every rank, from the shards of all ranks. Gradients are summed over ranks."""

        def check_arguments() -> tuple[int, SharedValues]:
            at = dimension(x, dim)
            self._check_shard(x.shape[at], length)
            return at, {
                OBJECT: self._number, "dim": at, "length": length,
                "other dimensions": [n for i, n in enumerate(x.shape) if i != at],
                "dtype": x.dtype, "device": x.device.type, "layout": self.layout,
                "positions of layout": positions_checksum(self.layout, length, self.world),
                "gradients": torch.is_grad_enabled() and x.requires_grad,
            }  # fmt: skip

        at = check_on_all_ranks(self._groups, "ContextParallel.unshard", check_arguments)
        return unshard(x, at, length, self.layout, self.comm)

    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = ..., scale: float | None = ...,
        softcap: float | None = ..., sinks: Tensor | None = ..., alibi_slopes: Tensor | None = ...,
        length: int | None = ..., key_length: int | None = ..., key_layout: Layout | None = ...,
        return_lse: Literal[False] = ...,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = ..., scale: float | None = ...,
        softcap: float | None = ..., sinks: Tensor | None = ..., alibi_slopes: Tensor | None = ...,
        length: int | None = ..., key_length: int | None = ..., key_layout: Layout | None = ...,
        return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask = Causal(),  # noqa: B008  (immutable)
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        length: int | None = None,
        key_length: int | None = None,
        key_layout: Layout | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of this rank's queries over the keys of all ranks.

        q [B,Hq,n,D], k [B,Hkv,m,D] and v [B,Hkv,m,Dv] are this rank's shards, heads before positions as in
        `scaled_dot_product_attention` (not [B,n,Hq,D] as in FlashAttention), with kv heads unexpanded. `length` is the
        length of the whole sequence; without it, every rank must hold equally many positions. Keys of another sequence
        (cross attention) have their own `key_length`, and `key_layout` if it differs; positions start at 0 in both.
        Returns out [B,Hq,n,Dv], and with `return_lse` the float32 lse [B,Hq,n]; both are differentiable.

        `softcap`, `sinks` [Hq] and `alibi_slopes` [Hq] are as in `attention`. They are replicated: every rank passes
        the same values. Ranks compare a checksum of them, on a CPU in every call, on a GPU in the first 128 calls of
        the group and then in every 251st; a difference raises ValueError on every rank. The gradient of `sinks` on a
        rank is the contribution of its queries, as for any replicated weight: the sum over ranks is the whole gradient.
        """
        grad = torch.is_grad_enabled()
        if torch.compiler.is_compiling():
            needs_grad = tuple(grad and isinstance(x, Tensor) and x.requires_grad for x in (q, k, v, sinks))
            options = AttentionOptions(mask, scale, softcap, length, key_length, key_layout, return_lse, needs_grad)
            out, lse = compiled_attention(Inputs(q, k, v, sinks, alibi_slopes), self._handle, options)
            return (out, lse) if return_lse else out
        # A repeated call is known by the identity of its mask and layout, which are kept: nothing else can have it.
        # Small masks, which programs construct anew for every call, are compared by value.
        # With the types, since True == 1 == 1.0: what is valid as an integer must not make another type valid.
        key: object
        try:
            key = (
                type(q), q.shape, q.dtype, q.device, grad and q.requires_grad,
                type(k), k.shape, k.dtype, k.device, grad and k.requires_grad,
                type(v), v.shape, v.dtype, v.device, grad and v.requires_grad,
                k.ndim == 4 and k.shape[3] > 256 and values_in_keys(k, v),
                None if sinks is None else (_kind(sinks), grad), None if alibi_slopes is None else _kind(alibi_slopes),
                mask if type(mask) in SMALL_MASKS else id(mask), id(key_layout),
                scale, type(scale), softcap, type(softcap), length, type(length),
                key_length, type(key_length), return_lse, type(return_lse),
            )  # fmt: skip
            repeated = self._repeated.get(key)
        except (AttributeError, TypeError):  # not a tensor, or not hashable: reported on all ranks together
            key = repeated = None
        if repeated is not None:
            call = repeated[0]
            if sinks is None and alibi_slopes is None:
                for agreement in call.agreements:
                    agreement.begin()
            else:
                self._begin_with_terms(call, sinks, alibi_slopes)
        else:
            tensors = Inputs(q, k, v, sinks, alibi_slopes)
            needs_grad = tuple(grad and isinstance(x, Tensor) and x.requires_grad for x in tensors[:4])
            options = AttentionOptions(mask, scale, softcap, length, key_length, key_layout, return_lse, needs_grad)
            call = self._agreed_call(tensors, options, "ContextParallel.attention")
            if key is not None:
                if len(self._repeated) >= _MAX_CACHED_CALLS:
                    self._repeated.clear()
                self._repeated[key] = call, mask, key_layout
        scores = call.scores if alibi_slopes is None else resolve_scores(q, scale, softcap, alibi_slopes)
        out, lse = attend(q, k, v, call.executor, scores, sinks)
        return (out, lse) if return_lse else out

    @overload
    def recurrent(
        self, layer: RecurrentLayer, *, length: int | None = ..., documents: Mask | None = ...,
        initial_state: Tensor | None = ..., return_final_state: Literal[False] = ...,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def recurrent(
        self, layer: RecurrentLayer, *, length: int | None = ..., documents: Mask | None = ...,
        initial_state: Tensor | None = ..., return_final_state: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
    @not_compiled("ContextParallel.recurrent runs outside of a compiled graph")
    def recurrent(
        self,
        layer: RecurrentLayer,
        *,
        length: int | None = None,
        documents: Mask | None = None,
        initial_state: Tensor | None = None,
        return_final_state: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`attnmesh.recurrent.scan` over the positions of all ranks: this rank's outputs, and the final state.

        `layer` holds this rank's shards of the inputs along dim 2, and weights (`A`, `D`, `g` of lightning attention,
        `weight`, `bias`), which are replicated; `length` and `documents` are of the whole sequence. Without `length`,
        every rank must hold equally many positions. The layout must give ranks ranges of consecutive positions
        (`Contiguous`, `Zigzag`, `Balanced`). `schedule` and `backend` of the ContextParallel are of attention only.

        `initial_state` and the final state are replicated: every rank passes, and gets, the same. The gradient of the
        final state is the sum over ranks. As for weights, the gradient of `initial_state` on a rank is a contribution:
        the sum over ranks is the whole gradient.
        """

        def check_arguments() -> tuple[RecurrentCall, SharedValues]:
            check_layer(layer)
            sizes = layer._check()
            inferred = "" if length is not None else " (positions per rank x world; pass length= if they differ)"
            whole = sizes.length * self.world if length is None else length
            self._check_shard(sizes.length, whole)
            runs(self.layout, whole, self.world)
            masks = check_documents(documents, sizes.batch, whole)
            check_state(layer, initial_state)
            check_bool(return_final_state=return_final_state)
            tensors = layer._tensors()
            grads = [
                name for name, x in {**tensors, "initial_state": initial_state}.items()
                if torch.is_grad_enabled() and x is not None and x.requires_grad
            ]  # fmt: skip
            values: Tensor = tensors[layer._OUTPUT]
            call = RecurrentCall(layer, whole, masks, return_final_state, values.dtype, bool(grads), use_kernels(layer))
            return call, {
                OBJECT: self._number, "layer": type(layer).__name__, "batch": sizes.batch, "heads": sizes.heads,
                "groups": sizes.groups, "key_dim": sizes.key_dim, "value_dim": sizes.value_dim,
                f"length{inferred}": whole, "dtype": values.dtype, "dtype of states": layer.compute_dtype,
                "device": values.device.type, **layer._options(), "documents": documents,
                "initial_state": initial_state is not None, "return_final_state": return_final_state,
                "layout": self.layout, "positions of layout": positions_checksum(self.layout, whole, self.world),
                "gradients": grads,
            }  # fmt: skip

        call = check_on_all_ranks(self._groups, "ContextParallel.recurrent", check_arguments)
        with propagate_failure(self._groups):
            out, final = run_recurrent(call, initial_state, self.layout, self.comm)
        return (out, final) if return_final_state else out

    def agreed_executor(self, inputs: Inputs, options: AttentionOptions) -> Executor:
        """The executor of a call in a compiled graph, after all ranks have agreed on its arguments."""
        # A compiled backward sends other messages than an eager one.
        return self._agreed_call(inputs, options, "ContextParallel.attention in a compiled graph").executor

    def _agreed_call(self, inputs: Inputs, options: AttentionOptions, operation: str) -> _PreparedCall:
        """A call, after all ranks have agreed on its arguments."""

        def check_arguments() -> tuple[_PreparedCall, SharedValues]:
            call = self._checked_call(inputs, options)
            terms = self._compared_terms(inputs.sinks, inputs.alibi_slopes)
            return call, call.values | terms

        call = check_on_all_ranks(self._groups, operation, check_arguments)
        if inputs.sinks is not None or inputs.alibi_slopes is not None:
            self._score_checks.count()
        return call

    def _begin_with_terms(self, call: _PreparedCall, sinks: Tensor | None, alibi_slopes: Tensor | None) -> None:
        """Begin a call that all ranks have agreed on before: values of sinks and slopes are compared again."""
        terms = self._compared_terms(sinks, alibi_slopes)
        if terms:
            self._groups.agree("ContextParallel.attention", call.values | terms)
        else:
            for agreement in call.agreements:
                agreement.begin()
        self._score_checks.count()

    def _compared_terms(self, sinks: Tensor | None, alibi_slopes: Tensor | None) -> dict[str, object]:
        """The checksums of sinks and slopes that ranks compare in this call."""
        return {} if self.world == 1 else self._score_checks.compared(sinks=sinks, alibi_slopes=alibi_slopes)

    def executor(self, inputs: Inputs, options: AttentionOptions) -> Executor:
        """The executor of a call whose arguments the ranks have agreed on before."""
        return self._checked_call(inputs, options).executor

    def explain(
        self,
        *,
        length: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        batch: int = 1,
        mask: Mask = Causal(),  # noqa: B008  (immutable)
        dtype: torch.dtype = torch.bfloat16,
        key_length: int | None = None,
        key_layout: Layout | None = None,
        device: torch.device | str = "cuda",
    ) -> Explanation:
        """The plan of such a call: the work, operations and bytes of each rank, and the reason for the schedule.

        Nothing is computed or sent. Print the result. `value_dim` is the width of v if it differs from `head_dim`, that
        of q and k. `device` is the type of device to choose the schedule for.
        """
        from attnmesh.planner.auto import explain_schedule
        from attnmesh.planner.catalog import default_cluster

        _check_lengths(mask, length, key_length)
        if key_layout is not None:
            check_layout("key_layout", key_layout)
        kind = check_device("device", device).type
        value_dim = head_dim if value_dim is None else value_dim
        _check_shape(batch, q_heads, kv_heads, head_dim, value_dim, dtype)
        shape = _shape(batch, q_heads, kv_heads, head_dim, value_dim, dtype)
        positions = shards(mask, self.layout, length, self.world, key_layout, key_length)
        workload = Workload(
            positions, shape, self._groups.ranks_per_node, device=kind, reproducible=self.reproducible
        )  # fmt: skip
        choice = self._auto_choice(workload)
        schedule = self.schedule if choice is None else choice.schedule
        check_schedule(schedule, workload.shards, workload.ranks_per_node, reproducible=self.reproducible)
        return explain_schedule(schedule, workload, default_cluster(kind), choice)

    def explain_recurrent(
        self,
        layer: RecurrentLayer,
        *,
        length: int,
        return_final_state: bool = False,
        device: torch.device | str = "cuda",
    ) -> RecurrentExplanation:
        """The plan of `recurrent` for such a layer: the work, bytes and memory of each rank, exchanges and kernel.

        Nothing is computed or sent. Print the result. Only the sizes of the inputs count, not their positions, and
        tensors on the device "meta" take no memory. `device` is the type of device to estimate times for.

        Examples:
            >>> q, k, v = torch.empty(3, 1, 16, 1, 128, dtype=torch.bfloat16, device="meta")
            >>> g, beta = torch.empty(2, 1, 16, 1, dtype=torch.bfloat16, device="meta")
            >>> layer = am.recurrent.GatedDeltaRule(q, k, v, g, beta)
            >>> def rank(comm):
            ...     return am.ContextParallel(comm).explain_recurrent(layer, length=65536)
            >>> plan = am.run_virtual(4, rank)[0]
            >>> plan.rounds, [load.sent for load in plan.forward]
            (2, [2097152, 4194304, 4194304, 2883584])
        """
        from attnmesh.planner.catalog import default_cluster
        from attnmesh.planner.recurrent import RecurrentShape, RecurrentWorkload, explain_recurrent

        check_layer(layer)
        layer._check()
        check_count("length", length)
        check_bool(return_final_state=return_final_state)
        kind = check_device("device", device).type
        runs(self.layout, length, self.world)
        why, on = layer._why_no_kernels(), getattr(layer, layer._OUTPUT).device.type
        kernels = why is None and (kind if on == "meta" else on) == "cuda"
        kernel = "GPU kernels" if kernels else "chunks in PyTorch" + ("" if why is None else f" ({why})")
        workload = RecurrentWorkload(
            RecurrentShape.of(layer), length, self.world, self._groups.ranks_per_node, self.layout, return_final_state
        )
        return explain_recurrent(workload, kernel, default_cluster(kind))

    def _checked_call(self, inputs: Inputs, options: AttentionOptions) -> _PreparedCall:
        """The prepared call; ValueError for arguments that this rank can see to be wrong."""
        tensors = [isinstance(x, Tensor) or (x is None and at >= 3) for at, x in enumerate(inputs)]
        if not all(tensors) or getattr(inputs.alibi_slopes, "requires_grad", False):
            return self._new_call(inputs, options)  # raises
        # With the types, since True == 1 == 1.0: what is valid as an integer must not make another type valid.
        key = *map(_described, inputs), values_in_keys(inputs.k, inputs.v), options, *map(type, options)
        try:
            call = self._calls.get(key)
        except TypeError:  # an option is not hashable, and so not of its type
            call = None
        if call is None:
            call = self._new_call(inputs, options)
            if len(self._calls) >= _MAX_CACHED_CALLS:
                _LOG.warning("calls of more than %d signatures: all are planned anew", _MAX_CACHED_CALLS)
                self._calls.clear()
            self._calls[key] = call
        return call

    def _new_call(self, inputs: Inputs, options: AttentionOptions) -> _PreparedCall:
        q, k, v, sinks, alibi_slopes = inputs
        mask, scale, softcap, length, key_length, key_layout, return_lse, needs_grad = options
        check_inputs(q, k, v, scale)
        check_score_terms(q, softcap, sinks, alibi_slopes)
        check_bool(return_lse=return_lse)
        if key_layout is not None:
            check_layout("key_layout", key_layout)
        inferred = "" if length is not None else " (positions per rank x world; pass length= if they differ)"
        if length is None and key_length is None:
            check_dim_order(q, k, q.shape[2] * self.world, k.shape[2] * self.world)
        length = q.shape[2] * self.world if length is None else length
        _check_lengths(mask, length, key_length)
        check_batch(mask, q)
        self._check_shard(q.shape[2], length)
        key_length, key_layout = length if key_length is None else key_length, key_layout or self.layout
        self._check_shard(k.shape[2], key_length, key_layout, "keys")
        shape = _shape(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype)
        scores = options.scores(inputs)
        with_lse = return_lse or needs_grad[3]  # the gradient of sinks needs it where the queries are

        positions = shards(mask, self.layout, length, self.world, key_layout, key_length)
        ranks_per_node, device = self._groups.ranks_per_node, q.device.type
        workload = Workload(positions, shape, ranks_per_node, with_lse, device, self.reproducible)
        schedule = self._schedule_for(workload, mask, length)
        check_schedule(schedule, positions, ranks_per_node, reproducible=self.reproducible)
        executors = _REPRODUCIBLE if self.reproducible else EXECUTORS
        backend = with_reproducible(self.backend, self.reproducible)
        config = ExecutorConfig(positions, backend, self._groups, with_lse, shape.key_row, device)
        executor = executors[schedule](config)
        for kernel_call in executor.calls(q, k, v, scores):
            choose_fused(kernel_call, backend)  # raises if no backend serves it
        values = {
            OBJECT: self._number, "batch": shape.batch, "query heads": shape.q_heads, "kv heads": shape.kv_heads,
            "head_dim": shape.head_dim, "head_dim of v": shape.out_dim,
            # Each rank selects the kernel for all blocks by its own tensors.
            "v is a view of k": values_in_keys(k, v),
            f"length{inferred}": length, "key_length": key_length,
            "dtype": q.dtype, "device": q.device.type, "mask": mask, "scale": scores.scale, "softcap": softcap,
            "sinks": None if sinks is None else sinks.dtype, "alibi_slopes": alibi_slopes is not None,
            "layout": self.layout, "key_layout": key_layout,
            "positions of layout": positions_checksum(self.layout, length, self.world),
            "positions of key_layout": positions_checksum(key_layout, key_length, self.world),
            "schedule": schedule, "backend": self.backend, "reproducible": self.reproducible,
            "ranks_per_node": self._groups.ranks_per_node, "return_lse": return_lse,
            "gradient of q": needs_grad[0], "gradient of k": needs_grad[1], "gradient of v": needs_grad[2],
            "gradient of sinks": needs_grad[3],
        }  # fmt: skip
        agreements = self._groups.agreement("ContextParallel.attention", values) if self.world > 1 else []
        return _PreparedCall(executor, values, replace(scores, alibi_slopes=None), agreements)

    def _schedule_for(self, workload: Workload, mask: Mask, length: int) -> str:
        """The name of the schedule of a call."""
        if self.schedule != "auto":
            return self.schedule
        key = None
        if self._keeps_choices:
            parts = mask.parts if isinstance(mask, And) else (mask,)
            layer = frozenset(part for part in parts if part.length is None)  # without the documents
            key = workload.shape, workload.lse, workload.device, length.bit_length(), layer
            if key in self._kept_choices:
                return self._kept_choices[key]
        choice = self._auto_choice(workload)
        assert choice is not None
        if wants_choices(_LOG):
            log_choice(_LOG, "%s under %s, %s tokens over %s ranks: %s", mask, self.layout, length, self.world, choice)
        if key is not None:
            self._kept_choices[key] = choice.schedule
        return choice.schedule

    def _auto_choice(self, workload: Workload) -> Choice | None:
        """The planner's choice for schedule="auto"; None for a schedule that is given by name."""
        if self.schedule != "auto":
            return None
        from attnmesh.planner.auto import choose_schedule
        from attnmesh.planner.catalog import default_cluster

        return choose_schedule(workload, default_cluster(workload.device))

    def _check_shard(self, rows: int, length: int, layout: Layout | None = None, what: str = "positions") -> None:
        layout = layout or self.layout
        name = "length" if what == "positions" else "key_length"
        expected = layout.local_length(length, self.world, self.rank)
        if rows != expected:
            raise ValueError(
                f"with {name}={length} under {layout} rank {self.rank} of {self.world} holds {expected} of {length} "
                f"{what}, but its shard has {rows}{see('context-parallelism.md#shard-a-sequence')}"
            )


class UnnumberedContext(ContextParallel):
    """One that is made for a step or a call: all with equal arguments count as the same object between ranks.

    Ranks may make them at different times, and the calls of a new one are not compared anew.
    """

    def _new_number(self) -> int:
        return 0


@explained_in("context-parallelism.md#select-a-schedule")
def _check_names(schedule: str, backend: str, reproducible: bool) -> None:
    check_choice("schedule", schedule, ("auto", *SCHEDULES))
    check_choice("backend", backend, BACKENDS)
    with_reproducible(backend, reproducible)
    if reproducible and schedule not in ("auto", *REPRODUCIBLE):
        raise ValueError(
            f'schedule must be "auto" or one of {", ".join(REPRODUCIBLE)} with reproducible=True, got {schedule!r}: a '
            "ring brings keys in an order that depends on the ranks"
        )


def _kind(x: Tensor) -> tuple[object, ...]:
    return type(x), x.shape, x.dtype, x.device, x.requires_grad


def _described(x: Tensor | None) -> tuple[object, ...] | None:
    return None if x is None else (x.shape, x.dtype, x.device)


def _check_lengths(mask: Mask, length: int, key_length: int | None) -> None:
    check_mask("mask", mask)
    check_count("length", length)
    check_count("key_length", length if key_length is None else key_length)
    mask.check(length if key_length is None else key_length)


def _check_shape(batch: int, q_heads: int, kv_heads: int, head_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    sizes = {
        "batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim
    }  # fmt: skip
    for name, n in sizes.items():
        check_count(name, n, least=1)
    if q_heads % kv_heads:
        raise ValueError(f"q_heads must be a multiple of kv_heads, got {q_heads} and {kv_heads}")
    check_dtype("dtype", dtype)


def _shape(batch: int, q_heads: int, kv_heads: int, head_dim: int, value_dim: int, dtype: torch.dtype) -> Shape:
    return Shape(batch, q_heads, kv_heads, head_dim, dtype.itemsize, accumulation_dtype(dtype).itemsize, value_dim)
