"""The command `mdworker`."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn

import click
from click.core import ParameterSource

from ...interop.freelance.worker import DEFAULT_SERVICE, freelance_worker
from ...mdp import wire
from ...mdp.cli.console import (
    CONTEXT_SETTINGS,
    Endpoint,
    Number,
    SectionedCommand,
    brokers_option,
    handler_timeout_option,
    heartbeat_options,
    key_options,
    log_level_option,
    log_to_stderr,
    run,
    version_option,
)
from ...mdp.cli.shutdown import drain_timeout_option
from ...mdp.errors import SettingError
from ...mdp.program.arguments import is_async
from ...mdp.program.loading import load
from ...mdp.security.access import load as load_access
from ...mdp.security.keys import ClientKeys
from ...mdp.services import BaseService
from ..aio import DEFAULT_CONCURRENCY, AsyncWorker
from ..mdworker import Worker
from ..processes.reload import check_installed
from ..processes.supervised import ProcessLimits, SupervisorLink
from ..services import Services, ServicesWorker
from .serving import AnyWorker, Offering, serve, table
from .supervising import Supervision, supervise

SECTIONS: Final = {
    "Keys": ("key_file", "broker_key"),
    "Functions and workers of frames": ("service", "codec"),
    "Supervised processes": ("processes", "max_requests", "max_memory"),
    "Liveness and protocol": ("heartbeat", "liveness", "handler_timeout", "protocol"),
    "Without a broker": ("freelance", "bind", "access", "insecure"),
}
"""The headings of the help, and the options under each."""
DEFAULT_DRAIN_SECONDS: Final = 30.0
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class _Memory(click.ParamType):  # type: ignore[type-arg]  # not generic in older releases
    """A number of bytes, which may have a unit."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of bytes."""
        found = re.fullmatch(r"(\d{1,15})([KMG]?)B?", value.upper(), re.ASCII)
        if found is None or not int(found[1]):
            self.fail(f"expected a size such as 512M or 2G, got {value!r}", param, ctx)
        return int(found[1]) * _UNITS[found[2]]


