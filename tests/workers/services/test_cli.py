"""`mdworker` with services."""

import json

import pytest
from support.processes import broker, process, run

from zmdp.clients import Client, ServiceError
from zmdp.mdp.program.extras import install_command

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


OTHERS = """
from collections.abc import AsyncIterator
from dataclasses import dataclass
from zmdp import Services, Worker

@dataclass
class Letter:
    to: str

others = Services(prefix="mail.")
worker = Worker("echo", list, concurrency=3)
sync = Services(middleware=[lambda request, call_next: call_next(request)])

@others.service("send", concurrency=2)
def send(letter: Letter) -> None:
    pass

@others.service("watch")
async def watch(box: str) -> AsyncIterator[Letter]:
    yield Letter(box)

@sync.service("later")
async def later() -> int:
    return 1
"""
LIFESPANS = """
from contextlib import contextmanager
from zmdp import Services

@contextmanager
def no_begin():
    raise ConnectionRefusedError("no database")
    yield

@contextmanager
def no_end():
    yield
    raise ConnectionResetError("gone")

begins, ends = Services(lifespan=no_begin), Services(lifespan=no_end)
begins.service("a")(lambda: 0)
ends.service("a")(lambda: 0)
"""
TABLE = """\
SERVICE     REQUEST  REPLY             RUNS IN     CONCURRENCY
pid         None     int               threads     1
double      int      int               event loop  64
mail.send   Letter   None              threads     2
mail.watch  str      stream of Letter  event loop  64
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(SERVICES)
    (tmp_path / "more.py").write_text(OTHERS)
    (tmp_path / "lifespans.py").write_text(LIFESPANS)
    (tmp_path / "broken.py").write_text("import nothing_like_it")
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


def test_the_services_of_several_modules():
    with broker() as (_, at), process("mdworker", "own:services", "more:others", "--broker", at) as worker:
        assert "offering pid, double, mail.send, mail.watch at" in worker.line("offering")
        with Client(at) as client:
            assert client.call("double", 21) == 42
            assert client.call("mail.send", {"to": "a"}) is None
        assert worker.end() == 0


def test_a_table_of_what_would_be_served():
    done = run("mdworker", "own:services", "more:others", "--check")
    assert (done.returncode, done.stdout.decode()) == (0, TABLE)
    done = run("mdworker", "more:worker", "--check")
    assert done.stdout.decode().splitlines()[1].split() == ["echo", "frames", "frames", "threads", "3"]


def test_a_schedule_is_shown_because_no_worker_follows_it(tmp_path):
    module = "from zmdp import Services\nservices = Services()\n"
    module += "@services.service('cleanup', every='5m')\ndef cleanup() -> None: pass\n"
    module += "@services.service('report', cron='30 2 * * *')\ndef report() -> None: pass\n"
    (tmp_path / "timed.py").write_text(module)
    lines = [
        "cleanup: a Titanic is to submit a request every 300 s; without one, nothing does",
        "report: a Titanic is to submit a request by cron '30 2 * * *' in UTC; without one, nothing does",
    ]
    done = run("mdworker", "timed:services", "--check", cwd=tmp_path)
    assert done.stdout.decode().splitlines()[-2:] == lines
    with broker() as (_, at), process("mdworker", "timed:services", "--broker", at, cwd=tmp_path) as worker:
        for line in lines:
            worker.line(line)


def test_reload_without_watchfiles(tmp_path):
    (tmp_path / "watchfiles.py").write_text("raise ImportError")
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['watchfiles'] = None")
    done = run("mdworker", "own:services", "--reload", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert f"--reload needs watchfiles: {install_command('reload')}" in done.stderr.decode()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["broken:a", "own:nothing", "--check"], "broken.py:1); cannot use own:nothing: module own has no 'nothing'"),
        (["own:service"], "cannot use own:service: module own has no 'service': did you mean own:services?"),
        (["own:pid"], "own:pid is a service: serve the Services that declares it, and add --only pid to serve it"),
        (["more:sync", "--check"], "middleware <lambda> is a def, and cannot wrap service later"),
        (["own:services", "own:services"], "cannot use own:services: these services are included already"),
        (["own:services", "more:worker"], "more:worker is of type Worker: only a zmdp.Services can be served together"),
        (["own:services", "--max-memory", "much"], "expected a size such as 512M or 2G, got 'much'"),
        (["own:services", "--reload", "--freelance", "tcp://127.0.0.1:5"], "--reload has no meaning with --freelance"),
        (["own:services", "--only", "pit"], "there is no service 'pit': did you mean pid?"),
        (["own:services", "--service", "other"], "--service has no meaning with own:services"),
        (["own:services", "--codec", "json"], "--codec has no meaning with own:services"),
        (["own:services", "--processes", "1-2"], "expected a whole number of processes (greater than 0), got '1-2'"),
        (["own:empty"], "there are no services: declare one with @services.service(NAME)"),
        (["zmdp.workers.examples:echo", "--only", "echo"], "--only requires a zmdp.Services"),
    ],
)
def test_wrong_usage(arguments, problem):
    done = run("mdworker", *arguments)
    assert done.returncode == 2
    assert problem in " ".join(done.stderr.decode().split())


def test_a_lifespan_that_fails_is_in_the_log():
    done = run("mdworker", "lifespans:begins", "--log-format", "json")
    (logged,) = map(json.loads, done.stderr.splitlines())
    assert done.returncode == 1
    assert logged["message"] == "the lifespan failed at the start, so nothing is served"
    assert logged["exception"].endswith("ConnectionRefusedError: no database")
    with process("mdworker", "lifespans:ends", "--log-format", "json") as worker:
        worker.line("offering a")
        assert worker.end() == 1
        logged = json.loads(worker.line("the lifespan failed at the end"))
    assert logged["exception"].endswith("ConnectionResetError: gone")


def test_a_module_that_exits(tmp_path):
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(0)")
    done = run("mdworker", "leaving:services")
    assert done.returncode == 2
    assert b"mdworker: cannot use leaving:services: SystemExit: 0 (" in done.stderr


CONFIGURES_LOGGING = """
import logging.config
from contextlib import contextmanager
from zmdp import Services, Worker

