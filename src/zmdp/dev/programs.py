"""What `zmdp dev` runs: the commands of production, with addresses that are free on this machine."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ..mdp.errors import BindError, SettingError
from ..mdp.program.extras import WEB_PACKAGES, install_command
from ..mdp.transport.listening import listen

HOST: Final = "127.0.0.1"
BROKER_PORT, GATEWAY_PORT, DASHBOARD_PORT = 5555, 8080, 8081
"""The ports that are tried first; where another program listens, the next ones are tried."""
MAX_PORTS: Final = 1000
"""How many are tried."""
FOLDER: Final = Path(".zmdp")
ENVIRONMENT: Final = {"PYTHONUNBUFFERED": "1"}
"""What is added to the environment of each program: what your functions print is shown at once."""


@dataclass(frozen=True)
class Choice:
    """What is to run."""

    targets: Sequence[str]
    """MODULE:NAME of what the worker serves."""
    broker: bool = True
    titanic: bool = True
    gateway: bool = True
    dashboard: bool = True


@dataclass(frozen=True)
class Program:
    """A program that runs."""

    name: str
    words: list[str]
    """Its command line."""

    @property
    def shown(self) -> str:
        """Its command line with its environment, for a shell."""
        return " ".join([*(f"{name}={value}" for name, value in ENVIRONMENT.items()), shlex.join(self.words)])


@dataclass
class Plan:
    """The programs in the order in which they start, their addresses, and what is missing."""

    programs: list[Program] = field(default_factory=list)
    addresses: dict[str, str] = field(default_factory=dict)
    """The address of each program, for people."""
    missing: list[str] = field(default_factory=list)
    """The programs left out because a package is missing, each with how to install it."""
    endpoint: str | None = None
    """Where the broker listens; None if it is not among the programs."""


def plan(choice: Choice) -> Plan:
    """Return the programs for this choice.  Raises `BindError` if there are no free ports."""
    made = Plan()
    web = all(find_spec(name) for name in WEB_PACKAGES)
    if not web and ((choice.broker and choice.dashboard) or choice.gateway):
        made.missing.append(f"neither dashboard nor gateway: {install_command('web')}")
    reload = find_spec("watchfiles") is not None
    if not reload:
        made.missing.append(f"the worker does not reload your code when it changes: {install_command('reload')}")
    with ExitStack() as taken:
        connect = []
        if choice.broker:
            made.endpoint = made.addresses["broker"] = f"tcp://{_free_address(BROKER_PORT, taken)}"
            connect = ["--broker", made.endpoint]
            dashboard = []
            if web and choice.dashboard:
                dashboard = ["--http", _free_address(DASHBOARD_PORT, taken)]
                made.addresses["dashboard"] = f"http://{dashboard[1]}/"
            made.programs.append(Program("broker", [_command("mdp-broker"), "--bind", made.endpoint, *dashboard]))
        serve = [_command("mdworker"), *choice.targets, *connect, *(["--reload"] if reload else [])]
        made.programs.append(Program("worker", serve))
        if choice.titanic:
            file = FOLDER / "titanic.db"
            made.addresses["titanic"] = str(file)
            store = [_command("titanic"), "serve", "--db", str(file), "--service-schedules", *connect]
            made.programs.append(Program("titanic", store))
        if web and choice.gateway:
            address = _free_address(GATEWAY_PORT, taken)
            made.addresses["gateway"] = f"http://{address}/docs"
            made.programs.append(Program("gateway", [_command("mdp-gateway"), "http", "--bind", address, *connect]))
    return made


def procfile(programs: Sequence[Program]) -> str:
    """Return a Procfile, which honcho, foreman and others run."""
    return "\n".join(f"{program.name}: {program.shown}" for program in programs)


def _free_address(preferred: int, taken: ExitStack) -> str:
    """Return HOST:PORT at which nothing listens, and keep it taken until all have been chosen."""
    for port in range(preferred, preferred + MAX_PORTS):
        try:
            taken.enter_context(listen(HOST, port))
        except BindError:
            continue
        return f"{HOST}:{port}"
    raise BindError(f"none of the ports {preferred} to {preferred + MAX_PORTS - 1} is free")


def _command(name: str) -> str:
    """Return the name of a command of this environment, or its path if the shell would find no other or another one."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise SettingError(f"there is no command {name} beside {sys.executable}: install zmdp in this environment")
    return name if shutil.which(name) == found else found
