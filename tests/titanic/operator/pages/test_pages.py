"""`titanic serve --http`: metrics, health, pages and what one can do there, with a real Titanic."""

import asyncio
import re
import time
from contextlib import closing
from types import SimpleNamespace
from uuid import UUID

import httpx
import pytest
import sqlalchemy as sa
from prometheus_client.parser import text_string_to_metric_families
from support.access import ROLES, Folder
from support.processes import TIMEOUT_SECONDS, eventually, process
from support.titanics import LIMITS, QUICK, connected, row, state, titanic_at

from zmdp.clients import Client
from zmdp.mdp.security.access import new_token
from zmdp.testing import running_broker
from zmdp.titanic import Titanic
from zmdp.titanic.api.submission import pack
from zmdp.titanic.db import schema, store
from zmdp.titanic.db.store.models import R
from zmdp.titanic.operator.pages.database import AdminDatabase
from zmdp.workers import ServiceError, Worker

MARKUP = "<b>no & such</b> thing"


def fail(request):
    if request[0] == b"bad":
        raise ServiceError(404, MARKUP)
    yield b"a part"
    return b"\xff\x00"


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """A Titanic that has done something: two requests succeeded, one failed, and one waits."""
    db = tmp_path_factory.mktemp("web") / "titanic.db"
    with running_broker(limits=LIMITS) as server, Client(server.endpoints[0], timeout=TIMEOUT_SECONDS) as client:
        with Worker("some", fail, broker=server.endpoints[0]), titanic_at(server.endpoints[0], db) as found:
            titanic = Titanic(client)
            good = [titanic.submit("some", b"good", headers={"a": MARKUP}) for _ in range(2)]
            bad = titanic.submit("some", b"bad", key="the key")
            for ticket in good:
                ticket.result(timeout=TIMEOUT_SECONDS)
            with pytest.raises(ServiceError):
                bad.result(timeout=TIMEOUT_SECONDS)
            waits = titanic.submit("nobody", b"x")
            yield SimpleNamespace(
                db=str(db),
                good=good[0].uuid,
                many=good[1].uuid,
                bad=bad.uuid,
                waits=waits.uuid,
                server=server,
                **vars(found),
            )


def text(response):
    """Return what a page says, without its markup."""
    main = response.text.partition("<main")[2].partition("</main>")[0]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", main))


