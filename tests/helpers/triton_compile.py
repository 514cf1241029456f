"""Compile kernels for a GPU on a machine without one.

A process of its own runs the launchers with a driver that reports that GPU, stops each launch after its compilation,
and reads the machine code. (Of its own, because Triton interprets kernels in the tests' process. A fork of one that has
imported torch, but not Triton: that takes half a second, not three.)
"""

import importlib
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from helpers.carried_values import dropped_bounds, uncarried_in
from helpers.processes import Died, Raised, _context, _result

# Compute capability (Ampere, Ada, Hopper, Blackwell) -> bytes of shared memory of one program.
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TENSOR_MEMORY = 512  # columns of one program on sm_100


def compiled_for_hopper(test_file: str, cases: list[tuple], processes: int = 2) -> list[dict]:
    """`compiled` for sm_90."""
    return compiled(test_file, {90: cases}, processes)


def compiled(test_file: str, cases: dict[int, list[tuple]], processes: int = 2) -> list[dict]:
    """Run `launch(*case)` of a test file for every case; returns the resources of each kernel that was launched.

    `cases` are those of each compute capability. Compiling takes all the time, and test machines have two cores: more
    processes do not help.
    """
    every = [(target, case) for target, of_target in cases.items() for case in of_target]
    shares = [every[i::processes] for i in range(min(processes, len(every)))]
    runs = []
    for share in shares:
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(target=_compile, args=(theirs, test_file, share), daemon=True)
        process.start()
        theirs.close()
        runs.append((ours, process))
    kernels = []
    for ours, process in runs:
        found = _result(ours, process)
        process.join()
        assert not isinstance(found, Raised | Died), getattr(found, "traceback", found)
        kernels += found
    launched = [(kernel["target"], kernel["case"]) for kernel in kernels]
    assert all(one in launched for one in every), "a case launched nothing"
    dropped = {(kernel["kernel"], each) for kernel in kernels for each in kernel["dropped"]}
    assert not dropped, f"loops carry values that Triton drops: {sorted(dropped)}"
    left = {kernel["kernel"] for kernel in kernels if kernel["invalidated"] < kernel["barriers"]}
    assert not left, f"kernels end with valid barriers, whose memory Triton may use for something else: {sorted(left)}"
    return kernels


def tolerated_spills(kernel: dict) -> int:
    """Return the bytes that a kernel may spill.

    Far from 255 registers the assembler may still push out a few values, to fit one more program on a processor:
    that costs nothing. At the limit one address (8 bytes) is tolerated; more means the tiles are too large.
    """
    return 32 if kernel["registers"] <= 168 else 8


def assert_fit(kernels: list[dict], tolerated: Callable[[dict], int] = tolerated_spills) -> None:
    misfits = [kernel for kernel in kernels if kernel["spilled"] > tolerated(kernel) or not fits(kernel)]
    assert not misfits, "\n".join(map(str, misfits))


def fits(kernel: dict) -> bool:
    return kernel["shared"] <= SHARED_MEMORY[kernel["target"]] and kernel["tensor memory"] <= TENSOR_MEMORY


def count(kernel: dict, pattern: str) -> int:
    """Return how many machine instructions start with the pattern."""
    return sum(n for name, n in kernel["instructions"].items() if re.match(pattern, name))


def _compile(pipe: Connection, test_file: str, cases: list[tuple[int, tuple]]) -> None:
    os.environ.pop("TRITON_INTERPRET", None)  # Triton reads it when it is imported
    try:
        pipe.send(compile_launches(test_file, cases))
    except Exception as error:
        pipe.send(Raised(type(error).__name__, str(error), traceback.format_exc()))


def compile_launches(test_file: str, cases: list[tuple[int, tuple]]) -> list[dict]:
    """The resources of every kernel; runs in a process of its own."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from attnmesh.ops import launch

    class Driver:
        """A GPU driver, as far as compiling needs one."""

        get_current_target = staticmethod(lambda: GPUTarget("cuda", target, 32))
        get_current_device = staticmethod(lambda: target)  # Triton keeps the kernels of each device
        get_current_stream = staticmethod(lambda device: 0)

    def compile_only(kernel, *args, warmup, **options):
        binary = run(kernel, *args, warmup=True, **options)
        dropped = uncarried_in(binary, GPUTarget("cuda", target, 32), options) + dropped_bounds(binary.asm["source"])
        report = {"case": case, "kernel": kernel.fn.__name__, "target": target, "dropped": dropped}
        reports.append(report | resources(binary, disassemble=kernel.is_gluon()))

    reports: list[dict] = []
    driver.set_active(Driver())
    run, JITFunction.run = JITFunction.run, compile_only
    sys.path.insert(0, str(Path(test_file).parent))
    launcher = importlib.import_module(Path(test_file).stem)
    for target, case in cases:
        launch.WITHOUT_GPU = launch.GPU(target, SHARED_MEMORY[target])
        launcher.launch(*case)
    return reports


def resources(binary, *, disassemble: bool) -> dict:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = tool("cuobjdump", "--dump-resource-usage", file.name)
        code = tool("nvdisasm", "-c", "-ndf", file.name) if disassemble else ""  # half as long as compiling
    registers, stack, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage).groups())
    return {
        "registers": registers,
        "spilled": stack + local,  # kernels have no arrays or calls of their own: what lies there was spilled
        "shared": binary.metadata.shared,
        "tensor memory": binary.metadata.tmem_size or 0,
        "warps": binary.metadata.num_warps,
        "wgmma": "wgmma.mma_async" in binary.asm["ptx"],
        "barriers": binary.asm["ptx"].count("mbarrier.init"),
        "invalidated": binary.asm["ptx"].count("mbarrier.inval"),
        "overwritten": overwritten_operands(code),
        "instructions": Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([\w.]+)", code, re.MULTILINE)),
    }


def overwritten_operands(code: str) -> list[str]:
    """The registers that products of a loop read as they were before it, and that the loop overwrites.

    ptxas 12.8 may do so with an operand that has one use in the loop: every turn but the first is then wrong.
    """
    lines = code.splitlines()
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\.L_x_\d+:", line)}
    found = set()
    for end, line in enumerate(lines):
        # Without a condition: back from where a barrier is waited for, or to the next function of a warp.
        begin = labels.get("".join(re.findall(r"@!?U?P\d+ BRA .*`\((\.L_x_\d+)\)", line)), end)
        written: set[int] = set()
        before: set[int] = set()  # operands that come from before the loop
        for instruction in lines[begin:end]:
            if product := re.search(r"HGMMA\S+ R\d+, R(\d+), gdesc", instruction):
                before |= set(range(int(product[1]), int(product[1]) + 4)) - written
            elif write := re.search(r"\*/\s+(?:@!?U?P\d+\s+)?(?!ST|RED|ATOM)([\w.]+) R(\d+)", instruction):
                size = {"LDS.64": 2, "LDS.128": 4, "LDSM.16.M88.4": 4, "LDSM.16.MT88.4": 4}.get(write[1], 1)
                written |= set(range(int(write[2]), int(write[2]) + size))
        found |= {f"R{register}" for register in before & written}
    return sorted(found)


def tool(name: str, *args: str) -> str:
    import triton

    return subprocess.check_output([Path(triton.__file__).parent / "backends/nvidia/bin" / name, *args], text=True)
