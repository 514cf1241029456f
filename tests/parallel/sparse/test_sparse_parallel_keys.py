"""The checksum of indices, slots by owner of their keys, and the work of a ring."""

import itertools

import pytest
import torch

import attnmesh as am
from attnmesh.ops.sparse import torch_backend
from attnmesh.ops.sparse.arguments import RowBounds, SparseMask
from attnmesh.parallel.sparse import groups
from attnmesh.parallel.sparse.groups import SparseGroups, checksum
from attnmesh.parallel.sparse.keys import SequenceSharding, SlotsByOwner
from attnmesh.testing.sparse import SCALE
from helpers.cases import first
from helpers.sparse_grid import LAYOUTS, random_problem, run_grid


def bounds_of(indices: torch.Tensor, s_kv: int = 1000, **mask) -> RowBounds:
    return SparseMask(**mask).bounds(indices.shape[0], s_kv, indices.shape[1], indices.device)


def checksum_of(indices, **mask) -> int:
    return checksum(indices, bounds_of(indices, **mask)).item()


def test_every_change_of_a_slot_and_every_exchange_of_two_changes_the_checksum():
    indices = torch.randint(0, 1000, (4, 6), generator=torch.Generator().manual_seed(0)).int()
    seen = {checksum_of(indices)}
    changes = 0
    for at in range(24):
        for step in (1, -1, 7, 256):
            other = indices.clone()
            other.view(-1)[at] = (other.view(-1)[at] + step) % 1000
            seen.add(checksum_of(other))
            changes += 1
    for a, b in itertools.combinations(range(24), 2):
        other = indices.clone()
        other.view(-1)[[a, b]] = other.view(-1)[[b, a]]
        seen.add(checksum_of(other))
        changes += 1
    assert len(indices.unique()) == 24
    assert len(seen) == changes + 1


def test_slots_that_name_no_key_name_none_alike():
    indices = torch.tensor([[1, 2, 3, -1]], dtype=torch.int32)
    for other in ([1, 2, 3, 1000], [1, 2, 3, -7]):
        assert checksum_of(torch.tensor([other]).int()) == checksum_of(indices)
    assert checksum_of(indices, k_end=torch.tensor([3])) == checksum_of(torch.tensor([[1, 2, -1, -1]]).int())
    assert checksum_of(indices, topk_length=torch.tensor([2])) != checksum_of(indices)


def test_the_checksum_is_the_same_in_any_pieces(monkeypatch):
    indices = torch.randint(-2, 1001, (37, 5), dtype=torch.int32)
    whole = checksum_of(indices)
    for most in (1, 12, 99):
        monkeypatch.setattr(groups, "_MAX_ELEMENTS", most)
        assert checksum_of(indices) == whole


@pytest.mark.parametrize("layout", first(1, LAYOUTS))
def test_every_valid_slot_belongs_to_one_owner_and_comes_back_to_its_place(layout):
    problem = random_problem(11, 13, causal=True)
    for world in (2, 3, 20):
        for at in range(world):
            comm = type("Comm", (), {"world": world, "rank": at})
            groups_at = SparseGroups(comm, comm)
            sharding = SequenceSharding(groups_at, LAYOUTS[layout], True, 11, 13, torch.device("cpu"))
            bounds = bounds_of(problem.indices, 13, causal=True)
            slots, total = SlotsByOwner(problem.indices, bounds, sharding), torch.full((11, 7), -1)
            for owner in range(world):
                local, positions = slots.of(owner), LAYOUTS[layout].positions(13, world, owner)
                valid = local.bounds.valid(local.indices)
                counts = valid.sum(1)
                assert (valid == (torch.arange(valid.shape[1]) < counts[:, None])).all()  # leading columns
                assert local.indices.shape[1] == max(1, int(counts.max()))  # no wider than needed
                keys = torch.full_like(local.indices, -5)
                keys[valid] = positions[local.indices[valid].long()].int()
                assert (local.gather(problem.indices)[valid] == keys[valid]).all()
                assert (total[:, :-1].gather(1, local.slot.clamp(max=5))[valid] == -1).all()
                local.scatter(total, keys.long())
            assert (total[:, :-1] == torch.where(bounds.valid(problem.indices), problem.indices, -1)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_ring_computes_on_every_slot_once(layout, monkeypatch):
    counted = []
    plain = torch_backend.forward

    def counting(call, *args):
        counted.append(int(call.bounds.valid(call.indices).sum()))
        return plain(call, *args)

    monkeypatch.setattr(torch_backend, "forward", counting)
    problem = random_problem(11, 13, dtype=torch.float32)

    def program(place):
        mine = problem.shard(place)
        parallel = am.SparseParallel(cp=place.cp, length=11, key_length=13, layout=place.layout, schedule="ring")
        parallel.sparse_attention(mine.q, mine.kv, mine.indices, scale=SCALE)

    run_grid(1, 4, LAYOUTS[layout], program)
    assert len(counted) == 16
    assert sum(counted) == int(bounds_of(problem.indices, 13).valid(problem.indices).sum())
