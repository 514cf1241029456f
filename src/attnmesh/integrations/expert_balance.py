"""The load-balancing loss of mixture-of-experts models over ranks.

It is a product of means over all tokens, so that the losses of shards do not add up to it. Every rank computes it from
the router logits of the whole batch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnmesh.integrations.sharded_batch import ShardedPass

_NAME = "load_balancing_loss_func"  # in the modules of models; TRL takes that of Mixtral
_MIXTRAL = "transformers.models.mixtral.modeling_mixtral"


def check_balance(model: nn.Module) -> None:
    """Raise ValueError if the model adds a loss for its experts that is not the one that `whole_balance` computes."""
    if getattr(_config(model), "output_router_logits", False) and not hasattr(
        sys.modules[type(model).__module__], _NAME
    ):
        raise ValueError(
            f"output_router_logits must be False under context parallelism for {type(model).__name__}: the loss of its "
            "experts is not known to be one of tokens"
        )


def _config(model: Any) -> Any:
    return model.config.get_text_config()


@contextmanager
def whole_balance(
    models: Iterable[nn.Module], current: Callable[[], ShardedPass | None], share: float
) -> Iterator[None]:
    """In this context, the load-balancing loss of models is `share` times that of the whole batch of `current()`.

    Its gradients are such that the mean over ranks is the gradient of `share` times the loss.
    """
    models = list(models)
    if any(hasattr(_config(model), "output_router_logits") for model in models):
        importlib.import_module(_MIXTRAL)  # TRL imports it in its first step, and takes its function for every model
    names = {_MIXTRAL, *(type(model).__module__ for model in models)}
    modules: list[Any] = [sys.modules[name] for name in names if hasattr(sys.modules.get(name), _NAME)]
    before = [getattr(module, _NAME) for module in modules]
    for module, original in zip(modules, before, strict=True):
        setattr(module, _NAME, _over_ranks(original, current, share))
    try:
        yield
    finally:
        for module, original in zip(modules, before, strict=True):
            setattr(module, _NAME, original)


def _over_ranks(original: Any, current: Callable[[], ShardedPass | None], share: float) -> Any:
    def loss(gate_logits: Any, num_experts: Any = None, top_k: Any = 2, attention_mask: Any = None) -> Any:
        mesh = current()
        if mesh is None or not isinstance(gate_logits, tuple):
            return original(gate_logits, num_experts, top_k, attention_mask)
        rows, tokens = mesh.position_ids.shape

        def whole(x: Tensor) -> Tensor:
            return mesh.unshard(x.reshape(rows, tokens, -1)).flatten(0, 1)

        real = whole(mesh.attention_mask.to(torch.float32))
        return share * original(tuple(map(whole, gate_logits)), num_experts, top_k, real)

    return loss
