"""Ranks for a job: processes, threads of this process, or those that torchrun started."""

from __future__ import annotations

import logging
import sys
import tempfile
import threading
from pathlib import Path

import torch
from torch.multiprocessing.spawn import ProcessExitedException

from attnmesh.cli.generate.answering import answer
from attnmesh.cli.generate.bad_input import BadInput
from attnmesh.cli.generate.job import Job
from attnmesh.cli.generate.outcome import Outcome
from attnmesh.comm import Comm, CommError, launch, run_virtual
from attnmesh.core.optional import require
from attnmesh.integrations.load import load_model
from attnmesh.integrations.problem import ModelError

_BAD_INPUT = 2
_LOST = 1
_FOR_EVER = 1e8  # seconds: three years


class RanksLost(RuntimeError):  # noqa: N818 - said of ranks, as the others say it
    """A rank died or gave up, and so did the others."""


def processes(ranks: int, job: Job, timeout: float) -> Outcome:
    """Processes of our own. One that dies or gives up ends the others."""
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # what it warns of, RanksLost says
    with tempfile.TemporaryDirectory() as folder:
        try:
            launch.start(ranks, job.device, _process, job, Path(folder), timeout=timeout)
        except ProcessExitedException as ended:
            raise _explained(ended, ranks, Path(folder)) from None
        outcome: Outcome = torch.load(Path(folder) / "outcome", weights_only=False)  # our own, of a moment ago
        return outcome


def threads(ranks: int, job: Job) -> Outcome:
    """Virtual ranks, which share one model. None of them can die alone, so nothing is timed."""
    loaded = load_model(job.folder, device=job.device, dtype=job.dtype)
    try:
        return run_virtual(ranks, lambda comm: answer(comm, job, loaded), timeout=_FOR_EVER)[0]
    except CommError as error:
        raise RanksLost(str(error)) from error


def joined(job: Job, timeout: float) -> Outcome | None:
    """This process as one of torchrun's ranks; only rank 0 has the outcome."""
    return launch.join(job.device, _one_of_torchruns, job, timeout=timeout)


def _one_of_torchruns(comm: Comm, job: Job) -> Outcome | None:
    try:
        outcome = answer(comm, job)
    except CommError as error:
        raise RanksLost(f"rank {comm.rank} of {comm.world} gave up: {error}") from error
    except torch.OutOfMemoryError as error:
        raise BadInput(_does_not_fit(comm, error)) from error
    return outcome if comm.rank == 0 else None


def _process(comm: Comm, job: Job, folder: Path) -> None:
    """What went wrong is left in the folder, for the parent to say once."""
    # Transformers' bars, which nobody sees, have a lock among processes: Python complains of it if the rank is killed.
    require("tqdm", extra="hf").tqdm.set_lock(threading.RLock())
    try:
        outcome = answer(comm, job)
    except (ModelError, torch.OutOfMemoryError) as error:
        text = str(error) if isinstance(error, ModelError) else _does_not_fit(comm, error)
        _problem_of(comm.rank, folder).write_text(text)
        sys.exit(_BAD_INPUT)
    except CommError as error:
        _problem_of(comm.rank, folder).write_text(f"rank {comm.rank} of {comm.world} gave up: {error}")
        sys.exit(_LOST)
    if comm.rank == 0:
        torch.save(outcome, folder / "outcome")


def _explained(ended: ProcessExitedException, ranks: int, folder: Path) -> Exception:
    rank, problem = ended.error_index, _problem_of(ended.error_index, folder)
    said = problem.read_text() if problem.exists() else None
    if ended.exit_code == _BAD_INPUT and said is not None:
        return BadInput(said)
    if said is None:
        how = f"was killed ({ended.signal_name})" if ended.signal_name else f"ended with exit code {ended.exit_code}"
        said = f"rank {rank} of {ranks} {how}"
    return RanksLost(f"{said}; the other ranks were ended")


def _problem_of(rank: int, folder: Path) -> Path:
    return folder / f"problem of rank {rank}"


def _does_not_fit(comm: Comm, error: torch.OutOfMemoryError) -> str:
    return f"rank {comm.rank} of {comm.world} ran out of memory: {str(error).splitlines()[0]}"
