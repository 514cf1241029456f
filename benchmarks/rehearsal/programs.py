"""What whole programs send: the training example, and prefill and decode steps of a model, counted step by step."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, astuple, dataclass
from functools import partial
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from attnmesh import launch
from attnmesh.calibration.cpu import LinkFigures
from attnmesh.comm import Comm
from attnmesh.core.layouts import Zigzag
from attnmesh.core.masks import Causal
from attnmesh.generation.generator import Generator
from attnmesh.generation.passes import DecodePass, PrefillPass
from attnmesh.integrations.transformers_attention import NAME, register_attention
from attnmesh.kv_cache.sequence import Sequence as CacheSequence
from attnmesh.parallel.context import ContextParallel
from attnmesh.plan.decode import DecodeSharding
from attnmesh.plan.reshard import Part, Piece, plan_moves
from attnmesh.plan.shards import Shape, Workload, shards
from attnmesh.planner.program import Messages, Program, Round
from attnmesh.planner.schedules import program
from benchmarks.rehearsal.links import Counters
from benchmarks.rehearsal.nodes import INTERFACE
from benchmarks.rehearsal.ranks import link_figures

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_context_parallel.py"
SCHEDULE = "ring"
TRAINED, PROMPT, SHORT_PROMPT, SEQUENCES = 1024, 2048, 16, 16
STEPS = 3  # that are counted, after one that also agrees, plans and connects
_ONE_ROUND = 1 << 16  # bytes of all ranks below which an all-reduce of gloo tensors is one round
_HIDDEN, _LAYERS, _VOCABULARY = 256, 2, 128
_LOGITS = _VOCABULARY * 4  # bytes


@dataclass(frozen=True)
class Measured:
    """`runs` equal steps of a program on all ranks."""

    name: str
    runs: int
    seconds: float  # of the fastest one, on the slowest rank
    own_seconds: float  # of one without attention and messages
    counters: list[Counters]  # of every node
    shape: Shape  # of attention
    length: int
    layers: int
    parameters: list[int]  # bytes of each
    losses: list[float]


@dataclass(frozen=True)
class ProgramReport:
    """What rank 0 writes: the link between two nodes as messages see it, and every program."""

    link: LinkFigures
    programs: list[Measured]

    @staticmethod
    def load(path: Path) -> ProgramReport:
        """Read it."""
        facts = json.loads(path.read_text())
        programs = [
            Measured(**{**each, "counters": [Counters(**c) for c in each["counters"]], "shape": Shape(**each["shape"])})
            for each in facts["programs"]
        ]
        return ProgramReport(LinkFigures(**facts["link"]), programs)


# What is planned.


def planned_programs(measured: Measured, world: int, ranks_per_node: int) -> list[Program]:
    """What the ranks send in one step, and their attention."""
    if measured.name == "decode":
        shape = measured.shape
        state = shape.batch * shape.q_heads * (shape.head_dim + 1) * 4
        return [_all_gather("states", [state] * world)] * measured.layers
    held = shards(Causal(), Zigzag(), measured.length, world)
    workload = Workload(held, measured.shape, ranks_per_node, device="cpu")
    if measured.name == "prefill":
        last = [_LOGITS] + [0] * (world - 1)  # the zigzag layout gives the last token to rank 0
        attention = [program(SCHEDULE, workload, backward=False)] * measured.layers
        stored = [_to_where_it_is_stored(measured, world)] * measured.layers
        return [*attention, *stored, _all_gather("logits", last)]
    attention = [program(SCHEDULE, workload, backward=way) for way in (False, True)] * measured.layers
    gradients = [planned_all_reduce(nbytes, world) for nbytes in [*measured.parameters, 4]]
    return [*attention, *gradients]


def _to_where_it_is_stored(measured: Measured, world: int) -> Program:
    """The keys and values of a layer, from the ranks that compute them to those that store their positions."""
    sharding = DecodeSharding(cp=world)
    computed = [Zigzag().ranges(measured.length, world, rank) for rank in range(world)]
    stored = [sharding.position_shard(rank).ranges(measured.length) for rank in range(world)]
    before, after = ([Part(range(1), (Piece(0, 0, each),)) for each in parts] for parts in (computed, stored))
    moves = [move for move in plan_moves(before, after) if move.source != move.target]
    messages = Messages.of((move.source, move.target, move.tokens * measured.shape.key_row) for move in moves)
    return Program("store", world, lambda: iter([Round("store", {"store": messages}, (), ("store",))]))


def _all_gather(name: str, nbytes: Sequence[int]) -> Program:
    """Entry r is what rank r sends to every other rank."""
    world = len(nbytes)
    messages = Messages.of((a, b, nbytes[a]) for a in range(world) for b in range(world) if a != b)
    return Program(name, world, lambda: iter([Round(name, {name: messages}, (), (name,))]))


def planned_all_reduce(nbytes: int, world: int) -> Program:
    """As `Comm.all_reduce` over gloo: small tensors in one round, others as a reduce-scatter and an all-gather."""
    if nbytes * world <= _ONE_ROUND:
        return _all_gather("gradient", [nbytes] * world)
    slices = [4 * len(part) for part in np.array_split(np.empty(nbytes // 4, dtype=np.int8), world)]
    scattered = Messages.of((a, b, slices[b]) for a in range(world) for b in range(world) if a != b)
    first = Round("reduce-scatter", {"reduce-scatter": scattered}, (), ("reduce-scatter",))
    return Program("gradient", world, lambda: iter([first, *_all_gather("all-gather", slices).rounds()]))


# On the ranks.


def rehearse_programs(comm: Comm, *, path: Path) -> None:
    """Train, prefill and decode; rank 0 writes the report."""
    link = link_figures(comm)
    report = ProgramReport(link, [_training(comm), *_generation(comm)])
    if comm.rank == 0:
        path.write_text(json.dumps(asdict(report)))


class _Marks:
    """Points in time that all ranks reach together, with what the links have counted."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._found: list[tuple[float, Counters]] = []

    def mark(self) -> None:
        self._comm.barrier()
        self._found.append((time.perf_counter(), Counters.read(INTERFACE)))

    def steps(self) -> tuple[float, list[Counters]]:
        """Seconds of the fastest of the latest steps, and what every node counted over all of them."""
        comm, per_node, marks = self._comm, int(os.environ["LOCAL_WORLD_SIZE"]), self._found[-1 - STEPS :]
        seconds = [end - begin for (begin, _), (end, _) in pairwise(marks)]
        counted = marks[-1][1].since(marks[0][1])
        mine = torch.tensor([*seconds, *astuple(counted)], dtype=torch.float64, device="cpu")
        gathered = torch.stack(comm.all_gather(mine, [mine.shape] * comm.world))
        nodes = [Counters(*map(int, row)) for row in gathered[::per_node, STEPS:].tolist()]
        return float(gathered[:, :STEPS].max(0).values.min()), nodes


