"""The server's loop with several sockets."""

import select
import socket
import threading
import time
from contextlib import contextmanager
from errno import EHOSTUNREACH

import pytest
import zmq
from support.processes import TIMEOUT_MS, TIMEOUT_SECONDS, eventually
from support.zmtp import RawPeer

from zmdp.mdp import wire
from zmdp.mdp.broker.core.roles import Role
from zmdp.mdp.broker.io.dialer import LinkPort
from zmdp.mdp.broker.io.loop import MAX_TURN_MESSAGES, Server, ServerSettings
from zmdp.mdp.broker.io.outbox import Outbox
from zmdp.mdp.broker.io.ports import PREFIX_BYTES, Port, new_prefix
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.errors import BindError, SettingError
from zmdp.mdp.limits import Limits
from zmdp.mdp.security.access import Permissions
from zmdp.mdp.security.keys import create_keys, load_keys
from zmdp.mdp.transport.multipart import receive, send

TCP = "tcp://127.0.0.1:*"


@contextmanager
def running(server):
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield
    finally:
        server.stop()
        thread.join()


class DealerPort(Port):
    """A connection that the broker itself opens, with a peer that sends commands as peers of the main ROUTER do."""

    def __init__(self, context, endpoint, broker):
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)
        self.broker = broker
        super().__init__(new_prefix(), int(self.socket.get(zmq.FD)))

    def receive(self):
        message = receive(self.socket)
        return None if message is None else [self.prefix, *message]

    def deliver(self, message, now):
        self.broker.receive(message, now)

    def send(self, message):
        self.ready = True
        return send(self.socket, message[1:], self.unsent)

    def waiting(self):
        return {self.prefix: self.unsent.bytes}

    def release(self, identity):
        assert identity == self.prefix
        for each in list(self.unsent.waiting()):
            self.unsent.forget(each)

    def close(self):
        self.socket.close()


# Classes cannot be derived from compiled ones in interpreted code.
interpreted = pytest.mark.pure_only


def test_prefixes_differ_from_all_routing_ids_and_each_other():
    """Those that libzmq generates have five bytes; others cannot be guessed."""
    prefixes = {new_prefix() for _ in range(100)}
    assert len(prefixes) == 100
    assert {len(each) for each in prefixes} == {PREFIX_BYTES}
    assert PREFIX_BYTES > 5
    assert {each[0] for each in prefixes} == {0}


