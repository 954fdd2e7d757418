"""`mdclient limit`: how many requests of a service may run at once, and how many may start in a time."""

import json
from typing import Any

import click

from ...mdp.service_limits import Limit, ServiceLimits
from ...mdp.transport.reach import check_listening
from ..console import bodies
from ..console.asking import (
    OF,
    SERVICE,
    addressed,
    advice,
    check_known,
    connection_options,
    new_client,
)

QUESTION = "mmi.limit"


@click.command()
@SERVICE
@click.option("--concurrency", type=int, help="Maximum number of requests that run at once.")
@click.option("--rate", help="Maximum number of requests that start in a time, such as 500/min (s, min, h, d).")
@click.option("--burst", type=int, help="How many of these may start at once after a pause.")
@click.option("--group-concurrency", type=int, help="As --concurrency, for each group of requests.")
@click.option("--group-rate", help="As --rate, for each group of requests.")
@click.option("--group-burst", type=int, help="As --burst, for each group of requests.")
@click.option("--lift", is_flag=True, help="Remove what was set here: the workers' limits, or the file's, apply again.")
@OF
@connection_options(json_help="Print a JSON object.")
def limit(*, service: str, lift: bool, on: str | None, as_json: bool, **given: Any) -> None:
    """Show or set the limits of SERVICE, until the broker ends.

    \b
    mdclient limit openai.embed                                 show them
    mdclient limit openai.embed --concurrency 8 --rate 500/min  set them
    mdclient limit openai.embed --lift                          remove them

    Without options, it also shows the groups with most requests. What is set here replaces the limits that workers
    declare, and those in the broker's access file. With access control, a role with admin may.
    """
    names = ("concurrency", "rate", "burst", "group_concurrency", "group_rate", "group_burst")
    settings = {name: given.pop(name) for name in names}
    limits = ServiceLimits(
        Limit(*(settings[name] for name in names[:3])),
        Limit(*(settings[name] for name in names[3:])),
    )
    if lift and limits:
        raise click.UsageError("--lift removes the limits: leave out the others, or --lift")
    body = [service.encode()]
    if lift or limits:
        body.append(json.dumps(limits.as_dict()).encode())
    with new_client(given) as client, advice(given, QUESTION, on=on):
        check_listening(given["broker"], given["keys"])
        reply = client.request(QUESTION, *body, options=addressed(on))
        check_known(QUESTION, reply)
    answer = json.loads(reply[0])
    if as_json:
        bodies.print_json(answer)
        return
    by = "the operator" if answer["by_operator"] else "its workers"
    found = ServiceLimits.read(answer["limits"])
    click.echo(f"{answer['service']}: {found} (set by {by})" if found else f"{answer['service']}: no limit")
    for each in answer["groups"]:
        click.echo(f"  {each['group'] or '(no group)'}: {each['waiting']:,} waiting, {each['running']:,} running")
