"""`zmdp dev` as its user has it: real processes, which are called, edited, killed and stopped."""

import json
import os
import re
import signal
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from support.dev import turn
from support.processes import TIMEOUT_SECONDS, alive, children, eventually, process, run

from zmdp.clients import Client
from zmdp.titanic import Titanic

WORDS = """
import time
from zmdp import Services

services = Services()


@services.service("words.count")
def count(text: str) -> int:
    print("counting", text)
    return len(text.split())


@services.service("words.wait")
def wait(seconds: float) -> None:
    print("waiting")
    time.sleep(seconds)


@services.service("words.often", every="1s")
def often() -> None:
    print("often")
"""
ENVIRONMENT = dict.fromkeys(("MDP_BROKER", "MDP_KEY", "MDP_BROKER_KEY"), "")


class Dev:
    """A `zmdp dev` that is ready."""

    def __init__(self, running, folder, without):
        self.folder = folder
        self.process = running
        self.addresses = {}
        for name in {"broker", "dashboard", "titanic", "gateway"} - {
            option.removeprefix("--no-") for option in without
        }:
            shown, self.addresses[name] = running.line(name, "stdout").split()
            assert shown == name

    @property
    def broker(self):
        return self.addresses["broker"]

    def programs(self):
        """Return the process ids of the programs by the names of their commands."""
        found = {}
        for pid in children(self.process.pid):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            found[next(Path(word.decode()).name for word in words[1:])] = pid
        return found

    def call(self, service, value):
        with Client(self.broker, timeout=TIMEOUT_SECONDS) as client:
            return client.call(service, value)


@contextmanager
def dev(folder, *options):
    (folder / "words.py").write_text(WORDS)
    with ExitStack() as stack:
        with turn():
            command = ("zmdp", "dev", "words:services", *options)
            running = stack.enter_context(process(*command, cwd=folder, **ENVIRONMENT))
            running.line("all are ready")
        yield Dev(running, folder, options)


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    with dev(tmp_path_factory.mktemp("dev")) as found:
        yield found


def test_a_call(started):
    assert started.call("words.count", "one two") == 2
    started.process.line("worker  | counting one two")
    done = run("zmdp", "call", "words.count", "three more words", MDP_BROKER=started.broker)
    assert done.stdout == b"3\n"


