"""A PgBouncer before the tests' PostgreSQL: on a Unix socket, and ended afterwards."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest
from support.postgres import Cluster, unprivileged
from support.processes import TIMEOUT_SECONDS, eventually

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")  # which users may not have in PATH
MISSING = "PgBouncer is not installed: apt-get install pgbouncer"


@contextmanager
def pgbouncer(cluster: Cluster, **settings: str) -> Iterator[str]:
    """Run PgBouncer with transaction pooling and two connections to the server; yield its folder, for `through`."""
    if PROGRAM is None:
        pytest.skip(MISSING)
    folder = Path(tempfile.mkdtemp(prefix="zmdp-bouncer-", dir="/tmp"))
    how = unprivileged(folder)
    if "user" in how:
        os.chown(folder, how["user"], how["group"])
    ours = {
        "listen_addr": "", "unix_socket_dir": folder, "auth_type": "any", "pool_mode": "transaction",
        "default_pool_size": "2", "logfile": folder / "log", **settings,
    }  # fmt: skip
    lines = ["[databases]", f"* = host={cluster.folder} user=postgres", "[pgbouncer]"]
    (folder / "ini").write_text("\n".join([*lines, *(f"{name} = {value}" for name, value in ours.items())]))
    process = subprocess.Popen([PROGRAM, "-q", folder / "ini"], **how)
    try:

        def answers() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            with suppress(psycopg.OperationalError), psycopg.connect(_url(folder, "postgres")):
                return True
            return False

        eventually(answers)
        yield str(folder)
    finally:
        process.terminate()
        process.wait(TIMEOUT_SECONDS)
        shutil.rmtree(folder)


def through(folder: str, url: str) -> str:
    """Return the URL that leads to the database of `url` through the PgBouncer in `folder`."""
    return _url(Path(folder), url.partition("?")[0].rpartition("/")[2])


def _url(folder: Path, name: str) -> str:
    return f"postgresql://postgres@/{name}?host={folder}&port=6432"
