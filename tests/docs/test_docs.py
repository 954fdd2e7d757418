"""The documentation is true: its examples run, its reference is what `--help` says, its links lead somewhere."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
from support.processes import broker, process, run

from zmdp.clients import Client
from zmdp.mdp.journal import Drop, Loss, Refusal, Stats
from zmdp.mdp.limits import Limits
from zmdp.mdp.wire import Reason
from zmdp.workers import Worker

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
DEFAULT = "tcp://127.0.0.1:5555"


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def shout(request):
    for word in request[0].split():
        yield word.upper()


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
    served, called, from_asyncio = blocks("README.md", "python")
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
    (session,) = blocks("README.md", "console")
    lines = session.splitlines()
    commands = [shlex.split(line.removeprefix("$ ")) for line in lines if line.startswith("$ ")]
    assert [command[0] for command in commands] == ["mdp-broker", "mdworker", "mdclient"]
    with broker() as (_, at), process(*commands[1], MDP_BROKER=at) as worker:
        worker.line("serving echo")
        assert run(*commands[2], "--wait", MDP_BROKER=at).stdout.decode().splitlines() == lines[3:]


def test_the_examples_of_the_python_page(endpoint, capsys):
    run_python("docs/python.md", endpoint)
    assert "500 ValueError: no good" in capsys.readouterr().out


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
    names = re.findall(r"`((?:mdp|mmi|clients|workers|tests)/[\w/]+(?:\.py)?)`", (ROOT / "ARCHITECTURE.md").read_text())
    assert names
    assert [name for name in names if not (ROOT / name).exists()] == []
