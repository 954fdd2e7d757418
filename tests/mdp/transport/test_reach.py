"""Why a broker cannot be reached, over real connections."""

import socket
import threading
from contextlib import contextmanager

import pytest

from zmdp.mdp.errors import BrokerUnreachable
from zmdp.mdp.testing import running_broker
from zmdp.mdp.transport import reach
from zmdp.mdp.transport.reach import check_listening, why_unreachable

NOT_A_BROKER = "a program listens there, but it does not answer like a broker: is the port right?"


@contextmanager
def listener(answer):
    """The endpoint of a TCP server that answers each connection with these bytes and reads nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepted = []

        def serve():
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                accepted.append(connection)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in accepted:
            connection.close()


@pytest.mark.parametrize("bind", ["tcp", "ipc"])
def test_a_broker(bind, tmp_path):
    with running_broker(*([f"ipc://{tmp_path}/broker"] if bind == "ipc" else [])) as server:
        assert why_unreachable(server.endpoints[0]) is None
        check_listening(["tcp://127.0.0.1:1", *server.endpoints])


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n", b"SSH-2.0\r\n", b""])
def test_another_program(answer, monkeypatch):
    if not answer:
        monkeypatch.setattr(reach, "PROBE_SECONDS", 0.05)
    with listener(answer) as at:
        assert why_unreachable(at) == NOT_A_BROKER
        with pytest.raises(BrokerUnreachable, match=f"cannot reach a broker at {at}: a program listens there"):
            check_listening([at])


def test_nothing(tmp_path):
    for at in ("tcp://127.0.0.1:1", f"ipc://{tmp_path}/none"):
        assert f"`mdp-broker --bind {at}` starts one" in why_unreachable(at)
    assert why_unreachable("inproc://any") is None