@click.command(cls=SectionedCommand, sections=SECTIONS, context_settings=CONTEXT_SETTINGS, no_args_is_help=True)
@click.argument("targets", metavar="MODULE:NAME...", nargs=-1, required=True)
@brokers_option(
    "Broker to serve. Can be repeated, or separate endpoints with commas: if one is lost or drains, the next is served "
    "until the first is back.",
    default=False,
)
@key_options
@click.option("--service", metavar="NAME", help="Service to offer; required if MODULE:NAME is a function.")
@click.option("--only", multiple=True, metavar="NAME", help="Offer only this service of a Services. Can be repeated.")
@click.option(
    "--codec",
    type=click.Choice(["json", "msgpack", "arrow"]),
    help="Codec of a function's argument and result. Without it, both are lists of bytes.",
)
@click.option(
    "--concurrency",
    type=Number("requests", whole=True),
    help="Maximum number of concurrent requests of each process.  "
    f"[default: 1 thread; {DEFAULT_CONCURRENCY} for asyncio handlers]",
)
@click.option(
    "--processes",
    type=Number("processes", whole=True),
    help="Supervise so many worker processes, also one: they are restarted if they die, and SIGHUP replaces them one "
    "by one, with new code, without a failed call.  [default: serve in this process]",
)
@click.option(
    "--max-requests",
    type=Number("requests", whole=True),
    help="Replace a process, as SIGHUP does, after it has served so many requests.",
)
@click.option(
    "--max-memory", type=_Memory(), help="Replace a process, as SIGHUP does, when it uses more memory, such as 512M."
)
@click.option(
    "--reload",
    is_flag=True,
    help="For development: replace the processes, as SIGHUP does, when Python files in the modules' folders change.",
)
@heartbeat_options(default=False)
@handler_timeout_option
@drain_timeout_option(
    DEFAULT_DRAIN_SECONDS,
    "How long running requests may take to finish after SIGTERM or Ctrl-C; then other workers get them.",
)
@click.option(
    "--protocol",
    type=click.Choice(["X1", "0.2", "0.1"]),
    envvar="MDP_PROTOCOL",
    show_envvar=True,
    show_default="X1",
    help="Protocol to speak: 0.2 or 0.1 for third-party brokers.",
)
@click.option(
    "--freelance",
    type=Endpoint(),
    help="Serve without a broker: clients connect to this endpoint (mdclient call --freelance). It is the public name "
    "of this server, such as tcp://server1:5555.",
)
@click.option(
    "--bind",
    type=Endpoint(),
    help="With --freelance: where to listen, if not at that endpoint, such as tcp://*:5555.",
)
@click.option(
    "--access",
    metavar="FILE",
    help="With --freelance: admit only the keys in this access file (see mdp-keys), whose secret_key is the server's.",
)
@click.option(
    "--insecure", is_flag=True, help="With --freelance: listen without --access where other machines can connect."
)
@click.option(
    "--check",
    is_flag=True,
    help="Print what would be served, without serving; exit with 2 if it would fail to start. Uses no broker, and "
    "enters no lifespan.",
)
@log_level_option
@click.option("--supervised-by", nargs=3, type=int, hidden=True)
@version_option()
def cli(
    *,
    targets: tuple[str, ...],
    broker: tuple[str, ...],
    keys: ClientKeys | None,
    service: str | None,
    only: tuple[str, ...],
    codec: str | None,
    concurrency: int | None,
    processes: int | None,
    max_requests: int | None,
    max_memory: int | None,
    reload: bool,
    heartbeat: float | None,
    liveness: int | None,
    handler_timeout: float | None,
    drain_timeout: float,
    protocol: str | None,
    freelance: str | None,
    bind: str | None,
    access: str | None,
    insecure: bool,
    check: bool,
    log_level: str,
    supervised_by: tuple[int, int, int] | None,
) -> int:
    """Serve requests with MODULE:NAME: a `zmdp.Services`, a `zmdp.Worker` or `AsyncWorker`, or a function of a request.
    Several `Services` can be served together.

    The module is looked up in the current directory, then among the installed packages.  Options override the settings
    in the module.

    SIGTERM or Ctrl-C finishes the requests in progress and exits, at the latest after --drain-timeout, whatever the
    handlers do; a second signal exits immediately.  Other workers get the requests that were not finished.

    \b
    from zmdp import Services             # hello.py
    services = Services()
    @services.service("hello")
    def hello(name: str) -> str:
        return f"Hello, {name}!"

    \b
    Try it, each in a terminal of its own:
      mdp-broker                                start a broker on this machine
      mdworker hello:services                   or, without a file: mdworker zmdp.workers.examples:echo
      mdclient call hello '"Ada"'               call it

    \b
    Exit codes:
      0  stopped, all requests were finished
      1  stopped before that, by --drain-timeout or a second signal; a lifespan failed; or --freelance cannot listen
      2  invalid usage, or MODULE:NAME cannot be used
    """
    log_to_stderr(log_level)
    link = None if supervised_by is None else SupervisorLink(*supervised_by)
    _check_freelance(freelance)
    _export_connection()
    options: dict[str, Any] = {
        "endpoints": broker or None, "keys": keys, "concurrency": concurrency,
        "heartbeat": heartbeat, "liveness": liveness, "handler_timeout": handler_timeout, "protocol": protocol,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None}
    worker: Offering
    found = _load_all(targets)
    if len(found) > 1 or isinstance(found[0], Services):
        worker = _services_worker(_joined(found, targets), " ".join(targets), only, given)
    elif only:
        raise click.UsageError(f"--only requires a zmdp.Services, but {targets[0]} is not one")
    else:
        worker = _as_worker(found[0], targets[0], service, codec, None if freelance is None else DEFAULT_SERVICE)
        worker.settings = replace(worker.settings, **{"name": worker.settings.name or targets[0], **given})
        if freelance is not None:
            rules = None if access is None else load_access(access)
            worker = freelance_worker(worker, freelance, bind=bind, access=rules, insecure=insecure)
    if reload:
        check_installed()
    if check:
        click.echo(table(worker))
        return 0
    limits = ProcessLimits(max_requests, max_memory)
    if link is None and (processes is not None or reload or limits != (None, None)):
        if sys.platform == "win32":
            raise SettingError(
                "--processes, --reload and --max-… supervise processes, which needs signals that Windows does not have"
            )
        modules = [target.partition(":")[0] for target in targets] if reload else []
        return supervise(Supervision(processes or 1, drain_timeout, modules))
    return serve(worker, drain_timeout, link, limits)


