"""Why a broker cannot be reached, over real connections."""

import logging
import socket
import threading
from contextlib import contextmanager, suppress

import pytest
import zmq
from support.access import Folder
from support.processes import TIMEOUT_SECONDS

from zmdp.clients import Client
from zmdp.mdp.errors import BrokerUnreachable
from zmdp.mdp.transport import reach
from zmdp.mdp.transport.reach import check_listening, warn_if_unreachable, why_refused, why_unreachable
from zmdp.testing import running_broker

NOT_A_BROKER = "a program listens there, but it does not answer like a broker: is the port right?"


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Have probes wait as long as tests do."""
    monkeypatch.setattr(reach, "PROBE_SECONDS", TIMEOUT_SECONDS)


@contextmanager
def listener(answer=None):
    """The endpoint of a TCP server that answers each connection with these bytes and hangs up, or is silent."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection:
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        if answer is not None:
            thread.start()
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        if answer is not None:
            thread.join()


@pytest.mark.parametrize("bind", ["tcp", "ipc"])
def test_a_broker_notices_nothing(bind, tmp_path, caplog):
    with (
        caplog.at_level(logging.INFO),
        running_broker(*([f"ipc://{tmp_path}/broker"] if bind == "ipc" else [])) as server,
    ):
        assert why_unreachable(server.endpoints[0]) is None
        check_listening(["tcp://127.0.0.1:1", *server.endpoints])
        with Client(server.endpoints[0], timeout=TIMEOUT_SECONDS) as client:
            client.available("echo")  # by then, the broker has seen those connections
    assert "failed in its handshake" not in caplog.text


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n", b"SSH-2.0\r\n"])
@pytest.mark.parametrize("with_keys", [False, True])
def test_another_program(answer, with_keys, tmp_path):
    keys = Folder(tmp_path).keys("shop") if with_keys else None
    with listener(answer) as at:
        reason = NOT_A_BROKER if with_keys else "is it a broker that admits only known keys? Then pass --key"
        assert reason in why_unreachable(at, keys)
        with pytest.raises(BrokerUnreachable, match=f"cannot reach a broker at {at}: "):
            check_listening([at], keys)


def test_a_program_that_is_silent_may_be_a_broker_that_is_held_up(monkeypatch):
    monkeypatch.setattr(reach, "PROBE_SECONDS", 0.05)
    with listener() as at:
        assert why_unreachable(at) is None
        check_listening([at])


def test_a_worker_warns_of_each_broker_that_is_missing(caplog):
    with running_broker() as server:
        at = "tcp://127.0.0.1:1"
        warn_if_unreachable(logging.getLogger("zmdp.worker"), [at, *server.endpoints])
    (message,) = [each.getMessage() for each in caplog.records if each.name == "zmdp.worker"]
    assert message.startswith(f"no broker at {at} yet: nothing is listening there")
    assert message.endswith("; retrying until there is one")


def test_nothing(tmp_path):
    for at in ("tcp://127.0.0.1:1", f"ipc://{tmp_path}/none"):
        assert f"`mdp-broker --bind {at}` starts one" in why_unreachable(at)
    assert why_unreachable("inproc://any") is None


@pytest.mark.parametrize("bind", ["tcp", "ipc"])
def test_keys(bind, tmp_path):
    folder = Folder(tmp_path)
    with (
        folder.broker(*([f"ipc://{tmp_path}/broker"] if bind == "ipc" else [])) as server,
        running_broker(*([f"ipc://{tmp_path}/open"] if bind == "ipc" else [])) as without,
    ):
        at, key = server.endpoints[0], folder.keys("stranger").public.decode()
        assert why_unreachable(at, folder.keys("shop")) is None
        assert "admits only known keys" in why_unreachable(at)  # which side notices first is a matter of chance
        assert f"`mdp-keys allow ROLE -- '{key}'` adds it" in why_unreachable(at, folder.keys("stranger"))
        assert f"its public key is not {key}" in why_unreachable(at, folder.keys("shop", "stranger"))
        assert "does not use keys" in why_unreachable(without.endpoints[0], folder.keys("shop"))
        check_listening([*without.endpoints, at], folder.keys("shop"))
        with pytest.raises(BrokerUnreachable, match=r"does not use keys.*; .*the broker refuses this key"):
            check_listening([*without.endpoints, at], folder.keys("stranger"))


NO_DETAIL = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL


@pytest.mark.parametrize(
    ("event", "value", "with_keys", "text"),
    [
        (zmq.Event.HANDSHAKE_FAILED_AUTH, 500, True, "the broker cannot check keys (ZAP status 500)"),
        (zmq.Event.HANDSHAKE_FAILED_AUTH, 400, False, "the broker cannot check keys (ZAP status 400)"),
        (zmq.Event.HANDSHAKE_FAILED_PROTOCOL, zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC, True, "ZMTP error 0x11000001"),
        (NO_DETAIL, 32, True, "or it does not use keys"),
        (NO_DETAIL, 32, False, "is it a broker that admits only known keys? Then pass --key and --broker-key"),
    ],
)
def test_what_a_monitor_says(tmp_path, event, value, with_keys, text):
    assert text in why_refused(event, value, Folder(tmp_path).keys("shop") if with_keys else None)


def test_what_a_monitor_says_about_other_things():
    assert why_refused(zmq.Event.DISCONNECTED, 0, None) is None
