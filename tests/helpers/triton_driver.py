"""A driver of a Hopper GPU for Triton, on a machine without one: it writes down what it is passed.

For a process of its own: Triton reads whether to interpret kernels when it is imported.
"""

import io
import os
import runpy
import traceback
from contextlib import redirect_stdout
from multiprocessing.connection import Connection
from types import SimpleNamespace

from helpers.processes import Raised, _context, _result


def said_by_its_own_process(file: str) -> str:
    """Run a test file as a program, in a process that has imported torch; returns the last line that it prints."""
    ours, theirs = _context.Pipe(duplex=False)
    process = _context.Process(target=_run, args=(theirs, file), daemon=True)
    process.start()
    theirs.close()
    said = _result(ours, process)
    process.join()
    assert isinstance(said, str), getattr(said, "traceback", said)
    return said.splitlines()[-1]


def _run(pipe: Connection, file: str) -> None:
    os.environ.pop("TRITON_INTERPRET", None)  # Triton reads it when it is imported
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            runpy.run_path(file, run_name="__main__")
        pipe.send(said.getvalue())
    except BaseException as error:
        pipe.send(Raised(type(error).__name__, str(error), traceback.format_exc()))


def record_launches() -> tuple[list, list]:
    """Make it the active driver; returns what launches pass to it from now on, and its stream, to be changed."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    passed, stream = [], [100]

    def encode(*args):
        return ("map", args)

    def launch(*args):
        passed.append(args)

    utils = SimpleNamespace(
        load_binary=lambda *_: (1, 2, 32, 0, 1024), get_device_properties=lambda _: {"max_shared_mem": 232448},
        fill_tma_descriptor=encode, fill_tma_descriptor_tiled=encode, launch=launch,
        build_signature_metadata=lambda _: b"",
    )  # fmt: skip
    # Triton 3.6 builds a module for every signature, Triton 3.7 has one.
    nvidia.compile_module_from_src = lambda **_: SimpleNamespace(launch=launch)
    nvidia.library_dirs = list
    for name in ("ARG_CONSTEXPR", "ARG_KERNEL", "ARG_TUPLE"):
        setattr(nvidia, name, name)
    nvidia.PyKernelArg = lambda **given: tuple(given.items())
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: -1,
            get_current_stream=lambda _: stream[0],
            launcher_cls=nvidia.CudaLauncher,
            utils=utils,
        )
    )
    return passed, stream


def skip_compilation() -> None:
    """Let launches reach the driver with a kernel that was not compiled, in a moment instead of seconds."""
    import triton.compiler

    triton.compiler.compile = _not_compiled


def _not_compiled(src, target=None, options=None, **_):
    from triton.runtime import driver

    descriptors = [kind for kind in src.signature.values() if str(kind).startswith("tensordesc")]
    meta = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 64, 64], "fp4_padded": False}
    scratch = {f"{kind}_scratch_{what}": 0 for kind in ("global", "profile") for what in ("size", "align")}
    metadata = SimpleNamespace(
        tensordesc_meta=[meta] * len(descriptors), num_ctas=1, launch_cooperative_grid=False,
        launch_pdl=options["launch_pdl"], **scratch,
    )  # fmt: skip
    return SimpleNamespace(
        run=driver.active.launcher_cls(src, metadata), function=1, packed_metadata=(4, 1, 0),
        launch_metadata=lambda *_: None, src=src, metadata=metadata,
    )  # fmt: skip
