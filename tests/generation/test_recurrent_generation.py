"""Models with recurrent layers generate the tokens of Transformers, on any number of ranks."""

import pytest
import torch

import attnmesh as am
from helpers.cases import first, in_turn, sweep
from helpers.models import on_virtual_ranks
from helpers.recurrent_models import MODELS, recurrent_model

FEW = [("bamba", 2), ("lfm2", 3), ("mamba2", 2)]  # with attention of few and many layers, and without
NEW = 6


def tokens_of(count, seed):
    return torch.randint(1, 64, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [tokens_of(n, n) for n in (40, 7, 1, 23)]


def model_of(kind):
    model = recurrent_model(kind).eval()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def expected(model, prompt, new=NEW, **how):
    """The tokens of one process with Transformers' own attention and cache."""
    model.set_attn_implementation("eager")
    ids = torch.tensor([prompt])
    how["attention_mask"] = torch.ones_like(ids)  # also for the token that is the padding
    tokens = model.generate(ids, max_new_tokens=new, do_sample=False, **how)[0, len(prompt) :].tolist()
    model.set_attn_implementation("attnmesh")
    return tokens


def finish(generator, requests):
    while generator.num_unfinished:
        generator.step()
    return [[token.id for token in request.tokens] for request in requests]


def on_ranks(model, world, work, **settings):
    def rank(comm):
        return work(am.Generator(model, None, comm, **{"cache_tokens": 512, "max_sequences": 12, **settings}))

    return on_virtual_ranks(world, rank)


@pytest.mark.parametrize(("kind", "world"), first(len(FEW), [*FEW, *in_turn(MODELS, (1, 3, 2, 4))]))
def test_tokens_are_those_of_one_process(kind, world):
    """Prompts of several chunks, of one token and shorter than a chunk over ranks, in one batch; and in beams."""
    model = model_of(kind)
    wanted = [expected(model, prompt) for prompt in PROMPTS]
    # (MiniMax's own cache leaves the states of its layers behind when beams are reordered.)
    beams = expected(model, PROMPTS[1], num_beams=2, use_cache=kind != "minimax")

    def work(generator):
        greedy = finish(generator, [generator.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS])
        return greedy, finish(generator, [generator.submit(PROMPTS[1], max_new_tokens=NEW, num_beams=2)])[0]

    sharding = am.DecodeSharding(cp=world) if world % 2 else am.DecodeSharding(cp=world // 2, kvdp=2)
    for greedy, of_beams in on_ranks(model, world, work, prefill_chunk=16, sharding=sharding):
        assert greedy == wanted
        assert of_beams == beams


def test_requests_that_are_preempted_or_join_later():
    """A row of states is used again by another sequence, and a request is computed again from its tokens."""
    model = model_of("lfm2")
    prompts = [PROMPTS[0][:30], PROMPTS[0][10:40], PROMPTS[3]]
    wanted = [expected(model, prompt, new) for prompt, new in zip(prompts, (130, 130, NEW), strict=True)]

    def work(generator):
        first = [generator.submit(prompt, max_new_tokens=130) for prompt in prompts[:2]]
        generator.step()
        generator.cancel(generator.submit(PROMPTS[1], max_new_tokens=NEW))
        last = generator.submit(prompts[2], max_new_tokens=NEW)
        return finish(generator, [*first, last]), generator.stats.preemptions

    for tokens, preemptions in on_ranks(model, 1, work, cache_tokens=160, max_sequences=2):
        assert tokens == wanted
        assert preemptions > 0


@pytest.mark.parametrize(
    ("kind", "world"), [("lfm2", 1), sweep("qwen3_next", 1), ("bamba", 2), sweep("minimax", 2), sweep("jamba", 2)]
)
def test_prefixes_are_reused(kind, world):
    """Turns of a chat, samples of a prompt, and prompts with a common beginning: the tokens of a new generator."""
    model, block = model_of(kind), 32 * world
    prompt = tokens_of(block + 8, 1)
    turn = expected(model, prompt, block)
    next_prompt = [*prompt, *turn, *tokens_of(9, 2)]
    template = tokens_of(2 * block + 5, 3)
    prompts = [[*template, *tokens_of(block, 4 + at)] for at in range(3)]
    wanted = [turn, *(expected(model, each) for each in (next_prompt, prompt, prompt, *prompts))]

    def work(generator):
        def answers(texts, new=NEW):
            requests = [generator.submit(text, max_new_tokens=new) for text in texts]
            return list(zip(finish(generator, requests), (request.cached for request in requests), strict=True))

        found = [*answers([prompt], block), *answers([next_prompt]), *answers([prompt, prompt])]
        return found + [answer for text in prompts for answer in answers([text])], generator.stats.reused_tokens

    sharding = am.DecodeSharding(cp=world)
    for found, reused in on_ranks(model, world, work, cache_tokens=12 * block, sharding=sharding):
        assert [tokens for tokens, _ in found] == wanted
        cached = [0, 2 * block, block, block, 0, 0, 2 * block]  # the second text with the template keeps a state there
        assert [count for _, count in found] == cached
        assert reused == sum(cached)


def test_log_probabilities_of_a_prompt():
    """Chunks over ranks compute the logits of all their tokens, and leave the states as they are without."""
    model = model_of("bamba")
    wanted = model(torch.tensor([PROMPTS[0]]), use_cache=False).logits[0].log_softmax(-1)
    tokens = expected(model, PROMPTS[0])

    def work(generator):
        request = generator.submit(PROMPTS[0], max_new_tokens=NEW, prompt_logprobs=0)
        return finish(generator, [request])[0], [each.logprob for each in request.prompt_logprobs]

    for found, logprobs in on_ranks(model, 2, work, prefill_chunk=16, sharding=am.DecodeSharding(cp=2)):
        assert found == tokens
        each = wanted[torch.arange(len(PROMPTS[0]) - 1), PROMPTS[0][1:]]
        torch.testing.assert_close(torch.tensor(logprobs), each.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "world"), first(1, [("lfm2", 2), ("granitemoehybrid", 1), *in_turn(MODELS, (1, 2, 3))])
)
def test_drafts_that_are_accepted_and_rejected(kind, world):
    """Beside an answer without drafts and a beam search; states are kept at the block boundaries that drafts reach."""
    model = model_of(kind)
    prompts = [PROMPTS[1] * 3, [*PROMPTS[3], *PROMPTS[3][:9]], PROMPTS[0]]
    wanted = [expected(model, prompt, 60) for prompt in prompts]
    beams = expected(model, PROMPTS[1], num_beams=2, use_cache=kind != "minimax")

    def work(generator):
        requests = [generator.submit(each, max_new_tokens=60, speculative=at < 2) for at, each in enumerate(prompts)]
        requests.append(generator.submit(PROMPTS[1], max_new_tokens=NEW, num_beams=2))
        tokens = finish(generator, requests)
        again = generator.submit([*prompts[0], *tokens[0], 1], max_new_tokens=1)
        finish(generator, [again])
        return tokens, again.cached, generator.stats

    block = 32 * world
    for tokens, cached, stats in on_ranks(model, world, work, sharding=am.DecodeSharding(cp=world)):
        assert tokens == [*wanted, beams]
        assert cached == (len(prompts[0]) + 59) // block * block
        assert 0 < stats.accepted_tokens <= stats.draft_tokens
        assert stats.accepted_tokens < stats.draft_tokens or kind in ("mamba", "falcon_mamba")  # they repeat a token


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("lfm2", am.DecodeSharding(cp=2), am.DecodeSharding(kvdp=2)),
        ("bamba", am.DecodeSharding(kvdp=2), am.DecodeSharding(cp=2, interleave=4)),
        sweep("mamba2", am.DecodeSharding(cp=2), am.DecodeSharding(kvdp=2)),  # without attention
        sweep("qwen3_5_text", am.DecodeSharding(kvdp=2), am.DecodeSharding(cp=2)),
    ],
    ids=str,
)
def test_requests_move_and_are_saved(kind, before, after, tmp_path):
    """Answers, a prompt that is computed in part, a request that waits: to another sharding, then through files."""
    model = model_of(kind)
    wanted = [expected(model, prompt, 12) for prompt in PROMPTS]

    def generator_of(comm, sharding):
        return am.Generator(
            model, None, comm, cache_tokens=256, max_sequences=4, prefill_chunk=8, step_tokens=24, sharding=sharding
        )

    def rank(comm):
        source, target = (generator_of(comm, sharding) for sharding in (before, after))
        for prompt in PROMPTS:
            source.submit(prompt, max_new_tokens=12)
        for _ in range(2):
            source.step()
        moved = am.generation.move_requests(source, target, comm)
        assert source.num_unfinished == 0
        begun = [len(request.tokens) for request in moved]
        target.step()
        am.generation.save_requests(target, tmp_path / "saved")
        loaded = generator_of(comm, before)
        return begun, finish(loaded, am.generation.load_requests(loaded, tmp_path / "saved")), finish(target, moved)

    for begun, of_files, tokens in on_virtual_ranks(2, rank):
        assert 0 == min(begun) < max(begun)
        assert tokens == of_files == wanted


