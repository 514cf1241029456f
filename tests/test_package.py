"""The package as it is released: its versions, its extras, and what an environment without extras can do with it.

The slow tests build both distributions and use the wheel from outside of the repository, in an environment that has
the packages that attnmesh requires, and what these require, and nothing else.
"""

import ast
import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import attnmesh

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
SOURCE = ROOT / "src" / "attnmesh"


def closure(requirements: list[str], extra: str = "") -> set[str]:
    """The names of the installed distributions that requirements bring, with all that these require."""
    found: set[tuple[str, str]] = set()
    todo = [(Requirement(text), extra) for text in requirements]
    while todo:
        requirement, of_extra = todo.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": of_extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) in found:
                continue
            found.add((name, wanted))
            if name == "attnmesh":
                todo += [(Requirement(text), "") for text in (EXTRAS[wanted] if wanted else PROJECT["dependencies"])]
                continue
            try:
                required = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                continue
            todo += [(Requirement(text), wanted) for text in required]
    return {name for name, _ in found}


# Versions.


def test_the_version_is_the_same_everywhere():
    citation = (ROOT / "CITATION.cff").read_text()
    cited = dict(re.findall(r"^(version|date-released): (.+)$", citation, flags=re.MULTILINE))
    assert PROJECT["version"] == attnmesh.__version__ == cited["version"]
    assert f"\n## {cited['version']} ({cited['date-released']})\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_changelog_has_a_section_for_each_release_newest_first():
    sections = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert all(re.fullmatch(r"Unreleased|\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)", title) for title in sections)
    releases = [title.split()[0] for title in sections if title != "Unreleased"]
    assert sections.count("Unreleased") <= 1
    assert sections[0] == "Unreleased" or "Unreleased" not in sections
    assert releases[0] == PROJECT["version"]
    numbers = [tuple(map(int, release.split("."))) for release in releases]
    assert numbers == sorted(set(numbers), reverse=True)


# Extras.


