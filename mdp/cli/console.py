"""What the command lines share: one-line errors, option types that say what they take, logging to stderr."""

import logging
import os
import re
import sys
from collections.abc import Callable
from typing import Any, Final, NoReturn, TextIO

import click
import zmq
from click.core import ParameterSource

from ... import __version__
from .. import compiled
from ..errors import (
    BrokerUnreachable,
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
from ..limits import LARGEST

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130

_ENDPOINT: Final = re.compile(r"(ipc|inproc)://.+|tcp://([^\s]+):(\d+|\*)")
_MAX_PORT: Final = 65535


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
"""Exit code by error; the first that fits counts, and 1 for any other."""


def run(name: str, command: click.Command) -> NoReturn:
    """Run the command `name` and exit.  Whatever is wrong is told in one line on stderr.

    For an error of zmdp's own the exit code is that of `EXIT_CODES`.  Bad usage exits with 2, Ctrl-C with 130.
    """
    _open_closed_streams()
    try:
        result = command.main(prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as error:
        _fail(name, EXIT_USAGE, _explain(error))
    except click.ClickException as error:
        _fail(name, EXIT_USAGE, error.format_message())
    except (click.Abort, KeyboardInterrupt):
        _fail(name, EXIT_INTERRUPTED, "interrupted")
    except SettingError as error:
        _fail(name, EXIT_USAGE, str(error))
    except ZmdpError as error:
        code = next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), EXIT_FAILED)
        _fail(name, code, str(error))
    except BrokenPipeError:
        _discard(sys.stdout)  # whoever read our output has gone
        sys.exit(EXIT_FAILED)
    except OSError as error:
        _fail(name, EXIT_FAILED, str(error) if error.filename else f"cannot write the output: {error.strerror}")
    sys.exit(result if isinstance(result, int) else 0)


def _open_closed_streams() -> None:
    """A program may be started with its standard streams closed; then there is nobody to read, and no error."""
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, mode))  # noqa: SIM115 - it stays open, like the one it stands for


def _fail(name: str, code: int, text: str) -> NoReturn:
    try:
        print(f"{name}: {printable(text)}", file=sys.stderr, flush=True)  # noqa: T201 - the one place for errors
    except OSError:
        _discard(sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        _discard(sys.stdout)
    sys.exit(code)


def _discard(stream: TextIO) -> None:
    """Nobody takes what is in its buffer: Python would try once more when it ends, and exit with a code of its own."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def printable(text: str) -> str:
    """What a peer said, on one line and with nothing in it that a terminal would obey."""
    return "".join(each if each.isprintable() else "?" for each in " ".join(text.split()))


def _explain(error: click.UsageError) -> str:
    """One line: what is wrong, where it was said if not on the command line, and where to look."""
    text = error.format_message().rstrip(".?")
    if error.ctx is None:
        return text
    parameter = getattr(error, "param", None)
    if isinstance(parameter, click.Option) and parameter.name:
        source = error.ctx.get_parameter_source(parameter.name)
        if source is ParameterSource.ENVIRONMENT:
            name = parameter.envvar or f"{error.ctx.auto_envvar_prefix}_{parameter.name.upper()}"
            text += f" (from the environment, {name})"
        elif source is ParameterSource.DEFAULT_MAP:
            text += f" (from {error.ctx.params.get('config')})"
    return f"{text}. See '{error.ctx.command_path} --help'"


class Number(click.ParamType):  # type: ignore[type-arg]  # not generic in older releases
    """A number above 0 (or from 0 on) of some unit."""

    def __init__(self, unit: str, *, whole: bool = False, zero: bool = False) -> None:
        self.name = {"seconds": "SECONDS", "bytes": "BYTES"}.get(unit, "N")
        kind, least = "a whole number" if whole else "a number", "0 or more" if zero else "above 0"
        self._takes = f"it takes {kind} of {unit}, {least}"
        self._whole = whole
        self._zero = zero

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """SECONDS, BYTES or N."""
        del param, ctx
        return self.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | int:
        """The number in `value`, from whatever source."""
        try:
            if isinstance(value, bool) or (self._whole and isinstance(value, float)):
                raise ValueError
            number = int(value) if self._whole else float(value)
            if not -LARGEST < number < LARGEST:
                raise ValueError
        except (TypeError, ValueError):
            self.fail(f"{value!r}: {self._takes}", param, ctx)
        if number < 0 or (number == 0 and not self._zero):
            self.fail(f"{value!r}: {self._takes}", param, ctx)
        return number


class Endpoint(click.ParamType):  # type: ignore[type-arg]  # not generic in older releases
    """A ZeroMQ endpoint."""

    name = "ENDPOINT"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """ENDPOINT."""
        del param, ctx
        return self.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """`value`, if it can be an endpoint."""
        match = _ENDPOINT.fullmatch(value) if isinstance(value, str) else None
        port = match.group(3) if match else None
        if match is None or (port and port != "*" and int(port) > _MAX_PORT):
            self.fail(f"{value!r}: it takes an endpoint such as tcp://127.0.0.1:5555 or ipc:///tmp/broker", param, ctx)
        return str(value)


def version_option() -> Callable[[Any], Any]:
    """`--version`, the same for all commands; it says what runs compiled."""

    def show(context: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted:
            below = f"{compiled.told()}; pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()}"
            click.echo(f"{context.find_root().info_name} {__version__} ({below})")
            context.exit()

    return click.option(
        "--version",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        allow_from_autoenv=False,
        callback=show,
        help="Show the version and what runs compiled, and exit.",
    )


def with_default(text: str, default: object, unit: str = "") -> str:
    """An option's help with its default and the unit of that."""
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    return f"{text}  [default: {shown} {unit}".rstrip() + "]"


log_level_option = click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    default="info",
    show_default=True,
    help="Least level of what is logged to stderr.",
)


def log_to_stderr(level: str) -> None:
    """Log to stderr, a line an event, with the time."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
