"""Every name of Gluon's language that a kernel uses is there in the installed Triton.

Names change from version to version, a kernel is only compiled where it runs, and the emulator does not ask Triton.
"""

import ast
from pathlib import Path

import pytest

import attnmesh
from helpers.cases import first

pytest.importorskip("triton")
FILES = sorted(Path(attnmesh.__file__).parent.glob("ops/**/gluon*.py"))


@pytest.mark.parametrize("file", first(16, FILES), ids=lambda file: "/".join(file.parts[-2:]))
def test_the_names_that_a_kernel_uses_are_there(file):
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

    modules = {"gl": gl, "mbarrier": mbarrier, "tma": tma, "async_copy": async_copy}
    used = {
        (x.value.id, x.attr)
        for x in ast.walk(ast.parse(file.read_text()))
        if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name) and x.value.id in modules
    }
    missing = {f"{module}.{name}" for module, name in used if not hasattr(modules[module], name)}
    if file.name == "gluon_common.py" and hasattr(gl, "barrier"):
        missing.discard("gl.thread_barrier")  # the name of gl.barrier before Triton 3.7
    assert not missing
