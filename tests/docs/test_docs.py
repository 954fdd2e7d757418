"""The documentation is true: its examples run, its reference is what `--help` says, its links lead somewhere."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
from support.processes import broker, process, run

from zmdp.clients import Client
from zmdp.mdp.broker.journal import Drop, Loss, Refusal, Stats
from zmdp.mdp.limits import Limits
from zmdp.mdp.wire import Reason
from zmdp.titanic import schema
from zmdp.workers import Worker

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
DEFAULT = "tcp://127.0.0.1:5555"


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def shout(request):
    for word in request[0].split():
        yield word.upper()
    return b"%d letters" % len(request[0])


def fails(request):
    raise ValueError("no good")


@pytest.fixture(scope="module")
def endpoint():
    with (
        broker() as (_, at),
        Worker("echo", list, broker=at),
        Worker("shout", shout, broker=at),
        Worker("fails", fails, broker=at),
    ):
        yield at


def run_python(page, endpoint):
    names = {}
    for block in blocks(page, "python"):
        exec(compile(block.replace(DEFAULT, endpoint), page, "exec"), names)
    return names


def test_the_examples_of_the_readme(capsys):
    served, called, from_asyncio, _ = blocks("README.md", "python")
    names = {}
    with broker() as (_, at):
        exec(served.replace(DEFAULT, at), names)
        with names["worker"]:
            exec(called.replace(DEFAULT, at), names)
            exec(from_asyncio.replace(DEFAULT, at), names)
    assert capsys.readouterr().out.splitlines() == [
        "[b'HELLO'] False", "[b'BIG'] False", "[b'WORLD'] False", "[b'15 letters'] True",
        "b'7 letters'", "b'5 letters'", "b'13 letters'",
    ]  # fmt: skip


def test_the_commands_of_the_readme():
    session, *_ = blocks("README.md", "console")
    lines = session.splitlines()
    commands = [shlex.split(line.removeprefix("$ ")) for line in lines if line.startswith("$ ")]
    assert [command[0] for command in commands] == ["mdp-broker", "mdworker", "mdclient"]
    with broker() as (_, at), process(*commands[1], MDP_BROKER=at) as worker:
        worker.line("offers echo")
        assert run(*commands[2], "--wait", MDP_BROKER=at).stdout.decode().splitlines() == lines[3:]


@pytest.mark.parametrize("page", ["README.md", "docs/titanic.md"])
def test_the_commands_about_titanic(page, tmp_path):
    """Each command of the session prints what the page says; the uuid is another one each time."""
    lines = next(each for each in reversed(blocks(page, "console")) if "titanic" in each).splitlines()
    uuid = next(line for line in lines if re.fullmatch("[0-9a-f]{32}", line))
    with broker() as (_, at):
        asked = {"MDP_BROKER": at, "TITANIC_DB": str(tmp_path / "titanic.db")}
        serve = process("titanic", "serve", "--heartbeat", "0.2", **asked)
        worker = process("mdworker", "zmdp.workers.echo:worker", **asked)
        with serve as titanic, worker:
            titanic.line("serving")
            given = uuid
            for command, *printed in sessions(lines):
                words = shlex.split(command.replace(uuid, given))
                if words[0] == "titanic" and words[1] != "serve":
                    out = run(*words, **asked).stdout.decode().splitlines()
                    if printed == [uuid]:
                        (given,) = out
                    else:
                        assert out == printed


def sessions(lines):
    """Each command, and the lines it prints."""
    found = []
    for line in lines:
        if line.startswith("$ "):
            found.append([line.removeprefix("$ ")])
        else:
            found[-1].append(line)
    return found


def test_the_examples_of_the_titanic_page(endpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with process("titanic", "serve", "--broker", endpoint, "--heartbeat", "0.2", cwd=tmp_path) as titanic:
        titanic.line("serving")
        names = run_python("docs/titanic.md", endpoint)
        out = capsys.readouterr().out
        assert "[b'HELLO']" in out
        assert "[b'15 letters']" in out
        assert "it failed" not in out
        reply = run("titanic", "reply", names["uuid"], "--wait", "--stream", MDP_BROKER=endpoint)
        assert reply.stdout.split() == [b"A", b"NEW", b"ORDER", b"11", b"letters"]
        names["engine"].dispose()


def test_the_query_of_the_titanic_page(tmp_path):
    engine = schema.open_engine(schema.database_url(str(tmp_path / "t.db")), create=True)
    schema.upgrade(engine)
    (query,) = blocks("docs/titanic.md", "sql")
    with engine.connect() as connection:
        assert connection.exec_driver_sql(query).all() == []
    engine.dispose()


def test_the_examples_of_the_python_page(endpoint, capsys):
    run_python("docs/python.md", endpoint)
    assert "500 ValueError: no good" in capsys.readouterr().out


def test_the_examples_of_the_wire_page(endpoint, capsys):
    with Client(endpoint) as client:
        client.request("echo")  # by then there is a worker
    run_python("docs/wire.md", endpoint)
    (block,) = blocks("docs/wire.md", "python")
    assert capsys.readouterr().out.strip() == re.search(r"  # (\[.*\])$", block, re.MULTILINE)[1]


def test_the_command_of_the_mmi_page(endpoint):
    (session,) = blocks("docs/mmi.md", "console")
    ((command, *printed),) = sessions(session.splitlines())
    with Client(endpoint) as client:
        client.request("echo")  # by then there is a worker
    assert run(*shlex.split(command), MDP_BROKER=endpoint).stdout.decode().splitlines() == printed


def test_the_toml_example(tmp_path):
    (config,) = blocks("docs/operations.md", "toml")
    (tmp_path / "broker.toml").write_text(
        config.replace(DEFAULT, "tcp://127.0.0.1:*").replace("/run/zmdp", str(tmp_path))
    )
    with process("mdp-broker", "--config", str(tmp_path / "broker.toml")) as running:
        running.line("ipc://", "stdout")


def test_the_command_reference_is_what_help_says():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert (ROOT / "docs" / "commands.md").read_text() == generate.reference(), "run python docs/generate.py"


def test_every_reason_and_count_is_documented():
    page = (ROOT / "docs" / "mmi.md").read_text()
    names = {str(each) for kind in (Reason, Drop, Refusal, Loss) for each in kind} | set(Stats().as_dict())
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_every_key_of_the_answers_is_documented(endpoint):
    page = (ROOT / "docs" / "mmi.md").read_text()
    with Client(endpoint) as client:
        client.request("echo")  # by then there is a worker to tell of
        for question in ("mmi.services", "mmi.workers", "mmi.stats", "mmi.broker"):
            answer = json.loads(client.request(question)[0])
            rows = next((value for value in answer.values() if isinstance(value, list)), [{}])
            missing = [key for key in (*answer, *rows[0]) if f"`{key}`" not in page and f'"{key}"' not in page]
            assert missing == []


def test_every_limit_is_an_option():
    page = (ROOT / "docs" / "commands.md").read_text()
    assert [name for name in Limits.__dataclass_fields__ if f"--{name.replace('_', '-')}" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    targets = [t for t in re.findall(r"\]\(([^)#]+)", page.read_text()) if "://" not in t]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_files_that_the_architecture_names_exist():
    folders = "mdp|mmi|clients|workers|titanic|spark|src|tests"
    names = re.findall(rf"`((?:{folders})/[\w/]+(?:\.py)?)`", (ROOT / "ARCHITECTURE.md").read_text())
    assert names
    assert [name for name in names if not (ROOT / name).exists()] == []
