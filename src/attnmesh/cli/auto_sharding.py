"""`--sharding auto`: the plan of `attnmesh plan decode` that is the fastest that fits into the ranks' memory.

The times are the planner's, the bytes of weights and KV cache are what ranks will have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attnmesh.cli.language_model import DeviceMemory, local_ranks
from attnmesh.cli.plan import enough_ranks
from attnmesh.cli.sharding import kv_itemsize
from attnmesh.generation.latents import latent_widths
from attnmesh.generation.models import cache_storage
from attnmesh.generation.rank_memory import ShardedMemory
from attnmesh.models.checkpoint import CONFIG
from attnmesh.plan.decode import DecodeSharding
from attnmesh.planner.catalog import default_cluster
from attnmesh.planner.decode import DecodeRequest, decode_option, shardings
from attnmesh.planner.models.config import WeightBits, model_from_config
from attnmesh.planner.ranking import Memory, Option, ranked, usable_memory
from attnmesh.utils.text import counted, readable_bytes


@dataclass(frozen=True)
class AutoSharding:
    """What a sharding is chosen for: decode steps of `batch` sequences of `context` tokens on `ranks` ranks."""

    folder: Path
    config: Any  # of Transformers
    dtype: torch.dtype
    ranks: int
    batch: int
    context: int
    rank_memory: ShardedMemory  # what ranks will have
    device_memory: DeviceMemory
    storage: str | None = None  # of the KV cache; None: the dtype

    def choose(self) -> tuple[DecodeSharding, str]:
        """The fastest sharding that fits, and why. Raises ValueError if none fits."""
        request = self._request()
        options = list(self._options(request))
        available = self.device_memory.planned
        best = ranked(options, available, {}).best
        if best is None:
            raise ValueError(self._problem(request, options, available))
        assert best.sharding is not None
        fitting = sum(option.fits(available) for option in options)
        which = f"the fastest of {fitting} that fit" if fitting > 1 else "the only one that fits"
        return best.sharding, f"{which}, {readable_bytes(best.memory.total)} of {readable_bytes(available)} per rank"

    def _request(self) -> DecodeRequest:
        values = {**self.config.get_text_config().to_dict(), "dtype": None, "quantization_config": None}
        bits = 8 * self.dtype.itemsize
        model = replace(model_from_config(values, self.folder / CONFIG), weight_bits=WeightBits(bits, bits, bits))
        cluster = default_cluster(self.device_memory.device).with_ranks_per_node(local_ranks(self.ranks))
        storage = cache_storage(latent_widths(self.config), self.dtype, self.storage)
        itemsize = kv_itemsize(storage, model)
        return DecodeRequest(model, self.context, self.batch, self.ranks, cluster, kv_itemsize=itemsize)

    def _options(self, request: DecodeRequest) -> Iterator[Option]:
        """All shardings of one replica that the model can be divided by, with the memory that they take here."""
        for replicas, sharding in shardings(request):
            if replicas > 1:
                continue
            try:
                held = self.rank_memory.of(sharding)
            except ValueError:  # heads or weights that cannot be divided this way
                continue
            option = decode_option(request, replicas, sharding)
            yield replace(option, memory=Memory(held.weights, held.kv_cache, option.memory.working))

    def _problem(self, request: DecodeRequest, options: list[Option], available: float) -> str:
        usable = usable_memory(available)

        def least_memory(ranks: int) -> Memory | None:
            larger = self._options(replace(request, devices=ranks))
            return min((option.memory for option in larger), key=lambda memory: memory.total, default=None)

        if not options:
            return (
                f"no sharding divides {self.folder} over {counted(self.ranks, 'rank')}: it has "
                f"{request.model.q_heads} query heads and {request.model.kv_heads} kv heads"
            )
        least = min(options, key=lambda option: option.memory.total)
        memory = least.memory
        return (
            f"no sharding of {self.folder} fits: {least.name}, the smallest, takes {readable_bytes(memory.total)} per "
            f"rank ({readable_bytes(memory.weights)} of weights, {readable_bytes(memory.cache)} of KV cache, "
            f"{readable_bytes(memory.working)} of activations), and {readable_bytes(usable)} are usable, nine tenths "
            f"of {readable_bytes(available)} ({self.device_memory}). {enough_ranks(self.ranks, least_memory, usable)}"
        )
