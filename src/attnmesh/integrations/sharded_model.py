"""A Transformers model whose weights are divided over ranks: every rank has its part of each, and computes with that.

Tokens pass through a layer either all on every rank (a decode step), or divided over the ranks (a prefill chunk):

    embedding                 the rows of this rank's part of the vocabulary; summed over ranks
    attention, MLP            gathers the tokens; this rank's heads or intermediate activations; the sum over ranks is
                              scattered to the tokens' ranks
    LM head                   the last token's logits of this rank's part of the vocabulary; gathered

Norms and residuals between them are computed for this rank's tokens only. Where every rank has all tokens, nothing is
gathered, and an all-reduce replaces the scatter. All ranks sum in rank order, so they get the same bits.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attnmesh.comm import Comm, SharedValues, check_on_all_ranks
from attnmesh.integrations.checkpoint import quiet_transformers, require_hf
from attnmesh.integrations.transformers_attention import register_attention
from attnmesh.integrations.transformers_models import NAME, check_model
from attnmesh.integrations.weight_splits import check_sharded_model, heads_of, weight_parts, weight_splits
from attnmesh.parallel.decode.ranks import DecodeRanks, decode_ranks
from attnmesh.parallel.node_groups import comm_named
from attnmesh.plan.decode import DecodeSharding
from attnmesh.plan.weights import Split, WeightPart, weight_part
from attnmesh.utils.validation import check_type

_ATTRIBUTE = "_attnmesh_weights"

_building = threading.Lock()  # settings of Transformers are those of the process, and virtual ranks are threads


class WeightSource(Protocol):
    """Where the weights of a model come from."""

    def prepare(self, model: Any, weights: Mapping[str, Tensor], parts: Mapping[str, WeightPart]) -> None:
        """Raise ValueError unless it has exactly these weights of a model, tied ones once."""

    def read(self, name: str, whole: tuple[int, ...], part: WeightPart) -> Tensor:
        """A copy of a part of a tensor with the shape `whole`, in its final dtype and on its device."""


class _WholeModel:
    """A model that has all weights."""

    def __init__(self, model: Any) -> None:
        self._state: dict[str, Tensor] = model.state_dict()

    def prepare(self, model: Any, weights: Mapping[str, Tensor], parts: Mapping[str, WeightPart]) -> None:
        """Raise ValueError if the model is not the one that its configuration describes."""
        for name, weight in weights.items():
            if name not in self._state or self._state[name].shape != weight.shape:
                found = "none" if name not in self._state else list(self._state[name].shape)
                raise ValueError(
                    f"model must have the weights of its configuration: {name} {list(weight.shape)}, got {found}"
                )

    def read(self, name: str, whole: tuple[int, ...], part: WeightPart) -> Tensor:
        """A copy of a part."""
        return torch.cat([self._state[name][index] for index in part.indices()], part.dim)


class TokenExchange:
    """How the tokens of a pass are divided over ranks: not at all, or `parts[r]` consecutive tokens on rank r."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._parts: list[int] | None = None

    @contextmanager
    def divided(self, parts: list[int]) -> Iterator[None]:
        """Within it, rank r has `parts[r]` tokens between the layers, at least one."""
        self._parts = parts
        try:
            yield
        finally:
            self._parts = None

    def gather(self, x: Tensor) -> Tensor:
        """All tokens, [B, n, hidden], from those of this rank."""
        if self._parts is None:
            return x
        batch, _, hidden = x.shape
        return torch.cat(self._comm.all_gather(x.contiguous(), [(batch, n, hidden) for n in self._parts]), 1)

    def reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, for this rank's tokens, from an addend for all tokens."""
        if self._comm.world == 1:
            return x
        if self._parts is None:
            return self._comm.all_reduce(x.contiguous(), reuse=True)
        return self._comm.reduce_scatter([part.contiguous() for part in x.split(self._parts, 1)])

    def last(self, x: Tensor) -> Tensor:
        """The last token, [B, 1, hidden], or all of x where tokens are not divided."""
        if self._parts is None:
            return x
        empty = x.new_empty(0)
        shapes = [(0,)] * (self._comm.world - 1) + [(len(x), 1, x.shape[2])]
        is_last = self._comm.rank == self._comm.world - 1
        return self._comm.all_gather(x[:, -1:].contiguous() if is_last else empty, shapes)[-1]

    def gather_vocabulary(self, logits: Tensor, sizes: list[int]) -> Tensor:
        """All logits [.., vocabulary], from those of this rank's part."""
        if self._comm.world == 1:
            return logits
        shapes = [(*logits.shape[:-1], size) for size in sizes]
        return torch.cat(self._comm.all_gather(logits.contiguous(), shapes), -1)


