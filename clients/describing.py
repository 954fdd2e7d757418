"""Ask brokers about a service (`mmi.describe`), and combine their answers."""

import json
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from ..mdp.errors import ServiceNotFound
from ..mdp.services import About, Description

DESCRIBE: Final = "mmi.describe"
MAX_BROKERS: Final = 16
"""Maximum number of brokers that are asked about a service."""


class _Said(msgspec.Struct):
    workers: int
    about: dict[str, Any]


class _Answer(msgspec.Struct):
    broker: str
    workers: int
    brokers: list[str]
    abouts: list[_Said]
    limits: dict[str, Any] = {}


class Inquiry:
    """Collects the answers of brokers: each names the others that have workers of the service, or know of some."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._asked: dict[str, None] = {}
        self._named: dict[str, None] = {}
        self._found = False
        self._workers = 0
        self._limits: dict[str, Any] = {}
        self._said: dict[str, int] = {}
        """The number of workers that say the same, by what they say as JSON."""

    def next_broker(self) -> str | None:
        """Return the name of a broker to ask, or None if all have answered."""
        left = [name for name in self._named if name not in self._asked]
        if not left or len(self._asked) >= MAX_BROKERS:
            return None
        self._asked[left[0]] = None
        return left[0]

    def take(self, reply: Sequence[bytes]) -> None:
        """Take in an answer.  Raises `ServiceNotFound` if the broker cannot answer."""
        if list(reply) == [b"404"]:
            return
        try:
            answer = msgspec.json.decode(reply[0], type=_Answer)
        except msgspec.DecodeError:
            told = b" ".join(reply).decode(errors="replace")
            text = f"the broker does not know {DESCRIBE} (it answered {told:.100}): it is not zmdp's, or an older one"
            raise ServiceNotFound(text, service=self._service) from None
        self._found = True
        self._asked[answer.broker] = None
        self._named.update(dict.fromkeys(answer.brokers))
        self._workers += answer.workers
        self._limits = self._limits or answer.limits
        for each in answer.abouts:
            text = json.dumps(each.about)
            self._said[text] = each.workers + self._said.get(text, 0)

    def description(self) -> Description:
        """Return the combined answers.  Raises `ServiceNotFound` if no worker offers the service."""
        if not self._found:
            text = f"no worker offers {self._service!r}, or this client may not know of it"
            raise ServiceNotFound(text, service=self._service, code=404)
        # The order is the same whichever broker was asked first, even if the numbers of workers are equal.
        said = sorted(self._said.items(), key=lambda each: (-each[1], each[0]))
        abouts = tuple(About.read(json.loads(text), workers) for text, workers in said)
        return Description(self._service, self._workers, abouts, self._limits)
