"""`Generator(..., reproducible=True)`: the logits of a token have the same bits however they are computed.

The modules of a model compute tiles, as in training (`integrations.reproducible`): products of a fixed number of
aligned positions, in which the token at position p has row `p % size`. What the other rows of a tile have does not
change the bits of its row. So a decode step computes whole tiles, too: tokens of several sequences share a tile where
their rows differ, and absent rows repeat a token.

Attention is `attention(..., reproducible=True)`. The keys that a pass attends to are gathered from the ranks that store
them, in every layer and pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from attnmesh.comm import Comm
from attnmesh.core.layouts import Aligned, Layout
from attnmesh.core.masks import Chunked
from attnmesh.core.ranges import InterleavedShard
from attnmesh.generation.attention_calls import AttentionCall, AttentionCalls, NewTokensCache, mask_window, run_model
from attnmesh.generation.passes import CachePass, ContextPrefill, DecodePass, Options
from attnmesh.integrations.reproducible import LEAF, attending, make_leafwise
from attnmesh.integrations.transformers_models import text_config
from attnmesh.ops.dense.api import attention
from attnmesh.ops.paged import PagedKV
from attnmesh.ops.storage import PLAIN


def tile_size(layout: Layout) -> tuple[int, Layout]:
    """The positions of a tile, and the layout of prompts: as in training, `Aligned` has both."""
    return (layout.size, layout.layout) if isinstance(layout, Aligned) else (LEAF, layout)


def prepare(model: Any, calls: AttentionCalls, storage: str, size: int) -> None:
    """Let a model with whole weights compute tiles. Raises ValueError for a model that is not served."""
    if storage not in PLAIN:
        raise ValueError(
            f"storage must be None with reproducible=True, got {storage!r}: training has no quantized keys"
        )
    experts = next((name for name, _ in model.named_modules() if "expert" in name.rpartition(".")[2]), None)
    if experts is not None:
        raise ValueError(
            f"model must have no experts with reproducible=True, got {experts}: how many tokens of a tile an expert "
            f"has would change the bits of each"
        )
    if calls.latent is not None or calls.shared or calls.recurrent:
        kind = "a cache of latents" if calls.latent is not None else "recurrent layers"
        raise ValueError(
            f"model must cache keys and values of its own in every layer with reproducible=True, got "
            f"{'layers that share them' if calls.shared else kind}"
        )
    try:
        make_leafwise(model)
        first, second = (_probed(model, size, other) for other in (0, 1))
    except ValueError as error:
        raise ValueError(f"model must be one that can be trained with reproducible=True: {error}") from None
    if not torch.equal(first, second):
        raise ValueError(
            f"model must compute every token of a tile by itself with reproducible=True, got a {type(model).__name__} "
            f"whose bits depend on other tokens on this machine"
        )


@torch.no_grad()
def _probed(model: Any, size: int, other: int) -> Tensor:
    """The logits of every second token of a tile without attention; the tokens between these are `other` ones."""
    config, at = text_config(model), torch.arange(size, device="cpu")
    tiles = Tiles.of(at[None], size, 0, model.get_output_embeddings())
    at = at.to(model.get_input_embeddings().weight.device)
    positions = (at % getattr(config, "max_position_embeddings", size))[None]
    ids = (at + other * (at % 2) * (1 + at)) % config.vocab_size
    return run_model(model, _Probe(tiles, positions), ids[None], positions)[0, ::2]


@dataclass(frozen=True)
class _Probe(NewTokensCache):
    """A pass whose attention is 0."""

    leaves: Tiles
    positions: Tensor

    def index_in_row(self) -> Tensor:
        """The positions of the tokens."""
        return self.positions

    def update(self, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """The keys and values of the tile."""
        return key, value

    def attend(self, layer: object, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """0 for every token."""
        return q.new_zeros(*q.shape[:3], v.shape[3])


@dataclass(frozen=True)
class Tiles:
    """The tokens of a pass in tiles. Each tile is a row of the batch that the model is given."""

    size: int
    shape: tuple[int, int]  # sequences, and tokens of each
    places: Tensor  # of each token in all tiles, one after another
    rows: int
    keep: int  # the latest tokens of each sequence whose logits are wanted; 0: all
    head: nn.Module  # computes logits

    @classmethod
    def of(cls, positions: Tensor, size: int, keep: int, head: nn.Module) -> Tiles:
        """The tiles of tokens at positions [B, T] on a CPU: each is in the first tile whose row is free."""
        row = positions.flatten() % size
        order, counts = row.argsort(stable=True), torch.bincount(row, minlength=size)
        earlier = torch.arange(len(row), device="cpu") - (counts.cumsum(0) - counts)[row[order]]
        tile = torch.empty_like(row)
        tile[order] = earlier
        shape = (positions.shape[0], positions.shape[1])
        return cls(size, shape, tile * size + row, int(counts.max()), keep, head)

    @property
    def tokens(self) -> list[int]:
        """The number of tokens in each leaf of a row: a row is one leaf."""
        return [self.size]

    def numbers(self, row: int) -> list[int]:
        """The numbers of the leaves of a row."""
        return [row]

    def computed_rows(self, module: nn.Module) -> Sequence[int]:
        """The tiles that a module computes: of logits, those that are wanted."""
        return self._kept_tiles if module is self.head else range(self.rows)

    @cached_property
    def _kept(self) -> Tensor:
        """The places of the tokens whose logits are wanted, [B, T]."""
        return self.places.view(self.shape)[:, -self.keep :]

    @cached_property
    def _kept_tiles(self) -> list[int]:
        found: list[int] = (self._kept // self.size).unique().tolist()
        return found

    def spread(self, x: Tensor) -> Tensor:
        """Numbers of tokens [B, T] in tiles [rows, size]; absent tokens repeat the first."""
        flat = x.flatten()
        found = flat[:1].repeat(self.rows * self.size)
        found[self.places] = flat
        return found.view(self.rows, self.size)

    def take(self, x: Tensor) -> Tensor:
        """Heads of tokens [B, H, T, D] from tiles [rows, H, size, D]."""
        tokens: Tensor = x.transpose(1, 2).flatten(0, 1)[self.places].unflatten(0, self.shape)
        return tokens.transpose(1, 2).contiguous()

    def put(self, x: Tensor) -> Tensor:
        """The inverse of `take`; absent tokens are 0."""
        found = x.new_zeros(self.rows * self.size, x.shape[1], x.shape[3])
        found[self.places] = x.transpose(1, 2).flatten(0, 1)
        return found.view(self.rows, self.size, *found.shape[1:]).transpose(1, 2)

    def logits(self, x: Tensor) -> Tensor:
        """The logits [B, T, vocabulary] of the tokens that are wanted, from tiles."""
        places = self._kept
        if x.shape[0] != self.rows:  # only the tiles with these
            tile = torch.searchsorted(torch.tensor(self._kept_tiles, device=places.device), places // self.size)
            places = tile * self.size + places % self.size
        return x.flatten(0, 1)[places]


GatheredKeys = tuple[Tensor, Tensor, Tensor]
"""Keys and values [1, H, n, D] of one sequence, and their positions, in any order."""


@dataclass(frozen=True)
class KeyRanks:
    """The ranks that store the keys of sequences."""

    comm: Comm
    shard: InterleavedShard

    def gather(self, own: Sequence[tuple[Tensor, Tensor]], runs: Sequence[range]) -> list[GatheredKeys]:
        """The keys of all ranks at these positions of each sequence.

        `own` are the keys and values that this rank stores. Every rank sends its own to every other.
        """
        shard = self.shard
        local = [
            [range(shard.length(run.start, rank), shard.length(run.stop, rank)) for run in runs]
            for rank in range(self.comm.world)
        ]
        width = own[0][0].shape[3]
        packed = torch.cat([torch.cat([k[0], v[0]], -1).transpose(0, 1) for k, v in own])  # [n, H, D + Dv]
        shapes = [(sum(map(len, each)), *packed.shape[1:]) for each in local]
        received = self.comm.all_gather(packed.contiguous(), shapes) if self.comm.world > 1 else [packed]
        parts = [x.split([len(run) for run in each]) for x, each in zip(received, local, strict=True)]
        found = []
        for i in range(len(runs)):
            rows = torch.cat([each[i] for each in parts]).transpose(0, 1)[None]
            at = [
                shard.position(torch.arange(each[i].start, each[i].stop, device="cpu"), rank)
                for rank, each in enumerate(local)
            ]
            found.append((rows[..., :width].contiguous(), rows[..., width:].contiguous(), torch.cat(at)))
        return found


@dataclass(frozen=True)
class TiledPass(CachePass):
    """A pass whose model is given tiles."""

    tiles: Tiles = field(kw_only=True)
    keys: KeyRanks = field(kw_only=True)

    @property
    def leaves(self) -> Tiles:
        """The tiles, each a leaf of a row of its own."""
        return self.tiles

    def index_in_row(self) -> Tensor:
        """The positions of the tokens, in tiles."""
        return self.tiles.spread(self.positions)

    def attend(self, layer: object, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Out of the tokens in tiles."""
        with attending():
            q, k, v = (self.tiles.take(x) for x in (q, k, v))
            return self.tiles.put(super().attend(layer, q, k, v, **options))


