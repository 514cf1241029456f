"""Generator(..., reproducible=True): the bits of the trainer, for any ranks, chunks, batches, drafts and prefixes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh.comm import Comm
from attnmesh.generation import engine, reproducible
from attnmesh.generation.batching import Callbacks
from attnmesh.generation.generator import Generator
from attnmesh.generation.sampling import log_probs
from attnmesh.ops.dense.reproducible import _Problem
from attnmesh.training.data_parallel import GradientReduction
from helpers.cases import sweep
from helpers.models import VOCABULARY, attnmesh_model, on_virtual_ranks, random_ids
from helpers.training import run_ranks

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

LAYOUT = am.Aligned(am.Zigzag(), 16)  # tiles of 16 positions
PROMPTS = [random_ids(length, seed=length) for length in (150, 2, 33)]
NEW = 5
SAMPLED = am.Sampling(temperature=0.9, seed=3)
IMPORTS = ("transformers.models.llama.modeling_llama",)


class Answer(NamedTuple):
    ids: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float]
    logits: Tensor | None  # [tokens, vocabulary]; None on ranks of other groups


@cache
def model(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    return copy.deepcopy(attnmesh_model(kind, dtype))  # it is changed


def answers(
    comm: Comm, kind: str = "llama", *, dtype: torch.dtype = torch.float32, prompts: list[list[int]] = PROMPTS,
    alone: bool = False, sharding: am.DecodeSharding | None = None, scored: bool = True, **options: Any,
) -> list[Answer]:  # fmt: skip
    """The answers to the prompts in one batch, or to one prompt after another."""
    rows: dict[int, list[Tensor]] = {}
    generator = Generator(
        model(kind, dtype), comm=comm, cache_tokens=1200, max_sequences=len(prompts), layout=LAYOUT,
        sharding=sharding or am.DecodeSharding(cp=comm.world), reproducible=True,
        callbacks=Callbacks(on_logits=lambda row, logits: rows.setdefault(row, []).append(logits)), **options,
    )  # fmt: skip
    requests = []
    for at, prompt in enumerate(prompts):
        scores = {"logprobs": 2, "prompt_logprobs": 1 if at == 2 else None} if scored else {}
        requests.append(generator.submit(prompt, max_new_tokens=NEW, stop=[], sampling=SAMPLED, **scores))
        if alone:
            list(generator.stream(requests[-1]))
    while any(not request.finished for request in requests):
        generator.step()
    return [
        Answer(
            request.ids, [token.logprob for token in request.tokens],
            [each.logprob for each in request.prompt_logprobs],
            torch.stack(rows[request.number]) if request.number in rows else None,
        )
        for request in requests
    ]  # fmt: skip


def assert_same_bits(found: list[Answer], expected: list[Answer]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one[:3] == other[:3]
        if one.logits is not None:
            assert torch.equal(one.logits, other.logits)


def trained(comm: Comm, texts: list[list[int]], kind: str = "llama", dtype: torch.dtype = torch.float32) -> list[Any]:
    """The log-probabilities and the logits of texts, as the trainer computes them."""
    cp = am.ContextParallel(comm, layout=LAYOUT, reproducible=True)
    trainer = model(kind, dtype)
    GradientReduction(trainer, cp)
    found = []
    for text in texts:
        ids = torch.tensor([text])
        inputs = am.shard_inputs(cp, ids, ids)
        logits = trainer(**inputs).logits
        whole = inputs["attention_pass"].unshard(logits.detach())
        found.append((am.gather_log_probs(inputs, logits).detach()[0], whole[0]))
    return found


def assert_trainer_has_the_bits(found: list[Answer], trainer: list[Any], prompts: list[list[int]] = PROMPTS) -> None:
    for answer, prompt, (of_labels, logits) in zip(found, prompts, trainer, strict=True):
        first = len(prompt) - 1
        assert of_labels[first : first + NEW].tolist() == answer.logprobs
        assert of_labels[: len(answer.prompt_logprobs)].tolist() == answer.prompt_logprobs
        assert torch.equal(logits[first : first + NEW], answer.logits)


def texts(found: list[Answer], prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [prompt + answer.ids for prompt, answer in zip(prompts, found, strict=True)]


@pytest.fixture(scope="module")
def one() -> list[Answer]:
    return on_virtual_ranks(1, answers)[0]


@pytest.mark.parametrize("world", [1, 2, sweep(3)])
def test_answers_have_the_bits_of_the_trainer(one, world):
    long = [at for at, text in enumerate(texts(one)) if len(text) >= 16 * world]  # a leaf for every rank
    of_trainer = on_virtual_ranks(world, lambda comm: trained(comm, [texts(one)[at] for at in long]))[-1]
    assert_trainer_has_the_bits([one[at] for at in long], of_trainer, [PROMPTS[at] for at in long])


@pytest.mark.parametrize(
    ("sharding", "options"),
    [
        (am.DecodeSharding(cp=1), {"prefill_chunk": 7, "alone": True}),
        (am.DecodeSharding(cp=2), {"prefill_chunk": 64, "schedule": "ulysses"}),
        (am.DecodeSharding(cp=3), {"prefill_chunk": 7}),
        (am.DecodeSharding(cp=3, interleave=16), {}),
        (am.DecodeSharding(cp=2, kvdp=2), {"step_tokens": 20}),
        *(
            sweep(am.DecodeSharding(cp=cp), {"prefill_chunk": chunk, "alone": alone})
            for cp in (1, 2, 3, 4, 6, 8) for chunk in (16, 17, 64, None) for alone in (False, True)
        ),
    ],
)  # fmt: skip
def test_any_ranks_chunks_and_batches_have_the_same_bits(one, sharding, options):
    found = on_virtual_ranks(sharding.ranks, lambda comm: answers(comm, sharding=sharding, **options))
    for of_rank in found:
        assert_same_bits(of_rank, one)
    for at in range(len(PROMPTS)):
        assert any(of_rank[at].logits is not None for of_rank in found)


def force(text: list[int]) -> Any:
    """A logits processor that lets an answer be this text."""

    def forced(ids: Tensor, scores: Tensor) -> Tensor:
        found = torch.full_like(scores, -torch.inf)
        found[0, text[ids.shape[1]]] = 0.0
        return found

    return forced


@pytest.mark.parametrize("world", [sweep(1), 3])
def test_a_prompt_that_is_decoded_token_by_token_has_the_bits_of_its_prefill(one, world):
    """Chunks of one token."""
    text = texts(one)[2 if world > 1 else 0]

    def rank(comm: Comm) -> list[Tensor]:
        rows: list[Tensor] = []
        generator = Generator(
            model("llama"), comm=comm, cache_tokens=400, layout=LAYOUT, reproducible=True,
            callbacks=Callbacks(on_logits=lambda _, logits: rows.append(logits)),
        )  # fmt: skip
        request = generator.submit(
            text[:1], max_new_tokens=len(text) - 1, stop=[], logprobs=0, logits_processors=[force(text)]
        )
        list(generator.stream(request))
        assert request.ids == text[1:]
        return [torch.tensor([token.logprob for token in request.tokens]), torch.stack(rows)]

    [(of_labels, logits)] = on_virtual_ranks(1, lambda comm: trained(comm, [text]))[0]
    for found in on_virtual_ranks(world, rank):
        assert torch.equal(found[0], of_labels[:-1])
        assert torch.equal(found[1], logits[:-1])


def test_reused_prefixes_drafts_and_beams_have_the_same_bits(one):
    prompt = PROMPTS[2] * 3  # so that drafts are found

    def rank(comm: Comm) -> list[Any]:
        generator = Generator(
            model("llama"), comm=comm, cache_tokens=1200, max_sequences=3, layout=LAYOUT, reproducible=True,
            sharding=am.DecodeSharding(cp=comm.world),
        )  # fmt: skip
        first = generator.submit(PROMPTS[0], max_new_tokens=NEW, stop=[], sampling=SAMPLED, logprobs=2)
        list(generator.stream(first))
        again = generator.submit(PROMPTS[0], max_new_tokens=NEW, stop=[], sampling=SAMPLED, logprobs=2)
        list(generator.stream(again))
        assert again.cached
        for request in (first, again):
            assert request.ids == one[0].ids
            assert [token.logprob for token in request.tokens] == one[0].logprobs
        how = {"max_new_tokens": 12, "stop": []}
        drafted = [token.id for token in generator.generate([prompt], speculative=True, **how)]
        assert generator.stats.draft_tokens
        assert drafted == [token.id for token in generator.generate([prompt], **how)]
        return [drafted, [token.id for token in generator.generate([prompt], num_beams=3, **how)]]

    [expected], found = on_virtual_ranks(1, rank), on_virtual_ranks(3, rank)
    assert all(each == expected for each in found)


def test_other_generators_have_other_bits(one):
    """Or the tests of bits would prove nothing."""
    generator = Generator(model("llama"), cache_tokens=1200, max_sequences=3)
    request = generator.submit(PROMPTS[0], max_new_tokens=NEW, stop=[], sampling=SAMPLED, logprobs=2)
    found = [token.logprob for token in generator.stream(request)]
    assert found == pytest.approx(one[0].logprobs, abs=1e-3)
    assert found != one[0].logprobs


def steps_of_their_own_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a decode step are computed one by one, without a tile."""
    of = reproducible.Tiles.of.__func__

    def small(cls: Any, positions: Tensor, size: int, keep: int, head: Any) -> Any:
        return of(cls, positions, 1 if positions.shape[1] == 1 else size, keep, head)

    monkeypatch.setattr(reproducible.Tiles, "of", classmethod(small))


