"""The command `mdp-broker`."""

import gc
import logging
import re
import resource
import sys
from contextlib import ExitStack, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import click
import msgspec

from ... import version
from ...version import PURE
from ..broker.io.dialer import LinkTo
from ..broker.io.loop import DEFAULT_DRAIN, DEFAULT_IPC_MODE, Server, ServerSettings, default_name
from ..errors import SettingError
from ..limits import DEFAULT_ENDPOINT, Limits
from ..program import toml
from ..program.logs import counted
from ..security.access import Access, load
from ..security.certificates import public_key
from ..wire import service_name, show
from . import notify
from .access_report import as_json, as_text
from .console import (
    CONTEXT_SETTINGS,
    Address,
    Endpoint,
    EndpointList,
    Number,
    SectionedCommand,
    all_values,
    limit_option,
    log_format,
    log_level_option,
    log_to_stderr,
    options,
    run,
    version_option,
)
from .shutdown import Shutdown, drain_timeout_option
from .web import WebProcess, check_address, check_packages

NOT_SETTINGS: Final = {"check", "config", "json", "version"}
"""Options that can be neither in the environment nor in the TOML file."""
SECTIONS: Final = {
    "Access control": ("access", "check", "json", "insecure", "ipc_mode"),
    "Limits": [*(limit.name for limit in fields(Limits)), "slow"],
    "Links to other brokers": ("name", "peer", "parent"),
    "Pirates": ("pirate", "pirate_workers"),
}
"""The headings of the help, and the options under each."""
GRACE_SECONDS: Final = 1.75
"""How long the broker may take after its drain limit: its sockets have a second to send the last messages."""

log = logging.getLogger("zmdp.broker")


class _Mode(click.ParamType):  # type: ignore[type-arg]  # not generic in older releases
    """The permissions of a file, in octal."""

    name = "MODE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return `value` as a number; a number in a TOML file is rejected, since it is probably not octal."""
        if not isinstance(value, str) or not re.fullmatch(r"(0o?)?[0-7]{3}", value):
            self.fail(f"expected permissions as three octal digits, such as '660', got {value!r}", param, ctx)
        return int(value, 8)


class _Pirates(click.ParamType):  # type: ignore[type-arg]  # as above
    """One endpoint with a service, or several separated by commas.  The option's callback is `all_values`."""

    name = "ENDPOINT=SERVICE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[tuple[str, bytes]]:
        """Return the endpoints in `value`, each with its service."""
        # The name of a service may contain a comma.
        texts = re.split(r",\s*(?=\w+://)", value.strip(" ,")) if isinstance(value, str) else [value]
        return [self._pair(text, param, ctx) for text in texts]

    def _pair(self, text: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, bytes]:
        endpoint, found, service = text.partition("=") if isinstance(text, str) else ("", "", "")
        if not found:
            self.fail(f"expected ENDPOINT=SERVICE, such as 'tcp://127.0.0.1:5556=echo', got {text!r}", param, ctx)
        try:
            name = service_name(service.strip())
        except SettingError as error:
            self.fail(f"{text!r}: {error}", param, ctx)
        return Endpoint().convert(endpoint.strip(), param, ctx), name


class _Link(click.ParamType):  # type: ignore[type-arg]  # as above
    """Another broker: its endpoint, and with access control its public key."""

    name = "ENDPOINT[=KEY]"

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> LinkTo:
        """Return the broker that `value` names."""
        if isinstance(value, LinkTo):
            return value
        if not isinstance(value, str):
            self.fail(f"expected ENDPOINT or ENDPOINT=KEY, got {value!r}", param, ctx)
        endpoint, _, key = value.partition("=")
        found = Endpoint().convert(endpoint.strip(), param, ctx)
        try:
            return LinkTo(self._kind, found, public_key(key.strip(), Path()) if key else None)
        except SettingError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


def _load_config(context: click.Context, _: click.Parameter, path: Path | None) -> Path | None:
    """Use the values of a TOML file as the options' defaults."""
    if path is None:
        return None
    known = {each.name or "": each for each in context.command.params if each.name not in NOT_SETTINGS}
    fields = [(name, _kind(each) | msgspec.UnsetType, msgspec.UNSET) for name, each in known.items()]
    kind = msgspec.defstruct("Settings", fields, rename="kebab", forbid_unknown_fields=True)
    given = msgspec.structs.asdict(toml.convert(toml.load(path), kind, str(path)))
    settings = {name: value for name, value in given.items() if value is not msgspec.UNSET}
    for name, value in settings.items():
        if known[name].multiple and isinstance(value, str):
            settings[name] = [value]
        try:
            known[name].type_cast_value(context, settings[name])
        except click.BadParameter as error:
            raise SettingError(f"{path}: {name.replace('_', '-')}: {error.message}") from None
    context.default_map = settings
    return path


