"""Completes what a shell's user types: the names of services, which a broker tells."""

import json
from typing import Final

import click
from click.shell_completion import CompletionItem

from ...mdp.errors import ZmdpError
from ...mdp.security.keys import load_keys
from ...mdp.transport.endpoints import split_brokers
from ..mdclient import Client

ANSWER_SECONDS: Final = 0.2
"""How long the broker may take: its user waits, and can type the name as well."""


def services(context: click.Context, argument: click.Parameter, incomplete: str) -> "list[CompletionItem[str]]":
    """Return the services that begin with `incomplete`, or none if no broker answers in time."""
    del argument
    given = context.params
    try:
        brokers = split_brokers(given["broker"])
        keys = load_keys(given["key_file"], given["broker_key"], brokers)
        with Client(tuple(brokers), timeout=ANSWER_SECONDS, retries=0, key=keys) as client:
            found = json.loads(client.request("mmi.services")[0])["services"]
    except (ZmdpError, ValueError, TypeError, LookupError):  # no broker, or not ours
        return []
    return [CompletionItem(each["name"]) for each in found if each["name"].startswith(incomplete)]
