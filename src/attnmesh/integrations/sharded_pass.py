"""`ShardedPass`: how a Transformers model attends in a call with a batch that is sharded over ranks.

A model is told of a sharded batch by its arguments only. A model that reads neither masks nor other keyword arguments
would compute with this rank's tokens and give no sign of it. So its calls are watched: before a call the layers of the
model are checked, and after it that each of them has attended over the ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cached_property
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnmesh.comm import Comm
from attnmesh.core.mask_encoding import traced_mask
from attnmesh.core.masks import Documents, Mask, Packing, PerSequence
from attnmesh.integrations.multimodal import is_given_whole, serve_images
from attnmesh.integrations.recurrent_layers import serve_over_ranks
from attnmesh.integrations.transformers_models import (
    IGNORED_LABEL,
    MODELS_PAGE,
    attention_layers,
    check_attention_code,
    check_config,
    check_encoder,
    check_modules,
    check_positions,
    counts_positions,
    modules_in_forward,
    text_backbone,
    text_config,
)
from attnmesh.ops.recurrent.layer import RecurrentLayer
from attnmesh.parallel.context import ContextParallel
from attnmesh.utils.text import see
from attnmesh.utils.validation import shown

_CallCheck = Callable[[nn.Module, Sequence[Any]], None]

_checks: ContextVar[tuple[_CallCheck, ...]] = ContextVar("checks of calls without a sharded batch", default=())
_inspected: WeakSet[nn.Module] = WeakSet()


class ShardedPass:
    """How a model attends in one forward pass over rows of `length` tokens that are sharded over ranks.

    A model takes it as the keyword argument `attention_pass`. It is no dataclass: wrappers of models rebuild those.

    Attributes:
        cp: the ranks, with the layout of this batch.
        length: the number of tokens of a whole row.
        causal: whether the model is a decoder, whose tokens attend to earlier tokens only.
        packing: the documents and the padding of the whole batch.
        position_ids: this rank's positions [B, n], as the model takes them.
        attention_mask: this rank's tokens [B, n] that are not padding.
        check_once: called before the first attention of the pass, within the forward of the model.
        balances_experts: whether the load-balancing loss of experts is computed from the tokens of all ranks.
        gathers_scores: whether the head of a sequence classifier gathers the scores of all tokens.
        counts_padding: whether padding comes before tokens and positions were not given, so that they are counted in
            the row.
        has_model_positions: whether `position_ids` were given, or counted as the model would.
        plain_position_ids: what they were before they were counted, if they were.
        is_watched: whether a model is being called that was checked for this batch.
        leaves: how tokens are divided among ranks, if bits must not depend on it (`integrations.reproducible`).
        around_attention: entered around every attention of the pass.
        attended_by: the ids of the modules that have attended in the latest call; None if some are in a compiled graph.
        wholes: the tensors of the whole batch that have one entry per token, under the names that the model takes.
        has_images: whether the batch has images, too, which a model of text would not take.
    """

    check_once: Callable[[], None] | None = None
    causal = True
    balances_experts = False
    gathers_scores = False
    counts_padding = False
    has_model_positions = False
    plain_position_ids: Tensor | None = None
    is_watched = False
    leaves: Any = None
    has_images = False
    around_attention: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(
        self, cp: ContextParallel, length: int, packing: Packing, position_ids: Tensor, attention_mask: Tensor
    ) -> None:
        self.cp, self.length, self.packing = cp, length, packing
        self.position_ids, self.attention_mask = position_ids, attention_mask
        self._documents = packing.numbers()  # for compiled graphs
        self._masks: dict[Mask, Mask] = {}
        self._accepted: dict[str, Tensor] = {}
        self._rotary_checked = False
        self.attended_by: set[int] | None = set()
        self.wholes: dict[str, Any] = {}
        self._shards: dict[str, Tensor] = {}

    def index_in_row(self) -> Tensor:
        """The index in the row of each of this rank's tokens [n]."""
        return self.cp.positions(self.length).to(self.position_ids.device)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's shard of a tensor that has one entry per token along `dim`."""
        return self.cp.shard(x, dim).contiguous()

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole tensor from the shards of all ranks, on every rank.

        Its gradients are summed over ranks; in a reproducible pass, where the sum would depend on their number, a rank
        takes the gradients that it has itself, so that a loss which all ranks compute counts once.
        """
        if self.leaves is not None and x.requires_grad and torch.is_grad_enabled():
            whole: Tensor = _UnshardOnce.apply(x, self, dim)  # type: ignore[no-untyped-call]
            return whole
        return self.cp.unshard(x, dim, self.length)

    def mask(self, layer: Mask) -> Mask:
        """The mask of a layer within the documents of this batch."""
        if torch.compiler.is_compiling():
            return traced_mask(layer, self._documents)
        if layer not in self._masks:
            self._masks[layer] = self.packing.apply(layer)
        return self._masks[layer]

    def attend(
        self, layer: object, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, sinks: Tensor | None,
        softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Out of this rank's queries over the keys of all ranks."""
        if self.check_once is not None and not torch.compiler.is_compiling():
            self.check_once()
            self.check_once = None
        with self.around_attention():
            return self.cp.attention(
                q, k, v, mask=self.mask(mask), scale=scale, softcap=softcap, sinks=sinks, length=self.length
            )

    def scan(self, module: nn.Module, layer: RecurrentLayer) -> Tensor:
        """The outputs of a recurrent layer for this rank's tokens, which continue the tokens of other ranks."""
        if self.check_once is not None:
            self.check_once()
            self.check_once = None
        self.count_attention(module)
        if self.leaves is not None:
            raise ValueError(
                f"layers that mix tokens must be attention with a reproducible ContextParallel, got "
                f"{type(module).__name__}, whose sums depend on the number of ranks"
            )
        out: Tensor = self.cp.recurrent(layer, documents=self.documents, length=self.length)
        return out

    @cached_property
    def documents(self) -> Mask | None:
        """The documents of every row. Padding before the first continues in it, as in a row that is not packed."""
        if self._documents is None:
            return None
        rows = []
        for numbers in self._documents:
            changes = 1 + torch.nonzero(numbers[1:] != numbers[:-1]).flatten()
            starts = [at for at in changes.tolist() if numbers[at] >= 0 and int(numbers[:at].max()) >= 0]
            rows.append(Documents([b - a for a, b in pairwise([0, *starts, self.length])]))
        return PerSequence(rows) if any(len(row.bounds) > 2 for row in rows) else None

    def count_positions(self, first: int, local: Tensor | None) -> None:
        """Let positions begin with `first + 1` and leave out padding, whose position is `first`, as RoBERTa's do.

        It finds padding by the token `first`: so must the attention_mask of `local`, this rank's tokens.
        """
        with checked_on_all_ranks(self.cp.comm, "positions counted from the padding token", force=True):
            if local is None or not torch.equal(local != first, self.attention_mask.bool()):
                raise ValueError(
                    f"input_ids must be {first}, the padding token, exactly where attention_mask is 0, for a model "
                    f"that counts positions from its padding token, got others"
                )
        rows = self.position_ids.shape[0]
        real = torch.ones(rows, self.length, dtype=torch.int64, device="cpu")
        if self._documents is not None:
            real = self._documents >= 0
        self.plain_position_ids = self.position_ids
        self.position_ids = self.shard((real.cumsum(1) * real + first).to(self.position_ids.device))
        self.has_model_positions = True

    def count_attention(self, module: nn.Module) -> None:
        """Note that the attention of this module is computed over the ranks."""
        if torch.compiler.is_compiling():
            self.attended_by = None
        elif self.attended_by is not None:
            self.attended_by.add(id(module))

    def check_given(self, name: str, given: Tensor) -> None:
        """Raise ValueError on every rank if the model was given other positions or another mask than this pass has.

        Documents and padding come from the whole batch, so a tensor that replaces this rank's shard has no effect on
        attention. A copy, such as one on another device, is compared once.
        """
        expected: Tensor = getattr(self, name)
        if torch.compiler.is_compiling():
            if given.shape != expected.shape:
                raise ValueError(
                    f"{name} must be what shard_inputs returned, got a tensor of shape {list(given.shape)}"
                )
            torch._assert_async((given == expected).all(), f"{name} must be what shard_inputs returned, got another")
            return
        if given is expected or given is self._accepted.get(name):
            return
        with checked_on_all_ranks(self.cp.comm, f"a model's {name}", force=True):
            if given.shape != expected.shape or not torch.equal(given.to(expected), expected):
                raise ValueError(
                    f"{name} must be what shard_inputs returned, got another tensor of shape {list(given.shape)}: pass "
                    f"the whole {name} to shard_inputs, which finds packed documents and padding in it"
                )
        self._accepted[name] = given

    def keep_whole(self, name: str, whole: Tensor, shard: Tensor) -> None:
        """Keep a tensor of the whole batch for models that need it beside this rank's shard."""
        self.wholes[name], self._shards[name] = whole, shard

    def check_shard(self, name: str, given: Tensor) -> None:
        """Raise ValueError on every rank if the model was given another tensor than the shard of a whole tensor."""
        expected = self._shards[name]
        if given is expected or given is self._accepted.get(name):
            return
        with checked_on_all_ranks(self.cp.comm, f"a model's {name}", force=True):
            if given.shape != expected.shape or not torch.equal(given.to(expected), expected):
                raise ValueError(
                    f"{name} must be what shard_inputs returned, got another tensor of shape {list(given.shape)}: pass "
                    f"the whole {name} to shard_inputs, since a model with images reads it"
                )
        self._accepted[name] = given

    def accept_positions(self, position_ids: Tensor) -> None:
        """Let attention be called with this rank's positions that the model found in the whole batch."""
        self._accepted["position_ids"] = position_ids
        self.counts_padding = False

    def masks_of(self, given: Any) -> Any:
        """The masks of this rank's tokens in place of those that a model made from the whole batch."""
        if isinstance(given, dict):
            return {name: self.masks_of(mask) for name, mask in given.items()}
        over_ranks = getattr(given, "over_ranks", None)
        if over_ranks is not None:
            return over_ranks(ShardedMask(self))
        if given is None or (isinstance(given, Tensor) and given.dim() == 2):
            return ShardedMask(self)
        raise ValueError(
            f"attention_mask of a language model must be [batch, tokens] or a mask that Transformers makes, got "
            f"{shown(given)}{see(MODELS_PAGE)}"
        )

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
        last, why = int(self.position_ids.max()) + 1, f"on which the frequencies of rope_type {kind!r} depend"
        if kind != "longrope":
            value: dict[str, object] = {f"the largest position, or {limit}, {why},": max(last, limit)}
        else:
            how = "use layout=Striped() and balance=False"
            value = {f"whether it has a position beyond {limit}, {why} ({how}),": last > limit}
        self.cp.comm.agree("rotary embeddings", value, force=True)
        self._rotary_checked = True


