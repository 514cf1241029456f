"""Every architecture over ranks: logits, loss and every gradient equal those of one process with eager attention."""

import pytest
import torch

import attnmesh as am
from helpers.cases import in_turn
from helpers.models import TYPES, attnmesh_model, on_virtual_ranks, random_ids, transformers_model
from helpers.packed_batches import LENGTH, ROWS, check

SHORT = (((0, 6), (6, 17)), ((3, 15),))  # packed, and padded on both sides


def rows_of(kind):
    """Of Llama 4, Transformers counts chunks and scales by the index in the row: documents must begin there."""
    return (((0, 18),), ((0, 15),)) if kind == "llama4_text" else SHORT


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_packed_and_padded_documents_of_every_architecture(kind):
    check(kind, 2, rows=rows_of(kind), length=18)


def test_packed_documents_of_llama_4_are_those_of_a_row_of_transformers():
    ids = torch.tensor([random_ids(18, 1), random_ids(18, 2)])
    positions = torch.tensor([[*range(6), *range(12)], [*range(11), *range(7)]])
    wanted = transformers_model("llama4_text", torch.float64)(input_ids=ids, position_ids=positions, use_cache=False)

    def rank(comm):
        inputs = am.shard_inputs(am.ContextParallel(comm), ids, position_ids=positions)
        return inputs["attention_pass"].unshard(attnmesh_model("llama4_text")(**inputs).logits.detach())

    alone = attnmesh_model("llama4_text")(input_ids=ids, position_ids=positions, use_cache=False).logits
    for found in (alone, *on_virtual_ranks(2, rank)):
        torch.testing.assert_close(found.double(), wanted.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "world", "layout"),
    in_turn(TYPES, [1, 2, 3, 4], [am.Zigzag(), am.Striped(), am.Contiguous()]),
    ids=str,
)
def test_every_architecture_everywhere(kind, world, layout):
    check(kind, world, rows=rows_of(kind), length=18, layout=layout, balance=False)
    check(kind, world, rows=(((0, 23),),) * 2, length=23, layout=layout)
    if kind != "llama4_text":
        check(kind, world, rows=ROWS, length=LENGTH, layout=layout)
