"""`mdworker --freelance` and `mdclient call --freelance` as processes, some of which are killed."""

import json
import os
import signal
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from support.access import Folder
from support.freelance import Caller
from support.processes import TIMEOUT_SECONDS, eventually, free_endpoint, process, run

from zmdp.interop.freelance.client import FreelanceClient

HERE = Path(__file__).parent
ECHO = "zmdp.workers.examples:echo"


@contextmanager
def server(endpoint, target=ECHO, *options, **env):
    """Run a server; yield its process once it listens."""
    with process("mdworker", target, "--freelance", endpoint, *options, cwd=HERE, **env) as running:
        running.line("offering")
        yield running


@pytest.fixture
def endpoint():
    return free_endpoint()


@pytest.fixture
def call(in_this_process):
    """`call(*arguments)` is `mdclient call` in this process."""
    return partial(in_this_process, "mdclient", "call")


# ── servers that are killed ──────────────────────────────────────────────────────────────────────────────────────────


def test_kill_9_of_one_of_two_servers_under_load_fails_no_call(pool):
    """Threads call all the time, while each server is killed and started again."""
    endpoints = [free_endpoint(), free_endpoint()]
    ended, errors, done = threading.Event(), [], []

    def call_all_the_time(client, thread):
        number = 0
        while not ended.is_set():
            body = b"%d %d" % (thread, number)
            try:
                assert client.request(body, timeout=TIMEOUT_SECONDS) == [body]
            except Exception as error:  # noqa: BLE001 - counted
                errors.append(error)
            number += 1
        done.append(number)

    with FreelanceClient(endpoints, timeout=TIMEOUT_SECONDS) as client:
        running = [server(endpoint) for endpoint in endpoints]
        for each in running:
            each.__enter__()
        try:
            calls = [pool.submit(call_all_the_time, client, thread) for thread in range(8)]
            for at in range(2):
                eventually(lambda: all(state.alive for state in client.servers()))
                running[at].__exit__(None, None, None)  # kills it
                eventually(lambda at=at: not {s.endpoint: s.alive for s in client.servers()}[endpoints[at]])
                running[at] = server(endpoints[at])
                running[at].__enter__()
        finally:
            ended.set()
            for each in calls:
                each.result()
            for each in running:
                each.__exit__(None, None, None)
    assert errors == []
    assert sum(done) > 100


def test_a_server_that_is_suspended_is_passed_over():
    endpoints = [free_endpoint(), free_endpoint()]
    with (
        server(endpoints[0]) as first,
        server(endpoints[1]),
        FreelanceClient(endpoints, timeout=TIMEOUT_SECONDS, ping=0.1, ttl=2.0) as client,
    ):
        eventually(lambda: all(state.alive for state in client.servers()))
        first.send_signal(signal.SIGSTOP)
        try:
            for _ in range(5):
                assert client.request(b"x", timeout=TIMEOUT_SECONDS) == [b"x"]
            eventually(lambda: [state.endpoint for state in client.servers() if state.alive] == endpoints[1:])
        finally:
            first.send_signal(signal.SIGCONT)
        eventually(lambda: all(state.alive for state in client.servers()))


# ── mdworker ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_sigterm_finishes_what_has_begun(endpoint, tmp_path):
    path = tmp_path / "held"
    with server(endpoint, "services:slow") as running, Caller(endpoint) as caller:
        caller.send(endpoint, b"1", os.fsencode(path))
        eventually(path.exists)
        caller.send(endpoint, b"2", b"never begun")
        running.send_signal(signal.SIGTERM)
        running.line("stopping once the requests in progress are finished")
        path.unlink()
        assert caller.recv()[1:] == [b"1", b"%d" % running.pid]
        assert running.wait() == 0
        assert not caller.socket.poll(0)


def test_a_large_reply_arrives_although_the_server_stops(endpoint):
    with server(endpoint, "services:large") as running, FreelanceClient(endpoint, timeout=TIMEOUT_SECONDS) as client:
        assert client.request(b"x") == [b"x" * 20_000_000]
        assert running.wait() == 0


def test_a_function_needs_no_service_name(call, endpoint):
    with server(endpoint, "builtins:list") as running:
        running.line("offering freelance at")
        assert call("--freelance", endpoint, "x").stdout == b"x\n"


