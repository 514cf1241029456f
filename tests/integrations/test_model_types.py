"""Every architecture over ranks: logits, loss and every gradient equal those of one process with eager attention."""

import pytest

import attnmesh as am
from helpers.models import KINDS, TYPES
from helpers.packed_batches import LENGTH, ROWS, check

# Packed and padded, in documents of whole chunks: Transformers counts the chunks of chunked attention in the row.
SHORT = (((0, 6), (6, 17)), ((3, 15),))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in KINDS)) for kind in TYPES]
)  # the others are in test_packed_batches.py and test_shard_inputs.py
def test_packed_and_padded_documents_of_every_architecture(kind):
    check(kind, 2, rows=SHORT, length=18)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [am.Zigzag(), am.Striped(), am.Contiguous()], ids=repr)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", TYPES)
def test_every_architecture_everywhere(kind, world, layout):
    check(kind, world, rows=SHORT, length=18, layout=layout, balance=False)
    check(kind, world, rows=(((0, 23),),) * 2, length=23, layout=layout)
    if kind != "llama4_text":  # the documents of which are of whole chunks
        check(kind, world, rows=ROWS, length=LENGTH, layout=layout)