def _kind(option: click.Parameter) -> Any:
    """Return the type that the value of an option has in a TOML file."""
    if isinstance(option.type, click.types.BoolParamType):
        return bool
    if isinstance(option.type, Number):
        return float | int
    return str | list[str] if option.multiple else str


@click.command(
    cls=SectionedCommand,
    sections=SECTIONS,
    context_settings=CONTEXT_SETTINGS,
    epilog="Each option can also be set in the environment, with commas between several endpoints, or in the TOML file "
    "(heartbeat = 2, bind = [...]). Flags override the environment, which overrides the file. SIGTERM or Ctrl-C drains "
    "the broker: it accepts no new requests and finishes those in flight, at the latest after --drain-timeout. A "
    "second signal stops it immediately. SIGHUP makes it read the access file again.",
)
@click.option(
    "--bind",
    type=EndpointList(),
    multiple=True,
    callback=all_values,
    default=[DEFAULT_ENDPOINT],
    help=(
        "Endpoint to listen on: tcp://HOST:PORT (* for a free port) or ipc://PATH. Can be repeated, or separate "
        "endpoints with commas."
    ),
)
@click.option(
    "--pirate",
    type=_Pirates(),
    multiple=True,
    callback=all_values,
    help="Endpoint for programs without a library: plain REQ sockets call SERVICE there, and workers that speak the "
    "Paranoid Pirate Protocol offer it. Can be repeated, or separate several with commas.",
)
@click.option(
    "--pirate-workers",
    type=_Pirates(),
    multiple=True,
    callback=all_values,
    help="Endpoint where such workers offer SERVICE, as well as Simple Pirates, whose REQ sockets look like clients.",
)
@click.option(
    "--name",
    help="Name of this broker among those it is linked to.  [default: the host's name and the first port]",
)
@click.option(
    "--peer",
    type=_Link("peer"),
    multiple=True,
    help="Another broker to exchange requests with; with --access, and its public key: a file, or the key itself. "
    "Can be repeated.",
)
@click.option(
    "--parent",
    type=_Link("parent"),
    help="The broker above this one in a tree, as for --peer: every broker of a tree reaches the services of all.",
)
@click.option(
    "--access",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Admit only the keys in this access file, each with the permissions of its role. mdp-keys writes it.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Check the access file, print who may do what, and exit: with 2 if the file is invalid.",
)
@click.option("--json", "json", is_flag=True, help="With --check, print JSON.")
@click.option(
    "--insecure",
    is_flag=True,
    help="Listen on any address without --access: whoever can connect may do everything.",
)
@click.option(
    "--http",
    type=Address(),
    help="Serve a dashboard, /metrics, /livez and /readyz at HOST:PORT (0 for a free port). With --access, to holders "
    "of tokens; mdp-keys token makes them. Needs zmdp[web].",
)
@click.option(
    "--ipc-mode",
    type=_Mode(),
    default=f"{DEFAULT_IPC_MODE:04o}",
    help="Permissions of the files of ipc:// endpoints, in octal.",
)
@options(*map(limit_option, fields(Limits)))
@drain_timeout_option(DEFAULT_DRAIN, "How long running requests may take to finish after SIGTERM or Ctrl-C.")
@click.option(
    "--slow",
    type=Number("seconds"),
    show_default="never",
    help="Log each request that takes longer than this, in the queue and at its worker.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    envvar="MDP_CONFIG",
    show_envvar=True,
    is_eager=True,
    callback=_load_config,
    help="TOML file of settings, named like the options.",
)
@log_level_option
@version_option()
def cli(
    *,
    bind: tuple[str, ...],
    pirate: tuple[tuple[str, bytes], ...],
    pirate_workers: tuple[tuple[str, bytes], ...],
    name: str | None,
    peer: tuple[LinkTo, ...],
    parent: LinkTo | None,
    access: Path | None,
    check: bool,
    json: bool,
    insecure: bool,
    http: tuple[str, int] | None,
    ipc_mode: int,
    drain_timeout: float,
    slow: float | None,
    config: Path | None,
    log_level: str,
    **limits: Any,
) -> int:
    """Run a broker: workers offer named services, and clients call them, all through one socket.

    The endpoints that it listens on are printed to stdout, one per line, then the URL of --http; logs go to stderr.
    With --access, only known keys are admitted, and all connections are encrypted.  Without it, whoever can connect may
    do everything: the broker listens only on loopback addresses and on ipc:// sockets, which other machines cannot
    reach.

    \b
    Exit codes:
      0  drained
      1  cannot listen; or stopped before it was drained, by --drain-timeout or a second signal
      2  invalid usage, or a package is missing
    """
    del config  # its values have become the options' defaults
    if not bind:
        raise click.UsageError("bind is empty: it must name at least one endpoint, such as tcp://127.0.0.1:5555")
    if (check and access is None) or (json and not check):
        raise click.UsageError("--check requires --access" if check else "--json requires --check")
    if check and access is not None:
        found = load(access)
        click.echo(as_json(found) if json else as_text(found))
        return 0
    rules = load(access) if access else None
    settings = ServerSettings(
        limits=Limits(**limits), pirates=pirate, pirate_workers=pirate_workers, name=name or default_name(bind),
        slow=slow, links=[*peer, *([parent] if parent else [])], drain_timeout=drain_timeout, insecure=insecure,
        ipc_mode=ipc_mode,
    )  # fmt: skip
    log_to_stderr(log_level)
    _allow_many_connections()
    if http is not None:
        check_packages("mdp-broker --http")
        check_address(http[0], access=rules, insecure=insecure)
    with ExitStack() as stack:
        web = (
            None
            if http is None
            else stack.enter_context(WebProcess(*http, log_level=log_level, log_format=log_format()))
        )
        server = stack.enter_context(Server(
            bind if web is None else (*bind, web.endpoint), settings,
            access=rules if web is None or rules is None else web.admitted_by(rules),
        ))  # fmt: skip
        stack.enter_context(Shutdown(
            server.stop, server.stop, limit=drain_timeout, unfinished=partial(_unfinished, server), announcement="",
            grace=GRACE_SECONDS, reload=server.reload, logger=log,
        ))  # fmt: skip
        endpoints = server.endpoints[: len(bind)]
        for endpoint in endpoints:
            click.echo(endpoint)
        if web is not None:
            web.start(server)
            click.echo(web.url)
        sys.stdout.flush()
        _log_build()
        _log_access(rules, insecure=insecure)
        pirates = [
            f"; pirates at {endpoint} {do} {show(service)}"
            for do, actual, given in (
                ("call", server.pirate_endpoints, pirate), ("offer", server.pirate_worker_endpoints, pirate_workers)
            )
            for endpoint, (_, service) in zip(actual, given, strict=True)
        ]  # fmt: skip
        log.info(
            "ready on %s%s; heartbeat %g s, workers expire after %g s of silence; Ctrl-C stops it",
            ", ".join(endpoints), "".join(pirates), settings.limits.heartbeat, settings.limits.patience,
        )  # fmt: skip
        server.access_control.around_reload = notify.reloading
        notify.ready(server.turning)
        # The broker creates no reference cycles.  With a million requests waiting, looking for some would take a
        # second each time, and most of the time that it takes to shut down.
        gc.disable()
        server.run()
        return int(server.forced or server.cut_off)