def required_modules() -> list[tuple[str, str, str]]:
    """(file, module, extra) of every `require(module, extra=...)` in the package and the benchmarks."""
    found = []
    for path in [*SOURCE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        text = path.read_text()
        if "require" not in text:
            continue
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
                continue
            extra = {keyword.arg: keyword.value for keyword in node.keywords}.get("extra")
            if node.func.id == "require_hf":
                extra = ast.Constant("hf")
            elif node.func.id != "require":
                continue
            assert isinstance(extra, ast.Constant), path
            for module in modules_named(node.args[0], tree):
                found.append((str(path.relative_to(ROOT)), module, extra.value))
    return found


def modules_named(argument: ast.expr, tree: ast.Module) -> list[str]:
    match argument:
        case ast.Constant(value=str(module)):
            return [module]
        case ast.JoinedStr(values=[ast.Constant(value=str(prefix)), *_]):  # f"attnmesh.ops.dense.gluon_{part}"
            parts = prefix.split(".")
            files = (SOURCE / Path(*parts[1:-1])).glob(f"{parts[-1]}*.py")
            return [".".join([*parts[:-1], path.stem]) for path in files]
        case ast.Name(id=name):  # for module in ("fastapi", ...)
            loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
            tuples = [loop.iter for loop in loops if isinstance(loop.target, ast.Name) and loop.target.id == name]
            return [each.value for items in tuples if isinstance(items, ast.Tuple) for each in items.elts]
    raise AssertionError(ast.dump(argument))


_IMPORT = re.compile(r"^\s*(?:from (\w+)[\w.]* import |import (\w+)[\w.]*(?: as \w+)?$)", flags=re.MULTILINE)


def third_party(path: Path) -> set[str]:
    """The top-level modules that a file imports, besides Python's own and attnmesh."""
    names = {one or other for one, other in _IMPORT.findall(path.read_text())}
    return names - sys.stdlib_module_names - {"attnmesh"}


# Of modules with another name, and of starlette, on which fastapi is built.
DISTRIBUTIONS = {
    "prometheus_client": "prometheus-client", "huggingface_hub": "huggingface-hub", "starlette": "fastapi"
}  # fmt: skip


def distributions(module: str) -> set[str]:
    """The distributions that a module needs; for a module of attnmesh, those that it imports."""
    if module.startswith("attnmesh."):
        return third_party(SOURCE.parent / (module.replace(".", "/") + ".py"))
    top = module.partition(".")[0]
    return {DISTRIBUTIONS.get(top, top)}


def test_an_extra_brings_what_is_required_of_it():
    required = required_modules()
    assert {extra for _, _, extra in required} == {"triton", "hf", "serve", "torchtitan", "verl", "plot"}
    assert {"triton", "transformers", "accelerate", "fastapi", "uvicorn", "prometheus-client", "matplotlib"} <= set(
        set().union(*(distributions(module) for _, module, _ in required))
    )
    brought = {extra: closure([f"attnmesh[{extra}]"]) for extra in EXTRAS}
    wrong = [
        f"{path}: {module} needs {name}, which the extra {extra!r} does not bring"
        for path, module, extra in required
        for name in distributions(module) - brought[extra]
    ]
    assert wrong == []


def test_the_page_of_features_lists_every_extra():
    section = (ROOT / "docs" / "features.md").read_text().partition("\n## Extras\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE) == list(EXTRAS)


def test_modules_import_only_what_is_declared():
    served = closure(["attnmesh[serve]"]) | closure(["attnmesh[triton]"]) | closure(["attnmesh[train]"])
    served |= closure(["attnmesh[torchtitan]"]) | closure(["attnmesh[verl]"])
    names = set().union(*(third_party(path) for path in SOURCE.rglob("*.py")))
    assert {"torch", "numpy", "rich", "typer", "triton", "fastapi"} <= names
    assert {DISTRIBUTIONS.get(name, name) for name in names} - served == set()


def test_a_constraint_pins_every_direct_requirement():
    pinned = {
        canonicalize_name(Requirement(line).name)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    declared = [PROJECT["dependencies"], *EXTRAS.values()]
    direct = {canonicalize_name(Requirement(text).name) for texts in declared for text in texts}
    assert direct - pinned == {"attnmesh"}


# Distributions.


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, the wheel, and the wheel that is built from the sdist."""
    tree, dist, again = (tmp_path_factory.mktemp(name) for name in ("tree", "dist", "again"))
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())

    def build(kind: str, source: Path, into: Path) -> Path:
        program = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
        done = subprocess.run([sys.executable, "-c", program, str(into)], cwd=source, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return next(into.glob({"sdist": "*.tar.gz", "wheel": "*.whl"}[kind]))

    sdist = build("sdist", tree, dist)
    with tarfile.open(sdist) as archive:
        archive.extractall(again, filter="data")
    unpacked = next(path for path in again.iterdir() if path.is_dir())
    return sdist, build("wheel", tree, dist), build("wheel", unpacked, again)


@pytest.mark.sweep
def test_the_wheel_has_the_package_and_nothing_else(built):
    _, wheel, from_sdist = built
    assert wheel.name == from_sdist.name == f"attnmesh-{PROJECT['version']}-py3-none-any.whl"
    info = f"attnmesh-{PROJECT['version']}.dist-info"
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(from_sdist) as other:
        names = set(archive.namelist())
        hashes = [{name: hashlib.sha256(each.read(name)).hexdigest() for name in names} for each in (archive, other)]
        metadata = importlib.metadata.PathDistribution(zipfile.Path(archive, f"{info}/"))
        assert set(metadata.metadata.get_all("Provides-Extra")) == set(EXTRAS)
        without = [text for text in metadata.requires if "extra ==" not in text]
        assert sorted(without) == sorted(PROJECT["dependencies"])
        assert [(entry.name, entry.value) for entry in metadata.entry_points] == [
            ("attnmesh", "attnmesh.cli.main:main")
        ]
    assert hashes[0] == hashes[1]
    files = {path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    expected = {str(path.relative_to(SOURCE.parent)) for path in files}
    assert "attnmesh/py.typed" in expected
    assert {name for name in names if not name.startswith(f"{info}/")} == expected
    assert f"{info}/licenses/LICENSE" in names


@pytest.mark.sweep
def test_the_sdist_has_the_repository(built):
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = {name for name in listed.split("\0") if name and (ROOT / name).is_file()} - names
    assert missing <= {".gitignore", ".ci/run"}


@pytest.fixture(scope="module")
def clean(built, tmp_path_factory):
    """An environment with the wheel and what it requires; the folder to run in is outside of the repository."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder / "env", with_pip=False, symlinks=True)
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    names = closure(PROJECT["dependencies"])
    assert {"torch", "numpy", "rich", "typer"} <= names
    assert not names & {"transformers", "safetensors", "accelerate", "fastapi", "matplotlib"}
    for name in names:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of a marker that does not apply here
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
    python = folder / "env" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    subprocess.run([*install, "--quiet", str(built[2])], check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRITON"))}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        program, *arguments = command
        return subprocess.run(
            [str(python.parent / program), *arguments],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=500,
        )  # fmt: skip

    return run


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.sweep
def test_the_wheel_is_imported_from_the_environment(clean):
    shown = succeeded(clean("python", "-c", "import attnmesh; print(attnmesh.__version__, attnmesh.__file__)"))
    assert shown.split()[0] == PROJECT["version"]
    assert "site-packages/attnmesh/__init__.py" in shown
    assert succeeded(clean("attnmesh", "--version")) == f"attnmesh {PROJECT['version']}"
    assert succeeded(clean("python", "-m", "attnmesh", "--version")) == f"attnmesh {PROJECT['version']}"


@pytest.mark.sweep
def test_the_first_example_of_the_readme_runs_without_extras(clean):
    code = re.search(r"^```python\n(.*?)^```\n", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    assert code is not None
    assert "ContextParallel" in code[1]
    succeeded(clean("python", "-c", code[1]))


@pytest.mark.sweep
def test_verify_passes_without_extras(clean):
    shown = succeeded(clean("attnmesh", "verify", "--virtual", "--ranks", "2", "--seed", "1"))
    assert "WRONG" not in shown


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("command", "extra", "status"),
    [
        (("python", "-c", "import attnmesh; attnmesh.register_attention()"), "hf", 1),
        (("attnmesh", "serve", "--ranks", "1"), "serve", 2),  # as an option that is refused
    ],
    ids=["register_attention", "serve"],
)
def test_what_needs_an_extra_names_it(clean, command, extra, status):
    done = clean(*command)
    assert done.returncode == status
    assert f"pip install 'attnmesh[{extra}]'" in done.stderr


@pytest.mark.sweep
def test_the_import_takes_less_than_a_second_besides_torch(clean):
    clean("python", "-c", "import attnmesh")  # writes byte code
    code = "import time, torch; begin = time.process_time(); import attnmesh; print(time.process_time() - begin)"
    assert min(float(succeeded(clean("python", "-c", code))) for _ in range(3)) < 1.0
