"""Checks the documentation: examples run, the reference matches `--help`, links and citations exist."""

import importlib.util
import io
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from pathlib import Path

import pytest
import rules
from support import pages
from support.databases import Database, new_file
from support.postgres import cluster as new_cluster
from support.processes import BIN, TIMEOUT_SECONDS, broker, eventually, free_endpoint, process, run

from zmdp.clients import Client
from zmdp.mdp.broker.core.drops import Drop
from zmdp.mdp.broker.core.journal import Loss, Refusal, Stats
from zmdp.mdp.limits import Limits
from zmdp.mdp.wire import Reason
from zmdp.titanic.db import schema
from zmdp.workers import Worker

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "docs" / "reference" / "commands.md"
"""Written by `make docs`."""
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {GENERATED})
REPOSITORY = "https://github.com/zmdp/zmdp/blob/main/"
DEFAULT = "tcp://127.0.0.1:5555"


def blocks(page, language):
    return pages.blocks((ROOT / page).read_text(), language)


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


def test_the_first_example_of_the_readme(tmp_path):
    """The service and its caller run as separate programs, and print what the page shows."""
    programs = blocks("README.md", "python")
    session, *_ = blocks("README.md", "console")
    for program in programs:
        (tmp_path / program.splitlines()[0].removeprefix("# ")).write_text(program)
    (start,), (serve,), (call, *printed) = sessions(session.splitlines())
    assert start == "mdp-broker"
    with broker() as (_, at), process(*shlex.split(serve), cwd=tmp_path, MDP_BROKER=at):
        await_worker(at)
        _, name = shlex.split(call)
        done = run(sys.executable, str(tmp_path / name), MDP_BROKER=at)
        assert done.stdout.decode().splitlines() == printed, done.stderr.decode()


def test_the_first_page_of_the_site_shows_the_programs_of_the_readme():
    shown, tested = (" ".join(blocks(page, "python")).split("\n") for page in ("docs/index.md", "README.md"))
    assert [line for line in shown if line.strip().removesuffix("  # 3") not in map(str.strip, tested)] == []


def test_the_examples_of_the_services_page(endpoint, tmp_path, monkeypatch):
    """`images.py` runs as `mdworker` runs it, and the other examples call it."""
    program, *others = blocks("docs/how-to/services.md", "python")
    (tmp_path / "images.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MDP_BROKER", endpoint)
    database = {"TITANIC_DB": str(tmp_path / "titanic.db")}
    with (
        process("mdworker", "images:services", cwd=tmp_path) as worker,
        process(
            "titanic", "serve", "--heartbeat", "0.2", "--liveness", "50", MDP_BROKER=endpoint, **database
        ) as titanic,
    ):
        worker.line("serving at")
        titanic.line("serving")
        names = {}
        exec(compile(program, "docs/how-to/services.md", "exec"), names)
        for each in others:
            exec(compile(each, "docs/how-to/services.md", "exec"), names)
        names["client"].close()


def await_worker(endpoint):
    """Wait until a worker has registered."""
    with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        eventually(lambda: json.loads(client.request("mmi.stats")[0])["workers"])


def test_the_endpoint_of_the_readme_is_the_default(monkeypatch):
    monkeypatch.delenv("MDP_BROKER", raising=False)
    with Client() as client:
        assert (client.endpoint, Worker("echo").settings.endpoints) == (DEFAULT, [DEFAULT])
    assert f"`{DEFAULT}`, where `mdp-broker` listens" in " ".join((ROOT / "README.md").read_text().split())


def test_the_demo_runs_without_spark():
    done = run(sys.executable, str(ROOT / "examples" / "demo.py"))
    assert done.returncode == 0, done.stderr.decode()
    assert b"each of the 500 has its reply: True" in done.stdout
    assert b"`make demo-spark`" in done.stdout
    assert b"mdp-spark" not in done.stdout


def test_only_the_demo_of_spark_installs_pyspark():
    demo, demo_spark = (
        subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for target in ("demo", "demo-spark")
    )
    assert "examples/demo.py" in demo
    assert "spark" not in demo
    assert "examples/spark_scenes.py" in demo_spark


