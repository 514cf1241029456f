"""An error that is raised in another thread: the one that calls a comm, and that may wait for the device."""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import suppress

import torch

from attnmesh.comm.group_store import CommError


class CallerError:
    """Raises CommError in the thread that made the latest calls, as soon as it runs Python code again.

    A thread that waits for the device, in `torch.cuda.synchronize()` or `item()`, raises when that returns. Hold `lock`
    while the error becomes known, and call `withdraw` before raising it in any other way: it is raised once.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._thread = threading.get_ident()
        self._is_sent = False

    def remember_thread(self) -> None:
        """This thread makes calls. A thread of autograd does not count: its errors reach the one that it works for."""
        if torch._C._current_graph_task_id() == -1:
            self._thread = threading.get_ident()

    def send(self, message: str) -> None:
        """Raise CommError in the thread that makes calls."""
        with self.lock:
            self._is_sent = True
            _set_async_exception(self._thread, _with_message(message))

    def withdraw(self) -> None:
        """Do not raise an error that was sent and has not been raised yet."""
        with self.lock:
            if self._is_sent:
                self._is_sent = False
                _set_async_exception(self._thread, None)
                _finish_signal()


def _with_message(message: str) -> type[CommError]:
    """A class, because Python raises classes in other threads; an instance has the message, and is pickled as such."""

    class SentError(CommError):
        def __init__(self, *_: object) -> None:
            super().__init__(message)

        def __reduce__(self) -> tuple[type[CommError], tuple[str]]:
            return CommError, (message,)

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


def _set_async_exception(thread: int, exception: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if exception is None else ctypes.py_object(exception)
    )
