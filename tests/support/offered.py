"""Services with types, offered from a thread."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.http_gateways import await_services
from support.loops import serving

from zmdp import Services


@contextmanager
def offered(services: Services, endpoint: str, **settings: Any) -> Iterator[None]:
    """Offer services until the block ends.  `settings` are those of the worker and of a client that waits for it."""
    with serving(services.worker(broker=endpoint, **settings)):
        await_services(endpoint, *(each.name for each in services), **settings)
        yield
