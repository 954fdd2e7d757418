"""Who can connect to a server: keys, the access file, addresses, permissions of sockets."""

import math
import os
import stat
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import zmq
from support.processes import TIMEOUT_MS
from zmq.utils.monitor import recv_monitor_message

from zmdp.mdp.broker.io.loop import Server, ServerSettings
from zmdp.mdp.errors import BindError, SettingError
from zmdp.mdp.security.access import SETTLE_SECONDS, load
from zmdp.mdp.security.keys import create_keys, load_keys
from zmdp.testing import running_broker

ASK = [b"MDPC02", b"\x01", b"mmi.service", b"echo"]


@pytest.fixture
def folder(tmp_path):
    for name in ("broker", "shop", "web"):
        create_keys(name, tmp_path)
    write(tmp_path, '[roles.shop]\nkeys = ["shop.key"]\n')
    return tmp_path


def write(folder, roles):
    (folder / "access.toml").write_text(f'secret_key = "broker.key_secret"\n{roles}')


@contextmanager
def client(context, endpoint, keys=None):
    with context.socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvtimeo = 0, TIMEOUT_MS
        if keys:
            keys.apply(socket)
        socket.connect(endpoint)
        with suppress(zmq.Again):  # the broker may have refused it already
            socket.send_multipart(ASK, zmq.NOBLOCK)
        yield socket


@pytest.fixture
def keys(folder):
    return {name: load_keys(folder / f"{name}.key_secret", folder / "broker.key") for name in ("shop", "web")}


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:*", "ipc://{}/broker"])
def test_only_known_keys_are_admitted(folder, keys, context, logged, bind):
    with running_broker(bind.format(folder), access=load(folder / "access.toml")) as server:
        endpoint = server.endpoints[0]
        with client(context, endpoint), client(context, endpoint, keys["web"]), client(context, endpoint, keys["shop"]):
            assert logged(f"unknown key {keys['web'].public.decode()}")
        with client(context, endpoint, keys["shop"]) as shop:
            assert shop.recv_multipart()[-1] == b"403"
    assert server.access_control.gate.counts.keys() >= {"admitted", "unknown-key"}
    assert server.broker.stats.mmi >= 1


def test_a_connection_of_a_revoked_key_ends_although_it_has_not_sent_anything(folder, keys, context, logged):
    """It has passed the gate, and could be used later."""
    with running_broker(access=load(folder / "access.toml")) as server, context.socket(zmq.DEALER) as shop:
        monitor = shop.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        with monitor:
            shop.linger, shop.rcvtimeo = 0, TIMEOUT_MS
            keys["shop"].apply(shop)
            shop.connect(server.endpoints[0])
            assert recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            write(folder, "[roles.shop]\nkeys = []\n")
            server.reload()
            assert logged("1 role, 0 keys")
            assert monitor.poll(TIMEOUT_MS)
            assert recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED
            shop.disable_monitor()


def test_what_is_wrong_is_not_reloaded(folder, keys, context, logged):
    with running_broker(access=load(folder / "access.toml")) as server:
        write(folder, "[roles.shop]\nkeys = 3\n")
        server.reload()
        assert logged("reloaded nothing, the previous state of the access file still applies: ")
        with client(context, server.endpoints[0], keys["shop"]) as shop:
            assert shop.recv_multipart()


def test_a_file_that_is_half_written_is_not_reloaded(folder, caplog):
    path = folder / "access.toml"
    whole = path.read_bytes() + '# läuft\n[roles.web]\nkeys = ["web.key"]\nmmi = "all"\n'.encode()
    refused, now = 0, 0.0
    with Server(("tcp://127.0.0.1:*",), access=load(path)) as server:
        control = server.access_control
        for end in range(len(path.read_bytes()), len(whole)):
            path.write_bytes(whole[:end])
            try:
                load(path)
            except SettingError:
                refused += 1
                now = reload(control, now)
                assert "reloaded nothing, the previous state" in caplog.messages[-1]
                assert list(control.access.roles) == ["shop"]
        path.write_bytes(whole)
        reload(control, now)
        assert list(control.access.roles) == ["shop", "web"]
    assert refused > 20


