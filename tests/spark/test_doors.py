"""Spark's jobs as a door: what `SparkJobs` calls keeps to the contracts of all doors, as far as it has them.

A caller gets what a job yields together with its result.  Whether a job outlives its driver or the broker is another
contract (`batch/test_losses.py`): its call ends at once.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import pytest
from doors.adapters import BEATS, Call, Door, Failed, failure_of
from doors.test_contracts import (  # noqa: F401 - they run here with the fixture below
    holding,
    parts,
    test_a_failure_has_the_code_and_the_text_of_its_handler,
    test_cancel,
    test_each_call_gets_its_own_reply,
    test_parts_arrive_while_the_handler_goes_on,
    test_timeout,
)
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.sparks import running_batch

from zmdp.clients import Client
from zmdp.spark.client import SparkJobs
from zmdp.testing import request as made

LOOK_SECONDS = 0.05


class Spark(Door):
    """`SparkJobs`, and a batch in this process whose only job is the handler."""

    streams = False
    overdue = frozenset({"timeout", "interrupted"})  # the second if it has told something already
    many = 3

    def __init__(self, spark: Any, endpoint: str, folder: Any) -> None:
        super().__init__(endpoint, folder)
        self._spark = spark

    def _open(self) -> None:
        self._pool = self._stack.enter_context(ThreadPoolExecutor(2 * self.many))
        self.client = self._stack.enter_context(Client(self.endpoint, timeout=SPARK_TIMEOUT_SECONDS, **BEATS))

    @contextmanager
    def worker(self, handler: Any) -> Any:
        def job(spark: Any, body: str) -> Any:
            """Run the handler in a thread, beside a task of Spark, which ends with it and is cancelled with the job."""
            request, path = made(body.encode()), self._folder / f"{body} has ended"
            running = self._pool.submit(lambda: [*_all_of(handler(request))])
            running.add_done_callback(lambda _: path.touch())
            try:
                if not wait([running], LOOK_SECONDS).done:
                    spark.sparkContext.parallelize([str(path)], 1).foreach(_await_file)
                yield from running.result()
            finally:
                request.cancelled = True

        with running_batch(self._spark, self.endpoint, self._folder, jobs={"job": job}, concurrency=self.many):
            yield

    def _run(self, body: bytes, timeout: float | None) -> list[bytes]:
        result = SparkJobs(self.client, deadline=timeout, progress=False).run("job", body=body.decode())
        return [value.encode() for value in result.yielded]

    def begin(self, *body: bytes, timeout: float | None = None, retries: int = 0) -> Call:
        return Call(self._pool.submit(self._run, body[0], timeout))

    def cancelled_once(self, begun: Callable[[], Any], *body: bytes) -> list[bytes] | Failed:
        """Interrupt the main thread, as Ctrl-C does: nothing else cancels a job's call."""
        ended = threading.Event()

        def interrupt() -> None:
            begun()
            while not ended.wait(LOOK_SECONDS):  # Python may be just about to sleep: then it does not notice
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            return self._run(body[0], None)
        except KeyboardInterrupt as error:
            ended.set()
            return failure_of(error)
        finally:
            ended.set()
            thread.join()


def _await_file(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(LOOK_SECONDS)


def _all_of(result: Any) -> list[str]:
    """Return what a handler returned or has yielded, as text."""
    frames = [result] if isinstance(result, bytes) else result
    return [frame.decode() for frame in frames]


@pytest.fixture
def door(spark, endpoint, tmp_path):
    with Spark(spark, endpoint, tmp_path) as door:
        yield door
