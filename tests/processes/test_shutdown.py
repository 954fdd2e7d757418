"""Every command that serves ends on SIGTERM, whatever its handlers do, and says what it gave up."""

import json
import os
import signal
import socket
import sqlite3
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from support.flux_client import FluxClient
from support.freelance import Caller
from support.processes import alive, broker, eventually, free_endpoint, process

from zmdp.clients import Client
from zmdp.titanic import Titanic

HERE = Path(__file__).parent
PATIENCE_SECONDS = 60.0
"""How long a test waits for a process to end before it fails."""
LIMIT = ("--drain-timeout", "0.5")
BEATS = ("--heartbeat", "0.2", "--liveness", "50")
THREADS = ["sleeps", "spins"]
LOOPS = ["awaits", "refuses_to_end", "blocks", "spins_in_loop", "blocks_in_c", "waits_for_thread"]


def ended(running, number=signal.SIGTERM):
    """Send a signal, wait until the process has ended, and return its exit code."""
    running.send_signal(number)
    assert running.poll(PATIENCE_SECONDS) is not None, running.stderr
    return running.wait()


@pytest.fixture(scope="module")
def endpoint():
    with broker(*BEATS) as (_, endpoint):
        yield endpoint


@pytest.fixture
def client(endpoint):
    with Client(endpoint, timeout=PATIENCE_SECONDS, retries=0) as client:
        yield client


@pytest.mark.parametrize(
    ("command", "ready", "stream"),
    [
        (["mdworker", "zmdp.workers.examples:echo"], "offering", "stderr"),
        (["mdworker", "zmdp.workers.examples:echo", "--freelance", "PORT"], "offering", "stderr"),
        (["titanic", "serve", "--db", "titanic.db"], "serving", "stderr"),
        (["mdp-broker", "--bind", "PORT"], "tcp://", "stdout"),
        (["mdp-gateway", "http", "--bind", "127.0.0.1:0"], "http://", "stdout"),
        (["mdp-gateway", "flux", "--socket", "SOCKET"], "local://", "stdout"),
    ],
    ids=["worker", "freelance", "titanic", "broker", "http", "flux"],
)
def test_a_command_that_has_nothing_to_reload_says_so(endpoint, tmp_path, command, ready, stream):
    """From the moment when it says where it serves."""
    command = [{"PORT": free_endpoint(), "SOCKET": str(tmp_path / "flux")}.get(each, each) for each in command]
    with process(*command, cwd=tmp_path, MDP_BROKER=endpoint) as running:
        running.line(ready, stream)
        running.send_signal(signal.SIGHUP)
        running.line("nothing to reload")
        assert ended(running) == 0


@contextmanager
def worker(endpoint, handler, *options, service="", limit=LIMIT):
    command = ("mdworker", f"stuck:{handler}", "--service", service or handler, "--broker", endpoint, *limit, *options)
    with process(*command, cwd=HERE) as running:
        yield running


def hold(client, service, folder):
    """Send a request, and wait until its handler has begun.  Return the handler's process, and the future reply."""
    path = folder / "begun"
    reply = client.submit(service, os.fsencode(path))
    eventually(path.exists)
    return int(path.read_text()), reply


# ── mdworker ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("handler", [*THREADS, *LOOPS])
def test_a_worker_ends_whatever_its_handler_does(endpoint, client, tmp_path, handler):
    with worker(endpoint, handler) as running:
        _, reply = hold(client, handler, tmp_path)
        assert ended(running) == 1
        running.line("stopping once the requests in progress are finished, within 0.5 s; interrupt again to exit")
        running.line(f"not finished within 0.5 s: gave up 1 request of {handler} (")
    with process("mdworker", "zmdp.workers.examples:repeat", "--service", handler, "--broker", endpoint):
        assert reply.result() == [os.fsencode(tmp_path / "begun")]  # another worker got it


@pytest.mark.parametrize("handler", ["sleeps", "blocks"])
def test_a_worker_of_an_older_protocol_ends(endpoint, client, tmp_path, handler):
    with worker(endpoint, handler, "--protocol", "0.2", "--concurrency", "2") as running:
        hold(client, handler, tmp_path)
        assert ended(running, signal.SIGINT) == 1
        running.line(f"gave up 1 request of {handler} (")


@pytest.mark.parametrize("handler", ["spins", "spins_in_loop", "blocks_in_c"])
def test_a_second_signal_ends_a_worker_immediately_whatever_its_handler_does(endpoint, client, tmp_path, handler):
    with worker(endpoint, handler, limit=("--drain-timeout", "3600")) as running:
        hold(client, handler, tmp_path)
        running.send_signal(signal.SIGTERM)
        running.line("interrupt again to exit immediately")
        assert ended(running) == 1


