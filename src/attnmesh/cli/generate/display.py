"""What the command prints: progress, answers, statistics per rank, verdicts, and the HTML report."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from attnmesh.cli import output
from attnmesh.cli.generate.job import Comparison, Job, Result
from attnmesh.cli.report import run_facts
from attnmesh.generation.stats import GenerationStats
from attnmesh.report import GeneratedAnswer, generation_report, write_report
from attnmesh.report.data import in_words
from attnmesh.utils.text import counted

_MIB = 2**20
_PROMPT_TOKENS_SHOWN = 64  # the last tokens of a prompt without a question


class Display:
    """Prints on rank 0 and is silent on the other ranks. Progress bars appear on a terminal only."""

    def __init__(self, *, visible: bool) -> None:
        self._console = output.console(quiet=not visible)
        self._visible = visible
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    @contextmanager
    def status(self, message: str) -> Iterator[None]:
        """Show that something takes a while."""
        with output.status(message, quiet=not self._visible):
            yield

    def question(self, question: str) -> None:
        """Print a question, before it is answered."""
        self._console.print(f"\n> {question}", style="bold", highlight=False)

    def prefill(self, done: int, total: int) -> None:
        """Show how many tokens of a prompt are processed; the bar disappears when all are."""
        if not self._console.is_terminal or not self._visible:
            return
        if self._bar is None:
            columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,} of {task.total:,}")
            self._bar = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
            self._task = self._bar.add_task("prefill", total=total)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=done)
        if done == total:
            self._bar.stop()
            self._bar = None

    def answer(self, text: str) -> None:
        """Print the next piece of an answer."""
        self._console.stream(text)

    def note(self, text: str = "") -> None:
        """Print a line about the run."""
        self._console.print(text, style="dim", highlight=False, soft_wrap=True)


def rank_table(job: Job, result: Result) -> Table:
    """One row per rank."""
    rows = [_row(job, stats) for stats in result.stats]
    return output.table(f"attnmesh generate: {counted(len(rows), 'rank')}, {job.device}", _columns(job), rows)


def summary(job: Job, result: Result) -> list[str]:
    """Sentences about the memory, the reuse of the KV cache and the drafts."""
    first, most = result.stats[0], max(stats.kv_bytes for stats in result.stats)
    lines = [
        f"KV cache: at most {most / _MIB:.1f} MiB per rank; a single device would need "
        f"{first.kv_bytes_unsharded / _MIB:.1f} MiB."
    ]
    if len(job.prompts) > 1:
        computed, reused = first.prefill_tokens, first.reused_tokens
        lines.append(
            f"Prompts: {computed + reused:,} tokens, {computed:,} computed and {reused:,} reused from the KV cache of "
            "an earlier question."
        )
    if job.speculative:
        lines.append(
            f"Drafts: {first.accepted_tokens} of {first.draft_tokens} tokens accepted; "
            f"{first.generated_tokens} tokens in {first.decode_steps + len(job.prompts)} forward passes."
        )
    return lines


def verdict(number: int, one: Comparison, tokenizer: Any) -> str:
    """Whether a single process generates the same tokens, and otherwise where the two differ first."""
    first = slice(one.equal_tokens, one.equal_tokens + 1)
    ours, expected = tokenizer.decode(one.ours[first]), tokenizer.decode(one.expected[first])
    compared = (
        f"all {len(one.ours)} tokens equal those of a single process"
        if one.equal
        else f"DIFFERENT from a single process at token {one.equal_tokens + 1}: {ours!r} instead of {expected!r}"
    )
    return f"Check of answer {number}: {compared}; logits differ by at most {one.logit_error:.1e} of the largest."


def write_generation_report(
    path: Path, job: Job, config: Any, tokenizer: Any, result: Result, checks: Sequence[Comparison]
) -> None:
    """Write an HTML report: questions and answers, statistics of every rank and, with `checks`, the comparison."""
    answers = []
    for i, (prompt, answer) in enumerate(zip(job.prompts, result.answers, strict=True)):
        shown = job.questions[i] if job.questions else tokenizer.decode(prompt[-_PROMPT_TOKENS_SHOWN:])
        compared = (checks[i].equal_tokens, checks[i].logit_error) if checks else (None, None)
        answers.append(GeneratedAnswer(shown, tokenizer.decode(answer.ids), len(prompt), len(answer.ids), *compared))
    facts = {
        "model": _describe_model(config),
        "device": job.device,
        "dtype": str(job.dtype).removeprefix("torch."),
        "KV cache": job.storage,
        "layout": in_words(job.layout),
        "prefill chunk": f"{job.prefill_chunk:,} tokens",
        **run_facts(),
    }
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", len(result.stats)))
    report = generation_report(
        answers, result.stats, facts=facts, speculative=job.speculative, ranks_per_node=ranks_per_node
    )
    write_report(path, report)


def _columns(job: Job) -> list[str]:
    always = ["rank", "tokens held", "KV MiB", "sent MiB", "prefill s", "decode s", "tokens/s"]
    return [*always, "steps", "drafted", "accepted"] if job.speculative else always


def _row(job: Job, stats: GenerationStats) -> list[object]:
    decoded = stats.generated_tokens - len(job.prompts)  # prefill computes the first token of an answer
    speed = decoded / stats.decode_seconds if stats.decode_seconds else 0.0
    row: list[object] = [
        stats.rank,
        stats.cached_tokens,
        stats.kv_bytes / _MIB,
        stats.bytes_sent / _MIB,
        stats.prefill_seconds,
        stats.decode_seconds,
        speed,
    ]
    return [*row, stats.decode_steps, stats.draft_tokens, stats.accepted_tokens] if job.speculative else row


def _describe_model(config: Any) -> str:
    """The architecture, because the folder may be a cache entry whose name means nothing."""
    kind = ", ".join(config.architectures or ()) or config.model_type
    return f"{kind}, {config.num_hidden_layers} layers, hidden size {config.hidden_size}"
