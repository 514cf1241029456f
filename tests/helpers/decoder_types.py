"""What attnmesh does with all decoder and encoder types of the installed Transformers, and the tables in the docs.

`python -m helpers.decoder_types` writes the tables, from the folder of the repository with src and tests in PYTHONPATH.
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
from attnmesh.models.sharded import check_sharded_config
from helpers.models import on_virtual_ranks
from helpers.small_models import small_config, small_model

PAGE = Path(__file__).parents[2] / "docs" / "features.md"
PROMPTS = [
    torch.randint(8, 53, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (23, 3, 11)
]  # longer than windows and chunks, shorter than ranks need
MOST = 9

_IDS = torch.randint(8, 53, (2, 19), generator=torch.Generator().manual_seed(0))
_BEGIN, _END = "<!-- decoder types: begin -->", "<!-- decoder types: end -->"
ENCODERS_BEGIN, ENCODERS_END = "<!-- encoder types: begin -->", "<!-- encoder types: end -->"


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


def encoder_types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return list(MODEL_FOR_MASKED_LM_MAPPING_NAMES)


def train_encoder(kind: str, head: str = "MaskedLM", world: int = 2) -> None:
    """Compare loss, logits and gradients with one process, for rows with padding. Raises ValueError if refused."""
    mask = torch.ones_like(_IDS)
    mask[1, 13:] = 0
    ids = _IDS.masked_fill(mask == 0, 0)  # the padding token, from which some types count positions
    labels = (_IDS if head == "MaskedLM" else _IDS % 2).masked_fill(mask == 0, -100)
    labels[:, ::3] = labels[0, :10] = -100  # ranks have other numbers of labels
    try:
        whole = small_model(kind, "eager", head)
        wanted = whole(input_ids=ids, labels=labels, attention_mask=mask)
        wanted.loss.backward()
    except Exception as error:
        raise NotMadeError(f"{kind}: {type(error).__name__}") from error

    def rank(comm):
        model = small_model(kind, "attnmesh", head)
        inputs = am.shard_inputs(am.ContextParallel(comm), ids, labels, attention_mask=mask, causal=False)
        out = model(**inputs)
        out.loss.backward()
        grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        return out.loss.detach(), inputs["attention_pass"].unshard(out.logits.detach()), grads

    everyone = on_virtual_ranks(world, rank)
    close = torch.allclose(sum(loss for loss, _, _ in everyone), wanted.loss, 1e-4)
    close = close and torch.allclose(everyone[0][1][mask == 1], wanted.logits[mask == 1], 1e-4, 1e-4)
    for name, weight in whole.named_parameters():
        if weight.grad is not None and weight.numel():
            grad = sum(grads[name] for _, _, grads in everyone)
            close = close and bool((grad - weight.grad).abs().max() <= 1e-4 * max(1e-2, float(weight.grad.abs().max())))
    if not close:
        raise WrongError(kind)


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


# `load_model` refuses the files of these types with sharded weights: Transformers saves weights under other names, or
# numbers without a dimension (apertus).
_NOT_FROM_FILES = {"apertus", "ernie4_5_moe", "hy_v3", "kolibri1"}


def row_of(kind: str) -> Row | None:
    """The row of a type; None if it is neither served nor refused, because no small model of it is known."""
    register_attention()
    results = []
    for call in (lambda: train(kind), lambda: generate(kind, 2, 8)):
        try:
            call()
            results.append("")
        except ValueError as error:
            results.append(reason_of(error))
        except NotMadeError:
            return _refused_by_config(kind)
    try:
        check_sharded_config(small_config(kind), am.DecodeSharding(tp=2))
        sharded = not results[1] and kind not in _NOT_FROM_FILES
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
        return Row(kind, False, False, False, reason_of(error))
    return None


def reason_of(error: ValueError) -> str:
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


def encoder_table() -> dict[str, str]:
    """Why each encoder type is refused, or nothing for a type that is served."""
    quiet()
    register_attention()
    found: dict[str, str] = {}
    with torch.random.fork_rng():
        for kind in sorted(encoder_types()):
            try:
                train_encoder(kind)
                found[kind] = ""
            except NotMadeError:
                continue
            except ValueError as error:
                found[kind] = reason_of(error)
    return found


def encoder_lines(rows: dict[str, str]) -> str:
    return refused_and_served(rows, "encoders", "loss and gradients of one process", len(encoder_types()))


def refused_and_served(rows: dict[str, str], title: str, served_how: str, types: int) -> str:
    """A table of types that are served, and of those that are refused by reason; `types` are all that there are."""
    by_reason: dict[str, list[str]] = {}
    for kind, why in rows.items():
        by_reason.setdefault(why, []).append(kind)
    served = by_reason.pop("", [])
    return "\n".join([
        f"| {title} | |", "|---|---|", f"| {', '.join(served)} | {served_how} |",
        *(f"| {', '.join(kinds)} | refused: {why} |" for why, kinds in by_reason.items()), "",
        f"{len(served)} types are served, {len(rows) - len(served)} are refused, and {types - len(rows)} have not been "
        "tried: their small configurations are not known here.",
    ])  # fmt: skip


def written(begin: str = _BEGIN, end: str = _END) -> str:
    """The table in the documentation."""
    return PAGE.read_text().partition(begin)[2].partition(end)[0].strip()


def sharded_types() -> list[str]:
    """The types whose weights can be divided, as the table in the documentation has them."""
    rows = (line.strip("| ").split(" | ") for line in written().splitlines())
    return [row[0] for row in rows if row[1:4] == ["yes", "yes", "yes"]]


def write_between(begin: str, text: str, end: str) -> None:
    before, _, rest = PAGE.read_text().partition(begin)
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}")


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
    write_between(_BEGIN, lines(table()), _END)
    write_between(ENCODERS_BEGIN, encoder_lines(encoder_table()), ENCODERS_END)
