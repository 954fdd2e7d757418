"""Whose a request is: Titanic at a broker with access control (docs/how-to/security.md), frames written by hand."""

import json
import threading
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
import zmq
from support.peers import Client, OldClient, X1Client, X1Worker
from support.processes import eventually
from support.titanics import LIMITS, connected, row, running_bench, serving, stored

from zmdp.mdp.errors import SettingError
from zmdp.mdp.security.access import load
from zmdp.mdp.security.keys import create_keys, load_keys
from zmdp.testing import running_broker
from zmdp.titanic import enqueue

ROLES = {
    "titanic": {"call": ["*"], "offer": ["titanic.*"], "on_behalf": True},
    "shop": {"call": ["titanic.*", "echo", "shop-only"]},
    "web": {"call": ["titanic.*", "echo"]},
    "ops": {"call": ["titanic.*"], "admin": True},
    "works": {"offer": ["*"]},
}
UNKNOWN = b"0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """The folder of the access file, with a key for each role."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("broker", *ROLES):
        create_keys(name, folder)
    access(folder, ROLES)
    return folder


def access(folder, roles):
    """Write the access file."""
    lines = ['secret_key = "broker.key_secret"']
    for name, settings in roles.items():
        lines += [f"[roles.{name}]", f'keys = ["{name}.key"]']
        lines += [f"{setting} = {json.dumps(value)}" for setting, value in settings.items()]
    (folder / "access.toml").write_text("\n".join(lines))


