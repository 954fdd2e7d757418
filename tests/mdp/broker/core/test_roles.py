"""What roles may do at a broker, and that nothing passes from one to another (C45)."""

import json

import pytest
from support import turns
from support import x1_messages as x1
from support.x1_messages import (
    answer,
    cancel,
    client_heartbeat,
    credit,
    disconnected,
    failure,
    feed,
    final,
    heartbeat,
    leave,
    partial,
    release,
    request,
    told,
    work,
)

from zmdp.mdp import wire
from zmdp.mdp.broker.core.drops import Drop
from zmdp.mdp.broker.core.journal import Refusal
from zmdp.mdp.broker.core.roles import MAX_REMEMBERED, Role
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.security.access import Permissions
from zmdp.mdp.wire import C01, C02, W02


def broker_with(**roles):
    """A broker with these roles; `shop` may call `echo`, and `farm` may offer it."""
    given = {
        "shop": {"call": ("echo",)},
        "farm": {"offer": ("echo", "sum")},
        "titanic": {"call": ("*",), "on_behalf": True},
        "ops": {"call": ("*",), "admin": True},
        **roles,
    }
    broker = Broker(now=0, first_address=1)
    turns.grant(broker, {name: Permissions(name=name, **permissions) for name, permissions in given.items()}, now=0)
    return broker


def receive(broker, role, message):
    return told(turns.receive(broker, message, 0, broker.roles.named(role)))


def ready(service=b"echo", worker=b"w", **settings):
    return x1.ready(worker, service, **settings)


def options_of(work):
    return json.loads(work[5] or b"{}")


def error(code, client=b"c", number=1):
    """The beginning of an ERROR to an X1 client."""
    return client, "ERROR", number, code


# ── what may be called and offered ───────────────────────────────────────────────────────────────────────────────────


def test_a_request_that_is_not_allowed_leaves_no_trace():
    broker = broker_with()
    assert receive(broker, "shop", request(service=b"secret"))[0][:4] == error(403)
    assert receive(broker, "shop", [b"d", C02, b"\x01", b"secret", b"x"]) == []
    directory, registry = broker.directory, broker.registry
    assert (directory.services, directory.clients, registry.request_bytes, registry.queued) == ({}, {}, 0, 0)
    assert broker.stats.dropped == {Drop.NOT_ALLOWED: 2}


def refusal(role):
    text = f"role {role} may not offer 'echo': the broker's access file decides"
    return disconnected(b"w", text.encode())


@pytest.mark.parametrize(("role", "named"), [("shop", "shop"), ("nobody-knows-it", "(none)"), ("", "(none)")])
def test_a_worker_that_may_not_offer_its_service_is_disconnected(role, named):
    broker = broker_with()
    assert receive(broker, role, ready()) == [refusal(named)]
    assert broker.stats.disconnected == {Refusal.NOT_ALLOWED: 1}
    assert (broker.directory.services, broker.directory.workers) == ({}, {})


def test_a_worker_of_a_dialect_without_texts_is_only_disconnected():
    broker = broker_with()
    assert receive(broker, "shop", [b"w", W02, b"\x01", b"echo"]) == [wire.disconnect((b"w",), W02)]


def test_permissions_are_remembered_for_a_bounded_number_of_services():
    role = Role("shop", Permissions(name="shop", call=("a*",)))
    for number in range(2 * MAX_REMEMBERED):
        assert role.may_call(b"a%d" % number)
        assert not role.may_offer(b"a%d" % number)
    assert max(len(role._calls), len(role._offers)) <= MAX_REMEMBERED


def test_new_permissions_hold_at_once():
    broker = broker_with()
    receive(broker, "farm", ready())
    receive(broker, "farm", ready(b"sum", b"v"))
    receive(broker, "shop", request())
    granted = {"farm": Permissions(name="farm", offer=("sum",)), "shop": Permissions(name="shop", call=("sum",))}
    assert told(turns.grant(broker, granted, now=0)) == [refusal("farm")]
    assert broker.registry.queued == 1  # what was accepted goes on
    assert receive(broker, "shop", request(2))[0][:4] == error(403, number=2)
    assert receive(broker, "ops", request(client=b"o"))[0][:4] == error(403, client=b"o")  # no longer a role


# ── who asks ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "options",
    [
        b"",
        b"{}",
        b' { "headers":{"a":"b"} } ',
        b'{"ttl":5000}',
        b'{"user":"ops","admin":true,"headers":{}}',
        b'{"us\\u0065r":1}',
    ],
)
def test_a_worker_is_told_who_asks(options):
    broker = broker_with()
    receive(broker, "farm", ready())
    (sent,) = receive(broker, "shop", request(options=options))
    expected = {name: value for name, value in json.loads(options or b"{}").items() if name != "admin"}
    assert options_of(sent) == {**expected, "user": "shop"}


def test_a_worker_is_told_that_an_admin_asks():
    broker = broker_with()
    receive(broker, "farm", ready())
    (sent,) = receive(broker, "ops", request())
    assert options_of(sent) == {"user": "ops", "admin": True}


def test_a_client_that_does_not_speak_x1_has_a_user_too():
    broker = broker_with()
    receive(broker, "farm", ready(dialect=True))
    (sent,) = receive(broker, "shop", [b"c", C02, b"\x01", b"echo", b"x"])
    assert options_of(sent) == {"user": "shop", "dialect": "0.2"}


def test_without_access_control_nobody_can_claim_to_be_a_user():
    broker = Broker(now=0, first_address=1)
    claims = b'{"user":"ops","admin":true,"headers":{"a":"b"}}', b'{"user":"ops","on_behalf":"shop"}'
    asked = [request(number, options=options) for number, options in enumerate(claims)]
    assert feed(broker, ready(credit=2), *asked) == [work(1, options=b'{"headers":{"a":"b"}}'), work(2)]


