"""The argument fuzzer: every public callable, one bad value at a time, and what counts as a proper answer.

The public callables are found by introspection: the names in `attnmesh.__all__`, in the `__all__` of its packages, and
those that the documentation and the examples import. A valid call of each is in `helpers.argument_calls`.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import inspect
import math
import re
import resource
import signal
import types
import typing
from collections import abc
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import attnmesh as am

ROOT = Path(__file__).parents[2]
PACKAGES_WITH_NAMES = (
    "attnmesh.report", "attnmesh.sparse", "attnmesh.decode", "attnmesh.models", "attnmesh.recurrent",
    "attnmesh.generation",
)  # fmt: skip
# What the commands use of the planner and of traces, and a program may use as well.
PLANNER_NAMES = {
    "attnmesh.comm": ("Comm", "CommError"),
    "attnmesh.planner.catalog": ("Catalog", "catalog", "default_cluster", "load"),
    "attnmesh.planner.decode": ("DecodeRequest", "decode_ranking"),
    "attnmesh.planner.models": ("model", "read_config", "read_model_config"),
    "attnmesh.planner.prefill": ("PrefillRequest", "prefill_ranking"),
    "attnmesh.planner.recommend": ("compare_shardings",),
    "attnmesh.planner.simulator": ("Slowdown",),
    "attnmesh.trace.timeline": ("read_trace", "write_trace"),
}
TIME_LIMIT = 10  # seconds per call
MEMORY_LIMIT = 1 << 30  # bytes per call
_MISSING = object()


# What is public.


@dataclass(frozen=True)
class Target:
    """A public function, constructor or method. `owner` is the class that a method belongs to."""

    name: str
    owner: type | None
    function: Callable[..., Any]

    @property
    def is_method(self) -> bool:
        """Whether it is called on an instance."""
        return self.owner is not None and self.name.partition(".")[2] != "" and "self" in self._signature.parameters

    @property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.function)

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters that a caller gives."""
        return {name: each for name, each in self._signature.parameters.items() if name != "self"}


