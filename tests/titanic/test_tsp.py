"""TSP, the Titanic Service Protocol (RFC 9, C27 to C30), with frames written by hand."""

import json
import re

import pytest
from support import peers
from support.peers import Client, OldClient, OldWorker, Worker, X1Client
from support.processes import eventually
from support.titanics import serving, stored

on_sqlite = pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
"""For tests that do not depend on the database."""
STATUS = re.compile(rb"[0-9]{3}( .+)?", re.DOTALL)
UUID = re.compile(rb"[0-9a-f]{32}")
STRANGE = b"0123456789abcdef0123456789abcdef"
"""A UUID of no request."""
NO_UUIDS = [
    b"",
    b"../../etc/passwd",
    b"/etc/passwd",
    b"..",
    b"0" * 31,
    b"0" * 33,
    b"g" * 32,
    b"1_2" * 10 + b"12",
    b"+" + b"1" * 31,
    b"0x" + b"1" * 30,
    b" " + b"1" * 31,
    b"1" * 31 + b"\n",
    b"1" * 31 + b"\0",
    b"1" * 32 + b"\0",
    b"\xff" * 32,
    "１".encode() * 10 + b"11",
    b"01234567-89ab-cdef-0123-456789abcdef",
    b"{0123456789abcdef0123456789abcd}",
    b"%" * 32,
    b"' OR uuid IS NOT NULL OR uuid = '",
    b"1" * 100_000,
]


class X1Worker(peers.X1Worker):
    """Expects that Titanic names each request by its UUID."""

    def work(self, *body):
        address, told = self.request(*body)
        assert re.fullmatch(rb'{"headers":{"request-id":"[0-9a-f]{32}"}}', told)
        return address


def x1_worker(bench, service):
    worker = bench.connect(X1Worker)
    worker.ready(service)
    return worker


def ask(client, service, *body, **options):
    """Send a request to Titanic, and return the frames of the FINAL, before which nothing may arrive."""
    client.request(service, *body, **options)
    message = client.recv()
    head = {
        Client: [b"MDPC02", b"\x03", service],
        OldClient: [b"", b"MDPC01", service],
        X1Client: [b"", b"MDPCX1", b"\x03", b"%d" % getattr(client, "number", 0)],
    }[type(client)]
    assert message[: len(head)] == head
    frames = message[len(head) :]
    assert STATUS.fullmatch(frames[0])
    assert frames[0][:3] in {b"200", b"300", b"400", b"500"}
    return frames


def submit(client, service, *body, **options):
    """Submit a request, and return its UUID."""
    status, uuid = ask(client, b"titanic.request", service, *body, **options)
    assert status == b"200"
    assert UUID.fullmatch(uuid)
    return uuid


def end(client, uuid):
    """Return the first answer of `titanic.reply` other than 300."""

    def reply():
        frames = ask(client, b"titanic.reply", uuid)
        return None if frames == [b"300"] else frames

    return eventually(reply)


def refused(frames, code=b"400"):
    """Return whether it is one frame, the status, or two: with a text, and a reason, for callers that speak X1."""
    return frames == [code] or (len(frames) == 2 and frames[0].startswith(code + b" "))


# ── titanic.request ──────────────────────────────────────────────────────────────────────────────────────────────────


@on_sqlite
def test_c27_a_request_is_answered_with_200_and_a_uuid(bench, server):
    client = bench.client()
    client.request(b"titanic.request", b"nobody", b"body")
    head, command, service, status, uuid = client.recv()
    assert (head, command, service, status) == (b"MDPC02", b"\x03", b"titanic.request", b"200")
    assert UUID.fullmatch(uuid)


def test_c27_a_request_is_stored_before_it_is_answered(bench, server, url):  # C27
    client = bench.client()
    for number in range(20):
        uuid = submit(client, b"nobody", b"%d" % number, b"")
        (row,) = [row for row in stored(url)["requests"] if str(row["uuid"]).replace("-", "") == uuid.decode()]
        assert row["service"] == "nobody"
        assert bytes(row["body"]) == len(b"%d" % number).to_bytes(4, "big") + b"%d" % number + bytes(4)


@on_sqlite
def test_c27_the_service_needs_no_workers_yet(bench, server):
    client = bench.client()
    uuid = submit(client, b"later", b"body")
    client.request(b"titanic.reply", uuid)
    client.final(b"titanic.reply", b"300")
    worker = bench.worker(b"later")
    worker.final(worker.work(b"body"), b"done")
    assert end(client, uuid) == [b"200", b"done"]


