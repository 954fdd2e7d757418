"""The command `titanic` as users see it: output, exit codes, errors, signals."""

import json
import os
import re
import shlex
import shutil
import signal
import sqlite3
import threading
from contextlib import ExitStack, closing, contextmanager
from functools import partial

import pytest
from support.postgres import cluster as new_cluster
from support.privileges import bound_by_permissions
from support.processes import TIMEOUT_SECONDS, eventually, process, run
from support.titanics import BEATS, LIMITS, row, state

from zmdp.clients import Client
from zmdp.testing import running_broker
from zmdp.titanic import Titanic
from zmdp.titanic.db.store.models import STATES
from zmdp.titanic.operator.command import cli
from zmdp.workers import ServiceError, Worker

QUICK = ("--heartbeat", "0.2", "--liveness", "50")
STRANGE = "0123456789abcdef0123456789abcdef"
"""A UUID that no request has."""
UUID = re.compile(rb"[0-9a-f]{32}\n")


def count(request):
    for number in range(int(request[0])):
        yield [b"%d" % number, b"."]
    return b"end"


def fail(request):
    raise ServiceError(404, "no such\n\x1b[31mrecord", b"\x1b]detail")


@contextmanager
def services():
    """Run a broker with three services, and yield its endpoint."""
    with running_broker(limits=LIMITS, drain_timeout=0.1) as server, ExitStack() as stack:
        at = server.endpoints[0]
        for name, handler in (("echo", list), ("count", count), ("fail", fail)):
            stack.enter_context(Worker(name, handler, broker=at, **BEATS))
        yield at


@pytest.fixture(scope="module")
def endpoint():
    with services() as at:
        yield at


@contextmanager
def serve(at, db, *options, **env):
    """Run `titanic serve`, and yield it once it is ready."""
    with process("titanic", "serve", "--broker", at, "--db", str(db), *QUICK, *options, **env) as running:
        running.line("serving titanic.request, titanic.reply, titanic.close")
        yield running


@pytest.fixture(scope="module")
def db(endpoint, tmp_path_factory):
    """The database of a running Titanic."""
    path = tmp_path_factory.mktemp("titanic") / "titanic.db"
    with serve(endpoint, path):
        yield path


@pytest.fixture
def here(in_this_process):
    """The command `titanic` in this process."""
    return partial(in_this_process, "titanic")


@pytest.fixture
def titanic(here, endpoint, db):
    """The command, with the broker and the database in its environment."""
    return partial(here, MDP_BROKER=endpoint, TITANIC_DB=str(db))


def one_line(result):
    """Return the error that a command wrote; errors in its usage follow upon its usage."""
    *usage, line = result.stderr.decode().splitlines()
    assert usage == [] or usage[0].startswith("Usage: ")
    return line


def done(result):
    """Return the output of a command that succeeded and printed nothing to stderr."""
    assert (result.returncode, result.stderr) == (0, b""), result.stderr
    return result.stdout


# ── request, reply, close ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_from_beginning_to_end(endpoint, db):
    def titanic(*arguments):
        return run("titanic", *arguments, MDP_BROKER=endpoint)

    told = done(titanic("request", "echo", "hello"))
    assert UUID.fullmatch(told)
    uuid = told.decode().strip()
    assert done(titanic("reply", uuid, "--wait")) == b"hello\n"
    assert done(titanic("reply", uuid.upper())) == b"hello\n"
    assert done(titanic("close", uuid, STRANGE)) == b""
    assert done(titanic("close", uuid)) == b""
    result = titanic("reply", uuid)
    assert (result.returncode, result.stdout) == (4, b"")
    assert f"Titanic does not know request {uuid}" in one_line(result)


