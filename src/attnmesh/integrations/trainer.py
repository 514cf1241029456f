"""Transformers' Trainer and TRL's SFTTrainer under context parallelism: what `accelerate.enable()` replaces in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from attnmesh.comm import SharedValues, check_on_all_ranks
from attnmesh.integrations.accelerate_ranks import (
    AcceleratorRanks,
    ShiftedLabels,
    is_sharding,
    ranks_of,
    with_labels,
)
from attnmesh.integrations.patches import Patches
from attnmesh.integrations.sharded_batch import ShardedPass
from attnmesh.utils.optional import require
from attnmesh.utils.validation import warn_caller

Options = dict[str, Any]


def patch_trainer(patches: Patches, module: ModuleType, options: Options) -> None:
    """Replace the methods of `transformers.Trainer` that know about context parallelism."""
    trainer = module.Trainer
    patches.replace(trainer, "_prepare_context_parallel_inputs", partial(_prepare_inputs, options))
    patches.replace(trainer, "_get_num_items_in_batch", _num_items)
    patches.replace(trainer, "prediction_step", partial(_prediction_step, options))
    patches.replace(trainer, "evaluation_loop", partial(_evaluation_loop, options))
    patches.replace(trainer, "compute_loss", _compute_loss)
    patches.replace(trainer, "__init__", _init)


def patch_sft_trainer(patches: Patches, module: ModuleType, options: Options) -> None:
    """Replace the methods of `trl.SFTTrainer` that refuse packing or that do not shard."""
    trainer = module.SFTTrainer
    patches.replace(trainer, "__init__", _sft_init)
    patches.replace(trainer, "prediction_step", partial(_sft_prediction_step, options))
    patches.replace(trainer, "compute_loss", _sft_compute_loss)


def _shards(trainer: Any) -> bool:
    config = getattr(trainer.accelerator, "parallelism_config", None)
    return config is not None and config.cp_enabled


# Batches.


def _prepare_inputs(options: Options, original: Callable[..., Any]) -> Callable[..., Any]:
    def prepare_inputs(self: Any, model: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Trainer._prepare_context_parallel_inputs: a context, and this rank's shard of the batch."""
        if not _shards(self):
            return original(self, model, inputs)  # type: ignore[no-any-return]
        ranks = ranks_of(self.accelerator, options)
        ranks.prepare(model)
        check_on_all_ranks(ranks.cp.comm, "Trainer", partial(_check_trainer, self, model))
        local = ranks.shard_batch(inputs)
        if _has_own_loss(self) and "labels" in local:
            local["labels"] = ShiftedLabels(local["labels"])
        inputs.clear()  # in place: the trainer counts tokens in it
        inputs.update(local)
        return partial(_sharded, self, ranks, local["mesh"], local.get("num_items_in_batch")), inputs

    return prepare_inputs


def _check_trainer(trainer: Any, model: nn.Module) -> tuple[None, SharedValues]:
    """ValueError for a trainer whose loss is not a sum over tokens, or whose gradients are not reduced."""
    others = {
        base.__name__ for base in type(trainer).__mro__
        if base.__module__.startswith("trl.") and not base.__name__.endswith(("BaseTrainer", "SFTTrainer"))
    }  # fmt: skip
    if others:
        raise ValueError(f"the trainer must be Transformers' Trainer or TRL's SFTTrainer, got {sorted(others)[0]}")
    for name in ("neftune_noise_alpha", "use_liger_kernel"):
        if getattr(trainer.args, name, None):
            raise ValueError(f"{name} is not supported under context parallelism, got {getattr(trainer.args, name)}")
    if trainer.compute_loss_func is not None:
        raise ValueError(
            "compute_loss_func must be None under context parallelism: it would get the logits of a part of the "
            "sequence with labels that are already shifted; override compute_loss, where inputs['shift_labels'] are "
            "this rank's labels"
        )
    wrapped = any(isinstance(part, (DistributedDataParallel, FSDPModule)) for part in model.modules())
    compiled = hasattr(model, "_orig_mod")  # `unwrap_model` has removed the wrapper from its modules, not from its call
    if torch.is_grad_enabled() and not wrapped and not compiled:
        raise ValueError(
            f"the model must be wrapped by DDP or FSDP2 in training, which reduce gradients over ranks, got "
            f"{type(model).__name__}: create a new trainer"
        )
    if _has_own_loss(trainer):
        warn_caller(
            f"compute_loss of {type(trainer).__name__} is given this rank's tokens: inputs['shift_labels'] are its "
            f"labels, already shifted, and the loss must be a sum over them divided by num_items_in_batch"
        )
    return None, {}


