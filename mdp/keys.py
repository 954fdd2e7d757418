"""The CURVE keys of clients and workers: make them, load them, and use them on a socket."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any

import zmq

from .certificates import public_key, read_secret, write_pair
from .errors import SettingError


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """The keys of one client or worker, and the public key of its broker (`server`), all in Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes

    def apply(self, socket: zmq.Socket[Any]) -> None:
        """Encrypt the connections that `socket` makes from now on, and authenticate both sides."""
        socket.set(zmq.CURVE_PUBLICKEY, self.public)
        socket.set(zmq.CURVE_SECRETKEY, self.secret)
        socket.set(zmq.CURVE_SERVERKEY, self.server)


Key = str | PathLike[str] | ClientKeys
"""The key of a client or worker: its secret certificate file, or the keys that `load_keys` has returned."""
BrokerKey = str | PathLike[str]
"""The broker's public key: its certificate file, or 40 characters of Z85."""


def load_keys(key: Key | None, broker_key: BrokerKey | None) -> ClientKeys | None:
    """Return the keys of a client or worker, or None if neither argument is given.

    `key` is its secret certificate file; `broker_key` is the broker's public key, a certificate file or 40 characters
    of Z85.  Instead of both, `key` can be keys that were loaded before.  Raises `SettingError` if only one is given, or
    if one of them is not what it should be.
    """
    if isinstance(key, ClientKeys):
        if broker_key:
            raise SettingError(f"the broker's key {broker_key} is given twice: the loaded key contains one already")
        return key
    if not key and not broker_key:
        return None
    if not broker_key:
        raise SettingError(
            f"the key {key} is of no use without the broker's public key: add --broker-key (in Python, broker_key)"
        )
    if not key:
        raise SettingError(
            f"the broker's key {broker_key} is of no use without a key of one's own: add --key (in Python, key)"
        )
    own = read_secret(Path(key))
    if zmq.curve_public(own.secret) != own.public:
        raise SettingError(f"{key} is damaged: its public key does not belong to its secret key")
    return ClientKeys(own.public, own.secret, public_key(str(broker_key), Path()))


def create_keys(name: str, folder: Path, metadata: Mapping[str, str] | None = None) -> tuple[Path, Path]:
    """Make a key pair, write NAME.key and NAME.key_secret to `folder`, and return their paths.

    Raises `SettingError` if a file exists or cannot be written.
    """
    try:
        public, secret = zmq.curve_keypair()
    except zmq.ZMQError:
        raise SettingError("this libzmq cannot make keys: it was built without CURVE (reinstall pyzmq)") from None
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return write_pair(name, folder, public, secret, {"name": name, "created": created, **(metadata or {})})
