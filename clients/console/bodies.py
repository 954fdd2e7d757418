"""Bodies on a command line: frames from arguments, files or stdin, and replies on stdout."""

import base64
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import click

from ...mdp.tracing import REQUEST_ID
from ..calls.reply import Reply
from ..json_values import is_text

BODY = click.argument("body", nargs=-1)
HEADER = click.option(
    "--header",
    "headers",
    multiple=True,
    metavar="NAME=VALUE",
    callback=lambda context, option, values: pairs(values),
    help="Header for the handler. Can be repeated.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
VERBOSE = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Print the id of the request to stderr: log lines about it have it, at the broker, the worker and Titanic. "
    "Without --header request-id=ID, it is a new one.",
)
BODY_HELP = (
    "Each BODY is one frame of the request: text, @FILE for the content of a file, - for stdin, or @@TEXT for text "
    "that begins with @. Write -- before a text that begins with -, unless it is a number. Without a BODY the request "
    "has one empty frame. Files and stdin are sent byte for byte."
)


def pairs(values: Sequence[str], expected: str = "NAME=VALUE") -> dict[str, str]:
    """Parse NAME=VALUE options.  Raises `click.BadParameter`, which says what was `expected`."""
    found = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not (name and equals):
            raise click.BadParameter(f"{value!r}: expected {expected}")
        found[name] = text
    return found


def named(headers: dict[str, str]) -> dict[str, str]:
    """Return the headers with an id of the request, and print it to stderr."""
    headers = {REQUEST_ID: uuid4().hex, **headers}
    click.echo(f"{REQUEST_ID}: {headers[REQUEST_ID]}", err=True)
    return headers


def frames(body: Sequence[str]) -> list[bytes]:
    """Return the frames that `body` stands for (see `BODY_HELP`).  Raises `click.UsageError` for an unreadable file."""
    found = []
    for part in body:
        if part == "-":
            found.append(sys.stdin.buffer.read())
        elif part.startswith("@@"):
            found.append(os.fsencode(part[1:]))
        elif part == "@":
            raise click.UsageError("@ must be followed by the name of a file: @FILE")
        elif part.startswith("@"):
            try:
                found.append(Path(part[1:]).read_bytes())
            except OSError as error:
                raise click.UsageError(f"cannot read {part[1:]}: {error.strerror}") from None
        else:
            # Exactly as the shell passed it, even if it is not UTF-8.
            found.append(os.fsencode(part))
    return found


def described(reply: Reply) -> dict[str, Any]:
    """Return `reply` as --json prints it."""
    return {"service": reply.service, "final": reply.final, "frames": [text_or_base64(frame) for frame in reply]}


def text_or_base64(frame: bytes) -> str | dict[str, str]:
    """Return a frame as --json prints it."""
    try:
        return frame.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(frame).decode()}


def print_json(value: object) -> None:
    """Print a value as one line of JSON, and flush."""
    click.echo(json.dumps(value, ensure_ascii=False))
    sys.stdout.flush()


def print_frames(frames: Sequence[bytes], *, parts: bool = False) -> None:
    """Print the frames of a reply, one per line.

    A single frame that is text ends with a newline, too; one that is not, such as an image, is printed as it is, unless
    stdout is a terminal.  With `parts`, every frame has a line, since more replies follow.
    """
    data = b"\n".join(frames)
    lines = parts or len(frames) > 1
    write(data, newline=lines or (not data.endswith(b"\n") and (sys.stdout.isatty() or (bool(data) and is_text(data)))))


def write(data: bytes, *, newline: bool) -> None:
    """Print bytes as they are, and flush."""
    sys.stdout.buffer.write(data + b"\n" if newline else data)
    sys.stdout.buffer.flush()
