"""Training through Transformers compared with calling `ContextParallel.attention` directly, and the memory of a step.

A step is the forward and backward of a model of Llama-3.1-8B's shape on one rank of many, which runs alone on one
device (`OneRankComm`). `integrated` is `model(**shard_inputs(...))` with `attn_implementation="attnmesh"`; `direct` is
the same layers in a loop that calls `cp.attention` itself, with masks and layouts made beforehand where the batch stays
the same. Both compute the same, which is asserted.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import count
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnmesh.cli.options import Device, check_device
from attnmesh.cli.output import Rows
from attnmesh.core.layouts import Balanced
from attnmesh.core.masks import Causal, Documents, Mask
from attnmesh.core.ranges import as_tensor
from attnmesh.integrations.sharded_batch import shard_inputs
from attnmesh.integrations.transformers_attention import NAME, register_attention, transformers_attention
from attnmesh.parallel.context import ContextParallel
from attnmesh.utils.optional import require
from benchmarks.common import JsonOption, QuickOption, make_app, publish
from benchmarks.one_rank import AllocatingComm, OneRankComm
from benchmarks.timers import wall

_MEMORY_LAYERS = 4
_LONG = 0.15  # seconds
_TOKENS = 96  # kinds of tokens of a model without a head
PEER = "sdpa"  # Transformers' own attention
_TOLERANCE = 0.01  # relative, between two results of one layer that were rounded to bf16


class Part(str, Enum):
    """What is measured."""

    STEP = "step"
    MODEL = "model"
    CALL = "call"
    MEMORY = "memory"


@dataclass(frozen=True)
class Scale:
    """The model and the batches of a run."""

    model: dict[str, Any]
    device: str
    dtype: torch.dtype
    per_rank: tuple[int, ...]  # tokens of a rank
    worlds: tuple[int, ...]
    document: int  # tokens of a document
    rounds: int
    memory_length: int
    layers: int  # of a model, where a step is not of one layer


_LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 1 << 20,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
FULL = Scale(_LLAMA_8B, "cuda", torch.bfloat16, (8192, 32768), (2, 8), 2048, 7, 32768, 8)
_TINY = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 4096,
}  # fmt: skip
QUICK = Scale(_TINY, "cpu", torch.float32, (48,), (2,), 16, 1, 80, 1)


def random_llama(scale: Scale, layers: int, *, head: bool) -> Any:
    """A model with random weights; without a head, it has as few embeddings as possible."""
    register_attention()
    transformers = require("transformers", extra="hf")
    sizes = scale.model if head else scale.model | {"vocab_size": _TOKENS}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers)
    kind = transformers.AutoModelForCausalLM if head else transformers.AutoModel
    with torch.device(scale.device):
        return kind.from_config(config, dtype=scale.dtype, attn_implementation=NAME).train()


# A step.


@dataclass(frozen=True)
class Batch:
    """One row of tokens on the device, packed with documents of these lengths."""

    ids: Tensor
    documents: tuple[int, ...] | None
    position_ids: Tensor | None

    @property
    def mask(self) -> Mask:
        """What tokens attend to."""
        return Causal() if self.documents is None else Causal() & Documents(self.documents)


def make_batch(length: int, documents: Sequence[int] | None, device: str) -> Batch:
    """A batch of random tokens."""
    ids = torch.randint(_TOKENS, (1, length), device=device)
    positions = None
    if documents is not None:
        positions = torch.cat([torch.arange(n, device="cpu") for n in documents])[None].to(device)
    return Batch(ids, None if documents is None else tuple(documents), positions)


def random_documents(length: int, mean: int, seed: int) -> list[int]:
    """Lengths from half to one and a half times the mean that add up to `length`."""
    dice, lengths = random.Random(seed), []
    while (left := length - sum(lengths)) > 0:
        lengths.append(min(left, dice.randint(mean // 2, 3 * mean // 2)))
    return lengths


def with_layout_of(cp: ContextParallel, batch: Batch) -> ContextParallel:
    """The ranks with the layout that shard_inputs gives the batch."""
    return cp if batch.documents is None else cp.with_layout(Balanced(batch.mask))


def integrated_step(model: Any, cp: ContextParallel, batch: Batch, by_positions: bool = False) -> Tensor:
    """One rank's step through Transformers. Documents are found in the position_ids, or their lengths given."""
    _begin(model, cp)
    out: Tensor = model(**sharded(cp, batch, by_positions)).last_hidden_state
    out.backward(out.detach())
    return out.detach()


