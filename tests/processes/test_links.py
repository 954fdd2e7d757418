"""Links that must not be: to the broker itself, to namesakes, in circles, to other programs, without the right keys."""

import json
import random
import re
import signal
import socket
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq
from support.access import Folder
from support.peers import ready_of, record, records_of, request_of
from support.processes import TIMEOUT_SECONDS, broker, eventually, free_endpoint, run

from zmdp.clients import Client
from zmdp.workers import Worker

QUICK = ("--heartbeat", "0.2", "--liveness", "50")
ALERT = ("--heartbeat", "0.2", "--liveness", "15")
"""For brokers that are to notice a silence."""


@contextmanager
def undisturbed(endpoint, folder=None):
    """Call a service at the broker all the time; every call must succeed.  Yields a client of the broker."""
    keys, worker_keys = (folder.settings("operator"), folder.settings("resizer")) if folder else ({}, {})
    ended = threading.Event()
    calls = []

    def call():
        with Client(endpoint, timeout=TIMEOUT_SECONDS, retries=0, **keys) as client:
            while not ended.is_set():
                calls.append(client.request("echo", b"%d" % len(calls)) == [b"%d" % len(calls)])

    with (
        Worker("echo", list, broker=endpoint, **worker_keys),
        Client(endpoint, timeout=TIMEOUT_SECONDS, **keys) as client,
    ):
        eventually(lambda: client.available("echo"))
        thread = threading.Thread(target=call)
        thread.start()
        try:
            yield client
            before = len(calls)
            eventually(lambda: len(calls) > before + 10)
        finally:
            ended.set()
            thread.join()
        assert all(calls)
        assert json.loads(client.request("mmi.stats")[0])["internal_errors"] == 0


def troubles(client):
    return [row["trouble"] for row in json.loads(client.request("mmi.brokers")[0])["links"]]


def told(running, endpoint, text, folder=None):
    """Check that the broker logs `text`, and that `mdclient brokers` shows it, while a client calls a service."""
    options = folder.options("operator") if folder else ()
    with undisturbed(endpoint, folder) as client:
        assert re.search(r" WARNING zmdp.broker\[\d+\]: no link to broker \S+ yet: ", running.line(f" yet: {text}"))
        eventually(lambda: any(each.startswith(text) for each in troubles(client)))
        shown = run("mdclient", "brokers", "--broker", endpoint, *options).stdout.decode()
        assert text in shown
    assert "Traceback" not in running.stderr


# ── brokers that cannot be linked ────────────────────────────────────────────────────────────────────────────────────


