"""`mdclient tail` shows the requests that end at a real broker."""

import json
import signal
from contextlib import contextmanager

import pytest
from click.testing import CliRunner
from support.access import Folder
from support.processes import TIMEOUT_SECONDS, broker, process
from support.router import Router

from zmdp.clients import Client, ServiceError
from zmdp.clients.command.main import cli
from zmdp.clients.command.monitoring.command import tail_line, tail_rows
from zmdp.mdp.errors import RequestRejected
from zmdp.workers import Worker

ROW = {
    "id": "7", "request_id": None, "service": "echo", "role": "", "client": "c1", "protocol": "X1", "attempts": 1,
    "bytes": 5, "outcome": "ok", "queue_seconds": 0.0005, "worker_seconds": 2.5, "worker": 3, "ago_seconds": 1.5,
}  # fmt: skip


def test_rows_and_lines():
    (row,) = tail_rows({"requests": [ROW]}, 1_800_000_001.75)
    assert row["ended"] == "2027-01-15T08:00:00.250+00:00"
    assert "ago_seconds" not in row
    assert tail_line(row)[8:] == ".250    ok  echo  queue 0.5 ms  time 2.5 s  worker 3  client c1  request 7"
    failed = {
        **row, "outcome": "500", "worker": None, "worker_seconds": None, "attempts": 2, "role": "shop",
        "request_id": "order-1",
    }  # fmt: skip
    assert (
        tail_line(failed)[12:]
        == "   500  echo  queue 0.5 ms  time -  role shop  client c1  attempts 2  request order-1"
    )


def echo(request):
    if request[0] == b"bad":
        raise ServiceError(404, "no such thing")
    return request


@contextmanager
def following(at, *options):
    """Run `mdclient tail`; yield its process once the broker collects requests for it."""
    with process("mdclient", "tail", "--broker", at, "--interval", "0.05", *options) as tail:
        tail.line("following the requests at")
        yield tail


def test_requests_are_shown_as_they_end():
    with broker() as (_, at), Worker("echo", echo, broker=at), Worker("other", echo, broker=at):
        with (
            Client(at, timeout=TIMEOUT_SECONDS) as client,
            following(at) as tail,
            following(at, "echo", "--failed", "--json") as bad,
        ):
            client.request("echo", b"hello", headers={"request-id": "order-1"})
            client.request("other", b"hello")
            for name in ("echo", "other"):
                with pytest.raises(ServiceError):
                    client.request(name, b"bad")
            shown = tail.line("order-1", "stdout").split()
            assert shown[1:3] == ["ok", "echo"]
            assert tail.line("404  other", "stdout")
            row = json.loads(bad.line("{", "stdout"))
            assert (row["service"], row["outcome"], row["protocol"]) == ("echo", "404", "X1")
            assert tail.end(signal.SIGINT) == 0
            assert bad.end(signal.SIGINT) == 0
            assert (tail.stderr.count("\n"), bad.stderr.count("\n")) == (0, 0)


def test_what_was_missed_is_told():
    with (
        Router() as router,
        process(
            "mdclient", "tail", "--broker", router.endpoint, "--protocol", "0.2", "--interval", "0.01", "--count", "1"
        ) as tail,
    ):
        for token, found, left_out in (("a", [], 0), ("a", [], 8), ("b", [ROW], 0)):
            asked = router.recv()
            assert json.loads(asked[-1])["limit"] == 100
            answer = {"tail": token, "requests": found, "left_out": left_out}
            router.send(asked[0], b"MDPC02", b"\x03", b"mmi.tail", json.dumps(answer).encode())
        assert tail.wait() == 0
        assert tail.stderr.splitlines()[1:] == [
            "8 more were left out",
            "requests may be missing: the broker was restarted, or was not asked in time",
        ]


def test_only_admins_may_see_requests(tmp_path):
    folder = Folder(tmp_path)

    def run(name):
        at = ("--broker", server.endpoints[0], *folder.options(name))
        return CliRunner().invoke(cli, ("tail", *at, "--count", "1"), standalone_mode=False)

    with folder.broker() as server, Worker("echo", echo, broker=server.endpoints[0], **folder.settings("resizer")):
        assert isinstance(run("shop").exception, RequestRejected)
        with (
            process(
                "mdclient", "tail", "--broker", server.endpoints[0], *folder.options("operator"), "--count", "1"
            ) as tail,
            Client(server.endpoints[0], timeout=TIMEOUT_SECONDS, **folder.settings("shop")) as client,
        ):
            tail.line("following")
            client.request("echo", b"hello")
            assert "role shop" in tail.line("echo", "stdout")
