"""Flux gateways at a tree of three brokers: ranks 0 (root), 1 (a) and 2 (b)."""

import pytest
from support.flux_client import ANY, EVENT, FluxClient, Message
from support.flux_gateways import running_gateway, running_workers
from support.processes import eventually


@pytest.fixture
def clients(stack, tree):
    """A client of each rank."""
    return [stack.enter_context(gateway.client()) for gateway in tree]


def endpoint(gateway):
    return gateway.gateway.upstream.client.endpoint


def attribute(client, name, **settings):
    return client.rpc("attr.get", {"name": name}, **settings).json["value"]


def test_every_gateway_has_the_same_ranks(clients):
    for rank, client in enumerate(clients):
        assert attribute(client, "rank") == str(rank)
        assert attribute(client, "size") == "3"
        assert attribute(client, "hostlist") == "root,a,b"
        assert attribute(client, "tbon.level") == ("1" if rank else "0")
        assert attribute(client, "tbon.maxlevel") == "1"
        assert attribute(client, "tbon.descendants") == ("0" if rank else "2")
        assert [attribute(client, "rank", nodeid=each) for each in range(3)] == ["0", "1", "2"]
        assert client.rpc("attr.get", {"name": "rank"}, nodeid=3).a == 113


def where(rank):
    async def handler(request):
        return b"%d" % rank

    return handler


def test_a_request_goes_where_its_nodeid_says(stack, tree, clients):
    for rank in (0, 1):
        stack.enter_context(running_workers(endpoint(tree[rank]), where=where(rank)))
    eventually(lambda: all(client.rpc("where.x").a == 0 for client in clients))
    for client in clients:
        eventually(lambda: [client.rpc("where.x", nodeid=rank).payload for rank in (0, 1)] == [b"0", b"1"])  # noqa: B023
        missing = client.rpc("where.x", nodeid=2)
        assert (missing.a, missing.text) == (38, "No service matching where.x is registered")
        assert client.rpc("where.x", nodeid=3).a == 113
    assert [client.rpc("where.x").payload for client in clients[:2]] == [b"0", b"1"]
    assert clients[2].rpc("where.x").payload in (b"0", b"1")


def test_events_of_every_rank_have_one_order_at_all(clients):
    for client in clients:
        assert client.rpc("event.subscribe", {"topic": "x."}).a == 0
    for number in range(12):
        clients[number % 3].send(Message(EVENT, b"x.%d" % number, b"%d" % number))
    received = [[client.receive() for _ in range(12)] for client in clients]
    assert received[0] == received[1] == received[2]
    assert [event.a for event in received[0]] == list(range(1, 13))
    assert sorted(int(event.payload) for event in received[0]) == list(range(12))
    assert {(event.userid, event.rolemask & 1, event.b) for event in received[0]} == {
        (received[0][0].userid, 1, 0)
    }  # fmt: skip


def test_a_program_serves_the_whole_tree_and_learns_who_leaves(stack, tree, clients):
    a = clients[1]
    assert a.rpc("service.add", {"service": "zecho"}).a == 0
    with FluxClient(tree[2].path) as client:
        eventually(lambda: client.rpc("mmi.service", b"zecho").payload == b"200")
        client.request("zecho.say", tag=7)
        request = a.receive()
        assert (request.b, request.a, len(request.routes)) == (7, ANY, 2)
        a.respond(request, b"from rank 1")
        assert client.receive().payload == b"from rank 1"
        client.request("zecho.say", nodeid=2, tag=7)
        assert client.receive().a == 38
    notice = a.receive()
    assert (notice.topic, notice.routes[1]) == (b"zecho.disconnect", request.routes[1])


def test_the_gateway_at_rank_0_can_stop_first_and_come_back(stack, tree, clients, tmp_path):
    for client in clients[1:]:
        client.rpc("event.subscribe", {"topic": ""})
    path, broker = tree[0].path, endpoint(tree[0])
    tree[0].stop()
    again = stack.enter_context(running_gateway(broker, path, size=3))
    eventually(lambda: again.run(lambda: len(again.gateway._publisher._streams)) == 2)
    clients[1].send(Message(EVENT, b"x"))
    assert [client.receive().topic for client in clients[1:]] == [b"x", b"x"]
