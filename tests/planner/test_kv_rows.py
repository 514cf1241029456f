"""When a KVDP rank projects keys and values for its own sequences only."""

from attnmesh.planner.auto import own_rows_pay
from helpers.clusters import device

ROUND = device(flops=1e6, launch=1e-3)  # a launch is worth 1000 operations


def test_own_rows_pay_when_they_spare_more_than_a_launch():
    assert not own_rows_pay(0, 10**9, ROUND)  # one KVDP rank: all rows are its own
    assert not own_rows_pay(49, 10, ROUND)  # two operations for each row and number: 50 rows are a launch
    assert own_rows_pay(51, 10, ROUND)