def test_a_worker_does_not_wait_for_a_broker_that_does_not_answer():
    command = ("mdworker", "zmdp.workers.examples:repeat", "--service", "echo", *BEATS, *LIMIT)
    with broker(*BEATS) as (suspended, at), process(*command, "--broker", at) as running:
        with Client(at, timeout=PATIENCE_SECONDS) as client:
            client.request("echo", b"x")
        suspended.send_signal(signal.SIGSTOP)
        assert ended(running) == 1
        running.line("gave up waiting for")


@pytest.mark.parametrize(
    ("handler", "told"),
    [
        ("sleeps", "not finished within 0.5 s: gave up 1 request of sleeps ("),
        ("blocks", "not finished within 0.5 s: gave up 1 request of blocks ("),
        ("holds_interpreter", "did not end within 0.5 s: killing it; other workers get its requests"),
    ],
)
def test_all_worker_processes_end(endpoint, client, tmp_path, handler, told):
    with worker(endpoint, handler, "--processes", "2") as running:
        pid, _ = hold(client, handler, tmp_path)
        assert ended(running) == 1
        running.line(told)
        assert not alive(pid)


def test_a_worker_process_ends_with_its_supervisor_although_its_event_loop_is_blocked(endpoint, client, tmp_path):
    with worker(endpoint, "blocks", "--processes", "2") as running:
        pid, _ = hold(client, "blocks", tmp_path)
        os.kill(running.pid, signal.SIGKILL)
        eventually(lambda: not alive(pid), PATIENCE_SECONDS)
        running.line("the supervisor process has died: stopping")


@pytest.mark.parametrize("handler", ["sleeps", "awaits", "spins_in_loop"])
def test_a_freelance_server_ends(tmp_path, handler):
    at, path = free_endpoint(), tmp_path / "begun"
    command = ("mdworker", f"stuck:{handler}", "--freelance", at, *LIMIT)
    with process(*command, cwd=HERE) as running, Caller(at) as caller:
        running.line("offering")
        caller.send(at, b"1", os.fsencode(path))
        eventually(path.exists)
        assert ended(running) == 1
        running.line("gave up 1 request of freelance (1); their clients try other servers")


# ── the broker ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_broker_ends_although_a_worker_never_answers(tmp_path):
    with broker(*LIMIT) as (running, at), worker(at, "sleeps"), Client(at, timeout=PATIENCE_SECONDS) as client:
        hold(client, "sleeps", tmp_path)
        assert ended(running) == 1
        running.line("stopped with 1 requests running and 0 waiting: gave them up")


def test_a_broker_ends_although_its_web_server_and_worker_are_suspended(tmp_path):
    with broker("--http", "127.0.0.1:0", *LIMIT) as (running, at), worker(at, "sleeps") as suspended:
        with Client(at, timeout=PATIENCE_SECONDS) as client:
            hold(client, "sleeps", tmp_path)
            (web,) = [
                int(entry.parent.name)
                for entry in Path("/proc").glob("[0-9]*/stat")
                if entry.read_text().rsplit(")", 1)[1].split()[1] == str(running.pid)
            ]
            os.kill(web, signal.SIGSTOP)
            suspended.send_signal(signal.SIGSTOP)
            assert ended(running) == 1
            running.line("stopped with 1 requests running and 0 waiting: gave them up")
            eventually(lambda: not alive(web))


# ── titanic serve ────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def titanic(at, db, *options):
    with process("titanic", "serve", "--broker", at, "--db", str(db), *BEATS, *LIMIT, *options) as running:
        running.line("serving titanic.request, titanic.reply, titanic.close")
        yield running


def test_titanic_ends_although_a_service_never_answers(endpoint, client, tmp_path):
    path = tmp_path / "begun"
    with worker(endpoint, "sleeps"), titanic(endpoint, tmp_path / "titanic.db") as running:
        Titanic(client).submit("sleeps", os.fsencode(path))
        eventually(path.exists)
        assert ended(running) == 1
        running.line("gave up 1 running requests of sleeps: they are executed again")


def test_titanic_ends_although_its_database_is_locked(endpoint, client, tmp_path):
    db = tmp_path / "titanic.db"
    with titanic(endpoint, db) as running, closing(sqlite3.connect(db, isolation_level=None)) as lock:
        lock.execute("BEGIN IMMEDIATE")
        client.submit("titanic.request", b"anybody", b"body")
        eventually(lambda: busy(client, "titanic.request"))
        assert ended(running) == 1
        running.line("not finished within 0.5 s: gave up 1 request to Titanic itself")


