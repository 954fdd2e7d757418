"""Attacks within the protocol: messages of MDP and X1, well-formed or nearly so.

Without keys anybody may offer any service and call it; so no attack here offers the canary's, whose requests it would
simply get.  Those with keys do (`keyed`).
"""

import json
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import count
from random import Random
from typing import Any, Final

from support.peers import body_of, ready_of, record, request_of

from zmdp.mdp import wire
from zmdp.mdp.wire import batch

from .zmtp import CLAIM, Message, Peer, crowd, settle, take_over

REQUEST: Final = b"\x01"
"""The command of an MDP/0.2 client."""
READY, W_REQUEST, W_PARTIAL, W_FINAL, W_HEARTBEAT, W_DISCONNECT = b"\x01", b"\x02", b"\x03", b"\x04", b"\x05", b"\x06"
"""Those of an MDP/0.2 worker."""
CANCEL, RELEASE = 5, 11
"""Commands of X1 clients and workers."""
BATCH: Final = b"\x09"
NOBODY: Final = b"waited-for"
"""A service without a worker."""
DEEP: Final = b'{"a":' * 9000 + b"1" + b"}" * 9000
"""Options that take long to parse."""
MAX_LARGE: Final = 128
"""Messages near the limit of their size that one attack sends."""


def request(service: bytes, *body: bytes) -> Message:
    """Return an MDP/0.2 client's REQUEST."""
    return [b"", b"MDPC02", REQUEST, service, *body]


def x1_request(number: int, service: bytes, *body: bytes, ttl: int = 0, options: bytes = b"") -> Message:
    """Return an X1 client's REQUEST."""
    frames = [None if len(frame) >= wire.SHARED else frame for frame in body]
    attached = [frame for frame in body if len(frame) >= wire.SHARED]
    return from_client(request_of(number, service, *frames, ttl=ttl, options=options), *attached)


def x1_cancel(*numbers: int) -> Message:
    """Return an X1 client's CANCELs."""
    return from_client(signals(CANCEL, numbers))


def from_client(records: bytes, *attached: bytes) -> Message:
    """Return an X1 client's message."""
    return [b"", b"MDPCX1", BATCH, records, *attached]


def from_worker(records: bytes, *attached: bytes) -> Message:
    """Return an X1 worker's message."""
    return [b"", b"MDPWX1", BATCH, records, *attached]


def signals(command: int, ids: Iterable[int]) -> bytes:
    """Return records of CANCEL or RELEASE."""
    return b"".join(record(command, each) for each in ids)


def partial(address: int, frame: bytes) -> Message:
    """Return an X1 worker's PARTIAL."""
    return from_worker(record(3, address, body_of(None)), frame)


def final(address: int, frame: bytes) -> Message:
    """Return an X1 worker's FINAL."""
    return from_worker(record(4, address, body_of(frame)))


def ready(header: bytes, service: bytes) -> Message:
    """Return the READY of a worker of any dialect."""
    return from_worker(ready_of(service, 1)) if header == b"MDPWX1" else [b"", header, READY, service]


def commands(messages: Iterable[Message]) -> list[Any]:
    """Return the commands in the X1 messages among these, which the broker has sent."""
    found: list[Any] = []
    for message in messages:
        if message[1:3] == [b"MDPCX1", BATCH]:
            found += batch.to_client(message, 1)
        elif message[1:3] == [b"MDPWX1", BATCH]:
            found += batch.to_worker(message, 1)
    return found


def requests_in(messages: Iterable[Message]) -> list[wire.Request]:
    """Return the REQUESTs to an X1 worker that are in these messages."""
    return [each for each in commands(messages) if isinstance(each, wire.Request)]


def address_of(request: wire.Request) -> int:
    """Return the address of a REQUEST to a worker."""
    assert isinstance(request.id, int)
    return request.id


def replies_in(messages: Iterable[Message]) -> list[tuple[int, bytes]]:
    """Return number and first frame of the replies to an X1 client; for an ERROR, its text."""
    return sorted(
        (each.id, each.text if isinstance(each, wire.Error) else bytes(each.body[0])) for each in commands(messages)
    )


