"""The command `mdp-gateway http`."""

import gc
import sys
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Final

import click

from ....mdp.cli.console import (
    CONTEXT_SETTINGS,
    Address,
    Decorator,
    Number,
    SectionedCommand,
    brokers_option,
    key_options,
    log_level_option,
    log_to_stderr,
    options,
)
from ....mdp.errors import BindError, SettingError
from ....mdp.extras import install_command
from ....mdp.keys import ClientKeys
from ....mdp.transport.tcp import is_loopback
from ....mdp.transport.tcp import listen as open_listener
from ..descriptors import raise_descriptor_limit
from ..upstream import Upstream
from .access import load
from .settings import Settings

DEFAULT_BIND: Final = "127.0.0.1:8080"
SECTIONS: Final = {
    "Access control and TLS": ("access", "insecure", "tls_cert", "tls_key", "allow_hosts", "allow_origins"),
    "Keys for the broker": ("key_file", "broker_key"),
    "Limits": [setting.name for setting in fields(Settings) if setting.metadata],
}
"""The headings of the help, and the options under each."""


def _limit_option(setting: Field[Any]) -> Decorator:
    unit, text = setting.metadata["unit"], setting.metadata["help"]
    return click.option(
        f"--{setting.name.replace('_', '-')}",
        type=Number(unit, whole=setting.type is not float),
        default=setting.default,
        show_default="half of --max-connections" if setting.default is None else True,
        help=text,
    )


@click.command(cls=SectionedCommand, sections=SECTIONS, context_settings=CONTEXT_SETTINGS)
@click.option(
    "--bind",
    type=Address(),
    default=DEFAULT_BIND,
    help="Where to listen; port 0 for a free one.",
)
@brokers_option("The broker's endpoint. Can be repeated, or separate several with commas, in order of preference.")
@key_options
@click.option(
    "--access",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Admit only callers with a token in this access file. `mdp-gateway token` writes it.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Listen on any address without --access: whoever can connect may call every service.",
)
@click.option(
    "--tls-cert", type=click.Path(path_type=Path), metavar="FILE", help="The server's certificate: use HTTPS."
)
@click.option("--tls-key", type=click.Path(path_type=Path), metavar="FILE", help="Its key, if it is in another file.")
@click.option(
    "--allow-host",
    "allow_hosts",
    multiple=True,
    metavar="NAME",
    help="Without --access, let clients address the gateway by this name as well (the header Host), or * for any. Can "
    "be repeated.  [default: localhost and the loopback addresses]",
)
@click.option(
    "--allow-origin",
    "allow_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Let pages of this origin (https://HOST, or * for all) use the gateway from a browser. Can be repeated.",
)
@options(*(_limit_option(setting) for setting in fields(Settings) if setting.metadata))
@log_level_option
def cli(
    *,
    bind: tuple[str, int],
    broker: tuple[str, ...],
    keys: ClientKeys | None,
    access: Path | None,
    insecure: bool,
    tls_cert: Path | None,
    tls_key: Path | None,
    allow_hosts: tuple[str, ...],
    allow_origins: tuple[str, ...],
    log_level: str,
    **limits: Any,
) -> int:
    """Let programs call services with HTTP: POST /services/NAME.

    The URL is printed to stdout; logs go to stderr.  Without --access, whoever can connect may call every service: the
    gateway listens only on loopback addresses, which other machines cannot reach.

    With --key, requests are made on behalf of the callers' roles, so the broker decides what each role may call.

    SIGTERM or Ctrl-C finishes the requests in progress, and exits at the latest after --drain-timeout; a second signal
    exits immediately.  SIGHUP makes the gateway read the access file again.

    \b
    Exit codes:
      0  stopped, all requests were finished
      1  cannot listen; or stopped before that, by --drain-timeout or a second signal
      2  invalid usage, or a package is missing
    """
    try:
        from ....mdp.http.server import run, tls_context  # noqa: PLC0415 - the help does not need what these import
        from . import server as http  # noqa: PLC0415
        from .gateway import Gateway  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("zmdp"):
            raise
        raise SettingError(f"this needs further packages ({error.name} is missing): {install_command('web')}") from None
    if tls_cert is None and tls_key:
        raise click.UsageError("--tls-key requires --tls-cert")
    if access is None and not insecure and not is_loopback(bind[0]):
        raise BindError(
            f"refused to listen on {bind[0]}, where other machines may connect, without access control: use --access "
            f"FILE to admit known callers only, or --insecure to admit everybody"
        )
    rules = load(access) if access else None
    hosts = None
    if access is None and is_loopback(bind[0]) and "*" not in allow_hosts:
        hosts = frozenset({bind[0], *(name.lower() for name in allow_hosts)})
    settings = Settings(hosts=hosts, allow_origins=allow_origins, **limits)
    tls = tls_context(tls_cert, tls_key) if tls_cert else None
    log_to_stderr(log_level)
    raise_descriptor_limit(settings.max_connections)
    listener = open_listener(*bind)

    async def main() -> int:
        upstream = Upstream(broker, keys=keys, timeout=settings.timeout)
        gateway = Gateway(upstream, settings, rules, on_behalf=keys is not None)
        server = http.gateway_server(gateway, listener, tls)

        def ready() -> None:
            click.echo(server.url)
            sys.stdout.flush()
            http.log.info("ready at %s for the broker at %s; Ctrl-C stops it", server.url, ", ".join(broker))
            if rules is None and not is_loopback(bind[0]):
                http.log.warning("--insecure: whoever can connect may call every service")
            elif rules is not None and tls is None and not is_loopback(bind[0]):
                http.log.warning("tokens are not encrypted without --tls-cert: put a proxy with TLS in front")
            gc.freeze()  # what is there now stays

        return await http.serve(gateway, server, ready)

    return run(main)
