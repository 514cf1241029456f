"""Data parallelism beside context parallelism in a training loop of one's own: DDP and FSDP2.

A loss over context-parallel ranks is the sum of the ranks' losses, but DDP and FSDP2 average gradients over all ranks
that they know. `GradientReduction` makes them sum over context-parallel ranks, from the groups of the wrapped model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from attnmesh.comm import Comm, GroupComm, SoloComm
from attnmesh.integrations.reproducible import TreeReduction
from attnmesh.integrations.transformers_models import IGNORED_LABEL, modules_in_forward
from attnmesh.parallel.context import ContextParallel
from attnmesh.parallel.node_groups import comm_named
from attnmesh.utils.validation import check_choice, check_list, check_tensor, check_type, shown

__all__ = ["GradientReduction"]

LOSSES = ("tokens", "mean", "whole")

_reductions: WeakKeyDictionary[nn.Module, GradientReduction] = WeakKeyDictionary()


class GradientReduction:
    """Makes DDP or FSDP2 reduce gradients as the losses of ranks that share sequences require.

    Construct it once, after the model was wrapped over all ranks of data and context parallelism (for FSDP2 the
    flattened mesh `dp_shard_cp`, or a mesh of two dimensions). The losses of ranks are not scaled.

    With a reproducible `cp` the model is not wrapped: call `reduce()` after every backward, and losses, gradients and
    parameters have the same bits at any number of ranks. See `docs/reproducibility.md#training`.

    Args:
        model: a DistributedDataParallel, or a module on which `fully_shard` was called; with a reproducible `cp`, a
            model of Transformers as it is.
        cp: the ranks that share a sequence.
        data: with a reproducible `cp`, the ranks that have other rows of the batch, such as `mesh["dp"]`.
        losses: what the losses of the ranks are.

            - `"tokens"`: shares of the mean over the tokens of all data ranks: gradients are summed over all ranks.
              Pass `num_items_in_batch=reduction.num_items(labels)` to `shard_inputs`.
            - `"mean"`: shares of the mean over the tokens of their data rank: gradients are summed over the ranks of
              `cp` and averaged over data ranks.
            - `"whole"`: every rank computes the whole loss of its data rank (from `gather_log_probs` or `unshard`), or
              scales its loss itself: gradients are averaged over all ranks, as DDP and FSDP2 do.

    A wrapped model that is trained on inputs of `shard_inputs` without a GradientReduction raises ValueError.

    Examples:
        >>> import torch.distributed as dist
        >>> from attnmesh.training.data_parallel import GradientReduction
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun starts more ranks
        >>> wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        >>> reduction = GradientReduction(wrapped, am.ContextParallel())
        >>> reduction.data_ranks, reduction.num_items(torch.tensor([[5, 6, -100]])).item()  # 5 has no token before it
        (1, 1)
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        model: nn.Module,
        cp: ContextParallel,
        losses: str = "tokens",
        *,
        data: Comm | dist.ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        check_type("cp", cp, ContextParallel)
        check_choice("losses", losses, LOSSES)
        self._tree: TreeReduction | None = None
        if cp.reproducible:
            self._init_tree(model, cp, losses, data)
            return
        if data is not None:
            raise ValueError(f"data must be None unless cp is reproducible, got {shown(data)}")
        wrappers = _wrappers(model)
        self.losses = losses
        self._groups = _groups(wrappers)
        self._device = next(model.parameters()).device
        self._world = prod(dist.get_world_size(group) for group in self._groups)
        self.data_ranks = self._world // cp.world
        """The number of groups of ranks that share a sequence."""
        _check_members(cp, wrappers, self._world)
        self._divisor = {"tokens": 1, "mean": self.data_ranks, "whole": self._world}[losses]
        for wrapper in wrappers:
            known = _reductions.get(wrapper)
            if known is None or known._divisor != self._divisor:
                _divide_by(wrapper, self._divisor, self._groups)
            _reductions[wrapper] = self

    def _init_tree(self, model: nn.Module, cp: ContextParallel, losses: str, data: Any) -> None:
        check_type("model", model, nn.Module)
        wrapped = [part for part in model.modules() if isinstance(part, DistributedDataParallel | FSDPModule)]
        if wrapped:
            raise ValueError(
                f"model must not be wrapped with a reproducible ContextParallel, as `reduce()` sums gradients, got a "
                f"{type(wrapped[0]).__name__}: pass the ranks with other sequences as data="
            )
        if losses != "tokens":
            raise ValueError(f"losses must be 'tokens' with a reproducible ContextParallel, got {losses!r}")
        over_data = SoloComm() if data is None else comm_named("data", data)
        self.losses, self.data_ranks = losses, over_data.world
        self._tree = TreeReduction(model, cp, over_data)
        self._device = next(model.parameters()).device

    def reduce(self) -> None:
        """Add the gradients of all ranks to the `grad` of the parameters, with a reproducible ContextParallel.

        All ranks call it after every backward, before gradients are clipped or used.
        """
        if self._tree is None:
            raise ValueError("cp must be reproducible for reduce(): DDP and FSDP2 reduce gradients themselves")
        self._tree.reduce()

    def num_items(self, labels: Tensor | Iterable[Tensor]) -> Tensor:
        """The number of labels of this step, by which the loss is divided.

        With `losses="tokens"` the labels of all data ranks are counted, else the labels of this data rank. `labels`
        [B, S] are the labels of whole rows of this data rank, as `shard_inputs` takes them; with gradient accumulation,
        a list with one tensor for each batch of the step. All ranks call it.
        """
        batches = [labels] if isinstance(labels, Tensor) else check_list("labels", labels, "tensors")
        count = torch.zeros((), dtype=torch.int64, device=self._device)
        for i, batch in enumerate(batches):
            if check_tensor(f"labels[{i}]", batch).ndim != 2:
                raise ValueError(f"labels[{i}] must be [batch, tokens], got {list(batch.shape)}")
            count += (batch[:, 1:] != IGNORED_LABEL).sum().to(self._device)
        if self.losses != "tokens":
            return count
        if self._tree is not None:
            return self._tree.data.all_reduce(count)
        total = self._summed(count)  # every rank of a sequence has counted the same labels
        return total // (self._world // self.data_ranks)

    def loss(self, loss: Tensor) -> Tensor:
        """The loss of all ranks, from the loss of each: to be logged. It has no gradient. All ranks call it."""
        if self._tree is not None:
            sums = getattr(check_tensor("loss", loss), "attnmesh_sums", None)
            if sums is None:
                raise ValueError(
                    "loss must be what the model returned, with a reproducible ContextParallel, got another tensor"
                )
            return self._tree.loss(sums)
        return self._summed(check_tensor("loss", loss).detach().clone()) / self._divisor

    def _summed(self, x: Tensor) -> Tensor:
        for group in self._groups:
            dist.all_reduce(x, group=group)
        return x


