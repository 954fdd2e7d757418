"""The command `mdp-gateway token`."""

from pathlib import Path
from typing import Any

import click
import tomlkit

from ..mdp.cli import access_file
from ..mdp.cli.console import CONTEXT_SETTINGS
from ..mdp.program import toml
from ..mdp.security.access import new_token
from .access import load, parse

_BEGINNING = "# Who may use the gateway: mdp-gateway http --access FILE.  Edit this file, or use mdp-gateway token.\n"


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("role")
@click.option(
    "--access",
    type=click.Path(path_type=Path),
    metavar="FILE",
    required=True,
    help="The gateway's access file, which is created if it does not exist.",
)
def cli(role: str, access: Path) -> None:
    """Make a token for ROLE and print it.

    The access file gets its SHA-256 hash, from which nobody can find the token.  Callers pass the token in the header
    `Authorization: Bearer TOKEN`.  A new role may call every service: edit its `call` in the file.  A gateway that runs
    reads the file again on SIGHUP.
    """
    token, digest = new_token()
    created = add(access, role, digest)
    click.echo(token)
    if created:
        click.echo(f"added the role {role}, which may call every service: edit its `call` in {access}", err=True)


def add(path: Path, role: str, digest: str) -> bool:
    """Add the hash of a token to a role in the access file; return whether the role is new.  Raises `SettingError`."""

    def change(content: Any) -> None:
        table = content.setdefault("roles", tomlkit.table(is_super_table=True)).setdefault(role, tomlkit.table())
        table.setdefault("tokens", tomlkit.array()).append(digest)

    with access_file.locked(path.parent):
        exists = path.exists()
        created = not exists or role not in load(path).roles
        access_file.replace(path, toml.read(path) if exists else _BEGINNING, change, parse, mode=0o600)
    return created
