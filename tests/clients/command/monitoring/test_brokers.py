"""What `mdclient` shows of linked brokers, as pure functions and of real brokers."""

import json
import os
import signal
from contextlib import ExitStack, contextmanager, suppress

import click
import pytest
from click.testing import CliRunner
from support.access import Folder
from support.processes import SHORT_TIMEOUTS, TIMEOUT_SECONDS, broker, eventually

from zmdp.clients import Client
from zmdp.clients.command.main import cli
from zmdp.clients.command.monitoring.brokers import (
    BrokerReport,
    all_lines,
    all_with_rates,
    lines,
    summary,
)
from zmdp.clients.command.monitoring.top import BrokerView, elsewhere
from zmdp.mdp.broker.io.dialer import LinkTo
from zmdp.mdp.errors import RequestRejected, RequestTimeout, ServiceNotFound, WorkerLost
from zmdp.mdp.security.access import load
from zmdp.mdp.security.certificates import public_key
from zmdp.testing import running_broker
from zmdp.workers import Worker


def run(*arguments):
    result = CliRunner().invoke(cli, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


# ── as pure functions ────────────────────────────────────────────────────────────────────────────────────────────────


def service(name, *, workers=0, credit=0, queued=0, dispatched=0, remote_credit=0, remote_free=0, hops=None):
    return {
        "name": name, "workers": workers, "idle": workers, "credit": credit, "running": 0, "queued": queued,
        "dispatched": dispatched, "remote_credit": remote_credit, "remote_free": remote_free, "hops": hops,
    }  # fmt: skip


def link(broker="", *, state="up", endpoint="", up=10.0, sent=0, received=0, trouble="", kind="peer"):
    return {
        "broker": broker, "kind": kind, "endpoint": endpoint, "state": state, "trouble": trouble, "up_seconds": up,
        "services": 2, "outstanding_there": 3, "outstanding_here": 4, "sent": sent, "received": received,
    }  # fmt: skip


def view(*services, moment=0.0, requests=0):
    stats = {"up_seconds": 10.0, "workers": 1, "queued": 5, "request_bytes": 0, "running": 6, "requests": requests}
    return BrokerView(list(services), [], {**stats, "replies": 0, "errors": 0, "dropped": {}, "lost": {}}, moment)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (service("echo", workers=1, credit=1, hops=0), ""),
        (service("echo", remote_credit=4, remote_free=3, hops=1), "3 of 4 free, 1 hop"),
        (service("echo", remote_credit=4000, remote_free=0, hops=3), "0 of 4,000 free, 3 hops"),
        (service("echo", workers=1, remote_credit=4, remote_free=4, hops=0), "4 of 4 free"),
    ],
)
def test_what_other_brokers_offer_of_a_service(row, text):
    assert elsewhere(row) == text


ANSWER = {
    "name": "a",
    "links": [
        link("b", endpoint="tcp://b:5555", up=62.0, sent=12, received=34),
        link(state="down", endpoint="tcp://c:5555", up=0, trouble="nothing is listening there"),
    ],
    "brokers": [{"name": "b", "hops": 1, "over": "b"}, {"name": "d", "hops": 2, "over": "b"}],
    "more": 0,
}


def test_links_as_lines():
    assert list(lines(ANSWER)) == [
        "broker a",
        "",
        "LINK  KIND  ENDPOINT      STATE  UP       SERVICES  THERE  HERE  SENT  RECEIVED  TROUBLE",
        "b     peer  tcp://b:5555  up     0:01:02         2      3     4    12        34  -",
        "-     peer  tcp://c:5555  down   -               2      3     4     0         0  nothing is listening there",
        "",
        "BROKER  HOPS  OVER",
        "b          1  b",
        "d          2  b",
    ]


def test_links_of_a_broker_without_any():
    none = {"name": "a", "links": [], "brokers": [], "more": 0}
    assert list(lines(none)) == ["broker a", "no links: mdp-broker --peer and --parent open them"]
    assert summary(none) == {"links": "none", "hops": "none"}


