"""The Flux gateway's socket: who is admitted, bad input, limits, and the command."""

import os
import resource
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.access import Folder
from support.flux_client import ANY, CONTROL, EVENT, HEADER, MAGIC, REQUEST, RESPONSE, FluxClient, Message, encode
from support.flux_gateways import echo, running_gateway, running_workers
from support.processes import BIN, TIMEOUT_MS, Process, eventually, process

from zmdp.gateways.upstream import raise_descriptor_limit
from zmdp.interop.flux import gateway as flux_gateway
from zmdp.interop.flux.session import session
from zmdp.mdp.errors import BindError, RequestTimeout
from zmdp.mdp.limits import Limits
from zmdp.testing.broker import running_broker

CONNECTIONS = 10_000
DESCRIPTORS = 500
"""Besides those of connections: for both ends of each, which are in this process."""
NOBODY = 65534

GUEST = """
import os, socket, sys
os.setuid(int(sys.argv[3]))
peer = socket.socket(socket.AF_UNIX)
peer.connect(sys.argv[1])
sys.stdout.buffer.write(peer.recv(1))
if sys.argv[2]:
    peer.sendall(bytes.fromhex(sys.argv[2]))
sys.stdout.buffer.write(peer.recv(1 << 16))
"""


# ── who is admitted ──────────────────────────────────────────────────────────────────────────────────────────────────


