"""Checksums of values that must be equal on all ranks, and the calls in which they are compared."""

import pytest
import torch

from attnmesh.comm.base import CallLog
from attnmesh.parallel import checksums
from attnmesh.parallel.checksums import Checksum, ValueChecks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_equal_values_have_equal_checksums(dtype):
    x = torch.tensor([[1, 0, 1], [0, 0, 1]]).to(dtype)
    assert Checksum.of(x) == Checksum.of(x.t().contiguous().t())
    assert Checksum.of(x) != Checksum.of(x.flip(1))
    assert "[1, 0, 1, 0, ...]" in str(Checksum.of(x))


@pytest.mark.parametrize("shape", [(), (0,), (3,)])
def test_any_shape_has_a_checksum(shape):
    x = torch.ones(shape, requires_grad=True)
    assert Checksum.of(x) == Checksum.of(torch.ones(shape))


def test_a_device_is_read_in_the_first_calls_and_then_at_an_interval(monkeypatch):
    # On the host, a size of 0 stands for a device: nothing is read in every call.
    monkeypatch.setattr(checksums, "_READ_ALWAYS", 0)
    checks, read = ValueChecks(CallLog(), "test", first=3, every=5), []
    for call in range(12):
        read += [call] if checks.compared(sinks=torch.ones(2), slopes=None) else []
        checks.count()
    assert read == [0, 1, 2, 5, 10]


def test_values_on_the_host_are_read_in_every_call():
    checks = ValueChecks(CallLog(), "test", first=1, every=100)
    for _ in range(3):
        assert len(checks.compared(sinks=torch.ones(2), slopes=torch.ones(2))) == 2
        checks.count()
    assert not checks.compared(sinks=torch.ones(2, device="meta"))


@pytest.mark.parametrize("limit", [0, 1 << 24])
def test_a_storage_can_be_resized_after_it_was_read(limit, monkeypatch):
    monkeypatch.setattr(checksums, "_READ_ALWAYS", limit)
    x = torch.ones(4)
    Checksum.of(x)
    x.untyped_storage().resize_(0)  # as FSDP does
