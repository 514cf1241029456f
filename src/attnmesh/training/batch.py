"""A batch of a Transformers model over ranks: `shard_inputs` gives a rank its tokens, and a `ShardedPass`.

Every rank has the whole batch and takes its shard. Packed documents and padding are found in the whole batch, on every
rank alike, before it is sharded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attnmesh.comm import SharedValues, check_on_all_ranks
from attnmesh.core.layouts import Aligned, Balanced
from attnmesh.core.masks import Causal, Full, packing_of
from attnmesh.core.ranges import as_tensor
from attnmesh.integrations.multimodal import IMAGES
from attnmesh.integrations.reproducible import LEAF, aligned, prepare_pass, token_losses
from attnmesh.integrations.sharded_pass import ShardedMask, ShardedPass, watch_models
from attnmesh.integrations.transformers_attention import check_gaps, document_starts
from attnmesh.integrations.transformers_models import IGNORED_LABEL
from attnmesh.parallel.checksums import ValueChecks
from attnmesh.parallel.context import ContextParallel
from attnmesh.utils.text import explained_in
from attnmesh.utils.validation import check_bool, check_tensor, check_type, shown

_NAMES = ("input_ids", "labels", "position_ids", "attention_mask", "num_items_in_batch", "attention_pass", "use_cache")


def shard_inputs(
    cp: ContextParallel,
    input_ids: Tensor,
    labels: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    document_lengths: Sequence[Sequence[int]] | None = None,
    num_items_in_batch: Tensor | int | None = None,
    balance: bool = True,
    causal: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """This rank's shard of a batch [B, S], as keyword arguments of a model: `model(**shard_inputs(cp, ids, ids))`.

    Args:
        cp: the ranks and the layout.
        input_ids: tokens [B, S], the same on every rank.
        labels: as Transformers takes them, usually the tokens themselves, -100 where there is no loss. They are shifted
            by one position before they are sharded, if `causal`.
        position_ids: positions [B, S] or [1, S]; 0, 1, 2, ... by default. A position that does not follow the one
            before begins a new document, which attends to itself only. Rows may be packed differently.
        attention_mask: [B, S], 0 where a token is padding: before, after or between documents.
        document_lengths: the lengths of the documents of every row, without padding, instead of position_ids that
            restart.
        num_items_in_batch: the number of labels that the loss is divided by; by default the number in this batch. With
            data parallelism, `GradientReduction.num_items(labels)`.
        balance: give packed or padded rows the layout `Balanced`, which divides their work evenly.
        causal: False for an encoder, such as BERT, with a head for masked language models or token classification.
        more: more tensors [B, S, ...] to shard, under the names that the model takes, such as `mm_token_type_ids`; and
            images, under names with `pixel`, `image` or `video` in them, such as `pixel_values` and `image_grid_thw`,
            which every rank gives to the model whole.

    Ranks compare a checksum of every tensor: in every call if it is on the host and has at most 16 MiB; otherwise, as
    reading it would stall the device, in the first call of a group and then in every 100th. A difference raises
    ValueError on every rank.

    The model's loss is this rank's share of the mean over the labels of all ranks: the sum of the losses over all ranks
    is the loss, and the sum of the gradients is the gradient. A rank without labels has the loss 0.
    `inputs["attention_pass"].unshard(logits)` returns the logits of the whole batch, and `gather_log_probs` the
    log-probabilities of its labels.

    Examples:
        >>> ids = torch.randint(64, (1, 10))
        >>> def rank(comm):
        ...     inputs = am.shard_inputs(am.ContextParallel(comm), ids, ids)
        ...     return inputs["input_ids"].shape, model(**inputs).loss.detach()
        >>> results = am.run_virtual(2, rank)
        >>> [shape for shape, _ in results]
        [torch.Size([1, 5]), torch.Size([1, 5])]
        >>> torch.allclose(sum(loss for _, loss in results), model(ids, labels=ids).loss, atol=1e-5)
        True
    """
    check_type("cp", cp, ContextParallel)
    watch_models()
    images = {name: x for name, x in more.items() if IMAGES.search(name) and x is not None}
    per_token = {name: x for name, x in more.items() if not IMAGES.search(name)}

    def check() -> tuple[ShardedPass, SharedValues]:
        _check_batch(input_ids, labels, num_items_in_batch, per_token)
        found, values = _checked_pass(cp, input_ids, position_ids, attention_mask, document_lengths, balance, causal)
        count = num_items_in_batch if isinstance(num_items_in_batch, int) else None
        every = per_token | _tensors_of(images)
        kinds = {name: f"{x.dtype} {list(x.shape)}" for name, x in every.items()}
        more: SharedValues = {"num_items_in_batch": count, "tensors per token": kinds}
        if cp.world > 1:
            items = num_items_in_batch if isinstance(num_items_in_batch, Tensor) else None
            more |= checks.compared(
                input_ids=input_ids, labels=labels, position_ids=position_ids, attention_mask=attention_mask,
                num_items_in_batch=items, **every,
            )  # fmt: skip
        return found, {**more, **values}

    checks = batch_checks(cp)
    attention_pass = check_on_all_ranks(cp.comm, "shard_inputs", check, force=True)
    checks.count()
    inputs: dict[str, Any] = {
        "input_ids": attention_pass.shard(input_ids),
        "position_ids": attention_pass.position_ids,
        # Without a mask Transformers would treat positions that are not consecutive as packed sequences.
        "attention_mask": ShardedMask(attention_pass),
        "use_cache": False,
        "attention_pass": attention_pass,
    }
    inputs |= {name: attention_pass.shard(x) for name, x in per_token.items()} | images
    for name, x in {"input_ids": input_ids, **per_token}.items():
        attention_pass.keep_whole(name, x, inputs[name])
    attention_pass.wholes |= {"attention_mask": attention_mask, "position_ids": position_ids}
    attention_pass.has_images = bool(images)
    if labels is not None:
        shifted = F.pad(labels, (0, 1), value=IGNORED_LABEL)[:, 1:] if causal else labels
        local = attention_pass.shard(shifted).long()
        count = (shifted != IGNORED_LABEL).sum() if num_items_in_batch is None else num_items_in_batch
        count = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
        inputs |= {"labels": local, "num_items_in_batch": count}
        if causal:
            inputs["shift_labels"] = local
        attention_pass.check_once = partial(_check_reduction, counted=num_items_in_batch is not None)
    return inputs


def gather_log_probs(inputs: Mapping[str, Any], logits: Tensor) -> Tensor:
    """The log-probabilities of the labels of the whole batch, float32 [B, S], on every rank.

    `inputs` come from `shard_inputs`, and `logits` [B, n, vocabulary] is what the model computed from them. Entry t of
    a row is the log-probability of label t + 1; where there is no label, it is 0. Only one number per token is sent.
    Differentiable: gradients are summed over ranks, so a loss that every rank computes from the result counts once for
    each rank. With a reproducible ContextParallel it counts once.

    Examples:
        >>> ids = torch.randint(64, (1, 10))
        >>> def rank(comm):
        ...     inputs = am.shard_inputs(am.ContextParallel(comm), ids, ids)
        ...     return am.gather_log_probs(inputs, model(**inputs).logits).detach()
        >>> log_probs = am.run_virtual(2, rank)[1]
        >>> expected = model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        >>> log_probs.shape, torch.allclose(log_probs[:, :-1], expected, atol=1e-5)
        (torch.Size([1, 10]), True)
    """
    if (
        not isinstance(inputs, Mapping)
        or not isinstance(inputs.get("attention_pass"), ShardedPass)
        or "shift_labels" not in inputs
    ):
        raise ValueError(f"inputs must be what shard_inputs returned for labels, got {shown(inputs)}")
    labels: Tensor = inputs["shift_labels"]
    attention_pass: ShardedPass = inputs["attention_pass"]

    def check() -> tuple[None, SharedValues]:
        wanted = f"[{labels.shape[0]}, {labels.shape[1]}, vocabulary]"
        check_tensor("logits", logits, wanted)
        if logits.dim() != 3 or logits.shape[:2] != labels.shape or not logits.is_floating_point():
            raise ValueError(f"logits must be floating point {wanted}, got {logits.dtype} {list(logits.shape)}")
        if logits.device != labels.device:
            raise ValueError(f"logits must be on the device of the labels, {labels.device}, got {logits.device}")
        if labels.device.type == "cpu" and labels.numel() and int(labels.max()) >= logits.shape[2]:
            raise ValueError(
                f"logits must have an entry for every label, got {logits.shape[2]} and the label {int(labels.max())}"
            )
        return None, {"vocabulary": logits.shape[2], "dtype": logits.dtype}

    check_on_all_ranks(attention_pass.cp.comm, "gather_log_probs", check)
    if attention_pass.leaves is None:
        nll = F.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten().long(), ignore_index=IGNORED_LABEL, reduction="none"
        )
    else:
        nll = token_losses(logits.flatten(0, 1), labels.flatten())
    return attention_pass.unshard(-nll.view(labels.shape))


def _check_reduction(*, counted: bool) -> None:
    from attnmesh.training.data_parallel import check_reduction  # it imports FSDP, which takes a while

    check_reduction(counted=counted)


@explained_in("training.md#packed-and-padded-batches")
def _checked_pass(
    cp: ContextParallel,
    input_ids: Tensor,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    document_lengths: Sequence[Sequence[int]] | None,
    balance: bool,
    causal: bool,
) -> tuple[ShardedPass, SharedValues]:
    """The pass, and what must be equal on all ranks."""
    check_bool(balance=balance, causal=causal)
    rows, length = shape = (input_ids.shape[0], input_ids.shape[1])
    if length < cp.world:
        raise ValueError(f"input_ids must have at least one token per rank ({cp.world}), got {list(input_ids.shape)}")
    real = None if attention_mask is None else _real_tokens(attention_mask, input_ids)
    positions = None if position_ids is None else _checked_positions(position_ids, input_ids)
    if document_lengths is not None:
        if positions is not None:
            raise ValueError(
                f"document_lengths must be None if position_ids are given, which restart with a document, got "
                f"{shown(document_lengths)}"
            )
        if real is not None:
            check_gaps(None, None, real)
        positions = lengths_to_positions(document_lengths, real, shape)
    starts = None if positions is None else document_starts(positions).cpu()  # a byte per token leaves the device
    if real is not None:
        check_gaps(None if positions is None else positions.cpu(), starts, real)
    packing = packing_of(starts, real, shape)
    size = cp.layout.size if isinstance(cp.layout, Aligned) else LEAF
    if balance and packing.mask is not None:
        cp = cp.with_layout(Balanced(Causal() & packing.mask if causal else Full() & packing.mask))

    if cp.reproducible:
        cp = aligned(cp, size)
    device = input_ids.device
    if positions is None:
        local = as_tensor(cp.layout.ranges(length, cp.world, cp.rank), device)[None].repeat(rows, 1)
    else:
        local = _move(cp.shard(positions, 1), device)
    every = torch.ones(local.shape, dtype=torch.bool, device=device)
    found = ShardedPass(cp, length, packing, local, every if real is None else _move(cp.shard(real, 1), device))
    found.counts_padding = positions is None and any(packing.first)
    found.causal, found.has_model_positions = causal, position_ids is not None
    if cp.reproducible:
        prepare_pass(found)
    return found, {
        "input_ids": list(input_ids.shape), "packing": packing.mask, "balance": balance, "causal": causal
    }  # fmt: skip


def _tensors_of(images: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of arguments that describe images, each by a name; ValueError for what is no tensor."""
    found: dict[str, Tensor] = {}
    for name, x in images.items():
        for i, each in enumerate(x if isinstance(x, list | tuple) else [x]):
            if not isinstance(each, Tensor | int | float):
                raise ValueError(f"{name} must be a tensor or a list of tensors or numbers, got {shown(x)}")
            found[f"{name}[{i}]" if isinstance(x, list | tuple) else name] = (
                each if isinstance(each, Tensor) else torch.tensor(each, device="cpu")
            )
    return found


