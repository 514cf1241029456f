"""Context parallelism of torchtitan with attnmesh: two lines in a config.

    override.imports = ["attnmesh.training.torchtitan.flex_attention"]
    parallelism.context_parallel_degree = 8

The override replaces the inner attention of every layer. Batches are sharded by layouts of attnmesh, for tokens, labels
and positions alike, and all layers and pipeline stages get the masks of torchtitan as masks of attnmesh. The module
imports torchtitan: import it by name, as `override.imports` does.
"""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks

from attnmesh.comm import SharedValues, SoloComm, check_on_all_ranks
from attnmesh.core.layouts import Balanced, Contiguous, Layout, Zigzag
from attnmesh.core.masks import Causal, Full, Mask
from attnmesh.integrations.transformers_attention import Patches
from attnmesh.parallel.context import ContextParallel
from attnmesh.parallel.executor import BACKENDS
from attnmesh.plan.shards import SCHEDULES
from attnmesh.training.batch import batch_checks
from attnmesh.training.torchtitan_masks import mask_of_blocks, mask_of_metadata, masks_under, window_mask
from attnmesh.utils.optional import require
from attnmesh.utils.text import see
from attnmesh.utils.validation import check_choice, shown

require("torchtitan", extra="torchtitan")

from torchtitan.config.override import derive, override  # noqa: E402
from torchtitan.distributed.compile import apply_compile  # noqa: E402
from torchtitan.distributed.context_parallel import (  # noqa: E402
    apply_cp_to_forward,
    prepare_context_parallel_input,
)
from torchtitan.distributed.cudagraph import wrap_with_cuda_graph  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata, spmd  # noqa: E402
from torchtitan.models.common.decoder import Decoder  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402
from torchtitan.protocols.sharding import LocalMapConfig  # noqa: E402

__all__ = ["TESTED", "disable", "enable", "flex_attention", "varlen_attention"]

TESTED = {"torchtitan": "0.3"}
"""The version whose functions `enable()` replaces."""

_LOG = logging.getLogger(__name__)
_PAGE = "stacks.md#torchtitan"
_LAYERS = ["layers.*", "*model.layers.*"]  # of a decoder: encoders of images have layers under another name
_CONTEXT = "_attnmesh_context"  # of a DeviceMesh

_options: dict[str, Any] = {"schedule": "auto", "backend": "auto"}  # of `enable`
_patches = Patches()


# The overrides.


@override(target=FlexAttention.Config, fqns=_LAYERS, description="attention over ranks by attnmesh")  # type: ignore[untyped-decorator]
def flex_attention(config: Any, *, schedule: str = "auto", backend: str = "auto") -> Any:
    """The override of FlexAttention, to be named in `override.imports`. `schedule` and `backend` as in ContextParallel.

    It calls `enable()`. The masks come from the model's `get_attention_masks`.
    """
    return _replaced(config, FlexAttentionOverRanks.Config, schedule, backend)


@override(target=VarlenAttention.Config, fqns=_LAYERS, description="attention over ranks by attnmesh")  # type: ignore[untyped-decorator]
def varlen_attention(config: Any, *, schedule: str = "auto", backend: str = "auto") -> Any:
    """The override of VarlenAttention, to be named in `override.imports`. `schedule`, `backend` as in ContextParallel.

    It calls `enable()`. Documents are read from the metadata, and `window_size` from the config.
    """
    return _replaced(config, VarlenAttentionOverRanks.Config, schedule, backend)


def _replaced(config: Any, to: Any, schedule: str, backend: str) -> Any:
    enable(schedule=schedule, backend=backend)
    found = derive(config, to)
    sharding = found.sharding_config
    if sharding is not None:  # torchtitan gathers k and v over cp, and reduces their gradients
        given = sharding.in_src_shardings
        gradients = tuple(given[name] for name in ("q_BLNH", "k_BLNH", "v_BLNH"))
        found.sharding_config = replace(
            sharding, in_dst_shardings=given, local_map=LocalMapConfig(in_grad_placements=gradients)
        )
    return found


