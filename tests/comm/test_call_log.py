"""The log of calls: equal for equal calls in the same order, different for anything else."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from attnmesh.comm.base import CallLog, LoggedCall, call_text, more_calls, out_of_step, text_digest


def log_of(*texts: str) -> CallLog:
    log = CallLog()
    for text in texts:
        log.add(text, text_digest(text))
    return log


@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abc"), max_size=8))
def test_digests_are_equal_exactly_for_equal_calls(a, b):
    assert (log_of(*a).digest == log_of(*b).digest) == (a == b)


def test_a_digest_is_the_same_in_every_process():
    assert text_digest("attention(mask=Causal())") == 0x78B639C797880C03


def test_the_first_difference_is_described():
    logs = {0: log_of("a", "b", "c").latest(8), 1: log_of("a", "b", "c").latest(8), 2: log_of("a", "x", "c").latest(8)}
    assert out_of_step(logs) == "ranks are out of step at call 2: b on ranks 0, 1 but x on rank 2"


def test_a_rank_that_is_behind_is_not_out_of_step():
    logs = {0: log_of("a", "b").latest(8), 1: log_of("a").latest(8), 2: []}
    assert out_of_step(logs) is None
    assert more_calls(logs) == (
        "ranks are out of step: 2 calls, the last one b, on rank 0 but 1 call, the last one a, on rank 1 but no call "
        "on rank 2"
    )


def test_a_difference_before_the_calls_that_are_known():
    logs = {0: log_of("a", *"bcdef").latest(2), 1: log_of("x", *"bcdef").latest(2)}
    text = out_of_step(logs)
    assert text is not None
    assert text.startswith("ranks are out of step at call 5 or before: e [digest ")


def test_the_latest_and_some_earlier_digests_are_published():
    log = CallLog()
    for number in range(5000):
        log.add("call", number)
    sampled = log.sampled_digests()
    assert len(log.digests()) == 4096
    assert set(range(4985, 5001)) <= set(sampled)
    assert {number for number in sampled if number < 4985} == {n for n in range(905, 4985) if n % 64 == 0}
    assert log.latest(1) == [LoggedCall(5000, log.digest, "call")]


def test_texts():
    assert call_text("f", None) == "f"
    assert call_text("f", {"n": 1, "shape": (2, 3)}) == "f(n=1, shape=(2, 3))"
    assert call_text("f", ({"n": 1}, ("append", {"tokens": 1}))) == "f(n=1) after append(tokens=1)"
    assert call_text("f", ({"n": 1}, None)) == "f(n=1)"


def test_shapes_are_shown_as_tuples():
    text = call_text("exchange", {"shape": torch.Size([1, 2]), "shapes": [torch.Size([3])], "n": 4})
    assert text == "exchange(shape=(1, 2), shapes=((3,),), n=4)"
