"""Genuine Flux tools and Python bindings against the gateway, where flux-core is installed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.flux_gateways import count, echo, running_workers
from support.processes import BIN, TIMEOUT_SECONDS, Process

FLUX = shutil.which("flux") or shutil.which("/opt/flux/bin/flux")
PYTHON = "/usr/bin/python3"

pytestmark = pytest.mark.skipif(FLUX is None, reason="flux-core is not installed")

SERVICE = """
import errno, json, flux
from flux.constants import FLUX_MSGTYPE_REQUEST

h = flux.Flux()
h.service_register("zecho").get()

def say(h, kind, msg, arg):
    h.respond(msg, {"heard": msg.payload, "topic": msg.topic})

def fail(h, kind, msg, arg):
    h.respond_error(msg, errno.EINVAL, "it went wrong")

def count(h, kind, msg, arg):
    for i in range(3):
        h.respond(msg, {"i": i})
    h.respond_error(msg, errno.ENODATA, "")

def gone(h, kind, msg, arg):
    print("gone", flush=True)

def stop(h, kind, msg, arg):
    h.respond(msg, None)
    h.service_unregister("zecho").get()
    h.reactor_stop()

handlers = {"say": say, "fail": fail, "count": count, "disconnect": gone, "stop": stop}
watchers = [h.msg_watcher_create(f, FLUX_MSGTYPE_REQUEST, "zecho." + name) for name, f in handlers.items()]
for watcher in watchers:
    watcher.start()
print("ready", flush=True)
h.reactor_run()
"""

CLIENT = """
import flux
from flux.constants import FLUX_RPC_NORESPONSE, FLUX_RPC_STREAMING

def stream(topic, payload):
    future = h.rpc(topic, payload, flags=FLUX_RPC_STREAMING)
    parts = []
    while True:
        try:
            parts.append(future.get())
        except OSError as error:
            return parts, error.errno
        future.reset()

def error(topic):
    try:
        h.rpc(topic, {"x": 1}).get()
    except OSError as error:
        return error.errno, error.strerror

h = flux.Flux()
print(h.attr_get("rank"), h.attr_get("size"))
"""


@pytest.fixture
def environment(gateway):
    library = next(Path(FLUX).parents[1].glob("lib*/flux/python3*"), Path("/nowhere"))
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "FLUX_URI": f"local://{gateway.path}", "PYTHONPATH": str(library)}


@pytest.fixture
def flux(environment):
    """Run a tool; return its exit code, output and errors."""

    def run(*arguments):
        done = subprocess.run(
            [FLUX, *arguments], check=False, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
        return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()

    return run


@pytest.fixture
def python(environment):
    """Run a program with the bindings; return its output."""

    def run(source):
        done = subprocess.run(
            [PYTHON, "-c", source],
            check=False,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        assert not done.returncode, done.stderr
        return done.stdout.splitlines()

    return run


def test_ping(stack, broker, flux):
    stack.enter_context(running_workers(broker, calc=echo))
    for target, shown in {"broker": "any!broker", "calc": "any!calc", "0": "0!broker", "0!calc": "0!calc"}.items():
        code, (first, *lines), errors = flux("ping", "-c2", "-i0.01", target)
        assert (code, errors) == (0, [])
        assert first == f"flux-ping {shown}"
        service = shown.partition("!")[2]
        assert [line.partition(" time=")[0] for line in lines] == [f"0!{service}.ping pad=0 seq={n}" for n in (0, 1)]
    assert flux("ping", "-c1", "nope") == (
        1, ["flux-ping any!nope"], ["flux-ping: nope.ping: Function not implemented"]
    )  # fmt: skip
    assert flux("ping", "-c1", "7") == (1, ["flux-ping 7!broker"], ["flux-ping: 7!broker.ping: No route to host"])
    assert flux("ping", "-c1", "upstream!broker")[2] == ["flux-ping: upstream!broker.ping: No route to host"]


def test_attributes(flux):
    assert flux("getattr", "rank") == (0, ["0"], [])
    assert flux("getattr", "nope") == (1, [], ["flux-getattr: nope: No such file or directory"])
    code, lines, _ = flux("lsattr", "-v")
    assert code == 0
    assert any(line.split() == ["size", "1"] for line in lines)


def test_events(environment, flux):
    command = [os.path.relpath(FLUX, BIN), "event", "sub", "-c3", "zm."]
    subscriber = Process(command, environment, None, False)
    sent = 0
    while subscriber.poll(0.01) is None:
        sent += 1
        assert flux("event", "pub", *(["-s"] if sent % 2 else []), "zm.x", '{"n":1}')[0] == 0
    assert subscriber.wait() == 0
    assert subscriber.line("zm.x", "stdout", count=3) == 'zm.x\t{"n":1}'


def test_python_calls_services(stack, broker, python):
    stack.enter_context(running_workers(broker, echo=echo, count=count))
    lines = python(
        CLIENT
        + """
print(h.rpc("echo.say", {"x": 1}).get())
print(stream("count.up", {"parts": 2}))
print(error("nope.x"))
h.rpc("echo.say", {"x": 1}, flags=FLUX_RPC_NORESPONSE)
print(h.event_subscribe("zm.") or h.event_send("zm.y", {"z": 1}) or h.event_recv().payload)
"""
    )
    assert lines == [
        "0 1", "{'x': 1}", "([{'i': 0}, {'i': 1}], 61)", "(38, 'No service matching nope.x is registered')", "{'z': 1}"
    ]  # fmt: skip


def test_a_python_program_offers_a_service(environment, python):
    service = Process([os.path.relpath(PYTHON, BIN), "-c", SERVICE], environment, None, False)
    service.line("ready", "stdout")
    lines = python(
        CLIENT
        + """
print(h.rpc("zecho.say", {"x": 1}).get())
print(stream("zecho.count", {}))
print(error("zecho.fail"))
"""
    )
    assert lines == [
        "0 1", "{'heard': {'x': 1}, 'topic': 'zecho.say'}", "([{'i': 0}, {'i': 1}, {'i': 2}], 61)",
        "(22, 'it went wrong')",
    ]  # fmt: skip
    service.line("gone", "stdout")
    assert python(CLIENT + 'print(h.rpc("zecho.stop").get())\nprint(error("zecho.say"))')[1:] == [
        "None", "(38, 'No service matching zecho.say is registered')"
    ]  # fmt: skip
    assert service.wait() == 0
