"""An error that is raised in another thread: the one that calls a comm, and that may wait for the device."""

from __future__ import annotations

import ctypes
import threading

import torch

from attnmesh.comm.agreement import CommError


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


def _set_async_exception(thread: int, exception: type[CommError] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if exception is None else ctypes.py_object(exception)
    )
