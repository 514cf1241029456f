"""`attnmesh verify`: compares every mode with float64 on random inputs."""

from __future__ import annotations

import secrets
import warnings
from functools import partial
from typing import Annotated

import torch
import typer

from attnmesh.cli import output
from attnmesh.cli.options import Device, DeviceOption, RanksOption, VirtualOption, check_device
from attnmesh.comm import Comm, launch
from attnmesh.verify import run as verify
from attnmesh.verify.mode import Outcome


def verify_command(
    ranks: RanksOption = None,
    device: DeviceOption = Device.CPU,
    virtual: VirtualOption = False,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**62, show_default="drawn at random", help="Seed of the random inputs.")
    ] = None,
) -> None:
    """Compare every mode with float64 on random inputs. Exits with 1 if a result is wrong."""
    check_device(device)
    work = partial(_verify, device=device.value, seed=seed)
    failures = launch.run(work, ranks, device=device.value, virtual=virtual)
    if any(failures):
        raise typer.Exit(1)


def _verify(comm: Comm, *, device: str, seed: int | None) -> int:
    """Run all modes; rank 0 prints the table and returns the number of failures, the other ranks return 0."""
    if seed is None:  # rank 0 draws one for all
        drawn = torch.tensor([secrets.randbelow(2**31)], device=device)
        seed = int(comm.all_gather(drawn, [(1,)] * comm.world)[0])
    # torch warns on every rank of CPUs without bf16 instructions, and computes all the same.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    outcomes: list[Outcome] = []
    total = len(verify.modes(comm, device))
    with output.Progress(quiet=comm.rank > 0) as progress:
        for outcome in verify.run(comm, device, seed):
            outcomes.append(outcome)
            progress(outcome.mode.name, len(outcomes), total)
    if comm.rank > 0:
        return 0
    rows = [[o.mode.name, o.mode.shape, o.worst, o.error, o.bound, "ok" if o.passed else "WRONG"] for o in outcomes]
    failed = sum(not o.passed for o in outcomes)
    console = output.console()
    title = f"attnmesh verify: {comm.world} ranks, {device}, seed {seed}"
    console.print(output.table(title, ["mode", "shape", "worst tensor", "error", "bound", "verdict"], rows))
    console.print(f"{len(outcomes) - failed} passed, {failed} failed")
    return failed