def documented_imports() -> set[tuple[str, str]]:
    """(module, name) of everything that README, docs and examples import from inside the package."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]
    found = set()
    for file in files:
        for module, names in re.findall(r"^from (attnmesh\.[\w.]+) import ([\w, ]+)$", file.read_text(), re.M):
            found |= {(module, name.strip()) for name in names.split(",")}
    return found


def public_objects() -> dict[str, Any]:
    """Every public function and class by name."""
    places = {("attnmesh", name) for name in am.__all__} | documented_imports()
    places |= {(package, name) for package in PACKAGES_WITH_NAMES for name in importlib.import_module(package).__all__}
    places |= {(module, name) for module, names in PLANNER_NAMES.items() for name in names}
    return {name: getattr(importlib.import_module(module), name) for module, name in sorted(places)}


def targets(concrete: Collection[str] = ()) -> dict[str, Target]:
    """Every public callable: functions, constructors, and public methods, inherited ones included.

    The methods of an abstract class count for its subclasses, and for itself if it is among `concrete`.
    """
    found: dict[str, Target] = {}
    for name, public in public_objects().items():
        if not inspect.isclass(public):
            found[name] = Target(name, None, public)
            continue
        if issubclass(public, BaseException | enum.Enum):
            continue
        if not inspect.isabstract(public) and public.__init__ is not object.__init__ and not _is_named_tuple(public):
            found[name] = Target(name, public, public)
        if inspect.isabstract(public) and public.__name__ not in concrete:
            continue
        for method, value in inspect.getmembers(public, callable):
            if (method.startswith("_") and method != "__call__") or not _is_ours(value):
                continue
            if method == "__call__" and "__call__" not in vars(public):
                continue
            found[f"{name}.{method}"] = Target(f"{name}.{method}", public, value)
    return {name: target for name, target in found.items() if target.parameters}


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("attnmesh") and not inspect.isclass(value)


# Bad values.


def _meta() -> Tensor:
    return torch.empty(2, 3, device="meta")


GENERIC: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "string": lambda: "no such value",
    "empty string": lambda: "",
    "bytes": lambda: b"\x01\x02",
    "object": object,
    "class": lambda: int,
    "function": lambda: lambda *given, **named: None,
    "empty list": list,
    "list of strings": lambda: ["x", "y"],
    "list of lists": lambda: [[]],
    "dict": lambda: {"a": 1},
    "set": lambda: {1, 2},
    "True": lambda: True,
    "0": lambda: 0,
    "-1": lambda: -1,
    "7": lambda: 7,
    "2**40": lambda: 2**40,
    "2**63": lambda: 2**63,
    "10**400": lambda: 10**400,
    "1.5": lambda: 1.5,
    "-0.5": lambda: -0.5,
    "1e300": lambda: 1e300,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "-inf": lambda: -math.inf,
    "complex": lambda: 1j,
    "array": lambda: np.zeros((2, 3)),
    "array of objects": lambda: np.array([object()]),
    "numpy integer": lambda: np.int64(1),
    "range": lambda: range(2),
    "tensor": lambda: torch.ones(2, 3),
    "scalar tensor": lambda: torch.tensor(1.0),
    "integer tensor": lambda: torch.ones(2, dtype=torch.int64),
    "empty tensor": lambda: torch.empty(0),
    "meta tensor": _meta,
    "tensor of 9 dimensions": lambda: torch.ones([1] * 9),
    "dtype": lambda: torch.float16,
    "integer dtype": lambda: torch.int64,
    "device": lambda: torch.device("meta"),
}

OF_TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "one dimension more": lambda x: x.unsqueeze(0),
    "one dimension less": lambda x: x[0] if x.ndim and x.shape[0] else x.reshape(-1, 1),
    "no dimension": lambda x: torch.zeros((), dtype=x.dtype),
    "one row less": lambda x: x[:-1] if x.ndim and x.shape[0] else x,
    "last dimension shorter": lambda x: x[..., :-1] if x.ndim and x.shape[-1] else x,
    "no rows": lambda x: x[:0] if x.ndim else x,
    "no last dimension": lambda x: x[..., :0] if x.ndim else x,
    "float64": lambda x: x.double(),
    "float16": lambda x: x.half(),
    "int64": lambda x: x.long(),
    "int8": lambda x: x.to(torch.int8),
    "bool": lambda x: x.bool(),
    "complex64": lambda x: x.to(torch.complex64),
    "float8": lambda x: x.float().to(torch.float8_e4m3fn),
    "on meta": lambda x: x.to("meta"),
    "with gradient": lambda x: x.detach().float().requires_grad_(),
    "as an array": lambda x: np.zeros(tuple(x.shape)),
    "as a list": lambda x: np.zeros(tuple(x.shape)).tolist(),
    "sparse": lambda x: x.float().to_sparse(),
}  # fmt: skip

ELEMENTS = ("None", "string", "bytes", "object", "True", "-1", "2**63", "10**400", "1.5", "nan", "dict", "meta tensor")


class Case(NamedTuple):
    """One bad call: `label` says what takes the place of the argument `parameter`."""

    target: str
    variant: int
    parameter: str
    label: str

    def __str__(self) -> str:
        variant = f"[{self.variant}]" if self.variant else ""
        return f"{self.target}{variant}({self.parameter}={self.label})"


def replacements(valid: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """The labels of all values to put in place of a valid one, and how to make them from it."""
    for label, make in GENERIC.items():
        yield label, lambda _, make=make: make()
    if isinstance(valid, Tensor):
        for label, change in OF_TENSORS.items():
            yield label, change
    if isinstance(valid, list | tuple) and valid and not hasattr(valid, "_fields"):
        for label in ELEMENTS:
            yield f"[0] = {label}", lambda given, label=label: type(given)([GENERIC[label](), *given[1:]])
        yield "one more", lambda given: type(given)([*given, given[-1]])
        yield "reversed", lambda given: type(given)(reversed(given))
        if isinstance(valid[0], list | tuple) and valid[0] and not hasattr(valid[0], "_fields"):
            for label in ELEMENTS:
                yield (
                    f"[0][0] = {label}",
                    lambda given, label=label: type(given)(
                        [type(given[0])([GENERIC[label](), *given[0][1:]]), *given[1:]]
                    ),
                )


# Calls and their judgement.


class Outcome(NamedTuple):
    """What a call did. `kind` is "accepted", "refused", or the name of what is wrong."""

    kind: str
    text: str

    @property
    def is_finding(self) -> bool:
        """Whether the call answered improperly."""
        return self.kind not in ("accepted", "refused")


class Stuck(BaseException):
    """A call ran past the time limit."""


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Raise Stuck in the main thread after some time; refuse memory beyond some more than the process has now."""

    def stop(*_: object) -> None:
        raise Stuck(f"ran for {TIME_LIMIT} s")

    before = signal.signal(signal.SIGALRM, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_LIMIT, hard))
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


def finish(result: Any) -> Any:
    """Enter a context manager, run an iterator to its end."""
    if isinstance(result, contextlib.AbstractContextManager) and not isinstance(result, Tensor):
        with result:
            return None
    if isinstance(result, types.GeneratorType):
        return list(result)
    return result


