"""The commands as users see them: output, exit codes, errors."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support.processes import BIN, TIMEOUT_SECONDS, broker, eventually, process, run

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def endpoint():
    with broker() as (_, endpoint), process("mdworker", "zmdp.workers.examples:echo", "--broker", endpoint) as worker:
        worker.line("echo: serving at ")
        eventually(lambda: run("mdclient", "call", "echo", "--broker", endpoint).returncode == 0)
        yield endpoint


@pytest.fixture
def mdclient(in_this_process, endpoint):
    """The command `mdclient` in this process, with the broker in its environment."""
    return partial(in_this_process, "mdclient", MDP_BROKER=endpoint)


def one_line(result):
    """Return the error that a command wrote; errors in its usage follow upon its usage."""
    *usage, line = result.stderr.decode().splitlines()
    assert usage == [] or usage[0].startswith("Usage: ")
    return line


# ── mdclient ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_call_prints_what_is_not_text_byte_for_byte(mdclient, tmp_path):
    data = bytes(range(256)) * 100
    (tmp_path / "data").write_bytes(data)
    assert mdclient("call", "echo", "-", stdin=data).stdout == data
    assert mdclient("call", "echo", f"@{tmp_path}/data").stdout == data


def test_call_ends_a_text_with_a_newline(mdclient):
    assert mdclient("call", "echo", "hello").stdout == b"hello\n"
    assert mdclient("call", "echo", "-", stdin=b"one\ntwo\n").stdout == b"one\ntwo\n"
    assert mdclient("call", "echo", "@@home").stdout == b"@home\n"
    assert mdclient("call", "echo").stdout == b""


def test_a_body_may_begin_like_an_option(mdclient):
    assert mdclient("call", "echo", "-5", "--timeout", "20", "-.5e3").stdout == b"-5\n-.5e3\n"
    assert mdclient("call", "echo", "-1", "--", "--json").stdout == b"-1\n--json\n"
    assert mdclient("call", "echo", "--", "-x").stdout == b"-x\n"
    assert "No such option '-x'" in one_line(mdclient("call", "echo", "-x"))


def test_call_as_json(mdclient):
    result = mdclient("call", "--json", "echo", "text", "-", stdin=b"\xff\x00")
    assert json.loads(result.stdout) == {"service": "echo", "final": True, "frames": ["text", {"base64": "/wA="}]}


@pytest.mark.parametrize("command", ["mdworker", "mdclient", "mdp-broker"])
def test_ctrl_c_while_a_command_is_imported_prints_nothing(tmp_path, command):
    (tmp_path / "click.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(600)\n")
    with process(command, PYTHONPATH=str(tmp_path)) as running:
        running.line("importing", "stdout")
        assert running.end(signal.SIGINT) == -signal.SIGINT
        assert running.stderr == ""


@pytest.mark.parametrize("command", ["call", "stream"])
def test_what_the_broker_does_not_know(mdclient, command):
    result = mdclient(command, "mmi.nonsense")
    assert (result.returncode, result.stdout) == (4, b"")
    assert "the broker does not know 'mmi.nonsense' (501): mmi.service, mmi.services" in one_line(result)
    result = mdclient(command, "mmi.workers", "echo", "x")
    assert (result.returncode, result.stdout) == (1, b"")
    assert "the broker cannot read what 'mmi.workers' was asked (400)" in one_line(result)
    assert mdclient(command, "mmi.service", "nobody").stdout.strip() == b"404"


def test_stream_prints_part_by_part(endpoint, mdclient):
    with process("mdworker", "text_services:count", "--broker", endpoint, cwd=HERE.parents[1] / "examples") as worker:
        worker.line("text.count: serving at ")
        text = "# one\na b c\n# two\nd e\n"
        assert mdclient("stream", "--wait", "text.count", text).stdout == b"one\n3\ntwo\n2\ntotal\n5\n"
        lines = mdclient("stream", "--json", "text.count", text).stdout.splitlines()
        assert [json.loads(line)["final"] for line in lines] == [False, False, True]
        assert worker.end() == 0


def test_services_and_info_and_ping(mdclient):
    shown = mdclient("services").stdout.decode().splitlines()
    assert [line.split() for line in shown] == [["SERVICE", "WORKERS", "IDLE", "QUEUED"], ["echo", "1", "1", "0"]]
    (row,) = json.loads(mdclient("services", "--json").stdout)
    assert {key: row[key] for key in ("name", "workers", "idle", "queued")} == {
        "name": "echo", "workers": 1, "idle": 1, "queued": 0
    }  # fmt: skip
    assert b"max_queue=1000000" in mdclient("info").stdout
    assert json.loads(mdclient("info", "--json").stdout)["broker"]["name"] == "zmdp"
    assert len(mdclient("ping", "--count", "2", "--interval", "0.01").stdout.splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["call", "nobody"], 4, "no worker offers 'nobody' at tcp://"),
        (["stream", "nobody"], 4, "no worker offers 'nobody' at tcp://"),
        (["call", "nobody", "--protocol", "0.2"], 4, "no worker offers 'nobody' at tcp://"),
        (["call", "echo", "--protocol", "3"], 2, "'3' is not one of 'X1', '0.2', '0.1'"),
        (["call", "echo", "--header", "nameonly"], 2, "'nameonly': expected NAME=VALUE"),
        (["call", "echo", "--header", "a=b", "--protocol", "0.2"], 2, "--header requires protocol X1"),
        (["bench", "nobody"], 4, "no worker offers 'nobody' at tcp://"),
        (["bench", "echo", "--load", "mixed"], 2, "--slow BODY requires --load mixed"),
        (["bench", "echo", "--slow", "x"], 2, "--slow BODY requires --load mixed"),
        (["bench", "echo", "--protocol", "0.2"], 2, "--load pipelined and mixed require protocol X1"),
        (["bench", "echo", "--outstanding", "0"], 2, "expected a whole number of requests (greater than 0), got '0'"),
        (["top", "--broker", "tcp://127.0.0.1:1"], 5, "nothing is listening there"),
        (["top", "--count", "0"], 2, "expected a whole number of updates (greater than 0), got '0'"),
        (["call", "nobody", "--wait", "--timeout", "1", "--retries", "1"], 3, "service 'nobody'"),
        (
            ["call", "echo", "--broker", "tcp://127.0.0.1:1"],
            5,
            "nothing is listening there. Is the broker running? `mdp-broker --bind",
        ),
        (["call", "echo", "@/no/such/file"], 2, "cannot read /no/such/file: No such file or directory"),
        (["call", "echo", "--timeout", "soon"], 2, "expected a number of seconds (greater than 0), got 'soon'"),
        (
            ["call", "echo", "--broker", "localhost"],
            2,
            "expected an endpoint such as tcp://127.0.0.1:5555 or ipc:///tmp/broker, got 'localhost'",
        ),
        (["call", "a\tb"], 2, "is not a valid service name"),
        (["call"], 2, "Missing argument 'SERVICE'"),
        (["cal"], 2, "No such command 'cal'"),
    ],
)
def test_errors_are_one_line_with_an_exit_code(mdclient, arguments, code, told):
    result = mdclient(*arguments)
    assert (result.returncode, result.stdout) == (code, b"")
    assert told in one_line(result)


def test_a_failed_handler_has_its_own_exit_code(endpoint, mdclient):
    with process("mdworker", "os:getcwd", "--service", "wrong", "--broker", endpoint) as worker:
        worker.line("wrong: serving at ")
        result = mdclient("call", "--wait", "wrong")
        assert result.returncode == 6
        assert "TypeError" in one_line(result)


def test_headers(endpoint, mdclient, tmp_path):
    text = "import json\ndef look(request):\n    return json.dumps(dict(request.headers)).encode()\n"
    (tmp_path / "looking.py").write_text(text)
    with process("mdworker", "looking:look", "--service", "look", "--broker", endpoint, cwd=tmp_path) as worker:
        worker.line("look: serving at ")
        for command in ("call", "stream"):
            result = mdclient(command, "--wait", "look", "--header", "a=b", "--header", "größe=x=y", "--header", "c=")
            assert json.loads(result.stdout) == {"a": "b", "größe": "x=y", "c": ""}


def test_mdclient_speaks_older_protocols(endpoint, mdclient):
    speak = ("--protocol", "0.2")
    assert mdclient("call", "echo", "hello", *speak).stdout == b"hello\n"
    assert mdclient("call", "echo", "hello", *speak, "--envelope").stdout == b"hello\n"
    assert mdclient("stream", "echo", "hello", *speak).stdout == b"hello\n"
    assert mdclient("call", "echo", "hello", MDP_PROTOCOL="0.1").stdout == b"hello\n"
    assert mdclient("ping", "--count", "1", *speak).returncode == 0
    assert b"echo" in mdclient("services", *speak).stdout
    bench = mdclient("bench", "echo", "--load", "sync", "--seconds", "0.2", "--json", *speak)
    assert json.loads(bench.stdout)["replies"] > 0
    assert json.loads(bench.stdout)["errors"] == {}
    with process("mdworker", "os:getpid", "--service", "pid", "--broker", endpoint, *speak) as worker:
        worker.line("pid: serving at ")
        result = mdclient("call", "--wait", "pid", *speak)
        assert (result.returncode, "HandlerError" in one_line(result) or "TypeError" in one_line(result)) == (6, True)


@pytest.mark.parametrize(
    ("load", "kinds"),
    [
        (["--load", "sync"], ["all"]),
        (["--outstanding", "8"], ["all"]),
        (["--load", "mixed", "--slow", "slow", "--share", "0.5", "--rate", "100"], ["short", "slow"]),
    ],
)
def test_bench(mdclient, load, kinds):
    result = mdclient("bench", "echo", "x", "--seconds", "0.2", "--json", *load)
    assert result.returncode == 0
    figures = json.loads(result.stdout)
    assert (figures["replies"] > 0, figures["errors"], sorted(figures["latency_ms"])) == (True, {}, kinds)
    assert set(figures["latency_ms"][kinds[0]]) == {"count", "mean", "p50", "p90", "p99", "p99.9", "max"}


def test_top(mdclient):
    looks = mdclient("top", "--count", "2", "--interval", "0.01", "--json").stdout.splitlines()
    for look in map(json.loads, looks):
        assert [row["name"] for row in look["services"]] == ["echo"]
        assert [row["service"] for row in look["workers"]] == ["echo"]
        assert look["totals"]["requests_per_second"] >= 0
    assert len(looks) == 2
    shown = mdclient("top", "--count", "1").stdout.decode()
    assert "\x1b" not in shown
    assert "SERVICE  WORKERS" in shown


def test_top_until_ctrl_c(endpoint):
    with process("mdclient", "top", "--interval", "0.01", "--broker", endpoint) as top:
        top.line("SERVICE", "stdout", count=3)
        assert top.end(signal.SIGINT) == 0
        assert top.stderr == ""


def test_a_full_queue_has_its_own_exit_code():
    with (
        broker("--max-queue", "1") as (_, at),
        process("mdclient", "call", "nobody", "--wait", "--timeout", "600", "--broker", at),
    ):
        eventually(lambda: b'"queued": 1' in run("mdclient", "services", "--json", "--broker", at).stdout)
        result = run("mdclient", "call", "nobody", "--wait", "--broker", at)
        assert (result.returncode, "(429)" in one_line(result)) == (7, True)


def test_ctrl_c_while_waiting(endpoint):
    with process("mdclient", "call", "nobody", "--wait", "--timeout", "60", "--broker", endpoint) as asking:
        eventually(lambda: b'"nobody"' in run("mdclient", "services", "--json", "--broker", endpoint).stdout)
        assert asking.end(signal.SIGINT) == 130
    eventually(lambda: b'"nobody"' not in run("mdclient", "services", "--json", "--broker", endpoint).stdout)


def test_a_closed_pipe_is_not_an_error(endpoint):
    command = f"{run.__globals__['BIN']}/mdclient stream --broker {endpoint} echo x | true"
    assert os.system(f"bash -c 'set -o pipefail; {command}'") in {0, 256}


# ── mdp-broker ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_default_endpoint_is_loopback(in_this_process):
    assert b"default: tcp://127.0.0.1:5555]" in in_this_process("mdp-broker", "--help").stdout.replace(
        b"\n" + b" " * 34, b" "
    )


def test_a_port_in_use_is_an_error(endpoint):
    result = run("mdp-broker", "--bind", endpoint)
    assert (result.returncode, result.stdout) == (1, b"")
    assert (
        one_line(result)
        == f"mdp-broker: cannot listen on {endpoint}: another program is listening there, perhaps another broker: "
        "choose another endpoint"
    )


def test_a_unix_socket_in_use_is_an_error_and_a_stale_one_is_replaced(tmp_path):
    at = f"ipc://{tmp_path}/broker"
    with broker(bind=at) as (first, _):
        assert run("mdp-broker", "--bind", at).returncode == 1
        assert run("mdclient", "ping", "--count", "1", "--broker", at).returncode == 0
        first.kill()
    with broker(bind=at):  # which replaces the socket file of the killed broker
        assert run("mdclient", "ping", "--count", "1", "--broker", at).returncode == 0


def test_a_file_is_not_replaced_by_a_socket(tmp_path):
    (tmp_path / "precious").write_text("data")
    result = run("mdp-broker", "--bind", f"ipc://{tmp_path}/precious")
    assert result.returncode == 1
    assert one_line(result).endswith("exists and is not a socket")
    assert (tmp_path / "precious").read_text() == "data"


def test_closed_standard_streams_are_not_an_error():
    bin_ = run.__globals__["BIN"]
    assert os.system(f"{bin_}/mdp-broker --help >&- 2>&-") == 0
    assert os.system(f"{bin_}/mdp-broker --heartbeat x 2>/dev/full") >> 8 == 2
    assert os.system(f"timeout -s INT 1 {bin_}/mdp-broker --bind tcp://127.0.0.1:* <&- >&- 2>&-") >> 8 == 124
    assert run("mdp-broker", "--version", MDP_VERSION="no").returncode == 0


@pytest.mark.parametrize("call", ["worker.start()", "worker.run()"])
def test_a_module_that_runs_its_own_worker_is_refused(tmp_path, call):
    text = f"from zmdp.workers import Worker\nworker = Worker('x', list)\n{call}\n"
    (tmp_path / "eager.py").write_text(text)
    with process("mdworker", "eager:worker", "--processes", "2", cwd=tmp_path) as running:
        assert running.wait() == 2
        assert "cannot use eager:worker: module eager runs a worker when it is imported" in running.stderr


@pytest.mark.parametrize("separator", [None, ",", " "])
def test_a_broker_listens_on_several_endpoints(tmp_path, separator):
    binds = ["tcp://127.0.0.1:*", f"ipc://{tmp_path}/b"]
    flags = [] if separator else ["--bind", binds[0], "--bind", binds[1]]
    env = {"MDP_BIND": separator.join(binds)} if separator else {}
    with process("mdp-broker", *flags, **env) as running:
        for at in (running.line("tcp://", "stdout"), running.line("ipc://", "stdout")):
            assert run("mdclient", "ping", "--count", "1", "--broker", at).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "env", "config", "told"),
    [
        (
            ["--heartbeat", "fast"], {}, "",
            "'--heartbeat' (env var: 'MDP_HEARTBEAT'): expected a number of seconds (greater than 0), got 'fast'",
        ),
        (["--heartbeat", "-1"], {}, "", "(greater than 0), got '-1'"),
        (["--max-queue", "1.5"], {}, "", "expected a whole number of requests (greater than 0), got '1.5'"),
        (["--drain-timeout", "-1"], {}, "", "expected a number of seconds (0 or more), got '-1'"),
        (["--bind", "tcp://127.0.0.1:99999"], {}, "", "its port is '99999', but a port is a number up to 65535"),
        (["--bind", "tcp://a:1,b:2"], {}, "", "got 'b:2'"),
        ([], {}, "bind = [5555]", "broker.toml: Expected `str`, got `int` - at `$.bind[0]`"),
        (["--bind", "5555"], {}, "", "got '5555'"),
        (
            ["--pirate", "tcp://127.0.0.1:1"], {}, "",
            "expected ENDPOINT=SERVICE, such as 'tcp://127.0.0.1:5556=echo', got 'tcp://127.0.0.1:1'",
        ),
        (["--pirate", "tcp://127.0.0.1:1="], {}, "", "'' is not a valid service name"),
        (["--pirate", "127.0.0.1:1=echo"], {}, "", "expected an endpoint such as"),
        ([], {"MDP_PIRATE": "echo"}, "", "Invalid value for '--pirate' (env var: 'MDP_PIRATE'): expected ENDPOINT="),
        ([], {}, "pirate = 'echo'", "broker.toml: pirate: expected ENDPOINT="),
        ([], {}, "pirate = { a = 1 }", "broker.toml: Expected `str | array`, got `object` - at `$.pirate`"),
        (["--beat", "1"], {}, "", "No such option"),
        ([], {"MDP_LIVENESS": "x"}, "", "Invalid value for '--liveness' (env var: 'MDP_LIVENESS'): expected a"),
        (["--liveness", "x"], {"MDP_LIVENESS": "5"}, "", "(greater than 0), got 'x'"),
        ([], {}, "liveness = 0", "broker.toml: liveness: expected a whole number of intervals (greater than 0), got 0"),
        ([], {}, "liveness = true", "broker.toml: Expected `int | float`, got `bool` - at `$.liveness`"),
        ([], {}, "max-queue = 'x'", "broker.toml: Expected `int | float`, got `str` - at `$.max-queue`"),
        ([], {}, "bind = []", "bind is empty: it must name at least one endpoint"),
        ([], {}, "live-nes = 3", "unknown field `live-nes` ('live-nes': did you mean liveness?)"),
        ([], {}, "max_queues = 3", "unknown field `max_queues` ('max_queues': did you mean max-queue?)"),
        ([], {}, "zzz = 3", "unknown field `zzz` ('zzz': known are bind, pirate, pirate-workers, "),
        ([], {}, "access = 3", "broker.toml: Expected `str`, got `int` - at `$.access`"),
        ([], {}, "name = ['a']", "broker.toml: Expected `str`, got `array` - at `$.name`"),
        ([], {}, "insecure = 1", "broker.toml: Expected `bool`, got `int` - at `$.insecure`"),
        ([], {}, "max_queue = 2", "unknown field `max_queue` ('max_queue': did you mean max-queue?)"),
        ([], {}, "liveness", "not valid TOML"),
        ([], {}, "liveness = " + "9" * 10_000, "not valid TOML"),
        (["--config", "/no/such"], {}, "", "cannot read /no/such: No such file or directory"),
        (["--config", "/"], {}, "", "cannot read /: Is a directory"),
    ],
)  # fmt: skip
def test_invalid_settings_are_one_line(tmp_path, in_this_process, arguments, env, config, told):
    (tmp_path / "broker.toml").write_text(config)
    files = ["--config", str(tmp_path / "broker.toml")] if config else []
    result = in_this_process("mdp-broker", *files, *arguments, **env)
    assert (result.returncode, result.stdout) == (2, b"")
    assert told in one_line(result)


def test_flags_override_the_environment_which_overrides_the_file(tmp_path):
    (tmp_path / "broker.toml").write_text('expiry = 1\nmax-queue = 1\nliveness = 11\nbind = "tcp://127.0.0.1:*"\n')
    env = {"MDP_CONFIG": str(tmp_path / "broker.toml"), "MDP_EXPIRY": "2", "MDP_MAX_QUEUE": "2"}
    with process("mdp-broker", "--max-queue", "3", **env) as running:
        at = running.line("tcp://", "stdout")
        limits = json.loads(run("mdclient", "info", "--json", "--broker", at).stdout)["broker"]["limits"]
    assert (limits["max_queue"], limits["expiry"], limits["liveness"], limits["heartbeat"]) == (3, 2, 11, 1)


def test_an_idle_broker_exits_with_0():
    for number in (signal.SIGTERM, signal.SIGINT):
        with broker() as (running, _):
            assert running.end(number) == 0


# ── mdworker ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["no.such.module:worker"], "cannot use no.such.module:worker: No module named 'no' in /"),
        (["missing:worker"], "cannot use missing:worker: ModuleNotFoundError: No module named 'nowhere' (/"),
        (["os:nothing"], "cannot use os:nothing: module os has no 'nothing': it has "),
        (["os:wakl"], "cannot use os:wakl: module os has no 'wakl': did you mean os:walk"),
        (
            ["zmdp.workers.examples:nope"],
            "module zmdp.workers.examples has no 'nope': it has echo, sleep, repeat, pause",
        ),
        (["os"], "expected MODULE:NAME, for example zmdp.workers.examples:echo, got 'os': add the name that is to be"),
        (["os:"], "got 'os:': add the name that is to be used, os:NAME"),
        (
            ["app.py"],
            "'app.py' names a file instead of a module: use app:NAME, with the NAME that the worker or function",
        ),
        (["./app.py:worker"], "'./app.py:worker' names a file instead of a module: use app:worker"),
        (["pack/app.py:worker"], "names a file instead of a module: use pack.app:worker"),
        (["/srv/app.py:worker"], "use app:worker with /srv as the current directory"),
        (["os:name"], "os:name is of type str: expected a zmdp.Services, a zmdp.Worker or AsyncWorker, or a"),
        (["os:getcwd"], "os:getcwd is a function: name the service that it offers with --service NAME"),
        (["sound:worker", "--service", "a\tb"], "is not a valid service name"),
        (["sound:worker", "--service", "mmi.x"], "service 'mmi.x' is reserved: the broker itself offers"),
        (["zmdp.workers.examples:echo", "--concurrency", "0"], "a whole number of requests (greater than 0), got '0'"),
        (
            ["zmdp.workers.examples:echo", "--codec", "json"],
            "is a worker, which has its own codec: remove --codec",
        ),
        (["os:getcwd", "--service", "x", "--codec", "pickle"], "'pickle' is not one of 'json', 'msgpack', 'arrow'"),
        (["eager:worker"], "handler of 'x' is for asyncio: it needs an AsyncWorker"),
        (["broken:worker"], "SyntaxError"),
        (["raising:worker"], "raising.py:2)"),
    ],
)
def test_a_worker_that_cannot_be_used_is_one_line(tmp_path, monkeypatch, in_this_process, arguments, told):
    (tmp_path / "broken.py").write_text("def\n")
    (tmp_path / "raising.py").write_text("\n1/0\n")
    (tmp_path / "missing.py").write_text("import nowhere\n")
    text = "import asyncio\nfrom zmdp.workers import Worker\nworker = Worker('x', asyncio.sleep)\n"
    (tmp_path / "eager.py").write_text(text)
    (tmp_path / "sound.py").write_text("from zmdp.workers import Worker\nworker = Worker('echo', list)\n")
    monkeypatch.delitem(sys.modules, "sound", raising=False)  # a worker can be started only once
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds its directory
    monkeypatch.chdir(tmp_path)
    result = in_this_process("mdworker", *arguments)
    assert result.returncode == 2
    assert told in one_line(result)


@pytest.mark.parametrize("command", ["mdp-broker", "mdclient", "mdworker", "titanic", "mdp-spark"])
def test_short_help(in_this_process, command):
    short, long = in_this_process(command, "-h"), in_this_process(command, "--help")
    assert (short.returncode, short.stdout) == (0, long.stdout)
    assert b"  -h, --help " in short.stdout


@pytest.mark.parametrize("command", ["mdp-broker", "mdclient", "mdworker"])
def test_version(command):
    assert run(command, "--version").stdout.startswith(command.encode() + b" 0.")


ASYNC = """
import asyncio
from pathlib import Path
from zmdp.workers import AsyncWorker, Last

