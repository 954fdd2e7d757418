"""Package what executors need besides Spark: zmdp itself as a zip, and a Python environment with pyzmq as an archive.

Executors need pyzmq and a Python of the driver's minor version.  The driver ships zmdp itself.
"""

import importlib.util
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...mdp.errors import SettingError, ZmdpError
from .. import session as sessions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PACKAGE: Final = "zmdp.zip"
ENVIRONMENT: Final = "environment.tar.gz"
LAUNCHER: Final = "main.py"
ENVIRONMENT_FOLDER: Final = "environment"
"""The folder in an executor's working directory into which Spark unpacks the archive."""
EXECUTOR_PYTHON: Final = f"./{ENVIRONMENT_FOLDER}/bin/python"
TOP_LEVEL_MODULES: Final = ("pyspark_titanic",)
"""Modules that belong to zmdp but are not in its package: where Spark looks for the data source."""
_LAUNCH: Final = '''"""`spark-submit --py-files zmdp.zip main.py fleet …` is `mdp-spark fleet …`."""
from zmdp.spark.cli import main
main()
'''


class PackError(ZmdpError):
    """The files to ship cannot be created; the message says why."""


# ── packing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def write_package(target: Path) -> None:
    """Write the zip for `--py-files`, which contains zmdp's own files; zmdp may itself be running from such a zip."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in _sources(files("zmdp"), "zmdp/"):
            archive.writestr(name, content)
        for module in TOP_LEVEL_MODULES:
            found = importlib.util.find_spec(module)
            read = getattr(found.loader, "get_source", None) if found is not None else None
            if read is not None:
                archive.writestr(f"{module}.py", read(module))


def _sources(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    for each in sorted(folder.iterdir(), key=lambda each: each.name):
        if each.is_dir():
            if each.name != "__pycache__":
                yield from _sources(each, f"{prefix}{each.name}/")
        elif not each.name.endswith(tuple(EXTENSION_SUFFIXES)):  # zipimport cannot load extension modules
            yield prefix + each.name, each.read_bytes()


def write_environment(target: Path, requirements: Sequence[str]) -> None:
    """Write the archive for `--archive`: a virtual environment of this Python with these packages.

    A requirement is as for pip: `numpy>=2`, the path of a wheel, or `-r FILE` as one string.  Raises `PackError`.
    """
    with tempfile.TemporaryDirectory(prefix="zmdp-pack-") as folder:
        home = Path(folder) / ENVIRONMENT_FOLDER
        try:
            venv.create(home, with_pip=True, symlinks=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise PackError(
                f"cannot create a virtual environment ({error}); on Debian, run apt-get install python3-venv"
            ) from error
        wanted = [
            part for each in requirements for part in (each.split(maxsplit=1) if each.startswith("-r") else [each])
        ]
        command = [
            str(home / "bin" / "python"),
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--quiet",
            "install",
            *wanted,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - the user's requirements
        if done.returncode:
            raise PackError(f"pip could not install {' '.join(wanted)}: {_last_line(done.stderr)}")
        with tarfile.open(target, "w:gz") as archive:
            archive.add(home, ".", filter=_executor_needs)


_PIP: Final = re.compile(r"pip[\d.]*|pip-[^/]+\.dist-info")


def _executor_needs(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Filter out what executors do not run: pip, and bytecode with this machine's paths."""
    path = Path(member.name)
    pip = path.parent.name in {"bin", "site-packages"} and _PIP.fullmatch(path.name) is not None
    return None if pip or path.name == "__pycache__" else member


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no reason given")


def base_requirements() -> list[str]:
    """Return what fleets always need, in the driver's versions: pyzmq, and click for drivers."""
    import click  # noqa: PLC0415
    import zmq  # noqa: PLC0415

    del click
    return [f"pyzmq=={zmq.__version__}", "click>=8.1"]


