"""Ranks whose models, weights or settings differ: every rank is told, with both sides. Invalid logits: so, too."""

import math

import pytest
import torch

import attnmesh as am
from attnmesh.generation.generator import Generator, generate
from attnmesh.generation.sampling import Sampling
from attnmesh.parallel.checksums import checksums
from attnmesh.plan.decode import DecodeSharding
from helpers.models import VOCABULARY, OneLayer, generated_rows, on_virtual_ranks, random_ids
from helpers.processes import run_processes

PROMPTS = [random_ids(21, seed) for seed in (1, 2)]
SHARDINGS = [DecodeSharding(cp=3), DecodeSharding(kvdp=3)]
SETTINGS = {"cache_tokens": 200, "max_sequences": 3, "prefill_chunk": 12}


def changed(change):
    model = OneLayer()
    change(model)
    return model


def set_config(name, value):
    return lambda model: setattr(model.config, name, value)


def swap_rows(model):
    model.embedding.weight.data[[3, 4]] = model.embedding.weight.data[[4, 3]]


def flip_one_bit(model):
    model.embedding.weight.data.view(torch.int32)[50, 7] ^= 1


# Construction.


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache_tokens": 201}, "cache_tokens is 200 on ranks 0, 2 but 201 on rank 1"),
        ({"max_sequences": 4}, "max_sequences is 3 on ranks 0, 2 but 4 on rank 1"),
        ({"prefill_chunk": 14}, "prefill_chunk is 12 on ranks 0, 2 but 14 on rank 1"),
        ({"prefill_chunk": None}, "prefill_chunk is 12 on ranks 0, 2 but None on rank 1"),
        ({"layout": am.Striped()}, r"layout is Zigzag\(\) on ranks 0, 2 but Striped\(\) on rank 1"),
        ({"layout": am.Zigzag(2)}, r"layout is Zigzag\(\) on ranks 0, 2 but Zigzag\(2\) on rank 1"),
        ({"schedule": "ring"}, "schedule is auto on ranks 0, 2 but ring on rank 1"),
        ({"sharding": "other"}, "sharding is .* on ranks 0, 2 but .* on rank 1"),
        ({"prefill_chunk": 1}, r"prefill_chunk must be at least 2 tokens per rank, .*\(on rank 1\)"),
        ({"sharding": DecodeSharding(cp=2)}, r"sharding must be kvdp x cp = 3 ranks .*\(on rank 1\)"),
    ],
)
def test_other_settings_on_one_rank_are_refused_on_all(settings, message, sharding):
    other = {**SETTINGS, "sharding": sharding, **settings}
    if settings.get("sharding") == "other":
        other["sharding"] = next(each for each in SHARDINGS if each != sharding)

    def rank(comm):
        with pytest.raises(ValueError, match=message if comm.rank != 1 else message.removesuffix(r" .*\(on rank 1\)")):
            Generator(OneLayer(), None, comm, **(other if comm.rank == 1 else {**SETTINGS, "sharding": sharding}))
        return len(generated_rows(Generator(OneLayer(), None, comm, **SETTINGS), PROMPTS, max_new_tokens=2))

    assert on_virtual_ranks(3, rank) == [2] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_config("rope_theta", 5.0), r"config.rope_theta is \(not given\) on ranks 0, 2 but 5.0 on rank 1"),
        (set_config("num_attention_heads", 4), "config.num_attention_heads is 2 on ranks 0, 2 but 4 on rank 1"),
        (lambda model: model.bfloat16(), r"dtype is torch.float32 on ranks 0, 2 but torch.bfloat16 on rank 1"),
        (lambda model: model.register_buffer("more", torch.ones(1)), "tensors of the model is 2 with .* but 3 with "),
        (
            flip_one_bit,
            r"ranks have different weights in 1 of 2 tensors, by checksum: embedding.weight is \w+ on ranks 0, 2 but "
            r"\w+ on rank 1$",
        ),
        (swap_rows, r"different weights in 1 of 2 tensors, by checksum: embedding.weight is"),
        (lambda model: model.frequencies.neg_(), r"different weights in 1 of 2 .*: frequencies is \w+ on ranks 0, 2"),
        (lambda model: model.load_state_dict(OneLayer(1).state_dict()), "different weights in 2 of 2 tensors"),
    ],
)
def test_another_model_on_one_rank_is_refused_on_all(change, message):
    def rank(comm):
        model = changed(change) if comm.rank == 1 else OneLayer()
        with pytest.raises(ValueError, match=message):
            Generator(model, None, comm, **SETTINGS)
        return len(generated_rows(Generator(OneLayer(), None, comm, **SETTINGS), PROMPTS, max_new_tokens=2))

    assert on_virtual_ranks(3, rank) == [2] * 3


