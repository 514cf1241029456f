"""A driver of a Hopper GPU for Triton, on a machine without one: it writes down what it is passed.

For a process of its own: Triton reads whether to interpret kernels when it is imported.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace


def said_by_its_own_process(file: str) -> str:
    """Run a test file as a program; returns the last line that it prints."""
    tests = str(Path(__file__).resolve().parents[1])
    env = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (tests, env.get("PYTHONPATH"))))
    done = subprocess.run([sys.executable, file], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


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
