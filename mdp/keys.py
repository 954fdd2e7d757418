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


def load_keys(key_file: str | PathLike[str] | None, broker_key: str | PathLike[str] | None) -> ClientKeys | None:
    """Return the keys of a client or worker, or None if neither argument is given.

    `key_file` is its secret certificate file; `broker_key` is the broker's public key, a certificate file or 40
    characters of Z85.  Raises `SettingError` if only one is given, or if one of them is not what it should be.
    """
    if not key_file and not broker_key:
        return None
    if not broker_key:
        raise SettingError(f"the key {key_file} is of no use without the broker's public key: add --broker-key")
    if not key_file:
        raise SettingError(f"the broker's key {broker_key} is of no use without a key of one's own: add --key")
    own = read_secret(Path(key_file))
    if zmq.curve_public(own.secret) != own.public:
        raise SettingError(f"{key_file} is damaged: its public key does not belong to its secret key")
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
