"""The command `mdp-keys`."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from ..errors import SettingError
from ..security.access import LIMITS, MMI, Permissions, load, new_token
from ..security.certificates import PUBLIC_SUFFIX, read_certificate
from ..security.keys import create_keys
from . import access_file
from .access_report import key_rows
from .console import CONTEXT_SETTINGS, Group, limit_option, options, printable, run, version_option

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")

_access_option = click.option(
    "--access",
    type=click.Path(path_type=Path),
    metavar="FILE",
    envvar="MDP_ACCESS",
    required=True,
    show_envvar=True,
    help="The broker's access file, which the first `allow` creates.",
)


@click.group(cls=Group, context_settings=CONTEXT_SETTINGS)
@version_option()
def cli() -> None:
    """Make keys, and say in a broker's access file what each key may do.

    \b
    mdp-keys new shop                                              shop.key and shop.key_secret
    mdp-keys new resizer                                           another pair, for a worker
    mdp-keys allow shop shop.key --call '*' --access access.toml   this key may call all services
    mdp-keys allow resizer resizer.key --offer resize --access access.toml
    mdp-broker --access access.toml

    The first `allow` creates access.toml, and beside it the broker's own key, broker.key and broker.key_secret.
    Clients and workers then need --key, their own secret file, and --broker-key, the file broker.key.

    Files named *.key are public. Files named *.key_secret are not: create each key on the machine that uses it, and
    send only its .key file to the person who edits the access file.

    \b
    Exit codes: 0 success; 2 invalid usage, an invalid file, or no such key.
    """


@cli.command()
@click.argument("name")
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path), default=Path(), metavar="DIR", help="Where to write the files."
)
def new(name: str, folder: Path) -> None:
    """Make a key pair, NAME.key and NAME.key_secret.

    NAME.key is public; NAME.key_secret can be read only by its owner. Existing files are not overwritten.
    """
    if not _NAME.fullmatch(name):
        raise SettingError(
            f"{name!r} cannot be the name of a key: use up to 64 letters, digits, and the characters - _ . (and --dir "
            "for the folder)"
        )
    public, secret = create_keys(name, folder)
    click.echo(f"{public}\n{secret}")
    _explain(f"{secret} stays with the program (--key); give {public} to the broker (mdp-keys allow)")


@cli.command()
@click.argument("file", type=click.Path(path_type=Path))
def show(file: Path) -> None:
    """Print the public key in FILE. A secret key is never printed."""
    public, secret = read_certificate(file)
    click.echo(public.decode())
    if secret:
        _explain(f"{file} contains the secret key as well, which is not shown")


@cli.command()
@click.argument("role")
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@_access_option
@click.option("--call", multiple=True, metavar="PATTERN", help="Services that it may call. Can be repeated.")
@click.option("--offer", multiple=True, metavar="PATTERN", help="Services that it may offer. Can be repeated.")
@click.option(
    "--mmi",
    type=click.Choice(MMI),
    help="What it may ask the broker itself: nothing, whether a service exists (the default), or everything.",
)
@click.option("--admin/--no-admin", default=None, help="It may fetch, close and cancel what belongs to others.")
@click.option("--on-behalf/--no-on-behalf", default=None, help="It may ask on behalf of other roles.")
@click.option("--link/--no-link", default=None, help="It is for other brokers, which may be linked to this one.")
@options(*map(limit_option, LIMITS))
def allow(role: str, keys: tuple[str, ...], access: Path, **settings: Any) -> None:
    """Give ROLE to each KEY, and permissions to ROLE.

    A KEY is a public certificate file, or a public key of 40 characters; put -- in front of one that begins with a
    hyphen. If FILE or ROLE do not exist, they are created. Patterns such as 'spark.*' are added to those that ROLE
    has; other permissions are replaced. To take permissions away, edit FILE.

    \b
    mdp-keys allow shop shop.key web.key --call 'resize' --call 'spark.*' --access access.toml
    mdp-keys allow shop --queued-requests 500 --access access.toml
    """
    given = {name: value for name, value in settings.items() if value not in {None, ()}}
    if not keys and not given:
        raise click.UsageError("nothing to allow: name a KEY, or a permission such as --call")
    created = not access.exists()
    permissions = access_file.allow(access, role, keys, given).roles[role]
    added = f"added {', '.join(keys)}; it" if keys else "it"
    _explain(f"role {role}: {added} {_allowed(permissions)}")
    if not permissions.call and not permissions.offer and permissions.mmi != "all":
        _explain(f"role {role} may neither call nor offer any service yet: add --call or --offer")
    if created:
        public = access.parent / f"{access_file.BROKER_NAME}{PUBLIC_SUFFIX}"
        _explain(f"created {access}: start the broker with mdp-broker --access {shlex.quote(str(access))}")
        _explain(f"clients and workers need the broker's public key, {public}, as --broker-key")
    else:
        _explain_reload(access)


@cli.command()
@click.argument("role")
@_access_option
def token(role: str, access: Path) -> None:
    """Make a token for ROLE, print it, and add its digest to the access file, which must have the role.

    A token lets people and programs look at the broker over HTTP (mdp-broker --http), if the role may ask for
    everything (--mmi all) or is an administrator. It is shown only now: the file has only its digest. To take it back,
    remove the digest from FILE.
    """
    secret, digest = new_token()
    permissions = access_file.add_token(access, role, digest).roles[role]
    click.echo(secret)
    _explain(f"role {role}: added the token {digest[:15]}…, which is shown only now")
    if permissions.mmi != "all":
        _explain(f"role {role} may not look at the dashboard yet: mdp-keys allow {role} --mmi all")
    _explain_reload(access)


@cli.command()
@click.argument("key")
@_access_option
def revoke(key: str, access: Path) -> None:
    """Remove KEY from the access file.

    KEY is a public certificate file, its name, or a public key of 40 characters. When the broker reloads the file,
    the open connections of the key end.
    """
    for role, called in access_file.revoke(access, key):
        _explain(f"revoked {called}, which had the role {role}")
    _explain_reload(access)


@cli.command()
@_access_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ls(access: Path, as_json: bool) -> None:
    """List the keys in the access file: role, file, and public key."""
    rows = key_rows(load(access))
    if as_json:
        click.echo(json.dumps(rows, ensure_ascii=False))
        return
    widths = {name: max((len(row[name]) for row in rows), default=0) for name in ("role", "name")}
    for row in rows:
        click.echo(f"{row['role']:{widths['role']}}  {row['name']:{widths['name']}}  {row['public_key']}")


def _allowed(role: Permissions) -> str:
    """Return what the role may do, limits aside."""
    text = f"may call {_listed(role.call)}, and offer {_listed(role.offer)}"
    others = {
        f"mmi {role.mmi}": role.mmi != Permissions.mmi and not role.admin,  # which implies it
        "admin": role.admin,
        "on behalf": role.on_behalf,
        "link": role.link,
    }
    named = [name for name, has in others.items() if has]
    return f"{text}; {', '.join(named)}" if named else text


def _listed(patterns: Sequence[str]) -> str:
    return ", ".join(patterns) or "nothing"


def _explain(text: str) -> None:
    click.echo(printable(text), err=True)


def _explain_reload(access: Path) -> None:
    _explain(
        f"a broker that runs with --access {shlex.quote(str(access))} reads it again on SIGHUP: kill -HUP PID, or "
        "systemctl reload"
    )


def main(name: str = "mdp-keys") -> NoReturn:
    """Run the command by the name that its user has called it."""
    run(name, cli)


if __name__ == "__main__":
    main()
