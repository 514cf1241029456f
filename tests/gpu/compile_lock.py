"""No kernel is compiled twice: processes that need the same one wait for the first, and read Triton's disk cache."""

from __future__ import annotations

import fcntl
import functools
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any


def share_compilations(locks: Path, during: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
    """Let Triton and Gluon kernels be compiled under a lock of their own in the folder `locks`, within `during()`."""
    import triton

    compiled = triton.compiler.compile

    @functools.wraps(compiled)
    def compile_once(src: Any, target: Any = None, options: dict[str, Any] | None = None, **more: Any) -> Any:
        source = src if isinstance(src, str) else src.hash()
        what = f"{source} {target} {sorted((options or {}).items())}"
        with during(), (locks / hashlib.sha256(what.encode()).hexdigest()).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, or the process is killed
            return compiled(src, target=target, options=options, **more)

    triton.compiler.compile = triton.compile = compile_once
