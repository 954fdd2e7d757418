"""The Guide's Lazy Pirate client and Paranoid Pirate worker, written from its description, at a broker that is killed.

All intervals are the Guide's.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from support.access import Folder
from support.pirates import LazyPirate, ParanoidPirate
from support.processes import TIMEOUT_SECONDS, broker, eventually, free_endpoint, process

from zmdp.clients import Client

REQUEST_TIMEOUT_MS, RETRIES = 2500, 100
HEARTBEAT_MS, LIVENESS = 1000, 3
BEATS = ("--heartbeat", "0.1", "--liveness", "100")


class LazyPirateClient:
    """Sends a number, waits for the same number; if none comes in time, closes the socket and sends it again."""

    def __init__(self, context: zmq.Context, endpoint: str) -> None:
        self._context, self._endpoint = context, endpoint
        self._socket = self._connect()
        self.sequence = 0

    def _connect(self) -> zmq.Socket:
        socket = self._context.socket(zmq.REQ)
        socket.linger = 0
        socket.connect(self._endpoint)
        return socket

    def call(self) -> None:
        self.sequence += 1
        for _ in range(RETRIES):
            self._socket.send(b"%d" % self.sequence)
            if self._socket.poll(REQUEST_TIMEOUT_MS):
                assert self._socket.recv_multipart() == [b"%d" % self.sequence]
                return
            self.close()
            self._socket = self._connect()
        raise AssertionError("server seems to be offline, abandoning")

    def close(self) -> None:
        self._socket.close()


class ParanoidPirateWorker(threading.Thread):
    """Returns requests of three frames as they are; connects again when the queue has been silent."""

    def __init__(self, context: zmq.Context, endpoint: str) -> None:
        super().__init__()
        self._sockets, self._endpoint = context, endpoint
        self.ended = threading.Event()
        self.connected = 0

    def run(self) -> None:
        while not self.ended.is_set():
            with self._sockets.socket(zmq.DEALER) as socket:
                socket.linger = 0
                socket.connect(self._endpoint)
                socket.send(b"\x01")
                self.connected += 1
                self._serve(socket)

    def _serve(self, socket: zmq.Socket) -> None:
        liveness, heartbeat_at = LIVENESS, time.monotonic() + HEARTBEAT_MS / 1000
        while not self.ended.is_set():
            if socket.poll(HEARTBEAT_MS):
                message = socket.recv_multipart()
                if len(message) == 3:
                    socket.send_multipart(message)
                else:
                    assert message == [b"\x02"]
                liveness = LIVENESS
            else:
                liveness -= 1
                if liveness == 0:
                    return
            if time.monotonic() > heartbeat_at:
                heartbeat_at = time.monotonic() + HEARTBEAT_MS / 1000
                socket.send(b"\x02")


@contextmanager
def crew(endpoint: str, workers: int) -> Iterator[tuple[LazyPirateClient, list[ParanoidPirateWorker]]]:
    """Run workers in threads; yield a client and them."""
    with zmq.Context() as context:
        threads = [ParanoidPirateWorker(context, endpoint) for _ in range(workers)]
        client = LazyPirateClient(context, endpoint)
        for each in threads:
            each.start()
        try:
            yield client, threads
        finally:
            client.close()
            for each in threads:
                each.ended.set()
            for each in threads:
                each.join()


def test_a_killed_broker_is_found_again():
    """The workers are not registered at the new broker, whose silence tells them so."""
    main, endpoint = free_endpoint(), free_endpoint()
    options = ("--pirate", f"{endpoint}=echo", *BEATS)
    with crew(endpoint, 2) as (client, workers):
        ended = threading.Event()

        def call():
            while not ended.is_set():
                client.call()

        calling = threading.Thread(target=call)
        calling.start()
        try:
            for _ in range(3):
                before = client.sequence
                with broker(*options, bind=main) as (running, _):
                    eventually(lambda at_least=before + 100: client.sequence > at_least)
                    running.kill()
            with broker(*options, bind=main):
                ended.set()
                calling.join()
        finally:
            ended.set()
            calling.join()
        # Two at the start, and one for each of the next two lives at least.
        assert sum(each.connected for each in workers) >= 4


def test_endpoints_of_pirates_are_not_printed_but_logged(tmp_path):
    """stdout has the endpoints at which zmdp's own programs connect."""
    echo, shout = free_endpoint(), f"ipc://{tmp_path}/shout"
    config = tmp_path / "broker.toml"
    config.write_text(f'bind = "tcp://127.0.0.1:*"\npirate = ["{echo}=echo", "{shout}=shout, loud"]\n')
    one_line = f'pirate = "{echo}=echo"\n'
    for options, env, pirates in [
        (["--pirate", f"{echo}=echo", "--pirate", f"{shout}=a=b"], {}, [f"{echo} call echo", f"{shout} call a=b"]),
        ([], {"MDP_PIRATE": f"{echo}=echo,{shout}=shout"}, [f"{echo} call echo", f"{shout} call shout"]),
        (["--config", str(config)], {}, [f"{echo} call echo", f"{shout} call shout, loud"]),
        (["--config", str(tmp_path / "one.toml")], {}, [f"{echo} call echo"]),
    ]:
        (tmp_path / "one.toml").write_text(one_line)
        with process("mdp-broker", "--bind", "tcp://127.0.0.1:*", *options, **env) as running:
            main = running.line("://", "stdout")
            ready = running.line("ready on")
            assert f"ready on {main}; {'; '.join(f'pirates at {each}' for each in pirates)}; heartbeat" in ready
            assert running.end() == 0
            assert running._lines["stdout"] == [main]


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_with_access_control_pirates_have_keys_too(folder):
    endpoint = free_endpoint()
    access = ("--access", str(folder.access), "--pirate", f"{endpoint}=echo", "--heartbeat", "60")
    with broker(*access) as (running, main), zmq.Context() as context:

        def peer(kind, name):
            made = kind(context, endpoint, options=options_of(folder, name))
            peers.append(made)
            return made

        peers = []
        try:
            forbidden = peer(ParanoidPirate, "shop")
            client, worker = peer(LazyPirate, "shop"), peer(ParanoidPirate, "resizer")
            forbidden.ready()
            running.line("role shop may not offer 'echo'")
            client.call(b"hello")
            worker.ready()
            worker.final(worker.work(b"hello"), b"world")
            client.answered(b"world")
            with Client(main, timeout=TIMEOUT_SECONDS, **folder.settings("driver")) as observer:
                assert observer.request("mmi.service", b"echo") == [b"200"]
                folder.write(folder.access.read_text().partition("\n")[2].replace("resizer", "stranger"))
                running.send_signal(signal.SIGHUP)
                running.line(f"unknown key {folder.keys('resizer').public.decode()}")
                eventually(lambda: observer.request("mmi.service", b"echo") == [b"404"])
        finally:
            for each in peers:
                each.close()


def options_of(folder, name):
    keys = folder.keys(name)
    return {zmq.CURVE_SERVERKEY: keys.server, zmq.CURVE_PUBLICKEY: keys.public, zmq.CURVE_SECRETKEY: keys.secret}
