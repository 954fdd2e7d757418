"""The entry points of all commands: each imports its command, and Ctrl-C meanwhile ends it without a traceback."""

import signal
import sys
from functools import partial
from importlib import import_module
from typing import Final

PROGRAMS: Final = {
    "dev": "zmdp.dev.cli",
    "broker": "zmdp.mdp.cli.broker",
    "worker": "zmdp.workers.command.cli",
    "client": "zmdp.clients.command.main",
    "titanic": "zmdp.titanic.operator.command.cli",
    "gateway": "zmdp.gateways.cli",
    "spark": "zmdp.spark.cli",
    "keys": "zmdp.mdp.cli.keys",
}
"""The modules of the commands, by their names behind `zmdp`."""
SHORTCUTS: Final = ("call", "stream", "services", "describe", "top", "completion")
"""Subcommands of `zmdp client` that `zmdp` has as well."""


def _run(module: str, name: str) -> None:
    """Import the module of a command, and run its `main` by this name."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else signals are ignored, as in a background job
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        main = import_module(module).main
    finally:
        signal.signal(signal.SIGINT, before)
    main(name)


def zmdp() -> None:
    """Run `zmdp NAME`: the command of that name, of which nothing else is imported."""
    name = next(iter(sys.argv[1:]), "")
    if name in PROGRAMS:
        sys.argv[:2] = [f"zmdp {name}"]  # each command reads its own arguments
        _run(PROGRAMS[name], sys.argv[0])
    elif name in SHORTCUTS:
        _run(PROGRAMS["client"], "zmdp")
    else:
        _run("zmdp.cli", "zmdp")


mdp_broker = partial(_run, PROGRAMS["broker"], "mdp-broker")
mdp_gateway = partial(_run, PROGRAMS["gateway"], "mdp-gateway")
mdp_keys = partial(_run, PROGRAMS["keys"], "mdp-keys")
mdclient = partial(_run, PROGRAMS["client"], "mdclient")
mdworker = partial(_run, PROGRAMS["worker"], "mdworker")
mdp_spark = partial(_run, PROGRAMS["spark"], "mdp-spark")
titanic = partial(_run, PROGRAMS["titanic"], "titanic")
