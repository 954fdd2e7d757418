"""The clients' default settings."""

from typing import Final

DEFAULT_TIMEOUT: Final = 5.0
"""Seconds that `Client` allows for each try."""
DEFAULT_RETRIES: Final = 2
"""Tries that `Client` makes after the first."""
DEFAULT_TOTAL_TIMEOUT: Final = DEFAULT_TIMEOUT * (1 + DEFAULT_RETRIES)
"""Seconds that `AsyncClient` allows for a request."""
DEFAULT_HEARTBEAT: Final = 1.0
"""Seconds."""
DEFAULT_LIVENESS: Final = 5
"""Heartbeat intervals after which a silent broker is given up."""
MAX_OUTSTANDING: Final = 10_000
"""Requests that may be outstanding over one connection; more wait for their turn."""
