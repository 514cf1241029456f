"""The context-parallel ranks of an `Accelerator`: models that attend over them, and batches that are sharded over them.

A batch is sharded in one of two ways. A trainer knows the names of its tensors (`shard_batch`). In a loop of the user,
`accelerator.maybe_context_parallel(buffers=...)` shards tensors in place, and which of them are position_ids or labels
shows when the model is called (`shard_buffers`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnmesh.comm import SharedValues, check_on_all_ranks
from attnmesh.core.layouts import dimension
from attnmesh.core.packing import IGNORED_LABEL
from attnmesh.integrations.expert_balance import check_balance, whole_balance
from attnmesh.integrations.model_calls import checked_calls
from attnmesh.integrations.sharded_batch import ShardedMask, ShardedPass, Unreadable, batch_checks, shard_inputs
from attnmesh.integrations.transformers_attention import register_attention
from attnmesh.integrations.transformers_models import NAME, check_model
from attnmesh.parallel.checksums import ValueChecks
from attnmesh.parallel.context import ContextParallel
from attnmesh.utils.error_links import see
from attnmesh.utils.optional import require
from attnmesh.utils.validation import shown

_ATTRIBUTE = "_attnmesh_ranks"  # of an Accelerator and of a prepared model

# Packed rows as attention kernels of one device take them: position_ids contain the same.
_DERIVED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def ranks_of(accelerator: Any, options: Mapping[str, Any]) -> AcceleratorRanks:
    """The context-parallel ranks of an accelerator, created by the first call."""
    ranks: AcceleratorRanks | None = getattr(accelerator, _ATTRIBUTE, None)
    if ranks is None:
        ranks = AcceleratorRanks(accelerator, options)
        setattr(accelerator, _ATTRIBUTE, ranks)
    return ranks


def is_sharding(accelerator: Any) -> bool:
    """Whether the accelerator is inside a context in which batches are sharded."""
    ranks = getattr(accelerator, _ATTRIBUTE, None)
    return ranks is not None and ranks.is_sharding


class ShiftedLabelsError(ValueError, AttributeError):
    """An AttributeError, too, so that `hasattr` works."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"a compute_loss of one's own must read inputs['shift_labels'] under context parallelism, got one that "
            f"reads inputs['labels'] ({name}): labels are those of this rank and already shifted, and the loss must be "
            f"a sum over them divided by num_items_in_batch{see('training.md#accelerate-trainer-and-trl')}"
        )


class ShiftedLabels(Unreadable):
    """What a compute_loss of the user's is given as labels: the model reads them, and loss functions must not."""

    error = ShiftedLabelsError

    def __init__(self, labels: Tensor) -> None:
        self.tensor = labels


class _NoRanks:
    """What a pickled model has instead of `AcceleratorRanks`."""

    def _add_pass(self, *_: object) -> None:
        """The arguments stay as they are."""


