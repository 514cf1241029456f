"""Damaged and hostile checkpoint folders: each loads exactly what it holds, or is refused in one line, at once."""

import random
import shutil
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from safetensors.torch import load_file

from attnmesh.models.checkpoint import ModelError
from attnmesh.models.loading import load_model
from helpers.cases import sweep
from helpers.hostile_folders import KINDS, LOADS, QUICK, damage, ran
from helpers.memory import little_memory
from helpers.models import write_folder

SECONDS = 20


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("folder") / "model")


@pytest.fixture
def folder(original, tmp_path, monkeypatch):
    def refuse(*args):
        pytest.fail("reached for the network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("asked at the terminal"))
    return Path(shutil.copytree(original, tmp_path / "model"))


def outcome(folder: Path) -> str:
    """Load a folder and compare with its weights: LOADS, or the reason for which it is refused."""
    start = time.perf_counter()
    said = LOADS
    try:
        with little_memory():
            model, _ = load_model(folder, attn_implementation="sdpa")
    except ModelError as error:
        said = str(error)
    assert time.perf_counter() - start < SECONDS
    assert not ran(folder).exists(), "code of the folder was run"
    if said == LOADS:
        stored, weights = load_file(folder / "model.safetensors"), model.state_dict()
        assert set(stored) == set(weights)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, stored[name], rtol=0, atol=0, equal_nan=True)
    else:
        assert "\n" not in said
        assert len(said) < 1000
        assert not any(word in said.lower() for word in ("alloc", "out of memory", "memoryerror")), said
    return said


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.sweep) for kind in KINDS]
)
def test_a_hostile_folder_loads_exactly_or_is_refused(folder, kind):
    change, expected = KINDS[kind]
    change(folder)
    said = outcome(folder)
    print(kind, said)
    assert expected in said


@pytest.mark.parametrize("block", [0, *(sweep(block) for block in range(1, 4))])
def test_a_damaged_configuration_loads_exactly_or_is_refused(original, folder, block):
    loaded, seeds = 0, range(20 * block, 20 * (block + 1))
    for seed in seeds:
        shutil.copytree(original, folder, dirs_exist_ok=True)
        print(f"seed {seed}: {damage(folder, random.Random(seed))}: ", end="", flush=True)
        said = outcome(folder)
        print(said)
        loaded += said == LOADS
    print(f"{loaded} of {len(seeds)} loaded, the others were refused")
