"""The run as a page: `attnmesh generate --report`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnmesh.cli.generate.job import Job
from attnmesh.cli.generate.outcome import Outcome
from attnmesh.cli.generate.plain import Comparison
from attnmesh.report import GeneratedAnswer, command, generation_report, write_report
from attnmesh.report.data import MOST_RANKS, in_words

_PROMPT_TOKENS_SHOWN = 64  # of a prompt without a question, its last ones


def write_page(
    path: Path, job: Job, config: Any, tokenizer: Any, outcome: Outcome, checks: Sequence[Comparison]
) -> None:
    """Write the questions and answers, the figures of every rank and, with `checks`, the comparison."""
    answers = []
    for i, (prompt, answer) in enumerate(zip(job.prompts, outcome.answers, strict=True)):
        shown = job.questions[i] if job.questions else tokenizer.decode(prompt[-_PROMPT_TOKENS_SHOWN:])
        compared = (checks[i].alike, checks[i].apart) if checks else (None, None)
        answers.append(GeneratedAnswer(shown, tokenizer.decode(answer.ids), len(prompt), len(answer.ids), *compared))
    world = len(outcome.efforts)
    facts = {
        "model": _model(config), "device": job.device, "dtype": str(job.dtype).removeprefix("torch."),
        "layout": in_words(job.layout), "prefill chunk": f"{job.prefill_chunk:,} tokens", **command.facts(),
    }  # fmt: skip
    made = generation_report(
        answers, outcome.efforts, facts=facts, speculative=job.speculative,
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
    )  # fmt: skip
    write_report(path, made)


def problem_with_page(path: Path, ranks: int) -> str | None:
    """Why no page can be written there; None if it can."""
    if path.is_dir():
        return f"--report {path} is a folder: give a file"
    if not path.parent.is_dir():
        return f"--report {path}: the folder {path.parent} does not exist"
    return f"--report shows at most {MOST_RANKS} ranks" if ranks > MOST_RANKS else None


def _model(config: Any) -> str:
    """A model in words: a folder's name may be a cache's, and says nothing."""
    kind = ", ".join(config.architectures or ()) or config.model_type
    return f"{kind}, {config.num_hidden_layers} layers, {config.hidden_size} wide"