def test_bodies_are_bytes_from_files_and_stdin(titanic, tmp_path):
    data = bytes(range(256)) * 100
    (tmp_path / "data").write_bytes(data)
    uuid = done(titanic("request", "echo", "-", stdin=data)).decode().strip()
    assert done(titanic("reply", "--wait", uuid)) == data
    uuid = done(titanic("request", "echo", f"@{tmp_path}/data", "@@home", "")).decode().strip()
    assert done(titanic("reply", "--wait", uuid)) == data + b"\n@home\n\n"
    uuid = done(titanic("request", "echo")).decode().strip()
    assert done(titanic("reply", "--wait", uuid)) == b""


def test_a_reply_that_is_not_there_yet(titanic, db):
    uuid = done(titanic("request", "nobody", "")).decode().strip()
    result = titanic("reply", uuid)
    assert (result.returncode, result.stdout) == (3, b"")
    assert one_line(result) == f"titanic: there is no reply to {uuid} yet: use --wait to wait for it"
    result = titanic("reply", uuid, "--wait", "--timeout", "2")
    assert (result.returncode, result.stdout) == (3, b"")
    assert one_line(result) == f"titanic: request {uuid} has no reply after 2 s"
    done(titanic("close", uuid))


def test_stream_prints_part_by_part(titanic):
    uuid = done(titanic("request", "count", "3")).decode().strip()
    assert done(titanic("reply", uuid, "--stream")) == b"0\n.\n1\n.\n2\n.\nend\n"
    assert done(titanic("reply", uuid, "--stream", "--from", "2")) == b"2\n.\nend\n"
    lines = done(titanic("reply", uuid, "--stream", "--json", "--from", "1")).splitlines()
    assert [json.loads(line) for line in lines] == [
        {"final": False, "frames": ["1", "."]},
        {"final": False, "frames": ["2", "."]},
        {"final": True, "frames": ["end"]},
    ]
    assert done(titanic("reply", uuid)) == b"end\n"


def test_a_request_that_failed(titanic):
    uuid = done(titanic("request", "fail")).decode().strip()
    for options in (["--wait"], [], ["--stream"]):
        result = titanic("reply", uuid, *options)
        assert (result.returncode, result.stdout) == (6, b"")
        told = f"titanic: request {uuid} has failed: service 'fail' failed with 404: no such ?[31mrecord"
        assert one_line(result) == told


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────────────────────


WRONG = [
    (["request"], 2, "Missing argument 'SERVICE'"),
    (["request", "mmi.service", "x"], 2, "mmi.service cannot be called through Titanic: call it directly"),
    (["request", "echo", "--priority", "10"], 2, "10 is not in the range 0<=x<=9"),
    (
        ["request", "echo", "--delay", "soon"],
        2,
        "'soon' is not a duration such as 90 (seconds), 15m, 12h or 7d, 0 or more",
    ),
    (["request", "echo", "--delay", "1", "--at", "2100-01-01"], 2, "delay and at cannot be combined"),
    (["request", "echo", "--at", "tomorrow"], 2, "'tomorrow' is not a time such as 2030-01-31T12:00"),
    (["request", "echo", "--retries", "-1"], 2, "-1 is not in the range 0<=x<=1000"),
    (["request", "echo", "--broker", "tcp://127.0.0.1:1"], 5, "nothing is listening there. Is the broker running?"),
    (["reply", STRANGE], 4, f"Titanic does not know request {STRANGE}"),
    (["reply", STRANGE, "--stream"], 4, f"Titanic does not know request {STRANGE}"),
    (["reply", "../../etc/passwd"], 2, "'../../etc/passwd' is not a UUID: use the 32 hex digits"),
    (["reply", STRANGE, "--from", "-1"], 2, "expected a whole number of parts (0 or more), got '-1'"),
    (["reply", STRANGE, "--from", "2"], 2, "--from requires --stream"),
    (["close"], 2, "Missing argument 'UUID"),
    (["show", STRANGE], 4, f"no request {STRANGE} in sqlite:///"),
    (["ls", "--state", "gone"], 2, "'gone' is not one of 'delayed', 'pending', 'running', 'done', 'failed'"),
    (["ls", "--limit", "0"], 2, "expected a whole number of requests (greater than 0), got '0'"),
    (["ls", "--older-than", "x"], 2, "'x' is not a duration such as 30s, 15m, 12h or 7d"),
    (["ls", "--older-than", "7"], 2, "'7' has no unit: write 7s, 7m, 7h or 7d"),
    (["ls", "--db", "/no/such/titanic.db"], 2, "there is no database /no/such/titanic.db: `titanic serve` creates"),
    (["ls", "--db", "mysql://host/db"], 2, "'mysql' is not supported: Titanic needs sqlite:///FILE or postgresql"),
    (["ls", "--db", "sqlite://"], 2, "Titanic needs a SQLite file"),
    (["ls", "--db", "/etc/passwd"], 6, "sqlite:////etc/passwd: file is not a database"),
    (["stats", "--db", "postgresql://me:secret@127.0.0.1:1/x"], 6, "postgresql://me:***@127.0.0.1:1/x: "),
    (["purge"], 2, "Missing option '--older-than'"),
    (["purge", "--older-than", "1d", "--state", "pending"], 2, "'pending' is not one of 'done', 'failed'"),
    (["db", "upgrade", "--db", "/no/such/folder/titanic.db"], 2, "there is no folder /no/such/folder"),
    (["serve", "--lease", "1"], 2, "lease is 1.0: it must be 2 seconds or more"),
    (["serve", "--max-waiting", "0"], 2, "expected a whole number of requests (greater than 0), got '0'"),
    (["serve", "--db", "postgresql://127.0.0.1:1/x"], 6, "postgresql://127.0.0.1:1/x: "),
    (["sink"], 2, "No such command 'sink'"),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: " ".join(wrong[0]))