@contextmanager
def relayed(context, endpoint, keys):
    """Yield an endpoint without keys, whose connections to the broker use these keys."""
    stop = context.socket(zmq.PAIR)
    stop.bind("inproc://stop-relaying")
    front = context.socket(zmq.ROUTER)
    front.linger = 0
    port = front.bind_to_random_port("tcp://127.0.0.1")

    def relay():
        backs = {}
        poller = zmq.Poller()
        stopping = context.socket(zmq.PAIR)
        stopping.connect("inproc://stop-relaying")
        poller.register(stopping, zmq.POLLIN)
        poller.register(front, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if stopping in ready:
                break
            if front in ready:
                peer, *message = front.recv_multipart()
                if peer not in backs:
                    backs[peer] = context.socket(zmq.DEALER)
                    backs[peer].linger = 0
                    keys.apply(backs[peer])
                    backs[peer].connect(endpoint)
                    poller.register(backs[peer], zmq.POLLIN)
                backs[peer].send_multipart(message)
            for peer, back in backs.items():
                if back in ready:
                    front.send_multipart([peer, *back.recv_multipart()])
        for each in (stopping, front, *backs.values()):
            each.close()

    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        stop.send(b"")
        thread.join()
        stop.close()


@pytest.fixture
def site(keys, url):
    """A broker with access control and a Titanic; `site.peer(role, kind)` connects a peer with a role's key."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        broker = stack.enter_context(
            running_broker(limits=LIMITS, drain_timeout=0.0, context=context, access=load(keys / "access.toml"))
        )
        endpoint = broker.endpoints[0]

        def keys_of(role):
            return load_keys(keys / f"{role}.key_secret", keys / "broker.key")

        def peer(role, kind=X1Client):
            mine = keys_of(role)
            options = {zmq.CURVE_PUBLICKEY: mine.public, zmq.CURVE_SECRETKEY: mine.secret,
                       zmq.CURVE_SERVERKEY: mine.server}  # fmt: skip
            made = kind(context, endpoint, options=options)
            stack.callback(made.close)
            return made

        titanic = stack.enter_context(relayed(context, endpoint, keys_of("titanic")))
        stack.enter_context(serving(titanic, url))
        yield SimpleNamespace(peer=peer, broker=broker, url=url)
        assert broker.broker.stats.internal_errors == 0


def ask(client, service, *body, **options):
    """Send a request to Titanic and return the frames of its answer, without PARTIALs."""
    if isinstance(client, X1Client):
        client.request(service, *body, options=json.dumps(options).encode() if options else b"")
        start = 4
    else:
        client.request(service, *body)
        start = 3
    return client.recv()[start:]


def submit(client, *body, service=b"later", **options):
    status, uuid = ask(client, b"titanic.request", service, *(body or (b"body",)), **options)
    assert status == b"200"
    return uuid


def reply(client, uuid, **options):
    return ask(client, b"titanic.reply", uuid, **options)


def close(client, uuid):
    return ask(client, b"titanic.close", uuid)


def ended(client, uuid):
    """Return the first answer other than 300."""
    return eventually(lambda: None if (frames := reply(client, uuid)) == [b"300"] else frames)


def known(url, uuid):
    return uuid.decode() in {str(each["uuid"]).replace("-", "") for each in stored(url)["requests"]}


def worker(site, service):
    made = site.peer("works", X1Worker)
    made.ready(service)
    return made


# ── whose it is ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [X1Client, Client, OldClient])
def test_a_request_belongs_to_the_role_that_submits_it(site, kind):
    uuid = submit(site.peer("shop", kind))
    assert row(site.url, uuid.decode())["owner"] == "shop"


def test_nobody_can_submit_in_the_name_of_another_role(site):
    uuid = submit(site.peer("web"), user="shop", admin=True)
    assert row(site.url, uuid.decode())["owner"] == "web"


@pytest.mark.parametrize("kind", [X1Client, Client, OldClient])
@pytest.mark.parametrize("state", ["pending", "done"])
def test_to_other_roles_a_request_is_unknown(site, kind, state):
    shop, web = site.peer("shop", kind), site.peer("web", kind)
    uuid = submit(shop, service=b"echo")
    if state == "done":
        echo = worker(site, b"echo")
        address, _ = echo.request(b"body")
        echo.final(address, b"reply")
        assert ended(shop, uuid) == [b"200", b"reply"]
    assert (
        reply(web, uuid)
        == reply(web, UNKNOWN)
        == ([b"400 unknown uuid", b"unknown-uuid"] if kind is X1Client else [b"400"])
    )
    assert close(web, uuid) == close(web, UNKNOWN) == [b"200"]
    assert reply(shop, uuid) == ([b"300"] if state == "pending" else [b"200", b"reply"])
    assert close(shop, uuid) == [b"200"]
    assert not known(site.url, uuid)


@pytest.mark.parametrize("options", [{"wait": True}, {"wait": True, "partials": True}, {"partials": True}], ids=str)
def test_other_roles_cannot_watch_a_request(site, options):
    shop, web = site.peer("shop"), site.peer("web")
    uuid = submit(shop, service=b"echo")
    echo = worker(site, b"echo")
    address, _ = echo.request(b"body")
    echo.partial(address, b"part")
    eventually(lambda: stored(site.url)["parts"])
    assert reply(web, uuid, **options) == reply(web, UNKNOWN, **options) == [b"400 unknown uuid", b"unknown-uuid"]


def test_admins_can_fetch_and_close_what_belongs_to_others(site):
    shop, ops = site.peer("shop"), site.peer("ops")
    uuid = submit(shop)
    assert reply(ops, uuid) == [b"300"]
    assert close(ops, uuid) == [b"200"]
    assert reply(shop, uuid) == reply(ops, uuid) == [b"400 unknown uuid", b"unknown-uuid"]


def test_only_admins_reach_a_request_without_an_owner(site):
    with connected(site.url) as connection:
        uuid = enqueue(connection, "later").encode()
    assert reply(site.peer("shop"), uuid) == [b"400 unknown uuid", b"unknown-uuid"]
    assert close(site.peer("shop"), uuid) == [b"200"]
    assert reply(site.peer("ops"), uuid) == [b"300"]


def test_without_access_control_a_request_with_an_owner_is_out_of_reach(url):
    with running_bench() as bench, serving(bench.endpoint, url):
        with connected(url) as connection:
            theirs = enqueue(connection, "later", owner="shop").encode()
            ours = enqueue(connection, "later").encode()
        client = bench.x1_client()
        assert reply(client, theirs) == [b"400 unknown uuid", b"unknown-uuid"]
        assert reply(client, ours) == [b"300"]


# ── executed ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_is_executed_on_behalf_of_its_owner(site):
    shop = site.peer("shop")
    uuid = submit(shop, service=b"echo", headers={"a": "b"})
    echo = worker(site, b"echo")
    address, options = echo.request(b"body")
    told = json.loads(options)
    assert told["user"] == "shop"
    assert "admin" not in told
    assert told["headers"]["a"] == "b"
    echo.final(address, b"reply")
    assert ended(shop, uuid) == [b"200", b"reply"]


def test_a_request_without_an_owner_is_executed_as_titanic(site):
    with connected(site.url) as connection:
        enqueue(connection, "echo", b"body")
        enqueue(connection, "echo", b"body", owner="web")
    echo = worker(site, b"echo")
    users = []
    for _ in range(2):
        address, options = echo.request(b"body")
        users.append(json.loads(options)["user"])
        echo.final(address, b"reply")
    assert users == ["titanic", "web"]


@pytest.mark.parametrize(("role", "owner"), [("web", "web"), (None, "nobody-any-more")])
def test_what_the_owner_may_not_call_fails_at_once(site, role, owner):
    """Also if it has retries, and if its role does not exist any more."""
    if role:
        uuid = submit(site.peer(role), service=b"shop-only", retries=5, backoff=1).decode()
    else:
        with connected(site.url) as connection:
            uuid = enqueue(connection, "shop-only", owner=owner, retries=5, backoff=0.001)
    worker(site, b"shop-only")
    answer = ended(site.peer("ops"), uuid.encode())
    assert answer[0].startswith(
        f"500 on behalf of {owner}: the role on whose behalf role titanic asks may not call".encode()
    )
    assert answer[1:] == [b"403", b"shop-only"]
    found = row(site.url, uuid)
    assert (found["state"], found["attempts"], found["failures"], found["code"]) == ("failed", 1, 0, 403)


@pytest.mark.parametrize("owner", ["", "x" * 65, "a\0b", 3], ids=repr)
def test_an_owner_must_be_text(url, owner):
    with connected(url) as connection, pytest.raises(SettingError, match="owner must be text of 1 to 64 bytes"):
        enqueue(connection, "echo", owner=owner)


# ── schedules ────────────────────────────────────────────────────────────────────────────────────────────────────────


def add_schedule(client, name=b"nightly"):
    return ask(client, b"titanic.schedule", b"add", name, b"echo", b"body", cron="0 2 * * *")


def schedules_of(client):
    status, listed = ask(client, b"titanic.schedule", b"ls")
    assert status == b"200"
    return [(each["name"], each["owner"]) for each in json.loads(listed)]


def test_a_schedule_belongs_to_the_role_that_added_it(site):
    shop, web, ops = site.peer("shop"), site.peer("web"), site.peer("ops")
    assert add_schedule(shop) == add_schedule(shop, b"weekly") == add_schedule(web) == [b"200"]
    assert schedules_of(shop) == [("nightly", "shop"), ("weekly", "shop")]
    assert schedules_of(web) == [("nightly", "web")]
    assert schedules_of(ops) == [("nightly", "shop"), ("nightly", "web"), ("weekly", "shop")]
    for action in (b"pause", b"resume", b"run", b"rm"):
        unknown = ask(web, b"titanic.schedule", action, b"never-added")
        assert unknown == [b"400 there is no schedule never-added", b"malformed"]
        assert ask(web, b"titanic.schedule", action, b"weekly") == [b"400 there is no schedule weekly", b"malformed"]
        refused = ask(web, b"titanic.schedule", action, b"weekly", owner="shop")
        assert refused == [b"400 only admins can change what belongs to others", b"malformed"]
    assert ask(web, b"titanic.schedule", b"rm", b"nightly", owner="web") == [b"200"]
    assert schedules_of(ops) == [("nightly", "shop"), ("weekly", "shop")]


def test_admins_change_the_schedules_of_others(site):
    shop, web, ops = site.peer("shop"), site.peer("web"), site.peer("ops")
    add_schedule(shop)
    assert ask(ops, b"titanic.schedule", b"pause", b"nightly") == [b"200"]
    add_schedule(web)
    several = ask(ops, b"titanic.schedule", b"rm", b"nightly")
    assert several == [b"400 several roles have a schedule nightly: set owner", b"malformed"]
    assert ask(ops, b"titanic.schedule", b"rm", b"nightly", owner="web") == [b"200"]
    assert schedules_of(ops) == [("nightly", "shop")]


def test_what_a_schedule_submits_is_executed_on_behalf_of_its_owner(site):
    shop, web, ops = site.peer("shop"), site.peer("web"), site.peer("ops")
    echo = worker(site, b"echo")
    add_schedule(shop)
    status, uuid = ask(ops, b"titanic.schedule", b"run", b"nightly")
    assert status == b"200"
    address, options = echo.request(b"body")
    assert json.loads(options)["user"] == "shop"
    echo.final(address, b"reply")
    assert ended(shop, uuid) == [b"200", b"reply"]
    assert reply(web, uuid) == [b"400 unknown uuid", b"unknown-uuid"]
