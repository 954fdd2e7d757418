"""A broker for each test of rows."""

import pytest
from support.titanics import LIMITS

from zmdp.testing import running_broker


@pytest.fixture
def server():
    with running_broker(limits=LIMITS, drain_timeout=0.0) as running:
        yield running
