"""The UNIX socket at which a gateway listens: created with its permissions, and removed at the end."""

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from ...mdp.errors import BindError


def listen(path: str, mode: int) -> socket.socket:
    """Return a socket that is bound to `path`, whose file never has more permissions than `mode`.

    Raises `BindError` if another program listens there, or if something else is in the way.
    """
    check_free(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o777 & ~mode)
    try:
        with suppress(FileNotFoundError):
            os.unlink(path)
        listener.bind(path)
        os.chmod(path, mode)  # a default ACL of the folder replaces the umask
    except OSError as error:
        listener.close()
        raise BindError(f"cannot listen on {path}: {error.strerror or error}") from None
    finally:
        os.umask(umask)
    listener.setblocking(False)
    return listener


def check_free(path: str) -> None:
    """Raise `BindError` if no socket can be created at `path`: there is no folder, or something is in the way."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if not os.path.isdir(folder := os.path.dirname(path)):
            raise BindError(f"cannot listen on {path}: there is no folder {folder}") from None
        return
    if not stat.S_ISSOCK(mode):
        raise BindError(f"cannot listen on {path}: it exists and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return  # left behind by a process that is gone
        except OSError as error:
            raise BindError(f"cannot listen on {path}: {error.strerror or error}") from None
    raise BindError(f"cannot listen on {path}: another gateway is running there")


def remove(path: str, created: os.stat_result) -> None:
    """Remove the socket's file, unless it has been replaced."""
    with suppress(OSError):
        found = os.stat(path)
        if (found.st_dev, found.st_ino) == (created.st_dev, created.st_ino):
            Path(path).unlink()
