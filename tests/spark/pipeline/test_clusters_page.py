"""docs/spark/clusters.md is correct: its keys open a cluster, and its options exist."""

import json
import os
import re
import shlex
import subprocess
from contextlib import ExitStack
from pathlib import Path

import click
import pytest
from support import environment
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.pages import blocks
from support.processes import BIN, process, run
from support.standalone import standalone

from zmdp.clients import Client, RequestRejected
from zmdp.mdp.cli.broker import cli as mdp_broker
from zmdp.mdp.cli.keys import cli as mdp_keys
from zmdp.spark.cli import cli as mdp_spark

PAGE = (Path(__file__).parents[3] / "docs" / "spark" / "clusters.md").read_text()
COMMANDS = {"mdp-spark": mdp_spark, "mdp-keys": mdp_keys, "mdp-broker": mdp_broker, "main.py": mdp_spark}


def commands():
    """Yield the words of each command of zmdp on the page."""
    for block in blocks(PAGE, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = [word for word in shlex.split(line) if not re.fullmatch(r"MDP_\w+=.*", word)]
            at = next((number for number, word in enumerate(words) if word in COMMANDS), None)
            if at is not None:
                yield words[at:]


@pytest.mark.parametrize("words", [*commands()], ids=lambda words: " ".join(words[:2]))
def test_options_exist(words):
    name, *rest = words
    command = COMMANDS[name]
    while isinstance(command, click.Group):
        sub, *rest = rest
        command = command.get_command(click.Context(command), sub)
        assert command is not None, sub
    options = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
    given = {word.partition("=")[0] for word in rest if word.startswith("--")}
    assert given <= options


def create_keys(section, folder):
    """Run the commands of a section that create keys and the access file."""
    text = PAGE[PAGE.index(f"## {section}\n") :].partition("\n## ")[0]
    for line in re.findall(r"^mdp-keys .*$", text, re.MULTILINE):
        done = subprocess.run(
            [BIN / "mdp-keys", *shlex.split(line)[1:]],
            cwd=folder, env={**os.environ, "MDP_ACCESS": "access.toml"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    return text


def test_the_secrets_of_kubernetes(tmp_path):
    text = create_keys("Kubernetes", tmp_path)
    named = set(re.findall(r"--from-file=([\w.]+)", text))
    assert {"driver.key_secret", "driver.key", "shop.key"} < named <= {path.name for path in tmp_path.iterdir()}
    assert run("mdp-broker", "--check", "--access", str(tmp_path / "access.toml")).returncode == 0


@pytest.mark.long
@pytest.mark.usefixtures("java")
@pytest.mark.timeout(2400)
def test_a_standalone_cluster_with_keys(tmp_path):
    create_keys("A standalone cluster, with keys", tmp_path)
    (tmp_path / "words.py").write_text('def count(request): return b"%d" % len(request[0].split())\n')
    (tmp_path / "catalogue.toml").write_text("")
    fleet, batch = [words for words in commands() if words[0] == "mdp-spark"][:2]
    environment.make(tmp_path / "environment.tar.gz")
    with ExitStack() as stack:
        cluster = stack.enter_context(standalone(tmp_path, cores=4))
        running = stack.enter_context(
            process("mdp-broker", "--bind", "tcp://127.0.0.1:*", "--access", "access.toml", cwd=tmp_path)
        )
        at = running.line("tcp://", "stdout")
        keys = {"MDP_BROKER": at, "MDP_BROKER_KEY": str(tmp_path / "broker.key")}
        driver = {**keys, "MDP_KEY": str(tmp_path / "driver.key_secret")}
        small = ("--conf", "spark.executor.memory=512m", "--conf", "spark.ui.enabled=false")
        for words, ready in ((fleet, "serves words at"), (batch, "serving spark.sql")):
            here = " ".join(words).replace("spark://master.example:7077", cluster.url).replace("/shared", str(tmp_path))
            here = here.replace("--max 4", "--max 1").replace("max=8", "max=2")  # of four cores
            command = stack.enter_context(process(*here.split(), *small, cwd=tmp_path, **driver))
            command.line(ready, timeout=SPARK_TIMEOUT_SECONDS)
        settings = {"key": tmp_path / "shop.key_secret", "broker_key": tmp_path / "broker.key"}
        with Client(at, timeout=SPARK_TIMEOUT_SECONDS, **settings) as client:
            assert client.request("words", b"how many words") == [b"3"]
            assert client.request("spark.sql", b"SELECT count(*) AS n FROM range(9)")[-1] == b'[{"n":9}]'
            with pytest.raises(RequestRejected):
                client.request("spark.control.batch", b'{"op": "drain"}')
        shop = {**keys, "MDP_KEY": str(tmp_path / "shop.key_secret")}
        assert json.loads(run("mdp-spark", "submit", "sql", "SELECT 1 AS one", **shop).stdout) == {"one": 1}
        operator = {**keys, "MDP_KEY": str(tmp_path / "operator.key_secret")}
        assert run("mdp-spark", "drain", "batch", "words", **operator).returncode == 0
