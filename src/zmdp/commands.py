"""The entry points of all commands: each imports its command, and Ctrl-C meanwhile ends it without a traceback."""

import signal
from functools import partial
from importlib import import_module


def _run(module: str) -> None:
    """Import the module of a command, and run its `main`."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else signals are ignored, as in a background job
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        main = import_module(module).main
    finally:
        signal.signal(signal.SIGINT, before)
    main()


mdp_broker = partial(_run, "zmdp.mdp.cli.broker")
mdp_gateway = partial(_run, "zmdp.clients.gateways.cli")
mdp_keys = partial(_run, "zmdp.mdp.cli.keys")
mdclient = partial(_run, "zmdp.clients.cli.main")
mdworker = partial(_run, "zmdp.workers.cli.main")
mdp_spark = partial(_run, "zmdp.spark.cli")
titanic = partial(_run, "zmdp.titanic.cli.main")
