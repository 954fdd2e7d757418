"""What a visitor of a dashboard may do to its server."""

from dataclasses import replace
from typing import Final

from ...mdp.http.limits import ConnectionLimits

LIMITS: Final = ConnectionLimits(
    max_body=64 << 10, max_connections=200, max_header_bytes=16 << 10, header_timeout=5.0, body_timeout=10.0,
    keep_alive=30.0,
)  # fmt: skip


def limits_for(*, everybody: bool, local: bool) -> ConnectionLimits:
    """Return the limits of a server that admits `everybody`, or holders of tokens, and that is only for `local` users.

    If both are true, URLs must have a name of this machine: otherwise another site could let its own name point here,
    and read the pages in the browser of a visitor.
    """
    return replace(LIMITS, hosts=frozenset()) if everybody and local else LIMITS
