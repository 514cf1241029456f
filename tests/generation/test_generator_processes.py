"""Models over real ranks: processes that speak gloo."""

import pytest
import torch

import attnmesh as am
from attnmesh.generation.engine import Engine
from attnmesh.generation.generator import Generator
from attnmesh.generation.sampling import Sampling
from attnmesh.plan.decode import DecodeSharding
from attnmesh.training.batch import shard_inputs
from helpers.models import attnmesh_model, generated_rows, greedy_tokens, on_virtual_ranks, random_ids
from helpers.processes import Died, Raised, run_processes

PROMPTS = [random_ids(n, seed, high=30) * 2 for n, seed in ((11, 1), (17, 2))]
MOST = 8


def trained_and_generated(comm):
    """The same program on processes and virtual ranks."""
    model, ids = attnmesh_model("llama"), torch.tensor([random_ids(37, 3), random_ids(37, 4)])
    labels = ids.clone()
    labels[:, :9] = -100
    ranks = am.ContextParallel(comm)
    with torch.autograd.set_multithreading_enabled(False):
        out = model(**shard_inputs(ranks, ids, labels))
        gradients = torch.autograd.grad(out.loss, list(model.parameters()), materialize_grads=True)
    rows = []
    for sharding, speculative in ((DecodeSharding(cp=2), True), (DecodeSharding(kvdp=2), False)):
        generator = Generator(model, None, comm, cache_tokens=400, max_sequences=2, sharding=sharding, prefill_chunk=20)
        rows.append(generated_rows(generator, PROMPTS, max_new_tokens=MOST, speculative=speculative))
        rows.append(generated_rows(generator, PROMPTS, max_new_tokens=MOST, sampling=Sampling(1.0, 0.9, seed=5)))
    return [out.loss.detach(), ranks.unshard(out.logits.detach(), 1, 37), *gradients], rows


@pytest.mark.sweep
def test_processes_do_what_virtual_ranks_do():
    expected = [greedy_tokens("llama", prompt, MOST) for prompt in PROMPTS]
    virtual = on_virtual_ranks(2, trained_and_generated)
    for (found, rows), (wanted, wanted_rows) in zip(run_processes(2, trained_and_generated), virtual, strict=True):
        assert rows == wanted_rows
        assert rows[0] == rows[2] == expected
        for mine, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)


def killed_in_the_middle(comm):
    step, steps = Engine.decode, []

    def last_step(self, *args):
        steps.append(1)
        if comm.rank == 1 and len(steps) == 3:
            import os

            os._exit(9)
        return step(self, *args)

    Engine.decode = last_step
    return generated_rows(
        Generator(attnmesh_model("llama"), None, comm, cache_tokens=400), PROMPTS[:1], max_new_tokens=MOST, stop=()
    )


@pytest.mark.sweep
def test_a_rank_that_is_killed_ends_the_others_wait():
    alive, dead = run_processes(2, killed_in_the_middle, strict=False)
    assert dead == Died(9)
    assert isinstance(alive, Raised)
    assert alive.type == "CommError"
