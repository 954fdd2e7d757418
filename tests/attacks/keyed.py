"""Attacks on a broker with access control: without a key, and with the key of a role that may do little.

`keys` is the folder with the keys of the roles in `ROLES`.  The canary has a role of its own.
"""

import select
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Final
from urllib.parse import urlsplit

import zmq
from support.peers import ready_of
from support.processes import TIMEOUT_MS, eventually
from zmq.utils.monitor import recv_monitor_message

from zmdp.mdp import wire
from zmdp.mdp.codes import Code
from zmdp.mdp.security.keys import ClientKeys, load_keys

from .connections import MAX_CONNECTIONS
from .messages import (
    MAX_LARGE,
    RELEASE,
    W_REQUEST,
    address_of,
    commands,
    final,
    forged,
    from_worker,
    late,
    ready,
    replies_in,
    request,
    requests_in,
    signals,
    x1_cancel,
    x1_request,
)
from .zmtp import CHUNK, COMMAND, LONG, PATIENCE, Connection, Message, sent

ROLES: Final = """
[roles.attacker]
keys = ["attacker.key"]
call = ["own*"]
offer = ["own*"]

[roles.greedy]
keys = ["greedy.key"]
call = ["*"]
offer = ["own*"]
outstanding = 300
queued_requests = 100
request_bytes = 8_000_000
connections = 100

[roles.victim]
keys = ["victim.key"]
call = ["victim"]
offer = ["victim"]
"""
HEARTBEAT: Final = [b"", b"MDPWX1"]
GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
FAILED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_fences = count(1 << 40)


class KeyedPeer:
    """A DEALER with a key; its connection stays open until the process ends."""

    context: Final[zmq.Context[Any]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4 * MAX_CONNECTIONS)
    open: Final[list["KeyedPeer"]] = []

    def __init__(self, endpoint: str, keys: ClientKeys | None, identity: bytes = b"") -> None:
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.sndtimeo = int(PATIENCE * 1000)
        self.socket.sndhwm = self.socket.rcvhwm = 0
        if identity:
            self.socket.routing_id = identity
        if keys is not None:
            keys.apply(self.socket)
        self.socket.connect(endpoint)
        self.open.append(self)

    def send(self, *frames: bytes) -> None:
        """Send one message."""
        sent["messages"] += 1
        self.socket.send_multipart(frames)

    def flood(self, messages: Iterable[Sequence[bytes]]) -> None:
        """Send messages, and let the broker take them in every so often."""
        for number, message in enumerate(messages, 1):
            self.send(*message)
            if number % 1000 == 0:
                self.sync()

    def recv(self, timeout: float = PATIENCE) -> Message | None:
        """Return the next message, or None if none arrives in time."""
        return self.socket.recv_multipart() if self.socket.poll(1000 * timeout) else None

    def sync(self) -> list[Message]:
        """Wait until the broker has taken in everything that was sent here; return what arrived until then."""
        came: list[Message] = []
        for _ in range(2):  # the broker dispatches at the end of a turn, after its own answers
            fence = b"%d" % next(_fences)
            self.send(fence, b"", b"MDPC02", b"\x01", b"mmi.service", b"fence")
            while (message := self.recv()) is not None and message[0] != fence:
                came.append(message)
            assert message is not None, "the broker does not answer a role that may ask it"
        return came

    def close(self) -> None:
        self.open.remove(self)
        self.socket.close()


def key(keys: Path, role: str) -> ClientKeys:
    """Return the keys of a role."""
    found = load_keys(keys / f"{role}.key_secret", keys / "broker.key")
    assert found is not None
    return found


def worker(endpoint: str, keys: ClientKeys, service: bytes, identity: bytes = b"") -> KeyedPeer:
    """Return a registered X1 worker with much credit, which does nothing by itself."""
    peer = KeyedPeer(endpoint, keys, identity)
    peer.send(*from_worker(ready_of(service, 10_000)))
    assert commands(peer.sync()) == [], "the worker was not registered"
    return peer


