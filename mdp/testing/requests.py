"""Requests for unit tests of handlers, without a broker."""

from collections.abc import Mapping
from typing import Any

from ...workers import Request
from ..wire import Options, encode_options


def request(
    *frames: bytes,
    service: str = "test",
    headers: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    deadline: float | None = None,
    attempt: int = 1,
    cancelled: bool = False,
) -> Request:
    """Return the `Request` that a handler gets when a client sends `frames` (none: one empty frame).

        def test_greet():
            assert greet(request(b"hello", headers={"user": "ann"})) == b"hello, ann"

    A handler that calls `current_request()`, for example because it gets a decoded value, needs a context as well:

        with handling(request(headers={"user": "ann"})):
            assert greet("hello") == "hello, ann"

    Raises `SettingError` for options or headers that a client could not send.
    """
    values = {**(options or {}), **({"headers": dict(headers)} if headers else {})}
    made = Request(
        frames or [b""], service=service, client=b"test", options=Options(encode_options(values)), deadline=deadline,
        attempt=attempt,
    )  # fmt: skip
    made.cancelled = cancelled
    return made
