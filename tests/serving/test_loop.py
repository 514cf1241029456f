"""What is kept of requests between their threads and the loop, and what is counted of an answer."""

from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from attnmesh.generation.sampling import Sampling
from attnmesh.serving import loop, metrics
from attnmesh.serving.loop import Submission


def test_a_finished_request_leaves_its_room_and_hears_no_more():
    queue, heard = loop.RequestQueue(2), []
    submission = Submission(0, [1, 2], 3, Sampling())
    first, second = queue.submit([submission] * 2, heard.append)
    with pytest.raises(loop.QueueFull):
        queue.check_room(1)
    queue.report(first, finish_reason="stop")
    queue.report(first, finish_reason="stop")
    queue.report(second, error=ValueError("no"))
    assert len(queue) == 0
    assert [(event.choice, event.finish_reason, str(event.error)) for event in heard] == [
        (0, "stop", "None"), (1, None, "no"),
    ]  # fmt: skip
    queue.check_room(2)


@pytest.mark.parametrize(("timeout", "idle"), [(0.4, 0.1), (1e6, loop._MAX_IDLE)])
def test_idle_ranks_look_for_requests_well_within_the_timeout(timeout, idle):
    generator = SimpleNamespace(comm=SimpleNamespace(timeout=timeout))
    assert loop.ServingLoop(generator, None, should_stop=lambda: False, grace=0)._max_idle == pytest.approx(idle)


def test_times_of_an_answer(monkeypatch):
    """The first token from the request, others from the one before, the whole from the request."""
    clock = iter([10.0, 13.0, 14.0, 16.0, 21.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    seen = {name: [] for name in ("first_token", "next_token", "latency", "new_tokens", "finished")}
    observers = {name: SimpleNamespace(observe=seen[name].append) for name in ("first_token", "next_token", "latency")}
    counted = SimpleNamespace(inc=lambda: seen["new_tokens"].append(1))
    finished = SimpleNamespace(labels=lambda reason: SimpleNamespace(inc=lambda: seen["finished"].append(reason)))
    times = metrics.AnswerTimes(SimpleNamespace(**observers, new_tokens=counted, finished=finished))
    for _ in range(3):
        times.token()
    times.end("stop")
    assert seen == {
        "first_token": [3.0], "next_token": [1.0, 2.0], "latency": [11.0], "new_tokens": [1] * 3, "finished": ["stop"],
    }  # fmt: skip
