"""What workers say of their services: the same text is kept once, and there are not many different ones."""

from typing import Final

MAX_ABOUTS: Final = 8
"""Different texts of one service: a rolling deploy has two or three."""
MAX_ABOUTS_BYTES: Final = 64 << 20
"""Bytes of the texts of all services."""


class About:
    """What some workers of a service say of it."""

    __slots__ = ("text", "workers")

    def __init__(self, text: bytes) -> None:
        self.text = text
        """A JSON object."""
        self.workers = 0
        """Number of workers that say it."""


class Abouts:
    """What the workers of each service say of it; those that are leaving do not count."""

    def __init__(self, max_bytes: int = MAX_ABOUTS_BYTES) -> None:
        self._max_bytes = max_bytes
        self._by_service: dict[bytes, dict[bytes, About]] = {}
        self._size = 0

    def of(self, service: bytes) -> list[About]:
        """Return what is said of a service, first what most workers say."""
        return sorted(self._by_service.get(service, {}).values(), key=_rank)

    def add(self, service: bytes, text: bytes) -> About | None:
        """Record that one more worker says this of its service.  Return None if it is not kept: there is no room."""
        said = self._by_service.get(service, {})
        about = said.get(text)
        if about is None:
            if not text or len(said) >= MAX_ABOUTS or self._size + len(text) > self._max_bytes:
                return None
            about = said[text] = About(text)
            self._by_service[service] = said
            self._size += len(text)
        about.workers += 1
        return about

    def remove(self, service: bytes, about: About) -> None:
        """Record that one of the workers that say this is leaving."""
        about.workers -= 1
        if about.workers:
            return
        said = self._by_service[service]
        del said[about.text]
        self._size -= len(about.text)
        if not said:
            del self._by_service[service]


def _rank(about: About) -> int:
    return -about.workers
