"""The options of an X1 request: a JSON object in a frame."""

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar, Final

from ..errors import SettingError
from .names import MAX_NAME
from .value import Value

MAX_OPTIONS: Final = 65535
"""Maximum size in bytes of the options that a client sends, which is also what a record of the batched form can hold.
The broker may write longer options in the framed form."""
BROKERS: Final = frozenset({"user", "admin", "on_behalf", "via", "attempts"})
"""Options that clients send to the broker only, or that only the broker can write; it removes them from what clients
send."""
MAX_HOPS: Final = 16
"""Maximum number of links that a request may pass."""
MAX_NESTING: Final = 64
"""Maximum nesting of objects and lists in options, so that every peer's JSON parser can read them."""


class Options(Value):
    """The options of an X1 request: the frame as received, and the values that the broker uses."""

    __slots__ = ("broker", "claims", "on_behalf", "only_ttl", "raw", "ttl", "ttl_apart", "wait")
    __match_args__: ClassVar[tuple[str, ...]] = (
        "raw", "ttl", "wait", "only_ttl", "ttl_apart", "claims", "on_behalf", "broker",
    )  # fmt: skip

    def __init__(
        self,
        raw: bytes = b"",
        ttl: float | None = None,
        wait: bool = True,
        only_ttl: bool = False,
        ttl_apart: bool = False,
        claims: bool = False,
        on_behalf: str | None = None,
        broker: str | None = None,
    ) -> None:
        self.raw = raw
        self.ttl = ttl
        """Seconds."""
        self.wait = wait
        self.only_ttl = only_ttl
        """There is no option other than a ttl."""
        self.ttl_apart = ttl_apart
        """The ttl is not in `raw`: it stood beside the options, in a record."""
        self.claims = claims
        """`raw` contains options that are not passed on (`BROKERS`)."""
        self.on_behalf = on_behalf
        """From a client: the role on whose behalf it makes the request."""
        self.broker = broker
        """The name of the broker whose workers are to do the request; None if any may."""

    def values(self) -> dict[str, Any]:
        """Parse and return all options.  They are not kept, since parsed they take many times the memory of `raw`."""
        values: dict[str, Any] = json.loads(self.raw) if self.raw else {}
        return values


NO_OPTIONS: Final = Options()


@lru_cache(maxsize=1024)
def _cached_options(raw: bytes) -> Options | None:
    return _parse_options(raw)


def parse_options(raw: bytes) -> Options | None:
    """Return the options in `raw`, which is empty or a JSON object; None if they are malformed."""
    if not raw:
        return NO_OPTIONS
    return _cached_options(raw) if len(raw) <= MAX_NAME else _parse_options(raw)