def test_the_make_targets_that_pages_name_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z][\w-]+)\b", "".join(map(str, code_of(PAGES)))))
    assert {"demo", "demo-spark", "test"} <= named
    assert named <= targets


def test_pages_install_from_a_checkout_until_there_is_a_release():
    """What an index has under this name until then may be somebody else's."""
    released = re.search(r"^## \d", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    wrong = re.compile("/path/to/zmdp" if released else r"pip install[^`\n]*[ ']zmdp\b")
    assert [page.name for page in PAGES if wrong.search(page.read_text())] == []


def code_of(pages):
    """Return the code on the pages, in blocks and within lines."""
    return [code for page in pages for code in re.findall(r"```.*?```|`[^`]+`", page.read_text(), re.DOTALL)]


def test_the_commands_about_titanic(tmp_path):
    """Each command of the session prints what the page shows, except that UUIDs differ."""
    lines = blocks("docs/how-to/titanic.md", "console")[-1].splitlines()
    uuid = next(line for line in lines if re.fullmatch("[0-9a-f]{32}", line))
    with broker() as (_, at):
        asked = {"MDP_BROKER": at, "TITANIC_DB": str(tmp_path / "titanic.db")}
        serve = process("titanic", "serve", "--heartbeat", "0.2", "--liveness", "50", **asked)
        worker = process("mdworker", "zmdp.workers.examples:echo", **asked)
        with worker, ExitStack() as stack:
            await_worker(at)
            stack.enter_context(serve).line("serving")
            given = uuid
            for command, *printed in sessions(lines):
                words = shlex.split(command.replace(uuid, given))
                if words[0] == "titanic" and words[1] != "serve":
                    out = run(*words, **asked).stdout.decode().splitlines()
                    if printed == [uuid]:
                        (given,) = out
                    else:
                        assert out == printed


def test_the_commands_about_backups(tmp_path):
    """SQLite is backed up, restored and moved to PostgreSQL, which is dumped and restored, as the page says."""
    page = "docs/how-to/backups.md"
    (backup, move), (restore, dump, undump) = blocks(page, "console"), blocks(page, "sh")
    new_file(tmp_path / "titanic.db")
    file = Database(str(tmp_path / "titanic.db"))
    with new_cluster() as cluster:
        env = os.environ | cluster.environment
        env["PATH"] = f"{BIN}:{env['PATH']}"

        def execute(text, **more):
            done = subprocess.run(
                ["sh", "-ec", text], cwd=tmp_path, env=env | more, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        def check_printed(session):
            for command, *printed in sessions(session.splitlines()):
                out = execute(command)
                assert re.sub(r"\d+ bytes", "bytes", out) == re.sub(r"\d+ bytes", "bytes", "\n".join([*printed, ""]))

        file.add("first")
        file.add("second")
        check_printed(backup)
        file.add("later")
        file.engine.dispose()
        assert "later" not in execute(restore)
        cluster.execute("CREATE DATABASE queue")
        check_printed(move)
        execute(dump, TITANIC_DB="postgresql:///queue")
        restored, original = execute(undump), execute("titanic stats --db titanic.db")
        # An age of two digits is wider than one of one.
        assert re.sub(r" +\d+[smh]\b", " age", restored) == re.sub(r" +\d+[smh]\b", " age", original)


def sessions(lines):
    """Return each command and the lines that it prints."""
    found = []
    for line in lines:
        if line.startswith("$ "):
            found.append([line.removeprefix("$ ")])
        else:
            found[-1].append(line)
    return found


def test_the_examples_of_the_titanic_page(endpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with process(
        "titanic", "serve", "--broker", endpoint, "--heartbeat", "0.2", "--liveness", "50", cwd=tmp_path
    ) as titanic:
        titanic.line("serving")
        names = run_python("docs/how-to/titanic.md", endpoint)
        out = capsys.readouterr().out
        assert "[b'HELLO']" in out
        assert "[b'15 letters']" in out
        assert "[b'8 letters']" in out
        assert "it failed" not in out
        reply = run("titanic", "reply", names["uuid"], "--wait", "--stream", MDP_BROKER=endpoint)
        assert reply.stdout.split() == [b"A", b"NEW", b"ORDER", b"11", b"letters"]
        names["engine"].dispose()


def test_the_query_of_the_titanic_page(tmp_path):
    engine = schema.open_engine(schema.database_url(str(tmp_path / "t.db")), create=True)
    schema.upgrade(engine)
    (query,) = blocks("docs/how-to/titanic.md", "sql")
    with engine.connect() as connection:
        assert connection.exec_driver_sql(query).all() == []
    engine.dispose()


def test_the_examples_of_the_python_page(endpoint, capsys):
    run_python("docs/how-to/python.md", endpoint)
    assert "500 ValueError: no good" in capsys.readouterr().out


def test_the_examples_of_the_page_about_tests(endpoint):
    run_python("docs/how-to/test.md", endpoint)


def test_the_examples_about_logging(endpoint, monkeypatch):
    root, said = logging.Logger("root"), io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(logging, "getLogger", lambda: root)
    call, setup = blocks("docs/how-to/operations.md", "python")
    exec(setup, {})

    def resize(request):
        root.info("resizing")
        return request.headers["request-id"].encode()

    [handler] = root.handlers
    handler.formatter._style._fmt += " %(request_id)s"
    with Worker("resize", resize, broker=endpoint), Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        exec(call, {"client": client, "image": b""})
    assert said.getvalue().endswith(" resizing order-7\n")


def test_the_examples_of_the_conformance_page(endpoint, capsys):
    with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        client.request("echo")  # now there is a worker
    run_python("docs/reference/conformance.md", endpoint)
    (block,) = blocks("docs/reference/conformance.md", "python")
    assert capsys.readouterr().out.strip() == re.search(r"  # (\[.*\])$", block, re.MULTILINE)[1]


def test_the_programs_of_the_pirates_page(tmp_path):
    """The worker, the client and `mdclient` run as separate programs, and print what the page shows."""
    client, worker = blocks("docs/interoperability/pirates.md", "python")
    start, *_ = blocks("docs/interoperability/pirates.md", "sh")
    (session,) = blocks("docs/interoperability/pirates.md", "console")
    at = free_endpoint()
    for program in (client, worker):
        assert program.count("tcp://127.0.0.1:5556") == 1
        name = program.splitlines()[0].removeprefix("# ")
        (tmp_path / name).write_text(program.replace("tcp://127.0.0.1:5556", at))
    command, *options = shlex.split(start.replace("tcp://127.0.0.1:5556", at))
    with process(command, "--bind", "tcp://127.0.0.1:*", *options) as running:
        main = running.line("://", "stdout")
        with process(sys.executable, str(tmp_path / "worker.py")):
            await_worker(main)
            printed = run(sys.executable, str(tmp_path / "client.py")).stdout.decode().strip()
            assert printed == re.search(r"  # (\[.*\])$", client, re.MULTILINE)[1]
            ((command, *printed),) = sessions(session.splitlines())
            assert run(*shlex.split(command), MDP_BROKER=main).stdout.decode().splitlines() == printed


def test_the_pair_of_the_page_about_brokers():
    """The programs run in parallel, and the calls print what the page shows."""
    started, *_ = blocks("docs/how-to/brokers.md", "sh")
    (session,) = blocks("docs/how-to/brokers.md", "console")
    left, right = (free_endpoint() for _ in range(2))

    def words(line):
        return shlex.split(line.replace("tcp://127.0.0.1:5555", left).replace("tcp://127.0.0.1:5556", right))

    with ExitStack() as stack:
        running = [stack.enter_context(process(*words(line))) for line in started.splitlines()]
        assert len(running) == 3
        running[0].line("linked to broker right")
        await_worker(right)
        with Client(left, timeout=TIMEOUT_SECONDS) as client:
            eventually(lambda: b"[]" not in client.request("mmi.brokers")[0])
            answer = json.loads(client.request("mmi.brokers")[0])
            mmi = (ROOT / "docs" / "reference" / "mmi.md").read_text()
            assert [key for key in (*answer["links"][0], *answer["brokers"][0]) if f"`{key}`" not in mmi] == []
        for command, *printed in sessions(session.splitlines()):
            assert run(*words(command)).stdout.decode().splitlines() == printed


def test_the_tree_of_the_page_about_brokers():
    _, _, started, *_ = blocks("docs/how-to/brokers.md", "sh")
    lines = started.splitlines()
    ports = {port: free_endpoint() for port in ("5555", "5565", "5575")}
    with ExitStack() as stack:
        for line in lines:
            told = re.sub(r"tcp://127\.0\.0\.1:(\d+)", lambda found: ports[found[1]], line)
            stack.enter_context(process(*shlex.split(told)))
        client = stack.enter_context(Client(ports["5565"], timeout=TIMEOUT_SECONDS))

        def names():
            return [each["name"] for each in json.loads(client.request("mmi.brokers")[0])["brokers"]]

        eventually(lambda: names() == ["root", "south"])


def test_the_command_of_the_mmi_page(endpoint):
    (session,) = blocks("docs/reference/mmi.md", "console")
    ((command, *printed),) = sessions(session.splitlines())
    with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        client.request("echo")  # now there is a worker
    assert run(*shlex.split(command), MDP_BROKER=endpoint).stdout.decode().splitlines() == printed


def test_the_toml_example(tmp_path):
    (config,) = blocks("docs/how-to/operations.md", "toml")
    (tmp_path / "broker.toml").write_text(
        config.replace(DEFAULT, "tcp://127.0.0.1:*").replace("/run/zmdp", str(tmp_path))
    )
    with process("mdp-broker", "--config", str(tmp_path / "broker.toml")) as running:
        running.line("ipc://", "stdout")


def script(name):
    """Return a program in `docs/` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_reference_has_every_command():
    page = script("generate").reference()
    commands = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert [name for name in commands if f"## {name}\n" not in page] == []
    assert "### mdclient call\n" in page


def test_the_command_reference_is_wrapped():
    formatted = "Usage: x\n\n  " + "word " * 29 + "word\n  the end\n\n  kept\n    as it is\n"
    words = ["  " + " ".join(["word"] * 19), "  " + "word " * 11 + "the end"]
    assert script("generate").wrapped(formatted).splitlines() == ["Usage: x", "", *words, "", "  kept", "    as it is"]
    assert max(map(len, script("generate").reference().splitlines())) <= 100


def test_every_reason_and_count_is_documented():
    page = (ROOT / "docs" / "reference" / "mmi.md").read_text()
    names = {str(each) for kind in (Reason, Drop, Refusal, Loss) for each in kind} | set(Stats().as_dict())
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_every_key_of_the_answers_is_documented(endpoint):
    page = (ROOT / "docs" / "reference" / "mmi.md").read_text()
    with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        tail = client.request("mmi.tail")[0]
        client.submit("nobody")
        client.request("echo")  # now there are a worker and requests to report
        client.submit("nobody", wait=False)
        questions = ("services", "workers", "stats", "broker", "brokers", "requests", "failures")
        for question, *body in (*((f"mmi.{each}",) for each in questions), ("mmi.tail", tail)):
            answer = json.loads(client.request(question, *body)[0])
            rows = next((value for value in answer.values() if isinstance(value, list)), [{}])
            missing = [
                key for key in (*answer, *(rows or [{}])[0]) if f"`{key}`" not in page and f'"{key}"' not in page
            ]
            assert missing == []


def test_every_limit_is_an_option():
    page = script("generate").reference()
    assert [name for name in Limits.__dataclass_fields__ if f"--{name.replace('_', '-')}" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_a_target(page):
    links = re.findall(r"\]\(([^)]+)\)", page.read_text())
    targets = [target(page, link) for link in links if "://" not in link or link.startswith(REPOSITORY)]
    assert [path for path, _ in targets if not path.exists() and path != GENERATED] == []
    assert [(path.name, anchor) for path, anchor in targets if anchor and anchor not in anchors(path)] == []


def target(page, link):
    """Return the file that a link on a page leads to, and the anchor."""
    path, _, anchor = link.partition("#")
    if link.startswith(REPOSITORY):
        return ROOT / path.removeprefix(REPOSITORY), anchor
    return (page.parent / path).resolve() if path else page, anchor


def anchors(page):
    """Return the anchors that GitHub gives to the headings of a page, and those that it sets itself."""
    text = script("generate").reference() if page == GENERATED else page.read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    named = re.findall(r'<a id="([\w-]+)">', text)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings} | set(named)


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/explanation/guarantees.md"])
def test_the_files_that_a_page_names_exist(page):
    folders = "mdp|mmi|clients|workers|titanic|spark|migrations|src|tests|docs|bench|examples"
    names = re.findall(rf"`((?:{folders})/[\w./-]+)`", (ROOT / page).read_text())
    assert names
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_pages_that_other_files_name_exist():
    folders = [*CODE, "deploy", "monitoring", ".github", ".ci"]
    found = (path for each in folders for path in (ROOT / each).rglob("*"))
    files = [path for path in found if path.is_file() and path.parent.suffix != ".egg-info"]
    files += [path for path in ROOT.iterdir() if path.is_file()]
    named = {
        (str(path.relative_to(ROOT)), page)
        for path in files
        if path.suffix in {"", ".py", ".toml", ".yaml", ".yml", ".conf", ".Dockerfile"}
        for page in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(errors="ignore"))
    }
    assert len(named) > 10
    assert {each for each in named if not (ROOT / each[1]).exists() and ROOT / each[1] != GENERATED} == set()


# ── conformance and glossary ─────────────────────────────────────────────────────────────────────────────────────────

RULES = re.findall(r"^- \*\*C(\d+)\*\* ", (ROOT / "docs" / "reference" / "conformance.md").read_text(), re.MULTILINE)
CODE = ["mdp", "mmi", "clients", "workers", "titanic", "spark", "migrations", "src", "tests", "bench", "examples"]


def test_the_rules_are_numbered_without_gaps():
    assert [int(number) for number in RULES] == list(range(1, len(RULES) + 1))


def test_every_rule_that_is_cited_exists():
    files = [path for top in CODE for kind in ("*.py", "*.pyx") for path in (ROOT / top).rglob(kind)]
    cited = {
        (number, str(path.relative_to(ROOT)))
        for path in [*files, *PAGES]
        # C01 and C02 are the headers of MDP, not rules.
        for number in re.findall(r"\bC([1-9]\d?)\b", path.read_text())
    }
    assert len({number for number, _ in cited}) > 30
    assert sorted((number, path) for number, path in cited if number not in RULES) == []


def test_every_rule_has_a_test():
    assert sorted(rules.rules().keys() - rules.proofs().keys()) == []


def test_the_table_of_rules_and_their_tests_is_current():
    assert rules.PAGE.read_text() == rules.page(), "write it again: python tests/rules.py"


def test_the_glossary_is_in_order():
    terms = re.findall(r"^- \*\*([^*]+)\*\*: ", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert terms == sorted(terms, key=str.lower)
    assert {"address", "credit", "envelope", "suspect", "X1"} <= set(terms)


# ── width ────────────────────────────────────────────────────────────────────────────────────────────────────────────

LONG = "word " * 25


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x" * 100, []),
        ("x" * 101, [1]),
        (f"short\n{LONG}\n", [2]),
        (f"```\n{LONG}\n```\n{LONG}", [4]),
        (f"text:\n\n    {LONG}\n    {LONG}\n{LONG}", [5]),
        (f"- item\n    {LONG}", [2]),  # continues the item
        (f"| a | {LONG} |", []),
        (f"[a link](https://{'x' * 100})", []),
        (f"[a link](page.md) {LONG}", [1]),
        (f"<https://{'x' * 100}>", []),
    ],
)
def test_lines_that_are_too_long_are_found(text, found):
    assert script("check_width").long_lines(text) == found


def test_the_pages_that_people_write_are_checked():
    names = {page.name for page in script("check_width").pages()}
    assert {"README.md", "CONTRIBUTING.md", "x1.md"} <= names
    assert "commands.md" not in names