def sharded(cp: ContextParallel, batch: Batch, by_positions: bool = False) -> dict[str, Any]:
    """This rank's inputs of a model."""
    if batch.documents is None or by_positions:
        return shard_inputs(cp, batch.ids, position_ids=batch.position_ids)
    return shard_inputs(cp, batch.ids, document_lengths=[batch.documents])


def direct_step(model: Any, cp: ContextParallel, batch: Batch, mask: Mask) -> Tensor:
    """The same with the model's layers and `cp.attention`; `cp` has the batch's layout."""
    rotate = require("transformers.models.llama.modeling_llama", extra="hf").apply_rotary_pos_emb
    _begin(model, cp)
    length = batch.ids.shape[1]
    if batch.position_ids is None:
        positions = as_tensor(cp.layout.ranges(length, cp.world, cp.rank), batch.ids.device)[None]
    else:
        positions = cp.shard(batch.position_ids, 1)
    x = model.embed_tokens(cp.shard(batch.ids, 1))
    cos, sin = model.rotary_emb(x, positions)
    for layer in model.layers:
        attn, y = layer.self_attn, layer.input_layernorm(x)
        heads = [project(y).unflatten(-1, (-1, attn.head_dim)) for project in (attn.q_proj, attn.k_proj, attn.v_proj)]
        q, k, v = (x.transpose(1, 2) for x in heads)
        q, k = rotate(q, k, cos, sin)
        out = cp.attention(q, k, v, mask=mask, scale=attn.scaling, length=length)
        x = x + attn.o_proj(out.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    out = model.norm(x)
    out.backward(out.detach())
    return out.detach()


def _begin(model: Any, cp: ContextParallel) -> None:
    model.zero_grad()
    assert isinstance(cp.comm, OneRankComm)
    cp.comm.begin()


class Kind(str, Enum):
    """What a batch is, and how shard_inputs learns of its documents."""

    CAUSAL = "causal"
    LENGTHS = "packed, document_lengths"
    POSITIONS = "packed, position_ids on the device"
    ANEW = "packed anew in every step, document_lengths"
    ANEW_ALLGATHER = "packed anew in every step, document_lengths, schedule='allgather'"


_ANEW = (Kind.ANEW, Kind.ANEW_ALLGATHER)


def measure_steps(scale: Scale) -> Iterator[tuple[str, Rows]]:
    """A step of one layer: a line for every kind of batch, number of tokens and number of ranks."""
    return _kinds(scale, 1, scale.per_rank)


def measure_models(scale: Scale) -> Iterator[tuple[str, Rows]]:
    """A step of several layers, which share what happens once in a step, with the fewest tokens."""
    return _kinds(scale, scale.layers, scale.per_rank[:1])


def _kinds(scale: Scale, layers: int, per_rank: Sequence[int]) -> Iterator[tuple[str, Rows]]:
    model = random_llama(scale, layers, head=False)
    for kind in Kind:
        rows: Rows = []
        for tokens in per_rank:
            for world in scale.worlds:
                rows.append(_step_row(scale, model, kind, tokens, world))
                _free()
        yield f"a step of {layers} layers, {kind.value}", rows


def _step_row(scale: Scale, model: Any, kind: Kind, per_rank: int, world: int) -> dict[str, object]:
    cp = ContextParallel(
        OneRankComm(world // 2, world), schedule="allgather" if kind == Kind.ANEW_ALLGATHER else "auto"
    )
    length, seeds = per_rank * world, count()

    def batch() -> Batch:
        documents = None if kind == Kind.CAUSAL else [scale.document] * (length // scale.document)
        if kind in _ANEW:
            documents = random_documents(length, scale.document, next(seeds))
        return make_batch(length, documents, scale.device)

    def direct(batch: Batch) -> Tensor:
        return direct_step(model, with_layout_of(cp, batch), batch, batch.mask)

    by_positions = kind == Kind.POSITIONS
    same = batch()
    results = []
    for step in (partial(integrated_step, model, cp, same, by_positions), partial(direct, same)):
        results.append([step(), *(weight.grad.clone() for weight in model.layers[0].parameters())])
    _assert_equal(kind.value, *results, tolerance=_TOLERANCE * len(model.layers) ** 0.5)

    runs: dict[str, Callable[[], object]]
    if kind in _ANEW:  # a layout and a plan are made for every batch
        batches = {name: iter([batch() for _ in range(scale.rounds + 1)]) for name in ("direct", "again", "integrated")}
        runs = {
            "direct": lambda: direct(next(batches["direct"])),
            "integrated": lambda: integrated_step(model, cp, next(batches["integrated"]), by_positions),
            "again": lambda: direct(next(batches["again"])),
        }
    else:
        own, mask = with_layout_of(cp, same), same.mask
        runs = {
            "direct": partial(direct_step, model, own, same, mask),
            "integrated": partial(integrated_step, model, cp, same, by_positions),
        }
        runs["again"] = runs["direct"]
    row: dict[str, object] = {"per_rank": per_rank, "ranks": world}
    waiting = queued = _steps(runs, 1, scale)
    if kind not in _ANEW and waiting["direct"] < _LONG:  # of a long step the host's part is small
        queued = _steps(runs, 4, scale)
    for name, of in (("waiting", waiting), ("queued", queued)):
        row |= {f"{name}_{program}_ms": 1e3 * of[program] for program in ("direct", "integrated")}
        row[f"{name}_overhead"] = of["integrated"] / of["direct"] - 1
        row[f"{name}_noise"] = of["again"] / of["direct"] - 1
    return row


def _steps(runs: dict[str, Callable[[], object]], at_once: int, scale: Scale) -> dict[str, float]:
    """Seconds of a step of every program, in turns; the host waits for the device after `at_once` steps."""

    def several(run: Callable[[], object]) -> None:
        for _ in range(at_once):
            run()
        _wait(scale.device)

    return {
        name: seconds / at_once
        for name, seconds in wall({name: partial(several, run) for name, run in runs.items()}, scale.rounds).items()
    }


def _assert_equal(name: str, ours: Sequence[Tensor], direct: Sequence[Tensor], *, tolerance: float) -> None:
    for at, (a, b) in enumerate(zip(ours, direct, strict=True)):
        error = float((a.float() - b.float()).norm() / b.float().norm())
        assert error < tolerance, f"{name}: result {at} of the two programs differs by {error:.2g}"


# A call of the attention.


def measure_calls(scale: Scale) -> Iterator[tuple[str, Rows]]:
    """Microseconds of the host for one attention call, without gradients, while the device is busy."""
    model, rows = random_llama(scale, 1, head=False), []
    per_rank = min(scale.per_rank)
    for kind in ("causal", "packed"):
        for world in scale.worlds:
            cp = ContextParallel(OneRankComm(world // 2, world))
            length = per_rank * world
            documents = None if kind == "causal" else [scale.document] * (length // scale.document)
            batch = make_batch(length, documents, scale.device)
            with torch.no_grad():
                given, options = _attention_call(model, cp, batch)
                own, mask, (q, k, v) = with_layout_of(cp, batch), batch.mask, given[1:4]
                runs: dict[str, Callable[[], object]] = {
                    "direct": partial(own.attention, q, k, v, mask=mask, scale=options["scaling"], length=length),
                    "integrated": partial(transformers_attention, *given, **options),
                }
                times = _host_us(runs, cp, scale)
            rows.append({
                "batch": kind, "ranks": world, "tokens_per_rank": per_rank,
                "direct_us": times["direct"], "integrated_us": times["integrated"],
                "added_us": times["integrated"] - times["direct"],
            })  # fmt: skip
    yield "time of the host for an attention call", rows


def _attention_call(model: Any, cp: ContextParallel, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that the model passes to its attention."""
    calls = []

    def recorded(*given: Any, **options: Any) -> Any:
        calls.append((given, options))
        return transformers_attention(*given, **options)

    functions = require("transformers.modeling_utils", extra="hf").AttentionInterface
    functions.register(NAME, recorded)
    try:
        _begin(model, cp)
        model(**sharded(cp, batch))
    finally:
        register_attention()
    return calls[0]


def _host_us(runs: dict[str, Callable[[], object]], cp: ContextParallel, scale: Scale) -> dict[str, float]:
    """Median microseconds of every run, in turns."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    assert isinstance(cp.comm, OneRankComm)
    for counts in [False] + [True] * (3 * scale.rounds):
        for name, run in runs.items():
            cp.comm.begin()
            _wait(scale.device)
            if scale.device == "cuda":
                torch.cuda._sleep(20_000_000)  # cycles, about 10 ms
            began = time.perf_counter()
            run()
            if counts:
                samples[name].append(1e6 * (time.perf_counter() - began))
    return {name: statistics.median(values) for name, values in samples.items()}


# Memory.


def measure_memory(scale: Scale) -> Iterator[tuple[str, Rows]]:
    """Peak bytes that a training step adds to weights and gradients: a rank's share, and Transformers alone."""
    model = random_llama(scale, min(scale.layers, _MEMORY_LAYERS), head=True)
    for batch in ("causal", "packed", "padded"):
        rows: Rows = []
        for world in (1, 2, 4, 8, None):
            added, mask = step_memory(scale, model, batch, world)
            if world == 1:
                one = added
            rows.append({
                "program": f"Transformers, {PEER}" if world is None else NAME, "ranks": world or 1,
                "added_mb": added / 1e6, "share_of_one_rank": added / one, "largest_mask_mb": mask / 1e6,
            })  # fmt: skip
        yield f"peak memory of a step, {batch}", rows


def step_memory(scale: Scale, model: Any, kind: str, world: int | None) -> tuple[int, int]:
    """Peak bytes of a step on one rank of `world`, or with Transformers' own attention; and those of its largest mask.

    On the CPU the peak is not measured and 1.
    """
    rows = 2 if kind == "padded" else 1
    length = scale.memory_length // rows
    ids = torch.randint(scale.model["vocab_size"], (rows, length), device=scale.device)
    more: dict[str, Tensor] = {}
    if kind == "packed":
        documents = [scale.document] * (length // scale.document)
        more["position_ids"] = torch.cat([torch.arange(n, device="cpu") for n in documents])[None].to(scale.device)
    if kind == "padded":
        more["attention_mask"] = torch.ones_like(ids)
        more["attention_mask"][1, 3 * length // 4 :] = 0
    model.set_attn_implementation(PEER if world is None else NAME)
    comm = None if world is None else AllocatingComm(world // 2, world)

    def step() -> None:
        model.zero_grad(set_to_none=False)
        if comm is None:
            inputs = {"input_ids": ids, "labels": ids, "use_cache": False, **more}
        else:
            inputs = shard_inputs(ContextParallel(comm), ids, ids, **more)
        model(**inputs).loss.backward()

    with _QuadraticTensors(length, length if world is None else -(-length // world)) as seen:
        step()  # allocates gradients, compiles
    _wait(scale.device)
    _free()
    added = 1
    if scale.device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        added = torch.cuda.max_memory_allocated() - before
        _free()
    return added, seen.largest


class _QuadraticTensors(TorchDispatchMode):
    """Finds the largest tensor with an entry for every pair of tokens, or for every pair of a rank's and all tokens."""

    def __init__(self, length: int, local: int) -> None:
        super().__init__()
        self._length, self._local, self.largest = length, local, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for x in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(x, Tensor) and self._is_quadratic(list(x.shape)):
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return found

    def _is_quadratic(self, sizes: list[int]) -> bool:
        if self._length not in sizes:
            return False
        sizes.remove(self._length)
        return self._length in sizes or self._local in sizes


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


_PARTS = {Part.STEP: measure_steps, Part.MODEL: measure_models, Part.CALL: measure_calls, Part.MEMORY: measure_memory}


def main(
    only: Annotated[
        list[Part] | None, typer.Option("--only", help="What to measure. Repeatable; everything by default.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Number of times each program is timed.")] = None,
    quick: QuickOption = False,
    json: JsonOption = None,
) -> None:
    """Measure the overhead of training through Transformers, and the memory of a training step."""
    scale = QUICK if quick else FULL
    if not quick:
        check_device(Device.CUDA)
    if rounds is not None:
        scale = replace(scale, rounds=rounds)
    sections = (section for part in only or tuple(Part) for section in _PARTS[part](scale))
    publish("integration", scale.device, sections, json)


app = make_app(main)

if __name__ == "__main__":
    app()