def test_damaged_states_are_refused(tmp_path):
    model = model_of("lfm2")

    def load(comm):
        generator = am.Generator(model, None, comm, cache_tokens=64)
        with pytest.raises(ValueError, match=r"states-00000\.bin is damaged: it must have"):
            am.generation.load_requests(generator, tmp_path)
        assert generator.num_unfinished == 0

    generator = am.Generator(model, cache_tokens=64)
    generator.submit(PROMPTS[1], max_new_tokens=NEW)
    generator.step()
    am.generation.save_requests(generator, tmp_path)
    (file,) = tmp_path.glob("states-*")
    data = file.read_bytes()
    file.write_bytes(bytes([*data[:-1], data[-1] ^ 1]))
    on_virtual_ranks(2, load)
    file.write_bytes(data[:-1])
    on_virtual_ranks(1, load)


@pytest.mark.parametrize(
    ("kind", "sharding"),
    [
        ("qwen3_next", am.DecodeSharding(tp=2)),
        sweep("qwen3_next", am.DecodeSharding(kvdp=2, cp=2)),
        sweep("qwen3_5_text", am.DecodeSharding(tp=2, cp=2)),
        sweep("qwen3_5_text", am.DecodeSharding(kvdp=3)),
    ],
    ids=str,
)
def test_sharded_weights(kind, sharding):
    """Chunks whose tokens are divided over ranks and chunks that are too short, drafts, beams, and a second turn."""
    model, block = model_of(kind), 32 * sharding.cp
    prompt = tokens_of(block + 8, 1)
    wanted = [expected(model, each) for each in [*PROMPTS, prompt]]
    turn = [*prompt, *wanted[-1], *tokens_of(9, 2)]
    wanted += [expected(model, turn), expected(model, PROMPTS[1], num_beams=2)]

    def rank(comm):
        part = am.models.shard_model(model, sharding, comm)
        generator = am.Generator(part, None, comm, cache_tokens=512, max_sequences=6, prefill_chunk=16)
        found = finish(generator, [generator.submit(each, max_new_tokens=NEW) for each in PROMPTS])
        found += finish(generator, [generator.submit(prompt, max_new_tokens=NEW, speculative=True)])
        second = generator.submit(turn, max_new_tokens=NEW, speculative=True)
        found += finish(generator, [second, generator.submit(PROMPTS[1], max_new_tokens=NEW, num_beams=2)])
        return found, second.cached

    for found, cached in on_virtual_ranks(sharding.ranks, rank):
        assert found == wanted
        assert cached == block