def test_a_role_may_ask_on_behalf_of_another():
    broker = broker_with()
    receive(broker, "farm", ready())
    (sent,) = receive(broker, "titanic", request(options=b'{"on_behalf":"shop","user":"ops"}'))
    assert options_of(sent) == {"user": "shop"}
    (refused,) = receive(broker, "titanic", request(2, service=b"sum", options=b'{"on_behalf":"shop"}'))
    assert refused[:4] == error(403, number=2)  # shop may not call it
    (refused,) = receive(broker, "titanic", request(3, options=b'{"on_behalf":"nobody"}'))
    assert refused[:4] == error(403, number=3)


def test_a_role_without_that_permission_may_not_ask_on_behalf_of_another():
    broker = broker_with()
    receive(broker, "farm", ready())
    for number, user in enumerate(("ops", "shop", "nobody")):
        asked = request(number, options=b'{"on_behalf":"%s"}' % user.encode())
        assert receive(broker, "shop", asked)[0][:4] == error(403, number=number)
    assert receive(broker, "shop", request(9, options=b'{"on_behalf":1}'))[0][:4] == error(400, number=9)


# ── nothing passes from one role to another ──────────────────────────────────────────────────────────────────────────


def held_by_a_worker():
    broker = broker_with()
    receive(broker, "farm", ready())
    receive(broker, "shop", request())
    return broker


@pytest.mark.parametrize(
    "message",
    [
        final(),
        partial(),
        failure(),
        release(),
        credit(0),
        heartbeat(),
        leave(),
        ready(),
        [b"w", W02, b"\x06"],
        [b"w", W02, b"\x04", b"1", b"", b"forged"],
        cancel(),
        client_heartbeat(),
        request(2),
        request(2, options=b"no JSON"),
        [b"c", C02, b"\x01", b"echo", b"x"],
    ],
)
def test_what_another_role_says_about_a_peer_is_ignored_and_counted(message):  # C45
    broker = held_by_a_worker()
    before = broker.directory.workers[b"w"].last_seen, broker.registry.request_bytes
    assert turns.receive(broker, message, 1, broker.roles.named("ops")) == []
    assert (broker.stats.other_role, broker.stats.invalid) == (1, {})
    assert (broker.directory.workers[b"w"].last_seen, broker.registry.request_bytes) == before
    assert receive(broker, "farm", final(body=b"right")) == [answer(body=b"right")]


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_limits_of_a_role_are_its_own():
    broker = broker_with(shop={"call": ("echo",), "outstanding": 1}, mall={"call": ("echo",)})
    assert receive(broker, "shop", request()) == []
    (refused,) = receive(broker, "shop", request(client=b"d"))  # another connection of the same role
    assert refused[:4] == error(429, client=b"d")
    assert receive(broker, "mall", request(client=b"m")) == []
    receive(broker, "shop", cancel())
    assert receive(broker, "shop", request(client=b"d")) == []


def test_what_is_collected_for_a_role_counts():
    broker = broker_with(shop={"call": ("echo",), "request_bytes": 10_000})
    receive(broker, "farm", ready())
    receive(broker, "shop", [b"c", b"", C01, b"echo", b"x"])
    for _ in range(10):
        receive(broker, "farm", partial(body=b"x" * 1000))
    assert broker.stats.dropped == {Drop.ROLE_MEMORY_FULL: 1}
    assert broker.roles.named("shop").request_bytes == 0


def test_what_a_role_uses_is_given_back():
    broker = broker_with()
    role = broker.roles.named("shop")
    receive(broker, "shop", request())
    receive(broker, "shop", request(2))
    assert (role.accepted - role.ended, role.running) == (2, 0)
    receive(broker, "farm", ready())
    assert (role.accepted - role.ended, role.running) == (2, 1)
    receive(broker, "farm", final())
    receive(broker, "shop", cancel(2))
    assert (role.accepted - role.ended, role.running, role.request_bytes) == (0, 0, 0)


# ── MMI ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def ask(broker, role, name, body=b""):
    (answer,) = receive(broker, role, [b"q", C02, b"\x01", name, body])
    return answer[-1]


def test_mmi_tells_a_role_of_what_it_may_call_or_offer():
    broker = broker_with(shop={"call": ("echo",), "mmi": "service"})
    receive(broker, "farm", ready())
    receive(broker, "farm", ready(b"sum", b"v"))
    assert ask(broker, "shop", b"mmi.service", b"echo") == b"200"
    assert ask(broker, "shop", b"mmi.service", b"sum") == b"403"
    assert [row["name"] for row in json.loads(ask(broker, "shop", b"mmi.services"))["services"]] == ["echo"]
    assert [row["name"] for row in json.loads(ask(broker, "ops", b"mmi.services"))["services"]] == ["echo", "sum"]
    assert len(json.loads(ask(broker, "ops", b"mmi.workers"))["workers"]) == 2


QUESTIONS = [b"mmi.service", b"mmi.services", b"mmi.workers", b"mmi.stats", b"mmi.broker", b"mmi.brokers", b"mmi.else"]


@pytest.mark.parametrize(("mmi", "allowed"), [("none", []), ("service", QUESTIONS[:2]), ("all", QUESTIONS)])
def test_mmi_is_a_permission(mmi, allowed):
    broker = broker_with(shop={"mmi": mmi})
    for name in QUESTIONS:
        (answered,) = receive(broker, "shop", request(service=name))
        expected = (b"c", "FINAL", 1) if name in allowed else error(403)
        assert answered[: len(expected)] == expected
