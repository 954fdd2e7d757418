"""Open Spark sessions whose Java, Python, addresses and scheduler are set up for zmdp's services.

Supports classic sessions, whose driver is this process, and Spark Connect (`sc://`).
"""

import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from ..mdp.errors import SettingError, ZmdpError
from ..mdp.program.extras import install_command
from .reasons import reason

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NEEDS_JAVA: Final = (
    "Spark needs Java 17 or newer: on Debian, run `apt-get install openjdk-17-jre-headless`; elsewhere, install Java "
    "and set JAVA_HOME"
)
OLDEST_JAVA: Final = 17
MASTER_PORT: Final = 7077
CONNECT_PORT: Final = 15002
FIRST_PAUSE_SECONDS: Final = 1.0
"""Pause before opening a session is retried; it doubles each time."""
LONGEST_PAUSE_SECONDS: Final = 32.0
DEFAULT_MASTER: Final = "local[*]"
_MASTER: Final = re.compile(r"local(\[.+\])?|local-cluster\[\d+,\d+,\d+\]|spark://.+|yarn|k8s://.+")
_LOGGING: Final = Path(__file__).with_name("log4j2.properties")


class SparkError(ZmdpError):
    """Spark cannot be started or reached; the message says why, and how to fix it."""


# ── Java ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def find_java() -> Path | None:
    """Return the `java` that Spark would run: that of JAVA_HOME, otherwise that on PATH; None if there is none."""
    home = os.environ.get("JAVA_HOME")
    found = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    return Path(found) if found and Path(found).exists() else None


def java_version() -> int | None:
    """Return the major version of Java, for example 17, or None if Java is missing or does not report it."""
    program = find_java()
    if program is None:
        return None
    try:
        done = subprocess.run([program, "-version"], capture_output=True, text=True, check=False, timeout=60)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', done.stderr + done.stdout)
    return int(match.group(1)) if match else None


def java_problem() -> str | None:
    """Return why Spark cannot run with this machine's Java, or None if it can."""
    version = java_version()
    if version is None:
        home = os.environ.get("JAVA_HOME")
        return f"there is no Java in JAVA_HOME ({home})" if home else "there is no Java on PATH"
    return f"{find_java()} is Java {version}" if version < OLDEST_JAVA else None


def check_installed() -> None:
    """Say what to install: raise `SettingError` if PySpark is missing, `SparkError` if a Java that it supports is."""
    try:
        import pyspark  # noqa: F401, PLC0415 - optional dependency
    except ImportError:
        raise SettingError(f"this needs PySpark: {install_command('spark')}") from None
    problem = java_problem()
    if problem is not None:
        raise SparkError(f"{problem}: {NEEDS_JAVA}")


# ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def default_conf(master: str) -> dict[str, str]:
    """Return the Spark settings that `open_session` uses by default on `master`."""
    found = {
        "spark.scheduler.mode": "FAIR",  # concurrent requests share the cluster
        "spark.python.task.killTimeout": "0s",  # a cancelled task's Python process ends within two seconds
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.ui.showConsoleProgress": "false",
    }
    if not is_remote(master):
        # All executors are on this machine, and a host's other addresses do not work everywhere.
        found |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    return found


