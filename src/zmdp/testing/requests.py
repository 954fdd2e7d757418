"""Requests for unit tests of handlers, without a broker."""

from collections.abc import Mapping
from typing import Any

from ..mdp.wire import Options, encode_options
from ..workers import Request


def request(
    *frames: bytes,
    service: str = "test",
    headers: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    deadline: float | None = None,
    attempt: int = 1,
    cancelled: bool = False,
) -> Request:
    """Return the `Request` that a handler gets when a client sends `frames`.

        def test_greet():
            assert greet(request(b"hello", headers={"user": "ann"})) == b"hello, ann"

    A handler that calls `current_request()`, for example because it gets a decoded value, needs a context as well:

        with handling(request(headers={"user": "ann"})):
            assert greet("hello") == "hello, ann"

    Args:
        frames: The body; none is one empty frame.
        service: The name of the service.
        headers: What the client has sent as headers.
        options: What the client has sent as options.
        deadline: When it expires, as a value of `time.monotonic()`.
        attempt: 1, plus the number of workers that were lost while they held it.
        cancelled: Whether the reply is no longer wanted.

    Returns:
        The request.

    Raises:
        SettingError: A client could not send these options or headers.
    """
    values = {**(options or {}), **({"headers": dict(headers)} if headers else {})}
    made = Request(
        frames or [b""], service=service, client=b"test", options=Options(encode_options(values)), deadline=deadline,
        attempt=attempt,
    )  # fmt: skip
    made.cancelled = cancelled
    return made
