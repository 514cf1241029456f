"""One rank's part of a job: it loads the model, and reads and answers with the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnmesh.cli.generate.job import Job
from attnmesh.cli.generate.outcome import Answer, Outcome, everybodys
from attnmesh.cli.generate.screen import Screen
from attnmesh.comm import Comm
from attnmesh.generation.generator import GenerationStats, Generator
from attnmesh.integrations.load import load_model


def answer(comm: Comm, job: Job, loaded: tuple[Any, Any] | None = None) -> Outcome:
    """Answer all prompts; rank 0 shows the answers as they come. `loaded` is the model, where ranks share one."""
    screen = Screen(seen=comm.rank == 0)
    with screen.busy(f"{comm.world} ranks load the model"):
        model, tokenizer = loaded or load_model(job.folder, device=_own_device(job.device), dtype=job.dtype)
        comm.barrier()
    kept: list[Tensor] = []
    generator = Generator(
        model,
        tokenizer,
        comm,
        tokens=job.device_memory,
        layout=job.layout,
        prefill_chunk=job.prefill_chunk,
        on_read=screen.read,
        on_logits=(lambda _, logits: kept.append(logits.float().cpu())) if _keeps(comm, job) else None,
    )
    answers = []
    for number, prompt in enumerate(job.prompts):
        if job.questions:
            screen.ask(job.questions[number])
        screen.read(0, len(prompt))
        before = _figures(generator.effort)
        kept.clear()
        ids = []
        for token in generator.generate(
            [prompt], max_new_tokens=job.max_new_tokens, sampling=job.sampling, speculative=job.speculative
        ):
            ids.append(token.id)
            screen.say(token.text)
        screen.note()
        screen.note(_in_words(len(prompt), before, _figures(generator.effort)))
        answers.append(Answer(ids, torch.stack(kept) if kept else None))
    return Outcome(answers, everybodys(comm, generator.effort, generator.reader.device))


def _own_device(device: str) -> str:
    """With its number: each rank has a device of its own where there are enough."""
    return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device


def _keeps(comm: Comm, job: Job) -> bool:
    return job.keep_logits and comm.rank == 0


def _figures(effort: GenerationStats) -> tuple[int, int, float, float]:
    return effort.reused, effort.generated, effort.prefill_seconds, effort.decode_seconds


def _in_words(prompt: int, before: tuple[int, int, float, float], after: tuple[int, int, float, float]) -> str:
    """What an answer took. Its first token comes with reading, so it is none of those that decoding is timed by."""
    reused, new, reading, decoding = (b - a for a, b in zip(before, after, strict=True))
    again = f", {reused:,} of them known from before" if reused else ""
    speed = f" ({(new - 1) / decoding:.1f} a second)" if new > 1 else ""
    return f"prompt of {prompt:,} tokens{again}, read in {reading:.1f} s; {new} new tokens{speed}"
