"""The house: every room stands above all that it imports, files stay short, and heavy extras wait until used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import attnmesh
from attnmesh.core.optional import installed, require

SOURCE = Path(attnmesh.__file__).parent

# Floors, lowest first. A room may import its own floor and any below; `MAY_IMPORT` says where it is fewer than that.
FLOORS = [
    {
        "state",
        "mask",
        "layout",
        "share",
        "counts",
        "spans",
        "balanced",
        "joint",
        "extras",
        "timeline",
        "named",
        "quantity",
        "recorder",
        "busy",
        "met",
    },
    {"plan"},
    {"ops"},
    {"cache"},
    {"comm"},
    {"parallel"},
    {"models"},
    {
        "verify",
        "verify_decode",
        "verify_cache",
        "verify_generation",
        "verify_mode",
        "verify_sparse",
        "verify_sparse_ranks",
        "report",
        "launch",
        "bench",
        "plan_command",
        "trace_run",
        "calibrate",
        "generate_command",
        "report_page",
    },
    {"cli"},
    {"attnmesh"},  # the front door, attnmesh/__init__.py, opens on every room
]
GROUND = FLOORS[0]
MAY_IMPORT = {"comm": GROUND | {"comm"}}  # what ranks exchange knows nothing of plans and kernels

Graph = dict[str, set[str]]


def room_of(module: str) -> str:
    """`attnmesh.ops.dense.api` is in the room `ops`; the package itself is `attnmesh`."""
    return module.split(".")[1] if "." in module else module


def floor_of(room: str) -> int:
    for floor, rooms in enumerate(FLOORS):
        if room in rooms:
            return floor
    raise AssertionError(f"the room {room!r} has no floor yet: give it one in FLOORS and in the design's house")


def allowed(importer: str, imported: str) -> bool:
    a, b = room_of(importer), room_of(imported)
    return b in MAY_IMPORT[a] if a in MAY_IMPORT else floor_of(b) <= floor_of(a)


def arrows_up(graph: Graph) -> list[str]:
    """The imports that no room of that floor may make."""
    return [f"{a} imports {b}" for a in sorted(graph) for b in sorted(graph[a]) if not allowed(a, b)]


def circle(graph: Graph) -> list[str]:
    """Modules that import one another in a circle, or nothing."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        found = next(filter(None, (walk(after, [*path, module]) for after in sorted(graph.get(module, ())))), [])
        done.add(module)
        return found

    return next(filter(None, (walk(module, []) for module in sorted(graph))), [])


