"""Opening sessions: everything that needs no Spark."""

import signal
import socket
import sys
from contextlib import suppress

import pytest
from support.connect import connected
from support.processes import process, run
from support.results import package

from zmdp.mdp.errors import SettingError
from zmdp.spark import session
from zmdp.spark.reasons import reason


@pytest.mark.parametrize("master", ["spark", "locl[2]", "local[2", "http://x", "local-cluster[1,2]"])
def test_invalid_masters(master):
    with pytest.raises(SettingError, match="is not a Spark master: use"):
        session.open_session("test", master=master)


def test_invalid_connect_addresses():
    with pytest.raises(SettingError, match="use sc://HOST:PORT"):
        session.connect_session("localhost:15002")


def test_the_token_of_a_connect_server_is_not_shown(tmp_path):
    package("grpc")
    with pytest.raises(SettingError) as failed:
        session.connect_session("localhost:15002/;token=sesame")
    assert "sesame" not in str(failed.value)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"sc://127.0.0.1:{server.getsockname()[1]}/wrong"
        options = ("--connect", f"{address};token=sesame", "--history", str(tmp_path / "history.db"))
        with process("mdp-spark", "batch", *options) as batch:
            batch.line(f"starting Spark on {address}")
            batch.line(f"no Spark Connect server at {address}: ")
            batch.end()
        assert "sesame" not in batch.stderr


def test_ctrl_c_stays_the_programs_also_where_no_session_was_made():
    def ours(number, frame):
        raise AssertionError

    before = signal.signal(signal.SIGINT, ours)
    try:
        with suppress(RuntimeError), session._sigint_preserved():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # as PySpark sets its own
            raise RuntimeError
        assert signal.getsignal(signal.SIGINT) is ours
    finally:
        signal.signal(signal.SIGINT, before)


def java(folder, text, code=0):
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{text}' >&2\nexit {code}\n")
    program.chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "21-ea" 2023', 21),
        ('java version "1.8.0_292"', 8),
        ("nonsense", None),
    ],
)
def test_the_version_of_java(tmp_path, monkeypatch, text, version):
    monkeypatch.setenv("JAVA_HOME", java(tmp_path, text))
    assert session.java_version() == version


@pytest.mark.parametrize("needs", [session.check_installed, lambda: session.connect_session("sc://127.0.0.1")])
def test_a_missing_package_is_a_matter_of_installation(monkeypatch, needs):
    for name in ("pyspark", "pyspark.sql.connect.session"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SettingError, match=r"pip install .*\[(spark|connect)\]'"):
        needs()


def test_missing_or_old_java_is_reported_in_one_line(tmp_path, monkeypatch):
    package("pyspark")
    nowhere = {"JAVA_HOME": str(tmp_path / "none"), "PATH": str(tmp_path)}
    for name, value in nowhere.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        session.SparkError, match=r"there is no Java in JAVA_HOME \(.*/none\): Spark needs Java 17 or newer"
    ):
        session.check_installed()
    monkeypatch.setenv("JAVA_HOME", java(tmp_path, 'openjdk version "11.0.2"'))
    with pytest.raises(session.SparkError, match="is Java 11: Spark needs Java 17"):
        session.check_installed()


def test_commands_without_java(tmp_path):
    package("pyspark")
    done = run("mdp-spark", "batch", JAVA_HOME=str(tmp_path), PATH="/nowhere")
    assert (done.returncode, done.stderr.decode().count("\n")) == (1, 1), done.stderr
    assert "there is no Java in JAVA_HOME" in done.stderr.decode()
    assert run("mdp-spark", JAVA_HOME=str(tmp_path)).stderr.startswith(b"Usage: mdp-spark")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--config", "nowhere.toml"), "cannot read nowhere.toml"),
        (("--job", "x=nowhere:f"), "No module named 'nowhere'"),
        (("--job", "x"), "expected NAME=VALUE"),
        (("--master", "locl"), "'locl' is not a Spark master"),
        (("--connect", "sc://x", "--master", "local[2]"), "--connect cannot be combined with --master"),
        (("--connect", "http://x"), "is not a Spark Connect address"),
        (("--inline", "999999999999"), "bytes can be sent"),
        (("--py-files", "nowhere.py"), "no such file: nowhere.py"),
        (("--name", "a b"), "is not a valid name"),
        (("--concurrency", "0"), "a whole number of requests (greater than 0)"),
    ],
)
def test_invalid_arguments_of_a_batch(in_this_process, tmp_path, arguments, message):
    package("pyspark")
    found = in_this_process("mdp-spark", "batch", *arguments, JAVA_HOME=java(tmp_path, 'openjdk version "17"'))
    assert found.returncode == 2, found.stderr
    assert message in found.stderr.decode().splitlines()[-1]


def test_a_subclass_of_a_connect_session_is_a_connect_session():
    connect = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})
    own = type("CatalogueSession", (connect,), {})
    assert session.is_connect(own())
    assert not session.is_connect(object())


@pytest.mark.long
@pytest.mark.usefixtures("java")
@pytest.mark.timeout(2400)
def test_modules_on_connect(tmp_path, monkeypatch):
    module = tmp_path / "modules" / "zmdp_doubling.py"
    module.parent.mkdir()
    module.write_text("def double(n):\n    return 2 * n\n")
    monkeypatch.syspath_prepend(module.parent)
    with connected(tmp_path) as opened:
        from pyspark.sql.functions import udf
        from zmdp_doubling import double

        remote = f"sc://127.0.0.1:{opened.client._builder.endpoint.rpartition(':')[2]}"
        doubled = udf(double, "bigint")
        with pytest.raises(Exception, match="zmdp_doubling") as raised:
            opened.range(3).select(doubled("id")).collect()
        assert reason(raised.value) == (
            "ModuleNotFoundError: No module named 'zmdp_doubling'; executors need it: start the batch with --py-files "
            "FILE, a .py file or a zip that has it"
        )
        shipped = session.connect_session(remote, [str(module)])
        assert [row[0] for row in shipped.range(3).select(doubled("id")).collect()] == [0, 2, 4]
        shipped.stop()
