"""Changes to other packages that are undone exactly, also to modules that are imported later."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MISSING = object()


class Patches:
    """Attributes that were replaced, and what they were."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []
        self._finder = _Finder()

    def replace(self, owner: type, name: str, method: Callable[..., Any]) -> None:
        """Replace a method of a class by `method(original, self, ...)`."""
        original = getattr(owner, name)
        self._replaced.append((owner, name, owner.__dict__.get(name, _MISSING)))

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return method(original, *args, **kwargs)

        setattr(owner, name, replaced)

    def when_imported(self, module: str, apply: Callable[[ModuleType], None]) -> None:
        """Call `apply(module)` now if the module is imported, else after its import."""
        if module in sys.modules:
            apply(sys.modules[module])
            return
        self._finder.pending[module] = apply
        if self._finder not in sys.meta_path:
            sys.meta_path.insert(0, self._finder)

    def undo(self) -> None:
        """Restore all attributes; modules that are imported later stay as they are."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._finder.pending.clear()
        while self._replaced:
            owner, name, own = self._replaced.pop()
            if own is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


class _Finder(MetaPathFinder):
    """Finds the pending modules as Python would, and calls their function after they are executed."""

    def __init__(self) -> None:
        self.pending: dict[str, Callable[[ModuleType], None]] = {}
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a pending module; None for others, which other finders find."""
        if fullname not in self.pending or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_apply(module: ModuleType) -> None:
                execute(module)
                apply = self.pending.pop(fullname, None)
                if apply is not None:
                    apply(module)

            spec.loader.exec_module = execute_and_apply  # type: ignore[method-assign]
        return spec
