"""Who may call what: the access file, tokens, TLS, and the broker's roles."""

import hashlib
import re
import ssl
import subprocess
from functools import partial

import httpx
import pytest
from support.access import Folder
from support.gateways import Services, running_gateway, running_services
from support.processes import TIMEOUT_SECONDS, eventually

from zmdp.clients import Client
from zmdp.gateways.access import Caller, load, parse
from zmdp.gateways.program import reload
from zmdp.gateways.token_cli import add
from zmdp.mdp.errors import SettingError
from zmdp.mdp.http.problems import Problem
from zmdp.mdp.http.server import tls_context
from zmdp.mdp.security.access import new_token

TOKEN = "zmdp_test"
DIGEST = "sha256:" + hashlib.sha256(TOKEN.encode()).hexdigest()
FILE = f"""
[roles.shop]
tokens = ["{DIGEST}"]
call = ["echo", "spark.*"]

[roles.operator]
tokens = ["sha256:{"0" * 64}"]
mmi = "all"
"""


@pytest.fixture
def access(tmp_path):
    return parse(FILE, tmp_path / "access.toml")


def bearer(token=TOKEN):
    return {"authorization": f"Bearer {token}"}


class TestFile:
    def test_a_token(self, access):
        assert access.identify(b"Bearer zmdp_test").role == "shop"
        assert access.identify(b"bearer  zmdp_test ").role == "shop"

    @pytest.mark.parametrize(
        "given", [b"", b"Bearer", b"Bearer other", b"Basic zmdp_test", DIGEST.encode(), b"zmdp_test"]
    )
    def test_anything_else(self, access, given):
        with pytest.raises(Problem) as refused:
            access.identify(given)
        status, headers, _ = refused.value.response()
        assert status == 401
        assert dict(headers)[b"www-authenticate"].startswith(b'Bearer realm="zmdp"')

    def test_nothing(self, access):
        with pytest.raises(Problem, match="pass a token"):
            access.identify(None)

    @pytest.mark.parametrize(
        ("role", "service", "allowed"),
        [
            ("shop", b"echo", True),
            ("shop", b"spark.sql", True),
            ("shop", b"echo2", False),
            ("shop", b"titanic.request", False),
            ("shop", b"mmi.services", True),
            ("shop", b"mmi.describe", False),
            ("shop", b"mmi.stats", False),
            ("operator", b"anything", True),
            ("operator", b"mmi.stats", True),
            # What acts on the requests of other callers, or on the programs that serve them:
            ("operator", b"mmi.cancel", False),
            ("operator", b"mmi.tail", False),
            ("operator", b"spark.control.jobs", False),
            ("shop", b"spark.control.jobs", False),
        ],
    )
    def test_what_a_role_may_call(self, access, role, service, allowed):
        assert access.roles[role].may_call(service) is allowed
        assert Caller.anybody.may_call(service)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("roles = 1", "Expected `object`, got `int` - at `$.roles`"),
            ("[roles", "not valid TOML"),
            (
                'secret_key = "x"',
                "unknown field `secret_key` ('secret_key': known are roles)",
            ),
            ("[other]", "unknown field `other`"),
            ("[roles]\na = 1", "role a: Expected `object`, got `int`"),
            ('[roles."a b"]', "cannot be the name of a role"),
            (
                "[roles.a]\nkeys = []",
                "('keys': did you mean tokens?)",
            ),
            ('[roles.a]\ntokens = "x"', "role a: Expected `array`, got `str` - at `$.tokens`"),
            ('[roles.a]\ntokens = ["zmdp_secret"]', "a text without sha256:"),
            ('[roles.a]\ntokens = ["sha256:0"]', "64 hexadecimal digits"),
            ('[roles.a]\nmmi = "some"', "role a: Invalid enum value 'some' - at `$.mmi`"),
            ('[roles.a]\ncall = ["mmi.*"]', "use the setting mmi"),
            (f'[roles.a]\ntokens = ["{DIGEST}"]\n[roles.b]\ntokens = ["{DIGEST}"]', "in role a already"),
            (f'[roles.a]\ntokens = ["{DIGEST}", "{DIGEST}"]', "twice"),
        ],
    )
    def test_invalid_files(self, tmp_path, text, expected):
        with pytest.raises(SettingError, match=re.escape(expected)) as invalid:
            parse(text, tmp_path / "access.toml")
        assert "zmdp_secret" not in str(invalid.value)

    def test_files_that_cannot_be_read(self, tmp_path):
        with pytest.raises(SettingError, match="mdp-gateway token creates it"):
            load(tmp_path / "missing.toml")
        (tmp_path / "binary.toml").write_bytes(b"\xff")
        with pytest.raises(SettingError, match="not text"):
            load(tmp_path / "binary.toml")

    def test_tokens_are_added(self, tmp_path):
        path = tmp_path / "access.toml"
        (first, digest), (second, other) = new_token(), new_token()
        add(path, "shop", digest)
        path.write_text(path.read_text() + "# kept\n")
        add(path, "shop", other)
        assert "# kept" in path.read_text()
        assert first not in path.read_text()
        assert path.stat().st_mode & 0o777 == 0o600
        found = load(path)
        assert [found.identify(f"Bearer {each}".encode()).role for each in (first, second)] == ["shop", "shop"]
        with pytest.raises(SettingError, match="cannot be the name"):
            add(path, "a b", digest)


