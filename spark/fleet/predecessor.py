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
"""How long a predecessor that was not asked to drain must be missing before it is taken for lost: it registers again
after a restart of the broker."""


class Predecessor:
    """The fleet whose name and service a successor takes over.

    Both serve for a while, the successor under the name NAME.next.  When as many of its slots serve, it retires the
    predecessor, which drains, and then takes its name.
    """

    def __init__(self, client: Client, settings: FleetSettings) -> None:
        self.wanted = 0
        """The number of slots that it wants."""
        self._settings = settings
        self._lost_seconds = max(LOST_SECONDS, settings.heartbeat * settings.liveness)
        self._client = client
        self._retired = False
        self._missing_since: float | None = None

    @property
    def successor(self) -> str:
        """The successor's name in the meantime."""
        return f"{self._settings.name}.next"

    def find(self) -> bool:
        """Return whether there is such a fleet.

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
        """Log that the successor has taken its name."""
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