def batch_checks(cp: ContextParallel, kind: str = "shard_inputs") -> ValueChecks:
    """When ranks compare the values of a batch that they cannot compare in every call."""
    return ValueChecks(cp.comm.log, kind, first=1, every=100)


def _check_batch(
    input_ids: Tensor, labels: Tensor | None, num_items_in_batch: Tensor | int | None, per_token: Mapping[str, Tensor]
) -> None:
    _check_ids("input_ids", input_ids)
    if labels is not None:
        _check_ids("labels", labels)
        if labels.shape != input_ids.shape or labels.device != input_ids.device:
            raise ValueError(
                f"labels must have the shape of input_ids, {list(input_ids.shape)}, and be on {input_ids.device}, got "
                f"{list(labels.shape)} on {labels.device}"
            )
    if num_items_in_batch is not None and not (
        (isinstance(num_items_in_batch, Tensor) and num_items_in_batch.dim() == 0)
        or (isinstance(num_items_in_batch, int) and not isinstance(num_items_in_batch, bool))
    ):
        raise ValueError(f"num_items_in_batch must be an integer, got {shown(num_items_in_batch)}")
    for name, x in per_token.items():
        if name in _NAMES or not isinstance(x, Tensor) or x.shape[:2] != input_ids.shape:
            got = list(x.shape) if isinstance(x, Tensor) else shown(x)
            raise ValueError(f"{name} must be a tensor {list(input_ids.shape)} and more dimensions, got {got}")


