"""Which models of Transformers are served, by what their layers are and not by their names.

A layer that mixes tokens must do so in the attention function or in the functions of recurrent layers that are served
(`recurrent_layers`): over ranks, another one would see this rank's tokens only. The configuration's `layer_types` name
such layers in most models, and the model's code shows the rest. What an attention asks for (mask, window, soft cap,
sinks, widths) is decided in the attention function, where it asks.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from attnmesh.integrations.recurrent_layers import has_recurrent_layers, is_recurrent
from attnmesh.utils.text import see
from attnmesh.utils.validation import shown

NAME = "attnmesh"
"""The `attn_implementation`."""
IGNORED_LABEL = -100
"""The label of tokens without a loss, as in torch and Transformers."""
MODELS_PAGE = "language-models.md#which-models"
"""Of the documentation: what is served, and what is refused."""
STACKS_PAGE = "stacks.md#unsloth"
"""Of the documentation: why models that Unsloth has patched are refused."""

SERVED_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
"""The `layer_types` that are served."""

_TOKENWISE_LAYERS = ("dense", "sparse", "mlp", "moe")  # layers that compute every token by itself
_MIXERS = (nn.Conv1d, nn.RNNBase)  # modules that mix tokens, wherever they are in a decoder layer
_COUNTED_POSITIONS = "create_position_ids_from_input_ids"  # in the code of models that derive positions from tokens
_ENCODER_HEADS = re.compile("For(MaskedLM|TokenClassification)")  # which compute every token by itself
_HEADS = re.compile("For(Sequence|Token)Classification|ForQuestionAnswering|ForMultipleChoice|DoubleHeads")
_POSITIONS_CODE = re.compile(r"cumsum\((\w+_)?attention_mask|attention_mask(\.long\(\)|\.int\(\))?\.cumsum")
_NEIGHBORS_CODE = re.compile(r"\bpad\(inputs_embeds\b")
_MIXER_CODE = re.compile(r"nn\.(Conv1d|LSTM|GRU|RNN)\(")


def check_config(config: Any, name: str | None = None) -> None:
    """Raise ValueError if a model of this configuration has layers that are not served.

    Args:
        config: the configuration of the model, or of its part that is a language model.
        name: of the model, for the message.

    Called for every mask, also while torch.compile traces: what depends on the class of `config` is cached.
    """
    name = type(config).__name__ if name is None else name
    layers = _layer_types(config)
    for layer in layers or ():
        if layer not in SERVED_LAYERS and layer not in _TOKENWISE_LAYERS and not _is_recurrent(type(config)):
            raise ValueError(
                f"{name}: layer_types must be {', '.join(SERVED_LAYERS)}, as other layers that mix tokens would see "
                f"one rank's tokens only, got {', '.join(sorted(set(layers or ())))}{see(MODELS_PAGE)}"
            )
    why_not = _why_not(type(config), layers is not None)
    if why_not:
        raise ValueError(f"{name}: {why_not}{see(MODELS_PAGE)}")


def check_model(model: Any) -> None:
    """Raise ValueError unless the model is served and uses this attention."""
    check_attention_code(model)
    check_positions(model)
    if isinstance(model, nn.Module):
        check_modules(model)


def check_text_only(model: Any) -> None:
    """Raise ValueError for a model that takes images, which are not given to it when it generates."""
    if text_backbone(model) is not None:
        raise ValueError(
            f"model must be a language model to generate, got {type(model).__name__}, which takes images: they are "
            f"served in training{see('training.md#models-with-images')}"
        )


def check_attention_code(model: Any) -> None:
    """Raise ValueError if the model's configuration or code is not served, or if it uses another attention."""
    if not hasattr(model, "config") or not hasattr(model, "get_input_embeddings"):
        raise ValueError(f"model must be a language model of Transformers, got {shown(model)}")
    config = text_config(model)
    check_config(config, type(model).__name__)
    implementation = config._attn_implementation
    if implementation != NAME:
        raise ValueError(
            f"attn_implementation of the model must be {NAME!r} (load it with attn_implementation={NAME!r} or call "
            f"model.set_attn_implementation({NAME!r})), got {implementation!r}{see(MODELS_PAGE)}"
        )


