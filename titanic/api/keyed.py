"""Rows with keys, which clients send through Titanic (`clients/rows`)."""

import asyncio
import time
from collections.abc import Mapping
from typing import Final

from ...clients import Reply, RequestError, RequestTimeout, ServiceNotFound, WorkerLost
from ...clients.rows import Caller
from ...mdp.codes import Code
from .steps import REQUEST, no_titanic, parse_reply

FIRST_PAUSE_SECONDS: Final = 0.05
"""How long to wait before a row is submitted again; each following pause is twice as long."""
MAX_PAUSE_SECONDS: Final = 1.0
"""The longest of these pauses."""
REFUSED: Final = frozenset({Code.QUEUE_FULL, Code.DRAINING})
"""Codes that mean "try again later"."""


class KeyedRows:
    """Submits rows to Titanic under their keys, which it remembers together with the replies for `keep` seconds.

    The requests are never closed, because the rows may be submitted again, which needs the replies again.
    """

    through = REQUEST

    def __init__(self, client: Caller, headers: Mapping[str, str] | None, keep: float) -> None:
        self._client = client
        self._headers = headers
        kept_ms = round(keep * 1000, 3)
        self._options = {"key_ttl": kept_ms, "result_ttl": kept_ms, "reply": True}

    async def request(self, service: str, row: bytes, key: str, group: str, timeout: float) -> list[bytes]:
        """Submit a row, again until its time has passed if there is no Titanic or it is full, and return the reply.

        Raises:
            RequestTimeout: There is none yet; submitting the row again returns it later.
            RequestError: The request has failed, or could not be submitted.
        """
        deadline, pause = time.monotonic() + timeout, FIRST_PAUSE_SECONDS
        while True:
            error: RequestError
            try:
                reply = await self._submit(service, row, key, group, max(deadline - time.monotonic(), 0.001))
                if reply is not None:
                    return reply
                text = "no reply in time; the request continues, and the same key returns its reply later"
                error = RequestTimeout(text, service=service, code=Code.TIME_PASSED, text=text)
            except (ServiceNotFound, WorkerLost) as lost:
                error = lost
            except RequestError as failed:
                if failed.code not in REFUSED:
                    raise
                error = failed
            if time.monotonic() + pause >= deadline:
                raise error
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    async def _submit(self, service: str, row: bytes, key: str, group: str, timeout: float) -> list[bytes] | None:
        """Submit a row, and return its reply; None if it has none yet, because its time passes or Titanic ends."""
        try:
            reply = await self._client.request(
                REQUEST, service.encode(), row, timeout=timeout, wait=False, headers=self._headers,
                options={**self._options, "key": key, **({"group": group} if group else {})},
            )  # fmt: skip
        except ServiceNotFound:
            raise no_titanic(self._client.endpoint, REQUEST) from None
        return parse_reply(Reply(reply, service=REQUEST, final=True), "")
