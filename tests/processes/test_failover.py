"""Linked brokers as processes that are killed and drained: what waits, what is finished, and what commands do.

`tests/faults/test_failover.py` has them under load.
"""

import json
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.access import Folder
from support.processes import TIMEOUT_SECONDS, broker, eventually, free_endpoint, process

from zmdp.clients import Client, RequestRejected
from zmdp.workers import Worker

HERE = Path(__file__).parent
BEATS = {"heartbeat": 0.5, "liveness": 240}
"""Only the end of a connection is noticed, however slow the machine is."""
OPTIONS = ("--heartbeat", "0.5", "--liveness", "240")
kill, drain = signal.SIGKILL, signal.SIGTERM


class Brokers:
    """Brokers in processes; `links` has the options of each, with other brokers' names in place of endpoints."""

    def __init__(self, ends, links, *options):
        self._ends = ends
        self._options = (*OPTIONS, *options)
        self.endpoints = {name: free_endpoint() for name in links}
        self._links = {
            name: [self._with_endpoint(option) for option in options] for name, options in links.items()
        }  # fmt: skip
        self.processes = {}
        for name in links:
            self.start(name)

    def _with_endpoint(self, option):
        name, *key = option.split("=")
        return "=".join([self.endpoints.get(name, name), *key])

    def start(self, name):
        options = ("--name", name, *self._links[name], *self._options)
        self.processes[name], _ = self._ends.enter_context(broker(*options, bind=self.endpoints[name]))

    def end(self, name, how):
        assert self.processes[name].end(how) == (0 if how is drain else -kill)

    def restart(self, name, how):
        """End a broker and start it again; return once it is linked."""
        self.end(name, how)
        self.start(name)
        self.await_links(name)

    def await_links(self, name, **keys):
        """Wait until a broker reaches all the others."""
        with Client(self.endpoints[name], timeout=TIMEOUT_SECONDS, **BEATS, **keys) as client:
            eventually(lambda: reached(client) == self.endpoints.keys() - {name})


def reached(client):
    """Return the names of the brokers that the client's broker reaches."""
    return {row["name"] for row in json.loads(client.request("mmi.brokers")[0])["brokers"]}


def pair(ends, *options):
    return Brokers(ends, {"a": ["--peer", "b"], "b": ["--peer", "a"]}, *options)


def at(*endpoints):
    """Return the options of a command that knows several brokers."""
    return [option for endpoint in endpoints for option in ("--broker", endpoint)]


@pytest.mark.parametrize(("worker_at", "ends_first"), [("a", "a"), ("b", "b"), ("b", "a")])
def test_a_long_request_is_finished_once_while_its_broker_drains(tmp_path, worker_at, ends_first):
    gate, begun = tmp_path / "gate", tmp_path / "begun"
    gate.touch()
    with ExitStack() as ends:
        brokers = pair(ends)
        a, b = brokers.endpoints.values()
        order = (a, b) if worker_at == "a" else (b, a)
        brokers.await_links("a")
        ends.enter_context(
            process("mdworker", "services:recorded", "--service", "recorded", *at(*order), *OPTIONS, cwd=HERE)
        )
        client = ends.enter_context(Client([a, b], timeout=TIMEOUT_SECONDS, **BEATS))
        reply = client.submit("recorded", str(gate).encode(), str(begun).encode())
        eventually(begun.exists)
        draining = brokers.processes[ends_first]
        draining.send_signal(drain)
        draining.line("draining: ")
        ends.enter_context(Worker("echo", list, broker=[a, b], **BEATS))
        assert client.request("echo", b"new") == [b"new"]
        assert client.endpoint == (b if ends_first == "a" else a)
        assert draining.poll() is None
        assert not reply.done()
        gate.unlink()
        assert reply.result() == [b"done"]
        assert draining.wait() == 0
        assert begun.read_text() == "begun\n"


# ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_commands_with_several_brokers(tmp_path, in_this_process):
    with ExitStack() as ends:
        brokers = pair(ends)
        a, b = brokers.endpoints.values()
        either, both = at(a, b), f"{a} {b}"
        titanic = ends.enter_context(process("titanic", "serve", "--db", str(tmp_path / "db"), *either, *OPTIONS))
        ends.enter_context(process("mdworker", "zmdp.workers.examples:echo", *either, *OPTIONS))
        titanic.line("titanic.close: serving at ")
        tickets = []

        def submit(text):
            result = in_this_process(
                "titanic", "request", "echo", text, "--timeout", str(TIMEOUT_SECONDS), MDP_BROKER=both
            )
            assert result.returncode == 0, result
            tickets.append((result.stdout.decode().strip(), text.encode()))

        submit("before")
        for name, how in (("a", kill), ("b", drain)):
            brokers.end(name, how)
            submit(f"without {name}")
            for arguments, env in ((either, {}), ((), {"MDP_BROKER": both})):
                result = in_this_process("mdclient", "call", "echo", name, *arguments, **env)
                assert (result.returncode, result.stdout) == (0, f"{name}\n".encode()), result
            brokers.start(name)
            brokers.await_links(name)
            submit(f"after {name}")
        for uuid, text in tickets:
            result = in_this_process("titanic", "reply", uuid, "--wait", "--timeout", str(TIMEOUT_SECONDS), *either)
            assert (result.returncode, result.stdout) == (0, text + b"\n"), result
        assert titanic.end() == 0


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

ACCESS = """
secret_key = "broker.key_secret"
[roles.shop]
keys = ["shop.key"]
call = [{services}]
[roles.operator]
keys = ["operator.key"]
call = ["*"]
admin = true
[roles.resizer]
keys = ["resizer.key"]
offer = ["*"]
[roles.brokers]
keys = ["broker.key"]
call = ["*"]
offer = ["*"]
link = true
"""


def test_a_role_is_the_same_at_every_broker(tmp_path):
    """Both brokers have the same key, since clients that know both have one key for all brokers."""
    folder = Folder(tmp_path)
    key = tmp_path / "broker.key"
    for name, services in (("a", '"*"'), ("b", '"who"')):
        (tmp_path / f"{name}.toml").write_text(ACCESS.format(services=services))
    with ExitStack() as ends:
        brokers = Brokers(ends, {
            name: ["--access", str(tmp_path / f"{name}.toml"), "--peer", f"{other}={key}"]
            for name, other in ("ab", "ba")
        })  # fmt: skip
        a, b = brokers.endpoints.values()
        for name in "ab":
            brokers.await_links(name, **folder.settings("operator"))
        for service in ("who", "other"):
            ends.enter_context(Worker(service, who, broker=b, **BEATS, **folder.settings("resizer")))
        shops = [
            ends.enter_context(Client(order, timeout=TIMEOUT_SECONDS, **BEATS, **folder.settings("shop")))
            for order in ([a, b], [b, a])
        ]
        operator = ends.enter_context(Client(a, timeout=TIMEOUT_SECONDS, **BEATS, **folder.settings("operator")))
        assert [shop.request("who") for shop in shops] == [[b"shop"], [b"shop"]]
        assert operator.request("who") == [b"operator"]
        assert operator.request("other") == [b"operator"]
        why = ["the role on whose behalf role brokers asks may not call it", "role shop may not call it"]
        for shop, text in zip(shops, why, strict=True):  # only b's file forbids it
            with pytest.raises(RequestRejected, match=text) as refused:
                shop.request("other")
            assert refused.value.code == 403
        brokers.end("a", kill)
        assert shops[0].request("who") == [b"shop"]
        assert shops[0].endpoint == b


def who(request):
    """Reply with the role of the caller."""
    return request.user.encode()