def as_guest(path, *messages):
    """Connect as another user, send messages, and return what arrives at once."""
    sent = b"".join(map(encode, messages)).hex()
    # The process becomes the guest itself: a guest may not be allowed to execute an interpreter below /root.
    command = [sys.executable, "-S", "-c", GUEST, str(path), sent, str(NOBODY)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert not done.returncode, done.stderr
    return done.stdout


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")


@pytest.fixture
def open_folder():
    """A folder that every user can enter, which those of pytest are not."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@needs_root
def test_other_users_are_refused(broker, open_folder):
    with running_gateway(broker, open_folder / "flux") as gateway:
        os.chmod(gateway.path, 0o666)
        assert as_guest(gateway.path) == b"\1"


@needs_root
def test_guests_are_guests(stack, broker, open_folder):
    seen = []

    async def note(request):
        seen.append((request.options["flux"]["userid"], request.options["flux"]["rolemask"]))
        return b""

    stack.enter_context(running_workers(broker, note=note))
    gateway = stack.enter_context(running_gateway(broker, open_folder / "flux", guests=True))
    assert stat.S_IMODE(os.stat(gateway.path).st_mode) == 0o666
    forged = Message(REQUEST, b"note.x", None, 0, ANY, 1, userid=0, rolemask=1)
    assert as_guest(gateway.path, forged)[0] == 0
    assert seen == [(NOBODY, 6)]
    refused = as_guest(gateway.path, Message(REQUEST, b"service.add", b'{"service":"x"}\0', 0, ANY, 1))
    assert HEADER.unpack(refused[-HEADER.size :])[6] == 1
    admitted = as_guest(gateway.path, Message(REQUEST, b"service.add", b'{"service":"65534-x"}\0', 0, ANY, 1))
    assert HEADER.unpack(admitted[-HEADER.size :])[6] == 0


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_socket_is_for_its_owner_only_and_removed_at_the_end(broker, tmp_path):
    path = tmp_path / "flux"
    with running_gateway(broker, path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


def test_a_socket_that_somebody_else_has_created_meanwhile_is_not_removed(broker, tmp_path):
    path = tmp_path / "flux"
    with running_gateway(broker, path), socket.socket(socket.AF_UNIX) as other:
        path.unlink()
        other.bind(str(path))
    assert path.exists()


def test_a_socket_that_a_dead_gateway_left_is_replaced(broker, tmp_path):
    path = tmp_path / "flux"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with running_gateway(broker, path) as gateway, gateway.client():
        pass


def test_a_second_gateway_of_a_broker_leaves_events_to_the_first(gateway, broker, tmp_path, logged):
    with running_gateway(broker, tmp_path / "second") as second, second.client() as client:
        assert logged("another gateway publishes the events already")
        assert client.rpc("event.publish", {"topic": "x", "flags": 0}).a == 0


def test_only_one_gateway_can_run_at_a_socket(gateway, broker):
    with pytest.raises(BindError, match=r"flux: another gateway is running there"):
        with running_gateway(broker, gateway.path):
            pass
    with gateway.client() as client:
        assert client.rpc("attr.get", {"name": "rank"}).a == 0


def test_what_is_no_socket_is_not_replaced(broker, tmp_path):
    (tmp_path / "flux").write_text("important")
    with pytest.raises(BindError, match="it exists and is not a socket"):
        with running_gateway(broker, tmp_path / "flux"):
            pass
    with pytest.raises(BindError, match=r"there is no folder .*/nowhere"):
        with running_gateway(broker, tmp_path / "nowhere" / "flux"):
            pass
    assert (tmp_path / "flux").read_text() == "important"


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────────


def alive(gateway):
    """Whether the gateway serves others."""
    with gateway.client() as client:
        return client.rpc("attr.get", {"name": "rank"}).a == 0


REQUEST_BYTES = encode(Message(REQUEST, b"attr.get", b'{"name":"rank"}\0', 0, ANY, 1))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", MAGIC) + struct.pack(">I", 0),
        struct.pack("<I", MAGIC) + struct.pack(">I", 0xFFFFFFFF),
        struct.pack("<I", MAGIC) + struct.pack(">I", 1) + b"\xff",
        REQUEST_BYTES[:8] + b"\xf0" + REQUEST_BYTES[9:],
        REQUEST_BYTES[:-20] + b"\0" * 20,
        encode(Message(REQUEST, b"attr.get", routes=None)),
        encode(Message(RESPONSE, b"attr.get", routes=None)),
        encode(Message(REQUEST, b"", routes=())),
        encode(Message(REQUEST, b"\xff.x")),
        encode(Message(REQUEST, b"x", routes=(b"r",) * 1000)),
        encode(Message(3, b"x")),
    ],
)
def test_what_is_no_message_ends_the_connection(gateway, data, logged):
    with gateway.client() as client:
        client.socket.sendall(data)
        assert client.ends()
    assert logged("not a Flux message")
    assert alive(gateway)


def test_control_messages_and_responses_to_nothing_are_ignored(client):
    client.send(Message(CONTROL, routes=None))
    client.send(Message(RESPONSE, b"x", routes=()))
    client.send(Message(RESPONSE, b"x", routes=(b"1", b"2")))
    assert client.rpc("attr.get", {"name": "rank"}).a == 0


def test_a_message_that_is_too_large_ends_the_connection(broker, tmp_path, logged):
    with running_gateway(broker, tmp_path / "flux", max_message=1000) as gateway:
        with gateway.client() as client:
            client.socket.sendall(encode(Message(REQUEST, b"x.y", bytes(1000))))
            assert client.ends()
        assert alive(gateway)
    assert logged("message too long")


def test_replies_may_be_larger_than_what_may_be_left_unread(stack, broker, tmp_path):
    stack.enter_context(running_workers(broker, echo=echo))
    gateway = stack.enter_context(running_gateway(broker, tmp_path / "flux", max_unread=1000))
    client = stack.enter_context(gateway.client())
    body = bytes(range(256)) * 20_000
    assert client.rpc("echo.say", body).payload == body
    assert client.rpc("echo.say", b"x").payload == b"x"


def test_a_body_that_is_too_large_for_the_broker_has_its_errno(stack, tmp_path):
    broker = stack.enter_context(running_broker(limits=Limits(max_message=100_000))).endpoints[0]
    stack.enter_context(running_workers(broker, echo=echo))
    gateway = stack.enter_context(running_gateway(broker, tmp_path / "flux"))
    client = stack.enter_context(gateway.client())
    assert client.rpc("echo.say", bytes(120_000)).a == 90
    assert client.rpc("echo.say", b"x").payload == b"x"


@settings(max_examples=50)
@given(
    st.lists(
        st.builds(
            Message,
            st.sampled_from([1, 2, 4]),
            st.sampled_from([b"event.subscribe", b"service.add", b"x.cancel", b"x.ping", b"x.y", b"attr.get", b"a"]),
            st.none() | st.binary(max_size=20) | st.sampled_from([b'{"matchtag":1}\0', b'{"topic":""}\0', b"{}\0"]),
            st.sampled_from([0, 4, 16, 32, 64, 128, 0xB0]),
            st.sampled_from([0, 1, ANY]),
            st.sampled_from([0, 1]),
            routes=st.sampled_from([(), (b"1",), (b"1", b"2")]),
        ),
        max_size=10,
    )
)
def test_any_messages_are_answered_or_end_the_connection(shared_gateway, messages):
    with shared_gateway.client() as client:
        for message in messages:
            client.send(Message(**{**vars(message), "b": 0}) if message.type == EVENT else message)
        client.request("attr.get", {"name": "rank"}, tag=0xFFFF)
        while client.receive().b != 0xFFFF:
            pass


@pytest.fixture(scope="module")
def shared_gateway(tmp_path_factory):
    with (
        running_broker() as started,
        running_gateway(started.endpoints[0], tmp_path_factory.mktemp("shared") / "flux") as gateway,
    ):
        yield gateway


# ── the broker's access file ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_service_that_the_broker_refuses_is_not_added(stack, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "PROBE_SECONDS", 0.2)
    folder = Folder(tmp_path)
    folder.write('[roles.driver]\nkeys = ["driver.key"]\ncall = ["*"]\noffer = ["flux.*"]\nmmi = "all"\n')
    endpoint = stack.enter_context(folder.broker()).endpoints[0]
    gateway = stack.enter_context(running_gateway(endpoint, tmp_path / "flux", keys=folder.keys("driver")))
    with gateway.client() as client:
        assert client.rpc("service.add", {"service": "calc"}).a == 110
        assert client.rpc("service.remove", {"service": "calc"}).a == 2
    assert not gateway.gateway.instance.programs


def test_a_busy_broker_may_take_longer_to_answer_than_until_the_log_says_so(broker, tmp_path, monkeypatch):
    answer = flux_gateway.ask

    async def slow(client, timeout):
        if timeout < 2:
            raise RequestTimeout("no answer yet")
        return await answer(client, timeout)

    monkeypatch.setattr(flux_gateway, "ask", slow)
    with running_gateway(broker, tmp_path / "flux") as gateway, gateway.client() as client:
        assert client.rpc("attr.get", {"name": "rank"}).a == 0


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_ten_thousand_connections(broker, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_descriptor_limit(2 * CONNECTIONS + DESCRIPTORS)
    count = min(CONNECTIONS, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - DESCRIPTORS) // 2)
    peers = []
    try:
        with running_gateway(broker, tmp_path / "flux", max_connections=count) as gateway:
            for _ in range(count):
                peer = socket.socket(socket.AF_UNIX)
                peers.append(peer)
                peer.connect(gateway.path)
            for peer in peers:
                assert peer.recv(1) == b"\0"
            refused = FluxClient(gateway.path)
            assert refused.errno == 11
            assert refused.ends()
            refused.socket.close()
            for peer in peers[::100]:
                peer.sendall(REQUEST_BYTES)
            for peer in peers[::100]:
                assert HEADER.unpack(peer.recv(1000)[-HEADER.size :])[6:] == (0, 1)
    finally:
        for peer in peers:
            peer.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_requests_beyond_the_limit_wait_in_the_socket(stack, broker, gateway):
    stack.enter_context(running_workers(broker, echo=echo))
    with gateway.client() as client:
        client.socket.setblocking(False)
        pending, received = REQUEST_BYTES.replace(b"attr.get", b"echo.say") * 5_000, 0
        poll = select.poll()
        poll.register(client.socket, select.POLLIN | select.POLLOUT)
        answer = None
        while answer is None or received < 5_000 * answer:
            poll.poll(TIMEOUT_MS)
            with suppress(BlockingIOError):
                pending = pending[client.socket.send(pending[: 1 << 16]) :]
            try:
                data = client.socket.recv(1 << 20)
            except BlockingIOError:
                continue
            answer = answer or 8 + struct.unpack_from(">I", data, 4)[0]
            received += len(data)
            if not pending:
                poll.modify(client.socket, select.POLLIN)
        assert received == 5_000 * answer


def until(gateway, condition):
    """Wait until a condition holds in the gateway's thread."""
    eventually(lambda: gateway.run(condition))


def test_incomplete_messages_of_all_connections_have_one_limit(stack, broker, tmp_path, logged):
    gateway = stack.enter_context(running_gateway(broker, tmp_path / "flux", max_memory=100_000))
    incomplete = encode(Message(REQUEST, b"x.y", bytes(50_000)))[:40_000]
    first, second, third = (stack.enter_context(gateway.client()) for _ in range(3))
    for number, each in enumerate((first, second), 1):
        each.socket.sendall(incomplete)
        until(gateway, lambda number=number: gateway.gateway.memory == number * 40_000)
    third.socket.sendall(incomplete)
    assert third.ends()
    assert logged("--max-memory")
    until(gateway, lambda: gateway.gateway.memory == 80_000)
    first.socket.sendall(encode(Message(REQUEST, b"x.y", bytes(50_000)))[40_000:])
    assert first.receive().a == 38
    assert gateway.run(lambda: gateway.gateway.memory) == 40_000
    second.socket.close()
    until(gateway, lambda: gateway.gateway.memory == 0)
    assert not gateway.gateway.holders


def unread(stack, broker, gateway, size):
    """Return a client that does not read a large reply."""
    stack.enter_context(running_workers(broker, large=large))
    client = stack.enter_context(gateway.client())
    client.request("large.x", b"%d" % size)
    until(gateway, lambda: gateway.gateway.memory > size // 2)
    return client


async def large(request):
    return bytes(int(request[0]))


def test_what_is_unread_counts(stack, broker, tmp_path, logged):
    stack.enter_context(running_workers(broker, large=large))
    gateway = stack.enter_context(running_gateway(broker, tmp_path / "flux", max_memory=2_000_000))
    client = stack.enter_context(gateway.client())
    client.request("large.x", b"4000000")
    until(gateway, lambda: not gateway.gateway.connections)
    assert logged("--max-memory")
    assert gateway.gateway.memory == 0


def test_a_peer_that_reads_nothing_for_a_while_is_disconnected(stack, broker, gateway, logged):
    client = unread(stack, broker, gateway, 4_000_000)
    now = time.monotonic() + 100  # later than the gateway's own sweeps: nothing here depends on when they are
    gateway.run(gateway.gateway.sweep, now)
    client.read(1_000_000)
    gateway.run(gateway.gateway.sweep, now + 1 + flux_gateway.STALLED_SECONDS)
    assert gateway.gateway.connections
    gateway.run(gateway.gateway.sweep, now + 3 + 2 * flux_gateway.STALLED_SECONDS)
    until(gateway, lambda: not gateway.gateway.connections)
    assert logged("it has read nothing for 20 s")
    assert gateway.gateway.memory == 0


def test_a_connection_that_is_closed_ends_even_if_its_peer_does_not_read(stack, broker, gateway, monkeypatch):
    monkeypatch.setattr(flux_gateway, "CLOSE_SECONDS", 0.01)
    client = unread(stack, broker, gateway, 900_000)  # so little that the gateway still reads
    client.socket.sendall(b"garbage!")
    until(gateway, lambda: not gateway.gateway.connections)


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def command(path, broker, *options):
    python = [os.path.relpath(sys.executable, BIN), "-m", "zmdp.gateways.cli", "flux"]
    return Process([*python, "--socket", str(path), "--broker", broker, *options], {}, None, False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_until_it_is_stopped(broker, tmp_path, number):
    path = tmp_path / "flux"
    process = command(path, broker)
    assert process.line("local://", "stdout") == f"local://{path}"
    with FluxClient(path) as client:
        assert client.rpc("attr.get", {"name": "local-uri"}).json["value"] == f"local://{path}"
        assert process.end(number) == 0
        assert client.ends()
    assert not path.exists()
    assert "Traceback" not in process.stderr


def test_a_second_signal_exits_at_once(tmp_path):
    path = tmp_path / "flux"
    with process("python", "-m", "zmdp.mdp.cli.broker", "--bind", "tcp://127.0.0.1:*") as suspended:
        gateway = command(path, suspended.line("://", "stdout"))
        try:
            gateway.line("local://", "stdout")
            suspended.send_signal(signal.SIGSTOP)  # the gateway waits until it can say goodbye
            gateway.send_signal(signal.SIGTERM)
            gateway.line("interrupt again")
            assert gateway.end(signal.SIGTERM) == 1
        finally:
            gateway.kill()
    assert not path.exists()


def test_the_command_fails_with_one_line(broker, gateway, tmp_path):
    process = command(gateway.path, broker)
    assert process.wait() == 1
    assert process.stderr.splitlines()[-1].endswith("flux: another gateway is running there")
    process = command(tmp_path / "nowhere" / "flux", f"ipc://{tmp_path}/no-broker")
    assert process.wait() == 1
    assert process.stderr.endswith(f"there is no folder {tmp_path}/nowhere")
    process = command(tmp_path / ("x" * 200), broker)
    assert process.wait() == 2
    assert "is too long" in process.stderr
    assert "Traceback" not in process.stderr


def test_the_command_waits_for_the_broker_and_can_be_stopped_meanwhile(tmp_path):
    process = command(tmp_path / "flux", f"ipc://{tmp_path}/broker")
    process.line("waiting for the broker", "stderr")
    assert process.end() == 0