def test_errors_are_one_line_with_an_exit_code(here, endpoint, db, wrong):
    arguments, code, told = wrong
    result = here(*arguments, MDP_BROKER=endpoint, TITANIC_DB=str(db))
    assert (result.returncode, result.stdout) == (code, b"")
    assert told in one_line(result)
    assert "secret" not in one_line(result)


def test_no_titanic(here, monkeypatch):
    monkeypatch.setattr(cli, "REGISTRATION_SECONDS", 0.1)
    with running_broker(limits=LIMITS) as server:
        at = server.endpoints[0]
        for arguments in (["request", "echo"], ["reply", STRANGE, "--wait"], ["reply", STRANGE, "--stream"],
                          ["close", STRANGE]):  # fmt: skip
            result = here(*arguments, "--broker", at, "--timeout", "1d")  # the command fails sooner
            assert (result.returncode, result.stdout) == (4, b"")
            told = f"titanic: no Titanic is registered at {at}: start one with `titanic serve`"
            assert one_line(result) == told


SUBCOMMANDS = [*cli.LAZY_COMMANDS, "request", "reply", "close"]


@pytest.mark.parametrize("command", SUBCOMMANDS)
def test_a_misspelt_option_has_nothing_to_do_with_the_environment(here, endpoint, db, command):
    result = here(command, "--brokr", "x", MDP_BROKER=endpoint, TITANIC_DB=str(db), MDP_HEARTBEAT="1")
    assert (result.returncode, result.stdout) == (2, b"")
    assert "No such option '--brokr'" in one_line(result)
    assert "environment" not in one_line(result)


# ── operators ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def harbour(tmp_path_factory):
    """A database with a request in each state, and their UUIDs; its Titanic has ended."""
    path = tmp_path_factory.mktemp("harbour") / "titanic.db"
    gate, at_work = threading.Event(), threading.Event()

    def hold(request):
        yield b"half"
        at_work.set()
        gate.wait(TIMEOUT_SECONDS)

    with services() as endpoint, ExitStack() as stack:
        titanic = Titanic(stack.enter_context(Client(endpoint, timeout=TIMEOUT_SECONDS)))
        serving = stack.enter_context(serve(endpoint, path, "--drain-timeout", "0"))
        stack.enter_context(Worker("hold", hold, broker=endpoint, **BEATS))
        stack.callback(gate.set)
        uuids = {
            "done": titanic.submit("count", b"2").uuid,
            "failed": titanic.submit("fail", b"\xff").uuid,
            "pending": titanic.submit("nobody", priority=9, headers={"a": "b"}).uuid,
            "delayed": titanic.submit("nobody", delay=3600, key="k").uuid,
            "running": titanic.submit("hold").uuid,
        }
        titanic.ticket(uuids["done"]).result(timeout=TIMEOUT_SECONDS)
        with pytest.raises(ServiceError):
            titanic.ticket(uuids["failed"]).result(timeout=TIMEOUT_SECONDS)
        assert at_work.wait(TIMEOUT_SECONDS)
        eventually(lambda: row(str(path), uuids["running"])["partials"])
        serving.kill()
    return path, uuids


