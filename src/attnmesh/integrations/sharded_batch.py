"""A batch of a Transformers model over ranks: `shard_inputs` gives a rank its tokens, `ShardedPass` attends over all.

Every rank has the whole batch and takes its shard. Packed documents and padding are found in the whole batch, on every
rank alike, before it is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmesh.comm import SharedValues, check_on_all_ranks
from attnmesh.core.layouts import Balanced
from attnmesh.core.mask_encoding import traced_mask
from attnmesh.core.masks import Causal, Mask
from attnmesh.core.packing import (
    IGNORED_LABEL,
    Packing,
    check_gaps,
    document_starts,
    lengths_to_positions,
    packing_of,
)
from attnmesh.core.ranges import as_tensor
from attnmesh.integrations.model_calls import WatchedPass, watch_models
from attnmesh.integrations.transformers_models import MODELS_PAGE, modules_in_forward
from attnmesh.parallel.checksums import ValueChecks
from attnmesh.parallel.context import ContextParallel
from attnmesh.utils.error_links import explained_in, see
from attnmesh.utils.validation import check_bool, check_tensor, check_type, shown

_NAMES = ("input_ids", "labels", "position_ids", "attention_mask", "num_items_in_batch", "mesh", "use_cache")


class ShardedPass(WatchedPass):
    """How a model attends in one forward pass over rows of `length` tokens that are sharded over ranks.

    A model takes it as the keyword argument `mesh`. It is not a dataclass, because wrappers of models rebuild those.

    Attributes:
        cp: the ranks, with the layout of this batch.
        length: the number of tokens of a whole row.
        packing: the documents and the padding of the whole batch.
        position_ids: this rank's positions [B, n], as the model takes them.
        attention_mask: this rank's tokens [B, n] that are not padding.
        losses: "mean" if losses are shares of the mean over this batch, "counted" if they are divided by a number that
            was given, None if they are something else. Wrapped models must reduce gradients accordingly: see
            `data_parallel`.
    """

    losses: str | None = None
    balances_experts = False  # whether the load-balancing loss is computed from the tokens of all ranks

    def __init__(
        self, cp: ContextParallel, length: int, packing: Packing, position_ids: Tensor, attention_mask: Tensor
    ) -> None:
        super().__init__()
        self.cp, self.length, self.packing = cp, length, packing
        self.position_ids, self.attention_mask = position_ids, attention_mask
        self._documents = packing.numbers()  # for compiled graphs
        self._masks: dict[Mask, Mask] = {}
        self._accepted: dict[str, Tensor] = {}
        self._rotary_checked = False
        self.counts_padding = False
        """Whether padding comes before tokens, and positions were not given: they are then counted in the row."""

    def index_in_row(self) -> Tensor:
        """The index in the row of each of this rank's tokens [n]."""
        return self.cp.positions(self.length).to(self.position_ids.device)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's shard of a tensor that has one entry per token along `dim`."""
        return self.cp.shard(x, dim).contiguous()

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole tensor from the shards of all ranks, on every rank. Its gradients are summed over ranks."""
        return self.cp.unshard(x, dim, self.length)

    def mask(self, layer: Mask) -> Mask:
        """The mask of a layer within the documents of this batch."""
        if torch.compiler.is_compiling():
            return traced_mask(layer, self._documents)
        if layer not in self._masks:
            self._masks[layer] = self.packing.apply(layer)
        return self._masks[layer]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, sinks: Tensor | None,
        softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Out of this rank's queries over the keys of all ranks."""
        if self.losses is not None and not torch.compiler.is_compiling():
            from attnmesh.integrations.data_parallel import check_reduction  # it imports FSDP, which takes a while

            check_reduction(counted=self.losses == "counted")
            self.losses = None  # the other layers are not checked again
        return self.cp.attention(
            q, k, v, mask=self.mask(mask), scale=scale, softcap=softcap, sinks=sinks, length=self.length
        )

    def check_given(self, name: str, given: Tensor) -> None:
        """Raise ValueError on every rank if the model was given other positions or another mask than this pass has.

        Documents and padding come from the whole batch, so a tensor that replaces this rank's shard has no effect on
        attention. A copy, such as one on another device, is compared once.
        """
        expected: Tensor = getattr(self, name)
        if torch.compiler.is_compiling():
            if given.shape != expected.shape:
                raise ValueError(f"{name} must be that of shard_inputs, got a tensor of shape {list(given.shape)}")
            torch._assert_async((given == expected).all(), f"{name} must be that of shard_inputs, got another tensor")
            return
        if given is expected or given is self._accepted.get(name):
            return

        def check() -> tuple[None, SharedValues]:
            if given.shape != expected.shape or not torch.equal(given.to(expected), expected):
                raise ValueError(
                    f"{name} must be that of shard_inputs, got another tensor of shape {list(given.shape)}: pass the "
                    f"whole {name} to shard_inputs, which finds packed documents and padding in it"
                )
            return None, {}

        check_on_all_ranks(self.cp.comm, f"a model's {name}", check, force=True)
        self._accepted[name] = given

    def check_rotary(self, kind: str, limit: int) -> None:
        """Raise ValueError on every rank if ranks have other frequencies than one process.

        Rotary embeddings of this kind have other frequencies if the largest position of a pass is beyond `limit`, and
        a rank sees the positions of its own tokens only.
        """
        if self.cp.world == 1 or self._rotary_checked:
            return
        if torch.compiler.is_compiling():
            if self.length > limit:
                raise ValueError(
                    f"rope_type {kind!r} must have at most {limit} tokens in a compiled graph over ranks, got rows of "
                    f"{self.length}"
                )
            return
        last = int(self.position_ids.max()) + 1

        def check() -> tuple[None, SharedValues]:
            why = f"on which the frequencies of rope_type {kind!r} depend"
            if kind != "longrope":
                return None, {f"the largest position, or {limit}, {why},": max(last, limit)}
            how = "use layout=Striped() and balance=False"
            return None, {f"whether it has a position beyond {limit}, {why} ({how}),": last > limit}

        check_on_all_ranks(self.cp.comm, "rotary embeddings", check, force=True)
        self._rotary_checked = True


