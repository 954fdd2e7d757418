"""The echo service: replies with the frames of the request.  `mdworker zmdp.workers.echo:worker`."""

from .mdworker import Worker
from .request import Request

worker = Worker("echo")


@worker
def echo(request: Request) -> list[bytes]:
    """Return what came."""
    return request