def swapped_tiles_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoded token visits two tiles of keys in another order."""
    ascending = _Problem.keys_of

    def swapped(self: _Problem, rows: slice) -> Iterator:
        tiles = list(ascending(self, rows))
        yield from reversed(tiles) if self.call.q.shape[2] == 1 else tiles

    monkeypatch.setattr(_Problem, "keys_of", swapped)


def other_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities are computed in float64."""
    monkeypatch.setattr(engine, "_token_log_probs", log_probs)


@pytest.mark.parametrize("fault", [steps_of_their_own_shape, swapped_tiles_of_keys, other_log_probabilities])
def test_planted_faults_change_bits(one, fault, monkeypatch):
    fault(monkeypatch)
    [found] = on_virtual_ranks(1, lambda comm: answers(comm, prompts=PROMPTS[:1]))
    assert found[0].ids == one[0].ids
    assert found[0].logprobs == pytest.approx(one[0].logprobs, abs=1e-3)
    assert found[0].logprobs != one[0].logprobs


def test_a_module_that_mixes_the_tokens_of_a_tile_is_refused():
    class Centered(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(1, keepdim=True))

    mixing = attnmesh_model.__wrapped__("llama")  # a model of its own: others have computed tiles of the cached one
    mixing.model.layers[1].mlp.up_proj.__class__ = Centered
    with pytest.raises(ValueError, match="bits depend on other tokens"):
        Generator(mixing, cache_tokens=64, reproducible=True)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("llama", {"reproducible": 1}, "reproducible must be True or False, got 1"),
        ("llama", {"storage": "int8"}, "storage must be None with reproducible=True, got 'int8'"),
        ("llama", {"schedule": "ring"}, "with reproducible=True, got 'ring'"),
        ("mixtral", {}, "model must have no experts with reproducible=True"),
        ("gemma2", {}, "model must be one that can be trained with reproducible=True: .*aten.tanh"),
        ("deepseek_v3", {}, "reproducible=True"),
    ],
)
def test_what_is_not_served_is_refused(kind, options, message):
    given = {"cache_tokens": 64, "reproducible": True, **options}

    def rank(comm: Comm) -> None:
        with pytest.raises(ValueError, match=message):
            Generator(model(kind), comm=comm, sharding=am.DecodeSharding(cp=2), **given)

    on_virtual_ranks(2, rank)


