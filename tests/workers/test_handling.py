"""What both kinds of workers share, as functions."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.processes import TIMEOUT_SECONDS

from zmdp.mdp.errors import CodecError, HandlerError, RequestCancelled, ServiceError
from zmdp.mdp.tracing import handling
from zmdp.workers import Last, Request, current_request
from zmdp.workers.handling import MAX_BODY, MAX_BODY_FRAMES, Failed, HandlerAdapter, Unreadable, failed


def request(*frames, cancelled=False):
    made = Request(frames or [b""], service="echo", client=b"client")
    made.cancelled = cancelled
    return made


@pytest.mark.parametrize(
    ("result", "frames"),
    [
        (None, [b""]),
        (b"x", [b"x"]),
        (bytearray(b"x"), [b"x"]),
        (memoryview(b"x"), [b"x"]),
        ([b"x", bytearray(b"y"), memoryview(b"z")], [b"x", b"y", b"z"]),
        ((b"x",), [b"x"]),
        ([], [b""]),
        ((), [b""]),
        (Last(), [b""]),
        (Last([b"x", b"y"]), [b"x", b"y"]),
        (request(b"a", b"b"), [b"a", b"b"]),
    ],
)
def test_what_a_handler_may_give(result, frames):
    made = HandlerAdapter(None).frames(result)
    assert made == frames
    assert {type(frame) for frame in made} == {bytes}


@pytest.mark.parametrize("result", ["x", 1, [b"x", "y"], [None], {b"x"}, iter([b"x"]), Last("x"), object()])
def test_what_a_handler_may_not_give(result):
    with pytest.raises(HandlerError, match="expected bytes, a list of bytes, or None"):
        HandlerAdapter(None).frames(result)


async def coroutine():
    """Return nothing."""


async def async_generator():
    """Yield nothing."""
    return
    yield


def generator():
    """Yield nothing."""
    yield from ()


@pytest.mark.parametrize("codec", [None, "json"])
@pytest.mark.parametrize(
    ("function", "what"),
    [(coroutine, "a coroutine"), (async_generator, "an async generator"), (generator, "a generator")],
)
def test_what_a_plain_function_returns_that_wraps_another_kind(function, what, codec):
    with pytest.raises(HandlerError, match=f"returned {what} that was not run"):
        HandlerAdapter(codec).frames(function())


@pytest.mark.parametrize("result", [b"x" * (MAX_BODY + 1), [b""] * (MAX_BODY_FRAMES + 1)], ids=["bytes", "frames"])
def test_what_no_broker_takes(result):
    assert HandlerAdapter(None).frames(result[1:]) in ([result[1:]], result[1:])
    with pytest.raises(HandlerError, match=f"the limits are {MAX_BODY} bytes and {MAX_BODY_FRAMES} frames"):
        HandlerAdapter(None).frames(result)


def test_with_a_codec():
    coded = HandlerAdapter("json")
    assert coded.argument(request(b"[1,2]")) == [1, 2]
    assert (coded.frames({"a": None}), coded.frames(Last("x")), coded.frames(None)) == (
        [b'{"a":null}'],
        [b'"x"'],
        [b"null"],
    )
    with pytest.raises(Unreadable, match="the body cannot be read as json"):
        coded.argument(request(b"1", b"2"))
    with pytest.raises(CodecError, match="cannot be sent as json"):
        coded.frames(object())
    with pytest.raises(HandlerError, match="the limits are"):
        coded.frames("x" * MAX_BODY)
    asked = request(b"x")
    assert HandlerAdapter(None).argument(asked) is asked


def test_the_current_request_is_that_of_this_thread_and_block():
    with pytest.raises(LookupError):
        current_request()
    outer, inner = request(b"outer"), request(b"inner")
    together = threading.Barrier(2, timeout=TIMEOUT_SECONDS)

    def in_a_thread(mine):
        with handling(mine):
            together.wait()
            return current_request() is mine

    with handling(outer):
        with handling(inner):
            assert current_request() is inner
        assert current_request() is outer
        with pytest.raises(ZeroDivisionError), handling(inner):
            raise ZeroDivisionError
        assert current_request() is outer
    with pytest.raises(LookupError):
        current_request()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(in_a_thread, [outer, inner])) == [True, True]


@pytest.mark.parametrize(
    ("error", "cancelled", "told"),
    [
        (ValueError("no good"), False, Failed(500, "ValueError: no good")),
        (ValueError("no good"), True, Failed(500, "ValueError: no good")),
        (ValueError(), False, Failed(500, "ValueError")),
        (SystemExit(3), False, Failed(500, "SystemExit: 3")),
        (SystemExit(3), True, Failed(499, "cancelled")),
        (KeyError("x"), False, Failed(500, "KeyError: 'x'")),
        (ValueError("x" * 5000), False, Failed(500, "ValueError: " + "x" * 988)),
        (ValueError("two\nlines"), False, Failed(500, "ValueError: two\nlines")),
        (
            ExceptionGroup("two failed", [ValueError("one"), ExceptionGroup("more", [KeyError("x"), OSError("y")])]),
            False,
            Failed(
                500,
                "ExceptionGroup: two failed (2 sub-exceptions): ValueError: one; KeyError: 'x'; OSError: y",
            ),
        ),
        (ExceptionGroup("", [ExceptionGroup("", [ValueError("one")])]), False, Failed(500, "ValueError: one")),
        (ExceptionGroup("in a task", [ServiceError(404, "none")]), False, Failed(404, "none", (b"",))),
        (
            ExceptionGroup("many", [ValueError()] * 10_000),
            False,
            Failed(500, "ExceptionGroup: many (10000 sub-exceptions): " + "; ".join(["ValueError"] * 20)),
        ),
        (RequestCancelled("so there"), False, Failed(499, "cancelled")),
        (Unreadable("cannot be read"), False, Failed(400, "cannot be read")),
        (ServiceError(422, "two numbers"), False, Failed(422, "two numbers", (b"",))),
        (ServiceError(0, "", b""), False, Failed(0, "", (b"",))),
        (ServiceError(999, "x", b"detail"), True, Failed(999, "x", (b"detail",))),
    ],
)
def test_what_the_client_is_told(error, cancelled, told):
    assert failed(error, request(cancelled=cancelled)) == told


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (ServiceError(1000, "x"), "code is 1000: it must be a whole number from 0 to 999): failed with 1000: x"),
        (ServiceError(-1, "x"), "code is -1: it must be a whole number from 0 to 999): failed with -1: x"),
        (ServiceError("500", "x"), "code is '500': it must be a whole number from 0 to 999): failed with 500: x"),
        (ServiceError(500, None), "text is of type NoneType: it must be str): failed with 500: None"),
        (ServiceError(500, "x", "text"), "detail is of type str: it must be bytes or None): failed with 500: x"),
        (ServiceError(500, "x" * MAX_BODY), f"text and detail are longer than {MAX_BODY} bytes): failed with 500: xx"),
        (ServiceError(500, "x", b"x" * (MAX_BODY + 1)), f"longer than {MAX_BODY} bytes): failed with 500: x"),
    ],
    ids=range(7),
)
def test_a_failure_that_cannot_be_told_as_it_is(error, problem, caplog):
    code, text, detail = failed(error, request())
    assert (code, detail) == (500, ())
    assert text.startswith("invalid ServiceError (")
    assert problem in text
    assert problem.partition("):")[0] in caplog.text
    assert len(text) <= 1000


def test_the_traceback_goes_to_the_log_and_nowhere_else(caplog):
    try:
        raise ValueError("no good")
    except ValueError as error:
        told = failed(error, request())
    assert "Traceback" not in told.text
    assert "Traceback" in caplog.text
    assert __file__ in caplog.text
