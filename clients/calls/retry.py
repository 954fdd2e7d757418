"""`Retry`: which failed requests a client sends again by itself, and when."""

from collections.abc import Collection
from dataclasses import dataclass
from random import Random
from typing import Any

from ...mdp.backoff import doubled, jittered
from ...mdp.codes import Code
from ...mdp.errors import SettingError
from ...mdp.limits import check_number


@dataclass(frozen=True, slots=True)
class Retry:
    """Which failed requests a client sends again, within the time that the request has in all.

        client = Client(retry=Retry(attempts=5))
        client.call("report", retry=Retry(attempts=3, codes={429, 502, 503}))   # of this request

    After 429 and 404 the request has not been executed.  After 502 (its workers died), 503 (the broker is shutting
    down) and the codes with which a handler fails, it may have been, so name them only for a request that may be
    executed twice.  Nothing is sent again after its time has passed (408), or once a part of a stream has arrived.

    `Client(retries=)` multiplies that time; the `retries` of a service or a submission are Titanic's.

    Args:
        attempts: How often to send the request in all.
        codes: The codes of errors after which to send it again.
        backoff: Seconds before the second attempt; each further pause is twice as long.  All vary randomly.
        max_backoff: The longest pause, unless the error itself says after how long to try again (`retry_after`).

    Raises:
        SettingError: A setting is invalid.
    """

    attempts: int = 3
    codes: Collection[int] = frozenset({Code.QUEUE_FULL.value, Code.DRAINING.value})
    backoff: float = 0.1
    max_backoff: float = 10.0

    def __post_init__(self) -> None:
        codes: Any = self.codes
        check_number("attempts", self.attempts, whole=True)
        check_number("backoff", self.backoff)
        check_number("max_backoff", self.max_backoff)
        if not (self.attempts >= 1 and self.backoff > 0 and self.max_backoff > 0):
            raise SettingError(f"{self!r} is invalid: attempts must be 1 or more, and pauses longer than 0 seconds")
        if not isinstance(codes, Collection) or not all(isinstance(each, int) for each in codes):
            raise SettingError(f"codes is {codes!r:.100}: it must be a set of codes of errors, such as {{429, 503}}")
        object.__setattr__(self, "codes", frozenset(codes))


def pause_after(attempts: int, retry: Retry, rng: Random, at_least: float | None = None) -> float:
    """Return the seconds to wait after so many attempts, the last of which says that it takes `at_least` so long."""
    return (at_least or 0.0) + jittered(doubled(retry.backoff, retry.max_backoff, attempts - 1), rng)


def checked_retry(retry: Retry | None, protocol: str) -> Retry | None:
    """Return `retry`, if it is one and the protocol has codes.  Raises `SettingError`."""
    given: Any = retry
    if given is not None and not isinstance(given, Retry):
        raise SettingError(f"retry is {given!r:.100}: it must be a Retry, such as Retry(attempts=5)")
    if given is not None and protocol != "X1":
        raise SettingError(f"retry requires protocol X1: MDP/{protocol} does not say why a request has failed")
    return retry