class TestTokens:
    def test_every_path_needs_one(self, endpoint, services, access):
        with (
            running_gateway(endpoint, access=access) as gateway,
            httpx.Client(base_url=gateway.url, timeout=TIMEOUT_SECONDS) as http,
        ):
            assert http.post("/services/echo").status_code == 401
            assert http.get("/services").status_code == 401
            assert http.get("/metrics").status_code == 401
            assert http.post("/services/echo", headers=bearer("wrong")).status_code == 401
            refused = http.post("/services/echo")
            assert refused.headers["www-authenticate"] == 'Bearer realm="zmdp"'
            assert http.post("/services/echo", content=b"x", headers=bearer()).content == b"x"
            assert http.get("/readyz").status_code == 200

    def test_wrong_ones_are_logged_once_in_a_while(self, endpoint, services, access, caplog):
        with running_gateway(endpoint, access=access) as gateway, httpx.Client(base_url=gateway.url) as http:
            for _ in range(3):
                assert http.post("/services/echo", headers=bearer("wrong"), timeout=TIMEOUT_SECONDS).status_code == 401
        (line,) = [each.getMessage() for each in caplog.records if each.name == "zmdp.http"]
        assert "refused a client at 127.0.0.1" in line
        assert "wrong" not in line

    def test_a_role_calls_only_its_services(self, endpoint, services, access):
        with (
            running_gateway(endpoint, access=access) as gateway,
            httpx.Client(base_url=gateway.url, timeout=TIMEOUT_SECONDS) as http,
        ):
            for name in ("fail", "mmi.stats", "titanic.request"):
                response = http.post(f"/services/{name}", headers=bearer())
                assert response.status_code == 403
                assert response.json()["service"] == name
            assert [row["name"] for row in http.get("/services", headers=bearer()).json()["services"]] == ["echo"]

    def test_a_reload_revokes(self, endpoint, services, tmp_path, caplog):
        path = tmp_path / "access.toml"
        path.write_text(FILE)
        with (
            running_gateway(endpoint, access=load(path)) as gateway,
            httpx.Client(base_url=gateway.url, timeout=TIMEOUT_SECONDS) as http,
        ):
            assert http.post("/services/echo", headers=bearer()).status_code == 200
            path.write_text("[roles")
            gateway.call(partial(reload, gateway.gateway))
            assert eventually(lambda: "still applies" in caplog.text)
            assert http.post("/services/echo", headers=bearer()).status_code == 200
            path.write_text("")
            gateway.call(partial(reload, gateway.gateway))
            assert eventually(lambda: http.post("/services/echo", headers=bearer()).status_code == 401)


ROLES = """
[roles.gateway]
keys = ["driver.key"]
call = ["*"]
on_behalf = true

[roles.shop]
keys = ["shop.key"]
call = ["echo"]

[roles.worker]
keys = ["resizer.key"]
offer = ["*"]
call = ["*"]
"""


def test_the_broker_decides_what_a_role_may_call(tmp_path, access):
    folder = Folder(tmp_path)
    folder.write(ROLES)
    everything = parse(FILE.replace('call = ["echo", "spark.*"]', ""), tmp_path / "gateway.toml")
    with folder.broker() as broker:
        endpoint = broker.endpoints[0]
        services = Services()
        with running_services(endpoint, services, **folder.settings("resizer")):
            with Client(endpoint, **folder.settings("resizer")) as client:
                client.request("echo", b"")
                client.request("parts", b"0")
            with running_gateway(endpoint, access=everything, keys=folder.keys("driver")) as gateway:
                with httpx.Client(base_url=gateway.url, headers=bearer(), timeout=TIMEOUT_SECONDS) as http:
                    assert http.post("/services/echo").status_code == 200
                    assert services.requests[-1].user == "shop"
                    refused = http.post("/services/parts", content=b"1")
                    assert (refused.status_code, refused.json()["code"]) == (403, 403)
                    assert refused.json()["type"].endswith("#not-allowed")
                    assert http.get("/readyz").status_code == 200


# ── TLS ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def openssl(folder, *arguments):
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """The folder of a certificate for localhost, and of its key."""
    folder = tmp_path_factory.mktemp("tls")
    openssl(
        folder, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
        "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-keyout", "server.key", "-out", "server.pem",
    )  # fmt: skip
    return folder


class TestTls:
    def test_requests_and_events(self, certificate, endpoint, services, access):
        context = tls_context(certificate / "server.pem", certificate / "server.key")
        trust = ssl.create_default_context(cafile=certificate / "server.pem")
        with (
            running_gateway(endpoint, access=access, tls=context) as gateway,
            httpx.Client(base_url=gateway.url, verify=trust, timeout=TIMEOUT_SECONDS) as http,
        ):
            assert http.base_url.scheme == "https"
            assert http.post("/services/echo").status_code == 401
            large = bytes(1 << 20)
            assert http.post("/services/echo", content=large, headers=bearer()).content == large
            events = {"accept": "text/event-stream", **bearer()}
            assert http.post("/services/echo", content=b"x", headers=events).text == "event: final\ndata: x\n\n"
