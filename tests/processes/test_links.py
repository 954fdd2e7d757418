"""Links that must not be: to the broker itself, to namesakes, in circles, to other programs, without the right keys."""

import json
import re
import socket
import threading
from contextlib import contextmanager

import pytest
from support.access import Folder
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