class _UnshardOnce(torch.autograd.Function):
    """The whole tensor, of which a rank's gradient is a part of the gradient that every rank has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, attention_pass: ShardedPass, dim: int) -> Tensor:
        ctx.attention_pass, ctx.dim = attention_pass, dim
        return attention_pass.cp.unshard(x, dim, attention_pass.length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.attention_pass.shard(grad, ctx.dim), None, None


@contextmanager
def checked_on_all_ranks(comm: Comm, operation: str, *, force: bool = False) -> Iterator[None]:
    """Raise a ValueError in the body, which checks arguments, on every rank. `force` is as in `check_on_all_ranks`."""
    try:
        yield
    except ValueError as error:
        comm.agree(operation, {}, str(error))
        raise
    comm.agree(operation, {}, force=force)


class ReadError(ValueError, AttributeError):
    """An AttributeError, too, so that `hasattr` works."""


class Unreadable:
    """Stands for a tensor that only attnmesh reads: whatever else is done with it raises `ReadError(explain(what))`."""

    explain: Callable[[str], str]

    def __getattr__(self, name: str) -> Any:
        raise ReadError(type(self).explain(name))

    def __getitem__(self, key: object) -> Any:
        raise ReadError(type(self).explain("[]"))

    def __eq__(self, other: object) -> bool:
        raise ReadError(type(self).explain("=="))

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of a function that is given this object."""
        raise ReadError(cls.explain(getattr(function, "__name__", str(function))))


