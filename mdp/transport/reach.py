"""Explain why no broker can be reached at an endpoint, or why a broker refuses this program."""

import logging
import socket as sockets
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..errors import BrokerUnreachable, SettingError
from ..limits import DEFAULT_ENDPOINT
from ..security.keys import ClientKeys
from .sockets import ONE_CONNECTION_MS, check_descriptors, dealer, end, own_context

PROBE_SECONDS: Final = 1.0
"""How long to wait for a connection, and before for a handshake; without an answer, nothing is concluded."""
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

_REMEDY: Final = "pass --key and --broker-key (in Python, key and broker_key)"
_HAS_NO_KEY: Final = (
    "this broker was started without --access and does not use keys: leave out --key and --broker-key, or is the "
    "address right?"
)


def why_unreachable(endpoint: str, keys: ClientKeys | None = None) -> str | None:
    """Return why a connection to `endpoint` fails and what to do about it, or None if it succeeds or is unclear."""
    try:
        parts = urlsplit(endpoint)
        tcp = parts.scheme == "tcp" and parts.hostname is not None and parts.port is not None
        if not tcp and (parts.scheme != "ipc" or endpoint.startswith("ipc://@")):
            return None
        event, value = _shake_hands(endpoint, None if keys is None else keys.at(endpoint))
        if event == zmq.Event.DISCONNECTED:
            return "a program listens there, but it does not answer like a broker: is the port right?"
        if not event & ENDED:
            return why_refused(event, value, keys, endpoint)
        # ZeroMQ could not connect, and does not say why.
        if tcp:
            sockets.create_connection((parts.hostname or "", parts.port or 0), timeout=PROBE_SECONDS).close()
        else:
            with sockets.socket(sockets.AF_UNIX) as probe:
                probe.connect(endpoint.removeprefix("ipc://"))
    except (ConnectionRefusedError, FileNotFoundError):
        return nothing_listens(endpoint)
    except (PermissionError, sockets.gaierror) as error:
        return error.strerror
    except SettingError as error:  # too few descriptors
        return str(error)
    except (OSError, ValueError):
        pass
    return None


def why_not_begun() -> str:
    """Return what CONNECT_RETRIED means if no other event came before it."""
    try:
        check_descriptors()
    except SettingError as error:
        return str(error)
    return NOT_BEGUN


def nothing_listens(endpoint: str) -> str:
    """Return that nothing listens at `endpoint`, and what would."""
    dev = "`zmdp dev` or " if endpoint == DEFAULT_ENDPOINT else ""
    return f"nothing is listening there. Is the broker running? {dev}`mdp-broker --bind {endpoint}` starts one"


def why_refused(event: int, value: int, keys: ClientKeys | None, endpoint: str = "") -> str | None:
    """Return what an event of a monitor says about the broker at `endpoint`, if that did not admit this program."""
    if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
        return _why_not_admitted(value, keys)
    if event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return f"this broker admits only known keys: {_REMEDY}" if keys is None else _HAS_NO_KEY
    if event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
        return f"the handshake failed (ZMTP error {value:#x}): is it a broker?"
    if event == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:  # also if both sides reject each other, whoever is faster
        if keys is None:
            return f"it ended the handshake: is it a broker that admits only known keys? Then {_REMEDY}"
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


def _shake_hands(endpoint: str, keys: ClientKeys | None) -> tuple[int, int]:
    """Connect with these keys.  Return what ZeroMQ's monitor says about it: the event and its value, or (0, 0)."""
    context = own_context()
    try:
        monitored = HANDSHAKE_FAILED | ENDED | int(zmq.Event.HANDSHAKE_SUCCEEDED)
        socket = dealer(context, endpoint, _NO_RECONNECTION, keys=keys, monitored=monitored)
        with socket, socket.get_monitor_socket() as monitor:
            event = recv_monitor_message(monitor) if monitor.poll(round(PROBE_SECONDS * 1000)) else None
            socket.disable_monitor()
    finally:
        end(context)
    return (0, 0) if event is None else (event["event"], event["value"])


def _why_not_admitted(status: int, keys: ClientKeys | None) -> str:
    if status != _NOT_ADMITTED or keys is None:
        return f"the broker cannot check keys (ZAP status {status}): see its log"
    key = keys.public.decode()
    return f"the broker refuses this key, which it does not know or no longer: `mdp-keys allow ROLE -- '{key}'` adds it"


def _other_key(keys: ClientKeys) -> str:
    return f"its public key is not {keys.server.decode()}, the one given as --broker-key"