def _attention(
    q: Tensor, positions: Tensor, keys: GatheredKeys, options: Options
) -> Tensor:  # fmt: skip
    """Out [1, H, n, Dv] of queries of one sequence over gathered keys."""
    k, v, at = keys
    return attention(
        q, k, v, mask=options.mask, scale=options.scale, sinks=options.sinks, softcap=options.softcap,
        q_positions=positions.cpu(), k_positions=at, reproducible=True,
    )  # fmt: skip


@dataclass(frozen=True)
class ReproducibleDecode(TiledPass, DecodePass):
    """A decode step. Every rank attends to all keys of every sequence."""

    def _attend(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        pools, shard = self.cache.pools[call.layer], self.keys.shard
        table = self.step.steps[pools.kind].block_table
        runs = [range(_first_key(int(row[0]), options), int(row[-1]) + 1) for row in self.positions]
        own = [
            PagedKV(pools.keys, pools.values, table[i : i + 1]).read(
                range(shard.length(run.start), shard.length(run.stop)), q.dtype
            )
            for i, run in enumerate(runs)
        ]
        gathered = self.keys.gather(own, runs)
        outs = [
            _attention(q[i : i + 1], self.positions[i], keys, options) for i, keys in enumerate(gathered)
        ]  # fmt: skip
        return torch.cat(outs)


def _first_key(position: int, options: Options) -> int:
    """The first position that a query may attend to."""
    window = mask_window(options.mask)
    if window is None:
        return 0
    return position // window * window if isinstance(options.mask, Chunked) else max(0, position + 1 - window)


@dataclass(frozen=True)
class ReproduciblePrefill(TiledPass, ContextPrefill):
    """A chunk of a prompt. The first uses a reproducible `ContextParallel`; later ones attend to all keys."""

    def _later(self, call: AttentionCall, q: Tensor, options: Options) -> Tensor:
        k, v, _ = self._read(call, q.dtype)
        start = max(0, self.chunk.new.start + 1 - (call.window or 0)) if self.cache.pools[call.layer].kind else 0
        (keys,) = self.keys.gather([(k, v)], [range(start, self.chunk.new.stop)])
        return _attention(q, self.positions[0], keys, options)