# ── programs that are no brokers ─────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def listener(serve):
    """A TCP server that gives each connection to `serve`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = []

        def accept():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                connections.append(connection)
                serve(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in connections:
                connection.close()


def texts(connection):
    """Answer as a NATS server does."""
    connection.sendall(b'INFO {"server_id":"X","version":"2.10.0","max_payload":1048576}\r\n')
    connection.recv(1000)
    connection.sendall(b"-ERR 'Unknown Protocol Operation'\r\n")
    connection.close()


SILENT = "it does not answer as a broker; silent for 3 s"
ENDED = "the program that listens there ended the handshake: "
NO_BROKER = f"{ENDED}is it a broker? Does it need a key "


@pytest.mark.parametrize(
    ("serve", "text"),
    [(lambda connection: None, SILENT), (lambda connection: connection.close(), NO_BROKER), (texts, NO_BROKER)],
    ids=["silent", "closes", "NATS"],
)
def test_a_program_that_is_no_broker(serve, text):
    with listener(serve) as other, broker("--name", "a", "--peer", other, *ALERT) as (running, at):
        told(running, at, text)


def test_a_socket_that_is_no_broker():
    with zmq.Context() as context, context.socket(zmq.REP) as rep:
        rep.linger = 0
        port = rep.bind_to_random_port("tcp://127.0.0.1")
        with broker("--name", "a", "--peer", f"tcp://127.0.0.1:{port}", *ALERT) as (running, at):
            told(running, at, SILENT)


def test_nobody_listens():
    with broker("--name", "a", "--peer", free_endpoint(), *QUICK) as (running, at):
        told(running, at, "nothing is listening there")


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

PEOPLE = """
[roles.resizer]
keys = ["resizer.key"]
offer = ["*"]
[roles.operator]
keys = ["operator.key"]
call = ["*"]
admin = true
"""
LINKED = """
[roles.brokers]
keys = ["%s"]
call = ["*"]
offer = ["*"]
link = true
"""


@pytest.fixture
def folder(tmp_path):
    """Keys, and two access files: of broker a, whose key is `broker`, and of b, whose key is `driver`."""
    made = Folder(tmp_path)
    made.write(PEOPLE + LINKED % "driver.key")
    (tmp_path / "b.toml").write_text(f'secret_key = "driver.key_secret"\n{PEOPLE}{LINKED % "broker.key"}')
    return made


def keyed(folder, name, *options):
    """Run a broker with its access file."""
    path = folder.access if name == "a" else folder.path / "b.toml"
    return broker("--name", name, "--access", str(path), *QUICK, *options)


def test_with_the_right_keys_a_link_is_established(folder):
    with keyed(folder, "b") as (_, other), keyed(folder, "a", "--peer", f"{other}={folder.path}/driver.key") as (_, at):
        with Client(at, timeout=TIMEOUT_SECONDS, **folder.settings("operator")) as client, ExitStack() as stack:
            keys = {**folder.settings("resizer"), "broker_key": folder.path / "driver.key"}
            stack.enter_context(Worker("far", list, broker=other, **keys))
            assert client.request("far", b"x") == [b"x"]


def test_a_wrong_key(folder):
    folder.write(PEOPLE + LINKED % "stranger.key")
    given = folder.keys("stranger", "stranger").server.decode()
    with keyed(folder, "b") as (_, other):
        with keyed(folder, "a", "--peer", f"{other}={folder.path}/stranger.key") as (running, at):
            told(running, at, f"{ENDED}its public key is not {given}, or", folder)


def test_a_key_that_the_other_broker_does_not_know(folder):
    (folder.path / "b.toml").write_text(f'secret_key = "driver.key_secret"\n{PEOPLE}')
    with keyed(folder, "b") as (there, other):
        with keyed(folder, "a", "--peer", f"{other}={folder.path}/driver.key") as (running, at):
            told(running, at, "the broker refuses this key", folder)
        there.line("refused a connection from 127.0.0.1: unknown key")


def test_a_key_without_link(folder):
    text = (folder.path / "b.toml").read_text()
    (folder.path / "b.toml").write_text(text.replace("link = true", "link = false"))
    with keyed(folder, "b") as (there, other):
        with keyed(folder, "a", "--peer", f"{other}={folder.path}/driver.key") as (running, at):
            why = "role brokers may not link brokers: it needs link = true in the broker's access file"
            told(running, at, why, folder)
        there.line(f"refused a link: {why}")


def test_a_key_that_is_revoked_where_the_link_is_opened(folder):
    with keyed(folder, "b") as (_, other):
        with keyed(folder, "a", "--peer", f"{other}={folder.path}/driver.key") as (running, at):
            running.line("linked to broker b")
            folder.write(PEOPLE)
            running.send_signal(signal.SIGHUP)
            told(running, at, "role (none) may not link brokers: it needs link = true in this broker's", folder)


def test_no_key(folder):
    with keyed(folder, "b") as (_, other), broker("--name", "a", "--peer", other, *QUICK) as (running, at):
        told(running, at, NO_BROKER)


def test_a_key_for_a_broker_that_has_none(folder):
    given = folder.keys("driver", "driver").server.decode()
    with broker("--name", "b", *QUICK) as (_, other):
        with keyed(folder, "a", "--peer", f"{other}={folder.path}/driver.key") as (running, at):
            told(running, at, f"{ENDED}its public key is not {given}, or it was started without --access", folder)


@pytest.mark.parametrize(
    ("access", "key", "text"),
    [
        (True, "stranger.key", "has no role with link = true in "),
        (True, "resizer.key", "has no role with link = true in "),
        (True, "", "needs the public key of that broker: tcp://127.0.0.1:1=FILE.key"),
        (False, "driver.key", "has a key, but this broker uses none: use --access FILE"),
        (True, "missing.key", "missing.key"),
    ],
)
def test_settings_that_cannot_work_are_refused(folder, access, key, text):
    peer = f"tcp://127.0.0.1:1={folder.path}/{key}" if key else "tcp://127.0.0.1:1"
    options = ("--access", str(folder.access)) if access else ()
    done = run("mdp-broker", "--bind", "tcp://127.0.0.1:*", "--peer", peer, *options)
    assert done.returncode == 2
    assert text in " ".join(done.stderr.decode().split())
    assert b"Traceback" not in done.stderr


# ── peers that claim too much ────────────────────────────────────────────────────────────────────────────────────────

READY, REQUEST, PARTIAL, FINAL, CANCEL, DISCONNECT, ERROR, RELEASE = 1, 2, 3, 4, 5, 6, 7, 11
HELLO = {"name": "liar", "instance": "1", "heartbeat": 1.0, "kind": "peer", "link": 1}
NOT_ALLOWED = (403).to_bytes(2, "big")
STEADY = ("--heartbeat", "600")


class Liar:
    """A link to a broker, of which every frame is written by hand."""

    def __init__(self, context, endpoint, keys=None):
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        if keys is not None:
            keys.apply(self.socket)
        self.socket.connect(endpoint)

    def ask(self, body):
        """Ask for a link, and return the command of the answer and its fields."""
        self.say(b"MDPCL1", request_of(1, b"mmi.link", body))
        while True:
            message = self.socket.recv_multipart()
            if message[:2] == [b"MDPWL1", b"\x09"]:  # else it is a heartbeat
                ((command, _, fields),) = records_of(message, 0)
                return command, fields

    def opened(self):
        command, _ = self.ask(json.dumps(HELLO).encode())
        assert command == FINAL
        return self

    def say(self, header, *records):
        self.socket.send_multipart([header, b"\x09", b"".join(records)])

    def taken(self):
        """Wait until the broker has taken in everything sent so far."""
        self.socket.send_multipart([b"fence", b"", b"MDPCX1", b"\x09", request_of(1, b"mmi.service", b"x")])
        while self.socket.recv_multipart()[0] != b"fence":
            pass


@contextmanager
def liar(endpoint, keys=None):
    with zmq.Context() as context:
        told = Liar(context, endpoint, keys)
        try:
            yield told
        finally:
            told.socket.close()


def memory(pid):
    """Return the resident memory of a process in bytes."""
    (line,) = (each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def announced(name, credit=1, options=b'{"hops":1,"free":1}'):
    return ready_of(name, credit, options)


def services_of(client):
    answer = json.loads(client.request("mmi.services")[0])
    return {row["name"] for row in answer["services"]} - {"echo"}, answer["more"]


WAYS = [
    b"", b"{}", b"[]", b"\xff", b'{"via":"a"}', b'{"via":[]}', b'{"via":[1]}', b'{"via":["b"],"attempts":-1}',
    b'{"via":["b"],"attempts":"x"}', b'{"via":["b"],"user":1}', b'{"via":["b"],"broker":1}',
]  # fmt: skip


def test_garbage_over_a_link_is_counted_and_disturbs_nobody():
    rng = random.Random(7)
    with broker("--name", "a", *STEADY) as (running, at), undisturbed(at) as client, liar(at) as peer:
        peer.opened()
        for number, way in enumerate(WAYS):
            peer.say(b"MDPCL1", request_of(number + 1, b"echo", b"x", options=way))
        peer.taken()
        invalid = json.loads(client.request("mmi.stats")[0])["invalid"]
        assert invalid["bad-options"] == len(WAYS)
        for hops in (b'"x"', b"-1", b"1.5", b"true", b"null", b"17", b"4294967296", b"1e400", b"[]"):
            peer.say(b"MDPWL1", announced(b"far", options=b'{"hops":%s,"free":1}' % hops))
            peer.say(
                b"MDPWL1", announced(b"far", options=b'{"hops":1,"free":%s}' % (hops if hops != b"17" else b"-17"))
            )
        peer.taken()
        assert services_of(client) == (set(), 0)
        for header in (b"MDPCL1", b"MDPWL1"):
            for command in set(range(256)) - {DISCONNECT}:
                peer.say(header, record(command, command), record(command, 5, rng.randbytes(20)))
            for size in (0, 1, 4, 5, 12, 13, 50, 1000):
                for _ in range(20):
                    peer.say(header, rng.randbytes(size))
            for command in (FINAL, PARTIAL, ERROR, RELEASE, CANCEL, REQUEST):
                peer.say(header, *(record(command, rng.getrandbits(64), rng.randbytes(9)) for _ in range(200)))
            for frames in (
                [b"\x09"],
                [b""],
                [b"\x01", b"x"],
                [b"\xff"],
                [b"\x09", b"", b"x"],
                [b"\x05"],
                [b"\x06"] * 9,
            ):
                peer.socket.send_multipart([header, *frames])
        peer.taken()
        peer.say(b"MDPCL1", request_of(1, b"mmi.link", json.dumps(HELLO).encode()))
        peer.taken()
        peer.say(b"MDPWL1", record(DISCONNECT, 0, b"\xff\xfe" * 1000))
        eventually(lambda: not json.loads(client.request("mmi.brokers")[0])["links"])
        assert running.poll() is None
        assert "Traceback" not in running.stderr
