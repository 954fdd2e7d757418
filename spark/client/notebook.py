"""Shows the progress of a job in a notebook: a bar in HTML that is updated in place."""

import sys
from collections.abc import Iterable, Iterator
from html import escape
from typing import Any, cast

from ...clients import Reply
from .partials import counts, event_of, progress_line, showing


def watching(parts: Iterable[Reply]) -> Iterator[Reply]:
    """Yield the parts, and show progress: in a notebook as a bar of HTML, elsewhere as `mdp-spark submit` does."""
    if not in_notebook():
        yield from showing(parts)
        return
    from IPython.display import display  # noqa: PLC0415 - loaded already

    bar = _Bar()
    handle = cast("Any", display)(bar, display_id=True)  # untyped, if it is there at all
    try:
        for part in parts:
            event = event_of(part)
            if event.get("event") == "yielded":
                print(event["value"] if "value" in event else progress_line(event))  # noqa: T201 - as the caller's own code would, below the bar
            bar.event |= event
            bar.state = "done" if part.final else "running"
            handle.update(bar)
            yield part
    finally:
        if bar.state != "done":
            bar.state = "failed"
            handle.update(bar)


def in_notebook() -> bool:
    """Return whether this is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return hasattr(shell, "kernel")


class _Bar:
    """The last event of a job, as a notebook shows it."""

    def __init__(self) -> None:
        self.event: dict[str, Any] = {}
        self.state = "waiting for a batch"

    def __repr__(self) -> str:
        job = f"job {self.event['job']} " if "job" in self.event else ""
        told = ""
        if "tasks" in self.event:  # at the end, they would be those of a little earlier
            told = f": {counts(self.event)}" if self.state == "running" else f" after {self.event['seconds']} s"
        return f"{job}{self.state}{told}"

    def _repr_html_(self) -> str:
        value = 'value="1"' if self.state == "done" else ""
        if not value and self.event.get("tasks"):
            value = f'value="{int(self.event["tasks_done"])}" max="{int(self.event["tasks"])}"'
        elif not value and self.state == "failed":
            value = 'value="0"'  # without a value, the browser shows that something is running
        return f'<progress {value} style="width: 20em"></progress> <small>{escape(repr(self))}</small>'


def html_table(names: list[str], rows: list[dict[str, Any]], caption: str) -> str:
    """Return rows as a table in HTML."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(row[name])):.200}</td>" for name in names) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p><small>{escape(caption)}</small></p>"
