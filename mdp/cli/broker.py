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
from .console import Endpoint, Number, log_level_option, log_to_stderr, run, version_option, with_default

log = logging.getLogger("zmdp.broker")


def _limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """An option for each of the broker's limits, with its default and unit."""
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
    """Make the values of a TOML file the defaults of the options that nothing else sets."""
    if path is None:
        return None
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not TOML: {error}"
        raise click.BadParameter(f"cannot read {path}: {reason}") from None
    known = {p.name for p in context.command.params if p.name} - {"config", "version", "help"}
    settings = {name.replace("-", "_"): value for name, value in values.items()}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise click.BadParameter(f"{path} sets {', '.join(unknown)}: it may set {', '.join(sorted(known))}")
    if isinstance(settings.get("bind"), str):
        settings["bind"] = [settings["bind"]]
    context.params["config"] = path
    context.default_map = settings
    return path


@click.command(
    context_settings={"auto_envvar_prefix": "MDP", "max_content_width": 110},
    epilog="Each option can also be set in the environment (MDP_HEARTBEAT=2, MDP_BIND with endpoints separated by "
    "spaces) or in the TOML file (heartbeat = 2, bind = [...]). A flag goes before the environment, that before the "
    "file. SIGTERM or Ctrl-C drains: no new requests, those in flight finish; again, it ends at once.",
)
@click.option(
    "--bind",
    type=Endpoint(),
    multiple=True,
    default=[DEFAULT_ENDPOINT],
    help=with_default(
        "Endpoint to listen on: tcp://HOST:PORT (port * for a free one) or ipc://PATH. Can be repeated.",
        DEFAULT_ENDPOINT,
    ),
)
@_limit_options
@click.option(
    "--drain-timeout",
    type=Number("seconds", zero=True),
    default=DEFAULT_DRAIN,
    help=with_default("Time that requests in flight have to finish after SIGTERM.", DEFAULT_DRAIN, "seconds"),
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    is_eager=True,
    callback=_load_config,
    help="TOML file with settings, named as the options.",
)
@log_level_option
@version_option()
def cli(*, bind: tuple[str, ...], drain_timeout: float, config: Path | None, log_level: str, **limits: Any) -> int:
    """Run a broker: programs offer named services, others call them, all through one socket.

    The endpoints it listens on are printed to stdout, one a line; everything else goes to stderr.  There is no
    authentication: listen on addresses that only trusted programs reach.

    \b
    Exit codes: 0 drained and ended; 1 cannot listen, or ended by a second signal; 2 bad usage.
    """
    del config  # its values have become the options' defaults
    if not bind:
        raise click.UsageError("bind is empty: it takes at least one endpoint, such as tcp://127.0.0.1:5555")
    settings = Limits(**limits)
    log_to_stderr(log_level)
    _allow_many_connections()
    with Server(bind, limits=settings, drain_timeout=drain_timeout) as server:
        with server.stopped_by(signal.SIGTERM, signal.SIGINT):
            for endpoint in server.endpoints:
                click.echo(endpoint)
            sys.stdout.flush()
            log.info(
                "ready on %s; heartbeat %g s, a worker silent for %g s is dead; Ctrl-C ends",
                ", ".join(server.endpoints), settings.heartbeat, settings.patience,
            )  # fmt: skip
            server.run()
        return int(server.forced)


def _allow_many_connections() -> None:
    """Each peer takes a file descriptor; the customary soft limit of 1024 is soon reached."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> NoReturn:
    """Entry point of `mdp-broker`."""
    run("mdp-broker", cli)


if __name__ == "__main__":
    main()
