"""Write what the site has and the repository has not, as `make docs` does before it builds the site.

That is docs/reference/commands.md, from the `--help` of each command, docs/llms.txt, from the navigation, and a view of
the package for mkdocstrings.
"""

import shutil
import textwrap
import tomllib
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from zmdp.cli import cli as zmdp
from zmdp.clients.command.main import cli as mdclient
from zmdp.dev.cli import cli as dev
from zmdp.gateways.cli import cli as mdp_gateway
from zmdp.mdp.cli.broker import cli as mdp_broker
from zmdp.mdp.cli.console import CONTEXT_SETTINGS
from zmdp.mdp.cli.keys import cli as mdp_keys
from zmdp.spark.cli import cli as mdp_spark
from zmdp.titanic.operator.command.cli import cli as titanic
from zmdp.workers.command.cli import cli as mdworker

ROOT = Path(__file__).parents[1]
COMMANDS = "reference/commands.md"
WIDTH = 100


def reference() -> str:
    """Return the whole page."""
    shown = zmdp.get_help(click.Context(zmdp, info_name="zmdp", terminal_width=WIDTH, **zmdp.context_settings))
    parts = [
        "# Commands\n\nThe `--help` of every command, which each command also prints.\n",
        f"## zmdp\n\n```text\n{shown}\n```\n",
    ]
    for name, command in (
        ("zmdp dev", dev),
        ("mdp-broker", mdp_broker),
        ("mdp-keys", mdp_keys),
        ("mdclient", mdclient),
        ("mdworker", mdworker),
        ("titanic", titanic),
        ("mdp-gateway", mdp_gateway),
        ("mdp-spark", mdp_spark),
    ):
        settings = {**command.context_settings, **CONTEXT_SETTINGS}
        parts += sections(command, click.Context(command, info_name=name, **settings), 2)
    return "\n".join(parts)


def sections(command: click.Command, context: click.Context, level: int) -> list[str]:
    """Return a section with a command's help, and one for each of its subcommands."""
    context.terminal_width = WIDTH
    help_text = wrapped(command.get_help(context))
    parts = [f"{'#' * level} {context.command_path}\n\n```text\n{help_text}\n```\n"]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            parts += sections(child, click.Context(child, info_name=name, parent=context), level + 1)
    return parts


def wrapped(text: str) -> str:
    """Return a help text with its paragraphs wrapped: click does not wrap those that are marked as formatted."""
    return "\n".join(
        line
        for _, paragraph in groupby(text.splitlines(), key=lambda line: (bool(line), len(line) - len(line.lstrip())))
        for line in filled(list(paragraph))
    )


def filled(lines: list[str]) -> list[str]:
    """Return lines of the same indentation, rewrapped if one of them is too long."""
    if max(map(len, lines)) <= WIDTH:
        return lines
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    return textwrap.wrap(" ".join(map(str.strip, lines)), WIDTH, initial_indent=indent, subsequent_indent=indent)


def llms() -> str:
    """Return the site's contents as https://llmstxt.org has them: a section for each part of the navigation."""
    project = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    parts = [f"# {project['site_name']}\n\n> {project['site_description']}\n"]
    for part in project["nav"]:
        ((title, entries),) = part.items()
        links = [f"- [{title_of(page)}]({address_of(page)})" for page in pages_of(entries)]
        parts.append("\n".join([f"## {title}\n", *links, ""]))
    return "\n".join(parts)


def pages_of(entry: Any) -> list[str]:
    """Return the pages in a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in pages_of(part)]


def title_of(page: str) -> str:
    """Return the first heading of a page."""
    text = reference() if page == COMMANDS else (ROOT / "docs" / page).read_text()
    return text.split("\n", 1)[0].removeprefix("# ")


def address_of(page: str) -> str:
    """Return where the site has a page, relative to its root."""
    path = Path(page)
    return f"{path.parent if path.name == 'index.md' else path.with_suffix('')}/"


def link_package(folder: Path) -> None:
    """Lay out the package as it is when installed, with links, because mkdocstrings finds modules by their paths."""
    shutil.rmtree(folder, ignore_errors=True)
    package = folder / "zmdp"
    package.mkdir(parents=True)
    for source in [*(ROOT / "src" / "zmdp").iterdir(), *(init.parent for init in ROOT.glob("*/__init__.py"))]:
        (package / source.name).symlink_to(source)


if __name__ == "__main__":
    (ROOT / "docs" / COMMANDS).write_text(reference())
    (ROOT / "docs" / "llms.txt").write_text(llms())
    link_package(ROOT / "build" / "package")
