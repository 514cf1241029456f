"""`AttnmeshEngine`: verl's FSDP engine of language models, whose ranks share sequences with attnmesh.

verl packs the sequences of a micro-batch into one row, whose positions restart, and computes log-probabilities and
entropies of every token of it. Here a rank has the shard of that row that `shard_inputs` gives it; what is computed of
its tokens is gathered, so that every rank computes the loss of the whole row. FSDP averages gradients over all ranks,
and the gradients of what is gathered are summed over the ranks that share it: a loss counts once for each of them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor
from verl.utils import tensordict_utils
from verl.workers.engine import FSDPEngineWithLMHead
from verl.workers.engine.fsdp import transformer_impl

from attnmesh.comm import SoloComm
from attnmesh.integrations.sharded_pass import ShardedPass
from attnmesh.integrations.transformers_attention import Patches, document_starts
from attnmesh.integrations.transformers_models import NAME
from attnmesh.parallel.context import ContextParallel
from attnmesh.training.batch import shard_inputs
from attnmesh.utils.validation import shown

_LABELS, _TEMPERATURES = "input_ids_rmpad_rolled", "temperature_rmpad"  # per token, as verl's engine names them


class AttnmeshEngine(FSDPEngineWithLMHead):  # type: ignore[misc]  # verl has no types
    """verl's FSDP engine with attnmesh for sequences that `ulysses_sequence_parallel_size` ranks share."""

    options: ClassVar[dict[str, Any]] = {}  # of ContextParallel, by `enable`

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        _check_configs(model_config, engine_config)
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self._pass: ShardedPass | None = None

    def _init_device_mesh(self) -> None:
        super()._init_device_mesh()
        # The sizes and the mesh of sequence parallelism stay; what verl does with its group is not called.
        self.use_ulysses_sp, self.ulysses_parallel_group = False, None
        mesh = self.ulysses_device_mesh
        self.cp = ContextParallel(SoloComm() if mesh is None else mesh["sp"].get_group(), **self.options)

    def _build_module(self) -> Any:
        config = self.model_config.hf_config
        implementation = config._attn_implementation
        patches = Patches()
        # What verl patches in models is for Ulysses, fused kernels and images. None of them is used here, and verl
        # would refuse numbers of heads that the ranks do not divide.
        patches.replace(transformer_impl, "apply_monkey_patch", lambda *_, **__: None)
        config._attn_implementation = NAME
        try:
            return super()._build_module()
        finally:
            config._attn_implementation = implementation
            patches.undo()

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """This rank's shard of a micro-batch, as arguments of the model and of `prepare_model_outputs`."""
        _check_batch(micro_batch)
        row, outputs = super().prepare_model_inputs(micro_batch=micro_batch)
        _check_row(row, micro_batch["input_ids"].offsets())
        per_token = {name: outputs[name][None] for name in (_LABELS, _TEMPERATURES)}
        inputs = shard_inputs(self.cp, row["input_ids"], position_ids=row["position_ids"], **per_token)
        outputs |= {name: inputs.pop(name)[0] for name in per_token}
        outputs["attention_pass"] = inputs["attention_pass"]
        del inputs["use_cache"]  # verl passes it
        return inputs, outputs

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Any]:
        """Log-probabilities and what else verl computes per token, of the whole micro-batch, as nested tensors."""
        self._pass = output_args["attention_pass"]
        try:
            found: dict[str, Any] = super().prepare_model_outputs(
                output, output_args, micro_batch, logits_processor_func
            )
        finally:
            self._pass = None
        return found

    def _gather_and_unpad_packed(self, tensor: Tensor, pad_size: int) -> Tensor:
        """One value per token of the whole row, from the values of this rank's tokens."""
        assert self._pass is not None
        row = self._pass.unshard(tensor[None])[0]
        return row[: row.shape[0] - pad_size]


def _check_configs(model: Any, engine: Any) -> None:
    _check_values({"strategy": (engine.strategy, "fsdp2")})  # others have other options
    ranks, world = engine.ulysses_sequence_parallel_size, dist.get_world_size()
    if not isinstance(ranks, int) or ranks < 1 or world % ranks:
        raise ValueError(f"ulysses_sequence_parallel_size must divide the {world} ranks, got {shown(ranks)}")
    _check_values(
        {
            "use_remove_padding": (model.use_remove_padding, True),
            "use_fused_kernels": (model.use_fused_kernels, False),
            "use_liger": (model.use_liger, False),
            "enable_activation_offload": (model.enable_activation_offload, False),
            "qat.enable": (engine.qat.enable, False),
            "mtp.enable": (model.mtp.enable, False),
        }
    )
    config = model.hf_config
    if getattr(config, "vision_config", None) is not None or getattr(config, "audio_config", None) is not None:
        raise ValueError(f"model_type must be a language model without images and sound, got {config.model_type!r}")


def _check_batch(micro_batch: Any) -> None:
    wanted = {"use_remove_padding": True, "use_fused_kernels": False, "distillation_use_topk": False}
    read = tensordict_utils.get_non_tensor_data
    _check_values({name: (read(micro_batch, name, allowed), allowed) for name, allowed in wanted.items()})


def _check_values(values: dict[str, tuple[Any, Any]]) -> None:
    """Raise ValueError unless every value is the one that is allowed, the second of its pair."""
    for name, (value, allowed) in values.items():
        if value != allowed:
            raise ValueError(f"{name} must be {allowed!r} for attnmesh's engine of verl, got {shown(value)}")


def _check_row(row: dict[str, Any], offsets: Tensor) -> None:
    """Raise ValueError unless the row is text, and its positions restart where its sequences begin, and only there."""
    known = {"input_ids", "attention_mask", "position_ids"}
    if set(row) != known:
        raise ValueError(
            f"multi_modal_inputs must be empty and the model must take no cu_seqlens, got {sorted(set(row) - known)}"
        )
    positions = row["position_ids"]
    if positions.dim() != 2:
        raise ValueError(f"position_ids must be one number per token, got {list(positions.shape)}")
    found = document_starts(positions.long())[0].nonzero()[:, 0].tolist()
    begins = offsets.tolist()
    if begins[-1] == positions.shape[1]:  # else the row is padded, with one more sequence
        begins.pop()
    if found != begins:
        raise ValueError(
            f"position_ids must restart where a sequence of the micro-batch begins, at {shown(begins)}, and only "
            f"there, got {shown(found)}"
        )