NO_REQUESTS = [
    [b""],
    [b"echo"],
    [b"", b"body"],
    [b"x" * 256, b"body"],
    [b"no\ttab", b"body"],
    [b"\xff", b"body"],
    [b"mmi.service", b"echo"],
    [b"titanic.request", b"echo", b"body"],
    [b"titanic.", b"body"],
]


def test_c30_a_request_without_service_and_body_is_400(bench, server, url):
    client = bench.client()
    submit(client, b"nobody", b"there before")
    before = stored(url)
    for body in NO_REQUESTS:
        assert refused(ask(client, b"titanic.request", *body)), body
    assert stored(url) == before


# ── titanic.reply ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("body", [[b""], [b"", b""], [b"one"], [b"", b"\0\xff", b"", b"three", b""], [b"200", b"300"]])
def test_c28_the_reply_has_all_frames_also_empty_ones(bench, server, body):  # C28
    client, worker = bench.client(), bench.worker(b"echo")
    uuid = submit(client, b"echo", *body)
    worker.final(worker.work(*body), *body)
    assert end(client, uuid) == [b"200", *body]


def test_c28_anyone_can_fetch_the_reply_again(bench, server):
    client, worker = bench.client(), bench.worker(b"echo")
    uuid = submit(client, b"echo", b"body")
    worker.final(worker.work(b"body"), b"one", b"two")
    end(client, uuid)
    for _ in range(3):
        client.request(b"titanic.reply", uuid)
        client.final(b"titanic.reply", b"200", b"one", b"two")
    other = bench.client()
    other.request(b"titanic.reply", uuid)
    other.final(b"titanic.reply", b"200", b"one", b"two")


def test_c28_a_running_request_is_300(bench, server):
    client, worker = bench.client(), bench.worker(b"echo")
    uuid = submit(client, b"echo", b"body")
    address = worker.work(b"body")
    for _ in range(3):
        client.request(b"titanic.reply", uuid)
        client.final(b"titanic.reply", b"300")
    worker.partial(address, b"half")
    client.request(b"titanic.reply", uuid)
    client.final(b"titanic.reply", b"300")  # RFC 9 knows no PARTIALs
    worker.final(address, b"done")
    assert end(client, uuid) == [b"200", b"done"]


def test_c28_an_unknown_uuid_is_400(bench, server):
    assert refused(ask(bench.client(), b"titanic.reply", STRANGE))


def test_c30_a_uuid_is_taken_in_either_case(bench, server):
    client, worker = bench.client(), bench.worker(b"echo")
    uuid = submit(client, b"echo", b"body")
    while not (re.search(rb"[a-f]", uuid)):  # pragma: no cover - one of 3 million
        uuid = submit(client, b"echo", b"body")
    mixed = b"".join(bytes([digit]).upper() if at % 2 else bytes([digit]) for at, digit in enumerate(uuid))
    worker.final(worker.work(b"body"), b"done")
    end(client, uuid)
    for each in (uuid.upper(), mixed):
        assert ask(client, b"titanic.reply", each) == [b"200", b"done"]
    assert ask(client, b"titanic.close", uuid.upper()) == [b"200"]
    assert refused(ask(client, b"titanic.reply", uuid))


@pytest.mark.parametrize("service", [b"titanic.reply", b"titanic.close"])
def test_c30_an_invalid_uuid_is_400_and_changes_nothing(bench, server, url, service):
    client = bench.client()
    uuid = submit(client, b"nobody", b"body")
    before = stored(url)
    for each in NO_UUIDS:
        assert refused(ask(client, service, each)), each
    assert refused(ask(client, service, uuid, b""))
    assert refused(ask(client, service, uuid, uuid))
    assert refused(ask(client, service, b"", uuid))
    assert stored(url) == before
    assert ask(client, b"titanic.reply", uuid) == [b"300"]


# ── titanic.close ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_c29_close_deletes_the_request_and_its_reply(bench, server, url):  # C29
    client, worker = bench.client(), bench.worker(b"echo")
    uuid, other = submit(client, b"echo", b"1"), submit(client, b"echo", b"2")
    address = worker.work(b"1")
    worker.partial(address, b"part")
    worker.final(address, b"one")
    worker.final(worker.work(b"2"), b"two")
    end(client, uuid)
    end(client, other)
    assert len(stored(url)["parts"]) == 1
    client.request(b"titanic.close", uuid)
    client.final(b"titanic.close", b"200")
    client.request(b"titanic.reply", uuid)
    client.final(b"titanic.reply", b"400")
    assert ask(client, b"titanic.reply", other) == [b"200", b"two"]
    assert len(stored(url)["requests"]) == 1
    assert stored(url)["parts"] == []


