"""Spark sessions that are built right: Java, Python, addresses and schedulers set as the services here need them.

Classic (a driver in this process, on `local`, `local-cluster`, standalone, YARN, Kubernetes) and Spark Connect (`sc://`).
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from ..mdp.errors import SettingError, ZmdpError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NEEDS_PYSPARK: Final = "this needs PySpark: pip install 'zmdp[spark]'"
NEEDS_JAVA: Final = (
    "Spark needs Java 17 or newer: on Debian `apt-get install openjdk-17-jre-headless`; elsewhere install it and set "
    "JAVA_HOME"
)
OLDEST_JAVA: Final = 17
MASTER_PORT: Final = 7077
CONNECT_PORT: Final = 15002
DEFAULT_MASTER: Final = "local[*]"
_LOCAL: Final = re.compile(r"local(-cluster)?\b")
_MASTER: Final = re.compile(r"local(\[.+\])?|local-cluster\[\d+,\d+,\d+\]|spark://.+|yarn|k8s://.+")
_JAVA_CLASS: Final = re.compile(r"^(?:\w+\.)+\w+: ")
_STACK: Final = re.compile(r"\s*(== SQL|JVM stacktrace|at (org|java|scala)\.|'?\w+ \[|\+- )")
_PLAN_FOLLOWS: Final = re.compile(r"pos \d+;$")
_LOGGING: Final = Path(__file__).with_name("log4j2.properties")


class SparkError(ZmdpError):
    """Spark cannot be started, or not be reached; says why, and what to do."""


# ── Java ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def java() -> Path | None:
    """The `java` that Spark would run: that of JAVA_HOME, else the one on PATH.  None if there is none."""
    home = os.environ.get("JAVA_HOME")
    found = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    return Path(found) if found and Path(found).exists() else None


def java_version() -> int | None:
    """Its major version, 17 for example; None if there is no Java, or one that does not tell."""
    program = java()
    if program is None:
        return None
    try:
        told = subprocess.run([program, "-version"], capture_output=True, text=True, check=False, timeout=60)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', told.stderr + told.stdout)
    return int(match.group(1)) if match else None


def no_java() -> str:
    """Where it was looked for in vain."""
    home = os.environ.get("JAVA_HOME")
    return f"there is no Java at JAVA_HOME, {home}" if home else "there is no Java"


def check_installed() -> None:
    """Raises `SparkError` if PySpark cannot be imported or there is no Java that it runs on; says what to do."""
    try:
        import pyspark  # noqa: F401, PLC0415 - only who uses Spark needs it
    except ImportError:
        raise SparkError(NEEDS_PYSPARK) from None
    version = java_version()
    if version is None:
        raise SparkError(f"{no_java()}: {NEEDS_JAVA}")
    if version < OLDEST_JAVA:
        raise SparkError(f"{java()} is Java {version}: {NEEDS_JAVA}")


# ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def settings(master: str | None) -> dict[str, str]:
    """What is set for a classic session on `master` unless somebody says otherwise."""
    found = {
        "spark.scheduler.mode": "FAIR",  # requests share the cluster; none waits for the whole of another
        "spark.python.task.killTimeout": "0s",  # a cancelled task's Python is gone in two seconds
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.ui.showConsoleProgress": "false",
    }
    if master is not None and _LOCAL.match(master):
        # Loopback: nobody else's executors come, and a host's other addresses do not work everywhere.
        found |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    return found


def open_session(name: str, *, master: str | None = None, conf: Mapping[str, str] | None = None) -> "SparkSession":
    """A classic session: its driver is this process.

    `master` is as for `spark-submit`: `local[4]`, `spark://HOST:7077`, `yarn`, `k8s://…`; None takes what
    `spark-submit` set, else `local[*]`.  `conf` goes before what is set here (`settings`).  Executors run this very
    Python, unless `conf` or PYSPARK_PYTHON name another.

    Raises `SettingError` for a master or a setting that Spark refuses, `SparkError` for a cluster that does not answer
    and if PySpark or Java is missing.
    """
    given = dict(conf or {})
    master = settled_master(master, given)
    check_installed()
    from pyspark import SparkConf  # noqa: PLC0415
    from pyspark.sql import SparkSession  # noqa: PLC0415

    if _LOCAL.match(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if "spark.pyspark.python" in given:
        os.environ["PYSPARK_PYTHON"] = given["spark.pyspark.python"]  # the one that PySpark looks at
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if "log4j" not in given.get("spark.driver.extraJavaOptions", "") and "SPARK_CONF_DIR" not in os.environ:
        options = given.get("spark.driver.extraJavaOptions", "")
        given["spark.driver.extraJavaOptions"] = f"{options} -Dlog4j2.configurationFile={_LOGGING.as_uri()}".strip()
    for each in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        logging.getLogger(each).setLevel(logging.CRITICAL + 1)  # what a query gets wrong, its caller is told
    if master.startswith("spark://"):
        _check_answering("Spark master", master.removeprefix("spark://").split(","), MASTER_PORT)
    _forget_dead_jvm()
    asked = SparkConf().setMaster(master).setAppName(name).setAll(list({**settings(master), **given}.items()))
    try:
        with _signals_kept():
            return SparkSession.builder.config(conf=asked).getOrCreate()
    except Exception as error:  # py4j's, PySpark's, and what the launcher raises: all mean that there is no session
        _forget_half_made()
        raise SparkError(f"no Spark session on {master}: {_why_none(error)}") from error


@contextmanager
def _signals_kept() -> Iterator[None]:
    """PySpark takes Ctrl-C for itself when it makes a session: leave it to the program, if that has a use for it."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:  # also where a session was half made
        if before is not signal.default_int_handler and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


