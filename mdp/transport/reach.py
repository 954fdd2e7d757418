"""Explain why no broker can be reached at an endpoint, or why a broker refuses this program."""

import logging
import socket as sockets
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..errors import BrokerUnreachable, SettingError
from ..keys import ClientKeys
from .descriptors import check_descriptors
from .sockets import ONE_CONNECTION_MS, dealer, end, own_context

PROBE_SECONDS: Final = 1.0
"""How long to wait for a program to accept a connection, and then for an answer; without one, nothing is concluded."""
HANDSHAKE_SECONDS: Final = 1.0
"""How long to wait for the handshake of a ZeroMQ socket, which a program that speaks something else never ends."""
SIGNATURE: Final = b"\xff"
"""The first byte that a ZeroMQ socket sends over a new connection."""
_GREETING: Final = b"\xff\0\0\0\0\0\0\0\1\x7f\3"
"""What makes a ZeroMQ socket send its whole greeting: a signature and a version of ZMTP."""
_GREETING_BYTES: Final = 64
_MECHANISM: Final = slice(12, 32)
"""Where the greeting names the mechanism: NULL, or CURVE for a broker that requires keys."""
_NO_RECONNECTION: Final[dict[int, int]] = {zmq.LINGER: 0, zmq.RECONNECT_IVL: ONE_CONNECTION_MS}

REFUSED: Final = int(zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL)
"""Events of a monitor: a broker refused this program.  ZeroMQ does not connect again after one of these."""
HANDSHAKE_FAILED: Final = REFUSED | int(zmq.Event.HANDSHAKE_FAILED_NO_DETAIL)
"""Events of a monitor that `why_refused` explains."""
ENDED: Final = int(zmq.Event.DISCONNECTED | zmq.Event.CLOSED | zmq.Event.CONNECT_RETRIED)
"""Events of a monitor: a connection has ended, or could not be established."""
NOT_BEGUN: Final = "cannot connect: is the name of the host right?"
"""What CONNECT_RETRIED means if no other event came before it: there was not even a socket."""
_NOT_ADMITTED: Final = 400

_NEEDS_KEY: Final = "this broker admits only known keys: pass --key and --broker-key (in Python, key and broker_key)"
_HAS_NO_KEY: Final = (
    "this broker was started without --access and does not use keys: leave out --key and --broker-key, or is the "
    "address right?"
)


def why_unreachable(endpoint: str, keys: ClientKeys | None = None) -> str | None:
    """Return why a connection to `endpoint` fails and what to do about it, or None if it succeeds or is unclear."""
    keys = None if keys is None else keys.at(endpoint)
    try:
        parts = urlsplit(endpoint)
        tcp = parts.scheme == "tcp" and parts.hostname is not None and parts.port is not None
        if not tcp and (parts.scheme != "ipc" or endpoint.startswith("ipc://@")):
            return None
        # First as a ZeroMQ socket does it: a broker would log what follows as a failed handshake.
        event, value = _shake_hands(endpoint, keys)
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            return None
        if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            return _why_not_admitted(value, keys)
        ended = event == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
        if tcp:
            with sockets.create_connection((parts.hostname or "", parts.port or 0), timeout=PROBE_SECONDS) as probe:
                return _why_not_usable(probe, keys, ended=ended)
        with sockets.socket(sockets.AF_UNIX) as probe:
            probe.settimeout(PROBE_SECONDS)
            probe.connect(endpoint.removeprefix("ipc://"))
            return _why_not_usable(probe, keys, ended=ended)
    except (ConnectionRefusedError, FileNotFoundError):
        return f"nothing is listening there. Is the broker running? `mdp-broker --bind {endpoint}` starts one"
    except (PermissionError, sockets.gaierror) as error:
        return error.strerror
    except SettingError as error:  # too few descriptors
        return str(error)
    except (OSError, ValueError):
        return None


def why_not_begun() -> str:
    """Return what CONNECT_RETRIED means if no other event came before it."""
    try:
        check_descriptors()
    except SettingError as error:
        return str(error)
    return NOT_BEGUN


