"""What the families share: cases as lines, weighted draws, random numbers, and the outcome of a case."""

from __future__ import annotations

import ast
import importlib
import re
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

import attnmesh
from attnmesh.testing.errors import ROUNDING

T = TypeVar("T")
Case = dict[str, Any]

FAMILIES = ("dense", "ring", "decode", "sparse", "sparse_decode")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CONFIGURATIONS = 16  # of a seed
LOW, HIGH = -(2**31), 2**31 - 1  # the ends of int32


def family_of(name: str) -> ModuleType:
    """Return the module with `draw` and `check(case, device)` of a family, or of a dotted name."""
    return importlib.import_module(name if "." in name else f"tests.gpu.search.{name}")


def draw_case(family: str, seed: int, number: int, device: str) -> Case:
    """Return one case; sizes are smaller on the CPU.

    What kernels are compiled for is drawn from `build`, which repeats: a seed has a few configurations, each with many
    sizes, masks and lengths.
    """
    build = Random(f"{family}-{seed}-configuration-{number % CONFIGURATIONS}")
    return family_of(family).draw(Random(f"{family}-{seed}-{number}"), build, device)


def as_line(case: Case) -> str:
    """Return a case as one line of name=value; what is None or False is left out."""
    given = {name: value for name, value in case.items() if value is not None and value is not False}
    return " ".join(f"{name}={value!r}".replace(" ", "").replace("'", "") for name, value in given.items())


def from_line(line: str) -> Case:
    """Return the case of a line."""
    case = {}
    for name, _, value in (part.partition("=") for part in line.split()):
        try:
            case[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            case[name] = value
    return case


def pick(random: Random, weights: Mapping[T, float]) -> T:
    """Return one of the keys, by weight."""
    return random.choices(list(weights), list(weights.values()))[0]


def chance(random: Random, odds: float) -> bool:
    """Return True this often."""
    return random.random() < odds


def draw_length(random: Random, most: int, least: int = 1) -> int:
    """Return a length: half of them small, small more often than large, some next to a multiple of a tile."""
    low = least if chance(random, 0.5) else max(least, most // 16)
    n = round(low * (max(most, low) / low) ** random.random())
    if chance(random, 0.3) and n > 64:
        n = n // 64 * 64 + random.choice((-1, 0, 1))
    return min(max(n, least), most)


def normal(*shape: int, seed: object, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal numbers on a device."""
    generator = torch.Generator(device).manual_seed(Random(str(seed)).getrandbits(40))
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device=device).to(dtype)


def integers(low: int, high: int, *shape: int, seed: object, device: str) -> Tensor:
    """Return int32 numbers of low <= n < high on a device."""
    generator = torch.Generator(device).manual_seed(Random(str(seed)).getrandbits(40))
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int32, device=device)


def rounding_of(dtype: torch.dtype, rows: int) -> float:
    """Return the relative rounding that the error rule allows; more for a few rows, whose errors do not average out."""
    return ROUNDING[dtype] * (1 + 3 * min(1.0, (16 / max(rows, 1)) ** 0.5))


class Outcome(NamedTuple):
    """How a case ended: "passed", "refused" or "failed", and why. After some faults a process is of no more use."""

    status: str
    why: str = ""
    fatal: bool = False


def run_case(family: str, case: Case, device: str) -> Outcome:
    """Compute a case and compare it. What the library refuses is no failure; every other exception is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            family_of(family).check(case, device)
            if device == "cuda":
                torch.cuda.synchronize()
                if torch.cuda.memory_reserved() > 6 << 30:
                    torch.cuda.empty_cache()
    except AssertionError as error:
        return Outcome("failed", _one_line(error) or _place(error))
    except ValueError as error:
        if _is_refusal(error):
            return Outcome("refused", re.sub(r"-?\d[\d.e+-]*", "N", _one_line(error))[:110])
        return Outcome("failed", f"{_one_line(error)} ({_place(error)})")
    except Exception as error:
        return Outcome("failed", f"{type(error).__name__}: {_one_line(error)} ({_place(error)})", fatal=True)
    return Outcome("passed")


def _is_refusal(error: BaseException) -> bool:
    """Whether the library itself raised it."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    return Path(attnmesh.__file__).parent in Path(raised_in).parents


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:240]


def _place(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {frame.filename.rpartition('/')[2]}:{frame.lineno}"
