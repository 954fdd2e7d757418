"""Take the place of a running fleet without a gap: `mdp-spark fleet --replace`."""

import logging
import time
from typing import Final

from ...clients import Client, ServiceNotFound
from ...mdp.control import SPARK
from ...mdp.errors import SettingError
from ..control import ask
from .settings import FleetSettings

log = logging.getLogger("zmdp.spark")

LOST_SECONDS: Final = 15.0
"""How long a predecessor that was not asked to drain must be missing before it counts as lost.  After a restart of the
broker, it takes a while to register again.
"""


class Predecessor:
    """The running fleet NAME, which another fleet is to replace.

    Both serve for a while, the new one as NAME.next.  When it has as many serving slots as its predecessor wants, it
    retires the predecessor, which drains, and then takes the name NAME.
    """

    def __init__(self, client: Client, settings: FleetSettings) -> None:
        self.wanted = 0
        """The number of slots that the predecessor wants."""
        self._settings = settings
        self._lost_seconds = max(LOST_SECONDS, settings.heartbeat * settings.liveness)
        self._client = client
        self._retired = False
        self._missing_since: float | None = None

    @property
    def successor(self) -> str:
        """The name of the new fleet until its predecessor has gone."""
        return f"{self._settings.name}.next"

    def find(self) -> bool:
        """Return whether the predecessor is running.

        Raises `SettingError` if it cannot be replaced by this one, and `ZmdpError` if the broker does not answer.
        """
        settings = self._settings
        try:
            status = ask(self._client, settings.name, "status")
        except ServiceNotFound:
            return False
        if status.get("service") != settings.service:
            raise SettingError(f"--replace: {settings.name} is not a fleet that serves {settings.service}")
        if self._client.available(SPARK + self.successor):
            raise SettingError(f"--replace: {settings.name} is already being replaced, by {self.successor}")
        self.wanted = int(status["wanted"])
        return True

    def replaced(self) -> None:
        """Log that the new fleet has taken the name of its predecessor."""
        log.info("replaced the previous fleet %s", self._settings.name)

    def retire(self) -> bool:
        """Ask the predecessor to drain.  Return whether it has gone.

        Raises `ZmdpError` if it refuses, or the broker does not answer.
        """
        try:
            ask(self._client, self._settings.name, "retire")
        except ServiceNotFound:
            # It has drained, or was killed; or the broker was restarted, and it comes back.
            now = time.monotonic()
            self._missing_since = now if self._missing_since is None else self._missing_since
            return self._retired or now >= self._missing_since + self._lost_seconds
        self._retired, self._missing_since = True, None
        return False