class ShardedBatchError(ValueError, AttributeError):
    """An AttributeError, too, so that `hasattr` works."""

    def __init__(self, name: str) -> None:
        reader = next((type(module).__name__ for module in modules_in_forward()), "code outside of the model")
        super().__init__(
            f"all layers that mix tokens must be attention that is given the keyword argument mesh, since this batch "
            f"is sharded over ranks, got {reader}, which uses attention_mask itself ({name}); the tensor is "
            f"inputs['mesh'].attention_mask{see(MODELS_PAGE)}"
        )


class Unreadable:
    """Stands for a tensor that only attnmesh reads: whatever else is done with it raises `error(what)`."""

    error: Callable[[str], Exception]

    def __getattr__(self, name: str) -> Any:
        raise self.error(name)

    def __getitem__(self, key: object) -> Any:
        raise self.error("[]")

    def __eq__(self, other: object) -> bool:
        raise self.error("==")

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of a function that is given this object."""
        raise cls.error(getattr(function, "__name__", str(function)))


class ShardedMask(Unreadable):
    """What a model is given as its attention_mask: the tensor `mesh.attention_mask`, for attnmesh's attention only.

    Another attention, or a layer that mixes tokens without attention, would compute with this rank's tokens and give no
    sign of it. Here it raises ValueError as soon as it reads the mask. What Transformers reads on the way is allowed.
    """

    error = ShardedBatchError
    ndim = 2

    def __init__(self, mesh: ShardedPass) -> None:
        self.mesh = mesh
        self.shape, self.dtype, self.device = mesh.attention_mask.shape, torch.bool, mesh.attention_mask.device

    def to(self, *_: object, **__: object) -> ShardedMask:
        """Itself: the tensor stays where it is."""
        return self

    def view(self, *shape: int) -> ShardedMask:
        """Itself, as a matrix: GPT-2 makes sure that it is one."""
        if len(shape) != 2:
            raise ShardedBatchError("view")
        return self

    def cumsum(self, dim: int) -> Tensor:
        """Read for chunked attention."""
        return self.mesh.attention_mask.cumsum(dim)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of a function that is given this mask."""
        if function is torch.zeros_like:  # for chunked attention
            return torch.zeros_like(args[0].mesh.attention_mask, **kwargs or {})
        return super().__torch_function__(function, types, args, kwargs)


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
    **per_token: Tensor,
) -> dict[str, Any]:
    """This rank's shard of a batch [B, S], as keyword arguments of a model: `model(**shard_inputs(cp, ids, ids))`.

    Args:
        cp: the ranks and the layout.
        input_ids: tokens [B, S], the same on every rank.
        labels: as Transformers takes them, usually the tokens themselves, -100 where there is no loss. They are shifted
            by one position before they are sharded.
        position_ids: positions [B, S] or [1, S]; 0, 1, 2, ... by default. A position that does not follow the one
            before begins a new document, which attends to itself only. Rows may be packed differently.
        attention_mask: [B, S], 0 where a token is padding: before, after or between documents.
        document_lengths: the lengths of the documents of every row, without padding, instead of position_ids that
            restart.
        num_items_in_batch: the number of labels that the loss is divided by; by default those of this batch. With data
            parallelism, `GradientReduction.num_items(labels)`.
        balance: give packed or padded rows the layout `Balanced`, which divides their work evenly.
        per_token: more tensors [B, S, ...] to shard, under the names that the model takes.

    Ranks compare a checksum of every tensor: in every call if it is on the host and has at most 16 MiB; otherwise, as
    reading it would stall the device, in the first call of a group and then in every 100th. A difference raises
    ValueError on every rank.

    The model's loss is this rank's share of the mean over the labels of all ranks: the sum over all ranks of their
    losses is the loss, and that of their gradients is the gradient. A rank without labels has the loss 0.
    `inputs["mesh"].unshard(logits)` returns the logits of the whole batch, `gather_log_probs` those of its labels.

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

    def check() -> tuple[ShardedPass, SharedValues]:
        _check_batch(input_ids, labels, num_items_in_batch, per_token)
        found, values = _checked_pass(cp, input_ids, position_ids, attention_mask, document_lengths, balance)
        count = num_items_in_batch if isinstance(num_items_in_batch, int) else None
        kinds = {name: f"{x.dtype} {list(x.shape)}" for name, x in per_token.items()}
        more: SharedValues = {"num_items_in_batch": count, "tensors per token": kinds}
        if cp.world > 1:
            items = num_items_in_batch if isinstance(num_items_in_batch, Tensor) else None
            more |= checks.compared(
                input_ids=input_ids, labels=labels, position_ids=position_ids, attention_mask=attention_mask,
                num_items_in_batch=items, **per_token,
            )  # fmt: skip
        return found, {**more, **values}

    checks = batch_checks(cp)
    mesh = check_on_all_ranks(cp.comm, "shard_inputs", check, force=True)
    checks.count()
    inputs: dict[str, Any] = {
        "input_ids": mesh.shard(input_ids),
        "position_ids": mesh.position_ids,
        # Without a mask Transformers would treat positions that are not consecutive as packed sequences.
        "attention_mask": ShardedMask(mesh),
        "use_cache": False,
        "mesh": mesh,
    }
    inputs |= {name: mesh.shard(x) for name, x in per_token.items()}
    if labels is not None:
        shifted = F.pad(labels, (0, 1), value=IGNORED_LABEL)[:, 1:]
        local = mesh.shard(shifted).long()
        count = (shifted != IGNORED_LABEL).sum() if num_items_in_batch is None else num_items_in_batch
        count = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
        inputs |= {"labels": local, "shift_labels": local, "num_items_in_batch": count}
        mesh.losses = "mean" if num_items_in_batch is None else "counted"
    return inputs


def gather_log_probs(inputs: Mapping[str, Any], logits: Tensor) -> Tensor:
    """The log-probabilities of the labels of the whole batch, float32 [B, S], on every rank.

    `inputs` are those of `shard_inputs`, and `logits` [B, n, vocabulary] what the model computed from them. Entry t of
    a row is the log-probability of label t + 1; where there is no label, it is 0. Only one number per token is sent.
    Differentiable: gradients are summed over ranks, so a loss that every rank computes from the result counts once for
    each rank.

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
        or not isinstance(inputs.get("mesh"), ShardedPass)
        or "shift_labels" not in inputs
    ):
        raise ValueError(f"inputs must be those of shard_inputs with labels, got {shown(inputs)}")
    labels: Tensor = inputs["shift_labels"]
    mesh: ShardedPass = inputs["mesh"]

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

    check_on_all_ranks(mesh.cp.comm, "gather_log_probs", check)
    nll = F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten().long(), ignore_index=IGNORED_LABEL, reduction="none"
    )
    return mesh.unshard(-nll.view(labels.shape))