@pytest.fixture
def operator(harbour, tmp_path, here):
    """The command on a copy of that database, the UUIDs, and the path."""
    source, uuids = harbour
    path = tmp_path / "titanic.db"
    with closing(sqlite3.connect(source)) as from_, closing(sqlite3.connect(path)) as to, from_, to:
        from_.backup(to)
    from_.close()
    to.close()

    def call(*arguments):
        return here(*arguments, "--db", str(path))

    return call, uuids, str(path)


def uuids_of(told):
    return [json.loads(line)["uuid"] for line in told.splitlines()]


def test_ls(operator):
    titanic, uuids, _ = operator
    assert sorted(uuids_of(done(titanic("ls", "--json")))) == sorted(uuids.values())
    for name, uuid in uuids.items():
        assert uuids_of(done(titanic("ls", "--json", "--state", name))) == [uuid]
    two = uuids_of(done(titanic("ls", "--json", "--state", "done", "--state", "failed")))
    assert two == [uuids["done"], uuids["failed"]]
    assert uuids_of(done(titanic("ls", "--json", "--service", "nobody"))) == [uuids["pending"], uuids["delayed"]]
    assert uuids_of(done(titanic("ls", "--json", "--service", "nobody", "--state", "delayed"))) == [uuids["delayed"]]
    assert len(uuids_of(done(titanic("ls", "--json", "--older-than", "0")))) == 5
    result = titanic("ls", "--json", "--older-than", "1d")
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"no such requests\n")
    result = titanic("ls", "--json", "--limit", "2")
    assert uuids_of(result.stdout) == [uuids["done"], uuids["failed"]]
    assert result.stderr == b"there are more requests: use --limit to see them\n"


def test_ls_for_people(operator):
    titanic, uuids, _ = operator
    header, *lines = done(titanic("ls")).decode().splitlines()
    assert header.split() == ["UUID", "SERVICE", "OWNER", "STATE", "PRI", "AGE", "TRIES", "NOTE"]
    told = {line.split()[0]: line for line in lines}
    assert set(told) == set(uuids.values())
    for name, uuid in uuids.items():
        assert name in told[uuid]
    assert told[uuids["failed"]].endswith("404: no such ?[31mrecord")
    assert "due in 60m" in told[uuids["delayed"]] or "due in 1h" in told[uuids["delayed"]]
    assert "took " in told[uuids["done"]]


def test_show(operator):
    titanic, uuids, _ = operator
    told = {name: json.loads(done(titanic("show", "--json", uuid))) for name, uuid in uuids.items()}
    assert {name: each["state"] for name, each in told.items()} == {name: name for name in uuids}
    assert (told["done"]["reply"], told["done"]["partials"]) == (["end"], [["0", "."], ["1", "."]])
    assert (told["failed"]["code"], told["failed"]["error"]) == (404, "no such\n\x1b[31mrecord")
    assert (told["failed"]["body"], told["failed"]["reply"]) == ([{"base64": "/w=="}], ["\x1b]detail"])
    assert (told["running"]["reply"], told["running"]["partials"]) == (None, [["half"]])
    assert json.loads(told["pending"]["headers"]) == {"a": "b"}
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", each["created"]) for each in told.values())
    lines = done(titanic("show", uuids["failed"])).decode().splitlines()
    assert all(line.isprintable() for line in lines)
    told = dict(line.split(maxsplit=1) for line in lines)
    assert (told["uuid"], told["state"], told["code"]) == (uuids["failed"], "failed", "404")
    assert "finished" in told
    assert "lease" not in told


