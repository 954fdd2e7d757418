"""Keys of a broker with an access file, over real sockets; `tests/mdp/broker/core/test_roles.py` has what roles may do.

Roles that a test does not describe otherwise have `mmi = "all"`, since peers ask the broker to find out that nothing
arrives (`Peer.sync`).
"""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest
import zmq
from support.peers import (
    Client,
    OldClient,
    OldWorker,
    Peer,
    Worker,
    X1Client,
    X1Worker,
    body_of,
    record,
    request_of,
)
from support.processes import TIMEOUT_SECONDS, eventually
from support.router import proxied
from zmq.utils.monitor import recv_monitor_message

from zmdp.mdp.limits import Limits
from zmdp.mdp.security import access
from zmdp.mdp.security.keys import ClientKeys, create_keys, load_keys
from zmdp.testing import running_broker

CLIENTS = [Client, OldClient, X1Client]
WORKERS = [Worker, OldWorker, X1Worker]
SHOP = {"call": ["echo", "spark.*"]}
FARM = {"offer": ["echo", "spark.*"]}
OPS = {"admin": True}
Roles = dict[str, Any]


class Log(logging.Handler):
    """What the brokers of a test have logged, from INFO on, while the block runs."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._logger = logging.getLogger("zmdp.broker")
        self._level = self._logger.level

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            self._lines.append(record.getMessage())
            self._changed.notify_all()

    def line(self, text: str, count: int = 1) -> None:
        """Wait for `count` lines that contain `text`."""
        with self._changed:
            found = self._changed.wait_for(lambda: sum(text in each for each in self._lines) >= count, TIMEOUT_SECONDS)
            assert found, (text, self._lines)

    @property
    def text(self) -> str:
        with self._changed:
            return "\n".join(self._lines)

    def __enter__(self) -> Self:
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)


class Guarded:
    """A broker with access control, and the keys and peers of a test.

    Each role has a key with its own name.
    """

    def __init__(self, folder: Path, stack: ExitStack, roles: Roles) -> None:
        self.folder = folder
        self.context: zmq.Context[Any] = stack.enter_context(zmq.Context())
        self._stack = stack
        create_keys("broker", folder)
        self._write(roles)
        self.log = stack.enter_context(Log())
        limits, keys = Limits(heartbeat=60.0), access.load(folder / "access.toml")
        self.server = stack.enter_context(running_broker(limits=limits, drain_timeout=0.0, access=keys))
        self.endpoint = self.server.endpoints[0]
        self._reloads = 0

    def _write(self, roles: Roles) -> None:
        """Write the access file; the setting `keys` of a role has the names of its keys."""
        lines = ['secret_key = "broker.key_secret"']
        for name, given in roles.items():
            settings = {"keys": [name], "mmi": "all", **given}
            for each in settings["keys"]:
                self.keys(each)
            settings["keys"] = [f"{each}.key" for each in settings["keys"]]
            lines += [f"[roles.{name}]", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
        (self.folder / "access.toml").write_text("\n".join(lines))

    def reload(self, roles: Roles) -> None:
        """Replace the access file, and wait until the broker has read it."""
        self._write(roles)
        self.server.reload()
        self._reloads += 1
        self.log.line("reloaded", count=self._reloads)

    def keys(self, name: str) -> ClientKeys:
        """Return the keys of that name, which are made when they are first asked for."""
        if not (self.folder / f"{name}.key").exists():
            create_keys(name, self.folder)
        keys = load_keys(self.folder / f"{name}.key_secret", self.folder / "broker.key")
        assert keys is not None
        return keys

    def connect(
        self,
        kind: Callable[..., Any],
        key: str | None,
        service: bytes = b"",
        *,
        endpoint: str = "",
        identity: bytes = b"",
        **told: Any,
    ) -> Any:
        """Return a peer that uses that key; if `service` is given, a worker that the broker has registered."""
        options = {} if key is None else options_of(self.keys(key))
        if identity:
            options[zmq.ROUTING_ID] = identity
        peer = kind(self.context, endpoint or self.endpoint, options=options)
        self._stack.callback(peer.close)
        if service:
            peer.ready(service, **told)
            peer.sync()
        return peer

    def stats(self, key: str = "ops") -> dict[str, Any]:
        """Return the broker's counts."""
        asks = self.connect(Client, key)
        asks.request(b"mmi.stats", b"")
        found: dict[str, Any] = json.loads(asks.recv()[-1])
        asks.close()
        return found

    def attempt(self, keys: ClientKeys | None) -> int:
        """Try to connect with these keys, and return the first event that says what became of it."""
        ended = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | ended
        with self.context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            if keys is not None:
                keys.apply(socket)
            with socket.get_monitor_socket(events) as monitor:
                socket.connect(self.endpoint)
                assert monitor.poll(TIMEOUT_SECONDS * 1000), "nothing became of the handshake"
                event = int(recv_monitor_message(monitor)["event"])
                socket.disable_monitor()
        return event


