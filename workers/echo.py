"""The echo service: reply with the frames of the request.  Run it with `mdworker zmdp.workers.echo:worker`."""

from .mdworker import Worker
from .session.request import Request

worker = Worker("echo")


@worker
def echo(request: Request) -> list[bytes]:
    """Return the request."""
    return request
