"""`mdworker` with services."""

import pytest
from support.processes import broker, process, run

from zmdp.clients import Client

SERVICES = """
import os
from zmdp import Services

services = Services()
empty = Services()

@services.service("pid")
def pid() -> int:
    return os.getpid()

@services.service("double")
async def double(n: int) -> int:
    return 2 * n
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(SERVICES)
    monkeypatch.chdir(tmp_path)


def test_all_services_are_offered_by_one_process():
    with broker() as (_, at), process("mdworker", "own:services", "--broker", at) as worker:
        assert "offering pid, double at" in worker.line("offering")
        worker.line("pid: serving")
        worker.line("double: serving")
        with Client(at) as client:
            assert client.call("double", 21) == 42
            assert client.call("pid") == worker.pid
        assert worker.end() == 0


def test_some_services_in_several_processes():
    command = ("mdworker", "own:services", "--only", "pid", "--processes", "2")
    with broker() as (_, at), process(*command, "--broker", at) as worker:
        worker.line("pid: serving", count=2)
        with Client(at) as client:
            assert client.call("pid") != worker.pid
            assert not client.available("double")
        assert worker.end() == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["own:services", "--only", "pit"], "there is no service 'pit': did you mean pid?"),
        (["own:services", "--service", "other"], "--service has no meaning with own:services"),
        (["own:services", "--codec", "json"], "--codec has no meaning with own:services"),
        (["own:services", "--processes", "1-2"], "give a Services a fixed number"),
        (["own:empty"], "there are no services: declare one with @services.service(NAME)"),
        (["zmdp.workers.echo:worker", "--only", "echo"], "--only requires a zmdp.Services"),
    ],
)
def test_wrong_usage(arguments, problem):
    done = run("mdworker", *arguments)
    assert done.returncode == 2
    assert problem in " ".join(done.stderr.decode().split())
