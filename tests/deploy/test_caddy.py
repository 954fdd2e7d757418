"""The configuration of Caddy in `deploy/`, before a real gateway."""

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from support.gateways import running_gateway, running_services
from support.processes import TIMEOUT_SECONDS, eventually, free_endpoint

from zmdp.testing import running_broker

CONFIGURATION = Path(__file__).parents[2] / "deploy/caddy/Caddyfile"
GLOBAL = "{\n\tadmin off\n\tauto_https disable_redirects\n\tskip_install_trust\n"

pytestmark = pytest.mark.skipif(shutil.which("caddy") is None, reason="needs Caddy")


@pytest.fixture
def url(tmp_path, monkeypatch):
    """Where Caddy listens, with a certificate of its own authority."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    port = int(free_endpoint().rpartition(":")[2])
    with (
        running_broker(drain_timeout=0.0) as broker,
        running_services(broker.endpoints[0]),
        running_gateway(broker.endpoints[0]) as gateway,
    ):
        text = CONFIGURATION.read_text()
        for old, new in (
            ("{\n", GLOBAL), ("gateway.example {", f"localhost:{port} {{\n\tbind 127.0.0.1\n\ttls internal"),
            ("127.0.0.1:8080", f"127.0.0.1:{gateway.port}"),
        ):  # fmt: skip
            assert old in text
            text = text.replace(old, new) if old != "{\n" else text.replace(f"\n{old}", f"\n{new}", 1)
        file = tmp_path / "Caddyfile"
        file.write_text(text)
        with subprocess.Popen(["caddy", "run", "--config", file], stderr=subprocess.DEVNULL) as process:
            try:
                yield f"https://localhost:{port}", tmp_path / "caddy/pki/authorities/local/root.crt"
            finally:
                process.terminate()


def test_requests_and_streams(url):
    at, authority = url
    eventually(lambda: authority.exists() and authority.read_text())
    trust = ssl.create_default_context(cafile=authority)
    with httpx.Client(base_url=at, verify=trust, timeout=TIMEOUT_SECONDS) as http:

        def reply():
            try:
                return http.post("/services/echo", content=b"x", headers={"prefer": "wait=60"})
            except httpx.TransportError:  # it has no certificate yet
                return None

        assert eventually(reply).content == b"x"
        stream = http.post("/services/parts", content=b"2", headers={"accept": "text/event-stream"})
        assert stream.text.count("event: partial") == 2
        assert http.post("/services/echo", content=bytes(17 << 20)).status_code == 413