for option in cli.params:
    if isinstance(option, click.Option) and option.name and option.name not in NOT_SETTINGS:
        option.envvar, option.show_envvar = f"MDP_{option.name.upper()}", True


def _unfinished(server: Server) -> str:
    registry = server.broker.registry
    return f"{registry.running} running and {registry.queued} waiting requests"


def _log_build() -> None:
    """Log that it is not compiled, unless the environment asks for that: pip does not say so."""
    if not PURE and not all(version.compiled_parts().values()):
        log.info(
            "slower than it could be: not all of zmdp is compiled (%s), which takes a C compiler when it is installed; "
            "pip install -v shows why a build did not compile",
            version.build(),
        )  # fmt: skip


def _log_access(access: Access | None, *, insecure: bool) -> None:
    if access is not None:
        log.info(
            "access control by %s: %s, %s; the broker's public key is %s", access.path,
            counted(len(access.roles), "role"), counted(len(access.keys), "key"), access.public_key.decode(),
        )  # fmt: skip
    elif insecure:
        log.warning("--insecure: whoever can connect may do everything")


def _allow_many_connections() -> None:
    """Raise the soft limit of open files, usually 1024: each peer takes a file descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(name: str = "mdp-broker") -> NoReturn:
    """Run the command by the name that its user has called it."""
    run(name, cli)


if __name__ == "__main__":
    main()