def open_session(
    name: str, *, master: str | None = None, conf: Mapping[str, str] | None = None, py_files: Sequence[str] = ()
) -> "SparkSession":
    """Open a classic session, whose driver is this process.

    Args:
        name: the application's name.
        master: as for `spark-submit`: `local[4]`, `spark://HOST:7077`, `yarn`, `k8s://…`.  None uses what
            `spark-submit` set, otherwise `local[*]`.
        conf: Spark settings, which override those of `default_conf`.
        py_files: modules and zips to ship to executors, as paths or URLs; see `check_py_files`.  A session that already
            exists is returned without them.

    Executors run this Python unless `conf` or PYSPARK_PYTHON names another one.

    Raises `SettingError` if `master` is invalid or PySpark is missing, and `SparkError` if Java is missing, the cluster
    does not answer, or Spark refuses a setting or a file.
    """
    given = dict(conf or {})
    master = resolve_master(master, given)
    check_installed()
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415
    from pyspark.sql import SparkSession  # noqa: PLC0415

    if not is_remote(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if "spark.pyspark.python" in given:
        os.environ["PYSPARK_PYTHON"] = given["spark.pyspark.python"]  # PySpark reads the variable, not the setting
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if "log4j" not in given.get("spark.driver.extraJavaOptions", "") and "SPARK_CONF_DIR" not in os.environ:
        options = given.get("spark.driver.extraJavaOptions", "")
        given["spark.driver.extraJavaOptions"] = f"{options} -Dlog4j2.configurationFile={_LOGGING.as_uri()}".strip()
    for each in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        logging.getLogger(each).setLevel(logging.CRITICAL + 1)  # errors in queries go to their callers
    if master.startswith("spark://"):
        _check_listening("Spark master", master.removeprefix("spark://").split(","), MASTER_PORT)
    _discard_dead_jvm()
    exists = SparkContext._active_spark_context is not None
    spark_conf = SparkConf().setMaster(master).setAppName(name).setAll(list({**default_conf(master), **given}.items()))
    try:
        with _sigint_preserved():
            session = SparkSession.builder.config(conf=spark_conf).getOrCreate()
    except Exception as error:  # raised by py4j, PySpark or the launcher
        _reset_pyspark()
        why = reason(error)
        if "stopped SparkContext" in why:  # says where the context was created, not why it was stopped
            why = "the cluster does not answer or refused the application; see its log"
        raise SparkError(f"no Spark session on {master}: {why}") from error
    # Not with spark.submit.pyFiles, which has no effect when spark-submit runs this program.
    for each in () if exists else py_files:
        try:
            session.sparkContext.addPyFile(each)
        except Exception as error:
            stop_quietly(session)
            raise SparkError(f"Spark cannot fetch {each}: {reason(error)}") from error
    return session


def check_file(path: str) -> None:
    """Raise `SettingError` if the file `path` does not exist.

    URLs are not checked, and of `PATH#FOLDER`, which names where to unpack an archive, only the path is.
    """
    if "://" not in path and not Path(path.partition("#")[0]).is_file():
        raise SettingError(f"no such file: {path}")


def check_py_files(paths: Sequence[str]) -> None:
    """Raise `SettingError` if one of the files to ship to executors is missing, or is a wheel."""
    for each in paths:
        check_file(each)
        if each.endswith(".whl"):
            raise SettingError(
                f"{each}: Spark ignores wheels. Rename a pure-Python wheel to .zip; install others in the Python of "
                "the executors"
            )


def open_patiently(
    open_: Callable[[], object],
    failed: Callable[[SparkError, float], object],
    stopped: Callable[[], bool] = lambda: False,
) -> bool:
    """Call `open_` until it does not raise `SparkError`, with growing pauses.  Return False if `stopped` meanwhile.

    `failed` is told each error, and the seconds until the next attempt.
    """
    pause = FIRST_PAUSE_SECONDS
    while not stopped():
        try:
            open_()
        except SparkError as error:
            failed(error, pause)
        else:
            return True
        until = time.monotonic() + pause
        while time.monotonic() < until and not stopped():
            time.sleep(0.1)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    return False


def silence_py4j() -> None:
    """Hide messages of py4j and PySpark about lost connections; the errors that they lead to are raised.

    Filters handlers rather than a logger, because py4j also logs to the root logger.
    """
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: "py4j" not in record.pathname)
    with suppress(ImportError):
        from pyspark import accumulators  # noqa: PLC0415 - optional dependency

        for name in ("AccumulatorTCPServer", "AccumulatorUnixServer"):  # print a traceback when the JVM has gone
            server = getattr(accumulators, name, None)
            if server is not None:
                server.handle_error = lambda *arguments: None


