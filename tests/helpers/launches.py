"""The host's side of launches on a machine without a GPU: kernels are not compiled, and a driver writes down its calls.

For a process of its own: Triton reads whether to interpret kernels when it is imported, and has one driver.
"""

import sys
from collections.abc import Callable
from types import SimpleNamespace

import attnmesh


def record_launches() -> list:
    """Let Triton believe in a Hopper GPU, device -1, on which nothing runs. Returns what the driver is passed."""
    import triton.compiler
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    passed: list = []

    def launch(*args):
        passed.append(args)

    def encode(*args):
        return ("map", args)

    utils = SimpleNamespace(
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
            get_current_stream=lambda _: 7,
            launcher_cls=nvidia.CudaLauncher,
            utils=utils,
        )
    )
    triton.compiler.compile = _not_compiled
    return passed


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


def calls_of(run: Callable[[], object]) -> int:
    """The functions that a repeat of `run` calls from this package: its own, and those in C and in torch."""
    for _ in range(3):
        run()
    package, count = attnmesh.__path__[0], 0

    def watch(frame, event, _):
        nonlocal count
        caller = frame.f_back if event == "call" else frame if event == "c_call" else None
        inside = caller is not None and caller.f_code.co_filename.startswith(package)
        count += inside or (event == "call" and frame.f_code.co_filename.startswith(package))

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count