def enable(*, schedule: str = "auto", backend: str = "auto") -> None:
    """Shard torchtitan's batches for attnmesh; the overrides call it. A second call changes the arguments.

    Raises ValueError for a version of torchtitan that was not tested.
    """
    check_choice("schedule", schedule, ("auto", *SCHEDULES))
    check_choice("backend", backend, BACKENDS)
    _check_versions()
    disable()
    _options.update(schedule=schedule, backend=backend)
    _replace_everywhere(prepare_context_parallel_input, _shard_batch)
    _replace_everywhere(apply_cp_to_forward, _keep_forward)
    _replace_everywhere(apply_compile, _refuse_compile)
    _replace_everywhere(wrap_with_cuda_graph, _without_graph)
    _patches.replace(Decoder, "_create_flex_attention_mask", _describe_mask)


def disable() -> None:
    """Restore torchtitan. A model that was built before keeps attnmesh's attention."""
    _patches.undo()
    _options.update(schedule="auto", backend="auto")


def _check_versions() -> None:
    for package, tested in TESTED.items():
        version = importlib.metadata.version(package)
        if version.split(".")[:2] != tested.split("."):
            raise ValueError(
                f"the version of {package} must be {tested}, got {version}: attnmesh replaces functions of it and was "
                f"tested with {tested}"
            )


