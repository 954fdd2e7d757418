"""The process that serves a broker's dashboard and metrics: `mdp-broker --http`.

HTTP has a process of its own, which shares nothing with the broker but messages.  In a thread of the broker, each page
and each scrape would take the interpreter from the broker's loop, for milliseconds at a time; the loop runs without a
garbage collector, which HTTP needs; and a web server that runs out of memory or crashes would take the broker along.
As it is, the web server is restarted, and the broker goes on.

The process gets the listening socket, and a JSON object per line on stdin: where the broker is, with which key, and who
may look and act; a new one after each reload.  It ends with its stdin, and so with the broker.
"""

import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Final, Self

import zmq

from ..broker.io.loop import Server
from ..errors import BindError, SettingError
from ..program.control_services import SPARK
from ..program.extras import WEB_PACKAGES, install_command
from ..security.access import Access, Permissions
from ..transport.listening import is_loopback, listen, shown_address

MODULE: Final = "zmdp.dashboard"
ROLE: Final = "(dashboard)"
"""The role of the process at a broker with access control; no role in a file can have such a name."""
_FOLDER_PREFIX: Final = "zmdp-web-"
RESTART_SECONDS: Final = (1.0, 60.0)
"""How long to wait before the process is restarted: at first, and at most."""
END_SECONDS: Final = 0.5
"""How long the process may take to end by itself.  Then it is killed: it has nothing to finish."""

log = logging.getLogger("zmdp.broker")


def check_packages(what: str) -> None:
    """Raise `SettingError` if a package of the extra `web` is missing."""
    missing = [name for name in WEB_PACKAGES if find_spec(name) is None]
    if missing:
        raise SettingError(f"{what} needs further packages ({', '.join(missing)} missing): {install_command('web')}")


def check_address(host: str, *, access: Access | None, insecure: bool) -> None:
    """Raise `BindError` if other machines can reach the address, and everybody would be let in."""
    if access is None and not insecure and not is_loopback(host):
        raise BindError(
            f"refused to serve HTTP on {host}, where other machines may connect, without access control: use --access "
            f"FILE to admit holders of tokens only, or --insecure to admit everybody"
        )


class WebProcess:
    """The web server of a broker; it runs from `start` to the end of the `with` block.

    Raises `BindError` if it cannot listen.
    """

    def __init__(self, host: str, port: int, *, log_level: str, log_format: str) -> None:
        self._listener = listen(host, port)
        self._folder, self._lock_of_folder = _make_folder()
        self._public, self._secret = zmq.curve_keypair()
        self._logging = [log_level, log_format]
        self._open = not is_loopback(host)
        self._settings: dict[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._told = threading.Condition()
        """Guards the process and its settings; notified when the process is to be told something, or at the end."""
        self._untold = False
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="zmdp-web", daemon=True)
        self._writer = threading.Thread(target=self._write, name="zmdp-web-settings", daemon=True)

    @property
    def endpoint(self) -> str:
        """Where the broker must listen for it."""
        return f"ipc://{self._folder}/broker"

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{shown_address(self._listener)}/"

    def admitted_by(self, access: Access) -> Access:
        """Return `access` with the key of the process."""
        return access.adding({self._public: Permissions(ROLE, call=(f"{SPARK}*",), admin=True)})

    def start(self, server: Server) -> None:
        """Start the process, for a broker that listens at `endpoint`."""
        access = server.access_control.access
        self._settings = {"endpoint": self.endpoint, "open": self._open, "access": _visitors(access)}
        if access is not None:
            self._settings["keys"] = [self._public.decode(), self._secret.decode(), access.public_key.decode()]
            if not access.tokens:
                log.warning("nobody can open %s: no role has a token (mdp-keys token ROLE)", self.url)
        server.access_control.on_reload = self._reload
        self._launch()
        self._watcher.start()
        self._writer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._told:
            self._stopping.set()  # no process is started from now on
            self._told.notify()
            process = self._process
        if process is not None:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            self._watcher.join()
            self._writer.join()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock_of_folder)

    def _launch(self) -> None:
        with self._told:
            if self._stopping.is_set():
                return
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", MODULE, str(self._listener.fileno()), *self._logging],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0, pass_fds=[self._listener.fileno()],
                start_new_session=True,  # Ctrl-C is for the broker, which may still have requests to finish
            )  # fmt: skip
            self._tell()

    def _tell(self) -> None:
        self._untold = True
        self._told.notify()

    def _reload(self, access: Access) -> None:
        with self._told:
            self._settings["access"] = _visitors(access)
            self._tell()

    def _write(self) -> None:
        """Tell each process its settings, and the latest when they have changed.

        In a thread of its own: a process may take long to read them, or never do so.
        """
        pipe: IO[bytes] | None = None
        while True:
            with self._told:
                self._told.wait_for(lambda: self._untold or self._stopping.is_set())
                self._untold = False
                process, left = self._process, json.dumps(self._settings).encode() + b"\n"
            assert process is not None and process.stdin is not None  # noqa: S101, PT018 - it was launched, with a pipe
            if pipe is not None and pipe is not process.stdin:
                pipe.close()
            pipe = process.stdin
            if self._stopping.is_set():
                pipe.close()
                return
            with suppress(OSError):  # it has ended; the next one gets everything
                while left:
                    left = left[pipe.write(left) :]

    def _watch(self) -> None:
        """Restart the process when it ends."""
        shortest, longest = RESTART_SECONDS
        delay = shortest
        while True:
            process, began = self._process, time.monotonic()
            if process is None:
                return
            code = process.wait()
            if self._stopping.is_set():
                return
            if time.monotonic() - began > longest:
                delay = shortest
            log.error("the web server has ended with code %d; it restarts in %g s", code, delay)
            if self._stopping.wait(delay):
                return
            delay = min(2 * delay, longest)
            try:
                self._launch()
            except OSError as error:  # such as too many open files
                log.error("cannot start the web server: %s", error)


def _make_folder() -> tuple[Path, int]:
    """Make a folder for a socket, which only this user can enter; return it, and the descriptor that locks it.

    Brokers that were killed have left theirs.  Those are removed: nobody holds their locks any more.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
        lock = _locked(folder)
    except OSError as error:
        raise BindError(f"cannot make a folder for the socket of the web server: {error}: set TMPDIR") from None
    for socket in folder.parent.glob(f"{_FOLDER_PREFIX}*/broker"):  # one without a socket may not be locked yet
        with suppress(OSError):  # another broker's, or another user's
            abandoned = _locked(socket.parent)
            shutil.rmtree(socket.parent, ignore_errors=True)
            os.close(abandoned)
    return folder, lock


def _locked(folder: Path) -> int:
    """Return a descriptor that locks the folder.  Raises `OSError`, also if it is locked."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _visitors(access: Access | None) -> dict[str, Any] | None:
    """Return what the process must know of the access file: by digest of a token, its role and what that may do."""
    if access is None:
        return None
    return {
        digest.hex(): {"role": name, "look": access.roles[name].mmi == "all", "act": access.roles[name].admin}
        for digest, name in access.tokens.items()
    }