def samples(exposed):
    """Return the values of all metrics, by name and labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(exposed)
        for sample in family.samples
    }


def press(http, page, path, **fields):
    """Submit a form of a page; return what is shown then."""
    token = re.search(r'name="form_token" value="([^"]+)"', http.get(page).text)[1]
    return http.post(path, data={"form_token": token, **fields}, follow_redirects=True)


def test_metrics_are_what_was_done(there):
    ended = {"pending": 1, "done": 2, "failed": 1}
    found = eventually(lambda: (
        now := samples(there.http.get("/metrics").text)
    ) and all(now.get(("titanic_requests", state)) == count for state, count in ended.items()) and now)  # fmt: skip
    expected = {
        ("titanic_requests", "done"): 2, ("titanic_requests", "failed"): 1, ("titanic_requests", "running"): 0,
        ("titanic_accepted_total",): 4, ("titanic_attempts_total",): 3, ("titanic_finished_total", "ok"): 2,
        ("titanic_finished_total", "404"): 1, ("titanic_broker_up",): 1, ("titanic_database_up",): 1,
        ("titanic_commit_failures_total", "writer"): 0, ("titanic_instances",): 1,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert found["titanic_oldest_pending_seconds",] > 0
    assert found["titanic_commit_seconds_bucket", "+Inf", "writer"] == found["titanic_commit_seconds_count", "writer"]
    assert found["titanic_commit_seconds_count", "writer"] == found["titanic_commit_items_count", "writer"] > 3
    assert found["titanic_commit_items_sum", "writer"] >= 4 + 3


def test_health(there):
    assert there.http.get("/livez").json() == {"live": True}
    eventually(lambda: there.http.get("/readyz").json() == {"ready": True, "reasons": []})


def test_a_titanic_without_a_broker_is_not_ready(tmp_path):
    command = ("--broker", "tcp://127.0.0.1:1", "--db", str(tmp_path / "t.db"), "--http", "127.0.0.1:0")
    with process("titanic", "serve", *command, *QUICK) as running:
        url = running.line("http://", "stdout")
        reasons = ["the broker does not answer: no request is executed"]
        expected = (503, {"ready": False, "reasons": reasons})

        def told():
            answer = httpx.get(url + "readyz", timeout=TIMEOUT_SECONDS)
            return answer.status_code, answer.json()

        eventually(lambda: told() == expected)
        assert httpx.get(url + "livez", timeout=TIMEOUT_SECONDS).json() == {"live": True}
        assert running.end() == 0


def test_the_overview(there):
    shown = eventually(lambda: "Dead letters 1" in (page := text(there.http.get("/"))) and page)
    assert "some" in shown
    assert "nobody" in shown
    assert "4 requests accepted" in shown
    for title in ("Requests that have not ended 1 ", "Requests per second", "Duration of a commit p99"):
        assert title in shown


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/requests", {"good", "bad", "waits"}),
        ("/requests?state=failed", {"bad"}),
        ("/requests?state=pending", {"waits"}),
        ("/requests?state=nonsense", {"good", "bad", "waits"}),
        ("/requests?service=nobody", {"waits"}),
        ("/requests?q=NOBOD", {"waits"}),
        ("/requests?q=the+key", {"bad"}),
        ("/requests?q=no+%26+such", {"bad"}),
        ("/requests?q=100%25", set()),
        ("/requests?state=failed&service=nobody", set()),
    ],
)
def test_requests_are_found(there, path, expected):
    page = there.http.get(path)
    assert page.status_code == 200
    assert {name for name in ("good", "bad", "waits") if vars(there)[name] in page.text} == expected


def test_a_request_is_found_by_its_uuid(there):
    dashed = f"{there.bad[:8]}-{there.bad[8:12]}-{there.bad[12:16]}-{there.bad[16:20]}-{there.bad[20:]}"
    page = there.http.get("/requests", params={"q": dashed})
    assert there.bad in page.text
    assert there.good not in page.text


def test_one_request(there):
    shown = text(there.http.get("/request", params={"uuid": there.good}))
    assert "Header a: &lt;b&gt;no &amp; such&lt;/b&gt; thing" in shown
    assert "Body good" in shown
    assert "PARTIAL 0 a part" in shown
    assert "Reply ff 00" in shown
    assert "done" in shown
    shown = text(there.http.get("/request", params={"uuid": there.bad}))
    assert "Last error 404: &lt;b&gt;no &amp; such&lt;/b&gt; thing" in shown
    assert re.search(r"Attempts Attempts 1 Latest began \S+ \S+ ended", shown)
    assert "Key the key" in shown


def test_only_the_partials_that_are_shown_are_read(there):
    with connected(there.db) as connection:
        id_, attempt = connection.execute(sa.select(R.id, R.attempts).where(R.uuid == UUID(there.many))).one()
        parts = [store.Partial(id_, attempt, number, pack([b"%d" % number])) for number in range(1, 53)]
        store.add_partials(connection, parts)
    with closing(AdminDatabase(schema.database_url(there.db))) as database:
        row, count = asyncio.run(database.show(UUID(there.many)))
    assert (len(row["partials"]), count) == (50, 53)
    shown = text(there.http.get("/request", params={"uuid": there.many}))
    assert f"PARTIAL 49 49 Reply ff 00 PARTIALs 3 more: titanic show {there.many}" in shown


@pytest.mark.parametrize("uuid", ["", "0" * 32, "<b>"])
def test_there_is_no_such_request(there, uuid):
    page = there.http.get("/request", params={"uuid": uuid})
    assert (page.status_code, "Titanic has no request with this UUID" in page.text) == (404, True)


def test_retry_and_cancel(there):
    with running_broker(limits=LIMITS) as server, Client(server.endpoints[0], timeout=TIMEOUT_SECONDS) as client:
        with titanic_at(server.endpoints[0], there.db + ".own") as own:
            db = there.db + ".own"
            with Worker("some", fail, broker=server.endpoints[0]):
                tickets = [Titanic(client).submit("some", b"bad") for _ in range(3)]
                for each in tickets:
                    with pytest.raises(ServiceError):
                        each.result(timeout=TIMEOUT_SECONDS)
            one, *others = (each.uuid for each in tickets)
            page = f"/request?uuid={one}"
            # Until Titanic knows that the worker has gone, what it retries waits at the broker, and is running.
            eventually(lambda: "titanic_services 4.0\n" in own.http.get("/metrics").text)  # its own
            assert "Retry" in own.http.get(page).text
            shown = press(own.http, page, "/request/retry", uuid=one)
            assert "the request is now pending" in text(shown)
            assert state(db, one) == "pending"
            assert "Nothing was changed" in text(press(own.http, page, "/request/retry", uuid=one))
            shown = press(own.http, page, "/request/cancel", uuid=one)
            assert "the request is now failed" in text(shown)
            assert row(db, one)["code"] == 499
            shown = press(own.http, "/requests?state=failed", "/requests/retry", service="some")
            assert "3 requests are pending again" in text(shown)
            assert {state(db, uuid) for uuid in others} == {"pending"}


def test_a_forged_form_changes_nothing(there):
    answer = httpx.post(
        there.url + "request/cancel", data={"uuid": there.waits, "form_token": "0" * 64}, timeout=TIMEOUT_SECONDS
    )
    assert (answer.status_code, state(there.db, there.waits)) == (403, "pending")
    assert there.http.get("/request/cancel").status_code in {404, 405}


def test_tokens_decide_who_may_look_and_act(tmp_path):
    folder, tokens = Folder(tmp_path), {}
    roles = ROLES
    for name in ("shop", "driver", "operator"):
        tokens[name], digest = new_token()
        roles = roles.replace(f'["{name}.key"]', f'["{name}.key"]\ntokens = ["{digest}"]')
    folder.write(roles)
    db = tmp_path / "titanic.db"
    keys, http_access = folder.options("titanic"), ("--http-access", str(folder.access))
    with folder.broker(limits=LIMITS) as server:
        at = server.endpoints[0]
        with (
            Client(at, timeout=TIMEOUT_SECONDS, **folder.settings("shop")) as client,
            titanic_at(at, db, *keys, *http_access) as own,
        ):
            uuid = Titanic(client).submit("echo", b"a secret").uuid
            page = f"/request?uuid={uuid}"
            assert own.http.get("/metrics").status_code == 401
            assert own.http.get(page).headers["location"].startswith("/login?")
            seen = {}
            for name, token in tokens.items():
                answer = own.http.get(page, headers={"authorization": f"Bearer {token}"})
                seen[name] = (answer.status_code, "a secret" in answer.text, "Cancel this request" in answer.text)
            assert seen == {
                "shop": (403, False, False), "driver": (200, False, False), "operator": (200, True, True)
            }  # fmt: skip
            answer = own.http.get("/metrics", headers={"authorization": f"Bearer {tokens['driver']}"})
            assert answer.status_code == 200
            eventually(lambda: own.http.get("/readyz").status_code == 200)


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["--http", "0.0.0.0:0"], 1, "refused to serve HTTP on 0.0.0.0"),
        (["--http", "nonsense"], 2, "expected HOST:PORT"),
        (["--http-insecure"], 2, "need --http HOST:PORT"),
        (["--http", "127.0.0.1:0", "--http-access", "/no/such/file"], 2, "/no/such/file"),
    ],
)
def test_what_cannot_be_served(in_this_process, options, code, told, tmp_path):
    result = in_this_process("titanic", "serve", "--db", str(tmp_path / "t.db"), *options)
    *_, line = result.stderr.decode().splitlines()
    assert (result.returncode, told in line) == (code, True)


def test_a_port_in_use_is_one_line(in_this_process, there, tmp_path):
    port = there.url.rstrip("/").rpartition(":")[2]
    result = in_this_process("titanic", "serve", "--db", str(tmp_path / "t.db"), "--http", f"127.0.0.1:{port}")
    (line,) = result.stderr.decode().splitlines()
    assert (result.returncode, "another program listens there" in line) == (1, True)


def test_an_open_page_does_not_hold_up_the_end(tmp_path):
    with running_broker(limits=LIMITS) as server, titanic_at(server.endpoints[0], tmp_path / "t.db") as own:
        with own.http.stream("GET", "/live/") as page:
            assert next(page.iter_lines()).startswith("retry")
            began = time.monotonic()
            assert own.process.end() == 0
            assert time.monotonic() - began < TIMEOUT_SECONDS / 2
        assert "Traceback" not in own.process.stderr
        assert "Exception" not in own.process.stderr


def test_a_database_that_is_gone_is_told(tmp_path):
    db = tmp_path / "titanic.db"
    with running_broker(limits=LIMITS) as server, titanic_at(server.endpoints[0], db) as own:
        away = db.rename(tmp_path / "away.db")
        reasons = ["the database cannot be read: the file was removed or replaced"]
        eventually(lambda: own.http.get("/readyz").json()["reasons"] == reasons)
        assert "The database cannot be read" in own.http.get("/requests").text
        eventually(lambda: samples(own.http.get("/metrics").text)["titanic_database_up",] == 0)
        away.rename(db)
