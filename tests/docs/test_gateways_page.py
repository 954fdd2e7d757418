"""The examples of the page about gateways: commands, programs, and JavaScript in a real browser."""

import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support import browser as browsers
from support.http_gateways import TITANIC, await_services, http_gateway
from support.offered import offered
from support.pages import blocks, need_curl
from support.processes import TIMEOUT_SECONDS, broker, process

from zmdp import Services
from zmdp.gateways import access
from zmdp.gateways.http import cli
from zmdp.mdp.http.problems import KINDS, SERVICE_ERROR, TYPE_BASE
from zmdp.workers import Worker

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "gateways.md").read_text()
GATEWAY = (sys.executable, "-m", "zmdp.gateways.cli")
URL = "http://127.0.0.1:8080"
SERVERS = {"mdp-broker", "mdworker"}


images = Services()


@images.service("images.find")
def find(query: str) -> Iterator[str]:
    for number in range(3):
        yield f"{query}-{number}.png"


@dataclass
class Image:
    path: str
    width: int | None


@images.service("images.list")
def listed(query: str) -> Iterator[Image]:
    yield Image(f"{query}-0.png", 80)
    yield Image(f"{query}-1.png", None)


def sessions():
    """Return each command of the page, and what it prints."""
    return [
        re.fullmatch(r"((?:.*\\\n)*.*)\n((?:.*\n)*)", session).groups()
        for block in blocks(PAGE, "console")
        for session in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    ]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    """A broker, with the workers of the page."""
    folder = tmp_path_factory.mktemp("page")
    programs = blocks(PAGE, "python")
    with (
        broker() as (_, at),
        process("titanic", "serve", "--broker", at, cwd=folder),
        process("mdworker", "zmdp.workers.examples:echo", "--broker", at),
        Worker("images.resize", lambda job: {"width": job["width"], "height": 60}, broker=at, codec="json"),
    ):
        with ExitStack() as stack:
            for program in programs:
                file = folder / program.split()[1]
                file.write_text(re.sub(r"Worker\(", f'Worker(broker="{at}", service=', program))
                stack.enter_context(process(sys.executable, str(file)))
            await_services(at, "echo", "words", "table", "images.resize", *TITANIC)
            with offered(images, at):
                yield at


def test_the_commands_print_what_the_page_shows(endpoint, tmp_path):
    """UUIDs and tokens differ, and so do responses in the headers that the page leaves out."""
    need_curl()
    given = {}  # what the page shows → what is there
    options = ("--bind", "127.0.0.1:0", "--broker", endpoint)
    tried = 0
    with ExitStack() as stack:
        for command, printed in sessions():
            words = shlex.split(command)
            if words[:2] == ["mdp-gateway", "http"]:
                gateway = stack.enter_context(process(*GATEWAY, *words[1:], *options, cwd=tmp_path))
                given[URL] = gateway.line("http://", "stdout")
            elif words[0] not in SERVERS:
                check(command.replace("mdp-gateway", shlex.join(GATEWAY)), printed, given, tmp_path)
                tried += 1
    assert tried >= 9


def check(command, printed, given, folder):
    """Run a command, and compare what it prints."""
    for shown, real in given.items():
        command = command.replace(shown, real)
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True, cwd=folder
    )
    for pattern in (r"\b[0-9a-f]{32}\b", r"\bzmdp_[\w-]{43}"):
        given.update(zip(re.findall(pattern, printed), re.findall(pattern, done.stdout), strict=False))
    for shown, real in given.items():
        printed = printed.replace(shown, real)
    if "--include" in command:
        assert [line for line in printed.splitlines() if line not in done.stdout.splitlines()] == []
    else:
        assert done.stdout.rstrip("\n") == printed.rstrip("\n")


@pytest.mark.skipif(browsers.PROGRAM is None, reason="needs the browser Chromium: apt-get install chromium")
def test_the_programs_in_javascript(endpoint, tmp_path):
    (with_fetch,) = blocks(PAGE, "js")
    handler = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        origin = f"http://127.0.0.1:{server.server_port}"
        try:
            with (
                http_gateway(endpoint, allow_origins=(origin,)) as gateway,
                browsers.browser(tmp_path / "browser") as page,
            ):
                page.open(origin + "/")

                (stream,) = [printed for command, printed in sessions() if "event-stream" in command]
                program = with_fetch.replace(URL, gateway.url)
                assert page.evaluate(f"(async () => {{ {program} }})()") == stream
        finally:
            server.shutdown()
            thread.join()


def test_the_table_of_errors_has_every_kind():
    rows = re.findall(r'^\| (\d+) \| <a id="([\w-]+)"></a>`([\w-]+)` \| \S', PAGE, re.MULTILINE)
    assert [kind for _, anchor, kind in rows if anchor != kind] == []
    assert {kind: int(status) for status, _, kind in rows} == {name: kind.status for name, kind in KINDS.items()}
    assert f'<a id="{SERVICE_ERROR}"></a>' in PAGE
    assert TYPE_BASE.endswith("/docs/how-to/gateways.md#")


def test_the_options_that_the_page_names_exist():
    known = {option for parameter in cli.cli.params for option in parameter.opts}
    named = set(
        re.findall(r"--[a-z]+(?:-[a-z]+)*", "".join(blocks(PAGE, "sh")) + "".join(re.findall(r"`(--[^`]+)`", PAGE)))
    )
    assert len(named) > 10
    assert named <= known


def test_the_access_file_of_the_page_is_valid(tmp_path):
    (text,) = blocks(PAGE, "toml")
    caller = access.parse(text, tmp_path).roles["shop"]
    assert caller.may_call(b"spark.sql")
