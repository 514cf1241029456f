"""What ranks send is what the plan predicts: in a decode step with sharded weights, and of a prompt to be stored."""

import copy
from functools import cache
from pathlib import Path

import pytest
import torch

import attnmesh as am
from attnmesh.generation.generator import Generator
from attnmesh.generation.models import kv_bytes_per_token
from attnmesh.plan.decode import DecodeShape
from attnmesh.plan.reshard import Part, Piece, plan_moves
from attnmesh.planner.catalog import cluster
from attnmesh.planner.cost import bytes_sent, messages_sent
from attnmesh.planner.decode import DecodeRequest, decode_option
from attnmesh.planner.models import model_from_config
from helpers.cases import sweep
from helpers.models import LAYOUTS, VOCABULARY, attnmesh_model, on_virtual_ranks, random_ids

# Groups have as many each: a plan gives those that are left to the last groups, and a Generator to the first.
PROMPTS = [random_ids(n, seed, high=30) for n, seed in ((9, 1), (16, 2), (5, 4), (7, 5), (12, 6), (8, 7))]


@cache
def model(kind):
    return copy.deepcopy(attnmesh_model(kind)).to(torch.float16)  # the planner's activations have two bytes


def step_traffic(kind, sharding):
    """What each rank sends in one decode step of all prompts, by operation: messages and bytes."""

    def rank(comm):
        generator = Generator(
            am.models.shard_model(model(kind), sharding, comm), None, comm, cache_tokens=200, max_sequences=len(PROMPTS)
        )
        tokens = generator.generate(PROMPTS, max_new_tokens=4, stop=[])
        for _ in range(2 * len(PROMPTS)):  # prefill, and a decode step
            next(tokens)
        comm.traffic.reset()
        next(tokens)
        sent = dict(comm.traffic.by_op)
        tokens.close()
        return sent

    return on_virtual_ranks(sharding.ranks, rank)


@pytest.mark.parametrize(
    ("kind", "sharding"),
    [
        ("llama", am.DecodeSharding(tp=2)),
        sweep("llama", am.DecodeSharding(kvdp=2, cp=2)),
        sweep("llama", am.DecodeSharding(cp=3)),
        sweep("llama", am.DecodeSharding(tp=2, kvdp=3)),
        sweep("llama", am.DecodeSharding(tp=2, cp=3)),
        sweep("qwen3", am.DecodeSharding(tp=4)),
        sweep("qwen3_moe", am.DecodeSharding(tp=2, kvdp=2)),
    ],
    ids=str,
)
def test_a_decode_step_sends_what_is_planned(kind, sharding):
    config, ranks = model(kind).config, sharding.ranks
    layers, batch = config.num_hidden_layers, len(PROMPTS)
    heads = config.num_attention_heads, config.num_key_value_heads
    shape = DecodeShape(batch, 1, *heads, config.head_dim, config.hidden_size, itemsize=2)
    in_layers = []
    for rank, sent in enumerate(step_traffic(kind, sharding)):
        planned = bytes_sent(sharding, shape, rank)
        summed = planned.pop("projection")  # attention, MLP, and once the embedding
        assert sent.pop("all_reduce") == (2 * layers + 1, (2 * layers + 1) * summed)
        vocabulary = len(sharding.q_heads(rank, VOCABULARY))
        gathered = (ranks - 1) * batch * (vocabulary * 2 + 8)  # logits, and the tokens that each rank chose
        exchanged = layers * sum(planned.values())
        assert sum(nbytes for _, nbytes in sent.values()) == gathered + exchanged
        if ranks not in (sharding.kvdp, sharding.cp):  # otherwise they are collectives of all ranks
            parts = messages_sent(sharding, shape, rank, combine="all_to_all").values()
            messages = layers * sum(nbytes > 0 for part in parts for nbytes in part.values())
            assert sent.get("exchange", (0, 0)) == (messages, exchanged)
        in_layers.append(exchanged + 2 * layers * summed)
    assert ranking_bytes(config, sharding, batch) == max(in_layers)


@pytest.mark.parametrize(
    ("kind", "layout", "interleave"),
    [("llama", "zigzag", 1), ("deepseek_v3", "contiguous", 4), sweep("gpt_oss", "striped", 1)],
)
def test_a_prompt_is_sent_to_where_it_is_stored_once(kind, layout, interleave):
    """Keys and values, or latents, of every layer in its dtype. The striped layout has each where it is stored."""
    length, config = 53, model(kind).config
    sharding = am.DecodeSharding(cp=3, interleave=interleave)
    computed = [LAYOUTS[layout].ranges(length, 3, rank) for rank in range(3)]
    stored = [sharding.position_shard(rank).ranges(length) for rank in range(3)]
    parts = ([Part(range(1), (Piece(0, 0, each),)) for each in positions] for positions in (computed, stored))
    moves = [move for move in plan_moves(*parts) if move.source != move.target]
    assert bool(moves) == (layout != "striped")

    def rank(comm):
        generator = Generator(
            model(kind), None, comm, cache_tokens=100, sharding=sharding, layout=LAYOUTS[layout], schedule="ring"
        )
        comm.traffic.reset()
        list(generator.generate([random_ids(length, 3)], max_new_tokens=1, stop=[]))
        return comm.traffic.by_op.get("all_to_all", (0, 0))

    per_token = kv_bytes_per_token(config, "fp16")
    for number, sent in enumerate(on_virtual_ranks(3, rank)):
        planned = per_token * sum(move.tokens for move in moves if move.source == number)
        assert sent == (config.num_hidden_layers if moves else 0, planned)


def ranking_bytes(config, sharding, batch):
    """The bytes that `attnmesh plan decode` shows."""
    values = {**config.to_dict(), "dtype": "bfloat16"}
    request = DecodeRequest(model_from_config(values, Path("config.json")), 20, batch, sharding.ranks, cluster("h200"))
    return decode_option(request, 1, sharding).sent