def test_some_of_many_tensors_are_named():
    def rank(comm):
        model = OneLayer()
        for i in range(9):
            model.register_buffer(f"b{i}", torch.full((2,), float(i * comm.rank)))
        with pytest.raises(ValueError, match=r"weights in 8 of 11 .*: b1 is .*; b2 is .*; b3 is .*; and 5 more"):
            Generator(model, None, comm, **SETTINGS)

    on_virtual_ranks(2, rank)


def test_where_a_model_came_from_does_not_matter():
    def rank(comm):
        model = changed(set_config("_name_or_path", f"/models/of/rank/{comm.rank}"))
        return generated_rows(Generator(model, None, comm, **SETTINGS), PROMPTS, max_new_tokens=2)

    first, second = on_virtual_ranks(2, rank)
    assert first == second


def test_an_error_other_than_value_error_reaches_all_ranks():
    def rank(comm):
        model = OneLayer()
        if comm.rank == 1:
            model.get_input_embeddings = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError if comm.rank == 1 else ValueError, match="division by zero"):
            Generator(model, None, comm, **SETTINGS)
        return len(generated_rows(Generator(OneLayer(), None, comm, **SETTINGS), PROMPTS, max_new_tokens=2))

    assert on_virtual_ranks(2, rank) == [2] * 2


def checksum(x):
    return int(checksums([x], x.device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_checksums_tell_all_bits_and_places(dtype, monkeypatch):
    monkeypatch.setattr("attnmesh.parallel.checksums._CHUNK", 16)
    x = (torch.rand(1037, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)
    sums = {checksum(x)}
    assert checksum(x.clone()[None].expand(1, -1)) in sums
    assert checksum(torch.cat([x[:1], x])[1:]) in sums  # not aligned
    raw = x.view(torch.uint8)
    for at in (0, 1, 8, 500, len(raw) - 9, len(raw) - 1):  # one bit, and two bytes exchanged
        other = raw.clone()
        other[at] ^= 1
        sums.add(checksum(other.view(dtype)))
    assert len(sums) == 7
    numbers = torch.arange(60)
    assert len({checksum(numbers.roll(i)) for i in range(60)}) == 60
    assert checksum(torch.empty(0)) == 0


# The single call.


def test_generate_tells_all_ranks_of_an_error_of_one():
    def rank(comm):
        prompts = ["text"] if comm.rank == 1 else PROMPTS[:1]
        with pytest.raises(ValueError, match=r"prompts\[0\] must be token ids without a tokenizer, got text"):
            generate(OneLayer(), None, prompts, comm, max_new_tokens=2)
        with pytest.raises(ValueError, match="max_new_tokens must be a positive integer, got '2'"):
            generate(OneLayer(), None, PROMPTS, comm, max_new_tokens="2" if comm.rank == 1 else 2)
        return len(list(generate(OneLayer(), None, PROMPTS, comm, max_new_tokens=2)))

    assert on_virtual_ranks(2, rank) == [4, 4]


# Invalid logits.


class Spoiled(OneLayer):
    """Logits of one row become invalid from a position on, on one rank or on all."""

    def __init__(self, value, position, rank=None, comm=None):
        super().__init__()
        self._value, self._position, self._here = value, position, rank in (None, getattr(comm, "rank", None))

    def forward(self, *, input_ids, position_ids, logits_to_keep, **how):
        out = super().forward(
            input_ids=input_ids, position_ids=position_ids, logits_to_keep=logits_to_keep, **how
        )  # fmt: skip
        at = position_ids[:, -logits_to_keep:] if logits_to_keep else position_ids
        wrong = at == self._position
        if self._here and wrong.any():
            if self._value == -math.inf:
                out.logits[wrong] = self._value
            else:
                out.logits[..., 5][wrong] = self._value
        return out


@pytest.mark.parametrize(
    ("value", "sharding", "how"),
    [
        (math.nan, DecodeSharding(cp=2), {}),
        (math.inf, DecodeSharding(cp=2), {"speculative": True}),
        (-math.inf, DecodeSharding(kvdp=2), {"sampling": Sampling(1.0, 0.9, seed=1)}),
        (math.inf, DecodeSharding(kvdp=2, cp=2), {}),
    ],
)
def test_invalid_logits_raise_on_every_rank(value, sharding, how):
    prompts = [PROMPTS[0], PROMPTS[1][:15]]

    def rank(comm):
        for position, row, step in ((20, 0, 0), (23, 0, 3), (14, 1, 0)):
            model = Spoiled(value, position)
            generator = Generator(model, None, comm, cache_tokens=200, max_sequences=2, sharding=sharding)
            tokens = generator.generate(prompts, max_new_tokens=6, stop=(), **how)
            first = [next(tokens).id for _ in range(2 * step)]
            assert all(0 <= token < VOCABULARY for token in first)
            with pytest.raises(ValueError, match=rf"row {row}: the logits have a NaN .* after {step} tokens"):
                next(tokens)
            assert not generator.engine.cache.sequences
            generator.model._position = -1
            assert len(list(generator.generate(prompts, max_new_tokens=6, stop=(), **how))) == 12

    on_virtual_ranks(sharding.ranks, rank)


def test_invalid_logits_of_a_single_rank_raise_on_every_rank():
    def rank(comm):
        for bad in range(3):
            model = Spoiled(math.nan, 23, bad, comm)
            generator = Generator(model, None, comm, cache_tokens=200, sharding=DecodeSharding(cp=3))
            with pytest.raises(ValueError, match=r"row 0: the logits have a NaN .* after 3 tokens"):
                list(generator.generate(PROMPTS[:1], max_new_tokens=6, stop=()))

    on_virtual_ranks(3, rank)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, 0.9)])
