"""The command `mdp-spark`."""

from typing import Final, NoReturn

import click

from ..mdp.cli.console import LazyGroup, run, version_option

COMMANDS: Final = {
    "batch": "zmdp.spark.command.batch:batch",
    "fleet": "zmdp.spark.command.fleet:fleet",
    "submit": "zmdp.spark.command.submit:submit",
    "jobs": "zmdp.spark.command.status:jobs",
    "status": "zmdp.spark.command.status:status",
    "fetch": "zmdp.spark.command.fetch:fetch",
    "logs": "zmdp.spark.command.fetch:logs",
    "cancel": "zmdp.spark.command.status:cancel",
    "reload": "zmdp.spark.command.status:reload_command",
    "drain": "zmdp.spark.command.status:drain",
    "doctor": "zmdp.spark.command.fleet:doctor",
}


@click.group(cls=LazyGroup, commands_in=COMMANDS, context_settings={"max_content_width": 110})
@version_option()
def cli() -> None:
    """Run Spark jobs as services, and Spark executors as workers.

    \b
    mdp-spark doctor                            check that everything is installed and reachable
    mdp-spark batch --config catalogue.toml     offer spark.sql and spark.job
    mdp-spark submit sql "SELECT 1 AS one"      run a query, show its progress and print its result
    mdp-spark fleet yourmodule:handler --service NAME --max 4    serve NAME with executors
    mdp-spark status                            show the batches and fleets at the broker

    Needs the extra zmdp[spark] and Java 17 or newer. The client commands (all but batch, fleet and doctor) need
    neither.

    \b
    Exit codes:
      0  success                     5  no broker reachable
      1  other failure, or a failed  6  the job failed
         check of doctor             7  refused for now, retry later
      2  invalid usage             130  interrupted
      3  timeout
      4  not found
    """


def main(name: str = "mdp-spark") -> NoReturn:
    """Run the command by the name that its user has called it."""
    run(name, cli)


if __name__ == "__main__":
    main()