def pack(folder: Path, *, requirements: Sequence[str], environment: bool) -> list[Path]:
    """Write the files to ship into `folder`, creating it, and return their paths.  Raises `PackError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = [folder / PACKAGE, folder / LAUNCHER]
        write_package(made[0])
        made[1].write_text(_LAUNCH)
        if environment:
            made.append(folder / ENVIRONMENT)
            write_environment(made[2], [*base_requirements(), *requirements])
    except OSError as error:
        raise PackError(f"cannot write {error.filename or folder}: {error.strerror}") from error
    return made


# ── shipping ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Cluster:
    """The cluster whose executors a fleet uses, and what to ship to them.

    Args:
        master: as for `open_session`.
        conf: Spark settings, which override those set here.
        py_files: zips and modules to ship, as paths or URLs.
        archive: tar.gz of a Python environment, as a path or URL; executors run its Python.
        dynamic: let Spark start and stop executors of one core as needed.
    """

    master: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict)
    py_files: tuple[str, ...] = ()
    archive: str | None = None
    dynamic: bool = False

    def open(self, name: str, *, most: int | None = None) -> "SparkSession":
        """Open a session and ship everything; `most` is the maximum number of cores in use, if known.

        Raises `SettingError` if a file is missing, and what `open_session` raises.
        """
        self._check()
        conf = {**self._settings(most), **self.conf}
        session = sessions.open_session(name, master=self.master, conf=conf)
        for each in self.py_files:
            try:
                session.sparkContext.addPyFile(each)
            except Exception as error:
                session.stop()
                raise sessions.SparkError(f"Spark cannot fetch {each}: {sessions.reason(error)}") from error
        if not is_local(str(session.sparkContext.master)) and not _from_zip():
            from pyspark import SparkFiles  # noqa: PLC0415

            # Executors fetch the file from the driver, so it goes into a folder that Spark deletes with the session.
            package = Path(SparkFiles.getRootDirectory()) / "shipped" / PACKAGE
            package.parent.mkdir(exist_ok=True)
            write_package(package)
            session.sparkContext.addPyFile(str(package))
        return session

    def _check(self) -> None:
        for each in (*self.py_files, *([self.archive] if self.archive else [])):
            if "://" not in each and not Path(each.partition("#")[0]).is_file():
                raise SettingError(f"no such file: {each}")
        for each in self.py_files:
            if each.endswith(".whl"):
                raise SettingError(
                    f"{each}: Spark ignores wheels. Rename a pure-Python wheel to .zip; put others into an "
                    "environment: mdp-spark pack --requirement FILE.whl, then --archive"
                )
        if self.archive and self.master and is_local(self.master):
            raise SettingError(f"--archive needs executors in separate processes, but {self.master} has none")

    def _settings(self, most: int | None) -> dict[str, str]:
        found = {
            "spark.speculation": "false",  # leases are long on purpose
            "spark.task.maxFailures": "1",  # the fleet restarts slots itself, and logs why
            "spark.log.level": "FATAL",  # the fleet itself reports lost executors
        }
        if self.master and self.master.startswith("local-cluster"):
            found["spark.deploy.maxExecutorRetries"] = "-1"
        if self.archive:
            found["spark.archives"] = self.archive if "#" in self.archive else f"{self.archive}#{ENVIRONMENT_FOLDER}"
            found["spark.pyspark.python"] = EXECUTOR_PYTHON
        if self.dynamic:
            found |= {
                "spark.dynamicAllocation.enabled": "true",
                "spark.dynamicAllocation.shuffleTracking.enabled": "true",
                "spark.dynamicAllocation.executorIdleTimeout": "10s",
                "spark.executor.cores": "1",  # so that each idle slot frees its executor
            }
            if most is not None:
                found["spark.dynamicAllocation.maxExecutors"] = str(most)
        return found


def is_local(master: str) -> bool:
    """Whether executors are threads of the driver's own Java process, `local[…]`."""
    return master == "local" or master.startswith("local[")


def on_this_machine(master: str) -> bool:
    """Whether all executors run on the driver's machine: `local[…]` and `local-cluster[…]`."""
    return master.startswith("local")


def _from_zip() -> bool:
    """Whether this zmdp was itself shipped with `spark-submit --py-files`."""
    return not Path(__file__).is_file()


def python() -> str:
    """Return this Python's minor version, which executors must match."""
    return ".".join(map(str, sys.version_info[:2]))