def imports_of(text: str, module: str, *, is_package: bool = False) -> set[str]:
    """Everything a module's source imports, anywhere in it, as dotted names; `from a import b` gives `a.b`."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=base, names=names, level=level):
                above = package[: len(package) - (level - 1)] if level else []
                whole = ".".join([*above, *([base] if base else [])])
                found |= {f"{whole}.{alias.name}" for alias in names}
            case ast.Call(
                func=ast.Name(id="require" | "import_module") | ast.Attribute(attr="require" | "import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                found.add(name)
    return found


def inside(name: str, modules: set[str]) -> str | None:
    """The module of this package that a dotted name means: itself, or the module it is a name of."""
    while name:
        if name in modules:
            return name
        name = name.rpartition(".")[0]
    return None


def house(sources: dict[str, str], packages: frozenset[str] = frozenset()) -> Graph:
    """Which module imports which, from their texts."""
    modules = set(sources)
    return {
        module: {
            target
            for name in imports_of(text, module, is_package=module in packages)
            if (target := inside(name, modules)) not in (None, module)
        }
        for module, text in sources.items()
    }


def module_name(path: Path) -> str:
    return ".".join(["attnmesh", *path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")


FILES = sorted(SOURCE.rglob("*.py"))
SOURCES = {module_name(path): path.read_text() for path in FILES}
PACKAGES = frozenset(module_name(path) for path in FILES if path.name == "__init__.py")


def test_no_room_imports_a_higher_one():
    assert arrows_up(house(SOURCES, PACKAGES)) == []


def test_no_modules_import_one_another_in_a_circle():
    assert circle(house(SOURCES, PACKAGES)) == []


def test_the_checker_sees_the_arrows_that_are_known_to_be_there():
    graph = house(SOURCES, PACKAGES)
    assert "attnmesh.core.masks" in graph["attnmesh"]
    assert "attnmesh.core.ranges" in graph["attnmesh.plan.blocks"]  # from attnmesh import spans
    assert "attnmesh.comm.base" in graph["attnmesh.comm"]  # from .base import ...
    assert "attnmesh.ops.triton_merge" in graph["attnmesh.ops.merge"]  # require("...")
    assert "benchmarks.main" in graph["attnmesh.cli.main"]  # inside a function


def test_ops_never_imports_comm():
    graph = house(SOURCES, PACKAGES)
    reached, new = set(), {module for module in graph if room_of(module) == "ops"}
    while new:
        reached |= new
        new = {after for module in new for after in graph[module]} - reached
    assert {room_of(module) for module in reached} <= GROUND | {"plan", "ops"}


@pytest.mark.parametrize("heavy", ["torch.distributed", "triton"])
def test_the_ground_and_the_plans_start_no_process_and_compile_no_kernel(heavy):
    pure = [module for module in SOURCES if room_of(module) in GROUND | {"plan"}]
    assert len(pure) >= 7
    assert [module for module in pure if uses(SOURCES[module], module, heavy)] == []


def uses(text: str, module: str, heavy: str) -> bool:
    """Whether a module imports `heavy`, or reaches it as an attribute (`torch.distributed.send`)."""
    attributes = {ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    names = imports_of(text, module) | attributes
    return any(name == heavy or name.startswith(heavy + ".") for name in names)


# The checker itself, on small houses with a planted fault.

SOUND = {
    "attnmesh": "from attnmesh.state import merge\nfrom attnmesh.cli import app",
    "attnmesh.core.state": "import torch",
    "attnmesh.core.masks": "",
    "attnmesh.plan": "",
    "attnmesh.plan.blocks": "from attnmesh import mask\nfrom attnmesh.state import State",
    "attnmesh.ops": "",
    "attnmesh.ops.dense": "from attnmesh.plan.blocks import Patch",
    "attnmesh.comm": "from .base import Comm",
    "attnmesh.comm.base": "import torch.distributed as dist",
    "attnmesh.parallel": "",
    "attnmesh.parallel.ring": "from attnmesh.comm import Comm\nfrom attnmesh.ops import dense",
    "attnmesh.cli.main": "from attnmesh.parallel import ring",
}
SOUND_PACKAGES = frozenset({"attnmesh", "attnmesh.plan", "attnmesh.ops", "attnmesh.comm", "attnmesh.parallel"})


def test_a_sound_house_passes():
    graph = house(SOUND, SOUND_PACKAGES)
    assert arrows_up(graph) == []
    assert circle(graph) == []
    assert graph["attnmesh.plan.blocks"] == {"attnmesh.core.masks", "attnmesh.core.state"}
    assert graph["attnmesh.comm"] == {"attnmesh.comm.base"}


@pytest.mark.parametrize(
    ("module", "text", "arrow"),
    [
        ("attnmesh.core.state", "import attnmesh.plan.blocks", "attnmesh.core.state imports attnmesh.plan.blocks"),
        ("attnmesh.core.masks", "from .comm import Comm", "attnmesh.core.masks imports attnmesh.comm"),
        ("attnmesh.core.masks", "from attnmesh import merge", "attnmesh.core.masks imports attnmesh"),
        ("attnmesh.plan.blocks", "from ..ops import dense", "attnmesh.plan.blocks imports attnmesh.ops.dense"),
        ("attnmesh.ops.dense", "def f():\n    import attnmesh.comm", "attnmesh.ops.dense imports attnmesh.comm"),
        ("attnmesh.ops.dense", "from attnmesh import parallel as p", "attnmesh.ops.dense imports attnmesh.parallel"),
        ("attnmesh.ops.dense", 'require("attnmesh.comm", extra="x")', "attnmesh.ops.dense imports attnmesh.comm"),
        ("attnmesh.ops.dense", 'extras.require("attnmesh.cli.main")', "attnmesh.ops.dense imports attnmesh.cli"),
        (
            "attnmesh.ops.dense",
            'importlib.import_module("attnmesh.cli.main")',
            "attnmesh.ops.dense imports attnmesh.cli",
        ),
        ("attnmesh.comm.base", "from attnmesh.plan import blocks", "attnmesh.comm.base imports attnmesh.plan.blocks"),
        ("attnmesh.comm.base", "from attnmesh.ops import dense", "attnmesh.comm.base imports attnmesh.ops.dense"),
        ("attnmesh.parallel.ring", "from attnmesh.cli import app", "attnmesh.parallel.ring imports attnmesh.cli"),
        (
            "attnmesh.core.state",
            "if TYPE_CHECKING:\n    from attnmesh.ops import x",
            "attnmesh.core.state imports attnmesh.ops",
        ),
    ],
)
def test_a_planted_arrow_up_is_found(module, text, arrow):
    assert arrows_up(house(SOUND | {module: text}, SOUND_PACKAGES)) == [arrow]


def test_a_room_nobody_gave_a_floor_is_found():
    graph = house(SOUND | {"attnmesh.attic": "", "attnmesh.cli.main": "import attnmesh.attic"}, SOUND_PACKAGES)
    with pytest.raises(AssertionError, match="'attic' has no floor"):
        arrows_up(graph)


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, ["b", "c", "b"]),
        ({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}, []),
        ({"a": {"c"}, "b": {"c"}, "c": {"d"}, "d": {"a"}}, ["a", "c", "d", "a"]),
        ({}, []),
    ],
)
def test_a_planted_circle_is_found(graph, found):
    assert circle(graph) == found


@pytest.mark.parametrize(
    ("text", "heavy"),
    [
        ("import torch.distributed as dist", "torch.distributed"),
        ("from torch import distributed", "torch.distributed"),
        ("from torch.distributed import ProcessGroup", "torch.distributed"),
        ("import torch\ntorch.distributed.barrier()", "torch.distributed"),
        ("import triton.language as tl", "triton"),
        ("def f():\n    return require('triton', extra='triton')", "triton"),
    ],
)
def test_a_planted_heavy_import_is_found(text, heavy):
    assert uses(text, "attnmesh.core.masks", heavy)
    assert not uses("import torch\nfrom torch import Tensor\nimport tritonic", "attnmesh.core.masks", heavy)


def test_no_file_has_more_than_600_lines():
    lengths = {module: len(text.splitlines()) for module, text in SOURCES.items()}
    assert {module: lines for module, lines in lengths.items() if lines > 600} == {}


def test_importing_attnmesh_imports_no_extra():
    code = "import sys, attnmesh; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {"attnmesh", "torch"} <= loaded
    assert not loaded & {"triton", "transformers", "matplotlib"}


def test_a_missing_extra_is_named():
    with pytest.raises(ModuleNotFoundError, match=r"no_such_module is not installed.*attnmesh\[plot\]") as caught:
        require("no_such_module", extra="plot")
    assert caught.value.name == "no_such_module"


def test_what_a_module_of_ours_misses_is_named_not_the_module(tmp_path, monkeypatch):
    (tmp_path / "ours_for_the_test.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"^no_such_module is not installed.*extra 'hf'"):
        require("ours_for_the_test", extra="hf")


def test_what_is_there_is_returned():
    assert require("math", extra="none").sqrt(4) == 2
    assert installed("math")
    assert not installed("no_such_module")
