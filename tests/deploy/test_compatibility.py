"""The last release's programs work with today's, and its Titanic's database is upgraded while requests are submitted.

`$ZMDP_PREVIOUS` names another commit than the last tag.
"""

import os
import subprocess
import sys
import tarfile
import threading
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path

import pytest
from support.processes import BIN, TIMEOUT_SECONDS, Process, process

from zmdp.clients import Client
from zmdp.mdp.errors import ZmdpError
from zmdp.testing import free_endpoint
from zmdp.titanic import Titanic

ROOT = Path(__file__).parents[2]
REQUESTS = 200
"""Requests that are submitted, half of them before the old Titanic is stopped."""

pytestmark = pytest.mark.long


def previous() -> str:
    """Return the commit of the last release, or an empty string."""
    if "ZMDP_PREVIOUS" in os.environ:
        return os.environ["ZMDP_PREVIOUS"]
    words = ["git", "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*"]
    return subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """The folder with the last release's commands."""
    commit = previous()
    if not commit:
        pytest.skip("nothing has been released yet")
    folder = tmp_path_factory.mktemp("old")
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as source:
        source.extractall(folder / "source", filter="data")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    installed = folder / "venv" / "bin"
    subprocess.run(
        [installed / "python", "-m", "pip", "install", "--quiet", str(folder / "source")],
        check=True, env={**os.environ, "ZMDP_PURE": "1"},
    )  # fmt: skip
    return installed


@pytest.fixture
def start():
    """`start(folder, command, …)` runs a command of a folder until the test ends."""
    with ExitStack() as stack:

        def run(folder: Path, name: str, *arguments: str) -> Process:
            return stack.enter_context(process(str(folder / name), *arguments))

        yield run


def serve(start, broker: Path, worker: Path) -> str:
    """Start a broker and a worker for `echo`.  Return the endpoint."""
    endpoint = start(broker, "mdp-broker", "--bind", free_endpoint()).line("tcp://", "stdout")
    start(worker, "mdworker", "zmdp.workers.examples:echo", "--broker", endpoint)
    return endpoint


@pytest.mark.parametrize("protocol", ["X1", "0.2", "0.1"])
@pytest.mark.parametrize("today", [("broker",), ("client", "worker"), ("worker",), ("client",)], ids="+".join)
def test_each_program_works_with_those_of_the_last_release(today, protocol, old, start):
    def folder(program: str) -> Path:
        return BIN if program in today else old

    endpoint = serve(start, folder("broker"), folder("worker"))
    words = ("call", "echo", "hello", "--wait", "--timeout", f"{TIMEOUT_SECONDS:g}", "--protocol", protocol)
    if protocol != "X1":  # such clients are told nothing while there is no worker
        words = (*words, "--retries", "20")
    done = subprocess.run(
        [folder("client") / "mdclient", *words, "--broker", endpoint], check=True, capture_output=True
    )
    assert done.stdout.rstrip() == b"hello"


def test_todays_titanic_upgrades_the_database_while_requests_are_submitted(old, start, tmp_path):
    endpoint = serve(start, BIN, BIN)
    words = ("titanic", "serve", "--broker", endpoint, "--db", str(tmp_path / "titanic.db"))
    half, submitted = threading.Event(), []

    def submit() -> None:
        with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
            titanic = Titanic(client)
            for number in range(REQUESTS):
                while True:
                    try:  # with the same key, a request that was stored without our knowing is not stored again
                        ticket = titanic.submit("echo", b"%d" % number, key=f"key-{number}")
                    except ZmdpError:  # there is none at the moment
                        continue
                    submitted.append(ticket.uuid)
                    break
                if number == REQUESTS // 2:
                    half.set()

    before = start(old, *words)
    before.line("serving")
    submitting = threading.Thread(target=submit, daemon=True)
    submitting.start()
    assert half.wait(TIMEOUT_SECONDS)
    before.end()
    start(BIN, *words).line("serving")
    submitting.join(TIMEOUT_SECONDS)
    assert len(set(submitted)) == REQUESTS
    with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        titanic = Titanic(client)
        for number, uuid in enumerate(submitted):
            assert list(titanic.ticket(uuid).result(timeout=TIMEOUT_SECONDS)) == [b"%d" % number]
