"""A Titanic for tests: in this process, for a `with` block."""

import asyncio
import threading
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager

from ..titanic.server.program import Server


@contextmanager
def running_titanic(broker: str, db: str) -> Generator[Server]:
    """Run a Titanic in a thread.

        with running_broker() as server, running_titanic(server.endpoints[0], "test.db"): ...

    Requests in progress when the block ends stay in the file.

    Args:
        broker: The broker's endpoint.
        db: The SQLite file with its requests.

    Yields:
        The server.

    Raises:
        SettingError: A setting is invalid.
        SchemaError: The file has the tables of another version.
    """
    server = Server(db, broker=broker, drain_timeout=0.0)
    ready: Future[asyncio.AbstractEventLoop] = Future()
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            asyncio.run(server.run(lambda: ready.set_result(asyncio.get_running_loop())))
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread of the test
            failures.append(error)
            if not ready.done():
                ready.set_exception(error)

    thread = threading.Thread(target=serve, name="zmdp-titanic", daemon=True)
    thread.start()
    loop = ready.result()
    try:
        yield server
    finally:
        if not failures:
            loop.call_soon_threadsafe(server.stop)
        thread.join()
    if failures:
        raise failures[0]
