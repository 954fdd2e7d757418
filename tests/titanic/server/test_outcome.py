"""For how long results are kept."""

import pytest

from zmdp.titanic.server.outcome import Retention

FULL = Retention(100, {"resize": 10}, 1000, {"mail": 5})


@pytest.mark.parametrize(
    ("retention", "service", "done", "failed"),
    [
        (Retention(), "echo", None, None),
        (Retention(100), "echo", 100, 100),
        (Retention(100, {"resize": 10}), "resize", 10, 10),
        (Retention(None, {"resize": 10}), "echo", None, None),
        (Retention(None, {}, 1000), "echo", None, 1000),
        (FULL, "echo", 100, 1000),
        (FULL, "resize", 10, 1000),
        (FULL, "mail", 100, 5),
    ],
)
def test_how_long_results_are_kept(retention, service, done, failed):
    assert retention.seconds(service, failed=False) == done
    assert retention.seconds(service, failed=True) == failed
