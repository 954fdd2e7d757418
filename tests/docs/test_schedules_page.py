"""The examples of docs/how-to/schedules.md run, and its table is that of the declared options."""

import re
import shlex
from pathlib import Path

import pytest
from support.pages import blocks
from support.processes import TIMEOUT_SECONDS, broker, eventually, process, run
from support.titanics import QUICK

from zmdp.clients import Client
from zmdp.titanic import Schedules, Titanic
from zmdp.titanic.api.schedules import SCHEDULE_OPTIONS
from zmdp.titanic.api.submission import OPTIONS
from zmdp.titanic.operator.command.parameter_types import flag

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "schedules.md").read_text()


def block(language, about=""):
    (found,) = (each for each in blocks(PAGE, language) if about in each)
    return found


@pytest.fixture
def endpoint(tmp_path):
    with broker() as (_, at):
        db = ("--db", str(tmp_path / "titanic.db"))
        with process("titanic", "serve", "--broker", at, *db, *QUICK) as titanic:
            titanic.line("titanic.schedule: serving")
            yield at


def test_the_session(endpoint):
    """Each command prints what the page shows, except that times and UUIDs differ."""
    asked = {"MDP_BROKER": endpoint}
    with process("mdworker", "zmdp.workers.examples:echo", **asked):
        for part in re.split(r"^\$ ", block("console"), flags=re.MULTILINE)[1:]:
            command, *printed = part.splitlines()
            if command.endswith(" ls"):
                eventually(lambda: b" done" in run("titanic", "schedule", "ls", **asked).stdout)
            done = run(*shlex.split(command), **asked)
            assert done.returncode == 0, done.stderr
            assert [shape(line) for line in done.stdout.decode().splitlines()] == [shape(line) for line in printed]


def shape(line):
    """Return a line without its times, UUIDs and widths."""
    for pattern in (r"[0-9a-f]{32}", r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\dZ", r"\d+s ago", r" +"):
        line = re.sub(pattern, " ", line)
    return line


def test_the_program(endpoint, capsys):
    names = {}
    exec(block("python", "Schedules(client)").replace("tcp://127.0.0.1:5555", endpoint), names)
    assert re.fullmatch(r"nightly 20\S+ None\ntick 20\S+ None\n", capsys.readouterr().out)
    with Client(endpoint) as client:
        (row,) = Schedules(client).ls()
    assert (row["name"], row["paused"]) == ("nightly", True)


def test_the_service(endpoint, tmp_path):
    (tmp_path / "cleaning.py").write_text(block("python", "@services.service"))
    with process("mdworker", "cleaning:services", MDP_BROKER=endpoint, PYTHONPATH=str(tmp_path)):
        with Client(endpoint) as client:
            (row,) = eventually(Schedules(client).ls)
            told = {name: row[name] for name in ("name", "service", "every", "retries")}
            assert told == {"name": "service:cleanup", "service": "cleanup", "every": 300.0, "retries": 3}
            uuid = Schedules(client).run("service:cleanup")
            assert Titanic(client).ticket(uuid).result(TIMEOUT_SECONDS) == [b"0"]


def test_the_table_of_options():
    rows = [
        f"| `{name}` | `{flag(name)}` | `{option.wire_name or name}` | {option.help} | {option.default} |"
        for name, option in SCHEDULE_OPTIONS.items()
        if name not in OPTIONS
    ]
    assert len(rows) == 4
    assert "\n".join(rows) in PAGE
