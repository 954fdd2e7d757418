"""Too few file descriptors: an error that says so, before libzmq ends the process or a socket cannot be closed."""

import errno
import os
import subprocess
import sys
from textwrap import dedent

import pytest

from zmdp.mdp.errors import SettingError
from zmdp.mdp.transport.sockets import FREE_FILES, check_descriptors

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")

PROGRAM = dedent("""
    import asyncio, os, resource, sys
    from zmdp import AsyncClient, AsyncWorker, Client, Worker
    from zmdp.mdp.errors import SettingError
    from zmdp.interop.freelance.worker import FreelanceWorker
    from zmdp.mdp.broker.io.loop import Server
    from zmdp.mdp.transport.reach import why_unreachable

    NOWHERE = "tcp://127.0.0.1:1"

    async def echo(request):
        return request

    async def open_async(kind, *arguments):
        opened = kind(*arguments, broker=NOWHERE)
        if kind is AsyncWorker:
            opened.start()
            opened.abort()
            await opened.wait()
        else:
            await opened.close()

    def open_worker(worker):
        worker.start()
        worker.close()
        worker.wait()

    def echo_sync(request):
        return request

    def probe():
        reason = why_unreachable(NOWHERE)
        if "nothing is listening" not in reason:
            raise SettingError(reason)

    KINDS = {
        "Client": lambda: Client(NOWHERE).close(),
        "AsyncClient": lambda: loop.run_until_complete(open_async(AsyncClient)),
        "Worker": lambda: open_worker(Worker("echo", echo_sync, broker=NOWHERE)),
        "AsyncWorker": lambda: loop.run_until_complete(open_async(AsyncWorker, "echo", echo)),
        "FreelanceWorker": lambda: open_worker(FreelanceWorker("ipc://here", echo_sync)),
        "Server": lambda: Server(["tcp://127.0.0.1:*"]).close(),
        "probe": probe,
    }

    loop = asyncio.new_event_loop()
    make = KINDS[sys.argv[1]]
    make()  # imports what it needs
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    taken = []
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    for free in range(100):
        try:
            make()
        except SettingError as error:
            assert "this process may have 100 open: raise the limit (ulimit -n)" in str(error), error
        else:
            break
        os.close(taken.pop())
    print(free)
""")


@pytest.mark.parametrize(
    "kind", ["Client", "AsyncClient", "Worker", "AsyncWorker", "FreelanceWorker", "Server", "probe"]
)
def test_nothing_is_begun_without_enough_descriptors(kind, tmp_path):
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert FREE_FILES <= int(found.stdout) <= 2 * FREE_FILES


def test_the_check_leaves_nothing_open():
    before = os.dup(0)
    os.close(before)
    check_descriptors(10)
    after = os.dup(0)
    os.close(after)
    assert after == before


@pytest.mark.parametrize(
    ("reason", "remedy"), [(errno.EMFILE, "(ulimit -n), or close files"), (errno.ENFILE, "(sysctl fs.file-max)")]
)
def test_whose_limit_it_is(monkeypatch, reason, remedy):
    def pipe():
        raise OSError(reason, "none left")

    monkeypatch.setattr(os, "pipe", pipe)
    with pytest.raises(SettingError) as refused:
        check_descriptors()
    assert str(refused.value).endswith(remedy)


def test_other_errors_pass(monkeypatch):
    def pipe():
        raise OSError(errno.EPERM, "not allowed")

    monkeypatch.setattr(os, "pipe", pipe)
    with pytest.raises(PermissionError):
        check_descriptors()
