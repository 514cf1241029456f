"""Persistent kernels, whose programs process one work item after another: found in the source, and watched as they run.

A barrier knows only odd phases from even ones, and counts them over all items of a program. So what such a kernel gets
wrong shows from a program's second or third item on, and often only where items differ in length.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import attnmesh
from helpers import gluon

PACKAGE = Path(attnmesh.__file__).resolve().parent


class _Function(NamedTuple):
    """A function of a kernel, and the names that it mentions as (file, name): all, and through a module."""

    node: ast.FunctionDef
    mentions: set[tuple[str, str]]
    through_modules: set[tuple[str, str]]


def loops_over_items() -> dict[str, set[str]]:
    """The kernels of the package that may take several items or wait for other programs, and why each may.

    A kernel is a compiled function that no other mentions, named as in "sparse.gluon_topk._topk_kernel". It, or what it
    calls, has a `while` loop, asks for the number of programs, or uses what an atomic returns.
    """
    functions = _functions()
    mentioned = set().union(*(each.mentions for each in functions.values()))
    found = {}
    for key in functions.keys() - mentioned:
        reached, left = set(), [key]
        while left:
            at = left.pop()
            if at in functions and at not in reached:
                reached.add(at)
                left += functions[at].mentions
        if why := set().union(*(signs_of_items(functions[at].node) for at in reached)):
            found[f"{_module(key[0])}.{key[1]}"] = why
    return found


@cache
def _functions() -> dict[tuple[str, str], _Function]:
    """The compiled functions of the package by file and name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        if ".jit" not in source:
            continue
        tree = ast.parse(source)
        imported = {
            alias.asname or alias.name: (str(PACKAGE.parent / (x.module or "").replace(".", "/")) + ".py", alias.name)
            for x in ast.walk(tree)
            if isinstance(x, ast.ImportFrom)
            for alias in x.names
        }
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(x) for x in node.decorator_list):
                names = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)} - {node.name}
                mentions = {imported.get(name, (str(path), name)) for name in names}
                through_modules = {
                    (imported[x.value.id][0].removesuffix(".py") + f"/{imported[x.value.id][1]}.py", x.attr)
                    for statement in node.body
                    for x in ast.walk(statement)
                    if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name) and x.value.id in imported
                }
                found[str(path), node.name] = _Function(node, mentions | through_modules, through_modules)
    return found


def constants_through_modules() -> list[str]:
    """The constants that kernels read as `module.CONSTANT`, named as in "decode.gluon_fp8._score: LINES"."""
    return [
        f"{_module(file)}.{name}: {constant}"
        for (file, name), function in _functions().items()
        for home, constant in function.through_modules
        if Path(home).is_file() and constant.isupper()
    ]


def signs_of_items(function: ast.FunctionDef) -> set[str]:
    """Why a function may process several items, or wait for other programs."""
    dropped = {id(x.value) for x in ast.walk(function) if isinstance(x, ast.Expr)}  # calls whose result nobody uses
    found = set()
    for x in ast.walk(function):
        name = x.func.attr if isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute) else ""
        if isinstance(x, ast.While):
            found.add("while")
        elif name == "num_programs":
            found.add("num_programs")
        elif name.startswith("atomic") and id(x) not in dropped:
            found.add("atomic")
    return found


def _module(file: str) -> str:
    """The name of a module below `attnmesh.ops`, or below `attnmesh`."""
    return ".".join(Path(file).resolve().relative_to(PACKAGE).with_suffix("").parts).removeprefix("ops.")


# Launches.


class Launch(NamedTuple):
    """A kernel by its name in `loops_over_items`, its number of programs, and its arguments."""

    kernel: str
    programs: int
    args: dict[str, Any]


@contextmanager
def watched_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Collects the launches of the package's kernels: on a GPU, in Triton's interpreter, and emulated."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from attnmesh.ops.launch import Launch as RepeatedLaunch

    found: list[Launch] = []

    def watch(kind: type, function_of: str) -> None:
        original = kind.__getitem__

        def get(kernel: Any, grid: Any) -> Any:
            launch = original(kernel, grid)
            function = getattr(kernel, function_of)
            file = Path(function.__code__.co_filename).resolve()

            def run(*args: Any, **named: Any) -> Any:
                if file.is_relative_to(PACKAGE):
                    given = dict(zip(inspect.signature(function).parameters, args, strict=False)) | named
                    found.append(Launch(f"{_module(str(file))}.{function.__name__}", grid[0], given))
                return launch(*args, **named)

            return run

        patch.setattr(kind, "__getitem__", get)

    with monkeypatch.context() as patch:
        watch(JITFunction, "fn")
        watch(InterpretedFunction, "fn")
        watch(gluon.Kernel, "function")
        patch.setattr(RepeatedLaunch, "_is_watched", lambda launch: True)  # which passes the kernel by
        yield found