def check_modules(model: nn.Module) -> None:
    """Raise ValueError if a module in the decoder layers mixes tokens without attention, or with that of Unsloth."""
    _check_unpatched(model)
    for path, layer in attention_layers(model):
        served = {id(part) for each in layer.modules() if is_recurrent(type(each)) for part in each.children()}
        for inner, module in layer.named_modules():
            if isinstance(module, _MIXERS) and id(module) not in served:
                raise ValueError(
                    f"{type(model).__name__}: layers must mix tokens in their attention only, got {path}.{inner}, a "
                    f"{type(module).__name__}{see(MODELS_PAGE)}"
                )


def _check_unpatched(model: nn.Module) -> None:
    """Raise ValueError if Unsloth has replaced the code of a module: its attention calls no attention function."""
    for path, module in model.named_modules():
        forward = inspect.unwrap(getattr(module.forward, "__func__", module.forward))
        for code in (forward, type(module)):
            if getattr(code, "__module__", None) and code.__module__.startswith("unsloth"):
                raise ValueError(
                    f"{type(model).__name__}: the model must not be patched by Unsloth, whose attention computes one "
                    f"rank's tokens only, got {code.__module__}.{code.__name__} in {path or 'the model'}: load it in a "
                    f"process that does not import unsloth{see(STACKS_PAGE)}"
                )


def text_config(model: Any) -> Any:
    """The configuration of the model's part that is a language model."""
    return model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config


def text_backbone(model: Any) -> Any:
    """The language model inside of a model that has images or other inputs beside text; None for other models."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or getattr(config, "is_encoder_decoder", False):
        return None
    if config.get_text_config() is config or not hasattr(model, "get_decoder"):
        return None
    found = model.get_decoder()
    return None if found is model or not hasattr(found, "config") else found


def attention_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The decoder layers (those with a numbered part) that need not compute every token by itself, with their paths."""
    model = text_backbone(model) or model
    kinds = _layer_types(text_config(model)) or ()
    for path, layers in model.named_modules():
        for number, layer in enumerate(layers) if isinstance(layers, nn.ModuleList) else ():
            tokenwise = len(kinds) == len(layers) and kinds[number] in _TOKENWISE_LAYERS
            if not tokenwise and any(hasattr(part, "layer_idx") for part in layer.modules()):
                yield f"{path}.{number}", layer


def changing_rotary(config: Any) -> tuple[str, int] | None:
    """The kind of rotary embeddings whose frequencies depend on the largest position of a pass, if the model has such.

    And the number of positions up to which the frequencies are always the same.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    for each in (parameters, *parameters.values()):  # the values may be parameters of kinds of layers
        kind = each.get("rope_type") if isinstance(each, dict) else None
        if kind == "longrope":
            return kind, int(each.get("original_max_position_embeddings") or config.max_position_embeddings)
        if kind is not None and "dynamic" in kind:
            return kind, int(config.max_position_embeddings)
    return None


@cache
def counts_positions_from_mask(config_class: type) -> bool:
    """Whether the code of the model may derive positions from attention_mask where none are given, as OPT does."""
    found = _code(config_class)
    return found is not None and _POSITIONS_CODE.search(inspect.getsource(found[0])) is not None


def counts_positions(config_class: type) -> bool:
    """Whether positions begin after the padding token and leave out padding, as RoBERTa's."""
    return _counts_positions(config_class)


counts_positions._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _counts_positions(config_class: type) -> bool:
    found = _code(config_class)
    return found is not None and _COUNTED_POSITIONS in inspect.getsource(found[0])


def check_positions(model: Any) -> None:
    """Raise ValueError for a decoder whose positions do not begin with 0, as those that `generate` gives to it do."""
    if counts_positions(type(text_config(model))):
        raise ValueError(
            f"{type(model).__name__}: positions must be position_ids that begin with 0, got a model that counts them "
            f"from its padding token{see(MODELS_PAGE)}"
        )


