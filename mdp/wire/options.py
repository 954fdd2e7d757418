"""The options of X1 requests, as JSON; and the option `about` of READY, in which a worker describes its service."""

import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar, Final

from ..errors import SettingError, flaw
from ..service_limits import MAX_GROUP
from .names import MAX_NAME
from .value import Value

MAX_OPTIONS: Final = 65535
"""Maximum size in bytes of the options of a request: what a record can hold."""
BROKERS: Final = frozenset({"user", "admin", "on_behalf", "via", "attempts", "client_dialect"})
"""Options that clients send to the broker only, or that only the broker can write; it removes them from what clients
send."""
MAX_HOPS: Final = 16
"""Maximum number of links that a request may pass."""
MAX_NESTING: Final = 64
"""Maximum nesting of objects and lists in options, so that every peer's JSON parser can read them."""


class Options(Value):
    """The options of an X1 request: the bytes as received, and the values that the broker uses."""

    __slots__ = ("broker", "claims", "group", "on_behalf", "raw", "wait")
    __match_args__: ClassVar[tuple[str, ...]] = ("raw", "wait", "claims", "on_behalf", "broker", "group")

    def __init__(
        self,
        raw: bytes = b"",
        wait: bool = True,
        claims: bool = False,
        on_behalf: str | None = None,
        broker: str | None = None,
        group: str = "",
    ) -> None:
        self.raw = raw
        self.wait = wait
        self.claims = claims
        """`raw` contains options that are not passed on (`BROKERS`)."""
        self.on_behalf = on_behalf
        """From a client: the role on whose behalf it makes the request."""
        self.broker = broker
        """The name of the broker whose workers are to do the request; None if any may."""
        self.group = group
        """The group that it takes its turn and has a limit with; empty if it names none."""

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
    wait, headers = values.get("wait", True), values.get("headers", {})
    if not isinstance(wait, bool) or not isinstance(headers, dict):
        return None
    if not all(isinstance(value, str) for value in headers.values()):
        return None
    on_behalf, broker = values.get("on_behalf"), values.get("broker")
    if on_behalf is not None and not isinstance(on_behalf, str):
        return None
    if broker is not None and not (isinstance(broker, str) and broker.isprintable()):
        return None  # JSON can spell what UTF-8 cannot, and this name is written elsewhere
    group = values.get("group", "")
    if not (isinstance(group, str) and group.isprintable() and len(group.encode()) <= MAX_GROUP):
        return None
    return Options(raw, wait, not BROKERS.isdisjoint(values), on_behalf, broker, group)


def _shallow(values: dict[str, Any]) -> bool:
    level: list[Any] = [values]
    for _ in range(MAX_NESTING):
        children = (child for each in level for child in (each.values() if isinstance(each, dict) else each))
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return True
    return False


