"""The endpoints of brokers: which ones a client or worker connects to, with which keys, and whether they are valid."""

import os
import re
from collections.abc import Sequence
from typing import Any, Final

import zmq

from ..errors import SettingError
from ..limits import DEFAULT_ENDPOINT
from ..security.keys import BrokerKey, ClientKeys, Key, load_keys

BROKER_VARIABLE: Final = "MDP_BROKER"
KEY_VARIABLE: Final = "MDP_KEY"
BROKER_KEY_VARIABLE: Final = "MDP_BROKER_KEY"

_BETWEEN: Final = re.compile(r"[,\s]+(?=\w+://)")
"""What separates endpoints in a string; a path may contain commas and spaces."""
_TCP_ADDRESS: Final = re.compile(r"[0-9A-Za-z\[:][-.:%;\[\]_*0-9A-Za-z]*:[0-9]+")
"""The addresses that libzmq accepts; whether there is such a host, it finds out later."""
_MAX_PORT: Final = 65535


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


def checked_endpoint(endpoint: object) -> str:
    """Return `endpoint`.  Raises `SettingError` if it is not a string, or has no valid port."""
    if not isinstance(endpoint, str):
        raise SettingError(f"broker is {endpoint!r}: it must be one endpoint such as 'tcp://127.0.0.1:5555'")
    problem = port_problem(endpoint)
    if problem is not None:
        raise SettingError(f"{endpoint!r} is not a valid endpoint: {problem}")
    return endpoint


def checked_endpoints(broker: str | Sequence[str]) -> list[str]:
    """Return the endpoints in `broker`, at least one.

    Raises `SettingError` if ZeroMQ cannot connect to one of them.  Nothing is connected to find out: a broker would log
    that as a failed handshake.
    """
    given = list(broker) if isinstance(broker, list | tuple) else [broker]
    if not given:
        raise SettingError("broker is empty: it must be an endpoint such as tcp://127.0.0.1:5555, or several")
    endpoints = [checked_endpoint(each) for each in given]
    for endpoint in endpoints:
        problem = _connect_problem(endpoint)
        if problem is not None:
            raise SettingError(f"{endpoint!r} is not a valid endpoint: {problem}")
    return endpoints


def _connect_problem(endpoint: str) -> str | None:
    """Return why ZeroMQ would not connect to an endpoint that has no `port_problem`, or None."""
    transport, _, address = endpoint.partition("://")
    if transport not in {"tcp", "inproc"} and not zmq.has(transport):
        return "endpoints begin with tcp://, ipc:// or inproc://, as in tcp://127.0.0.1:5555"
    if not address or address == "@":
        return "it has no address, as in tcp://127.0.0.1:5555"
    if transport == "tcp" and not _TCP_ADDRESS.fullmatch(address):
        return "write tcp://HOST:PORT, as in tcp://127.0.0.1:5555"
    if transport == "ipc" and len(os.fsencode(address)) > zmq.IPC_PATH_MAX_LEN > 0:
        return f"its path is longer than {zmq.IPC_PATH_MAX_LEN} bytes"
    return None


def port_problem(endpoint: str) -> str | None:
    """Return what is wrong with the port of a tcp:// endpoint, or with how its IPv6 address is written, or None."""
    if not endpoint.startswith("tcp://"):
        return None
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not colon or port.endswith("]"):  # of an IPv6 address
        return "it has no port, such as :5555 at its end"
    if port != "*" and not (port.isdecimal() and int(port) <= _MAX_PORT):
        return f"its port is {port!r}, but a port is a number up to {_MAX_PORT}"
    host = host.rpartition(";")[2]  # after a source address
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        return "an IPv6 address is written in brackets, as in tcp://[::1]:5555"
    return None