def _training(comm: Comm) -> Measured:
    marks, models = _Marks(comm), []
    example = load_example()
    batches, small_llama = example.batches, example.small_llama

    def marked(length: int) -> Iterator[Tensor]:
        for tokens in batches(length):
            marks.mark()
            yield tokens

    def kept(*arguments: Any) -> Any:
        models.append(small_llama(*arguments))
        return models[-1]

    example.batches, example.small_llama = marked, kept
    losses = example.train(training_arguments(), torch.device("cpu"))
    marks.mark()
    seconds, counters = marks.steps()
    example.ContextParallel = _OwnPart
    example.train(training_arguments(), torch.device("cpu"))
    marks.mark()
    own_seconds, _ = marks.steps()
    facts = _facts(models[0], example.BATCH)
    return Measured("training example", STEPS, seconds, own_seconds, counters, length=TRAINED, losses=losses, **facts)


class _OwnPart:
    """Stands for `ContextParallel`, without attention and messages."""

    rank = -1  # prints nothing

    def __init__(self, **options: Any) -> None:
        cp = ContextParallel(**options)
        self.shard, self.positions = cp.shard, cp.positions
        self.comm = SimpleNamespace(all_reduce=lambda x: x)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        return q + k.mean() + v.mean()  # so that all have gradients


