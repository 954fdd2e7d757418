"""Options and limits that several subcommands of `mdp-spark` share."""

from collections.abc import Sequence
from typing import Final

import click

from ...clients.console import bodies
from ...mdp.cli.console import Decorator

SPARK_GRACE_SECONDS: Final = 1.75
"""How long Spark may take to end after the limit of a drain."""
PREFIX: Final = click.option("--prefix", default="spark", help="Prefix of the service names PREFIX.sql and PREFIX.job.")
MASTER: Final = click.option(
    "--master",
    metavar="URL",
    show_default="spark-submit's, else local[*]",
    help="Spark cluster: local[N], spark://HOST:PORT, yarn, k8s://…",
)
PY_FILES: Final = click.option(
    "--py-files", multiple=True, metavar="FILE", help="Python file or zip to ship to executors. Can be repeated."
)


def _conf(context: click.Context, option: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    del context, option
    found = bodies.pairs(values, "a Spark setting, spark.NAME=VALUE")
    for name, text in found.items():
        if not name.startswith("spark."):
            raise click.BadParameter(f"'{name}={text}': expected a Spark setting, spark.NAME=VALUE")
    return found


CONF: Final = click.option(
    "--conf", multiple=True, metavar="NAME=VALUE", callback=_conf, help="Spark setting. Can be repeated."
)


def name_option(kind: str) -> Decorator:
    """Return the decorator for `--name` of a driver, which is a `kind`: batch or fleet."""
    return click.option(
        "--name", show_default=f"{kind}-HOST-PID", help=f"Name of this {kind} for `status` and `drain`."
    )
