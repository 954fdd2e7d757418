"""The page of linked brokers, and its metrics."""

from support.processes import TIMEOUT_SECONDS, eventually
from support.processes import broker as plain_broker
from support.web import serving, web_broker

from zmdp.clients import Client


def test_a_link_and_what_passes_over_it():
    with (
        plain_broker("--name", "other<b>") as (_, endpoint),
        web_broker("--name", "mine", "--peer", endpoint) as broker,
        serving(endpoint, "echo", list),
        Client(broker.endpoint, timeout=TIMEOUT_SECONDS) as client,
    ):
        for _ in range(5):
            assert client.request("echo", b"x") == [b"x"]
        page = eventually(lambda: (text := broker.get("/brokers").text).count('<td class="number">5</td>') and text)
        assert "<td>other&lt;b&gt;</td>" in page
        assert '<span class="state up">up</span>' in page
        assert "other<b>" not in page
        sent = 'mdp_link_sent_total{broker="other<b>",kind="peer"} 5.0'
        metrics = eventually(lambda: sent in (text := broker.get("/metrics").text) and text)
        assert 'mdp_link_up{broker="other<b>",kind="peer"} 1.0' in metrics
        assert 'mdp_build_info{broker="mine",version=' in metrics
        broker.shows("/", "mine")


def test_of_two_links_to_a_broker_one_stands_by():
    with (
        plain_broker("--name", "other") as (_, endpoint),
        web_broker("--name", "mine", "--peer", endpoint, "--peer", endpoint) as broker,
    ):
        page = eventually(lambda: "standby" in (text := broker.get("/brokers").text) and text)
        assert [page.count(f'<span class="state {state}">') for state in ("up", "standby")] == [1, 1]


def test_the_services_of_linked_brokers_are_on_one_page():
    with (
        plain_broker("--name", "other") as (_, endpoint),
        web_broker("--name", "mine", "--peer", endpoint) as broker,
        serving(endpoint, "far", list),
        serving(broker.endpoint, "near", list),
        serving(broker.endpoint, "spark.control.web", list),
    ):
        page = eventually(
            lambda: (
                all(name in (text := broker.get("/services").text) for name in ("far", "near", "control.web")) and text
            )
        )
        row = page.partition('<tr id="service-far">')[2].partition("</tr>")[0]
        assert '1<span class="faint"> / 1 hop</span>' in row
        assert '<tr id="service-near">' in page
        assert '<tr id="service-spark.control.web">' not in page
        assert "Control services of Spark's drivers: 1" in page
        assert "<title>Services · mine</title>" in page
        assert "<title>near · Services · mine</title>" in broker.get("/service?name=near").text


def test_a_service_that_only_other_brokers_have_has_a_page():
    with (
        plain_broker("--name", "other") as (_, endpoint),
        web_broker("--name", "mine", "--peer", endpoint) as broker,
        serving(endpoint, "far", list),
    ):
        broker.shows("/services", "far")
        at = "Its workers are at other brokers, 1 hop away: they take 1 at a time."
        assert "No request has ended yet" in broker.shows("/service?name=far", at)