@contextmanager
def _sigint_preserved() -> Generator[None]:
    """Restore the program's SIGINT handler, which PySpark replaces when it creates a session."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:  # also if creating the session failed
        if before is not signal.default_int_handler and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


def resolve_master(master: str | None, conf: Mapping[str, str]) -> str:
    """Return the master to use: `master`, otherwise that of `conf`, of `spark-submit`, or `local[*]`.

    Raises `SettingError` if it is invalid.
    """
    found = master or conf.get("spark.master") or submitted("spark.master") or DEFAULT_MASTER
    if not _MASTER.fullmatch(found):
        raise SettingError(
            f"{found!r} is not a Spark master: use local[N], local[*], spark://HOST:PORT, yarn, k8s://… "
            "or local-cluster[EXECUTORS,CORES,MEMORY]"
        )
    return found


def is_remote(master: str | None) -> bool:
    """Whether the cluster of `master` may be on other machines, and so be unreachable for a while."""
    return master is not None and not master.startswith("local")


def _check_listening(what: str, places: Sequence[str], port: int) -> None:
    """Raise `SparkError` if nothing listens at any of these HOST[:PORT]: Spark would retry for minutes."""
    reasons = []
    for each in places:
        try:
            found = urlsplit(f"//{each}")
            socket.create_connection((found.hostname or "", found.port or port), timeout=5).close()
        except ValueError:
            raise SettingError(f"{each!r}: the address of a {what} is HOST:PORT") from None
        except OSError as error:
            reasons.append(f"{each} ({error.strerror or error})")
        else:
            return
    raise SparkError(f"no {what} answers at {', '.join(reasons)}")


def _reset_pyspark() -> None:
    """Clear PySpark's globals, so that the next session starts cleanly."""
    from pyspark import SparkContext  # noqa: PLC0415
    from pyspark.sql import SparkSession  # noqa: PLC0415

    context = SparkContext._active_spark_context
    if context is not None:
        with suppress(Exception):
            context.stop()
        SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None


def connect_session(remote: str, py_files: Sequence[str] = ()) -> "SparkSession":
    """Open a session on the Spark Connect server at `remote`, `sc://HOST:PORT`; `py_files` are shipped to executors.

    Raises `SettingError` if the address is invalid or a package is missing, and `SparkError` if the server does not
    answer.
    """
    shown = without_parameters(remote)
    if not remote.startswith("sc://"):
        raise SettingError(f"{shown!r} is not a Spark Connect address: use sc://HOST:PORT")
    try:
        from pyspark.sql.connect.session import SparkSession  # noqa: PLC0415
    except ImportError as error:
        raise SettingError(f"Spark Connect needs its client: {install_command('connect')} ({error})") from None
    _check_listening("Spark Connect server", [shown.removeprefix("sc://").partition("/")[0]], CONNECT_PORT)
    try:
        os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"  # tells pyspark.sql.functions, as `getOrCreate` does
        session = SparkSession.builder.remote(remote).create()
        session.version  # noqa: B018 - the first call that reaches the server
        for each in py_files:
            session.addArtifacts(each, pyfile=True)
    except Exception as error:
        raise SparkError(f"no Spark Connect server at {shown}: {reason(error)}") from error
    return session  # type: ignore[return-value]  # Connect's class has the same methods


def without_parameters(remote: str) -> str:
    """Return the address of a Spark Connect server as logs and status may show it: parameters may have a token."""
    return remote.partition(";")[0].removesuffix("/")


def is_connect(session: "SparkSession") -> bool:
    """Whether this is a Spark Connect session, or one of a subclass."""
    return any(kind.__module__.startswith("pyspark.sql.connect") for kind in type(session).__mro__)


def is_alive(session: "SparkSession") -> bool:
    """Whether a classic session's JVM runs and has not stopped the context, as it does when the cluster is lost."""
    with suppress(Exception):
        return not session.sparkContext._jsc.sc().isStopped()
    return False


def stop_quietly(session: "SparkSession") -> None:
    """Stop a session, ignoring errors: its cluster, server or JVM may be gone."""
    with suppress(Exception):
        session.stop()


def _discard_dead_jvm() -> None:
    """Make PySpark start a new JVM if the old one died; it has no public way to do so."""
    from pyspark import SparkContext  # noqa: PLC0415

    gateway = SparkContext._gateway
    process = getattr(gateway, "proc", None)
    if gateway is None or process is None or process.poll() is None:
        return
    with suppress(Exception):
        gateway.shutdown()
    SparkContext._gateway = SparkContext._jvm = None
    _reset_pyspark()


def submitted(name: str) -> str | None:
    """Return the value of a setting given to `spark-submit` if that runs this program, otherwise None."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return None
    from pyspark import SparkConf  # noqa: PLC0415
    from pyspark.java_gateway import launch_gateway  # noqa: PLC0415

    return SparkConf(_jvm=launch_gateway().jvm).get(name)  # type: ignore[no-untyped-call]