@explained_in("training.md#packed-and-padded-batches")
def _checked_pass(
    cp: ContextParallel,
    input_ids: Tensor,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    document_lengths: Sequence[Sequence[int]] | None,
    balance: bool,
) -> tuple[ShardedPass, SharedValues]:
    """The pass, and what must be equal on all ranks."""
    _check_ids("input_ids", input_ids)
    check_bool(balance=balance)
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
    if balance and packing.mask is not None:
        cp = cp.with_layout(Balanced(Causal() & packing.mask))

    device = input_ids.device
    if positions is None:
        local = as_tensor(cp.layout.ranges(length, cp.world, cp.rank), device)[None].repeat(rows, 1)
    else:
        local = _move(cp.shard(positions, 1), device)
    present = torch.ones(local.shape, dtype=torch.bool, device=device)
    if real is not None:
        present = _move(cp.shard(real, 1), device)
    values: SharedValues = {
        "input_ids": list(input_ids.shape), "packing": packing.mask, "balance": balance,
    }  # fmt: skip
    found = ShardedPass(cp, length, packing, local, present)
    found.counts_padding = positions is None and any(packing.first)
    return found, values


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


def _check_readable(name: str, x: Tensor) -> None:
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
    _check_readable("position_ids", position_ids)
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
    _check_readable("attention_mask", attention_mask)
    real = attention_mask.bool()
    all_real, others = torch.stack([real.all(), (real.to(attention_mask.dtype) != attention_mask).any()]).tolist()
    if others:
        raise ValueError(
            f"attention_mask must be 0 and 1 (padding is 0), got values up to {attention_mask.max().item()}"
        )
    return None if all_real else real.cpu()
