"""The examples of the page about security, run in order in one folder, as a newcomer would."""

import re
import shlex
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.pages import blocks
from support.processes import process, run

from zmdp.clients import Client
from zmdp.mdp.security.access import load, parse
from zmdp.mdp.security.keys import create_keys
from zmdp.testing import free_endpoint

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "security.md").read_text()
BIND, ADDRESS = "tcp://*:5555", "tcp://127.0.0.1:5555"
SERVERS = {"mdp-broker": "ready on", "mdworker": "serving at"}


def block_with(text):
    """Return the one block of commands that contains `text`."""
    (found,) = [block for block in blocks(PAGE, "sh") if text in block]
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("MDP_KEY", "MDP_BROKER", "MDP_BROKER_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_the_first_steps(folder):
    env, endpoint = {}, ADDRESS
    lines = [line for block in blocks(PAGE, "console") for line in block.splitlines()]
    commands = [at for at, line in enumerate(lines) if line.startswith("$ ")]
    with ExitStack() as stack:
        brokers = []
        for at, end in zip(commands, [*commands[1:], len(lines)], strict=True):
            text = lines[at].removeprefix("$ ").replace(BIND, "tcp://*:*").replace(ADDRESS, endpoint)
            words = shlex.split(text)
            if words[0] == "export":
                env |= dict(word.split("=", 1) for word in words[1:])
            elif words[0] in SERVERS:
                started = stack.enter_context(process(*words, cwd=folder, **env))
                started.line(SERVERS[words[0]])
                if words[0] == "mdp-broker":
                    endpoint = started.line("tcp://", "stdout").replace("0.0.0.0", "127.0.0.1")
                    brokers.append(started)
            else:
                done = run(*words, **env)
                assert done.returncode == 0, (words, done)
                if words[0] != "mdp-keys":
                    assert done.stdout.decode().splitlines() == lines[at + 1 : end]
        (program,) = blocks(PAGE, "python")
        exec(compile(program.replace(ADDRESS, endpoint), "security.md", "exec"), {})
        (broker,) = brokers
        check, hang_up = block_with("--check").splitlines()
        assert b"may call   resize" in run(*shlex.split(check)).stdout
        assert hang_up.startswith("kill -HUP ")
        create_keys("web", folder)
        assert run(*shlex.split("mdp-keys allow shop web.key --access access.toml")).returncode == 0
        broker.send_signal(signal.SIGHUP)
        broker.line("reloaded access.toml: 2 roles, 3 keys")
        assert run(*shlex.split(block_with("revoke"))).returncode == 0
        assert load(folder / "access.toml").keys_of("shop") == ["shop.key"]
        *_, token = [run(*shlex.split(line, comments=True)) for line in block_with("mdp-keys token").splitlines()]
        assert load(folder / "access.toml").roles["ops"].admin
        assert len(token.stdout.split()) == 1


def test_the_access_file(folder):
    for name in ("broker", "shop", "web"):
        create_keys(name, folder)
    text = blocks(PAGE, "toml")[0]
    access = parse(text, folder / "access.toml")
    assert access.keys_of("shop") == ["shop.key", "web.key"]
    assert access.roles["shop"].may_call(b"spark.sql")


def test_the_access_file_of_linked_brokers(folder):
    for name in ("left", "right"):
        create_keys(name, folder)
    (folder / "left.toml").write_text(next(block for block in blocks(PAGE, "toml") if "left.key_secret" in block))
    access = load(folder / "left.toml")
    assert access.roles["brokers"].link
    words = shlex.split(
        block_with("--peer").replace(BIND, "tcp://127.0.0.1:*").replace("tcp://right:5555", "tcp://127.0.0.1:1")
    )
    with process(*words, cwd=folder) as started:
        started.line("no link to broker tcp://127.0.0.1:1 yet: nothing is listening there")
    (command,) = re.findall(r"`(mdp-keys allow brokers [^`]*)`", PAGE)
    (folder / "left.toml").write_text('secret_key = "left.key_secret"\n')
    assert run(*shlex.split(command)).returncode == 0
    assert load(folder / "left.toml").roles["brokers"] == access.roles["brokers"]


def test_programs_use_either_of_a_pair_with_keys(folder):
    for name in ("left", "right", "shop", "resizer"):
        create_keys(name, folder)
    roles = "".join(block for block in blocks(PAGE, "toml") if "left.key_secret" in block)
    roles += '[roles.shop]\nkeys = ["shop.key"]\ncall = ["*"]\n[roles.resizer]\nkeys = ["resizer.key"]\noffer = ["*"]\n'
    (folder / "left.toml").write_text(roles)
    mirrored = roles.replace("left.key_secret", "right.key_secret").replace('"right.key"', '"left.key"')
    (folder / "right.toml").write_text(mirrored)
    export, serve, call = block_with("left.key,tcp").splitlines()
    ends = {name: free_endpoint() for name in ("left", "right")}
    for name, endpoint in ends.items():
        export = export.replace(f"tcp://{name}:5555", endpoint)
    env = dict([export.removeprefix("export ").split("=", 1)])
    with ExitStack() as stack:
        brokers = {}
        for name, other in (("left", "right"), ("right", "left")):
            options = ("--name", name, "--access", f"{name}.toml", "--bind", ends[name])
            command = ("mdp-broker", *options, "--peer", f"{ends[other]}={other}.key")
            brokers[name] = stack.enter_context(process(*command, cwd=folder))
            brokers[name].line("ready on")
        worker = stack.enter_context(process(*shlex.split(serve), cwd=folder, **env))
        worker.line(f"resize: serving at {ends['left']}")
        assert run(*shlex.split(call), **env).stdout == b"hello\n"
        (program,) = blocks(PAGE, "py")
        for name, endpoint in ends.items():
            program = program.replace(f"tcp://{name}:5555", endpoint)
        scope = {"Client": Client}
        exec(compile(program, "security.md", "exec"), scope)
        with scope["client"] as client:
            assert client.request("resize", b"one") == [b"one"]
            brokers["left"].kill()
            worker.line(f"resize: moved to {ends['right']}")
            assert client.request("resize", b"two") == [b"two"]
            assert client.endpoint == ends["right"]
        assert run(*shlex.split(call), **env).stdout == b"hello\n"
