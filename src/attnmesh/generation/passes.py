"""The forward passes of a Transformers model over a sharded KV cache: prefill chunks and decode steps.

A pass is what Transformers takes for a cache, and it computes the attention of `attn_implementation="attnmesh"`: call
by call, in the order that `AttentionCalls` has them, the keys and values that the layer gives to the attention function
are written to the cache and attended to.

With whole weights a rank has all heads of the tokens that it computes. With sharded weights it projects its query
heads, and its TP rank's kv heads, of all sequences (`HeadRanks`): KVDP ranks exchange query heads for sequences, CP
ranks merge their states, and the results return to the ranks of the heads, as in `AttentionBlock`. Every rank has the
keys and values of all tokens of the pass, and stores the keys and values of its sequences and positions. The latents of
latent attention are one kv head, which every TP rank has.

Decode steps of a single GPU run as CUDA graphs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from attnmesh.comm import Comm
from attnmesh.core import ranges
from attnmesh.core.masks import Chunked, Mask
from attnmesh.core.ranges import InterleavedShard, Ranges
from attnmesh.generation.attention_calls import AttentionCall, AttentionCalls, NewTokensCache, is_same, mask_window
from attnmesh.generation.models import LatentProjections
from attnmesh.generation.recurrent_states import RowStates
from attnmesh.kv_cache.cache import BlockCache
from attnmesh.kv_cache.pools import LayerPools, as_stored, write_rows, write_tokens
from attnmesh.models.sharded import ShardedWeights
from attnmesh.ops.decode.api import PagedStep
from attnmesh.ops.dense.api import attention, attention_state
from attnmesh.ops.paged import PagedKV
from attnmesh.ops.recurrent.api import scan
from attnmesh.ops.recurrent.layer import RecurrentLayer
from attnmesh.parallel.context import ContextParallel
from attnmesh.parallel.decode.core import DecodeAttention, LocalKV, StateExchange, pack_state, prefill_attention
from attnmesh.parallel.decode.exchange import HeadExchange, part_of
from attnmesh.parallel.decode.prefill import kv_heads_of
from attnmesh.plan.decode import Combine
from attnmesh.plan.weights import Heads


class Options(NamedTuple):
    """What a call of the attention function asks for."""

    mask: Mask
    scale: float
    sinks: Tensor | None
    softcap: float | None

    def of_heads(self, heads: range | None) -> Tensor | None:
        """The sinks of some heads; of all if None."""
        return self.sinks if self.sinks is None or heads is None else self.sinks[heads.start : heads.stop]

    def equals(self, other: Options) -> bool:
        """Whether both are the same, with sinks in the same tensor."""
        return self.sinks is other.sinks and self[:2] == other[:2] and self.softcap == other.softcap


@dataclass(frozen=True)
class HeadRanks:
    """The query heads of this rank, and the ranks that it shares them with.

    It projects the heads `own`, and attends for the heads `group`, its own and the heads of its KVDP and CP ranks; None
    stands for all heads of a layer.
    """

    states: StateExchange  # between CP ranks
    combine: Combine | Literal["all_gather"]
    own: range | None
    group: range | None
    exchange: HeadExchange | None = None  # of heads for sequences, without rows; None if they all attend here
    per_kv: int = 1  # query heads of a kv head
    first_kv: int = 0  # the first kv head of this rank
    attentions: dict[int, tuple[Options, DecodeAttention]] = field(default_factory=dict)
    """How each call decodes, and the options that this was made for: decided in its first step."""

    @classmethod
    def of_whole(cls, comm: Comm) -> HeadRanks:
        """Of whole weights: every rank of `comm` has all heads, and continues with the same bits."""
        return cls(StateExchange(comm, ()), "all_gather", None, None)

    @classmethod
    def of_sharded(cls, weights: ShardedWeights, heads: Heads) -> HeadRanks:
        """Of sharded weights."""
        sharding, ranks = weights.sharding, weights.ranks
        rank, all_here = ranks.rank, sharding.ranks == sharding.tp
        by_cp = tuple(len(sharding.cp_heads(peer, heads.q)) for peer in sharding.cp_peers(rank))
        by_kvdp = tuple(len(sharding.q_heads(peer, heads.q)) for peer in sharding.kvdp_peers(rank))
        return cls(
            StateExchange(ranks.cp, by_cp), "all_to_all", sharding.q_heads(rank, heads.q),
            sharding.group_heads(rank, heads.q), None if all_here else HeadExchange(ranks.kvdp, (), by_kvdp),
            heads.q // heads.kv, sharding.kv_heads(rank, heads.kv).start,
        )  # fmt: skip

    def exchanged(self, q: Tensor, rows: tuple[int, ...], value_dim: int, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Exchange heads for sequences, let `attend` compute [B_own, h_c, T, Dv] from [B_own, H, T, D], and back."""
        if self.exchange is None:
            return attend(q)
        exchange, (tokens, dim) = replace(self.exchange, rows=rows), q.shape[2:]
        buffer = torch.cat([part.transpose(0, 1).reshape(-1) for part in q.split(rows)])
        gathered = self.states.gather_heads(exchange.gather_heads(buffer, tokens, dim))
        if gathered.shape[1]:
            out = attend(gathered.transpose(0, 1))
        else:  # none of these sequences is cached here, nor by the ranks that would merge with this rank
            out = q.new_empty(0, sum(exchange.heads), tokens, value_dim)
        return exchange.scatter_heads(out).transpose(1, 2)


