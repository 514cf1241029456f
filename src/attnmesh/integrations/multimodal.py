"""Models with images over ranks: all that precedes the language model sees the whole batch, and the rest one shard.

Such a model embeds its tokens, encodes the images, puts their features in place of placeholder tokens, finds positions
and masks, and calls its language model. What it finds depends on the whole rows. So its code is given the whole batch,
with one exception: embeddings are computed for this rank's tokens only (`ShardedEmbeddings`). Hooks before the language
model take this rank's shard of the other arguments. The images are encoded on every rank, and its gradients for
the encoder come from its own tokens: their sum over ranks is the gradient, as for all parameters.
"""

from __future__ import annotations

import inspect
import re
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from attnmesh.integrations.transformers_models import MODELS_PAGE, check_head, text_backbone
from attnmesh.utils.text import see
from attnmesh.utils.validation import shown

IMAGES = re.compile("pixel|image|video|spatial_shapes|second_per_grid|aspect_ratio")
"""In the names of a model's arguments that describe images: every rank takes them whole."""

_LOCAL = ("labels", "shift_labels")  # of this rank's tokens already
_LOSS_CODE = re.compile(r"self\.loss_function\((?:[^()]|\([^()]*\))*\*\*\w+")
_SERVED = "_attnmesh_serves_images"  # of a module that has its hooks
_serving = Lock()  # virtual ranks may share a model


@runtime_checkable
class WholePass(Protocol):
    """A pass over a sharded batch whose whole tensors are known, `wholes`: a `ShardedPass`."""

    wholes: dict[str, Any]
    leaves: Any
    position_ids: Tensor

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's shard of a tensor that has one entry per token along `dim`."""

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole tensor from the shards of all ranks, on every rank."""

    def check_shard(self, name: str, given: Tensor) -> None:
        """Raise ValueError on every rank if the model was given another tensor than the shard of a whole tensor."""

    def accept_positions(self, position_ids: Tensor) -> None:
        """Let attention be called with this rank's positions that the model found in the whole batch."""

    def masks_of(self, given: Any) -> Any:
        """The masks of this rank's tokens in place of those that a model made from the whole batch."""


@dataclass
class _Call:
    """A call of a model with a sharded batch, until it has returned."""

    model: nn.Module
    attention_pass: WholePass
    embeds: bool = False  # whether the whole batch is being embedded


_current: ContextVar[_Call | None] = ContextVar("the call of a model with images", default=None)


def is_given_whole(model: nn.Module | None = None) -> bool:
    """Whether this model, or any, is being called with a sharded batch of which its own code is given the whole."""
    call = _current.get()
    return call is not None and (model is None or call.model is model)


def serve_images(model: Any) -> None:
    """Let a model with a language model inside of it take batches of `shard_inputs`. May be called more than once."""
    backbone = text_backbone(model)
    with _serving:
        if not getattr(model, _SERVED, False):
            model.register_forward_pre_hook(_enter, with_kwargs=True)
            model.register_forward_hook(_leave, always_call=True)
        if not getattr(backbone, _SERVED, False):
            backbone.register_forward_pre_hook(_shard_arguments, with_kwargs=True)
        embedding = model.get_input_embeddings()
        if not getattr(embedding, _SERVED, False):
            embedding.register_forward_pre_hook(_shard_ids)
            embedding.register_forward_hook(_to_sharded)
        for module in (model, backbone, embedding):
            setattr(module, _SERVED, True)


