"""Watches the source code of modules, for `mdworker --reload`."""

import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from ...mdp.errors import SettingError
from ...mdp.program.extras import install_command


def check_installed() -> None:
    """Raise `SettingError` if watchfiles is not installed."""
    if find_spec("watchfiles") is None:
        raise SettingError(f"--reload needs watchfiles: {install_command('reload')}")


def source_folders(modules: Iterable[str]) -> list[Path]:
    """Return the folders of modules that have been loaded; those of a package's modules are within the package's."""
    found = set()
    for name in modules:
        module = sys.modules[name.partition(".")[0]]
        files = [module.__file__] if module.__file__ else [f"{each}/__init__.py" for each in module.__path__]
        found |= {Path(file).resolve().parent for file in files}
    return sorted(found)


@contextmanager
def watch_sources(folders: Iterable[Path], changed: Callable[[str], object]) -> Generator[None]:
    """Call `changed` with what has changed when Python files in these folders do, in a thread, during the block."""
    from watchfiles import PythonFilter, watch  # noqa: PLC0415 - an optional dependency

    ended = threading.Event()

    def run() -> None:
        for changes in watch(*folders, watch_filter=PythonFilter(), stop_event=ended):
            names = sorted({Path(path).name for _, path in changes})
            changed(f"{', '.join(names)} changed")

    thread = threading.Thread(target=run, name="reload", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()  # it must not be in watchfiles' code when Python ends: that may abort the process