@pytest.fixture
def folder(tmp_path):
    """A folder that can be removed whatever its permissions have become."""
    path = tmp_path / "folder"
    path.mkdir()
    yield path
    path.chmod(0o755)


READING = [["ls", "--json"], ["stats"], ["db", "check"], ["purge", "--older-than", "0", "--dry-run"]]


def test_a_read_only_database_can_be_read(operator, here, folder):
    _, uuids, db = operator
    copied = shutil.copy(db, folder / "titanic.db")
    os.chmod(copied, 0o444)
    folder.chmod(0o555)
    for command in ([*each, "--db", str(copied)] for each in (*READING, ["show", uuids["done"]])):
        with bound_by_permissions():
            result = here(*command)
        assert (result.returncode, result.stderr) == (0, b""), result.stderr
    for command in (["retry", "--all"], ["purge", "--older-than", "0"], ["cancel", "--all"], ["db", "upgrade"]):
        with bound_by_permissions():
            result = here(*command, "--db", str(copied))
        assert (result.returncode, result.stdout) == (6, b"")
        assert "titanic.db: the file is read-only (" in one_line(result)


def test_a_read_only_database_is_read_while_a_titanic_writes(operator, here, folder):
    _, uuids, db = operator
    copied = shutil.copy(db, folder / "titanic.db")
    with closing(sqlite3.connect(copied)) as writer, writer:
        writer.execute("UPDATE titanic_requests SET priority = 8 WHERE uuid = ?", (uuids["done"],))
        writer.commit()
        assert os.path.exists(f"{copied}-wal")
        for name in folder.iterdir():
            name.chmod(0o444)
        folder.chmod(0o555)
        with bound_by_permissions():
            result = here("show", "--json", uuids["done"], "--db", str(copied))
    writer.close()
    assert json.loads(done(result))["priority"] == 8


def test_an_unreadable_database_says_why(operator, here, folder):
    _, _, db = operator
    copied = shutil.copy(db, folder / "titanic.db")
    os.chmod(copied, 0)
    for command in (*READING, ["retry", "--all"]):
        with bound_by_permissions():
            result = here(*command, "--db", str(copied))
        assert (result.returncode, result.stdout) == (6, b"")
        assert "titanic.db: permission denied: the file cannot be read" in one_line(result)


@pytest.mark.parametrize("command", [["serve"], ["db", "upgrade"]], ids=" ".join)
def test_a_folder_in_which_no_database_can_be_created(here, folder, command):
    folder.chmod(0o555)
    with bound_by_permissions():
        result = here(*command, "--db", str(folder / "titanic.db"))
    assert (result.returncode, result.stdout) == (6, b"")
    told = f"titanic.db: the file cannot be created in the folder {folder}: no permission to write there"
    assert one_line(result).endswith(told)


def test_retry(operator):
    titanic, uuids, db = operator
    result = titanic("retry", uuids["failed"], uuids["done"], STRANGE)
    assert (result.returncode, result.stdout) == (4, b"1 retried\n")
    assert result.stderr.decode().splitlines() == [
        f"{uuid}: no such request in state failed" for uuid in (uuids["done"], STRANGE)
    ]
    assert [state(db, uuids[name]) for name in ("failed", "done")] == ["pending", "done"]
    assert done(titanic("retry", "--all")) == b"0 retried\n"


def test_cancel(operator):
    titanic, uuids, db = operator
    assert done(titanic("cancel", uuids["running"])) == b"1 cancelled\n"
    assert (row(db, uuids["running"])["state"], row(db, uuids["running"])["code"]) == ("failed", 499)
    result = titanic("cancel", uuids["running"])
    assert (result.returncode, result.stdout) == (4, b"0 cancelled\n")
    assert "no such request in state delayed or pending or running" in one_line(result)
    assert done(titanic("cancel", "--all", "--service", "nobody")) == b"2 cancelled\n"
    assert {state(db, uuids[name]) for name in ("pending", "delayed", "running", "failed")} == {"failed"}
    assert state(db, uuids["done"]) == "done"


