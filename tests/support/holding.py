"""A handler that a test holds up."""

import threading
from typing import Any

from .processes import TIMEOUT_SECONDS


class Holding:
    """Holds each request until it is let go or cancelled, and replies with it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = False
        self.taken: list[Any] = []
        self.cancelled: list[Any] = []

    def __call__(self, request: Any) -> Any:
        with self._changed:
            self.taken.append(request)
            self._changed.notify_all()
            while not (self._open or request.cancelled):
                self._changed.wait(0.01)
            if request.cancelled:
                self.cancelled.append(request)
                self._changed.notify_all()
        return request

    def let_go(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def wait_taken(self, number: int = 1) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.taken) >= number, TIMEOUT_SECONDS)

    def wait_cancelled(self, number: int = 1) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.cancelled) >= number, TIMEOUT_SECONDS)
