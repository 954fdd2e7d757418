"""Log lines of all commands: as text or JSON, with the same fields, and with the request that they are about.

Code that knows the request passes `extra=fields_of(request)`; lines that are logged while a request is handled get the
same from `RequestFilter`.  docs/how-to/operations.md lists the fields.
"""

import json
import logging
import sys
from datetime import datetime
from typing import Any, Final

from ..tracing import REQUEST_ID, current, shown_id

FORMATS: Final = ("text", "json")
FIELDS: Final = ("request_id", "service", "worker", "role")
"""The fields of lines about a request or a worker."""
_STANDARD: Final = frozenset({*logging.makeLogRecord({}).__dict__, "asctime", "message", "taskName"})
"""The attributes of every record; whatever else a record has, its caller has passed as `extra`."""


def fields_of(request: Any) -> dict[str, Any]:
    """Return the fields of a log line about a request (`workers.Request`) that a worker handles.

    The id is the one that the caller has given it, or else the address that its broker has given it.
    """
    given = request.headers.get(REQUEST_ID, "")
    fields = {
        "request_id": shown_id(given) or _shown_address(getattr(request, "client", b"")),
        "service": request.service,
        "role": getattr(request, "user", ""),
    }
    return {name: value for name, value in fields.items() if value}


def counted(count: int, what: str) -> str:
    """Return "1 request" or "2 requests"."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def _shown_address(address: bytes) -> str:
    """Return a client's address; in hex unless it is text, as the addresses of our own brokers are."""
    return address.decode() if address.isascii() and address.decode().isprintable() else address.hex()


class RequestFilter(logging.Filter):
    """Adds the fields of the request that is being handled to what its handler logs.

        handler = logging.StreamHandler()
        handler.addFilter(RequestFilter())

    Install it on a handler of `logging`, not on a logger, whose filters do not see what its children log.

    Args:
        name: As for `logging.Filter`.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields, unless the record has a request already; `logging` calls it.

            RequestFilter().filter(record)                          # True

        Args:
            record: What is about to be logged.

        Returns:
            True: every record is logged.
        """
        request = current.get(None)
        if request is not None and not hasattr(record, "request_id"):
            for name, value in fields_of(request).items():
                if not hasattr(record, name):
                    setattr(record, name, value)
        return True


class TextFormatter(logging.Formatter):
    """A line for people: date, level, logger, process, message, and the request's id if the message lacks it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - logging's name
        """Return the date and time."""
        del datefmt
        return _time(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the line, to which a traceback may be added."""
        line = super().formatMessage(record)
        request_id = getattr(record, "request_id", "")
        return line if not request_id or request_id in record.message else f"{line} (request {request_id})"


class JsonFormatter(logging.Formatter):
    """A JSON object in a line, for programs that collect logs."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line: what every line has, the fields of a request, and whatever else was passed as `extra`."""
        values: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        given = {name: value for name, value in record.__dict__.items() if name not in _STANDARD}
        values.update({name: given[name] for name in FIELDS if name in given})
        values.update({name: value for name, value in given.items() if name not in values})
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            values["stack"] = record.stack_info
        return json.dumps(values, default=str)


def json_line(logger: str, message: str) -> str:
    """Return an error as a line of JSON, for a program that ends before it logs."""
    record = logging.makeLogRecord({"name": logger, "levelno": logging.ERROR, "levelname": "ERROR", "msg": message})
    return JsonFormatter().format(record)


def _time(record: logging.LogRecord) -> str:
    """Return when a record was made: ISO 8601, with milliseconds and the difference from UTC."""
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


def configure(level: str, form: str = "text") -> None:
    """Log to stderr, one line per event, unless the program has configured `logging` already."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    handler.addFilter(RequestFilter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def enable_again() -> None:
    """Enable the loggers of zmdp after the user's code has run.

    `logging.config` disables all loggers that it does not name, if it is not told otherwise: then nobody would see that
    a handler fails.
    """
    for name in list(logging.Logger.manager.loggerDict):
        if name == "zmdp" or name.startswith("zmdp."):
            logging.getLogger(name).disabled = False