def encode_options(values: Mapping[str, Any]) -> bytes:
    """Return `values` as the options of an X1 request; empty if there are none.

    Raises `SettingError` if they cannot be encoded as JSON, or would be malformed.
    """
    if not values:
        return b""
    try:
        raw = json.dumps(values, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SettingError(f"options cannot be sent as JSON: {flaw(error)}") from None
    if len(raw) > MAX_OPTIONS or parse_options(raw) is None:
        raise SettingError(
            f"options {raw[:200]!r} are invalid: wait must be true or false, headers must map strings to strings, "
            f"broker and group must be printable, group up to {MAX_GROUP} bytes; limits: {MAX_OPTIONS} bytes, "
            f"{MAX_NESTING} levels"
        )
    return raw


def signature_of(user: str, *, admin: bool) -> bytes:
    """Return the options in which the broker tells workers the caller's role, as members of a JSON object."""
    return json.dumps({"user": user, **({"admin": True} if admin else {})}, separators=(",", ":")).encode()[1:-1]


def signed(given: Options, signature: bytes) -> Options:
    """Return `given` without what only the broker can write, except for `signature`, which may be empty."""
    raw = given.raw
    if given.claims:
        values = {name: value for name, value in given.values().items() if name not in BROKERS}
        raw = json.dumps(values, separators=(",", ":")).encode() if values else b""
    if signature:
        raw = _joined(signature, raw)
    return Options(raw, given.wait, broker=given.broker, group=given.group)


def with_dialect(given: Options, dialect: str) -> Options:
    """Return `given` with the client's dialect, for workers that want to know it."""
    return signed(given, json.dumps({"dialect": dialect}, separators=(",", ":")).encode()[1:-1])


class Passed(Value):
    """The options of a request that came over a link: those about its way, and the others."""

    __slots__ = ("attempts", "dialect", "raw", "user", "via")
    __match_args__: ClassVar[tuple[str, ...]] = ("via", "attempts", "user", "raw", "dialect")

    def __init__(self, via: tuple[str, ...], attempts: int, user: str | None, raw: bytes, dialect: str = "") -> None:
        self.via = via
        """The names of the brokers that it has passed, in order."""
        self.attempts = attempts
        """Number of workers that have died while they held it."""
        self.user = user
        """The role of its client; None if the first broker has no access control."""
        self.raw = raw
        """The options that travel on to the worker, without what only the broker can write."""
        self.dialect = dialect
        """The dialect of its client, if that does not speak X1; else empty."""


def passed(raw: bytes) -> Passed | None:
    """Parse the options in `raw`, of a request that came over a link.  Return None if they are malformed."""
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
    dialect = values.get("client_dialect", "")
    if not isinstance(dialect, str) or (user is not None and not isinstance(user, str)):
        return None
    rest = {name: value for name, value in values.items() if name not in BROKERS}
    return Passed(
        tuple(via), attempts, user, json.dumps(rest, separators=(",", ":")).encode() if rest else b"", dialect
    )  # fmt: skip


def options_for_link(given: Options, via: tuple[str, ...], name: str, attempts: int, dialect: str) -> bytes:
    """Return the options of a request that broker `name` passes on after the brokers in `via`.

    `dialect` is that of its client, if it does not speak X1.
    """
    raw = given.raw
    return (_cached_for_link if len(raw) <= MAX_NAME else _for_link)(raw, via, name, attempts, dialect)


@lru_cache(maxsize=1024)
def _cached_for_link(raw: bytes, via: tuple[str, ...], name: str, attempts: int, dialect: str) -> bytes:
    return _for_link(raw, via, name, attempts, dialect)


def _for_link(raw: bytes, via: tuple[str, ...], name: str, attempts: int, dialect: str) -> bytes:
    way: dict[str, Any] = {"via": [*via, name]}
    if attempts:
        way["attempts"] = attempts
    if dialect:
        way["client_dialect"] = dialect
    return _joined(json.dumps(way, separators=(",", ":")).encode()[1:-1], raw)


def _joined(members: bytes, raw: bytes) -> bytes:
    """Return the object in `raw`, which may be empty, with more members in front."""
    others = raw.strip()[1:-1].strip()
    return b"{" + members + (b"," + others if others else b"") + b"}"


MAX_ABOUT: Final = 32768
"""Maximum size in bytes of an `about`, as compact JSON in ASCII."""
_ESCAPED: Final = re.compile(r"\\[ubfr]")
"""How JSON in ASCII writes what is not printable, except DEL, line feeds and tabs."""
_KEPT: Final = "\n\t"
"""Characters that are not printable, but belong into a text of several lines."""


def encode_about(about: Mapping[str, Any]) -> bytes:
    """Return `about` as JSON, with "?" in place of characters that could control a terminal.

    It may be larger than `MAX_ABOUT`.  Raises `TypeError`, `ValueError` or `RecursionError` for what is not JSON.
    """
    text = _json(dict(about))
    if not text.isprintable() or _ESCAPED.search(text):  # else there is nothing to replace
        text = _json(_cleaned(dict(about)))
    return text.encode()


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isprintable() else "".join(map(_shown, value))
    if isinstance(value, dict):
        return {_cleaned(key): _cleaned(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(each) for each in value]
    return value


def _shown(character: str) -> str:
    return character if character.isprintable() or character in _KEPT else "?"
