"""Who may look and act: tokens, sessions, forged forms, headers."""

import os
import signal

import httpx
import pytest
import tomlkit
from support.processes import TIMEOUT_SECONDS, eventually, run
from support.web import form_token, web_broker, web_server_of

from zmdp.clients import Client
from zmdp.mdp.program.extras import install_command
from zmdp.mdp.security.access import digest_of, written

COOKIE = "zmdp_"


def token_for(folder, role, *permissions):
    """Make a role with a token in folder/access.toml."""
    access = ("--access", f"{folder}/access.toml")
    assert run("mdp-keys", "allow", role, *permissions, *access).returncode == 0
    return run("mdp-keys", "token", role, *access).stdout.decode().strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("access")


@pytest.fixture(scope="module")
def tokens(folder):
    return {
        "admin": token_for(folder, "ops", "--admin"),
        "look": token_for(folder, "viewer", "--mmi", "all"),
        "none": token_for(folder, "shop", "--call", "*"),
        "lost": token_for(folder, "leaver", "--mmi", "all"),
    }


@pytest.fixture(scope="module")
def guarded(folder, tokens):
    with web_broker("--access", f"{folder}/access.toml") as broker:
        yield broker


def with_token(token):
    return {"authorization": f"Bearer {token}"}


def test_without_a_token_there_is_only_health(guarded):
    assert guarded.get("/readyz").status_code == guarded.get("/livez").status_code == 200
    answer = guarded.get("/services?q=x")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=%2Fservices%3Fq%3Dx")
    assert guarded.get("/live/services").status_code == 401
    answer = guarded.get("/metrics")
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, 'Bearer realm="zmdp"')
    assert guarded.post("/requests/cancel", data={"id": "1"}).headers["location"] == "/login"


@pytest.mark.parametrize("header", ["Bearer nonsense", "Bearer", "Basic eDp5", "", "Bearer \xff"])
def test_a_wrong_token_is_none(guarded, header):
    assert guarded.get("/metrics", headers={"authorization": header.encode("latin-1")}).status_code == 401


def test_a_role_that_may_ask_everything_may_look(guarded, tokens):
    eventually(lambda: "mdp_up 1.0" in guarded.get("/metrics", headers=with_token(tokens["look"])).text)
    assert "Overview" in guarded.get("/", headers=with_token(tokens["look"])).text
    for path in ("/metrics", "/"):
        assert guarded.get(path, headers=with_token(tokens["none"])).status_code == 403


def test_a_person_logs_in_and_out(guarded, tokens):
    with guarded.client(follow_redirects=True) as person:
        assert "Token" in person.get("/workers").text
        assert person.post("/login", data={"token": "wrong"}).status_code == 401
        assert person.post("/login", data={"token": tokens["none"]}).status_code == 401
        page = person.post("/login", data={"token": tokens["look"], "next": "/workers"})
        assert page.url.path == "/workers"
        assert "viewer (looks only)" in page.text
        cookie = page.history[0].headers["set-cookie"]
        assert cookie.startswith(f"{COOKIE}{guarded.port}=")
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        again = person.post("/logout", data={"form_token": form_token(page.text)})
        assert again.url.path == person.get("/").url.path == "/login"


@pytest.mark.parametrize("after", ["//evil.example", "/\\evil.example", "https://evil.example", "/\r\nx: y", ""])
def test_a_login_leads_nowhere_else(guarded, tokens, after):
    answer = guarded.post("/login", data={"token": tokens["look"], "next": after})
    assert answer.headers["location"] == "/"


def test_only_admins_act_and_only_with_a_form_of_their_own(guarded, tokens):
    def cancel(token, **fields):
        with guarded.client() as person:
            person.post("/login", data={"token": token})
            page = person.get("/services").text
            own = {"form_token": form_token(page)} if "own" in fields else fields
            return person.post("/requests/cancel", data={"id": "1", **own}, headers=HEADERS.get(fields.get("own"), {}))

    assert cancel(tokens["admin"], own="yes").headers["location"] == "/requests?cancelled=no"
    assert cancel(tokens["look"], own="yes").status_code == 403
    assert cancel(tokens["admin"]).status_code == 403
    assert cancel(tokens["admin"], form_token="0" * 64).status_code == 403
    assert cancel(tokens["admin"], form_token="\u00e4").status_code == 403
    assert cancel(tokens["admin"], own="other").status_code == 403


HEADERS = {"other": {"sec-fetch-site": "cross-site"}}


