"""One limit of a service over all partitions of a DataFrame, from a Spark of four cores in a process of its own."""

import json
import subprocess
import sys
import threading
import time

import pytest
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.sparks import BEATS, LIMITS, SMALL_JAVA

from zmdp import Limit
from zmdp.mdp.broker.core.drops import Drop
from zmdp.testing import running_broker
from zmdp.workers import Worker

pytestmark = pytest.mark.long

ROWS, RATE, BURST, AT_ONCE = 150, 50, 5, 4
PROGRAM = f"""
import json, sys
from zmdp.spark.pipeline import call_service
from zmdp.spark.session import open_session

conf = {{"spark.ui.enabled": "false", "spark.driver.memory": "1g", "spark.driver.extraJavaOptions": "{SMALL_JAVA}"}}
spark = open_session("limited", master="local[4]", conf=conf)
rows = spark.range(0, {ROWS}, 1, 8).selectExpr("id", "cast(id AS string) AS text")
for timeout in (0.5, 1.0):  # the second if the machine is too busy even for what a limit does not hold back
    replies = call_service(rows, "limited", input="text", broker=sys.argv[1], timeout=timeout).collect()
    if all(row.reply_code == 200 for row in replies):
        break
print(json.dumps([[row.text, row.reply, row.reply_code, row.reply_error] for row in replies]))
"""


class Recorded:
    """A handler that records when it starts and ends, and how often it runs at once."""

    def __init__(self):
        self.starts = []
        self.ends = []
        self.most = 0
        self._running = 0
        self._lock = threading.Lock()

    def __call__(self, request):
        with self._lock:
            self.starts.append(time.monotonic())
            self._running += 1
            self.most = max(self.most, self._running)
        time.sleep(0.02)  # the work
        with self._lock:
            self._running -= 1
            self.ends.append(time.monotonic())
        return request


def assert_conforming(starts, ends):
    """Check that the rate's algorithm allows these starts, whatever the delays between the broker and the handler.

    A request is dispatched before its handler starts, and after all but three of those before it have ended.
    """
    begun, ended = sorted(starts), sorted(ends)
    for first in range(AT_ONCE, len(begun)):
        for later in range(first + BURST, len(begun)):
            assert begun[later] - ended[first - AT_ONCE] >= (later - first - BURST + 1) / RATE - 0.001


def test_a_limit_holds_for_all_partitions_and_no_row_fails(java):
    """All rows together take longer than a row may wait."""
    handler = Recorded()
    limit = Limit(rate=f"{RATE}/s", burst=BURST, concurrency=AT_ONCE)
    with running_broker(limits=LIMITS, drain_timeout=0.0) as server:
        at = server.endpoints[0]
        with Worker("limited", handler, broker=at, concurrency=2 * AT_ONCE, limit=limit, **BEATS):
            done = subprocess.run(
                [sys.executable, "-c", PROGRAM, at], capture_output=True, text=True, timeout=2 * SPARK_TIMEOUT_SECONDS,
                check=False,
            )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert server.broker.stats.dropped[Drop.LIMIT_PASSED]
    texts = sorted(map(str, range(ROWS)))
    assert sorted(json.loads(done.stdout)) == [[text, text, 200, None] for text in texts]
    assert "rows wait for a limit of service 'limited'" in done.stderr
    assert handler.most <= AT_ONCE
    assert_conforming(handler.starts, handler.ends)