def test_sharded_weights_and_ranks_that_differ_are_refused():
    sharding = am.DecodeSharding(tp=2)

    def rank(comm: Comm) -> None:
        with pytest.raises(ValueError, match="reproducible"):
            Generator(model("llama"), comm=comm, cache_tokens=64, reproducible=comm.rank == 0)
        sharded = am.models.shard_model(attnmesh_model("llama"), sharding, comm)
        with pytest.raises(ValueError, match="must have whole weights on every rank with reproducible=True"):
            Generator(sharded, comm=comm, cache_tokens=64, sharding=sharding, reproducible=True)

    on_virtual_ranks(2, rank)


@pytest.mark.parametrize("seed", range(3))
def test_every_token_has_its_row_of_a_tile(seed):
    positions = torch.randint(0, 99, (5, 1), generator=torch.Generator().manual_seed(seed)) + torch.arange(7)
    tiles = reproducible.Tiles.of(positions, 16, 2, torch.nn.Identity())
    assert torch.equal(tiles.places % 16, positions.flatten() % 16)
    assert len(tiles.places.unique()) == positions.numel()
    assert torch.equal(tiles.spread(positions).flatten()[tiles.places], positions.flatten())
    x = torch.randn(5, 3, 7, 2)
    assert torch.equal(tiles.take(tiles.put(x)), x)
    logits = torch.randn(tiles.rows, 16, VOCABULARY)
    wanted = logits.flatten(0, 1)[tiles.places].view(5, 7, -1)[:, -2:]
    assert torch.equal(tiles.logits(logits[tiles._kept_tiles]), wanted)


KINDS = ("mistral", "qwen2", "qwen3", "gemma3_text", "olmo2", "phi", "phi3", "glm4", "smollm3", "granite", "cohere",
         "starcoder2", "gpt2")  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("mistral", torch.bfloat16),  # its cache keeps a window
        *(sweep(kind, torch.float32) for kind in KINDS),
        *(sweep(kind, dtype) for kind in ("llama", "qwen3") for dtype in (torch.bfloat16, torch.float16)),
    ],
)
def test_models_have_the_bits_of_the_trainer(kind, dtype):
    [alone] = on_virtual_ranks(1, lambda comm: answers(comm, kind, dtype=dtype))
    assert_trainer_has_the_bits(alone, on_virtual_ranks(1, lambda comm: trained(comm, texts(alone), kind, dtype))[0])
    for of_rank in on_virtual_ranks(2, lambda comm: answers(comm, kind, dtype=dtype, prefill_chunk=7)):
        assert_same_bits(of_rank, alone)


def of_processes(comm: Comm, chunk: int | None) -> list[Answer]:
    return answers(comm, prefill_chunk=chunk)


@pytest.mark.sweep
@pytest.mark.parametrize("chunk", [8, 64, None])
def test_processes_have_the_bits_of_one(chunk):
    [alone] = run_ranks(1, of_processes, None, imports=IMPORTS)
    assert_trainer_has_the_bits(alone, run_ranks(1, trained, texts(alone), imports=IMPORTS)[0])
    for world in (2, 4):
        for of_rank in run_ranks(world, of_processes, chunk, imports=IMPORTS):
            assert_same_bits(of_rank, alone)
