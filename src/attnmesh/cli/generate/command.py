"""The order of events: what was asked for is checked, the model made ready, ranks answer, one process checks them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnmesh.cli import output as report
from attnmesh.cli.generate import ranks as start
from attnmesh.cli.generate.bad_input import BadInput
from attnmesh.cli.generate.document import read_document
from attnmesh.cli.generate.job import Job, check_job, check_memory
from attnmesh.cli.generate.outcome import Outcome
from attnmesh.cli.generate.page import problem_with_page, write_page
from attnmesh.cli.generate.plain import Comparison, compare
from attnmesh.cli.generate.prompts import prompts_of
from attnmesh.cli.generate.screen import Screen
from attnmesh.cli.generate.show import rank_table, summary, verdict
from attnmesh.comm import launch
from attnmesh.core.layouts import LAYOUTS
from attnmesh.generation.sampling import Sampling
from attnmesh.integrations.load import config_and_tokenizer, model_folder, needs_conversion
from attnmesh.integrations.problem import ModelError
from attnmesh.integrations.transformers_attention import check_config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STRETCH = {"cpu": 512, "cuda": 8192}
"""Tokens a rank that are read in one pass: enough to keep its device busy."""


@dataclass(frozen=True)
class Asked:
    """What was asked for, as the command line has it."""

    model: Path | None
    ranks: int | None
    device: str
    dtype: str
    prompt: str | None
    prompt_file: Path | None
    questions: Sequence[str]
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    speculative: bool
    check: bool
    layout: str
    prefill_chunk: int | None
    virtual: bool
    timeout: float
    report: Path | None = None


def generate(asked: Asked) -> bool:
    """Do it and show it; whether all is well, which it is not where one process says something else."""
    world, copies = _places(asked)
    sampling = _sampling(asked)
    problem = problem_with_page(asked.report, world) if asked.report is not None else None
    if problem is not None:
        raise BadInput(problem)
    document = read_document(asked.prompt, asked.prompt_file)
    screen = Screen(seen=int(os.environ.get("RANK", "0")) == 0)
    folder, config, tokenizer = _model(asked, screen)
    job = Job(
        folder, asked.device, DTYPES[asked.dtype], tuple(map(tuple, prompts_of(tokenizer, document, asked.questions))),
        tuple(asked.questions), asked.max_new_tokens, sampling, asked.speculative, LAYOUTS[asked.layout],
        asked.prefill_chunk or world * STRETCH[asked.device], asked.check,
    )  # fmt: skip
    check_job(job, config, world)
    check_memory(job, config, world, copies)
    screen.note(f"A prompt of {len(job.prompts[0]):,} tokens goes to {world} ranks, {_kind(asked)} on {asked.device}.")
    outcome = _run(asked, job, world)
    if outcome is None:  # another rank of torchrun's shows it
        return True
    console = report.console()
    console.print()
    console.print(rank_table(job, outcome))
    for line in summary(job, outcome):
        console.print(line, highlight=False, soft_wrap=True)
    checks = _checks(job, outcome, tokenizer, screen) if asked.check else []
    if asked.report is not None:
        with screen.busy("writing the report"):
            write_page(asked.report, job, config, tokenizer, outcome, checks)
        console.print(f"Report: {asked.report}", soft_wrap=True)
    return all(one.equal for one in checks)


def _places(asked: Asked) -> tuple[int, int]:
    """How many ranks there are, and how many of them have a copy of the model on the same device."""
    if launch.under_torchrun():
        if asked.virtual or asked.ranks is not None:
            raise BadInput("torchrun says how many ranks there are: leave out --ranks and --virtual")
        world = int(os.environ["WORLD_SIZE"])
        here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    else:
        world = here = asked.ranks or 4
    if asked.virtual:
        return world, 1  # threads share one
    return world, -(-here // torch.cuda.device_count()) if asked.device == "cuda" else here


def _sampling(asked: Asked) -> Sampling:
    if asked.speculative and asked.temperature:
        raise BadInput(f"--speculative verifies the likeliest tokens: leave out --temperature {asked.temperature}")
    if asked.check and asked.temperature:
        raise BadInput(f"--check compares the likeliest tokens: leave out --temperature {asked.temperature}")
    if asked.check and DTYPES[asked.dtype] != torch.float32:
        raise BadInput(f"--check compares token by token, which {asked.dtype} is too coarse for: leave out --dtype")
    if not all(question.strip() for question in asked.questions):
        raise BadInput("a --question is empty")
    try:
        return Sampling(asked.temperature, asked.top_p, asked.seed)
    except ValueError as error:
        raise BadInput(str(error)) from None


def _model(asked: Asked, screen: Screen) -> tuple[Path, Any, Any]:
    """The folder that ranks load from, the model's configuration and its tokenizer."""
    with screen.busy("looking at the model"):
        convert = needs_conversion(asked.model)
    if convert:
        screen.note("The model is a GGUF file: it is converted once and kept, which takes a while.")
    with screen.busy("converting the model" if convert else "looking at the model"):
        folder = model_folder(asked.model)
        config, tokenizer = config_and_tokenizer(folder)
        try:
            check_config(config, ", ".join(config.architectures or ()) or str(folder))
        except ValueError as error:
            raise ModelError(f"{folder}: {error}") from None
    return folder, config, tokenizer


def _kind(asked: Asked) -> str:
    return "torchrun's" if launch.under_torchrun() else "threads" if asked.virtual else "processes"


def _run(asked: Asked, job: Job, world: int) -> Outcome | None:
    try:
        if launch.under_torchrun():
            return start.joined(job, asked.timeout)
        return start.threads(world, job) if asked.virtual else start.processes(world, job, asked.timeout)
    except BaseException:
        report.console().show_cursor()  # a bar hides it, and a rank that is ended does not bring it back
        raise


def _checks(job: Job, outcome: Outcome, tokenizer: Any, screen: Screen) -> list[Comparison]:
    """Ask one process, and show what it says to each answer."""
    console, comparisons, checks = report.console(), compare(job, outcome), []
    for number in range(1, len(job.prompts) + 1):
        with screen.busy(f"one process answers alone, {number} of {len(job.prompts)}"):
            one = next(comparisons)
        line = verdict(number, one, *_where_different(one, tokenizer))
        console.print(line, highlight=False, markup=False, soft_wrap=True)
        checks.append(one)
    return checks


def _where_different(one: Comparison, tokenizer: Any) -> tuple[str, str]:
    """What the two answers say at the first token that differs; nothing where one has ended."""
    at = slice(one.alike, one.alike + 1)
    return tokenizer.decode(one.ours[at]), tokenizer.decode(one.theirs[at])
