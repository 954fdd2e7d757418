"""Log lines as text and JSON, and the request that they are about."""

import io
import json
import logging
import re
import sys
from contextlib import contextmanager

import pytest

from zmdp.mdp import tracing
from zmdp.mdp.program import logs
from zmdp.mdp.wire import Options
from zmdp.workers import Request

NAMED = Options(b'{"headers":{"request-id":"order\\n7"},"user":"shop"}')


@contextmanager
def configured(form="text"):
    """Configure logging as the commands do; yield a logger, and a function that returns the lines written so far."""
    written = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging, "root", logging.Logger("root"))
        patch.setattr(sys, "stderr", written)
        logs.configure("info", form)
        logger = logging.Logger("zmdp.broker")
        logger.parent = logging.root
        yield logger, lambda: written.getvalue().splitlines()


def handled(options=NAMED, address=1234):
    return Request([b"body"], service="echo", client=address, options=options)


def test_a_line_of_text():
    with configured() as (logger, written):
        logger.warning("worker %d is gone", 7)
        logger.root.debug("not shown")
    (line,) = written()
    stamp, rest = line.split(" ", 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", stamp)
    assert re.fullmatch(r"WARNING zmdp\.broker\[\d+\]: worker 7 is gone", rest)


def test_a_line_of_text_shows_the_id_of_the_request_unless_the_message_does():
    with configured() as (logger, written):
        logger.info("dropped a request", extra={"request_id": "abc", "service": "echo"})
        logger.info("%s: abandoned", "abc", extra={"request_id": "abc"})
        try:
            raise ValueError("no good")
        except ValueError:
            logger.exception("it failed", extra={"request_id": "abc"})
    first, second, third, *traceback = written()
    assert first.endswith("]: dropped a request (request abc)")
    assert second.endswith("]: abc: abandoned")
    assert third.endswith("]: it failed (request abc)")
    assert traceback[-1] == "ValueError: no good"


def test_a_line_of_json():
    with configured("json") as (logger, written):
        logger.warning("größe %d\nand more", 7, extra={"worker": 3, "service": "echo", "tenant": object})
    (line,) = written()
    values = json.loads(line)
    assert list(values) == ["time", "level", "logger", "pid", "message", "service", "worker", "tenant"]
    del values["time"], values["pid"]
    assert values == {
        "level": "WARNING", "logger": "zmdp.broker", "message": "größe 7\nand more", "service": "echo", "worker": 3,
        "tenant": "<class 'object'>",
    }  # fmt: skip


def test_json_has_tracebacks_as_well():
    with configured("json") as (logger, written):
        try:
            raise ValueError("no good")
        except ValueError:
            logger.exception("it failed", stack_info=True)
    (line,) = written()
    values = json.loads(line)
    assert values["exception"].startswith("Traceback")
    assert values["exception"].endswith("ValueError: no good")
    assert values["stack"].startswith("Stack")


def test_what_a_handler_logs_has_its_request():
    with configured("json") as (logger, written):
        logger.info("before")
        with tracing.handling(handled()):
            logger.info("within")
            logger.info("about another", extra={"request_id": "other"})
            logger.info("with more", extra={"service": "own"})
    before, within, other, more = map(json.loads, written())
    assert "request_id" not in before
    assert {name: within[name] for name in logs.FIELDS if name in within} == {
        "request_id": "order?7", "service": "echo", "role": "shop",
    }  # fmt: skip
    assert (other["request_id"], "service" in other) == ("other", False)
    assert (more["request_id"], more["service"]) == ("order?7", "own")


@pytest.mark.parametrize(
    ("address", "shown"), [(1234, "1234"), (b"c-1", "c-1"), (b"\0k\x8b", "006b8b"), (b"a\nb", "610a62")]
)
def test_a_request_that_its_caller_did_not_name_has_the_address_that_the_broker_knows(address, shown):
    assert logs.fields_of(handled(Options(), address)) == {"request_id": shown, "service": "echo"}


def test_a_program_that_has_configured_logging_is_left_alone():
    with configured("json") as (logger, written):
        logs.configure("info", "text")
        logger.info("once")
    assert len(written()) == 1
    assert json.loads(written()[0])["message"] == "once"


def test_long_names_are_cut():
    assert tracing.shown_id("a b" + "x" * 1000) == "a?b" + "x" * (tracing.MAX_SHOWN_ID - 3)