def _check_ids(name: str, ids: Tensor) -> None:
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else f"{type(ids).__name__} {shown(ids)}"
        raise ValueError(f"{name} must be an int32 or int64 tensor [batch, tokens], got {got}")


def _check_values(name: str, x: Tensor) -> None:
    check_tensor(name, x)
    if x.device.type == "meta":
        raise ValueError(f"{name} must have values, got a tensor on the device meta")


def _move(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on that device. A copy from pinned memory does not wait for what the GPU has yet to do."""
    if device.type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def _checked_positions(position_ids: Tensor, input_ids: Tensor) -> Tensor:
    _check_ids("position_ids", position_ids)
    _check_values("position_ids", position_ids)
    if position_ids.shape not in (input_ids.shape, (1, input_ids.shape[1])):
        raise ValueError(
            f"position_ids must have the shape of input_ids, {list(input_ids.shape)}, or [1, {input_ids.shape[1]}], "
            f"got {list(position_ids.shape)}"
        )
    return position_ids.long().expand(input_ids.shape)


def _real_tokens(attention_mask: Tensor, input_ids: Tensor) -> Tensor | None:
    """The tokens that are not padding, bool [B, S] on the host; None if there is no padding."""
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != input_ids.shape:
        got = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else shown(attention_mask)
        raise ValueError(
            f"attention_mask must have the shape of input_ids, {list(input_ids.shape)}, got {got}: a mask of pairs of "
            f"tokens is not supported, documents are given by position_ids or document_lengths"
        )
    _check_values("attention_mask", attention_mask)
    real = attention_mask.bool()
    all_real, others = torch.stack([real.all(), (real.to(attention_mask.dtype) != attention_mask).any()]).tolist()
    if others:
        raise ValueError(
            f"attention_mask must be 0 and 1 (padding is 0), got values up to {attention_mask.max().item()}"
        )
    return None if all_real else real.cpu()


def lengths_to_positions(
    document_lengths: Sequence[Sequence[int]], real: Tensor | None, shape: tuple[int, int]
) -> Tensor:
    """position_ids [B, S] that restart with every document, from the lengths of the documents of every row."""
    rows, length = shape
    if not _is_lengths(document_lengths) or len(document_lengths) != rows:
        raise ValueError(
            f"document_lengths must be a list of {rows} lists of positive lengths, one for each row of input_ids, got "
            f"{shown(document_lengths)}"
        )
    positions = np.zeros(shape, dtype=np.int64)
    for row, lengths in enumerate(document_lengths):
        tokens = length if real is None else int(real[row].numpy().sum())
        if sum(lengths) != tokens:
            raise ValueError(
                f"document_lengths[{row}] must add up to the {tokens} tokens of the row that are not padding, got "
                f"{shown(list(lengths))}, which add up to {sum(lengths)}"
            )
        begin = 0 if real is None or not tokens else int(real[row].numpy().argmax())
        for count in lengths:
            positions[row, begin : begin + count] = np.arange(count)
            begin += count
    return torch.from_numpy(positions)


def _is_lengths(value: object) -> bool:
    return isinstance(value, Sequence) and all(
        isinstance(row, Sequence)
        and not isinstance(row, str)
        and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in row)
        for row in value
    )