def test_sampling_refuses_invalid_logits(sampling):
    good = torch.tensor([-math.inf, 1.0, 2.0])
    assert sampling.sample(good, sampling.generator(0)) in (1, 2)
    for bad in ([math.nan, 1.0, 2.0], [math.inf, 1.0, 2.0], [-math.inf] * 3):
        with pytest.raises(ValueError, match="logits must have a finite maximum and no NaN"):
            sampling.sample(torch.tensor(bad), sampling.generator(0))


# Processes.


def weights_of_a_process(comm):
    model = changed(flip_one_bit) if comm.rank == 1 else OneLayer()
    with pytest.raises(ValueError, match=r"embedding.weight is .* on rank 0 but .* on rank 1"):
        Generator(model, None, comm, **SETTINGS)
    with pytest.raises(ValueError, match="prefill_chunk is 12 on rank 0 but 14 on rank 1"):
        Generator(OneLayer(), None, comm, **{**SETTINGS, "prefill_chunk": 12 + 2 * comm.rank})
    generator = Generator(Spoiled(math.nan, 23), None, comm, **SETTINGS)
    with pytest.raises(ValueError, match=r"row 0: the logits have a NaN .* after 3 tokens"):
        list(generator.generate(PROMPTS[:1], max_new_tokens=6, stop=()))
    generator.model._position = -1
    return generated_rows(generator, PROMPTS, max_new_tokens=6)


@pytest.mark.sweep
def test_processes_are_told_like_virtual_ranks():
    assert run_processes(2, weights_of_a_process) == on_virtual_ranks(2, weights_of_a_process)


@pytest.mark.parametrize("call", ["generate", "step"])
def test_another_generator_on_one_rank_is_refused_on_all(call):
    def rank(comm):
        generators = [Generator(OneLayer(), comm=comm, **SETTINGS) for _ in range(2)]
        if call == "generate":
            return list(generators[comm.rank].generate([[1, 2, 3]], max_new_tokens=2, stop=[]))
        for generator in generators:
            generator.submit([1, 2, 3], max_new_tokens=2, stop=[])
        return generators[comm.rank].step()

    with pytest.raises(am.comm.CommError, match=r"out of step.* on rank 0 but .* on rank 1"):
        on_virtual_ranks(2, rank)
