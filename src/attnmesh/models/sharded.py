"""Models of Transformers whose weights are divided over ranks: every rank has its part of each, and computes with that.

Tokens pass through a layer either all on every rank (a decode step), or divided over the ranks (a prefill chunk):

    embedding                 the rows of this rank's part of the vocabulary; summed over ranks
    attention, MLP            gathers the tokens; this rank's heads or intermediate activations; the sum over ranks is
                              scattered to the tokens' ranks
    LM head                   the last token's logits of this rank's part of the vocabulary; gathered

Norms and residuals between them are computed for this rank's tokens only. So are recurrent layers, whose weights every
rank has: they scan over the ranks. Where every rank has all tokens, nothing is gathered, and an all-reduce replaces the
scatter. All ranks sum in rank order, so they get the same bits.

Transformers' tensor-parallel plan of a model names the layers whose weights are divided by columns or rows. What it
leaves open is added here: heads are divided by heads (kv heads by TP rank), GPT-OSS and the attention of DeepSeek-V3
have no plan, and the vocabulary is always divided. The sum over ranks is right if everything in an attention or an MLP
is divided, or is the same for every part: norms of one head, routers, latents. Any other weight is refused by name,
such as a shared expert that the plan leaves out, or a norm over all heads.

A part of a checkpoint is loaded slice by slice: the whole model is nowhere in memory, and at most one slice is beside
what is loaded already. Experts that a checkpoint stores one by one are written into the tensor of all experts, as
Transformers does.
"""

from __future__ import annotations

import copy
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnmesh.comm import Comm, SharedValues, check_on_all_ranks
from attnmesh.integrations.recurrent_layers import is_recurrent
from attnmesh.integrations.transformers_attention import register_attention
from attnmesh.integrations.transformers_models import NAME, check_config, check_model
from attnmesh.models.checkpoint import (
    LOCAL,
    Differences,
    ModelError,
    check_fits,
    check_floating_point,
    declared_model,
    model_errors,
    quiet_transformers,
    require_hf,
    stored_tensors,
    translated_errors,
)
from attnmesh.parallel.decode.ranks import DecodeRanks, decode_ranks
from attnmesh.parallel.node_groups import comm_named
from attnmesh.plan.decode import DecodeSharding
from attnmesh.plan.weights import FIRST_RANK, Heads, Split, WeightPart, weight_part
from attnmesh.utils.validation import check_type

_BY_Q_HEAD = ("q_proj", "q_b_proj", "kv_b_proj")  # the latter belongs to queries and outputs if the cache has latents
_BY_KV_HEAD = ("k_proj", "v_proj")
_ATTENTION = {"self_attn.q_proj": "colwise", "self_attn.o_proj": "rowwise"}
_OWN_PLANS: dict[str, dict[str, str]] = {
    "gpt_oss": {
        **_ATTENTION, "self_attn.k_proj": "colwise", "self_attn.v_proj": "colwise",
        "mlp.experts.gate_up_proj": "interleaved_colwise", "mlp.experts.gate_up_proj_bias": "interleaved_colwise",
        "mlp.experts.down_proj": "transposed_rowwise", "mlp.experts.down_proj_bias": "first",
    },
    "deepseek_v3": {**_ATTENTION, "self_attn.q_b_proj": "colwise", "self_attn.kv_b_proj": "colwise"},
}  # fmt: skip
_REPLICATED = ("replicated_with_grad_allreduce", "moe_tp_experts", "mla_kv_a_proj")
_LATENT = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")  # the same for all heads
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PLAN = "the tensor-parallel plan of the model"
_NUMBER = re.compile(r"\.\d+\.")

_GENERATION_CONFIG = "generation_config.json"
_EXPERTS = re.compile(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)$")
_STORED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_MIXTRAL_EXPERTS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}

_ATTRIBUTE = "_attnmesh_weights"

_building = threading.Lock()  # Transformers has one set of settings in a process, and virtual ranks are threads


# How weights are divided.


def check_sharded_model(model: Any, sharding: DecodeSharding) -> None:
    """Raise ValueError unless a whole model generates with weights that are divided this way."""
    weight_splits(model)
    check_heads(model.config, sharding)


def check_heads(config: Any, sharding: DecodeSharding) -> None:
    """Raise ValueError unless the heads of the model's attention are divided this way."""
    heads = heads_of(config)
    sharding.check_heads(heads.q, heads.kv)