def test_a_port_in_use_is_one_line_and_exit_code_1(endpoint):
    with server(endpoint):
        done = run("mdworker", ECHO, "--freelance", endpoint)
    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    assert line == (
        f"mdworker: cannot listen on {endpoint}: another program is listening there: choose another endpoint"
    )


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (["--freelance", "tcp://*:5555"], 2, "clients cannot connect to tcp://*:5555"),
        (["--freelance", "tcp://192.0.2.1:5555"], 1, "use --access FILE to admit known keys only, or --insecure"),
        (["--freelance", "nonsense"], 2, "Invalid value for '--freelance': expected an endpoint"),
        (["--freelance", "tcp://127.0.0.1:1", "--processes", "2"], 2, "start one mdworker for each endpoint"),
        (["--freelance", "tcp://127.0.0.1:1", "--broker", "tcp://127.0.0.1:2"], 2, "--broker has no meaning with"),
        (["--bind", "tcp://*:5555"], 2, "--bind requires --freelance"),
        (["--insecure"], 2, "--insecure requires --freelance"),
        (["--access", "access.toml"], 2, "--access requires --freelance"),
        (["--freelance", "tcp://127.0.0.1:1", "--access", "no-such-file"], 2, "cannot read no-such-file"),
    ],
)
def test_invalid_usage_of_mdworker(options, code, text):
    done = run("mdworker", ECHO, *options)
    *_, line = done.stderr.decode().splitlines()
    assert text in line
    assert done.returncode == code


def test_a_public_name_and_another_place_to_listen(call, endpoint):
    port = endpoint.rpartition(":")[2]
    with server(endpoint, ECHO, "--bind", f"tcp://*:{port}", "--insecure"):
        assert call("--freelance", endpoint, "x").stdout == b"x\n"


def test_keys(call, endpoint, tmp_path):
    folder = Folder(tmp_path)
    with server(endpoint, ECHO, "--access", str(folder.access)):
        keys = {"MDP_KEY": str(tmp_path / "shop.key_secret"), "MDP_BROKER_KEY": str(tmp_path / "broker.key")}
        done = call("--freelance", endpoint, "x")
        assert done.returncode == 5
        assert b"--key" in done.stderr
        assert call("--freelance", endpoint, "x", **keys).stdout == b"x\n"


# ── mdclient ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_reply_is_printed_as_without_freelance(call, endpoint):
    missing = free_endpoint()
    with server(endpoint):
        assert call("--freelance", endpoint, "hello").stdout == b"hello\n"
        assert call("--freelance", endpoint, "a", "b").stdout == b"a\nb\n"
        assert call("--freelance", endpoint).stdout == b""
        assert call("--freelance", missing, "--freelance", endpoint, "x").stdout == b"x\n"
        assert call("--freelance", f"{missing},{endpoint}", "x").stdout == b"x\n"
        assert call("--freelance", endpoint, "-", stdin=b"\xff\0").stdout == b"\xff\0"
        assert call("--freelance", endpoint, "@@x", MDP_BROKER="tcp://127.0.0.1:1").stdout == b"@x\n"
        printed = json.loads(call("--json", "--freelance", endpoint, "a", "b").stdout)
        assert printed == {"service": endpoint, "final": True, "frames": ["a", "b"]}


def test_exit_codes_of_mdclient(call, endpoint, tmp_path):
    path = tmp_path / "held"
    with server(endpoint, "builtins:sum"):
        done = call("--freelance", endpoint, "x")
        assert done.returncode == 6
        assert b"failed with 500: TypeError" in done.stderr
    with server(endpoint, "services:slow"):
        calls = partial(call, "--freelance", endpoint, str(path), "--timeout", "0.5", "--retries", "1")
        done = eventually(lambda: (ended := calls()).returncode != 5 and ended)  # 5: it did not get as far as that
        path.unlink(missing_ok=True)
        assert done.returncode == 3
        assert f"no reply from {endpoint} within 1 s" in done.stderr.decode()


def test_no_server(call, endpoint):
    done = call("--freelance", endpoint, "x")
    assert done.returncode == 5
    assert done.stderr.decode().splitlines() == [
        f"mdclient: cannot reach a server at {endpoint}: nothing is listening there. "
        f"`mdworker MODULE:NAME --freelance {endpoint}` starts a server"
    ]
    done = call("--freelance", endpoint, "x", "--wait", "--timeout", "0.1", "--retries", "1")
    assert done.returncode == 5
    assert "no server could be reached at" in done.stderr.decode()


def test_wait_waits_for_a_server(endpoint):
    with (
        process("mdclient", "call", "--freelance", endpoint, "x", "--wait", "--timeout", "60") as client,
        server(endpoint),
    ):
        client.line("x", "stdout")
        assert client.wait() == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--freelance", "tcp://127.0.0.1:1", "--broker", "tcp://127.0.0.1:2", "x"], "--broker has no meaning with"),
        (["--freelance", "tcp://127.0.0.1:1", "--header", "a=b", "x"], "--header has no meaning with --freelance"),
        (["--freelance", "tcp://127.0.0.1:1", "--protocol", "0.2", "x"], "--protocol has no meaning with"),
        (["--freelance", "nonsense", "x"], "Invalid value for '--freelance': expected an endpoint"),
        ([], "Missing argument 'SERVICE'"),
    ],
)
def test_invalid_usage_of_mdclient(call, arguments, text):
    done = call(*arguments)
    assert done.returncode == 2
    *_, line = done.stderr.decode().splitlines()
    assert text in line
