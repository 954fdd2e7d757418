"""The units with which systemd runs the commands: `--systemd` prints one."""

import sys
from pathlib import Path
from typing import Final

import click

from .console import Decorator

WATCHDOG_SECONDS: Final = 30

UNIT: Final = """\
# {file}, printed by: {command} --systemd
# Install it as {folder}/{file}, then: systemctl enable --now {instance}
# {settings}
[Unit]
Description={description}
Documentation=https://github.com/zmdp/zmdp/blob/main/docs/how-to/installing.md
After=network-online.target
Wants=network-online.target

[Service]
Type=notify
NotifyAccess=main
{service}
Restart=always
RestartSec=1
RestartPreventExitStatus=2
TimeoutStopSec=90
WatchdogSec={watchdog}
LimitNOFILE=1048576

# A user of its own, which exists while it runs unless there is one of this name.  It writes to {state} only.
User=zmdp
DynamicUser=yes
StateDirectory=zmdp
WorkingDirectory={state}
ConfigurationDirectory=zmdp
RuntimeDirectory={runtime}
UMask=0077

# It talks to the network, and to nothing else on this machine.
CapabilityBoundingSet=
AmbientCapabilities=
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
PrivateDevices=yes
PrivateUsers=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
ProcSubset=pid
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
MemoryDenyWriteExecute={no_jit}
RemoveIPC=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged @resources
SystemCallErrorNumber=EPERM

[Install]
WantedBy=multi-user.target
"""
FOLDER: Final = "/etc/systemd/system"
STATE: Final = "/var/lib/zmdp"
RELOAD: Final = "\nExecReload=/bin/kill -HUP $MAINPID"


def unit(command: str) -> str:
    """Return the unit of a command: mdp-broker, mdworker, titanic serve or mdp-gateway http."""
    file, description, environment, reloads = {
        "mdp-broker": ("mdp-broker.service", "zmdp's broker", "broker", True),
        "mdworker": ("mdworker@.service", "zmdp's worker %i", "worker-%i", True),
        "titanic serve": ("titanic.service", "zmdp's store of requests, Titanic", "titanic", False),
        "mdp-gateway http": ("mdp-gateway.service", "zmdp's gateway for HTTP", "gateway", True),
    }[command]
    name, *subcommand = command.split()
    is_worker = name == "mdworker"
    words = [
        str(Path(sys.executable).with_name(name)), *subcommand,
        *["$PROCESSES"] * is_worker, "$OPTIONS", *["$TARGET"] * is_worker,
    ]  # fmt: skip
    settings = f"/etc/zmdp/{environment}.env"
    optional = "" if is_worker else "-"
    return UNIT.format(
        file=file, command=command, folder=FOLDER, description=description, state=STATE, watchdog=WATCHDOG_SECONDS,
        instance="mdworker@NAME" if is_worker else file.removesuffix(".service"),
        settings=f"{settings.replace('%i', 'NAME')} has TARGET=module:services, and may have OPTIONS=--processes=4"
        if is_worker else f"{settings} may have OPTIONS=--option=value ..., and environment variables of the command",
        # One process that is supervised, so that systemctl reload replaces it without a failed call.
        service="Environment=PROCESSES=--processes=1\n" * is_worker
        + f"EnvironmentFile={optional}{settings}\nExecStart={' '.join(words)}{RELOAD if reloads else ''}",
        runtime=file.removesuffix(".service").replace("@", "-%i"),
        # Handlers may compile their code while they run.
        no_jit="no" if is_worker else "yes",
    )  # fmt: skip


def systemd_option(command: str) -> Decorator:
    """Return the decorator for `--systemd`, which prints the unit of `command` and exits."""

    def show(context: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted:
            click.echo(unit(command), nl=False)
            context.exit()

    return click.option(
        "--systemd",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Print a unit with which systemd runs this command, and exit.",
    )