def test_purge(operator):
    titanic, uuids, _ = operator
    assert done(titanic("purge", "--older-than", "1d")) == b"0 deleted\n"
    assert done(titanic("purge", "--older-than", "0", "--dry-run")) == b"1 would be deleted\n"
    assert done(titanic("purge", "--older-than", "0", "--service", "echo")) == b"0 deleted\n"
    assert len(uuids_of(titanic("ls", "--json").stdout)) == 5
    assert done(titanic("purge", "--older-than", "0")) == b"1 deleted\n"
    assert uuids["done"] not in uuids_of(titanic("ls", "--json").stdout)
    assert done(titanic("purge", "--older-than", "0", "--state", "failed", "--state", "done")) == b"1 deleted\n"
    assert sorted(uuids_of(titanic("ls", "--json").stdout)) == sorted(
        uuids[name] for name in ("pending", "delayed", "running")
    )
    assert json.loads(done(titanic("stats", "--json")))["partials"] == 1


def test_stats(operator):
    titanic, _, _ = operator
    told = json.loads(done(titanic("stats", "--json")))
    assert {state: told["total"][state] for state in STATES} == dict.fromkeys(STATES, 1)
    assert (told["total"]["attempts"], told["total"]["deaths"]) == (3, 0)
    assert told["total"]["oldest_pending_seconds"] == told["services"]["nobody"]["oldest_pending_seconds"] > 0
    assert set(told["services"]) == {"count", "fail", "nobody", "hold"}
    assert told["services"]["nobody"]["pending"] == 1
    assert told["services"]["nobody"]["oldest_waiting_seconds"] > 0
    assert told["services"]["count"]["oldest_waiting_seconds"] is None
    assert (told["keys"], told["partials"]) == (1, 3)
    header, *_, last, rest = done(titanic("stats")).decode().splitlines()
    assert header.split() == ["SERVICE", "DELAYED", "PENDING", "RUNNING", "DONE", "FAILED", "OLDEST"]
    assert last.split() == ["1"] * 5
    assert rest == "3 PARTIALs, 1 key"


# ── the tables ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_tables_of_sqlite(here, tmp_path):
    path = tmp_path / "new.db"

    def titanic(*arguments):
        return here("db", *arguments, TITANIC_DB=f"sqlite:///{path}")

    assert titanic("check").returncode == 2
    assert not path.exists()
    path.touch()
    assert done(titanic("current")) == b"no tables\n"
    assert json.loads(done(titanic("current", "--json")))["version"] is None
    result = titanic("check")
    assert (result.returncode, result.stdout) == (6, b"")
    assert f"has no tables yet: run `titanic db upgrade --db sqlite:///{path}`" in one_line(result)
    assert re.fullmatch(f"sqlite:///{path}: migrated: no tables → \\d{{4}}\n", done(titanic("upgrade")).decode())
    assert re.fullmatch(f"sqlite:///{path}: tables are at version \\d{{4}}\n", done(titanic("upgrade")).decode())
    assert re.fullmatch(rb"\d{4}\n", done(titanic("current")))
    told = json.loads(done(titanic("current", "--json")))
    assert told["version"] == told["needed"]
    assert b"as required" in done(titanic("check"))


def test_postgresql(here):
    with new_cluster() as cluster, services() as at:
        env = {"TITANIC_DB": cluster.url(), "MDP_BROKER": at}
        result = here("serve", **env)
        assert (result.returncode, result.stdout) == (6, b"")
        told = re.search(r"has no tables yet: run `(titanic db upgrade --db (\S+))`", one_line(result))
        assert b"no tables" in done(run(*shlex.split(told[1])))  # the command that the error suggests
        assert b"as required" in done(here("db", "check"))
        with serve(at, cluster.url()) as serving:
            uuid = done(here("request", "echo", "hello")).decode().strip()
            assert done(here("reply", uuid, "--wait")) == b"hello\n"
            assert uuids_of(done(here("ls", "--json"))) == [uuid]
            assert serving.end() == 0
        assert done(here("purge", "--older-than", "0")) == b"1 deleted\n"
        cluster.stop()
        for command in (["ls"], ["serve"], ["db", "upgrade"]):
            result = here(*command)
            assert (result.returncode, result.stdout) == (6, b"")
            one_line(result)