def test_a_call_by_http(started):
    url = started.addresses["gateway"].replace("/docs", "/services/words.count")
    request = Request(url, json.dumps("one two three").encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
        assert answer.read() == b"3"
    for address in (started.addresses["gateway"], f"{started.addresses['dashboard']}livez"):
        with urlopen(address, timeout=TIMEOUT_SECONDS) as answer:
            assert answer.status == 200


def test_a_durable_call(started):
    with Client(started.broker) as client:
        assert list(Titanic(client).submit("words.count", b'"one two"').result(TIMEOUT_SECONDS)) == [b"2"]
    assert started.addresses["titanic"] == ".zmdp/titanic.db"
    assert (started.folder / ".zmdp" / "titanic.db").exists()
    assert (started.folder / ".zmdp" / ".gitignore").read_text() == "*\n"


def test_a_declared_schedule_is_followed(started):
    started.process.line("worker  | often")


def test_changed_code_is_served(started):
    pytest.importorskip("watchfiles")
    (started.folder / "words.py").write_text(WORDS.replace("len(text.split())", "-1"))
    eventually(lambda: started.call("words.count", "one two") == -1)


def masked(line):
    """Return a command line with its ports masked."""
    return re.sub(r":\d+(?= |$)", ":PORT", line)


def test_what_is_printed_is_what_runs(started):
    shown = run("zmdp", "dev", "words:services", "--print", cwd=started.folder).stdout.decode().splitlines()
    lines = run("zmdp", "dev", "words:services", "--procfile", cwd=started.folder).stdout.decode().splitlines()
    # Each plan finds ports that are free at its moment, beside other tests.
    assert [masked(line.partition(": ")[2]) for line in lines] == [masked(line) for line in shown]
    assert [line.partition(": ")[0] for line in lines] == ["broker", "worker", "titanic", "gateway"]
    running = {}
    for name, pid in started.programs().items():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
        running[name] = words[[Path(word).name for word in words].index(name) :]
        assert b"PYTHONUNBUFFERED=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    for line in shown:
        variable, program, *arguments = line.split()
        assert variable == "PYTHONUNBUFFERED=1"
        _, *actual = running.pop(Path(program).name)
        assert masked(" ".join(arguments)) == masked(" ".join(actual))
    assert running == {}


def test_a_second_one_in_the_same_folder_is_refused(started):
    refused = run("zmdp", "dev", "words:services", cwd=started.folder, **ENVIRONMENT)
    assert (refused.returncode, refused.stdout) == (2, b"")
    told = refused.stderr.decode()
    assert f"it runs in {started.folder} already" in told
    assert f"(process {started.process.pid}, broker {started.broker})" in told


def test_one_in_another_folder_has_addresses_of_its_own_and_ends_on_ctrl_c(started, tmp_path):
    with dev(tmp_path) as other:
        assert not {*other.addresses.values()} & {*started.addresses.values()} - {".zmdp/titanic.db"}
        assert f"export MDP_BROKER={other.broker}`" in other.process.line("all are ready")
        assert other.call("words.count", "one two") == 2
        programs = other.programs()
        assert other.process.end(signal.SIGINT) == 0
        assert {*programs} == {"mdp-broker", "mdworker", "titanic", "mdp-gateway"}
        assert [name for name, pid in programs.items() if alive(pid)] == []
        order = re.findall(r"^(\w+) +\| .*(?:stopping once|draining:)", other.process.stderr, re.MULTILINE)
        assert order == ["zmdp", "gateway", "titanic", "worker", "broker"]


def test_a_program_that_crashes_is_restarted(tmp_path):
    with dev(tmp_path, "--no-titanic", "--no-gateway", "--no-dashboard") as found:
        os.kill(found.programs()["mdworker"], signal.SIGKILL)
        found.process.line("zmdp   | worker was killed by SIGKILL; it restarts in 0.5 s")
        assert found.call("words.count", "one two") == 2
        os.kill(found.programs()["mdp-broker"], signal.SIGKILL)
        found.process.line("zmdp   | broker was killed by SIGKILL; it restarts in 0.5 s")
        assert found.call("words.count", "one two") == 2
        assert found.process.end() == 0, found.process.stderr


def test_a_second_signal_kills(tmp_path):
    with ExitStack() as stack:
        found = stack.enter_context(dev(tmp_path, "--no-titanic", "--no-gateway", "--no-dashboard"))
        stack.enter_context(process("zmdp", "call", "words.wait", str(10 * TIMEOUT_SECONDS), MDP_BROKER=found.broker))
        found.process.line("worker | waiting")
        programs = found.programs()
        found.process.send_signal(signal.SIGINT)
        found.process.line("zmdp   | stopping")
        assert found.process.end(signal.SIGINT) == 1
        assert [name for name, pid in programs.items() if alive(pid)] == []


def test_nothing_outlives_it(tmp_path):
    with dev(tmp_path) as found:
        programs = found.programs()
        grandchildren = [each for pid in programs.values() for each in children(pid)]
        assert len(grandchildren) >= 1
        assert found.process.end(signal.SIGKILL) == -signal.SIGKILL
        eventually(lambda: not any(map(alive, [*programs.values(), *grandchildren])))


@pytest.mark.parametrize(
    ("target", "told"),
    [("nonsense:services", "cannot use nonsense:services: "), ("words:nonsense", "module words has no 'nonsense'")],
)
def test_what_cannot_be_served_ends_all(target, told, tmp_path):
    (tmp_path / "words.py").write_text(WORDS)
    with turn():
        done = run("zmdp", "dev", target, cwd=tmp_path, **ENVIRONMENT)
    assert done.returncode == 2
    log = done.stderr.decode()
    assert told in next(line for line in log.splitlines() if line.startswith("worker  | mdworker: "))
    assert log.splitlines()[-1] == "zmdp    | worker could not start: it exited with 2, and its lines say why"
