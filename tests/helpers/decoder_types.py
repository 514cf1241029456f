"""What attnmesh does with every decoder type of the installed Transformers: computed, and the table of it in the docs.

`python -m helpers.decoder_types` writes the table, from the folder of the repository with src and tests in PYTHONPATH.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import attnmesh as am
from attnmesh.generation.generator import Generator
from attnmesh.integrations.transformers_attention import register_attention
from attnmesh.integrations.transformers_models import check_config
from attnmesh.models.sharded import check_sharded_model
from helpers.models import on_virtual_ranks
from helpers.small_models import small_config, small_model

PAGE = Path(__file__).parents[2] / "docs" / "features.md"
PROMPTS = [
    torch.randint(8, 53, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (23, 3, 11)
]  # longer than windows and chunks, shorter than ranks need
MOST = 9

_IDS = torch.randint(8, 53, (2, 19), generator=torch.Generator().manual_seed(0))
_BEGIN, _END = "<!-- decoder types: begin -->", "<!-- decoder types: end -->"


class WrongError(Exception):
    """A result that is neither that of one process nor refused."""


class NotMadeError(Exception):
    """One process fails with the small configuration of a type."""


def quiet() -> None:
    """Let Transformers neither log nor warn."""
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")


def all_types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@torch.no_grad()
def train(kind: str) -> None:
    """Compare loss and logits over two ranks with one process. Raises ValueError if the model is refused."""
    try:
        wanted = small_model(kind, "eager")(input_ids=_IDS, labels=_IDS)
    except Exception as error:
        raise NotMadeError(f"{kind}: {type(error).__name__}") from error
    model = small_model(kind, "attnmesh")

    def rank(comm):
        inputs = am.shard_inputs(am.ContextParallel(comm), _IDS, _IDS)
        with torch.no_grad():
            out = model(**inputs)
        return out.loss, inputs["attention_pass"].unshard(out.logits)

    try:
        (loss, logits), (other, _) = on_virtual_ranks(2, rank)
    except TypeError as error:  # of a model that takes no keyword arguments
        if "unexpected keyword" in str(error):
            raise ValueError(f"the model takes no keyword arguments for its attention: {error}") from None
        raise
    if not (torch.allclose(logits, wanted.logits, 1e-4, 1e-4) and torch.allclose(loss + other, wanted.loss, 1e-4)):
        raise WrongError(f"{kind}: {(logits - wanted.logits).abs().max():.1e}")


@cache
@torch.no_grad()
def greedy(kind: str) -> tuple[list[list[int]], list[torch.Tensor]]:
    """The tokens of Transformers' `generate` for each prompt, and their logits."""
    model = small_model(kind, "eager")
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    rows, logits = [], []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MOST, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        rows.append(out.sequences[0, len(prompt) :].tolist())
        logits.append(torch.cat(out.logits))
    return rows, logits


def generate(kind: str, world: int, prefill_chunk: int | None, **how: Any) -> None:
    """Compare tokens and logits over ranks with Transformers' `generate`. Raises ValueError if the model is refused."""
    model = small_model(kind, "attnmesh")
    rows, logits = greedy(kind)

    def rank(comm):
        found: list[list[torch.Tensor]] = [[] for _ in PROMPTS]
        generator = Generator(
            model, None, comm, cache_tokens=200, max_sequences=len(PROMPTS), prefill_chunk=prefill_chunk,
            sharding=am.DecodeSharding(cp=world),
            callbacks=am.generation.Callbacks(on_logits=lambda row, each: found[row].append(each.clone())),
        )  # fmt: skip
        tokens: list[list[int]] = [[] for _ in PROMPTS]
        for token in generator.generate(PROMPTS, max_new_tokens=MOST, stop=[], **how):
            tokens[token.row].append(token.id)
        return tokens, found

    everyone = on_virtual_ranks(world, rank)
    for tokens, _ in everyone:
        if tokens != rows:
            raise WrongError(f"{kind} on {world} ranks: {tokens}, not {rows}")
    for row, wanted in enumerate(logits):
        found = torch.stack(next(found[row] for _, found in everyone if found[row]))
        if not torch.allclose(found, wanted, 1e-3, 1e-3 * float(wanted.abs().max())):
            raise WrongError(f"{kind} on {world} ranks: logits differ by {(found - wanted).abs().max():.1e}")


# The table.


@dataclass(frozen=True)
class Row:
    """What is said of one type."""

    kind: str
    trains: bool
    generates: bool
    sharded: bool
    why: str

    def __str__(self) -> str:
        words = ["yes" if each else "no" for each in (self.trains, self.generates, self.sharded)]
        return f"| {self.kind} | {' | '.join(words)} | {self.why} |"


def row_of(kind: str) -> Row | None:
    """The row of a type; None if it is neither served nor refused, because no small model of it is known."""
    register_attention()
    results = []
    for call in (lambda: train(kind), lambda: generate(kind, 2, 8)):
        try:
            call()
            results.append("")
        except ValueError as error:
            results.append(_reason(error))
        except NotMadeError:
            return _refused_by_config(kind)
    try:
        check_sharded_model(small_config(kind), kind, am.DecodeSharding(tp=2))
        sharded = not results[1]
    except ValueError:
        sharded = False
    return Row(kind, not results[0], not results[1], sharded, results[0] or results[1])


def _refused_by_config(kind: str) -> Row | None:
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(kind).get_text_config()
    except Exception:
        return None
    try:
        check_config(config)
    except ValueError as error:
        return Row(kind, False, False, False, _reason(error))
    return None


def _reason(error: ValueError) -> str:
    """What a message says, without the class of the model and what it got."""
    text = re.sub(r"\. See docs/.*|raised on virtual rank.*", "", str(error), flags=re.DOTALL).replace("\n", " ")
    text = re.sub(r"^(\w+: |a model's forward: |Generator: )+", "", text)
    text = re.sub(r"\(on rank.*?\)|\(\w+\._supports_attention_backend is False\)", "", text)
    return re.sub(r" +", " ", text).replace("|", "/").strip()


def table() -> list[Row]:
    """The rows of all types that are served or refused."""
    quiet()
    with torch.random.fork_rng():
        return [row for row in map(row_of, sorted(all_types())) if row is not None]


def lines(rows: list[Row]) -> str:
    served = [row for row in rows if row.trains or row.generates]
    refused = [row for row in rows if row not in served]
    left_out = len(all_types()) - len(rows)
    by_reason: dict[str, list[str]] = {}
    for row in refused:
        by_reason.setdefault(row.why, []).append(row.kind)
    return "\n".join([
        "| `model_type` | trains | generates | sharded weights | why not |", "|---|---|---|---|---|",
        *map(str, served), "",
        "| refused for training and generation | why |", "|---|---|",
        *(f"| {', '.join(kinds)} | {why} |" for why, kinds in by_reason.items()), "",
        f"{len(served)} types are served, {len(refused)} are refused, and {left_out} have not been tried: their small "
        "configurations are not known here.",
    ])  # fmt: skip


def written() -> str:
    """The table in the documentation."""
    return PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0].strip()


def written_of(kind: str) -> str | None:
    """The row of a type that is served, the reason of one that is refused, or None."""
    for line in written().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0] == kind:
            return line
        if len(cells) == 2 and kind in cells[0].split(", "):
            return cells[1]
    return None


if __name__ == "__main__":
    text = PAGE.read_text()
    before, _, rest = text.partition(_BEGIN)
    PAGE.write_text(f"{before}{_BEGIN}\n{lines(table())}\n{_END}{rest.partition(_END)[2]}")
