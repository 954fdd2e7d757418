"""The command `zmdp`, behind which all others are."""

import subprocess
import sys

import click
import pytest

from zmdp.cli import HELP, cli
from zmdp.entry_points import PROGRAMS, SHORTCUTS
from zmdp.mdp.cli.console import SectionedCommand

NAMES = [name for commands in HELP.values() for name in commands]


def test_the_help_names_every_command():
    assert {*NAMES} == {*PROGRAMS, *SHORTCUTS}


@pytest.mark.parametrize("name", NAMES)
def test_each_command_says_how_it_was_called(name, in_this_process):
    shown = in_this_process("zmdp", name, "--help")
    assert shown.returncode == 0
    assert shown.stdout.decode().startswith(f"Usage: zmdp {name} ")


def test_the_usage_of_a_command_within_a_command(in_this_process):
    wrong = in_this_process("zmdp", "client", "call", "--nonsense")
    assert (wrong.returncode, wrong.stderr.decode().splitlines()[0]) == (
        2, "Usage: zmdp client call [OPTIONS] SERVICE [BODY]..."
    )  # fmt: skip
    assert in_this_process("zmdp", "keys", "show", "/no/such.key").stderr.startswith(b"zmdp keys: cannot read")


def test_an_unknown_command(in_this_process):
    wrong = in_this_process("zmdp", "nonsense")
    assert (wrong.returncode, b"No such command 'nonsense'" in wrong.stderr) == (2, True)


def test_the_help_and_the_version(in_this_process):
    shown = in_this_process("zmdp", "--help").stdout.decode()
    assert [name for name in NAMES if f"\n  {name} " not in shown] == []
    assert in_this_process("zmdp").stdout.decode() + in_this_process("zmdp").stderr.decode() == shown
    assert in_this_process("zmdp", "--version").stdout.startswith(b"zmdp 0.")


def test_the_help_imports_nothing_but_click():
    program = """
import sys
from zmdp.entry_points import zmdp
sys.argv = ["zmdp", "--help"]
try:
    zmdp()
finally:
    print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    ours = {name for name in loaded if name.split(".")[0] == "zmdp"}
    assert ours == {"zmdp", "zmdp.version", "zmdp.entry_points", "zmdp.cli"}
    assert not {"asyncio", "msgspec", "sqlalchemy", "zmq"} & {*loaded}


def test_python_m_zmdp():
    done = subprocess.run([sys.executable, "-m", "zmdp", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: zmdp ")


@pytest.mark.parametrize(
    ("words", "found"),
    [("zmdp bro", {"broker"}), ("zmdp broker --pirate-w", {"--pirate-workers"}), ("zmdp client pi", {"ping"})],
)
def test_completion(words, found, in_this_process, monkeypatch):
    env = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_ZMDP_COMPLETE": "bash_complete"}
    lines = in_this_process("zmdp", **env).stdout.decode().split()
    assert {line.partition(",")[2] for line in lines} == found


def sectioned(command, context):
    """Yield every command with sections at and below a command."""
    if isinstance(command, SectionedCommand):
        yield command
    for name in command.list_commands(context) if isinstance(command, click.Group) else ():
        yield from sectioned(command.get_command(context, name), context)


def test_headings_name_options_that_exist_and_come_last():
    commands = list(sectioned(cli, click.Context(cli)))
    assert len(commands) >= 4
    for command in commands:
        context = click.Context(command)
        *_, newest = shown = command.get_help(context).split("\n\n")
        assert "--help" not in newest
        options = {each.name: each for each in command.get_params(context)}
        text = "\n\n".join(shown)
        for heading, names in command.sections.items():
            at = text.index(f"{heading}:")
            assert [name for name in names if text.find(f"\n  {options[name].opts[0]}") < at] == []
