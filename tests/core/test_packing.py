"""Packings of long batches are found without torch's threads, which a step would wait for on a busy host."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnmesh.core.masks import Documents, packing_of
from attnmesh.integrations.transformers_attention import check_gaps, document_starts
from attnmesh.training.batch import lengths_to_positions

GRAIN = 32768  # elements from which on torch divides an operation among threads
VIEWS = {"view", "slice", "select", "expand", "alias", "as_strided", "detach", "lift_fresh"}


class LargeOperations(TorchDispatchMode):
    """Collects the operations of torch on many elements."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.partition("::")[2]
        if name not in VIEWS and any(isinstance(x, Tensor) and x.numel() >= GRAIN for x in (*args, result)):
            self.found.add(name)
        return result


def test_packings_of_long_rows_use_no_threads_of_torch():
    lengths = [[2048] * 64, [40000, 3, 91069 - 50]]
    shape = (2, 131072)
    real = torch.ones(shape, dtype=torch.bool)
    real[1, -50:] = False
    with LargeOperations() as operations:
        positions = lengths_to_positions(lengths, real, shape)
        starts = document_starts(positions)
        check_gaps(positions, starts, real)
        packing = packing_of(starts, real, shape)
        numbers = packing.numbers()
    assert operations.found == set()
    assert packing.mask.visible(torch.tensor([2047, 2048]), torch.tensor([0, 0])).tolist() == [
        [True, False],
        [True] * 2,
    ]
    assert numbers[:, [0, 2047, 2048, -51, -50]].tolist() == [[1, 1, 2, 64, 64], [1, 1, 1, 3, -1]]
    with LargeOperations() as operations:
        assert packing_of(None, None, shape).mask is None
        assert packing_of(starts[:1], None, (1, shape[1])).mask == Documents(lengths[0])
    assert operations.found == set()


def test_documents_are_found_where_their_positions_are():
    starts = document_starts(torch.zeros(2, 5, dtype=torch.long, device="meta"))
    assert (starts.device.type, starts.dtype, starts.shape) == ("meta", torch.bool, (2, 5))
