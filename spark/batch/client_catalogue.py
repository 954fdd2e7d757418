"""The client commands `mdp-spark tables`, `describe`, `jobs` and `explain`: what batches offer to the caller's role.

They only talk to the broker and need neither PySpark nor Java.
"""

import json
from collections.abc import Iterator, Mapping
from textwrap import indent
from typing import Any

import click

from ...clients import Client, bodies
from ...mdp.errors import ServiceError
from ...titanic.cli.parameters import client_options
from .. import control
from ..client.requests import sql_frames
from ..parameters import PREFIX
from .client_commands import ARGS, print_rows, sql_settings

SECONDS = 300
"""How long Spark may take to open a table: it may read all of its files for the schema, and it may be starting."""


@click.command()
@click.argument("namespace", required=False)
@PREFIX
@client_options(SECONDS)
@bodies.JSON
def tables(*, namespace: str | None, prefix: str, client: Client, as_json: bool) -> int:
    """List the tables that you may query; with NAMESPACE, such as lake.shop, those in it."""
    if namespace is not None:
        print_rows(_rows(client, prefix, f"SHOW TABLES IN {namespace}"), as_json=as_json)
        return 0
    found = [
        {"batch": batch, **row}
        for batch, answer in _catalogues(client)
        for row in (*answer["tables"], *({"name": name, "format": "catalog"} for name in answer["catalogs"]))
    ]
    print_rows(found, as_json=as_json)
    return 0


@click.command()
@client_options(5)
@bodies.JSON
def jobs(*, client: Client, as_json: bool) -> int:
    """List the Python jobs that you may run, with their parameters."""
    found = list(_jobs(client))
    if as_json:
        bodies.print_json(found)
        return 0
    for job in found:
        about = job["description"].partition("\n")[0]
        _echo(f"{_signature(job)}{'  ' if about else ''}{about}")
    return 0


@click.command()
@click.argument("name")
@PREFIX
@client_options(SECONDS)
@bodies.JSON
def describe(*, name: str, prefix: str, client: Client, as_json: bool) -> int:
    """Describe the table NAME: its columns and their types; or the job NAME: its parameters and docstring."""
    job = next((job for job in _jobs(client) if job["name"] == name), None)
    if job is None:
        print_rows(_rows(client, prefix, f"DESCRIBE {name}"), as_json=as_json)
    elif as_json:
        bodies.print_json(job)
    else:
        _echo(_signature(job))
        _echo(indent(job["description"], "    "))
    return 0


@click.command()
@click.argument("query")
@ARGS
@PREFIX
@client_options(SECONDS)
@bodies.JSON
def explain(*, query: str, args: dict[str, str], prefix: str, client: Client, as_json: bool) -> int:
    """Show how Spark would run QUERY, without running it; @FILE reads it from a file, - from stdin."""
    (sql,) = bodies.frames([query])
    (row,) = _rows(client, prefix, f"EXPLAIN FORMATTED {sql.decode(errors='replace')}", **sql_settings(args))
    if as_json:
        bodies.print_json(row)
        return 0
    _echo(row["plan"])
    return 0


def _echo(text: str) -> None:
    """Print lines as they are, except for control characters."""
    for line in text.splitlines():
        click.echo("".join(each if each.isprintable() else "?" for each in line.expandtabs()))


def _rows(client: Client, prefix: str, sql: str, args: Any = None, types: Any = None) -> list[dict[str, Any]]:
    """Return what a statement of `spark.sql` answers."""
    reply = client.request(f"{prefix}.sql", *sql_frames(sql, args, "json", types), wait=False)
    try:
        found: list[dict[str, Any]] = json.loads(reply[-1])
    except (ValueError, LookupError):
        raise ServiceError(500, f"not a result of a batch: {reply[-1:]!r:.100}", service=reply.service) from None
    return found


def _catalogues(client: Client) -> Iterator[tuple[str, dict[str, Any]]]:
    found = list(control.ask_all(client, "catalogue"))
    if not found:
        click.echo("no batch at the broker; start one with `mdp-spark batch`", err=True)
    yield from found


def _jobs(client: Client) -> Iterator[dict[str, Any]]:
    return ({"batch": batch, **job} for batch, answer in _catalogues(client) for job in answer["jobs"])


def _signature(job: Mapping[str, Any]) -> str:
    return f"{job['name']}({job['parameters']})"
