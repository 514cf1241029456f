"""Context parallelism of accelerate, Transformers' Trainer and TRL with attnmesh: call `enable()` once.

After `enable()`, `ParallelismConfig(cp_size=N)` computes attention with attnmesh. Sliding windows, sinks, chunked
layers, packed and padded batches, lengths that N does not divide and CPU ranks (gloo) are then served. Importing this
module changes nothing, and `disable()` restores everything.

A batch is sharded in one of two ways. A trainer knows the names of its tensors (`AcceleratorRanks.shard_batch`). In a
loop of the user, `accelerator.maybe_context_parallel(buffers=...)` shards tensors in place, and which of them are
position_ids or labels shows when the model is called (`AcceleratorRanks.shard_buffers`). TRL's trainers other than
SFTTrainer keep whole rows: see `training.trl`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from attnmesh.comm import SharedValues, check_on_all_ranks
from attnmesh.core.layouts import Layout, Zigzag, check_layout
from attnmesh.integrations.multimodal import IMAGES, is_given_whole, serve_images, whole_arguments
from attnmesh.integrations.sdpa import ShardedBuffers
from attnmesh.integrations.sharded_pass import (
    ShardedMask,
    ShardedPass,
    Unreadable,
    checked_calls,
    checked_on_all_ranks,
)
from attnmesh.integrations.transformers_attention import Patches, register_attention
from attnmesh.integrations.transformers_models import IGNORED_LABEL, NAME, check_model, text_backbone, text_config
from attnmesh.parallel.context import ContextParallel
from attnmesh.parallel.executor import BACKENDS
from attnmesh.plan.shards import SCHEDULES
from attnmesh.training.batch import batch_checks, shard_inputs
from attnmesh.utils.optional import require
from attnmesh.utils.text import see
from attnmesh.utils.validation import check_choice, warn_caller

__all__ = ["TESTED", "disable", "enable"]

TESTED = {"accelerate": "1.15", "transformers": "5.22", "trl": "1.16"}
"""The versions whose private functions `enable()` replaces."""

_options: dict[str, Any] = {}  # of `enable`
_ATTRIBUTE = "_attnmesh_ranks"  # of an Accelerator and of a prepared model

# Packed rows as attention kernels of one device take them: position_ids contain the same.
_DERIVED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")

WHOLE_ROWS = {
    "DPOTrainer": ("trl.trainer.dpo_trainer",),
    "KTOTrainer": ("trl.trainer.kto_trainer",),
    "ORPOTrainer": ("trl.experimental.orpo.orpo_trainer",),
    "RewardTrainer": ("trl.trainer.reward_trainer",),
    "GRPOTrainer": ("trl.trainer.grpo_trainer", "trl.trainer.grpo_config"),
    "RLOOTrainer": ("trl.trainer.rloo_trainer", "trl.trainer.rloo_config"),
    "GKDTrainer": ("trl.experimental.gkd.gkd_trainer",),
}
"""TRL's trainers that compute their losses from whole rows, on every rank, and their modules."""
_WHOLE_ROWS_IN = "attnmesh.training.trl"  # imported with the first of them: it imports the code that generates

_BALANCE = "load_balancing_loss_func"  # in the modules of models; TRL takes the function of Mixtral
_MIXTRAL = "transformers.models.mixtral.modeling_mixtral"

_patches = Patches()


def enable(*, layout: Layout = Zigzag(), schedule: str = "auto", backend: str = "auto") -> None:  # noqa: B008
    """Use attnmesh for the context parallelism of accelerate, Transformers' Trainer and TRL's trainers.

    Call it before an `Accelerator`, `TrainingArguments` or a trainer is created. `ContextParallel` has the same
    arguments; packed and padded batches of a trainer get the layout `Balanced` instead. A second call changes the
    arguments. Raises ValueError for a version of accelerate, Transformers or TRL that was not tested.

    Examples:
        >>> from attnmesh.training import accelerate
        >>> accelerate.enable(layout=am.Zigzag(), schedule="ring")  # ParallelismConfig(cp_size=N) now uses attnmesh
        >>> accelerate.disable()
    """
    check_layout("layout", layout)
    check_choice("schedule", schedule, ("auto", *SCHEDULES))
    check_choice("backend", backend, BACKENDS)
    check_versions(TESTED, optional=("trl",))
    replace_methods(layout, schedule, backend)


