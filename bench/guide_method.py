"""A broker in Python by the ZeroMQ Guide's method, written independently: a straightforward first implementation.

    python bench/guide_method.py [--dialect 0.1|0.2] [--heartbeat 2.5]

It polls, calls `recv_multipart` and calls `send_multipart` once per message.  Services have a list of requests and a
list of idle workers, both taken from the front with `pop(0)`.  Another list of all idle workers is scanned for dead
ones and for heartbeats.  Workers are keyed by their identity in hexadecimal.  It prints its endpoint.
"""

import argparse
import time
from binascii import hexlify

import zmq

LIVENESS = 3
READY = b"\x01"
REQUEST = b"\x02"


class Service:
    """A service: its waiting requests and its idle workers."""

    def __init__(self) -> None:
        self.requests: list[list[bytes]] = []
        self.waiting: list[Worker] = []


class Worker:
    """A worker that has sent READY."""

    def __init__(self, name: bytes, address: bytes) -> None:
        self.name = name
        self.address = address
        self.service: Service | None = None
        self.service_name = b""
        self.expiry = 0.0


class Broker:
    """Clients and workers on one ROUTER."""

    def __init__(self, dialect: str, heartbeat: float) -> None:
        self.old = dialect == "0.1"
        self.client_header, self.worker_header = (b"MDPC01", b"MDPW01") if self.old else (b"MDPC02", b"MDPW02")
        self.final, self.beat, self.disconnect = (
            (b"\x03", b"\x04", b"\x05") if self.old else (b"\x04", b"\x05", b"\x06")
        )
        self.heartbeat = heartbeat
        self.beat_at = time.time() + heartbeat
        self.services: dict[bytes, Service] = {}
        self.workers: dict[bytes, Worker] = {}
        self.waiting: list[Worker] = []
        self.socket = zmq.Context().socket(zmq.ROUTER)
        self.socket.linger = 0
        self.poller = zmq.Poller()
        self.poller.register(self.socket, zmq.POLLIN)

    def run(self) -> None:
        while True:
            if self.poller.poll(self.heartbeat * 1000):
                message = self.socket.recv_multipart()
                sender = message.pop(0)
                if message[0] == b"":
                    message.pop(0)
                header = message.pop(0)
                if header == self.client_header:
                    self.from_client(sender, message)
                elif header == self.worker_header:
                    self.from_worker(sender, message)
            self.purge()
            self.send_heartbeats()

    def from_client(self, sender: bytes, message: list[bytes]) -> None:
        if not self.old:
            message.pop(0)  # the command, always REQUEST
        name = message.pop(0)
        if name.startswith(b"mmi."):
            known = message[-1] in self.services
            code = (b"200" if known else b"404") if name == b"mmi.service" else b"501"
            self.to_client(sender, b"\x03", name, [code])
        else:
            self.dispatch(self.require_service(name), [sender, b"", *message])

    def from_worker(self, sender: bytes, message: list[bytes]) -> None:
        command = message.pop(0)
        name = hexlify(sender)
        known = name in self.workers
        worker = self.require_worker(name, sender)
        if command == READY:
            if known:
                self.delete(worker, tell=True)
            else:
                worker.service_name = message.pop(0)
                worker.service = self.require_service(worker.service_name)
                self.is_waiting(worker)
        elif not known:
            self.delete(worker, tell=True)
        elif command == self.final or (command == b"\x03" and not self.old):
            client = message.pop(0)
            message.pop(0)  # the empty frame
            done = command == self.final
            self.to_client(client, b"\x03" if done else b"\x02", worker.service_name, message)
            if done:
                self.is_waiting(worker)
        elif command == self.beat:
            worker.expiry = time.time() + LIVENESS * self.heartbeat
        elif command == self.disconnect:
            self.delete(worker, tell=False)

    def to_client(self, client: bytes, command: bytes, service: bytes, body: list[bytes]) -> None:
        if self.old:
            self.socket.send_multipart([client, b"", self.client_header, service, *body])
        else:
            self.socket.send_multipart([client, self.client_header, command, service, *body])

    def to_worker(self, worker: Worker, command: bytes, message: list[bytes]) -> None:
        envelope = [worker.address, b""] if self.old else [worker.address]
        self.socket.send_multipart([*envelope, self.worker_header, command, *message])

    def require_service(self, name: bytes) -> Service:
        service = self.services.get(name)
        if service is None:
            service = self.services[name] = Service()
        return service

    def require_worker(self, name: bytes, address: bytes) -> Worker:
        worker = self.workers.get(name)
        if worker is None:
            worker = self.workers[name] = Worker(name, address)
        return worker

    def delete(self, worker: Worker, *, tell: bool) -> None:
        if tell:
            self.to_worker(worker, self.disconnect, [])
        if worker.service is not None and worker in worker.service.waiting:
            worker.service.waiting.remove(worker)
        if worker in self.waiting:
            self.waiting.remove(worker)
        self.workers.pop(worker.name, None)

    def is_waiting(self, worker: Worker) -> None:
        assert worker.service is not None
        self.waiting.append(worker)
        worker.service.waiting.append(worker)
        worker.expiry = time.time() + LIVENESS * self.heartbeat
        self.dispatch(worker.service, None)

    def dispatch(self, service: Service, message: list[bytes] | None) -> None:
        if message is not None:
            service.requests.append(message)
        self.purge()
        while service.waiting and service.requests:
            request = service.requests.pop(0)
            worker = service.waiting.pop(0)
            self.waiting.remove(worker)
            self.to_worker(worker, REQUEST, request)

    def purge(self) -> None:
        """Remove dead workers.  The list is ordered from oldest to newest, so the search stops at the first that is
        alive."""
        while self.waiting and self.waiting[0].expiry < time.time():
            self.delete(self.waiting[0], tell=False)

    def send_heartbeats(self) -> None:
        if time.time() > self.beat_at:
            for worker in self.waiting:
                self.to_worker(worker, self.beat, [])
            self.beat_at = time.time() + self.heartbeat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dialect", choices=("0.1", "0.2"), default="0.1")
    parser.add_argument("--heartbeat", type=float, default=2.5, help="seconds")
    options = parser.parse_args()
    broker = Broker(options.dialect, options.heartbeat)
    broker.socket.bind("tcp://127.0.0.1:*")
    print(broker.socket.get(zmq.LAST_ENDPOINT).decode().rstrip("\0"), flush=True)
    broker.run()


if __name__ == "__main__":
    main()
