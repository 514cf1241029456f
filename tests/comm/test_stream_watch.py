"""Operations that do not complete in time are noticed beside the rank, and its thread raises the error once."""

import pickle
import subprocess
import sys
import threading
import time

from attnmesh.comm import CommError
from attnmesh.comm.caller_error import CallerError
from attnmesh.comm.stream_watch import StreamWatch


class Event:
    """As one of CUDA."""

    def __init__(self, done: bool = False) -> None:
        self.done = done

    def query(self) -> bool:
        return self.done


class Overdue:
    def __init__(self) -> None:
        self.names: list[str] = []

    def note(self, operation) -> None:
        self.names.append(operation.name)


def test_the_oldest_operation_that_has_not_completed_is_known():
    overdue, now = Overdue(), time.monotonic()
    watch, events = StreamWatch(overdue.note), [Event(), Event(True), Event()]
    for number, event in enumerate(events):
        watch.add(str(number), now - 3 + number, 60, event)
    assert watch.oldest().name == "0"
    assert watch.oldest(age=100) is None
    events[0].done = True
    assert watch.oldest().name == "2"
    assert watch.oldest(age=2) is None
    events[2].done = True
    assert watch.oldest() is None


def test_an_operation_that_does_not_complete_in_time_is_reported():
    overdue = Overdue()
    watch, event = StreamWatch(overdue.note), Event()
    watch.add("ring", time.monotonic(), 0.3, event)
    watch.report_overdue()
    assert not overdue.names
    deadline = time.monotonic() + 5
    while not overdue.names and time.monotonic() < deadline:  # the thread notices
        time.sleep(0.02)
    assert overdue.names[0] == "ring"
    event.done = True


def test_a_thread_that_waits_raises_the_error_once_and_its_result_is_not_used():
    error, released, used, caught = CallerError(), threading.Event(), [], []
    ready = threading.Event()

    def rank() -> None:
        error.remember_thread()
        try:
            ready.set()
            used.append(released.wait(5))  # as in torch.cuda.synchronize()
        except CommError as raised:
            caught.append(raised)
            time.sleep(0.01)  # a second one would come here

    thread = threading.Thread(target=rank)
    thread.start()
    ready.wait(5)
    error.send("rank 1 did not arrive")
    released.set()
    thread.join(5)
    assert not used
    assert [str(raised) for raised in caught] == ["rank 1 did not arrive"]
    again = pickle.loads(pickle.dumps(caught[0]))
    assert type(again) is CommError
    assert str(again) == "rank 1 did not arrive"


def test_an_error_that_is_raised_otherwise_is_withdrawn():
    error, ready, withdrawn, ended = CallerError(), threading.Event(), threading.Event(), []

    def rank() -> None:
        error.remember_thread()
        ready.set()
        ended.append(withdrawn.wait(5))

    thread = threading.Thread(target=rank)
    thread.start()
    ready.wait(5)
    with error.lock:
        error.send("late")
        error.withdraw()
    withdrawn.set()
    thread.join(5)
    assert ended == [True]


TRACED = """
import sys
from attnmesh.comm import CommError
from attnmesh.comm.caller_error import CallerError

error = CallerError()
try:
    error.send("raised")
    while True:
        pass
except CommError:
    error.withdraw()  # has been raised
try:
    with error.lock:
        error.send("raised by the lock's end at the latest")
except CommError:
    error.withdraw()
sys.settrace(lambda *_: None)
(lambda: None)()
print("traced")
"""


def test_a_program_can_be_traced_after_an_error_was_withdrawn():
    done = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, text=True, timeout=60)
    assert done.stdout == "traced\n", done.stderr
