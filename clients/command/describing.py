"""`mdclient describe` and `mdclient stub`: the workers' description of a service, for people and as code."""

from collections.abc import Mapping
from typing import Any

import click

from ...mdp.service_limits import ServiceLimits
from ...mdp.services import Description
from ...mdp.services.submission import show_defaults
from ...mdp.transport.reach import check_listening
from ..console import bodies
from ..console.asking import SERVICE, advice, connection_options, new_client
from ..console.completion import services as complete_services
from . import stubs


@click.command()
@SERVICE
@connection_options(json_help="Print a JSON object.")
def describe(*, service: str, as_json: bool, **connection: Any) -> None:
    """Show what SERVICE does and which values it takes.

    Its workers say so; nobody has checked it. While a new version is rolled out, what each version says is shown.
    """
    with new_client(connection) as client, advice(connection, service):
        check_listening(connection["broker"], connection["keys"])
        description = client.describe(service)
    if as_json:
        bodies.print_json(description.as_dict())
    else:
        click.echo("\n".join(_lines(description)))


@click.command()
@click.argument("services", nargs=-1, required=True, metavar="SERVICE...", shell_complete=complete_services)
@connection_options(json_help="Print a JSON object with the code.")
def stub(*, services: tuple[str, ...], as_json: bool, **connection: Any) -> None:
    """Print Python code to call each SERVICE with types: dataclasses and `Service` objects.

    \b
    mdclient stub images.resize images.find > images_client.py
    """
    found = []
    with new_client(connection) as client:
        check_listening(connection["broker"], connection["keys"])
        for service in services:
            with advice(connection, service):
                found.append(client.describe(service))
    code = stubs.stub(found)
    if as_json:
        bodies.print_json({"code": code})
    else:
        click.echo(code, nl=False)


def _lines(description: Description) -> list[str]:
    lines = [f"{description.service}: {_workers(description.workers)}"]
    if description.limits:
        lines.append(f"limit: {ServiceLimits.read(description.limits)}")
    for about in description.abouts:
        told = [f"version {about.version}" if about.version else "", f"codec {about.codec}" if about.codec else ""]
        if len(description.abouts) > 1:
            told.insert(0, _workers(about.workers))
        title = ", ".join(each for each in told if each)
        shown = Description(description.service, about.workers, (about,))
        settings = [_settings("submission", about.submission), _settings("schedule", about.schedule)]
        for part in (title, about.description, stubs.types(shown), *settings):
            lines += ["", part] if part else []
    if silent := description.workers - sum(about.workers for about in description.abouts):
        lines += ["", f"{_workers(silent)} of these say nothing of it"]
    return lines


def _settings(title: str, settings: Mapping[str, Any]) -> str:
    return f"{title}: {show_defaults(settings)}" if settings else ""


def _workers(count: int) -> str:
    return f"{count} worker" if count == 1 else f"{count} workers"
