"""What a job took and came to, for people: a line a rank, what was saved, and whether one process says the same."""

from __future__ import annotations

from rich.table import Table

from attnmesh.cli import output as report
from attnmesh.cli.generate.job import Job
from attnmesh.cli.generate.outcome import Outcome
from attnmesh.cli.generate.plain import Comparison
from attnmesh.generation.generator import GenerationStats

_MIB = 2**20


def rank_table(job: Job, outcome: Outcome) -> Table:
    """A line a rank."""
    rows = [row(job, effort) for effort in outcome.efforts]
    return report.table(f"attnmesh generate: {len(rows)} ranks, {job.device}", columns(job), rows)


def columns(job: Job) -> list[str]:
    """What is said of a rank."""
    always = ["rank", "tokens held", "KV MiB", "sent MiB", "prefill s", "decode s", "tokens/s"]
    return [*always, "steps", "drafted", "accepted"] if job.speculative else always


def row(job: Job, effort: GenerationStats) -> list[object]:
    """A rank's figures, column by column."""
    # The first token of an answer comes with reading.
    decoded = effort.generated_tokens - len(job.prompts)
    speed = decoded / effort.decode_seconds if effort.decode_seconds else 0.0
    figures: list[object] = [
        effort.rank, effort.cached_tokens, effort.kv_bytes / _MIB, effort.bytes_sent / _MIB, effort.prefill_seconds,
        effort.decode_seconds, speed,
    ]  # fmt: skip
    return [*figures, effort.decode_steps, effort.draft_tokens, effort.accepted_tokens] if job.speculative else figures


def summary(job: Job, outcome: Outcome) -> list[str]:
    """What the ranks had to hold, read and draft, in a sentence each."""
    first, most = outcome.efforts[0], max(effort.kv_bytes for effort in outcome.efforts)
    lines = [
        f"Keys and values: {most / _MIB:.1f} MiB on a rank at most; one device would have needed "
        f"{first.kv_bytes_unsharded / _MIB:.1f} MiB."
    ]
    if len(job.prompts) > 1:
        lines.append(
            f"Prompts: {first.prefill_tokens + first.reused_tokens:,} tokens, of which {first.prefill_tokens:,} were read and {first.reused_tokens:,} "
            "were still there from an earlier question."
        )
    if job.speculative:
        lines.append(
            f"Drafts: {first.accepted_tokens} of {first.draft_tokens} tokens guessed from the text were right: "
            f"{first.generated_tokens} tokens in {first.decode_steps + len(job.prompts)} passes."
        )
    return lines


def verdict(number: int, one: Comparison, ours: str, theirs: str) -> str:
    """Whether one process says the same; `ours` and `theirs` are what is said where the two first differ."""
    said = (
        f"all {len(one.ours)} tokens are those of one process"
        if one.equal
        else f"DIFFERENT from one process at token {one.alike + 1}: {ours!r} where it says {theirs!r}"
    )
    return f"Check of answer {number}: {said}; logits are at most {one.apart:.1e} of the largest apart."