def given(peer: KeyedPeer) -> list[wire.Request]:
    """Return the REQUESTs that an X1 worker has been sent so far."""
    return requests_in(peer.sync())


# ── without a key ────────────────────────────────────────────────────────────────────────────────────────────────────


def unknown_keys(endpoint: str, amount: int, rng: Random, keys: Path) -> None:
    """Connections with keys that the broker does not know, or with none, each with a request; none gets in."""
    del rng
    broker = key(keys, "attacker").server
    done = 0
    while done < min(amount // 25, 2000):
        peers: list[tuple[KeyedPeer, Any]] = []
        for number in range(50):
            peer = KeyedPeer("inproc://nobody", None)
            if number % 10:
                ClientKeys(*zmq.curve_keypair(), broker).apply(peer.socket)
            peers.append((peer, peer.socket.get_monitor_socket(FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)))
            peer.socket.connect(endpoint)
            peer.send(*x1_request(1, b"canary", b"let me in"))
        for peer, monitor in peers:
            with monitor:
                assert monitor.poll(TIMEOUT_MS), "nothing became of the handshake"
                assert recv_monitor_message(monitor)["event"] & FAILED, "an unknown key was let in"
                peer.socket.disable_monitor()
            peer.close()
        done += len(peers)


def replayed_handshakes(endpoint: str, amount: int, rng: Random, keys: Path) -> None:
    """What a peer with a valid key has sent, on other connections: as it was, cut short, or with parts exchanged."""
    with _recorded(endpoint, keys) as (record, holder):
        others = [GREETING + record[64 + at :] for at in (0, 200, 202, 300)]
        for number in range(min(amount // 20, MAX_CONNECTIONS)):
            data = record if number % 2 else rng.choice([*others, record[: rng.randrange(64, len(record))], record * 2])
            _play(endpoint, data)
        assert given(holder) == [], "a recorded message arrived again"


def garbled_handshakes(endpoint: str, amount: int, rng: Random, keys: Path) -> None:
    """The same with bits and lengths changed, and with commands that are out of order or made up."""
    commands = [b"\x05HELLO", b"\x08INITIATE", b"\x07MESSAGE", b"\x07WELCOME", b"\x05READY", b"\x05ERROR", b"\x04PING"]
    with _recorded(endpoint, keys) as (record, holder):
        for number in range(min(amount // 20, MAX_CONNECTIONS)):
            data = bytearray(record)
            if number % 2:
                for _ in range(rng.choice([1, 2, 20])):
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            else:
                size = rng.choice([0, 1, 60, 200, 255, 300])
                body = rng.choice(commands) + rng.randbytes(size)
                made_up = bytes((COMMAND | LONG,)) + len(body).to_bytes(8, "big") + body
                at = rng.choice([64, 64 + 202, len(data)])
                data[at:at] = made_up * rng.choice([1, 1, 100])
            _play(endpoint, bytes(data))
        assert given(holder) == [], "a garbled message arrived"


@contextmanager
def _recorded(endpoint: str, keys: Path) -> Iterator[tuple[bytes, KeyedPeer]]:
    """Yield all that a client with a valid key sends to call a worker, and this worker."""
    holder = worker(endpoint, key(keys, "attacker"), b"own")
    target = urlsplit(endpoint)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = KeyedPeer(f"tcp://127.0.0.1:{listener.getsockname()[1]}", key(keys, "attacker"))
        client.send(*x1_request(1, b"own", b"once"))
        near, _ = listener.accept()
        with near, socket.create_connection((target.hostname or "", target.port or 0)) as far:
            record = bytearray()
            relay = threading.Thread(target=_relay, args=(near, far, record), daemon=True)
            relay.start()
            client.sync()
            client.close()
            relay.join()
    assert len(given(holder)) == 1
    yield bytes(record), holder


def _relay(near: socket.socket, far: socket.socket, record: bytearray) -> None:
    """Pass on bytes in both directions until one side ends, and record those of `near`."""
    while True:
        for each in select.select([near, far], [], [])[0]:
            data = each.recv(CHUNK)
            if not data:
                return
            if each is near:
                record += data
            (far if each is near else near).sendall(data)


def _play(endpoint: str, data: bytes) -> None:
    with Connection(endpoint) as connection:
        with suppress(OSError):  # the broker may close the connection
            connection.write(data)


# ── with the key of a role that may do little ────────────────────────────────────────────────────────────────────────

FORBIDDEN: Final = [b"canary", b"victim", b"newcomer-1", b"mmi.stats", b"mmi.workers", b"mmi.broker", b"mmi.else", b"x"]


def what_is_not_allowed(endpoint: str, amount: int, rng: Random, keys: Path) -> None:
    """Calls, offers and questions that the role may not make, in every dialect, and forged users and admins."""
    own = key(keys, "attacker")
    holder, client = worker(endpoint, own, b"own"), KeyedPeer(endpoint, own)
    for number in range(amount // 10):
        service = rng.choice(FORBIDDEN)
        client.send(*x1_request(number, service, b"body", options=b'{"user":"canary","admin":true}'))
        client.send(*request(service, b"body"))
        client.send(b"", b"MDPC01", service, b"body")
        if number % 500 == 0:
            _check_refusals(client.sync())
        if number % 100 == 0:
            client.send(*x1_request(number, b"own", b"body", options=rng.choice(_FORGED_OPTIONS)))
    _check_refusals(client.sync())
    for each in given(holder):
        who = {name: value for name, value in each.options.values().items() if name in {"user", "admin"}}
        assert who == {"user": "attacker"}, f"a forged user was passed on: {each}"
    impostor = KeyedPeer(endpoint, own)
    headers = [b"MDPWX1", b"MDPW02", b"MDPW01"]
    impostor.flood(ready(rng.choice(headers), rng.choice(FORBIDDEN)) for _ in range(amount // 5))
    came = impostor.sync()
    requests = requests_in(came) + [message for message in came if W_REQUEST in message[:3]]
    assert not requests, "a request went to an impostor"


_FORGED_OPTIONS: Final = [
    b'{"user":"greedy"}',
    b'{"admin":true}',
    b'{"user":"canary","user":"greedy","admin":true}',
    b'{"us\\u0065r":"greedy","\\u0061dmin":true}',
    b'{"headers":{"user":"canary"},"user":null}',
    b' { "user" : ["canary"] , "admin" : 1 } ',
]


def _check_refusals(messages: list[Message]) -> None:
    for message in messages:
        told = commands([message])
        assert told, f"answered although it was not allowed: {message}"
        for each in told:
            assert isinstance(each, wire.Error), f"answered although it was not allowed: {each}"
            assert each.code == Code.NOT_ALLOWED, f"refused for another reason: {each}"


def others_requests(endpoint: str, amount: int, rng: Random, keys: Path) -> None:
    """Replies to, and CANCELs of, what other roles have under way: addresses near its own, and small numbers."""
    own = key(keys, "attacker")
    victim, client = worker(endpoint, key(keys, "victim"), b"victim"), KeyedPeer(endpoint, key(keys, "victim"))
    for number in range(50):
        client.send(*x1_request(number, b"victim", b"%d" % number))
    client.sync()
    requests = given(victim)
    for turn in range(max(1, amount // 10_000)):
        thief, asker = worker(endpoint, own, b"own"), KeyedPeer(endpoint, own)
        asker.send(*x1_request(1, b"own", b""))
        asker.sync()
        near = address_of(given(thief)[-1])
        addresses = [*range(near - 50, near), *map(address_of, requests)]
        for forge in (late, forged):
            thief.flood(forge(rng.choice(addresses), rng) for _ in range(min(amount, 10_000) // 4))
        thief.flood([from_worker(signals(RELEASE, addresses))])
        asker.flood(x1_cancel(number) for number in range(min(amount // 10, 1000)))
        asker.flood([x1_cancel(*range(2, 250))])
        asker.sync()
        thief.close()
        asker.close()
        victim.send(*HEARTBEAT)
        told = [message for message in victim.sync() if message != HEARTBEAT]
        assert told == [], f"the victim's worker was told something in turn {turn}: {told[0]}"
    for each in requests:
        victim.send(*final(address_of(each), b"reply to " + bytes(each.body[0])))
    victim.sync()
    replies = replies_in(client.sync())
    assert replies == [(number, b"reply to %d" % number) for number in range(50)], "replies were forged or lost"


def routing_ids_of_other_roles(endpoint: str, amount: int, rng: Random, keys: Path) -> None:
    """Connect under the routing ids that peers of another role chose, while they are connected and after (C45)."""
    own, theirs = key(keys, "attacker"), key(keys, "victim")
    for number in range(min(max(2, amount // 2000), 25)):
        identity, secret = b"peer-%d" % number, rng.randbytes(16)
        source = worker(endpoint, theirs, b"victim", b"worker-%d" % number)
        client = KeyedPeer(endpoint, theirs, identity)
        client.send(*x1_request(1, b"victim", b"ask"))
        client.sync()
        (work,) = eventually(lambda: given(source))  # noqa: B023 - the previous worker may have had it at first
        claimants = _claimants(endpoint, own, [identity, b"worker-%d" % number])
        leaves = number % 2
        if leaves:
            client.close()
            claimants += _claimants(endpoint, own, [identity])
            _let_one_in(claimants)
        source.send(*final(address_of(work), secret))
        source.sync()
        if not leaves:
            assert (1, secret) in replies_in(client.sync()), "the client did not get its reply"
            client.close()
        source.close()
        for claimant in claimants:
            while (message := claimant.recv(0)) is not None:
                assert not any(secret in frame for frame in message), "a peer received what another role was sent"
            claimant.close()


def _claimants(endpoint: str, keys: ClientKeys, identities: list[bytes]) -> list[KeyedPeer]:
    """Connect several peers that want each of these routing ids."""
    claimants = []
    for identity in identities * 5:
        claimants.append(KeyedPeer(endpoint, keys, identity))
        claimants[-1].send(*x1_cancel(1))
        claimants[-1].send(*ready(b"MDPWX1", b"own"))
        claimants[-1].send(*x1_request(7, b"mmi.service", b"x"))
    return claimants


def _let_one_in(claimants: list[KeyedPeer]) -> None:
    """Wait until the broker answers one of these peers; libzmq ignores those whose routing id is in use."""
    poller = zmq.Poller()
    for each in claimants:
        poller.register(each.socket, zmq.POLLIN)
    assert poller.poll(TIMEOUT_MS), "nobody gets a routing id that is free"


def limits_of_a_role(endpoint: str, amount: int, rng: Random, keys: Path) -> None:
    """As much as its limits allow, and more: waiting and outstanding requests, memory, connections."""
    own = key(keys, "greedy")
    silent = worker(endpoint, own, b"own")
    peers = [KeyedPeer(endpoint, own) for _ in range(20)]
    numbers, body = count(), rng.randbytes(1 << 20)
    for messages, service, content, limit in (
        (amount // 4, b"waited-for", b"", b"role greedy may have 100 waiting requests"),
        (min(amount // 20, MAX_LARGE), b"own", body, b"requests of role greedy may take 8000000 bytes"),
        (amount // 4, b"own", b"", b"role greedy may have 300 outstanding requests"),
        (amount // 4, b"canary", b"", b"role greedy may have 300 outstanding requests"),
    ):
        refused = 0
        for number in range(messages):
            peers[number % 20].send(*x1_request(next(numbers), service, content))
            if number % 1000 == 999 or number == messages - 1:
                silent.send(*HEARTBEAT)
                answers = [message for peer in peers for message in peer.sync()]
                errors = [each for each in commands(answers) if isinstance(each, wire.Error)]
                refused += sum(each.code == Code.QUEUE_FULL and limit in each.text for each in errors)
        assert refused, f"the limit did not hold: {limit!r}"
    crowd = [KeyedPeer(endpoint, own) for _ in range(min(amount // 20, 400))]
    for peer in crowd:
        peer.send(*x1_request(1, b"mmi.service", b"x"))
    silent.sync()