def test_a_token_that_was_taken_back_is_refused_after_a_reload(guarded, tokens, folder):
    with guarded.client() as person:
        person.post("/login", data={"token": tokens["lost"]})
        assert person.get("/").status_code == 200
        content = tomlkit.parse((folder / "access.toml").read_text())
        content["roles"]["leaver"]["tokens"] = []
        (folder / "access.toml").write_text(content.as_string())
        guarded.process.send_signal(1)
        guarded.process.line("reloaded")
        eventually(lambda: person.get("/").status_code == 303)
    assert guarded.get("/metrics", headers=with_token(tokens["lost"])).status_code == 401
    assert guarded.get("/metrics", headers=with_token(tokens["look"])).status_code == 200


def test_a_reload_while_there_is_no_web_server_is_told_to_the_next(tmp_path):
    token_for(tmp_path, "ops", "--admin")
    with web_broker("--access", f"{tmp_path}/access.toml") as broker:
        new = token_for(tmp_path, "viewer", "--mmi", "all")
        os.kill(web_server_of(broker.process.pid), signal.SIGKILL)
        broker.process.send_signal(signal.SIGHUP)
        broker.process.line("reloaded ")
        eventually(lambda: answers(broker, "/metrics", headers=with_token(new)) == 200)


def test_any_number_of_tokens_is_told_to_the_web_server(tmp_path):
    token = token_for(tmp_path, "ops", "--admin")
    others = [written(digest_of(b"%d" % number)) for number in range(1000)]  # more than a pipe holds
    with open(tmp_path / "access.toml", "a") as file:
        file.write(f"[roles.viewer]\nmmi = 'all'\ntokens = {others}\n")
    with web_broker("--access", f"{tmp_path}/access.toml") as broker:
        assert broker.get("/metrics", headers=with_token(token)).status_code == 200
        assert broker.get("/metrics", headers=with_token("999")).status_code == 200


def answers(broker, path, **settings):
    """Return the status with which the web server answers, if there is one."""
    try:
        return broker.get(path, **settings).status_code
    except httpx.HTTPError:
        return None


def test_a_broker_without_tokens_says_so(folder):
    assert run("mdp-keys", "allow", "x", "--call", "*", "--access", f"{folder}/other.toml").returncode == 0
    with web_broker("--access", f"{folder}/other.toml") as broker:
        broker.process.line("no role has a token (mdp-keys token ROLE)")


def test_another_site_cannot_use_a_broker_on_this_machine(plain):
    with plain.client() as person, Client(plain.endpoint, timeout=TIMEOUT_SECONDS) as client:
        client.submit("nobody offers this", b"")
        page = eventually(lambda: "nobody" in (text := person.get("/requests").text) and text)
        token = form_token(page)
        assert person.post("/requests/cancel", data={"id": "1", "form_token": token}).status_code == 303
        assert person.post("/requests/cancel", data={"id": "1"}).status_code == 403
    assert plain.post("/requests/cancel", data={"id": "1", "form_token": token}).status_code == 403


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_name_that_points_here_is_refused(plain, host):
    assert plain.get("/", headers={"host": host}).status_code == 421
    assert plain.get("/metrics", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "[::1]:5", "127.0.0.1", "x.localhost:80"])
def test_names_of_this_machine_are_accepted(plain, host):
    assert plain.get("/readyz", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/services", "/nothing", "/metrics", "/static/app.js", "/login"])
def test_every_answer_has_the_security_headers(plain, path):
    headers = plain.get(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers.get("cache-control") == "no-store" or path.startswith("/static")


@pytest.mark.parametrize("path", ["/", "/services", "/workers", "/requests", "/brokers"])
def test_pages_have_nothing_inline(plain, path):
    page = plain.get(path).text
    assert "style=" not in page
    assert "<style" not in page
    assert "onclick" not in page
    assert page.count("<script") == page.count('<script src="/static/') == 1
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_strangers_are_not_let_in_without_access_control():
    result = run("mdp-broker", "--bind", "tcp://127.0.0.1:*", "--http", "0.0.0.0:0")
    assert result.returncode == 1
    (line,) = result.stderr.decode().splitlines()
    assert line.startswith("mdp-broker: refused to serve HTTP on 0.0.0.0, where other machines may connect")


def test_without_the_packages_it_says_what_to_install(in_this_process, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    result = in_this_process("mdp-broker", "--bind", "tcp://127.0.0.1:*", "--http", "127.0.0.1:0")
    assert result.returncode == 2
    assert result.stderr.decode().splitlines() == [
        f"mdp-broker: mdp-broker --http needs further packages (jinja2 missing): {install_command('web')}"
    ]


@pytest.mark.parametrize("address", ["8080", "localhost", "localhost:x", "localhost:70000", ":80"])
def test_an_address_that_is_none(in_this_process, address):
    result = in_this_process("mdp-broker", "--http", address)
    assert result.returncode == 2
    assert b"expected HOST:PORT" in result.stderr
