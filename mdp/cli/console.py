"""Shared by the commands: one-line errors, option types, `--version`, logging to stderr."""

import errno
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field
from functools import reduce, wraps
from itertools import islice
from pkgutil import resolve_name
from typing import Any, Final, NoReturn, TextIO

import click
import zmq

from ... import version
from ..errors import (
    BrokerUnreachable,
    RequestError,
    RequestTimeout,
    RetryLater,
    ServiceError,
    ServiceNotFound,
    SettingError,
    StreamInterrupted,
    TitanicError,
    UnknownTicket,
    WorkerLost,
    ZmdpError,
)
from ..limits import DEFAULT_ENDPOINT, LARGEST
from ..program import logs
from ..security.keys import load_keys
from ..transport.endpoints import BROKER_KEY_VARIABLE, BROKER_VARIABLE, KEY_VARIABLE, port_problem, split_brokers

CONTEXT_SETTINGS: Final[dict[str, Any]] = {
    "max_content_width": 110,
    "help_option_names": ["-h", "--help"],
    "show_default": True,
}
"""Click settings of every command."""
_NUMBER: Final = re.compile(r"-\.?\d.*", re.DOTALL)
"""A word that begins like an option, and is a negative number."""

_log_format = logs.FORMATS[0]
"""The `--log-format` of the command that is running, which `run` needs after its context has ended."""

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Adds options to a command."""

END_WITH_STDIN: Final = "ZMDP_END_WITH_STDIN"
"""With this in its environment, a command takes the end of its standard input for a SIGTERM."""
STDIN: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
CANNOT_WRITE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EBADF})
"""Errors without a file's name that writing to the standard output raises."""

MAX_DETAIL_CHARACTERS: Final = 1000
"""Characters of the detail of an error that are printed."""

_ENDPOINT: Final = re.compile(r"(ipc|inproc)://.+|tcp://[^\s/,]+:[^:/,]+")

EXIT_CODES: Final[dict[type[ZmdpError], int]] = {
    BrokerUnreachable: 5,
    RequestTimeout: 3,
    StreamInterrupted: 3,
    ServiceNotFound: 4,
    UnknownTicket: 4,
    TitanicError: 6,
    ServiceError: 6,
    WorkerLost: 6,
    RetryLater: 7,
}
"""Exit codes by error type; see `exit_code`."""


def exit_code(error: ZmdpError) -> int:
    """Return the exit code for `error`: that of its first type in `EXIT_CODES`, or else 1.

    If a stream is interrupted because its worker is lost, the code is that of `WorkerLost`, as for any other request.
    """
    if isinstance(error, StreamInterrupted) and error.code is not None:
        return EXIT_CODES[WorkerLost]
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), EXIT_FAILED)


def explanation(error: ZmdpError) -> str:
    """Return the text of `error`, with the detail that the service added."""
    detail = error.detail if isinstance(error, RequestError) else None
    if not detail:
        return str(error)
    try:
        text = detail.decode()
    except UnicodeDecodeError:
        text = f"{len(detail)} bytes that are not text"
    if len(text) > MAX_DETAIL_CHARACTERS:
        text = f"{text[:MAX_DETAIL_CHARACTERS]}…"
    return f"{error}; detail: {text}"


def run(name: str, command: click.Command) -> NoReturn:
    """Run the command `name` and exit.  Errors are printed to stderr in one line, those in its usage as Click does.

    Errors of zmdp exit with their `exit_code`, invalid usage with 2, Ctrl-C with 130.
    """
    global _log_format  # noqa: PLW0603
    _log_format = logs.FORMATS[0]
    _open_closed_streams()
    if os.environ.pop(END_WITH_STDIN, ""):  # it is not for programs that this one starts
        threading.Thread(target=_end_with_stdin, name="stdin", daemon=True).start()
    try:
        result = command.main(prog_name=name, standalone_mode=False, **CONTEXT_SETTINGS)
        sys.stdout.flush()
    except click.ClickException as error:
        _end(error.exit_code, error.show)
    except (click.Abort, KeyboardInterrupt):
        _fail(name, EXIT_INTERRUPTED, "interrupted")
    except SettingError as error:
        _fail(name, EXIT_USAGE, str(error))
    except ZmdpError as error:
        _fail(name, exit_code(error), explanation(error))
    except BrokenPipeError:
        _discard(sys.stdout)  # the reader of our output has gone
        sys.exit(EXIT_FAILED)
    except OSError as error:
        if _current_directory_is_deleted():  # the error itself names no file
            _fail(name, EXIT_FAILED, "the current directory has been deleted: change to one that exists")
        subject = error.filename or ("cannot write the output" if error.errno in CANNOT_WRITE else "")
        _fail(name, EXIT_FAILED, f"{subject}: {error.strerror or error}".removeprefix(": "))
    sys.exit(result if isinstance(result, int) else 0)


