"""Asking a broker whether it takes requests."""

import select

import pytest
from support.access import Folder
from support.processes import TIMEOUT_SECONDS, free_endpoint
from support.router import Router
from support.x1_client import DISCONNECT, HEARTBEAT

from zmdp.mdp.errors import SettingError
from zmdp.mdp.transport.failover import PROBE_TIMEOUT_SECONDS
from zmdp.mdp.transport.probe import Probe
from zmdp.testing import running_broker


@pytest.fixture
def probing(context):
    """Start probes, which are closed at the end."""
    probes = []

    def start(endpoint, keys=None):
        probes.append(Probe(endpoint, context, keys))
        probes[-1].outcome(100.0)  # from then on the descriptor tells
        return probes[-1]

    yield start
    for probe in probes:
        probe.close()


def outcome(probe, now=100.1):
    """Wait for the descriptor until the probe has an outcome."""
    poller = select.poll()
    poller.register(probe.descriptor, select.POLLIN)
    while (found := probe.outcome(now)) is None:
        assert poller.poll(TIMEOUT_SECONDS * 1000)
    return found


def test_a_broker_that_takes_requests(probing):
    with running_broker() as server:
        assert outcome(probing(server.endpoints[0])) is True


def test_a_broker_with_keys(probing, tmp_path):
    """It answers every peer that it admits, whatever its role may do."""
    folder = Folder(tmp_path)
    with folder.broker() as server:
        assert outcome(probing(server.endpoints[0], folder.keys("resizer"))) is True
        stranger = probing(server.endpoints[0], folder.keys("stranger"))
        assert outcome(probing(server.endpoints[0], folder.keys("shop"))) is True
        assert stranger.outcome(102.0) is False


@pytest.mark.parametrize(
    ("answer", "expected"), [(HEARTBEAT, True), (DISCONNECT, False)], ids=["HEARTBEAT", "DISCONNECT"]
)
def test_answers(probing, answer, expected):
    with Router() as router:
        probe = probing(router.endpoint)
        identity, *message = router.recv()
        assert message == HEARTBEAT
        router.send(identity, b"noise")
        router.send(identity, b"", b"MDPWX1")
        router.send(identity, b"", b"MDPCX1", b"\x06")
        router.send(identity, *answer)
        assert outcome(probe) is expected
        assert probe.outcome(1000.0) is expected


def test_a_broker_that_starts_in_the_meantime(probing):
    endpoint = free_endpoint()
    probe = probing(endpoint)
    with running_broker(endpoint):
        assert outcome(probe) is True


@pytest.mark.parametrize("where", [free_endpoint, lambda: "ipc:///tmp/no broker is here"], ids=["tcp", "ipc"])
def test_nobody_listens(probing, where):
    probe = probing(where())
    assert probe.outcome(100.0 + PROBE_TIMEOUT_SECONDS - 0.001) is None
    assert probe.outcome(100.0 + PROBE_TIMEOUT_SECONDS) is False


def test_a_broker_that_is_silent(probing):
    with Router() as router:
        probe = probing(router.endpoint)
        identity, *_ = router.recv()
        assert probe.outcome(102.0) is False
        router.send(identity, *HEARTBEAT)
        assert probe.outcome(102.0) is False


def test_a_probe_that_was_closed(probing):
    probe = probing(free_endpoint())
    for _ in range(2):
        probe.close()
        assert probe.outcome(100.1) is None


def test_an_invalid_endpoint(context):
    with pytest.raises(SettingError, match="'nowhere' is not a valid endpoint"):
        Probe("nowhere", context)