def _has_own_loss(trainer: Any) -> bool:
    """Whether compute_loss is the user's."""
    module = getattr(trainer.compute_loss, "__module__", None) or ""
    return module.split(".")[0] not in ("transformers", "trl", "attnmesh")


def _compute_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_loss(self: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Trainer.compute_loss, which may be called by one of the user's."""
        return original(self, model, with_labels(inputs), *args, **kwargs)

    return compute_loss


@contextmanager
def _sharded(trainer: Any, ranks: AcceleratorRanks, mesh: ShardedPass, share: Tensor | None) -> Iterator[None]:
    """The model computes a sharded batch. `share` is what its losses are divided by if nothing else is given."""
    smoother = trainer.label_smoother
    # Trainer multiplies the loss with the load-balancing loss in it by the number of ranks, SFTTrainer the loss alone.
    scaled = trainer.args.average_tokens_across_devices and trainer.model_accepts_loss_kwargs
    added = scaled and not hasattr(trainer, "aux_loss_enabled")
    with ranks.sharded(mesh, balance_share=1 / ranks.cp.world if added else 1.0):
        if smoother is not None:
            trainer.label_smoother = partial(_smoothed_loss, smoother, share)
        try:
            yield
        finally:
            trainer.label_smoother = smoother


def _smoothed_loss(
    smoother: Any, share: Tensor | None, outputs: Any, labels: Tensor, shift_labels: bool = False,
    num_items_in_batch: Any = None,
) -> Tensor:  # fmt: skip
    """The smoothed loss of this rank's labels, which are shifted already."""
    count = share if num_items_in_batch is None else num_items_in_batch
    return smoother(outputs, labels, shift_labels=False, num_items_in_batch=count)  # type: ignore[no-any-return]


def _num_items(original: Callable[..., Any]) -> Callable[..., Any]:
    def num_items(self: Any, batch_samples: Any, device: Any) -> Any:
        """Trainer._get_num_items_in_batch: not rounded down where ranks do not add up their labels."""
        if not _shards(self) or self.args.average_tokens_across_devices:
            return original(self, batch_samples, device)
        size = self.get_cp_size()
        self.get_cp_size = lambda: 1
        try:
            count = original(self, batch_samples, device)
        finally:
            del self.get_cp_size
        return None if count is None else count / size

    return num_items


# Evaluation.


def _prediction_step(options: Options, original: Callable[..., Any]) -> Callable[..., Any]:
    def prediction_step(
        self: Any, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """Trainer.prediction_step: the loss and the logits of the whole batch on every rank."""
        if not _shards(self):
            return original(self, model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[no-any-return]
        ranks = ranks_of(self.accelerator, options)
        ranks.latest = None
        loss, logits, labels = original(self, model, inputs, prediction_loss_only, ignore_keys)
        if ranks.latest is None:  # without labels the model computes the whole batch on every rank
            return loss, logits, labels
        return _mean(ranks, loss), _whole(ranks.latest, logits), labels

    return prediction_step


def _sft_prediction_step(options: Options, original: Callable[..., Any]) -> Callable[..., Any]:
    def prediction_step(
        self: Any, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """SFTTrainer.prediction_step with a sharded batch."""
        if not _shards(self):
            return original(self, model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[no-any-return]
        inputs = self._prepare_inputs(inputs)
        labels = inputs.get("labels")
        count = self._get_num_items_in_batch([inputs], self.args.device)
        with torch.no_grad():  # the model need not be wrapped
            context, inputs = self._prepare_context_parallel_inputs(model, inputs)
        mesh: ShardedPass = inputs["mesh"]
        with torch.no_grad(), self.compute_loss_context_manager(), context():
            found = self.compute_loss(model, inputs, return_outputs=not prediction_loss_only, num_items_in_batch=count)
        loss, outputs = (found, None) if prediction_loss_only else found
        loss = _mean(ranks_of(self.accelerator, options), loss)
        return (loss, None, None) if outputs is None else (loss, _whole(mesh, outputs.logits), labels)

    return prediction_step


def _mean(ranks: AcceleratorRanks, loss: Tensor) -> Tensor:
    """The mean of the losses of the context-parallel ranks: the loss of the whole batch."""
    shape = tuple(loss.shape)
    parts = ranks.cp.comm.all_gather(loss.detach().contiguous(), [shape] * ranks.cp.world)
    return torch.stack(parts).mean(0)


def _whole(mesh: ShardedPass, logits: Any) -> Any:
    """What the model returned for the whole batch, from its tensors [B, n, ...]; other tensors are refused."""
    if logits is None:
        return None
    if isinstance(logits, (tuple, list)):
        return type(logits)(_whole(mesh, x) for x in logits)

    def check() -> tuple[None, SharedValues]:
        if not isinstance(logits, Tensor) or logits.shape[:2] != mesh.position_ids.shape:
            got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(
                f"the outputs of the model must have one entry per token to be gathered, got {got}: set "
                "prediction_loss_only=True, or name the output in ignore_keys"
            )
        return None, {}

    check_on_all_ranks(mesh.cp.comm, "the outputs of a model", check)
    return mesh.unshard(logits.detach())


def _evaluation_loop(options: Options, original: Callable[..., Any]) -> Callable[..., Any]:
    def evaluation_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Trainer.evaluation_loop: results are gathered from one rank per batch."""
        if _shards(self):
            ranks = ranks_of(self.accelerator, options)
            self.gather_function = partial(_gather_over_batches, self.accelerator, ranks)
        first = _shards(self) and not self.accelerator._models
        result = original(self, *args, **kwargs)
        if first and self.model_wrapped is self.model and not self.is_fsdp_enabled:
            # Prepared for evaluation only: train() would take it for the model that DDP wraps, and not wrap it.
            for model in self.accelerator._models:
                model._is_accelerate_prepared = False
            self.accelerator._models.clear()
        return result

    return evaluation_loop


def _gather_over_batches(accelerator: Any, ranks: AcceleratorRanks, data: Any, use_gather_object: bool = False) -> Any:
    """`Accelerator.gather_for_metrics` of values that all context-parallel ranks of a batch have."""
    operations = require("accelerate.utils.operations", extra="hf")
    names = accelerator.parallelism_config.dp_dim_names
    group = accelerator.torch_device_mesh["dp"].get_group() if names else None

    def gathered(x: Tensor) -> Tensor:
        x = x[None] if x.dim() == 0 else x.contiguous()
        if group is None:
            return x
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x, group=group)
        return torch.cat(parts)

    state = accelerator.gradient_state
    samples = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
    if state.end_of_dataloader and state.remainder < 0 and group is None and ranks.latest is not None:
        samples = len(ranks.latest.position_ids)  # a stream: the rows of its last batch
    if not use_gather_object:
        return operations.recursively_apply(lambda x: gathered(x)[:samples], data)
    objects = [data]
    if group is not None:
        objects = [None] * dist.get_world_size(group)
        dist.all_gather_object(objects, data, group=group)
    return [x for part in objects for x in part][:samples]


# TRL's SFTTrainer.


def _init(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        """Trainer.__init__; afterwards SFTTrainer looks at `args.packing` to refuse it, so it is hidden."""
        original(self, *args, **kwargs)
        if hasattr(self, "_attnmesh_packing") and _shards(self):
            self._attnmesh_packing = self.args.packing, self.args.eval_packing
            self.args.packing = self.args.eval_packing = False

    return init


def _sft_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        """SFTTrainer.__init__ without its refusal of packing."""
        self._attnmesh_packing = None  # set by Trainer.__init__
        try:
            original(self, *args, **kwargs)
        finally:
            packing = self.__dict__.pop("_attnmesh_packing")
            if packing is not None:
                self.args.packing, self.args.eval_packing = packing

    return init


def _sft_compute_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_loss(
        self: Any, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """SFTTrainer.compute_loss, whose mean over a rank's labels is not a share of that over all labels."""
        if num_items_in_batch is None and is_sharding(self.accelerator):
            raise ValueError("num_items_in_batch must be given under context parallelism, got None")
        return original(self, model, with_labels(inputs), return_outputs, num_items_in_batch)

    return compute_loss
