"""Models with recurrent layers generate the tokens of Transformers, on any number of ranks."""

import pytest
import torch

import attnmesh as am
from helpers.cases import first, in_turn
from helpers.models import on_virtual_ranks
from helpers.recurrent_models import MODELS, recurrent_model

FEW = [("bamba", 2), ("lfm2", 3), ("mamba2", 2)]  # with attention of few and many layers, and without
PROMPTS = [torch.randint(1, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (40, 7, 1, 23)]
NEW = 6


def model_of(kind):
    model = recurrent_model(kind).eval()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def expected(model, prompt, new=NEW, **how):
    """The tokens of one process with Transformers' own attention and cache."""
    model.set_attn_implementation("eager")
    tokens = model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False, **how)[
        0, len(prompt) :
    ].tolist()
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

    for greedy, of_beams in on_ranks(model, world, work, prefill_chunk=16):
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


def test_no_prefix_is_reused():
    """There are no states of earlier tokens."""
    model = model_of("lfm2")
    wanted = expected(model, PROMPTS[0])

    def work(generator):
        tokens = [finish(generator, [generator.submit(PROMPTS[0], max_new_tokens=NEW)])[0] for _ in range(2)]
        return tokens, generator.stats.reused_tokens

    for tokens, reused in on_ranks(model, 1, work):
        assert tokens == [wanted, wanted]
        assert reused == 0


def test_log_probabilities_of_a_prompt():
    """Chunks over ranks compute the logits of all their tokens, and leave the states as they are without."""
    model = model_of("bamba")
    wanted = model(torch.tensor([PROMPTS[0]]), use_cache=False).logits[0].log_softmax(-1)
    tokens = expected(model, PROMPTS[0])

    def work(generator):
        request = generator.submit(PROMPTS[0], max_new_tokens=NEW, prompt_logprobs=0)
        return finish(generator, [request])[0], [each.logprob for each in request.prompt_logprobs]

    for found, logprobs in on_ranks(model, 2, work, prefill_chunk=16):
        assert found == tokens
        each = wanted[torch.arange(len(PROMPTS[0]) - 1), PROMPTS[0][1:]]
        torch.testing.assert_close(torch.tensor(logprobs), each.detach(), rtol=1e-4, atol=1e-4)


def test_what_needs_states_of_earlier_tokens_is_refused():
    def work(generator):
        with pytest.raises(ValueError, match="speculative must be False for a model with recurrent layers"):
            generator.submit(PROMPTS[0], max_new_tokens=NEW, speculative=True)
        generator.submit(PROMPTS[0], max_new_tokens=NEW)
        generator.step()
        with pytest.raises(ValueError, match="requests of a model with recurrent layers must stay on their ranks"):
            generator.states()

    on_ranks(model_of("lfm2"), 1, work)
