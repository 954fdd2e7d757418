"""The examples of the page about Freelance."""

import shlex
from contextlib import ExitStack
from pathlib import Path

from support.pages import blocks
from support.processes import free_endpoint, process, run

from zmdp.interop.freelance.worker import freelance_worker
from zmdp.interop.freelance.worker import session as freelance_session
from zmdp.workers.examples import echo

PAGE = (Path(__file__).parents[2] / "docs" / "interoperability" / "freelance.md").read_text()
NAMES = ("tcp://127.0.0.1:5555", "tcp://127.0.0.1:5556", "tcp://127.0.0.1:5557")


def blocks_at(language, endpoints):
    for block in blocks(PAGE, language):
        text = block
        for name, endpoint in zip(NAMES, endpoints, strict=True):
            text = text.replace(name, endpoint)
        yield text


def test_the_first_steps():
    (session,) = blocks_at("console", [free_endpoint() for _ in NAMES])
    *serve, call, printed = session.splitlines()
    assert len(serve) == 2
    words = shlex.split(call.removeprefix("$ "))
    with ExitStack() as stack:
        servers = [stack.enter_context(process(*shlex.split(line.removeprefix("$ ")))) for line in serve]
        for server in servers:
            server.line("offering echo at")
        assert run(*words).stdout.decode() == f"{printed}\n"
        servers[0].kill()
        assert run(*words).stdout.decode() == f"{printed}\n"


def test_the_examples_in_python(capsys):
    endpoints = [free_endpoint() for _ in NAMES]
    names = {}
    with freelance_worker(echo, endpoints[0]), freelance_worker(echo, endpoints[1]):
        for block in blocks_at("python", endpoints):
            exec(compile(block, "docs/interoperability/freelance.md", "exec"), names)
    trips, alive = capsys.readouterr().out.splitlines()
    assert all(endpoint in trips and endpoint in alive for endpoint in endpoints[:2])


def test_the_limits_and_reasons():
    reasons = [value for name, value in vars(freelance_session).items() if name.isupper() and isinstance(value, str)]
    assert len(reasons) == 7
    assert [reason for reason in reasons if f"`{reason}`" not in PAGE] == []
    assert f"up to {freelance_session.MAX_WAITING:,} or {freelance_session.MAX_WAITING_BYTES >> 20}" in PAGE
    assert f"every {freelance_session.REPORT_SECONDS:g} seconds" in PAGE