def _load_all(targets: Sequence[str]) -> list[object]:
    """Return what the targets name.  Raises `SettingError` with all problems."""
    found, problems = [], []
    for target in targets:
        try:
            found.append(load(target, "MODULE:NAME, for example zmdp.workers.examples:echo"))
        except SettingError as error:
            problems.append(str(error))
    if problems:
        raise SettingError("; ".join(problems))
    return found


def _joined(found: Sequence[object], targets: Sequence[str]) -> Services:
    """Return one `Services` with all that were found.  Raises `SettingError` if they cannot be served together."""
    if len(found) == 1 and isinstance(found[0], Services):
        return found[0]
    joined = Services()
    for each, target in zip(found, targets, strict=True):
        if not isinstance(each, Services):
            kind = type(each).__name__
            raise SettingError(
                f"{target} is of type {kind}: only a zmdp.Services can be served together with others; start an "
                "mdworker of its own for it"
            )
        try:
            joined.include(each)
        except SettingError as error:
            raise SettingError(f"cannot use {target}: {error}") from None
    return joined


def _export_connection() -> None:
    """Put --broker and the keys of the command line in the environment, where the module's workers and clients look."""
    context = click.get_current_context()
    for option in context.command.params:
        name = option.name or ""
        given = context.params.get(name)
        if name in {"broker", "key_file", "broker_key"} and given:
            os.environ[str(option.envvar)] = given if isinstance(given, str) else " ".join(given)


_NEEDS_FREELANCE: Final = ("bind", "access", "insecure")
_NEEDS_BROKER: Final = (
    "broker", "key_file", "broker_key", "processes", "max_requests", "max_memory", "reload", "heartbeat",
    "liveness", "handler_timeout", "protocol",
)  # fmt: skip


def _check_freelance(freelance: str | None) -> None:
    """Raise `click.UsageError` for options on the command line that have no meaning with, or without, --freelance."""
    context = click.get_current_context()
    for option in context.command.params:
        name = option.name or ""
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        if freelance is None and name in _NEEDS_FREELANCE:
            raise click.UsageError(f"{option.opts[0]} requires --freelance", context)
        if freelance is not None and name in _NEEDS_BROKER:
            supervised = name in {"processes", "max_requests", "max_memory", "reload"}
            hint = "start one mdworker for each endpoint" if supervised else "it uses no broker"
            raise click.UsageError(f"{option.opts[0]} has no meaning with --freelance: {hint}", context)


def _services_worker(services: Services, target: str, only: tuple[str, ...], given: dict[str, Any]) -> ServicesWorker:
    """Return the worker of these services, with the settings that the command line gives."""
    context = click.get_current_context()
    for name in ("service", "codec", "freelance"):
        if context.params[name] is not None:
            raise click.UsageError(f"--{name} has no meaning with {target}, which has services with names and types")
    arguments = {"name": target, **given}
    keys = arguments.pop("keys", None)
    broker = arguments.pop("endpoints", None)
    return services.worker(broker=broker, only=only, **({"key": keys} if keys is not None else {}), **arguments)


def _as_worker(
    found: object, target: str, service: str | None, codec: str | None, default_service: str | None
) -> AnyWorker:
    """Return `found`, which `target` names, if it is a worker, or make one of it if it is a function."""
    if isinstance(found, Worker | AsyncWorker):
        if codec is not None:
            raise SettingError(f"{target} is a worker, which has its own codec: remove --codec")
        if service is not None:
            found.service = wire.service_name(service)
        return found
    if not callable(found):
        expected = "a zmdp.Services, a zmdp.Worker or AsyncWorker, or a function with --service"
        raise SettingError(f"{target} is of type {type(found).__name__}: expected {expected}")
    service = service or default_service
    if service is None and isinstance(found, BaseService):
        alone = f"add --only {found.name} to serve it alone"
        raise SettingError(f"{target} is a service: serve the Services that declares it, and {alone}")
    if service is None:
        raise SettingError(f"{target} is a function: name the service that it offers with --service NAME")
    if is_async(found):
        return AsyncWorker(service, found, codec=codec)
    return Worker(service, found, codec=codec)


def main(name: str = "mdworker") -> NoReturn:
    """Run the command by the name that its user has called it."""
    run(name, cli)


if __name__ == "__main__":
    main()
