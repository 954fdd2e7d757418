"""The cluster that a fleet uses: its session, the files for its executors, and its cores."""

import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.resources import files
from importlib.resources.abc import Traversable
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...mdp.errors import SettingError
from ..session import check_file, check_py_files, open_session, resolve_master, submitted

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

PACKAGE: Final = "zmdp.zip"
"""The zip with zmdp itself: pure Python that needs pyzmq and msgspec."""
ENVIRONMENT_FOLDER: Final = "environment"
"""The folder in an executor's working directory into which Spark unpacks the archive."""
EXECUTOR_PYTHON: Final = f"./{ENVIRONMENT_FOLDER}/bin/python"


@dataclass(frozen=True)
class Cluster:
    """The cluster whose executors a fleet uses, and the files to ship to them.

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

    def open(self, name: str, *, slots: int | None = None, reserve: int = 0) -> "SparkSession":
        """Open a session with cores for at most `slots` slots and `reserve` others, and ship everything.

        Raises `SettingError` if a file is missing or a setting invalid, and what `open_session` raises.
        """
        master = resolve_master(self.master, self.conf)
        check_py_files(self.py_files)
        if self.archive:
            check_file(self.archive)
            if is_local(master):
                raise SettingError(f"--archive needs executors in separate processes, but {master} has none")
        conf = {**self._settings(master, slots, reserve), **self.conf}
        session = open_session(name, master=self.master, conf=conf, py_files=self.py_files)
        if not is_local(master):
            from pyspark import SparkFiles  # noqa: PLC0415

            # Executors fetch the file from the driver, so it goes into a folder that Spark deletes with the session.
            package = Path(SparkFiles.getRootDirectory()) / "shipped" / PACKAGE
            package.parent.mkdir(exist_ok=True)
            write_package(package)
            session.sparkContext.addPyFile(str(package))
        return session

    def _settings(self, master: str, slots: int | None, reserve: int) -> dict[str, str]:
        found = {
            "spark.speculation": "false",  # leases are long on purpose
            "spark.task.maxFailures": "1",  # the fleet restarts slots itself, and logs why
            "spark.log.level": "FATAL",  # the fleet itself reports lost executors
        }
        if master.startswith("local-cluster"):
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
        if slots is not None:
            each = _number({**found, **self.conf}, "spark.executor.cores", 1)
            executors = ceil((slots * _number(self.conf, "spark.task.cpus", 1) + reserve) / each)
            if self.dynamic:
                found["spark.dynamicAllocation.maxExecutors"] = str(executors)
            if master.startswith("spark://") and submitted("spark.cores.max") is None:
                # A standalone cluster would give all its cores to the first application.
                found["spark.cores.max"] = str(executors * each)
        return found


def cores(context: "SparkContext", slots: int | None = None) -> int:
    """Return the maximum number of cores of an application, according to its settings or its executors.

    `slots` is the intended number of slots, used if dynamic allocation has no limit of its own.

    Raises `SettingError` if there is no limit at all.
    """
    conf, master = context.getConf(), str(context.master)
    if match := re.fullmatch(r"local-cluster\[(\d+),(\d+),\d+\]", master):
        return int(match[1]) * int(match[2])
    if is_local(master):
        return int(_backend(context).totalCores())  # for local[*], those that a container gives to Java
    each = _number(conf, "spark.executor.cores", 1)
    if conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        if conf.get("spark.dynamicAllocation.maxExecutors") is not None:
            return _number(conf, "spark.dynamicAllocation.maxExecutors", 1) * each
        if slots is not None:
            return slots * task_cores(context)
        raise SettingError(
            "dynamic allocation has no limit: set one with --max, or with --conf spark.dynamicAllocation.maxExecutors=N"
        )
    return int(_backend(context).totalCoreCount())  # the cores of the executors that have registered


def _backend(context: "SparkContext") -> Any:
    """Return Spark's counter of cores; `defaultParallelism` would differ if a setting overrides it."""
    return context._jsc.sc().schedulerBackend()


def task_cores(context: "SparkContext") -> int:
    """Return the number of cores that each task, and so each slot, takes."""
    return _number(context.getConf(), "spark.task.cpus", 1)


def _number(conf: Any, name: str, default: int) -> int:
    text = conf.get(name, str(default))
    if not (text.isdecimal() and int(text)):
        raise SettingError(f"{name}={text}: expected a whole number greater than 0")
    return int(text)


def is_local(master: str) -> bool:
    """Whether executors are threads of the driver's own Java process, `local[…]`."""
    return master == "local" or master.startswith("local[")


# ── zmdp itself, as executors get it ─────────────────────────────────────────────────────────────────────────────────


def write_package(target: Path) -> None:
    """Write the zip for `addPyFile`, which contains zmdp's own files."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in _sources(files("zmdp"), "zmdp/"):
            archive.writestr(name, content)


def _sources(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    for each in sorted(folder.iterdir(), key=lambda each: each.name):
        if each.is_dir():
            if each.name != "__pycache__":
                yield from _sources(each, f"{prefix}{each.name}/")
        elif not each.name.endswith(tuple(EXTENSION_SUFFIXES)):  # zipimport cannot load extension modules
            yield prefix + each.name, each.read_bytes()