def judge(call: Callable[[], Any], parameter: str, value: Any, hint: Any, others: Collection[str] = ()) -> Outcome:
    """Run a call with a bad value and judge the answer. `others` are the other parameters of the call."""
    try:
        with limits():
            finish(call())
    except (ValueError, am.decode.CacheFull) as error:
        fits = hint is _MISSING or matches(value, hint)
        return judge_refusal(error, parameter, value, others if fits else ())
    except OSError as error:  # of a file that cannot be opened
        kind = "refused" if isinstance(value, str | Path) and "Path" in str(hint) else type(error).__name__
        return Outcome(kind, str(error)[:300])
    except Stuck as error:
        return Outcome("stuck", str(error))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return Outcome(type(error).__name__, str(error)[:300])
    if hint is not _MISSING and not matches(value, hint):
        return Outcome("accepted a value of the wrong type", describe(value))
    return Outcome("accepted", "")


def judge_refusal(error: Exception, parameter: str, value: Any, others: Collection[str]) -> Outcome:
    """A refusal must name the argument and its value, or another argument that does not go with it."""
    text = str(error)
    if isinstance(error, am.decode.CacheFull):
        return Outcome("refused", text)
    if isinstance(value, str | Path) and str(value) and f"{value} " in text:
        return Outcome("refused", text)  # a file, named by its path
    if text.startswith("unknown ") and repr(value) in text:
        return Outcome("refused", text)  # a name that is not known
    if not names(text, parameter):
        if any(names(text, other) for other in others):
            return Outcome("refused", text)
        return Outcome("argument not named", text[:300])
    if f"{parameter}[" not in text and not mentions(text, value):  # else it names one of several items
        return Outcome("value not named", text[:300])
    return Outcome("refused", text)


def names(text: str, parameter: str) -> bool:
    """Whether a message names a parameter: as a word, or as a part of one (`q` in `q_heads`)."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(parameter)}(?![A-Za-z0-9])", text) is not None


def mentions(text: str, value: Any, depth: int = 2) -> bool:
    """Whether a message shows a value: itself, its type, or what describes a tensor."""
    if "got both" in text or (isinstance(value, list | tuple) and "[..." in text):
        return True
    if isinstance(value, Tensor | np.ndarray):
        shape = [str(list(value.shape)), str(tuple(value.shape)), *map(str, value.shape)]
        if not value.ndim and str(getattr(value, "device", "cpu")) == "cpu":
            shape.append(str(value.item()))
        kind = [str(value.dtype).removeprefix("torch."), str(getattr(value, "device", "")), "gradient", "sparse"]
        return any(each and each in text for each in (*shape, *kind, "tensor(", "array(", type(value).__name__))
    shown = [repr(value)[:20], type(value).__name__, getattr(value, "__name__", None)]
    if isinstance(value, str | int | float | np.generic | torch.device):
        shown.append(str(value)[:20])
    if any(each and each in text for each in shown):
        return True
    if isinstance(value, abc.Sized) and f"{len(value)}" in text:
        return True
    if depth and isinstance(value, list | tuple | dict | set):
        return not value or any(mentions(text, each, depth - 1) for each in value)
    return value in ("", None) and ("got none" in text or "empty" in text)


def describe(value: Any) -> str:
    """A value in a few words."""
    return f"{type(value).__name__} {repr(value)[:60]}"


# Types.


def hint_of(target: Target, parameter: str) -> Any:
    """The annotation of a parameter as a type, `_MISSING` if it cannot be evaluated."""
    function = target.function.__init__ if inspect.isclass(target.function) else target.function
    annotation = target.parameters[parameter].annotation
    if not isinstance(annotation, str):
        return _MISSING if annotation is inspect.Parameter.empty else annotation
    module = inspect.getmodule(target.function)
    scope = {**vars(typing), **vars(module), **getattr(inspect.unwrap(function), "__globals__", {})}
    try:
        return eval(annotation, scope)
    except Exception:
        return _MISSING


def matches(value: Any, hint: Any) -> bool:
    """Whether a value may be of a type; True where that cannot be decided."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, typing.TypeVar | str | typing.ForwardRef):
        return True
    if hint is None or hint is type(None):
        return value is None
    if origin in (typing.Union, types.UnionType):
        return any(matches(value, part) for part in parts)
    if origin is typing.Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin is abc.Callable:
        return callable(value)
    if origin is tuple and parts and parts[-1] is not Ellipsis:
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(matches, value, parts))
    if origin is not None:
        if isinstance(value, Tensor | np.ndarray):
            return origin in (abc.Iterable, abc.Sequence) and value.ndim == 1
        if not isinstance(value, origin):
            return False
        inner = parts[0] if parts else Any
        return isinstance(value, str) or all(matches(each, inner) for each in value)
    if hint is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) else True


# All cases.


def inherited(target: Target) -> dict[str, None]:
    """The names of a callable: its own, then those of a method in the classes it is inherited from."""
    method = target.name.partition(".")[2]
    bases = target.owner.__mro__ if target.owner is not None and method else ()
    return dict.fromkeys([target.name, *(f"{base.__name__}.{method}" for base in bases)])


