"""The process of one attack: `python -m attacks.attacker NAME ENDPOINT AMOUNT SEED [KEYS]`.

It carries out the attack, writes one line of JSON (what it has sent, and how the attack ended), and keeps its
connections open until its standard input ends.
"""

import json
import resource
import sys
import traceback
from pathlib import Path
from random import Random
from typing import Final

from .keyed import KeyedPeer
from .suite import ATTACKS
from .zmtp import sent, still_open

MAX_MEMORY: Final = 2 << 30
"""Bytes of address space that an attacker may use."""


def main(name: str, endpoint: str, amount: str, seed: str, *keys: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, resource.RLIM_INFINITY))
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    report: dict[str, object] = {"failure": None, "cut_short": None}
    try:
        ATTACKS[name].run(endpoint, int(amount), Random(seed), *map(Path, keys))
    except OSError as error:
        report["cut_short"] = f"{type(error).__name__}: {error}"  # the broker has put an end to it
    except AssertionError as error:
        report["failure"] = str(error)
    except Exception:  # noqa: BLE001 - reported to the harness
        report["failure"] = traceback.format_exc()
    report |= {"messages": sent["messages"], "connections": len(still_open) + len(KeyedPeer.open)}
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
