"""What a visitor of a dashboard may do to its server."""

from typing import Final

from ...mdp.http.limits import ConnectionLimits

LIMITS: Final = ConnectionLimits(
    max_body=64 << 10, max_connections=200, max_header_bytes=16 << 10, header_timeout=5.0, body_timeout=10.0,
    keep_alive=30.0,
)  # fmt: skip