def check_reduction(*, counted: bool) -> None:
    """Raise ValueError if a wrapped model whose forward is running reduces gradients in another way than losses need.

    The losses come from `shard_inputs`: shares of the mean over the labels of this data rank, or over a number that
    was given (`counted`).
    """
    for wrapper in _running_wrappers():
        reduction = _reductions.get(wrapper)
        name = type(wrapper).__name__
        if reduction is None:
            raise ValueError(
                f"{name} averages gradients over ranks, but the losses of ranks that share a sequence must be summed: "
                "construct attnmesh.training.data_parallel.GradientReduction(model, cp) once, before training"
            )
        if reduction.losses == "tokens" and reduction.data_ranks > 1 and not counted:
            raise ValueError(
                f'num_items_in_batch must be given to shard_inputs for GradientReduction(losses="tokens") of '
                f"{reduction.data_ranks} data ranks: shard_inputs(..., num_items_in_batch=reduction.num_items(labels))"
            )


def _running_wrappers() -> Iterator[nn.Module]:
    """The DDP and FSDP2 modules in training in whose forward the caller is."""
    for module in modules_in_forward():
        if isinstance(module, DistributedDataParallel | FSDPModule) and module.training:
            yield module


def _wrappers(model: nn.Module) -> list[Any]:
    check_type("model", model, nn.Module)
    if isinstance(model, DistributedDataParallel):
        return [model]
    found = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not found:
        raise ValueError(
            "model must be a DistributedDataParallel or a module on which fully_shard was called (FSDP2), got "
            f"{type(model).__name__}"
        )
    return found


