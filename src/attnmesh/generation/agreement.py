"""Arguments and weights of a `Generator` must be equal on all ranks: they are compared before anything else is sent.

The arguments of the constructor and of every call, the model's configuration, and its weights: every rank computes with
weights of its own, and other weights on one rank would give wrong tokens on all.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from attnmesh.comm import Comm, CommError, SharedValues
from attnmesh.models.sharded import sharded_weights
from attnmesh.parallel.checksums import checksums
from attnmesh.utils.text import alternatives

# The origin of a model, not the model, and what `save_pretrained` writes into the configuration of the rank that saves.
_NOT_COMPARED = ("_name_or_path", "transformers_version", "_commit_hash", "architectures", "dtype")
_MAX_NAMED = 3  # tensors that an error names


def model_values(model: Any) -> SharedValues:
    """The configuration of a model, entry by entry, and the names, shapes and dtypes of its tensors."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_COMPARED}
    weights = sharded_weights(model)
    shapes = {} if weights is None else weights.shapes  # of whole tensors: the parts differ
    tensors = [f"{name} {list(shapes.get(name, x.shape))} {x.dtype}" for name, x in _tensors(model).items()]
    return {
        "model": type(model).__name__,
        **{f"config.{name}": value for name, value in sorted(config.items())},
        "tensors of the model": f"{len(tensors)} with names, shapes and dtypes {digest(tensors)}",
    }


def config_digest(model: Any) -> str:
    """Equal for models of the same configuration."""
    return digest(sorted((name, repr(x)) for name, x in model.config.to_dict().items() if name not in _NOT_COMPARED))


def digest(value: object) -> str:
    """A short digest of a value with a `repr` that is the same on all ranks."""
    return sha256(repr(value).encode()).hexdigest()[:16]


def check_same_weights(comm: Comm, model: Any, device: torch.device) -> None:
    """Raise ValueError on every rank unless all weights and buffers have the same bits on all ranks.

    Of a sharded model, those parts are compared that several ranks hold. The tensors must have the same names and
    shapes (`model_values`). It takes the time of reading the weights a few times; one number per tensor is sent.
    """
    if comm.world == 1:
        return
    tensors = _tensors(model)
    own = checksums(tensors.values(), device)
    by_rank = [sums.tolist() for sums in comm.all_gather(own, [own.shape] * comm.world)]
    weights = sharded_weights(model)
    parts = [{} if weights is None else weights.parts(rank, model.config) for rank in range(comm.world)]
    differing = []
    for i, name in enumerate(tensors):
        by_part: dict[Any, dict[int, int]] = {}
        for rank, sums in enumerate(by_rank):
            by_part.setdefault(parts[rank].get(name), {})[rank] = sums[i]
        differing += [
            f"{name} is {alternatives({rank: f'{total % 2**64:016x}' for rank, total in same.items()})}"
            for same in by_part.values()
            if len(set(same.values())) > 1
        ]
    if differing:
        more = f"; and {len(differing) - _MAX_NAMED} more" if len(differing) > _MAX_NAMED else ""
        raise ValueError(
            f"Generator: ranks have different weights in {len(differing)} of {len(tensors)} tensors, by checksum: "
            f"{'; '.join(differing[:_MAX_NAMED])}{more}"
        )


@dataclass
class Progress:
    """How far the calls of a `Generator` have got: equal on all ranks between two calls, or they are out of step."""

    generator: int = 0  # which one of those on its ranks, as `CallLog.number` counts them
    calls: int = 0
    steps: int = 0  # of the latest call
    digest: int = 0  # of all prompts and tokens

    def begin_call(self, prompts: Sequence[Sequence[int]]) -> None:
        """Count a call."""
        self.calls, self.steps = self.calls + 1, 0
        self.digest = hash((self.digest, *(hash(tuple(ids)) for ids in prompts)))

    def add_step(self, new: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Count a step, with the new tokens of each row."""
        self.steps += 1
        self.digest = hash((self.digest, *((row, *tokens) for row, tokens in new)))

    def __str__(self) -> str:
        return (
            f"generator {self.generator}, {self.steps} steps into call {self.calls}, digest {self.digest % 2**64:016x}"
        )


def report_error(comm: Comm, operation: str, error: BaseException) -> None:
    """Tell the other ranks why this rank leaves an operation, without waiting for them.

    Ranks that wait for this rank quote the reason. If all ranks leave, the comm remains usable.
    """
    if comm.world > 1 and not isinstance(error, CommError):
        with suppress(ValueError, CommError):  # it raises the given error
            comm.agree(operation, {}, f"{type(error).__name__}: {error}")


def _tensors(model: Any) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