def check_encoder(model: Any, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError unless a batch without causal masks may be given to this model."""
    name = type(model).__name__
    if not _ENCODER_HEADS.search(name) and model.base_model is not model:
        raise ValueError(
            f"a sharded batch with causal=False must be given to the body of an encoder, or with a head ForMaskedLM or "
            f"ForTokenClassification, got {name}: its head would compute with one rank's tokens{see(MODELS_PAGE)}"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"a sharded batch with causal=False must be given to an encoder, got {name}, which has a decoder"
            f"{see(MODELS_PAGE)}"
        )
    if arguments.get("return_dict") is False:
        raise ValueError(f"{name}: return_dict must not be False for a sharded batch with causal=False, got False")


def check_head() -> None:
    """Raise ValueError if the model that is being called has another head than a causal language model.

    A classifier pools a rank's tokens, and labels of tokens must not be shifted. Called within a forward pass: the
    models are found on the stack.
    """
    for module in modules_in_forward():
        if _HEADS.search(type(module).__name__):
            raise ValueError(
                f"a sharded batch must be given to a causal language model or its body, got {type(module).__name__}: "
                f"its head would compute with one rank's tokens, or with labels that are shifted"
            )


def modules_in_forward() -> Iterator[nn.Module]:
    """The modules in whose forward the caller is, innermost first: attention is not told which model calls it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(module, nn.Module):
            yield module
        frame = frame.f_back


def scale_by_index(module: nn.Module, query: Tensor, index: Callable[[], Tensor]) -> Tensor:
    """Queries [B, H, n, D] as one process scales them.

    Llama 4 scales the queries of layers without rotary embeddings by their index in the row, which the model takes to
    be that in the shard. `index()` is the index in the row, [n] or [B, n].
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query
    floor, factor = float(module.floor_scale), float(module.attn_scale)  # type: ignore[arg-type]

    def scale(positions: Tensor) -> Tensor:
        return torch.log1p(torch.floor((positions.float() + 1.0) / floor)) * factor + 1.0

    ratio = scale(index()) / scale(torch.arange(query.shape[2], device=query.device))
    return (query * ratio[..., None, :, None]).to(query.dtype)


def _layer_types(config: Any) -> list[str] | None:
    """The kinds of the layers, for models that name them."""
    layers = getattr(config, "layer_types", None)
    return getattr(config, "layers_block_type", None) if layers is None else layers


def _why_not(config_class: type, names_layers: bool) -> str:
    """Why no model with this class of configuration is served, or nothing."""
    return _why_not_by_code(config_class, names_layers)


# torch.compile runs it while tracing, as with torch.compiler.assume_constant_result, which would import torch._dynamo.
_why_not._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _why_not_by_code(config_class: type, names_layers: bool) -> str:
    found = _code(config_class)
    if found is None:
        return (
            f"the model's code must be in the module of {config_class.__name__} or in a module modeling_NAME beside "
            f"configuration_NAME, to see what its layers are, got {config_class.__module__}"
        )
    module, models = found
    source, recurrent = inspect.getsource(module), has_recurrent_layers(module)
    if _NEIGHBORS_CODE.search(source):
        return "layers must mix tokens in their attention only, got a model that joins embeddings of neighboring tokens"
    if not names_layers and not recurrent:
        if any(model._is_stateful for model in models):
            return "layers with a recurrent state are not served: they would see one rank's tokens only"
        if code := _MIXER_CODE.search(source):
            return (
                f"layers must mix tokens in their attention only, and without layer_types in the configuration any may "
                f"be a {code[1]}, which the model's code has"
            )
    for model in models:
        # Models with recurrent layers call attention functions without saying so.
        if not model._supports_attention_backend and not recurrent:
            return (
                f"the model has attention code of its own, which does not call an attention function with the "
                f"arguments that attnmesh needs ({model.__name__}._supports_attention_backend is False)"
            )
        arguments = inspect.signature(model.forward).parameters
        if "input_ids" in arguments and "position_ids" not in arguments and not (recurrent and "kwargs" in arguments):
            return f"{model.__name__} must take position_ids: ranks have tokens of any positions"
    return ""


def _is_recurrent(config_class: type) -> bool:
    """Whether the model's code has recurrent layers that are served: other layers that it names are refused there."""
    return _has_recurrent_layers(config_class)


_is_recurrent._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _has_recurrent_layers(config_class: type) -> bool:
    found = _code(config_class)
    return found is not None and has_recurrent_layers(found[0])


def _code(config_class: type) -> tuple[ModuleType, list[Any]] | None:
    """The module with the code of the models that have this configuration, and their classes."""
    for parent in config_class.__mro__:
        own = parent.__module__
        for name in dict.fromkeys([own.replace(".configuration_", ".modeling_"), own]):
            try:
                module = sys.modules.get(name) or importlib.import_module(name)
            except ImportError:
                continue
            models = [
                model for model in vars(module).values()
                if inspect.isclass(model) and getattr(model, "config_class", None) is parent
            ]  # fmt: skip
            if models:
                return module, models
    return None