def _finite(number: str) -> float:
    """Return the number that `number` spells.  Raises `ValueError` if JSON could not represent it."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(number)
    return value


_JSON: Final = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _parse_options(raw: bytes) -> Options | None:
    try:
        values = _JSON.decode(raw.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or not _shallow(values):
        return None
    ttl, wait, headers = values.get("ttl"), values.get("wait", True), values.get("headers", {})
    if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 <= ttl < MAX_TTL):
        return None
    if not isinstance(wait, bool) or not isinstance(headers, dict):
        return None
    if not all(isinstance(value, str) for value in headers.values()):
        return None
    on_behalf, broker = values.get("on_behalf"), values.get("broker")
    if on_behalf is not None and not isinstance(on_behalf, str):
        return None
    if broker is not None and not isinstance(broker, str):
        return None
    return Options(
        raw,
        None if ttl is None else ttl / 1000,
        wait,
        ttl is not None and len(values) == 1,
        claims=not BROKERS.isdisjoint(values),
        on_behalf=on_behalf,
        broker=broker,
    )


def _shallow(values: dict[str, Any]) -> bool:
    level: list[Any] = [values]
    for _ in range(MAX_NESTING):
        children = (child for each in level for child in (each.values() if isinstance(each, dict) else each))
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return True
    return False


MAX_TTL: Final = 1e15
"""Milliseconds."""


def encode_options(values: Mapping[str, Any]) -> bytes:
    """Return `values` as the options frame of an X1 request; empty if there are none.

    Raises `SettingError` if they cannot be encoded as JSON, or would be malformed.
    """
    if not values:
        return b""
    try:
        raw = json.dumps(values, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SettingError(f"options cannot be sent as JSON: {error}") from None
    if len(raw) > MAX_OPTIONS or parse_options(raw) is None:
        raise SettingError(
            f"options {raw[:200]!r} are invalid: ttl must be a number of milliseconds, wait must be true or false, "
            f"headers must map strings to strings; limits: {MAX_OPTIONS} bytes, {MAX_NESTING} levels"
        )
    return raw


def options_with(given: Options, ttl: int | None, attempt: int) -> bytes:
    """Return the options frame of a REQUEST to a worker, with the remaining ttl in milliseconds, if there is one.

    From the second attempt on, it includes the attempt.
    """
    if attempt <= 1 and ttl is not None:
        if given.only_ttl or not given.raw:
            return b'{"ttl":%d}' % ttl
        if given.ttl_apart:
            return _joined(b'"ttl":%d' % ttl, given.raw)
    values = given.values()
    if ttl is not None:
        values["ttl"] = ttl
    if attempt > 1:
        values["attempt"] = attempt
    return json.dumps(values, separators=(",", ":")).encode() if values else b""


def with_ttl(given: Options, ttl: int) -> Options:
    """Return `given` with the ttl, in milliseconds, that stood beside it in a record."""
    return Options(
        given.raw, ttl / 1000, given.wait, given.only_ttl or not given.raw, given.ttl is None,
        given.claims, given.on_behalf, given.broker,
    )  # fmt: skip


def options_without_ttl(given: Options) -> bytes:
    """Return the options of a REQUEST to a worker in the batched form, where the ttl stands beside them."""
    if given.ttl is None or given.ttl_apart:
        return given.raw
    if given.only_ttl:
        return b""
    values = given.values()
    del values["ttl"]
    return json.dumps(values, separators=(",", ":")).encode()


def signature_of(user: str, *, admin: bool) -> bytes:
    """Return what the broker tells workers about who asks, as members of a JSON object."""
    return json.dumps({"user": user, **({"admin": True} if admin else {})}, separators=(",", ":")).encode()[1:-1]


def signed(given: Options, signature: bytes) -> Options:
    """Return `given` without what only the broker can write, except for `signature`, which may be empty."""
    raw, apart = given.raw, given.ttl_apart
    if given.only_ttl and not apart:
        raw, apart = b"", given.ttl is not None
    elif given.claims:
        values = {name: value for name, value in given.values().items() if name not in BROKERS}
        raw = json.dumps(values, separators=(",", ":")).encode() if values else b""
    if signature:
        raw = _joined(signature, raw)
    return Options(raw, given.ttl, given.wait, not raw and given.ttl is not None, apart, broker=given.broker)


class Passed(Value):
    """What the options of a request that came over a link say about its way, and the options without that."""

    __slots__ = ("attempts", "raw", "user", "via")
    __match_args__: ClassVar[tuple[str, ...]] = ("via", "attempts", "user", "raw")

    def __init__(self, via: tuple[str, ...], attempts: int, user: str | None, raw: bytes) -> None:
        self.via = via
        """The names of the brokers that it has passed, in order."""
        self.attempts = attempts
        """Number of workers that have died while they held it."""
        self.user = user
        """The role of its client; None if the first broker has no access control."""
        self.raw = raw
        """The options that travel on to the worker, without what only the broker can write."""


def passed(raw: bytes) -> Passed | None:
    """Return what the options in `raw`, of a request that came over a link, say about its way; None if malformed."""
    return _cached_passed(raw) if len(raw) <= MAX_NAME else _passed(raw)


@lru_cache(maxsize=1024)
def _cached_passed(raw: bytes) -> Passed | None:
    return _passed(raw)


def _passed(raw: bytes) -> Passed | None:
    options = parse_options(raw)
    if options is None:
        return None
    values = options.values()
    via, attempts, user = values.get("via"), values.get("attempts", 0), values.get("user")
    if not isinstance(via, list) or not via or not all(isinstance(each, str) for each in via):
        return None
    if not isinstance(attempts, int) or isinstance(attempts, bool) or not 0 <= attempts < 1 << 32:
        return None
    if user is not None and not isinstance(user, str):
        return None
    rest = {name: value for name, value in values.items() if name not in BROKERS}
    return Passed(
        tuple(via), attempts, user, json.dumps(rest, separators=(",", ":")).encode() if rest else b""
    )  # fmt: skip


def options_for_link(given: Options, via: tuple[str, ...], name: str, attempts: int) -> bytes:
    """Return the options, without the ttl, of a request that broker `name` passes on after the brokers in `via`."""
    raw = options_without_ttl(given)
    return (_cached_for_link if len(raw) <= MAX_NAME else _for_link)(raw, via, name, attempts)


@lru_cache(maxsize=1024)
def _cached_for_link(raw: bytes, via: tuple[str, ...], name: str, attempts: int) -> bytes:
    return _for_link(raw, via, name, attempts)


def _for_link(raw: bytes, via: tuple[str, ...], name: str, attempts: int) -> bytes:
    way: dict[str, Any] = {"via": [*via, name]}
    if attempts:
        way["attempts"] = attempts
    return _joined(json.dumps(way, separators=(",", ":")).encode()[1:-1], raw)


def _joined(members: bytes, raw: bytes) -> bytes:
    """Return the object in `raw`, which may be empty, with more members in front."""
    others = raw.strip()[1:-1].strip()
    return b"{" + members + (b"," + others if others else b"") + b"}"