def check_sharded_config(config: Any, sharding: DecodeSharding) -> None:
    """Raise ValueError unless models of this configuration generate with weights that are divided this way."""
    check_sharded_model(_meta_model(config), sharding)


@cache
def is_sharded_type(model_type: str) -> bool:
    """Whether models of this type generate with weights that are divided; True without Transformers, to find out."""
    if find_spec("transformers") is None:
        return True
    with quiet_transformers():
        try:
            weight_splits(_meta_model(require_hf("transformers").AutoConfig.for_model(model_type)))
        except Exception:  # of a type that is not known, or not refused in words
            return False
    return True


def heads_of(config: Any) -> Heads:
    """The heads of the model's attention: kv heads are the heads of its KV cache, one if the cache has latents."""
    if getattr(config, "num_attention_heads", None) is None:
        raise ValueError(
            f"{type(config).__name__} must have num_attention_heads, as models whose layers attend, got none"
        )
    if getattr(config, "kv_lora_rank", None) is not None:
        return Heads(config.num_attention_heads, 1)
    return Heads(config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def weight_splits(model: Any) -> dict[str, Split | None]:
    """The split of every tensor in the state of a model, by name; None: every rank holds all of it.

    Raises ValueError if the parts would not compute what the whole model does.
    """
    heads = heads_of(model.config)
    prefix = f"{model.base_model_prefix}.layers.*."
    own = {prefix + name: style for name, style in _OWN_PLANS.get(model.config.model_type, {}).items()}
    plan = {**(model.tp_plan or {}), **own}
    vocabulary = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer}
    splits: dict[str, Split | None] = {}
    recurrent = [f"{path}." for path, module in model.named_modules() if is_recurrent(type(module))]
    head = next((name for name, module in model.named_modules() if module is model.get_output_embeddings()), "")
    for name, tensor in model.state_dict(keep_vars=True).items():
        is_vocabulary = id(tensor) in vocabulary or name == f"{head}.bias"
        is_whole = any(name.startswith(path) for path in recurrent)
        splits[name] = Split(0, "ranks") if is_vocabulary else None if is_whole else _split(name, tensor.ndim, plan)
    _check_splits(model, splits, heads, plan)
    return splits


def _check_splits(
    model: Any, splits: Mapping[str, Split | None], heads: Heads, plan: Mapping[str, str]
) -> None:  # fmt: skip
    """Raise ValueError unless the sum over the parts of every attention and every MLP is that of the whole one."""
    name, config = type(model).__name__, model.config
    if getattr(config, "num_kv_shared_layers", 0):
        raise ValueError(f"{name}: sharded weights require that every layer has its own keys and values")
    shapes = {each: tuple(tensor.shape) for each, tensor in model.state_dict(keep_vars=True).items()}
    paths = {id(module): path for path, module in model.named_modules()}
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    if len(layers) != config.num_hidden_layers:
        raise ValueError(f"{name}: sharded weights require {config.num_hidden_layers} layers, got {len(layers)}")
    kinds = getattr(config, "layer_types", None) or [""] * len(layers)
    for layer, kind in zip(layers, kinds, strict=True):
        recurrent = [paths[id(module)] for module in layer.modules() if is_recurrent(type(module))]
        gathered = [path for path in recurrent if _is_gathered(path, plan)]
        if recurrent and (kind != "linear_attention" or len(recurrent) > 1 or not gathered):
            raise ValueError(
                f"{name}: sharded weights require attention in every layer, or a recurrent layer whose outputs {_PLAN} "
                f"gathers, got {recurrent[0]}"
            )
        attentions = [each for each in layer.children() if hasattr(each, "layer_idx")]
        if len(attentions) != 1 or (kind == "linear_attention") != bool(recurrent):
            raise ValueError(f"{name}: sharded weights require one attention per layer, got {paths[id(layer)]}")
        for block in layer.children():
            path = f"{paths[id(block)]}."
            own = {each.removeprefix(path): splits[each] for each in shapes if each.startswith(path)}
            if block is attentions[0] and not recurrent:
                _check_attention(path, block, own, shapes, heads)
            if any(split is not None for split in own.values()):
                for leaf, split in own.items():
                    if split is None and not _is_common(leaf, shapes[path + leaf], block, config):
                        raise ValueError(
                            f"{path}{leaf} must be divided to shard the model's weights: {_PLAN} divides others of "
                            f"{path[:-1]}, and leaves it out"
                        )


