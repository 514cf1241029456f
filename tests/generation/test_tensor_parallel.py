"""Linear maps that ranks compute together: the same numbers, and only where they are asked to."""

import copy

import pytest
import torch
from torch import nn

from attnmesh.generation.tensor_parallel import TensorParallel
from attnmesh.integrations.transformers_attention import register_attention
from helpers.models import attnmesh_model, logits_of, on_virtual_ranks, transformers_model
from helpers.small_models import small_model


class Mlp(nn.Module):
    def __init__(self, hidden=6, wide=10, bias=True):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(hidden, wide, bias), nn.Linear(hidden, wide, bias)
        self.down_proj = nn.Linear(wide, hidden, bias)

    def forward(self, x):
        return self.down_proj(self.gate_proj(x).sigmoid() * self.up_proj(x))


class Model(nn.Module):
    def __init__(self, vocabulary=11, **how):
        super().__init__()
        self.mlp, self.head = Mlp(**how), nn.Linear(6, vocabulary, bias=how.get("bias", True))

    def get_output_embeddings(self):
        return self.head

    def forward(self, x):
        return self.head(x + self.mlp(x))


@pytest.mark.parametrize(("world", "bias"), [(1, False), (2, True), (3, False), (7, False), (12, True)])
def test_together_they_make_the_same(world, bias):
    model, x = Model(bias=bias).double(), torch.randn(2, 3, 6).double()
    expected = model(x)

    def rank(comm):
        mine = copy.deepcopy(model)
        shared = TensorParallel(mine, comm)
        assert torch.equal(mine(x), expected)
        before = comm.traffic.bytes
        with torch.no_grad(), shared:
            together = mine(x)
        assert (comm.traffic.bytes > before) == (world > 1)
        assert torch.equal(mine(x), expected)  # as if nothing had been
        return together

    found = on_virtual_ranks(world, rank)
    torch.testing.assert_close(found[0], expected)
    assert all(torch.equal(each, found[0]) for each in found)


def test_one_model_serves_ranks_of_many_worlds():
    model, x = Model().double(), torch.randn(1, 6).double()
    expected = model(x)
    for world in (3, 2, 4):

        def rank(comm):
            shared = TensorParallel(model, comm)
            with torch.no_grad(), shared:
                return model(x)

        for found in on_virtual_ranks(world, rank):
            torch.testing.assert_close(found, expected)


def test_an_error_within_leaves_nobody_at_work():
    def rank(comm):
        model = Model()
        shared = TensorParallel(model, comm)
        with pytest.raises(OSError, match="gone"), shared:
            raise OSError("gone")
        before = comm.traffic.bytes
        model(torch.randn(1, 6))
        assert comm.traffic.bytes == before

    on_virtual_ranks(2, rank)


def test_maps_of_another_make_are_left_alone():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 3 * super().forward(x)

    model, x = Model(), torch.randn(1, 6)
    model.mlp.up_proj, model.head = Scaled(6, 10), Scaled(6, 11)
    expected = model(x)

    def rank(comm):
        shared = TensorParallel(model, comm)
        with torch.no_grad(), shared:
            return model(x), comm.traffic.bytes

    for found, sent in on_virtual_ranks(2, rank):
        assert torch.equal(found, expected)
        assert sent == 0


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        ("llama", [True, True]),
        ("bitnet", [False, False]),  # a norm over all intermediate activations
        ("gemma3n_text", [False, True, False, True]),  # some layers keep the largest activations only
    ],
)
def test_only_mlps_that_compute_element_by_element_are_divided(kind, parallel):
    register_attention()
    with torch.random.fork_rng():
        model = small_model(kind, "attnmesh")

    def rank(comm):
        with TensorParallel(model, comm):
            pass

    on_virtual_ranks(2, rank)
    assert ["forward" in vars(layer.mlp.down_proj) for layer in model.model.layers] == parallel


def test_a_model_that_was_shared_is_trained_and_copied_as_before():
    model = copy.deepcopy(attnmesh_model("llama"))

    def rank(comm):
        TensorParallel(model, comm)

    on_virtual_ranks(2, rank)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        found = copied(input_ids=torch.tensor([[9, 10, 11]])).logits[0]  # of its own weights
    torch.testing.assert_close(found, logits_of("llama", [9, 10, 11]), rtol=1e-4, atol=1e-4)
    assert set(copied.state_dict()) == set(transformers_model("llama").state_dict())
    copied(input_ids=torch.tensor([[9, 10, 11]])).logits.sum().backward()
    assert all(weight.grad is not None for weight in copied.parameters())