def whole_arguments(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The model's own code gets the arguments of the whole batch, the language model gets the shards."""
    attention_pass: WholePass = kwargs["attention_pass"]
    if attention_pass.leaves is not None:
        raise ValueError(
            f"{type(model).__name__}: a model with images must be given a ContextParallel that is not reproducible: "
            f"the sums of its image encoder depend on the number of ranks"
        )
    has_head = getattr(model, "base_model", None) is not model
    if has_head and kwargs.get("labels") is not None and not _passes_count(type(model)):  # type: ignore[arg-type]
        raise ValueError(
            f"{type(model).__name__}: labels must be None for a model that computes its loss in its own way "
            f"over ranks, got labels{see(MODELS_PAGE)}"
        )
    given = {name: x for name, x in kwargs.items() if name != "attention_pass"}
    for name, whole in attention_pass.wholes.items():
        if name in ("attention_mask", "position_ids"):
            continue
        if name not in given:
            raise ValueError(f"{type(model).__name__}: {name} must be what shard_inputs returned, got none")
        attention_pass.check_shard(name, given[name])
        given[name] = whole
    given |= {name: attention_pass.wholes.get(name) for name in ("attention_mask", "position_ids")}
    _current.set(_Call(model, attention_pass))
    return given


def _enter(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Before the forward of the whole model."""
    if torch.compiler.is_compiling() or _current.get() is not None:
        return None
    if not isinstance(kwargs.get("attention_pass"), WholePass):
        return None
    if args:
        raise ValueError(f"{type(model).__name__}: arguments must be given by name, as shard_inputs returns them")
    return (), whole_arguments(model, kwargs)


def _leave(model: nn.Module, *_: object) -> None:
    """After the forward of the whole model, also if it has raised an exception."""
    if is_given_whole(model):
        _current.set(None)


@cache
def _passes_count(kind: type[nn.Module]) -> bool:
    """Whether the code of the model gives its loss function all that it was given, such as shifted labels."""
    try:
        code = inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError):  # a function without a file
        return False
    return _LOSS_CODE.search(code) is not None


# The embeddings of the tokens, before the language model.


class ShardedEmbeddings:
    """The embeddings [B, S, hidden] of the whole batch, of which this rank has the rows of its tokens.

    Models read their shape and put image features in the places of a mask, which is done here for this rank's tokens.
    For whatever else is done with them, every rank gathers all of them: right, in more memory.
    """

    ndim = 3

    def __init__(self, attention_pass: WholePass, local: Tensor) -> None:
        self._pass, self._local = attention_pass, local
        self._whole: Tensor | None = None
        self.shape = torch.Size((*attention_pass.wholes["input_ids"].shape, local.shape[-1]))
        self.dtype, self.device = local.dtype, local.device

    def local(self) -> Tensor:
        """The embeddings of this rank's tokens, [B, n, hidden]."""
        return self._local if self._whole is None else self._pass.shard(self._whole)

    def whole(self) -> Tensor:
        """The embeddings of all tokens. From now on, they are what counts: code may write into them."""
        if self._whole is None:
            self._whole = self._pass.unshard(self._local)
        return self._whole

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As of a tensor."""
        return self.ndim

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As of a tensor."""
        if self._whole is not None:
            return self._whole.to(*args, **kwargs)
        return ShardedEmbeddings(self._pass, self._local.to(*args, **kwargs))

    def masked_scatter(self, mask: Tensor, features: Tensor) -> Any:
        """The embeddings with the rows of `features`, in order, in the places of `mask`, [B, S, 1] or expanded."""
        is_of_tokens = mask.dim() == 3 and mask.shape[:2] == self.shape[:2]
        is_of_tokens = is_of_tokens and (mask.shape[2] == 1 or mask.stride(2) == 0)
        if self._whole is not None or not is_of_tokens:
            return self.whole().masked_scatter(mask, features)
        places = mask[..., 0].to(self.device)
        rows = features.reshape(-1, self.shape[2])
        here, own = own_rows(self._pass, places)
        local = self._local.masked_scatter(here[..., None], rows[own.to(rows.device)].to(self.device))
        return ShardedEmbeddings(self._pass, local)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    def __getitem__(self, key: Any) -> Any:
        return self.whole()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._whole = self.whole().clone()
        self._whole[key] = value

    def __eq__(self, other: object) -> Any:
        return self.whole() == other

    __hash__ = object.__hash__

    def __add__(self, other: Any) -> Any:
        return self.whole() + other

    def __mul__(self, other: Any) -> Any:
        return self.whole() * other

    __radd__, __rmul__ = __add__, __mul__

    @classmethod
    def __torch_function__(cls, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for a function that is given these embeddings."""

        def whole(x: Any) -> Any:
            if isinstance(x, list | tuple):
                return type(x)(map(whole, x))
            return x.whole() if isinstance(x, ShardedEmbeddings) else x

        return function(*whole(args), **{name: whole(x) for name, x in (kwargs or {}).items()})


def own_rows(attention_pass: WholePass, places: Tensor) -> tuple[Tensor, Tensor]:
    """Which of this rank's tokens [B, n] are in `places` [B, S], and which rows of one row per place are theirs."""
    here = attention_pass.shard(places)
    row = (places.flatten().cumsum(0) - 1).view(places.shape)
    return here, attention_pass.shard(row)[here]


def _shard_ids(embedding: nn.Module, args: tuple[Any, ...]) -> Tensor | None:
    """Before an embedding: this rank's tokens of the whole batch."""
    call = _current.get()
    if torch.compiler.is_compiling() or call is None or len(args) != 1 or not isinstance(args[0], Tensor):
        return None
    if args[0].shape != call.attention_pass.wholes["input_ids"].shape:
        return None
    call.embeds = True
    return call.attention_pass.shard(args[0])


def _to_sharded(embedding: nn.Module, args: object, found: Any) -> Any:
    """After it."""
    call = _current.get()
    if torch.compiler.is_compiling() or call is None or not call.embeds:
        return None
    call.embeds = False
    return ShardedEmbeddings(call.attention_pass, found)


# The language model.


def _shard_arguments(backbone: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Before the forward of the language model: this rank's shard of its arguments."""
    call = _current.get()
    if torch.compiler.is_compiling() or call is None:
        return None
    if args:
        raise ValueError(f"{type(backbone).__name__} must be given its arguments by name over ranks, got {len(args)}")
    check_head()
    attention_pass = call.attention_pass
    taken = inspect.signature(type(backbone).forward).parameters
    local = {name: x for name, x in kwargs.items() if name not in ("deepstack_visual_embeds", *_LOCAL) or name in taken}
    local.pop("deepstack_visual_embeds", None)
    for name, x in local.items():
        local[name] = _shard_argument(attention_pass, backbone, name, x)
    features = kwargs.get("deepstack_visual_embeds")
    if features is not None:
        local["visual_pos_masks"], own = own_rows(attention_pass, kwargs["visual_pos_masks"])
        local["deepstack_visual_embeds"] = [each[own.to(each.device)] for each in features]
    if local.get("position_ids") is None:
        local["position_ids"] = attention_pass.position_ids
    else:
        attention_pass.accept_positions(local["position_ids"])
    local["attention_mask"] = attention_pass.masks_of(kwargs.get("attention_mask"))
    return (), local | {"attention_pass": attention_pass}


def _shard_argument(attention_pass: WholePass, backbone: nn.Module, name: str, x: Any) -> Any:
    """This rank's shard of an argument that has one entry per token; other tensors are refused."""
    shape = attention_pass.wholes["input_ids"].shape
    if name in (*_LOCAL, "attention_mask") or x is None:
        return x
    if isinstance(x, ShardedEmbeddings):
        return x.local()
    if name == "position_ids":  # [S], [B, S], or one of these for each of the dimensions that images have
        if x.shape[-1] == shape[1]:
            return attention_pass.shard(x.expand(*x.shape[:-2], *shape) if x.dim() < 3 else x, -1)
    elif isinstance(x, Tensor) and x.shape[:2] == shape:
        return attention_pass.shard(x)
    elif not _has_tokens(x):
        return x
    got = list(x.shape) if isinstance(x, Tensor) else shown(x)
    raise ValueError(
        f"{type(backbone).__name__}: {name} must have one entry per token, {list(shape)}, to be sharded over ranks, "
        f"got {got}{see(MODELS_PAGE)}"
    )


def _has_tokens(x: Any) -> bool:
    """Whether an argument may have something for each token."""
    if isinstance(x, list | tuple):
        return any(map(_has_tokens, x))
    return isinstance(x, dict) or (isinstance(x, Tensor) and x.dim() > 0)
