"""The clients' default settings."""

from typing import Final

DEFAULT_TIMEOUT: Final = 5.0
"""Seconds that `Client` allows for each attempt."""
DEFAULT_RETRIES: Final = 2
"""Attempts that `Client` makes after the first."""
DEFAULT_TOTAL_TIMEOUT: Final = DEFAULT_TIMEOUT * (1 + DEFAULT_RETRIES)
"""Seconds that `AsyncClient` allows for a request."""
DEFAULT_HEARTBEAT: Final = 1.0
"""Seconds."""
DEFAULT_LIVENESS: Final = 5
"""Silent heartbeat intervals after which the broker is considered dead."""
MAX_OUTSTANDING: Final = 10_000
"""Maximum number of outstanding requests per connection; others wait for their turn."""
