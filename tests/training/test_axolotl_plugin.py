"""What the plugin of axolotl refuses, and what it replaces. axolotl itself runs in tests/stacks."""

import importlib
import importlib.metadata
import sys
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

VERSIONS = {"axolotl": "0.19.0", "transformers": "5.16.1", "accelerate": "1.13.0", "trl": "1.9.0"}
OVER_RANKS = {"context_parallel_size": 2, "sample_packing": True, "attn_implementation": "sdpa"}


@pytest.fixture
def module(monkeypatch):
    """The module of the plugin, beside a base class that does nothing, and the versions that it accepts."""
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["axolotl.integrations.base"].BasePlugin = object
    monkeypatch.setattr(importlib.metadata, "version", VERSIONS.get)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # the plugin sets it where there is no GPU
    monkeypatch.delitem(sys.modules, "attnmesh.training.axolotl", raising=False)
    found = importlib.import_module("attnmesh.training.axolotl")
    yield found
    found._patches.undo()
    del sys.modules["attnmesh.training.axolotl"]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("rl", "dpo", "rl must not be set with context_parallel_size > 1, got 'dpo'"),
        ("deepspeed", "zero3.json", "deepspeed must not be set"),
        ("liger_rms_norm", True, "liger_rms_norm must not be set with context_parallel_size > 1, got True"),
        ("model_config_type", "falcon_h1", "context_parallel_size must be 1 for falcon_h1, got 2"),
        ("cut_cross_entropy", True, "cut_cross_entropy must not be set"),
        ("tensor_parallel_size", 2, "tensor_parallel_size must be 1 with context_parallel_size > 1, got 2"),
    ],
)
def test_options_that_are_not_served_are_refused_over_ranks_only(module, option, value, message):
    with pytest.raises(ValueError, match=message):
        module.AttnmeshPlugin().register({**OVER_RANKS, option: value})
    module.AttnmeshPlugin().register({**OVER_RANKS, option: value, "context_parallel_size": 1})


def test_packing_without_separate_documents_is_refused(module):
    validated = {**OVER_RANKS, "attn_implementation": None, "attn_decontaminates_packing": False}
    with pytest.raises(ValueError, match=r"attn_implementation must be one for which axolotl separates.*got None"):
        module.AttnmeshPlugin().pre_model_load(validated)


@pytest.mark.parametrize(("package", "version"), [("axolotl", "0.20.0"), ("transformers", "5.22.2")])
def test_an_unknown_version_is_refused(module, monkeypatch, package, version):
    monkeypatch.setitem(VERSIONS, package, version)
    with pytest.raises(ValueError, match=f"the version of {package} must be .*, got {version}"):
        module.AttnmeshPlugin().register(OVER_RANKS)


def test_the_file_is_validated_without_the_size_and_keeps_it(module, monkeypatch):
    from accelerate.parallelism_config import ParallelismConfig

    config = ModuleType("axolotl.cli.config")
    seen = []
    config.validate_config = lambda cfg: seen.append(dict(cfg)) or {**cfg, "validated": True}
    train = ModuleType("axolotl.train")
    train.SequenceParallelContextManager = SimpleNamespace
    monkeypatch.setitem(sys.modules, "axolotl.cli.config", config)
    monkeypatch.setitem(sys.modules, "axolotl.train", train)
    before = ParallelismConfig.build_device_mesh
    plugin = module.AttnmeshPlugin()
    plugin.register({**OVER_RANKS, "context_parallel_size": None, "sequence_parallel_degree": 4})
    validated = config.validate_config({"seed": 7, "sequence_parallel_degree": 4})
    assert validated == {"seed": 7, "validated": True, "context_parallel_size": 4}
    assert seen == [{"seed": 7}]
    with train.SequenceParallelContextManager(models=[]) as nothing:
        assert nothing is None
    plugin.post_train_unload({})
    assert train.SequenceParallelContextManager is SimpleNamespace
    assert ParallelismConfig.build_device_mesh is before
