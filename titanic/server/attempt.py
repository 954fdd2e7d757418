"""Attempts to execute requests: each calls a service through the broker, and stores the PARTIALs meanwhile.

Each request is sent on behalf of its owner, so the broker refuses what the owner may not call.
"""

import asyncio
import json
import logging
from functools import partial
from typing import Any, Final, Protocol

from ...clients import (
    AsyncClient,
    Reply,
    RequestCancelled,
    RequestError,
    RetryLater,
    ServiceError,
    SettingError,
    StreamInterrupted,
)
from ...clients.calls.reply import Outcome
from ...clients.rows.row_calls import LIMITED
from ...clients.x1.broker_connection import Call
from ...mdp.codes import Code
from ...mdp.tracing import REQUEST_ID, Finish, continuing, untraced
from ..api.submission import pack, unpack
from ..db import store
from .outcome import BACKOFF_SECONDS, AttemptResult, Outcomes, fits, log_fields, request_id, transient_pause

MAX_PARTIALS: Final = 1_000_000
"""Maximum number of PARTIALs of one reply."""
MAX_UNSTORED_BYTES: Final = 64 << 20
"""Size of the unstored PARTIALs of one reply above which the attempt ends: they arrive faster than they are stored."""

log = logging.getLogger("zmdp.titanic")


class Slots(Protocol):
    """The dispatcher, as later steps know it: an attempt occupies a slot, which is given back in two parts.

    Nothing else goes from an attempt, or from its outcome, to earlier steps.
    """

    def executed(self, attempt: "Attempt") -> None:
        """Use the service's credit for another request: the service has finished this one."""

    def stored(self, attempt: "Attempt", result: AttemptResult) -> None:
        """Forget the attempt, whose result is stored."""


class Attempt:
    """A request that was claimed, and one attempt to execute it.  It receives the reply without a task of its own.

    Args:
        claimed: The request.
        client: Sends it.
        outcomes: Decides the result, and stores it.
        slots: Where the attempt occupies a slot until then.
    """

    __slots__ = (
        "_again", "_call", "_client", "_finish", "_outcomes", "_parts", "_result", "_slots", "_unstored",
        "_unstored_bytes", "claimed", "is_over", "is_sent",
    )  # fmt: skip

    def __init__(self, claimed: store.Claimed, client: AsyncClient, outcomes: Outcomes, slots: Slots) -> None:
        self.claimed = claimed
        self.is_sent = False
        self.is_over = False
        """Whether its result is being stored, or it was given up."""
        self._client = client
        self._outcomes = outcomes
        self._slots = slots
        self._call: Call | None = None
        self._again: asyncio.TimerHandle | None = None
        """Sends the request again, which a limit has kept from starting."""
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
        self.is_sent = True
        claimed, retries = self.claimed, self._outcomes.retries
        result: AttemptResult
        failed: BaseException
        try:
            headers, options = _addressing(claimed)
            headers, self._finish = continuing(claimed.service, headers)
            self._call = self._client.begin(
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
        if isinstance(outcome, RequestError) and outcome.reason in LIMITED and not outcome.workers_lost:
            self._end_span(outcome)  # it has not started, so the attempt goes on
            self._call = None
            pause = (outcome.retry_after or BACKOFF_SECONDS[0]) if isinstance(outcome, RetryLater) else 0.0
            self._again = asyncio.get_running_loop().call_later(pause, self.begin)
            return
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
        self.is_over = True
        if self._again is not None:
            self._again.cancel()
        if self._call is not None:
            self._client.cancel(self._call)
            self._end_span(RequestCancelled("given up: its result is not wanted any more"))

    def _end_span(self, error: BaseException | None) -> None:
        finish, self._finish = self._finish, untraced
        finish(error)

    def _after(self, outcome: Outcome) -> AttemptResult | None:
        """Return the result of the attempt, or None after a PARTIAL, which is being stored."""
        claimed, retries = self.claimed, self._outcomes.retries
        if isinstance(outcome, RequestError):
            return retries.after_error(claimed, outcome)
        if not isinstance(outcome, Reply):
            raise outcome
        if outcome.final:
            return retries.success(claimed, outcome)
        return self._after_partial(outcome)

    def _after_partial(self, part: Reply) -> AttemptResult | None:
        claimed, retries, number = self.claimed, self._outcomes.retries, self._parts
        result: AttemptResult
        if number == MAX_PARTIALS:
            result = retries.failure(claimed, Code.TOO_LARGE, f"the reply has more than {MAX_PARTIALS} PARTIALs")
        elif not fits(part):
            result = retries.failure(claimed, Code.TOO_LARGE, f"PARTIAL {number} is too large to be fetched")
        elif self._unstored_bytes > MAX_UNSTORED_BYTES:
            result = retries.after_error(claimed, self._overrun())
        else:
            body = pack(part)
            self._parts += 1
            self._unstored += 1
            self._unstored_bytes += len(body)
            self._outcomes.add_partial(claimed, number, body, self._partial_stored)
            return None
        if self._call is not None:
            self._client.cancel(self._call)
        return result

    def _overrun(self) -> RequestError:
        """Return the error of a stream that is not stored in time: its own if the database accepts what it can."""
        service, unstored = self.claimed.service, f"{self._unstored_bytes} bytes are unstored"
        if self._outcomes.failing:
            return StreamInterrupted(f"the database fails, and the stream goes on: {unstored}", service=service)
        text = f"the stream arrives faster than the database stores it: {unstored}"
        remedy = "yield less, or store large data elsewhere and yield references"
        return ServiceError(Code.TOO_LARGE, f"{text}; {remedy}", service=service)

    def _partial_stored(self, size: int) -> None:
        """Record that a PARTIAL of this size was stored."""
        self._unstored -= 1
        self._unstored_bytes -= size
        if self._result is not None:
            self._end(self._result)

    def _end(self, result: AttemptResult) -> None:
        """End with this result, once the PARTIALs are stored."""
        self._result = result
        if not self.is_over and not self._unstored:
            self.is_over = True
            self._call = None  # no cycles: garbage would have to be collected for each request
            self._outcomes.record(self.claimed, result, partial(self._slots.stored, self))
            self._slots.executed(self)

    def _broken(self, error: Exception) -> AttemptResult:
        claimed = self.claimed
        log.error("%s cannot be dispatched", claimed.uuid.hex, exc_info=error, extra=log_fields(claimed))
        return self._outcomes.retries.reschedule(
            claimed.id, claimed.attempt, transient_pause(claimed.attempt), repr(error)
        )


def _addressing(claimed: store.Claimed) -> tuple[Any, dict[str, Any]]:
    """Return headers and options of a request.  Raises `ValueError` if its headers are not JSON."""
    headers = json.loads(claimed.headers) if claimed.headers else None
    if headers is None or isinstance(headers, dict):
        headers = {REQUEST_ID: request_id(claimed, headers), **(headers or {})}
    named = {"on_behalf": claimed.owner, "group": claimed.group_name}
    return headers, {name: value for name, value in named.items() if value}
