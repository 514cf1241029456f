"""Which tests run together, in which order, and for how long at most."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePath

STAGES = ("tests/ops", "tests/gpu", "")  # kernels first, then what selects them; folders of MODELS come after all
MODELS = ("tests/generation", "tests/integrations", "tests/training", "tests/models", "tests/cli", "tests/serving")

LIMIT, LIMIT_MODELS, LIMIT_RANKS = 60, 180, 320  # seconds of a test without a mark `timeout`; ranks wait up to 300
MEMORY, MEMORY_RANKS = 4, 5  # GiB of a test without a mark `gpu_memory`, contexts included

MOST_CASES, MOST_SECONDS = 24, 30  # of one function that run in a row
UNKNOWN_SECONDS = 5  # of a test that has not run before


@dataclass(frozen=True)
class Test:
    """A collected test, and what its marks say."""

    id: str
    ranks: bool = False  # starts processes that share the GPU
    exclusive: bool = False  # measures time: nothing else may run
    timeout: float | None = None
    gpu_memory: float | None = None

    @property
    def function(self) -> str:
        return self.id.partition("[")[0]

    @property
    def file(self) -> str:
        return self.id.partition("::")[0]

    @property
    def folder(self) -> str:
        return PurePath(self.file).parent.as_posix()

    @property
    def is_model(self) -> bool:
        return self.id.startswith(MODELS)

    def limit(self, kernels: float = LIMIT) -> float:
        """The seconds after which the test is stuck, those of compilation not counted."""
        return self.timeout or (LIMIT_RANKS if self.ranks else LIMIT_MODELS if self.is_model else kernels)

    @property
    def memory(self) -> float:
        return self.gpu_memory or (MEMORY_RANKS if self.ranks else MEMORY)

    @property
    def stage(self) -> int:
        if self.exclusive or self.is_model:
            return len(STAGES) + self.exclusive
        return next(at for at, folder in enumerate(STAGES) if self.id.startswith(folder))


@dataclass
class Chunk:
    """Cases of one function, which a worker runs in a row: they share compiled kernels."""

    tests: list[Test]
    seconds: float = 0.0

    @property
    def ranks(self) -> bool:
        return self.tests[0].ranks

    @property
    def exclusive(self) -> bool:
        return self.tests[0].exclusive

    @property
    def memory(self) -> float:
        return max(test.memory for test in self.tests)


def chunks(tests: Iterable[Test], known: dict[str, float]) -> list[Chunk]:
    """Divide the tests, in the order in which they start: by stage, and long ones first where `known` has seconds."""
    found: list[Chunk] = []
    for _, cases in groupby(tests, lambda test: (test.function, test.ranks, test.exclusive)):
        chunk = Chunk([])
        for test in cases:
            seconds = known.get(test.id, UNKNOWN_SECONDS)
            most = 1 if test.ranks else MOST_CASES
            if len(chunk.tests) >= most or (chunk.tests and chunk.seconds + seconds > MOST_SECONDS):
                found.append(chunk)
                chunk = Chunk([])
            chunk.tests.append(test)
            chunk.seconds += seconds
        found.append(chunk)
    return sorted(found, key=lambda chunk: (chunk.tests[0].stage, -chunk.seconds))