@interpreted
def test_a_port_of_another_kind():
    """Everything that arrives is taken in, however much comes at once, though the descriptor is edge-triggered."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer, Server((TCP,)) as server:
        peer.linger, peer.rcvtimeo = 0, TIMEOUT_MS
        peer.bind("tcp://127.0.0.1:*")
        port = DealerPort(context, peer.get(zmq.LAST_ENDPOINT).decode().rstrip("\0"), server.broker)
        server.add_port(port)
        with running(server):
            for count in (1, 5 * MAX_TURN_MESSAGES, 1):
                for number in range(count):
                    peer.send_multipart([b"MDPC02", b"\x01", b"mmi.service", b"%d" % number])
                for _ in range(count):
                    assert peer.recv_multipart() == [b"MDPC02", b"\x03", b"mmi.service", b"404"]
        server._sockets.remove(port)
        assert port.socket.closed
        assert server._sockets.at(port.prefix) is server._sockets.main
        assert server.broker.stats.internal_errors == 0


@interpreted
def test_a_bug_in_a_port_does_not_end_the_loop(monkeypatch):
    with Server((TCP,), ServerSettings(pirates=[(TCP, "echo")])) as server, running(server):
        right = server.broker._receive_command

        def fails_once(command, role, now):
            if isinstance(command, wire.Request):
                raise RuntimeError("a bug")
            right(command, role, now)

        monkeypatch.setattr(server.broker, "_receive_command", fails_once)
        with RawPeer(server.pirate_endpoints[0]) as peer:
            peer.send(b"", b"bug")
            peer.send(b"\x01")
            eventually(lambda: server.broker.directory.workers)
        assert server.broker.stats.internal_errors == 1


def test_messages_from_many_peers_at_many_ports():
    pirates = [(TCP, f"service-{number}") for number in range(5)]
    with Server((TCP,), ServerSettings(pirates=pirates)) as server, running(server):
        ends = server.pirate_endpoints
        workers = [RawPeer(each).send(b"\x01") for each in ends]
        clients = [RawPeer(each) for _ in range(10) for each in ends]
        for _ in range(3):
            for number, client in enumerate(clients):
                client.send(b"", b"%d" % number)
            for each, worker in enumerate(workers):
                for _ in range(10):
                    address, _, body = worker.recv()
                    assert int(body) % len(workers) == each
                    worker.send(address, b"", body)
            for number, client in enumerate(clients):
                assert client.recv() == [b"", b"%d" % number]
        for peer in workers + clients:
            peer.close()
        eventually(lambda: not server.broker.directory.workers)


def test_connections_are_limited_for_all_sockets_together():
    with (
        Server((TCP,), ServerSettings(pirates=[(TCP, "echo")], limits=Limits(max_connections=2))) as server,
        running(server),
    ):
        one, two = RawPeer(server.endpoints[0]), RawPeer(server.pirate_endpoints[0])
        eventually(lambda: server.connections.open == 2)
        for count, endpoint in enumerate((server.endpoints[0], server.pirate_endpoints[0]), 1):
            with RawPeer(endpoint, handshake=False) as other:
                other.wait_for_end()
            assert server.connections.counts["over-limit"] == count
        one.close()
        eventually(lambda: server.connections.open == 1)
        with RawPeer(server.pirate_endpoints[0]) as three:
            three.send(b"\x01")
            eventually(lambda: server.broker.directory.workers)
        two.close()
        eventually(lambda: server.connections.open == 0)
        assert server.connections.addresses == {}


def test_a_message_that_arrives_while_another_is_sent():
    """Sending may consume the signal of its arrival, so the port is asked again."""
    with Server((TCP,), ServerSettings(pirates=[(TCP, "echo")])) as server, RawPeer(server.pirate_endpoints[0]) as peer:
        _, port = server._sockets.ports.values()
        peer.send(b"\x01")
        while not server.broker.directory.workers:
            server._sockets.wait(TIMEOUT_MS)
            server._turn(time.monotonic())
        assert not port.ready
        (worker,) = server.broker.directory.workers.values()
        peer.send(b"\x02")
        select.select([port.descriptor], [], [], TIMEOUT_SECONDS)
        assert port.send([*worker.route, b"\x02"]) == 0
        assert port.ready
        eventually(lambda: (server._turn(time.monotonic()), server.broker.stats.heartbeats)[1])


def test_chosen_routing_ids_are_forgotten():  # C39
    with Server((TCP,), ServerSettings(pirates=[(TCP, "echo")])) as server, running(server):
        _, port = server._sockets.ports.values()
        with RawPeer(server.pirate_endpoints[0], b"me") as peer:
            peer.send(b"\x01")
            eventually(lambda: server.broker.directory.workers)
            assert list(port.chosen) == [b"me"]
        eventually(lambda: not server.broker.directory.workers)
        eventually(lambda: not port.chosen)


def test_what_waits_at_ports_counts():
    """The peer for which most waits is found at any socket."""
    with Server((TCP,), ServerSettings(pirates=[(TCP, "echo")])) as server:
        _, port = server._sockets.ports.values()
        outbox = Outbox(Limits(max_outbox_bytes=20_000_000), server._sockets.ports)
        with RawPeer(server.pirate_endpoints[0]) as peer:
            peer.send(b"", b"hello")
            message = eventually(port.receive)
            assert message[1:] == [b"", b"hello"]
            assert message[0].startswith(port.prefix)
            while outbox.overfull() is None:
                assert port.send([message[0], b"", b"x" * 1_000_000]) == 0
            assert outbox.overfull() == message[0]
            assert list(port.waiting()) == [message[0]]
            outbox.forget(message[0])
            assert (outbox.overfull(), port.waiting()) == (None, {})
            server._sockets.at(message[0]).end(message[0])
            peer.wait_for_end()
        eventually(lambda: port.send([message[0], b"", b"x"]) == EHOSTUNREACH)


@pytest.mark.parametrize(
    ("pirates", "error", "text"),
    [
        ([("tcp://0.0.0.0:*", "echo")], BindError, "refused to listen on tcp://0.0.0.0:*"),
        ([(TCP, "")], SettingError, "not a valid service name"),
        ([(TCP, "echo"), ("ipc:///no/such/file", "echo")], BindError, "cannot listen on ipc:///no/such/file"),
    ],
)
def test_endpoints_and_services_are_checked(pirates, error, text):
    with pytest.raises(error, match=text.replace("*", r"\*")):
        Server((TCP,), ServerSettings(pirates=pirates))


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("tcp://nosuch.invalid:*", "that is not an address of this machine, nor the name of a network interface"),
        ("tcp://192.0.2.1:*", "that is not an address of this machine, nor the name of a network interface"),
        (f"ipc:///tmp/{'x' * 300}", "File name too long"),
    ],
)
def test_why_a_broker_cannot_listen(endpoint, why):
    with pytest.raises(BindError) as raised:
        Server((endpoint,), ServerSettings(insecure=True))
    assert str(raised.value) == f"cannot listen on {endpoint}: {why}"


def test_an_endpoint_in_use():
    with Server((TCP,), ServerSettings(pirates=[(TCP, "echo")])) as server:
        for given in ((server.endpoints[0], "x"), (server.pirate_endpoints[0], "x")):
            with pytest.raises(BindError, match="another program is listening there"):
                Server((TCP,), ServerSettings(pirates=[given]))


def test_a_socket_of_another_kind_is_not_replaced(tmp_path):
    path = str(tmp_path / "log")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
    ):
        other.bind(path)
        with pytest.raises(BindError, match="Protocol wrong type for socket"):
            Server((f"ipc://{path}",))
        sender.sendto(b"hello", path)
        assert other.recv(10) == b"hello"


def test_a_link_to_a_key_without_a_role_does_not_end_because_its_role_has_changed(tmp_path):
    for name in ("broker", "other"):
        create_keys(name, tmp_path)
    keys = load_keys(tmp_path / "broker.key_secret", tmp_path / "other.key")
    broker = Broker(now=0.0)
    with zmq.Context() as context:
        port = LinkPort(broker, b"link", "tcp://127.0.0.1:1", keys, broker.roles.nobody, context)
        try:
            before = port.ended  # nothing listens there, which may be known already
            port.grant({})
            assert port.ended == before
            port.grant({keys.server: Role("brokers", Permissions(name="brokers", link=True))})
            assert port.ended == "the role of its key has changed"
        finally:
            port.close()
