"""/metrics: parsed with prometheus-client's own parsers, and compared with what a known load did."""

import asyncio
import time

import httpx
import pytest
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families
from support.processes import TIMEOUT_SECONDS, eventually
from support.web import serving, web_broker

from zmdp.clients import Client
from zmdp.dashboard.broker.exposition import OTHER, BrokerCollector, Selection
from zmdp.dashboard.broker.snapshot import Snapshot
from zmdp.dashboard.shell.shell import exposition
from zmdp.mdp.errors import ServiceError, ServiceNotFound
from zmdp.workers import ServiceError as Failure

HOSTILE = '<script>alert("1")</script>\\{}'


def samples(families):
    return {
        (each.name, tuple(sorted(each.labels.items()))): each.value for family in families for each in family.samples
    }


def value(found, name, **labels):
    return found[name, tuple(sorted(labels.items()))]


def row(name, *, ok=0, queued=0, buckets=()):
    times = {"buckets": list(buckets), "seconds": 0.5 * sum(buckets)}
    return {
        "name": name, "workers": 1, "idle": 0, "credit": 1, "running": 0, "queued": queued,
        "oldest_seconds": 2.5 if queued else 0.0, "outcomes": {"ok": ok} if ok else {}, "queue_seconds": times,
        "worker_seconds": times, "redispatched": 0, "throttled": 0, "request_bytes": 10, "reply_bytes": 20,
        "served": True,
    }  # fmt: skip


def snapshot(*rows):
    return Snapshot(
        at=1.0,
        broker={"version": "1", "broker": "b", "up_seconds": 5, "draining": False},
        stats={
            "connections": {"accepted": 7, "ended": 3}, "dropped": {"expired": 2}, "invalid": {}, "disconnected": {},
            "lost": {"silent": 1}, "request_bytes": 9, "late": 0, "internal_errors": 0,
        },
        brokers={"links": [
            {"broker": "x", "kind": "peer", "endpoint": "tcp://x", "state": "standby", "outstanding_there": 1,
             "sent": 5, "received": 6},
            {"broker": "x", "kind": "peer", "endpoint": "", "state": "up", "outstanding_there": 2, "sent": 10,
             "received": 20},
        ]},
        bounds=[1.0, 2.0],
        services={each["name"]: each for each in rows},
    )  # fmt: skip


def exposed(it, named=None):
    text, _ = exposition([BrokerCollector(it, set(it.services) if named is None else named)], "")
    return samples(text_string_to_metric_families(text.decode()))


def test_a_snapshot_as_metrics():
    found = exposed(snapshot(row("a", ok=3, buckets=(1, 0, 2)), row("b", queued=4)))
    assert value(found, "mdp_up") == 1
    assert value(found, "mdp_connections") == 4
    assert value(found, "mdp_dropped_requests_total", reason="expired") == 2
    assert value(found, "mdp_requests_total", service="a", outcome="ok") == 3
    assert value(found, "mdp_request_duration_seconds_bucket", service="a", le="1.0") == 1
    assert value(found, "mdp_request_duration_seconds_bucket", service="a", le="+Inf") == 3
    assert value(found, "mdp_request_duration_seconds_sum", service="a") == 1.5
    assert value(found, "mdp_queue_depth", service="b") == 4
    assert value(found, "mdp_queue_oldest_seconds", service="b") == 2.5
    assert value(found, "mdp_workers", service="b", state="busy") == 1
    assert value(found, "mdp_link_sent_total", broker="x", kind="peer") == 15
    assert value(found, "mdp_link_up", broker="x", kind="peer") == 1


def test_without_an_answer_there_is_only_that_it_is_down():
    text, _ = exposition([BrokerCollector(None, set())], "")
    assert samples(text_string_to_metric_families(text.decode())) == {("mdp_up", ()): 0}


def test_services_beyond_a_number_are_added_up():
    found = exposed(snapshot(row("a", ok=3), row("b", ok=4, queued=1), row("c", ok=5, queued=2)), named={"a"})
    assert value(found, "mdp_requests_total", service="a", outcome="ok") == 3
    assert value(found, "mdp_requests_total", service=OTHER, outcome="ok") == 9
    assert value(found, "mdp_queue_depth", service=OTHER) == 3
    assert not any(("service", "b") in labels for _, labels in found)