def replace_methods(layout: Layout = Zigzag(), schedule: str = "auto", backend: str = "auto") -> None:  # noqa: B008
    """What `enable` does, for arguments and versions that the caller has checked."""
    disable()
    _options.update(layout=layout, schedule=schedule, backend=backend)
    _patch_accelerate(require("accelerate", extra="hf"))
    _patches.when_imported("transformers.trainer", _patch_trainer)
    _patches.when_imported("trl.trainer.sft_trainer", _patch_sft_trainer)
    for trainer, modules in WHOLE_ROWS.items():
        for module in modules:
            _patches.when_imported(module, partial(_patch_whole_rows, trainer))


def disable() -> None:
    """Restore accelerate, Transformers and TRL. A model that was prepared before keeps attnmesh's attention.

    Examples:
        >>> from attnmesh.training import accelerate
        >>> accelerate.disable()  # nothing to restore is no error
    """
    _patches.undo()


def check_versions(versions: Mapping[str, str], *, optional: Sequence[str] = ()) -> None:
    """Raise ValueError unless the installed packages have these versions; `optional` ones may be missing."""
    for package, tested in versions.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package in optional:
                continue
            require(package, extra="hf")  # raises
            raise
        if version.split(".")[:2] != tested.split("."):
            known = ", ".join(f"{name} {number}" for name, number in versions.items())
            raise ValueError(
                f"the version of {package} must be {tested}, got {version}: attnmesh replaces private functions of "
                f"these packages and was tested with {known}"
            )


def _patch_accelerate(accelerate: ModuleType) -> None:
    accelerator = accelerate.Accelerator
    _patches.replace(accelerator, "_prepare_cp", _prepare_cp)
    _patches.replace(accelerator, "prepare_data_loader", _prepare_data_loader)
    _patches.replace(accelerator, "gather_for_metrics", _gather_for_metrics)
    _patches.replace(accelerate.ParallelismConfig, "_validate_accelerator", _validate_accelerator)
    state = require("accelerate.state", extra="hf").AcceleratorState
    _patches.replace(state, "__init__", _init_state)


def _prepare_cp(original: Any, self: Any, *args: Any) -> tuple[Any, ...]:
    """Accelerator._prepare_cp: models get attnmesh's attention, and batches are sharded by its layouts."""
    ranks = ranks_of(self)
    for arg in args:
        if isinstance(arg, nn.Module):
            ranks.prepare(arg)
    self._cp_context = ranks.shard_buffers
    return args


