"""`Retry`: its settings, and clients that send failed requests again."""

from http import HTTPStatus
from itertools import count
from random import Random

import pytest
from support.x1_client import Highest

from zmdp import AsyncClient, Client, Retry, ServiceError, Worker
from zmdp.clients import RetryLater
from zmdp.clients.calls.retry import pause_after
from zmdp.mdp.errors import SettingError
from zmdp.mdp.limits import Limits
from zmdp.testing import running_broker

QUICK = {"backoff": 0.001, "max_backoff": 0.01}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"attempts": 0}, "attempts must be 1 or more"),
        ({"attempts": 1.5}, "attempts is 1.5: it must be a whole number"),
        ({"backoff": float("nan")}, "pauses longer than 0 seconds"),
        ({"max_backoff": -1}, "pauses longer than 0 seconds"),
        ({"codes": 429}, "codes is 429: it must be a set of codes"),
        ({"codes": {"429"}}, "it must be a set of codes of errors, such as {429, 503}"),
    ],
)
def test_settings_out_of_range(settings, text):
    with pytest.raises(SettingError) as caught:
        Retry(**settings)
    assert text in str(caught.value)


def test_pauses_double_up_to_the_longest_and_vary():
    retry = Retry(backoff=1.0, max_backoff=5.0)
    assert [pause_after(attempts, retry, Highest()) for attempts in (1, 2, 3, 4, 10_000)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    pauses = {pause_after(1, retry, Random(seed)) for seed in range(100)}
    assert len(pauses) == 100
    assert all(0.5 <= pause <= 1.0 for pause in pauses)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_other_protocols_cannot_retry(kind):
    with pytest.raises(SettingError, match=r"retry requires protocol X1: MDP/0\.2 does not say why"):
        kind(retry=Retry(), protocol="0.2")
    with pytest.raises(SettingError, match="retry is 5: it must be a Retry"):
        kind(retry=5)


@pytest.fixture
def endpoint():
    """A broker at which `flaky` fails twice, with 503, for each of its callers, and `streams` before its first part."""
    attempts = {}

    def flaky(request):
        if next(attempts.setdefault(request[0], count(1))) < 3:
            raise ServiceError(503, "not now")
        return request

    def streams(request):
        yield flaky(request)
        raise ServiceError(503, "too late")

    with running_broker() as server:
        at = server.endpoints[0]
        with Worker("flaky", flaky, broker=at), Worker("streams", streams, broker=at):
            yield at


def test_a_client_retries(endpoint):
    with Client(endpoint, retry=Retry(attempts=3, **QUICK)) as client:
        assert client.request("flaky", b"request") == [b"request"]
        assert client.submit("flaky", b"submit").result() == [b"submit"]
        stream = client.stream("streams", b"stream")
        assert next(stream) == [b"stream"]
        with pytest.raises(ServiceError, match="too late"):
            next(stream)
        with pytest.raises(ServiceError, match="not now"):
            client.request("flaky", b"once", retry=Retry(attempts=1))
    with Client(endpoint) as client:
        assert client.call("flaky", "call", retry=Retry(codes=[HTTPStatus.SERVICE_UNAVAILABLE], **QUICK)) == "call"
        with pytest.raises(ServiceError, match="not now"):
            client.request("flaky", b"never")


def test_a_full_queue_is_waited_for():
    """The broker refuses requests beyond the first (429) until a worker comes, and none of them fails."""
    with running_broker(limits=Limits(max_queue=1)) as server, Client(server.endpoints[0], timeout=30.0) as client:
        waiting = client.submit("echo", b"first")
        futures = [client.submit("echo", b"%d" % n, retry=Retry(attempts=10_000, **QUICK)) for n in range(20)]
        with pytest.raises(RetryLater):
            client.request("echo", b"without")
        with Worker("echo", list, broker=server.endpoints[0]):
            assert waiting.result() == [b"first"]
            assert [each.result() for each in futures] == [[b"%d" % n] for n in range(20)]