def _replace_everywhere(function: Callable[..., Any], by: Callable[..., Any]) -> None:
    """Replace a function of torchtitan in all modules that have imported it."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torchtitan" and vars(module).get(function.__name__) is function:
            _patches.replace(module, function.__name__, by)  # type: ignore[arg-type]


# A batch over ranks.


@dataclass(frozen=True, eq=False)
class RankBatch:
    """A batch, or a microbatch of a pipeline, whose sequence is sharded: what layers get as `attention_masks`."""

    cp: ContextParallel
    length: int
    mask: Mask
    _under: dict[Mask, Mask] = field(default_factory=dict, repr=False)

    def under(self, layer: Mask) -> Mask:
        """The mask of a layer; the same object for all layers of a kind, as repeated calls are known by it."""
        if layer not in self._under:
            self._under[layer] = masks_under(self.mask, layer)
        return self._under[layer]


def _shard_batch(
    original: Any,
    inputs: Tensor,
    labels: Tensor,
    extra_kwargs: dict[str, Any],
    cp_mesh: Any,
    device: torch.device,
    load_balancer_type: str | None = "headtail",
    ptrr_mask_key: str | None = None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """prepare_context_parallel_input: shards of the tokens, labels and positions, and a RankBatch for every mask."""
    cp = _context_of(cp_mesh)
    checks = batch_checks(cp, "torchtitan")

    def check() -> tuple[tuple[Tensor, Mask | dict[str, Mask], Layout], SharedValues]:
        positions = _checked_positions(inputs, labels, extra_kwargs)
        given = extra_kwargs.get("attention_masks")
        masks = _read_masks(given, (inputs.shape[0], inputs.shape[1]))
        work = masks
        if isinstance(masks, Mask) and isinstance(given, VarlenMetadata):  # documents; layers add their windows
            work = masks_under(masks, Causal())
        layout = _layout(load_balancer_type, work, ptrr_mask_key)
        values = {"input": list(inputs.shape), "attention_masks": _compared(masks), "layout": layout}
        return (positions, masks, layout), values | checks.compared(input=inputs, labels=labels, positions=positions)

    positions, masks, layout = check_on_all_ranks(cp.comm, "attnmesh.training.torchtitan", check)
    checks.count()
    cp, length = cp.with_layout(layout), inputs.shape[1]
    whole = [inputs, labels, positions]
    inputs, labels, positions = (cp.shard(x, 1).contiguous() for x in whole)
    if isinstance(masks, dict):
        batch: Any = {name: RankBatch(cp, length, mask) for name, mask in masks.items()}
    else:
        batch = RankBatch(cp, length, masks)
    return inputs, labels, {**extra_kwargs, "positions": positions, "attention_masks": batch}


def _context_of(mesh: Any) -> ContextParallel:
    """The ContextParallel of the ranks of a mesh: one for training and validation."""
    known = getattr(mesh, _CONTEXT, None)
    if known is None or (known.schedule, known.backend) != (_options["schedule"], _options["backend"]):
        known = ContextParallel(mesh, **_options)
        setattr(mesh, _CONTEXT, known)
    return known


def _checked_positions(inputs: Tensor, labels: Tensor, extra_kwargs: Mapping[str, Any]) -> Tensor:
    others = sorted(set(extra_kwargs) - {"positions", "attention_masks"})
    if others:
        raise ValueError(
            f"a batch must have input and positions only over ranks that share a sequence, got {', '.join(others)}: "
            f"tensors of images are not sharded{see(_PAGE)}"
        )
    positions = extra_kwargs.get("positions")
    if not isinstance(positions, Tensor) or positions.shape != inputs.shape or labels.shape != inputs.shape:
        got = [list(x.shape) if isinstance(x, Tensor) else shown(x) for x in (positions, labels)]
        raise ValueError(
            f"positions and labels must have the shape of input, {list(inputs.shape)}, got {got[0]} and {got[1]}"
        )
    return positions


def _read_masks(masks: Any, shape: tuple[int, int]) -> Mask | dict[str, Mask]:
    """The mask of a batch, or a mask for each kind of layer."""
    if isinstance(masks, dict):
        return {name: _read_blocks(mask, shape) for name, mask in masks.items()}
    return mask_of_metadata(masks, shape) if isinstance(masks, VarlenMetadata) else _read_blocks(masks, shape)


def _read_blocks(mask: Any, shape: tuple[int, int]) -> Mask:
    if not isinstance(mask, BlockMask):
        raise ValueError(
            f"attention_masks must be a BlockMask, VarlenMetadata, or a dict of BlockMask, got {type(mask).__name__}: "
            f"layers other than attention are not served over ranks{see(_PAGE)}"
        )
    if mask.seq_lengths[0] != shape[1]:
        raise ValueError(f"attention_masks must be of {shape[1]} tokens, as input, got {mask.seq_lengths[0]}")
    return mask_of_blocks(mask)


def _compared(masks: Mask | dict[str, Mask]) -> object:
    return sorted(masks.items()) if isinstance(masks, dict) else masks


def _layout(load_balancer: str | None, masks: Mask | dict[str, Mask], key: str | None) -> Layout:
    """The layout for `parallelism.context_parallel_load_balancer`."""
    if load_balancer is None:
        return Contiguous()
    check_choice("parallelism.context_parallel_load_balancer", load_balancer, ("headtail", "ptrr"))
    if load_balancer == "headtail":
        return Zigzag()
    if isinstance(masks, dict):
        check_choice("parallelism.context_parallel_ptrr_mask_key", key, tuple(masks))
        return Balanced(masks[str(key)])
    return Balanced(masks)


# The inner attention.


class _AttentionOverRanks(Module):  # type: ignore[misc]
    """Attention of the queries of this rank over the keys of all ranks of `cp`."""

    ranks = 1
    """The number of ranks that share a sequence."""

    def parallelize(self, parallel_dims: Any) -> None:
        """Module.parallelize: the heads of this rank become a local tensor, the sequence stays sharded."""
        self.ranks = parallel_dims.cp
        super().parallelize(parallel_dims)

    def _attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], masks: Any, layer: Mask, scale: float | None, out_transform: Any
    ) -> Tensor:
        if spmd.is_type_checking():
            raise ValueError(f"debug.spmd_typechecking must be False with attnmesh's attention, got True{see(_PAGE)}")
        q, k, v = (x.transpose(1, 2) for x in qkv)
        batch = masks if isinstance(masks, RankBatch) else self._whole(masks, q)
        mask = batch.under(layer)
        if out_transform is None:
            out = batch.cp.attention(q, k, v, mask=mask, scale=scale, length=batch.length)
            return out.transpose(1, 2)
        out, lse = batch.cp.attention(q, k, v, mask=mask, scale=scale, length=batch.length, return_lse=True)
        transformed: Tensor = out_transform(out.transpose(1, 2), lse.transpose(1, 2))
        return transformed

    def _whole(self, masks: Any, q: Tensor) -> RankBatch:
        """The batch of a rank that shares its sequences with no other one."""
        if self.ranks > 1:
            raise ValueError(
                f"attention_masks must come from prepare_context_parallel_input, which torchtitan's Trainer and "
                f"Validator call, with context_parallel_degree={self.ranks}, got {type(masks).__name__}{see(_PAGE)}"
            )
        for known, batch in _latest:
            if known is masks:
                return batch
        read = _read_masks(masks, (q.shape[0], q.shape[2]))
        assert isinstance(read, Mask), "layers get the mask of their kind"
        found = RankBatch(ContextParallel(SoloComm(), **_options), q.shape[2], read)
        _latest.append((masks, found))
        return found


_latest: deque[tuple[Any, RankBatch]] = deque(maxlen=8)  # without context parallelism: masks that several layers share


class FlexAttentionOverRanks(_AttentionOverRanks):
    """FlexAttention by attnmesh. `block_size` and `kernel_options` are of kernels that do not run."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):  # type: ignore[misc]
        """That of FlexAttention."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any,
        score_mod: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """FlexAttention.forward. Tensors are [B,n,H,D]."""
        _check_unserved(score_mod=score_mod, **kwargs)
        return self._attend((q_BLNH, k_BLNH, v_BLNH), attention_masks, Full(), scale, out_transform)


class VarlenAttentionOverRanks(_AttentionOverRanks):
    """VarlenAttention by attnmesh. Tensors keep their dtype; torchtitan casts them to bfloat16."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):  # type: ignore[misc]
        """That of VarlenAttention."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._layer = window_mask(config.window_size)

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """VarlenAttention.forward. Tensors are [B,n,H,D]."""
        _check_unserved(**kwargs)
        return self._attend((q_BLNH, k_BLNH, v_BLNH), attention_masks, self._layer, scale, out_transform)


def _check_unserved(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} must be None with attnmesh's attention, got {shown(value)}{see(_PAGE)}")


# Functions of torchtitan that are replaced.


def _keep_forward(original: Any, attention_modules: Any, cp_mesh: Any) -> Any:
    """apply_cp_to_forward: with spmd_backend "partial_dtensor" it wraps the forward of all inner attention."""
    others = sorted({type(x).__name__ for x in attention_modules if not isinstance(x, _AttentionOverRanks)})
    if not any(isinstance(module, _AttentionOverRanks) for module in attention_modules):
        return original(attention_modules, cp_mesh)
    if others:
        raise ValueError(f"override.imports must replace the inner attention of all layers, got {', '.join(others)}")
    for module in attention_modules:
        module.ranks = cp_mesh.size()
    return None


def _describe_mask(original: Any, self: Any, positions: Tensor, attn_config: Any, mask_mods: Any) -> BlockMask:
    """Decoder._create_flex_attention_mask: a BlockMask of one block, with the mask functions. No pair is evaluated."""
    if not isinstance(attn_config.inner_attention, FlexAttentionOverRanks.Config):
        found: BlockMask = original(self, positions, attn_config, mask_mods)
        return found
    rows, length = positions.shape
    one = torch.ones(rows, 1, 1, dtype=torch.int32, device=positions.device)
    return BlockMask.from_kv_blocks(
        one, torch.zeros_like(one)[..., None], BLOCK_SIZE=length, mask_mod=and_masks(*mask_mods),
        seq_lengths=(length, length), compute_q_blocks=False,
    )  # fmt: skip


def _refuse_compile(original: Any, model: Any, **kwargs: Any) -> Any:
    """apply_compile: a mask is a constant of a compiled graph, which every batch would compile anew."""
    if any(isinstance(module, _AttentionOverRanks) for module in model.modules()):
        raise ValueError(
            f'compile.components must not have "model" with attnmesh\'s attention, whose masks change with every '
            f"batch{see(_PAGE)}"
        )
    return original(model, **kwargs)


def _without_graph(original: Any, fwd_bwd_fn: Any) -> Any:
    """wrap_with_cuda_graph: a graph would replay the documents of the batch that it captured."""
    _LOG.warning("CUDA graphs are not captured: attnmesh plans the documents of every batch on the host")
    return fwd_bwd_fn