def _prepare_data_loader(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Accelerator.prepare_data_loader: every rank reads a stream itself.

    By default rank 0 reads it and sends another batch to each rank, also to ranks that share a sequence.
    """
    config = self.dataloader_config
    if self.parallelism_config is None or not self.parallelism_config.cp_enabled:
        return original(self, *args, **kwargs)
    if config.dispatch_batches:
        raise ValueError(
            "dispatch_batches must be False or None under context parallelism, got True: ranks that share a "
            "sequence would get different batches"
        )
    before, config.dispatch_batches = config.dispatch_batches, False
    try:
        return original(self, *args, **kwargs)
    finally:
        config.dispatch_batches = before


def _gather_for_metrics(original: Any, self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
    """Accelerator.gather_for_metrics.

    At the end of a dataset it keeps one entry for each sample. Values of shards are no samples.
    """
    if use_gather_object or not is_sharding(self):
        return original(self, input_data, use_gather_object)
    return self.gather(input_data)


def _validate_accelerator(original: Any, self: Any, accelerator: Any) -> None:
    """ParallelismConfig._validate_accelerator: CPU ranks are ranks like others; DeepSpeed is refused."""
    if self.cp_enabled and accelerator.distributed_type == "DEEPSPEED":
        raise ValueError(
            f"deepspeed_plugin must be None with cp_size > 1, got cp_size {self.cp_size} and DeepSpeed, whose engine "
            f"reduces gradients in code of its own: use DDP or FSDP2{see('stacks.md#deepspeed')}"
        )
    if self.cp_enabled and accelerator.distributed_type == "MULTI_CPU":
        accelerator = SimpleNamespace(
            multi_device=True, is_fsdp2=False, distributed_type=accelerator.distributed_type,
            num_processes=accelerator.num_processes, is_main_process=accelerator.is_main_process,
        )  # fmt: skip
    original(self, accelerator)


def _init_state(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """AcceleratorState.__init__: an FSDP plugin takes effect on CPU ranks too, if there is context parallelism."""
    original(self, *args, **kwargs)
    plugin, config = kwargs.get("fsdp_plugin"), self.parallelism_config
    if plugin is None or config is None or not config.cp_enabled or self.distributed_type != "MULTI_CPU":
        return
    if plugin.fsdp_version != 2:
        raise ValueError(f"fsdp_version must be 2 with cp_size > 1, got {plugin.fsdp_version}")
    if self._mixed_precision != "no":
        plugin.set_mixed_precision(self._mixed_precision)
    kinds = require("accelerate.utils", extra="hf").DistributedType
    self.fsdp_plugin, self.distributed_type = plugin, kinds.FSDP
    require("accelerate.state", extra="hf").PartialState._shared_state["distributed_type"] = kinds.FSDP


# Transformers' Trainer and TRL's SFTTrainer.


def _patch_trainer(module: ModuleType) -> None:
    """Replace the methods of `transformers.Trainer` that know about context parallelism."""
    trainer = module.Trainer
    _patches.replace(trainer, "_prepare_context_parallel_inputs", _prepare_inputs)
    _patches.replace(trainer, "_get_num_items_in_batch", _num_items)
    _patches.replace(trainer, "prediction_step", _prediction_step)
    _patches.replace(trainer, "evaluation_loop", _evaluation_loop)
    _patches.replace(trainer, "compute_loss", _compute_loss)
    _patches.replace(trainer, "__init__", _init)


def _patch_whole_rows(trainer: str, module: ModuleType) -> None:
    """Let one of TRL's trainers, which takes whole rows, compute over the ranks of an accelerator."""
    importlib.import_module(_WHOLE_ROWS_IN).patch_trainer(_patches, trainer, module)


def _patch_sft_trainer(module: ModuleType) -> None:
    """Replace the methods of `trl.SFTTrainer` that refuse packing or that do not shard."""
    trainer = module.SFTTrainer
    _patches.replace(trainer, "__init__", _sft_init)
    _patches.replace(trainer, "prediction_step", _sft_prediction_step)
    _patches.replace(trainer, "compute_loss", _sft_compute_loss)


def shards(trainer: Any) -> bool:
    config = getattr(trainer.accelerator, "parallelism_config", None)
    return config is not None and config.cp_enabled


# Batches.


def _prepare_inputs(original: Any, self: Any, model: Any, inputs: dict[str, Any]) -> Any:
    """Trainer._prepare_context_parallel_inputs: a context, and this rank's shard of the batch."""
    if not shards(self):
        return original(self, model, inputs)
    ranks = ranks_of(self.accelerator)
    if takes_whole_rows(self):
        with checked_on_all_ranks(ranks.cp.comm, "Trainer"):
            _check_trainer(self, model)
        return nullcontext, inputs
    ranks.prepare(model)
    with checked_on_all_ranks(ranks.cp.comm, "Trainer"):
        _check_trainer(self, model)
    local = ranks.shard_batch(inputs)
    if _has_own_loss(self) and "labels" in local:
        local["labels"] = ShiftedLabels(local["labels"])
    inputs.clear()  # in place: the trainer counts tokens in it
    inputs.update(local)
    return partial(_sharded, self, ranks, local["attention_pass"], local.get("num_items_in_batch")), inputs


def _check_trainer(trainer: Any, model: nn.Module) -> None:
    """ValueError for a trainer whose loss is not a sum over tokens, or whose gradients are not reduced."""
    check_kind(trainer)
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
    if _has_own_loss(trainer) and not takes_whole_rows(trainer):
        warn_caller(
            f"compute_loss of {type(trainer).__name__} is given this rank's tokens: inputs['shift_labels'] are its "
            f"labels, already shifted, and the loss must be a sum over them divided by num_items_in_batch"
        )


def _trl_names(trainer: Any) -> set[str]:
    """The names of TRL's trainers that a trainer is an instance of."""
    return {base.__name__ for base in type(trainer).__mro__ if base.__module__.startswith("trl.")}


def check_kind(trainer: Any) -> None:
    """Raise ValueError for one of TRL's trainers that is not served."""
    served = ("SFTTrainer", *WHOLE_ROWS)
    others = _trl_names(trainer) - {"_BaseTrainer", "BaseTrainer", *served}
    if others:
        raise ValueError(
            f"the trainer must be Transformers' Trainer or TRL's {', '.join(served)}, got {sorted(others)[0]}"
        )


def takes_whole_rows(trainer: Any) -> bool:
    """Whether a trainer computes its loss from whole rows."""
    return not _trl_names(trainer).isdisjoint(WHOLE_ROWS)


def _has_own_loss(trainer: Any) -> bool:
    """Whether compute_loss is the user's."""
    module = getattr(trainer.compute_loss, "__module__", None) or ""
    return module.split(".")[0] not in ("transformers", "trl", "axolotl", "attnmesh")


def _compute_loss(original: Any, self: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Trainer.compute_loss, which may be called by one of the user's."""
    return original(self, model, with_labels(inputs), *args, **kwargs)


@contextmanager
def _sharded(
    trainer: Any, ranks: AcceleratorRanks, attention_pass: ShardedPass, share: Tensor | None
) -> Iterator[None]:
    """The model computes a sharded batch. `share` is what its losses are divided by if nothing else is given."""
    smoother = trainer.label_smoother
    # Trainer multiplies the loss with the load-balancing loss in it by the number of ranks, SFTTrainer the loss alone.
    scaled = trainer.args.average_tokens_across_devices and trainer.model_accepts_loss_kwargs
    added = scaled and not hasattr(trainer, "aux_loss_enabled")
    with ranks.sharded(attention_pass, balance_share=1 / ranks.cp.world if added else 1.0):
        if smoother is not None:
            trainer.label_smoother = partial(_smoothed_loss, smoother, share)
        try:
            yield
        finally:
            trainer.label_smoother = smoother


def _smoothed_loss(
    smoother: Any, share: Tensor | None, outputs: Any, labels: Tensor, shift_labels: bool = False,
    num_items_in_batch: Any = None,
) -> Any:  # fmt: skip
    """The smoothed loss of this rank's labels, which are shifted already."""
    count = share if num_items_in_batch is None else num_items_in_batch
    return smoother(outputs, labels, shift_labels=False, num_items_in_batch=count)


def _num_items(original: Any, self: Any, batch_samples: Any, device: Any) -> Any:
    """Trainer._get_num_items_in_batch: not rounded down where ranks do not add up their labels."""
    if not shards(self) or self.args.average_tokens_across_devices:
        return original(self, batch_samples, device)
    size = self.get_cp_size()
    self.get_cp_size = lambda: 1
    try:
        count = original(self, batch_samples, device)
    finally:
        del self.get_cp_size
    return None if count is None else count / size


# Evaluation.


def _prediction_step(
    original: Any, self: Any, model: Any, inputs: dict[str, Any], prediction_loss_only: bool,
    ignore_keys: Any = None,
) -> Any:  # fmt: skip
    """Trainer.prediction_step: the loss and the logits of the whole batch on every rank."""
    if not shards(self) or takes_whole_rows(self):
        return original(self, model, inputs, prediction_loss_only, ignore_keys)
    ranks = ranks_of(self.accelerator)
    ranks.latest = None
    loss, logits, labels = original(self, model, inputs, prediction_loss_only, ignore_keys)
    if ranks.latest is None:  # without labels the model computes the whole batch on every rank
        return loss, logits, labels
    return _mean(ranks, loss), _whole(ranks.latest, logits), labels


def _sft_prediction_step(
    original: Any, self: Any, model: Any, inputs: dict[str, Any], prediction_loss_only: bool,
    ignore_keys: Any = None,
) -> Any:  # fmt: skip
    """SFTTrainer.prediction_step with a sharded batch."""
    if not shards(self) or takes_whole_rows(self):
        return original(self, model, inputs, prediction_loss_only, ignore_keys)
    inputs = self._prepare_inputs(inputs)
    labels = inputs.get("labels")
    count = self._get_num_items_in_batch([inputs], self.args.device)
    with torch.no_grad():  # the model need not be wrapped
        context, inputs = self._prepare_context_parallel_inputs(model, inputs)
    attention_pass: ShardedPass = inputs["attention_pass"]
    with torch.no_grad(), self.compute_loss_context_manager(), context():
        found = self.compute_loss(model, inputs, return_outputs=not prediction_loss_only, num_items_in_batch=count)
    loss, outputs = (found, None) if prediction_loss_only else found
    loss = _mean(ranks_of(self.accelerator), loss)
    return (loss, None, None) if outputs is None else (loss, _whole(attention_pass, outputs.logits), labels)


def _mean(ranks: AcceleratorRanks, loss: Tensor) -> Tensor:
    """The mean of the losses of the context-parallel ranks: the loss of the whole batch."""
    shape = tuple(loss.shape)
    parts = ranks.cp.comm.all_gather(loss.detach().contiguous(), [shape] * ranks.cp.world)
    return torch.stack(parts).mean(0)


def _whole(attention_pass: ShardedPass, logits: Any) -> Any:
    """What the model returned for the whole batch, from its tensors [B, n, ...]; other tensors are refused."""
    if logits is None:
        return None
    if isinstance(logits, (tuple, list)):
        return type(logits)(_whole(attention_pass, x) for x in logits)
    with checked_on_all_ranks(attention_pass.cp.comm, "the outputs of a model"):
        if not isinstance(logits, Tensor) or logits.shape[:2] != attention_pass.position_ids.shape:
            got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(
                f"the outputs of the model must have one entry per token to be gathered, got {got}: set "
                "prediction_loss_only=True, or name the output in ignore_keys"
            )
    return attention_pass.unshard(logits.detach())


def _evaluation_loop(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Trainer.evaluation_loop: results are gathered from one rank per batch."""
    if shards(self):
        ranks = ranks_of(self.accelerator)
        self.gather_function = partial(gather_over_batches, self.accelerator, ranks)
    first = shards(self) and not self.accelerator._models
    result = original(self, *args, **kwargs)
    if first and self.model_wrapped is self.model and not self.is_fsdp_enabled:
        # Prepared for evaluation only: train() would take it for the model that DDP wraps, and not wrap it.
        for model in self.accelerator._models:
            model._is_accelerate_prepared = False
        self.accelerator._models.clear()
    return result


def gather_over_batches(accelerator: Any, ranks: AcceleratorRanks, data: Any, use_gather_object: bool = False) -> Any:
    """`Accelerator.gather_for_metrics` of values that all context-parallel ranks of a batch have."""
    operations = require("accelerate.utils.operations", extra="hf")
    group = data_group(accelerator)
    state = accelerator.gradient_state
    samples = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
    if state.end_of_dataloader and state.remainder < 0 and group is None and ranks.latest is not None:
        samples = len(ranks.latest.position_ids)  # a stream: the rows of its last batch
    if not use_gather_object:
        return operations.recursively_apply(lambda x: gather_over(group, x)[:samples], data)
    return gather_objects_over(group, data)[:samples]


def data_group(accelerator: Any) -> Any:
    """The process group with one rank for each batch; None if all ranks have the same batch."""
    names = accelerator.parallelism_config.dp_dim_names
    return accelerator.torch_device_mesh["dp"].get_group() if names else None


def gather_over(group: Any, x: Tensor) -> Tensor:
    """The tensors of all ranks of a group in a row; a number is a row of one."""
    x = x[None] if x.dim() == 0 else x.contiguous()
    if group is None:
        return x
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts)


def gather_objects_over(group: Any, objects: list[Any]) -> list[Any]:
    """The lists of all ranks of a group in a row."""
    if group is None:
        return list(objects)
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, objects, group=group)
    return [x for part in parts for x in part]


# TRL's SFTTrainer.


def _init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Trainer.__init__; afterwards SFTTrainer looks at `args.packing` to refuse it, so it is hidden."""
    original(self, *args, **kwargs)
    if hasattr(self, "_attnmesh_packing") and shards(self):
        self._attnmesh_packing = self.args.packing, self.args.eval_packing
        self.args.packing = self.args.eval_packing = False


def _sft_init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """SFTTrainer.__init__ without its refusal of packing."""
    self._attnmesh_packing = None  # set by Trainer.__init__
    try:
        original(self, *args, **kwargs)
    finally:
        packing = self.__dict__.pop("_attnmesh_packing")
        if packing is not None:
            self.args.packing, self.args.eval_packing = packing


def _sft_compute_loss(
    original: Any, self: Any, model: Any, inputs: dict[str, Any], return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:  # fmt: skip
    """SFTTrainer.compute_loss, whose mean over a rank's labels is no share of the mean over all labels."""
    if num_items_in_batch is None and is_sharding(self.accelerator):
        raise ValueError("num_items_in_batch must be given under context parallelism, got None")
    return original(self, model, with_labels(inputs), return_outputs, num_items_in_batch)


# The context-parallel ranks of an `Accelerator`.


def ranks_of(accelerator: Any) -> AcceleratorRanks:
    """The context-parallel ranks of an accelerator, created by the first call."""
    ranks: AcceleratorRanks | None = getattr(accelerator, _ATTRIBUTE, None)
    if ranks is None:
        ranks = AcceleratorRanks(accelerator, _options)
        setattr(accelerator, _ATTRIBUTE, ranks)
    return ranks


def is_sharding(accelerator: Any) -> bool:
    """Whether the accelerator is inside a context in which batches are sharded."""
    ranks = getattr(accelerator, _ATTRIBUTE, None)
    return ranks is not None and ranks.is_sharding


class ShiftedLabels(Unreadable):
    """What a compute_loss of the user's is given as labels: the model reads them, and loss functions must not."""

    def __init__(self, labels: Tensor) -> None:
        self.tensor = labels

    @staticmethod
    def explain(name: str) -> str:
        """Why the labels cannot be read, as some code tried to."""
        return (
            f"a compute_loss of one's own must read inputs['shift_labels'] under context parallelism, got one that "
            f"reads inputs['labels'] ({name}): labels are this rank's and already shifted, and the loss must be a "
            f"sum over them divided by num_items_in_batch{see('training.md#accelerate-trainer-and-trl')}"
        )


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
        self.current_pass: ShardedPass | None = None
        """The pass of the batch in `sharded`, or of the latest call in `shard_buffers`."""
        self._buffers: _Buffers | None = None  # in `shard_buffers`
        self.latest: ShardedPass | None = None
        """The pass of the latest `shard_batch`."""

    @property
    def is_sharding(self) -> bool:
        """Whether a batch is sharded at the moment."""
        return self.current_pass is not None or self._buffers is not None

    def __deepcopy__(self, memo: object) -> AcceleratorRanks:
        return self  # a copy of a prepared model attends over the same ranks

    def __reduce__(self) -> tuple[type[_NoRanks], tuple[()]]:
        return _NoRanks, ()  # a prepared model that is pickled is one of a single process

    # Models.

    def model(self, module: nn.Module) -> Any:
        """The model of Transformers inside of wrappers, such as DDP or PEFT."""
        return _base_model(self._unwrap(module))

    def prepare(self, module: nn.Module) -> None:
        """Let a model of Transformers (or of PEFT around one) attend over the ranks. May be called again."""
        model = self.model(module)
        if self.has_prepared(model):
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
        if text_backbone(model) is not None:
            serve_images(model)
        self.mark_prepared(model)
        self._models.append(model)

    def has_prepared(self, model: nn.Module) -> bool:
        """Whether a model of Transformers was prepared for these ranks."""
        return getattr(model, _ATTRIBUTE, None) is self

    def mark_prepared(self, model: nn.Module) -> None:
        """Note that a model of Transformers is prepared, so that `prepare` leaves it as it is."""
        setattr(model, _ATTRIBUTE, self)

    def _add_pass(
        self, names: list[str], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments of a prepared model with the keyword argument `attention_pass`; None if they stay as they are.

        `names` are the names of positional arguments.
        """
        has_images = text_backbone(model) is not None
        if has_images and is_given_whole(model):
            return None
        attention_pass: ShardedPass | None = kwargs.get("attention_pass")
        if attention_pass is not None and not isinstance(attention_pass, ShardedPass):
            return None  # of a `Generator`, over a sharded KV cache
        buffers = self._buffers if attention_pass is None else None
        attention_pass = attention_pass or self.current_pass
        if attention_pass is None and buffers is None:
            self._check_whole(model)
            return None
        given = with_labels({**dict(zip(names, args, strict=False)), **kwargs})
        if buffers is not None:
            given = buffers.arguments(self.cp, given)
            attention_pass = self.current_pass = given["attention_pass"]
        assert attention_pass is not None
        mask = given.get("attention_mask")
        if isinstance(mask, Tensor):
            attention_pass.check_given("attention_mask", mask)
        found = {
            "position_ids": attention_pass.position_ids,
            **given,
            "attention_mask": ShardedMask(attention_pass),
            "attention_pass": attention_pass,
        }
        return (), whole_arguments(model, found) if has_images else found

    def _check_prepared(self, model: nn.Module, given: Sequence[Any]) -> None:
        """Raise ValueError for a model that was not prepared and is called with shards of the batch."""
        if self.has_prepared(model):
            return
        shards = set() if self._buffers is None else self._buffers.shapes
        if self.current_pass is not None:
            shards = shards | {self.current_pass.position_ids.shape}
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
        """This rank's arguments of the model, from the arguments of the whole batch by name.

        `num_items_in_batch` is such that the mean of the losses over ranks is the loss. `labels` are shifted.
        """
        named, others = self._checked_batch(inputs)
        local = _sharded_arguments(self.cp, named, labels="labels" in inputs)
        attention_pass = self.latest = local["attention_pass"]
        # A tensor, which trainers count; the model gets a ShardedMask.
        return {**others, **local, "attention_mask": attention_pass.attention_mask}

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
                if IMAGES.search(name):
                    continue
                if x.shape[:2] != ids.shape and not (name == "position_ids" and x.shape == (1, ids.shape[1])):
                    raise ValueError(
                        f"{name} must have one entry per token, {list(ids.shape)}, to be sharded over ranks, got "
                        f"{list(x.shape)}"
                    )
            others = {name: x for name, x in given.items() if name not in named}
            return (named, others), {"names of the batch": sorted(given)}

        return check_on_all_ranks(self.cp.comm, "a batch under context parallelism", check)

    @contextmanager
    def sharded(self, attention_pass: ShardedPass, *, balance_share: float = 1.0) -> Iterator[None]:
        """The model attends by `attention_pass`, also if it is called without it.

        `balance_share` is what the load-balancing loss of experts is multiplied by.
        """
        with self.context(balance_share):
            self.current_pass = attention_pass
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
        with self.context():
            checks = batch_checks(self.cp, "buffers")

            def check() -> tuple[_Buffers, SharedValues]:
                found = _Buffers(buffers or [], buffer_seq_dims or [])
                return found, found.compared(checks)

            # Forced: other ranks may next wait for a message of DDP.
            state = check_on_all_ranks(self.cp.comm, "maybe_context_parallel", check, force=True)
            checks.count()
            with state.sharded(self.cp, no_restore_buffers or ()):
                self._buffers = state
                yield

    @contextmanager
    def context(self, balance_share: float = 1.0) -> Iterator[None]:
        """A context that ends the sharding of the batch and is not entered inside itself."""
        if self.is_sharding:
            raise ValueError("maybe_context_parallel must not be entered inside itself: the batch is sharded already")
        with whole_balance(self._models, lambda: self.current_pass, balance_share), checked_calls(self._check_prepared):
            try:
                yield
            finally:
                self.current_pass = self._buffers = None


class _Buffers(ShardedBuffers):
    """The buffers of `maybe_context_parallel`, among which are arguments of the model."""

    @property
    def shapes(self) -> set[torch.Size]:
        """Of the shards: rows and tokens."""
        return {buffer.shape[:2] for buffer in self.buffers}

    def arguments(self, cp: ContextParallel, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the model with this rank's shards, its pass, and the scale of its loss."""

        def check() -> tuple[dict[str, Any], SharedValues]:
            names = ("input_ids", "labels", "shift_labels", "position_ids", "attention_mask")
            found = {name: self._whole(name, given[name]) for name in names if given.get(name) is not None}
            if "input_ids" not in found:
                raise ValueError("the model must be called with input_ids under context parallelism")
            shape = found["input_ids"].shape
            for name, x in given.items():
                whole = self._buffer(x) if isinstance(x, Tensor) else None
                if IMAGES.search(name):
                    found[name] = x
                elif whole is not None and whole.shape[:2] == shape:
                    found[name] = whole  # of which a model with images reads all
                elif name not in found and isinstance(x, Tensor) and x.dim() > 1 and x.shape[:2] == shape:
                    raise ValueError(
                        f"{name} must be one of the buffers of maybe_context_parallel, got the whole tensor"
                    )
            return found, {"arguments of the model": sorted(found)}

        found = check_on_all_ranks(cp.comm, "a model under maybe_context_parallel", check)
        has_labels = "labels" in found
        if "shift_labels" in found:
            found.pop("labels", None)
        local = _sharded_arguments(cp, found, labels=has_labels, balance=False)
        if "num_items_in_batch" in local and "num_items_in_batch" in given:
            del local["num_items_in_batch"]
        return {**given, **local}

    def _whole(self, name: str, x: Tensor) -> Tensor:
        """The whole tensor of an argument that is a buffer, or shares its memory."""
        whole = self._buffer(x)
        if whole is not None:
            return whole
        raise ValueError(
            f"{name} must be one of the buffers of maybe_context_parallel, got another tensor of shape {list(x.shape)}"
        )

    def _buffer(self, x: Tensor) -> Tensor | None:
        for buffer, whole in zip(self.buffers, self.wholes, strict=True):
            if x is buffer or (x.shape == buffer.shape and x.data_ptr() == buffer.data_ptr()):
                return whole
        return None


def with_labels(inputs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a model with the labels that a compute_loss of the user's must not read."""
    labels = inputs.get("labels")
    return {**inputs, "labels": labels.tensor} if isinstance(labels, ShiftedLabels) else inputs


def _check_loss(model: Any) -> None:
    """Raise ValueError for a model whose outputs are not one per token, or whose labels are not labels of tokens."""
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


def _sharded_arguments(
    cp: ContextParallel, named: dict[str, Any], *, labels: bool, balance: bool = True
) -> dict[str, Any]:
    """What `shard_inputs` returns, with the loss scaled so that the mean over ranks is the loss of the whole batch.

    If the caller has shifted the labels (`shift_labels`), `labels` is whether the model is given labels, too.
    """
    check_same_tokens(cp, named["input_ids"])
    local = shard_inputs(cp, balance=balance, **named)
    if "shift_labels" in named:
        local["num_items_in_batch"] = (named["shift_labels"] != IGNORED_LABEL).sum().clamp(min=1)
        local |= {"labels": local["shift_labels"]} if labels else {}
    if "num_items_in_batch" in local:
        local["num_items_in_batch"] = local["num_items_in_batch"] / cp.world
    attention_pass: ShardedPass = local["attention_pass"]
    attention_pass.check_once, attention_pass.balances_experts = None, True
    return local


def _base_model(module: nn.Module) -> nn.Module:
    """The model of Transformers inside a model of PEFT."""
    if hasattr(module, "peft_config") and hasattr(module, "get_base_model"):
        return module.get_base_model()  # type: ignore[no-any-return, operator]
    return module


# The load-balancing loss of mixture-of-experts models is a product of means over all tokens, so that the losses of
# shards do not add up to it. Every rank computes it from the router logits of the whole batch.


def check_balance(model: nn.Module) -> None:
    """Raise ValueError if the model adds a loss for its experts other than the loss that `whole_balance` computes."""
    if getattr(text_config(model), "output_router_logits", False) and not hasattr(
        sys.modules[type(model).__module__], _BALANCE
    ):
        raise ValueError(
            f"output_router_logits must be False under context parallelism for {type(model).__name__}: the loss of its "
            "experts is not known to be one of tokens"
        )


@contextmanager
def whole_balance(
    models: Iterable[nn.Module], current: Callable[[], ShardedPass | None], share: float
) -> Iterator[None]:
    """In this context, the load-balancing loss of models is `share` times the loss of the whole batch of `current()`.

    Its gradients are such that the mean over ranks is the gradient of `share` times the loss.
    """
    models = list(models)
    if any(hasattr(text_config(model), "output_router_logits") for model in models):
        importlib.import_module(_MIXTRAL)  # TRL imports it in its first step, and takes its function for every model
    names = {_MIXTRAL, *(type(model).__module__ for model in models)}
    modules: list[Any] = [sys.modules[name] for name in names if hasattr(sys.modules.get(name), _BALANCE)]
    before = [getattr(module, _BALANCE) for module in modules]
    for module, original in zip(modules, before, strict=True):
        setattr(module, _BALANCE, _over_ranks(original, current, share))
    try:
        yield
    finally:
        for module, original in zip(modules, before, strict=True):
            setattr(module, _BALANCE, original)


def _over_ranks(original: Any, current: Callable[[], ShardedPass | None], share: float) -> Any:
    def loss(gate_logits: Any, num_experts: Any = None, top_k: Any = 2, attention_mask: Any = None) -> Any:
        attention_pass = current()
        if attention_pass is None or not isinstance(gate_logits, tuple):
            return original(gate_logits, num_experts, top_k, attention_mask)
        rows, tokens = attention_pass.position_ids.shape

        def whole(x: Tensor) -> Tensor:
            return attention_pass.unshard(x.reshape(rows, tokens, -1)).flatten(0, 1)

        real = whole(attention_pass.attention_mask.to(torch.float32))
        return share * original(tuple(map(whole, gate_logits)), num_experts, top_k, real)

    return loss