SETTINGS = {
    "version": 1,
    "formatters": {"own": {"format": "OWN %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"own": {"class": "logging.StreamHandler", "formatter": "own"}},
    "root": {"handlers": ["own"], "level": "INFO"},
}

def dict_config():
    logging.config.dictConfig(SETTINGS)

def file_config():
    logging.config.fileConfig("logging.ini")

@contextmanager
def lifespan():
    dict_config()
    yield

services = Services(**SERVICES)
CONFIGURE

@services.service("fails")
def fails() -> int:
    raise ValueError("no good")

worker = Worker("fails", lambda request: fails())
"""
LOGGING_INI = """
[loggers]
keys = root
[handlers]
keys = own
[formatters]
keys = own
[logger_root]
level = INFO
handlers = own
[handler_own]
class = StreamHandler
formatter = own
args = (sys.stderr,)
[formatter_own]
format = OWN %(levelname)s %(name)s: %(message)s
"""


@pytest.mark.parametrize(
    ("target", "where"),
    [("services", "dict_config()"), ("worker", "dict_config()"), ("worker", "file_config()"), ("services", "lifespan")],
)
def test_a_module_that_configures_logging_does_not_silence_the_worker(tmp_path, target, where):
    lifespan, configure = ("lifespan=lifespan", "") if where == "lifespan" else ("", where)
    module = CONFIGURES_LOGGING.replace("**SERVICES", lifespan).replace("CONFIGURE\n", f"{configure}\n")
    (tmp_path / "own.py").write_text(module)
    (tmp_path / "logging.ini").write_text(LOGGING_INI)
    with broker() as (_, endpoint), Client(endpoint) as client:
        with process("mdworker", f"own:{target}", "--broker", endpoint, cwd=tmp_path) as worker:
            worker.line("OWN INFO zmdp.worker: offering fails")
            with pytest.raises(ServiceError, match="no good"):
                client.call("fails")
            worker.line("OWN ERROR zmdp.worker: fails: the handler failed")
            worker.line("ValueError: no good")
