"""Makes attempts to execute requests: calls their services through the broker, and stores the PARTIALs meanwhile.

Each request is sent on behalf of its owner, so the broker refuses what the owner may not call.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from ..clients import AsyncClient, Reply, RequestCancelled, RequestError, ServiceError, SettingError, StreamInterrupted
from ..clients.call import Call, Outcome
from ..mdp.codes import Code
from ..mdp.tracing import REQUEST_ID, Finish, continuing, untraced
from . import store
from .frames import pack, unpack
from .metrics import Metrics
from .results import Results
from .retries import AttemptResult, RetryPolicy, fits, log_fields, request_id, transient_pause

MAX_PARTIALS: Final = 1_000_000
"""Maximum number of PARTIALs of one reply."""
MAX_UNSTORED_BYTES: Final = 64 << 20
"""Size of the unstored PARTIALs of one reply above which the attempt ends: they arrive faster than they are stored."""

log = logging.getLogger("zmdp.titanic")


class Attempts:
    """Makes attempts.

    Args:
        client: The client that sends the requests.
        retries: Decides what follows.
        results: Stores PARTIALs.
        metrics: Counts attempts.
    """

    def __init__(self, client: AsyncClient, retries: RetryPolicy, results: Results, metrics: Metrics) -> None:
        self.client = client
        self.retries = retries
        self.results = results
        self._metrics = metrics

    def begin(self, claimed: store.Claimed, ended: Callable[[AttemptResult], None]) -> "Attempt":
        """Send a request to its service.  Later, `ended` is called with the result."""
        self._metrics.attempted()
        attempt = Attempt(self, claimed, ended)
        attempt.begin()
        return attempt


class Attempt:
    """One attempt to execute a request.  It receives the reply without a task of its own."""

    __slots__ = (
        "_attempts", "_call", "_claimed", "_ended", "_finish", "_parts", "_result", "_unstored", "_unstored_bytes",
    )  # fmt: skip

    def __init__(self, attempts: Attempts, claimed: store.Claimed, ended: Callable[[AttemptResult], None]) -> None:
        self._attempts = attempts
        self._claimed = claimed
        self._ended: Callable[[AttemptResult], None] | None = ended
        self._call: Call | None = None
        self._finish: Finish = untraced
        """Ends the span."""
        self._parts = 0
        """How many PARTIALs have arrived."""
        self._unstored = 0
        """How many of them are not stored yet."""
        self._unstored_bytes = 0
        self._result: AttemptResult | None = None

    def begin(self) -> None:
        """Send the request."""
        claimed, retries = self._claimed, self._attempts.retries
        result: AttemptResult
        failed: BaseException
        try:
            headers, options = _addressing(claimed)
            headers, self._finish = continuing(claimed.service, headers)
            self._call = self._attempts.client.begin(
                self, claimed.service, *unpack(claimed.body), headers=headers, options=options
            )
        except (ValueError, SettingError) as error:  # it can never be sent: another program may have written the row
            failed, result = error, retries.failure(claimed, Code.MALFORMED, str(error))
        except RequestError as error:
            failed, result = error, retries.after_error(claimed, error)
        except Exception as error:  # noqa: BLE001 - one broken request must not stop the others
            failed, result = error, self._broken(error)
        else:
            return
        self._end_span(failed)
        asyncio.get_running_loop().call_soon(self._end, result)

    def put(self, outcome: Outcome) -> None:
        """Take a PARTIAL, the reply or the error."""
        try:
            result = self._after(outcome)
        except Exception as error:  # noqa: BLE001 - one broken request must not stop the others
            result = self._broken(error)
        if result is not None:
            if isinstance(outcome, Reply):
                self._end_span(None if outcome.final else RequestCancelled("given up: a PARTIAL cannot be stored"))
            else:
                self._end_span(outcome)
            self._end(result)

    def cancel(self) -> None:
        """Give up the attempt: its result is not wanted any more."""
        self._ended = None
        if self._call is not None:
            self._attempts.client.cancel(self._call)
            self._end_span(RequestCancelled("given up: its result is not wanted any more"))

    def _end_span(self, error: BaseException | None) -> None:
        finish, self._finish = self._finish, untraced
        finish(error)

    def _after(self, outcome: Outcome) -> AttemptResult | None:
        """Return the result of the attempt, or None after a PARTIAL, which is being stored."""
        claimed, retries = self._claimed, self._attempts.retries
        if isinstance(outcome, RequestError):
            return retries.after_error(claimed, outcome)
        if not isinstance(outcome, Reply):
            raise outcome
        if outcome.final:
            return retries.success(claimed, outcome)
        return self._after_partial(outcome)

    def _after_partial(self, part: Reply) -> AttemptResult | None:
        claimed, retries, number = self._claimed, self._attempts.retries, self._parts
        result: AttemptResult
        if number == MAX_PARTIALS:
            result = retries.failure(claimed, Code.TOO_LARGE, f"the reply has more than {MAX_PARTIALS} PARTIALs")
        elif not fits(part):
            result = retries.failure(claimed, Code.TOO_LARGE, f"PARTIAL {number} is too large to be fetched")
        elif self._unstored_bytes > MAX_UNSTORED_BYTES:
            result = retries.after_error(claimed, self._overrun())
        else:
            saved = store.Partial(claimed.id, claimed.attempt, number, pack(part))
            self._parts += 1
            self._unstored += 1
            self._unstored_bytes += len(saved.body)
            self._attempts.results.store_partial(claimed.uuid, saved, partial(self._stored, len(saved.body)))
            return None
        if self._call is not None:
            self._attempts.client.cancel(self._call)
        return result

    def _overrun(self) -> RequestError:
        """Return the error of a stream that is not stored in time: its own if the database accepts what it can."""
        service, unstored = self._claimed.service, f"{self._unstored_bytes} bytes are unstored"
        if self._attempts.results.failing:
            return StreamInterrupted(f"the database fails, and the stream goes on: {unstored}", service=service)
        text = f"the stream arrives faster than the database stores it: {unstored}"
        remedy = "yield less, or store large data elsewhere and yield references"
        return ServiceError(Code.TOO_LARGE, f"{text}; {remedy}", service=service)

    def _stored(self, size: int) -> None:
        """Record that a PARTIAL of this size was stored."""
        self._unstored -= 1
        self._unstored_bytes -= size
        if self._result is not None:
            self._end(self._result)

    def _end(self, result: AttemptResult) -> None:
        """End with this result, once the PARTIALs are stored."""
        self._result = result
        ended = self._ended
        if ended is not None and not self._unstored:
            self._ended = self._call = None  # no cycles: garbage would have to be collected for each request
            ended(result)

    def _broken(self, error: Exception) -> AttemptResult:
        claimed = self._claimed
        log.error("%s cannot be dispatched", claimed.uuid.hex, exc_info=error, extra=log_fields(claimed))
        return self._attempts.retries.reschedule(
            claimed.id, claimed.attempt, transient_pause(claimed.attempt), repr(error)
        )


def _addressing(claimed: store.Claimed) -> tuple[Any, dict[str, Any]]:
    """Return headers and options of a request.  Raises `ValueError` if its headers are not JSON."""
    headers = json.loads(claimed.headers) if claimed.headers else None
    if headers is None or isinstance(headers, dict):
        headers = {REQUEST_ID: request_id(claimed, headers), **(headers or {})}
    return headers, {"on_behalf": claimed.owner} if claimed.owner else {}
