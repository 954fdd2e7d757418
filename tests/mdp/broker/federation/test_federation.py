"""A broker that is made without links to others."""

import pytest
from support import turns
from support.x1_messages import client_heartbeat, final, ready, request

from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.errors import SettingError


@pytest.fixture
def broker():
    broker = Broker(now=0, first_address=1, federation=False)
    turns.receive(broker, ready(b"w"), 0)
    return broker


def test_it_serves_clients(broker):
    (work,) = turns.receive(broker, request(1), 0)
    assert work[0] == b"w"
    (reply,) = turns.receive(broker, final(1), 0)
    assert reply[0] == b"c"
    assert turns.receive(broker, client_heartbeat(), 0) == [client_heartbeat()]


@pytest.mark.parametrize("header", [b"MDPCL1", b"MDPWL1"])
def test_messages_of_other_brokers_are_invalid(broker, header):
    assert turns.receive(broker, [b"x", b"", header, b"\x09"], 0) == []
    assert broker.stats.invalid == {"no-header": 1}


def test_it_opens_no_links(broker):
    with pytest.raises(SettingError, match="without links"):
        broker.add_link("peer", None, "tcp://b")
    turns.link_opened(broker, b"uplink", 0)
    turns.link_failed(broker, b"uplink", "nothing is listening there", 0)
    assert broker.federation.describe(0) == []


def test_it_grants_probes_loses_drains_and_closes(broker):
    assert turns.receive(broker, request(1), 0)
    broker.grant({}, 0)
    assert broker.watch.find("17") is None
    broker.probe(b"c", 0)
    assert broker.take_messages()
    broker.drain(0)
    broker.disconnected(b"c", 0, 0)
    broker.close(0)
    broker.take_messages()
    assert broker.closed
