"""Report which modules are compiled.  With `ZMDP_PURE=1` in the environment none are."""

from importlib import import_module
from typing import Any

from ...pure import PURE


def parts() -> dict[str, bool]:
    """Return which parts are compiled: moving messages, packing batches, and the protocol's state machines.

    This reports what is in use: an extension module that was built but cannot be imported does not count.
    """
    machine, multipart, batch = (_imported(name) for name in ("broker.machine", "transport.multipart", "wire.batch"))
    return {
        "multipart": multipart.COMPILED,
        "batch": not str(batch.__file__).endswith(".py"),
        "machines": not str(machine.__file__).endswith(".py"),
    }


def _imported(name: str) -> Any:
    return import_module(f"zmdp.mdp.{name}")  # when asked: all of them import this package


def summary() -> str:
    """Return the same in words, for `--version`."""
    have = parts()
    if all(have.values()):
        return "compiled"
    if not any(have.values()):
        return "pure Python, as ZMDP_PURE asks" if PURE else "pure Python"
    return ", ".join(f"{name} {'compiled' if there else 'pure Python'}" for name, there in have.items())