class ShardedMask(Unreadable):
    """What a model is given as its attention_mask: for attnmesh's attention only.

    Another attention, or a layer that mixes tokens without attention, would compute with this rank's tokens and give no
    sign of it. Here it raises ValueError as soon as it reads the mask. What Transformers reads on the way is allowed.
    """

    ndim = 2

    def __init__(self, attention_pass: ShardedPass) -> None:
        self.attention_pass = attention_pass
        self.shape, self.dtype, self.device = (
            attention_pass.attention_mask.shape,
            torch.bool,
            attention_pass.attention_mask.device,
        )

    def for_recurrent_layers(self) -> Tensor:
        """This rank's tokens [B, n] that are not padding, as a new tensor."""
        return self.attention_pass.attention_mask.bool()[:]

    def to(self, *_: object, **__: object) -> ShardedMask:
        """Itself: the tensor stays where it is."""
        return self

    def view(self, *shape: int) -> ShardedMask:
        """Itself, as a matrix: GPT-2 makes sure that it is one."""
        if len(shape) != 2:
            raise ReadError(self.explain("view"))
        return self

    @staticmethod
    def explain(name: str) -> str:
        """Why the mask cannot be read, as some code tried to."""
        reader = next((type(module).__name__ for module in modules_in_forward()), "code outside of the model")
        return (
            f"all layers that mix tokens must be attention that is given the keyword argument attention_pass, since "
            f"this batch is sharded over ranks, got {reader}, which uses attention_mask itself ({name}); the tensor is "
            f"inputs['attention_pass'].attention_mask{see(MODELS_PAGE)}"
        )

    def cumsum(self, dim: int) -> Tensor:
        """Read for chunked attention."""
        return self.attention_pass.attention_mask.cumsum(dim)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of a function that is given this mask."""
        if function is torch.zeros_like:  # for chunked attention
            return torch.zeros_like(args[0].attention_pass.attention_mask, **kwargs or {})
        return super().__torch_function__(function, types, args, kwargs)


# Calls of models.


def watch_models() -> None:
    """Let all models of Transformers check the sharded batches that they are given. May be called more than once."""
    models = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if models is not None and models.__call__ is not _call:
        models.__call__ = _call


@contextmanager
def checked_calls(check: _CallCheck) -> Iterator[None]:
    """In this context, `check(model, arguments)` is called before a model that is not given a sharded batch."""
    watch_models()
    token = _checks.set((*_checks.get(), check))
    try:
        yield
    finally:
        _checks.reset(token)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """PreTrainedModel.__call__ with the checks of a sharded batch."""
    if torch.compiler.is_compiling():
        if isinstance(kwargs.get("attention_pass"), ShardedPass):
            check_config(text_config(self))
            check_positions(self)
            if kwargs["attention_pass"].has_images:
                raise ValueError(
                    f"{type(self).__name__}: a batch over ranks must not have images for a compiled model, got some"
                    f"{see(MODELS_PAGE)}"
                )
            if not kwargs["attention_pass"].causal:
                raise ValueError(
                    f"{type(self).__name__}: causal must be True for a compiled model over ranks, got False"
                    f"{see(MODELS_PAGE)}"
                )
        return self._call_impl(*args, **kwargs)
    given = (*args, *kwargs.values())
    attention_pass = _pass_of(given)
    if attention_pass is None:
        checks = _checks.get()
        for check in () if checks and is_given_whole() else checks:
            check(self, given)
    elif not attention_pass.is_watched:
        return _watched_call(self, attention_pass, args, kwargs)
    return nn.Module.__call__(self, *args, **kwargs)


def _pass_of(given: Sequence[Any]) -> ShardedPass | None:
    """The pass of a sharded batch, which a model may be given with its mask only."""
    passes = (x if isinstance(x, ShardedPass) else getattr(x, "attention_pass", None) for x in given)
    return next((x for x in passes if isinstance(x, ShardedPass)), None)


def _watched_call(model: Any, attention_pass: ShardedPass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    check_attention_code(model)
    if model not in _inspected:
        check_modules(model)
        serve_over_ranks(model)
        _inspected.add(model)
    if attention_pass.causal and text_backbone(model) is not None:
        serve_images(model)
    elif attention_pass.has_images:
        raise ValueError(
            f"{type(model).__name__}: a batch over ranks must not have images for a model without a language model "
            f"inside of it (get_decoder), got some{see(MODELS_PAGE)}"
        )
    if kwargs.get("encoder_hidden_states") is not None:
        raise ValueError(
            f"{type(model).__name__}: encoder_hidden_states must be None in a batch that is sharded over ranks, which "
            f"is not served with cross-attention{see(MODELS_PAGE)}"
        )
    if attention_pass.causal:
        check_positions(model)
    else:
        check_encoder(model, kwargs)
        _count_positions(model, attention_pass, kwargs)
    labels = None if attention_pass.causal else kwargs.pop("labels", None)
    items = None if attention_pass.causal else kwargs.pop("num_items_in_batch", None)
    attention_pass.is_watched, attention_pass.attended_by = True, set()
    try:
        result = nn.Module.__call__(model, *args, **kwargs)
    finally:
        attention_pass.is_watched = False
    _check_attended(model, attention_pass)
    return result if attention_pass.causal else _encoder_result(result, labels, items)


def _count_positions(model: Any, attention_pass: ShardedPass, kwargs: dict[str, Any]) -> None:
    """Give the model the positions that it would count in the whole rows."""
    if not counts_positions(type(text_config(model))):
        return
    if attention_pass.has_model_positions:
        if kwargs.get("position_ids") is attention_pass.plain_position_ids:
            kwargs["position_ids"] = attention_pass.position_ids
        return
    if kwargs.get("position_ids") is not attention_pass.position_ids or attention_pass.documents is not None:
        raise ValueError(
            f"{type(model).__name__} counts positions from its padding token: document_lengths must be None, and "
            f"position_ids what shard_inputs returned{see(MODELS_PAGE)}"
        )
    attention_pass.count_positions(int(text_config(model).pad_token_id), kwargs.get("input_ids"))
    kwargs["position_ids"] = attention_pass.position_ids


class _FirstTokenOutput(Unreadable):
    """Stands for what an encoder computes from the first token of a row, which one rank has."""

    @staticmethod
    def explain(name: str) -> str:
        """Why it cannot be read."""
        return (
            f"pooler_output must not be used in a batch that is sharded over ranks ({name}): the model computes it "
            "from the first token of each rank; inputs['attention_pass'].unshard(last_hidden_state) has all tokens"
        )


def _encoder_result(result: Any, labels: Tensor | None, items: Tensor | int | None) -> Any:
    """The output of an encoder, with this rank's share of the mean loss over the labels of all ranks."""
    changes: dict[str, Any] = {}
    if labels is not None:
        if items is None:
            raise ValueError("num_items_in_batch must be what shard_inputs returned with labels, got None")
        total = F.cross_entropy(
            result.logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        )
        changes["loss"] = total / items
    if getattr(result, "pooler_output", None) is not None:
        changes["pooler_output"] = _FirstTokenOutput()
    return type(result)(**{**result, **changes}) if changes else result


def _check_attended(model: nn.Module, attention_pass: ShardedPass) -> None:
    """Raise ValueError if a layer of the model has not attended over the ranks in the call that has ended."""
    config = text_config(model)
    attended = attention_pass.attended_by
    if attended is None or len(attended) >= max(1, getattr(config, "num_hidden_layers", 1)):
        return
    for path, layer in attention_layers(model):
        if not any(id(part) in attended for part in layer.modules()):
            got = f"{path} ({type(layer).__name__}), which did not"
            break
    else:
        if attended:
            return  # a model with fewer layers than its configuration has
        got = "a model that did not call it at all"
    raise ValueError(
        f"{type(model).__name__}: every layer that mixes tokens must call attnmesh's attention in a batch that is "
        f"sharded over ranks, got {got}, in a model of type {getattr(config, 'model_type', None)!r}: it would see one "
        f"rank's tokens only{see(MODELS_PAGE)}"
    )