def calls_of(target: Target, table: dict[str, list[Callable[..., Any]]]) -> list[Callable[..., Any]]:
    """The factories of the valid calls of a callable."""
    for name in inherited(target):
        if name in table:
            return table[name]
    raise LookupError(f"{target.name} is public and has no valid call: add one to CALLS in helpers/argument_calls.py")


def receiver_of(target: Target, table: Any, receivers: dict[str, Callable[[], Any]]) -> Any:
    """A new instance for a method to be called on."""
    kind = target.owner
    assert kind is not None
    if kind.__name__ in receivers:
        return receivers[kind.__name__]()
    if kind.__name__ not in table:
        return kind()
    return invoke(kind, table[kind.__name__][0]())


def invoke(function: Callable[..., Any], arguments: dict[str, Any], *before: Any) -> Any:
    """Call a function with arguments by name; those of `*parameters` by position."""
    arguments = dict(arguments)
    given = list(before)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL and name in arguments:
            star = arguments.pop(name)
            given += star if isinstance(star, tuple) else [star]
    return function(*given, **arguments)


class Fuzzer:
    """All bad calls of the public callables."""

    def __init__(
        self,
        table: dict[str, list[Callable[..., Any]]],
        receivers: dict[str, Callable[[], Any]],
        not_fuzzed: Collection[str],
        skipped: Collection[tuple[str, str, str]] = (),
    ) -> None:
        self.table, self.receivers, self.skipped = table, receivers, skipped
        self.targets = {
            name: target
            for name, target in targets(receivers).items()
            if inherited(target).keys().isdisjoint(not_fuzzed)
        }

    def make(self, name: str, variant: int = 0) -> tuple[Any, dict[str, Any]]:
        """The instance (None for a function) and the arguments of a valid call."""
        target = self.targets[name]
        factory = calls_of(target, self.table)[variant]
        if not target.is_method:
            return None, dict(factory())
        receiver = receiver_of(target, self.table, self.receivers)
        return receiver, dict(factory(receiver))

    def call(self, name: str, receiver: Any, arguments: dict[str, Any]) -> Any:
        """Call a target."""
        target = self.targets[name]
        return invoke(target.function, arguments, *([receiver] if target.is_method else []))

    def cases(self, name: str) -> Iterator[Case]:
        """All bad calls of one target."""
        for variant in range(len(calls_of(self.targets[name], self.table))):
            _, valid = self.make(name, variant)
            for parameter in self.parameters(name, valid):
                for label in self.labels(name, valid, parameter):
                    yield Case(name, variant, parameter, label)

    def labels(self, name: str, valid: dict[str, Any], parameter: str) -> list[str]:
        """The labels of all bad values of a parameter."""
        every = (label for label, _ in replacements(self._given(name, valid, parameter)))
        return [label for label in every if (name, parameter, label) not in self.skipped]

    def replacement(self, name: str, valid: dict[str, Any], parameter: str, label: str) -> Any:
        """A bad value of a parameter, made from the arguments of a valid call."""
        given = self._given(name, valid, parameter)
        return dict(replacements(given))[label](given)

    def _given(self, name: str, valid: dict[str, Any], parameter: str) -> Any:
        declared = self.targets[name].parameters.get(parameter)
        return valid.get(parameter, declared.default if declared is not None else None)

    def parameters(self, name: str, valid: dict[str, Any]) -> list[str]:
        """The parameters of a target; instead of `**options`, the options of the valid call."""
        declared = self.targets[name].parameters
        known = [each for each, p in declared.items() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        return known + [each for each in valid if each not in declared]

    def bad_call(self, case: Case) -> tuple[Callable[[], Any], Any]:
        """A call with one bad value, and the value."""
        receiver, arguments = self.make(case.target, case.variant)
        value = arguments[case.parameter] = self.replacement(case.target, arguments, case.parameter, case.label)
        return lambda: self.call(case.target, receiver, arguments), value

    def run(self, case: Case) -> Outcome:
        """Make one bad call and judge the answer."""
        call, value = self.bad_call(case)
        target = self.targets[case.target]
        hint = hint_of(target, case.parameter) if case.parameter in target.parameters else _MISSING
        if (
            case.parameter in target.parameters
            and target.parameters[case.parameter].kind is inspect.Parameter.VAR_POSITIONAL
        ):
            hint = _MISSING
        owner = target.owner if target.is_method else None
        fields = inspect.signature(owner).parameters if owner is not None else ()
        _, valid = self.make(case.target, case.variant)
        others = [name for name in (*self.parameters(case.target, valid), *fields) if name != case.parameter]
        return judge(call, case.parameter, value, hint, others)