@dataclass(frozen=True)
class ShardedWeights:
    """What is known about the weights of a sharded model."""

    sharding: DecodeSharding
    ranks: DecodeRanks
    shapes: Mapping[str, tuple[int, ...]]  # of the whole tensors
    splits: Mapping[str, Split | None]
    tokens: TokenExchange

    def parts(self, rank: int, config: Any) -> dict[str, WeightPart]:
        """The part of every tensor that a rank holds."""
        return weight_parts(self.splits, self.shapes, self.sharding, rank, heads_of(config))


def sharded_weights(model: Any) -> ShardedWeights | None:
    """How the weights of a model are divided, or None if the model is whole."""
    found = getattr(model, _ATTRIBUTE, None)
    return found if isinstance(found, ShardedWeights) else None


def shard_model(model: Any, sharding: DecodeSharding, comm: Comm | None = None) -> Any:
    """A model with this rank's part of the weights of `model`, which every rank has, for a `Generator` over `comm`.

    The weights are divided over all ranks: heads, MLP, experts and vocabulary. Nothing of `model` is changed or shared.
    `load_model` with a sharding reads the parts from a checkpoint instead, without a whole model anywhere.

    Examples:
        >>> def rank(comm):
        ...     part = am.shard_model(model, am.DecodeSharding(tp=2), comm)
        ...     tokens = list(am.generate(part, None, [[1, 2, 3]], comm, max_new_tokens=4, stop=[]))
        ...     return [token.id for token in tokens]
        >>> whole = [token.id for token in am.generate(model, None, [[1, 2, 3]], max_new_tokens=4, stop=[])]
        >>> am.run_virtual(2, rank) == [whole, whole]
        True
    """
    all_ranks = comm_named("comm", comm)

    def check_arguments() -> tuple[DecodeRanks, SharedValues]:
        check_type("sharding", sharding, DecodeSharding)
        check_model(model)
        if sharded_weights(model) is not None:
            raise ValueError("model must be whole, got a sharded model")
        check_sharded_model(model.config, type(model).__name__, sharding)
        return decode_ranks(all_ranks, all_ranks, sharding), {"sharding": repr(sharding), "model": type(model).__name__}

    ranks = check_on_all_ranks(all_ranks, "shard_model", check_arguments, force=True)

    def build() -> tuple[Any, SharedValues]:
        like = model.get_input_embeddings().weight
        return build_sharded(model.config, ranks, sharding, _WholeModel(model), like), {}

    sharded = check_on_all_ranks(all_ranks, "shard_model weights", build, force=True)
    sharded.generation_config = copy.deepcopy(model.generation_config)
    return sharded