def test_links_in_short():
    assert summary(ANSWER) == {"links": "b=up  tcp://c:5555=down", "hops": "b=1  d=2"}


def test_more_brokers_than_are_listed():
    assert list(lines(ANSWER | {"more": 7}))[-1] == "… and 7 more"


def test_rates_of_all_brokers():
    before = [
        BrokerReport(
            "a", 0, "", "", view(service("echo", dispatched=10), moment=100.0, requests=50), [link("b", sent=100)]
        ),
        BrokerReport("b", 1, "b", "gone"),
    ]
    after = [
        BrokerReport(
            "a", 0, "", "", view(service("echo", dispatched=30), moment=104.0, requests=90), [link("b", sent=108)]
        ),
        BrokerReport("b", 1, "b", "", view(requests=20), [link("a", received=50)]),
        BrokerReport("c", 2, "b", "broker c cannot be reached from here"),
    ]
    a, b, c = all_with_rates(after, before)["brokers"]
    assert (a["totals"]["requests_per_second"], a["services"][0]["per_second"]) == (10.0, 5.0)
    assert [(each["sent_per_second"], each["received_per_second"]) for each in a["links"]] == [(2.0, 0.0)]
    assert (b["totals"]["requests_per_second"], b["links"][0]["received_per_second"]) == (2.0, 5.0)
    assert c == {"name": "c", "hops": 2, "over": "b", "trouble": "broker c cannot be reached from here"}


def test_rates_of_a_link_that_is_not_up():
    (broker,) = all_with_rates([BrokerReport("a", 0, "", "", view(), [link(state="down", up=0, sent=5)])], [])[
        "brokers"
    ]
    assert broker["links"][0]["sent_per_second"] == 0.0


def test_all_brokers_as_lines():
    seen = [
        BrokerReport("a", 0, "", "", view(service("echo", remote_credit=4, hops=1), requests=10), [link("b", sent=20)]),
        BrokerReport(
            "b", 1, "b", "", view(service("echo", workers=2, credit=4, queued=1, hops=0)), [link("a", kind="child")]
        ),
        BrokerReport("c", 2, "b", "broker c cannot be reached from here"),
    ]
    assert list(all_lines(all_with_rates(seen, []), "tcp://host:5555", 1000)) == [
        "tcp://host:5555   3 brokers, 1 of which cannot be asked",
        "",
        "BROKER  HOPS  OVER  UP       WORKERS  RUNNING  QUEUED  REQUESTS/S  TROUBLE",
        "a          0  -     0:00:10        1        6       5         1.0  -",
        "b          1  b     0:00:10        1        6       5         0.0  -",
        "c          2  b     -              -        -       -           -  broker c cannot be reached from here",
        "",
        "FROM  LINK  KIND   STATE  SERVICES  THERE  HERE  SENT/S  RECEIVED/S  TROUBLE",
        "a     b     peer   up            2      3     4     2.0         0.0  -",
        "b     a     child  up            2      3     4     0.0         0.0  -",
        "",
        "SERVICE  BROKER  WORKERS  IDLE  CREDIT  RUNNING  QUEUED  REQUESTS/S",
        "echo     b             2     2       4        0       1         0.0",
    ]


@pytest.mark.parametrize("height", [1, 10, 24, 50])
def test_the_view_of_all_brokers_fits_the_terminal(height):
    seen = [
        BrokerReport(f"b{n}", n, "b1", "", view(*(service(f"s{n}", workers=1) for n in range(30))), [link("a")] * 2)
        for n in range(40)
    ]
    told = list(all_lines(all_with_rates(seen, []), "tcp://host:5555", height))
    assert len(told) <= max(height, 13)
    assert sum(line.startswith("… and ") for line in told) == 3