def load_example() -> Any:
    """The training example as a module, with heads of 64: kernels of this width are measured."""
    spec = importlib.util.spec_from_file_location("train_context_parallel", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.LlamaConfig = partial(example.LlamaConfig, head_dim=64)
    return example


def losses_of_one_process() -> list[float]:
    """The losses of the training example without ranks."""
    with redirect_stdout(StringIO()):
        losses: list[float] = load_example().train(training_arguments(), torch.device("cpu"))
    return losses


def training_arguments() -> Namespace:
    """The options of the example."""
    return Namespace(
        length=TRAINED, layout="zigzag", schedule=SCHEDULE, steps=1 + STEPS, dtype="fp32", checkpoint=None,
        checkpoint_every=5,
    )  # fmt: skip


def _facts(model: Any, batch: int) -> dict[str, Any]:
    config = model.config
    shape = Shape(batch, config.num_attention_heads, config.num_key_value_heads, config.head_dim, 4, 4)
    return {
        "shape": shape,
        "layers": config.num_hidden_layers,
        "parameters": [parameter.nbytes for parameter in model.parameters()],
    }


class GenerationSteps:
    """Prefill of long prompts, and decode steps of many sequences: the passes of a Generator."""

    def __init__(self, model: Any, comm: Comm) -> None:
        generator = Generator(
            model, None, comm, cache_tokens=2 * PROMPT, max_sequences=SEQUENCES, schedule=SCHEDULE,
            sharding=DecodeSharding(cp=comm.world),
        )  # fmt: skip
        self._engine, self._cache = generator.engine, generator.engine.cache.local
        self._sequences: list[CacheSequence] = []

    def prefill(self, step: int) -> None:
        """A long prompt, of which nothing is kept."""
        self._cache.free(self._prefilled(step, PROMPT), forget=True)

    def begin_decode(self) -> None:
        """Prefill the prompts that decode steps follow."""
        self._sequences = [self._prefilled(i, SHORT_PROMPT) for i in range(SEQUENCES)]

    def decode(self, step: int) -> None:
        """A token of every sequence."""
        ids = [[step]] * SEQUENCES
        new = self._cache.append(self._sequences, ids)
        self._engine.decode(self._sequences, ids, new)
        self._cache.mark_written(new)

    def _prefilled(self, seed: int, length: int) -> CacheSequence:
        dice = torch.Generator().manual_seed(seed)
        ids: list[int] = torch.randint(_VOCABULARY, (length,), generator=dice).tolist()
        sequence = self._cache.allocate(ids)
        new = self._cache.append([sequence], length)
        self._engine.prefill(sequence, 0, ids, new)
        self._cache.mark_written(new)
        return sequence


def generation_model() -> Any:
    """A Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    register_attention()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=_HIDDEN, intermediate_size=2 * _HIDDEN, num_hidden_layers=_LAYERS,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, max_position_embeddings=PROMPT,
        attn_implementation=NAME,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def _generation(comm: Comm) -> list[Measured]:
    model = generation_model()
    steps = GenerationSteps(model, comm)

    def measured(name: str, step: Callable[[int], None], batch: int, length: int) -> Measured:
        seconds, counters = _steps(comm, step)
        with (
            patch.object(PrefillPass, "_attend", _own_attention),
            patch.object(PrefillPass, "_stored_here", _own_tokens),
            patch.object(DecodePass, "_attend", _own_attention),
        ):
            own_seconds, _ = _steps(comm, step)
        facts = _facts(model, batch)
        return Measured(name, STEPS, seconds, own_seconds, counters, length=length, losses=[], **facts)

    first = measured("prefill", steps.prefill, 1, PROMPT)
    steps.begin_decode()
    return [first, measured("decode", steps.decode, SEQUENCES, SHORT_PROMPT)]


def _own_tokens(self: object, call: object, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return new  # as many as those that are stored here


def _own_attention(self: object, call: object, q: Tensor, k: Tensor, v: Tensor, options: object) -> Tensor:
    return q


def _steps(comm: Comm, step: Callable[[int], None]) -> tuple[float, list[Counters]]:
    marks = _Marks(comm)
    for i in range(1 + STEPS):
        marks.mark()
        step(i)
    marks.mark()
    return marks.steps()


def main() -> None:
    """Run under torchrun: `python -m benchmarks.rehearsal.programs REPORT`."""
    import sys

    launch.run(rehearse_programs, timeout=60, path=Path(sys.argv[1]))


if __name__ == "__main__":
    main()
