"""Makes attempts to execute requests: calls their services through the broker, and stores the PARTIALs meanwhile.

Each request is sent on behalf of its owner, so the broker refuses what the owner may not call.
"""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, Final

from ..clients import AsyncClient, RequestError, SettingError
from ..mdp.codes import Code
from ..mdp.rows import OPTION, read_reply, worked_seconds
from ..mdp.tracing import REQUEST_ID
from . import store
from .frames import LENGTH, pack, unpack
from .lanes import Running, Sent
from .metrics import Metrics
from .results import Results
from .retries import (
    TRANSIENT_CODES,
    AttemptResult,
    RetryPolicy,
    fits,
    log_fields,
    request_id,
    transient_pause,
    workers_lost,
)

MAX_PARTIALS: Final = 1_000_000
"""Maximum number of PARTIALs of one reply."""
MAX_UNSTORED_PARTIALS: Final = 64
"""Number of unstored PARTIALs of one stream above which reading it pauses."""

log = logging.getLogger("zmdp.titanic")


class Attempts:
    """Makes attempts, and returns their results.

    Args:
        client: The client that sends the requests.
        retries: Decides what follows.
        results: Stores PARTIALs.
        metrics: Counts attempts, and the workers that they cost.
    """

    def __init__(self, client: AsyncClient, retries: RetryPolicy, results: Results, metrics: Metrics) -> None:
        self._client = client
        self._retries = retries
        self._results = results
        self._metrics = metrics

    async def make(self, sent: Sent) -> Sequence[AttemptResult]:
        """Execute the members of `sent`, and return the result of each, in their order."""
        self._metrics.attempted(len(sent.members))
        if len(sent.members) == 1:
            return [await self._execute(sent.members[0])]
        return await self._execute_pack(sent)

    async def _execute(self, running: Running) -> AttemptResult:
        """Call the service, store its PARTIALs, and return the outcome."""
        claimed = running.claimed
        saving: deque[asyncio.Task[None]] = deque()
        outcome: AttemptResult
        try:
            try:
                outcome = await self._call(running, saving)
            except RequestError as error:
                outcome = self._retries.after_error(claimed, error)
            except SettingError as error:  # the request can never be sent
                outcome = self._retries.failure(claimed, Code.MALFORMED, str(error))
            except Exception as error:  # one broken request must not stop the others
                log.exception("%s cannot be dispatched", claimed.uuid.hex, extra=log_fields(claimed))
                outcome = self._retries.reschedule(
                    claimed.id, claimed.attempt, transient_pause(claimed.attempt), repr(error)
                )
            for each in saving:
                await each
        finally:
            for each in saving:
                each.cancel()
        return outcome

    async def _execute_pack(self, sent: Sent) -> Sequence[AttemptResult]:
        """Call the service with the rows of a pack, and return the outcome of each.

        If the pack fails as a whole, its requests are not to blame.  They are sent again, each by itself.
        """
        claims = [each.claimed for each in sent.members]
        first, size = claims[0], sent.lane.size
        began = time.monotonic()
        pause = 0.0
        try:
            headers, options = _addressing(first)
            rows = [claimed.body[LENGTH:] for claimed in claims]
            reply = await self._client.request(
                first.service, *rows, timeout=None, headers=headers, options={**options, OPTION: len(rows)}
            )
        except (RequestError, SettingError) as error:
            reason = str(error)
            if isinstance(error, RequestError):
                reason = error.text or reason
                self._metrics.lost(workers_lost(error))
                if error.code in TRANSIENT_CODES:
                    pause = transient_pause(1)
            size.failed()
        except Exception as error:  # one broken request must not stop the others
            log.exception("a pack of %d requests cannot be dispatched", len(claims), extra=log_fields(first))
            reason, pause = repr(error), transient_pause(1)
        else:
            outcomes = read_reply(reply, len(claims))
            size.replied(len(claims), time.monotonic() - began, worked_seconds(reply), understood=outcomes is not None)
            if outcomes is not None:
                return [self._retries.after_row(*each) for each in zip(claims, outcomes, strict=True)]
            reason = "its worker does not understand packs of rows"
        log.info(
            "%s and %d others: %s; sending each by itself", first.uuid.hex, len(claims) - 1, reason,
            extra=log_fields(first),
        )  # fmt: skip
        return [self._retries.reschedule(claimed.id, claimed.attempt, pause, reason) for claimed in claims]

    async def _call(self, running: Running, saving: "deque[asyncio.Task[None]]") -> AttemptResult:
        """Call the service, storing its PARTIALs as they arrive."""
        claimed, size = running.claimed, running.lane.size
        try:
            body = unpack(claimed.body)
            headers, options = _addressing(claimed)
        except ValueError as error:  # another program has written the row
            return self._retries.failure(claimed, Code.MALFORMED, str(error))
        asked = running.row and size.understood is not False
        if asked:
            options[OPTION] = 1
        began = time.monotonic()
        async with aclosing(self._client.stream(claimed.service, *body, headers=headers, options=options)) as parts:
            number = 0
            async for part in parts:
                if part.final:
                    break
                if number == MAX_PARTIALS:
                    reason = f"the reply has more than {MAX_PARTIALS} PARTIALs"
                    return self._retries.failure(claimed, Code.TOO_LARGE, reason)
                if not fits(part):
                    reason = f"PARTIAL {number} is too large to be fetched"
                    return self._retries.failure(claimed, Code.TOO_LARGE, reason)
                saved = store.Partial(claimed.id, claimed.attempt, number, pack(part))
                saving.append(asyncio.create_task(self._results.store_partial(claimed.uuid, saved)))
                number += 1
                if len(saving) >= MAX_UNSTORED_PARTIALS:
                    await saving.popleft()
        if asked:
            outcomes = read_reply(part, 1) if number == 0 else None
            size.replied(1, time.monotonic() - began, worked_seconds(part), understood=outcomes is not None)
            if outcomes is not None:
                return self._retries.after_row(claimed, outcomes[0])
        return self._retries.success(claimed, part)


def _addressing(claimed: store.Claimed) -> tuple[Any, dict[str, Any]]:
    """Return headers and options of a request.  Raises `ValueError` if its headers are not JSON."""
    headers = json.loads(claimed.headers or "null")
    if headers is None or isinstance(headers, dict):
        headers = {REQUEST_ID: request_id(claimed, headers), **(headers or {})}
    return headers, {"on_behalf": claimed.owner} if claimed.owner else {}
