"""docs/clusters.md is correct: its stream runs, also again after it was killed, and its options exist."""

import json
import re
import shlex
import subprocess
from functools import partial
from pathlib import Path

import click
import pytest
from support.processes import BIN
from support.titanics import BEATS

from zmdp.mdp.cli.broker import cli as mdp_broker
from zmdp.mdp.cli.keys import cli as mdp_keys
from zmdp.mdp.errors import ServiceError
from zmdp.spark.cli import cli as mdp_spark
from zmdp.workers import Worker

PAGE = (Path(__file__).parents[3] / "docs" / "clusters.md").read_text()
COMMANDS = {"mdp-spark": mdp_spark, "mdp-keys": mdp_keys, "mdp-broker": mdp_broker, "packed/main.py": mdp_spark}


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def up(request):
    (text,) = request
    if text == b"bad":
        raise ServiceError(422, "no such word")
    return text.upper()


def test_the_stream_writes_each_row_once_also_after_a_failure(spark, endpoint, tmp_path):
    stream, failed, direct = blocks("python")
    names = {"spark": spark}

    def run(code):
        for folder in ("incoming", "shouted", "checkpoint-direct", "checkpoint", "direct"):
            code = re.sub(rf'"{folder}(?=["/])', f'"{tmp_path}/{folder}', code)
        exec(compile(code.replace("tcp://127.0.0.1:5555", endpoint), "clusters.md", "exec"), names)

    def add(name, *texts):
        rows = (json.dumps({"id": number, "text": text}) for number, text in enumerate(texts))
        (tmp_path / "incoming" / name).write_text("\n".join(rows))

    def shouted():
        return sorted(row.reply or row.reply_error for row in spark.read.parquet(str(tmp_path / "shouted")).collect())

    (tmp_path / "incoming").mkdir()
    add("a.json", "one", "bad")
    with Worker("shout", up, broker=endpoint, **BEATS):
        run(stream)
        assert shouted() == ["ONE", "no such word"]
        add("b.json", "two")
        run(stream)
        (tmp_path / "checkpoint" / "commits" / "1").unlink()  # as if the driver had died just before it committed
        (tmp_path / "checkpoint" / "commits" / ".1.crc").unlink(missing_ok=True)
        run(stream)
        assert shouted() == ["ONE", "TWO", "no such word"]
        run(failed)
        assert [row.text for row in names["failed"].collect()] == ["bad"]
        run(direct)
        assert spark.read.parquet(str(tmp_path / "direct")).where("reply_code = 200").count() == 2


def commands():
    """Yield the words of each command of zmdp on the page."""
    for block in blocks("sh"):
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


@pytest.mark.parametrize("section", ["A standalone cluster, with keys", "Kubernetes"])
def test_the_keys_are_created_and_may_do_what_they_need(section, tmp_path):
    text = PAGE[PAGE.index(f"## {section}\n") :].partition("\n## ")[0]
    here = partial(subprocess.run, cwd=tmp_path, capture_output=True, check=True)
    for line in re.findall(r"^mdp-keys .*$", text, re.MULTILINE):
        here([BIN / "mdp-keys", *shlex.split(line)[1:]])
    assert set(re.findall(r"--from-file=(\S+)", text)) <= {path.name for path in tmp_path.iterdir()}
    shown = here([BIN / "mdp-broker", "--check", "--access", "access.toml"]).stdout.decode()
    assert all(role in shown for role in ("driver", "shop", "operator"))