# ── of real brokers ──────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def chain():
    """The brokers a, b and c in a tree, c on top, in this process; yields their endpoints and a client of a."""
    with ExitStack() as stack:
        endpoints, above = {}, []
        for name in "cba":
            server = stack.enter_context(running_broker(name=name, links=above, drain_timeout=0.0))
            endpoints[name] = server.endpoints[0]
            above = [LinkTo("parent", server.endpoints[0])]
        client = stack.enter_context(Client(endpoints["a"], timeout=TIMEOUT_SECONDS))
        eventually(lambda: len(links_of(client)["brokers"]) == 2)
        yield endpoints, client


def links_of(client, **options):
    return json.loads(client.request("mmi.brokers", options=options or None)[0])


def test_services_of_other_brokers_are_listed_as_such():
    with chain() as (at, client), Worker("far", list, broker=at["c"]), Worker("near", list, broker=at["a"]):
        eventually(lambda: client.available("far") and client.available("near"))
        lines = run("services", "--broker", at["a"]).splitlines()
        assert lines[0].split() == ["SERVICE", "WORKERS", "IDLE", "QUEUED", "ELSEWHERE"]
        assert [line.split(maxsplit=4) for line in lines[1:]] == [
            ["far", "0", "0", "0", "1 of 1 free, 2 hops"],
            ["near", "1", "1", "0", "-"],
        ]
        top = run("top", "--count", "1", "--broker", at["a"])
        assert "QUEUE P99  ELSEWHERE" in top
        assert "1 of 1 free, 2 hops" in top
        there = ("services", "--broker", at["a"], "--on", "c")
        eventually(lambda: "near" in run(*there))
        assert run(*there).splitlines()[1:] == [
            "far            1        1        0  -",
            "near           0        0        0  1 of 1 free, 2 hops",
        ]


def test_nothing_is_said_of_elsewhere_without_links():
    with running_broker() as server, Worker("echo", list, broker=server.endpoints[0]):
        eventually(lambda: "echo" in run("services", "--broker", server.endpoints[0]))
        assert "ELSEWHERE" not in run("services", "--broker", server.endpoints[0])
        assert "ELSEWHERE" not in run("top", "--count", "1", "--broker", server.endpoints[0])


def test_a_call_is_addressed_to_a_broker():
    with chain() as (at, _), Worker("who", lambda request: b"c", broker=at["c"]):
        with Worker("who", lambda request: b"a", broker=at["a"]):
            for name in "ac":
                arguments = ("who", "--wait", "--broker", at["a"], "--on", name)
                assert run("call", *arguments) == f"{name}\n"
                assert run("stream", *arguments) == f"{name}\n"
        with pytest.raises(ServiceNotFound, match="no worker offers 'who' at broker b"):
            run("call", "who", "--broker", at["a"], "--on", "b")


def test_a_broker_that_cannot_be_reached():
    with chain() as (at, _):
        told = r"broker x cannot be reached from here \(502\); `mdclient brokers` lists"
        for command in (("call", "who"), ("call", "who", "--wait"), ("services",), ("brokers",), ("info",)):
            with pytest.raises(WorkerLost, match=told):
                run(*command, "--broker", at["a"], "--on", "x")


@pytest.mark.parametrize("protocol", ["0.2", "0.1"])
def test_only_x1_can_address_a_broker(protocol):
    with running_broker() as server:
        common = ("--broker", server.endpoints[0], "--protocol", protocol)
        with pytest.raises(click.UsageError, match="--on requires protocol X1"):
            run("call", "echo", "--on", "b", *common)
        for command in (("services", "--on", "b"), ("top", "--all", "--count", "1")):
            with pytest.raises((click.UsageError, ValueError), match="X1"):
                run(*command, *common)
        with pytest.raises(click.UsageError, match="leave out --on"):
            run("top", "--all", "--on", "b", "--broker", server.endpoints[0])


def test_the_links_of_each_broker():
    with chain() as (at, _):
        told = json.loads(run("brokers", "--json", "--broker", at["a"], "--on", "b"))
        assert told["name"] == "b"
        assert {(each["broker"], each["kind"], each["state"]) for each in told["links"]} == {
            ("a", "child", "up"), ("c", "parent", "up"),
        }  # fmt: skip
        assert "b     parent" in run("brokers", "--broker", at["a"])
        info = run("info", "--broker", at["a"]).splitlines()
        assert info[-3:] == ["brokers", "  links          b=up", "  hops           b=1  c=2"]
        told = json.loads(run("info", "--json", "--broker", at["a"]))
        assert told["broker"]["broker"] == told["brokers"]["name"] == "a"


