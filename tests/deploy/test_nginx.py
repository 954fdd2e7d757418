"""The configuration of nginx in `deploy/`, before a real gateway."""

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from support.gateways import running_gateway, running_services
from support.processes import TIMEOUT_SECONDS, eventually, free_endpoint

from zmdp.gateways import access
from zmdp.mdp.security.access import new_token
from zmdp.testing import running_broker

CONFIGURATION = Path(__file__).parents[2] / "deploy/nginx/zmdp.conf"

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")


def openssl(folder, *arguments):
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Certificates: of a CA, and signed by it, of the server, of shop.example and of somebody without a role."""
    folder = tmp_path_factory.mktemp("nginx")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    openssl(
        folder, "req", "-x509", *curve, "-subj", "/CN=ca", "-addext", "keyUsage=critical,keyCertSign",
        "-keyout", "ca.key", "-out", "clients-ca.pem",
    )  # fmt: skip
    for name, subject, alternative in (
        ("server", "localhost", "DNS:localhost"), ("shop", "shop.example", "DNS:shop"), ("other", "other", "DNS:other"),
    ):  # fmt: skip
        openssl(
            folder, "req", "-x509", *curve, "-subj", f"/CN={subject}", "-CA", "clients-ca.pem", "-CAkey", "ca.key",
            "-addext", f"subjectAltName={alternative}", "-addext", "basicConstraints=critical,CA:FALSE",
            "-keyout", f"{name}.key", "-out", f"{name}.pem",
        )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def nginx(folder):
    """Return the port of nginx, and a token."""
    token, digest = new_token()
    roles = folder / "access.toml"
    roles.write_text(f'[roles.shop]\ntokens = ["{digest}"]\ncall = ["echo", "parts"]\n')
    (folder / "roles.map").write_text(f'"CN=shop.example" "Bearer {token}";\n')
    port = int(free_endpoint().rpartition(":")[2])
    with (
        running_broker(drain_timeout=0.0) as broker,
        running_services(broker.endpoints[0]),
        running_gateway(broker.endpoints[0], access=access.load(roles)) as gateway,
    ):
        text = CONFIGURATION.read_text()
        for old, new in (
            ("listen 443", f"listen 127.0.0.1:{port}"), ("server 127.0.0.1:8080", f"server 127.0.0.1:{gateway.port}"),
            ("/etc/nginx/zmdp", str(folder)),
        ):  # fmt: skip
            assert old in text
            text = text.replace(old, new)
        (folder / "zmdp.conf").write_text(text)
        paths = "".join(
            f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        main = folder / "nginx.conf"
        main.write_text(
            f"pid {folder}/pid;\ndaemon off;\nerror_log {folder}/error.log;\nevents {{}}\n"
            f"http {{ access_log off;\n{paths}include {folder}/zmdp.conf; }}\n"
        )
        with subprocess.Popen(["nginx", "-c", main, "-p", folder], stderr=subprocess.DEVNULL) as process:
            try:
                eventually(lambda: (folder / "pid").exists() and (folder / "pid").read_text())
                yield port, token
            finally:
                process.terminate()


def trust(folder, name=None):
    context = ssl.create_default_context(cafile=folder / "clients-ca.pem")
    if name is not None:
        context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    return context


def client(folder, nginx, name=None):
    return httpx.Client(base_url=f"https://localhost:{nginx[0]}", verify=trust(folder, name), timeout=TIMEOUT_SECONDS)


def test_a_token_or_a_certificate(folder, nginx):
    wait = {"prefer": "wait=60"}
    with client(folder, nginx) as http:
        assert http.post("/services/echo").status_code == 401
        token = {"authorization": f"Bearer {nginx[1]}", **wait}
        assert http.post("/services/echo", content=b"x", headers=token).content == b"x"
        assert http.post("/services/echo", content=bytes(17 << 20), headers=token).status_code == 413
    with client(folder, nginx, "shop") as http:
        assert http.post("/services/echo", content=b"x", headers=wait).content == b"x"
        stream = http.post("/services/parts", content=b"2", headers={"accept": "text/event-stream", **wait})
        assert stream.text.count("event: partial") == 2
        assert http.post("/services/fail").status_code == 403
    with client(folder, nginx, "other") as http:
        assert http.post("/services/echo", headers={"x-client": "CN=shop.example"}).status_code == 401