def _mesh_infos(wrapper: Any) -> list[Any]:
    state = wrapper._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # a list in later versions of torch
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return [group.mesh_info for group in groups]


def _groups(wrappers: list[Any]) -> list[dist.ProcessGroup]:
    """The groups over which gradients are reduced, one after the other."""
    if isinstance(wrappers[0], DistributedDataParallel):
        return [wrappers[0].process_group]
    infos = [info for wrapper in wrappers for info in _mesh_infos(wrapper)]
    if not infos:
        raise ValueError("model must have parameters that FSDP2 shards, got none")
    names = ("shard_process_group", "replicate_process_group")
    found = [[getattr(info, name) for name in names if getattr(info, name, None) is not None] for info in infos]
    if any(groups != found[0] for groups in found):
        raise ValueError("model must be sharded over the same mesh in all its parts, got several meshes")
    return found[0]


def _check_members(cp: ContextParallel, wrappers: list[Any], world: int) -> None:
    """Raise ValueError unless gradients are reduced over all ranks of `cp`, as a part of the ranks."""
    if isinstance(wrappers[0], DistributedDataParallel):
        reduced = dist.get_process_group_ranks(wrappers[0].process_group)
    else:
        reduced = sorted(
            next(info for wrapper in wrappers for info in _mesh_infos(wrapper)).mesh.mesh.flatten().tolist()
        )
    if isinstance(cp.comm, GroupComm):
        sharing = dist.get_process_group_ranks(cp.comm.group)
    elif cp.world == 1:
        sharing = [dist.get_rank()]
    else:
        raise ValueError(f"cp must be over a process group or a mesh, got {shown(cp.comm)}")
    if not set(sharing) <= set(reduced) or world % cp.world:
        raise ValueError(
            "model must be wrapped over all ranks of data and context parallelism, got gradients that are reduced over "
            f"the ranks {reduced} and sequences that are shared by the ranks {sharing}: for FSDP2, pass the flattened "
            'mesh, mesh["dp", "cp"]._flatten("dp_cp")'
        )


def _divide_by(wrapper: Any, divisor: float, groups: list[dist.ProcessGroup]) -> None:
    """Gradients are the sum over ranks, divided by `divisor`."""
    if isinstance(wrapper, DistributedDataParallel):
        if divisor == dist.get_world_size(groups[0]) and wrapper not in _reductions:
            return
        try:
            wrapper.register_comm_hook((groups[0], divisor), _all_reduce)
        except RuntimeError as error:
            raise ValueError(f"model must have no other communication hook: {error}") from error
        return
    for name in ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms"):
        if not hasattr(wrapper, name):
            raise ValueError(f"FSDPModule.{name} must exist, which torch {torch.__version__} does not have")
    wrapper.set_gradient_divide_factor(float(divisor))
    if any(parameter.device.type != "cuda" for parameter in wrapper.parameters()):
        wrapper.set_force_sum_reduction_for_comms(True)  # only NCCL multiplies and averages as it reduces


def _all_reduce(state: tuple[dist.ProcessGroup, float], bucket: Any) -> torch.futures.Future[Tensor]:
    """A communication hook of DDP."""
    group, divisor = state
    gradients = bucket.buffer()
    if divisor != 1:
        gradients.div_(divisor)
    work = dist.all_reduce(gradients, group=group, async_op=True)
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


_all_reduce.__annotations__.clear()  # DDP compares them with types, but these are strings