# ── serve ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def port(tmp_path):
    """A broker for this test, a client, and the path of a database."""
    with running_broker(limits=LIMITS, drain_timeout=0.1) as server:
        with Client(server.endpoints[0], timeout=TIMEOUT_SECONDS) as client:
            yield server.endpoints[0], Titanic(client), str(tmp_path / "titanic.db")


@contextmanager
def holding(at):
    """Offer the service `hold`; yield an event that it sets, and one that it waits for."""
    held, gate = threading.Event(), threading.Event()

    def hold(request):
        held.set()
        gate.wait(TIMEOUT_SECONDS)
        return request[0]

    with Worker("hold", hold, broker=at, **BEATS):
        try:
            yield held, gate
        finally:
            gate.set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_finishes_running_requests_and_leaves_pending_ones(port, number):
    at, titanic, db = port
    with serve(at, db) as serving, holding(at) as (held, gate):
        running = titanic.submit("hold", b"running")
        waiting, later = titanic.submit("nobody", b"waiting"), titanic.submit("hold", delay=60)
        assert held.wait(TIMEOUT_SECONDS)
        serving.send_signal(number)
        serving.line("for 1 running requests")
        eventually(lambda: not titanic.client.available("titanic.request"))
        gate.set()
        assert serving.wait() == 0
        assert [state(db, each.uuid) for each in (running, waiting)] == ["done", "pending"]
        assert state(db, later.uuid) in {"delayed", "pending"}
    with serve(at, db), Worker("nobody", list, broker=at, **BEATS):
        assert running.result(timeout=TIMEOUT_SECONDS) == [b"running"]
        assert waiting.result(timeout=TIMEOUT_SECONDS) == [b"waiting"]


@pytest.mark.parametrize("logged", ["interrupt again to exit immediately", "for 1 running requests"])
def test_a_second_signal_exits_immediately_and_loses_nothing(port, logged):
    at, titanic, db = port
    with holding(at) as (held, gate):
        with serve(at, db, "--drain-timeout", "600", "--lease", "5") as serving:
            ticket = titanic.submit("hold", b"body")
            assert held.wait(TIMEOUT_SECONDS)
            serving.send_signal(signal.SIGTERM)
            serving.line(logged)
            assert serving.end() == 1
            assert "Traceback" not in serving.stderr
        gate.set()
        with serve(at, db):
            assert ticket.result(timeout=TIMEOUT_SECONDS) == [b"body"]


def test_settings_of_serve(port):
    at, titanic, db = port
    env = {"MDP_BROKER": at, "TITANIC_DB": db, "MDP_HEARTBEAT": "0.2", "MDP_LIVENESS": "50"}
    command = ("titanic", "serve", "--max-waiting", "2", "--ttl", "1h", "--log-level", "warning")
    with process(*command, **env) as serving, Worker("echo", list, broker=at, **BEATS):
        eventually(lambda: titanic.client.available("titanic.request"))
        ticket = titanic.submit("echo")
        ticket.result(timeout=TIMEOUT_SECONDS)
        assert row(db, ticket.uuid)["expires"] - row(db, ticket.uuid)["finished"] == pytest.approx(3600)
        titanic.submit("nobody")
        result = run("titanic", "request", "nobody", "--broker", at)
        assert (result.returncode, result.stdout) == (6, b"")
        assert "full: 1 requests to nobody have not ended (--max-waiting-per-service)" in one_line(result)
        assert serving.end() == 0
        assert serving.stderr == ""
