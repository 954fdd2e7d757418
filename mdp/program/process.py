"""This process: `pid` is `os.getpid()` without the system call, which is 3 % of what a request costs a worker."""

import os

pid = os.getpid()


def _forked() -> None:
    global pid  # noqa: PLW0603 - there is one per process
    pid = os.getpid()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forked)
