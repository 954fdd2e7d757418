"""Ends a process that a handler has forked, when the handler returns in it: the worker is the parent's."""

import logging
import os
import sys
from contextlib import suppress
from typing import NoReturn

from .session.request import Request

log = logging.getLogger("zmdp.worker")


def end_forked(request: Request, error: BaseException | None = None) -> NoReturn:
    """End this process, which is not the one that received the request: it must not reply over its parent's sockets.

    As in any program, `SystemExit` says with which code.  The child's `error`, or that it has returned, is logged.
    """
    code = error.code if isinstance(error, SystemExit) else 1
    if error is None:
        text = "%s: the handler has returned in a process that it has forked, which ends: end it with os._exit()"
        log.error(text, request.service)
    elif not isinstance(error, SystemExit):
        text = "%s: the handler failed in a process that it has forked, which ends"
        log.error(text, request.service, exc_info=error)
    with suppress(Exception):  # as Python does at the end of a program
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
