"""Raises an error in another thread: the caller of a comm, which may wait for the device."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from attnmesh.comm.health.group_store import CommError

lock = threading.RLock()
"""Held while an error becomes known, and while it is sent or withdrawn: it is raised once."""
_sent: dict[int, CommError] = {}
"""Errors that are to be raised in threads, and have not been yet."""
_uninterrupted: dict[int, CommError | None] = {}
"""Threads in which no error is to be raised now, and the error that is to be raised later."""


class Caller:
    """The thread that makes the calls of a comm.

    Python raises an error that is sent to it as soon as the thread runs Python code again. A thread that waits for the
    device, in `torch.cuda.synchronize()` or `item()`, raises when that returns.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def remember_thread(self) -> None:
        """This thread makes calls. A thread of autograd does not count: the thread that called backward raises."""
        if torch._C._current_graph_task_id() == -1:
            self._thread = threading.get_ident()

    def send(self, error: CommError) -> None:
        """Raise an error in the thread, unless another comm has sent one that has not been raised yet."""
        with lock:
            if self._thread in _uninterrupted:
                _uninterrupted[self._thread] = _uninterrupted[self._thread] or error
            elif self._thread not in _sent and _set_async_exception(self._thread, _class_of(error)):
                _sent[self._thread] = error

    def withdraw(self) -> None:
        """Do not raise an error that was sent and has not been raised yet. Call it before raising in any other way."""
        with lock:
            for thread in (self._thread, threading.get_ident()):
                _take_back(thread)
                if thread in _uninterrupted:
                    _uninterrupted[thread] = None


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Around what must not be left half-way: an error that is sent to this thread meanwhile is raised at the end."""
    thread = threading.get_ident()
    with lock:
        if (error := _take_back(thread)) is not None:
            raise error
        _uninterrupted[thread] = None
    try:
        yield
    finally:
        with lock:
            error = _uninterrupted.pop(thread)
        if error is not None:
            raise error


def _take_back(thread: int) -> CommError | None:
    """An error that was sent to a thread and has not been raised."""
    error = _sent.pop(thread, None)
    if error is not None:
        _set_async_exception(thread, None)
        _finish_signal()
    return error


def _class_of(error: CommError) -> type[CommError]:
    """A class, because Python raises classes in other threads. An instance equals the error, also after pickling."""

    class SentError(CommError):
        def __init__(self, *_: object) -> None:
            super().__init__(str(error), error.causes)
            _sent.pop(threading.get_ident(), None)

        def __reduce__(self) -> tuple[type[CommError], tuple[str, tuple[str, ...]]]:
            return CommError, (str(error), error.causes)

    SentError.__name__ = SentError.__qualname__ = CommError.__name__
    SentError.__module__ = CommError.__module__
    return SentError


class _NoError(BaseException):
    """Raised and caught at once."""


def _finish_signal() -> None:
    """Let Python notice that nothing is to be raised any more.

    Python 3.11 and 3.12 keep looking for an exception that was taken back until they have raised one, and 3.11 does
    nothing else as soon as a debugger or a coverage tool traces the program.
    """
    with suppress(_NoError):
        _set_async_exception(threading.get_ident(), _NoError)
        for _ in range(100):  # it is raised at the end of a call or of a turn
            time.sleep(0)


def _set_async_exception(thread: int, exception: type[BaseException] | None) -> bool:
    """Whether the thread exists."""
    return bool(
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread), None if exception is None else ctypes.py_object(exception)
        )
    )