class AcceleratorRanks:
    """The ranks of the mesh dimension "cp" of an accelerator.

    `options` are the arguments of `ContextParallel`.
    """

    def __init__(self, accelerator: Any, options: Mapping[str, Any]) -> None:
        mesh = accelerator.torch_device_mesh
        names = () if mesh is None else mesh.mesh_dim_names or ()
        if "cp" not in names:
            raise ValueError(f"the device mesh of the accelerator must have a dimension 'cp', got dimensions {names}")
        if accelerator.parallelism_config.tp_enabled:
            raise ValueError(
                f"tp_size must be 1 with attnmesh's context parallelism, got {accelerator.parallelism_config.tp_size}"
            )
        self.cp = ContextParallel(mesh["cp"], **options)
        self._unwrap: Callable[[nn.Module], nn.Module] = accelerator.unwrap_model
        self._models: list[nn.Module] = []
        self._mesh: ShardedPass | None = None  # of the batch in `sharded`, or of the latest call in `shard_buffers`
        self._buffers: _Buffers | None = None  # in `shard_buffers`
        self.latest: ShardedPass | None = None
        """The pass of the latest `shard_batch`."""

    @property
    def is_sharding(self) -> bool:
        """Whether a batch is sharded at the moment."""
        return self._mesh is not None or self._buffers is not None

    def __deepcopy__(self, memo: object) -> AcceleratorRanks:
        return self  # a copy of a prepared model attends over the same ranks

    def __reduce__(self) -> tuple[type[_NoRanks], tuple[()]]:
        return _NoRanks, ()  # a prepared model that is pickled is one of a single process

    # Models.

    def prepare(self, module: nn.Module) -> None:
        """Let a model of Transformers (or of PEFT around one) attend over the ranks. May be called again."""
        model: Any = _base_model(self._unwrap(module))
        if getattr(model, _ATTRIBUTE, None) is self:
            return

        def check() -> tuple[None, SharedValues]:
            adapter = getattr(self._unwrap(module), "active_peft_config", None)
            if getattr(adapter, "is_prompt_learning", False):
                raise ValueError(
                    f"the PEFT method must not add tokens to the sequence under context parallelism, got "
                    f"{type(adapter).__name__}"
                )
            register_attention()
            if hasattr(model, "set_attn_implementation"):
                model.set_attn_implementation(NAME)
            check_model(model)
            _check_loss(model)
            check_balance(model)
            return None, {"model": type(model).__name__}

        check_on_all_ranks(self.cp.comm, "Accelerator.prepare", check, force=True)
        names = list(inspect.signature(type(model).forward).parameters)[1:]
        model.register_forward_pre_hook(partial(self._add_pass, names), with_kwargs=True)
        setattr(model, _ATTRIBUTE, self)
        self._models.append(model)

    def _add_pass(
        self, names: list[str], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments of a prepared model with the keyword argument `mesh`; None if they stay as they are.

        `names` are those of positional arguments.
        """
        mesh: ShardedPass | None = kwargs.get("mesh")
        buffers = self._buffers if mesh is None else None
        mesh = mesh or self._mesh
        if mesh is None and buffers is None:
            self._check_whole(model)
            return None
        given = with_labels({**dict(zip(names, args, strict=False)), **kwargs})
        if buffers is not None:
            given = buffers.arguments(self.cp, given)
            mesh = self._mesh = given["mesh"]
        assert mesh is not None
        mask = given.get("attention_mask")
        if isinstance(mask, Tensor):
            mesh.check_given("attention_mask", mask)
        return (), {"position_ids": mesh.position_ids, **given, "attention_mask": ShardedMask(mesh), "mesh": mesh}

    def _check_prepared(self, model: nn.Module, given: Sequence[Any]) -> None:
        """Raise ValueError for a model that was not prepared and is called with shards of the batch."""
        if getattr(model, _ATTRIBUTE, None) is self:
            return
        shards = set() if self._buffers is None else self._buffers.shapes
        if self._mesh is not None:
            shards = shards | {self._mesh.position_ids.shape}
        if any(isinstance(x, Tensor) and x.shape[:2] in shards for x in given):
            raise ValueError(
                f"models that are called with a batch that is sharded over ranks must be prepared "
                f"(accelerator.prepare), got {type(model).__name__}, which was not: it would compute with one rank's "
                f"tokens only; or call it with the whole batch, before the context"
            )

    @staticmethod
    def _check_whole(model: nn.Module) -> None:
        """Raise ValueError for a whole batch in training."""
        if model.training and torch.is_grad_enabled():
            raise ValueError(
                "the model must be called inside `with accelerator.maybe_context_parallel(buffers=[...])` while it is "
                "trained with cp_size > 1: outside of it, every rank would compute the whole sequence"
            )

    # Batches of a trainer.

    def shard_batch(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's arguments of the model, from those of the whole batch by name.

        `num_items_in_batch` is such that the mean of the losses over ranks is the loss. `labels` are shifted.
        """
        named, others = self._checked_batch(inputs)
        check_same_tokens(self.cp, named["input_ids"])
        local = shard_inputs(self.cp, **named)
        local["mesh"].losses = None  # they are scaled here, for the mean over ranks
        if "shift_labels" in named:
            local |= _loss_of_shifted(local["shift_labels"], named["shift_labels"], labels="labels" in inputs)
        if "num_items_in_batch" in local:
            local["num_items_in_batch"] = local["num_items_in_batch"] / self.cp.world
        mesh = self.latest = local["mesh"]
        mesh.losses, mesh.balances_experts = None, True  # losses are scaled for a mean over ranks
        # A tensor, which trainers count; the model gets a ShardedMask.
        return {**others, **local, "attention_mask": mesh.attention_mask}

    def _checked_batch(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arguments of `shard_inputs`, and what is not a tensor; ValueError on every rank for other tensors."""

        def check() -> tuple[tuple[dict[str, Any], dict[str, Any]], SharedValues]:
            ids = inputs.get("input_ids")
            if not isinstance(ids, Tensor):
                raise ValueError(f"the batch must have input_ids under context parallelism, got {sorted(inputs)}")
            given = {name: x for name, x in inputs.items() if x is not None and name not in _DERIVED}
            if "position_ids" not in given and "cu_seq_lens_q" in inputs:
                raise ValueError("the batch must have position_ids, which restart with every document, got cu_seq_lens")
            if "shift_labels" in given:
                given.pop("labels", None)
            named = {name: x for name, x in given.items() if isinstance(x, Tensor)}
            for name, x in named.items():
                if x.shape[:2] != ids.shape and not (name == "position_ids" and x.shape == (1, ids.shape[1])):
                    raise ValueError(
                        f"{name} must have one entry per token, {list(ids.shape)}, to be sharded over ranks, got "
                        f"{list(x.shape)}"
                    )
            others = {name: x for name, x in given.items() if name not in named}
            return (named, others), {"names of the batch": sorted(given)}

        return check_on_all_ranks(self.cp.comm, "a batch under context parallelism", check)

    @contextmanager
    def sharded(self, mesh: ShardedPass, *, balance_share: float = 1.0) -> Iterator[None]:
        """The model attends by `mesh`, also if it is called without it.

        `balance_share` is what the load-balancing loss of experts is multiplied by.
        """
        with self._context(balance_share):
            self._mesh = mesh
            yield

    # Batches of a user's loop.

    @contextmanager
    def shard_buffers(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Iterable[Tensor] | None = None,
    ) -> Iterator[None]:
        """Shard tensors in place along their sequence dimensions; restored afterwards, as in `maybe_context_parallel`.

        The model finds position_ids, attention_mask and labels among the buffers. Its loss is scaled so that the mean
        over ranks is the loss of the whole batch, which data parallelism computes.
        """
        with self._context():
            checks = batch_checks(self.cp, "buffers")
            state = check_on_all_ranks(  # forced: other ranks may next wait for a message of DDP
                self.cp.comm, "maybe_context_parallel", lambda: _checked_buffers(buffers, buffer_seq_dims, checks),
                force=True,
            )  # fmt: skip
            checks.count()
            kept = {id(buffer) for buffer in no_restore_buffers or ()}
            state.replace([self.cp.shard(whole, dim).contiguous() for whole, dim in state.wholes])
            self._buffers = state
            try:
                yield
            finally:
                state.restore(kept)

    @contextmanager
    def _context(self, balance_share: float = 1.0) -> Iterator[None]:
        """A context that ends the sharding of the batch and is not entered inside itself."""
        if self.is_sharding:
            raise ValueError("maybe_context_parallel must not be entered inside itself: the batch is sharded already")
        with whole_balance(self._models, lambda: self._mesh, balance_share), checked_calls(self._check_prepared):
            try:
                yield
            finally:
                self._mesh = self._buffers = None


class _Buffers:
    """Tensors that are sharded in place, and what they were."""

    def __init__(self, buffers: Sequence[Tensor], dims: Sequence[int]) -> None:
        self._buffers = list(buffers)
        # Not the same tensors: theirs are replaced.
        self.wholes = [(buffer.detach(), dim) for buffer, dim in zip(buffers, dims, strict=True)]

    @property
    def shapes(self) -> set[torch.Size]:
        """Of the shards: rows and tokens."""
        return {buffer.shape[:2] for buffer in self._buffers}

    def replace(self, shards: Sequence[Tensor]) -> None:
        for buffer, shard in zip(self._buffers, shards, strict=True):
            buffer.data = shard

    def restore(self, kept: set[int]) -> None:
        for buffer, (whole, _) in zip(self._buffers, self.wholes, strict=True):
            if id(buffer) not in kept:
                buffer.data = whole

    def arguments(self, cp: ContextParallel, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the model with this rank's shards, its pass, and the scale of its loss."""

        def check() -> tuple[dict[str, Any], SharedValues]:
            names = ("input_ids", "labels", "shift_labels", "position_ids", "attention_mask")
            found = {name: self._whole(name, given[name]) for name in names if given.get(name) is not None}
            if "input_ids" not in found:
                raise ValueError("the model must be called with input_ids under context parallelism")
            shape = found["input_ids"].shape
            for name, x in given.items():
                if name not in found and isinstance(x, Tensor) and x.dim() > 1 and x.shape[:2] == shape:
                    raise ValueError(
                        f"{name} must be one of the buffers of maybe_context_parallel, got the whole tensor"
                    )
            return found, {"arguments of the model": sorted(found)}

        found = check_on_all_ranks(cp.comm, "a model under maybe_context_parallel", check)
        with_labels = "labels" in found
        if "shift_labels" in found:
            found.pop("labels", None)
        check_same_tokens(cp, found["input_ids"])
        local = shard_inputs(cp, balance=False, **found)
        local["mesh"].losses = None  # they are scaled here, for the mean over ranks
        if "shift_labels" in found:
            local |= _loss_of_shifted(local["shift_labels"], found["shift_labels"], labels=with_labels)
        if "num_items_in_batch" in local:
            local["num_items_in_batch"] = given.get("num_items_in_batch", local["num_items_in_batch"] / cp.world)
        mesh: ShardedPass = local["mesh"]
        mesh.losses, mesh.balances_experts = None, True  # losses are scaled for a mean over ranks
        return {**given, **local}

    def _whole(self, name: str, x: Tensor) -> Tensor:
        """The whole tensor of an argument that is a buffer, or shares its memory."""
        for buffer, (whole, _) in zip(self._buffers, self.wholes, strict=True):
            if x is buffer or (x.shape == buffer.shape and x.data_ptr() == buffer.data_ptr()):
                return whole
        raise ValueError(
            f"{name} must be one of the buffers of maybe_context_parallel, got another tensor of shape {list(x.shape)}"
        )


def with_labels(inputs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a model with the labels that a compute_loss of the user's must not read."""
    labels = inputs.get("labels")
    return {**inputs, "labels": labels.tensor} if isinstance(labels, ShiftedLabels) else inputs


def _check_loss(model: Any) -> None:
    """Raise ValueError for a model whose outputs are not one per token, or whose labels are not those of tokens."""
    kind = getattr(model, "loss_type", None)
    losses = require("transformers.loss.loss_utils", extra="hf")
    if kind is not None and losses.LOSS_MAPPING.get(kind) is not losses.ForCausalLMLoss:
        raise ValueError(
            f"the model must be a causal language model, or a model without a head, got {type(model).__name__}"
        )


def check_same_tokens(cp: ContextParallel, input_ids: Tensor) -> None:
    """Raise ValueError on every rank if ranks have different tokens; their shapes must be equal.

    For tensors on an accelerator, whose tokens `shard_inputs` does not read.
    """
    if input_ids.device.type == "cpu":
        return
    parts = cp.comm.all_gather(_digest(input_ids), [(1,)] * cp.world)
    if len({int(part) for part in parts}) > 1:
        raise ValueError(
            "input_ids must be the same on all ranks of context parallelism, got different tokens: pass the data "
            "loader to accelerator.prepare, or give all ranks that share a sequence the same batches"
        )


def _digest(ids: Tensor) -> Tensor:
    """One number that depends on all tokens and their places."""
    weights = torch.arange(1, ids.numel() + 1, device=ids.device, dtype=torch.int64) * 0x9E3779B97F4A7C1 | 1
    return ((ids.flatten().to(torch.int64) + 1) * weights).sum()[None]


def _loss_of_shifted(local: Tensor, whole: Tensor, *, labels: bool) -> dict[str, Any]:
    """The arguments of the loss for labels that the caller has shifted."""
    count = (whole != IGNORED_LABEL).sum().clamp(min=1)
    return {"num_items_in_batch": count} | ({"labels": local} if labels else {})


def _checked_buffers(
    buffers: Sequence[Tensor] | None, dims: Sequence[int] | None, checks: ValueChecks
) -> tuple[_Buffers, SharedValues]:
    buffers, dims = buffers or [], dims or []
    if len(buffers) != len(dims):
        raise ValueError(f"buffer_seq_dims must have one entry per buffer ({len(buffers)}), got {shown(list(dims))}")
    lengths = [buffer.shape[dimension(buffer, dim)] for buffer, dim in zip(buffers, dims, strict=True)]
    if len(set(lengths)) > 1:
        raise ValueError(f"buffers must have the same length along buffer_seq_dims, got lengths {lengths}")
    compared = checks.compared(**{f"buffers[{i}]": buffer for i, buffer in enumerate(buffers)})
    return _Buffers(buffers, dims), {"lengths": lengths, **compared}


def _base_model(module: nn.Module) -> nn.Module:
    """The model of Transformers inside a model of PEFT."""
    if hasattr(module, "peft_config") and hasattr(module, "get_base_model"):
        return module.get_base_model()  # type: ignore[no-any-return, operator]
    return module