def _is_gathered(path: str, plan: Mapping[str, str]) -> bool:
    """Whether every rank has all outputs of a layer by the plan, whose weights every rank has here."""
    pattern = _NUMBER.sub(".*.", f"{path}.")
    return any(name.startswith(pattern) and style == "colwise_gather_output" for name, style in plan.items())


def _check_attention(
    path: str, block: Any, splits: Mapping[str, Split | None], shapes: Mapping[str, tuple[int, ...]], heads: Heads
) -> None:
    """Raise ValueError unless the heads of an attention are divided: its projections, and its output."""
    divided = {leaf: split for leaf, split in splits.items() if split is not None}
    by = {split.by for leaf, split in divided.items() if split.dim == 0 and leaf.endswith(".weight")}
    out = any(split.dim == -1 and split.by == "q_heads" for split in divided.values())
    is_latent = "kv_b_proj.weight" in splits
    if by != ({"q_heads"} if is_latent else {"q_heads", "kv_heads"}) or not out:
        raise ValueError(
            f"{path[:-1]}: {_PLAN} must divide the projections of queries, keys, values and outputs to shard its "
            f"weights, got {', '.join(divided) or 'none of them'}"
        )
    key = shapes.get(f"{path}k_proj.weight")
    if key is not None and key[0] != heads.kv * getattr(block, "head_dim", key[0] // heads.kv):
        raise ValueError(f"{path[:-1]} must have {heads.kv} kv heads, as the configuration has, to shard its weights")


def _is_common(leaf: str, shape: tuple[int, ...], block: Any, config: Any) -> bool:
    """Whether a weight that is not divided belongs to every part alike."""
    parts = leaf.split(".")
    if hasattr(block, "layer_idx"):
        if parts[0] in _LATENT or parts[-1] == "sinks":
            return True
        return len(shape) == 1 and shape[0] == getattr(block, "head_dim", None)  # a norm of each head
    experts = next((each for name in _EXPERT_COUNTS if (each := getattr(config, name, None))), None)
    of_router = ((experts, config.hidden_size), (experts,), (1, experts), (1, config.hidden_size))
    return prod(shape) == 1 or shape in of_router


def _split(name: str, ndim: int, plan: Mapping[str, str]) -> Split | None:
    pattern = _NUMBER.sub(".*.", name)
    layer, _, leaf = pattern.rpartition(".")
    style = plan.get(pattern) or plan.get(layer)
    if style is None or style in _REPLICATED or leaf == "sinks":
        return None
    is_bias, is_attention = leaf == "bias", ".self_attn." in pattern
    projection = layer.rpartition(".")[2]
    if projection == "gate_up_proj" and style == "colwise_gather_output" and not is_attention:
        return Split(0, "ranks", packed=2)  # the output of every rank is a gate and as much of what it multiplies
    if projection == "down_proj" and style == "rowwise_split_input":
        style = "rowwise"
    match style:
        case "colwise":
            if is_attention and projection not in (*_BY_Q_HEAD, *_BY_KV_HEAD):
                names = ", ".join((*_BY_Q_HEAD, *_BY_KV_HEAD))
                raise ValueError(f"{name}: a projection of attention must be one of {names}, got {projection}")
            return Split(0, "ranks" if not is_attention else "q_heads" if projection in _BY_Q_HEAD else "kv_heads")
        case "rowwise":
            return FIRST_RANK if is_bias else Split(-1, "q_heads" if is_attention else "ranks", aligned=ndim == 3)
        case "packed_colwise" if ndim == 3:
            return Split(-2, "ranks", packed=2, aligned=True)
        case "interleaved_colwise":
            return Split(-1, "ranks", unit=2, aligned=True)
        case "transposed_rowwise":
            return Split(-2, "ranks", aligned=True)
        case "first":
            return FIRST_RANK
    raise ValueError(f"{name}: {_PLAN} has {style!r}, which is not supported")


# Models.


class _WholeModel:
    """A model that has all weights, as a source of parts."""

    def __init__(self, model: Any) -> None:
        self._state: dict[str, Tensor] = model.state_dict()

    def prepare(self, model: Any, weights: Mapping[str, Tensor], parts: Mapping[str, WeightPart]) -> None:
        """Raise ValueError unless the model has the weights of its configuration."""
        for name, weight in weights.items():
            if name not in self._state or self._state[name].shape != weight.shape:
                found = "none" if name not in self._state else list(self._state[name].shape)
                raise ValueError(
                    f"model must have the weights of its configuration: {name} {list(weight.shape)}, got {found}"
                )

    def read(self, name: str, whole: tuple[int, ...], part: WeightPart) -> Tensor:
        """A copy of a part of a tensor with the shape `whole`."""
        whole_tensor = self._state[name]
        if not part.ranges:
            return whole_tensor.clone()
        return torch.cat([whole_tensor[index] for index in part.indices()], part.dim)


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
        """All tokens, [B, n, hidden], from this rank's tokens."""
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
        """All logits [.., vocabulary], from the logits of this rank's part."""
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
        """The part of every tensor that a rank holds. Raises ValueError if a tensor cannot be divided this way."""
        heads = heads_of(config)
        return {
            name: weight_part(name, self.shapes[name], split, self.sharding, rank, heads)
            for name, split in self.splits.items()
        }


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
        ...     part = am.models.shard_model(model, am.DecodeSharding(tp=2), comm)
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
        check_sharded_model(model, sharding)
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


def build_sharded(
    config: Any, ranks: DecodeRanks, sharding: DecodeSharding, source: _WholeModel | _Checkpoint, like: Tensor
) -> Any:
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
    tokens, sharding, vocabulary = weights.tokens, weights.sharding, model.config.vocab_size
    divided = {name.rpartition(".")[0] for name, split in weights.splits.items() if split is not None}
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    paths = {id(module): name for name, module in model.named_modules()}
    for layer in layers:
        for block in layer.children():
            path = paths[id(block)]
            if any(name == path or name.startswith(f"{path}.") for name in divided):
                vars(block)["forward"] = partial(_block_forward, block, tokens)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    parts = [sharding.q_heads(rank, vocabulary) for rank in range(sharding.ranks)]
    vars(embedding)["forward"] = partial(_embedding_forward, embedding, tokens, parts[weights.ranks.rank])
    vars(head)["forward"] = partial(_head_forward, head, tokens, list(map(len, parts)))


def _block_forward(block: nn.Module, tokens: TokenExchange, *args: Any, **kwargs: Any) -> Any:
    """The forward of an attention or an MLP: all tokens in, the sum over ranks out."""
    if args:
        args = (tokens.gather(args[0]), *args[1:])
    else:
        kwargs["hidden_states"] = tokens.gather(kwargs["hidden_states"])
    out = type(block).forward(block, *args, **kwargs)
    return (tokens.reduce(out[0]), *out[1:]) if isinstance(out, tuple) else tokens.reduce(out)


def _embedding_forward(embedding: nn.Module, tokens: TokenExchange, own: range, ids: Tensor) -> Tensor:
    """The forward of an embedding of a part of the vocabulary, `own`."""
    local = ids - own.start
    other = (local < 0) | (local >= len(own))
    rows: Tensor = type(embedding).forward(embedding, local.masked_fill(other, 0))
    return tokens.reduce(rows.masked_fill(other[..., None], 0))


def _head_forward(head: nn.Module, tokens: TokenExchange, sizes: list[int], x: Tensor) -> Tensor:
    """The forward of an LM head with a part of the vocabulary; `sizes` of the parts of all ranks."""
    return tokens.gather_vocabulary(type(head).forward(head, tokens.last(x)), sizes)


# Parts of a checkpoint.


def load_sharded(
    folder: Path, config: Any, device: torch.device, dtype: torch.dtype, sharding: DecodeSharding, comm: Comm
) -> Any:
    """The model in a folder with this rank's part of its weights. Raises ModelError if they are not complete."""
    with translated_errors(f"the model in {folder} cannot be sharded"):
        check_config(config.get_text_config(), type(config).__name__)
        check_heads(config, sharding)
        ranks = decode_ranks(comm, comm, sharding)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{folder} must store weights that are not quantized to be sharded")
    with closing(_Checkpoint(folder, config, dtype, device)) as checkpoint, model_errors():
        model = build_sharded(config, ranks, sharding, checkpoint, torch.empty(0, dtype=dtype, device=device))
    if (folder / _GENERATION_CONFIG).is_file():
        with quiet_transformers(), translated_errors(f"{folder / _GENERATION_CONFIG} cannot be read"):
            generation: Any = require_hf("transformers").GenerationConfig
            model.generation_config = generation.from_pretrained(folder, local_files_only=LOCAL["local_files_only"])
    return model


@dataclass(frozen=True)
class _Piece:
    """A stored tensor, and where it is in a tensor of the model: from `begin` of dimension `dim`, of one expert."""

    name: str
    shape: tuple[int, ...]
    dim: int = 0
    begin: int = 0
    expert: int | None = None


class _Checkpoint:
    """The weights in a folder, as a source of parts."""

    def __init__(self, folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        self._is_mixtral = config.model_type == "mixtral"
        self._stored = stored_tensors(folder)
        with quiet_transformers():
            declared_model(config, len(self._stored), folder)  # refuses sizes that would take time to build
        self._files: dict[Path, Any] = {}
        self._open = ExitStack()
        self._in_float32: tuple[str, ...] = ()

    def close(self) -> None:
        """Close the files."""
        self._open.close()

    def prepare(self, model: Any, weights: Mapping[str, Tensor], parts: Mapping[str, WeightPart]) -> None:
        """Raise ModelError unless the folder has exactly these weights, and their parts fit on the device.

        Args:
            model: without weights.
            weights: by name, tied ones once.
            parts: what is to be read of them.
        """
        pieces = [piece for name, weight in weights.items() for piece in self._pieces(name, tuple(weight.shape))]
        declared = {piece.name: piece.shape for piece in pieces}
        ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
        tied = set(model.state_dict()) - set(weights)
        found = {
            name: tensor.shape for name, tensor in self._stored.items()
            if name in declared or not (name in tied or any(pattern.search(name) for pattern in ignored))
        }  # fmt: skip
        Differences.between(found, declared).check(self._folder)
        check_floating_point({name: self._stored[name] for name in declared}, self._folder)
        strict = model._keep_in_fp32_modules_strict or ()
        half = model._keep_in_fp32_modules or () if self._dtype == torch.float16 else ()
        self._in_float32 = (*strict, *half)
        needed = sum(prod(parts[name].shape) for name in weights) * self._dtype.itemsize
        check_fits(needed, self._device, self._folder)

    def read(self, name: str, whole: tuple[int, ...], part: WeightPart) -> Tensor:
        """A part of a tensor of the model."""
        in_float32 = any(each in name for each in self._in_float32)
        out = torch.empty(part.shape, dtype=torch.float32 if in_float32 else self._dtype, device=self._device)
        for piece in self._pieces(name, whole):
            for index, target in _overlaps(piece, part):
                view = out if piece.expert is None else out[piece.expert]
                view[target].copy_(self._slice(piece.name)[index])
        return out

    def _slice(self, name: str) -> Any:
        """A stored tensor, of which nothing is read before it is indexed."""
        file = self._stored[name].file
        with translated_errors(f"{file} is damaged"):
            if file not in self._files:
                safe_open = require_hf("safetensors").safe_open
                self._files[file] = self._open.enter_context(safe_open(file, framework="pt"))
            return self._files[file].get_slice(name)

    def _pieces(self, name: str, shape: tuple[int, ...]) -> Iterator[_Piece]:
        """The stored tensors that a tensor of the model consists of."""
        found = _EXPERTS.match(name)
        stored = name.replace(".mlp.", ".block_sparse_moe.") if self._is_mixtral else name
        if found is None or name in self._stored:
            yield _Piece(stored if stored in self._stored else name, shape)
            return
        parts = (_MIXTRAL_EXPERTS if self._is_mixtral else _STORED_EXPERTS)[found[2]]
        experts, rows, columns = shape
        for expert in range(experts):
            for at, part in enumerate(parts):
                rows_of_one = rows // len(parts)
                path = f"{stored.rpartition('.')[0]}.{expert}.{part}.weight"
                yield _Piece(path, (rows_of_one, columns), 0, at * rows_of_one, expert)


def _overlaps(piece: _Piece, part: WeightPart) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Indices of a stored tensor, and of (one expert of) the part, that are the same elements."""
    whole = (slice(None),) * len(piece.shape)
    dim = part.dim - (piece.expert is not None)  # of the stored tensor
    if not part.ranges:
        yield whole, _at(whole, piece.dim, slice(piece.begin, piece.begin + piece.shape[piece.dim]))
        return
    at = 0  # in the part
    for own in part.ranges:
        target = slice(at, at + len(own))
        at += len(own)
        if dim != piece.dim:  # the stored tensor has all of this dimension
            yield _at(whole, dim, slice(own.start, own.stop)), _at(whole, dim, target)
        elif piece.begin <= own.start and own.stop <= piece.begin + piece.shape[dim]:
            yield _at(whole, dim, slice(own.start - piece.begin, own.stop - piece.begin)), _at(whole, dim, target)


def _at(index: tuple[slice, ...], dim: int, at: slice) -> tuple[slice, ...]:
    return (*index[:dim], at, *index[dim + 1 :])