def reload(control, now):
    """Ask for a reload, and wait until the file has settled; return when that is."""
    control.ask_to_reload()
    control.woken(now)
    assert control.settling.due == now + SETTLE_SECONDS
    control.settling.action(now + SETTLE_SECONDS)
    assert control.settling.due == math.inf
    return now + SETTLE_SECONDS


def test_a_file_is_reloaded_once_nobody_writes_it_any_more(folder, caplog):
    caplog.set_level("INFO", "zmdp.broker")
    path = folder / "access.toml"
    beginning, rest = path.read_bytes(), b'[roles.web]\nkeys = ["web.key"]\n'
    with Server(("tcp://127.0.0.1:*",), access=load(path)) as server:
        control = server.access_control
        control.ask_to_reload()
        control.woken(0.0)
        path.write_bytes(beginning.replace(b"shop.key", b"web.key"))  # valid, and not yet what is meant
        control.settling.action(SETTLE_SECONDS)
        assert list(control.access.keys.values()) == ["shop"]
        path.write_bytes(beginning + rest)
        control.settling.action(2 * SETTLE_SECONDS)
        assert control.settling.due == 3 * SETTLE_SECONDS
        assert list(control.access.roles) == ["shop"]
        control.settling.action(3 * SETTLE_SECONDS)
        assert list(control.access.roles) == ["shop", "web"]
    assert [each for each in caplog.messages if "reloaded" in each] == [f"reloaded {path}: 2 roles, 2 keys"]


def test_a_new_key_of_the_broker_itself_needs_a_restart(folder, keys, context, logged):
    with running_broker(access=load(folder / "access.toml")) as server:
        create_keys("other", folder)
        (folder / "access.toml").write_text('secret_key = "other.key_secret"\n[roles.shop]\nkeys = ["shop.key"]\n')
        server.reload()
        assert logged("the broker's own key has changed: restart the broker to use it")
        with client(context, server.endpoints[0], keys["shop"]) as shop:
            assert shop.recv_multipart()


def test_without_an_access_file_there_is_nothing_to_reload(logged, context):
    with running_broker() as server:
        server.reload()
        assert logged("nothing to reload")
        with client(context, server.endpoints[0]) as anybody:
            assert anybody.recv_multipart()


def test_a_context_with_a_zap_handler_of_its_own_is_refused(folder, context):
    with context.socket(zmq.REP) as handler:
        handler.bind("inproc://zeromq.zap.01")
        with pytest.raises(BindError, match="has a ZAP handler already"):
            Server(("tcp://127.0.0.1:*",), context=context, access=load(folder / "access.toml"))


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:*", "tcp://0.0.0.0:*", "tcp://[::]:*", "tcp://10.1.2.3:*", "tcp://eth0:*", "tcp://x.org:*"]
)
def test_addresses_that_others_reach_are_refused_before_anything_is_bound(endpoint, tmp_path):
    with pytest.raises(BindError, match=r"refused to listen on .* --access FILE .* --insecure"):
        Server((f"ipc://{tmp_path}/broker", endpoint))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "tcp://127.1.2.3:*", "tcp://lo:*", "inproc://broker"])
def test_addresses_on_this_machine_need_no_access_control(endpoint):
    with Server((endpoint,)) as server:
        assert server.access_control.gate is None


def test_other_addresses_are_allowed_with_access_control_or_without_security(folder):
    with Server(("tcp://0.0.0.0:*",), ServerSettings(insecure=True)):
        pass
    with Server(("tcp://0.0.0.0:*",), access=load(folder / "access.toml")):
        pass


@pytest.mark.parametrize(("mode", "expected"), [(None, 0o600), (0o660, 0o660), (0o666, 0o666)])
@pytest.mark.parametrize("name", ["{}/broker", "*"])
def test_ipc_sockets_have_the_permissions_that_were_asked_for(tmp_path, mode, expected, name):
    before = os.umask(0o027)
    try:
        with Server(
            (f"ipc://{name.format(tmp_path)}",), ServerSettings(**({} if mode is None else {"ipc_mode": mode}))
        ) as server:
            path = Path(server.endpoints[0].removeprefix("ipc://"))
            assert stat.S_IMODE(path.stat().st_mode) == expected
            if name == "*":
                assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    finally:
        assert os.umask(before) == 0o027


def test_an_abstract_socket_has_no_permissions():
    with Server((f"ipc://@zmdp-test-{os.getpid()}",)) as server:
        assert server.endpoints
