"""The command `mdp-gateway http` as a process, beside brokers and workers that die."""

import signal
import socket
import sys

import httpx
import pytest
from support.processes import TIMEOUT_SECONDS, eventually, process, run

from zmdp.mdp.program.extras import install_command
from zmdp.mdp.transport.listening import is_loopback

GATEWAY = ("python", "-m", "zmdp.gateways.cli")


def gateway(*options):
    return process(*GATEWAY, "http", "--bind", "127.0.0.1:0", *options)


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (("--bind", "8080"), 2, "expected HOST:PORT"),
        (("--bind", "http://127.0.0.1:8080"), 2, "expected HOST:PORT"),
        (("--listen", "127.0.0.1:8080"), 2, "No such option '--listen'"),
        (("--bind", "x:99999"), 2, "expected HOST:PORT"),
        (("--bind", "0.0.0.0:0"), 1, "refused to listen on 0.0.0.0"),
        (("--access", "missing.toml"), 2, "mdp-gateway token creates it"),
        (("--tls-key", "x"), 2, "requires --tls-cert"),
        (("--tls-cert", "missing.pem"), 2, "cannot use the certificate missing.pem"),
        (("--max-body", "0"), 2, "expected a whole number of bytes"),
    ],
)
def test_invalid_usage(in_this_process, options, code, text):
    done = in_this_process("mdp-gateway", "http", "--bind", "127.0.0.1:0", *options)
    assert done.returncode == code
    assert text in done.stderr.decode()


def test_a_port_that_is_taken(in_this_process):
    with socket.create_server(("127.0.0.1", 0)) as other:
        done = in_this_process("mdp-gateway", "http", "--bind", f"127.0.0.1:{other.getsockname()[1]}")
    assert done.returncode == 1
    assert b"another program listens there; use another port, or 0 for a free one" in done.stderr


def test_a_package_is_missing(in_this_process, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for name in ("server", "connection"):
        monkeypatch.delitem(sys.modules, f"zmdp.mdp.http.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn.config", None)
    done = in_this_process("mdp-gateway", "http")
    assert done.returncode == 2
    assert install_command("web") in done.stderr.decode()


def test_a_token(in_this_process, tmp_path):
    path = str(tmp_path / "access.toml")
    made = in_this_process("mdp-gateway", "token", "shop", "--access", path)
    assert made.returncode == 0
    assert made.stdout.startswith(b"zmdp_")
    told = f"added the role shop, which may call every service: edit its `call` in {path}\n"
    assert made.stderr.decode() == told
    assert in_this_process("mdp-gateway", "token", "shop", "--access", path).stderr == b""  # no new role
    again = in_this_process("mdp-gateway", "token", "shpo", "--access", path)
    assert again.stderr.startswith(b"added the role shpo")


def test_loopback():
    assert is_loopback("127.0.0.2")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("192.0.2.1")
    assert not is_loopback("example.org")


def test_it_finishes_requests_and_stops(endpoint, services):
    with gateway("--broker", endpoint) as running:
        url = running.line("http://", "stdout")
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        assert httpx.post(f"{url}/services/echo", content=b"x", timeout=TIMEOUT_SECONDS).content == b"x"
        with (
            socket.create_connection(address, TIMEOUT_SECONDS) as busy,
            socket.create_connection(address, TIMEOUT_SECONDS) as idle,
        ):
            busy.sendall(
                b"POST /services/hold HTTP/1.1\r\nhost: localhost\r\n"
                b"request-timeout: 5\r\ncontent-length: 4\r\n\r\nterm"
            )
            eventually(lambda: b"term" in services.begun)
            running.send_signal(signal.SIGTERM)
            assert idle.recv(1) == b""  # it is closed at once
            assert busy.recv(100).startswith(b"HTTP/1.1 504")
        assert running.wait() == 0


def test_a_second_signal_exits(endpoint, services):
    with gateway("--broker", endpoint) as running:
        url = running.line("http://", "stdout")
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), TIMEOUT_SECONDS) as busy:
            busy.sendall(b"POST /services/hold HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\n\r\ntwice"[:-1])
            eventually(lambda: b"twic" in services.begun)
            running.send_signal(signal.SIGTERM)
            eventually(lambda: _refused(url))
            assert running.end(signal.SIGINT) == 1
        eventually(lambda: b"twic" in services.cancelled)


def test_requests_that_take_too_long_are_cut_off(endpoint, services):
    with gateway("--broker", endpoint, "--drain-timeout", "0.1") as running:
        url = running.line("http://", "stdout")
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), TIMEOUT_SECONDS) as busy:
            busy.sendall(b"POST /services/hold HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\n\r\ncut")
            eventually(lambda: b"cut" in services.begun)
            assert running.end(signal.SIGTERM) == 1
        eventually(lambda: b"cut" in services.cancelled)
        assert "Traceback" not in running.stderr


def _refused(url):
    try:
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), TIMEOUT_SECONDS).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.parametrize(("option", "evil"), [("shop.example", 421), ("*", 200)])
def test_hosts_are_allowed(endpoint, services, option, evil):
    with gateway("--broker", endpoint, "--allow-host", option) as running:
        url = running.line("http://", "stdout")
        found = [
            httpx.post(f"{url}/services/echo", headers={"host": host}, timeout=TIMEOUT_SECONDS).status_code
            for host in ("localhost:80", "SHOP.example", "evil.example")
        ]
        assert found == [200, 200, evil]


def test_it_reads_the_access_file_again(endpoint, services, tmp_path):
    path = tmp_path / "access.toml"
    token = run(*GATEWAY, "token", "shop", "--access", str(path)).stdout.decode().strip()
    headers = {"authorization": f"Bearer {token}"}
    with gateway("--broker", endpoint, "--access", str(path)) as running:
        url = running.line("http://", "stdout")
        assert httpx.post(f"{url}/services/echo", headers=headers, timeout=TIMEOUT_SECONDS).status_code == 200
        path.write_text("")
        running.send_signal(signal.SIGHUP)
        running.line("read the access file again")
        assert httpx.post(f"{url}/services/echo", headers=headers, timeout=TIMEOUT_SECONDS).status_code == 401