@dataclass
class _Calls:
    """How far a pass has got."""

    made: int = 0
    latents: Tensor | None = None  # that the next call writes
    written: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # keys and values that later calls share


@dataclass(frozen=True)
class CachePass(NewTokensCache, ABC):
    """A pass that writes keys and values of new tokens to `slots` [B, T] of this rank's cache; below 0 is skipped.

    There are slots for each kind of layers (`LayerPools.kind`); none if this rank stores none of the tokens. The tokens
    that this rank computes are at `positions` [B, n].
    """

    cache: BlockCache
    slots: tuple[Tensor, ...]
    positions: Tensor
    calls: AttentionCalls
    latents: LatentProjections | None = field(default=None, kw_only=True)  # of a model whose cache has latents
    states: RowStates | None = field(default=None, kw_only=True)  # of a model with recurrent layers
    _calls: _Calls = field(default_factory=_Calls, init=False, repr=False, compare=False)

    @property
    def has_states(self) -> bool:  # type: ignore[override]
        """Whether the model has recurrent layers."""
        return self.states is not None

    def index_in_row(self) -> Tensor:
        """The positions of this rank's tokens, [B, n]."""
        return self.positions

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """What the model goes on with: the new keys and values. The call that follows writes what it is given.

        Of a model with latent attention they are latents and the keys' rope parts, one head of each, which the model
        expands: they are returned as they are stored.
        """
        if self.latents is None:
            return key, value
        self._calls.latents = self.latents.vectors(key, value)
        pools = self.cache.pools[self._next().layer]
        return self.latents.parts(as_stored(pools.keys, self._calls.latents))

    def attend(
        self, layer: object, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, sinks: Tensor | None,
        softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Out [B, h, T, Dv] of this rank's queries [B, h, T, D] over all positions up to theirs."""
        call = self._next()
        if mask != call.mask:
            raise ValueError(f"the mask of {call.name} must be {call.mask!r} in every pass, got {mask!r}")
        self._calls.made += 1
        if call.is_first:
            self._write(call, k, v)
        else:
            self._check_written(call, k, v)
        return self._attend(call, q, k, v, Options(mask, scale, sinks, softcap))

    def scan(self, module: nn.Module, layer: RecurrentLayer) -> Tensor:
        """The outputs of a recurrent layer, which continues from the states of the sequences."""
        name = type(module).__name__
        if self.states is None:
            raise ValueError(f"a pass must have no recurrent calls, got {name}")
        out, states = self._scan(layer, self.states.read(name))
        self.states.write(states, layer)
        return out

    def _scan(self, layer: RecurrentLayer, states: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs of this rank's tokens and the states after the last token of the pass, on every rank."""
        return scan(layer, initial_state=states, return_final_state=True)

    def check_complete(self) -> None:
        """Raise ValueError if the model has made fewer calls than in other passes."""
        if self.states is not None:
            self.states.check_complete()
        made, calls = self._calls.made, self.calls.calls
        if made != len(calls):
            raise ValueError(
                f"a pass must have {len(calls)} attention calls, got {made}: {calls[made].name} is missing"
            )

    def _next(self) -> AttentionCall:
        calls = self.calls.calls
        if self._calls.made == len(calls):
            raise ValueError(f"a pass must have {len(calls)} attention calls, got another after {calls[-1].name}")
        return calls[self._calls.made]

    def _write(self, call: AttentionCall, k: Tensor, v: Tensor) -> None:
        """Write what a call caches: its keys and values, or their latents."""
        pools = self.cache.pools[call.layer]
        if self.latents is None:
            layer = self.calls.layers[call.layer]
            if (k.shape[3], v.shape[3]) != (layer.head_dim, layer.value_dim):
                raise ValueError(
                    f"{call.name} must have keys and values of {layer.head_dim} and {layer.value_dim} features in "
                    f"every pass, got {k.shape[3]} and {v.shape[3]}"
                )
            if call.layer in self.calls.shared:
                self._calls.written[call.layer] = k, v
            stored = self._stored_here(call, (k, v))
            if self.slots:
                write_tokens(pools.keys, pools.values, self.slots[pools.kind], *stored)
            return
        vectors, self._calls.latents = self._calls.latents, None
        if vectors is None:
            raise ValueError(f"{call.name} must cache latents in every pass, got none")
        stored = self._stored_here(call, (vectors,))
        if self.slots:
            write_rows(pools.keys, self.slots[pools.kind], *stored)

    def _check_written(self, call: AttentionCall, k: Tensor, v: Tensor) -> None:
        """Raise ValueError unless an earlier call has written these keys and values."""
        written = self._calls.written[call.layer]
        if not (is_same(k, written[0]) and is_same(v, written[1])):
            raise ValueError(f"{call.name} must have the keys and values of an earlier layer, as in other passes")

    @abstractmethod
    def _stored_here(self, call: AttentionCall, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Those of new keys and values that `slots` are for."""

    @abstractmethod
    def _attend(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        """The output of a call, whose keys and values are written."""

    def _over_cache(self, call: AttentionCall, q: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """The output of q [B, h, T, D], where `attend` attends with its argument to the keys in the cache."""
        return attend(q) if self.latents is None else self.latents.attend(call.layer, q, attend)


# Prefill.


@dataclass(frozen=True)
class ChunkKV:
    """The tokens that this rank stores of a sequence with a chunk at positions `new`: `blocks` of each kind of layers.

    `home` are the keys and values of the chunk that it stores, of layers that keep a window only.
    """

    new: range
    shard: InterleavedShard
    blocks: tuple[Tensor, ...]
    home: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)

    @property
    def own(self) -> Tensor:
        """The indices in the chunk of the tokens that this rank stores, ascending."""
        first, end = self.shard.length(self.new.start), self.shard.length(self.new.stop)
        return self.shard.position(torch.arange(first, end, device="cpu")) - self.new.start

    def read(
        self, call: AttentionCall, pools: LayerPools, dtype: torch.dtype, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [1, Hkv, n, D] that a call in the chunk may attend to here, and their positions.

        Layers that keep a window only need not store all of the chunk: they read only keys and values from before the
        chunk. With `keep`, later calls read the same.
        """
        end = self.shard.length(self.new.stop)
        paged = PagedKV(pools.keys, pools.values, self.blocks[pools.kind][None])
        if not pools.kind:
            return *paged.read(range(end), dtype), self.shard.position(torch.arange(end, device="cpu"))
        assert call.window is not None
        first = self.shard.length(max(0, self.new.start + 1 - call.window))
        k, v = self.home[call.layer] if keep else self.home.pop(call.layer)
        keys, values = paged.read(range(first, self.shard.length(self.new.start)), dtype)
        keys = torch.cat([keys, as_stored(paged.k, k)], 2)
        values = torch.cat([values, as_stored(paged.v, v)], 2)
        return keys, values, self.shard.position(torch.arange(first, end, device="cpu"))


class HomeExchange:
    """Sends keys and values of a chunk from the ranks that compute them, `parts[r]`, to the ranks that store them."""

    def __init__(self, comm: Comm, parts: Sequence[Ranges], shard: InterleavedShard, device: torch.device) -> None:
        self._comm = comm
        positions = [ranges.as_tensor(part) for part in parts]
        owners = [shard.owner(each) for each in positions]
        self.is_needed = any(bool((owner != rank).any()) for rank, owner in enumerate(owners))
        self._sent = [(owners[comm.rank] == rank).nonzero().flatten().to(device) for rank in range(comm.world)]
        received = [each[owner == comm.rank] for each, owner in zip(positions, owners, strict=True)]
        self._counts = [len(each) for each in received]
        self._order = torch.cat(received).argsort().to(device)  # the cache has them in the order of their positions

    def __call__(self, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Tensors [1, H, n, D] of the tokens that this rank stores, from the tensors of the tokens that it computes."""
        if not self.is_needed:
            return new
        heads, widths = new[0].shape[1], [x.shape[3] for x in new]
        tokens = torch.cat([x[0] for x in new], -1).transpose(0, 1)  # [n, H, D]: one message for all
        shapes = [(count, heads, sum(widths)) for count in self._counts]
        received = self._comm.all_to_all([tokens[at].contiguous() for at in self._sent], shapes)
        home = torch.cat(list(received))[self._order].transpose(0, 1)[None]
        return tuple(torch.split(home, widths, -1))


@dataclass(frozen=True)
class PrefillPass(CachePass, ABC):
    """A prefill chunk of one sequence. The first chunk of a prompt needs no cache; later chunks attend over it."""

    chunk: ChunkKV

    def _stored_here(self, call: AttentionCall, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        home = self._home(new)
        if self.cache.pools[call.layer].kind and self.chunk.new.start:
            self.chunk.home[call.layer] = home
        return home

    def _attend(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        pools = self.cache.pools[call.layer]
        if self.chunk.new.start == 0:
            if self.latents is None:  # else they were expanded from what is stored, for this rank's heads only
                k, v = as_stored(pools.keys, k), as_stored(pools.values, v)
            return self._first(q, k, v, options)
        return self._over_cache(call, q, lambda queries: self._later(call, queries, options))

    def _read(self, call: AttentionCall, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values in this rank's cache, with the tokens of the chunk, and their positions."""
        return self.chunk.read(call, self.cache.pools[call.layer], dtype, call.layer in self.calls.shared)

    @abstractmethod
    def _home(self, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Keys and values of the tokens that this rank stores, from the keys and values that it has computed."""

    @abstractmethod
    def _first(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        """The output of the first chunk."""

    @abstractmethod
    def _later(self, call: AttentionCall, q: Tensor, options: Options) -> Tensor:
        """The output of a later chunk, over the keys in the caches of all ranks."""


@dataclass(frozen=True)
class ContextPrefill(PrefillPass):
    """A chunk with whole weights, sharded over the ranks: `parts[r]` are the positions of rank r's tokens.

    The first chunk uses context parallelism, in its layout. Later ones attend over the sharded cache
    (`prefill_attention`). Either way every key goes to the rank that stores its position (`exchange`).
    """

    context: ContextParallel
    parts: Sequence[Ranges]
    exchange: HomeExchange

    def _home(self, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.exchange(new)

    def _scan(self, layer: RecurrentLayer, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.context.recurrent(
            layer, length=len(self.chunk.new), initial_state=states, return_final_state=True
        )  # fmt: skip

    def _first(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        return self.context.attention(q, k, v, **options._asdict(), length=len(self.chunk.new))

    def _later(self, call: AttentionCall, q: Tensor, options: Options) -> Tensor:
        return prefill_attention(
            self.context.comm, q, self.parts, *self._read(call, q.dtype), **options._asdict()
        )  # fmt: skip


@dataclass(frozen=True)
class HeadPrefill(PrefillPass):
    """A chunk with sharded weights: every rank has all its tokens, and stores `own`, unless another group does.

    The first chunk attends by heads, without messages. `rows` is the number of sequences of each KVDP rank.
    """

    heads: HeadRanks
    rows: tuple[int, ...]
    own: Tensor
    tokens: ContextParallel | None  # the ranks that the tokens are divided over between the layers

    def _scan(self, layer: RecurrentLayer, states: Tensor) -> tuple[Tensor, Tensor]:
        if self.tokens is None:
            return super()._scan(layer, states)
        length = len(self.chunk.new)
        return self.tokens.recurrent(layer, length=length, initial_state=states, return_final_state=True)

    def _home(self, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(x[:, :, self.own] for x in new)

    def _first(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        heads = self.heads
        if self.latents is None:
            assert heads.own is not None
            k, v = (kv_heads_of(x, heads.own, heads.per_kv, heads.first_kv) for x in (k, v))
        return attention(
            q, k, v, mask=options.mask, scale=options.scale, softcap=options.softcap,
            sinks=options.of_heads(heads.own),
            k_positions=torch.arange(len(self.chunk.new), device="cpu"),  # or a short prompt would be warned of
        )  # fmt: skip

    def _later(self, call: AttentionCall, q: Tensor, options: Options) -> Tensor:
        def over_own(queries: Tensor) -> Tensor:
            keys, values, positions = self._read(call, q.dtype)
            state = attention_state(
                queries, keys, values, mask=options.mask, scale=options.scale, softcap=options.softcap,
                k_positions=positions,
                q_positions=torch.arange(self.chunk.new.start, self.chunk.new.stop, device="cpu"),
            )  # fmt: skip
            of_group = options.of_heads(self.heads.group)
            return self.heads.states.combine(pack_state(state), of_group, q.dtype, "all_to_all")

        return self.heads.exchanged(q, self.rows, self.calls.layers[call.layer].value_dim, over_own)


# Decode.


@dataclass(frozen=True)
class StepKV:
    """The tokens that this rank stores of the sequences of a decode step, including the new tokens.

    `steps` have the block table of each kind of layers, and the index of the last key stored here. `positions` int64
    [B, T] are the positions of the new tokens. `shard` are the positions of a sequence that are stored here.
    """

    steps: tuple[PagedStep, ...]
    positions: Tensor
    shard: InterleavedShard
    _key_ranges: dict[Mask, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def key_range(self, mask: Mask) -> tuple[Tensor, Tensor]:
        """The keys stored here that each new token attends to: the same for all layers with this mask."""
        if mask not in self._key_ranges:
            end = self.shard.length(self.positions + 1).to(torch.int32)
            window = mask_window(mask)
            if window is None:
                first = torch.zeros_like(end)
            elif isinstance(mask, Chunked):
                first = self.shard.length(self.positions // window * window).to(torch.int32)
            else:
                first = self.shard.length((self.positions + 1 - window).clamp(min=0)).to(torch.int32)
            self._key_ranges[mask] = (first, end)
        return self._key_ranges[mask]


@dataclass(frozen=True)
class DecodePass(CachePass):
    """A decode step: the same few new tokens of some sequences on every rank that computes them.

    `rows` is the number of sequences of each KVDP rank, the sequences of rank 0 first, where ranks exchange heads for
    sequences; `step` has the sequences that this rank stores.
    Each rank attends over the positions that it stores, and merges the states of all ranks in the same order, so all
    ranks continue with the same bits.
    """

    heads: HeadRanks
    rows: tuple[int, ...]
    step: StepKV

    def _stored_here(self, call: AttentionCall, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.heads.exchange is None:
            return new
        own = part_of(self.rows, self.heads.exchange.comm.rank)
        return tuple(x[own] for x in new)

    def _attend(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        heads, pools, step = self.heads, self.cache.pools[call.layer], self.step
        known = heads.attentions.get(call.number)
        if known is None or not options.equals(known[0]):
            known = heads.attentions[call.number] = options, self._decided(options)
        attention = known[1]
        kv = LocalKV(pools.keys, pools.values, step.steps[pools.kind], lambda _: step.key_range(options.mask))
        if self.latents is None and heads.exchange is None:
            return attention(q, kv, heads.combine)
        width = self.calls.layers[call.layer].value_dim
        return self._over_cache(
            call, q,
            lambda queries: heads.exchanged(
                queries, self.rows, width, lambda own: attention(own, kv, heads.combine)
            ),
        )  # fmt: skip

    def _decided(self, options: Options) -> DecodeAttention:
        """How a call decodes."""
        return DecodeAttention(
            self.heads.states, options.scale, mask_window(options.mask), options.of_heads(self.heads.group),
            softcap=options.softcap, chunked=isinstance(options.mask, Chunked),
        )  # fmt: skip


# CUDA graphs.

Run = Callable[[DecodePass, Tensor, Tensor], Tensor]


class DecodeGraphs:
    """CUDA graphs of decode steps on a single GPU: a step of few tokens takes the host longer to launch than to run.

    Steps of the same shape share a graph. It reads what changes from step to step (tokens, positions, slots, tables)
    from static tensors, which every step refills. The first step of a shape runs eagerly, to compile kernels; the
    second is captured. All graphs share the memory of their intermediate results.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._graphs: dict[torch.Size, _DecodeGraph | None] = {}
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, step: DecodePass, ids: Tensor, positions: Tensor) -> Tensor:
        """The logits of a step, valid until the next call."""
        if ids.shape not in self._graphs:
            self._graphs[ids.shape] = None
            return self._run(step, ids, positions)
        graph = self._graphs[ids.shape]
        if graph is None:
            graph = self._graphs[ids.shape] = _DecodeGraph(self._run, self._memory, step, ids, positions)
        return graph(step, ids, positions)


class _DecodeGraph:
    def __init__(self, run: Run, memory: Any, step: DecodePass, ids: Tensor, positions: Tensor) -> None:
        self._inputs = [x.clone() for x in _graph_inputs(step, ids, positions)]
        cur_pos, static_ids, static_positions, *tables = self._inputs
        caches = len(step.slots)
        steps = tuple(PagedStep(table, cur_pos) for table in tables[caches:])
        static_step = replace(step.step, steps=steps, positions=static_positions, _key_ranges={})
        static = replace(step, slots=tuple(tables[:caches]), positions=static_positions, step=static_step)
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(ids.device)
        with torch.cuda.graph(self._graph, pool=memory):
            self._logits = run(static, static_ids, static_positions)

    def __call__(self, step: DecodePass, ids: Tensor, positions: Tensor) -> Tensor:
        for static, given in zip(self._inputs, _graph_inputs(step, ids, positions), strict=True):
            static.copy_(given)
        self._graph.replay()
        return self._logits


def _graph_inputs(step: DecodePass, ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    steps = step.step.steps
    return steps[0].cur_pos, ids, positions, *step.slots, *(each.block_table for each in steps)
