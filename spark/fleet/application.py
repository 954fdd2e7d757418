"""The Spark application of a fleet: a session that is opened again when it is lost, and room for slots."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...mdp.errors import SettingError
from ..session import check_installed, is_alive, is_remote, open_patiently, resolve_master, stop_quietly
from .cluster import Cluster, cores, task_cores
from .settings import FleetSettings
from .slots import Slots

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

log = logging.getLogger("zmdp.spark")


class Application:
    """The session on `cluster`.  `warn` logs what may be repeated; `stopped` ends the wait for a lost cluster."""

    def __init__(
        self, settings: FleetSettings, cluster: Cluster, *, warn: Callable[[str], None], stopped: Callable[[], bool]
    ) -> None:
        self.master = self.id = ""  # kept here because a session that has ended cannot be asked
        self._settings = settings
        self._cluster = cluster
        self._warn = warn
        self._stopped = stopped
        self._session: SparkSession | None = None

    @property
    def context(self) -> "SparkContext":
        """The context of the current session."""
        assert self._session is not None, "open() opens the session"  # noqa: S101 - our own invariant
        return self._session.sparkContext

    @property
    def is_alive(self) -> bool:
        """Whether there is a session that has not ended."""
        return self._session is not None and is_alive(self._session)

    def open(self) -> bool:
        """Open the session; wait for a remote cluster that is unavailable.  Return False if stopped meanwhile.

        Raises `SettingError`, also if PySpark is missing, and `SparkError` if Java is, or a local session cannot be
        opened.
        """
        master = resolve_master(self._cluster.master, self._cluster.conf)
        check_installed()
        if is_remote(master):
            return self._open_patiently()
        self._open()
        return True

    def reopen(self) -> None:
        """Open a new session after the cluster went away or the application or its driver was killed."""
        log.warning("the Spark session on %s has ended; opening another", self.master)
        self.close()
        if self._open_patiently():
            log.info("opened a new session on %s", self.master)

    def close(self) -> None:
        """Stop the session."""
        if self._session is not None:
            stop_quietly(self._session)

    def _open(self) -> None:
        settings = self._settings
        self._session = self._cluster.open(settings.name, slots=settings.maximum, reserve=settings.reserve)
        self.master, self.id = str(self.context.master), str(self.context.applicationId)

    def _open_patiently(self) -> bool:
        return open_patiently(
            self._open, lambda error, _: self._warn(f"{error}; retrying until it works"), self._stopped
        )

    # ── cores ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def new_slots(self) -> Slots:
        """Return a new fleet's slots, as many as there are cores for.  Raises `SettingError` if there are too few."""
        settings = self._settings
        most = self.max_slots()
        needed = max(1, settings.minimum)
        if most is not None and not is_remote(self.master):
            if most < needed:
                raise SettingError(
                    f"{self.master} has {cores(self.context)} cores, of which {settings.reserve} are reserved "
                    f"(--reserve): that leaves {max(most, 0)} for slots, but {needed} are needed; use more cores or "
                    "--reserve 0"
                )
            if settings.maximum is not None and most < settings.maximum:
                log.warning("--max %d exceeds the %d slots for which there are cores", settings.maximum, most)
        return Slots(settings.minimum, max(most or 0, needed), settings.lease, settings.idle)

    def max_slots(self) -> int | None:
        """Return the number of slots for which there are cores now, or None if that is unknown.

        Raises `SettingError` if there is no limit at all.
        """
        settings = self._settings
        try:
            most = (cores(self.context, settings.maximum) - settings.reserve) // task_cores(self.context)
        except SettingError:
            raise
        except Exception as error:  # noqa: BLE001 - py4j raises many types when a session ends
            log.debug("cannot tell how many slots fit: %s", error)
            return None
        return most if settings.maximum is None else min(most, settings.maximum)
