"""Models by name: public config files that come along, only the fields that are read; or anybody's own file."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from attnmesh.planner.hardware_catalog.names import unknown
from attnmesh.planner.models.model import ModelConfig
from attnmesh.planner.models.model_config import read_whole_config

_FOLDER = Path(__file__).parent
_ALIASES = {"llama-3.3-70b": "llama-3.1-70b", "deepseek-r1": "deepseek-v3", "mistral-7b-v0.1": "mistral-7b"}


def model_names() -> list[str]:
    """All names that `model` knows."""
    return sorted([path.stem for path in _FOLDER.glob("*.json")] + list(_ALIASES))


def model(name_or_path: str | Path) -> ModelConfig:
    """A model by its name, its config file, or a folder with one.

    What is there as a file or folder is read; anything else must be a name. An owner before the name, capitals and
    `-Instruct` do not matter: `meta-llama/Llama-3.1-8B-Instruct` is `llama-3.1-8b`.
    """
    path = Path(name_or_path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"the folder {path} has no config.json")
        return read_whole_config(path / "config.json")
    if path.is_file():
        return read_whole_config(path)
    name = _plain(str(name_or_path))
    if name in model_names():
        return _known(_ALIASES.get(name, name))
    if path.suffix == ".json" or path.is_absolute() or len(path.parts) > 2:
        raise ValueError(f"there is no config file or folder {path}")
    raise unknown("model (nor is it a config file)", str(name_or_path), model_names())


def _plain(name: str) -> str:
    owner, _, last = name.strip().lower().rpartition("/")
    return (name.lower() if "/" in owner or owner in (".", "..") else last).removesuffix("-instruct")


@cache
def _known(name: str) -> ModelConfig:
    return read_whole_config(_FOLDER / f"{name}.json", name)
