"""Brokers that admit only the keys in an access file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zmdp.mdp.broker.io.loop import Server
from zmdp.mdp.limits import Limits
from zmdp.mdp.security.access import load
from zmdp.mdp.security.keys import ClientKeys, create_keys, load_keys
from zmdp.testing import running_broker

ROLES = """
[roles.shop]
keys = ["shop.key"]
call = ["*"]

[roles.resizer]
keys = ["resizer.key"]
offer = ["*"]

[roles.titanic]
keys = ["titanic.key"]
call = ["*"]
offer = ["titanic.*"]
on_behalf = true

[roles.driver]
keys = ["driver.key"]
call = ["*"]
offer = ["*"]
mmi = "all"

[roles.operator]
keys = ["operator.key"]
call = ["*"]
admin = true
"""
NAMES = ("broker", "shop", "resizer", "titanic", "driver", "operator", "stranger")


class Folder:
    """A folder with keys, that of `stranger` being unknown, and the access file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.access = path / "access.toml"
        for name in NAMES:
            create_keys(name, path)
        self.write(ROLES)

    def write(self, roles: str) -> None:
        self.access.write_text(f'secret_key = "broker.key_secret"\n{roles}')

    def settings(self, name: str, broker: str = "broker") -> dict[str, Path]:
        """The keywords with which the program `name` connects."""
        return {"key": self.path / f"{name}.key_secret", "broker_key": self.path / f"{broker}.key"}

    def keys(self, name: str, broker: str = "broker") -> ClientKeys:
        found = load_keys(**self.settings(name, broker))
        assert found is not None
        return found

    def options(self, name: str, broker: str = "broker") -> tuple[str, ...]:
        """The command-line options with which the program `name` connects."""
        return ("--key", str(self.path / f"{name}.key_secret"), "--broker-key", str(self.path / f"{broker}.key"))

    def environment(self, name: str) -> dict[str, str]:
        """The environment variables with which the program `name` connects."""
        return {"MDP_KEY": str(self.path / f"{name}.key_secret"), "MDP_BROKER_KEY": self.keys(name).server.decode()}

    @contextmanager
    def broker(self, *binds: str, limits: Limits | None = None) -> Iterator[Server]:
        """Run a broker in a thread, with these keys."""
        with running_broker(*binds, limits=limits, drain_timeout=0.0, access=load(self.access)) as server:
            yield server
            assert server.broker.stats.internal_errors == 0
