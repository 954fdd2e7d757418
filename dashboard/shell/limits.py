"""What a visitor of a dashboard may do to its server."""

from dataclasses import replace
from typing import Final

from ...mdp.http.limits import ServerLimits

LIMITS: Final = ServerLimits(max_body=64 << 10, max_header_bytes=16 << 10, body_timeout=10.0, keep_alive=30.0)


def limits_for(*, everybody: bool, local: bool) -> ServerLimits:
    """Return the limits of a server that admits `everybody`, or holders of tokens, and that is only for `local` users.

    If both are true, URLs must have a name of this machine: otherwise another site could let its own name point here,
    and read the pages in the browser of a visitor.
    """
    return replace(LIMITS, hosts=frozenset()) if everybody and local else LIMITS