def test_what_was_counted_among_the_others_stays_there():
    selection = Selection(maximum=2)

    def choose(names):
        return selection.choose({name: {"served": True} for name in names.split()})

    assert choose(f"a {OTHER} b c") == {"a", "b"}
    assert choose("b c") == {"b"}  # c's counts are in the sum already
    assert choose("b c d") == {"b", "d"}
    assert choose("b d") == {"b", "d"}
    assert choose("b c") == {"b", "c"}  # c was gone in between, and its counts with it


def test_a_service_has_a_label_from_its_first_worker_on():
    selection = Selection()
    assert selection.choose({"a": {"served": False}}) == set()
    assert selection.choose({"a": {"served": True}}) == {"a"}


@pytest.fixture(scope="module")
def loaded():
    """A broker after a known load."""

    def work(request):
        if request[0] == b"fail":
            raise Failure(422, "no")
        return [request[0] * 2]

    with (
        web_broker() as broker,
        serving(broker.endpoint, "echo", work),
        serving(broker.endpoint, HOSTILE, work),
        Client(broker.endpoint, timeout=TIMEOUT_SECONDS) as client,
    ):
        for _ in range(20):
            client.request("echo", b"12345")
        client.request(HOSTILE, b"")
        for _ in range(3):
            with pytest.raises(ServiceError):
                client.request("echo", b"fail")
        with pytest.raises(ServiceNotFound):
            client.request("nothing", b"", wait=False)
        yield broker


def test_the_metrics_of_a_known_load(loaded):
    def settled():
        found = samples(text_string_to_metric_families(loaded.get("/metrics").text))
        # The last to be counted, and what the broker is asked for first.
        return found if ("mdp_dropped_requests_total", (("reason", "no-worker"),)) in found else None

    found = eventually(settled)
    assert value(found, "mdp_requests_total", service="echo", outcome="ok") == 20
    assert value(found, "mdp_request_duration_seconds_count", service="echo") == 20
    assert value(found, "mdp_request_bytes_total", service="echo") == 20 * 5 + 3 * 4
    assert value(found, "mdp_reply_bytes_total", service="echo") >= 20 * 10
    assert value(found, "mdp_requests_total", service=OTHER, outcome="404") == 1
    assert value(found, "mdp_requests_total", service=HOSTILE, outcome="ok") == 1
    assert value(found, "mdp_dropped_requests_total", reason="no-worker") == 1
    assert value(found, "mdp_workers", service="echo", state="idle") == 1
    assert value(found, "mdp_role_requests_total", role="") >= 24
    assert value(found, "mdp_connections") == 4  # two workers, one client, and the web server


def test_openmetrics_on_request(loaded):
    wanted = "application/openmetrics-text; version=1.0.0"
    answer = loaded.get("/metrics", headers={"accept": f"{wanted},text/plain;q=0.5"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = {each.name: each for each in openmetrics_parser.text_string_to_metric_families(answer.text)}
    assert families["mdp_requests"].type == "counter"
    assert families["mdp_request_queue_seconds"].type == "histogram"
    assert families["mdp_queue_depth"].type == "gauge"
    plain = loaded.get("/metrics").headers["content-type"]
    assert plain.startswith("text/plain; version=0.0.4")


def test_many_scrapes_are_one_question_to_the_broker(loaded):
    def asked():
        with Client(loaded.endpoint, timeout=TIMEOUT_SECONDS) as client:
            return client.call("mmi.stats")["mmi"]

    async def scrape():
        async with httpx.AsyncClient(base_url=loaded.url, timeout=TIMEOUT_SECONDS) as client:
            return await asyncio.gather(*(client.get("/metrics") for _ in range(50)))

    began, before = time.monotonic(), asked()
    assert all(answer.status_code == 200 for answer in asyncio.run(scrape()))
    after, took = asked(), time.monotonic() - began
    assert after - before <= 4 * (took + 2) + 2  # four for each second, and two of this test