worker = AsyncWorker("hold", concurrency=2)

@worker
async def hold(request):
    path = Path(request[0].decode())
    path.write_text("held")
    while path.exists():
        await asyncio.sleep(0.01)
    return b"let go"

async def count(number):
    for each in range(number):
        yield each
    yield Last({"counted": number})
"""


@pytest.fixture
def module(tmp_path):
    (tmp_path / "services_of_mine.py").write_text(ASYNC)
    return tmp_path


def test_mdworker_serves_a_coroutine_function_with_a_codec(endpoint, mdclient, module):
    command = ("mdworker", "services:double", "--service", "double", "--codec", "json", "--broker", endpoint)
    with process(*command, cwd=HERE) as worker:
        worker.line("double: serving at ")
        assert mdclient("call", "--wait", "double", "21").stdout == b"42\n"
        result = mdclient("call", "double", "{")
        assert (result.returncode, "cannot be read as json" in one_line(result)) == (1, True)
        result = mdclient("call", "double", "null")
        assert (result.returncode, "TypeError" in one_line(result)) == (6, True)
    command = ("mdworker", "services_of_mine:count", "--service", "count", "--codec", "json", "--broker", endpoint)
    with process(*command, cwd=module) as worker:
        worker.line("count: serving at ")
        assert mdclient("stream", "--wait", "count", "2").stdout == b'0\n1\n{"counted":2}\n'


@pytest.mark.parametrize(
    "command",
    [["mdworker", "zmdp.workers.examples:echo"], ["titanic", "serve", "--db", "titanic.db"]],
    ids=lambda each: each[0],
)
def test_a_directory_that_has_been_deleted(tmp_path, command):
    gone = tmp_path / "gone"
    gone.mkdir()
    change = "import os, sys; os.rmdir(os.getcwd()); os.execv(sys.argv[1], sys.argv[1:])"
    result = subprocess.run(
        [sys.executable, "-c", change, str(BIN / command[0]), *command[1:]],
        cwd=gone, capture_output=True, timeout=TIMEOUT_SECONDS, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert one_line(result) == f"{command[0]}: the current directory has been deleted: change to one that exists"
