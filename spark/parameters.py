"""Options that several subcommands of `mdp-spark` share."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Final

import click

from ..clients import Client
from ..mdp.cli.console import Decorator, brokers_option, key_options, with_default
from ..mdp.keys import ClientKeys
from ..mdp.transport.reach import check_listening
from ..titanic.cli.parameters import DURATION

BROKER: Final = brokers_option(
    "Broker to use. Can be repeated, or separate endpoints with commas: if one is lost or drains, the next is used "
    "until the first is back."
)
PREFIX: Final = click.option(
    "--prefix",
    default="spark",
    help=with_default("Prefix of the service names PREFIX.sql and PREFIX.job.", "spark"),
)
MASTER: Final = click.option(
    "--master",
    metavar="URL",
    help=with_default("Spark cluster: local[N], spark://HOST:PORT, yarn, k8s://…", "spark-submit's, else local[*]"),
)
PY_FILES: Final = click.option(
    "--py-files",
    multiple=True,
    metavar="FILE",
    help="Python file or zip to ship to executors. Can be repeated.",
)


def _conf(context: click.Context, option: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    del context, option
    found = pairs(values, "a Spark setting, spark.NAME=VALUE")
    for name, text in found.items():
        if not name.startswith("spark."):
            raise click.BadParameter(f"'{name}={text}': expected a Spark setting, spark.NAME=VALUE")
    return found


JSON: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
CONF: Final = click.option(
    "--conf",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_conf,
    help="Spark setting. Can be repeated.",
)


def name_option(kind: str) -> Decorator:
    """Return the decorator for `--name` of a driver, which is a `kind`: batch or fleet."""
    return click.option(
        "--name", help=with_default(f"Name of this {kind} for `status` and `drain`.", f"{kind}-HOST-PID")
    )


def client_options(seconds: float) -> Decorator:
    """Return the decorator that calls a command with a `client`, made from --broker, --key and --timeout."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def run(*, broker: Sequence[str], keys: ClientKeys | None, timeout: float, **given: Any) -> Any:
            check_listening(broker, keys)
            with Client(broker, timeout=timeout, retries=0, key=keys) as client:
                return command(client=client, **given)

        timeout = click.option(
            "--timeout", type=DURATION, default=seconds,
            help=with_default("How long to wait for an answer.", f"{seconds:g}", "seconds"),
        )  # fmt: skip
        return BROKER(key_options(timeout(run)))

    return decorate


def pairs(values: Sequence[str], expected: str = "NAME=VALUE") -> dict[str, str]:
    """Parse NAME=VALUE options.  Raises `click.BadParameter`."""
    found = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not (name and equals):
            raise click.BadParameter(f"{value!r}: expected {expected}")
        found[name] = text
    return found
