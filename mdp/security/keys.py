"""The CURVE keys of clients and workers: make them, load them, and use them on a socket."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Self

import zmq
import zmq.auth

from ..errors import SettingError
from .certificates import PUBLIC_SUFFIX, SECRET_SUFFIX, public_key, read_secret


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """The keys of one client or worker, and the public keys of its brokers, all in Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes
    """The public key of all brokers that `servers` does not list; empty if it lists all."""
    servers: tuple[tuple[str, bytes], ...] = ()
    """Endpoints of brokers that have keys of their own, with these."""

    def at(self, endpoint: str) -> Self:
        """Return the keys for a connection to the broker at `endpoint`, whose key is the result's `server`."""
        return replace(self, server=dict(self.servers).get(endpoint, self.server), servers=())

    def apply(self, socket: zmq.Socket[Any]) -> None:
        """Encrypt the connections that `socket` makes from now on, and authenticate both sides."""
        socket.set(zmq.CURVE_PUBLICKEY, self.public)
        socket.set(zmq.CURVE_SECRETKEY, self.secret)
        socket.set(zmq.CURVE_SERVERKEY, self.server)


Key = str | PathLike[str] | ClientKeys
"""The key of a client or worker: its secret certificate file, or the keys that `load_keys` has returned."""
BrokerKey = str | PathLike[str]
"""The broker's public key: its certificate file, or 40 characters of Z85."""


def load_keys(
    key: Key | None, broker_key: BrokerKey | None, brokers: Mapping[str, BrokerKey] | None = None
) -> ClientKeys | None:
    """Return the keys of a client or worker, or None if no key is given.

    `key` is its secret certificate file; `broker_key` is the broker's public key, a certificate file or 40 characters
    of Z85.  `brokers` has the key of each endpoint, empty for those whose key is `broker_key`.  Instead of `key` and
    `broker_key`, `key` can be keys that were loaded before.

    Raises `SettingError` if a key is missing, or if one of them is not what it should be.
    """
    brokers = brokers or {}
    given = {endpoint: text for endpoint, text in brokers.items() if text}
    if isinstance(key, ClientKeys):
        if broker_key:
            raise SettingError(f"the broker's key {broker_key} is given twice: the loaded key contains one already")
        loaded = key
    else:
        some = broker_key or next(iter(given.values()), None)
        if not key and not some:
            return None
        if not some:
            raise SettingError(
                f"the key {key} is of no use without the broker's public key: add --broker-key (in Python, "
                "broker_key), or write the broker as ENDPOINT=KEY"
            )
        if not key:
            raise SettingError(
                f"the broker's key {some} is of no use without a key of one's own: add --key (in Python, key)"
            )
        public, secret = read_secret(Path(key))
        if zmq.curve_public(secret) != public:
            raise SettingError(f"{key} is damaged: its public key does not belong to its secret key")
        loaded = ClientKeys(public, secret, public_key(str(broker_key), Path()) if broker_key else b"")
    servers = dict(loaded.servers) | {endpoint: _key_of(endpoint, str(text)) for endpoint, text in given.items()}
    for endpoint in brokers:
        if not loaded.server and endpoint not in servers:
            raise SettingError(
                f"the public key of the broker at {endpoint} is missing: write {endpoint}=KEY, or add --broker-key "
                "(in Python, broker_key) for all brokers without one"
            )
    return replace(loaded, servers=tuple(servers.items()))


def _key_of(endpoint: str, text: str) -> bytes:
    try:
        return public_key(text, Path())
    except SettingError as error:
        raise SettingError(f"the key of the broker at {endpoint}: {error}") from None


def create_keys(name: str, folder: Path) -> tuple[Path, Path]:
    """Make a key pair, write NAME.key and NAME.key_secret to `folder`, and return their paths.

    Raises `SettingError` if one of them exists, because a key is never overwritten, or if they cannot be written.
    """
    paths = folder / f"{name}{PUBLIC_SUFFIX}", folder / f"{name}{SECRET_SUFFIX}"
    for path in paths:
        if os.path.lexists(path):
            raise SettingError(f"{path} exists, and keys are not overwritten: choose another name")
    try:
        with tempfile.TemporaryDirectory(prefix=".keys", dir=folder) as private:  # in which nobody else can read
            zmq.auth.create_certificates(private, name)
            os.chmod(Path(private, paths[1].name), 0o600)
            for path in paths:
                os.replace(Path(private, path.name), path)
    except zmq.ZMQError:
        raise SettingError("this libzmq cannot make keys: it was built without CURVE (reinstall pyzmq)") from None
    except OSError as error:
        raise SettingError(f"cannot write keys to {folder}: {error.strerror}") from None
    return paths