def worker(endpoint: str, service: bytes) -> Peer:
    """Return a registered X1 worker with much credit, which does nothing by itself."""
    peer = Peer(endpoint)
    peer.send(*from_worker(ready_of(service, 10_000)))
    peer.sync()
    return peer


def held_address(peer: Peer) -> int:
    """Return the address of the next REQUEST to an X1 worker."""
    (request,) = requests_in([peer.expect(b"MDPWX1", BATCH)])
    return address_of(request)


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def tiny_frames(endpoint: str, amount: int, rng: Random) -> None:
    """Waiting requests of a thousand frames of two bytes: each frame takes far more memory than its bytes (C40)."""
    peer = Peer(endpoint)
    body = [rng.randbytes(2) for _ in range(1000)]
    peer.flood(request(NOBODY, *body) for _ in range(min(3 * amount // 4, 4000)))
    peer.sync()


def large_waiting_requests(endpoint: str, amount: int, rng: Random) -> None:
    """Requests near the limit of their size, to a service without a worker, from several clients."""
    peers = [Peer(endpoint) for _ in range(4)]
    body = rng.randbytes(peers[0].limits()["max_message"] - 10_000)
    for number in range(min(amount // 50, MAX_LARGE)):
        peers[number % 4].flood([x1_request(number, NOBODY, body)])
    for peer in peers:
        peer.sync()


def large_held_requests(endpoint: str, amount: int, rng: Random) -> None:
    """Requests near the limit of their size, held by a worker that does not answer (C40)."""
    silent, client = worker(endpoint, b"held"), Peer(endpoint)
    body = rng.randbytes(client.limits()["max_message"] - 10_000)
    for number in range(min(amount // 50, MAX_LARGE)):
        client.flood([x1_request(number, b"held", body)])
        while silent.recv(0) is not None:
            silent.send(b"", b"MDPWX1")
    client.sync()


def envelopes(endpoint: str, amount: int, rng: Random) -> None:
    """Requests whose envelopes are much larger than they are, each from a peer that is known by this envelope only."""
    peer = Peer(endpoint)

    def routed(number: int) -> Message:
        return [b"%d" % number, *(rng.randbytes(254) + b"!" for _ in range(14)), b""]

    peer.flood([*routed(n), *request(NOBODY, b"")[1:]] for n in range(min(5 * amount, 20_000)))
    peer.flood([*routed(n), *x1_request(n, NOBODY, b"")[1:]] for n in range(min(5 * amount, 20_000)))
    peer.flood([*routed(n), *x1_request(n, b"mmi.service", NOBODY)[1:]] for n in range(min(amount, 10_000)))
    peer.flood([*routed(n), *ready(b"MDPWX1", b"routed")[1:]] for n in range(min(amount, 4000)))
    peer.sync()


def streams_not_read(endpoint: str, amount: int, rng: Random) -> None:
    """Clients that ask for a stream and do not read it."""
    source = worker(endpoint, b"stream")
    part = rng.randbytes(65_000)
    clients = [Peer(endpoint) for _ in range(8)]
    addresses = []
    for number, client in enumerate(clients):
        client.send(*x1_request(number, b"stream", b""))
        addresses.append(held_address(source))
    for number in range(min(amount, 8000)):
        source.flood([partial(addresses[number % 8], part)])
    source.sync()


def requests_not_read(endpoint: str, amount: int, rng: Random) -> None:
    """Workers with much credit that do not read their requests."""
    workers = [worker(endpoint, b"unread") for _ in range(4)]
    client = Peer(endpoint)
    body = rng.randbytes(60_000)
    client.flood(x1_request(number, b"unread", body) for number in range(min(amount, 10_000)))
    client.sync()
    assert workers  # they stay connected


def collected_partials(endpoint: str, amount: int, rng: Random) -> None:
    """PARTIALs for MDP/0.1 clients, which the broker keeps until the FINAL: there is none."""
    source, client = worker(endpoint, b"collected"), Peer(endpoint)
    part = rng.randbytes((client.limits()["max_message"] - 10_000) // 4)
    for _ in range(min(amount // 50, MAX_LARGE)):
        client.send(b"", b"MDPC01", b"collected", b"")
        client.sync()
        for each in requests_in(source.sync()):  # no REQUEST while memory is used up
            source.flood([partial(address_of(each), part)] * 4)
    source.sync()


def oversized_messages(endpoint: str, amount: int, rng: Random) -> None:
    """Messages over the limit of their size, as one frame and as many."""
    peer = Peer(endpoint)
    limit = peer.limits()["max_message"]
    whole, part = rng.randbytes(limit + 1), rng.randbytes(limit // 8)
    for number in range(min(amount // 100, MAX_LARGE)):
        peer.flood([x1_request(number, NOBODY, *([whole] if number % 2 else [part] * 9))])
    peer.sync()


def mmi_flood(endpoint: str, amount: int, rng: Random) -> None:
    """Many questions to the broker itself, with long answers that nobody reads."""
    members = Peer(endpoint)
    members.flood([b"%d" % n, *ready(b"MDPWX1", b"crowd-%d" % (n % 100))] for n in range(500))
    members.sync()
    names = [b"mmi.workers", b"mmi.services", b"mmi.stats", b"mmi.broker", b"mmi.service", b"mmi.what"]
    for dialect in (b"0.2", b"X1"):
        peer = Peer(endpoint)
        peer.flood(
            (
                x1_request(number, rng.choice(names), b"") if dialect == b"X1" else request(rng.choice(names), b"")
                for number in range(amount // 2)
            ),
            read=False,
        )
    settle(endpoint)


def heartbeats_not_read(endpoint: str, amount: int, rng: Random) -> None:
    """HEARTBEATs, each of which the broker answers, from peers that do not read."""
    del rng
    client, stranger = Peer(endpoint), Peer(endpoint)
    client.flood(([b"", b"MDPCX1"] for _ in range(amount)), read=False)
    stranger.flood(([b"MDPW02", W_HEARTBEAT] for _ in range(amount)), read=False)
    settle(endpoint)


# ── names and identities ─────────────────────────────────────────────────────────────────────────────────────────────


def unknown_services(endpoint: str, amount: int, rng: Random) -> None:
    """Requests to as many unknown services as the broker has room for, and more (C41)."""
    peer = Peer(endpoint)
    count = max(amount, 2 * int(peer.limits()["max_services"]))
    peer.flood(request(b"unknown-%d-%d" % (n, rng.getrandbits(30)), b"") for n in range(count))
    peer.sync()


def ids_of_departed_clients(endpoint: str, amount: int, rng: Random) -> None:
    """Take the self-chosen id of a client that has left while its request was at work (C39)."""
    for number in range(min(max(4, amount // 500), 50)):
        service, identity, secret = b"left-%d" % number, b"client-%d" % number, rng.randbytes(16)
        source, victim = worker(endpoint, service), Peer(endpoint, identity)
        asked = x1_request(1, service, b"ask") if number % 2 else request(service, b"ask")
        victim.send(*asked)
        address = held_address(source)
        claimants = take_over(endpoint, victim, identity)
        source.sync()  # so that one of them has got the identity
        source.send(*final(address, secret))
        source.sync()
        assert not _received(claimants, secret), "a client received the reply to another's request"
        source.close()


def ids_of_departed_workers(endpoint: str, amount: int, rng: Random) -> None:
    """Take the self-chosen id of a worker that has left, to get its requests (C39)."""
    for number in range(min(max(4, amount // 500), 50)):
        service, identity, secret = b"gone-%d" % number, b"worker-%d" % number, rng.randbytes(16)
        victim, client = Peer(endpoint, identity), Peer(endpoint)
        victim.send(*ready(b"MDPWX1" if number % 2 else b"MDPW02", service))
        victim.sync()
        claimants = take_over(endpoint, victim, identity)
        client.sync()  # so that one of them has got the identity
        client.send(*x1_request(1, service, secret))
        client.sync()
        assert not _received(claimants, secret), "a peer received the requests of another worker"
        client.close()


def ids_of_connected_clients(endpoint: str, amount: int, rng: Random) -> None:
    """Connect with the self-chosen id of a client that waits for a reply (C39)."""
    for number in range(min(max(4, amount // 500), 50)):
        service, identity, secret = b"busy-%d" % number, b"client-%d" % number, rng.randbytes(16)
        source, client = worker(endpoint, service), Peer(endpoint, identity)
        client.send(*x1_request(1, service, b"ask"))
        address = held_address(source)
        claimants = crowd(endpoint, identity)
        source.send(*final(address, secret))
        client.expect(b"MDPCX1", BATCH, record(3, 1, body_of(secret)))
        assert not _received(claimants, secret), "a client received the reply to another's request"
        source.close()
        client.close()


def _received(peers: list[Peer], secret: bytes) -> bool:
    """Return whether one of these peers, which want the same identity, received `secret`; disconnect all of them."""
    received: list[Message] = []
    for peer in peers:
        # At most one is let in.  The broker answers it in the order in which it sent the rest.
        with suppress(OSError):  # the broker may refuse it
            while (message := peer.recv(0)) is not None:
                received.append(message)
                if CLAIM in message:
                    received += peer.sync()
        peer.close()
    return any(secret in frame for message in received for frame in message)


def stolen_addresses(endpoint: str, amount: int, rng: Random) -> None:
    """Replies for what another worker holds, and CANCELs for what another client has asked (C32)."""
    for _ in range(max(2, amount // 5000)):
        holder, client = worker(endpoint, b"victim"), Peer(endpoint)
        client.flood(x1_request(number, b"victim", b"%d" % number) for number in range(100))
        requests: list[wire.Request] = []
        while len(requests) < 100:
            requests += requests_in([holder.expect(b"MDPWX1", BATCH)])
        addresses = [address_of(each) for each in requests]
        for thief in (worker(endpoint, b"thief"), worker(endpoint, b"victim"), Peer(endpoint)):
            for forge in (late, forged):
                thief.flood(forge(rng.choice(addresses), rng) for _ in range(min(amount, 5000) // 20))
            thief.flood([from_worker(signals(RELEASE, addresses)), x1_cancel(*addresses), x1_cancel(*range(100))])
            thief.flood(x1_cancel(number) for number in range(100))
            thief.sync()
            thief.close()
            holder.send(b"", b"MDPWX1")
        received = client.sync()
        for address, each in zip(addresses, requests, strict=True):
            holder.send(*final(address, b"reply to " + bytes(each.body[0])))
        holder.sync()
        replies = replies_in([*received, *client.sync()])
        assert replies == [(number, b"reply to %d" % number) for number in range(100)], "replies were forged or lost"
        holder.close()
        client.close()


def late(address: int, rng: Random) -> Message:
    """Return what an X1 worker could say about a request that it held, for which the broker does not disconnect it."""
    return rng.choice([
        final(address, b"forged"),
        partial(address, b"forged"),
        from_worker(record(7, address, b"\x01\xf4\0\x06forged" + body_of())),
        from_worker(record(RELEASE, address)),
    ])  # fmt: skip


def forged(address: int, rng: Random) -> Message:
    """Return the same, or what no worker may say."""
    return rng.choice([
        late(address, rng),
        [b"MDPW02", W_FINAL, b"%d" % address, b"", b"forged"],
        [b"MDPW02", W_PARTIAL, b"%d" % address, b"", b"forged"],
        from_worker(record(10, 0, struct.pack(">I", rng.randrange(20)))),
        from_worker(record(8, address)),
        rng.choice([[b"", b"MDPWX1"], [b"MDPW02", W_HEARTBEAT]]),
    ])  # fmt: skip


# ── malformed messages ───────────────────────────────────────────────────────────────────────────────────────────────

MDP_WORKERS: Final = [b"MDPW01", b"MDPW02"]
HEADERS: Final = [b"MDPC01", b"MDPC02", b"MDPCX1", b"MDPWX1", *MDP_WORKERS]
VALID: Final[list[Message]] = [
    request(b"mutant", b"body"),
    [b"MDPC02", REQUEST, b"mutant", b"a", b"b"],
    [b"", b"MDPC01", b"mutant", b"body"],
    x1_request(7, b"mutant", b"body", ttl=1000, options=b'{"wait":true,"headers":{"a":"b"}}'),
    x1_request(9, b"mutant", bytes(wire.SHARED), b"body", bytes(wire.SHARED)),
    x1_request(8, b"mmi.service", b"mutant"),
    x1_cancel(7),
    [b"", b"MDPCX1"],
    [b"MDPW02", READY, b"mutant"],
    [b"", b"MDPW01", READY, b"mutant"],
    from_worker(ready_of(b"mutant", 3, b'{"name":"n","host":"h","pid":7,"version":"1"}')),
    *([header, command, b"12345", b"", b"body"] for header in MDP_WORKERS for command in (W_PARTIAL, W_FINAL)),
    *([header, command] for header in MDP_WORKERS for command in (W_HEARTBEAT, W_DISCONNECT)),
    final(12345, b"body"),
    partial(12345, b"body"),
    from_worker(record(7, 12345, b"\x01\xf4\0\x04text" + body_of(b"detail"))),
    from_worker(record(10, 0, b"\0\0\0\x05") + record(RELEASE, 12345)),
    from_worker(record(6, 0)),
    [b"", b"MDPWX1"],
]
ODD: Final = [b"", b"\0", b"\xff", b"0", b"-1", b"00", b"9" * 20, b"9" * 5000, b"{}", b"[]", b"x" * 256, b"y" * 70_000]


def mutated_messages(endpoint: str, amount: int, rng: Random) -> None:
    """Valid messages of every dialect with something wrong somewhere (C15, C43)."""
    for _ in range(10):
        peer = Peer(endpoint)
        peer.flood(_mutated(rng) for _ in range(amount // 10))
        peer.sync()


def _mutated(rng: Random) -> Message:
    message = list(rng.choice(VALID))
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(message) + 1)
        part = message[at : at + 1]
        odd = rng.choice([*ODD, *HEADERS, bytes((rng.randrange(256),))])
        message[at : at + 1] = rng.choice([
            [],
            part * 2,
            [*part, odd],
            [odd],
            [b"".join(part)[:-1]],
            [bytes(byte ^ (1 << rng.randrange(8)) if rng.random() < 0.2 else byte for byte in b"".join(part)[:300])],
        ])  # fmt: skip
    return message or [b""]


def options_bombs(endpoint: str, amount: int, rng: Random) -> None:
    """Options that are costly to parse: deep, long, of huge numbers, of very many members."""
    bombs = [
        b'{"a":' * 13_000 + b"1",
        DEEP,
        b'{"a":' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b'{"a":' + b"9" * 4299 + b"}",
        b'{"a":' + b"9" * 60_000 + b"}",
        b'{"a":1e' + b"9" * 60_000 + b"}",
        b'{"a":0.' + b"0" * 60_000 + b"1}",
        b'{"a":NaN,"wait":Infinity}',
        json.dumps({str(n): n for n in range(4500)}).encode(),
        json.dumps({"headers": {str(n): "" for n in range(4500)}}).encode(),
        b'{"headers":{"a":"' + b"\\ud800" * 10_000 + b'"}}',
        b'{"pid":' + b"9" * 4000 + b"}",
        b'{"name":"' + b"n" * 60_000 + b'"}',
        b"{" + b" " * 65_000 + b"}",
        b'{"a":1}' + b"x" * 65_000,
    ]
    peer = Peer(endpoint)
    for number in range(amount // 10):
        bomb = rng.choice(bombs)
        peer.flood([
            x1_request(number, NOBODY, b"", options=bomb),
            [b"%d" % number, *from_worker(ready_of(b"bombed", 1, bomb))],
        ])  # fmt: skip
    peer.sync()


# ── floods ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def ready_flood(endpoint: str, amount: int, rng: Random) -> None:
    """READY after READY on one connection, for the same service, for many, and for reserved ones."""
    peer = Peer(endpoint)
    services = [b"flooded", b"mmi.service", *(b"flooded-%d" % n for n in range(100))]
    peer.flood(ready(rng.choice([b"MDPW02", b"MDPWX1"]), rng.choice(services)) for _ in range(amount // 2))
    peer.flood([b"%d" % n, *ready(b"MDPWX1", b"routed-%d" % n)] for n in range(amount // 2))
    peer.sync()


def reconnecting_workers(endpoint: str, amount: int, rng: Random) -> None:
    """Workers that register and break the connection, again and again, while requests wait for them."""
    client = Peer(endpoint)
    client.flood(x1_request(number, b"fickle", b"") for number in range(100))
    for number in range(amount // 10):
        stays = number % 2 == 0
        with Peer(endpoint, b"" if stays else rng.choice([b"", b"the same", b"worker-%d" % number])) as peer:
            peer.send(*ready(rng.choice([b"MDPW02", b"MDPWX1"]), b"fickle"))
            if stays:
                peer.sync()


def silent_workers(endpoint: str, amount: int, rng: Random) -> None:
    """Workers that take requests and never answer, of all dialects."""
    workers = []
    for number in range(min(max(10, amount // 100), 500)):
        peer = Peer(endpoint)
        peer.send(*ready(rng.choice([*MDP_WORKERS, b"MDPWX1"]), b"silent-%d" % (number % 10)))
        workers.append(peer)
    client = Peer(endpoint)
    client.flood(
        x1_request(number, b"silent-%d" % (number % 10), b"body", ttl=rng.choice([1, 100, 60_000]))
        for number in range(amount)
    )
    client.sync()
    for peer in workers:
        peer.sync()


def requests_for_the_canary(endpoint: str, amount: int, rng: Random) -> None:
    """Many requests for the service that others need, from one client (C20)."""
    peer = Peer(endpoint)
    peer.flood(x1_request(number, b"canary", rng.randbytes(8)) for number in range(amount // 5))
    peer.sync()


def memory_used_up(endpoint: str, amount: int, rng: Random) -> None:
    """Requests that wait for nobody use up the limit on memory, and a busy service then has no room for others'."""
    peer = Peer(endpoint)
    limits = peer.limits()
    body = rng.randbytes(limits["max_message"] - 10_000)
    numbers = count()
    for size, last in ((len(body), 1 + limits["max_request_bytes"] // len(body)), (0, 8000)):
        peer.flood(x1_request(next(numbers), NOBODY, body[:size]) for _ in range(last))
    for _ in range(amount // 1000):  # the broker drops those that do not read its answers
        peer.flood(x1_request(next(numbers), b"canary", b"") for _ in range(1000))
        peer.sync()


def cancel_storm(endpoint: str, amount: int, rng: Random) -> None:
    """Requests that are cancelled at once, while they wait and while a worker holds them, and in the same message."""
    holder, client = worker(endpoint, b"holder"), Peer(endpoint)

    def storm() -> Iterator[Message]:
        for number in range(amount // 4):
            service = rng.choice([NOBODY, b"holder"])
            yield x1_request(number, service, b"")
            yield x1_cancel(number)
            yield from_client(request_of(number, service, b"") + record(CANCEL, number))

    client.flood(storm())
    client.sync()
    holder.sync()


def short_lives(endpoint: str, amount: int, rng: Random) -> None:
    """Requests that expire almost at once, in a service without a worker."""
    peer = Peer(endpoint)
    peer.flood(x1_request(n, NOBODY, b"", ttl=rng.randrange(1, 50)) for n in range(amount))
    peer.sync()


def waiting_requests(endpoint: str, amount: int, rng: Random) -> None:
    """Twenty times `amount` requests that wait, most of them of X1 clients, each of which is owed an ERROR."""
    del rng
    numbered, old = Peer(endpoint), Peer(endpoint)
    numbered.flood(x1_request(number, NOBODY, b"body") for number in range(16 * amount))
    old.flood(request(NOBODY, b"body") for _ in range(4 * amount))
    numbered.sync()
    old.sync()