def test_all_brokers_are_watched():
    with chain() as (at, client), Worker("far", list, broker=at["c"]):
        for _ in range(10):
            client.request("far")
        told = json.loads(run("top", "--all", "--json", "--count", "1", "--broker", at["a"]))
        assert [(each["name"], each["hops"], each["over"]) for each in told["brokers"]] == [
            ("a", 0, ""), ("b", 1, "b"), ("c", 2, "b"),
        ]  # fmt: skip
        a, b, c = told["brokers"]
        assert a["links"][0]["sent"] >= 10
        assert a["links"][0]["sent_per_second"] > 0
        assert {link["broker"]: link["received"] for link in b["links"]}["a"] >= 10
        assert [(row["name"], row["workers"]) for row in c["services"]] == [("far", 1)]
        text = run("top", "--all", "--count", "2", "--interval", "0.01", "--broker", at["a"])
        assert text.count("   3 brokers\n") == 2
        assert f"{at['a']}   3 brokers" in text


def test_a_broker_that_does_not_answer_is_shown_as_such():
    with broker("--name", "b", "--heartbeat", "30") as (process, at):
        with running_broker(name="a", links=[LinkTo("peer", at)], drain_timeout=0.0) as server:
            with Client(server.endpoints[0], timeout=TIMEOUT_SECONDS) as client:
                eventually(lambda: links_of(client)["brokers"])
            os.kill(process.pid, signal.SIGSTOP)
            try:
                for timeout in SHORT_TIMEOUTS:
                    limit = f"{timeout:g}"
                    with suppress(RequestTimeout):  # of a, which may be slow
                        a, b = asked_for_all(server.endpoints[0], "--timeout", limit)
                        if not a["trouble"]:
                            break
            finally:
                os.kill(process.pid, signal.SIGCONT)
            assert (a["name"], a["trouble"]) == ("a", "")
            assert b["name"] == "b"
            assert b["trouble"] == f"no answer within {limit} s"


def asked_for_all(at, *options):
    return json.loads(run("top", "--all", "--json", "--count", "1", "--broker", at, *options))["brokers"]


ROLES_OF_A = """
[roles.operator]
keys = ["operator.key"]
admin = true
[roles.brokers]
keys = ["driver.key"]
link = true
"""
ROLES_OF_B = """
[roles.operator]
keys = ["operator.key"]
[roles.brokers]
keys = ["broker.key"]
link = true
"""


def test_a_broker_whose_roles_do_not_allow_it_is_shown_as_such(tmp_path):
    folder = Folder(tmp_path)
    folder.write(ROLES_OF_A)
    other = tmp_path / "b.toml"
    other.write_text(f'secret_key = "driver.key_secret"\n{ROLES_OF_B}')
    with running_broker(name="b", access=load(other), drain_timeout=0.0) as b:
        link = LinkTo("peer", b.endpoints[0], public_key("driver.key", tmp_path))
        with running_broker(name="a", access=load(folder.access), links=[link], drain_timeout=0.0) as a:
            with Client(a.endpoints[0], timeout=TIMEOUT_SECONDS, **folder.settings("operator")) as client:
                eventually(lambda: links_of(client)["brokers"])
            common = ("--broker", a.endpoints[0], *folder.options("operator"))
            printed = json.loads(run("top", "--all", "--json", "--count", "1", *common))
            a_row, b_row = printed["brokers"]
            assert (a_row["name"], a_row["trouble"], b_row["name"]) == ("a", "", "b")
            assert "may not call it" in b_row["trouble"]
            with pytest.raises(RequestRejected, match="may not call it"):
                run("brokers", "--on", "b", *common)