class WeightSizes:
    """The weights of a model and how they are divided, without memory for them."""

    def __init__(self, config: Any) -> None:
        model = _meta_model(config)
        splits = weight_splits(model)
        unique = {id(tensor): (name, tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
        kinds = [((tuple(tensor.shape), splits[name]), name) for name, tensor in unique.values()]
        self._heads, self._counts, self._names = heads_of(config), Counter(kind for kind, _ in kinds), dict(kinds)

    def largest_part(self, sharding: DecodeSharding) -> int:
        """The elements of the rank that holds most. Raises ValueError if a tensor cannot be divided this way."""
        held = [0] * sharding.ranks
        for (shape, split), count in self._counts.items():
            for rank in range(sharding.ranks):
                part = weight_part(self._names[shape, split], shape, split, sharding, rank, self._heads)
                held[rank] += count * prod(part.shape)
        return max(held)


def build_sharded(config: Any, ranks: DecodeRanks, sharding: DecodeSharding, source: WeightSource, like: Tensor) -> Any:
    """The model of a configuration with one rank's part of its weights. `like` has their dtype and device."""
    model = _meta_model(config)
    state = model.state_dict(keep_vars=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    weights = ShardedWeights(sharding, ranks, shapes, weight_splits(model), TokenExchange(ranks.all_ranks))
    parts = weights.parts(ranks.rank, config)
    unique = {id(tensor): name for name, tensor in reversed(state.items())}  # tied weights have the first name
    source.prepare(model, {name: state[name] for name in sorted(unique.values())}, parts)
    loaded: dict[str, Tensor] = {}
    for name, tensor in state.items():
        first = unique[id(tensor)]
        if first not in loaded:
            part = parts[first]
            if part.zeros:
                x = torch.zeros(part.shape, dtype=like.dtype, device=like.device)
            else:
                x = source.read(first, shapes[first], part)
            loaded[first] = nn.Parameter(x, requires_grad=False) if isinstance(tensor, nn.Parameter) else x
        _set_tensor(model, name, loaded[first])
    _compute_buffers(model, like.device)
    _exchange_tokens(model, weights)
    vars(model)[_ATTRIBUTE] = weights
    return model.eval()


def _meta_model(config: Any) -> Any:
    """The model without memory for its weights."""
    register_attention()
    transformers = require_hf("transformers")
    with _building, quiet_transformers(), torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=NAME, trust_remote_code=False
        )


def _set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # Transformers leaves it as it is
    (module._parameters if leaf in module._parameters else module._buffers)[leaf] = tensor  # type: ignore[assignment]
    if isinstance(module, nn.Linear) and leaf == "weight":
        module.out_features, module.in_features = tensor.shape


def _compute_buffers(model: Any, device: torch.device) -> None:
    """Compute what is not stored, such as frequencies of rotary embeddings, as Transformers does when it loads."""
    for module in list(model.modules()):
        missing = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for name in missing:
            module._buffers[name] = torch.empty_like(module._buffers[name], device=device)
        if missing:
            model._init_weights(module)


# Where the ranks exchange tokens.


def _exchange_tokens(model: Any, weights: ShardedWeights) -> None:
    if weights.ranks.all_ranks.world == 1:
        return
    divided = {name.rpartition(".")[0] for name, split in weights.splits.items() if split is not None}
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    paths = {id(module): name for name, module in model.named_modules()}
    for layer in layers:
        for block in layer.children():
            path = paths[id(block)]
            if any(name == path or name.startswith(f"{path}.") for name in divided):
                vars(block)["forward"] = _BlockForward(block, weights.tokens)
    sharding = weights.sharding
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    vocabulary = model.config.vocab_size
    vars(embedding)["forward"] = _EmbeddingForward(
        embedding, weights.tokens, sharding.q_heads(weights.ranks.rank, vocabulary)
    )
    sizes = [len(sharding.q_heads(rank, vocabulary)) for rank in range(sharding.ranks)]
    vars(head)["forward"] = _HeadForward(head, weights.tokens, sizes)


class _BlockForward:
    """The forward of an attention or an MLP: all tokens in, the sum over ranks out."""

    def __init__(self, block: nn.Module, tokens: TokenExchange) -> None:
        self._block, self._tokens = block, tokens

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (self._tokens.gather(args[0]), *args[1:])
        else:
            kwargs["hidden_states"] = self._tokens.gather(kwargs["hidden_states"])
        out = type(self._block).forward(self._block, *args, **kwargs)
        return (self._tokens.reduce(out[0]), *out[1:]) if isinstance(out, tuple) else self._tokens.reduce(out)


class _EmbeddingForward:
    """The forward of an embedding of a part of the vocabulary, `own`."""

    def __init__(self, embedding: nn.Module, tokens: TokenExchange, own: range) -> None:
        self._embedding, self._tokens, self._own = embedding, tokens, own

    def __call__(self, ids: Tensor) -> Tensor:
        local = ids - self._own.start
        other = (local < 0) | (local >= len(self._own))
        rows: Tensor = type(self._embedding).forward(self._embedding, local.masked_fill(other, 0))
        return self._tokens.reduce(rows.masked_fill(other[..., None], 0))


class _HeadForward:
    """The forward of an LM head with a part of the vocabulary; `sizes` are those of all ranks."""

    def __init__(self, head: nn.Module, tokens: TokenExchange, sizes: list[int]) -> None:
        self._head, self._tokens, self._sizes = head, tokens, sizes

    def __call__(self, x: Tensor) -> Tensor:
        x = self._tokens.last(x)
        return self._tokens.gather_vocabulary(type(self._head).forward(self._head, x), self._sizes)
