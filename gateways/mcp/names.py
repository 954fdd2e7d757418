"""Names of tools: those of services, in the characters that agents' programs and models accept.

Letters, digits and underscores stay, and a dot between them is a hyphen: `words.count` is the tool `words-count`.  Any
other byte is two hyphens and its hexadecimal number.  So each tool's name stands for one service.
"""

import re
from typing import Final

MAX_NAME: Final = 128
"""Characters of a tool's name (MCP, "Tool Names")."""
TASK_RESULT: Final = "task_result"
TASK_CANCEL: Final = "task_cancel"
"""The gateway's own tools: services of these names are written in another way."""
_SPECIAL: Final = re.compile(rb"(\.)(?=[A-Za-z0-9_])|[^A-Za-z0-9_]", re.DOTALL)
_WRITTEN: Final = re.compile(r"--([0-9a-f]{2})|-")


def tool_name(service: str) -> str:
    """Return the name of the tool that a service is."""
    if service in (TASK_RESULT, TASK_CANCEL):
        return f"--{ord(service[0]):02x}{service[1:]}"
    return _SPECIAL.sub(_write, service.encode()).decode()


def service_name(tool: str) -> str | None:
    """Return the service that a tool is; None if no service is called so."""
    try:
        found = _WRITTEN.sub(lambda match: chr(int(match[1], 16)) if match[1] else ".", tool)
        service = found.encode("latin-1").decode()
    except UnicodeError:
        return None
    return service if tool_name(service) == tool else None


def _write(match: re.Match[bytes]) -> bytes:
    return b"-" if match[1] else b"--%02x" % ord(match[0])
