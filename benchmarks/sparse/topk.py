"""The exact top-k of the indexer beside torch's: a product of all scores, some rows at a time, and `torch.topk`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from attnmesh.cli.output import Rows
from attnmesh.ops.sparse.arguments import SparseMask, TopKIndices
from attnmesh.ops.sparse.indexer import indexer_topk
from benchmarks.sparse import exact, roofline
from benchmarks.sparse.cases import Indexer
from benchmarks.sparse.guard import SUMMED, Verdict, choice_error, relative_error, worst
from benchmarks.sparse.inputs import Indexed, indexer_inputs, some_rows
from benchmarks.sparse.stage import Program, Stage, freed

TOPK = {False: "indexer_topk", True: "indexer_topk, causal"}
IN_TORCH = {False: "torch", True: "torch, causal"}
_MOST_SCORES = 2**29  # of all heads, at a time: what torch's way takes from memory


def measure_topk(stage: Stage) -> Rows:
    """Over every number of keys, all of them seen, and causal: the rows are the last of the sequence."""
    return [row for shape in stage.sizes.indexers for causal in (False, True) for row in _topk(stage, shape, causal)]


def _topk(stage: Stage, shape: Indexer, causal: bool) -> Rows:
    freed(stage.device)
    x = indexer_inputs(shape, stage.device, stage.dtype)
    mask = SparseMask(causal=True, q_start=shape.s_kv - shape.s_q) if causal else SparseMask()
    ends = mask.bounds(shape.s_q, shape.s_kv, shape.topk, x.iq.device).hi
    ours = partial(indexer_topk, x.iq, x.ik, x.w, shape.topk, mask=mask, backend=stage.backend)
    torchs = partial(in_torch, x, shape.topk, ends)

    slots = ours()
    rows = some_rows(shape.s_q, stage.device)
    scores = exact.index_scores(x, rows)
    at = torch.arange(shape.s_kv, device=stage.device)
    scores = scores.masked_fill(at >= ends[rows, None], -torch.inf)
    verdicts = {
        TOPK[causal]: judged_choice(slots, scores, rows),
        IN_TORCH[causal]: Verdict(choice_error(torchs()[1][rows], scores), "peer"),
    }
    held = sum(t.nbytes for t in x)
    least = held + sum(t.nbytes for t in slots if t is not None)
    del slots, scores
    freed(stage.device)

    programs: dict[str, Program] = {TOPK[causal]: ours, IN_TORCH[causal]: torchs}
    times = stage.milliseconds(programs)
    work = roofline.topk(shape, causal=causal)
    found = []
    for name, ms in times.items():
        row = stage.row(name, shape.heads, shape.s_kv, work, ms, verdicts[name]) | {
            "over_ours": ms / times[TOPK[causal]]
        }
        added = stage.added_bytes(programs[name])
        found.append(row if added is None else row | {"memory_over_io": (held + added) / least})
    return found


def judged_choice(slots: TopKIndices, scores: Tensor, rows: Tensor) -> Verdict:
    """The best keys of these rows, by exact scores; the scores that came with them; and every row in order."""
    assert slots.scores is not None
    chosen = slots.indices[rows]
    order = 0.0 if bool((slots.indices.diff(dim=1) > 0).all()) else torch.inf
    of_chosen = relative_error(slots.scores[rows], scores.gather(1, chosen.clamp(min=0).long()))
    return worst((choice_error(chosen, scores), SUMMED), (of_chosen, SUMMED), (order, SUMMED))


def in_torch(x: Indexed, topk: int, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and indices: some rows at a time, every score of every head in memory, in the dtype of the inputs."""
    s_q, heads, d = x.iq.shape
    s_kv = x.ik.shape[0]
    at = torch.arange(s_kv, device=x.ik.device)
    step = max(1, _MOST_SCORES // (heads * s_kv))
    found = []
    for start in range(0, s_q, step):
        some = slice(start, start + step)
        dots = (x.iq[some].reshape(-1, d) @ x.ik.T).view(-1, heads, s_kv).relu_()
        scores = (x.w[some, None].to(dots.dtype) @ dots).squeeze(1).float()
        found.append(scores.masked_fill_(at >= ends[some, None], -torch.inf).topk(topk, 1))
    return torch.cat([best.values for best in found]), torch.cat([best.indices.int() for best in found])