def options_of(keys: ClientKeys) -> dict[int, int | bytes]:
    """Return the socket options for these keys."""
    return {
        zmq.CURVE_PUBLICKEY: keys.public, zmq.CURVE_SECRETKEY: keys.secret, zmq.CURVE_SERVERKEY: keys.server,
    }  # fmt: skip


Start = Callable[..., Guarded]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(role={…}, …)` starts a broker with these roles, and the role `ops`, an admin."""
    with ExitStack() as stack:
        guarded: list[Guarded] = []

        def run(**roles: Any) -> Guarded:
            guarded.append(Guarded(tmp_path, stack, {"ops": OPS, **roles}))
            return guarded[-1]

        yield run
        assert [each.server.broker.stats.internal_errors for each in guarded] == [0] * len(guarded)


def held(worker: Any, *body: bytes) -> bytes:
    """Expect a REQUEST with this body; return its address."""
    return worker.request(*body)[0] if isinstance(worker, X1Worker) else worker.work(*body)  # type: ignore[no-any-return]


def serve(client: Any, worker: Any, service: bytes = b"echo") -> None:
    """Let `client` call `worker`, and expect that it succeeds."""
    client.request(service, b"question")
    worker.final(held(worker, b"question"), b"answer")
    client.final(service, b"answer")


def user_told(worker: Any, *body: bytes) -> dict[str, Any]:
    """Expect a REQUEST with this body, answer it, and return who asked, according to its options."""
    address, options = worker.request(*body)
    worker.final(address, b"done")
    return {name: value for name, value in json.loads(options).items() if name in {"user", "admin"}}


# ── whose something is (C45) ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_routing_id_in_use_cannot_be_taken_with_another_key(start: Start) -> None:
    # C45, C39
    guarded = start(shop=SHOP, farm=FARM, mall=SHOP)
    shop = guarded.connect(X1Client, "shop", identity=b"shop-1").sync()
    mall = guarded.connect(X1Client, "mall", identity=b"shop-1")
    farm = guarded.connect(X1Worker, "farm", b"echo", credit=2)
    shop.request(b"echo", b"mine")
    mall.request(b"echo", b"not mine", number=2)
    mall.cancel(number=shop.number)
    farm.final(held(farm, b"mine"), b"answer")
    shop.final(b"echo", b"answer")
    farm.nothing()
    assert not mall.socket.poll(0)


# ── keys come and go ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [X1Worker, Worker])
def test_a_revoked_key_loses_its_connections_and_what_its_workers_hold(start: Start, kind: Callable[..., Any]) -> None:
    farm_of = {"farm": {**FARM, "keys": ["farm", "other"]}}
    guarded = start(shop=SHOP, **farm_of)
    shop = guarded.connect(X1Client, "shop")
    revoked = guarded.connect(kind, "farm", b"echo")
    shop.request(b"echo", b"x")
    held(revoked, b"x")
    stays = guarded.connect(kind, "other", b"echo")
    guarded.reload({"ops": OPS, "shop": SHOP, "farm": {**FARM, "keys": ["other"]}})
    stays.final(held(stays, b"x"), b"from the other key of the role")
    shop.final(b"echo", b"from the other key of the role")
    assert guarded.attempt(guarded.keys("farm")) != zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert guarded.stats()["lost"] == {"unreachable": 1}


def test_a_reload_that_revokes_no_key_ends_no_connection(start: Start) -> None:
    guarded = start(shop=SHOP)
    shop = guarded.connect(Client, "shop")
    with shop.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED) as monitor:
        assert recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        guarded.reload({"ops": OPS, "shop": SHOP, "mall": SHOP})
        guarded.connect(Client, "mall").sync()
        shop.sync()
        assert not monitor.poll(0)
        shop.socket.disable_monitor()


def test_calls_go_on_while_keys_come_and_go(start: Start) -> None:
    roles = {"ops": OPS, "shop": SHOP, "farm": FARM}
    guarded = start(**roles)
    farm = guarded.connect(X1Worker, "farm", b"echo", credit=100)
    shop = guarded.connect(X1Client, "shop").sync()  # a reload may end connections that have not said anything
    done, stop = [0], threading.Event()
    failures: list[BaseException] = []

    def call() -> None:
        try:
            while not stop.is_set():
                serve(shop, farm)
                done[0] += 1
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    try:
        for turn in range(20):
            count = done[0]
            came = {f"guest-{number}": SHOP for number in range(4) if turn >> number & 1}
            guarded.reload({**roles, **came})
            for guest in came:
                guarded.connect(Client, guest).sync()
            eventually(lambda count=count: done[0] > count + 5 or failures)
    finally:
        stop.set()
        caller.join()
    assert failures == []


# ── every dialect, and proxies ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", WORKERS)
def test_all_dialects_mix_under_encryption(start: Start, kind: Callable[..., Any]) -> None:
    guarded = start(shop=SHOP, farm=FARM)
    farm = guarded.connect(kind, "farm", b"echo")
    for client_kind in CLIENTS:
        client = guarded.connect(client_kind, "shop")
        for _ in range(3):
            serve(client, farm)
        client.nothing()
    farm.disconnect()
    farm.sync()
    assert guarded.stats()["workers"] == 0


@pytest.mark.parametrize("kind", [OldWorker, X1Worker])
def test_all_dialects_pass_a_proxy_that_has_a_key(start: Start, kind: Callable[..., Any]) -> None:
    # C36: those behind a proxy have its role
    guarded = start(shop=SHOP, farm=FARM, branch={**FARM, **SHOP})
    with proxied(guarded.endpoint, guarded.keys("branch")) as endpoint:
        behind = [guarded.connect(each, None, endpoint=endpoint) for each in (OldClient, X1Client)]
        farm = guarded.connect(kind, None, b"echo", endpoint=endpoint)
        for client in behind:
            serve(client, farm)
        serve(guarded.connect(X1Client, "shop"), farm)
        if kind is not OldWorker:
            behind[1].request(b"echo", b"x", options=b'{"user":"ops","admin":true}')
            assert user_told(farm, b"x") == {"user": "branch"}
            behind[1].final(b"echo", b"done")
        behind[1].request(b"secret", b"x")
        behind[1].error(b"403")


def test_peers_behind_one_proxy_are_out_of_reach_of_those_behind_another(start: Start) -> None:
    # C45: with the same envelopes on both sides
    guarded = start(branch={**FARM, **SHOP}, other={**FARM, **SHOP}, farm=FARM)
    farm = guarded.connect(X1Worker, "farm", b"echo", credit=5)
    branch, other = guarded.connect(Peer, "branch"), guarded.connect(Peer, "other")
    head = [b"\0same", b"", b"MDPCX1", b"\x09"]
    branch.send(*head, request_of(1, b"echo", b"x"))
    address = held(farm, b"x")
    other.send(*head, record(5, 1))
    *envelope, refusal = other.recv()
    assert (envelope, b"unknown-number" in refusal) == (head, True)
    farm.final(address, b"y")
    assert branch.recv() == [*head, record(3, 1, body_of(b"y"))]
