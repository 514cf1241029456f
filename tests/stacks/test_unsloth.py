"""Models that Unsloth has patched are refused by name.

Unsloth cannot be imported without a GPU. The names of what it replaces, and with what, are read from its code.
"""

import ast
import importlib.util
from pathlib import Path

import pytest

import attnmesh as am
from attnmesh.integrations.transformers_models import check_model
from helpers.training import training_model

pytest.importorskip("transformers")
if importlib.util.find_spec("unsloth") is None:
    pytest.skip("unsloth is not installed", allow_module_level=True)

MODELS = ("llama", "mistral", "qwen3")


def replaced(kind):
    """The classes whose forward Unsloth's module of a kind of model replaces, with the names of its functions."""
    code = Path(importlib.util.find_spec("unsloth").submodule_search_locations[0], "models", f"{kind}.py").read_text()
    return {
        node.targets[0].value.id: ast.unparse(node.value)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)
        and node.targets[0].attr == "forward" and isinstance(node.targets[0].value, ast.Name)
    }  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_every_class_that_unsloth_patches_is_refused_by_name(kind, monkeypatch):
    am.register_attention()
    model = training_model(kind)
    model.set_attn_implementation("attnmesh")
    check_model(model)
    classes = {type(module).__name__: type(module) for module in model.modules()}
    patched = {name: function for name, function in replaced(kind).items() if name in classes}
    assert any(name.endswith("Attention") for name in patched)  # the part that matters
    for name, function in patched.items():
        with monkeypatch.context() as patch:

            def forward(self, *args, **kwargs):
                raise AssertionError("called")

            forward.__module__, forward.__name__ = f"unsloth.models.{kind}", function.split("(")[0]
            patch.setattr(classes[name], "forward", forward)
            with pytest.raises(ValueError, match=f"patched by Unsloth.*unsloth.models.{kind}.{forward.__name__}"):
                check_model(model)