def test_c29_close_of_an_unknown_request_is_200(bench, server, url):
    client = bench.client()
    uuid = submit(client, b"nobody", b"body")
    for _ in range(3):
        assert ask(client, b"titanic.close", uuid) == [b"200"]
        assert ask(client, b"titanic.close", STRANGE) == [b"200"]
    assert stored(url)["requests"] == []


def test_c29_a_request_closed_before_it_runs_is_not_run(bench, server):
    client = bench.client()
    closed, open_ = submit(client, b"later", b"closed"), submit(client, b"later", b"open")
    assert ask(client, b"titanic.close", closed) == [b"200"]
    worker = bench.worker(b"later")
    worker.final(worker.work(b"open"), b"done")
    assert end(client, open_) == [b"200", b"done"]
    worker.nothing()


# ── requests that fail ───────────────────────────────────────────────────────────────────────────────────────────────


@on_sqlite
def test_a_worker_of_mdp_02_that_fails(bench, server):
    client, worker = bench.x1_client(), bench.worker(b"records")
    uuid = submit(client, b"records", b"")
    worker.final(worker.work(b""), b"zmdp.error", b"404", b"no such record")
    assert end(client, uuid) == [b"500 no such record", b"404", b"records"]


# ── other dialects ───────────────────────────────────────────────────────────────────────────────────────────────────


@on_sqlite
@pytest.mark.parametrize("kind", [OldClient, Client, X1Client])
@pytest.mark.parametrize("worker_kind", [OldWorker, Worker, X1Worker])
def test_any_client_and_any_worker(bench, server, kind, worker_kind):
    client, worker = bench.connect(kind), bench.connect(worker_kind)
    uuid = submit(client, b"echo", b"1", b"", b"3")
    assert ask(client, b"titanic.reply", uuid) == [b"300"]
    worker.ready(b"echo")
    worker.final(worker.work(b"1", b"", b"3"), b"", b"two")
    assert end(client, uuid) == [b"200", b"", b"two"]
    assert refused(ask(client, b"titanic.reply", STRANGE))
    assert refused(ask(client, b"titanic.request", b"echo"))
    assert ask(client, b"titanic.close", uuid) == [b"200"]
    assert refused(ask(client, b"titanic.reply", uuid))


@on_sqlite
@pytest.mark.parametrize("kind", [OldClient, Client])
def test_c37_callers_that_do_not_speak_x1_get_bare_codes(bench, engine, kind):
    url = engine.url.render_as_string(hide_password=False)
    client, worker = bench.connect(kind), x1_worker(bench, b"records")
    with serving(bench.endpoint, url, max_waiting=1):
        uuid = submit(client, b"records", b"body")
        eventually(lambda: ask(client, b"titanic.request", b"records", b"body") == [b"500"])  # it is full
        worker.error(worker.work(b"body"), b"404", b"no such record", b"detail")
        assert end(client, uuid) == [b"500", b"404", b"records", b"detail"]
        assert ask(client, b"titanic.reply", STRANGE) == [b"400"]
        for service in (b"titanic.request", b"titanic.reply", b"titanic.close"):
            assert ask(client, service, b"no uuid") == [b"400"]


@on_sqlite
def test_c37_callers_that_speak_x1_get_a_text_and_a_reason(bench, server):
    client = bench.x1_client()
    for service in (b"titanic.request", b"titanic.reply", b"titanic.close"):
        status, reason = ask(client, service, b"no uuid")
        assert status.startswith(b"400 titanic")
        assert reason == b"malformed"


@on_sqlite
def test_mdp_02_has_no_options(bench, server):
    client, worker = bench.client(), bench.worker(b"echo")
    uuid = submit(client, b"echo", b'{"delay":100000}', b"{}")
    worker.final(worker.work(b'{"delay":100000}', b"{}"), b"done")
    assert end(client, uuid) == [b"200", b"done"]


# ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_headers_reach_the_service(bench, server):
    client, worker = bench.x1_client(), x1_worker(bench, b"echo")
    uuid = submit(client, b"echo", b"body", options=b'{"headers":{"tenant":"gr\\u00f6\\u00dfer","a\\u0000":"\\u0000"}}')
    address, told = worker.request(b"body")
    assert json.loads(told)["headers"] == {"request-id": uuid.decode(), "tenant": "größer", "a\0": "\0"}
    worker.final(address, b"done")
