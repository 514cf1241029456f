"""`attnmesh verify`: compares every mode with float64 on random inputs."""

from __future__ import annotations

import re
import secrets
import time
import warnings
from functools import partial
from typing import Annotated

import torch
import typer

from attnmesh import launch
from attnmesh.cli import options, output
from attnmesh.comm import Comm
from attnmesh.utils.text import counted
from attnmesh.utils.validation import MAX_TIMEOUT, check_number, check_timeout, shown
from attnmesh.verify import run as verify
from attnmesh.verify.mode import Outcome


def verify_command(
    ranks: options.RanksOption = None,
    device: options.DeviceOption = options.Device.CPU,
    virtual: options.VirtualOption = False,
    share_gpu: options.ShareGpuOption = False,
    only: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Only modes whose name and shape match this regular expression."),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(min=0, max=MAX_TIMEOUT, metavar="SECONDS", help="Begin no further mode after so many seconds."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**62, show_default="drawn at random", help="Seed of the random inputs.")
    ] = None,
    timeout: options.TimeoutOption = launch.TIMEOUT,
) -> None:
    """Compare every mode with float64 on random inputs. Exits with 1 if a result is wrong."""
    options.check_device(device)
    options.check_share_gpu(share_gpu, device.value, virtual)
    check_timeout(timeout)
    if time_limit is not None:
        check_number("--time-limit", time_limit, least=0)
    if only is not None:
        _check_pattern(only)
    work = partial(_verify, device=device.value, only=only, time_limit=time_limit, seed=seed)
    failures = launch.run(work, ranks, device=device.value, virtual=virtual, share_gpu=share_gpu, timeout=timeout)
    if any(failures):
        raise typer.Exit(1)


def _check_pattern(only: str) -> None:
    try:
        re.compile(only)
    except (re.error, OverflowError, RecursionError) as error:
        reason = f"must be a regular expression, got {shown(only)}: {error}"
        raise typer.BadParameter(reason, param_hint="--only") from None


def _verify(comm: Comm, *, device: str, only: str | None, time_limit: float | None, seed: int | None) -> int:
    """Run the modes; rank 0 prints the table and returns the number of failures, the other ranks return 0."""
    chosen = verify.select(comm, device, only)
    if seed is None:  # rank 0 draws one for all
        drawn = torch.tensor([secrets.randbelow(2**31)], device=device)
        seed = int(comm.all_gather(drawn, [(1,)] * comm.world)[0])
    # torch warns on every rank of CPUs without bf16 instructions, and computes all the same.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    outcomes: list[Outcome] = []
    begin = time.monotonic()
    with output.Progress(quiet=comm.rank > 0, every_step=True) as progress:
        for outcome in verify.run(comm, device, seed, chosen, time_limit):
            outcomes.append(outcome)
            progress(_line(outcome), len(outcomes), len(chosen))
    if comm.rank > 0:
        return 0
    rows = [[o.mode.name, o.mode.shape, o.worst, o.error, o.bound, _verdict(o)] for o in outcomes]
    failed = sum(not o.passed for o in outcomes)
    console = output.console()
    title = f"attnmesh verify: {counted(comm.world, 'rank')}, {device}, seed {seed}"
    console.print(output.table(title, ["mode", "shape", "worst tensor", "error", "bound", "verdict"], rows))
    rest = len(chosen) - len(outcomes)
    stopped = f", {rest} not run (--time-limit {time_limit:g}, {time.monotonic() - begin:.0f} s)" if rest else ""
    console.print(f"{len(outcomes) - failed} passed, {failed} failed{stopped}")
    return failed


def _line(outcome: Outcome) -> str:
    mode = outcome.mode
    return f"{_verdict(outcome)}: {mode.name}, {mode.shape}: {outcome.worst} {outcome.error:.1e} of {outcome.bound:.1e}"


def _verdict(outcome: Outcome) -> str:
    return "ok" if outcome.passed else "WRONG"