def _end_with_stdin() -> None:
    """Stop when the program at the other end of the standard input has ended, however it did."""
    while os.read(STDIN, select.PIPE_BUF):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _current_directory_is_deleted() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _open_closed_streams() -> None:
    """Open the null device for each standard stream that is closed, so that writing to it is not an error."""
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, mode))  # noqa: SIM115 - it stays open, like the stream it replaces


def _fail(name: str, code: int, text: str) -> NoReturn:
    line = f"{name}: {printable(text)}" if _log_format == "text" else logs.json_line(name, printable(text))
    _end(code, lambda: print(line, file=sys.stderr, flush=True))  # noqa: T201 - the one place for errors


def _end(code: int, tell: Callable[[], object]) -> NoReturn:
    """Exit with a code after an error, which `tell` writes to stderr."""
    try:
        tell()
    except OSError:
        _discard(sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        _discard(sys.stdout)
    sys.exit(code)


def _discard(stream: TextIO) -> None:
    """Redirect a broken stream to the null device.

    Python flushes it once more at exit, and a failure there would replace our exit code.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def printable(text: str) -> str:
    """Return `text` on one line and without control characters, safe to show on a terminal."""
    return "".join(each if each.isprintable() else "?" for each in " ".join(text.split()))


class Subcommand(click.Command):
    """A command whose arguments may be negative numbers, although these begin like options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments: with a negative number among them, all of them behind the options and `--`.

        What follows an option that takes a value stays with it.
        """
        takes = {name: each.nargs for each in self.params if _takes_value(each) for name in each.opts}
        ordered: list[str] = []
        values: list[str] = []
        words = iter(args)
        for word in words:
            if word == "--":
                values += words
            elif not word.startswith("-") or word == "-" or _NUMBER.fullmatch(word):
                values.append(word)
            else:
                ordered += [word, *islice(words, takes.get(word, 0))]
        return super().parse_args(ctx, [*ordered, "--", *values] if any(map(_NUMBER.fullmatch, values)) else args)


def _takes_value(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Option) and not parameter.is_flag and not parameter.count


class SectionedCommand(click.Command):
    """A command whose help shows most options under headings, behind those that a newcomer needs.

    `sections` has the names of the options of each heading.  Those that it does not name come first.
    """

    def __init__(self, *args: Any, sections: Mapping[str, Collection[str]], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options: Click has no headings of its own."""
        named = {name for names in self.sections.values() for name in names}
        first = {each.name for each in self.get_params(ctx)} - named
        for heading, names in {"Options": first, **self.sections}.items():
            records = [each.get_help_record(ctx) for each in self.get_params(ctx) if each.name in names]
            with formatter.section(heading):
                formatter.write_dl([record for record in records if record])


class Group(click.Group):
    """A group of commands whose arguments may be negative numbers."""

    command_class = Subcommand


class LazyGroup(Group):
    """A group that imports a command, and with it what that depends on, only when the command is used.

    `commands_in` has `"MODULE:NAME"` of each such command; they are listed after the group's other commands.
    """

    def __init__(self, *args: Any, commands_in: Mapping[str, str], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._targets = commands_in

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order in which the help shows them."""
        del ctx
        return [*self.commands, *self._targets]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command.  Return None if there is none of that name."""
        target = self._targets.get(cmd_name)
        if target is None:
            return super().get_command(ctx, cmd_name)
        found: click.Command = resolve_name(target)
        return found


class Number(click.ParamType):  # type: ignore[type-arg]  # not generic in older releases
    """A number with a unit, greater than 0; with `zero`, 0 is allowed too."""

    def __init__(self, unit: str, *, whole: bool = False, zero: bool = False) -> None:
        self.name = {"seconds": "SECONDS", "bytes": "BYTES"}.get(unit, "N")
        kind, least = "a whole number" if whole else "a number", "0 or more" if zero else "greater than 0"
        self._expected = f"expected {kind} of {unit} ({least})"
        self._whole = whole
        self._zero = zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | int:
        """Return `value`, which may come from a TOML file as well, as a number."""
        try:
            if isinstance(value, bool) or (self._whole and isinstance(value, float)):
                raise ValueError
            number = int(value) if self._whole else float(value)
            if not -LARGEST < number < LARGEST:
                raise ValueError
            if number < 0 or (number == 0 and not self._zero):
                raise ValueError
        except (TypeError, ValueError):
            self.fail(f"{self._expected}, got {value!r}", param, ctx)
        return number


class Address(click.ParamType):  # type: ignore[type-arg]  # not generic in older releases
    """A host and a port."""

    name = "HOST:PORT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """Return host and port."""
        if isinstance(value, tuple):
            return value
        host, _, port = str(value).rpartition(":")
        if not host or "://" in host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            self.fail(f"expected HOST:PORT, such as 127.0.0.1:8080, got {value!r}", param, ctx)
        return host.strip("[]"), int(port)


class Endpoint(click.ParamType):  # type: ignore[type-arg]  # not generic in older releases
    """A ZeroMQ endpoint."""

    name = "ENDPOINT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return `value` if it can be an endpoint."""
        problem = port_problem(value) if isinstance(value, str) else None
        if problem is not None:
            self.fail(f"{value!r} is not a valid endpoint: {problem}", param, ctx)
        if not (isinstance(value, str) and _ENDPOINT.fullmatch(value)):
            meant = f"tcp://{value}"
            example = meant if _ENDPOINT.fullmatch(meant) else "tcp://127.0.0.1:5555 or ipc:///tmp/broker"
            expected = f"expected an endpoint such as {example}"
            self.fail(f"{expected}, got {value!r}", param, ctx)
        return value


class BrokerEndpoint(Endpoint):
    """The endpoint of a broker, and with access control its public key."""

    name = "ENDPOINT[=KEY]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return `value` if it can be a broker; `key_options` reads the key."""
        if not isinstance(value, str):
            return super().convert(value, param, ctx)
        endpoint, found, key = value.partition("=")
        return f"{super().convert(endpoint.strip(), param, ctx)}{found}{key.strip()}"


class EndpointList(click.ParamType):  # type: ignore[type-arg]  # not generic in older releases
    """One ZeroMQ endpoint, or several separated by commas.

    The option is `multiple`, so that Click splits the value of an environment variable at spaces as well.  Its callback
    is `all_values`.
    """

    def __init__(self, kind: Endpoint | None = None) -> None:
        self._kind = kind or Endpoint()
        self.name = self._kind.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        """Return the list of endpoints in `value`."""
        endpoints = [each.strip() for each in value.split(",") if each.strip()] if isinstance(value, str) else []
        return [self._kind.convert(each, param, ctx) for each in endpoints or [value]]


def limit_option(limit: Field[Any], **changed: Any) -> Decorator:
    """Return the option for a field of limits (`limit` in `mdp/limits.py`), with its default, unit and help."""
    settings = {"default": limit.default, "show_default": limit.metadata.get("derived") or True, **changed}
    return click.option(
        f"--{limit.name.replace('_', '-')}",
        type=Number(limit.metadata["unit"], whole=limit.type is not float),
        help=limit.metadata["help"],
        **settings,
    )


def options(*decorators: Decorator) -> Decorator:
    """Return the decorator that adds several options to a command; its help shows them in this order."""
    return lambda command: reduce(lambda decorated, option: option(decorated), reversed(decorators), command)


def all_values(context: click.Context, option: click.Parameter, values: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """Return all values in the lists that an option was given: its callback."""
    del context, option
    return tuple(each for value in values for each in value)


def brokers_option(help_: str, *, default: bool = True) -> Decorator:
    """Return the decorator for `--broker` of a command that fails over, which also has the `key_options`.

    The command gets a tuple of endpoints.  Without `default`, it may be empty.
    """
    return click.option(
        "--broker",
        type=EndpointList(BrokerEndpoint()),
        multiple=True,
        callback=all_values,
        default=[DEFAULT_ENDPOINT] if default else None,
        envvar=BROKER_VARIABLE,
        show_envvar=True,
        show_default=DEFAULT_ENDPOINT,
        help=help_,
    )


def heartbeat_options(*, default: bool = True) -> Decorator:
    """Return the decorator for `--heartbeat` and `--liveness` of a worker; without `default`, they may be None."""
    heartbeat = click.option(
        "--heartbeat",
        type=Number("seconds"),
        default=1.0 if default else None,
        envvar="MDP_HEARTBEAT",
        show_envvar=True,
        show_default="1",
        help="Heartbeat interval.",
    )
    liveness = click.option(
        "--liveness",
        type=Number("intervals", whole=True),
        default=5 if default else None,
        envvar="MDP_LIVENESS",
        show_envvar=True,
        show_default="5",
        help="Silent heartbeat intervals after which the broker is considered dead.",
    )
    return options(heartbeat, liveness)


def key_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--key` and `--broker-key`, and call the command with `keys`: `ClientKeys`, or None if no key is given.

    Keys in the `brokers_option` of the command are among them, and its endpoints are without them.
    """

    @click.option(
        "--key",
        "key_file",
        metavar="FILE",
        envvar=KEY_VARIABLE,
        show_envvar=True,
        help="Secret key (NAME.key_secret, made by `mdp-keys new NAME`), for brokers that admit only known keys.",
    )
    @click.option(
        "--broker-key",
        metavar="FILE|KEY",
        envvar=BROKER_KEY_VARIABLE,
        show_envvar=True,
        help="The broker's public key: its file, or the key itself (40 characters). Brokers that have different keys "
        "are written as ENDPOINT=KEY in --broker.",
    )
    @wraps(command)
    def with_keys(
        *arguments: Any, key_file: str | None, broker_key: str | None, broker: Sequence[str], **options: Any
    ) -> Any:
        brokers = split_brokers(broker) if broker else {}
        keys = load_keys(key_file, broker_key, brokers)
        return command(*arguments, broker=tuple(brokers), keys=keys, **options)

    return with_keys


def show_version(context: click.Context) -> NoReturn:
    """Print the version and which modules are compiled, and exit."""
    build = f"{version.build()}; pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()}"
    click.echo(f"{context.find_root().info_name} {version.__version__} ({build})")
    context.exit()


def version_option() -> Callable[[Any], Any]:
    """Return the `--version` option of all commands, which also shows which modules are compiled."""

    def show(context: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted:
            show_version(context)

    return click.option(
        "--version",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show the version and which modules are compiled, and exit.",
    )


handler_timeout_option = click.option(
    "--handler-timeout",
    type=Number("seconds"),
    show_default="never",
    help="How long a handler may neither return nor yield before its request goes to another worker.",
)


def log_level_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--log-level`, and `--log-format`, of which only `log_to_stderr` has to know."""
    level = click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
        default="info",
        help="Lowest level of log messages to write to stderr.",
    )
    form = click.option(
        "--log-format",
        type=click.Choice(logs.FORMATS, case_sensitive=False),
        default=logs.FORMATS[0],
        envvar="MDP_LOG_FORMAT",
        show_envvar=True,
        is_eager=True,
        expose_value=False,
        callback=_keep_format,
        help="Write log messages, and the error that ends the command, as lines of text or as JSON objects. Errors in "
        "the usage are text.",
    )
    return level(form(command))


def _keep_format(context: click.Context, option: click.Parameter, form: str) -> None:
    del context, option
    global _log_format  # noqa: PLW0603 - a process runs one command
    _log_format = form


def log_format() -> str:
    """Return the `--log-format` of the command that is running."""
    return _log_format


def log_to_stderr(level: str) -> None:
    """Log to stderr, one line per event."""
    logs.configure(level, log_format())
