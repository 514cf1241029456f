"""The run as a page: `attnmesh generate --report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnmesh.cli.generate.job import Job
from attnmesh.cli.generate.outcome import Outcome
from attnmesh.cli.generate.plain import Comparison
from attnmesh.cli.generate.show import columns, row
from attnmesh.core.masks import Causal
from attnmesh.core.state import accumulation_dtype
from attnmesh.plan.workload import Shape
from attnmesh.report import command
from attnmesh.report.data import MOST_RANKS, make_report
from attnmesh.report.page import write_report


def write_page(path: Path, job: Job, config: Any, outcome: Outcome, checks: Sequence[Comparison]) -> None:
    """Write what the ranks held, computed and sent while they read the first prompt, and the figures of the run."""
    world = len(outcome.efforts)
    figures = {
        f"attnmesh generate: {world} ranks, {job.device}": [
            dict(zip(columns(job), row(job, effort), strict=True)) for effort in outcome.efforts
        ]
    }
    if checks:
        figures["Beside one plain process"] = [
            {
                "answer": number, "tokens": len(one.ours), "the same tokens": "all" if one.equal else one.alike,
                "logits apart, of the largest": f"{one.apart:.1e}",
            }
            for number, one in enumerate(checks, 1)
        ]  # fmt: skip
    made = make_report(
        Causal(), job.layout, len(job.prompts[0]), world, _shape(job, config), node=world, device=job.device,
        facts={"model": _model(config), **command.facts()},
        outcomes=command.checked(world, job.layout, Causal(), world),
        figures=figures,
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


def _shape(job: Job, config: Any) -> Shape:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return Shape(1, heads, kv_heads, head_dim, job.dtype.itemsize, accumulation_dtype(job.dtype).itemsize)
