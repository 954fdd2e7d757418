"""The PARTIALs of a batch as text: the events and the progress of a job."""

import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Final

import click

from ...clients import Reply

BAR_WIDTH: Final = 30
LINE_SECONDS: Final = 5.0
"""Minimum interval between two lines about progress, where they cannot be overwritten."""


def event_of(part: Reply) -> dict[str, Any]:
    """Return the event in a PARTIAL; an empty one if it is something else, such as the FINAL."""
    with suppress(ValueError, LookupError):
        event = json.loads(part[0])
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            return event
    return {}


def progress_line(event: dict[str, Any]) -> str | None:
    """Return an event as a line of text."""
    match event:
        case {"event": "started", "job": job, "driver": driver}:
            return f"job {job} on {driver}"
        case {"event": "waiting"}:
            return "waiting for a free session"
        case {"event": "yielded", "value": value}:
            return json.dumps(value, ensure_ascii=False)
        case {"event": "yielded", "rows": rows}:
            return f"a table of {rows} rows"
        case {"event": "progress", "tasks": tasks, "tasks_done": done}:
            filled = BAR_WIDTH * done // tasks if tasks else 0
            return f"[{'#' * filled}{'-' * (BAR_WIDTH - filled)}] {counts(event)}"
    return None


def counts(event: dict[str, Any]) -> str:
    """Return the numbers of an event `progress` as text."""
    failed = f", {event['tasks_failed']} failed" if event.get("tasks_failed") else ""
    rows = f", {event['rows_read']:,} rows read" if event.get("rows_read") else ""
    return (
        f"{event['tasks_done']}/{event['tasks']} tasks, "
        f"{event.get('stages_done')}/{event.get('stages')} stages{rows}{failed}, {event.get('seconds')} s"
    )


class Lines:
    """Decides which events are worth a line where lines stay: all but progress that follows closely on other progress.

    `of(event)` yields them, and whether each should stay where lines can be overwritten.
    """

    def __init__(self, seconds: float = LINE_SECONDS) -> None:
        self._seconds = seconds
        self._told_at = float("-inf")
        self.job = ""
        """The job that the latest event was about."""

    def of(self, event: dict[str, Any]) -> Iterator[tuple[str, bool]]:
        """Yield the lines about an event, none if there is nothing to say."""
        line = progress_line(event)
        if line is None:
            return
        before, self.job = self.job, event.get("job", self.job)
        if before not in {"", self.job}:  # its PARTIALs begin anew: some may have been passed over
            yield f"another attempt: job {self.job}", True
        if event["event"] != "progress" or time.monotonic() - self._told_at >= self._seconds:
            self._told_at = time.monotonic()
            yield line, event["event"] not in {"progress", "waiting"}


def showing(parts: Iterable[Reply]) -> Iterator[Reply]:
    """Yield the parts, and show their events on stderr: a bar on a terminal, otherwise an occasional line."""
    terminal = sys.stderr.isatty()
    lines = Lines(0 if terminal else LINE_SECONDS)
    try:
        for part in parts:
            yield part
            for line, stays in lines.of(event_of(part)):
                click.echo(f"\r\x1b[K{line}" if terminal else line, nl=stays or not terminal, err=True)
    finally:
        if terminal:
            click.echo("\r\x1b[K", nl=False, err=True)
