"""The errors of failed jobs, as the caller, the log and the history get them."""

import json
import re
import traceback
from contextlib import suppress
from typing import Any, Final

from ...mdp.codes import Code
from ...mdp.errors import ServiceError, ZmdpError
from ...workers import Request
from ..reasons import reason

UNPROCESSABLE: Final = 422
"""Error code for an invalid request, which retrying does not help."""
_CONDITION: Final = re.compile(r"(?:^|: )\[([A-Z][A-Z0-9_.]+)\] ", re.MULTILINE)
_SQLSTATE: Final = re.compile(r"\bSQLSTATE: (\w{5})\b")
_SHUT_DOWN: Final = "SparkContext was shut down"
"""Spark's message for every running job when its driver ends."""
_PYTHON_TRACEBACK: Final = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*\S.*")


def unprocessable(text: str) -> ServiceError:
    """Return the error for an invalid request."""
    return ServiceError(UNPROCESSABLE, text[:1000])


def check_owner(caller: Request, job: str, owner: str, action: str) -> None:
    """Raise `ServiceError` 403 if the caller may not do `action` with a job: it is not its owner, nor an admin."""
    if not caller.may_manage(owner):
        text = f"job {job} belongs to {owner}; only {owner} or an admin can {action}"
        raise ServiceError(Code.NOT_ALLOWED, text)


def failure(error: BaseException) -> ServiceError:
    """Return the error that the caller receives for an exception of a job.

    The code is 422 if the request was at fault, otherwise 500.  The detail is a JSON object with Spark's `condition`,
    `sqlstate` and `message`.
    """
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, ZmdpError):
        return ServiceError(Code.FAILED, str(error)[:1000])
    if not _is_sparks(error):
        return ServiceError(Code.FAILED, f"{type(error).__name__}: {reason(error)}"[:1000])
    classes = {each.__name__ for each in type(error).__mro__}
    caller_error = {"AnalysisException", "ParseException", "IllegalArgumentException"} & classes
    message = reason(error)
    return ServiceError(UNPROCESSABLE if caller_error else Code.FAILED, message, detail(error, message))


def withheld(error: BaseException, role: str) -> ServiceError:
    """Return the error for a role that may not know more than the condition: the text may tell of other tables."""
    if not _is_sparks(error):
        return failure(error)
    condition = json.loads(detail(error, ""))["condition"] or type(error).__name__
    text = f"[{condition}] Spark's message is withheld: it may tell of tables that role {role or '(none)'} may not read"
    return ServiceError(UNPROCESSABLE, text, detail(error, text))


def detail(error: Any, message: str) -> bytes:
    """Return the detail of the ERROR for an exception of Spark, whose text is `message`."""
    condition = sqlstate = None
    with suppress(Exception):  # py4j's errors have neither, and PySpark's ask the session, which may be gone
        condition, sqlstate = error.getCondition(), error.getSqlState()
    if condition is None and (outermost := _CONDITION.search(text := str(error))):
        condition = outermost[1]
        state = _SQLSTATE.search(text, outermost.end())
        sqlstate = state and state[1]
    return json.dumps({"condition": condition, "sqlstate": sqlstate, "message": message}, ensure_ascii=False).encode()


def python_traceback(error: BaseException, *, of_job: bool) -> str | None:
    """Return the traceback of the Python code that failed, on an executor or in the driver; None if there was none.

    A query has no Python code: the traceback of Spark's own errors would show ours and PySpark's only.
    """
    if isinstance(error, ZmdpError):
        return None
    found: list[str] = []
    if _is_sparks(error):
        with suppress(Exception):  # py4j asks the JVM, which may be gone
            found = _PYTHON_TRACEBACK.findall(str(error))
        if not found and not of_job:
            return None
    return found[-1] if found else "".join(traceback.format_exception(error)).rstrip()


def lost_error(job: str, error: BaseException) -> ServiceError:
    """Return the error for a job during which Spark was lost.

    Its code is 502, so that Titanic repeats the request; `gave_up` ends that.
    """
    why = ""
    if _is_sparks(error):
        with suppress(Exception):  # py4j asks the JVM, which may be gone
            why = reason(error)[:500]
    if not why or _SHUT_DOWN in why:
        why = (
            "its driver ended, probably out of memory: select less, in this job, or in another one that ran beside it "
            "(mdp-spark status --history), or give the driver more memory with --conf spark.driver.memory=…"
        )
    return ServiceError(Code.WORKER_LOST, f"Spark was lost during job {job}: {why}")


def gave_up(losses: int, reported: str) -> ServiceError:
    """Return the error for a request during which Spark was lost too often; unlike 502, it is not retried."""
    text = f"given up after Spark was lost {losses} times during this request; the last time: {reported}"
    return ServiceError(Code.FAILED, text[:1000])


def _is_sparks(error: BaseException) -> bool:
    """Whether Spark has reported the error, rather than Python code in the driver or py4j."""
    return hasattr(error, "java_exception") or hasattr(error, "getCondition")
