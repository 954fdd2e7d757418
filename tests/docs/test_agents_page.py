"""The programs of the page about agents, and the agent in examples/."""

import sys

from support.http_gateways import await_services
from support.pages import DOCS, blocks
from support.processes import BIN, broker, process, run

from zmdp.mdp.services.tool import Tool

PAGE = (DOCS / "how-to" / "agents.md").read_text()


def test_a_service_is_a_tool(tmp_path):
    for program in blocks(PAGE, "python")[:2]:
        (tmp_path / program.splitlines()[0].removeprefix("# ")).write_text(program)
    main = tmp_path / "main.py"
    printed = next(each for each in blocks(PAGE, "console") if each.startswith("$ python main.py"))
    with broker() as (_, at), process("mdworker", "words:services", cwd=tmp_path, MDP_BROKER=at):
        await_services(at, "words.count")
        main.write_text(main.read_text().replace('["mcp"]', f'["mcp", "--broker", "{at}"]'))
        done = run(sys.executable, str(main), PATH=str(BIN))
    assert done.stdout.decode() == printed.partition("\n")[2], done.stderr.decode()


def test_the_agent():
    session = next(each for each in blocks(PAGE, "console") if "examples/agent" in each)
    expected = session.splitlines()[1:]
    done = run(sys.executable, str(DOCS.parent / "examples" / "agent" / "agent.py"))
    printed = done.stdout.decode().splitlines()
    left = expected.index("…")
    assert printed[:left] == expected[:left], done.stderr.decode()
    assert printed[-len(expected) + left + 1 :] == expected[left + 1 :]


def test_the_hints_are_those_of_the_class():
    for name in ("title", "read_only", "destructive", "durable"):
        assert name in Tool.__dataclass_fields__
        assert f"`{name}`" in PAGE or f"{name}=True" in PAGE
