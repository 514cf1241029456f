"""Random operations against the model; and planted faults, each of which the same operations must find."""

import pytest
import torch
from cache_model import OPERATIONS, Pair, drive
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from attnmesh.kv_cache.block_manager import BlockManager, BlockPool
from attnmesh.kv_cache.pools import DeviceTables, Pools
from attnmesh.kv_cache.sequence import NewTokens, Sequence
from helpers.cases import first

SIZES = [
    {"block_size": 2, "num_blocks": 12},
    {"block_size": 3, "num_blocks": 7, "layers": 1, "max_length": 12},
    {"block_size": 1, "num_blocks": 14, "max_sequences": 3},
    {"block_size": 4, "num_blocks": 40, "max_sequences": 9, "max_length": 20},
]
IDS = [f"{sizes['num_blocks']}x{sizes['block_size']}" for sizes in SIZES]


# One of them every time, small enough to be full often; the others are sweeps.
@pytest.mark.parametrize(
    "sizes",
    [pytest.param(sizes, marks=pytest.mark.sweep if at else (), id=IDS[at]) for at, sizes in enumerate(SIZES)],
)
def test_random_operations(sizes):
    done = drive(2500, seed=1, **sizes).done
    # The run was worth something: all of it happened, and often.
    assert min(done[name] for name in ("found", "full", "evicted", *OPERATIONS)) >= 20, done


@pytest.mark.sweep
@pytest.mark.parametrize("sizes", SIZES, ids=IDS)
def test_many_random_operations(sizes):
    drive(10_000, seed=2, **sizes)


class CacheMachine(RuleBasedStateMachine):
    """The same operations, chosen by hypothesis, which finds the shortest run that fails."""

    def __init__(self):
        super().__init__()
        self.pair = Pair()

    @rule(operation=st.sampled_from(sorted(set(OPERATIONS))), random=st.randoms(use_true_random=False))
    def operate(self, operation, random):
        self.pair.step(operation, random)

    @invariant()
    def agrees(self):
        self.pair.check()


CacheMachine.TestCase.settings = settings(
    max_examples=12, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestCacheMachine = CacheMachine.TestCase


def forget_copy(monkeypatch):
    """A shared last block is replaced, but its content does not come along."""
    monkeypatch.setattr(Pools, "copy_blocks", lambda *_: None)


def share_and_write(monkeypatch):
    """No copy on write: whoever appends writes into the shared block."""
    real = BlockManager._touched_blocks
    monkeypatch.setattr(
        BlockManager, "_touched_blocks", lambda *args: [block._replace(is_copy=False) for block in real(*args)]
    )


def forget_reference(monkeypatch):
    """A block that is found again is not held."""
    monkeypatch.setattr(BlockPool, "acquire", lambda self, block: None)


def register_early(monkeypatch):
    """Blocks are findable as soon as their first layer is written."""
    monkeypatch.setattr(NewTokens, "__init__", early_init)
    monkeypatch.setattr(Sequence, "written", property(lambda self: self.length))


def early_init(self, slots, sequences, unwritten_layers, owner, window_slots):
    self.slots, self.window_slots = slots, window_slots
    self.sequences, self.unwritten_layers, self.owner = sequences, EarlySet(unwritten_layers), owner


class EarlySet(set):
    """Empty as soon as anything was taken out."""

    taken = False

    def discard(self, x):
        super().discard(x)
        self.taken = True

    def __bool__(self):
        return bool(len(self)) and not self.taken


def register_before_written(monkeypatch):
    """Tokens that wait for their layers count as written when later ones are."""
    monkeypatch.setattr(Sequence, "written", property(lambda self: self.length))


def keep_registered(monkeypatch):
    """A findable block that was truncated is written over, and still found."""
    monkeypatch.setattr(BlockPool, "remove_hash", lambda self, block: None)


def write_after_free(monkeypatch):
    """Slots stay valid after their tokens are truncated or freed, and belong to someone else by then."""
    monkeypatch.setattr(NewTokens, "drop", lambda *_: None)


def ignore_cache_key(monkeypatch):
    """Tenants find one another's blocks."""
    monkeypatch.setattr("attnmesh.kv_cache.cache.root_hash", lambda key: b"")


def forget_parents(monkeypatch):
    """A block is named by its own tokens alone."""
    import attnmesh.kv_cache.block_manager as block_manager

    real = block_manager.block_hash
    monkeypatch.setattr(block_manager, "block_hash", lambda parent, ids: real(b"", ids))


def release_twice(monkeypatch):
    """The blocks of a truncated sequence go back twice."""
    real = BlockPool.free

    def release(self, blocks):
        real(self, blocks)
        self.free_blocks.extend(
            block for block in blocks if not self.ref_counts[block] and block not in self.hash_of_block
        )

    monkeypatch.setattr(BlockPool, "free", release)


def lose_blocks(monkeypatch):
    """The last block of a freed sequence never goes back."""
    real = BlockPool.free
    monkeypatch.setattr(BlockPool, "free", lambda self, blocks: real(self, blocks[1:]))


def change_before_check(monkeypatch):
    """Room is looked for too late: a full cache has changed by then."""
    monkeypatch.setattr(BlockPool, "check_available", lambda self, needed, keep=(): None)


def stale_table(monkeypatch):
    """Only additions reach the table on the device."""
    real = DeviceTables._set
    monkeypatch.setattr(DeviceTables, "_set", lambda self, at, value: real(self, at, value) if value >= 0 else None)


FAULTS = [
    forget_copy, share_and_write, forget_reference, register_early, register_before_written, keep_registered,
    write_after_free, ignore_cache_key, forget_parents, release_twice, lose_blocks, change_before_check, stale_table,
]  # fmt: skip


@pytest.mark.parametrize(
    "fault",
    first(1, [pytest.param(fault, marks=[pytest.mark.sweep] * (fault is register_before_written)) for fault in FAULTS]),
)
def test_a_planted_fault_is_found(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError, KeyError, ValueError)):
        drive(5000, seed=1, **SIZES[0])


def test_moving_the_tables_is_found():
    pair = Pair()
    pair.cache.block_table = pair.cache.block_table.clone()
    with pytest.raises(AssertionError):
        pair.check()
    assert torch.equal(pair.cache.block_table, pair.cache._tables.block_tables[0])
