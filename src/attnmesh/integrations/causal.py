"""Whether a model generates text token by token, as its configuration tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attnmesh.integrations.problem import ModelError, needed


def check_causal(config: Any, model: Path) -> None:
    """Refuse the configuration of a model that is not a causal language model.

    A family may have one, and this model still be another of that family: a classifier would get a random output layer.
    """
    known = needed("transformers").MODEL_FOR_CAUSAL_LM_MAPPING
    named = ", ".join(config.architectures or ()) or f"a model of type {config.model_type!r}"
    if type(config) not in known:
        raise ModelError(f"{model} is not a causal language model: it is {named}")
    classes = known[type(config)]
    names = {one.__name__ for one in (classes if isinstance(classes, list | tuple) else (classes,))}
    if config.architectures and not names & set(config.architectures):
        raise ModelError(f"{model} is not a causal language model: it is {named}, not {' or '.join(sorted(names))}")