def why_refused(event: int, value: int, keys: ClientKeys | None, endpoint: str = "") -> str | None:
    """Return what an event of a monitor says about the broker at `endpoint`, if that did not admit this program."""
    if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
        return _why_not_admitted(value, keys)
    if event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return _NEEDS_KEY if keys is None else _HAS_NO_KEY
    if event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
        return f"the handshake failed (ZMTP error {value:#x}): is it a broker?"
    if event == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:  # also if both sides reject each other, whoever is faster
        if keys is None:
            return "the program that listens there closed the connection: is it a broker? Does it require --key?"
        return f"the broker ended the handshake: {_other_key(keys.at(endpoint))}, or it does not use keys"
    return None


def why_none_reachable(broker: Sequence[str], keys: ClientKeys | None) -> str | None:
    """Return why no broker at any of these endpoints can be used; None if one can, or it is unclear."""
    reasons = [why_unreachable(endpoint, keys) for endpoint in broker]
    if not all(reasons):
        return None
    return "; ".join(f"{endpoint}: {reason}" for endpoint, reason in zip(broker, reasons, strict=True))


def warn_if_unreachable(log: logging.Logger, broker: Sequence[str], keys: ClientKeys | None = None) -> None:
    """Log a warning for each endpoint where no broker can be used, on behalf of a worker, which keeps trying."""
    for endpoint in broker:
        reason = why_unreachable(endpoint, keys)
        if reason is not None:
            log.warning("no broker at %s yet: %s; retrying until there is one", endpoint, reason)


def check_listening(broker: Sequence[str], keys: ClientKeys | None = None) -> None:
    """Raise `BrokerUnreachable` if no broker at any of these endpoints can be used: retries would be wasted."""
    reasons = why_none_reachable(broker, keys)
    if reasons is not None:
        raise BrokerUnreachable(f"cannot reach a broker at {reasons}")


def _why_not_usable(probe: sockets.socket, keys: ClientKeys | None, *, ended: bool) -> str | None:
    """Return why the program at the other end of a new connection is not a broker, or refuses these keys; else None.

    `ended` tells whether it has ended a handshake with these keys.
    """
    greeting, greeted = b"", False
    try:
        try:
            greeting = probe.recv(_GREETING_BYTES)
        except TimeoutError:  # a broker that is held up, or a program that waits to be asked, such as an HTTP server
            greeted = True
            probe.sendall(_GREETING)
            greeting = probe.recv(_GREETING_BYTES)
        if greeting.startswith(SIGNATURE):
            if not greeted:
                probe.sendall(_GREETING)
            while len(greeting) < _GREETING_BYTES and (more := probe.recv(_GREETING_BYTES - len(greeting))):
                greeting += more
    except TimeoutError:
        if not greeting:
            return None  # silence proves nothing: the machine may be busy
    except ConnectionError:
        pass
    if not greeting.startswith(SIGNATURE):
        return "a program listens there, but it does not answer like a broker: is the port right?"
    mechanism = greeting[_MECHANISM].rstrip(b"\0")
    if mechanism == b"CURVE":
        if keys is None:
            return _NEEDS_KEY
        return f"the broker ended the handshake: {_other_key(keys)}" if ended else None
    return _HAS_NO_KEY if mechanism and keys is not None else None


def _shake_hands(endpoint: str, keys: ClientKeys | None) -> tuple[int, int]:
    """Connect with these keys.  Return what ZeroMQ's monitor says about it: the event and its value, or (0, 0)."""
    context = own_context()
    try:
        monitored = HANDSHAKE_FAILED | int(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.CLOSED)
        socket = dealer(context, endpoint, _NO_RECONNECTION, keys=keys, monitored=monitored)
        with socket, socket.get_monitor_socket() as monitor:
            event = recv_monitor_message(monitor) if monitor.poll(round(HANDSHAKE_SECONDS * 1000)) else None
            socket.disable_monitor()
    finally:
        end(context)
    return (0, 0) if event is None else (event["event"], event["value"])


def _why_not_admitted(status: int, keys: ClientKeys | None) -> str:
    if status != _NOT_ADMITTED or keys is None:
        return f"the broker cannot check keys (ZAP status {status}): see its log"
    key = keys.public.decode()
    return f"the broker refuses this key, which it does not know or no longer: `mdp-keys allow ROLE '{key}'` adds it"


def _other_key(keys: ClientKeys) -> str:
    return f"its public key is not {keys.server.decode()}, the one given as --broker-key"