def checked_master(master: str) -> str:
    """`master`, if Spark can have it.  Raises `SettingError`."""
    if not _MASTER.fullmatch(master):
        raise SettingError(
            f"{master!r} is no Spark master: it takes local[N], local[*], spark://HOST:PORT, yarn, k8s://… "
            "or local-cluster[EXECUTORS,CORES,MEMORY]"
        )
    return master


def settled_master(master: str | None, conf: Mapping[str, str]) -> str:
    """The master that a session gets: `master`, else that of `conf`, else `spark-submit`'s, else `local[*]`.

    Raises `SettingError` for one that Spark cannot have.
    """
    return checked_master(master or conf.get("spark.master") or _submitted_master() or DEFAULT_MASTER)


def is_elsewhere(master: str | None) -> bool:
    """Whether that master's cluster may be away for a while, as those on other machines may."""
    return master is not None and not _LOCAL.match(master)


def _check_answering(what: str, places: Sequence[str], port: int) -> None:
    """Raises `SparkError` if nobody listens at any of these HOST[:PORT]: Spark itself would try for minutes."""
    reasons = []
    for each in places:
        try:
            found = urlsplit(f"//{each}")
            socket.create_connection((found.hostname or "", found.port or port), timeout=5).close()
        except ValueError:
            raise SettingError(f"{each!r}: a {what}'s address is HOST:PORT") from None
        except OSError as error:
            reasons.append(f"{each} ({error.strerror or error})")
        else:
            return
    raise SparkError(f"no {what} answers at {', '.join(reasons)}")


def _why_none(error: Exception) -> str:
    told = reason(error)
    if "stopped SparkContext" in told:  # it says where that was made, not why it was stopped
        return "the cluster does not answer, or refused the application; its log says why"
    return told


def _forget_half_made() -> None:
    """A session could not be made: leave nothing of it to the next."""
    from pyspark import SparkContext  # noqa: PLC0415
    from pyspark.sql import SparkSession  # noqa: PLC0415

    context = SparkContext._active_spark_context
    if context is not None:
        with suppress(Exception):
            context.stop()
        SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None


def connect_session(remote: str) -> "SparkSession":
    """A new session of the Spark Connect server at `remote`, `sc://HOST:PORT`.

    Raises `SettingError` if that is no such address, `SparkError` if nobody answers there.
    """
    if not remote.startswith("sc://"):
        raise SettingError(f"{remote!r} is no Spark Connect address: it takes sc://HOST:PORT")
    try:
        from pyspark.sql.connect.session import SparkSession  # noqa: PLC0415
    except ImportError as error:
        raise SparkError(f"Spark Connect needs its client: pip install 'zmdp[connect]' ({error})") from None
    _check_answering("Spark Connect server", [remote.removeprefix("sc://").partition("/")[0]], CONNECT_PORT)
    try:
        session = SparkSession.builder.remote(remote).create()
        session.version  # noqa: B018 - asks the server, which nothing has done yet
    except Exception as error:
        raise SparkError(f"no Spark Connect server at {remote}: {reason(error)}") from error
    return session  # type: ignore[return-value]  # its twin, with the same methods


def is_connect(session: "SparkSession") -> bool:
    """Whether it is a session of Spark Connect."""
    return type(session).__module__.startswith("pyspark.sql.connect")


def is_alive(session: "SparkSession") -> bool:
    """Whether a classic session's JVM is there, and has not stopped it, as it does when its cluster is lost."""
    with suppress(Exception):
        return not session.sparkContext._jsc.sc().isStopped()
    return False


def forget(session: "SparkSession") -> None:
    """End a session, though its cluster, its server or its JVM may be gone."""
    with suppress(Exception):
        session.stop()


def _forget_dead_jvm() -> None:
    """Have another JVM be started in the place of one that died: PySpark has no other way."""
    from pyspark import SparkContext  # noqa: PLC0415
    from pyspark.sql import SparkSession  # noqa: PLC0415

    gateway = SparkContext._gateway
    process = getattr(gateway, "proc", None)
    if gateway is None or process is None or process.poll() is None:
        return
    with suppress(Exception):
        gateway.shutdown()
    SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None


def reason(error: BaseException) -> str:
    """What Spark has to say, in one line: the condition and its message, or what Python raised."""
    java_exception = getattr(error, "java_exception", None)
    if java_exception is not None:
        cause = java_exception
        while cause.getCause() is not None:
            cause = cause.getCause()
        text = _JAVA_CLASS.sub("", str(cause.toString()), count=1)
    else:
        text = str(error) or type(error).__name__
    _, python, after = text.rpartition("Traceback (most recent call last):\n")
    if python:  # of a task: what it raised stands after the lines that say where, which are indented
        text = "\n".join(dropwhile(lambda line: line.startswith(" "), after.splitlines()))
    told = []
    for line in text.splitlines():
        if _STACK.match(line):
            break
        told.append(line.strip())
        if _PLAN_FOLLOWS.search(line):
            break
    return " ".join(line for line in told if line).rstrip("; ")[:1000]


def _submitted_master() -> str | None:
    """What `spark-submit` was told, if it is that which runs this program."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return None
    from pyspark import SparkConf  # noqa: PLC0415
    from pyspark.java_gateway import launch_gateway  # noqa: PLC0415

    return SparkConf(_jvm=launch_gateway().jvm).get("spark.master")  # type: ignore[no-untyped-call]
