"""The command `mdp-broker`."""

import logging
import resource
import signal
import sys
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import click

from ..broker.server import DEFAULT_DRAIN, Server
from ..defaults import DEFAULT_ENDPOINT
from ..limits import Limits
from .console import (
    CONTEXT_SETTINGS,
    FILE_SPELLING,
    Endpoints,
    Number,
    all_endpoints,
    log_level_option,
    log_to_stderr,
    run,
    version_option,
    with_default,
)

log = logging.getLogger("zmdp.broker")


def _limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each of the broker's limits, with its default and unit."""
    for limit in reversed(fields(Limits)):
        unit = limit.metadata["unit"]
        command = click.option(
            f"--{limit.name.replace('_', '-')}",
            type=Number(unit, whole=limit.type is int),
            default=limit.default,
            help=with_default(limit.metadata["help"], limit.default, unit),
        )(command)
    return command


def _load_config(context: click.Context, _: click.Parameter, path: Path | None) -> Path | None:
    """Use the values of a TOML file as the options' defaults."""
    if path is None:
        return None
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not valid TOML: {error}"
        raise click.BadParameter(f"cannot read {path}: {reason}") from None
    known = {p.name for p in context.command.params if p.name} - {"config", "version", "help"}
    spelling = {name.replace("-", "_"): name for name in values}
    unknown = sorted(spelling[name] for name in spelling.keys() - known)
    if unknown:
        allowed = ", ".join(sorted(name.replace("_", "-") for name in known))
        raise click.BadParameter(f"{path} has no setting {', '.join(unknown)}; known settings are {allowed}")
    settings = {name: values[spelled] for name, spelled in spelling.items()}
    if isinstance(settings.get("bind"), str):
        settings["bind"] = [settings["bind"]]
    context.params["config"] = path
    context.default_map = settings
    context.meta[FILE_SPELLING] = spelling
    return path


@click.command(
    context_settings={"auto_envvar_prefix": "MDP", **CONTEXT_SETTINGS},
    epilog="Each option can also be set in the environment (MDP_HEARTBEAT=2, MDP_BIND with endpoints separated by "
    "commas) or in the TOML file (heartbeat = 2, bind = [...]). Flags override the environment, which overrides the "
    "file. SIGTERM or Ctrl-C drains the broker: it accepts no new requests and finishes those in flight. A second "
    "signal stops it immediately.",
)
@click.option(
    "--bind",
    type=Endpoints(),
    multiple=True,
    callback=all_endpoints,
    default=[DEFAULT_ENDPOINT],
    help=with_default(
        "Endpoint to listen on: tcp://HOST:PORT (* for a free port) or ipc://PATH. Can be repeated, or separate "
        "endpoints with commas.",
        DEFAULT_ENDPOINT,
    ),
)
@_limit_options
@click.option(
    "--drain-timeout",
    type=Number("seconds", zero=True),
    default=DEFAULT_DRAIN,
    help=with_default("How long running requests may take to finish after SIGTERM.", DEFAULT_DRAIN, "seconds"),
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    is_eager=True,
    callback=_load_config,
    help="TOML file of settings, named like the options.",
)
@log_level_option
@version_option()
def cli(*, bind: tuple[str, ...], drain_timeout: float, config: Path | None, log_level: str, **limits: Any) -> int:
    """Run a broker: workers offer named services, and clients call them, all through one socket.

    The endpoints that it listens on are printed to stdout, one per line; logs go to stderr.  There is no
    authentication: listen only on addresses that untrusted programs cannot reach.

    \b
    Exit codes:
      0  drained
      1  cannot listen, or stopped by a second signal
      2  invalid usage
    """
    del config  # its values have become the options' defaults
    if not bind:
        raise click.UsageError("bind is empty: it must name at least one endpoint, such as tcp://127.0.0.1:5555")
    settings = Limits(**limits)
    log_to_stderr(log_level)
    _allow_many_connections()
    with Server(bind, limits=settings, drain_timeout=drain_timeout) as server:
        with server.stopped_by(signal.SIGTERM, signal.SIGINT):
            for endpoint in server.endpoints:
                click.echo(endpoint)
            sys.stdout.flush()
            log.info(
                "ready on %s; heartbeat %g s, workers expire after %g s of silence; Ctrl-C stops it",
                ", ".join(server.endpoints), settings.heartbeat, settings.patience,
            )  # fmt: skip
            server.run()
        return int(server.forced)


def _allow_many_connections() -> None:
    """Raise the soft limit of open files, usually 1024: each peer takes a file descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> NoReturn:
    """Entry point of `mdp-broker`."""
    run("mdp-broker", cli)


if __name__ == "__main__":
    main()