def busy(client, service):
    return sum(row["busy"] for row in json.loads(client.request("mmi.workers", service.encode())[0])["workers"])


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        ("0.5", "not finished within 0.5 s: gave up waiting for the broker or the database"),
        ("3", "gave up waiting for the broker or the database"),
    ],
)
def test_titanic_ends_although_its_broker_does_not_answer(tmp_path, seconds, told):
    with broker(*BEATS) as (suspended, at):
        with titanic(at, tmp_path / "titanic.db", "--drain-timeout", seconds) as running:
            with Client(at, timeout=PATIENCE_SECONDS) as client:
                assert client.request("titanic.close", b"00" * 16)
            suspended.send_signal(signal.SIGSTOP)
            assert ended(running) == 1
            running.line(told)


# ── gateways ─────────────────────────────────────────────────────────────────────────────────────────────────────────

GATEWAY = ("python", "-m", "zmdp.gateways.cli")


def request_over_http(url, service, path):
    """Send a request, and return the connection."""
    connection = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), PATIENCE_SECONDS)
    body = os.fsencode(path)
    head = f"POST /services/{service} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_the_http_gateway_ends_although_a_service_never_answers(endpoint, client, tmp_path):
    path, service = tmp_path / "begun", "called-over-http"
    command = (*GATEWAY, "http", "--bind", "127.0.0.1:0", "--broker", endpoint, *LIMIT)
    with worker(endpoint, "awaits", service=service), process(*command) as running:
        eventually(lambda: client.available(service))
        with request_over_http(running.line("http://", "stdout"), service, path):
            eventually(path.exists)
            assert ended(running) == 1
            running.line("gave up 1 request, which had 0.5 s to finish")


def test_the_http_gateway_finishes_at_once_if_its_only_broker_is_gone():
    with broker(bind="tcp://127.0.0.1:*") as (gone, at):
        with process(*GATEWAY, "http", "--bind", "127.0.0.1:0", "--broker", at) as running:
            running.line("http://", "stdout")
            gone.send_signal(signal.SIGKILL)
            gone.wait()
            running.send_signal(signal.SIGTERM)
            assert running.wait() == 0
            assert "gave up" not in running.stderr


@contextmanager
def flux(at, path):
    with process(*GATEWAY, "flux", "--socket", str(path), "--broker", at, *LIMIT) as running:
        running.line("local://", "stdout")
        yield running


def test_the_flux_gateway_ends_although_a_program_never_answers(endpoint, client, tmp_path):
    with flux(endpoint, tmp_path / "flux") as running, FluxClient(tmp_path / "flux") as program:
        program.rpc("service.add", {"service": "silent"})
        reply = client.submit("silent", b"{}")
        program.receive()
        assert ended(running) == 1
        running.line("gave up 1 request, which had 0.5 s to finish")
        assert program.ends()
    with process("mdworker", "zmdp.workers.examples:repeat", "--service", "silent", "--broker", endpoint):
        assert reply.result() == [b"{}"]


def test_the_flux_gateway_ends_although_a_service_never_answers(endpoint, client, tmp_path):
    path = tmp_path / "begun"
    with worker(endpoint, "writes_flux"), flux(endpoint, tmp_path / "flux") as running:
        with FluxClient(tmp_path / "flux") as program:
            eventually(lambda: client.available("writes_flux"))
            program.request("writes_flux.x", {"path": str(path)})
            eventually(path.exists)
            assert ended(running) == 1
            running.line("gave up 1 request, which had 0.5 s to finish")
    assert not (tmp_path / "flux").exists()


def test_the_flux_gateway_finishes_requests(endpoint, client, tmp_path):
    with process(*GATEWAY, "flux", "--socket", str(tmp_path / "flux"), "--broker", endpoint) as running:
        running.line("local://", "stdout")
        with FluxClient(tmp_path / "flux") as program:
            program.rpc("service.add", {"service": "late"})
            reply = client.submit("late", b"{}")
            request = program.receive()
            running.send_signal(signal.SIGTERM)
            running.line("stopping once the requests in progress are finished, within 10 s")
            eventually(lambda: not client.available("late"))
            program.respond(request, {"y": 2})
            assert reply.result() == [b'{"y": 2}']
            assert running.poll(PATIENCE_SECONDS) == 0


def test_the_flux_gateway_ends_although_its_broker_does_not_answer(tmp_path):
    with broker(*BEATS) as (suspended, at), flux(at, tmp_path / "flux") as running:
        suspended.send_signal(signal.SIGSTOP)
        assert ended(running) == 1
        running.line("gave up waiting for the broker, which does not answer; no request was in progress")
    assert not (tmp_path / "flux").exists()
