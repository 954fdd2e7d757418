"""Which brokers a client or worker connects to, and with which keys: its arguments, or else the environment."""

import os
import re
from collections.abc import Sequence
from typing import Any, Final

from ..defaults import DEFAULT_ENDPOINT
from ..security.keys import BrokerKey, ClientKeys, Key, load_keys
from .sockets import checked_endpoints

BROKER_VARIABLE: Final = "MDP_BROKER"
KEY_VARIABLE: Final = "MDP_KEY"
BROKER_KEY_VARIABLE: Final = "MDP_BROKER_KEY"

_BETWEEN: Final = re.compile(r"[,\s]+(?=\w+://)")
"""What separates endpoints in a string; a path may contain commas and spaces."""


def checked_brokers(
    broker: str | Sequence[str] | None, key: Key | None = None, broker_key: BrokerKey | None = None
) -> tuple[list[str], ClientKeys | None]:
    """Return the endpoints of these brokers, at least one, and the keys for them, or None without keys.

    A broker is an endpoint, or ENDPOINT=KEY with its public key; brokers without one have the key `broker_key`.  An
    argument that is None is taken from the environment: MDP_BROKER, MDP_KEY, MDP_BROKER_KEY.  With an empty `key`, or
    keys that are loaded already, no key is taken from there.

    Raises `SettingError` if an endpoint or a key is invalid.
    """
    if broker is None:
        broker = os.environ.get(BROKER_VARIABLE, "").strip(", ") or DEFAULT_ENDPOINT
    if key != "" and not isinstance(key, ClientKeys):
        key = os.environ.get(KEY_VARIABLE) if key is None else key
        broker_key = os.environ.get(BROKER_KEY_VARIABLE) if broker_key is None else broker_key
    brokers = split_brokers(broker)
    return list(brokers), load_keys(key, broker_key, brokers)


def split_brokers(broker: str | Sequence[str]) -> dict[str, str]:
    """Return the endpoints of these brokers, at least one, each with its public key or an empty string.

    Raises `SettingError` if an endpoint is invalid.
    """
    given: Any = _BETWEEN.split(broker.strip(", ")) if isinstance(broker, str) else broker
    brokers = given if isinstance(given, list | tuple) else [given]
    pairs = [each.partition("=") if isinstance(each, str) else (each, "", "") for each in brokers]
    endpoints = checked_endpoints([endpoint for endpoint, _, _ in pairs])
    return {endpoint: key for endpoint, (_, _, key) in zip(endpoints, pairs, strict=True)}
